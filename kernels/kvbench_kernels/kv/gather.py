"""Dequantize pages into contiguous K and V, in one launch, for an attention without pages.

One program takes some tokens of one head of one sequence, of K or of V (axis 1 of the grid)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench_kernels.kv.convert import decode_e4m3, narrow, widen
from kvbench_kernels.kv.layout import LayerPages, check_gather, signed
from kvbench_kernels.launches import launched

TILE = 4096  # elements a program takes, 32 a thread


# fmt: off
def paged_gather(
    cache: LayerPages, table: Tensor, length: int, dtype: torch.dtype, reads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The first `length` tokens of the sequences whose page tables are table [B, P], in `dtype`.

    Returns k [B, Hkv, length, D] and v [B, Hkv, length, Dv], contiguous: codes * scale in float32, rounded
    once. Columns of the table beyond the length are not read. reads [2] int64: B * length is added to
    reads[0], and to reads[1] if K and V are stored in 8 bits. ValueError for other arguments.
    """
    check_gather(cache, table, length)
    k_pages, v_pages = cache.k, cache.v
    _, heads, page_size, dim = k_pages.shape
    batch, value_dim = len(table), v_pages.shape[3]
    k = torch.empty((batch, heads, length, dim), dtype=dtype, device=k_pages.device)
    v = torch.empty((batch, heads, length, value_dim), dtype=dtype, device=k_pages.device)
    if batch * length == 0:
        return k, v
    block, value_block = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    tokens = max(1, TILE // max(block, value_block))
    tiles = triton.cdiv(length, tokens)
    fmt = cache.fmt
    compiled = _kv_gather[(tiles * batch * heads, 2)](
        signed(k_pages), signed(v_pages), cache.k_scale, cache.v_scale, table, k, v, reads, length, tiles,
        table.stride(0), FMT=fmt.name, E4M3=fmt.payload_dtype == "float8_e4m3fn", ROW_SCALE=fmt.scale_per_row,
        HEADS=heads, DIM=dim, VALUE_DIM=value_dim, PAGE_SIZE=page_size, TOKENS=tokens, BLOCK=block,
        VALUE_BLOCK=value_block, num_warps=4,
    )
    launched(f"kv_gather_{fmt.name}", compiled)
    return k, v


def _kernel_name(kernel: object) -> str:
    """The name in a profile: `kv_gather_int8_sym`."""
    return f"kv_gather_{kernel.constants['FMT']}"  # type: ignore[attr-defined]



@triton.jit(repr=_kernel_name, do_not_specialize=["length", "tiles", "table_row"])  # type: ignore[untyped-decorator]
def _kv_gather(  # type: ignore[no-untyped-def]
    k_pages, v_pages, k_scale, v_scale, table, k, v, reads, length, tiles, table_row,
    FMT: tl.constexpr, E4M3: tl.constexpr, ROW_SCALE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _gather_rows(k_pages, k_scale, table, k, length, tiles, table_row,
                     E4M3, ROW_SCALE, HEADS, DIM, PAGE_SIZE, TOKENS, BLOCK)
        if reads is not None:
            line = tl.program_id(0) // tiles
            if tl.program_id(0) % tiles == 0 and line % HEADS == 0:
                tl.atomic_add(reads, length.to(tl.int64), sem="relaxed")
                k_bits: tl.constexpr = k_pages.dtype.element_ty.primitive_bitwidth
                v_bits: tl.constexpr = v_pages.dtype.element_ty.primitive_bitwidth
                if k_bits == 8 and v_bits == 8:
                    tl.atomic_add(reads + 1, length.to(tl.int64), sem="relaxed")
    else:
        _gather_rows(v_pages, v_scale, table, v, length, tiles, table_row,
                     E4M3, ROW_SCALE, HEADS, VALUE_DIM, PAGE_SIZE, TOKENS, VALUE_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _gather_rows(  # type: ignore[no-untyped-def]
    payload, scales, table, out, length, tiles, table_row,
    E4M3: tl.constexpr, ROW_SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):
    line = (tl.program_id(0) // tiles).to(tl.int64)  # sequence * HEADS + head
    token = (tl.program_id(0) % tiles) * TOKENS + tl.arange(0, TOKENS)
    inside = token < length
    at = table + (line // HEADS) * table_row + token // PAGE_SIZE
    page = tl.load(at, mask=inside, other=0).to(tl.int64)
    row = (page * HEADS + line % HEADS) * PAGE_SIZE + token % PAGE_SIZE
    d = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] if DIM == BLOCK else inside[:, None] & (d < DIM)
    x = tl.load(payload + row[:, None] * DIM + d, mask=mask, other=0)
    if scales is None:  # native
        if x.dtype != out.dtype.element_ty:
            x = narrow(widen(x), out.dtype.element_ty)
    else:
        values = decode_e4m3(x) if E4M3 else x.to(tl.float32)
        if ROW_SCALE:
            scale = tl.load(scales + row, mask=inside, other=1.0).to(tl.float32)[:, None]
        else:
            scale = tl.load(scales)
        x = narrow(values * scale, out.dtype.element_ty)
    tl.store(out + (line * length + token)[:, None] * DIM + d, x, mask=mask)
