"""A12 inside the attention kernels and the gather: payload, scales, queries, tables and outputs beyond 2^31
elements.
"""

from dataclasses import replace

import pytest
import torch

from kvbench_kernels.attention import decode
from kvbench_kernels.attention.decode import paged_decode
from kvbench_kernels.attention.prefill import paged_prefill
from kvbench_kernels.kv import gather
from kvbench_kernels.kv.gather import paged_gather
from kvbench_kernels.kv.layout import LayerPages
from tests.kernels.address_space import LastPrograms, address_space, empty
from tests.kernels.kv_pool import Pool, queries, random_pool

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="for Triton's interpreter; test_attention_gpu.py has the payload on a GPU",
)
HALF = torch.float16


def attended(pool, q, kernel):
    """Decode of the first query, or prefill of all."""
    if kernel == "decode":
        return paged_decode(pool.cache, q[:1], pool.table, pool.lengths, 0.125, splits=1)
    starts = torch.tensor([0, len(q)], dtype=torch.int32)
    return paged_prefill(pool.cache, q, pool.table, pool.lengths, starts, len(q), 0.125)


def rowwise(pool, q, kernel):
    """One query a sequence, by either kernel; or what the gather finds of the shortest sequence's length, K
    and V.
    """
    if kernel == "gather":
        return torch.stack(paged_gather(pool.cache, pool.table, int(pool.lengths.min()), HALF))
    if kernel == "decode":
        return paged_decode(pool.cache, q, pool.table, pool.lengths, 0.125, splits=1)
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    return paged_prefill(pool.cache, q, pool.table, pool.lengths, starts, 1, 0.125)


def moved(pool, first):
    """The pool's one sequence in the pages from `first` on, the last ones of the pool."""
    used = pool.table[0, : -(-int(pool.lengths[0]) // pool.cache.k.shape[2])].long()
    parts = []
    for part in (pool.cache.k, pool.cache.v, pool.cache.k_scale, pool.cache.v_scale):
        assert part is not None
        front = 2**31 * part[0, 0, 0].numel()  # a row's number may wrap before it is multiplied
        big = address_space(first + len(used), *part.shape[1:], dtype=part.dtype, front=front)
        big[first:] = part[used]
        parts.append(big)
    pages = torch.arange(first, first + len(used), dtype=torch.int32)[None]
    return Pool(LayerPages(pool.cache.fmt, *parts), pages, pool.lengths)


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_a12_t2_page_131_072_is_attended(kernel):
    """INT8 pages of 16 tokens, 8 heads of 128: page 131,072 starts at element 2^31."""
    pool = random_pool("int8_sym", HALF, (32,), "cpu", kv_heads=8, head_dim=128, value_dim=128)
    q = queries(5, 8, 128, dtype=HALF, device="cpu")
    far = moved(pool, 131_072)
    assert far.cache.k[131_072].storage_offset() == 2**31
    assert torch.equal(attended(far, q, kernel), attended(pool, q, kernel))


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_a12_t3_scales_above_2_to_the_31_elements_are_attended(kernel):
    """Row 2^31 of the pages, so that row numbers themselves leave 32 bits: what K's and V's scales are found
    by.
    """
    pool = random_pool("int8_sym", HALF, (100,), "cpu", head_dim=16, value_dim=16, page_size=64)
    q = queries(5, 4, 16, dtype=HALF, device="cpu")
    far = moved(pool, 2**24)
    assert far.cache.k_scale is not None
    assert far.cache.k_scale[2**24].storage_offset() == 2**31
    assert torch.equal(attended(far, q, kernel), attended(pool, q, kernel))


@pytest.mark.parametrize("splits", [1, 2])
def test_a12_t3_output_of_decode_above_2_to_the_31_elements(splits, monkeypatch):
    """The last sequence of 2^19 + 1 (16 heads of 256), whose programs alone run. With splits the partial
    results lie beyond 2^31 too; the statistics, of which there are 2^25, do not.
    """
    batch = 2**19 + 1
    pool = random_pool("int8_sym", HALF, (100,), "cpu", kv_heads=1, value_dim=256)
    q = queries(1, 16, 64, dtype=HALF, device="cpu")
    wanted = paged_decode(pool.cache, q, pool.table, pool.lengths, 0.125, splits=splits)
    where = (pool.table.expand(batch, -1), pool.lengths.repeat(batch), 0.125)
    monkeypatch.setattr(torch, "empty", empty)
    for name in ("paged_decode_split", "paged_decode_combine"):
        monkeypatch.setattr(decode, name, LastPrograms(getattr(decode, name)))
    out = paged_decode(pool.cache, q.expand(batch, -1, -1), *where, splits=splits)
    assert out[-1].storage_offset() == 2**31
    assert torch.equal(out[-1:], wanted)


def test_a12_t3_output_of_prefill_above_2_to_the_31_elements(monkeypatch):
    """Five queries behind 2^24 - 1 rows that belong to no sequence, of 2 heads of 64: the second row is at
    2^31.
    """
    pool = random_pool("int8_sym", HALF, (100,), "cpu")
    q = queries(5, 2, 64, dtype=HALF, device="cpu")
    first = 2**24 - 1
    rows = address_space(first + 5, 2, 64, dtype=HALF)
    rows[first:] = q
    starts = torch.tensor([first, first + 5], dtype=torch.int32)
    wanted = attended(pool, q, "prefill")
    monkeypatch.setattr(torch, "empty", empty)
    out = paged_prefill(pool.cache, rows, pool.table, pool.lengths, starts, 5, 0.125)
    assert torch.equal(out[first:], wanted)


def test_a12_t3_output_of_the_gather_above_2_to_the_31_elements(monkeypatch):
    """K and V of the last head of 2^20 + 1 sequences, whose programs alone run."""
    batch = 2**20 + 1
    pool = random_pool("int8_sym", HALF, (16,), "cpu")
    wanted = paged_gather(pool.cache, pool.table, 16, HALF)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(gather, "_kv_gather", LastPrograms(gather._kv_gather))
    for out, expected in zip(
        paged_gather(pool.cache, pool.table.expand(batch, -1), 16, HALF), wanted, strict=True
    ):
        assert out[-1].storage_offset() == 2**31
        assert torch.equal(out[-1, 1], expected[0, 1])


@pytest.mark.parametrize("strides", [(2**30, 64), (64, 2**30)], ids=["rows", "heads"])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_a12_t3_queries_above_2_to_the_31_elements(kernel, strides):
    pool = random_pool("int8_sym", HALF, (33, 20, 7), "cpu", kv_heads=1)
    q = queries(3, 3, 64, dtype=HALF, device="cpu")
    far = address_space(2**31 + 192, dtype=HALF).as_strided((3, 3, 64), (*strides, 1))
    far.copy_(q)
    assert torch.equal(rowwise(pool, far, kernel), rowwise(pool, q, kernel))


@pytest.mark.parametrize("kernel", ["decode", "prefill", "gather"])
def test_a12_t3_page_tables_above_2_to_the_31_elements(kernel):
    """Rows of a table 2^30 columns apart: the third starts at 2^31."""
    pool = random_pool("int8_sym", HALF, (33, 20, 7), "cpu", kv_heads=1)
    q = queries(3, 3, 64, dtype=HALF, device="cpu")
    width = pool.table.shape[1]
    far = address_space(2**31 + width, dtype=torch.int32).as_strided((3, width), (2**30, 1))
    far.copy_(pool.table)
    assert torch.equal(rowwise(replace(pool, table=far), q, kernel), rowwise(pool, q, kernel))
