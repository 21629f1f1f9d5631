"""FP8 checkpoints: evidence holds what is loaded to the files themselves, and to what is stored after every task."""

from types import SimpleNamespace

import torch
from torch import nn

from kvbench.engines.reference import load
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.evidence.examine import ReferenceExaminer
from kvbench.evidence.products import Products
from kvbench.evidence.stored_weights import fp8_modules, weights_level
from kvbench.evidence.weight_reach import unreached
from kvbench.formats.fp8_checkpoint import Fp8Config
from kvbench.records.record import MISMATCH, VERIFIED
from kvbench_kernels.gemm.blockwise import dequantize_blocks, quantize_blocks
from tests.engines.test_fp8_checkpoint import configure, edit, made
from tests.engines.test_weight_evidence import decided, spec_of


def checkpoint(folder):
    made(folder, hidden_size=192, intermediate_size=320, num_hidden_layers=2)
    return folder


def loaded_from(folder):
    return load.load_model({"model": str(folder), "weights": "fp8_block128"}, "cpu", "float32")


def test_a_checkpoint_s_layers_are_those_of_its_files(tmp_path):
    model = loaded_from(checkpoint(tmp_path))
    assert sorted(model.weights.stored) == sorted(model.weights.modules)
    assert weights_level(model, decided(model))[0].state == VERIFIED


def test_a_layer_that_the_loader_dequantizes_is_named(tmp_path, monkeypatch):
    """The loader says itself which layers it converted, and leaves this one out."""
    name, honest = "model.layers.1.mlp.up_proj", load.load_fp8

    def faulty(*arguments):
        found = honest(*arguments)
        module = found.model.get_submodule(name)
        plain = nn.Linear(module.in_features, module.out_features, bias=False)
        plain.weight.data = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
        found.model.set_submodule(name, plain)
        fields = {key: getattr(found, key) for key in found.__dataclass_fields__}
        fields["converted"] = tuple(n for n in found.converted if n != name)
        fields["checksums"] = {k: v for k, v in found.checksums.items() if k != name}
        return SimpleNamespace(**fields)

    folder = checkpoint(tmp_path)
    monkeypatch.setattr(load, "load_fp8", faulty)
    model = loaded_from(folder)
    level, effective = weights_level(model, decided(model))
    assert level.state == MISMATCH
    assert f"{name} is native, and FP8 in the checkpoint's files" in level.sentence
    assert effective == "fp8_block128"  # of what was converted; the level is what fails


def test_an_fp8_output_layer_reaches_the_logits(tmp_path):
    """It has a row a logit, and not a row a token, where only the last logits are asked for."""
    folder = checkpoint(tmp_path)

    def quantize_head(tensors):
        codes, scales = quantize_blocks(tensors["lm_head.weight"])
        tensors |= {"lm_head.weight": codes, "lm_head.weight_scale_inv": scales}

    edit(folder, quantize_head)
    configure(folder, Fp8Config().as_dict())
    model = loaded_from(folder)
    assert isinstance(model.model.lm_head, Fp8Linear)

    def make(sequences, tokens):
        return Engine(model, decided(model), spec_of("fp8_block128"), sequences=sequences, tokens=tokens)

    modules = list(fp8_modules(model.model))
    assert list(unreached(make, modules, lambda *_: None)) == []
    hook = model.model.lm_head.register_forward_hook(lambda module, arguments, out: torch.zeros_like(out))
    assert len(list(unreached(make, modules, lambda *_: None))) == len(modules)
    hook.remove()


def test_what_a_task_changed_shows_in_the_evidence_of_that_task():
    """The probes are taken once a model; what is stored is looked at each time."""
    spec = spec_of("fp8_block128")
    session = ReferenceExaminer()
    model = load.load_model(spec, "cpu", "float32")
    first = session.probes(model, decided(model), spec, Products())
    assert all(level.state == VERIFIED for level in first if level.name.endswith("-weights"))
    module = model.model.get_submodule("model.layers.2.mlp.down_proj")
    module.weight_scale_inv.data.mul_(3)
    (e2,) = [x for x in session.probes(model, decided(model), spec, Products()) if x.name == "E2-weights"]
    assert e2.state == MISMATCH
    assert (
        "model.layers.2.mlp.down_proj: codes or scales are not those that the layer was loaded with"
        in e2.sentence
    )
