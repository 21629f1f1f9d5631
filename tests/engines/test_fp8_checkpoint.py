"""FP8 checkpoints: loaded as they are, or refused by the key that is wrong; native ones quantized on load."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.engines.reference.weights import fp8_checkpoint
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.errors import KvbenchError, Refused, UsageError
from kvbench.evidence.stored_weights import source_level
from kvbench.formats.fp8_checkpoint import fp8_config
from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.models.catalog import SHAPES, TINY
from kvbench.runners.storage import weights_bytes
from kvbench_kernels.gemm.blockwise import dequantize_blocks
from tests.factories.checkpoints import FILE, configure, edit, fp8, load, logits, random_model, raw

FP8 = torch.float8_e4m3fn
BLOCK = WEIGHT_FORMATS["fp8_block128"]
DOWN = "model.layers.0.mlp.down_proj"  # [192, 320]: scales [2, 3]
UP = "model.layers.0.mlp.up_proj"  # [320, 192]: scales [3, 2]
DOWN_W, DOWN_S, UP_W, UP_S = (f"{m}.{part}" for m in (DOWN, UP) for part in ("weight", "weight_scale_inv"))
LAYER = tuple(
    f"model.layers.0.{m}_proj"
    for m in (*(f"self_attn.{p}" for p in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
)
NORM, EMBEDDING, HEAD = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight", "lm_head.weight"
EXPERT = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fp8(folder, hidden_size=192, intermediate_size=320, num_hidden_layers=1)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of an FP8 checkpoint, to be spoiled."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def fails(folder, *parts, error=KvbenchError, weights="fp8_block128"):
    with pytest.raises(error) as e:
        load(folder, weights=weights)
    message = str(e.value)
    assert [part for part in (str(folder), *parts) if part not in message] == []
    assert message.endswith(".")


def at(name, index, value):
    """A change of elements; FP8 codes are given as bytes."""

    def change(tensors):
        (raw(tensors[name]) if tensors[name].dtype == FP8 else tensors[name])[index] = value

    return change


# What is loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a14_t4_a_checkpoint_is_what_was_quantized_and_keeps_its_dtypes(whole, dtype):
    loaded = load(whole, dtype)
    facts = loaded.weights
    assert (facts.format, facts.source, facts.modules) == ("fp8_block128", "checkpoint", LAYER)
    assert (facts.warnings, facts.scale_dtypes) == ((), {"float32": 7})
    assert (loaded.dtype_name, loaded.random) == (dtype, False)
    assert facts.load_seconds > 0
    stored = load_file(whole / FILE)
    for key, tensor in loaded.model.state_dict().items():
        name, _, part = key.rpartition(".")
        own = {"weight": FP8, "weight_scale_inv": torch.float32} if name in LAYER else {}
        assert tensor.dtype == own.get(part, getattr(torch, dtype)), key
        assert not own or torch.equal(raw(tensor), raw(stored[key]))
    assert all(isinstance(loaded.model.get_submodule(name), Fp8Linear) for name in LAYER)
    assert not any(p.requires_grad or p.is_meta for p in loaded.model.parameters())


FAMILIES = [
    ("tiny-llama", {}),
    ("tiny-qwen2", {}),  # biases
    ("tiny-qwen3", {"tie_word_embeddings": True}),
    ("tiny-mistral", {}),
    ("tiny-gemma2", {"tie_word_embeddings": True}),  # scales its embedding by a buffer
    ("tiny-llama", {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": None}),
    ("tiny-llama", {"model_type": "granite"}),
]  # fmt: skip


def load_plainly(path, dtype=torch.bfloat16):
    config = AutoConfig.from_pretrained(path)
    found = fp8_config(config.to_dict(), str(path))
    return fp8_checkpoint.load_fp8(str(path), path, config, found, torch.device("cpu"), dtype, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("base", "changes"), FAMILIES)
def test_every_number_and_buffer_is_that_of_the_model(tmp_path, base, changes, dtype):
    model = fp8(tmp_path, base, dtype, **changes)
    native = AutoModelForCausalLM.from_config(model.config, dtype=dtype)  # its buffers are never cast
    loaded = load_plainly(tmp_path, dtype)
    assert loaded.converted == tuple(n for n, m in model.named_modules() if isinstance(m, Fp8Linear))
    assert torch.equal(logits(loaded.model.eval()), logits(model))
    ours, theirs = dict(loaded.model.named_buffers()), dict(native.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in theirs)


def test_the_model_computes_with_the_values_that_the_codes_stand_for(whole):
    loaded = load(whole).model
    native = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    state = {k: v for k, v in loaded.state_dict().items() if not k.endswith("scale_inv")}
    for name in LAYER:
        module = loaded.get_submodule(name)
        state[f"{name}.weight"] = dequantize_blocks(module.weight, module.weight_scale_inv)
    native.load_state_dict(state)
    torch.testing.assert_close(logits(loaded), logits(native.eval()), atol=1e-4, rtol=1e-4)


def test_a14_t1_a06_t1_two_times_a_half_is_one_and_codes_of_448_stay_448(folder):
    codes, scales = torch.full((320, 192), 2.0).to(FP8), torch.full((3, 2), 0.5)
    raw(codes)[256:258, 128], scales[2, 1] = torch.tensor([0x7E, 0xFE]), 1
    edit(folder, {UP_W: codes, UP_S: scales})
    module = load(folder).model.get_submodule(UP)
    values = dequantize_blocks(module.weight, module.weight_scale_inv)
    assert values[:256].unique().tolist() == module(torch.eye(192)[:1]).unique().tolist() == [1.0]
    assert raw(module.weight.data)[256:258, 128].tolist() == [0x7E, 0xFE]
    assert values[256:258, 128].tolist() == [448, -448]


def test_a14_t2_both_names_of_a_scale_are_read_and_old_rotary_frequencies_passed_over(folder):
    expected = logits(load(folder).model)
    edit(folder, lambda t: {f"{m}.weight_scale": t.pop(f"{m}.weight_scale_inv") for m in LAYER[::2]})
    edit(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})  # as transformers does
    assert torch.equal(logits(load(folder).model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a14_t3_narrow_scales_are_widened_exactly(folder, dtype):
    edit(folder, {UP_S: torch.full((3, 2), 1 / 448).to(dtype)})
    loaded = load(folder)
    module = loaded.model.get_submodule(UP)
    assert loaded.weights.scale_dtypes == {"float32": 6, str(dtype).removeprefix("torch."): 1}
    assert module.weight_scale_inv.dtype == dtype
    exact = module.weight.float() * torch.tensor(1 / 448).to(dtype).float()
    assert torch.equal(dequantize_blocks(module.weight, module.weight_scale_inv), exact)


# Scales and codes


SCALES_OF_DOWN, NO_SCALE = f"The scales {DOWN_S} ", "a scale is a finite number above 0"
BLOCK_1_1, TWO_CODES, EXTRA_BIAS = (1, slice(1, 3)), ([3, 7], [5, 0]), "model.layers.9.mlp.up_proj.bias"
UNUSED = [f"{UP}.input_scale", "lm_head.weight_scale_inv", "model.layers.0.self_attn.k_proj.scale"]
NAMES = f"{UP_S} {{}} {UP}.weight_scale for the FP8 weight {UP_W}"
LIST_IT = ("its config.json says FP8", f"List {UP} in modules_to_not_convert")
OTHER_FLOAT = "of the 8-bit floats only F8_E4M3 is read"
WRONG = [
    (lambda t: {f"{UP}.weight_scale": t[UP_S]}, "both " + NAMES.format("and")),
    ({UP_S: None}, "neither " + NAMES.format("nor")),
    (dict.fromkeys([*UNUSED, "model.extra"], torch.ones(1)),
     f"holds 3 scales that nothing in the model uses: {', '.join(sorted(UNUSED))}."),
    (lambda t: {UP_W: t[UP_W].bfloat16(), UP_S: None}, f"holds {UP_W} as BF16, without a scale", *LIST_IT),
    (lambda t: {UP_W: t[UP_W].bfloat16()}, f"holds {UP_W} as BF16, with a scale", *LIST_IT),
    *(({DOWN_S: torch.ones(shape)}, SCALES_OF_DOWN, f"have shape {shape}; a weight [192, 320] in 128x128 "
       "blocks has scales [2, 3]. Export the checkpoint again.")
      for shape in ([1, 3], [3, 3], [2, 2], [3, 2], [6], [])),
    *((at(DOWN_S, BLOCK_1_1, scale), SCALES_OF_DOWN, f"hold {scale} at index [1, 1]; {NO_SCALE}")
      for scale in (math.nan, math.inf, -0.5)),
    (at(DOWN_S, BLOCK_1_1, 3e38), "at index [1, 1]; times 448, the largest code, it overflows float32"),
    (at(DOWN_S, BLOCK_1_1, 0.0), "hold 0.0 at index [1, 1]; the codes of that block are not all 0"),
    ({DOWN_S: torch.full((2, 3), 120, dtype=torch.uint8)},
     SCALES_OF_DOWN, "are uint8; accepted are float32, bfloat16,"),
    (at(UP_W, TWO_CODES, 0x7F), f"The tensor {UP_W} ", "holds nan at index [3, 5] (the byte 0x7F, "),
    (at(UP_W, TWO_CODES, 0xFF), f"The tensor {UP_W} ", "holds nan at index [3, 5] (the byte 0xFF, "),
    (lambda t: {UP_W: t[UP_W][:319]}, f"tensor {UP_W} ", "has shape [319, 192], the model wants [320, 192]"),
    (lambda t: {UP_W: t[UP_W].float().to(torch.float8_e5m2)}, OTHER_FLOAT),
    (lambda t: {UP_W: t[UP_W].float().to(torch.float8_e4m3fnuz)}, OTHER_FLOAT),
    ({EXPERT: torch.zeros(4, 4).to(FP8), f"{EXPERT}_scale_inv": torch.ones(1, 1)},
     f"holds {EXPERT} as FP8", "of no plain nn.Linear of the model", "no experts of a mixture"),
    (lambda t: {EMBEDDING: t[EMBEDDING].to(FP8)}, f"holds {EMBEDDING} as FP8", "it is of a Embedding"),
    ({EXTRA_BIAS: torch.ones(3)}, f"holds 1 tensors that nothing in the model uses: {EXTRA_BIAS}"),
    ({NORM: torch.ones(191)}, f"The tensor {NORM} ", "has shape [191], the model wants [192]"),
    ({NORM: torch.ones(192, dtype=torch.int8)}, "is I8, the model wants floating-point numbers"),
    ({NORM: torch.full((192,), float("nan"))}, f"The tensor {NORM} ", "holds nan at index [0]"),
    ({NORM: None}, f"has 1 missing keys, the first is {NORM}"),
    ({DOWN_W: None}, f"has no {DOWN_W}; fetch it again"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a06_t4_a13_t4_a14_t2_a15_t2_a_tensor_that_does_not_fit_is_named(folder, wrong):
    edit(folder, wrong[0])
    fails(folder, *wrong[1:])


def test_a03_t1_a_zero_scale_over_zero_codes_is_read(folder):
    def change(t):
        raw(t[DOWN_W])[128:192, 128:256] = 0
        raw(t[DOWN_W])[150, 200] = 0x80  # -0
        t[DOWN_S][1, 1] = 0

    edit(folder, change)
    assert logits(load(folder).model).isfinite().all()
    edit(folder, lambda t: raw(t[DOWN_W])[191, 255].fill_(1))
    fails(folder, "hold 0.0 at index [1, 1]")


@pytest.mark.parametrize("as_bytes", [False, True], ids=["e8m0", "uint8"])
def test_scales_of_one_byte_become_float32_exactly_and_it_is_said(folder, as_bytes):
    exponents = torch.arange(100, 160, 10, dtype=torch.uint8).view(2, 3)
    edit(folder, {DOWN_S: exponents if as_bytes else exponents.view(torch.float8_e8m0fnu)})
    if as_bytes:
        configure(folder, {"scale_fmt": "ue8m0"})
        scales = [f"{m}.weight_scale_inv" for m in LAYER[:-1]]
        fails(folder, f"The scales {scales[0]} ", "at index [0, 0]; scale_fmt ue8m0 says powers of two")
        edit(folder, lambda t: {name: t[name].log2().ceil().exp2() for name in scales})
    loaded = load(folder)
    held = loaded.model.get_submodule(DOWN).weight_scale_inv
    assert held.dtype == torch.float32
    assert torch.equal(held.double(), 2.0 ** (exponents.double() - 127))
    assert loaded.weights.scale_dtypes == {"float32": 6, "float8_e8m0fnu": 1}
    assert loaded.weights.warnings == (
        "1 scale tensors of the checkpoint are powers of two in one byte (E8M0); they are held as float32, "
        "which is exact.",
    )


# Config and files must agree


def test_a15_t1_the_list_decides_by_whole_names(tmp_path):
    """A name that is the beginning of another one: `up` is nothing here, `up_proj` is one layer's."""
    fp8(tmp_path)
    skipped = "model.layers.1.mlp.up_proj"
    weight, scales = f"{skipped}.weight", f"{skipped}.weight_scale_inv"
    edit(tmp_path, lambda t: {weight: dequantize_blocks(t[weight], t.pop(scales))})
    configure(tmp_path, {"modules_to_not_convert": ["layers.1.mlp.up_proj", "lm_head", "layers.1.mlp.up"]})
    loaded = load(tmp_path)
    assert len(loaded.weights.modules) == 27
    assert skipped not in loaded.weights.modules
    assert type(loaded.model.get_submodule(skipped)) is nn.Linear
    (warning,) = loaded.weights.warnings
    assert warning.startswith("modules_to_not_convert lists 'layers.1.mlp.up',")


def test_a15_t2_the_list_of_native_modules_and_the_files_must_agree(folder):
    configure(folder, {"modules_to_not_convert": ["lm_head", "up_proj"]})
    fails(folder, f"holds {UP_W} as FP8", f"modules_to_not_convert in its config.json lists {UP} as native")
    configure(folder, {"modules_to_not_convert": ["lm_head", "language_model.lm_head", "model.norm"]})
    (warning,) = load(folder).weights.warnings
    assert "'language_model.lm_head'" in warning
    configure(folder, {"weight_block_size": None})
    fails(folder, "weight_block_size is not given, expected [128, 128]", error=UsageError)


def test_8_bit_floats_without_a_quantization_config_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    edit(folder, lambda t: dict.fromkeys([k for k in t if k.endswith("scale_inv")]))
    for weights in ("native", "fp8_block128"):
        said = ("holds model.", " as F8_E4M3, but its config.json has no quantization_config")
        fails(folder, *said, weights=weights)


# Output layer and ties


def test_a15_t3_a_tied_head_is_the_embedding_and_counts_once_also_where_the_files_hold_both(tmp_path):
    fp8(tmp_path, tie_word_embeddings=True)
    loaded = load_plainly(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert "lm_head" not in loaded.converted
    shapes = [m.weight.shape for m in loaded.model.modules() if isinstance(m, Fp8Linear)]
    linears = sum(weight_bytes(BLOCK, n, k, "bfloat16").total for n, k in shapes)
    assert weights_bytes(loaded.model) == linears + 9 * 64 * 2 + 258 * 64 * 2  # norms, embedding
    expected = logits(loaded.model.eval())
    edit(tmp_path, lambda t: {HEAD: t[EMBEDDING]})
    assert torch.equal(logits(load_plainly(tmp_path).model.eval()), expected)
    edit(tmp_path, {EMBEDDING: None})  # transformers takes the head for both then
    again = load_plainly(tmp_path).model.eval()
    assert torch.equal(logits(again), expected)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    edit(tmp_path, lambda t: {EMBEDDING: t[HEAD] + 1})
    fails(tmp_path, "lm_head.weight and model.embed_tokens.weight with different values")
    edit(tmp_path, lambda t: {HEAD: t[HEAD].to(FP8), "lm_head.weight_scale_inv": torch.ones(3, 1)})
    configure(tmp_path, {"modules_to_not_convert": []})
    fails(tmp_path, "holds lm_head.weight as FP8, but its config.json ties it to model.embed")


def test_a_head_is_fp8_only_where_the_files_say_so(folder):
    configure(folder, {"modules_to_not_convert": []})
    assert load(folder).weights.modules == LAYER  # as the files hold it, with an empty list
    layer = Fp8Linear.quantized(nn.Linear(192, 258, bias=False))
    edit(folder, {HEAD: layer.weight.data, "lm_head.weight_scale_inv": layer.weight_scale_inv.data})
    loaded = load(folder)
    assert loaded.weights.modules == (*LAYER, "lm_head")
    assert isinstance(loaded.model.lm_head, Fp8Linear)
    configure(folder, {"modules_to_not_convert": ["lm_head"]})
    fails(folder, "holds lm_head.weight as FP8", "modules_to_not_convert", "lists lm_head as native")


def test_a15_t4_the_native_remainder_counts_in_the_ratio():
    """Qwen3-8B: embedding and output layer stay bfloat16, so FP8 layers do not halve the whole."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**SHAPES["qwen3-8b-shape"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = [m.weight.shape for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    native = sum(p.numel() * 2 for p in model.parameters())
    fp8 = native - sum(n * k * 2 - weight_bytes(BLOCK, n, k, "bfloat16").total for n, k in shapes)
    assert (native, fp8, round(fp8 / native, 4)) == (16_381_470_720, 9_437_399_040, 0.5761)


# Files


def test_shards_are_read_by_their_index(folder):
    expected, tensors = logits(load(folder).model), load_file(folder / FILE)
    names = sorted(tensors)
    (folder / FILE).rename(folder / "consolidated.safetensors")  # the same once more: not listed
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for i in range(2):
        shard = {k: tensors[k] for k in names[i::2]}
        save_file(shard, folder / f"model-{i}.safetensors", metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(logits(load(folder).model), expected)
    save_file({names[0]: tensors[names[0]]}, folder / "model-2.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map | {"more": "model-2.safetensors"}}))
    fails(folder, f"hold the tensor {names[0]}")
    (folder / "model-1.safetensors").unlink()
    fails(folder, "index.json names model-1.safetensors, which is not there; fetch the checkpoint again")


def test_a_truncated_file_is_a_sentence(folder):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])
    fails(folder, "could not be loaded (SafetensorError")


@pytest.mark.slow
def test_a_hub_model_is_loaded_from_its_snapshot(whole, tmp_path):
    """From the hub cache on the disk; what huggingface_hub reads at import needs a process of its own."""
    repo = tmp_path / "models--owner--name"
    shutil.copytree(whole, repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    code = (
        "from kvbench.engines.reference.load import load_model\n"
        "m = load_model({'model': 'owner/name', 'weights': 'fp8_block128'}, 'cpu', 'bfloat16')\n"
        "print(m.weights.source, len(m.weights.modules), m.sha)"
    )
    own = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["checkpoint", "7", f"hub:owner/name@main:{'0' * 40}"]


# What a cell asks for


def test_an_fp8_checkpoint_is_not_native(whole):
    advice = f"model: {{source: {whole}, native: THE_UNQUANTIZED_MODEL}}, or write weights: fp8_block128."
    said = ("already quantized (fp8, 128x128 blocks)", " cannot be loaded as weights: native", advice)
    fails(whole, *said, error=UsageError, weights="native")


def test_a_native_model_is_quantized_on_load_where_that_is_asked(tmp_path):
    native, fp8 = (load("tiny-llama", weights=w) for w in ("native", "fp8_block128"))
    assert (native.weights.format, native.weights.source, native.weights.modules) == ("native", "native", ())
    assert (fp8.weights.format, fp8.weights.source) == ("fp8_block128", "quantized on load")
    assert len(fp8.weights.modules) == 28
    assert {n for n, m in fp8.model.named_modules() if isinstance(m, Fp8Linear)} == set(fp8.weights.modules)
    native.model.save_pretrained(tmp_path)
    native.tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert (again.weights.source, again.random, fp8.random) == ("quantized on load", False, True)
    assert torch.equal(logits(again.model), logits(fp8.model))
    codes, held = (m.model.get_submodule("model.layers.2.self_attn.o_proj").weight for m in (fp8, native))
    scale = held.abs().amax().item() / 448
    assert (dequantize_blocks(codes, torch.tensor([[scale]])) - held).abs().max() <= held.abs().max() / 16


def test_only_the_layers_linear_modules_are_quantized():
    """`gate` beside experts chooses between them and stays native; without experts it is a layer."""

    def block(*experts):
        made = nn.Module()
        made.gate, made.gate_proj = nn.Linear(8, 2, bias=False), nn.Linear(8, 8)
        made.norm, made.experts_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        if experts:
            made.experts = nn.ModuleList(experts)
        return made

    model = nn.Module()
    model.layers, model.head = nn.ModuleList([block(nn.Linear(8, 8)), block()]), nn.Linear(8, 3)
    biases = [block.gate_proj.bias for block in model.layers]
    due = ("layers.0.gate_proj", "layers.0.experts.0", "layers.1.gate", "layers.1.gate_proj")
    assert quantize_model(model, "m").modules == due
    assert type(model.head) is type(model.layers[0].gate) is nn.Linear
    assert type(model.layers[1].gate) is Fp8Linear
    assert [b.gate_proj.bias.data_ptr() for b in model.layers] == [b.data_ptr() for b in biases]


def test_a_weight_that_is_not_finite_is_not_quantized():
    model = random_model()
    model.model.layers[1].mlp.up_proj.weight.data[5, 7] = float("inf")
    said = r"model\.layers\.1\.mlp\.up_proj\.weight of the checkpoint m holds inf at index \[5, 7\]"
    with pytest.raises(KvbenchError, match=said):
        quantize_model(model, "m")


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4}
ELSEWHERE = [
    (TINY["tiny-gpt-oss"], "model.layers.0.mlp.experts.gate_up_proj is a weight of a GptOssExperts"),
    (TINY["tiny-deepseek-v2"], "model.layers.1.mlp.experts.gate_up_proj is a weight of a DeepseekV2Experts"),
    (GPT2, "transformer.h.0.attn.c_attn.weight is a weight of a Conv1D"),
]


@pytest.mark.parametrize(("config", "what"), ELSEWHERE)
def test_a_model_whose_weights_are_elsewhere_is_refused_by_name(config, what):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with pytest.raises(Refused, match=f"cannot be quantized to fp8_block128: {re.escape(what)}"):
        quantize_model(model, "m")
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())


@pytest.mark.parametrize("spoil", [torch.ones_like, torch.fliplr, lambda s: s.bfloat16().float()])
def test_scales_spoilt_between_file_and_layer_are_not_the_checkpoint_s(folder, monkeypatch, spoil):
    honest = fp8_checkpoint.read_scales

    def spoilt(*args):
        scales, dtype = honest(*args)
        return spoil(scales), dtype

    assert source_level(load(folder)).state == "verified"
    monkeypatch.setattr(fp8_checkpoint, "read_scales", spoilt)
    e2 = source_level(load(folder))
    assert e2.state == "mismatch"
    assert "the stored scales differ from the source's" in e2.sentence
