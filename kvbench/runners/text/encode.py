"""Text to token ids for the quality runners: BOS policy, joint encoding of prompt and answer, truncation.

Nothing is left to a tokenizer's default: text is encoded without special tokens, and the BOS that the tokenizer
would add is put in front by us, unless the text already begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.data.corpora import Corpus, corpus, first_ids
from kvbench.errors import UsageError

if TYPE_CHECKING:
    from kvbench.runners.context import Context


def head_ids(ctx: Context, wanted: int) -> list[int]:
    """The first `wanted` ids of the corpus of option `data`, tokenized as the tokenizer does by default (its own BOS policy)."""
    name = ctx.options["data"]
    return first_ids(name, corpus(name, ctx.data_dir).text, ctx.model.tokenizer, wanted)


def document_heads(text: Corpus, tokenizer: Any, documents: int, tokens: int) -> list[list[int]]:
    """At most `tokens` ids of each of so many documents, evenly over the corpus, tokenized as the tokenizer does by default.

    Raises UsageError for a corpus with fewer documents, and for one with nothing to predict (fewer than two tokens).
    """
    found = []
    for i, head in heads(text, documents, tokens):
        ids: list[int] = tokenizer(head)["input_ids"][:tokens]
        if len(ids) < 2:
            raise UsageError(
                f"Document {i} of corpus {text.name!r} has {len(ids)} tokens; give another text."
            )
        found.append(ids)
    return found


def heads(text: Corpus, documents: int, tokens: int) -> Iterator[tuple[int, str]]:
    """(index, characters enough for `tokens` tokens) of so many documents, evenly over the corpus; UsageError where it has fewer."""
    if len(text.documents) < documents:
        raise UsageError(
            f"Corpus {text.name!r} has {len(text.documents)} documents, and {documents} are asked for; ask for fewer."
        )
    for i in range(documents):
        at = i * len(text.documents) // documents
        yield at, text.document(at).strip()[: 64 * tokens]  # no tokenizer makes tokens that long


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text, no special tokens added. One call, which a fast tokenizer spreads over the cores."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return ids


def bos_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text by default: its BOS, or nothing."""
    bare, dressed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return list(dressed[:start])
    return []


NEUTRAL = "\n"  # one line end before a text says nothing about it


def neutral_ids(tokenizer: Any) -> list[int]:
    """Ids of one line end, with which a prompt is perturbed without a change of meaning; none where the tokenizer has none."""
    ids = plain_ids(tokenizer, [NEUTRAL])[0]
    return [] if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids else list(ids)


def perturbed(prompt: Sequence[int], neutral: Sequence[int], first: Sequence[int]) -> list[int]:
    """`neutral` put before the prompt, behind the BOS tokens `first` where it begins with them."""
    at = len(first) if list(prompt[: len(first)]) == list(first) else 0
    return [*prompt[:at], *neutral, *prompt[at:]]


def bos_policy(tokenizer: Any) -> str:
    """The sentence for the record."""
    ids = bos_ids(tokenizer)
    if ids:
        return f"one: the tokenizer puts {ids} first; not repeated where the prompt already begins with it"
    if tokenizer.bos_token_id is None:
        return "none: the tokenizer has no BOS token"
    return (
        f"none added by the tokenizer (its BOS token is {tokenizer.bos_token!r}, id {tokenizer.bos_token_id})"
    )


@dataclass(frozen=True)
class Pair:
    """A prompt with its answers as ids: context, and one continuation a choice. The context starts with any BOS.

    merged: a token crosses the join, so that scoring starts at an earlier token, the same for every choice.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    merged: bool


def strings(prompt: str, answers: Sequence[str]) -> list[str]:
    """The texts whose ids `join` takes: the prompt and the prompt with each answer. Spaces that end the prompt belong
    to the answer, where the tokenizer would put them.
    """
    return [prompt.rstrip(), *(prompt + answer for answer in answers)]


def join(prompt: Sequence[int], wholes: Sequence[Sequence[int]], bos: Sequence[int]) -> Pair | None:
    """Split each jointly encoded string behind the prompt's own tokens.

    A tokenizer may merge the prompt's last token with the answer ("Ans" + "wer" -> "Answer"): then the split moves
    back to the last token that all strings share, so that every choice scores the same text and has a token. Returns
    None when an answer adds no token at all, or when no token is left to condition the first one on.
    """
    shared = min(common_length(prompt, whole) for whole in wholes)
    context = (*bos, *prompt[:shared])
    if not context or any(len(whole) <= shared for whole in wholes):
        return None
    return Pair(context, tuple(tuple(whole[shared:]) for whole in wholes), shared < len(prompt))


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements two lists (or characters two texts) begin with alike."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def common_prefix(contexts: Sequence[Sequence[int]]) -> int:
    """Tokens that all contexts share, at most one less than the shortest: each keeps a token of its own to run."""
    first = contexts[0]
    shared = min(common_length(first, c) for c in contexts)
    return min(shared, min(len(c) for c in contexts) - 1)


def overflow(pair: Pair, window: int | None) -> int:
    """Tokens by which context and longest continuation exceed the window. The last token is never fed, so window + 1
    may stand: 1,108 + 1 in a window of 128 is 980 too many.
    """
    if window is None:
        return 0
    return max(0, len(pair.context) + max(len(c) for c in pair.continuations) - (window + 1))


@dataclass(frozen=True)
class Fitted:
    """What fits the window. dropped_shots: whole examples left out; dropped_tokens: then cut from the prompt's head.
    pair is None when nothing can be scored: no token to score, or no room for the question's end and its answers.
    """

    pair: Pair | None
    dropped_shots: int
    dropped_tokens: int

    @property
    def truncated(self) -> bool:
        return self.dropped_shots > 0 or self.dropped_tokens > 0


def fit(encode: Callable[[int], Pair | None], shots: int, window: int | None, bos: int) -> Fitted:
    """Drop whole examples from the last on, then as many of the prompt's first tokens as must go.

    encode(n): the pair with the first n examples (so the examples that stay are a prefix that questions share);
    bos: BOS tokens at the head, which always stay.
    """
    for kept in range(shots, -1, -1):
        pair = encode(kept)
        if pair is None:
            return Fitted(None, shots - kept, 0)
        excess = overflow(pair, window)
        if not excess:
            return Fitted(pair, shots - kept, 0)
    if pair is None or len(pair.context) - excess < max(1, bos):
        return Fitted(None, shots, excess)
    context = (*pair.context[:bos], *pair.context[bos + excess :])
    return Fitted(Pair(context, pair.continuations, pair.merged), shots, excess)
