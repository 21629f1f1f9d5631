"""A checkpoint that says nothing of a quantization: its codes and scales are never taken for weights."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.engines.reference.weights.quantize_checkpoint import quantize_checkpoint
from kvbench.engines.reference.weights.tensor_files import check_unread
from kvbench.errors import KvbenchError
from kvbench.formats.checkpoint_scales import of_cache
from kvbench_kernels.gemm.blockwise import quantize_blocks
from tests.factories.checkpoints import edit, load, native, raw

UP = "model.layers.1.mlp.up_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj"
CACHE_SCALE = "model.layers.0.self_attn.k_scale"


def write(folder, change):
    """A checkpoint of random weights with some of its tensors changed."""
    edit(native(folder), change)
    return folder


def codes_alone(tensors):
    scale = tensors[UP].abs().amax(1, keepdim=True) / 127
    return {UP: (tensors[UP] / scale).round().to(torch.int8)}


def int8(tensors):
    return codes_alone(tensors) | {f"{UP}_scale": tensors[UP].abs().amax(1, keepdim=True) / 127}


def bytes_of_fp8(tensors):
    codes, scales = quantize_blocks(tensors[UP])
    return {UP: raw(codes), f"{UP}_scale_inv": scales}


def shorter_names(tensors):
    tensors |= codes_alone(tensors)
    for key in [key for key in tensors if key.startswith("model.")]:
        tensors[key.removeprefix("model.")] = tensors.pop(key)


REFUSED = [
    (int8, f"holds {UP} as I8, but its config.json has no quant"),
    (bytes_of_fp8, f"holds {UP} as U8, but its config.json has no quant"),
    (codes_alone, f"holds {UP} as I8, but its config.json has no quant"),
    (shorter_names, f"holds {UP.removeprefix('model.')} as I8"),
    *(({f"{K_PROJ}.{scale}": torch.ones(1)}, f"holds {K_PROJ}.{scale}, which nothing reads")
      for scale in ("weight_scale", "weight_scale_inv", "scales")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), REFUSED)
@pytest.mark.parametrize("weights", ["native", "fp8_block128"])
def test_a14_t2_integer_weights_and_scales_that_nothing_reads_are_errors(tmp_path, change, said, weights):
    with pytest.raises(KvbenchError, match=said):
        load(write(tmp_path, change), weights=weights)


def test_a14_t2_quantize_refuses_codes_and_writes_nothing(tmp_path):
    source, out = write(tmp_path / "source", int8), tmp_path / "out"
    with pytest.raises(KvbenchError, match=f"holds {UP} as I8"):
        quantize_checkpoint(str(source), out)
    assert not out.exists()


@pytest.mark.parametrize("name", [CACHE_SCALE, f"{K_PROJ}.output_scale"])
@pytest.mark.parametrize("weights", ["native", "fp8_block128"])
def test_scales_of_a_cache_are_a_warning_and_a_whole_checkpoint_has_none(tmp_path, name, weights):
    assert load(native(tmp_path), weights=weights).warnings() == ()
    edit(tmp_path, {name: torch.ones(1)})
    (warning,) = load(tmp_path, weights=weights).warnings()
    assert f"scales of a KV cache ({name})" in warning


@pytest.mark.parametrize(("key", "what"), [
    ("h.0.attn.c_attn.qweight", "error"), ("h.0.attn.c_attn.qzeros", "error"),
    ("m.up_proj.weight.absmax", "error"), ("m.up_proj.input_scale", "error"),
    ("m.k_proj.weight_scale", "error"),
    ("m.v_scale", "cache"), ("m.attn.kv_scale", "cache"), ("m.v_proj.output_scale", "cache"),
    ("mtp.layers.0.weight", "other"),
])  # fmt: skip
def test_what_is_not_read_is_told_apart(key, what):
    if what == "error":
        with pytest.raises(KvbenchError, match=f"holds {key}, which nothing reads"):
            check_unread("m", [key])
        return
    said = check_unread("m", [key])
    assert of_cache(key) == (what == "cache")
    assert said == () if what == "cache" else key in said[0]


def test_of_many_tensors_one_is_named_and_the_others_counted():
    (sentence,) = check_unread("m", ["mtp.b", "mtp.a", "mtp.c"])
    assert "no mtp.a and 2 more of" in sentence


# What a run says of it


def run(tmp_path, matrix, runners):
    (tmp_path / "m.yaml").write_text(f"name: m\n{matrix}\nrunners: {{{runners}}}\n")
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", str(tmp_path / "m.yaml"), "--out", str(out)])
    return result.exit_code, result.output, out


def test_a15_t2_a_warning_stands_in_every_record_and_first_in_the_report(tmp_path):
    folder = write(tmp_path / "model", {CACHE_SCALE: torch.ones(1)})
    matrix = f"model: {folder}\naxes: {{kv_format: [native]}}"
    code, said, out = run(tmp_path, matrix, "parity: {lengths: [1], steps: 1}")
    assert code == 0, said
    assert "About the weights." in said
    assert f"scales of a KV cache ({CACHE_SCALE})" in " ".join(said.split())
    assert "About the weights" in (out / "report.html").read_text()
    (record,) = (json.loads(path.read_text()) for path in (out / "records").glob("*.json"))
    assert "scales of a KV cache" in record["facts"]["weight_warnings"][0]


@pytest.mark.parametrize("runners", ["storage: {}", "gemm: {rows: [1]}"])
def test_a_native_model_that_is_another_one_is_refused_whatever_is_measured(tmp_path, runners):
    """Also by runners that need no native model themselves: their numbers are set against its cells."""
    matrix = "model: {source: tiny-wide, native: tiny-llama}\naxes: {weights: [native, fp8_block128]}"
    code, said, _ = run(tmp_path, matrix, runners)
    assert code == 3, said
    assert "native_is_another_model" in said
