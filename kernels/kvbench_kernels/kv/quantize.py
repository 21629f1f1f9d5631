"""Reference quantizers for KV rows in torch: the twins that every faster kernel must match byte for byte.

Layout: `x [..., D]` in float32, float16 or bfloat16; one row is the last axis. Nothing here reads a value back to
the host: counts are 0-dim int64 tensors on x's device, so that a decode step over many layers never waits for it.

Three rules make the bytes the same everywhere:

- divisions are float32, correctly rounded, and by a tensor. torch on CUDA turns `x / python_number` into a
  multiplication by the reciprocal, which is another number in the last bit;
- E4M3 values are clamped before the cast: eager torch below 2.12 casts a finite overflow to NaN;
- a row's scale comes from its finite elements only. A non-finite element is counted, never laundered into a
  plausible value: its code is 0 in INT8, which has no NaN, and 0x7F (NaN) in E4M3.

A stored dynamic scale is always > 0, for an all-zero row too (its codes are 0, so it dequantizes to exactly 0
with any scale). A scale of 0 in a store therefore means one thing only: it was never written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127.0
E4M3_MAX = 448.0
E4M3_TIE = 464.0  # halfway to the next step (480): up to here rounding alone gives 448
FP16_MAX = 65504.0
FP16_MAX_BITS = 0x7BFF
E4M3_MIN_SCALE = 2.0**-126  # smallest normal float32: amax/448 of a tinier row would underflow towards 0


@dataclass(frozen=True)
class Quantized:
    """What a quantizer gives for `x [..., D]`. The counts are 0-dim int64 tensors.

    codes: [..., D] in the storage dtype. scales: [...] float16 (int8_sym) or float32 (fp8_e4m3), None where the
    format stores none a row. clipped: finite elements beyond the largest code under a given static scale.
    nonfinite: NaN and infinities in x. overflow: rows whose scale does not fit FP16 (stored as 65504, so their
    elements are clipped; the caller must fail on it).
    """

    codes: Tensor
    scales: Tensor | None
    clipped: Tensor
    nonfinite: Tensor
    overflow: Tensor


def quantize_native(x: Tensor) -> Quantized:
    """No change: codes are x itself."""
    zero = _zero(x)
    return Quantized(x, None, zero, zero, zero)


def quantize_int8_sym(x: Tensor) -> Quantized:
    """Symmetric INT8 a row: s = amax/127 rounded up to FP16, q = round-half-even(x/s) in [-127, 127].

    Rounding up keeps amax/s <= 127, so the range never clips; a row too small for FP16 gets 2^-24, its smallest
    positive number. |x - q*s| <= s/2, plus one float32 rounding of x/s (at most s * 2^-18).
    """
    values, broken = _finite_values(x)
    wanted = values.abs().amax(-1) / _scalar(INT8_MAX, x)
    nearest = wanted.to(torch.float16)
    # The bit pattern of a positive float is ordered as the float is: + 1 is the next number up.
    bits = nearest.view(torch.int16) + (nearest.float() < wanted)
    scales = bits.clamp_(1, FP16_MAX_BITS).view(torch.float16)
    codes = (values / scales.float().unsqueeze(-1)).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Quantized(codes, scales, _zero(x), broken.sum(), (wanted > FP16_MAX).sum())


def quantize_fp8_e4m3(x: Tensor) -> Quantized:
    """E4M3FN a row: s = amax/448 in float32 (at least 2^-126), round to nearest even, saturated at 448.

    |x - q*s| <= max(|x| / 16, s * 2^-10), plus float32 rounding.
    """
    values, broken = _finite_values(x)
    scales = (values.abs().amax(-1) / _scalar(E4M3_MAX, x)).clamp_(min=E4M3_MIN_SCALE)
    codes = _to_e4m3(values / scales.unsqueeze(-1), broken)
    zero = _zero(x)
    return Quantized(codes, scales, zero, broken.sum(), zero)


def quantize_int8_static(x: Tensor, scale: Tensor) -> Quantized:
    """Symmetric INT8 with a given float32 scale, on x's device: q = clamp(round-half-even(x/scale)).

    scale: 0-dim or [1]; any shape that broadcasts over x works. Clipped: what rounds beyond 127.
    """
    values, broken = _finite_values(x)
    rounded = (values / scale).round_()
    clipped = (rounded.abs() > INT8_MAX).sum()
    return Quantized(
        rounded.clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), None, clipped, broken.sum(), _zero(x)
    )


def quantize_fp8_e4m3_static(x: Tensor, scale: Tensor) -> Quantized:
    """E4M3FN with a given float32 scale, on x's device, saturated at 448.

    scale: as in quantize_int8_static. Clipped: what rounding alone would take beyond 448, so from above 464.
    """
    values, broken = _finite_values(x)
    scaled = values / scale
    clipped = (scaled.abs() > E4M3_TIE).sum()
    return Quantized(_to_e4m3(scaled, broken), None, clipped, broken.sum(), _zero(x))


def dequantize(fmt: str, codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored codes back to `dtype`: codes * scale in float32, rounded once.

    codes [..., D]; scale [...] for a dynamic format, 0-dim or [1] for a static one, None for native.
    """
    if fmt == "native":
        return codes.to(dtype)
    if scale is None:
        raise ValueError(f"Codes of KV format {fmt!r} need their scale to be dequantized; none was given.")
    per_row = scale.float().unsqueeze(-1) if fmt in DYNAMIC else scale
    values = e4m3_to_float(codes) if codes.dtype == torch.float8_e4m3fn else codes.float()
    return (values * per_row).to(dtype)


def e4m3_to_float(codes: Tensor) -> Tensor:
    """Exactly `codes.float()`. torch's CPU cast goes element by element; this one is some five times as fast."""
    if codes.device.type != "cpu":
        return codes.float()
    # The 7 bits of exponent and mantissa, shifted under those of FP16, whose bias is 8 larger; the sign extends.
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    # Only 0x7F, the NaN, carries into the exponent's top bit when one unit is added, and FP16 calls that NaN too.
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


def _given(scale: Tensor | None) -> Tensor:
    if scale is None:
        raise ValueError("A static KV format needs a scale tensor; None was given.")
    return scale


# Formats with one stored scale a row.
DYNAMIC = frozenset({"int8_sym", "fp8_e4m3"})

# KV format name -> function(x, static scale or None).
QUANTIZE: dict[str, Callable[[Tensor, Tensor | None], Quantized]] = {
    "native": lambda x, _: quantize_native(x),
    "int8_sym": lambda x, _: quantize_int8_sym(x),
    "int8_static": lambda x, scale: quantize_int8_static(x, _given(scale)),
    "fp8_e4m3": lambda x, _: quantize_fp8_e4m3(x),
    "fp8_e4m3_static": lambda x, scale: quantize_fp8_e4m3_static(x, _given(scale)),
}
