"""Loaded models: random ones of every attention kind here; the default model where the mark allows it."""

import copy
import json

import pytest
import torch

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.engines.reference.load import load_model
from kvbench.errors import KvbenchError, Refused, UsageError
from kvbench.models.catalog import TINY
from kvbench.models.source import config_facts
from tests.factories.checkpoints import FILE, configure, edit


def load(model="tiny-llama", dtype="float32", **keys):
    return load_model({"model": str(model), **keys}, "cpu", dtype)


def logits(loaded, text="A page holds sixteen tokens; the café is open."):
    """[N, V], by transformers' own attention: what is tested here is what was loaded."""
    twin = copy.deepcopy(loaded.model)
    twin.set_attn_implementation("eager")
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        return twin(ids, use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", TINY)
def test_config_and_modules_agree_on_tiny_models_whose_logits_vary_and_repeat(name):
    loaded = load(name)
    assert loaded.facts == config_facts({"model": name})
    assert loaded.random
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    first = logits(loaded)
    assert torch.equal(first, logits(load(name)))
    assert 1.0 < first.std() < 10.0
    assert len(set(first.argmax(-1).tolist())) > 5


def test_random_weights_leave_the_global_generator_alone_and_have_the_dtype_asked_for():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    loaded = load(dtype="bfloat16")
    assert torch.equal(torch.rand(3), expected)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.dtype_name == "bfloat16"
    with pytest.raises(UsageError, match="dtype 'int8' is unknown; choose one of float32"):
        load(dtype="int8")


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
    loaded = load()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_the_saved_model_back_and_its_random_twin_needs_no_weights(saved):
    loaded, original = load(saved), load()
    assert not loaded.random
    assert loaded.facts == original.facts
    assert loaded.sha.startswith("files:")
    assert torch.equal(logits(loaded), logits(original))
    (saved / FILE).unlink()
    loaded = load(saved, model_weights="random")
    assert loaded.random
    assert logits(loaded).std() > 1


def final_norm(value):
    def spoil(folder):
        edit(folder, lambda tensors: tensors["model.norm.weight"][63:].fill_(value))

    return spoil


def pickled(folder):
    (folder / FILE).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def other_tokenizer(folder):
    """transformers takes the class from model_type, not from tokenizer.json: every id would be lost."""
    load("tiny-qwen2").model.save_pretrained(folder)


def remote_code(folder):
    configure(folder, model_type="own", auto_map={"AutoConfig": "own.Own"})
    (folder / "own.py").write_text("raise SystemExit('this code must not run')\n")


K_PROJ = "model.layers.2.self_attn.k_proj.weight"
GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(("spoil", "error", "said"), [
    (lambda f: (f / FILE).write_bytes(bytes(64)), KvbenchError, "could not be loaded .* whole transformers model"),
    (lambda f: edit(f, {K_PROJ: None}), KvbenchError, f"1 missing keys, the first is {K_PROJ}"),
    (final_norm(float("inf")), KvbenchError, r"model\.norm\.weight .* holds inf at index \[63\]"),
    (final_norm(float("-inf")), KvbenchError, r"model\.norm\.weight .* holds -inf at index \[63\]"),
    (lambda f: configure(f, GPTQ), UsageError, r"already quantized .* quant_method is gptq, expected fp8"),
    (other_tokenizer, KvbenchError, r"Qwen2Tokenizer\) turns 'The cat, 12 dogs.' into tokens that read ''"),
    (pickled, UsageError, "only pickled weights"),
    (remote_code, KvbenchError, "could not be loaded"),
])  # fmt: skip
def test_a_spoilt_folder_is_refused_in_a_sentence(saved, spoil, error, said):
    spoil(saved)
    with pytest.raises(error, match=said):
        load(saved, trust_remote_code=False)


SMALL = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}  # fmt: skip
PAIR = ["sliding_attention", "full_attention"]


def from_config(folder, model_type, **changes):
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": model_type, **changes}))
    return load(folder, model_weights="random")


@pytest.mark.parametrize(("model_type", "changes"), [
    ("gpt2", {"num_key_value_heads": None}),
    ("opt", {"num_key_value_heads": None, "ffn_dim": 64, "word_embed_proj_dim": 64}),
    *((name, {}) for name in ("phi3", "olmo2", "granite", "smollm3")),
    ("gemma3_text", {"sliding_window": 16, "head_dim": 16, "layer_types": PAIR}),
    *((name, {"sliding_window": 16, "layer_types": PAIR}) for name in ("exaone4", "cohere2")),
])  # fmt: skip
def test_other_families_bind_as_their_config_says(tmp_path, model_type, changes):
    loaded = from_config(tmp_path, model_type, **changes)
    due = ["sliding" if "layer_types" in changes else "full", "full"]
    assert [layer.kind for layer in loaded.facts.layers] == due


GLOBAL = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}


@pytest.mark.parametrize(("model_type", "changes", "reason"), [
    ("bloom", {}, "attention_unsupported"),
    ("gpt_neo", GLOBAL, "attention_unsupported"),
    ("diffllama", {}, "shared_attention_module"),
    ("bert", {"is_decoder": False}, "not_causal"),
    ("falcon", {"multi_query": True}, "layers_without_attention"),
    ("mamba", {}, "layers_without_attention"),
])  # fmt: skip
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
    loaded = load("smollm2-135m-instruct")
    assert loaded.facts == config_facts({"model": "smollm2-135m-instruct"})
    ours, theirs = loaded.model.state_dict(), direct.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.model
def test_the_default_model_speaks():
    loaded = load("smollm2-135m-instruct")
    best = logits(loaded, "The capital of France is")[-1].argmax().item()
    assert loaded.tokenizer.decode([best]) == " Paris"
