"""Loaded models: random ones of every attention kind here; the default model where the mark allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvbench.engine.modulefacts import with_modules
from safetensors.torch import load_file, save_file
from torch import nn

from kvbench.catalog import TINY
from kvbench.decision import LayerFacts, ModelFacts
from kvbench.engine.bytetokenizer import byte_tokenizer
from kvbench.engine.load import LoadedModel, load_model
from kvbench.errors import KvbenchError, UsageError
from kvbench.formats import KVShape
from kvbench.models import config_facts


def logits(loaded: LoadedModel, text: str = "A page holds sixteen tokens; the café is open.") -> torch.Tensor:
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        out: torch.Tensor = loaded.model(ids, use_cache=False).logits[0].float()
    return out


@pytest.mark.parametrize("name", TINY)
def test_config_and_modules_agree_on_tiny_models(name: str) -> None:
    loaded = load_model({"model": name}, "cpu", "float32")
    assert loaded.facts == config_facts({"model": name})
    assert loaded.random
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", TINY)
def test_random_logits_vary_and_repeat(name: str) -> None:
    first, again = (logits(load_model({"model": name}, "cpu", "float32")) for _ in range(2))
    assert torch.equal(first, again)
    assert 1.0 < first.std() < 10.0
    assert len(set(first.argmax(-1).tolist())) > 5


def test_random_weights_leave_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_model({"model": "tiny-llama"}, "cpu", "float32")
    assert torch.equal(torch.rand(3), expected)


def test_dtype_is_what_was_asked_for() -> None:
    loaded = load_model({"model": "tiny-llama"}, "cpu", "bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.dtype_name == "bfloat16"
    with pytest.raises(UsageError, match="dtype 'int8' is unknown; choose one of float32"):
        load_model({"model": "tiny-llama"}, "cpu", "int8")


@pytest.mark.parametrize("text", ["plain", "héllo 漢字\n\t \x00", ""])
def test_byte_tokenizer_ids_are_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (258, 256, 257)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that transformers wrote, from a tiny model."""
    monkeypatch.setenv("KVBENCH_CACHE_DIR", str(tmp_path / "cache"))
    loaded = load_model({"model": "tiny-llama"}, "cpu", "float32")
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_the_saved_model_back(saved: Path) -> None:
    loaded = load_model({"model": str(saved)}, "cpu", "float32")
    original = load_model({"model": "tiny-llama"}, "cpu", "float32")
    assert not loaded.random
    assert loaded.facts == original.facts
    assert loaded.sha.startswith("files:")
    assert torch.equal(logits(loaded), logits(original))


def test_random_weights_from_a_folder_need_no_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    loaded = load_model({"model": str(saved), "model_weights": "random"}, "cpu", "float32")
    assert loaded.random
    assert logits(loaded).std() > 1


def test_a_damaged_folder_is_a_sentence(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(KvbenchError, match=r"could not be loaded .* whole transformers model"):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_a_missing_tensor_is_an_error_and_not_random_numbers(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        KvbenchError, match=r"1 missing keys, the first is model\.layers\.2\.self_attn\.k_proj\.weight"
    ):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_a_quantized_checkpoint_is_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (saved / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(UsageError, match=r"already quantized \(fp8\)"):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_a_tokenizer_that_loses_text_is_an_error(saved: Path) -> None:
    """transformers takes the class from model_type, whatever tokenizer.json holds: here every id would be lost."""
    loaded = load_model({"model": "tiny-qwen2"}, "cpu", "float32")
    loaded.model.save_pretrained(saved)
    with pytest.raises(
        KvbenchError, match=r"Qwen2Tokenizer\) turns 'The cat, 12 dogs.' into tokens that read ''"
    ):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_pickled_weights_are_never_loaded(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")
    with pytest.raises(UsageError, match="only pickled weights"):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_remote_code_needs_the_matrix_to_say_so(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    (saved / "own.py").write_text("raise SystemExit('this code must not run')\n")
    with pytest.raises(KvbenchError, match="could not be loaded"):
        load_model({"model": str(saved), "trust_remote_code": False}, "cpu", "float32")


class Attention(nn.Module):
    """Stands for an attention module of transformers: only the attributes that are read."""

    def __init__(self, layer_idx: int, **attributes: Any) -> None:
        super().__init__()
        self.layer_idx, self.is_causal = layer_idx, True
        for name, value in attributes.items():
            setattr(self, name, value)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module, registry: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._supports_attention_backend = registry


FACTS = ModelFacts("test", (LayerFacts("full", 4, KVShape(2, 16, 16)),), 2048)


@pytest.mark.parametrize(
    ("model", "attribute"),
    [
        (Model(Attention(0), registry=False), "attention_registry"),
        (Model(), "attention_modules"),
        (Model(Attention(0), Attention(0)), "attention_modules"),
        (Model(Attention(0), Attention(1)), "attention_modules"),
        (Model(Attention(0, is_causal=False)), "is_causal"),
        (Model(Attention(0, head_dim=32)), "head_dim"),
        (Model(Attention(0, num_key_value_groups=4)), "num_key_value_groups"),
        (Model(Attention(0, attn_logit_softcapping=50.0)), "attn_logit_softcapping"),
        (Model(Attention(0, sliding_window=24)), "sliding_window"),
    ],
)
def test_a10_t3_modules_that_contradict_the_config_are_named(model: Model, attribute: str) -> None:
    assert [name for name, _ in with_modules(model, FACTS).unsupported] == [attribute]


def test_modules_that_agree_add_nothing_and_sinks_come_from_them() -> None:
    fine = Model(
        Attention(0, head_dim=16, num_key_value_groups=2, sliding_window=None, attn_logit_softcapping=None)
    )
    assert with_modules(fine, FACTS) == FACTS
    with_sinks = with_modules(Model(Attention(0, sinks=nn.Parameter(torch.zeros(4)))), FACTS)
    assert with_sinks.layers[0].sinks
    assert with_sinks.unsupported == ()


@pytest.mark.model
def test_the_prepared_folder_holds_the_gguf_values_exactly() -> None:
    from transformers import AutoModelForCausalLM

    from kvbench.fetch import fetch

    gguf = fetch("smollm2-135m-instruct")
    direct = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    loaded = load_model({"model": "smollm2-135m-instruct"}, "cpu", "float32")
    assert loaded.facts == config_facts({"model": "smollm2-135m-instruct"})
    ours, theirs = loaded.model.state_dict(), direct.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.model
def test_the_default_model_speaks() -> None:
    loaded = load_model({"model": "smollm2-135m-instruct"}, "cpu", "float32")
    ids = loaded.tokenizer("The capital of France is")["input_ids"]
    with torch.inference_mode():
        best = loaded.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item()
    assert loaded.tokenizer.decode([best]) == " Paris"
