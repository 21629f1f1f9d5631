"""The self-test: every fault is caught by name, nothing of one is left behind, and what nobody catches ends in exit code 1."""

import json
import sys
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.engines.reference.backends import BACKENDS, TORCH
from kvbench.selftest import suite
from kvbench.selftest.fault import CELLS, Fault
from kvbench.selftest.suite import FAILED, MISSED, PASSED, run_suite
from kvbench.selftest.table import FAULTS, HOLES


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with suite.quick():
        yield


def patched():
    """The identity of all that a fault may replace: names of modules, classes and backends, entries of tables."""
    modules = {
        n: m
        for n, m in sys.modules.items()
        if n.startswith(("kvbench", "kvbench_kernels", "transformers.models.llama"))
    }
    owners = {n: vars(m) for n, m in modules.items()}
    owners |= {f"backend {name}": dict(vars(backend)) for name, backend in BACKENDS.items()}
    for name, module in modules.items():
        for key, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == name:
                owners[f"{name}.{key}"] = dict(vars(value))
            elif isinstance(value, dict) and key.isupper():
                owners[f"{name}.{key}"] = {str(k): v for k, v in value.items()}
    return {
        (owner, key): id(value)
        for owner, held in owners.items()
        for key, value in held.items()
        if key[:2] != "__" or key == "__init__"
    }


def raising(name, fault, before):
    with fault.inject():
        assert patched() != before, f"{name} replaces nothing that is looked at here"
        raise ZeroDivisionError


def test_nothing_is_left_of_a_fault_whose_run_raises():
    assert all((TORCH.write, TORCH.gather))  # cached on first access
    before = patched()
    for name, fault in {**FAULTS, **HOLES}.items():
        with pytest.raises(ZeroDivisionError):
            raising(name, fault, before)
        assert patched() == before, name


def test_a_fault_that_nobody_catches_ends_in_exit_code_1():
    lines = []
    nothing = {"nothing": Fault("Nothing is broken.", nullcontext, "anything")}
    score = run_suite(nothing, say=lambda result: lines.append(result.line()))
    assert (score.exit_code, score.last_line()) == (1, "caught 0 of 1")
    assert [line.split()[0] for line in lines] == [PASSED, MISSED]
    assert lines[1].endswith("every check passed")


def test_a_fault_that_is_caught_under_another_name_counts_as_missed():
    vague = {"vague": Fault("Scales are 0.", FAULTS["scale_zero"].inject, "the moon")}
    score = run_suite(vague)
    assert score.exit_code == 1
    assert "nothing says 'the moon'" in score.faults[0].sentence


def test_nothing_counts_where_the_clean_run_fails(monkeypatch):
    monkeypatch.setattr(suite, "CLEAN", FAULTS["scale_zero"].inject)
    score = run_suite(FAULTS, ["metric_nan"])
    assert (score.clean[0].status, score.caught, score.exit_code) == (FAILED, 1, 1)
    assert "so nothing counts" in score.last_line()


def test_only_skipped_faults_are_no_pass():
    lacking = [name for name, fault in FAULTS.items() if suite._lacking(fault.cell)]
    if not lacking:
        pytest.skip("a GPU is here")
    score = run_suite(FAULTS, lacking)
    assert (score.of, score.exit_code) == (0, 1)
    assert "needs a CUDA device" in score.faults[0].line()


def test_each_fault_is_written_down():
    for fault in (*FAULTS.values(), *HOLES.values()):
        assert fault.breaks.endswith(".")
        assert fault.cell in CELLS
        assert fault.says
    assert not set(FAULTS) & set(HOLES)


def call(*words):
    return CliRunner().invoke(app, ["selftest", *words])


def test_the_command_has_a_line_a_fault_and_the_score():
    result = call("--fault", "scale_zero", "--fault", "metric_nan")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:5:2]] == [["caught", "scale_zero"], ["caught", "metric_nan"]]
    assert "E2, " in lines[1]
    assert lines[2].strip().startswith("E2: ")
    assert lines[-1] == "caught 2 of 2"


def test_json_is_one_object_on_stdout():
    result = call("--fault", "metric_nan", "--json")
    answer = json.loads(result.stdout)
    assert (answer["caught"], answer["of"], answer["exit_code"], result.exit_code) == (1, 1, 0, 0)
    assert answer["faults"][0]["by"] == "plausible"
    assert "metric_nan" in result.stderr


def test_the_list_runs_nothing():
    result = call("--list")
    assert result.exit_code == 0
    assert [line.split()[1] for line in result.stdout.splitlines()] == [*FAULTS, *HOLES]
    rows = json.loads(call("--list", "--json").stdout)
    assert {row["kind"] for row in rows} == {"fault", "hole"}


def test_an_unknown_fault_is_a_usage_error_with_the_accepted_ones():
    result = call("--fault", "scale_zer0")
    assert result.exit_code == 2
    assert "Fault 'scale_zer0' is unknown; choose from format_lost_matrix_to_cell" in result.stderr
