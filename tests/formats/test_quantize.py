"""Exact values of the KV quantizers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.gemm.blockwise import quantize_activation_torch, quantize_blocks
from kvbench_kernels.kv.quantize import (
    FP16_MAX,
    QUANTIZE,
    dequantize,
    e4m3_to_float,
    quantize_fp8_e4m3,
    quantize_fp8_e4m3_static,
    quantize_int8_static,
    quantize_int8_sym,
)

BAD = (math.nan, math.inf, -math.inf)
QUANTIZED = [name for name, fmt in KV_FORMATS.items() if fmt.quantized]


def f32(*values):
    return torch.tensor(values, dtype=torch.float32)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def raw(codes):
    return codes.view(torch.uint8).tolist()


def static_scale(fmt, value=0.05):
    return f32(value) if KV_FORMATS[fmt].scale_kind == "static" else None


def test_every_kv_format_has_a_quantizer_of_its_dtypes():
    assert set(QUANTIZE) == set(KV_FORMATS)
    for name, fmt in KV_FORMATS.items():
        result = QUANTIZE[name](torch.ones(2, 3, 8), static_scale(name))
        codes, scales = result.codes, result.scales
        dtype = getattr(torch, fmt.payload_dtype or "float32")
        assert (codes.shape, codes.dtype) == ((2, 3, 8), dtype)
        shape = (scales.shape, scales.dtype) if scales is not None else None
        assert shape == (((2, 3), getattr(torch, str(fmt.scale_dtype))) if fmt.scale_per_row else None)


def test_native_is_the_input_itself():
    x = torch.randn(3, 4)
    assert QUANTIZE["native"](x, None).codes is x
    assert torch.equal(dequantize(x, None, torch.float32), x)


# A02: static scales


def test_a02_t1_static_scale_is_the_one_that_is_used_and_t2_clipping_is_counted():
    x = f32(0.3, -0.4, 1.2, 4.5, -4.9)
    good = quantize_int8_static(x, f32(0.05))
    assert good.codes.tolist() == [6, -8, 24, 90, -98]
    torch.testing.assert_close(dequantize(good.codes, f32(0.05), torch.float32), x, rtol=0, atol=5e-7)
    collapsed = quantize_int8_static(x, f32(1.0))
    assert collapsed.codes.tolist() == [0, 0, 1, 4, -5]
    assert (dequantize(collapsed.codes, f32(1.0), torch.float32) - x).abs().max() == 0.5
    result = quantize_int8_static(f32(8.0, -8.0, 6.35, 6.37, 1.0), f32(0.05))
    assert result.codes.tolist() == [127, -127, 127, 127, 20]
    assert result.clipped.item() == 2  # 6.37 rounds to 127, as 6.35 does
    restored = dequantize(result.codes, f32(0.05), torch.float32)
    assert restored[0].item() == pytest.approx(6.35, abs=1e-6)


@pytest.mark.parametrize("fmt", ["int8_static", "fp8_e4m3_static"])
def test_without_a_scale_of_the_rows_nothing_is_quantized_or_dequantized(fmt):
    with pytest.raises(ValueError, match="needs a scale"):
        QUANTIZE[fmt](f32(1.0), None)
    codes = QUANTIZE[fmt](torch.zeros(2, 3, 4), f32(1.0)).codes
    with pytest.raises(ValueError, match="need their scale"):
        dequantize(codes, None, torch.float32)
    with pytest.raises(ValueError, match="do not fit codes"):
        dequantize(codes, torch.ones(3, 2), torch.float32)


# A03: zeros (T1, a weight in blocks: test_blockwise.py)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_a03_t2_zero_row_is_exactly_zero_and_leaves_its_neighbour_alone(fmt):
    row = normal(64, seed=1)
    scale = static_scale(fmt)
    both = QUANTIZE[fmt](torch.stack((torch.zeros(64), row)), scale)
    alone = QUANTIZE[fmt](row.unsqueeze(0), scale)
    assert raw(both.codes[0]) == [0] * 64
    assert raw(both.codes[1]) == raw(alone.codes[0])
    scales = both.scales if both.scales is not None else scale
    restored = dequantize(both.codes, scales, torch.float32)[0]
    assert torch.equal(restored.view(torch.int32), torch.zeros(64, dtype=torch.int32))  # +0.0, every bit
    if both.scales is not None and alone.scales is not None:
        assert both.scales.isfinite().all()
        assert (both.scales > 0).all()  # a stored 0 means "never written"
        assert both.scales[1] == alone.scales[0]
        assert both.scales[0] == {"int8_sym": 2.0**-24, "fp8_e4m3": 2.0**-126}[fmt]  # the smallest
    assert both.nonfinite.item() == 0


# A04: the FP16 scale


@pytest.mark.parametrize(
    ("amax", "scale", "code"),
    [
        pytest.param(1e-6, 2.0**-24, 17, id="t1_nearest_would_be_0"),
        pytest.param(127 * 1.4 * 2.0**-24, 2.0**-23, 89, id="t2_nearest_would_clip"),
        pytest.param(5.0, 0.039398193359375, 127, id="t3_rounded_up"),
        pytest.param(8_319_008.0, 65504.0, 127, id="t4_largest_legal"),
        pytest.param(127.0, 1.0, 127, id="exact"),
        pytest.param(1e-44, 2.0**-24, 0, id="float32_subnormal"),
    ],
)
def test_a04_t1_to_t4_scale_is_rounded_up_to_fp16(amax, scale, code):
    x = f32(amax, -amax, amax / 3, 0.0).unsqueeze(0)
    result = quantize_int8_sym(x)
    assert result.scales.tolist() == [scale]
    assert result.codes[0, :2].tolist() == [code, -code]
    assert result.overflow.item() == 0
    error = dequantize(result.codes, result.scales, torch.float32) - x
    assert error.abs().max().item() <= scale / 2 + 1e-6
    assert amax != 1e-6 or error[0, 0].item() == pytest.approx(1.3e-8, abs=1e-9)


@pytest.mark.parametrize("amax", [8_319_009.0, 8_323_072.0, 1e7, 3.4e38])
def test_a04_t4_a_scale_beyond_fp16_is_counted_and_never_inf(amax):
    result = quantize_int8_sym(torch.tensor([[amax, 1.0], [2.0, 1.0]]))
    assert result.overflow.item() == 1
    assert result.scales[0].item() == FP16_MAX
    assert result.codes[0].tolist() == [127, 0]


@pytest.mark.parametrize("code", [0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
def test_a04_t5_minus_128_never_appears_and_ties_go_to_even(code):
    assert quantize_int8_static(f32(code), f32(1.0)).codes.item() == round(code)
    assert quantize_int8_sym(f32(127.0, code)).codes[1].item() == round(code)
    assert quantize_int8_static(f32(-200.0, -128.0, -127.5), f32(1.0)).codes.tolist() == [-127] * 3
    x = normal(64, 128, seed=2) * 1e3
    for codes in (quantize_int8_sym(x).codes, quantize_int8_static(x, f32(0.05)).codes):
        assert codes.min().item() == -127


# A05: outliers


def test_a05_t2_one_outlier_silences_an_int8_row_and_not_an_e4m3_row():
    x = torch.full((1, 64), 0.4)
    x[0, -1] = 127.0
    int8, fp8 = quantize_int8_sym(x), quantize_fp8_e4m3(x)
    assert (int8.scales.item(), int8.codes[0].tolist()) == (1.0, [0] * 63 + [127])
    assert fp8.scales.item() == pytest.approx(127 / 448)
    restored = dequantize(fp8.codes, fp8.scales, torch.float32)
    assert restored[0, 0].item() == pytest.approx(0.3898, abs=5e-5)


# A06: E4M3


def test_a06_t1_saturation_is_the_same_everywhere_and_t2_subnormals_round():
    x = f32(448, 449, 463.9, 464, 465, 480, 1000, -1000, 3e38)
    result = quantize_fp8_e4m3_static(x, f32(1.0))
    assert raw(result.codes) == [0x7E] * 7 + [0xFE, 0x7E]
    assert result.clipped.item() == 5  # up to 464, rounding alone gives 448
    assert result.nonfinite.item() == 0
    subnormals = quantize_fp8_e4m3_static(f32(2**-9, 1.5 * 2**-10, 2**-10, 0.00097), f32(1.0))
    assert raw(subnormals.codes) == [0x01, 0x01, 0x00, 0x00]


class _Casts(TorchFunctionMode):
    """The largest magnitude that was cast to E4M3."""

    largest = 0.0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and torch.float8_e4m3fn in args:
            self.largest = max(self.largest, args[0].nan_to_num(0.0).abs().max().item())
        return func(*args, **(kwargs or {}))


def test_a06_t1_nothing_beyond_448_is_left_to_the_cast():
    """Which torch before 2.12 turns into NaN, and later ones saturate."""
    with _Casts() as casts:
        quantize_fp8_e4m3_static(torch.tensor([465.0, -1000.0, 3e38]), torch.tensor(1.0))
        quantize_fp8_e4m3(torch.tensor([[1.1754e-38, 3e38, -7.0]]))
        quantize_activation_torch(torch.tensor([[465.0, -1000.0, 3.1e38]]))
        quantize_blocks(torch.tensor([[465.0, -1000.0, 3.1e38]]))
    assert casts.largest == 448.0


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_a06_t3_nonfinite_input_is_counted_and_not_laundered(fmt, bad):
    x = torch.tensor([[1.0, bad, -2.0, 0.5], [1.0, 0.25, -2.0, 0.5]])
    scale = static_scale(fmt)
    result = QUANTIZE[fmt](x, scale)
    clean = QUANTIZE[fmt](x.masked_fill(~x.isfinite(), 0.0), scale)
    assert (result.nonfinite.item(), result.clipped.item()) == (1, 0)
    assert result.codes.view(torch.uint8)[0, 1].item() == (0x7F if "fp8" in fmt else 0)
    keep = x.isfinite()
    assert torch.equal(result.codes.view(torch.uint8)[keep], clean.codes.view(torch.uint8)[keep])
    if result.scales is not None and clean.scales is not None:
        assert torch.equal(result.scales, clean.scales)


def test_e4m3_codes_are_read_back_exactly_and_rounded_to_the_nearest_even():
    """Against a nearest-neighbour search over the 127 magnitudes: no cast is involved."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    ours, torchs = e4m3_to_float(codes), codes.float()
    assert ours.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    keep = ~torchs.isnan()
    assert torch.equal(ours[keep].view(torch.int32), torchs[keep].view(torch.int32))
    grid = codes[:0x7F].double()
    middles = (grid[:-1] + grid[1:]) / 2
    x = torch.cat((middles, middles * (1 + 1e-6), middles * (1 - 1e-6), grid)).float()
    found = quantize_fp8_e4m3_static(x, f32(1.0)).codes.view(torch.uint8).long()
    distance = (x.double()[:, None] - grid).abs()
    nearest = distance.min(1).values
    for i in range(len(x)):
        winners = (distance[i] == nearest[i]).nonzero().flatten()
        expected = winners[0] if len(winners) == 1 else winners[winners % 2 == 0][0]
        assert found[i] == expected, x[i]


# Bounds for any input

DTYPES = {torch.float32: 3.4e38, torch.bfloat16: 3.38e38, torch.float16: 65504.0}


@st.composite
def rows(draw):
    """One row whose magnitude lies anywhere in its dtype's range, subnormals and zeros included."""
    dtype, largest = draw(st.sampled_from(list(DTYPES.items())))
    top = draw(st.floats(min_value=0.0, max_value=largest)) * 2.0 ** draw(st.integers(-150, 0))
    shares = draw(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=33))
    x = (torch.tensor(shares, dtype=torch.float64) * top).to(dtype)
    return x[x.isfinite()].reshape(1, -1) if x.isfinite().any() else torch.zeros(1, 1, dtype=dtype)


@settings(max_examples=300, deadline=None)
@given(rows())
def test_int8_sym_bound_holds_for_any_row(x):
    result = quantize_int8_sym(x)
    exact = x.double()
    scale = result.scales.double().item()
    assert 0 < scale < math.inf
    assert result.codes.min().item() >= -127
    wanted = x.float().abs().max() / 127
    assert result.overflow.item() == int(wanted.item() > FP16_MAX)
    if result.overflow.item():
        return
    assert scale >= wanted.item()
    below = (result.scales.view(torch.int16) - 1).view(torch.float16).item()
    assert below < wanted.item() or scale == 2.0**-24  # no FP16 number in between
    error = (result.codes.double() * scale - exact).abs().max().item()
    # The quotient is rounded to float32 before it is rounded to a code: up to 2^-18 of a step for a code
    # below 128.
    assert error <= scale / 2 + max(1e-6, scale * 2.0**-17)


@settings(max_examples=300, deadline=None)
@given(rows())
def test_fp8_e4m3_bound_holds_for_any_row(x):
    result = quantize_fp8_e4m3(x)
    exact, scale = x.double(), result.scales.double()
    assert (result.nonfinite.item(), result.overflow.item()) == (0, 0)
    assert scale.item() >= 2.0**-126
    assert not ((result.codes.view(torch.uint8) & 0x7F) == 0x7F).any()
    error = (result.codes.double() * scale.unsqueeze(-1) - exact).abs()
    bound = torch.maximum(exact.abs() / 16, scale * 2.0**-10) * (1 + 1e-6)
    assert (error <= bound).all()


@settings(max_examples=200, deadline=None)
@given(rows(), st.floats(1e-6, 1e3))
def test_static_int8_bound_holds_for_any_row(x, value):
    scale = f32(value)
    result = quantize_int8_static(x, scale)
    s = scale.double().item()
    inside = x.double().abs() <= 127 * s
    error = (result.codes.double() * s - x.double()).abs()
    assert (error[inside] <= s / 2 * (1 + 2.0**-15)).all()
    assert (result.codes[~inside].abs() == 127).all()
    assert result.codes.min().item() >= -127
    assert result.clipped.item() <= int((~inside).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_counts_stay_on_the_device_and_a_view_gives_the_bytes_of_its_copy(fmt, dtype):
    base = normal(64, 3, 10, seed=4).to(dtype)
    view = base.permute(2, 1, 0)[1:]
    a, b = (QUANTIZE[fmt](x, static_scale(fmt)) for x in (view, view.contiguous()))
    assert raw(a.codes.contiguous()) == raw(b.codes)
    for count in (a.clipped, a.nonfinite, a.overflow):
        assert (count.shape, count.dtype) == ((), torch.int64)
