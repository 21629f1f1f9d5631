"""Loaded models: random ones of every attention kind here; the default model where the mark allows it."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.engines.reference.load import load_model
from kvbench.errors import KvbenchError, Refused, UsageError
from kvbench.models.catalog import TINY
from kvbench.models.source import config_facts


def logits(loaded, text="A page holds sixteen tokens; the café is open."):
    """[N, V], by transformers' own attention: what is tested here is what was loaded."""
    twin = copy.deepcopy(loaded.model)
    twin.set_attn_implementation("eager")
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        return twin(ids, use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", TINY)
def test_config_and_modules_agree_on_tiny_models(name):
    loaded = load_model({"model": name}, "cpu", "float32")
    assert loaded.facts == config_facts({"model": name})
    assert loaded.random
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", TINY)
def test_random_logits_vary_and_repeat(name):
    first, again = (logits(load_model({"model": name}, "cpu", "float32")) for _ in range(2))
    assert torch.equal(first, again)
    assert 1.0 < first.std() < 10.0
    assert len(set(first.argmax(-1).tolist())) > 5


def test_random_weights_leave_the_global_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_model({"model": "tiny-llama"}, "cpu", "float32")
    assert torch.equal(torch.rand(3), expected)


def test_dtype_is_what_was_asked_for():
    loaded = load_model({"model": "tiny-llama"}, "cpu", "bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.dtype_name == "bfloat16"
    with pytest.raises(UsageError, match="dtype 'int8' is unknown; choose one of float32"):
        load_model({"model": "tiny-llama"}, "cpu", "int8")


@pytest.mark.parametrize("text", ["plain", "héllo 漢字\n\t \x00", ""])
def test_byte_tokenizer_ids_are_bytes(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (258, 256, 257)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder that transformers wrote, from a tiny model."""
    monkeypatch.setenv("KVBENCH_CACHE_DIR", str(tmp_path / "cache"))
    loaded = load_model({"model": "tiny-llama"}, "cpu", "float32")
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_the_saved_model_back(saved):
    loaded = load_model({"model": str(saved)}, "cpu", "float32")
    original = load_model({"model": "tiny-llama"}, "cpu", "float32")
    assert not loaded.random
    assert loaded.facts == original.facts
    assert loaded.sha.startswith("files:")
    assert torch.equal(logits(loaded), logits(original))


def test_random_weights_from_a_folder_need_no_weights(saved):
    (saved / "model.safetensors").unlink()
    loaded = load_model({"model": str(saved), "model_weights": "random"}, "cpu", "float32")
    assert loaded.random
    assert logits(loaded).std() > 1


def test_a_damaged_folder_is_a_sentence(saved):
    (saved / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(KvbenchError, match=r"could not be loaded .* whole transformers model"):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_a_missing_tensor_is_an_error_and_not_random_numbers(saved):
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        KvbenchError, match=r"1 missing keys, the first is model\.layers\.2\.self_attn\.k_proj\.weight"
    ):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_a_checkpoint_of_another_quantization_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    quantization = {"quant_method": "gptq", "bits": 4}
    (saved / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(UsageError, match=r"already quantized .* quant_method is gptq, expected fp8"):
        load_model({"model": str(saved)}, "cpu", "float32")


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinite_weight_is_an_error(saved, value):
    tensors = load_file(saved / "model.safetensors")
    tensors["model.norm.weight"][63] = value
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvbenchError, match=rf"model\.norm\.weight .* holds {value} at index \[63\]"):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_a_tokenizer_that_loses_text_is_an_error(saved):
    """transformers takes the class from model_type, whatever tokenizer.json holds: here every id would be lost."""
    loaded = load_model({"model": "tiny-qwen2"}, "cpu", "float32")
    loaded.model.save_pretrained(saved)
    with pytest.raises(
        KvbenchError, match=r"Qwen2Tokenizer\) turns 'The cat, 12 dogs.' into tokens that read ''"
    ):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_pickled_weights_are_never_loaded(saved):
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")
    with pytest.raises(UsageError, match="only pickled weights"):
        load_model({"model": str(saved)}, "cpu", "float32")


def test_remote_code_needs_the_matrix_to_say_so(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    (saved / "own.py").write_text("raise SystemExit('this code must not run')\n")
    with pytest.raises(KvbenchError, match="could not be loaded"):
        load_model({"model": str(saved), "trust_remote_code": False}, "cpu", "float32")


SMALL = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}  # fmt: skip
PAIR = ["sliding_attention", "full_attention"]


def from_config(folder, model_type, **changes):
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": model_type, **changes}))
    return load_model({"model": str(folder), "model_weights": "random"}, "cpu", "float32")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt2", {"num_key_value_heads": None}),
        ("opt", {"num_key_value_heads": None, "ffn_dim": 64, "word_embed_proj_dim": 64}),
        ("phi3", {}),
        ("olmo2", {}),
        ("granite", {}),
        ("smollm3", {}),
        ("gemma3_text", {"sliding_window": 16, "head_dim": 16, "layer_types": PAIR}),
        ("exaone4", {"sliding_window": 16, "layer_types": PAIR}),
        ("cohere2", {"sliding_window": 16, "layer_types": PAIR}),
    ],
)
def test_other_families_bind_as_their_config_says(tmp_path, model_type, changes):
    loaded = from_config(tmp_path, model_type, **changes)
    assert [layer.kind for layer in loaded.facts.layers] == (
        ["sliding", "full"] if changes.get("layer_types") else ["full"] * 2
    )


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bloom", {}, "attention_unsupported"),
        (
            "gpt_neo",
            {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
            "attention_unsupported",
        ),
        ("diffllama", {}, "shared_attention_module"),
        ("bert", {"is_decoder": False}, "not_causal"),
        ("falcon", {"multi_query": True}, "layers_without_attention"),
        ("mamba", {}, "layers_without_attention"),
    ],
)
def test_a10_t3_what_cannot_be_bound_is_refused_with_a_reason(tmp_path, model_type, changes, reason):
    with pytest.raises(Refused) as e:
        from_config(tmp_path, model_type, **changes)
    assert e.value.reason == reason
    assert str(e.value).endswith(".")


@pytest.mark.slow
@pytest.mark.model
def test_the_prepared_folder_holds_the_gguf_values_exactly():
    from transformers import AutoModelForCausalLM

    from kvbench.models.download import fetch

    gguf = fetch("smollm2-135m-instruct")
    direct = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    loaded = load_model({"model": "smollm2-135m-instruct"}, "cpu", "float32")
    assert loaded.facts == config_facts({"model": "smollm2-135m-instruct"})
    ours, theirs = loaded.model.state_dict(), direct.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.model
def test_the_default_model_speaks():
    loaded = load_model({"model": "smollm2-135m-instruct"}, "cpu", "float32")
    best = logits(loaded, "The capital of France is")[-1].argmax().item()
    assert loaded.tokenizer.decode([best]) == " Paris"
