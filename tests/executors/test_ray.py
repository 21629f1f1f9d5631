"""`--executor ray` on a local Ray: the same numbers, crashes told; and what is said where Ray is missing."""

import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvbench.errors import UsageError
from kvbench.records.run import RunDir
from kvbench.run.executors import ray as on_ray
from tests.executors.conftest import CRASH, by_format, quality

Run = Callable[..., Any]


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
