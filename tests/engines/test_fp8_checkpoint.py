"""Checkpoints with FP8 weights: loaded as they are, or refused with the key that is wrong; native ones quantized on load."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.engines.reference.weights import fp8_checkpoint as fp8checkpoint
from kvbench.engines.reference.weights.fp8_checkpoint import load_fp8, read_scales
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.engines.reference.weights.tensor_files import TensorFiles
from kvbench.errors import KvbenchError, Refused, UsageError
from kvbench.evidence import stored_weights as weightevidence
from kvbench.formats.fp8_checkpoint import Fp8Config, fp8_config
from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.models.catalog import SHAPES, TINY
from kvbench.runners.storage import weights_bytes
from kvbench_kernels.gemm.blockwise import dequantize_blocks

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
DOWN = "model.layers.0.mlp.down_proj"  # [192, 320]: scales [2, 3]
UP = "model.layers.0.mlp.up_proj"  # [320, 192]: scales [3, 2]
LAYER = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"] + [
    f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")
]


def made(
    folder: Path, base: str = "tiny-llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """A random model, quantized and written to `folder` as an FP8 checkpoint; the model."""
    config = AutoConfig.for_model(**{**TINY[base], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    quantize_model(model, base)
    model.config.quantization_config = Fp8Config(("lm_head",)).as_dict()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    del model.config.quantization_config
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    made(folder, hidden_size=192, intermediate_size=320, num_hidden_layers=1)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of an FP8 checkpoint, to be spoiled."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def load(folder: Path, dtype: str = "float32", weights: str = "fp8_block128") -> LoadedModel:
    return load_model({"model": str(folder), "weights": weights}, "cpu", dtype)


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    change(tensors)
    tensors = {k: v.clone() for k, v in tensors.items()}  # two names of one tensor would not be saved
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, quantization: dict[str, Any] | None = None, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(quantization or {})
    (folder / "config.json").write_text(json.dumps(config | changes))


def fails(folder: Path, *parts: str, error: type[KvbenchError] = KvbenchError) -> None:
    with pytest.raises(error) as e:
        load(folder)
    message = str(e.value)
    assert str(folder) in message
    assert [part for part in parts if part not in message] == []
    assert message.endswith(".")


def logits(model: Any) -> Tensor:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out: Tensor = model(torch.arange(20)[None], use_cache=False).logits
    return out


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


# What is loaded


def test_a_checkpoint_is_what_was_quantized(whole: Path) -> None:
    loaded = load(whole)
    facts = loaded.weights
    assert (facts.format, facts.source, facts.modules, facts.warnings) == (
        "fp8_block128",
        "checkpoint",
        tuple(LAYER),
        (),
    )
    assert facts.scale_dtypes == {"float32": 7}
    assert facts.load_seconds > 0
    stored = load_file(whole / "model.safetensors")
    for name in LAYER:
        module = loaded.model.get_submodule(name)
        assert isinstance(module, Fp8Linear)
        assert torch.equal(raw(module.weight.data), raw(stored[f"{name}.weight"]))
        assert torch.equal(module.weight_scale_inv, stored[f"{name}.weight_scale_inv"])
    assert not any(p.requires_grad or p.is_meta for p in loaded.model.parameters())
    assert not loaded.random


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("tiny-llama", {}),
    ("tiny-qwen2", {}),  # biases
    ("tiny-qwen3", {"tie_word_embeddings": True}),
    ("tiny-mistral", {}),
    ("tiny-gemma2", {"tie_word_embeddings": True}),  # scales its embedding by a buffer
    ("tiny-llama", {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": None}),  # two rotary embeddings
    ("tiny-llama", {"model_type": "granite"}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("base", "changes"), FAMILIES, ids=lambda v: str(v.get("model_type", "")) if isinstance(v, dict) else v
)
def test_every_number_and_buffer_is_that_of_the_model(
    tmp_path: Path, base: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = made(tmp_path, base, dtype, **changes)
    native = AutoModelForCausalLM.from_config(model.config, dtype=dtype)  # its buffers are never cast
    config = AutoConfig.from_pretrained(tmp_path)
    fp8 = fp8_config(config.to_dict(), base)
    assert fp8 is not None
    loaded = load_fp8(base, tmp_path, config, fp8, CPU, dtype, False)
    assert loaded.converted == tuple(n for n, m in model.named_modules() if isinstance(m, Fp8Linear))
    assert torch.equal(logits(loaded.model.eval()), logits(model))
    ours, theirs = dict(loaded.model.named_buffers()), dict(native.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in theirs)


def test_the_model_computes_with_the_values_that_the_codes_stand_for(whole: Path) -> None:
    loaded = load(whole).model
    native = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    state = {k: v for k, v in loaded.state_dict().items() if not k.endswith("scale_inv")}
    for name in LAYER:
        module = loaded.get_submodule(name)
        state[f"{name}.weight"] = dequantize_blocks(module.weight, module.weight_scale_inv)
    native.load_state_dict(state)
    torch.testing.assert_close(logits(loaded), logits(native.eval()), atol=1e-4, rtol=1e-4)


def test_a14_t1_two_times_a_half_is_one(folder: Path) -> None:
    def change(t: Tensors) -> None:
        t[f"{UP}.weight"] = torch.full((320, 192), 2.0).to(FP8)
        t[f"{UP}.weight_scale_inv"].fill_(0.5)

    edit(folder, change)
    module = load(folder).model.get_submodule(UP)
    assert dequantize_blocks(module.weight, module.weight_scale_inv).unique().tolist() == [1.0]
    assert module(torch.eye(192)[:1]).unique().tolist() == [1.0]


def test_a14_t2_both_names_of_a_scale_are_read(folder: Path) -> None:
    expected = logits(load(folder).model)
    edit(
        folder, lambda t: t.update({f"{m}.weight_scale": t.pop(f"{m}.weight_scale_inv") for m in LAYER[::2]})
    )
    assert torch.equal(logits(load(folder).model), expected)


def test_a14_t2_neither_or_both_names_are_an_error(folder: Path) -> None:
    edit(folder, lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale_inv"]}))
    fails(folder, f"both {UP}.weight_scale_inv and {UP}.weight_scale for the FP8 weight {UP}.weight")
    edit(folder, lambda t: (t.pop(f"{UP}.weight_scale"), t.pop(f"{UP}.weight_scale_inv")))
    fails(folder, f"neither {UP}.weight_scale_inv nor {UP}.weight_scale for the FP8 weight {UP}.weight")


def test_a14_t2_a_scale_that_nothing_uses_is_an_error(folder: Path) -> None:
    extra = [f"{UP}.input_scale", "model.layers.0.self_attn.k_proj.scale", "lm_head.weight_scale_inv"]
    edit(folder, lambda t: t.update(dict.fromkeys(extra, torch.ones(1)) | {"model.extra": torch.ones(1)}))
    fails(folder, f"holds 3 scales that nothing in the model uses: {', '.join(sorted(extra))}.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a14_t3_narrow_scales_are_widened_exactly(folder: Path, dtype: torch.dtype) -> None:
    def change(t: Tensors) -> None:
        t[f"{UP}.weight_scale_inv"] = torch.full((3, 2), 1 / 448).to(dtype)

    edit(folder, change)
    loaded = load(folder)
    module = loaded.model.get_submodule(UP)
    assert loaded.weights.scale_dtypes == {"float32": 6, str(dtype).removeprefix("torch."): 1}
    assert module.weight_scale_inv.dtype == dtype
    exact = module.weight.float() * torch.tensor(1 / 448).to(dtype).float()
    assert torch.equal(dequantize_blocks(module.weight, module.weight_scale_inv), exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a14_t4_codes_and_scales_keep_their_dtypes(whole: Path, dtype: str) -> None:
    loaded = load(whole, dtype)
    for key, tensor in loaded.model.state_dict().items():
        name, _, part = key.rpartition(".")
        expected = (
            {"weight": FP8, "weight_scale_inv": torch.float32}[part]
            if name in LAYER
            else getattr(torch, dtype)
        )
        assert tensor.dtype == expected, key
    assert loaded.dtype_name == dtype
    stored = load_file(whole / "model.safetensors")[f"{UP}.weight_scale_inv"]
    assert torch.equal(loaded.model.get_submodule(UP).weight_scale_inv, stored)


# Scales


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ([4, 16], lambda s: s[:4]),
        ([6, 16], lambda s: torch.cat([s, s[:1]])),
        ([5, 15], lambda s: s[:, :15]),
        ([16, 5], lambda s: s.T),
        ([80], lambda s: s.flatten()),
        ([], lambda s: s[0, 0]),
    ],
)
def test_a13_t4_scales_of_another_shape_are_an_error(
    tmp_path: Path, shape: list[int], change: Callable[[Tensor], Tensor]
) -> None:
    codes = torch.ones(576, 2048).to(FP8)
    for scales in (torch.ones(5, 16), change(torch.ones(5, 16))):
        save_file({"s": scales.clone().contiguous()}, tmp_path / "model.safetensors")
        with TensorFiles(tmp_path) as files:
            if scales.shape == (5, 16):
                assert torch.equal(read_scales("m", files, "s", codes, Fp8Config())[0], scales)
                continue
            with pytest.raises(KvbenchError) as e:
                read_scales("m", files, "s", codes, Fp8Config())
        assert str(e.value) == (
            f"The scales s of the checkpoint m have shape {shape}; a weight [576, 2048] in 128x128 blocks has scales "
            "[5, 16]. Export the checkpoint again."
        )


def test_a13_t4_transposed_scales_are_named_with_their_tensor(folder: Path) -> None:
    key = f"{DOWN}.weight_scale_inv"
    edit(folder, lambda t: t.update({key: t[key].T.contiguous()}))
    fails(
        folder,
        f"The scales {key} ",
        "have shape [3, 2]; a weight [192, 320] in 128x128 blocks has scales [2, 3].",
    )


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "hold nan at index [1, 1]; a scale is a finite number above 0"),
        (float("inf"), "hold inf at index [1, 1]; a scale is a finite number above 0"),
        (3e38, "at index [1, 1]; times 448, the largest code, it overflows float32"),
        (-0.5, "hold -0.5 at index [1, 1]; a scale is a finite number above 0"),
        (0.0, "hold 0.0 at index [1, 1]; the codes of that block are not all 0"),
    ],
)
def test_a_scale_that_is_none_is_named_with_its_index(folder: Path, value: float, why: str) -> None:
    def change(t: Tensors) -> None:
        t[f"{DOWN}.weight_scale_inv"][1, 1] = value
        t[f"{DOWN}.weight_scale_inv"][1, 2] = value

    edit(folder, change)
    fails(folder, f"The scales {DOWN}.weight_scale_inv ", why)


def test_a03_t1_a_zero_scale_over_zero_codes_is_read(folder: Path) -> None:
    def change(t: Tensors) -> None:
        raw(t[f"{DOWN}.weight"])[128:192, 128:256] = 0
        raw(t[f"{DOWN}.weight"])[150, 200] = 0x80  # -0
        t[f"{DOWN}.weight_scale_inv"][1, 1] = 0

    edit(folder, change)
    loaded = load(folder)
    assert logits(loaded.model).isfinite().all()
    edit(folder, lambda t: raw(t[f"{DOWN}.weight"])[191, 255].fill_(1))
    fails(folder, "hold 0.0 at index [1, 1]")


@pytest.mark.parametrize("as_bytes", [False, True], ids=["e8m0", "uint8"])
def test_scales_of_one_byte_become_float32_exactly_and_it_is_said(folder: Path, as_bytes: bool) -> None:
    exponents = torch.arange(100, 160, 10, dtype=torch.uint8).view(2, 3)
    scales = exponents if as_bytes else exponents.view(torch.float8_e8m0fnu)
    edit(folder, lambda t: t.update({f"{DOWN}.weight_scale_inv": scales}))
    if as_bytes:
        fails(
            folder,
            f"The scales {DOWN}.weight_scale_inv ",
            "are uint8; accepted are float32, bfloat16, float16, float8_e8m0fnu",
        )
        edit(folder, lambda t: t.update({f"{m}.weight_scale_inv": t[f"{m}.weight_scale_inv"].log2().ceil().exp2()
                                         for m in LAYER[:-1]}))  # fmt: skip
        configure(folder, {"scale_fmt": "ue8m0"})
    loaded = load(folder)
    held = loaded.model.get_submodule(DOWN).weight_scale_inv
    assert held.dtype == torch.float32
    assert torch.equal(held.double(), 2.0 ** (exponents.double() - 127))
    assert loaded.weights.scale_dtypes == {"float32": 6, "float8_e8m0fnu": 1}
    assert loaded.weights.warnings == (
        "1 scale tensors of the checkpoint are powers of two in one byte (E8M0); they are held as float32, which is exact.",
    )


def test_scales_that_are_no_powers_of_two_disagree_with_ue8m0(folder: Path) -> None:
    configure(folder, {"scale_fmt": "ue8m0"})
    fails(
        folder,
        f"The scales {LAYER[0]}.weight_scale_inv ",
        "at index [0, 0]; scale_fmt ue8m0 says powers of two",
    )


# Codes


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a06_t4_a_code_that_is_nan_is_named_with_its_index(folder: Path, byte: int) -> None:
    def change(t: Tensors) -> None:
        raw(t[f"{UP}.weight"])[3, 5] = byte
        raw(t[f"{UP}.weight"])[7, 0] = byte

    edit(folder, change)
    fails(folder, f"The tensor {UP}.weight ", f"holds nan at index [3, 5] (the byte 0x{byte:02X}, ")


def test_a06_t1_codes_of_448_stay_448(folder: Path) -> None:
    def change(t: Tensors) -> None:
        raw(t[f"{UP}.weight"])[:2, 0] = torch.tensor([0x7E, 0xFE])
        t[f"{UP}.weight_scale_inv"].fill_(1.0)

    edit(folder, change)
    module = load(folder).model.get_submodule(UP)
    assert raw(module.weight.data)[:2, 0].tolist() == [0x7E, 0xFE]
    assert dequantize_blocks(module.weight, module.weight_scale_inv)[:2, 0].tolist() == [448, -448]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_other_8_bit_floats_are_refused(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].float().to(dtype)}))
    fails(folder, f"The tensor {UP}.weight ", "of the 8-bit floats only F8_E4M3 is read")


def test_codes_of_another_shape_are_an_error(folder: Path) -> None:
    edit(folder, lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][:319]}))
    fails(folder, f"The tensor {UP}.weight ", "has shape [319, 192], the model wants [320, 192]")


# Config and files must agree


def test_a15_t1_the_list_decides_by_whole_names(tmp_path: Path) -> None:
    """A name of the list that is the beginning of another one: `up` is nothing here, `up_proj` is one layer's."""
    made(tmp_path)
    skipped = "model.layers.1.mlp.up_proj"

    def change(t: Tensors) -> None:
        t[f"{skipped}.weight"] = dequantize_blocks(
            t[f"{skipped}.weight"], t.pop(f"{skipped}.weight_scale_inv")
        )

    edit(tmp_path, change)
    configure(tmp_path, {"modules_to_not_convert": ["layers.1.mlp.up_proj", "lm_head", "layers.1.mlp.up"]})
    loaded = load(tmp_path)
    assert len(loaded.weights.modules) == 27
    assert skipped not in loaded.weights.modules
    assert type(loaded.model.get_submodule(skipped)) is nn.Linear
    assert [w.split(",")[0] for w in loaded.weights.warnings] == [
        "modules_to_not_convert lists 'layers.1.mlp.up'"
    ]


@pytest.mark.parametrize("with_scale", [False, True])
def test_a15_t2_a_native_tensor_for_a_converted_layer_is_an_error(folder: Path, with_scale: bool) -> None:
    def change(t: Tensors) -> None:
        t[f"{UP}.weight"] = t[f"{UP}.weight"].to(torch.bfloat16)
        if not with_scale:
            del t[f"{UP}.weight_scale_inv"]

    edit(folder, change)
    fails(folder, f"holds {UP}.weight as BF16, {'with' if with_scale else 'without'} a scale", "its config.json says FP8",
          f"List {UP} in modules_to_not_convert")  # fmt: skip


def test_a15_t2_an_fp8_tensor_for_a_module_on_the_list_is_an_error(folder: Path) -> None:
    configure(folder, {"modules_to_not_convert": ["lm_head", "up_proj"]})
    fails(
        folder, f"holds {UP}.weight as FP8", f"modules_to_not_convert in its config.json lists {UP} as native"
    )


def test_a15_t2_a_pattern_that_matches_nothing_reaches_the_caller(folder: Path) -> None:
    configure(folder, {"modules_to_not_convert": ["lm_head", "language_model.lm_head", "model.norm"]})
    warnings = load(folder).weights.warnings
    assert len(warnings) == 1
    assert "'language_model.lm_head'" in warnings[0]


def test_8_bit_floats_without_a_quantization_config_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    edit(folder, lambda t: [t.pop(k) for k in list(t) if k.endswith("scale_inv")])
    for weights in ("native", "fp8_block128"):
        with pytest.raises(
            KvbenchError, match=r"holds model\S+ as F8_E4M3, but its config.json has no quantization_config"
        ):
            load(folder, weights=weights)


def test_another_quantization_is_refused_before_anything_is_read(folder: Path) -> None:
    configure(folder, {"weight_block_size": None})
    fails(folder, "weight_block_size is not given, expected [128, 128]", error=UsageError)


def test_experts_and_fused_modules_are_refused_by_name(folder: Path) -> None:
    key = "model.layers.0.mlp.experts.0.gate_proj"
    extra = {f"{key}.weight": torch.zeros(4, 4).to(FP8), f"{key}.weight_scale_inv": torch.ones(1, 1)}
    edit(folder, lambda t: t.update(extra))
    fails(
        folder, f"holds {key}.weight as FP8", "of no plain nn.Linear of the model", "no experts of a mixture"
    )
    edit(folder, lambda t: [t.pop(k) for k in extra])
    edit(folder, lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(FP8)}))
    fails(folder, "holds model.embed_tokens.weight as FP8", "it is of a Embedding")


# Output layer and ties


def load_tied(path: Path) -> Any:
    config = AutoConfig.from_pretrained(path)
    fp8 = fp8_config(config.to_dict(), str(path))
    assert fp8 is not None
    return load_fp8(str(path), path, config, fp8, CPU, torch.bfloat16, False)


def test_a15_t3_a_tied_head_shares_the_embedding_and_counts_once(tmp_path: Path) -> None:
    made(tmp_path, tie_word_embeddings=True)
    loaded = load_tied(tmp_path)
    embedding = loaded.model.model.embed_tokens.weight
    assert loaded.model.lm_head.weight is embedding
    assert "lm_head" not in loaded.converted
    fp8 = WEIGHT_FORMATS["fp8_block128"]
    shapes = [m.weight.shape for m in loaded.model.modules() if isinstance(m, Fp8Linear)]
    linears = sum(weight_bytes(fp8, n, k, "bfloat16").total for n, k in shapes)
    norms = 9 * 64 * 2
    assert weights_bytes(loaded.model) == linears + norms + 258 * 64 * 2


def test_a15_t3_a_tied_head_that_the_files_hold_too_must_be_the_embedding(tmp_path: Path) -> None:
    made(tmp_path, tie_word_embeddings=True)
    expected = logits(load_tied(tmp_path).model.eval())
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    edit(tmp_path, lambda t: t.update({head: t[embedding].clone()}))
    assert torch.equal(logits(load_tied(tmp_path).model.eval()), expected)
    edit(tmp_path, lambda t: t.pop(embedding))  # transformers takes the head for both then
    loaded = load_tied(tmp_path).model.eval()
    assert torch.equal(logits(loaded), expected)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    edit(tmp_path, lambda t: t.update({embedding: t[head] + 1}))
    with pytest.raises(
        KvbenchError, match=r"lm_head\.weight and model\.embed_tokens\.weight with different values"
    ):
        load_tied(tmp_path)
    edit(tmp_path, lambda t: t.update({head: t[head].to(FP8), "lm_head.weight_scale_inv": torch.ones(3, 1)}))
    configure(tmp_path, {"modules_to_not_convert": []})
    with pytest.raises(
        KvbenchError, match=r"holds lm_head\.weight as FP8, but its config\.json ties it to model\.embed"
    ):
        load_tied(tmp_path)


def test_a_head_is_fp8_only_where_the_files_say_so(folder: Path) -> None:
    configure(folder, {"modules_to_not_convert": []})
    assert load(folder).weights.modules == tuple(LAYER)  # as the files hold it, with an empty list

    def change(t: Tensors) -> None:
        layer = Fp8Linear.quantized(nn.Linear(192, 258, bias=False))
        t["lm_head.weight"], t["lm_head.weight_scale_inv"] = layer.weight.data, layer.weight_scale_inv.data

    edit(folder, change)
    loaded = load(folder)
    assert loaded.weights.modules == (*LAYER, "lm_head")
    assert isinstance(loaded.model.lm_head, Fp8Linear)
    configure(folder, {"modules_to_not_convert": ["lm_head"]})
    fails(
        folder,
        "holds lm_head.weight as FP8, but modules_to_not_convert in its config.json lists lm_head as native",
    )


def test_a15_t4_the_native_remainder_counts_in_the_ratio() -> None:
    """Qwen3-8B: embedding and output layer stay bfloat16, so FP8 layers do not halve the whole."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**SHAPES["qwen3-8b-shape"]), dtype=torch.bfloat16
        )
    linears = [m for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    fp8 = WEIGHT_FORMATS["fp8_block128"]
    native = sum(p.numel() * 2 for p in model.parameters())
    saved = sum(
        m.weight.numel() * 2 - weight_bytes(fp8, m.out_features, m.in_features, "bfloat16").total
        for m in linears
    )
    assert native == 16_381_470_720
    assert native - saved == 9_437_399_040
    assert round((native - saved) / native, 4) == 0.5761


# Everything else must be there, and nothing more


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(folder: Path) -> None:
    norm = "model.layers.0.input_layernorm.weight"
    edit(folder, lambda t: t.update({"model.layers.9.mlp.up_proj.bias": torch.ones(3)}))
    fails(folder, "holds 1 tensors that nothing in the model uses: model.layers.9.mlp.up_proj.bias")
    edit(folder, lambda t: (t.pop("model.layers.9.mlp.up_proj.bias"), t.update({norm: torch.ones(191)})))
    fails(folder, f"The tensor {norm} ", "has shape [191], the model wants [192]")
    edit(folder, lambda t: t.update({norm: torch.ones(192, dtype=torch.int8)}))
    fails(folder, f"The tensor {norm} ", "is I8, the model wants floating-point numbers")
    edit(folder, lambda t: t.update({norm: torch.full((192,), float("nan"))}))
    fails(folder, f"The tensor {norm} ", "holds nan at index [0]")
    edit(folder, lambda t: t.pop(norm))
    fails(folder, f"has 1 missing keys, the first is {norm}")
    edit(folder, lambda t: t.pop(f"{DOWN}.weight"))
    fails(folder, f"has no {DOWN}.weight; fetch it again")


def test_old_rotary_frequencies_are_passed_over_as_transformers_does(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load(folder).weights.modules == tuple(LAYER)


def test_shards_are_read_by_their_index(folder: Path) -> None:
    expected = logits(load(folder).model)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").rename(
        folder / "consolidated.safetensors"
    )  # the same once more: not listed
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({k: tensors[k] for k in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(logits(load(folder).model), expected)
    save_file({names[0]: tensors[names[0]]}, folder / "model-2.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map | {"more": "model-2.safetensors"}}))
    fails(folder, f"hold the tensor {names[0]}")
    (folder / "model-1.safetensors").unlink()
    fails(folder, "index.json names model-1.safetensors, which is not there; fetch the checkpoint again")


def test_a_truncated_file_is_a_sentence(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    fails(folder, "could not be loaded (SafetensorError")


@pytest.mark.slow
def test_a_hub_model_is_loaded_from_its_snapshot(whole: Path, tmp_path: Path) -> None:
    """From the hub cache, as it lies on the disk; what huggingface_hub reads at import needs a process of its own."""
    repo = tmp_path / "models--owner--name"
    shutil.copytree(whole, repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    code = (
        "from kvbench.engines.reference.load import load_model\n"
        "m = load_model({'model': 'owner/name', 'weights': 'fp8_block128'}, 'cpu', 'bfloat16')\n"
        "print(m.weights.source, len(m.weights.modules), m.sha)"
    )
    env = {
        **os.environ,
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["checkpoint", "7", f"hub:owner/name@main:{'0' * 40}"]


# What a cell asks for


def test_an_fp8_checkpoint_is_not_native(whole: Path) -> None:
    with pytest.raises(
        UsageError, match=r"already quantized \(fp8, 128x128 blocks\).* cannot be loaded as weights: native"
    ) as e:
        load(whole, weights="native")
    assert (
        f"model: {{source: {whole}, native: THE_UNQUANTIZED_MODEL}}, or write weights: fp8_block128."
        in str(e.value)
    )


def test_a_native_model_is_quantized_on_load_where_that_is_asked(tmp_path: Path) -> None:
    spec = {"model": "tiny-llama"}
    native, fp8 = (
        load_model(spec, "cpu", "float32"),
        load_model({**spec, "weights": "fp8_block128"}, "cpu", "float32"),
    )
    assert (native.weights.format, native.weights.source, native.weights.modules) == ("native", "native", ())
    assert (fp8.weights.format, fp8.weights.source, len(fp8.weights.modules)) == (
        "fp8_block128",
        "quantized on load",
        28,
    )
    assert {n for n, m in fp8.model.named_modules() if isinstance(m, Fp8Linear)} == set(fp8.weights.modules)
    native.model.save_pretrained(tmp_path)
    native.tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert (again.weights.source, again.random, fp8.random) == ("quantized on load", False, True)
    assert torch.equal(logits(again.model), logits(fp8.model))
    name = "model.layers.2.self_attn.o_proj"
    codes, held = (m.model.get_submodule(name).weight for m in (fp8, native))
    scale = held.abs().amax().item() / 448
    assert (dequantize_blocks(codes, torch.tensor([[scale]])) - held).abs().max() <= held.abs().max() / 16


def test_only_the_layers_linear_modules_are_quantized() -> None:
    """`gate` beside experts chooses between them and stays native; without experts it is a layer like any other."""

    class Block(nn.Module):
        def __init__(self, *experts: nn.Module) -> None:
            super().__init__()
            self.gate, self.gate_proj = nn.Linear(8, 2, bias=False), nn.Linear(8, 8)
            self.norm, self.experts_norm = nn.LayerNorm(8), nn.LayerNorm(8)
            if experts:
                self.experts = nn.ModuleList(experts)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList([Block(nn.Linear(8, 8)), Block()]), nn.Linear(8, 3)

    model = Model()
    biases = [block.gate_proj.bias for block in model.layers]
    assert quantize_model(model, "m").modules == (
        "layers.0.gate_proj", "layers.0.experts.0", "layers.1.gate", "layers.1.gate_proj")  # fmt: skip
    assert type(model.head) is nn.Linear
    assert type(model.layers[0].gate) is nn.Linear
    assert type(model.layers[1].gate) is Fp8Linear
    assert [b.gate_proj.bias.data_ptr() for b in model.layers] == [b.data_ptr() for b in biases]


def test_a_weight_that_is_not_finite_is_not_quantized() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY["tiny-llama"]), dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[5, 7] = float("inf")
    with pytest.raises(
        KvbenchError,
        match=re.escape("model.layers.1.mlp.up_proj.weight of the checkpoint m holds inf at index [5, 7]"),
    ):
        quantize_model(model, "m")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (TINY["tiny-gpt-oss"], "model.layers.0.mlp.experts.gate_up_proj is a weight of a GptOssExperts"),
        (TINY["tiny-deepseek-v2"], "model.layers.1.mlp.experts.gate_up_proj is a weight of a DeepseekV2Experts"),
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4}, "transformer.h.0.attn.c_attn.weight is a weight of a Conv1D"),
    ],
)  # fmt: skip
def test_a_model_whose_weights_are_elsewhere_is_refused_by_name(config: dict[str, Any], what: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with pytest.raises(Refused, match=f"cannot be quantized to fp8_block128: {re.escape(what)}"):
        quantize_model(model, "m")
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())


@pytest.mark.parametrize(
    "spoil", [torch.ones_like, lambda s: s.flip(0).flip(1), lambda s: s.bfloat16().float()]
)
def test_scales_spoilt_between_file_and_layer_are_not_the_checkpoint_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]
) -> None:
    honest = fp8checkpoint.read_scales

    def spoilt(*args: Any) -> tuple[Tensor, str]:
        scales, dtype = honest(*args)
        return spoil(scales), dtype

    assert weightevidence.source_level(load(folder)).state == "verified"
    monkeypatch.setattr(fp8checkpoint, "read_scales", spoilt)
    e2 = weightevidence.source_level(load(folder))
    assert e2.state == "mismatch"
    assert "the stored scales differ from the source's" in e2.sentence
