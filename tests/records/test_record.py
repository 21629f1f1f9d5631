"""Records and manifests that somebody or something has damaged: a sentence, never a traceback or a
verdict."""

import json

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from tests.factories.runs.made import MadeRun, layers, storage_facts

KEY = "storage--cand"
MATRIX = "name: m\nmodel: tiny-llama\naxes: {kv_format: [native]}\nrunners: {storage: {}}\n"


@pytest.fixture
def run_dir(tmp_path):
    made = MadeRun().measure(
        "storage",
        (layers(2, 512, 64), storage_facts(16, 2048)),
        (layers(2, 2048, 0), storage_facts(16, 2048)),
    )
    return made.on_disk(tmp_path / "run")


def gate(run):
    return CliRunner().invoke(app, ["gate", str(run.path)])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", "[" * 100_000])
def test_a_file_that_is_no_record(run_dir, text):
    run_dir.record_path(KEY).write_text(text)
    result = gate(run_dir)
    assert result.exit_code == 2, result.exception
    assert f"{KEY}.json" in result.stderr


DAMAGES = {
    "status": lambda d: d.update(status="great"),
    "no status": lambda d: d.update(status=None),
    "samples": lambda d: d.update(samples=[]),
    "facts": lambda d: d.update(facts=None),
    "decision": lambda d: d["decision"].pop("weights"),
    "evidence": lambda d: d.update(evidence="verified"),
    "level": lambda d: d["evidence"].update(levels=[{"x": 1}]),
    "level state": lambda d: d["evidence"]["levels"][0].update(state="yes"),
    "runner": lambda d: d.update(runner=5),
    "partial": lambda d: d.update(partial=5),
    "seconds": lambda d: d.update(seconds="1"),
    "key": lambda d: d.update(key="storage--base"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record(run_dir, damage):
    assert gate(run_dir).exit_code == 0
    assert_refused(run_dir, run_dir.record_path(KEY), DAMAGES[damage])


def assert_refused(run_dir, path, damage):
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    result = gate(run_dir)
    assert result.exit_code == 2, result.exception
    assert path.name in result.stderr


@pytest.mark.parametrize("payload", ["x", None, float("nan"), 10**400])
def test_a_sample_that_is_no_number_is_no_pass(run_dir, payload):
    path = run_dir.record_path(KEY)
    data = json.loads(path.read_text())
    data["samples"]["layers"][0]["payload"] = payload
    path.write_text(json.dumps(data))
    assert gate(run_dir).exit_code in (1, 3)


MANIFESTS = {
    "empty": lambda d: d.clear(),
    "schema": lambda d: d.update(schema=9),
    "no cells": lambda d: d.update(cells=[]),
    "null tasks": lambda d: d.update(tasks=None),
    "no matrix": lambda d: d.pop("matrix"),
    "gate": lambda d: d.update(gate=5),
    "foreign cell": lambda d: d["tasks"][0].update(cells=["q"]),
    "no cell": lambda d: d["tasks"][0].update(cells=[]),
    "lost baseline": lambda d: d["cells"][1].update(baseline="q"),
    "path as key": lambda d: d["tasks"][0].update(key="../../x"),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_damaged_manifest(run_dir, damage):
    assert_refused(run_dir, run_dir.manifest_path, MANIFESTS[damage])


def test_a_run_directory_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "m.yaml").write_text(MATRIX)
    for out in ("file", "file/x"):
        result = CliRunner().invoke(app, ["run", str(tmp_path / "m.yaml"), "--out", str(tmp_path / out)])
        assert result.exit_code == 2, result.exception
        assert "--out" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        *(["-k", "(" * 2000 + "native" + ")" * 2000], ["-k", "not " * 3000 + "native"]),
        *(["--set", "model=" + "x" * 5000], ["--set", "gate=" + "x" * 5000]),
    ],
)
def test_words_without_measure(tmp_path, words):
    (tmp_path / "m.yaml").write_text(MATRIX)
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "m.yaml"), *words])
    assert result.exit_code == 2, result.exception


def test_a_limit_that_no_float_holds(tmp_path, run_dir):
    (tmp_path / "g.yaml").write_text(f"checks: [{{metric: ppl, at_most: {'9' * 395}}}]\n")
    result = CliRunner().invoke(app, ["gate", str(run_dir.path), "--gate", str(tmp_path / "g.yaml")])
    assert result.exit_code == 2, result.exception
