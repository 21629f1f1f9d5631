"""Damaged records and manifests: a sentence, never a traceback or a verdict."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.records.run import RunDir
from kvbench.records.schema import manifest_schema, record_schema
from kvbench.report.json import RESULTS_VERSION, results_schema
from tests.factories.runs.made import MadeRun, layers, storage_facts

KEY = "storage--cand"
MATRIX = "name: m\nmodel: tiny-llama\naxes: {kv_format: [native]}\nrunners: {storage: {}}\n"


@pytest.fixture
def run_dir(tmp_path):
    facts = storage_facts(16, 2048)
    made = MadeRun().measure("storage", (layers(2, 512, 64), facts), (layers(2, 2048, 0), facts))
    return made.on_disk(tmp_path / "run")


def gate(run, code, *words):
    result = CliRunner().invoke(app, ["gate", str(run.path), *map(str, words)])
    assert result.exit_code in code, result.exception
    return result.stderr


def damaged(path, damage):
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", "[" * 100_000])
def test_a_file_that_is_no_record(run_dir, text):
    run_dir.record_path(KEY).write_text(text)
    assert f"{KEY}.json" in gate(run_dir, [2])


DAMAGES = {
    "status": lambda d: d.update(status="great"), "no status": lambda d: d.update(status=None),
    "samples": lambda d: d.update(samples=[]), "facts": lambda d: d.update(facts=None),
    "decision": lambda d: d["decision"].pop("weights"), "evidence": lambda d: d.update(evidence="verified"),
    "level": lambda d: d["evidence"].update(levels=[{"x": 1}]),
    "level state": lambda d: d["evidence"]["levels"][0].update(state="yes"),
    "runner": lambda d: d.update(runner=5), "partial": lambda d: d.update(partial=5),
    "seconds": lambda d: d.update(seconds="1"), "key": lambda d: d.update(key="storage--base"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record(run_dir, damage):
    gate(run_dir, [0])
    damaged(run_dir.record_path(KEY), DAMAGES[damage])
    assert f"{KEY}.json" in gate(run_dir, [2])


@pytest.mark.parametrize("payload", ["x", None, float("nan"), 10**400])
def test_a_sample_that_is_no_number_is_no_pass(run_dir, payload):
    damaged(run_dir.record_path(KEY), lambda d: d["samples"]["layers"][0].update(payload=payload))
    gate(run_dir, [1, 3])


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
    damaged(run_dir.manifest_path, MANIFESTS[damage])
    assert run_dir.manifest_path.name in gate(run_dir, [2])


def test_a_run_directory_that_cannot_be_one_and_a_limit_that_no_float_holds(tmp_path, run_dir):
    (tmp_path / "file").write_text("")
    (tmp_path / "m.yaml").write_text(MATRIX)
    for out in ("file", "file/x"):
        result = CliRunner().invoke(app, ["run", str(tmp_path / "m.yaml"), "--out", str(tmp_path / out)])
        assert result.exit_code == 2, result.exception
        assert "--out" in result.stderr
    (tmp_path / "g.yaml").write_text(f"checks: [{{metric: ppl, at_most: {'9' * 395}}}]\n")
    gate(run_dir, [2], "--gate", tmp_path / "g.yaml")


def test_words_without_measure(tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    deep, long = "(" * 2000 + "native" + ")" * 2000, "x" * 5000
    chosen = [("-k", deep), ("-k", "not " * 3000 + "native")]
    for words in (*chosen, ("--set", f"model={long}"), ("--set", f"gate={long}")):
        result = CliRunner().invoke(app, ["plan", str(tmp_path / "m.yaml"), *words])
        assert result.exit_code == 2, result.exception


# The schemas of what a run leaves hold for real files, and detect damage.


ROOT = Path(__file__).parents[2]
SCHEMAS = {"record": record_schema, "manifest": manifest_schema, "results": results_schema}


def faults(kind, data):
    """Of a file, or of what is in one."""
    data = json.loads(data.read_text()) if isinstance(data, Path) else data
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind]())
    return [f"{e.json_path}: {e.message}" for e in validator.iter_errors(data)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of today's code on a tiny model: matrix, records, gate, report."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "m.yaml").write_text(
        "name: m\nmodel: {source: tiny-llama, weights: random, plumbing: true}\n"
        "axes: {kv_format: [native, int8_sym]}\nengine: {context: 32, device: cpu}\n"
        "runners: {storage: {}, perplexity: {limit_chunks: 1}}\n"
    )
    result = CliRunner().invoke(app, ["run", str(folder / "m.yaml"), "--out", str(folder / "out"), "--quiet"])
    assert result.exit_code == 0, result.output
    said = r"NOT JUDGED  No gate was applied; all \d+ built-in checks passed\. Exit code 0\.\n(\S+\n){8}"
    assert re.fullmatch(said, result.stdout)
    assert result.stderr == ""
    return RunDir(folder / "out")


@pytest.mark.parametrize("kind", SCHEMAS)
def test_they_are_schemas(kind):
    schema = SCHEMAS[kind]()
    jsonschema.Draft202012Validator.check_schema(schema)
    result = CliRunner().invoke(app, ["schema", kind])
    assert (result.exit_code, json.loads(result.stdout)) == (0, schema)
    result = CliRunner().invoke(app, ["schema", kind[1:]])
    assert result.exit_code == 2
    assert "use matrix, gate, record, manifest, results" in result.stderr


def test_real_and_failed_runs_validate(run, tmp_path):
    assert faults("manifest", run.manifest_path) == []
    records = list((run.path / "records").glob("*.json"))
    assert [faults("record", path) for path in records] == [[]] * 4
    assert faults("results", run.path / "results.json") == []
    assert json.loads((run.path / "results.json").read_text())["schema"] == RESULTS_VERSION
    good = layers(2, 512, 64), storage_facts(16, 2048)
    error = {"type": "MemoryError", "message": "no memory", "tail": ["x"]}
    made = MadeRun().measure("storage", good, good)
    made.change("cand", status="error", samples={}, facts={}, decision=None, evidence=None, error=error)
    made.records[0].samples["layers"][0]["payload"] = float("nan")
    run = made.on_disk(tmp_path)
    for record in made.records:
        assert faults("record", run.record_path(record.key)) == []
    assert CliRunner().invoke(app, ["gate", str(run.path)]).exit_code == 1
    assert faults("results", run.path / "results.json") == []


DAMAGE = [
    ("record", "records/*.json", "status", "great"),
    ("manifest", "run.json", "tasks", None),
    ("results", "results.json", "exit_code", 2),
]


@pytest.mark.parametrize(("kind", "files", "key", "value"), DAMAGE)
def test_damage_is_seen(kind, files, key, value, run):
    data = json.loads(next(run.path.glob(files)).read_text())
    for damaged in ({**data, key: value}, {**data, "more": 1}, {k: v for k, v in data.items() if k != key}):
        assert len(faults(kind, damaged)) == 1
