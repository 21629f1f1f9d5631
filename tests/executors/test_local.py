"""`--executor local`: fresh processes give the numbers of this one; crashes, identities, interrupts."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.machine.host import host
from kvbench.records.run import RunDir
from kvbench.run.executors import ray as on_ray
from kvbench.run.executors.child import Children, ending, python_path
from kvbench.run.executors.job import waves
from tests.executors.conftest import CRASH, MATRIX, by_format, load_here, quality


def test_fresh_processes_give_the_numbers_of_one_process(matrix, tmp_path, kvbench):
    assert kvbench("run", matrix, "--out", tmp_path / "inline").exit_code == 0
    local = kvbench("run", matrix, "--executor", "local", "--out", tmp_path / "local")
    assert local.exit_code == 0, local.output
    assert quality(tmp_path / "local") == quality(tmp_path / "inline")
    again = kvbench("run", matrix, "--executor", "local", "--out", tmp_path / "local")
    assert "4 of 4 tasks are already measured" in again.output


def test_shards_that_are_merged_give_the_numbers_of_one_run(matrix, tmp_path, kvbench):
    shards = [tmp_path / f"shard{i}" for i in (1, 2)]
    text = MATRIX.replace("[native, int8_sym]", "[native, int8_sym, fp8_e4m3]")
    matrix.write_text(text.replace("limit_chunks: 2", "limit_chunks: 1"))
    for i, out in enumerate(shards, 1):
        found = kvbench("run", matrix, "--shard", f"{i}/2", "--out", out)
        assert found.exit_code == 0, found.output
        assert f"shard {i} of 2: 4 of 6 tasks are measured here" in " ".join(found.output.split())
        assert "NOT EVALUATED" in found.output
    merged = kvbench("merge", *reversed(shards), "--out", tmp_path / "merged")
    assert merged.exit_code == 0, merged.output
    assert kvbench("run", matrix, "--out", tmp_path / "whole").exit_code == 0
    assert quality(tmp_path / "merged") == quality(tmp_path / "whole")
    missing = kvbench("merge", shards[0], shards[0], "--out", tmp_path / "half")
    assert missing.exit_code == 3
    assert "no shard measured perplexity pydoc stream512 on kv_format=fp8_e4m3" in missing.output


def test_a_segfault_is_an_error_of_its_cell_and_the_others_go_on(matrix, tmp_path, kvbench, broken):
    """In the native cell's second task: its first one stands, int8_sym's perplexity lacks its baseline."""
    broken("kvbench.runners.perplexity", CRASH)
    result = kvbench("run", matrix, "--executor", "local", "--out", tmp_path / "out")
    assert result.exit_code == 3
    records = by_format(tmp_path / "out")
    error = records["perplexity", "native"].error
    said = "The process of kv_format=native was ended by signal 11 (SIGSEGV) while it measured this task."
    assert (error["type"], error["message"], error["tail"][-1]) == ("Crash", said, "last words")
    assert [records["storage", kv].status for kv in ("native", "int8_sym")] == ["ok", "ok"]
    assert records["perplexity", "int8_sym"].status == "not_evaluated"
    assert "ended as error: The process of kv_format=native was ended by signal 11" in result.output


@pytest.mark.slow
def test_a_worker_that_dies_before_its_first_task_leaves_an_error_for_each(matrix, tmp_path, kvbench, broken):
    broken("kvbench.run.task.prepare", "os.write(2, b'no torch\\n'); os.kill(os.getpid(), signal.SIGKILL)")
    assert kvbench("run", matrix, "--executor", "local", "--out", tmp_path / "out").exit_code == 3
    errors = [r.error for r in RunDir(tmp_path / "out").load().records]
    said = "signal 9 (SIGKILL; the system sends it when memory runs out) before this task"
    assert [(said in e["message"], e["tail"][-1]) for e in errors if e] == [(True, "no torch")] * 4


def test_there_is_no_number_under_a_false_identity(tmp_path):
    """A text changes between the keys and the worker, and the worker's Triton is not the interpreted one."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "m.yaml").write_text(MATRIX.replace("pydoc", str(text)).replace(", int8_sym]", "]"))
    m = load_here(tmp_path / "m.yaml")
    ((unit,),) = waves(m, m.tasks, None, host().identity)
    (job,) = unit.jobs
    assert job.identities.keys() == {task.key for task in m.tasks}
    text.write_text("Something else altogether. " * 40)
    run_dir = RunDir(tmp_path / "out")
    assert Children().run(job, run_dir.path, lambda key: None) is None
    storage, perplexity = (run_dir.read(task.key) for task in m.tasks)
    assert (storage.status, perplexity.status, perplexity.samples) == ("ok", "error", {})
    assert perplexity.error["type"] == "OtherIdentity"
    assert f"Not measured on {host().environment['host']}" in perplexity.error["message"]
    assert "data " in perplexity.error["message"]
    other = replace(job, tasks=job.tasks[:1], variables={**job.variables, "TRITON_INTERPRET": None})
    assert Children().run(other, run_dir.path, lambda key: None) is None
    if host().device == "cpu":
        assert re.search(r"triton .*, interpreted there", run_dir.read(m.tasks[0].key).error["message"])
    assert ending(-200) == "was ended by signal 200 (unknown)"
    assert ending(0) == "ended with exit code 0 and without its records"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_children_end_with_their_driver_and_records_stay(how, matrix, tmp_path, kvbench, broken):
    """Ctrl-C, and a kill -9 that leaves the driver no time: the worker, busy in a task, is gone too."""
    pid_file, out = tmp_path / "pid", tmp_path / "out"
    write = f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    broken("kvbench.runners.perplexity", write)
    call = [sys.executable, "-m", "kvbench", "run", matrix, "--executor", "local", "--out", out]
    env, quiet = {**os.environ, "PYTHONPATH": python_path()}, subprocess.DEVNULL
    with subprocess.Popen(call, env=env, stderr=subprocess.PIPE, stdout=quiet, text=True) as driver:
        pid = int(wait_for(lambda: pid_file.is_file() and pid_file.read_text()))
        assert alive(pid)
        driver.send_signal(how)
        assert driver.wait() == (130 if how == signal.SIGINT else -how)
        kept_said = "the records written so far are kept; run the same command to continue"
        assert (kept_said in driver.stderr.read()) == (how == signal.SIGINT)
    wait_for(lambda: not alive(pid))
    (kept,) = RunDir(out).load().records
    assert (kept.runner, kept.status) == ("storage", "ok")
    assert not list((out / "records").glob(".*"))
    assert "(3 to run, 1 reused)" in kvbench("plan", matrix, "--out", out).output


def wait_for(what, seconds=200):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_it_stops_once_the_verdict_is_decided(matrix, tmp_path, kvbench):
    gate, out = tmp_path / "gate.yaml", tmp_path / "out"
    limit = "where: {kv_format: int8_sym}, at_most: 0.1, why: it cannot be"
    gate.write_text(f"checks:\n- {{metric: kv_ratio_16bit, {limit}}}\n")
    words = ["--executor", "local", "--until-decided", "--gate", gate, "--out", out]
    assert kvbench("run", matrix, *words).exit_code == 1
    assert {r.runner for r in RunDir(out).load().records} == {"storage"}


def test_words_that_do_not_go_together(matrix, kvbench):
    for words, said in (
        (["--executor", "slurm"], "--executor slurm is not known; use inline, local, ray."),
        (["--jobs", "2"], "together with --executor local"),
        (["--executor", "local", "--jobs", "0"], "expected a number of at least 1"),
        (["--shard", "0/2"], "--shard 0/2 is not a shard"),
        (["--shard", "1/2", "--until-decided"], "a shard decides no verdict"),
        (["--shard", "1/2", "--canary"], "a shard decides no verdict"),
    ):
        result = kvbench("run", matrix, *words)
        assert result.exit_code == 2
        assert said in result.output


# `--executor ray` on a local Ray: the same numbers, crashes told; and what is said where Ray is missing.


@pytest.mark.ray
@pytest.mark.slow
def test_a_local_ray_gives_the_same_numbers(matrix, tmp_path, kvbench, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert kvbench("run", matrix, "--out", tmp_path / "inline").exit_code == 0
    found = kvbench("run", matrix, "--executor", "ray", "--out", tmp_path / "ray")
    assert found.exit_code == 0, found.output
    assert quality(tmp_path / "ray") == quality(tmp_path / "inline")
    assert not ray.is_initialized()
    (host,) = {r.environment["host"] for r in RunDir(tmp_path / "ray").load().records}
    assert host is not None


@pytest.mark.ray
def test_a_crash_on_ray_is_told_and_not_retried(matrix, tmp_path, kvbench, broken, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tried = tmp_path / "tried"
    broken("kvbench.runners.perplexity", f"open({str(tried)!r}, 'a').write('x'); {CRASH}")
    assert kvbench("run", matrix, "--executor", "ray", "--out", tmp_path / "out").exit_code == 3
    assert tried.read_text() == "x"  # int8_sym's lacks its baseline and is not begun
    records = by_format(tmp_path / "out")
    error = records["perplexity", "native"].error
    assert "was ended by signal 11 (SIGSEGV) while it measured this task" in error["message"]
    assert "last words" in error["tail"]
    assert records["storage", "int8_sym"].status == "ok"


def test_without_ray_the_command_that_gets_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'not installed; install it: pip install "kvbench\[ray\]"'):
        on_ray.module()


def test_a_cluster_that_is_not_there_is_told_at_once(matrix, kvbench, monkeypatch):
    """Ray itself would try for minutes."""
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert not on_ray.answers(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        result = kvbench("run", matrix, "--executor", "ray", "--out", matrix.parent / "out")
        assert result.exit_code == 2
        assert f"Nothing answers at RAY_ADDRESS={address}; start a cluster there" in result.output
        taken.listen()
        assert on_ray.answers(address)
    assert on_ray.answers("auto")
    assert on_ray.answers("ray://10.0.0.1:10001")
    assert not on_ray.answers("127.0.0.1:99999")
