"""Perplexity by position: what the runner stores adds up to the chunk, and early and late tokens come out
apart."""

import math
from types import SimpleNamespace

import pytest
import torch

from kvbench.metrics import perplexity as derived
from kvbench.runners.perplexity import Pass, by_position
from kvbench.runners.text.chunking import POSITIONS, Chunk
from tests.factories.quality_tools import context, tiny_model


def test_a_token_counts_in_the_bucket_of_its_own_position():
    """511 scored tokens from position 1 on; the NLL of the token at position i is i."""
    found = by_position(1, -torch.arange(1.0, 512.0, dtype=torch.float64))
    assert [n for n, _ in found] == [63, 64, 128, 256]
    edges = ((1, 64), (64, 128), (128, 256), (256, 512))
    assert [nll for _, nll in found] == [sum(range(*edge)) for edge in edges]


def test_what_is_only_context_and_what_is_not_there_is_in_no_bucket():
    half = by_position(257, torch.full((255,), -1.0, dtype=torch.float64))  # llamacpp: the second half
    assert half == [[0, 0.0], [0, 0.0], [0, 0.0], [255, 255.0]]
    short = by_position(1, torch.full((69,), -2.0, dtype=torch.float64))
    assert short == [[63, 126.0], [6, 12.0], [0, 0.0], [0, 0.0]]


def test_buckets_add_up_to_the_chunk():
    one = Pass(None, 512)
    one.add(Chunk(tuple(range(200)), 1, 3), torch.linspace(-3, -1, 199, dtype=torch.float64))
    (chunk,) = one.chunks
    assert sum(n for n, _ in chunk["by_position"]) == chunk["tokens"] == 199
    assert sum(nll for _, nll in chunk["by_position"]) == pytest.approx(chunk["nll"], rel=1e-12)


def test_the_record_holds_the_edges(tmp_path):
    from kvbench.data.corpora import corpus
    from kvbench.runners import perplexity

    path = tmp_path / "text.txt"
    path.write_text(corpus("pydoc", None).text[:2500])
    measured = perplexity.run(context(tiny_model(), "perplexity", data=str(path)))
    assert measured.facts["positions"] == list(POSITIONS)
    assert all(len(chunk["by_position"]) == 4 for chunk in measured.samples["chunks"])


def record(*chunks, **facts):
    """A record of (document, [nll a token in each bucket]) chunks of 512 tokens."""
    made = []
    for document, nlls in chunks:
        buckets = [[n, n * nll] for n, nll in zip((63, 64, 128, 256), nlls, strict=True)]
        total = sum(nll for _, nll in buckets)
        made.append({"tokens": 511, "nll": total, "document": document, "by_position": buckets})
    facts = {"scored": 511 * len(made), "positions": [0, 64, 128, 256, 512]} | facts
    return SimpleNamespace(samples={"chunks": made}, facts=facts, protocol=1)


def rows(own, baseline=None):
    return {v.metric: v for v in derived.values(own, baseline)}


def test_perplexity_and_its_change_in_each_bucket_are_exact():
    native = record((0, [1.0, 1.0, 1.0, 1.0]), (1, [2.0, 2.0, 2.0, 2.0]))
    late = record((0, [1.0, 1.0, 1.0, 1.5]), (1, [2.0, 2.0, 2.0, 2.5]))
    found = rows(late, native)
    assert found["ppl_at_0_63"].value == pytest.approx(math.exp(1.5), rel=1e-12)
    assert found["ppl_at_0_63"].n == 126
    assert found["ppl_at_256_511"].value == pytest.approx(math.exp(2.0), rel=1e-12)
    assert found["ppl_delta_pct_at_128_255"].value == pytest.approx(0, abs=1e-12)
    assert found["ppl_delta_pct_at_256_511"].value == pytest.approx((math.exp(0.5) - 1) * 100, rel=1e-12)
    assert found["ppl_delta_pct"].value == pytest.approx((math.exp(0.5 * 256 / 511) - 1) * 100, rel=1e-12)
    assert found["ppl_delta_pct_at_256_511"].low is not None
    assert "ppl_delta_pct_at_0_63" not in rows(native)


def test_a_bucket_without_scored_tokens_has_no_value():
    own = record((0, [1.0] * 4))
    own.samples["chunks"][0]["by_position"][3] = [0, 0.0]
    assert {m for m in rows(own) if m.startswith("ppl_at_")} == {
        "ppl_at_0_63",
        "ppl_at_64_127",
        "ppl_at_128_255",
    }


def test_records_without_positions_or_of_other_edges_give_no_change():
    own = record((0, [1.0] * 4))
    old = record((0, [1.0] * 4))
    for chunk in old.samples["chunks"]:
        del chunk["by_position"]
    assert "ppl_delta_pct" in rows(old, own)
    assert not [m for m in rows(old, own) if "_at_" in m]
    assert not [m for m in rows(own, old) if m.startswith("ppl_delta_pct_at_")]
    other = record((0, [1.0] * 4), positions=[0, 32, 128, 256, 512])
    assert not [m for m in rows(own, other) if m.startswith("ppl_delta_pct_at_")]
