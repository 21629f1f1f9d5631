"""Chunks of a perplexity run, by protocol.

A17 T4 (stride 256, each token scored once) has no test: no protocol here overlaps, every chunk starts where
the one before it ends, and `test_no_token_is_scored_twice` guards that.
"""

from __future__ import annotations

import math

import pytest

from kvbench.runners.text.chunking import Chunk, document_of, llamacpp, rows, stream
from kvbench.runners.text.logits import packed


def test_a17_t3_scored_tokens_of_the_fp8_source():
    n = 293_457
    found = stream(range(n), [0] * n)
    assert len(found.chunks) == 574
    assert len(found.chunks[-1].tokens) == 81
    assert sum(c.scored for c in found.chunks) == 292_883
    assert (found.tokens, found.dropped_tokens) == (n, 0)


def test_a17_t2_perplexity_is_of_the_token_mean_not_of_the_chunk_means():
    found = stream(range(512 + 81), [0] * 593)
    nll = [2.0 * found.chunks[0].scored, 4.0 * found.chunks[1].scored]
    assert [c.scored for c in found.chunks] == [511, 80]
    assert math.exp(sum(nll) / sum(c.scored for c in found.chunks)) == pytest.approx(9.6864, abs=5e-5)


@pytest.mark.parametrize("n", [2, 511, 512, 513, 514, 1024, 1025])
def test_a17_t4_no_token_is_scored_twice(n):
    found = stream(range(n), [0] * n)
    scored = [t for c in found.chunks for t in c.tokens[c.skip :]]
    assert len(scored) == len(set(scored))
    assert all(c.tokens[0] not in scored for c in found.chunks)
    assert sum(len(c.tokens) for c in found.chunks) + found.dropped_tokens == n


def test_a_tail_of_one_token_has_nothing_to_score_and_is_counted():
    found = stream(range(513), [0] * 513)
    assert [len(c.tokens) for c in found.chunks] == [512]
    assert found.dropped_tokens == 1


@pytest.mark.parametrize("n", [0, 1])
def test_a17_t5_texts_of_no_or_one_token_are_skipped_and_counted(n):
    found = stream(range(n), [0] * n)
    assert (found.chunks, found.skipped_rows) == ((), 1)
    many = rows([[1], [], [1, 2, 3]], [0, 0, 1])
    assert many.skipped_rows == 2
    assert many.chunks == (Chunk((1, 2, 3), 1, 1),)
    assert many.tokens == 4


def test_rows_are_never_joined():
    found = rows([list(range(600)), list(range(600, 610))], [0, 3])
    assert [(len(c.tokens), c.document) for c in found.chunks] == [(512, 0), (88, 0), (10, 3)]


def test_llamacpp_scores_255_of_512_and_whole_chunks_only():
    found = llamacpp(range(1100), [7] * 1100, None)
    assert [c.scored for c in found.chunks] == [255, 255]
    assert found.chunks[1].tokens[found.chunks[1].skip :] == tuple(range(512 + 257, 1024))
    assert found.dropped_tokens == 1100 - 1024


def test_llamacpp_bos_heads_the_stream_and_each_chunk():
    found = llamacpp(range(1023), list(range(1023)), 9999)
    assert [c.tokens[0] for c in found.chunks] == [9999, 9999]
    assert found.chunks[0].tokens[1:] == tuple(range(511))
    assert found.chunks[1].tokens[1:] == tuple(range(512, 1023))  # token 511 gave its place to the second BOS
    assert [c.document for c in found.chunks] == [0, 511]


def test_a_chunk_belongs_to_the_document_that_it_starts_in():
    assert [document_of([0, 10, 10, 30], o) for o in (0, 9, 10, 29, 30, 99)] == [0, 0, 2, 2, 3, 3]
    found = stream(range(1024), [0] * 500 + [1] * 524)
    assert [c.document for c in found.chunks] == [0, 1]


def test_packs_hold_neighbours_up_to_the_limit():
    assert list(packed([200, 200, 200, 600, 1], 512)) == [[0, 1], [2], [3], [4]]
    assert list(packed([256, 256], 512)) == [[0, 1]]
    assert list(packed([], 512)) == []
