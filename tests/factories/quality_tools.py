"""Tokenizers, models and contexts that the tests of the quality runners share. Everything is made here, from seeds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvbench.data.corpora import corpus
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import Request, resolve
from kvbench.matrix.runners import RUNNERS
from kvbench.runners.context import Context, Measurement

if TYPE_CHECKING:
    from kvbench.engines.reference.load import LoadedModel


@cache
def bpe_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 800 ids trained on CPython's own topics: " A" and "A" are different tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters = "Answer: A Answer: B Answer: C Answer: D " * 200
    tokenizer.train_from_iterator([corpus("pydoc", None).text[:100_000], letters], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def word_tokenizer(words: list[str], **special: str) -> Any:
    """One token a word of `words`, longest match first, no spaces added: for joins that merge on purpose."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<unk>", *special.values(), *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def tiny_model(max_context: int = 1024, uniform: bool = False, tokenizer: Any = None) -> LoadedModel:
    """A seeded two-layer llama with the tokenizer above. uniform: the head is zero, so every next token has the same probability."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvbench.engines.reference.binding import bind
    from kvbench.engines.reference.load import LoadedModel
    from kvbench.models.attention_facts import facts_from_config

    tokenizer = tokenizer or bpe_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=max_context, initializer_range=0.3,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if uniform:
        model.lm_head.weight.zero_()
    facts = facts_from_config(config.to_dict())
    cpu = torch.device("cpu")
    return LoadedModel(
        model=model, tokenizer=tokenizer, facts=facts, binding=bind(model, facts, cpu), name="tiny", sha="tiny",
        device=cpu, dtype=torch.float32, random=True,
    )  # fmt: skip


def context(
    model: LoadedModel, runner: str, *, kv_format: str = "native", baseline: Measurement | None = None,
    data_dir: Path | None = None, spec: dict[str, Any] | None = None, **options: Any,
) -> Context:  # fmt: skip
    """A runner's context on real engines. baseline: what the same runner measured on native."""
    from kvbench.engines.reference.engine import Engine

    cell = {**CELL_KEYS, "kv_format": kv_format, "device": "cpu", "dtype": "float32", **(spec or {})}
    declared = RUNNERS[runner].options
    values = {n: o.default[0] if o.fans_out else o.default for n, o in declared.items()} | options
    assert set(values) == set(declared)

    def factory(name: str) -> Callable[..., Any]:
        decision = resolve(Request(name, "native", "torch", "refuse"), model.facts)
        return lambda **capacity: Engine(model, decision, cell, **capacity)

    record = SimpleNamespace(samples=baseline.samples, facts=baseline.facts) if baseline else None
    return Context(
        spec=cell, options=values, variant="", model=model, engine=factory(kv_format), native=factory("native"),
        emulator=factory("native"),
        baseline=record, is_baseline=record is None, data_dir=data_dir,
    )  # fmt: skip


def reference_logprobs(model: LoadedModel, ids: list[int]) -> Any:
    """log p of each id but the first by transformers alone: one plain forward, float64 log-softmax; [len - 1]."""
    import torch

    model.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = model.model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
    finally:
        model.model.set_attn_implementation("kvbench")
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
