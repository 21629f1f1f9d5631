"""`kvbench validate`: what would end a cell or leave a required check open is a problem (2); else a note (0)."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.models.catalog import TINY

ROOT = Path(__file__).parents[2]
MATRIX = """\
name: m
model: {source: tiny-llama, plumbing: true}
axes: {kv_format: [native, int8_sym]}
engine: {context: 64, backend: auto}
runners: {storage: {}}
"""
GATE = "checks: [{metric: kv_bytes_difference, equals: 0}]\n"


def validate(*words):
    env = {"COLUMNS": "200", "KVBENCH_DATA_DIR": "", "KVBENCH_ALLOW_HUB": ""}
    return CliRunner().invoke(app, ["validate", *map(str, words)], env=env)


def found(tmp_path, text=MATRIX, gate="", *words):
    """The first file's finding; the exit code is held to it."""
    (tmp_path / "m.yaml").write_text(text)
    more = []
    if gate:
        (tmp_path / "g.yaml").write_text(gate)
        more = ["--gate", tmp_path / "g.yaml"]
    result = validate(tmp_path / "m.yaml", "--json", *more, *words)
    answer = json.loads(result.stdout)
    first = answer["files"][0]
    assert result.exit_code == answer["exit_code"] == (2 if first["problems"] else 0)
    return first


@pytest.mark.parametrize("path", sorted((ROOT / "matrices").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_matrices_of_the_repository_are_valid(path):
    result = validate(path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{path}: ok; ")


def test_the_gates_of_the_repository_are_valid():
    gates = sorted((ROOT / "gates").glob("*.yaml"))
    result = validate(*gates)
    assert result.exit_code == 0, result.output
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [str(g) for g in gates]


def test_a_sound_matrix_says_what_it_is(tmp_path):
    sound = found(tmp_path, MATRIX.replace("storage: {}", "storage: {}, perplexity: {}"), GATE)
    assert sound["summary"] == "2 cells, 4 tasks, judged by g"
    heads = "4 query heads on 2 KV heads of 16"
    assert sound["facts"][0] == (
        f"model tiny-llama: llama, 4 layers of full attention, {heads}, at most 4096 positions"
    )
    assert sound["facts"][1].startswith("data pydoc: sha256 ")
    assert (sound["problems"], sound["notes"]) == ([], [])


def test_all_complaints_of_all_files_at_once(tmp_path):
    (tmp_path / "m.yaml").write_text(
        "axis: {}\nrunners: {storag: {}}\nmodel: tiny-llama\naxes: {batch: [0]}\n"
    )
    (tmp_path / "g.yaml").write_text("checks: [{metric: zzz, at_most: 1}, {metric: itl_ms}]\n")
    result = validate(tmp_path / "m.yaml", tmp_path / "g.yaml", "--json")
    assert result.exit_code == 2
    m, g = json.loads(result.stdout)["files"]
    assert [(f["kind"], len(f["problems"])) for f in (m, g)] == [("matrix", 3), ("gate", 2)]
    assert all(str(tmp_path) in p for p in m["problems"] + g["problems"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nosuch", "neither a folder nor a .gguf file"),
        ("tiny-deepseek-v2", "refused (mla_not_validated)"),
        ("{source: tiny-llama, weights: random}", "and the model tiny-llama has random weights"),
    ],
)
def test_a_cell_that_cannot_run_is_a_problem(tmp_path, model, words):
    text = MATRIX.replace("{source: tiny-llama, plumbing: true}", model).replace("storage", "perplexity")
    assert any(words in p for p in found(tmp_path, text)["problems"])


def test_the_shape_rules_of_the_kernels_hold_without_a_gpu(tmp_path):
    """The kernels do not take head_dim 24: refused where triton was named, for a GPU that is not here."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY["tiny-llama"], "head_dim": 24}))
    model = f"model: {{source: {tmp_path}, weights: random, plumbing: true}}"
    text = MATRIX.replace("model: {source: tiny-llama, plumbing: true}", model)
    assert found(tmp_path, text)["problems"] == []
    on_gpu = found(tmp_path, text.replace("backend: auto", "backend: triton"), "", "--device", "cuda")
    assert "The Triton kernels have no head_dim 24" in on_gpu["problems"][0]
    text = text.replace("backend: auto", "backend: triton, fallback: allow")
    fallback = found(tmp_path, text, "", "--device", "cuda")
    assert fallback["problems"] == []
    assert any("triton falls back to torch" in n and "head_dim 24" in n for n in fallback["notes"])


def test_a_gpu_that_is_not_here_is_a_note(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    (note,) = found(tmp_path, MATRIX, "", "--device", "cuda")["notes"]
    assert "cells need a CUDA device" in note
    assert found(tmp_path)["notes"] == []


def test_a_context_and_what_comes_after_it_have_to_fit(tmp_path):
    text = MATRIX.replace("context: 64", "context: 4090").replace("storage: {}", "latency: {new_tokens: 8}")
    assert "needs 4097 positions" in found(tmp_path, text)["problems"][0]
    assert found(tmp_path, text.replace("new_tokens: 8", "new_tokens: 7"))["problems"] == []


def test_a_check_without_an_answer_is_a_problem_if_it_is_required(tmp_path):
    optional = "{metric: itl_ratio, at_most: 2, required: false}"
    gate = f"checks:\n  - {{metric: ppl_delta_pct, within: [-1, 1]}}\n  - {optional}\n"
    both = found(tmp_path, MATRIX, gate)
    assert len(both["problems"]) == len(both["notes"]) == 1
    assert both["problems"][0].endswith("the gate will fail.")
    assert both["notes"][0].endswith("it will not be evaluated.")


@pytest.mark.parametrize("required", ["true", "false"])
def test_data_that_is_not_here(tmp_path, required):
    text = MATRIX.replace("storage: {}", "perplexity: {data: [wikitext2]}")
    gate = (
        f"allow_partial: true\nchecks: [{{metric: ppl_delta_pct, within: [-1, 1], required: {required}}}]\n"
    )
    missing = found(tmp_path, text, gate)
    assert "data wikitext2 (test): missing" in missing["facts"]
    where = missing["problems" if required == "true" else "notes"]
    assert any("its data is missing (wikitext2)" in sentence for sentence in where)
    assert any("kvbench data fetch wikitext2" in note for note in missing["notes"])
    assert len(missing["problems"]) == (required == "true")
    # A second text that is here answers a check that names no variant.
    either = found(tmp_path, text.replace("[wikitext2]", "[wikitext2, pydoc]"), gate)
    assert either["problems"] == []


def test_data_that_is_here_is_named_by_its_digest(tmp_path):
    folder = tmp_path / "data" / "wikitext-2-raw"
    folder.mkdir(parents=True)
    (folder / "wiki.test.raw").write_bytes(b" = A = \n")
    text = MATRIX.replace("storage: {}", "perplexity: {data: [wikitext2]}")
    here = found(tmp_path, text, "", "--data-dir", str(tmp_path / "data"))
    sha = hashlib.sha256(b" = A = \n").hexdigest()
    assert f"data wikitext2 (test): sha256 {sha}" in here["facts"]
    assert here["notes"] == []
    assert validate(tmp_path / "m.yaml", "--device", "tpu").exit_code == 2
