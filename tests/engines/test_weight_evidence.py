"""Evidence of the weights' precision: what a sound FP8 model shows, and how each fault is named."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvbench.engines.reference import kind, load
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.weights import blocks as weights
from kvbench.engines.reference.weights import fp8_linear as fp8linear
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.evidence import examine as evidence
from kvbench.evidence import weight_products as weightprobe
from kvbench.evidence.examine import ReferenceExaminer
from kvbench.evidence.products import Products
from kvbench.evidence.stored_weights import fp8_modules, weights_level
from kvbench.evidence.weight_reach import unreached
from kvbench.formats.fp8_checkpoint import Fp8Config
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import Choice, request_of, resolve
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, UNVERIFIED, VERIFIED
from kvbench.run.task.checks import another_model
from kvbench.selftest.weights import FAULTS
from kvbench_kernels.gemm import blockwise, fp8_linear
from kvbench_kernels.gemm.blockwise import dequantize_blocks, quantize_blocks
from tests.factories import checkpoints

MODULES = 7 * 4  # of tiny-llama and tiny-wide


def spec_of(weights="fp8_block128", **keys):
    own = {"model": "tiny-llama", "weights": weights, "device": "cpu", "dtype": "float32"}
    return {**CELL_KEYS, **own, **keys}


def loaded_as(weights="fp8_block128", dtype="float32", **keys):
    return load.load_model(spec_of(weights, dtype=dtype, **keys), "cpu", dtype)


def decided(loaded, weights="fp8_block128"):
    return resolve(request_of(spec_of(weights)), loaded.facts)


def maker(loaded, weights="fp8_block128", **keys):
    spec, decision = spec_of(weights, **keys), decided(loaded, weights)
    return lambda sequences, tokens: Engine(loaded, decision, spec, sequences=sequences, tokens=tokens)


def take(loaded, weights="fp8_block128"):
    """Measure a little and take the evidence."""
    make = maker(loaded, weights)
    probes = weightprobe.probe_weights(loaded, decided(loaded, weights), make)
    used = make(1, 48)
    seq = used.add()
    used.prefill(seq, list(range(40)))
    used.decode([seq], [3])
    return evidence.examine(used, *probes, reads_expected=True)


def level(found, name):
    return next(x for x in found.levels if x.name == f"{name}-weights")


def some(loaded, name="layers.2.mlp.up_proj"):
    return next((n, m) for n, m in loaded.model.named_modules() if n.endswith(name))


def is_mismatch(found, said):
    assert found.state == MISMATCH
    assert said in found.sentence


def modules_of(loaded):
    return {n: m for n, m in loaded.model.named_modules() if isinstance(m, Fp8Linear)}


def plain(module):
    """A native layer with the values that the codes stand for."""
    made = nn.Linear(module.in_features, module.out_features, bias=False).requires_grad_(False)
    made.weight.data = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
    return made


def test_fp8_weights_are_verified_at_every_level_and_a_compiler_calls_what_the_probes_call(fp8):
    found = take(fp8)
    assert (found.state, found.effective, found.effective_weights) == (VERIFIED, "native", "fp8_block128")
    own = [x.name for x in found.levels if x.name.endswith("weights")]
    assert own == [f"E{i}-weights" for i in range(1, 6)]
    assert found.precision["weights"] == "float32 and float8_e4m3fn + float32 scales"
    assert found.precision["gemm"] == "reference"
    e1, e4 = level(found, "E1").facts, level(found, "E4").facts
    assert (e1["modules"], e1["source"]) == (MODULES, "quantized on load")
    # Two forwards; q, k, v have 64, 32 and 32 rows, no whole blocks, so each is a product of its own.
    assert e4["products_a_forward"] * 2 == sum(e4["calls"].values())
    assert len(fp8.weights.shares) == MODULES  # every layer is held to its native weight when it is quantized
    assert 0 < max(fp8.weights.shares.values()) <= 1
    # Without a forward, as of the runners that measure bytes or products.
    found = evidence.examine(maker(fp8)(1, 48), reads_expected=False)
    e4 = level(found, "E4")
    assert e4.state == VERIFIED
    assert e4.sentence == "Every FP8 layer was computed in a probed decode step: reference 24 times."
    assert found.precision["gemm"] == "not measured"
    _, module = some(fp8)
    x = torch.randn(3, module.in_features)
    assert torch.equal(module(x), fp8linear.fp8_linear_op(x, module.weight, module.weight_scale_inv, None))


def test_native_weights_are_verified_native():
    found = take(loaded_as("native"), "native")
    assert (found.state, found.effective_weights) == (VERIFIED, "native")
    states = {e: level(found, e).state for e in ("E1", "E2", "E3", "E4", "E5")}
    assert states == dict.fromkeys(states, NOT_APPLICABLE) | {"E1": VERIFIED, "E4": VERIFIED}


@pytest.mark.parametrize(("held", "asked", "said"), [
    ("native", "fp8_block128", "no module was converted"),  # dropped at the hop from the spec to the loader
    ("fp8_block128", "native", "is stored as fp8_block128 (float8_e4m3fn), expected native"),
])  # fmt: skip
def test_weights_of_another_format_than_asked_for_are_named(held, asked, said):
    found = take(loaded_as(held), asked)
    assert (found.state, found.effective_weights) == (MISMATCH, held)
    assert said in level(found, "E1").sentence


# What only a run shows is in tests/selftest.
OF_A_RUN = ("gemm_measures", "gemm_leaves_a_shape_out", "gemm_wrong_at_two_rows")
NAMED = [name for name in FAULTS if not name.startswith(OF_A_RUN) and "_by_the_run" not in name]


@pytest.mark.parametrize("name", NAMED)
def test_a_fault_of_the_self_test_is_named(name):
    fault = FAULTS[name]
    with fault.inject():
        spec = spec_of(model="tiny-qwen2" if fault.cell == "fp8_biases" else "tiny-wide")
        found = take(kind.load_model(spec, "cpu", "float32"))
    said = [f"{x.name}: {x.sentence}" for x in found.levels if x.state == MISMATCH]
    assert re.search(fault.says, " ".join(said)), said


@pytest.mark.parametrize("told", [True, False])
def test_one_native_layer_is_named(fp8, told):
    """told: the loader's own list has it; else only the model itself can tell."""
    name, module = some(fp8)
    fp8.model.set_submodule(name, plain(module))
    said, effective = "is stored as native (float32), expected fp8_block128", "mixed"
    if not told:
        object.__setattr__(fp8.weights, "modules", tuple(n for n in fp8.weights.modules if n != name))
        said, effective = "was left native, beside layers that were quantized", "fp8_block128"
    found = take(fp8)
    assert f"{name} {said}" in level(found, "E1").sentence
    assert found.effective_weights == effective


@pytest.mark.parametrize("where", ["attribute", "buffer", "list", "dict", "halves", "module"])
def test_a_second_copy_of_a_weight_is_named(fp8, where):
    name, module = some(fp8)
    copy = plain(module).weight.data
    if where == "buffer":
        module.register_buffer("shadow", copy)
    else:
        halves, held = tuple(x.clone() for x in copy.split(8)), nn.ParameterList([nn.Parameter(copy)])
        made = {"attribute": copy, "list": [copy], "dict": {"w": copy}, "halves": halves, "module": held}
        module.shadow = made[where]
    sentence = level(take(fp8), "E1").sentence
    assert f"{name} holds 32768 B beside its codes, in " in sentence
    assert "its weight a second time" in sentence


def test_codes_and_scales_changed_after_loading_are_not_the_source_and_without_samples_it_is_unverified(fp8):
    name, module = some(fp8, "layers.0.mlp.up_proj")
    said = f"{name}, rows from 0: the stored {{}} differ from the source's"
    module.weight.data.view(torch.uint8)[0, 0] ^= 1
    is_mismatch(level(take(fp8), "E2"), said.format("codes"))
    module.weight.data.view(torch.uint8)[0, 0] ^= 1
    scales = module.weight_scale_inv.data.clone()
    module.weight_scale_inv.data.fill_(1.0)
    assert said.format("scales") in level(take(fp8), "E2").sentence
    module.weight_scale_inv.data.copy_(scales)
    object.__setattr__(fp8.weights, "samples", ())
    assert level(take(fp8), "E2").state == UNVERIFIED


def test_products_that_nobody_recorded_are_missed(fp8):
    _, module = some(fp8, "layers.1.mlp.down_proj")
    module.forward = lambda x: x.new_zeros(*x.shape[:-1], module.out_features)
    is_mismatch(level(take(fp8), "E4"), "times in 2 forwards")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_that_was_fp8_once_is_verified(fp8, tmp_path, dtype):
    native = loaded_as("native")
    for name, module in modules_of(fp8).items():
        native.model.get_submodule(name).weight.data.copy_(plain(module).weight)
    native.model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    native.tokenizer.save_pretrained(tmp_path)
    loaded = loaded_as(model=str(tmp_path), dtype=dtype)
    e2, e3, e5 = weightprobe.probe_weights(loaded, decided(loaded))
    assert (e2.state, e3.state, e5.state) == (VERIFIED, VERIFIED, VERIFIED), e5.sentence
    assert e5.facts["distance_from_native"] < 4 * e5.facts["distance_from_stored"]


def test_outputs_of_native_weights_are_named_where_the_tolerance_lets_them_pass(fp8, monkeypatch):
    natives = loaded_as("native").model
    weight = {m: natives.get_submodule(n).weight for n, m in modules_of(fp8).items()}
    by_codes = {m.weight.data_ptr(): torch.cat([weight[x] for x in m.group or (m,)]) for m in weight}

    def native(x, codes, scales, bias=None):
        return nn.functional.linear(x, by_codes[codes.data_ptr()], bias)

    monkeypatch.setitem(fp8_linear._PATHS, "reference", native)
    monkeypatch.setitem(weightprobe.TOLERANCE, torch.float32, 1.0)
    e5 = weightprobe.probe_weights(fp8, decided(fp8))[2]
    is_mismatch(e5, "outputs are closer to those of native weights than to those of the stored ones")


def test_a_gemm_dropped_between_decision_and_engine_is_named(fp8):
    decision = replace(decided(fp8), gemm=Choice("w8a16", "w8a16", "requested"))
    used = Engine(fp8, decision, spec_of(), sequences=1, tokens=48)
    used.gemm = "reference"
    used.prefill(used.add(), list(range(8)))
    e4 = level(evidence.examine(used, reads_expected=True), "E4")
    is_mismatch(e4, "the engine runs gemm reference, and w8a16 was resolved")


def test_biases_are_whole_after_the_probe_and_one_that_is_not_added_is_named(monkeypatch):
    loaded = loaded_as(model="tiny-qwen2")
    before = {n: p.clone() for n, p in loaded.model.named_parameters() if n.endswith("bias")}
    assert before
    assert level(take(loaded), "E3").state == VERIFIED
    assert all(torch.equal(p, before[n]) for n, p in loaded.model.named_parameters() if n in before)
    honest = blockwise.fp8_dequantize_matmul_torch
    monkeypatch.setitem(fp8_linear._PATHS, "reference", lambda *args, bias=None: honest(*args[:3]))
    is_mismatch(level(take(loaded), "E5"), "q_proj does not add its bias")


def test_a_quantizer_that_is_wrong_for_layer_and_sample_alike_is_outside_the_bound(monkeypatch):
    def cut(w):
        codes, scales = quantize_blocks(w)
        return (codes.view(torch.uint8) & 0xFE).view(torch.float8_e4m3fn), scales

    monkeypatch.setattr(fp8linear, "quantize_blocks", cut)
    monkeypatch.setattr(weights, "quantize_blocks", cut)
    is_mismatch(level(take(loaded_as()), "E2"), "times E4M3's rounding from the native weight")


def test_a_model_that_is_loaded_again_is_probed_again_and_its_storage_with_every_task(fp8):
    """The other probes are taken once a model; what is stored is looked at each time."""
    held, spec, decision = ReferenceExaminer(), spec_of(), decided(fp8)
    assert all(x.state == VERIFIED for x in held.weight_probes(fp8, decision, spec, Products()))
    again = loaded_as()
    some(again, "layers.2.mlp.down_proj")[1].weight_scale_inv.data.mul_(1.5)
    assert MISMATCH in {x.state for x in held.weight_probes(again, decision, spec, Products())}
    first = held.probes(fp8, decision, spec, Products())
    assert all(x.state == VERIFIED for x in first if x.name.endswith("-weights"))
    name, module = some(fp8, "layers.2.mlp.down_proj")
    module.weight_scale_inv.data.mul_(3)
    (e2,) = [x for x in held.probes(fp8, decision, spec, Products()) if x.name == "E2-weights"]
    assert e2.state == MISMATCH
    assert f"{name}: codes or scales are not those that the layer was loaded with" in e2.sentence


def test_native_cells_on_another_model_are_refused(fp8):
    fault = another_model(fp8, loaded_as("native", model="tiny-qwen3"))
    assert fault is not None
    assert fault.reason == "native_is_another_model"
    assert another_model(fp8, loaded_as("native")) is None


# FP8 checkpoints: held to the files themselves.


@pytest.fixture
def folder(tmp_path):
    checkpoints.fp8(tmp_path, hidden_size=192, intermediate_size=320, num_hidden_layers=2)
    return tmp_path


def test_a_layer_of_a_checkpoint_that_the_loader_dequantizes_is_named(folder, monkeypatch):
    """The loader says itself which layers it converted, and leaves this one out."""
    name, honest = "model.layers.1.mlp.up_proj", load.load_fp8
    model = checkpoints.load(folder)
    assert sorted(model.weights.stored) == sorted(model.weights.modules)
    assert weights_level(model, decided(model))[0].state == VERIFIED

    def faulty(*arguments):
        found = honest(*arguments)
        found.model.set_submodule(name, plain(found.model.get_submodule(name)))
        fields = {key: getattr(found, key) for key in found.__dataclass_fields__}
        fields["converted"] = tuple(n for n in found.converted if n != name)
        fields["checksums"] = {k: v for k, v in found.checksums.items() if k != name}
        return SimpleNamespace(**fields)

    monkeypatch.setattr(load, "load_fp8", faulty)
    model = checkpoints.load(folder)
    e1, effective = weights_level(model, decided(model))
    assert e1.state == MISMATCH
    assert f"{name} is native, and FP8 in the checkpoint's files" in e1.sentence
    assert effective == "fp8_block128"  # of what was converted; the level is what fails


def test_an_fp8_output_layer_reaches_the_logits(folder):
    """It has a row a logit, and not a row a token, where only the last logits are asked for."""
    parts = ("lm_head.weight", "lm_head.weight_scale_inv")
    checkpoints.edit(folder, lambda t: dict(zip(parts, quantize_blocks(t["lm_head.weight"]), strict=True)))
    checkpoints.configure(folder, Fp8Config().as_dict())
    model = checkpoints.load(folder)
    assert isinstance(model.model.lm_head, Fp8Linear)
    modules = list(fp8_modules(model.model))
    assert list(unreached(maker(model), modules, lambda *_: None)) == []
    hook = model.model.lm_head.register_forward_hook(lambda module, arguments, out: torch.zeros_like(out))
    assert len(list(unreached(maker(model), modules, lambda *_: None))) == len(modules)
    hook.remove()
