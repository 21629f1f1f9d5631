"""A small matrix on a tiny model, run by each executor; and a worker that is made to fail."""

import json

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.data.fingerprint import fingerprint as data_fingerprint
from kvbench.machine.host import host
from kvbench.matrix.load import load
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import METRICS, derive
from kvbench.models.source import fingerprint as model_fingerprint
from kvbench.records.run import RunDir

CRASH = "os.write(2, b'last words\\n'); os.kill(os.getpid(), signal.SIGSEGV)"
MATRIX = """\
name: small
model: {source: tiny-llama, plumbing: true}
axes:
  kv_format: [native, int8_sym]
engine: {context: 20}
runners:
  storage: {}
  perplexity: {data: pydoc, limit_chunks: 2}
"""


@pytest.fixture
def matrix(tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    return tmp_path / "m.yaml"


@pytest.fixture
def kvbench():
    """kvbench(words...): the command in this process."""
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def by_format(run):
    return {(r.runner, r.spec["kv_format"]): r for r in RunDir(run).load().records}


def load_here(path):
    """The matrix with the keys that a run on this machine gives its tasks."""

    def data(name, split):
        return data_fingerprint(name, None, split)

    return load(path, host=host(), fingerprint_model=model_fingerprint, fingerprint_data=data)


def quality(run):
    """What must be equal whoever measured it: samples and evidence of tasks that take no times, to the last
    bit, and what is derived."""
    whole = RunDir(run).load()
    assert whole.missing() == []
    kept = [r for r in whole.records if not RUNNERS[r.runner].timed]
    raw = {r.key: [r.status, r.samples, r.decision, r.evidence, r.partial] for r in kept}
    rows = [
        (r.cell, r.metric, r.variant, r.value, r.low, r.high, r.n, r.baseline, r.note)
        for r in derive(whole)
        if not RUNNERS[METRICS[r.metric].runner].timed and r.metric != "model_load_s"
    ]
    return json.dumps(raw, sort_keys=True), rows


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """broken(module, code): fresh Python processes run the code when they are about to import the module."""

    def breaks(module, code):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(
            "import os, signal, sys, time\n"
            "class Finder:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name == {module!r}:\n"
            f"            {code}\n"
            "sys.meta_path.insert(0, Finder())\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    return breaks
