"""Chunks of a perplexity run by protocol, log-probabilities against float64, and where a sampled text ends.

A17 T4 (stride 256, each token scored once) has no test: no protocol here overlaps, every chunk starts where
the one before it ends, and `test_no_token_is_scored_twice` guards that.
"""

import math
from dataclasses import replace

import pytest
import torch

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.errors import UsageError
from kvbench.runners.text.chunking import Chunk, document_of, llamacpp, rows, stream
from kvbench.runners.text.decode import Sampler, write
from kvbench.runners.text.logits import ROWS, compare, logprobs, packed


def test_a17_t3_scored_tokens_of_the_fp8_source():
    n = 293_457
    found = stream(range(n), [0] * n)
    assert (len(found.chunks), len(found.chunks[-1].tokens)) == (574, 81)
    assert sum(c.scored for c in found.chunks) == 292_883
    assert (found.tokens, found.dropped_tokens) == (n, 0)


@pytest.mark.parametrize("n", [2, 511, 512, 513, 514, 1024, 1025])
def test_a17_t4_no_token_is_scored_twice(n):
    found = stream(range(n), [0] * n)
    scored = [t for c in found.chunks for t in c.tokens[c.skip :]]
    assert len(scored) == len(set(scored))
    assert all(c.tokens[0] not in scored for c in found.chunks)
    assert sum(len(c.tokens) for c in found.chunks) + found.dropped_tokens == n
    assert found.dropped_tokens == (n % 512 == 1)  # a tail of one token has nothing to score


@pytest.mark.parametrize("n", [0, 1])
def test_a17_t5_texts_of_no_or_one_token_are_skipped_and_counted(n):
    found = stream(range(n), [0] * n)
    assert (found.chunks, found.skipped_rows) == ((), 1)
    many = rows([[1], [], [1, 2, 3]], [0, 0, 1])
    assert (many.skipped_rows, many.chunks, many.tokens) == (2, (Chunk((1, 2, 3), 1, 1),), 4)


def test_rows_are_never_joined_and_a_chunk_is_of_the_document_that_it_starts_in():
    found = rows([list(range(600)), list(range(600, 610))], [0, 3])
    assert [(len(c.tokens), c.document) for c in found.chunks] == [(512, 0), (88, 0), (10, 3)]
    assert [document_of([0, 10, 10, 30], o) for o in (0, 9, 10, 29, 30, 99)] == [0, 0, 2, 2, 3, 3]
    found = stream(range(1024), [0] * 500 + [1] * 524)
    assert [c.document for c in found.chunks] == [0, 1]


def test_llamacpp_scores_255_of_512_and_whole_chunks_only_each_with_the_bos():
    found = llamacpp(range(1100), [7] * 1100, None)
    assert [c.scored for c in found.chunks] == [255, 255]
    assert found.chunks[1].tokens[found.chunks[1].skip :] == tuple(range(512 + 257, 1024))
    assert found.dropped_tokens == 1100 - 1024
    found = llamacpp(range(1023), list(range(1023)), 9999)
    # Token 511 gave its place to the second BOS.
    assert [c.tokens for c in found.chunks] == [(9999, *range(511)), (9999, *range(512, 1023))]
    assert [c.document for c in found.chunks] == [0, 511]


def test_packs_hold_neighbours_up_to_the_limit():
    cases = ([200, 200, 200, 600, 1], [256, 256], [])
    assert [list(packed(sizes, 512)) for sizes in cases] == [[[0, 1], [2], [3], [4]], [[0, 1]], []]


def logits(rows, vocab=500, scale=4.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * scale


def test_logprobs_equal_a_float64_log_softmax_over_slice_borders():
    x = logits(ROWS["cpu"] * 2 + 3) + 300.0
    targets = torch.arange(len(x))
    exact = x.double().log_softmax(-1)[targets, targets]
    assert (logprobs(x, targets) - exact).abs().max() < 1e-6
    assert logprobs(x, targets).dtype == torch.float64
    uniform = torch.full((2,), -math.log(1000.0), dtype=torch.float64)
    assert torch.allclose(logprobs(torch.zeros(2, 1000), torch.tensor([0, 999])), uniform, atol=1e-12)


@pytest.mark.parametrize(("shift", "most"), [(0.0, 0.0), (5.0, 1e-11)])
def test_equal_distributions_do_not_diverge(shift, most):
    x = logits(40)
    found = compare(x, x + shift, torch.zeros(40, dtype=torch.long))
    assert found.kld.abs().max() <= most
    assert shift or found.delta_p.abs().max() == 0.0
    assert bool(found.top1_equal.all())


def test_divergence_equals_the_definition_in_float64():
    native = logits(70)
    candidate = native + 1e-3 * logits(70, scale=1.0).flip(1)
    targets = torch.randint(0, 500, (70,), generator=torch.Generator().manual_seed(0))
    found = compare(native, candidate, targets)
    p, q = native.double().log_softmax(-1), candidate.double().log_softmax(-1)
    assert (found.kld - (p.exp() * (p - q)).sum(-1)).abs().max() < 1e-10
    assert (found.delta_p - (q.exp() - p.exp())[range(70), targets]).abs().max() < 1e-7
    assert torch.equal(found.native, logprobs(native, targets))
    assert torch.equal(found.candidate, logprobs(candidate, targets))
    native, candidate = logits(6), logits(6).flip(1) * 30  # far apart
    found = compare(native, candidate, torch.zeros(6, dtype=torch.long))
    p, q = native.double().log_softmax(-1), candidate.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1)
    assert exact.min() > 100
    assert ((found.kld - exact) / exact).abs().max() < 1e-6


def test_top1_counts_another_argmax_and_a_nan_stays_a_nan():
    native, candidate = torch.zeros(2, 5), torch.zeros(2, 5)
    native[:, 1], candidate[0, 1], candidate[1, 2] = 3.0, 3.0, 3.0
    assert compare(native, candidate, torch.tensor([1, 1])).top1_equal.tolist() == [True, False]
    candidate[0, 0] = float("nan")
    found = compare(native, candidate, torch.tensor([1, 1]))
    assert found.kld.isnan().tolist() == found.candidate.isnan().tolist() == [True, False]


GREEDY = Sampler(until=("stop",), new_tokens=6, ends=frozenset({257}))
LOGITS = torch.tensor([[0.0, 3.0, 2.9, -1.0], [5.0, 0.0, 0.0, 4.9]])


class Scripted:
    """An engine whose every sequence says its own script; records which sequences each decode is of."""

    def __init__(self, *scripts):
        self.scripts, self.said = [list(s) for s in scripts], [0] * len(scripts)
        self.steps, self.freed, self.spec, self.added = [], [], {"prefill_chunk": 512}, 0

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


def test_a_text_ends_with_its_token_its_stop_text_or_its_length_and_leaves_the_batch():
    engine = Scripted([97, 257, 1, 1, 1, 1], b"stop--", b"abcdefgh")
    texts = write(engine, byte_tokenizer(), [[1, 2]] * 3, GREEDY)
    assert texts == [[97, 257], list(b"stop"), list(b"abcdef")]
    assert [seqs for seqs, _ in engine.steps] == [[0, 1, 2], [1, 2], [1, 2], [2], [2]]
    assert engine.steps[0][1] == [97, ord("s"), ord("a")]
    assert engine.freed == [0, 1, 2]


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 1e-4}])
def test_greedy_takes_the_largest_and_so_does_a_draw_from_one(changes):
    assert GREEDY.choose(LOGITS) == replace(GREEDY, do_sample=True, **changes).choose(LOGITS) == [1, 0]


def test_draws_have_the_probabilities_of_the_logits_and_the_temperature():
    torch.manual_seed(0)
    for temperature in (1.0, 2.0):
        sampler = replace(GREEDY, do_sample=True, temperature=temperature)
        drawn = torch.tensor(sampler.choose(LOGITS[:1].expand(20_000, -1)))
        share = torch.bincount(drawn, minlength=4) / 20_000
        assert (share - (LOGITS[0] / temperature).softmax(-1)).abs().max() < 0.015  # 4 standard errors
    drawn = replace(GREEDY, do_sample=True, top_k=2).choose(LOGITS[:1].expand(2_000, -1))
    assert set(drawn) == {1, 2}


@pytest.mark.parametrize(
    ("given", "says"),
    [({"new_tokens": 0}, "at least 1, got 0"), ({"do_sample": True, "temperature": 0.0}, "above 0, got 0.0")],
)
def test_settings_without_a_meaning_are_refused(given, says):
    with pytest.raises(UsageError, match=says):
        replace(GREEDY, **given)
