"""Bytes of weights before loading equal the formula after it, from config or headers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.engines.reference.load import load_model
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.errors import UsageError
from kvbench.formats.fp8_checkpoint import Fp8Config
from kvbench.models import weight_bytes as weightsizes
from kvbench.models.catalog import ALIASES, CONFIGS, TINY
from kvbench.models.source import config_facts
from kvbench.models.weight_bytes import weight_sizes
from kvbench.runners.storage import formula
from tests.runners.test_storage import shape_of

FORMATS = ("native", "fp8_block128")
TINY_DENSE = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"]
DENSE = [*TINY_DENSE, "tiny-wide", "qwen3-8b-shape", "smollm2-135m-instruct"]


def before_loading(model, weights, **keys):
    spec = {"model": str(model), "weights": weights, "dtype": "bfloat16", **keys}
    return weight_sizes(spec, config_facts(spec), weights)


def parts(sizes):
    assert sizes is not None
    return {"payload": sizes.payload, "scales": sizes.scales, "native": sizes.native}


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", DENSE)
def test_a_config_of_a_known_family_says_all(name, weights):
    config = CONFIGS[name] if name in CONFIGS else ALIASES[name].config
    sizes = before_loading(name, weights)
    assert parts(sizes) == formula(shape_of(dict(config)), weights)
    assert sizes is not None
    assert sizes.ratio == sizes.total / sum(formula(shape_of(dict(config)), "native").values())


@pytest.mark.parametrize("name", TINY_DENSE)
def test_a_config_that_is_silent_on_ties_has_none(tmp_path, name):
    config = {key: value for key, value in TINY[name].items() if key != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = parts(before_loading(tmp_path, "native", model_weights="random"))
    assert found == formula(shape_of(config), "native")


@pytest.mark.parametrize("name", sorted({*TINY} - {*DENSE}))
def test_a_config_of_another_family_says_nothing(name):
    assert before_loading(name, "native") is None


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"mlp_bias": True}, {"intermediate_size": None}]
)
def test_neither_does_one_with_tensors_of_its_own(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps({**TINY["tiny-llama"], **changes}))
    assert before_loading(tmp_path, "native", model_weights="random") is None


def saved(folder, name, fp8=False, **changes):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY[name], **changes}))
    if fp8:
        quantize_model(model.requires_grad_(False), name)
        model.config.quantization_config = Fp8Config(("lm_head",)).as_dict()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def loaded(folder, weights):
    return formula(load_model({"model": str(folder), "weights": weights}, "cpu", "bfloat16"), weights)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny-llama", {"attention_bias": True}),
        ("tiny-wide", {"tie_word_embeddings": True}),
        ("tiny-gemma2", {}),
    ],
)
def test_headers_of_native_weights_say_all(tmp_path, name, changes, weights):
    folder = saved(tmp_path, name, **changes)
    assert parts(before_loading(folder, weights)) == loaded(folder, weights)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_headers_of_fp8_weights_say_all(tmp_path, scales):
    folder = saved(tmp_path, "tiny-wide", fp8=True)
    file = folder / "model.safetensors"
    tensors = {k: t.to(scales) if k.endswith("scale_inv") else t for k, t in load_file(file).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, file, metadata={"format": "pt"})
    assert parts(before_loading(folder, "fp8_block128")) == loaded(folder, "fp8_block128")


def test_a_tied_output_layer_that_the_file_holds_too_counts_once(tmp_path):
    folder = saved(tmp_path, "tiny-llama", tie_word_embeddings=True)
    once = parts(before_loading(folder, "native"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert parts(before_loading(folder, "native")) == once


def test_experts_are_not_quantized(tmp_path):
    """Loading refuses them."""
    folder = saved(tmp_path, "tiny-llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(8, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert before_loading(folder, "fp8_block128") is None
    assert before_loading(folder, "native") is not None


@pytest.mark.parametrize(("beside", "linear"), [("mlp.other", 3), ("mlp.experts.0", 2)])
def test_a_gate_is_a_router_only_beside_experts(beside, linear):
    """As the loader has it: a dense layer of that name is quantized."""
    names = ("mlp.gate", "mlp.up_proj", f"{beside}.down_proj")
    tensors = {f"model.layers.0.{name}.weight": ("F32", (8, 8)) for name in names}
    assert len(weightsizes._linear(tensors)) == linear


def test_an_fp8_checkpoint_whose_files_are_not_here_has_no_known_sizes(tmp_path, monkeypatch):
    config = {**TINY["tiny-llama"], "quantization_config": Fp8Config().as_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("kvbench.models.source.cached_file", lambda *_: tmp_path / "config.json")
    assert before_loading("owner/name", "fp8_block128") is None
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "not-fetched-yet"}}')
    assert before_loading("owner/name", "fp8_block128") is None
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert before_loading("owner/name", "fp8_block128") == before_loading("tiny-llama", "fp8_block128")


@pytest.mark.parametrize("cut", [slice(0), slice(5), slice(40), slice(-1)])
def test_a_file_that_is_not_whole_is_named(tmp_path, cut):
    folder = saved(tmp_path, "tiny-llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[slice(cut.stop)])
    with pytest.raises(UsageError, match=r"model\.safetensors is not a complete safetensors file; fetch the"):
        before_loading(folder, "native")
