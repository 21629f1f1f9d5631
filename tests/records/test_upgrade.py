"""Runs of older schemas, measured by the code of their time: they are read, judged, and nothing is made up for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.errors import UsageError
from kvbench.files import write_json
from kvbench.gate.precision import precision
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve import ASPECTS
from kvbench.metrics.collect import derive
from kvbench.records.record import SCHEMA_VERSION, Evidence, Level, RunDir, record_from_dict
from kvbench.records.upgrade import MANIFESTS, RECORDS

OLD = sorted((Path(__file__).parent / "old_runs").glob("*.json"))
WEIGHTS = {"E1-weights", "E2-weights", "E3-weights", "E4-weights", "E5-weights"}
# Kept as it was measured, to the last bit.
MEASURED = ("key", "runner", "protocol", "status", "options", "samples", "facts", "environment", "partial", "error", "started_at", "seconds")  # fmt: skip


def stored(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(params=OLD, ids=lambda path: path.stem)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], RunDir]:
    data, run = stored(request.param), RunDir(tmp_path / "run")
    write_json(run.manifest_path, data["manifest"])
    for record in data["records"]:
        write_json(run.record_path(record["key"]), record)
    return data, run


def test_there_is_an_old_run_of_every_version() -> None:
    assert {stored(path)["manifest"]["schema"] for path in OLD} == set(range(1, SCHEMA_VERSION))
    assert set(RECORDS) == set(MANIFESTS) == set(range(1, SCHEMA_VERSION))


def test_what_was_measured_stays_and_what_was_not_is_unverified(old: tuple[dict[str, Any], RunDir]) -> None:
    data, run = old
    records = list(run.records())
    assert len(records) == len(data["records"]) == 2
    by_key = {record["key"]: record for record in data["records"]}
    for record in records:
        before = by_key[record.key]
        assert {name: getattr(record, name) for name in MEASURED} == {name: before[name] for name in MEASURED}
        assert record.schema == SCHEMA_VERSION
        assert record.evidence is not None
        assert record.decision is not None
        levels = {level["name"]: level for level in record.evidence["levels"]}
        for level in before["evidence"]["levels"]:
            assert levels.pop(level["name"]) == level
        assert set(levels) >= WEIGHTS
        assert {level["state"] for level in levels.values()} == {"unverified"}
        assert all("older than schema" in level["sentence"] for level in levels.values())
        assert record.evidence["effective"] == before["evidence"]["effective"]
        assert record.evidence["effective_weights"] == "unknown"
        for aspect in ASPECTS:
            assert record.decision[aspect]["requested"] == record.spec[aspect]
            if aspect in before["decision"]:
                assert record.decision[aspect] == before["decision"][aspect]
            else:
                assert record.decision[aspect]["reason"] == "before_this_choice"
        shown = Evidence(
            **{**record.evidence, "levels": tuple(Level(**x) for x in record.evidence["levels"])}
        )
        assert shown.state == "unverified"


def test_cells_tasks_and_records_have_the_keys_of_today(old: tuple[dict[str, Any], RunDir]) -> None:
    data, run = old
    manifest = run.manifest()
    assert manifest["schema"] == SCHEMA_VERSION
    assert {k: v for k, v in manifest.items() if k not in ("schema", "cells", "tasks")} == {
        k: v for k, v in data["manifest"].items() if k not in ("schema", "cells", "tasks")
    }
    for cell, before in zip(manifest["cells"], data["manifest"]["cells"], strict=True):
        assert set(cell["spec"]) == set(CELL_KEYS)
        assert before["spec"].items() <= cell["spec"].items()
        assert all(
            cell["spec"][key] == CELL_KEYS[key] for key in set(cell["spec"]).difference(before["spec"])
        )


def test_its_bytes_are_derived_and_its_precision_is_not_proven(old: tuple[dict[str, Any], RunDir]) -> None:
    _, run = old
    manifest, records = run.manifest(), list(run.records())
    values = {
        (row.metric, next(c["spec"]["kv_format"] for c in manifest["cells"] if c["id"] == row.cell)): row
        for row in derive(manifest, records)
    }
    assert values["kv_bytes_difference", "int8_sym"].value == 0
    assert values["kv_ratio_16bit", "int8_sym"].value == 0.5625
    assert values["weight_ratio_16bit", "int8_sym"].value is None  # nobody counted them then
    outcomes = list(precision(manifest, records))
    assert {o.status for o in outcomes} == {"fail"}
    assert all("unverified: " in o.sentence and "E1-weights: not looked at" in o.sentence for o in outcomes)
    assert not any("mismatch" in o.sentence for o in outcomes)


def test_gate_and_report_read_it(old: tuple[dict[str, Any], RunDir]) -> None:
    _, run = old
    result = CliRunner().invoke(app, ["gate", str(run.path)])
    assert result.exit_code == 1, result.output
    assert "0.5625" in result.output
    assert CliRunner().invoke(app, ["report", str(run.path)]).exit_code == 0
    assert json.loads(run.manifest_path.read_text())["schema"] < SCHEMA_VERSION  # read, never rewritten


@pytest.mark.parametrize("schema", [0, 4, 99, "3", None, True, 1.0, [1]])
def test_another_version_is_a_sentence(schema: Any) -> None:
    data = {**stored(OLD[-1])["records"][0], "schema": schema}
    with pytest.raises(UsageError, match=r"has schema .*, this kvbench reads schemas 1 to 3") as caught:
        record_from_dict(data, "r.json")
    newer = type(schema) is int and schema > SCHEMA_VERSION
    assert ("written by a newer kvbench" in str(caught.value)) == newer


@pytest.mark.parametrize(
    ("part", "damage"),
    [(part, damage) for part in ("spec", "decision", "evidence") for damage in (5, [], "x", ["a"])]
    + [("decision", {}), ("evidence", {}), ("evidence", {"levels": 5})],
)
def test_a_damaged_old_record_is_a_sentence(part: str, damage: Any) -> None:
    for path in OLD:
        with pytest.raises(UsageError, match=r"^r\.json "):
            record_from_dict({**stored(path)["records"][0], part: damage}, "r.json")


@pytest.mark.parametrize("damage", [None, 5, [5], [{}], [{"spec": 5}]])
def test_a_damaged_old_manifest_is_a_sentence(damage: Any, tmp_path: Path) -> None:
    for path in OLD:
        for part in ("cells", "tasks"):
            run = RunDir(tmp_path)
            write_json(run.manifest_path, {**stored(path)["manifest"], part: damage})
            with pytest.raises(UsageError, match=r"run\.json "):
                run.manifest()


def test_a_record_without_decision_or_evidence_is_lifted_too() -> None:
    for path in OLD:
        data = stored(path)["records"][0]
        error = {"type": "OSError", "message": "x", "tail": []}
        lifted = record_from_dict(
            {**data, "status": "error", "decision": None, "evidence": None, "error": error}
        )
        assert (lifted.decision, lifted.evidence, lifted.status) == (None, None, "error")


def test_quantized_weights_of_the_time_have_a_path_that_nobody_recorded() -> None:
    data = stored(OLD[-1])["records"][0]
    del data["decision"]["gemm"]  # as early ones of schema 2 are
    assert record_from_dict(data).decision["gemm"]["resolved"] == "native"
    data["decision"]["weights"] = {**data["decision"]["weights"], "requested": "fp8_block128", "resolved": "fp8_block128"}  # fmt: skip
    lifted = record_from_dict(data)
    assert lifted.decision is not None
    assert lifted.decision["gemm"]["resolved"] == "unknown"


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_what_an_old_record_says_of_its_weights_is_not_believed(path: Path) -> None:
    """No code of that time looked at them, so somebody wrote it in by hand."""
    data = stored(path)["records"][0]
    honest = record_from_dict(data)
    proof = [{"name": name, "state": "verified", "sentence": "yes", "facts": {}} for name in sorted(WEIGHTS)]
    forged = {**data["evidence"], "effective_weights": "native", "levels": data["evidence"]["levels"] + proof}
    assert record_from_dict({**data, "evidence": forged}).evidence == honest.evidence
