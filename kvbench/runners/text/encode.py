"""Text to token ids for the quality runners: BOS policy, joint encoding of prompt and answer, truncation.

Nothing depends on a tokenizer's defaults: text is encoded without special tokens, and this module adds the
BOS that the tokenizer would add, unless the text already begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.data.corpora import Corpus, corpus, evenly, first_ids
from kvbench.errors import UsageError

if TYPE_CHECKING:
    from kvbench.runners.context import Context


def head_ids(ctx: Context, wanted: int) -> list[int]:
    """The first `wanted` ids of the corpus of option `data`, with the tokenizer's own BOS policy."""
    name = ctx.options["data"]
    return first_ids(name, corpus(name, ctx.data_dir).text, ctx.model.tokenizer, wanted)


def document_heads(text: Corpus, tokenizer: Any, documents: int, tokens: int) -> list[list[int]]:
    """At most `tokens` ids of each of `documents` documents, evenly over the corpus, with the tokenizer's BOS
    policy.

    Raises UsageError for a corpus with fewer documents, and for a document with fewer than two tokens.
    """
    found = []
    for i, head in heads(text, documents, tokens):
        ids: list[int] = tokenizer(head)["input_ids"][:tokens]
        if len(ids) < 2:
            raise UsageError(f"Document {i} of corpus {text.name!r} has {len(ids)} tokens; use another text.")
        found.append(ids)
    return found


def heads(text: Corpus, documents: int, tokens: int) -> Iterator[tuple[int, str]]:
    """(index, characters enough for `tokens` tokens) of `documents` documents, evenly over the corpus."""
    if len(text.documents) < documents:
        raise UsageError(
            f"Corpus {text.name!r} has {len(text.documents)} documents, but {documents} are needed; ask for "
            "fewer."
        )
    for at in evenly(len(text.documents), documents):
        yield at, text.document(at).strip()[: 64 * tokens]  # no token is longer than 64 characters


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text without special tokens. One call, which a fast tokenizer runs on all cores."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return ids


def bos_ids(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer adds before a text by default: its BOS, or none."""
    bare, dressed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return list(dressed[:start])
    return []


def end_ids(tokenizer: Any, config: Any) -> list[int]:
    """The tokens that end a text, by the tokenizer and a config of the model, sorted."""
    found: set[int] = set()
    for holder in (tokenizer, config):
        ids = getattr(holder, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(found)


NEUTRAL = "\n"  # one line end before a prompt does not change its meaning


def neutral_ids(tokenizer: Any) -> list[int]:
    """Ids of one line end; none where the tokenizer has no token for it."""
    ids = plain_ids(tokenizer, [NEUTRAL])[0]
    return [] if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids else list(ids)


def perturbed(prompt: Sequence[int], neutral: Sequence[int], first: Sequence[int]) -> list[int]:
    """The prompt with `neutral` before it, after the BOS tokens `first` where it begins with them."""
    at = len(first) if list(prompt[: len(first)]) == list(first) else 0
    return [*prompt[:at], *neutral, *prompt[at:]]


def bos_policy(tokenizer: Any) -> str:
    """How BOS is handled, as a sentence for the record."""
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
    """Ids of a prompt with its answers: context (with any BOS), and one continuation for each choice.

    merged: a token spans prompt and answer, so scoring starts at an earlier token, the same for every choice.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    merged: bool


def strings(prompt: str, answers: Sequence[str]) -> list[str]:
    """The prompt, and the prompt with each answer. Spaces that end the prompt belong to the answer."""
    return [prompt.rstrip(), *(prompt + answer for answer in answers)]


def join(prompt: Sequence[int], wholes: Sequence[Sequence[int]], bos: Sequence[int]) -> Pair | None:
    """Split each jointly encoded string after the prompt's own tokens.

    A tokenizer may merge the prompt's last token with the answer ("Ans" + "wer" -> "Answer"). The split then
    moves back to the last token that all strings share, so that every choice scores the same text. Returns
    None when an answer adds no token, or when no token is left to condition the first one on.
    """
    shared = min(common_length(prompt, whole) for whole in wholes)
    context = (*bos, *prompt[:shared])
    if not context or any(len(whole) <= shared for whole in wholes):
        return None
    return Pair(context, tuple(tuple(whole[shared:]) for whole in wholes), shared < len(prompt))


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix of two lists or texts."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def common_prefix(contexts: Sequence[Sequence[int]]) -> int:
    """Tokens that all contexts share, at most one less than the shortest: each keeps one token to run."""
    first = contexts[0]
    shared = min(common_length(first, c) for c in contexts)
    return min(shared, min(len(c) for c in contexts) - 1)


def overflow(pair: Pair, window: int | None) -> int:
    """Tokens by which context and longest continuation exceed the window; the last token is not fed."""
    if window is None:
        return 0
    return max(0, len(pair.context) + max(len(c) for c in pair.continuations) - (window + 1))


@dataclass(frozen=True)
class Fitted:
    """What fits the window. dropped_shots: whole examples left out; dropped_tokens: then cut from the
    prompt's head. pair is None when nothing can be scored.
    """

    pair: Pair | None
    dropped_shots: int
    dropped_tokens: int

    @property
    def truncated(self) -> bool:
        return self.dropped_shots > 0 or self.dropped_tokens > 0


def fit(encode: Callable[[int], Pair | None], shots: int, window: int | None, bos: int) -> Fitted:
    """Drop whole examples from the last one on, then as many of the prompt's first tokens as needed.

    encode(n): the pair with the first n examples (so that questions still share them as a prefix);
    bos: BOS tokens at the head, which are never dropped.
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
