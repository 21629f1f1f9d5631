"""Exact number conversions in Triton kernels, bit for bit the same on a GPU and in Triton's interpreter.

The interpreter's own casts differ from the GPU's: E4M3 subnormals are wrong, E4M3 NaN becomes 480, float32 to
bfloat16 truncates, and subnormal bfloat16 numbers change. What is written to the cache is therefore made with
integers. Where a GPU's cast is faster and has one possible result, only the interpreter uses the bits
(INTERPRET). The remaining casts agree: float16 to and from float32, signed integers to float32."""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widen(x):  # type: ignore[no-untyped-def]
    """float16, bfloat16 or float32 to float32."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def narrow(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 to float16, bfloat16 or float32, rounded once to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Just under half a step, and one more if the last kept bit is odd: the sum carries as rounding does.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def encode_int8(x):  # type: ignore[no-untyped-def]
    """float32 in [-127, 127] to INT8, rounded half to even."""
    # From 1.5 * 2^23 on float32 counts in ones: the lowest bits of the sum are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def encode_e4m3(x):  # type: ignore[no-untyped-def]
    """float32 in [-448, 448] to the byte of E4M3FN, rounded to nearest even."""
    # 2^20 times x's power of two is added, so that the sum counts in x's last E4M3 place and its lowest bits
    # are x's significand of 4 bits. Below 2^-6, the smallest normal number, the place stays.
    power = tl.maximum(tl.abs(x), 0.015625).to(tl.uint32, bitcast=True) & 0x7F800000
    place = (power + (20 << 23)).to(tl.float32, bitcast=True)
    significand = (tl.abs(x) + place).to(tl.uint32, bitcast=True)
    # 2^-6 has the exponent 121 in float32; the significand of a normal number includes its leading 8.
    code = significand + (power >> 20) - 121 * 8
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code):  # type: ignore[no-untyped-def]
    """E4M3FN, as int8, to float32."""
    if INTERPRET:
        # Sign, exponent and significand to their places in float32, where the bias is 120 larger.
        bits = (code.to(tl.int32) << 20) & -0x78100000  # 0x87F00000
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
