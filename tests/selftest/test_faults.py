"""Every planted fault, run once: the ordinary gate catches it by name; a silent one passes where no probe looks.

A few faults of each kind run by default, the others are slow.
"""

import re
from dataclasses import replace

import pytest

from kvbench.errors import KvbenchError
from kvbench.records.record import LEVELS, UNVERIFIED
from kvbench.selftest import suite
from kvbench.selftest.fault import CELLS, NEEDS_CUDA
from kvbench.selftest.suite import CAUGHT, MISSED, PASSED, Measured
from kvbench.selftest.table import FAULTS, HOLES

# One for each level of evidence and each built-in check.
DEFAULT = frozenset({
    "format_lost_matrix_to_cell", "format_lost_engine_to_store", "weights_lost_cell_to_loader", "native_arm_quantized",
    "scale_zero", "static_v_scale_not_read", "scales_exchanged_on_reading", "page_off_by_one", "reference_truncates",
    "gemm_on_a_shadow", "gemm_by_another_kernel", "norm_changed_at_load", "store_never_read", "metric_nan",
})  # fmt: skip
ON_CPU = [cell for cell in CELLS if cell not in NEEDS_CUDA]
DTYPES_AND_BYTES = ("E1", "E1-weights")


def slow(names, default):
    return [pytest.param(n, marks=() if n in default else pytest.mark.slow) for n in names]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with suite.quick():
        yield


@pytest.fixture(scope="module")
def lenient(tmp_path_factory):
    """A gate that asks for dtypes and bytes alone."""
    path = tmp_path_factory.mktemp("gate") / "lenient.yaml"
    path.write_text("name: lenient\nevidence: E1\nchecks: [{metric: kv_bytes_difference, equals: 0}]\n")
    return path


def without_probes(measured):
    """The same run as if nothing had looked beyond dtypes and bytes."""

    def level(found):
        return found if found["name"] in DTYPES_AND_BYTES else {**found, "state": UNVERIFIED, "facts": {}}

    def blind(record):
        if record.evidence is None:
            return record
        levels = [level(found) for found in record.evidence["levels"] if found["name"] in LEVELS]
        facts = {key: value for key, value in record.facts.items() if not key.startswith("scale")}
        return replace(record, evidence={**record.evidence, "levels": levels}, facts=facts)

    records = tuple(map(blind, measured.run.records))
    return replace(measured, run=replace(measured.run, records=records))


@pytest.mark.parametrize("name", slow(FAULTS, DEFAULT))
def test_a_fault_is_caught_by_name_and_only_by_probes_where_it_is_silent(name, lenient):
    fault = FAULTS[name]
    if lacking := suite._lacking(fault.cell):  # the machine's lack alone
        pytest.skip(lacking)
    run = suite.measured_with(fault)
    found = suite.caught(name, fault, run)
    assert found.status == CAUGHT, found.sentence
    assert found.exit_code in (1, 3)
    assert found.by
    assert re.search(fault.says, found.cause), found.cause  # the printed line names the cause too
    if fault.cell not in NEEDS_CUDA:
        passes = (
            not isinstance(run, KvbenchError) and suite.judged(without_probes(run), lenient).exit_code == 0
        )
        assert passes == fault.silent


@pytest.mark.parametrize("cell", slow(ON_CPU, ("int8_sym", "fp8_weights")))
def test_a_run_without_a_fault_passes(cell, lenient):
    run = suite.measured(cell, suite.CLEAN)
    assert suite.judged(run).exit_code == 0
    blind = without_probes(run)
    assert suite.judged(blind).exit_code == 1  # the self-test's gate asks for all levels
    assert suite.judged(blind, lenient).exit_code == 0


@pytest.mark.parametrize("name", slow(HOLES, ("source_read_wrongly",)))
def test_a_known_hole_is_one(name):
    """One that is caught belongs in the table of faults."""
    found = suite.fault_run(name, HOLES[name])
    assert (found.status, found.exit_code) == (MISSED, 0), found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["int8_sym", "fp8_weights"])
def test_a_run_after_all_faults_still_passes(cell):
    assert suite.clean_run(cell).status == PASSED


@pytest.mark.parametrize(
    "name", ["format_lost_request_to_decision", "baseline_run_quantized", "format_lost_decision_to_engine"]
)
def test_a_gate_that_allows_fallbacks_allows_no_other(name, tmp_path):
    gate = tmp_path / "lenient.yaml"
    gate.write_text("allow_fallback: true\nchecks: [{metric: kv_bytes_difference, equals: 0}]\n")
    run = suite.measured_with(FAULTS[name])
    assert isinstance(run, Measured)
    assert suite.judged(run, gate).exit_code == 1
