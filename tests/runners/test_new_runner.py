"""A runner is three places: its file, its metrics, and its line in the registry.

A toy one is added to a copy of kvbench.
"""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUNNER = """
from kvbench.runners.context import Context, Measurement


def run(ctx: Context) -> Measurement:
    engine = ctx.engine(sequences=1, tokens=ctx.options["tokens"])
    logits = engine.prefill(engine.add(), list(range(ctx.options["tokens"])))
    return Measurement({"best": int(logits[-1].argmax())}, {"tokens": ctx.options["tokens"]})
"""
METRICS = """
from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import NUMBER
from kvbench.metrics.declare.value import Value

FACTS = ()
BEST = Metric("toy_best", NUMBER, "", "Best token", "argmax after the prompt")
TABLES = (Table("toy", "Toy", (BEST,), note="A toy."),)


def values(record, baseline):
    yield Value("toy_best", float(record.samples["best"]))
"""
ENTRY = """    RunnerDecl("toy", 1, TEXT, "a toy", {"tokens": _count(8, "tokens")}, ignores=_SHAPE),
"""
MATRIX = """
name: toy
model: {source: tiny-llama, weights: random, plumbing: true}
axes: {kv_format: [native, int8_sym], batch: 1, context: 16}
runners:
  toy: {tokens: 12}
"""


@pytest.mark.slow
def test_a_runner_is_three_places(tmp_path):
    package = tmp_path / "kvbench"
    shutil.copytree(ROOT / "kvbench", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "runners" / "toy.py").write_text(RUNNER)
    (package / "metrics" / "toy.py").write_text(METRICS)
    registry = package / "matrix" / "runners.py"
    head, first, rest = registry.read_text(encoding="utf-8").partition("    RunnerDecl(\n")
    registry.write_text(head + ENTRY + first + rest, encoding="utf-8")
    (tmp_path / "toy.yaml").write_text(MATRIX)

    command = [sys.executable, "-m", "kvbench", "run", "toy.yaml", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out" / "results_long.csv").open(encoding="utf-8") as f:
        rows = [row for row in csv.DictReader(f) if row["metric"] == "toy_best"]
    assert [float(row["value"]) >= 0 for row in rows] == [True, True]
