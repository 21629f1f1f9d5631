"""`run --canary`: cheapest tasks of each engine configuration first, the rest only where they got what was requested; and `--dry-run`."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.formats.kv import KV_FORMATS
from kvbench.machine.host import Host
from kvbench.matrix.load import load
from kvbench.records.schema import manifest_schema
from kvbench.run.canary import canary

MATRIX = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes:
  kv_format: [native, int8_sym]
  batch: [2, 1]
  context: [33, 20]
runners:
  perplexity: {limit_chunks: 1}
  storage: {}
"""

SHORT = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes: {kv_format: [native, int8_sym], context: [33, 20]}
runners: {storage: {}}
"""

Job = Callable[..., Any]


@pytest.fixture
def job(tmp_path):
    """job(*arguments): `kvbench run` of the short matrix in this process."""
    (tmp_path / "m.yaml").write_text(SHORT)

    def go(*arguments):
        words = ["run", str(tmp_path / "m.yaml"), "--out", str(tmp_path / "out"), *arguments]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return go


def records(tmp_path):
    return {p.stem: json.loads(p.read_text()) for p in (tmp_path / "out" / "records").glob("*.json")}


def manifest(tmp_path):
    return json.loads((tmp_path / "out" / "run.json").read_text())


def matrix(tmp_path, text):
    (tmp_path / "of.yaml").write_text(text)
    return load(tmp_path / "of.yaml", host=Host())


def test_the_smallest_cell_of_each_configuration_runs_its_exact_bytes(tmp_path):
    found = canary(matrix(tmp_path, MATRIX))
    assert [(c.spec["kv_format"], c.spec["batch"], c.spec["context"]) for c in found.cells] == [
        ("native", 1, 20), ("int8_sym", 1, 20),
    ]  # fmt: skip
    assert [t.runner for t in found.tasks] == ["storage", "storage"]
    assert [t.cells for t in found.tasks] == [(c.id,) for c in found.cells]
    assert found.title == "storage on 2 cells, one of each engine configuration"


def test_without_exact_bytes_it_is_the_first_of_the_cheapest_stage_behind_its_baseline(tmp_path):
    text = MATRIX.replace("  storage: {}\n", "  latency: {}\n  mcq: {limit: 2}\n")
    found = canary(matrix(tmp_path, text))
    assert [(t.runner, t.spec["kv_format"]) for t in found.tasks] == [
        ("perplexity", "native"), ("perplexity", "int8_sym"),
    ]  # fmt: skip
    assert found.tasks[1].baseline == found.tasks[0].key


def test_a_backend_or_page_size_of_its_own_is_a_configuration_of_its_own(tmp_path):
    found = canary(matrix(tmp_path, MATRIX.replace("  batch: [2, 1]", "  page_size: [16, 32]")))
    assert len(found.cells) == len(found.tasks) == 4


def test_a_sound_run_goes_on_and_measures_nothing_twice(job, tmp_path):
    result = job("--canary", "--rerun", "all")
    assert result.exit_code == 0, result.output
    assert "canary: storage on 2 cells" in result.output
    assert "the canary passed" in result.output
    assert result.output.count("storage: kv_format=int8_sym,context=20") == 1
    assert sorted(records(tmp_path)) == sorted(t["key"] for t in manifest(tmp_path)["tasks"])
    assert "until_decided" not in manifest(tmp_path)


def test_a_format_that_is_dropped_stops_the_run_with_1(job, monkeypatch, tmp_path):
    from kvbench.engines.reference import engine as core

    with monkeypatch.context() as broken:
        broken.setattr(core, "store_format", lambda decision: KV_FORMATS["native"])
        result = job("--canary")
    assert result.exit_code == 1
    flat = " ".join(result.output.split())
    assert "stopped by the canary; tasks not run: 2." in flat
    assert "kv_format int8_sym did not reach the store" in flat
    assert "--rerun all." in flat  # --rerun failed takes its record for measured
    assert len(records(tmp_path)) == 2
    stopped = {"by": "canary", "check": "precision", "after": "the canary"}
    assert manifest(tmp_path)["stopped"] == stopped
    assert "until_decided" not in manifest(tmp_path)
    assert "2 of 4 tasks were not run: --canary stopped the run" in flat
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["run"]["stopped"].items() >= stopped.items()
    assert len(results["run"]["stopped"]["not_run"]) == 2
    again = CliRunner().invoke(app, ["gate", str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert again.exit_code == 1  # from the stored records alone
    jsonschema.validate(manifest(tmp_path), manifest_schema())


@pytest.mark.slow
def test_an_error_stops_the_run_with_3_and_once_mended_it_goes_on(job, monkeypatch, tmp_path):
    from kvbench.runners import storage

    with monkeypatch.context() as broken:
        broken.setattr(storage, "run", lambda ctx: 1 / 0)
        result = job("--canary")
    assert result.exit_code == 3
    flat = " ".join(result.output.split())
    assert "stopped by the canary; tasks not run: 2." in flat
    assert "--rerun failed" in flat
    assert job("--canary").exit_code == 3  # the stored error stops it as well
    assert job("--canary", "--rerun", "failed").exit_code == 0
    assert len(records(tmp_path)) == 4
    assert "until_decided" not in manifest(tmp_path)


@pytest.mark.slow
def test_a_fallback_stops_it_unless_the_gate_allows_fallbacks(job, tmp_path):
    cell = (
        "--set",
        "model.source=tiny-deepseek-v2",
        "--set",
        "engine.fallback=allow",
        "--set",
        "axes.context=[8, 9]",
    )
    gate = tmp_path / "gate.yaml"
    gate.write_text("checks: [{metric: kv_bytes_difference, equals: 0}]\n")
    result = job("--canary", "--gate", str(gate), *cell)
    assert (result.exit_code, len(records(tmp_path))) == (1, 2)
    gate.write_text("allow_fallback: true\n" + gate.read_text())
    result = job("--canary", "--gate", str(gate), *cell)
    assert len(records(tmp_path)) == 4, result.output


def test_it_does_not_go_with_until_decided(job, tmp_path):
    result = job("--canary", "--until-decided")
    assert result.exit_code == 2
    assert "cannot be combined" in result.output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_the_plan_and_runs_nothing(job, tmp_path):
    options = ("--set", "axes.context=[9]", "-k", "int8_sym")
    dry = job("--dry-run", *options)
    plan = CliRunner().invoke(
        app,
        ["plan", str(tmp_path / "m.yaml"), "--out", str(tmp_path / "out"), *options],
        env={"COLUMNS": "200"},
    )
    assert dry.exit_code == 0
    assert dry.output == plan.output
    assert "int8_sym" in dry.output
    assert not (tmp_path / "out").exists()
    assert json.loads(job("--dry-run", "--json").output)["name"] == "tiny"


BESIDE = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes: {kv_format: native, context: 20}
include: [{kv_format: int8_sym, context: 33}]
runners: {latency: {new_tokens: 3, repeats: 1, warmup: 0}}
"""


def test_a_canary_without_its_baseline_s_record_is_timed_beside_native(job, tmp_path):
    (tmp_path / "m.yaml").write_text(BESIDE)
    result = job("--canary")
    found = [r for r in records(tmp_path).values() if r["spec"]["kv_format"] == "int8_sym"]
    assert [{arm["arm"] for arm in r["samples"]["arms"]} for r in found] == [{"baseline", "candidate"}], (
        result.output
    )
