"""Quantize + scatter: every stored byte against the torch quantizers, and nothing else touched."""

import itertools
import math

import pytest
import torch

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention.reference import paged_write_torch
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE
from kvbench_kernels.kv.write import paged_write
from kvbench_kernels.launches import record
from tests.kernels.address_space import address_space
from tests.kernels.cover import cover, grid
from tests.kernels.kv_pages import DTYPES, FILL, FORMATS, QUANTIZED, filled, hard_rows, make_pool, raw

# The interpreter computes with numpy, which warns where IEEE says infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")

STATIC = ("int8_static", "fp8_e4m3_static")
E4M3 = ("fp8_e4m3", "fp8_e4m3_static")


def slots_of(device, *slots):
    return torch.tensor(slots, dtype=torch.int64, device=device)


def stored(fmt, x, scale=1.0):
    """Bytes of one row x [D] written to slot 0 as K, and the counts of K alone."""
    pool = make_pool(fmt, str(x.device), pages=1, heads=1, page_size=1, dim=len(x), scale=(scale, scale))
    row = x.view(1, 1, -1)
    paged_write(pool.cache, row, torch.zeros_like(row), slots_of(str(x.device), 0), pool.health)
    return list(raw(pool.cache.k)), pool.health.tolist()


def assert_twins(device, fmt, k, v, slots, dtype=torch.float32, **sizes):
    """Every byte and count of the pool is that of the torch writer."""
    ours, twin = (make_pool(fmt, device, dtype, **sizes) for _ in range(2))
    paged_write(ours.cache, k, v, slots, ours.health)
    paged_write_torch(twin.cache, k, v, slots, twin.health)
    assert ours.content() == twin.content()


def shuffled(slots, tokens, device):
    return torch.randperm(slots, generator=torch.Generator().manual_seed(3))[:tokens].to(device)


# The whole pool against the twin, byte for byte

# heads, dim, value_dim, page_size
GEOMETRIES = [
    (2, 64, 64, 16), (3, 80, 48, 24), (8, 128, 128, 32), (1, 192, 128, 16), (2, 112, 96, 64), (1, 256, 256, 1),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "dtype", "geometry"), grid(FORMATS, DTYPES, GEOMETRIES), ids=str)
def test_stored_bytes_are_the_torch_quantizers(device, fmt, dtype, geometry):
    heads, dim, value_dim, page_size = geometry
    k, v = (hard_rows(5, heads, d, dtype, device, seed=s) for s, d in ((1, dim), (2, value_dim)))
    order = shuffled(12 * page_size, 5, device)
    order[4] = -1
    sizes = {"pages": 12, "heads": heads, "page_size": page_size, "dim": dim, "value_dim": value_dim}
    assert_twins(device, fmt, k, v, order, dtype, **sizes)


# A part of a large tile, one or two whole ones, and a rest.
@pytest.mark.parametrize(("fmt", "tokens"), grid(FORMATS, [1, 16, 19]))
def test_large_tiles_store_the_same_bytes(device, fmt, tokens, monkeypatch):
    """Those of a prompt: more elements a program than the few rows of a decode step are given."""
    monkeypatch.setattr("kvbench_kernels.kv.write.MANY", 1)
    k, v = (hard_rows(tokens, 2, dim, torch.bfloat16, device, seed=6) for dim in (64, 128))
    sizes = {"page_size": 8, "dim": 64, "value_dim": 128}
    assert_twins(device, fmt, k, v, shuffled(32, tokens, device), torch.bfloat16, **sizes)


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_slot_holds_its_own_token(device, fmt):
    """Against the quantizer itself, row by row: the twin's indexing is not trusted here."""
    k, v = (hard_rows(3, 2, 64, torch.float32, device, seed=s) for s in (4, 5))
    pool = make_pool(fmt, device)
    paged_write(pool.cache, k, v, slots_of(device, 17, 63, 0), pool.health)
    counts = [0, 0, 0]
    for side, x, payload, scales in (
        ("k", k, pool.cache.k, pool.cache.k_scale),
        ("v", v, pool.cache.v, pool.cache.v_scale),
    ):
        for token, (page, offset) in enumerate([(1, 1), (3, 15), (0, 0)]):
            for head in range(2):
                expected = QUANTIZE[fmt](x[token, head], scales if fmt in STATIC else None)
                assert raw(payload[page, head, offset]) == raw(expected.codes), (side, token, head)
                if expected.scales is not None and scales is not None:
                    assert raw(scales[page, head, offset]) == raw(expected.scales)
                for i, count in enumerate((expected.clipped, expected.nonfinite, expected.overflow)):
                    counts[i] += int(count)
        written = torch.zeros(payload.shape[:3], dtype=torch.bool)
        written[[1, 3, 0], :, [1, 15, 0]] = True
        assert set(raw(payload[~written.to(device)])) == {FILL}
    assert pool.health.tolist() == counts


@pytest.mark.parametrize(
    ("fmt", "scale", "dtype"), grid(STATIC, [1.0, 0.0371], [torch.bfloat16, torch.float16]), ids=str
)
def test_every_16_bit_number_under_a_static_scale(device, fmt, scale, dtype, monkeypatch):
    if device == "cpu":
        # The interpreter's time goes by programs.
        monkeypatch.setattr("kvbench_kernels.kv.write.SMALL_TILE", 2**14)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    every = every.view(-1, 1, 256)
    pool = make_pool(fmt, device, pages=8, heads=1, page_size=32, dim=256, scale=(scale, 1.0))
    slots = torch.arange(256, device=device)
    paged_write(pool.cache, every, torch.zeros_like(every), slots, pool.health)
    expected = QUANTIZE[fmt](every, pool.cache.k_scale)
    assert raw(pool.cache.k) == raw(expected.codes)
    assert pool.health.tolist() == [int(expected.clipped), int(expected.nonfinite), 0]
    assert int(expected.nonfinite) > 0


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_any_float32_pattern(device, fmt):
    generator = torch.Generator().manual_seed(6)
    bits = torch.randint(-(2**31), 2**31, (2, 64, 2, 64), generator=generator).to(torch.int32)
    k, v = bits.view(torch.float32).to(device)
    # A row takes its scale from its largest element: without this no row would be small.
    powers = 2.0 ** torch.arange(-130, -2, device=device).view(64, 2, 1)
    v = torch.where(v.isfinite(), v.clamp(-1, 1) * powers, v)
    assert_twins(device, fmt, k, v, torch.arange(64, device=device))


TIES = [
    ("int8_sym", torch.int8, 127, [127, 0, 2, 2, 0, -2, -2, 17, 19, 126]),
    ("fp8_e4m3", torch.float8_e4m3fn, 448, [448, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 16, 20, 128]),
]


@pytest.mark.parametrize(("fmt", "payload", "largest", "due"), TIES)
def test_ties_go_to_the_even_code(device, fmt, payload, largest, due):
    """The largest element makes the scale exactly 1."""
    x = torch.tensor([largest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 17, 19, 126.5]).float().to(device)
    codes, _ = stored(fmt, x)
    assert torch.tensor(codes, dtype=torch.uint8).view(payload).float().tolist() == due


@pytest.mark.parametrize(
    ("amax", "bits"),
    [
        (127.0, 0x3C00),  # 1.0
        (127.0 * (1 + 2**-10), 0x3C01),
        (127.0 * (1 + 2**-20), 0x3C01),  # up, although 1.0 is nearer
        (127.0 * 65504, 0x7BFF),
        (127.0 * 65504 * (1 + 2**-22), 0x7BFF),
        (1e9, 0x7BFF),
        (1e-30, 0x0001),  # the smallest: 2^-24
        (0.0, 0x0001),
    ],
)
def test_int8_scale_is_rounded_up_to_fp16(device, amax, bits):
    pool = make_pool("int8_sym", device, pages=1, heads=1, page_size=1)
    x = torch.full((1, 1, 64), -amax, device=device)
    paged_write(pool.cache, x, x, slots_of(device, 0), pool.health)
    for scale in (pool.cache.k_scale, pool.cache.v_scale):
        assert scale is not None
        assert scale.view(torch.int16).item() == bits
    assert pool.health.tolist() == [0, 0, 2 if amax > 127.0 * 65504 else 0]


def test_subnormal_bfloat16_keeps_its_value(device):
    x = torch.tensor([1, 2, 16, 127, 64], dtype=torch.int16, device=device).view(torch.bfloat16)
    pool = make_pool("fp8_e4m3_static", device, pages=1, heads=1, page_size=1, dim=5, scale=(2.0**-133, 1.0))
    row = x.view(1, 1, 5)
    paged_write(pool.cache, row, row, slots_of(device, 0), pool.health)
    # 2^-133 is bfloat16's smallest number, so the codes count in it.
    assert pool.cache.k.float().flatten().tolist() == [1, 2, 16, 128, 64]
    assert pool.cache.v.float().flatten().tolist() == [0] * 5


# Which rows are written, and what is counted


def test_rows_with_a_negative_slot_are_neither_stored_nor_counted_and_none_launch_nothing(device):
    x = torch.full((2, 2, 64), math.nan, device=device)
    for fmt in FORMATS:
        pool = make_pool(fmt, device)
        before = pool.content()
        paged_write(pool.cache, x, x, slots_of(device, -1, -(2**40)), pool.health)
        assert pool.content() == before
        with record() as launches:
            paged_write(pool.cache, x[:0], x[:0], slots_of(device), pool.health)
        assert (launches, pool.content()) == ([], before)


def test_counts_are_added_to_what_is_there(device):
    pool = make_pool("int8_static", device, scale=(1.0, 2.0))
    pool.health += torch.tensor([100, 200, 300], device=device)
    k, v = (torch.zeros((2, 2, 64), device=device) for _ in range(2))
    k[0, 0, :5] = torch.tensor([127.4, 127.5, -128.0, 1e30, math.inf])
    v[1, 1, :3] = torch.tensor([254.9, -255.0, math.nan])
    paged_write(pool.cache, k, v, slots_of(device, 5, 6), pool.health)
    assert pool.health.tolist() == [100 + 3 + 1, 200 + 1 + 1, 300]


def test_counts_of_rows_that_are_all_bad(device):
    """Two counts travel in one number inside a program; neither may run into the other."""
    pool = make_pool("fp8_e4m3_static", device, scale=(1.0, 1.0))
    x = torch.full((16, 2, 64), 1e6, device=device)
    x[:, :, ::2] = math.nan
    paged_write(pool.cache, x, x, torch.arange(16, device=device), pool.health)
    half = 16 * 2 * 64
    assert pool.health.tolist() == [half, half, 0]


def test_native_pages_of_another_dtype_get_the_rounded_number(device):
    x = hard_rows(4, 2, 64, torch.float32, device)
    for dtype in (torch.bfloat16, torch.float32):
        pool = make_pool("native", device, dtype)
        paged_write(pool.cache, x, x, slots_of(device, 0, 1, 2, 3), pool.health)
        got = pool.cache.k[0, :, :4].transpose(0, 1)
        assert torch.equal(got.nan_to_num(7.0), x.to(dtype).nan_to_num(7.0))
        assert pool.health.tolist() == [0, 0, 0]


# A06: E4M3 overflow and rounding


def test_a06_t1_stored_overflow_saturates(device):
    x = torch.tensor([448.0, 449, 463.9, 464, 465, 480, 1000, -1000, 3e38], device=device)
    codes, health = stored("fp8_e4m3_static", x)
    assert codes == [0x7E] * 7 + [0xFE, 0x7E]
    assert health == [5, 0, 0]  # from above 464


def test_a06_t2_subnormals_are_stored(device):
    x = torch.tensor([2.0**-9, 1.5 * 2.0**-10, 2.0**-10, 0.00097, -(2.0**-9), -(2.0**-10)], device=device)
    codes, health = stored("fp8_e4m3_static", x)
    assert codes == [0x01, 0x01, 0x00, 0x00, 0x81, 0x80]
    assert health == [0, 0, 0]


@pytest.mark.parametrize(
    ("fmt", "bad", "dtype"), grid(QUANTIZED, [math.nan, math.inf, -math.inf], DTYPES), ids=str
)
def test_a06_t3_a_nonfinite_element_is_counted_and_never_laundered(device, fmt, bad, dtype):
    x = torch.tensor([1.0, -2.0, bad, 3.0], dtype=dtype, device=device)
    codes, health = stored(fmt, x)
    assert health == [0, 1, 0]
    assert codes[2] == (0x7F if fmt in E4M3 else 0)
    finite, _ = stored(fmt, torch.where(x.isfinite(), x, 0))
    assert codes[:2] + codes[3:] == finite[:2] + finite[3:]


# A08: scales beside the payload, strides


@pytest.mark.parametrize("fmt", ["int8_sym", "fp8_e4m3"])
def test_a08_t4_scales_and_payload_do_not_touch_each_other(device, fmt):
    """All tensors lie in one buffer with 64 bytes between them."""
    model = make_pool(fmt, device, heads=3, dim=80)
    tensors = list(model.cache.tensors().values())
    size = sum(t.nbytes + 64 for t in tensors)
    buffer = filled((size,), torch.uint8, device)
    views, gaps, at = [], [], 0
    for t in tensors:
        views.append(buffer[at : at + t.nbytes].view(t.dtype).view(t.shape))
        gaps.append(buffer[at + t.nbytes : at + t.nbytes + 64])
        at += t.nbytes + 64
    x = hard_rows(64, 3, 80, torch.float32, device)
    slots = torch.arange(64, device=device)
    paged_write(LayerPages(model.cache.fmt, *views), x, x, slots, model.health)
    paged_write_torch(model.cache, x, x, slots, torch.zeros_like(model.health))
    assert [raw(view) for view in views] == [raw(t) for t in tensors]
    assert {byte for gap in gaps for byte in raw(gap)} == {FILL}


@pytest.mark.parametrize(
    ("fmt", "dtype"), cover(itertools.product(FORMATS, DTYPES), lambda case: case), ids=str
)
def test_a08_t5_strided_views_store_what_their_contiguous_copy_does(device, fmt, dtype):
    base = hard_rows(6, 6, 160, dtype, device)
    views = {
        "sliced": base[1:6, 1:3, 3:67],  # the storage offset breaks the alignment
        "every other": base[:5, ::3, ::2][..., :64],
        "heads first": base[:2, :5, :64].transpose(0, 1),
        "dim first": base[:5, :2, :64].permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "one head expanded": base[:5, :1, :64].expand(5, 2, 64),
    }
    slots = slots_of(device, 3, 60, 21, 0, 47)
    for name, x in views.items():
        ours, copy = (make_pool(fmt, device, dtype) for _ in range(2))
        paged_write(ours.cache, x, x.flip(0), slots, ours.health)
        dense = x.contiguous().clone()
        paged_write(copy.cache, dense, dense.flip(0), slots, copy.health)
        assert ours.content() == copy.content(), name


# A12: offsets above 2^31


@pytest.mark.parametrize(
    ("dim", "pages", "page", "first"), [(128, 131_074, 131_072, "payload"), (1, 2**24 + 2, 2**24, "scales")]
)
def test_a12_t2_t3_payload_and_scales_above_2_to_the_31_elements(device, dim, pages, page, first):
    k = address_space(pages, 8, 16, dim, dtype=torch.int8, device=device)
    scale = address_space(pages, 8, 16, dtype=torch.float16, device=device)
    assert (k if first == "payload" else scale)[page].storage_offset() == 2**31
    x = hard_rows(3, 8, dim, torch.float32, device)
    places = [(page, 5), (page + 1, 15), (page - 1, 0)]
    health = torch.zeros(3, dtype=torch.int64, device=device)
    slots = slots_of(device, *(16 * at + offset for at, offset in places))
    paged_write(LayerPages(KV_FORMATS["int8_sym"], k, k, scale, scale), x, x, slots, health)
    expected = QUANTIZE["int8_sym"](x, None)
    for i, (at, offset) in enumerate(places):
        assert raw(k[at, :, offset]) == raw(expected.codes[i])
        assert raw(scale[at, :, offset]) == raw(expected.scales[i])


def test_a12_t3_input_above_2_to_the_31_elements(device):
    storage = address_space(2**31 + 128, dtype=torch.float16, device=device)
    x = storage.as_strided((3, 2, 64), (2**30, 64, 1))
    x.copy_(hard_rows(9, 2, 64, torch.float16, device)[:3])  # the third is not zero
    assert_twins(device, "int8_sym", x, x, slots_of(device, 0, 1, 2))


# What does not fit is refused before anything is launched


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(3, 2, 63)}, r"k is torch.float32 \[3, 2, 63\]; pages \[4, 2, 16, 64\] take"),
        ({"v": torch.zeros(3, 3, 64)}, "do not fit each other"),
        ({"k": torch.zeros(3, 2, 64, dtype=torch.float64)}, "k is torch.float64"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots must be dense int64"),
        ({"health": torch.zeros(2, dtype=torch.int64)}, r"health int64 \[3\]"),
        ({"k_pages": torch.zeros(4, 2, 16, 64)}, "'int8_sym' hold torch.int8, not torch.float32"),
        ({"v_pages": torch.zeros(4, 16, 2, 64, dtype=torch.int8).transpose(1, 2)}, "must be contiguous"),
        ({"v_pages": torch.zeros(4, 2, 8, 64, dtype=torch.int8)}, "the same pages for K and V"),
        ({"k_scale": None}, "k_scale of KV format 'int8_sym' must be .*; got None"),
        ({"v_scale": torch.zeros(4, 2, 16)}, "must be contiguous torch.float16"),
        ({"v_scale": torch.zeros(1, dtype=torch.float16)}, r"\[4, 2, 16\]; got torch.float16 \[1\]"),
    ],
)
@pytest.mark.parametrize("write", [paged_write, paged_write_torch])
def test_what_does_not_fit_is_refused(write, change, message):
    pool = make_pool("int8_sym", "cpu")
    x = torch.zeros(3, 2, 64)
    given = {"k": x, "v": x, "slots": torch.arange(3), "health": pool.health}
    pages = {name.removesuffix("_pages"): x for name, x in change.items() if name not in given}
    given |= {name: x for name, x in change.items() if name in given}
    with record() as launches, pytest.raises(ValueError, match=message):
        write(pool.cache._replace(**pages), **given)
    assert not launches


def test_native_takes_no_scale():
    pool = make_pool("native", "cpu")
    x = torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match="'native' has no scales; k_scale must be None"):
        paged_write(pool.cache._replace(k_scale=torch.ones(1)), x, x, torch.arange(1), pool.health)
