"""The JSON Schemas accept what the loaders accept, and see the mistakes that a schema can see."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from kvbench.formats.kv import KV_FORMATS
from kvbench.gate.schema import gate_schema
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.schema import matrix_schema
from kvbench.matrix.yaml import load, parse
from kvbench.metrics import collect as metrics

ROOT = Path(__file__).parents[2]

MATRIX = """\
name: all-of-it
model: {source: tiny-llama, weights: random, revision: ~, trust_remote_code: false, plumbing: true}
axes:
  kv_format: [native, int8_sym, int8_static]
  scale: [0.05, {k: 1, v: [0.1, 0.2]}]
  batch: 8
engine: {page_size: 16, device: auto, model_revision: ~}
include: [{kv_format: native, context: 8}]
exclude: [{batch: 8, kv_format: native}]
runners:
  storage:
  parity: {lengths: 7}
  perplexity: {data: [pydoc, x.txt], limit_chunks: ~, kld: false}
  mcq: {tasks: cloze, shots: 5, max_truncated: 0.1}
gate: ../gates/x.yaml
"""

GATE = """\
name: release
allow_partial: true
checks:
  - {metric: kv_ratio_16bit, where: {kv_format: int8_sym, batch: 4}, equals: {value: 0.515625, tolerance: 1e-6}, why: x}
  - {metric: kv_bytes_difference, equals: 0}
  - {metric: ppl_delta_pct, where: {variant: wikitext2 stream512}, within: [-1, 1], required: false}
  - {metric: itl_ratio, at_most: 1.1}
  - {metric: top1_teacher_forced, at_least: 9e-1}
"""


def accepts(schema: dict[str, Any], text: str) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(parse(text, "f.yaml").data)


@pytest.mark.parametrize(
    ("scale", "fits"),
    [("checkpoint", True), ("checkpoint_or_default", True), ("default", True), ("s.json", True), ("[default, 0.05]", True),
     ("checkpont", False), ("dynamic", False), ("0", False)],
)  # fmt: skip
def test_the_words_of_scale_are_in_the_schema(scale: str, fits: bool) -> None:
    text = MATRIX.replace("scale: [0.05, {k: 1, v: [0.1, 0.2]}]", f"scale: {scale}")
    assert accepts(matrix_schema(), text) == fits
    about = matrix_schema()["properties"]["axes"]["properties"]["scale"]["description"]
    assert "checkpoint_or_default: those in the checkpoint's own files, 1.0 where it has none" in about


@pytest.mark.parametrize("schema", [matrix_schema(), gate_schema()], ids=["matrix", "gate"])
def test_schemas_are_schemas_and_json(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("path", sorted((ROOT / "matrices").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_matrices_validate(path: Path) -> None:
    jsonschema.Draft202012Validator(matrix_schema()).validate(load(path).data)


@pytest.mark.parametrize("path", sorted((ROOT / "gates").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_gates_validate(path: Path) -> None:
    jsonschema.Draft202012Validator(gate_schema()).validate(load(path).data)


def test_everything_that_a_matrix_may_say_validates() -> None:
    jsonschema.Draft202012Validator(matrix_schema()).validate(parse(MATRIX, "f.yaml").data)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("int8_sym,", "int8_sim,"),
        ("kv_format: [native,", "kv_fromat: [native,"),
        ("batch: 8\n", "batch: 0\n"),
        ("batch: 8\n", "batch: '8'\n"),
        ("batch: 8\n", "batch: []\n"),
        ("page_size", "page_sise"),
        ("device: auto", "device: off"),
        ("device: auto", "device: true"),
        ("0.05,", "-0.05,"),
        ("{k: 1, v:", "{k: 1, w:"),
        ("weights: random", "weights: randm"),
        ("source: tiny-llama, ", ""),
        ("model_revision: ~", "model: x"),
        ("storage:", "storge:"),
        ("storage:", "storage: {x: 1}"),
        ("shots: 5", "shots: 3"),
        ("tasks: cloze", "tasks: [closed]"),
        ("kld: false", "kld: off"),
        ("lengths: 7", "lengths: 0"),
        ("name: all-of-it", "name: All of it"),
        ("gate:", "gatee:"),
        ("[{kv_format: native, context: 8}]", "[{}]"),
    ],
)
def test_a_mistake_in_a_matrix_does_not_validate(right: str, wrong: str) -> None:
    text = MATRIX.replace(right, wrong, 1)
    assert text != MATRIX
    assert not accepts(matrix_schema(), text)


def test_a_matrix_needs_runners_and_axes_or_include() -> None:
    schema = matrix_schema()
    assert accepts(schema, "{model: a, axes: {batch: 1}, runners: {storage: }}")
    assert accepts(schema, "{model: a, include: [{batch: 1}], runners: {storage: }}")
    assert not accepts(schema, "{model: a, runners: {storage: }}")
    assert not accepts(schema, "{model: a, axes: {batch: 1}}")
    assert not accepts(schema, "{model: a, axes: {batch: 1}, runners: {}}")


def test_the_matrix_schema_has_every_key_runner_option_and_format() -> None:
    sections = matrix_schema()["properties"]
    assert list(sections["axes"]["properties"]) == list(CELL_KEYS)
    assert list(sections["runners"]["properties"]) == list(RUNNERS)
    for name, runner in RUNNERS.items():
        assert list(sections["runners"]["properties"][name]["properties"]) == list(runner.options)
    engine = sections["engine"]["properties"]
    assert engine["kv_format"]["enum"] == list(KV_FORMATS)
    for keys in (engine, *(r["properties"] for r in sections["runners"]["properties"].values())):
        assert all(schema["description"] for schema in keys.values())
    assert "one FP16 scale a token and KV head" in engine["kv_format"]["description"]


def test_everything_that_a_gate_may_say_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "METRICS", {}, raising=False)
    jsonschema.Draft202012Validator(gate_schema()).validate(parse(GATE, "f.yaml").data)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("at_most: 1.1", "at_mots: 1.1"),
        ("at_most: 1.1", "at_most: '1.1'"),
        ("at_most: 1.1", "at_most: 1.1, at_least: 1"),
        (", at_most: 1.1", ""),
        ("metric: itl_ratio, ", ""),
        ("metric: itl_ratio", "metric: true"),
        ("[-1, 1]", "[-1]"),
        ("[-1, 1]", "[-1, 0, 1]"),
        ("tolerance: 1e-6", "tolerance: -1"),
        ("value: 0.515625, ", ""),
        ("required: false", "required: no"),
        ("kv_format: int8_sym", "kv_format: int8_sim"),
        ("batch: 4", "bach: 4"),
        ("allow_partial: true", "allow_partial: yes"),
        ("checks:", "cheks:"),
    ],
)
def test_a_mistake_in_a_gate_does_not_validate(right: str, wrong: str) -> None:
    text = GATE.replace(right, wrong, 1)
    assert text != GATE
    assert not accepts(gate_schema(), text)
    assert not accepts(gate_schema(), "checks: []")


def test_metrics_of_a_gate_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"ppl": SimpleNamespace(name="ppl", unit="", definition="perplexity")}
    monkeypatch.setattr(metrics, "METRICS", table, raising=False)
    assert accepts(gate_schema(), "checks: [{metric: ppl, at_most: 9}]")
    assert not accepts(gate_schema(), "checks: [{metric: pppl, at_most: 9}]")
