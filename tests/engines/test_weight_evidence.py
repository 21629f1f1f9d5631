"""Evidence of the weights' precision: what a sound FP8 model shows, and what each injected fault is called."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import load_model
from kvbench.engines.reference.weights import blocks as weights
from kvbench.engines.reference.weights import fp8_linear as fp8linear
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.evidence import examine as evidence
from kvbench.evidence import weight_products as weightprobe
from kvbench.evidence.examine import ReferenceExaminer
from kvbench.evidence.products import Products
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve import Choice, request_of, resolve
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, UNVERIFIED, VERIFIED
from kvbench.run.task.checks import another_model
from kvbench_kernels.gemm import blockwise, fp8_linear
from kvbench_kernels.gemm.blockwise import dequantize_blocks
from kvbench_kernels.launches import launched

LAYERS = 4  # of tiny-llama and tiny-wide
MODULES = 7 * LAYERS


def spec_of(weights, **keys):
    return {
        **CELL_KEYS,
        "model": "tiny-llama",
        "weights": weights,
        "device": "cpu",
        "dtype": "float32",
        **keys,
    }


@pytest.fixture
def fp8():
    """A tiny model with FP8 weights, that a test may spoil."""
    return load_model(spec_of("fp8_block128"), "cpu", "float32")


def decided(loaded, weights="fp8_block128"):
    return resolve(request_of(spec_of(weights)), loaded.facts)


def take(loaded, weights="fp8_block128"):
    """Measure a little and take the evidence."""
    spec, decision = spec_of(weights), decided(loaded, weights)
    probes = weightprobe.probe_weights(loaded, decision)
    used = Engine(loaded, decision, spec, sequences=1, tokens=48)
    seq = used.add()
    used.prefill(seq, list(range(40)))
    used.decode([seq], [3])
    return evidence.examine(used, *probes, reads_expected=True)


def level(found, name):
    return next(x for x in found.levels if x.name == f"{name}-weights")


def some(loaded, name="layers.2.mlp.up_proj"):
    return next((n, m) for n, m in loaded.model.named_modules() if n.endswith(name))


def modules_of(loaded):
    return {n: m for n, m in loaded.model.named_modules() if isinstance(m, Fp8Linear)}


def test_fp8_weights_are_verified_at_every_level(fp8):
    found = take(fp8)
    assert found.state == VERIFIED
    assert (found.effective, found.effective_weights) == ("native", "fp8_block128")
    assert [x.name for x in found.levels if x.name.endswith("weights")] == [
        f"{e}-weights" for e in ("E1", "E2", "E3", "E4", "E5")
    ]
    assert found.precision["weights"] == "float32 and float8_e4m3fn + float32 scales"
    assert found.precision["gemm"] == "reference"
    e1, e4 = level(found, "E1").facts, level(found, "E4").facts
    assert (e1["modules"], e1["source"]) == (MODULES, "quantized on load")
    # Two forwards; q, k, v have 64, 32 and 32 rows, which are no whole blocks, so each is a product of its own.
    assert e4["products_a_forward"] * 2 == sum(e4["calls"].values())


def test_without_a_forward_a_probed_step_shows_the_products(fp8):
    """As of the runners that measure bytes or products."""
    idle = Engine(fp8, decided(fp8), spec_of("fp8_block128"), sequences=1, tokens=48)
    found = evidence.examine(idle, reads_expected=False)
    e4 = level(found, "E4")
    assert (e4.state, e4.sentence) == (
        VERIFIED, "Every FP8 layer was computed in a probed decode step: reference 24 times.")  # fmt: skip
    assert found.precision["gemm"] == "not measured"


def test_native_weights_are_verified_native():
    found = take(load_model(spec_of("native"), "cpu", "float32"), "native")
    assert (found.state, found.effective_weights) == (VERIFIED, "native")
    assert [level(found, e).state for e in ("E1", "E2", "E3", "E4", "E5")] == [
        VERIFIED, NOT_APPLICABLE, NOT_APPLICABLE, VERIFIED, NOT_APPLICABLE]  # fmt: skip


def test_weights_that_were_never_quantized_are_native():
    """The request is dropped at the hop from the spec to the loader."""
    found = take(load_model(spec_of("native"), "cpu", "float32"))
    assert (found.state, found.effective_weights) == (MISMATCH, "native")
    assert "no module was converted" in level(found, "E1").sentence


def test_a_baseline_with_fp8_weights_is_not_native(fp8):
    found = take(fp8, "native")
    assert (found.state, found.effective_weights) == (MISMATCH, "fp8_block128")
    assert "is stored as fp8_block128 (float8_e4m3fn), expected native" in level(found, "E1").sentence


def test_one_native_layer_is_named(fp8):
    name, module = some(fp8)
    plain = nn.Linear(module.in_features, module.out_features, bias=False)
    plain.weight.data = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
    fp8.model.set_submodule(name, plain.requires_grad_(False))
    found = take(fp8)
    assert found.effective_weights == "mixed"
    assert f"{name} is stored as native (float32), expected fp8_block128" in level(found, "E1").sentence


def test_a_layer_that_the_loader_left_out_is_named(fp8):
    """The loader's own list does not have it, so only the model itself can tell."""
    name, module = some(fp8)
    plain = nn.Linear(module.in_features, module.out_features, bias=False).requires_grad_(False)
    fp8.model.set_submodule(name, plain)
    kept = tuple(n for n in fp8.weights.modules if n != name)
    object.__setattr__(fp8.weights, "modules", kept)
    sentence = level(take(fp8), "E1").sentence
    assert f"{name} was left native, beside layers that were quantized" in sentence


@pytest.mark.parametrize("where", ["attribute", "buffer", "list", "dict", "halves", "module"])
def test_a_second_copy_of_a_weight_is_named(fp8, where):
    name, module = some(fp8)
    copy = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
    held = {
        "attribute": copy, "list": [copy], "dict": {"w": copy}, "halves": tuple(x.clone() for x in copy.split(8)),
        "module": nn.ParameterList([nn.Parameter(copy)]),
    }  # fmt: skip
    if where == "buffer":
        module.register_buffer("shadow", copy)
    else:
        module.shadow = held[where]
    sentence = level(take(fp8), "E1").sentence
    assert f"{name} holds 32768 B beside its codes, in " in sentence
    assert "its weight a second time" in sentence


def shadowed(module):
    """A forward on a dequantized copy that no attribute holds."""
    copy = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)

    def forward(x):
        with fp8_linear.product(x.numel() // x.shape[-1], *copy.shape):
            launched("fp8_dequantize_matmul_torch")  # it even says what is due
        return nn.functional.linear(x, copy)

    return forward


def test_a_shadow_of_the_weight_is_not_read_from_the_store(fp8):
    name, module = some(fp8)
    module.forward = shadowed(module)
    e3 = level(take(fp8), "E3")
    assert e3.state == MISMATCH
    assert f"doubling the scales of {name} does not double its output" in e3.sentence


def ignoring_scales(x, codes, scales, bias=None):
    return blockwise.fp8_dequantize_matmul_torch(x, codes, torch.ones_like(scales), bias)


def transposed_scales(x, codes, scales, bias=None):
    return blockwise.fp8_dequantize_matmul_torch(x, codes, scales.flip(0).flip(1), bias)


def rounded_scales(x, codes, scales, bias=None):
    return blockwise.fp8_dequantize_matmul_torch(x, codes, scales.bfloat16(), bias)


@pytest.mark.parametrize(
    ("product", "name", "said"),
    [
        (ignoring_scales, "E3", "does not double its output"),
        (ignoring_scales, "E5", "away from the product with its codes and scales"),
        (transposed_scales, "E5", "away from the product with its codes and scales"),
        (rounded_scales, "E5", "away from the product with its codes and scales"),
    ],
)
def test_a_product_that_misuses_the_scales_is_named(monkeypatch, product, name, said):
    loaded = load_model(spec_of("fp8_block128", model="tiny-wide"), "cpu", "float32")
    monkeypatch.setitem(fp8_linear._PATHS, "reference", product)
    found = level(take(loaded), name)
    assert found.state == MISMATCH
    assert said in found.sentence


@pytest.fixture
def tampered(fp8):
    return fp8, *some(fp8, "layers.0.mlp.up_proj")


def test_codes_changed_after_loading_are_not_the_source(tampered):
    loaded, name, module = tampered
    module.weight.data.view(torch.uint8)[0, 0] ^= 1
    e2 = level(take(loaded), "E2")
    assert e2.state == MISMATCH
    assert f"{name}, rows from 0: the stored codes differ from the source's" in e2.sentence


def test_scales_replaced_after_loading_are_not_the_source(tampered):
    loaded, name, module = tampered
    module.weight_scale_inv.data.fill_(1.0)
    e2 = level(take(loaded), "E2")
    assert f"{name}, rows from 0: the stored scales differ from the source's" in e2.sentence


def test_without_samples_the_source_is_unverified(fp8):
    object.__setattr__(fp8.weights, "samples", ())
    assert level(take(fp8), "E2").state == UNVERIFIED


def test_products_that_nobody_recorded_are_missed(fp8):
    _, module = some(fp8, "layers.1.mlp.down_proj")
    module.forward = lambda x: x.new_zeros(*x.shape[:-1], module.out_features)
    e4 = level(take(fp8), "E4")
    assert e4.state == MISMATCH
    assert "times in 2 forwards" in e4.sentence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_that_was_fp8_once_is_verified(fp8, tmp_path, dtype):
    native = load_model(spec_of("native"), "cpu", "float32")
    for name, module in modules_of(fp8).items():
        stored = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
        native.model.get_submodule(name).weight.data.copy_(stored)
    native.model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    native.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(spec_of("fp8_block128", model=str(tmp_path), dtype=dtype), "cpu", dtype)
    e2, e3, e5 = weightprobe.probe_weights(loaded, decided(loaded))
    assert (e2.state, e3.state, e5.state) == (VERIFIED, VERIFIED, VERIFIED), e5.sentence
    assert e5.facts["distance_from_native"] < 4 * e5.facts["distance_from_stored"]


def test_outputs_of_native_weights_are_named_where_the_tolerance_lets_them_pass(monkeypatch):
    loaded = load_model(spec_of("fp8_block128"), "cpu", "float32")
    natives = load_model(spec_of("native"), "cpu", "float32").model
    weight = {m: natives.get_submodule(n).weight for n, m in modules_of(loaded).items()}
    by_codes = {m.weight.data_ptr(): torch.cat([weight[x] for x in m.group or (m,)]) for m in weight}

    def native(x, codes, scales, bias=None):
        return nn.functional.linear(x, by_codes[codes.data_ptr()], bias)

    monkeypatch.setitem(fp8_linear._PATHS, "reference", native)
    monkeypatch.setitem(weightprobe.TOLERANCE, torch.float32, 1.0)
    e5 = weightprobe.probe_weights(loaded, decided(loaded))[2]
    assert e5.state == MISMATCH
    assert "outputs are closer to those of native weights than to those of the stored ones" in e5.sentence


def test_a_gemm_dropped_between_decision_and_engine_is_named(fp8):
    decision = replace(decided(fp8), gemm=Choice("w8a16", "w8a16", "requested"))
    used = Engine(fp8, decision, spec_of("fp8_block128"), sequences=1, tokens=48)
    used.gemm = "reference"
    used.prefill(used.add(), list(range(8)))
    sentence = level(evidence.examine(used, reads_expected=True), "E4").sentence
    assert "the engine runs gemm reference, and w8a16 was resolved" in sentence


def test_biases_are_whole_after_the_probe():
    loaded = load_model(spec_of("fp8_block128", model="tiny-qwen2"), "cpu", "float32")
    before = {n: p.clone() for n, p in loaded.model.named_parameters() if n.endswith("bias")}
    assert before
    assert level(take(loaded), "E3").state == VERIFIED
    assert all(torch.equal(p, before[n]) for n, p in loaded.model.named_parameters() if n in before)


def test_the_op_is_the_module(fp8):
    """What a compiler calls is what the probes call."""
    _, module = some(fp8)
    x = torch.randn(3, module.in_features)
    assert torch.equal(module(x), fp8linear.fp8_linear_op(x, module.weight, module.weight_scale_inv, None))


def test_exchanged_layers_are_not_those_that_were_loaded(fp8):
    (_, gate), (_, up) = some(fp8, "layers.2.mlp.gate_proj"), some(fp8, "layers.2.mlp.up_proj")
    kept = gate.weight.data.clone()
    gate.weight.data.copy_(up.weight.data)
    up.weight.data.copy_(kept)
    assert level(take(fp8), "E2").state == MISMATCH


def test_a_quantizer_that_is_wrong_for_layer_and_sample_alike_is_outside_the_bound(monkeypatch):
    def cut(w):
        codes, scales = blockwise.quantize_blocks(w)
        return (codes.view(torch.uint8) & 0xFE).view(torch.float8_e4m3fn), scales

    monkeypatch.setattr(fp8linear, "quantize_blocks", cut)
    monkeypatch.setattr(weights, "quantize_blocks", cut)
    e2 = level(take(load_model(spec_of("fp8_block128"), "cpu", "float32")), "E2")
    assert e2.state == MISMATCH
    assert "times E4M3's rounding from the native weight" in e2.sentence


def test_a_bias_that_is_not_added_is_named(monkeypatch):
    loaded = load_model(spec_of("fp8_block128", model="tiny-qwen2"), "cpu", "float32")

    def lost(x, codes, scales, bias=None):
        return blockwise.fp8_dequantize_matmul_torch(x, codes, scales)

    monkeypatch.setitem(fp8_linear._PATHS, "reference", lost)
    e5 = level(take(loaded), "E5")
    assert e5.state == MISMATCH
    assert "q_proj does not add its bias" in e5.sentence


def test_a_model_that_is_loaded_again_is_probed_again(fp8):
    held = ReferenceExaminer()
    spec, decision = spec_of("fp8_block128"), decided(fp8)
    assert all(x.state == VERIFIED for x in held.weight_probes(fp8, decision, spec, Products()))
    again = load_model(spec, "cpu", "float32")
    some(again, "layers.2.mlp.down_proj")[1].weight_scale_inv.data.mul_(1.5)
    assert MISMATCH in {x.state for x in held.weight_probes(again, decision, spec, Products())}


def test_native_cells_on_another_model_are_refused(fp8):
    other = load_model(spec_of("native", model="tiny-qwen3"), "cpu", "float32")
    fault = another_model(fp8, other)
    assert fault is not None
    assert fault.reason == "native_is_another_model"
    assert another_model(fp8, load_model(spec_of("native"), "cpu", "float32")) is None


def test_every_layer_is_held_to_its_native_weight_when_it_is_quantized(fp8):
    assert len(fp8.weights.shares) == MODULES
    assert 0 < max(fp8.weights.shares.values()) <= 1


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-wide", "tiny-qwen2", "tiny-qwen3"])
def test_every_output_of_a_sound_model_reaches_the_logits(model):
    loaded = load_model(spec_of("fp8_block128", model=model), "cpu", "float32")

    def make(sequences, tokens):
        spec = spec_of("fp8_block128", model=model)
        return Engine(loaded, decided(loaded), spec, sequences=sequences, tokens=tokens)

    assert weightprobe.probe_weights(loaded, decided(loaded), make)[1].state == VERIFIED
