"""Leases, lanes and the order of jobs: no model runs here."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.machine.host import host
from kvbench.matrix.cells import Task
from kvbench.matrix.load import load
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.tasks import key_of
from kvbench.records.run import RunDir
from kvbench.run.execute import Plan
from kvbench.run.executors import local
from kvbench.run.executors.child import python_path
from kvbench.run.executors.job import Identities, Job, Unit, from_json, split_timed, waves, with_baselines
from kvbench.run.executors.local import leased, like_the_first, notices
from kvbench.run.worker import differing
from tests.executors.conftest import MATRIX, load_here

LINES = (
    MATRIX.replace("engine: {context: 20}", "")
    .replace("[native, int8_sym]", "[native, int8_sym]\n  batch: [1, 2]\n  context: [20, 40, 60]")
    .replace("storage: {}", "storage: {}\n  latency: {}")
)
IDENTITY = {"torch": "1"}


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "m.yaml").write_text(LINES)
    return load(tmp_path / "m.yaml")


def test_jobs_hold_every_task_once_and_times_are_taken_alone(lines, tmp_path, monkeypatch):
    first, second = waves(lines, lines.tasks, None, IDENTITY)
    assert [len(unit.jobs) for unit in (*first, *second)] == [3] * 4  # a line's cells stay together
    keys = [[t.key for unit in wave for job in unit.jobs for t in job.tasks] for wave in (first, second)]
    assert sorted(keys[0] + keys[1]) == sorted(task.key for task in lines.tasks)
    assert {task.key for task in lines.tasks if task.baseline is None} == set(keys[0])
    cell_of = {cell.name: cell.id for cell in lines.cells}
    for job in (job for unit in (*first, *second) for job in unit.jobs):
        assert {task.cells[0] for task in job.tasks} == {cell_of[job.cell]}
    job = with_baselines(second[0], RunDir(tmp_path / "none")).jobs[0]
    assert from_json(job.to_json()) == job
    assert job.baselines == dict.fromkeys(task.baseline for task in job.tasks)
    assert all(job.identities[task.key]["host"] == IDENTITY for task in job.tasks)
    assert first[0].jobs[0].baselines == {}
    beside, alone = split_timed(first[0])  # what takes times is split off
    assert {t.runner for job in beside.jobs for t in job.tasks} == {"storage", "perplexity"}
    assert {t.runner for job in alone.jobs for t in job.tasks} == {"latency"}
    assert split_timed(beside)[1] is None
    due = [task for task in lines.tasks if task.runner == "perplexity" and task.baseline]
    ((unit,),) = waves(lines, due, Path("/data"), IDENTITY)
    (job,) = unit.jobs
    assert (job.tasks, job.data_dir) == (tuple(due), "/data")
    assert waves(lines, [], None, IDENTITY) == []
    calls = []

    def note(units, lanes, tell):
        if units:
            calls.append((len(lanes), {t.runner for u in units for job in u.jobs for t in job.tasks}))

    monkeypatch.setattr(local, "_do", note)
    plan = Plan(lines.tasks, ())
    local.Local(None, 4)(lines, plan, RunDir(tmp_path), None)
    assert calls == [(4, {"storage", "perplexity"}), (1, {"latency"})] * 2
    calls.clear()
    local.Local(None)(lines, plan, RunDir(tmp_path), None)
    assert calls == [(1, {"storage", "perplexity", "latency"})] * 2


def identities_of(path):
    """Of the tasks of a matrix: each is the one in the task's key."""
    m = load_here(path)
    identity = Identities(host().identity, None)
    for task in m.tasks:
        assert key_of(RUNNERS[task.runner], task.spec, task.options, identity(task)) == task.key
    return [identity(task) for task in m.tasks]


def test_identities_are_those_in_the_keys_and_differences_are_named(tmp_path):
    for name in ("smoke", "int8_scales", "fp8_quality", "sensitivity"):
        assert identities_of(Path(__file__).parents[2] / f"matrices/{name}.yaml")
    due = {"host": {"torch": "2.13.0", "device": "cuda: H200"}, "model": "m" * 80, "data": ["a"]}
    assert differing(due, due) == ""
    own = {"host": {"torch": "2.12.0", "device": "cuda: H200"}, "model": "n", "data": ["a"], "native": "x"}
    assert differing(due, own) == (
        f"torch 2.13.0 there, 2.12.0 here; model {'m' * 60}... there, n here; native unknown there, x here"
    )
    for name in ("quantized", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0")
        (tmp_path / name / "config.json").write_text(f'{{"of": "{name}"}}')
    (tmp_path / "m.yaml").write_text(
        f"name: m\nmodel: {{source: {tmp_path}/quantized, native: {tmp_path}/whole}}\n"
        "axes: {weights: [native, fp8_block128]}\nrunners: {storage: {}}\n"
    )
    native, quantized = identities_of(tmp_path / "m.yaml")
    assert quantized["native"] == native["model"] == native["native"] != quantized["model"]


def test_a_lease_is_one_process_and_gpus_are_of_one_type(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_CACHE_DIR", str(tmp_path))
    code = (
        "import sys\nfrom kvbench.run.executors.local import leased\n"
        "with leased('GPU-1', 0) as ours:\n    print(ours, flush=True)\n    sys.stdin.read()"
    )
    env = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True, env=env) as other:
        assert other.stdout.readline() == "True\n"
        for gpu, free in (("GPU-1", False), ("GPU-2", True)):
            with leased(gpu, 0) as ours:
                assert ours == free
        other.kill()
        other.wait()
        with leased("GPU-1", 5) as ours:
            assert ours
    assert like_the_first(GPUS) == ["GPU-1", "GPU-3"]
    fewer, jobs = notices({"device": "cuda", "gpus": GPUS}, ["cuda"], 5)
    assert fewer.startswith("2 of 3 GPUs are used")
    assert jobs.startswith("--jobs 5 is more than the 2 GPUs here")
    assert notices({"device": "cuda", "gpus": GPUS[:1]}, ["cuda"], None) == []
    (at_once,) = notices({"device": "cpu", "gpus": []}, ["cpu", "cpu"], 2)
    assert "(transfer, gemm, latency)" in at_once


GPUS = [{"name": "A", "uuid": "GPU-1"}, {"name": "B", "uuid": "GPU-2"}, {"name": "A", "uuid": "GPU-3"}]


class Made:
    """Children that only note who ran when, in place of processes, and what a lane gave them."""

    def __init__(self):
        self.stopped, self.most, self._now, self._lock = False, {}, {}, threading.Lock()

    def run(self, job, run_dir, done, extra):
        lane = extra.get("CUDA_VISIBLE_DEVICES", "cpu")
        with self._lock:
            self._now[lane] = self._now.get(lane, 0) + 1
            self.most[lane] = max(self.most.get(lane, 0), self._now[lane])
        time.sleep(0.02)
        for task in job.tasks:
            done(task.key)
        with self._lock:
            self._now[lane] -= 1

    def stop(self):
        self.stopped = True


class Told:
    def __init__(self, tmp_path):
        self.run_dir, self.keys = RunDir(tmp_path), []

    def done(self, job, key):
        self.keys.append(key)


def jobs(n, device):
    task, units = Task("", "storage", "", {}, {}, ("c",), None), []
    for i in range(n):
        units.append(Unit((Job(f"c{i}", device, (replace(task, key=f"k{i}"),), {}, {}, None, "/", {}),)))
    return units


@pytest.fixture
def do(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_CACHE_DIR", str(tmp_path))

    def go(units, lanes, told=None):
        made, told = Made(), told or Told(tmp_path)
        monkeypatch.setattr(local, "Children", lambda: made)
        local._do(units, lanes, told)
        return made, told

    return go


def test_a_gpu_of_another_run_is_left_to_it_and_a_fault_ends_the_children(do, capsys, monkeypatch, tmp_path):
    held, waited = threading.Event(), threading.Event()

    def said(text):
        print(text)
        waited.set()

    def hold():
        with leased("GPU-1", 5):
            held.set()
            waited.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    made, told = do(jobs(4, "cuda"), ["GPU-1", "GPU-3"])
    assert made.most == {"GPU-3": 1}
    monkeypatch.setattr(local, "announce", said)
    made, told = do(jobs(2, "cuda"), ["GPU-1"])  # the only one: waited for, and free once that is said
    assert (made.most, sorted(told.keys)) == ({"GPU-1": 1}, ["k0", "k1"])
    assert "GPU-1 is leased by another kvbench run; waiting for it." in capsys.readouterr().out
    other.join()
    made, told = do(jobs(9, "cuda"), ["GPU-1", "GPU-3"])
    assert (made.most, len(told.keys)) == ({"GPU-1": 1, "GPU-3": 1}, 9)

    class Full(Told):
        def done(self, job, key):
            raise OSError(28, "no space left")

    with pytest.raises(OSError, match="no space left"):
        do(jobs(50, "cpu"), [local.CPU], Full(tmp_path))
