"""The other arm: with the probes switched off, and a gate that asks for no more than E1 (dtypes and bytes), silent faults get past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvbench.evidence import examiner
from kvbench.records.record import LEVELS, UNVERIFIED, Evidence, Level
from kvbench.run.task import measure
from kvbench.selftest import suite
from kvbench.selftest.fault import NEEDS_CUDA
from kvbench.selftest.table import FAULTS

KEPT = ("E1", "E1-weights")  # dtypes and bytes; all other levels are switched off
BY_PROBES = ("E3-layers", "E3-pages", "E3-prefill", "E5", "E2-weights", "E3-weights", "E5-weights")


def off(name: str) -> Level:
    return Level(name, UNVERIFIED, "It was not looked at.")


@contextmanager
def probes_off() -> Iterator[None]:
    """Nothing looks at E2 to E5, nor at the live scales: the records say that they are unverified."""
    examine = examiner.examine

    def blind(*rest: Any, **keys: Any) -> Evidence:
        found = examine(*rest, **keys)
        return replace(found, levels=tuple(x if x.name in KEPT else off(x.name) for x in found.levels))

    levels = tuple(off(name) for name in BY_PROBES)
    with (
        patch.object(examiner.ReferenceExaminer, "probes", lambda *rest: levels),
        patch.object(examiner, "examine", blind),
        patch.object(measure, "scale_facts", lambda *rest: {}),
    ):
        yield


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with suite.quick():
        yield


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "lenient.yaml"
    path.write_text("name: lenient\nevidence: E1\nchecks: [{metric: kv_bytes_difference, equals: 0}]\n")
    return path


def test_a_run_without_a_fault_passes_and_its_levels_are_unverified(gate: Path) -> None:
    with probes_off():
        verdict = suite.judged("fp8_weights", suite.CLEAN, gate)
    assert verdict.exit_code == 0
    assert all(
        "unverified, which the gate allows above E1: E2, " in o.sentence
        for o in verdict.outcomes
        if o.check == "precision"
    )
    assert suite.judged("fp8_weights", suite.CLEAN).exit_code == 0
    with probes_off():
        assert (
            suite.judged("fp8_weights", suite.CLEAN).exit_code == 1
        )  # the strict gate of the self-test asks for all rungs
    assert set(BY_PROBES) | set(KEPT) | {"E2", "E3", "E3-reads", "E4", "E4-weights"} == set(LEVELS)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.cell not in NEEDS_CUDA])
def test_silent_faults_get_past_and_the_others_do_not(name: str, gate: Path) -> None:
    """So it is the probes that catch a silent fault; what shows in dtypes, bytes, decisions or values is not called silent."""
    fault = FAULTS[name]
    with probes_off():
        verdict = suite.judged(fault.cell, fault.inject, gate)
    said = next((o.sentence for o in verdict.outcomes if o.status != "pass"), "every check passed")
    assert (verdict.exit_code == 0) == fault.silent, said
