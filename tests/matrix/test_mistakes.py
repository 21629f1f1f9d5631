"""Mistakes in matrix and gate files, and their JSON Schemas, which refuse the mistakes that a schema can express.

mistakes.txt has a file's text and below it one line for each mistake: `> LINE:COLUMN code sentence`. A
reworded sentence changes that file alone.
"""

import json
from pathlib import Path

import jsonschema
import pytest

from kvbench.errors import UsageError
from kvbench.formats.kv import KV_FORMATS
from kvbench.gate import policy
from kvbench.matrix import load as matrix
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.document import ConfigError
from kvbench.matrix.parse import matrix_schema
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.yaml import load, parse

TEXT = (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8")
CASES = [block.split("\n> ") for block in TEXT.strip().split("\n\n")]


def test_the_file_name_is_the_name_when_it_can_be(tmp_path):
    text = "model: a\naxes: {batch: 1}\nrunners: {storage: {}}\n"
    (tmp_path / "int8-run.yaml").write_text(text)
    assert matrix.load(tmp_path / "int8-run.yaml").name == "int8-run"
    (tmp_path / "My Run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r'"My Run" \(from the file\'s name\)'):
        matrix.load(tmp_path / "My Run.yaml")


ROOT = Path(__file__).parents[2]
SCHEMAS = {"matrices": matrix_schema(), "gates": policy.gate_schema()}

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
  - {metric: kv_ratio_16bit, where: {kv_format: int8_sym, batch: 4},
     equals: {value: 0.515625, tolerance: 1e-6}, why: x}
  - {metric: kv_bytes_difference, equals: 0}
  - {metric: ppl_delta_pct, where: {variant: wikitext2 stream512}, within: [-1, 1], required: false}
  - {metric: itl_ratio, at_most: 1.1}
  - {metric: top1_teacher_forced, at_least: 9e-1}
"""

# Reasons for which a schema refuses a file too; the others need the whole file, the metric, or other files.
EXPRESSIBLE = {
    "empty", "missing_key", "not_accepted", "too_large", "too_small", "unknown_key", "wrong_length", "wrong_type",
}  # fmt: skip


def is_valid(kind, text):
    return jsonschema.Draft202012Validator(SCHEMAS[kind]).is_valid(parse(text, "f.yaml").data)


@pytest.mark.parametrize(("kind", "text"), [("matrices", MATRIX), ("gates", GATE)])
def test_schemas_are_schemas_and_json_and_take_every_feature(kind, text):
    schema = SCHEMAS[kind]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator(schema).validate(parse(text, "f.yaml").data)


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("matrices/*.yaml"), *ROOT.glob("gates/*.yaml")]), ids=lambda path: path.stem
)
def test_the_matrices_and_gates_of_the_project_validate(path):
    jsonschema.Draft202012Validator(SCHEMAS[path.parent.name]).validate(load(path).data)


@pytest.mark.parametrize(("text", "lines"), [pytest.param(text, lines, id=text) for text, *lines in CASES])
def test_a22_t2_to_t5_a23_t4_a_mistake_has_place_and_reason_and_the_schema_refuses_it(text, lines, tmp_path):
    """A matrix is given a model and a runner, unless its text ends with `...`."""
    gate, text, ends = text.startswith("# gate"), text.removesuffix("..."), text.endswith("...")
    if EXPRESSIBLE.intersection(line.split()[1] for line in lines) and "exclude names" not in text:
        assert not is_valid("gates" if gate else "matrices", text)
    if not gate and not ends:
        text += "\nmodel: tiny-llama\n" if "model:" not in text else ""
        text += "\nrunners: {storage: {}}\n" if "runners:" not in text else ""
    (tmp_path / "f.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        (policy if gate else matrix).load(tmp_path / "f.yaml")
    # Places and reasons first: they must hold whatever the sentences are.
    found = [f"{f.line}:{f.column} {f.code}" for f in caught.value.faults]
    assert found == [" ".join(line.split()[:2]) for line in lines]
    sentences = [fault.sentence.replace(f"{tmp_path}/", "") for fault in caught.value.faults]
    assert sentences == [line.split(" ", 2)[2] for line in lines]


@pytest.mark.parametrize(
    ("scale", "fits"),
    [("checkpoint", True), ("checkpoint_or_default", True), ("default", True), ("s.json", True),
     ("[default, 0.05]", True), ("checkpont", False), ("dynamic", False), ("0", False)],
)  # fmt: skip
def test_the_words_of_scale_are_in_the_schema(scale, fits):
    text = MATRIX.replace("scale: [0.05, {k: 1, v: [0.1, 0.2]}]", f"scale: {scale}")
    assert is_valid("matrices", text) == fits


def test_the_matrix_schema_has_every_key_runner_option_and_format():
    sections = SCHEMAS["matrices"]["properties"]
    assert list(sections["axes"]["properties"]) == list(CELL_KEYS)
    assert list(sections["runners"]["properties"]) == list(RUNNERS)
    for name, runner in RUNNERS.items():
        assert list(sections["runners"]["properties"][name]["properties"]) == list(runner.options)
    engine = sections["engine"]["properties"]
    assert engine["kv_format"]["enum"] == list(KV_FORMATS)
    for keys in (engine, *(r["properties"] for r in sections["runners"]["properties"].values())):
        assert all(schema["description"] for schema in keys.values())
    assert "one FP16 scale a token and KV head" in engine["kv_format"]["description"]
    assert "checkpoint_or_default: " in sections["axes"]["properties"]["scale"]["description"]
