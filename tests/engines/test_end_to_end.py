"""The whole job on a tiny model: run, judge, report, resume; and faults injected in the engine's hops."""

import csv
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.formats.kv import KV_FORMATS

MATRIX = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes:
  kv_format: [native, int8_sym]
engine: {context: 20}
runners:
  storage: {}
  latency: {new_tokens: 3, repeats: 1}
  agreement: {steps: 24, prompt_tokens: 12, continuation: 4}
gate: gate.yaml
"""

GATE = """\
name: tiny
allow_partial: true
checks:
  - {metric: kv_bytes_difference, equals: 0}
  - {metric: kv_ratio_16bit, where: {kv_format: int8_sym}, at_most: 0.7}
"""

Job = Callable[..., Any]


@pytest.fixture
def job(tmp_path):
    """job(*arguments): `kvbench run` of the matrix above in a temporary folder, in this process."""
    (tmp_path / "m.yaml").write_text(MATRIX)
    (tmp_path / "gate.yaml").write_text(GATE)

    def go(*arguments):
        words = ["run", str(tmp_path / "m.yaml"), "--out", str(tmp_path / "out"), *arguments]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return go


def records(path):
    return {p.name: json.loads(p.read_text()) for p in (path / "out" / "records").glob("*.json")}


def records_of(run):
    return [json.loads(p.read_text()) for p in (run / "records").glob("*.json")]


def test_a_sound_run_passes_and_is_judged_again_without_measuring(job, tmp_path):
    result = job()
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "report.html").is_file()
    before = records(tmp_path)
    assert {r["status"] for r in before.values()} == {"ok"}
    assert all(
        level["state"] in ("verified", "not_applicable")
        for r in before.values()
        for level in r["evidence"]["levels"]
    )
    rows = csv.DictReader((tmp_path / "out" / "results_long.csv").read_text().splitlines())
    assert {row["ran_on"] for row in rows} == {"torch"}
    again = CliRunner().invoke(app, ["gate", str(tmp_path / "out")])
    assert again.exit_code == 0
    assert job().exit_code == 0
    assert records(tmp_path) == before, "a finished run measured something again"


@pytest.mark.slow
def test_a_run_that_was_moved_is_judged_by_the_policy_it_keeps(job, tmp_path):
    assert job().exit_code == 0
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    policy = tmp_path / "gate.yaml"
    policy.write_text(GATE.replace("at_most: 0.7", "at_most: 0.1"))
    again = CliRunner().invoke(app, ["gate", str(moved)])
    assert again.exit_code == 0, again.output
    assert "differs from it. To judge by that: --gate" in again.stderr
    assert CliRunner().invoke(app, ["gate", str(moved), "--gate", str(policy)]).exit_code == 1
    policy.unlink()
    assert CliRunner().invoke(app, ["gate", str(moved)]).exit_code == 1  # by the one that judged last
    assert CliRunner().invoke(app, ["report", str(moved)]).exit_code == 0


@pytest.mark.slow
def test_json_is_one_object_on_stdout(job):
    result = job("--json")
    answer = json.loads(result.stdout)
    assert answer["exit_code"] == result.exit_code == 0


def test_a_run_without_a_gate_says_that_no_limit_was_judged(job, tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX.replace("gate: gate.yaml\n", ""))
    result = job("--set", "runners={storage: {}}")
    assert "No gate was applied" in result.output
    assert "No gate was applied" in (tmp_path / "out" / "report.html").read_text()
    with_gate = CliRunner().invoke(
        app, ["gate", str(tmp_path / "out"), "--gate", str(tmp_path / "gate.yaml")]
    )
    assert "No gate was applied" not in with_gate.output


def test_the_gate_decides_the_exit_code(job, tmp_path):
    (tmp_path / "gate.yaml").write_text(GATE.replace("0.7", "0.1"))
    result = job()
    assert result.exit_code == 1
    assert "kv_ratio_16bit" in result.output


def test_a_bad_gate_is_a_usage_error_before_anything_is_measured(job, tmp_path):
    (tmp_path / "gate.yaml").write_text(GATE.replace("at_most", "at_mots"))
    result = job()
    assert result.exit_code == 2
    assert "at_most" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a01_a_format_dropped_between_decision_and_store_fails(job, monkeypatch):
    from kvbench.engines.reference import engine as core

    monkeypatch.setattr(core, "store_format", lambda decision: KV_FORMATS["native"])
    result = job("--set", "runners={storage: {}}")
    assert result.exit_code == 1
    assert (
        "kv_format int8_sym did not reach the store: layer 0 K is stored as native"
        in result.output.replace("\n", " ")
    )


@pytest.mark.slow
def test_a01_a_format_dropped_between_spec_and_resolver_fails(job, monkeypatch):
    from dataclasses import replace

    from kvbench.engines.reference import kind

    honest = kind.resolve
    monkeypatch.setattr(
        kind, "resolve", lambda request, facts: honest(replace(request, kv_format="native"), facts)
    )
    result = job("--set", "runners={storage: {}}")
    assert result.exit_code == 1
    assert "int8_sym" in result.output
    assert "native" in result.output


def test_a02_t2_what_a_static_scale_clips_is_counted_in_the_report(job, tmp_path):
    result = job(
        "--set", "axes={kv_format: [native, int8_static], scale: 0.001}",
        "--set", "runners={latency: {new_tokens: 3, repeats: 1}}",
        "--set", "gate=null",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = {r["spec"]["kv_format"]: r["facts"] for r in records(tmp_path).values()}
    assert 0 < found["int8_static"]["kv_clipped"] < found["int8_static"]["kv_elements"]
    assert "kv_clipped" not in found["native"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "kv_clipped" in page
    assert f"{found['int8_static']['kv_clipped']:,}" in page


def test_a04_t4_a_cell_whose_scales_overflow_is_an_error_and_no_result(job, tmp_path, monkeypatch):
    from kvbench.engines.reference.kv.store import PagedKVStore

    write = PagedKVStore.write
    monkeypatch.setattr(
        PagedKVStore, "write", lambda self, layer, slots, k, v: write(self, layer, slots, k * 1e8, v)
    )
    result = job("--set", "runners={latency: {new_tokens: 3, repeats: 1}}", "--set", "gate=null")
    assert result.exit_code in (1, 3)
    found = {r["spec"]["kv_format"]: r for r in records(tmp_path).values()}
    assert (found["int8_sym"]["status"], found["int8_sym"]["samples"]) == ("error", {})
    assert "overflow K/V values were written in int8_sym" in found["int8_sym"]["error"]["message"]


def test_a19_t4_a_context_of_4096_on_2048_positions_is_refused_before_anything_is_loaded(
    job, tmp_path, monkeypatch
):
    from kvbench.engines.reference import kind
    from kvbench.models.catalog import TINY

    def load_model(*args):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(kind, "load_model", load_model)
    (tmp_path / "model").mkdir()
    config = {**TINY["tiny-llama"], "max_position_embeddings": 2048}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = job(
        "--set", f"model={{source: {tmp_path / 'model'}, weights: random, plumbing: true}}",
        "--set", "engine={context: 4096}",
        "--set", "runners={storage: {}, latency: {new_tokens: 3, repeats: 1}}",
    )  # fmt: skip
    assert result.exit_code == 3, result.output
    found = records(tmp_path).values()
    assert [(r["status"], r["error"]["reason"]) for r in found] == [("refused", "invalid_context")] * 4
    assert all("4096 tokens" in r["error"]["message"] and "has 2048" in r["error"]["message"] for r in found)


@pytest.mark.slow
def test_a24_t2_a_big_cell_leaves_nothing_to_the_small_one_after_it(job, tmp_path, monkeypatch):
    """Two cells in one process, the big one first: its store is gone, and the small one counts what it does alone."""
    from kvbench.engines.reference.kv.store import PagedKVStore
    from kvbench.run.task import measure

    honest, left = measure.execute, []

    def counting(*args):
        record = honest(*args)
        left.append(sum(type(o) is PagedKVStore for o in gc.get_objects()))
        return record

    monkeypatch.setattr(measure, "execute", counting)
    before = sum(type(o) is PagedKVStore for o in gc.get_objects())
    small = ("--set", "runners={storage: {}}", "--set", "engine={}", "--set", "axes.kv_format=native")
    job(*small, "--set", "axes.context=[200, 20]", "--out", str(tmp_path / "both"))
    job(*small, "--set", "axes.context=[20]", "--out", str(tmp_path / "alone"))
    assert left == [before] * 3
    both, alone = (
        {
            r["spec"]["context"]: (r["samples"], {k: v for k, v in r["facts"].items() if k != "load_seconds"})
            for r in records_of(tmp_path / name)
        }
        for name in ("both", "alone")
    )
    assert list(both) != [20]
    assert both[20] == alone[20]
    assert both[200][0]["layers"][0]["payload"] > both[20][0]["layers"][0]["payload"]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["agreement"])
def test_a_runner_that_measures_the_native_engine_instead_fails(job, monkeypatch, runner):
    import importlib
    from dataclasses import replace

    module = importlib.import_module(f"kvbench.runners.{runner}")
    honest = module.run
    monkeypatch.setattr(module, "run", lambda ctx: honest(replace(ctx, engine=ctx.native)))
    result = job(
        "--set",
        f"runners={{{runner}: {{{'steps: 24, prompt_tokens: 12' if runner == 'agreement' else 'new_tokens: 3, repeats: 1'}}}}}",
    )
    assert result.exit_code in (1, 3)
    assert "without an engine" in result.output.replace("\n", " ")


LATENCY = "runners={latency: {new_tokens: 3, repeats: 1, warmup: 0}}"


def test_quality_on_random_weights_is_refused(job):
    result = job("--set", "model={source: tiny-llama}")
    assert result.exit_code == 3
    assert "random" in result.output


def test_a_cell_that_cannot_run_does_not_stop_the_others(job, tmp_path):
    result = job("--set", "runners={storage: {}}", "--set", "axes.context=[20, 100000]", "--set", "engine={}")
    assert result.exit_code == 3
    assert sorted({r["status"] for r in records(tmp_path).values()}) == ["ok", "refused"]


@pytest.mark.slow
def test_kill_minus_nine_loses_only_the_task_in_hand(job, tmp_path):
    command = [
        sys.executable,
        "-m",
        "kvbench",
        "run",
        str(tmp_path / "m.yaml"),
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    while len(records(tmp_path) if (tmp_path / "out" / "records").is_dir() else {}) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
    kept = records(tmp_path)
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    after = records(tmp_path)
    assert {name: after[name] for name in kept} == kept, "a record that was there was measured again"
    tasks = [t["key"] for t in json.loads((tmp_path / "out" / "run.json").read_text())["tasks"]]
    assert sorted(after) == sorted(f"{key}.json" for key in tasks), "a record is missing or one too many"
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_two_runs_into_one_folder_do_not_mix(job, tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        result = job()
    assert result.exit_code == 2
    assert "Another kvbench run" in result.output


def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_loaded(job, monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = job("--set", "engine.device=cuda", "--set", "runners={storage: {}}")
    assert result.exit_code in (1, 3)
    found = records_of(tmp_path / "out")
    assert {(r["status"], r["error"]["reason"]) for r in found} == {("refused", "no_cuda_device")}
