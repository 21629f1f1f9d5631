"""The policy that judged a run judges it again, whoever asks: `gate`, `report`, and `merge` of its shards."""

import json

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app

MATRIX = """
name: kept
model: {source: tiny-llama, weights: random, plumbing: true}
axes: {kv_format: [native, int8_sym]}
engine: {context: 32, device: cpu}
runners: {storage: {}}
"""
NEVER = "name: never\nchecks: [{metric: kv_ratio_16bit, where: {kv_format: int8_sym}, at_most: 0.1}]\n"
ALWAYS = "name: always\nchecks: [{metric: kv_bytes_difference, equals: 0}]\n"


def kvbench(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "always.yaml").write_text(ALWAYS)
    (tmp_path / "never.yaml").write_text(NEVER)
    (tmp_path / "m.yaml").write_text(MATRIX)
    return tmp_path


@pytest.mark.parametrize("named", ["", "gate: always.yaml\n"])
def test_a_gate_that_was_given_is_not_forgotten(folder, named):
    (folder / "m.yaml").write_text(MATRIX + named)
    run = folder / "run"
    assert kvbench("run", folder / "m.yaml", "--gate", folder / "never.yaml", "--out", run).exit_code == 1
    again = kvbench("gate", run)
    assert again.exit_code == 1, again.output
    assert ("differs from it" in again.stderr) == bool(named)
    assert "FAIL" in kvbench("report", run).stdout
    results = json.loads((run / "results.json").read_text())
    assert (results["verdict"], results["run"]["gate"]) == ("fail", str(run / "gate.yaml"))

    # Another one, given to `gate`, is the one that stands from then on, and the report says its name.
    assert kvbench("gate", run, "--gate", folder / "always.yaml").exit_code == 0
    assert str(folder / "always.yaml") in (run / "report.md").read_text().replace("\\", "")
    assert kvbench("gate", run).exit_code == 0
    assert (run / "gate.yaml").read_text() == ALWAYS


@pytest.mark.slow
def test_shards_are_merged_under_the_gate_that_judged_them(folder):
    (folder / "m.yaml").write_text(MATRIX.replace("int8_sym]", "int8_sym, fp8_e4m3]"))
    shards = [folder / f"s{i}" for i in (1, 2)]
    for i, out in enumerate(shards, 1):
        kvbench("run", folder / "m.yaml", "--gate", folder / "never.yaml", "--shard", f"{i}/2", "--out", out)
    merged = kvbench("merge", *shards, "--out", folder / "whole")
    assert merged.exit_code == 1, merged.output
    before = json.loads((folder / "whole" / "run.json").read_text())["merged"]
    kvbench("run", folder / "m.yaml", "--out", folder / "whole")  # nothing is left to measure
    assert json.loads((folder / "whole" / "run.json").read_text())["merged"] == before
    (shards[1] / "gate.yaml").write_text(ALWAYS)
    refused = kvbench("merge", *shards, "--out", folder / "other")
    assert refused.exit_code == 2
    assert "different gates" in refused.stderr
    assert (
        kvbench("merge", *shards, "--out", folder / "other", "--gate", folder / "always.yaml").exit_code == 0
    )
