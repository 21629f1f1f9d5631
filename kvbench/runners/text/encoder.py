"""Questions to token ids, one subject at a time: template, shots, chat, truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.data.questions import Question
from kvbench.runners.text.encode import Fitted, Pair, common_length, fit, join, overflow, plain_ids, strings
from kvbench.runners.text.prompts import Template, continuations, messages, plain

# A shared head of at least so many characters is encoded once; it is cut this far before its end.
MIN_HEAD, MARGIN = 512, 64


@dataclass(frozen=True)
class Encoder:
    """Encodes the questions of one task. window: the model's positions, or None; examples: shots by subject;
    first: the BOS ids that the tokenizer adds before a text.
    """

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
                fitted.append(self._shorten(q, shots, len(self.bos(own[0]))))
        return fitted

    def _shorten(self, q: Question, shots: int, bos: int) -> Fitted:
        def encode(kept: int) -> Pair | None:
            texts = self.texts(q, kept)
            return self.pair(texts, plain_ids(self.tokenizer, texts))

        return fit(encode, shots, self.window, bos)


def ids_by_head(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text, exactly as if each were encoded alone, with their common head encoded once.

    The cut is after a line end that all texts share with `MARGIN` more characters on each side, so that the
    tokens there cannot depend on the question. The first and the last text check that the tokenizer splits
    there; if it does not, every text is encoded whole.
    """
    first, last = min(texts), max(texts)  # the common prefix of these two is common to all texts
    cut = _cut(first[: common_length(first, last)])
    if cut and len(texts) > 2:
        head = plain_ids(tokenizer, [texts[0][:cut]])[0]
        tails = plain_ids(tokenizer, [text[cut:] for text in texts])
        whole = plain_ids(tokenizer, [texts[0], texts[-1]])
        if whole == [head + tails[0], head + tails[-1]]:
            return [head + tail for tail in tails]
    return plain_ids(tokenizer, texts)


def _cut(common: str) -> int:
    """Start of the last line with `MARGIN` characters after it and visible neighbours; 0 for none."""
    if len(common) < MIN_HEAD:
        return 0
    at = len(common) - MARGIN
    while at > MARGIN:
        at = common.rfind("\n", 0, at)
        if at <= MARGIN:
            return 0
        if not common[at - 1].isspace() and not common[at + 1].isspace():
            return at + 1
    return 0
