"""Tokenizers, models and contexts that the tests of the quality runners share. Everything is made here, from seeds."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvbench.corpora import corpus


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
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
