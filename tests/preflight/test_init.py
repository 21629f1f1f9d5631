"""`kvbench init`: what it writes is valid, planned, and the format's own; nothing that is there is touched."""

import itertools
import json

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.formats.kv import KV_FORMATS
from kvbench.gate.policy import load as load_gate
from kvbench.models.catalog import TINY

QUANTIZED = [name for name, fmt in KV_FORMATS.items() if fmt.quantized]


def call(*words):
    return CliRunner().invoke(app, [str(w) for w in words], env={"COLUMNS": "200", "KVBENCH_DATA_DIR": ""})


MODELS = itertools.cycle(["smollm2-135m-instruct", "tiny-gemma2", "qwen3-8b-shape"])


@pytest.mark.parametrize(("fmt", "model"), list(zip(QUANTIZED, MODELS, strict=False)))
def test_what_it_writes_is_valid_and_planned(tmp_path, fmt, model):
    result = call("init", tmp_path / "mine", "--model", model, "--format", fmt)
    assert result.exit_code == 0, result.output
    matrix = tmp_path / "mine" / "matrix.yaml"
    assert result.stdout.splitlines()[-1] == f"Next: kvbench validate {matrix} && kvbench run {matrix}"
    checked = call("validate", matrix, matrix.with_name("gate.yaml"), "--json")
    assert checked.exit_code == 0, checked.output
    planned = call("plan", matrix, "--json")
    assert planned.exit_code == 0, planned.output
    cells = json.loads(planned.output)["cells"]
    assert [c["spec"]["kv_format"] for c in cells].count(fmt) == 4
    assert [c["problem"] for c in cells] == [None] * 8


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_an_editor_takes_it_by_the_schemas_beside_it(tmp_path, fmt):
    assert call("init", tmp_path / "a.yaml", "--format", fmt, "--model", "tiny-llama").exit_code == 0
    for name, schema in (("a.yaml", "matrix.schema.json"), ("a-gate.yaml", "gate.schema.json")):
        text = (tmp_path / name).read_text()
        assert text.splitlines()[0] == f"# yaml-language-server: $schema={schema}"
        jsonschema.validate(yaml.safe_load(text), json.loads((tmp_path / schema).read_text()))
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["gate"] == "a-gate.yaml"
    assert (tmp_path / "matrix.schema.json").read_text() == call("schema", "matrix").stdout


@pytest.mark.parametrize(
    ("model", "fmt", "ratio"),
    [
        ("smollm2-135m-instruct", "int8_sym", 66 / 128),
        ("qwen3-8b-shape", "int8_sym", 130 / 256),
        ("qwen3-8b-shape", "fp8_e4m3", 132 / 256),
    ],
)
def test_the_bytes_are_exact_for_the_model(tmp_path, model, fmt, ratio):
    call("init", tmp_path, "--model", model, "--format", fmt)
    check = next(c for c in load_gate(tmp_path / "gate.yaml").checks if c.metric == "kv_ratio_16bit")
    assert (check.low, check.high, check.where) == (ratio, ratio, {"kv_format": fmt})


CASES = [
    ("matrix.yaml", True),
    ("gate.yaml", False),
    ("matrix.schema.json", False),
    ("gate.schema.json", True),
]


@pytest.mark.parametrize(("kept", "linked"), CASES)
def test_nothing_is_overwritten_nor_written_through_a_link(tmp_path, kept, linked):
    path, elsewhere = tmp_path / "own" / kept, tmp_path / "elsewhere"
    path.parent.mkdir()
    if linked:
        path.symlink_to(elsewhere)
    else:
        path.write_text("mine")
    result = call("init", path.parent)
    assert result.exit_code == 2, result.output
    assert f"{path} already exists and is not changed" in " ".join(result.output.split())
    assert [p.name for p in path.parent.iterdir()] == [kept]
    assert not elsewhere.exists() if linked else path.read_text() == "mine"


def test_in_the_folder_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("init").exit_code == 0
    again = call("init")
    assert again.exit_code == 2
    assert "kvbench init another.yaml" in again.output
    assert call("init", "another.yaml").exit_code == 0


def test_a_second_matrix_shares_the_schemas(tmp_path):
    assert call("init", tmp_path / "a.yaml").exit_code == 0
    other = ("init", tmp_path / "b.yaml", "--format", "fp8_e4m3")
    assert [call(*other).exit_code for _ in range(2)] == [0, 2]
    assert sorted(p.stem for p in tmp_path.glob("*.yaml")) == ["a", "a-gate", "b", "b-gate"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--format", "int8sym", "Did you mean int8_sym?"),
        ("--format", "native", ""),
        ("--model", "smollm", ""),
    ],
)
def test_names_that_mean_nothing_are_refused(tmp_path, option, value, words):
    result = call("init", tmp_path, option, value)
    assert (result.exit_code, words in result.output, list(tmp_path.iterdir())) == (2, True, [])


def test_a_model_folder_is_named_whole_whatever_it_is_called(tmp_path, monkeypatch):
    """By its absolute path; quoted, as colons and hashes mean something in YAML."""
    odd = tmp_path / "my: model #1"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(TINY["tiny-llama"]))
    (odd / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    monkeypatch.chdir(tmp_path)
    assert call("init", tmp_path / "out", "--model", f"./{odd.name}").exit_code == 0
    assert yaml.safe_load((tmp_path / "out" / "matrix.yaml").read_text())["model"] == str(odd)
    assert call("validate", tmp_path / "out" / "matrix.yaml").exit_code == 0
