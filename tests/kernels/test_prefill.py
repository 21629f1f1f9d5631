"""Paged prefill against its torch twin, and what must not change its result."""

import itertools

import pytest
import torch

from kvbench_kernels.attention.prefill import paged_prefill
from kvbench_kernels.attention.reference import paged_prefill_torch
from kvbench_kernels.launches import record
from tests.kernels.cover import cover
from tests.kernels.kv_pool import DTYPES, FORMATS, assert_close, make_pool, queries, random_pool


def both(pool, q, new, **options):
    """The kernel's result and its twin's; new: tokens of each sequence that have a query."""
    starts = torch.tensor([0, *new], device=q.device).cumsum(0).to(torch.int32)
    where = (pool.table, pool.lengths, starts, max(new), q.shape[-1] ** -0.5)
    return (
        paged_prefill(pool.cache, q, *where, **options),
        paged_prefill_torch(pool.cache, q, *where, **options),
    )


@pytest.mark.parametrize(
    ("fmt", "dtype"), cover(itertools.product(FORMATS, DTYPES), lambda case: case), ids=str
)
def test_it_equals_its_twin_on_ragged_chunks(fmt, dtype, device):
    """A chunk after cached tokens, a whole prompt, and a single token."""
    new = (5, 20, 1)
    pool = random_pool(fmt, dtype, (70, 20, 33), device, kv_heads=1)
    assert_close(*both(pool, queries(sum(new), 2, 64, dtype=dtype, device=device), new))


@pytest.mark.parametrize("length", [140, 200])
def test_chunks_of_several_query_tiles(length, device):
    pool = random_pool("int8_sym", torch.float16, (length,), device, kv_heads=1)
    assert_close(*both(pool, queries(140, 1, 64, dtype=torch.float16, device=device), (140,)))


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "page_size"), [(80, 96, 32), (112, 128, 64), (192, 256, 16)]
)
def test_head_dims_and_page_sizes(head_dim, value_dim, page_size, device):
    pool = random_pool(
        "fp8_e4m3", torch.bfloat16, (40,), device, kv_heads=1, head_dim=head_dim, value_dim=value_dim, page_size=page_size
    )  # fmt: skip
    assert_close(*both(pool, queries(9, 1, head_dim, dtype=torch.bfloat16, device=device), (9,)))


@pytest.mark.parametrize(
    "options", [{"sliding_window": 1}, {"sliding_window": 40}, {"softcap": 2.0}, {"sinks": 1.0}]
)
def test_windows_soft_caps_and_sinks(options, device):
    new = (70, 3)
    pool = random_pool("int8_sym", torch.float16, (150, 80), device, kv_heads=1)
    if "sinks" in options:
        options = {"sinks": torch.tensor([2.0, 9.0], device=device)}
    q = 4 * queries(sum(new), 2, 64, dtype=torch.float16, device=device)
    out, twin = both(pool, q, new, **options)
    assert_close(out, twin)
    assert not torch.allclose(out, both(pool, q, new)[0], atol=0.01)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(14, 2), (9, 3), (24, 1), (8, 8)])
def test_a09_t1_the_prefill_kernel_maps_query_heads_to_kv_heads(q_heads, kv_heads, device):
    keys = [torch.zeros(kv_heads, 20, 64, device=device)]
    values = [torch.arange(kv_heads, device=device).float().view(-1, 1, 1).expand(-1, 20, 64)]
    out, _ = both(
        make_pool("native", keys, values), queries(4, q_heads, 64, dtype=torch.float32, device=device), (4,)
    )
    wanted = (torch.arange(q_heads, device=device) // (q_heads // kv_heads)).float()
    assert (out - wanted.view(1, -1, 1)).abs().max() < 1e-5


@pytest.mark.parametrize("fmt", FORMATS)
def test_a07_t2_poison_outside_the_sequence_never_reaches_the_prefill_kernel(fmt, device):
    q = queries(10, 1, 64, dtype=torch.float16, device=device)
    clean, dirty = (
        both(random_pool(fmt, torch.float16, (63, 6), device, kv_heads=1, poison=poison), q, (4, 6))[0]
        for poison in (False, True)
    )
    assert torch.equal(clean, dirty)
    assert clean.isfinite().all()


@pytest.mark.parametrize("fmt", ["native", "int8_sym", "fp8_e4m3"])
def test_a07_t4_page_order_and_spare_columns_change_no_prefill(fmt, device):
    q = queries(30, 1, 64, dtype=torch.bfloat16, device=device)
    first, *others = (
        both(random_pool(fmt, torch.bfloat16, (90,), device, kv_heads=1, **options), q, (30,))[0]
        for options in ({}, {"order_seed": 1}, {"spare": 0}, {"spare": 5})
    )
    assert all(torch.equal(first, other) for other in others)


def test_a07_t5_each_row_of_a_prefill_batch_equals_its_solo_run(device):
    new = (20, 1, 7)
    pool = random_pool("int8_sym", torch.float16, (80, 33, 7), device, kv_heads=1)
    q = queries(sum(new), 2, 64, dtype=torch.float16, device=device)
    together, _ = both(pool, q, new)
    start = 0
    for row, count in enumerate(new):
        alone, _ = both(pool.row(row), q[start : start + count], (count,))
        assert torch.equal(alone, together[start : start + count])
        start += count


def test_a_sequence_without_new_tokens_is_left_out(device):
    pool = random_pool("int8_sym", torch.float16, (20, 33), device, kv_heads=1)
    assert_close(*both(pool, queries(5, 1, 64, dtype=torch.float16, device=device), (0, 5)))


@pytest.mark.parametrize(
    ("fmt", "part"),
    [("native", "k"), ("fp8_e4m3", "k"), ("fp8_e4m3_static", "k"), ("fp8_e4m3", "v"), ("int8_sym", "k_scale"), ("int8_sym", "v_scale")],
)  # fmt: skip
def test_a11_t2_one_nan_in_the_pages_is_seen_by_prefill(fmt, part, device):
    """One element of K or one scale; of V a row, since an element of it is seen in its own column alone."""
    pool = random_pool(fmt, torch.float16, (40,), device)
    tensor = getattr(pool.cache, part)
    at = (int(pool.table[0, 0]), 1, 3, *([7] if part == "k" else []))
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[at] = 0x7F
    else:
        tensor[at] = torch.nan
    starts = torch.tensor([0, 5], device=device, dtype=torch.int32)
    q = queries(5, 4, 64, dtype=torch.float16, device=device)
    out = paged_prefill(pool.cache, q, pool.table, pool.lengths, starts, 5, 0.125)
    assert out[:, 2:].isnan().all()
    assert out[:, :2].isfinite().all()


@pytest.mark.parametrize(("fmt", "quantized"), [("native", 0), ("fp8_e4m3_static", 173)])
def test_reads_are_counted_once_a_sequence(fmt, quantized, device):
    pool = random_pool(fmt, torch.float16, (140, 33), device)
    starts = torch.tensor([0, 140, 141], device=device, dtype=torch.int32)
    reads, twin = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))
    q = queries(141, 2, 64, dtype=torch.float16, device=device)
    where = (pool.table, pool.lengths, starts, 140, 0.125)
    with record() as launches:
        paged_prefill(pool.cache, q, *where, reads=reads)
    paged_prefill_torch(pool.cache, q, *where, reads=twin)
    assert reads.tolist() == twin.tolist() == [173, quantized]
    assert [launch.name for launch in launches] == ["paged_prefill_causal"]


def test_nothing_new_launches_nothing(device):
    pool = random_pool("native", torch.float32, (5,), device)
    starts = torch.zeros(2, device=device, dtype=torch.int32)
    with record() as launches:
        out = paged_prefill(
            pool.cache, torch.zeros(0, 2, 64, device=device), pool.table, pool.lengths, starts, 0, 1.0
        )  # fmt: skip
    assert out.shape == (0, 2, 64)
    assert not launches


@pytest.mark.parametrize("starts", [torch.tensor([0, 2]), torch.tensor([0, 1, 2], dtype=torch.int32)])
def test_query_starts_that_do_not_fit_are_an_error(starts, device):
    pool = random_pool("native", torch.float32, (5,), device)
    q = queries(2, 2, 64, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="one more than the sequences"):
        paged_prefill(pool.cache, q, pool.table, pool.lengths, starts.to(device), 2, 1.0)
