"""The whole job on a tiny model: run, judge, report, resume; and what is refused or fails on the way."""

import csv
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.engines.reference import kind
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.models.catalog import TINY
from kvbench.run.task import measure
from kvbench.runners import agreement
from tests.factories.jobs import Job, flat, kvbench

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
STORAGE, LATENCY = "runners={storage: {}}", "runners={latency: {new_tokens: 3, repeats: 1}}"


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path, MATRIX, GATE)


def test_a_sound_run_passes_and_is_judged_again_without_measuring(job):
    result = job("--json")
    assert json.loads(result.stdout)["exit_code"] == result.exit_code == 0, result.output
    before = job.records()
    assert "report" in job.page
    assert {r["status"] for r in before.values()} == {"ok"}
    states = {level["state"] for r in before.values() for level in r["evidence"]["levels"]}
    assert states <= {"verified", "not_applicable"}
    rows = csv.DictReader((job.out / "results_long.csv").read_text().splitlines())
    assert {row["ran_on"] for row in rows} == {"torch"}
    assert job.judge().exit_code == job().exit_code == 0
    assert job.records() == before, "a finished run measured something again"


def test_a_run_without_a_gate_says_that_no_limit_was_judged(job):
    job.matrix.write_text(MATRIX.replace("gate: gate.yaml\n", ""))
    assert "No gate was applied" in job.set(STORAGE).output
    assert "No gate was applied" in job.page
    assert "No gate was applied" not in job.judge("--gate", job.gate).output


def test_the_gate_decides_the_exit_code_and_a_bad_one_is_a_usage_error_before_anything_is_measured(job):
    job.gate.write_text(GATE.replace("at_most", "at_mots"))
    result = job()
    assert result.exit_code == 2
    assert "at_most" in result.output
    assert not job.out.exists()
    job.gate.write_text(GATE.replace("0.7", "0.1"))
    result = job.set(STORAGE)
    assert result.exit_code == 1
    assert "kv_ratio_16bit" in result.output


def test_a02_t2_what_a_static_scale_clips_is_counted_in_the_report(job):
    result = job.set("axes={kv_format: [native, int8_static], scale: 0.001}", LATENCY, "gate=null")
    assert result.exit_code == 0, result.output
    native, static = (job.of(kv_format=name)[0]["facts"] for name in ("native", "int8_static"))
    assert 0 < static["kv_clipped"] < static["kv_elements"]
    assert "kv_clipped" not in native
    assert "kv_clipped" in job.page
    assert f"{static['kv_clipped']:,}" in job.page


def test_a04_t4_a_cell_whose_scales_overflow_is_an_error_and_no_result(job, monkeypatch):
    write = PagedKVStore.write
    monkeypatch.setattr(
        PagedKVStore, "write", lambda self, layer, slots, k, v: write(self, layer, slots, k * 1e8, v)
    )
    assert job.set(LATENCY, "gate=null").exit_code in (1, 3)
    (found,) = job.of(kv_format="int8_sym")
    assert (found["status"], found["samples"]) == ("error", {})
    assert "overflow K/V values were written in int8_sym" in found["error"]["message"]


def test_a19_t4_a_context_of_4096_on_2048_positions_is_refused_before_anything_is_loaded(
    job, tmp_path, monkeypatch
):
    monkeypatch.setattr(kind, "load_model", lambda *args: pytest.fail("the model was loaded"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY["tiny-llama"], "max_position_embeddings": 2048}))
    model = f"model={{source: {folder}, weights: random, plumbing: true}}"
    result = job.set(model, "engine={context: 4096}", "runners.agreement=null", "runners={storage: {}}")
    assert result.exit_code == 3, result.output
    found = job.of()
    assert [(r["status"], r["error"]["reason"]) for r in found] == [("refused", "invalid_context")] * 2
    assert all("4096 tokens" in r["error"]["message"] and "has 2048" in r["error"]["message"] for r in found)


@pytest.mark.slow
def test_a24_t2_a_big_cell_leaves_nothing_to_the_small_one_after_it(job, tmp_path, monkeypatch):
    """Two cells in one process, the big one first: its store is gone, and the small one counts what it does alone."""
    honest, left = measure.execute, []

    def stores():
        return sum(type(o) is PagedKVStore for o in gc.get_objects())

    def counting(*args):
        record = honest(*args)
        left.append(stores())
        return record

    monkeypatch.setattr(measure, "execute", counting)
    before, found = stores(), {}
    for contexts in ([200, 20], [20]):
        job.out = tmp_path / str(len(contexts))
        job.set(STORAGE, "engine={}", "axes.kv_format=native", f"axes.context={contexts}")
        found[len(contexts)] = {r["spec"]["context"]: r for r in job.of()}
    assert left == [before] * 3
    big, small, alone = found[2][200], found[2][20], found[1][20]
    for record in (small, alone):
        del record["facts"]["load_seconds"]
    assert (small["samples"], small["facts"]) == (alone["samples"], alone["facts"])
    assert big["samples"]["layers"][0]["payload"] > small["samples"]["layers"][0]["payload"]


@pytest.mark.slow
def test_a_runner_that_measures_the_native_engine_instead_fails(job, monkeypatch):
    honest = agreement.run
    monkeypatch.setattr(agreement, "run", lambda ctx: honest(replace(ctx, engine=ctx.native)))
    result = job.set("runners={agreement: {steps: 24, prompt_tokens: 12}}")
    assert result.exit_code in (1, 3)
    assert "without an engine" in flat(result.output)


def test_quality_on_random_weights_is_refused(job):
    agreement = "runners={agreement: {steps: 4, prompt_tokens: 4}}"
    result = job.set("model={source: tiny-llama}", agreement, "gate=null")
    assert result.exit_code == 3
    assert "random" in result.output


def test_a_cell_that_cannot_run_does_not_stop_the_others(job):
    assert job.set(STORAGE, "axes.context=[20, 100000]", "engine={}").exit_code == 3
    assert sorted({r["status"] for r in job.of()}) == ["ok", "refused"]


@pytest.mark.slow
def test_kill_minus_nine_loses_only_the_task_in_hand(job, tmp_path):
    command = [sys.executable, "-m", "kvbench", "run", str(job.matrix), "--out", str(job.out), "--json"]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    while len(job.records()) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = job.records()
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    after = job.records()
    assert {name: after[name] for name in kept} == kept, "a record that was there was measured again"
    assert sorted(after) == sorted(t["key"] for t in job.json("run.json")["tasks"]), (
        "a record is missing or one too many"
    )
    assert not list(job.out.rglob("*.tmp"))


def test_two_runs_into_one_folder_do_not_mix(job):
    job.out.mkdir()
    with (job.out / ".lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        result = job()
    assert result.exit_code == 2
    assert "Another kvbench run" in result.output


def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_loaded(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert job.set("engine.device=cuda", STORAGE).exit_code in (1, 3)
    assert {(r["status"], r["error"]["reason"]) for r in job.of()} == {("refused", "no_cuda_device")}


# The policy that judged a run judges it again, whoever asks: `gate`, `report`, and `merge` of its shards.

NEVER = "name: never\nchecks: [{metric: kv_ratio_16bit, where: {kv_format: int8_sym}, at_most: 0.1}]\n"
ALWAYS = "name: always\nchecks: [{metric: kv_bytes_difference, equals: 0}]\n"
KEPT = """
name: kept
model: {source: tiny-llama, weights: random, plumbing: true}
axes: {kv_format: [native, int8_sym]}
engine: {context: 32, device: cpu}
runners: {storage: {}}
"""


@pytest.fixture
def kept(tmp_path):
    (tmp_path / "always.yaml").write_text(ALWAYS)
    (tmp_path / "never.yaml").write_text(NEVER)
    return Job(tmp_path, KEPT)


@pytest.mark.parametrize("named", ["", "gate: always.yaml\n"])
def test_a_gate_that_was_given_is_not_forgotten(kept, tmp_path, named):
    kept.matrix.write_text(KEPT + named)
    assert kept("--gate", tmp_path / "never.yaml").exit_code == 1
    kept.out = kept.out.rename(tmp_path / "moved")
    again = kept.judge()
    assert again.exit_code == 1, again.output
    assert ("differs from it" in again.stderr) == bool(named)
    assert "FAIL" in kvbench("report", kept.out).stdout
    results = kept.json("results.json")
    assert (results["verdict"], results["run"]["gate"]) == ("fail", str(kept.out / "gate.yaml"))

    # Another one, given to `gate`, is the one that stands from then on, and the report says its name.
    assert kept.judge("--gate", tmp_path / "always.yaml").exit_code == 0
    assert str(tmp_path / "always.yaml") in (kept.out / "report.md").read_text().replace("\\", "")
    assert kept.judge().exit_code == 0
    assert (kept.out / "gate.yaml").read_text() == ALWAYS


@pytest.mark.slow
def test_shards_are_merged_under_the_gate_that_judged_them(kept, tmp_path):
    kept.matrix.write_text(KEPT.replace("int8_sym]", "int8_sym, fp8_e4m3]"))
    shards, whole, other = [tmp_path / "s1", tmp_path / "s2"], tmp_path / "whole", tmp_path / "other"
    for i, kept.out in enumerate(shards, 1):
        kept("--gate", tmp_path / "never.yaml", "--shard", f"{i}/2")
    kept.out = whole
    merged = kvbench("merge", *shards, "--out", whole)
    assert merged.exit_code == 1, merged.output
    before = kept.json("run.json")["merged"]
    kept()  # nothing is left to measure
    assert kept.json("run.json")["merged"] == before
    (shards[1] / "gate.yaml").write_text(ALWAYS)
    refused = kvbench("merge", *shards, "--out", other)
    assert refused.exit_code == 2
    assert "different gates" in refused.stderr
    assert kvbench("merge", *shards, "--out", other, "--gate", tmp_path / "always.yaml").exit_code == 0
