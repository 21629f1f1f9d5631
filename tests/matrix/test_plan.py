"""What `kvbench plan` prints: fallbacks with reasons, checks that nothing answers, a missing device."""

import json

import pytest

from kvbench.errors import UsageError
from kvbench.formats.fp8_checkpoint import Fp8Config
from kvbench.gate.coverage import gate_lines, uncovered
from kvbench.gate.policy import load
from kvbench.models.catalog import CONFIGS
from kvbench.models.source import fingerprint
from kvbench.preflight.plan import plan_cell, plan_text
from kvbench.records.run import RunDir
from kvbench.run.execute import plan_tasks

CPU = {"device": "cpu", "device_reason": "no NVIDIA driver"}
CUDA = {"device": "cuda", "device_reason": "1 GPU(s) visible"}


@pytest.fixture
def planned(make, tmp_path, monkeypatch):
    """planned(matrix, environment): the lines of the plan, up to those on the gate."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def lines(text, environment=CPU):
        matrix = make(text if "axes:" in text else "axes: {batch: [1]}\n" + text)
        tasks = plan_tasks(matrix, RunDir(tmp_path / "run"), "missing")
        shown = plan_text(matrix, [plan_cell(cell) for cell in matrix.cells], tasks, environment)
        return shown.split("\n\n  required evidence (")[0].splitlines()

    return lines


def test_a_fallback_has_its_reason_and_each_reason_one_sentence(planned):
    axes = "axes: {kv_format: [native, int8_sym], batch: [1, 2]}\n"
    lines = planned(f"{axes}engine: {{backend: triton, fallback: allow, device: cpu}}")
    assert lines.count("      backend: triton -> torch, fell back (no_gpu)") == 4
    assert lines.count("        rejected triton: no_gpu") == 4
    reasons = ["no_gpu", "graph_needs_triton_on_gpu", "layer_needs_triton_on_gpu"]
    assert [line.split(":")[0].strip() for line in lines[-3:]] == reasons


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("backend: auto", "      backend: auto -> torch (no_gpu)"),
        ("decode: eager, compile: 'off'", "  run    "),
    ],
)
def test_what_auto_became_or_runs_as_asked_is_no_fallback(planned, engine, line):
    lines = planned(f"engine: {{{engine}, device: cpu}}")
    assert sum(found.startswith(line) for found in lines) == 1
    assert not any("fell back" in found for found in lines)
    assert "auto" in engine or lines[-1].startswith(line)  # without a sentence


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("metric: kv_ratio_16bit, where: {kv_format: int8_sym}, at_most: 0.52", None),
        ("metric: ppl_delta_pct, where: {variant: pydoc stream512}, within: [-1, 1]", None),
        ("metric: itl_ratio, at_most: 1", "no_runner"),
        ("metric: kv_ratio_16bit, where: {kv_format: fp8_e4m3}, at_most: 1", "no_cell"),
        ("metric: ppl_delta_pct, where: {kv_format: native}, within: [-1, 1]", "only_baselines"),
        ("metric: ppl_delta_pct, where: {variant: wikitext2 stream512}, within: [-1, 1]", "no_variant"),
        ("metric: mcq_agreement, at_least: 0.5", "partial"),
        ("metric: mcq_agreement, at_least: 0.5, required: false", "partial"),
    ],
)
def test_a_check_that_the_matrix_cannot_answer_has_its_reason(make, tmp_path, check, reason):
    runners = "runners: {storage: {}, perplexity: {data: [pydoc]}, mcq: {limit: 9}}"
    matrix = make(f"axes: {{kv_format: [native, int8_sym]}}\n{runners}")
    gate = tmp_path / "g.yaml"
    gate.write_text(f"evidence: E2\nchecks:\n  - {{{check}}}\n")
    found = list(uncovered(load(gate), matrix.cells, matrix.tasks))
    assert [(one.reason, one.check.line) for one in found] == ([(reason, 3)] if reason else [])
    for one in found:
        assert ("exit code 3" in one.sentence) == (reason == "partial" and one.check.required)
    head, *sentences = gate_lines(load(gate), matrix.cells, matrix.tasks)
    assert head == "required evidence (gate g, evidence E2): E1, E2, E1-weights, E2-weights"
    assert sentences == [one.sentence for one in found]
    gate.write_text(f"allow_partial: true\nchecks: [{{{check}}}]\n")
    again = [one.reason for one in uncovered(load(gate), matrix.cells, matrix.tasks)]
    assert again == ([] if reason in (None, "partial") else [reason])


def test_the_model_of_all_cells_is_named_once(planned):
    axes = "axes: {weights: [native, fp8_block128]}\n"
    lines = planned(f"{axes}model: {{source: tiny-wide, native: tiny-llama}}")
    counts = "m: 2 cells, 2 tasks (2 to run, 0 reused)"
    assert lines[0] == f"{counts}; model tiny-wide, native weights from tiny-llama"
    (refused,) = [line for line in lines if "tiny" in line][1:]
    assert refused.strip().startswith("refused (native_is_another_model): ")
    lines = planned("axes: {model: [tiny-wide, tiny-llama]}")
    assert lines[0] == counts
    assert sum("model=tiny" in line for line in lines) == 2


def test_a_cuda_device_that_is_not_here_is_said_first(planned):
    both = "axes: {batch: [1, 2]}\nengine: {device: cuda}"
    for text, who in ((both, "cells need"), ("axes: {device: [cpu, cuda]}", "1 of 2 cells need")):
        note, empty = planned(text)[1:3]
        assert note.startswith(f"note: {who} a CUDA device and this machine has none (no NVIDIA driver)")
        assert empty == ""
    for device, environment in (("cuda", CUDA), ("cpu", CPU), ("cpu", CUDA), ("auto", CPU)):
        lines = planned(f"engine: {{device: {device}}}", environment)
        assert not any(line.startswith("note:") for line in lines)


def test_bytes_of_weights_are_planned_by_formula(planned):
    axes = "axes: {weights: [native, fp8_block128]}\n"
    lines = planned(f"{axes}engine: {{dtype: float32}}\nmodel: smollm2-135m-instruct")
    assert sum(line.endswith(" B of KV, 538,060,032 B of weights") for line in lines) == 1
    at = next(i for i, line in enumerate(lines) if line.endswith(" B of KV, 219,585,072 B of weights"))
    parts = "106,168,320 of codes + 30,000 of scales + 113,386,752 native"
    assert lines[at + 1] == f"      weight bytes: {parts}, ratio to native 0.408105"

    unknown = {
        "tiny-gpt-oss": "of KV, weight bytes known when it is loaded",
        "a/b": "KV and weight bytes unknown",
    }
    for model, words in unknown.items():
        assert sum(words in line for line in planned(f"model: {model}")) == 1


@pytest.fixture
def checkpoint(tmp_path):
    """A folder whose config.json says FP8, with a safetensors file that holds no tensor."""
    folder = tmp_path / "fp8"
    folder.mkdir()
    config = {**CONFIGS["tiny-llama"], "quantization_config": Fp8Config(("lm_head",)).as_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_fp8_weights_that_cannot_be_loaded_as_native_are_the_cell_s_problem(planned, checkpoint):
    axes = "axes: {weights: [native, fp8_block128]}\nengine: {device: cpu}\n"
    (problem,) = [line for line in planned(f"{axes}model: {checkpoint}") if "fails at load" in line]
    assert f"The checkpoint {checkpoint} is already quantized (fp8, 128x128 blocks)" in problem
    assert f"model: {{source: {checkpoint}, native: THE_UNQUANTIZED_MODEL}}" in problem
    lines = planned(f"{axes}model: {{source: {checkpoint}, native: tiny-llama}}")
    assert not any("fails at load" in line for line in lines)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("model.safetensors.index.json",
         '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}}',
         "2.safetensors (and 1 more)"),
        ("config.json", '{"quantization_config": {"quant_method": "gptq"}}', "quant_method is gptq"),
        ("model.safetensors", "no tensors", "/model.safetensors "),
        ("model.safetensors", "", "/model.safetensors "),
        ("model.safetensors.index.json", "[]", "weight_map"),
        ("config.json", "{}", "num_hidden_layers"),
        ("config.json", '{"quantization_config": "fp8"}', "quantization_config"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_broken_is_the_cell_s_problem(planned, checkpoint, file, content, sentence):
    """The other model's cells are planned as ever."""
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "model.safetensors").rename(checkpoint / "1.safetensors")
    (checkpoint / file).write_text(content)
    lines = planned(f"axes: {{model: [{checkpoint}, tiny-llama], weights: [native, fp8_block128]}}")
    assert sum("fails at load" in line and sentence in line for line in lines) == 2
    assert sum("backend: torch -> torch" in line for line in lines) == 2


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_config_is_a_mistake_of_the_matrix(make, checkpoint, content):
    """Nothing stands for its content in a task's key."""
    (checkpoint / "config.json").unlink()
    if content:
        (checkpoint / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"m\.yaml:2:8: .*(has no config\.json|is not valid JSON)"):
        make(f"axes: {{batch: [1]}}\nmodel: {checkpoint}", fingerprint_model=fingerprint)
