"""Text to token ids for the quality runners: BOS policy, prompts joined with answers, truncation.

Nothing depends on a tokenizer's defaults: text is encoded without special tokens, and this module adds the
BOS that the tokenizer would add, unless the text already begins with it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvbench.data.corpora import Corpus, corpus, evenly, first_ids
from kvbench.data.questions import Question
from kvbench.errors import UsageError
from kvbench.runners.context import Context
from kvbench.runners.text.prompts import Template, continuations, messages, plain

# A shared head of at least so many characters is encoded once; it is cut this far before its end.
MIN_HEAD, MARGIN = 512, 64


def head_ids(ctx: Context, wanted: int) -> list[int]:
    """The first `wanted` ids of the corpus of option `data`, with the tokenizer's own BOS policy."""
    name = ctx.options["data"]
    return first_ids(name, corpus(name, ctx.data_dir).text, ctx.model.tokenizer, wanted)


def document_heads(text: Corpus, tokenizer: Any, documents: int, tokens: int) -> list[list[int]]:
    """At most `tokens` ids of each of `documents` documents, with BOS. Raises UsageError for too few
    documents, and for one with fewer than two tokens.
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
    if (held := len(text.documents)) < documents:
        raise UsageError(
            f"Corpus {text.name!r} has {held} documents, but {documents} are needed; ask for fewer."
        )
    for at in evenly(held, documents):
        yield at, text.document(at).strip()[: 64 * tokens]  # no token is longer than 64 characters


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text without special tokens. One call, which a fast tokenizer runs on all cores."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return ids


def bos_ids(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer adds before a text by default: its BOS, or none."""
    bare, dressed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    starts = range(len(dressed) - len(bare) + 1)
    return next((list(dressed[:i]) for i in starts if dressed[i : i + len(bare)] == bare), [])


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
    if ids := bos_ids(tokenizer):
        return f"one: the tokenizer puts {ids} first; not repeated where the prompt already begins with it"
    if (own := tokenizer.bos_token_id) is None:
        return "none: the tokenizer has no BOS token"
    return f"none added by the tokenizer (its BOS token is {tokenizer.bos_token!r}, id {own})"


def check_chat(tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("chat_template: true, but the tokenizer has no chat template; set it to false.")


@dataclass(frozen=True)
class Pair:
    """Ids of a prompt with its answers: context (with any BOS), and one continuation for each choice. merged:
    a token spans prompt and answer, so scoring starts at an earlier token.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    merged: bool


def strings(prompt: str, answers: Sequence[str]) -> list[str]:
    """The prompt, and the prompt with each answer. Spaces that end the prompt belong to the answer."""
    return [prompt.rstrip(), *(prompt + answer for answer in answers)]


def join(prompt: Sequence[int], wholes: Sequence[Sequence[int]], bos: Sequence[int]) -> Pair | None:
    """Split each jointly encoded string after the prompt's own tokens. A tokenizer may merge the last of them
    with the answer ("Ans" + "wer" -> "Answer"): the split then moves back to the last token that all share.
    """
    shared = common_length([prompt, *wholes])
    context = (*bos, *prompt[:shared])
    if not context or any(len(whole) <= shared for whole in wholes):
        return None
    return Pair(context, tuple(tuple(whole[shared:]) for whole in wholes), shared < len(prompt))


def common_length(texts: Sequence[Any]) -> int:
    """Length of the common prefix of all lists or texts."""
    first, last = min(texts), max(texts)  # the common prefix of these two is common to all
    return next((i for i, (x, y) in enumerate(zip(first, last, strict=False)) if x != y), len(first))


def common_prefix(contexts: Sequence[Sequence[int]]) -> int:
    """Tokens that all contexts share, at most one less than the shortest: each keeps one token to run."""
    return min(common_length(contexts), min(map(len, contexts)) - 1)


def overflow(pair: Pair, window: int | None) -> int:
    """Tokens by which context and longest continuation exceed the window; the last token is not fed."""
    fed = len(pair.context) + max(map(len, pair.continuations)) - 1
    return 0 if window is None else max(0, fed - window)


@dataclass(frozen=True)
class Fitted:
    """What fits the window (pair None: nothing), examples left out, and tokens cut from the head."""

    pair: Pair | None
    dropped_shots: int
    dropped_tokens: int

    @property
    def truncated(self) -> bool:
        return self.dropped_shots > 0 or self.dropped_tokens > 0


def fit(encode: Callable[[int], Pair | None], shots: int, window: int | None, bos: int) -> Fitted:
    """Drop whole examples from the last one on, then as many of the prompt's first tokens as needed.
    encode(n): the pair with the first n examples; bos: BOS tokens at the head, which are never dropped.
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
    return Fitted(replace(pair, context=context), shots, excess)


@dataclass(frozen=True)
class Encoder:
    """Encodes the questions of one task. window: the model's positions; examples: by subject."""

    template: Template
    tokenizer: Any
    chat: bool
    window: int | None
    examples: Mapping[str, Sequence[Question]]
    first: Sequence[int]

    def texts(self, q: Question, shots: int) -> list[str]:
        """The prompt with the first `shots` examples, and that prompt with each answer."""
        solved = self.examples[q.subject][:shots] if shots else []
        if self.chat:
            turns = messages(self.template, q, solved)
            prompt = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        else:
            prompt = plain(self.template, q, solved)
        return strings(prompt, continuations(self.template, q, self.chat))

    def pair(self, texts: list[str], ids: list[list[int]]) -> Pair | None:
        return join(ids[0], ids[1:], self.bos(texts[0]))

    def bos(self, prompt: str) -> list[int]:
        """The ids before the prompt's own: one BOS at most, and none when the text begins with it."""
        token = self.tokenizer.bos_token
        return [] if token and prompt.startswith(token) else list(self.first)

    def subject(self, qs: Sequence[Question], shots: int) -> list[Fitted]:
        """The encoded questions of a subject; those that exceed the window lose examples, then tokens."""
        texts = [self.texts(q, shots) for q in qs]
        flat = iter(ids_by_head(self.tokenizer, [t for own in texts for t in own]))
        fitted = []
        for q, own in zip(qs, texts, strict=True):
            pair = self.pair(own, [next(flat) for _ in own])
            if pair is None or not overflow(pair, self.window):
                fitted.append(Fitted(pair, 0, 0))
            else:
                encode = partial(self._encode, q)
                fitted.append(fit(encode, shots, self.window, len(self.bos(own[0]))))
        return fitted

    def _encode(self, q: Question, shots: int) -> Pair | None:
        texts = self.texts(q, shots)
        return self.pair(texts, plain_ids(self.tokenizer, texts))


def ids_by_head(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text, exactly as if each were encoded alone, with their common head encoded once.

    The cut is after a line end that all texts share with `MARGIN` more characters on each side. The first and
    the last text check that the tokenizer splits there; if it does not, every text is encoded whole.
    """
    cut = _cut(texts[0][: common_length(texts)])
    if cut and len(texts) > 2:
        head = plain_ids(tokenizer, [texts[0][:cut]])[0]
        tails = plain_ids(tokenizer, [text[cut:] for text in texts])
        whole = plain_ids(tokenizer, [texts[0], texts[-1]])
        if whole == [head + tails[0], head + tails[-1]]:
            return [head + tail for tail in tails]
    return plain_ids(tokenizer, texts)


def _cut(common: str) -> int:
    """Start of the last line with `MARGIN` characters after it and visible neighbours; 0 for none."""
    at = len(common) - MARGIN if len(common) >= MIN_HEAD else 0
    while (at := common.rfind("\n", 0, at)) > MARGIN:
        if not common[at - 1].isspace() and not common[at + 1].isspace():
            return at + 1
    return 0
