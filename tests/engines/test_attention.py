"""The torch attention against an oracle of plain float64 loops."""

import math

import pytest
import torch

from kvbench_kernels.attention.reference import group_size, paged_attention_torch, soft_cap

HEADS = [(14, 2), (9, 3), (32, 4), (24, 1), (48, 2), (71, 1), (8, 8)]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle(q, k, v, scaling, offset, window=None, cap=None, sinks=None):
    """One query head and one query at a time, in float64, from the definition."""
    batch, q_heads, queries, _ = q.shape
    out = torch.zeros(batch, q_heads, queries, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(q_heads):
            kv_head = h // (q_heads // k.shape[1])
            for t in range(queries):
                scores, values = [], []
                for j in range(offset + t + 1):
                    if window is not None and offset + t - j >= window:
                        continue
                    score = float(q[b, h, t].double() @ k[b, kv_head, j].double()) * scaling
                    scores.append(score if cap is None else cap * math.tanh(score / cap))
                    values.append(v[b, kv_head, j].double())
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[h]) - top))
                for weight, value in zip(weights, values, strict=True):
                    out[b, h, t] += weight / total * value
    return out


@pytest.mark.parametrize("queries", [1, 5, 12])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(
    ("cap", "with_sinks"),
    [(None, False), (0.7, False), (None, True), (0.7, True)],
    ids=["plain", "cap", "sinks", "both"],
)
def test_attention_equals_the_oracle(queries, window, cap, with_sinks):
    keys = 12
    q, k, v = random(2, 6, queries, 8), random(2, 2, keys, 8, seed=1), random(2, 2, keys, 5, seed=2)
    sinks = random(6, seed=3) if with_sinks else None
    args = (0.4, keys - queries, window, cap, sinks)
    got = paged_attention_torch(q, k, v, *args)
    assert got.shape == (2, 6, queries, 5)
    torch.testing.assert_close(got.double(), oracle(q, k, v, *args), rtol=2e-6, atol=2e-6)
    exact = paged_attention_torch(q.double(), k.double(), v.double(), *args)  # what evidence compares with
    torch.testing.assert_close(exact, oracle(q, k, v, *args), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_half_precision_stays_in_its_dtype(dtype, cap):
    q, k, v = (random(1, 4, 3, 16, seed=i, dtype=dtype) for i in range(3))
    got = paged_attention_torch(q, k, v, 0.25, 0, None, cap)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), oracle(q, k, v, 0.25, 0, None, cap), rtol=0.02, atol=0.02)


def test_chunks_and_single_steps_agree_with_one_pass():
    q, k, v = random(1, 9, 20, 64), random(1, 3, 20, 64, seed=1), random(1, 3, 20, 64, seed=2)
    whole = paged_attention_torch(q, k, v, 0.125, 0, 7)
    for size in (1, 6):
        parts = [
            paged_attention_torch(
                q[:, :, s : s + size], k[:, :, : s + size], v[:, :, : s + size], 0.125, s, 7
            )
            for s in range(0, 20, size)
        ]
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-5, atol=1e-6)


def test_a_future_or_expired_key_cannot_reach_the_result_even_as_nan():
    q, k, v = random(1, 4, 1, 8), random(1, 2, 9, 8, seed=1), random(1, 2, 9, 8, seed=2)
    for cap in (None, 50.0):
        clean = paged_attention_torch(q, k, v, 1.0, 6, 3, cap)
        for tensor in (k, v):
            dirty = tensor.clone()
            dirty[:, :, 7:] = math.nan  # later than the query
            dirty[:, :, :4] = math.nan  # older than the window of 3
            pair = (dirty, v) if tensor is k else (k, dirty)
            assert torch.equal(paged_attention_torch(q, *pair, 1.0, 6, 3, cap), clean)


@pytest.mark.parametrize(("offset", "queries"), [(5, 4), (-1, 2)])
def test_missing_keys_are_an_error(offset, queries):
    with pytest.raises(ValueError, match="write the chunk to the store"):
        paged_attention_torch(torch.zeros(1, 2, queries, 4), *[torch.zeros(1, 2, 8, 4)] * 2, 1.0, offset)


# A09: heads


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS, ids=[f"{q}on{kv}" for q, kv in HEADS])
def test_a09_t1_query_head_reads_its_own_kv_head(q_heads, kv_heads, cap, queries):
    k = random(1, kv_heads, 5, 8)
    v = torch.arange(kv_heads, dtype=torch.float32).view(1, kv_heads, 1, 1).expand(1, kv_heads, 5, 8)
    out = paged_attention_torch(random(1, q_heads, queries, 8, seed=1), k, v, 0.3, 5 - queries, None, cap)
    expected = torch.arange(q_heads) // (q_heads // kv_heads)
    torch.testing.assert_close(out[0].mean((1, 2)), expected.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(out[0].round(), expected.float().view(-1, 1, 1).expand_as(out[0]))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(33, 2), (3, 2), (2, 4), (4, 0)])
def test_a09_t2_heads_that_do_not_divide_are_refused(q_heads, kv_heads):
    with pytest.raises(ValueError, match=rf"{q_heads} query heads on {kv_heads} KV heads"):
        group_size(q_heads, kv_heads)
    with pytest.raises(ValueError, match="multiple of the KV heads"):
        paged_attention_torch(torch.zeros(1, q_heads, 1, 4), *[torch.zeros(1, kv_heads, 2, 4)] * 2, 1.0, 1)


# A10: soft cap


def test_a10_t2_soft_cap_values():
    capped = soft_cap(torch.tensor([100.0, 10.0, -100.0, 0.0]), 50.0)
    assert capped.tolist() == pytest.approx([48.2014, 9.8688, -48.2014, 0.0], abs=5e-5)


def test_a10_t2_soft_cap_changes_large_scores():
    q, k, v = random(1, 4, 3, 8) * 12, random(1, 2, 3, 8, seed=1) * 12, random(1, 2, 3, 8, seed=2)
    assert not torch.allclose(
        paged_attention_torch(q, k, v, 1.0, 0),
        paged_attention_torch(q, k, v, 1.0, 0, softcap=50.0),
        atol=1e-3,
    )


def test_a_large_sink_takes_the_weight_and_gives_no_value():
    q, k, v = random(1, 2, 1, 8), random(1, 2, 3, 8, seed=1), torch.ones(1, 2, 3, 8)
    out = paged_attention_torch(q, k, v, 0.1, 2, sinks=torch.tensor([-1e9, 1e9]))
    torch.testing.assert_close(out[0, 0], torch.ones(1, 8))
    assert torch.equal(out[0, 1], torch.zeros(1, 8))


def test_a03_t3_zero_values_give_exactly_zero():
    q, k = random(1, 4, 1, 8).expand(1, 4, 6, 8), random(1, 2, 1, 8, seed=1).expand(1, 2, 6, 8)
    for cap in (None, 50.0):
        out = paged_attention_torch(q, k, torch.zeros(1, 2, 6, 8), 0.3, 0, None, cap)
        assert torch.equal(out, torch.zeros(1, 4, 6, 8))
