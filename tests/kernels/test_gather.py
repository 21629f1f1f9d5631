"""Pages back to contiguous K and V: every value against the torch dequantizer, and nothing else read."""

import itertools

import pytest
import torch

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention.reference import paged_gather_torch, paged_write_torch
from kvbench_kernels.kv.gather import paged_gather
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import dequantize
from kvbench_kernels.kv.write import paged_write
from kvbench_kernels.launches import record
from tests.kernels.address_space import address_space
from tests.kernels.cover import cover, grid
from tests.kernels.kv_pages import DTYPES, FORMATS, QUANTIZED, hard_rows, make_pool, raw

# The interpreter computes with numpy, which warns where IEEE says infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

STATIC = ("int8_static", "fp8_e4m3_static")


def same(a, b):
    """Bit for bit, except that one NaN is as good as another."""
    nan = a.isnan()
    return bool(torch.equal(nan, b.isnan())) and raw(a.masked_fill(nan, 0)) == raw(b.masked_fill(nan, 0))


def written(
    fmt, device, dtype = torch.float32, *,
    pages = 4, heads = 2, page_size = 16, dim = 64, value_dim = 64,
):  # fmt: skip
    """A pool with a row of every kind in each slot, stored by the reference."""
    sizes = {"pages": pages, "heads": heads, "page_size": page_size, "dim": dim, "value_dim": value_dim}
    pool = make_pool(fmt, device, dtype, **sizes)
    slots = torch.arange(pages * page_size, device=device)
    k = hard_rows(len(slots), heads, dim, dtype, device, seed=1)
    v = hard_rows(len(slots), heads, value_dim, dtype, device, seed=2)
    paged_write_torch(pool.cache, k, v, slots, pool.health)
    return pool


GEOMETRIES = [
    (2, 64, 64, 16, 33),
    (1, 80, 48, 24, 70),
    (3, 128, 128, 32, 64),
    (1, 192, 128, 16, 1),
    (1, 256, 256, 64, 65),
]


@pytest.mark.parametrize(("fmt", "dtype", "geometry"), grid(FORMATS, DTYPES, GEOMETRIES), ids=str)
def test_values_are_the_torch_dequantizers(device, fmt, dtype, geometry):
    heads, dim, value_dim, page_size, length = geometry
    pool = written(
        fmt, device, dtype, pages=7, heads=heads, page_size=page_size, dim=dim, value_dim=value_dim
    )
    pages = torch.tensor([[5, 0, 3, 2, -1], [6, 4, 1, 0, 2]], dtype=torch.int32, device=device)
    ours = paged_gather(pool.cache, pages, length, dtype, None)
    twin = paged_gather_torch(pool.cache, pages, length, dtype, None)
    for got, expected, d in zip(ours, twin, (dim, value_dim), strict=True):
        assert got.shape == expected.shape == (2, heads, length, d)
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert same(got, expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_token_comes_from_its_own_page(device, fmt):
    """Against the dequantizer itself, token by token: the twin's indexing is not trusted here."""
    pool = written(fmt, device, value_dim=32)
    table = [[2, 0], [3, 1]]
    got = paged_gather(pool.cache, torch.tensor(table, dtype=torch.int32, device=device), 19, torch.float32)
    for out, payload, scales in zip(
        got, (pool.cache.k, pool.cache.v), (pool.cache.k_scale, pool.cache.v_scale), strict=True
    ):
        for row in range(2):
            for token in (0, 15, 16, 18):
                at = table[row][token // 16], slice(None), token % 16
                scale = scales if scales is None or fmt in STATIC else scales[at]
                assert same(out[row, :, token], dequantize(payload[at], scale, torch.float32)), (row, token)


@pytest.mark.parametrize(
    ("fmt", "dtype"), cover(itertools.product(QUANTIZED, DTYPES), lambda case: case), ids=str
)
def test_every_code_under_many_scales(device, fmt, dtype):
    """All 256 codes, with scales down to where the product is subnormal and up to where it is infinite."""
    scales = (
        2.0 ** torch.linspace(-24, 15.9, 32) if fmt == "int8_sym" else 2.0 ** torch.linspace(-126, 127, 32)
    )
    for scale in scales[::8] if fmt in STATIC else scales[:1]:
        pool = make_pool(fmt, device, pages=2, heads=1, dim=256, scale=(float(scale), float(scale)))
        codes = torch.arange(256, device=device).to(torch.uint8).view(pool.cache.k.dtype)
        for payload, given in ((pool.cache.k, pool.cache.k_scale), (pool.cache.v, pool.cache.v_scale)):
            payload.view(torch.uint8).copy_(codes.view(torch.uint8).expand_as(payload))
            if given is not None and fmt not in STATIC:
                given.view(-1).copy_(scales)
        pages = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
        ours = paged_gather(pool.cache, pages, 32, dtype)
        twin = paged_gather_torch(pool.cache, pages, 32, dtype)
        assert same(ours[0], twin[0])
        assert same(ours[1], twin[1])
        assert int(ours[0].isnan().sum()) == (2 * 32 if fmt.startswith("fp8") else 0)


def test_native_pages_of_another_dtype_are_rounded_once(device):
    pool = written("native", device)
    pages = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    for dtype in DTYPES:
        ours = paged_gather(pool.cache, pages, 32, dtype)
        assert same(
            ours[0], pool.cache.k[[3, 1]].transpose(1, 2).reshape(1, 32, 2, 64).transpose(1, 2).to(dtype)
        )


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_was_written_comes_back(device, fmt):
    """Both kernels together, within the format's own error."""
    pool = make_pool(fmt, device, scale=(0.05, 0.05))
    k, v = (torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(s)).to(device) for s in (1, 2))
    pages = torch.tensor([[2, 3, 1]], dtype=torch.int32, device=device)
    token = torch.arange(40, device=device)
    slots = pages[0, token // 16].long() * 16 + token % 16
    paged_write(pool.cache, k, v, slots, pool.health)
    for got, x in zip(paged_gather(pool.cache, pages, 40, torch.float32), (k, v), strict=True):
        error = (got[0].transpose(0, 1) - x).abs()
        step = (
            x.abs().amax(-1, keepdim=True) / 127 if fmt == "int8_sym" else torch.tensor(0.05, device=device)
        )
        bound = {"native": 0 * x, "int8": 0.502 * step + 0 * x, "fp8": x.abs() / 16 + 1e-3}[fmt.split("_")[0]]
        assert bool((error <= bound).all())


# A07: only what belongs to the sequence is read


@pytest.mark.parametrize("fmt", FORMATS)
def test_columns_beyond_the_length_are_not_read(device, fmt):
    """A page id far outside the pool would crash a GPU, and the interpreter too."""
    pool = written(fmt, device)
    for length in (16, 17, 32):
        used = -(-length // 16)
        table = [[1, 2, *[2**30] * 6], [3, 0, *[-(2**30)] * 6]]
        wild = [row[:used] + row[2:] for row in table]
        exact = [row[:used] for row in table]
        outs = [
            paged_gather(pool.cache, torch.tensor(t, dtype=torch.int32, device=device), length, torch.float32)
            for t in (wild, exact)
        ]
        assert same(outs[0][0], outs[1][0])
        assert same(outs[0][1], outs[1][1])


# Evidence


@pytest.mark.parametrize(("fmt", "gather"), grid(FORMATS, [paged_gather, paged_gather_torch]))
def test_reads_count_tokens_once_a_sequence(device, fmt, gather):
    pool = written(fmt, device, pages=8, heads=3)
    reads = torch.tensor([1000, 2000], device=device)
    pages = torch.tensor([[*range(8)], [*range(8)][::-1]], dtype=torch.int32, device=device)
    for length in (100, 5):
        gather(pool.cache, pages, length, torch.float32, reads)
    assert reads.tolist() == [1000 + 2 * 105, 2000 + (0 if fmt == "native" else 2 * 105)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_k_and_v_take_one_launch(device, fmt):
    pool = written(fmt, device, pages=2, heads=1)
    pages = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    with record() as launches:
        paged_gather(pool.cache, pages, 20, torch.float32)
    assert [launch.name for launch in launches] == [f"kv_gather_{fmt}"]
    with record() as launches:
        k, _ = paged_gather(pool.cache, pages, 0, torch.float32)
    assert k.shape == (1, 1, 0, 64)
    assert not launches


# A12: offsets above 2^31


def test_a12_t2_payload_above_2_to_the_31_elements(device):
    heads, page_size, dim, pages = 8, 16, 128, 131_074
    k = address_space(pages, heads, page_size, dim, dtype=torch.int8, device=device)
    scale = address_space(pages, heads, page_size, dtype=torch.float16, device=device)
    x = hard_rows(32, heads, dim, torch.float32, device)
    health = torch.zeros(3, dtype=torch.int64, device=device)
    outs = []
    for first in (0, 131_072):
        slots = torch.arange(32, device=device) + first * page_size
        cache = LayerPages(KV_FORMATS["int8_sym"], k, k, scale, scale)
        paged_write_torch(cache, x, x, slots, health)
        pages_of = torch.tensor([[first, first + 1]], dtype=torch.int32, device=device)
        outs.append(paged_gather(cache, pages_of, 32, torch.float32))
    assert outs[0][0].abs().sum() > 0
    assert same(outs[0][0], outs[1][0])
    assert same(outs[0][1], outs[1][1])


def test_a12_t3_scales_above_2_to_the_31_elements(device):
    k = address_space(2**24 + 1, 8, 16, 1, dtype=torch.int8, device=device)
    scale = address_space(2**24 + 1, 8, 16, dtype=torch.float16, device=device)
    k[2**24], scale[2**24] = 2, torch.arange(1.0, 129, device=device).view(8, 16).half()
    pages = torch.tensor([[2**24]], dtype=torch.int32, device=device)
    cache = LayerPages(KV_FORMATS["int8_sym"], k, k, scale, scale)
    out, _ = paged_gather(cache, pages, 16, torch.float32)
    assert out.flatten().tolist() == [2.0 * i for i in range(1, 129)]


# What does not fit is refused before anything is launched


@pytest.mark.parametrize("gather", [paged_gather, paged_gather_torch])
def test_what_does_not_fit_is_refused(gather):
    pool = make_pool("int8_sym", "cpu")
    table = torch.zeros((1, 2), dtype=torch.int32)
    with record() as launches:
        with pytest.raises(ValueError, match=r"33 tokens need a page table \[B, 3 or more\]"):
            gather(pool.cache, table, 33, torch.float32)
        with pytest.raises(ValueError, match="with dense rows"):
            gather(pool.cache, table.repeat(1, 2)[:, ::2], 3, torch.float32)
        with pytest.raises(ValueError, match=r"'fp8_e4m3' hold torch.float8_e4m3fn, not torch.int8"):
            gather(pool.cache._replace(fmt=KV_FORMATS["fp8_e4m3"]), table, 3, torch.float32)
    assert not launches
