"""The schemas of what a run leaves hold for real files, and detect damage."""

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

ROOT = Path(__file__).parents[2]
SCHEMAS = {"record": record_schema, "manifest": manifest_schema, "results": results_schema}


def faults(kind, data):
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
    assert re.fullmatch(
        r"NOT JUDGED  No gate was applied; all \d+ built-in checks passed\. Exit code 0\.\n(\S+\n){8}",
        result.stdout,
    )
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


def test_a_real_run_validates(run):
    assert faults("manifest", json.loads(run.manifest_path.read_text())) == []
    records = list((run.path / "records").glob("*.json"))
    assert len(records) == 4
    assert [fault for path in records for fault in faults("record", json.loads(path.read_text()))] == []
    results = json.loads((run.path / "results.json").read_text())
    assert faults("results", results) == []
    assert results["schema"] == RESULTS_VERSION


def test_a_failed_run_validates(tmp_path):
    good = layers(2, 512, 64), storage_facts(16, 2048)
    error = {"type": "MemoryError", "message": "no memory", "tail": ["x"]}
    made = MadeRun().measure("storage", good, good)
    made.change("cand", status="error", samples={}, facts={}, decision=None, evidence=None, error=error)
    made.records[0].samples["layers"][0]["payload"] = float("nan")
    run = made.on_disk(tmp_path)
    for record in made.records:
        assert faults("record", json.loads(run.record_path(record.key).read_text())) == []
    assert CliRunner().invoke(app, ["gate", str(run.path)]).exit_code == 1
    assert faults("results", json.loads((run.path / "results.json").read_text())) == []


@pytest.mark.parametrize(
    ("kind", "files", "key", "value"),
    [
        ("record", "records/*.json", "status", "great"),
        ("manifest", "run.json", "tasks", None),
        ("results", "results.json", "exit_code", 2),
    ],
)
def test_damage_is_seen(kind, files, key, value, run):
    data = json.loads(next(run.path.glob(files)).read_text())
    assert len(faults(kind, {**data, key: value})) == 1
    assert len(faults(kind, {**data, "more": 1})) == 1
    assert len(faults(kind, {k: v for k, v in data.items() if k != key})) == 1
