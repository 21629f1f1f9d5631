"""Reference quantizers for KV rows in torch. Every faster kernel must match their bytes.

A row is the last axis of `x [..., D]` in float32, float16 or bfloat16. Nothing is read back to the host:
counts are 0-dim int64 tensors on x's device. Three rules make the bytes the same everywhere:

- A division is float32, correctly rounded, and by a tensor. torch on CUDA turns `x / python_number` into a
  multiplication by the reciprocal, which differs in the last bit.
- E4M3 values are clamped before the cast: eager torch below 2.12 casts a finite overflow to NaN.
- A row's scale comes from its finite elements only. A non-finite element is counted; its code is 0 in INT8,
  which has no NaN, and 0x7F (NaN) in E4M3.

A stored dynamic scale is always > 0, also for a row of zeros. A scale of 0 was therefore never written."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127.0
E4M3_MAX = 448.0
E4M3_TIE = 464.0  # halfway to the next step (480): up to here rounding alone gives 448
FP16_MAX = 65504.0
FP16_MAX_BITS = 0x7BFF
E4M3_MIN_SCALE = 2.0**-126  # smallest normal float32


@dataclass(frozen=True)
class Quantized:
    """The result of a quantizer for `x [..., D]`. The counts are 0-dim int64 tensors.

    codes: [..., D] in the storage dtype. scales: [...] in the scale dtype, None if the format has none per
    row. clipped: finite elements beyond the largest code under a static scale. nonfinite: NaN and infinities
    in x. overflow: rows whose scale exceeds FP16 and is stored as 65504; the caller must fail on it.
    """

    codes: Tensor
    scales: Tensor | None
    clipped: Tensor
    nonfinite: Tensor
    overflow: Tensor


def quantize_native(x: Tensor, scale: Tensor | None = None) -> Quantized:
    """Codes are x itself."""
    zero = _zero(x)
    return Quantized(x, None, zero, zero, zero)


def quantize_int8_sym(x: Tensor, scale: Tensor | None = None) -> Quantized:
    """Symmetric INT8 a row: s = amax/127 rounded up to FP16, at least 2^-24; q = round-half-even(x/s).

    |q| <= 127, as s is rounded up. |x - q*s| <= s/2, plus one float32 rounding of x/s (at most s * 2^-18).
    """
    values, broken = _finite_values(x)
    wanted = values.abs().amax(-1) / _scalar(INT8_MAX, x)
    nearest = wanted.to(torch.float16)
    # The bit pattern of a positive float is ordered as the float is: + 1 is the next number up.
    bits = nearest.view(torch.int16) + (nearest.float() < wanted)
    scales = bits.clamp_(1, FP16_MAX_BITS).view(torch.float16)
    codes = (values / scales.float().unsqueeze(-1)).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Quantized(codes, scales, _zero(x), broken.sum(), (wanted > FP16_MAX).sum())


def quantize_fp8_e4m3(x: Tensor, scale: Tensor | None = None) -> Quantized:
    """E4M3FN a row: s = amax/448 in float32 (at least 2^-126), round to nearest even, saturated at 448.

    |x - q*s| <= max(|x| / 16, s * 2^-10), plus float32 rounding.
    """
    values, broken = _finite_values(x)
    scales = (values.abs().amax(-1) / _scalar(E4M3_MAX, x)).clamp_(min=E4M3_MIN_SCALE)
    codes = _to_e4m3(values / scales.unsqueeze(-1), broken)
    zero = _zero(x)
    return Quantized(codes, scales, zero, broken.sum(), zero)


def quantize_int8_static(x: Tensor, scale: Tensor | None) -> Quantized:
    """Symmetric INT8 with a given float32 scale that broadcasts over x: q = clamp(round-half-even(x/scale)).

    Clipped: what rounds beyond 127.
    """
    values, broken = _finite_values(x)
    rounded = (values / _given("int8_static", scale)).round_()
    clipped = (rounded.abs() > INT8_MAX).sum()
    return Quantized(
        rounded.clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), None, clipped, broken.sum(), _zero(x)
    )


def quantize_fp8_e4m3_static(x: Tensor, scale: Tensor | None) -> Quantized:
    """E4M3FN with a given float32 scale that broadcasts over x, saturated at 448. Clipped: above 464."""
    values, broken = _finite_values(x)
    scaled = values / _given("fp8_e4m3_static", scale)
    clipped = (scaled.abs() > E4M3_TIE).sum()
    return Quantized(_to_e4m3(scaled, broken), None, clipped, broken.sum(), _zero(x))


def _given(fmt: str, scale: Tensor | None) -> Tensor:
    if scale is None:
        raise ValueError(f"KV format {fmt!r} needs a scale tensor; None was given.")
    return scale


# KV format -> its quantizer, a function of x and of the given scale, which dynamic formats ignore.
QUANTIZE: dict[str, Callable[[Tensor, Tensor | None], Quantized]] = {
    "native": quantize_native,
    "int8_sym": quantize_int8_sym,
    "int8_static": quantize_int8_static,
    "fp8_e4m3": quantize_fp8_e4m3,
    "fp8_e4m3_static": quantize_fp8_e4m3_static,
}


def dequantize(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """codes [..., D] * scale in float32, rounded once to `dtype`.

    scale: [...], one element for all, or None for native. ValueError for 8-bit codes without a scale and for
    scales of another shape.
    """
    if scale is None:
        if codes.element_size() == 1:
            raise ValueError(f"Codes in {codes.dtype} need their scale to be dequantized; none was given.")
        return codes.to(dtype)
    if scale.numel() > 1 and scale.shape != codes.shape[:-1]:
        raise ValueError(f"Scales {list(scale.shape)} do not fit codes {list(codes.shape)}; give one a row.")
    values = e4m3_to_float(codes) if codes.dtype == torch.float8_e4m3fn else codes.float()
    per_row = scale.float().reshape(() if scale.numel() == 1 else (*scale.shape, 1))
    return (values * per_row).to(dtype)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """Exactly `codes.float()`, about five times as fast as torch's cast on a CPU."""
    if codes.device.type != "cpu":
        return codes.float()
    # The 7 bits of exponent and mantissa, shifted under those of FP16, whose bias is 8 larger.
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    # Only 0x7F, the NaN, carries into the exponent's top bit when one unit is added; that is FP16's NaN too.
    half.bitwise_or_((half + 0x80).bitwise_and_(0x4000))
    return half.view(torch.float16).float().mul_(256.0)


def _finite_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in float32 with 0 for each non-finite element, and where those are."""
    values = x.float()
    broken = (values - values) != 0  # inf - inf and NaN - NaN are NaN; anything finite is 0
    return values.masked_fill(broken, 0.0), broken


def _to_e4m3(scaled: Tensor, broken: Tensor) -> Tensor:
    """Saturate, put NaN back where the input was non-finite, cast. `scaled` is overwritten."""
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).masked_fill_(broken, torch.nan).to(torch.float8_e4m3fn)


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=like.device)
