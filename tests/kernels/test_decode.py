"""Paged decode against its torch twin, and what must not change its result."""

import itertools

import pytest
import torch

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention.decode import choose_splits, paged_decode
from kvbench_kernels.attention.reference import paged_decode_torch
from kvbench_kernels.launches import record
from tests.kernels.cover import cover, grid
from tests.kernels.kv_pool import (
    DTYPES,
    FORMATS,
    QUANTIZED,
    assert_close,
    make_pool,
    queries,
    random_pool,
    rows_of,
)


def both(pool, q, *, splits=1, **options):
    """The kernel's result and its twin's."""
    options.setdefault("scaling", q.shape[-1] ** -0.5)
    where = (pool.table, pool.lengths, options.pop("scaling"))
    return (
        paged_decode(pool.cache, q, *where, splits=splits, **options),
        paged_decode_torch(pool.cache, q, *where, splits=splits, **options),
    )


@pytest.mark.parametrize(("fmt", "dtype"), grid(FORMATS, DTYPES), ids=str)
def test_it_equals_its_twin_on_ragged_lengths(fmt, dtype, device):
    pool = random_pool(fmt, dtype, (1, 67, 48), device)
    q = queries(3, 6, 64, dtype=dtype, device=device)
    for splits in (1, 2):
        assert_close(*both(pool, q, splits=splits))


DIMS = [
    (16, 32, 16),
    (80, 80, 32),
    (96, 96, 64),
    (112, 112, 16),
    (128, 128, 64),
    (192, 128, 32),
    (256, 256, 16),
    (64, 80, 64),
]


@pytest.mark.parametrize(
    ("fmt", "dims"),
    cover(itertools.product(("native", "int8_sym", "fp8_e4m3"), DIMS), lambda case: case),
    ids=str,
)
def test_head_dims_and_page_sizes(fmt, dims, device):
    head_dim, value_dim, page_size = dims
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "page_size": page_size}
    pool = random_pool(fmt, torch.float16, (70,), device, kv_heads=1, **sizes)
    assert_close(*both(pool, queries(1, 3, head_dim, dtype=torch.float16, device=device)))


@pytest.mark.parametrize("group", [1, 7, 24, 71])
def test_groups(group, device):
    pool = random_pool("fp8_e4m3", torch.bfloat16, (40, 9), device, kv_heads=1)
    assert_close(
        *both(pool, queries(2, group, 64, dtype=torch.bfloat16, device=device), splits=1 + group % 2)
    )


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(14, 2), (9, 3), (32, 4), (24, 1), (48, 2), (71, 1), (8, 8)]
)
def test_a09_t1_the_decode_kernel_maps_query_heads_to_kv_heads(q_heads, kv_heads, device):
    """With K = 0 every weight is 1; the mean of 32 equal values is exact, however a GPU divides."""
    keys = [torch.zeros(kv_heads, 32, 64, device=device)]
    values = [torch.arange(kv_heads, device=device).float().view(-1, 1, 1).expand(-1, 32, 64)]
    pool = make_pool("native", keys, values)
    out, _ = both(pool, queries(1, q_heads, 64, dtype=torch.float32, device=device))
    wanted = (torch.arange(q_heads, device=device) // (q_heads // kv_heads)).float()
    assert torch.equal(out, wanted.view(1, -1, 1).expand(1, q_heads, 64))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(33, 2), (3, 2)])
def test_a09_t2_the_kernels_refuse_heads_that_do_not_divide(q_heads, kv_heads, device):
    pool = random_pool("native", torch.float32, (5,), device, kv_heads=kv_heads)
    with pytest.raises(ValueError, match=f"{q_heads} query heads on {kv_heads} KV heads"):
        both(pool, queries(1, q_heads, 64, dtype=torch.float32, device=device))


OPTIONS = [
    {"sliding_window": 16},
    {"softcap": 2.0},
    {"sinks": 1.0},
    {"sliding_window": 33, "softcap": 9.0, "sinks": 1.0},
]


@pytest.mark.parametrize(("options", "splits"), grid(OPTIONS, [1, 3]), ids=str)
def test_windows_soft_caps_and_sinks(options, splits, device):
    pool = random_pool("int8_sym", torch.float16, (150, 20, 64), device)
    if "sinks" in options:
        options = {**options, "sinks": torch.tensor([2.0, -1.0, 0.0, 9.0], device=device)}
    q = 4 * queries(3, 4, 64, dtype=torch.float16, device=device)
    out, twin = both(pool, q, splits=splits, **options)
    assert_close(out, twin)
    plain, _ = both(pool, q, splits=splits)
    assert not torch.allclose(out, plain, atol=0.01)


@pytest.mark.parametrize("splits", [2, 5, 17])
def test_splits_without_a_tile_add_nothing(splits, device):
    """17 is also one chunk of the combine and one more."""
    pool = random_pool("int8_sym", torch.float32, (1, 40, 280), device, kv_heads=1)
    assert_close(*both(pool, queries(3, 1, 64, dtype=torch.float32, device=device), splits=splits))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_an_inactive_row_gives_zeros(splits, sinks, device):
    pool = random_pool("fp8_e4m3", torch.float16, (20, 30), device, poison=True)
    pool.lengths[0] = 0
    given = torch.zeros(4, device=device) if sinks else None
    out, twin = both(pool, queries(2, 4, 64, dtype=torch.float16, device=device), splits=splits, sinks=given)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert_close(out, twin)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a07_t2_poison_outside_the_sequence_never_reaches_the_decode_kernel(fmt, device):
    q = queries(3, 2, 64, dtype=torch.float16, device=device)
    for splits in (1, 2):
        clean, dirty = (
            both(
                random_pool(fmt, torch.float16, (1, 63, 64), device, kv_heads=1, poison=poison),
                q,
                splits=splits,
            )[0]
            for poison in (False, True)
        )
        assert torch.equal(clean, dirty)
        assert clean.isfinite().all()


@pytest.mark.parametrize("fmt", ["native", "int8_sym", "fp8_e4m3"])
def test_a07_t2_what_has_left_the_window_is_not_read(fmt, device):
    """Its pages may belong to another sequence by then, or to none."""
    pool = random_pool(fmt, torch.float16, (60,), device, kv_heads=1, poison=True)
    q = queries(1, 2, 64, dtype=torch.float16, device=device)
    before, _ = both(pool, q, sliding_window=20)
    pool.table[0, :2] = torch.tensor([-1, 4])  # page 4 belongs to no sequence and is poisoned
    out = paged_decode(pool.cache, q, pool.table, pool.lengths, 0.125, splits=1, sliding_window=20)
    assert torch.equal(out, before)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a07_t3_spare_columns_and_page_order_change_no_decode(fmt, device):
    q = queries(1, 2, 64, dtype=torch.bfloat16, device=device)
    first, *others = (
        both(random_pool(fmt, torch.bfloat16, (90,), device, kv_heads=1, **options), q, splits=2)[0]
        for options in ({}, {"order_seed": 1}, {"order_seed": 2}, {"spare": 0}, {"spare": 5})
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("splits", [1, 3])
def test_a07_t5_each_row_of_a_decode_batch_equals_its_solo_run(splits, device):
    pool = random_pool("int8_sym", torch.float16, (130, 1, 64, 20), device, kv_heads=1)
    q = queries(4, 3, 64, dtype=torch.float16, device=device)
    together, _ = both(pool, q, splits=splits)
    for row in range(4):
        alone, _ = both(pool.row(row), q[row : row + 1], splits=splits)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("fmt", "magnitude"), cover(itertools.product(QUANTIZED, (1e5, 1e30, 1e-30)), lambda case: case)
)
def test_bfloat16_queries_beyond_the_range_of_float16(fmt, magnitude, device):
    pool = random_pool(fmt, torch.bfloat16, (50,), device, kv_heads=1)
    q = queries(1, 3, 64, dtype=torch.bfloat16, device=device) * magnitude
    q[0, 1] = 0.0
    out, twin = both(pool, q, scaling=0.125 / magnitude)
    assert_close(out, twin)
    assert not torch.equal(out[0, 0], out[0, 1])


@pytest.mark.parametrize(
    ("fmt", "magnitude"), [("int8_sym", 1e-4), ("int8_sym", 1e6), ("fp8_e4m3", 1e-30), ("fp8_e4m3", 1e30)]
)
def test_values_whose_scales_leave_the_range_of_float16(fmt, magnitude, device):
    keys = rows_of((80,), 1, 64, torch.float32, device, 1)
    values = [rows_of((80,), 1, 64, torch.float32, device, 2)[0] * magnitude]
    pool = make_pool(fmt, keys, [x.bfloat16() for x in values])
    assert_close(*both(pool, queries(1, 3, 64, dtype=torch.bfloat16, device=device)))


@pytest.mark.parametrize(("at", "fmt"), grid([0, 79], ["int8_sym", "fp8_e4m3"]))
def test_a_huge_value_that_nobody_attends_to_costs_no_precision(fmt, at, device):
    q = torch.ones(1, 1, 64, dtype=torch.float16, device=device)
    keys = rows_of((80,), 1, 64, torch.float32, device, 1)
    values = rows_of((80,), 1, 64, torch.float32, device, 2)
    keys[0][:, at], values[0][:, at] = -20.0, 2.0**20
    assert_close(*both(make_pool(fmt, keys, values), q))


def test_queries_of_any_stride(device):
    pool = random_pool("int8_sym", torch.float16, (20, 33), device)
    wide = queries(4, 3, 80, dtype=torch.float16, device=device)
    q = wide.transpose(0, 1)[1:, :, 16:]  # [2, 4, 64], an offset view
    assert not q.is_contiguous()
    assert torch.equal(both(pool, q)[0], both(pool, q.contiguous())[0])


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("fmt", "quantized"), [("native", 0), ("int8_static", 100), ("fp8_e4m3", 100)])
def test_reads_are_counted_once_a_sequence(fmt, quantized, splits, device):
    pool = random_pool(fmt, torch.float16, (33, 67), device)
    reads, twin = (torch.tensor([5, 0], device=device) for _ in range(2))
    q = queries(2, 4, 64, dtype=torch.float16, device=device)
    where = (pool.table, pool.lengths, 0.125)
    paged_decode(pool.cache, q, *where, splits=splits, sliding_window=20, reads=reads)
    paged_decode_torch(pool.cache, q, *where, splits=splits, sliding_window=20, reads=twin)
    assert reads.tolist() == twin.tolist() == [105, quantized]


def test_launches_are_recorded_by_name(device):
    pool = random_pool("native", torch.float32, (5,), device)
    q = queries(1, 2, 64, dtype=torch.float32, device=device)
    with record() as all_of_them:
        with record() as nothing:
            pass
        both(pool, q, splits=1)
        with record() as inner:
            both(pool, q, splits=2)
    both(pool, q, splits=2)
    assert nothing == []
    split = ["paged_decode_split", "paged_decode_combine", "paged_decode_torch"]
    assert [launch.name for launch in inner] == split
    assert [launch.name for launch in all_of_them] == ["paged_decode_split", "paged_decode_torch", *split]


PARTS = [
    ("native", "k"), ("native", "v"), ("fp8_e4m3", "k"), ("fp8_e4m3_static", "k"), ("fp8_e4m3_static", "v"),
    ("int8_sym", "k_scale"), ("int8_sym", "v_scale"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fmt", "part", "splits"),
    cover([(*part, n) for part in PARTS for n in (1, 2)], lambda case: (case[:2], case[1:])),
)
def test_a11_t2_one_nan_in_the_pages_is_seen_by_decode(fmt, part, splits, device):
    """One element of K or one scale; of V a row, since an element of it is seen in its own column alone."""
    pool = random_pool(fmt, torch.float16, (70,), device, poison=False)
    tensor = getattr(pool.cache, part)
    at = (int(pool.table[0, 1]), 1, 3, *([7] if part == "k" else []))
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[at] = 0x7F if part == "k" else 0xFF
    else:
        tensor[at] = torch.nan
    out = paged_decode(
        pool.cache, queries(1, 4, 64, dtype=torch.float16, device=device), pool.table, pool.lengths, 0.125,
        splits=splits,
    )  # fmt: skip
    assert out[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fmt": KV_FORMATS["native"]}, "'native' hold"),
        ({"k_scale": None}, "k_scale of KV format 'int8_sym' must be contiguous"),
        ({"v_scale": torch.ones(1)}, "v_scale of KV format 'int8_sym' must be contiguous"),
        ({"table": torch.zeros(1, 2, dtype=torch.int64)}, "must be dense int32"),
        ({"q": torch.zeros(1, 2, 80)}, "do not fit"),
        ({"fmt": KV_FORMATS["fp8_e4m3"]}, "'fp8_e4m3' hold torch.float8_e4m3fn, not torch.int8"),
        ({"k": torch.zeros(3, 2, 64, 16, dtype=torch.int8).transpose(2, 3)}, "k_pages must be contiguous"),
        ({"splits": 0}, "0 splits"),
        ({"lengths": torch.tensor([20])}, "the lengths are torch.int64"),
        ({"lengths": torch.tensor([20, 1], dtype=torch.int32)}, "1 rows in the page table and 2 lengths"),
        ({"q": torch.zeros(3, 2, 64)}, "3 queries for 1 sequences"),
        ({"sinks": torch.zeros(1)}, r"Sinks \(1,\) for 2 query heads"),
        ({"reads": torch.zeros(2, dtype=torch.int32)}, "read counter is torch.int32"),
        ({"q": torch.zeros(1, 2, 64, dtype=torch.float64)}, "no query dtype float64"),
        ({"sliding_window": 0}, "sliding window"),
    ],
)
def test_what_the_kernel_would_read_wrongly_is_an_error(change, words, device):
    pool = random_pool("int8_sym", torch.float32, (20,), device)
    q = queries(1, 2, 64, dtype=torch.float32, device=device)
    given = {"q": q, "table": pool.table, "lengths": pool.lengths, "scaling": 0.125, "splits": 1}
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    cache = pool.cache._replace(**{name: change.pop(name) for name in pool.cache._fields if name in change})
    with pytest.raises(ValueError, match=words):
        paged_decode(cache, **given | change)


def test_splits_by_batch_and_length():
    assert choose_splits(1, 8, 131_072, 132) == 33
    assert choose_splits(8, 8, 16_384, 132) == 4
    assert choose_splits(1, 8, 1024, 132) == 8
    assert choose_splits(32, 8, 4096, 132) == 1
    assert choose_splits(32, 8, 65_536, 132) == 16
    assert choose_splits(1, 1, 1, 132) == 1
    assert choose_splits(0, 8, 0, 132) == 1
    for batch, heads, length in itertools.product((1, 7, 64), (1, 8), (1, 128, 129, 5000)):
        assert 1 <= choose_splits(batch, heads, length, 132) <= max(1, -(-length // 128))


def test_native_pages_have_the_dtype_of_the_queries(device):
    pool = random_pool("native", torch.float32, (20,), device)
    q = queries(1, 2, 64, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"q is torch\.float16 and native pages hold K in torch\.float32"):
        both(pool, q)
