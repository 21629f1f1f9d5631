"""Quantize K and V rows and scatter them into the paged cache, in one launch.

The stored bytes are those of `quantize.py`, bit for bit, on a GPU and in Triton's interpreter (`convert.py`).
One program takes ROWS rows (a row is one head of one token) of K or of V (axis 1 of the grid). Rows are
numbered through all tokens and heads, so that any number of heads fills a program."""

import triton
import triton.language as tl
from torch import Tensor

from kvbench_kernels.kv.convert import encode_e4m3, encode_int8, narrow, widen
from kvbench_kernels.kv.layout import LayerPages, check_write, unsigned
from kvbench_kernels.launches import launched

# Elements a program takes. Correctly rounded divisions branch, so a thread does them in sequence: it gets 4
# elements while the GPU has room for more programs, and 16 (two 16-byte loads) from 2^20 elements on.
SMALL_TILE, TILE, MANY = 512, 2048, 2**20


# fmt: off
def paged_write(cache: LayerPages, k: Tensor, v: Tensor, slots: Tensor, health: Tensor) -> None:
    """Quantize k [N, Hkv, D] and v [N, Hkv, Dv] (any strides) into the slots [N] int64 of the pages.

    A slot is page * page_size + offset; rows with a negative slot are neither stored nor counted, and slots
    beyond the pages are not detected. health [3] int64: clipped, nonfinite and overflow of `Quantized` are
    added, except for native. ValueError for tensors that do not fit each other.
    """
    check_write(cache, k, v, slots, health)
    tokens, heads, dim = k.shape
    rows = tokens * heads
    if rows == 0:
        return
    value_dim = v.shape[2]
    block, value_block = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    widest = max(block, value_block)
    rows_each = max(1, (SMALL_TILE if rows * widest < MANY else TILE) // widest)
    fmt = cache.fmt.name
    compiled = _kv_write[(triton.cdiv(rows, rows_each), 2)](
        k, v, slots, unsigned(cache.k), unsigned(cache.v), cache.k_scale, cache.v_scale, health, rows,
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        FMT=fmt, HEADS=heads, DIM=dim, VALUE_DIM=value_dim, PAGE_SIZE=cache.page_size, ROWS=rows_each,
        BLOCK=block, VALUE_BLOCK=value_block, num_warps=4,
    )
    launched(f"kv_write_{fmt}", compiled)


def _kernel_name(kernel: object) -> str:
    """The name in a profile: `kv_write_int8_sym`."""
    return f"kv_write_{kernel.constants['FMT']}"  # type: ignore[attr-defined]



@triton.jit(repr=_kernel_name, do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _kv_write(  # type: ignore[no-untyped-def]
    k, v, slots, k_pages, v_pages, k_scale, v_scale, health, rows,
    k_token, k_head, k_dim, v_token, v_head, v_dim,
    FMT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _write_rows(k, slots, k_pages, k_scale, health, rows, k_token, k_head, k_dim,
                    FMT, HEADS, DIM, PAGE_SIZE, ROWS, BLOCK)
    else:
        _write_rows(v, slots, v_pages, v_scale, health, rows, v_token, v_head, v_dim,
                    FMT, HEADS, VALUE_DIM, PAGE_SIZE, ROWS, VALUE_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _write_rows(  # type: ignore[no-untyped-def]
    x_ptr, slots, pages, scales, health, rows, stride_token, stride_head, stride_dim,
    FMT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slots + token, mask=inside, other=-1)
    d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    # x does not wait for the slots: both loads are under way together.
    source = token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    x = tl.load(x_ptr + source[:, None] + d * stride_dim, mask=_columns(inside, d, DIM, BLOCK), other=0.0)
    stored = inside & (slot >= 0)
    mask = _columns(stored, d, DIM, BLOCK)
    target_row = ((slot // PAGE_SIZE) * HEADS + head) * PAGE_SIZE + slot % PAGE_SIZE
    target = pages + target_row[:, None] * DIM + d

    if FMT == "native":
        if x.dtype != pages.dtype.element_ty:
            x = narrow(widen(x), pages.dtype.element_ty)
        tl.store(target, x, mask=mask)
    else:
        values = widen(x)
        broken = (tl.abs(values) <= 3.4028234663852886e38) == 0  # NaN compares as false
        values = tl.where(broken, 0.0, values)
        if FMT == "int8_sym":
            wanted = tl.math.div_rn(tl.max(tl.abs(values), 1), 127.0)
            scale16 = _round_up_to_fp16(wanted)
            tl.store(scales + target_row, scale16, mask=stored)
            scaled = tl.math.div_rn(values, scale16.to(tl.float32)[:, None])
            counted = (wanted[:, None] > 65504.0) & (d == 0)  # rows that overflow
        elif FMT == "fp8_e4m3":
            scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values), 1), 448.0), 1.1754943508222875e-38)
            tl.store(scales + target_row, scale, mask=stored)
            scaled = tl.math.div_rn(values, scale[:, None])
            counted = broken & False
        else:
            scaled = tl.math.div_rn(values, tl.load(scales))
            # What rounds beyond the largest code: the tie 127.5 goes up, the tie 464 down.
            counted = tl.abs(scaled) >= 127.5 if FMT == "int8_static" else tl.abs(scaled) > 464.0
        if FMT == "int8_sym" or FMT == "int8_static":
            codes = encode_int8(tl.minimum(tl.maximum(scaled, -127.0), 127.0))
        else:
            codes = encode_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
            codes = tl.where(broken, 0x7F, codes).to(tl.uint8)
        tl.store(target, codes, mask=mask)
        # Both counts in one sum: a program has fewer than 2^16 elements.
        seen = tl.where(mask, broken.to(tl.int32) + (counted.to(tl.int32) << 16), 0)
        total = tl.sum(tl.sum(seen, 1), 0)
        if total > 0:
            tl.atomic_add(health + (2 if FMT == "int8_sym" else 0), (total >> 16).to(tl.int64), sem="relaxed")
            tl.atomic_add(health + 1, (total & 0xFFFF).to(tl.int64), sem="relaxed")



@triton.jit  # type: ignore[untyped-decorator]
def _columns(rows, d, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mask [ROWS, BLOCK] of rows, without a compare if a row fills its block."""
    return rows[:, None] if DIM == BLOCK else rows[:, None] & (d < DIM)


@triton.jit
def _round_up_to_fp16(wanted):  # type: ignore[no-untyped-def]
    """The smallest FP16 number >= wanted, from 2^-24 up to 65504."""
    wanted = tl.minimum(wanted, 65504.0)
    nearest = wanted.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True).to(tl.int32) + (nearest.to(tl.float32) < wanted).to(tl.int32)
    return tl.maximum(bits, 1).to(tl.int16).to(tl.float16, bitcast=True)
