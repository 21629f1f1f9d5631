"""Two real runs of a tiny model beside each other: equal ones, and one whose quantized decode step was slowed down on purpose."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.engines.reference.engine import Engine

MATRIX = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes:
  kv_format: [native, int8_sym]
engine: {context: 20}
runners:
  storage: {}
  latency: {new_tokens: 5, repeats: 6}
  agreement: {steps: 130, prompt_tokens: 12, continuation: 0}
  perplexity: {data: pydoc, limit_chunks: 2}
"""
TIMES = "runners={latency: {new_tokens: 5, repeats: 6}}"
REST = "runners.latency.repeats=1"

Job = Callable[..., Path]


@pytest.fixture
def job(tmp_path):
    """job(name, setting): a run of the matrix above in a folder of that name, measured anew."""
    (tmp_path / "m.yaml").write_text(MATRIX)

    def go(name, setting):
        out = tmp_path / name
        words = ["run", str(tmp_path / "m.yaml"), "--out", str(out), "--set", setting]
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return out

    return go


def compared(*words):
    result = CliRunner().invoke(app, ["compare", *map(str, words), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.slow
def test_real_runs_are_equal_in_all_that_is_exact_and_a_planted_slowdown_is_found(job, monkeypatch):
    first, second = job("first", REST), job("second", REST)
    decode, spent = Engine.decode, []

    def slower(self, *work):
        """A quantized step takes three times as long again."""
        start = time.perf_counter()
        logits = decode(self, *work)
        if self.store.fmt.name == "int8_sym":
            spent.append(time.perf_counter() - start)
            time.sleep(3 * max(spent[-1], sorted(spent)[len(spent) // 2]))
        return logits

    exact = ("kv_bytes_total", "weight_bytes", "ppl", "kld_mean", "top1_agreement", "top1_teacher_forced")
    code, found = compared(first, second, *(word for metric in exact for word in ("--only", metric)))
    assert code == 0, found
    judged = {f["metric"] for f in found["findings"] if f["outcome"] == "same"}
    assert judged == set(exact)
    assert found["faults"] == []

    manifest = json.loads((first / "run.json").read_text())
    assert all(task["digests"]["model"].startswith("random:") for task in manifest["tasks"])

    before = job("before", TIMES)
    monkeypatch.setattr(Engine, "decode", slower)
    code, found = compared(before, job("planted", TIMES), "--only", "itl_ms", "-k", "int8_sym")
    (itl,) = [f for f in found["findings"] if "int8_sym" in f["place"]]
    assert code == 1, found
    assert itl["outcome"] == "worse", itl["sentence"]
    assert itl["change"]["kind"] == "time beside native"
    assert itl["change"]["low"] > 2
