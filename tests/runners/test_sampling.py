"""How a text goes on and where it ends: greedy, sampled, stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.errors import UsageError
from kvbench.runners.text.decode import Sampler, write

GREEDY = Sampler(until=("stop",), new_tokens=6, ends=frozenset({257}))
LOGITS = torch.tensor([[0.0, 3.0, 2.9, -1.0], [5.0, 0.0, 0.0, 4.9]])


class Scripted:
    """An engine whose every sequence says its own script; records which sequences each decode is of."""

    def __init__(self, *scripts):
        self.scripts, self.said, self.steps, self.freed = (
            [list(s) for s in scripts],
            [0] * len(scripts),
            [],
            [],
        )
        self.spec = {"prefill_chunk": 512}
        self.added = 0

    def add(self):
        self.added += 1
        return self.added - 1

    def free(self, seq):
        self.freed.append(seq)

    def _next(self, seq):
        row = torch.zeros(258)
        row[self.scripts[seq][self.said[seq]]] = 1
        self.said[seq] += 1
        return row[None]

    def forward(self, work, logits):
        return [self._next(seq) for seq, _ in work]

    def decode(self, seqs, tokens):
        self.steps.append((list(seqs), list(tokens)))
        return torch.cat([self._next(seq) for seq in seqs])


def texts(engine, sampler=GREEDY):
    return write(engine, byte_tokenizer(), [[1, 2]] * len(engine.scripts), sampler)


def test_a_text_ends_with_its_token_its_stop_text_or_its_length_and_leaves_the_batch():
    engine = Scripted([97, 257, 1, 1, 1, 1], b"stop--", b"abcdefgh")
    assert texts(engine) == [[97, 257], list(b"stop"), list(b"abcdef")]
    assert [seqs for seqs, _ in engine.steps] == [[0, 1, 2], [1, 2], [1, 2], [2], [2]]
    assert engine.steps[0][1] == [97, ord("s"), ord("a")]
    assert engine.freed == [0, 1, 2]


def test_greedy_takes_the_largest_and_so_does_a_draw_from_one():
    assert GREEDY.choose(LOGITS) == [1, 0]
    assert replace(GREEDY, do_sample=True, top_k=1).choose(LOGITS) == [1, 0]
    assert replace(GREEDY, do_sample=True, top_p=0.01).choose(LOGITS) == [1, 0]
    assert replace(GREEDY, do_sample=True, temperature=1e-4).choose(LOGITS) == [1, 0]


def test_draws_have_the_probabilities_of_the_logits_and_the_temperature():
    torch.manual_seed(0)
    for temperature in (1.0, 2.0):
        sampler = replace(GREEDY, do_sample=True, temperature=temperature)
        drawn = torch.tensor(sampler.choose(LOGITS[:1].expand(20_000, -1)))
        share = torch.bincount(drawn, minlength=4) / 20_000
        due = (LOGITS[0] / temperature).softmax(-1)
        assert (share - due).abs().max() < 0.015  # 4 standard errors
    drawn = replace(GREEDY, do_sample=True, top_k=2).choose(LOGITS[:1].expand(2_000, -1))
    assert set(drawn) == {1, 2}


@pytest.mark.parametrize(
    ("given", "says"),
    [({"new_tokens": 0}, "at least 1, got 0"), ({"do_sample": True, "temperature": 0.0}, "above 0, got 0.0")],
)
def test_settings_without_a_meaning_are_refused(given, says):
    with pytest.raises(UsageError, match=says):
        replace(GREEDY, **given)
