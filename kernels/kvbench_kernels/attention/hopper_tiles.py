"""Tiles of the Hopper decode kernel: their pages, their copies into the ring, and their codes and scales as
operands.
"""

# Gluon code, as in hopper_kernel.py.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# A name that changed after Triton 3.6, which has the second.
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_INT8_SPLIT = gl.constexpr(
    """{
    .reg .b32 x, e, o, m;
    xor.b32 x, $2, 0x80808080;
    mov.b32 m, 0x64806480;
    prmt.b32 e, x, 0x64646464, 0x4240;
    prmt.b32 o, x, 0x64646464, 0x4341;
    sub.f16x2 $0, e, m;
    sub.f16x2 $1, o, m;
    }
    """
)
_FP8_SPLIT = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 e, o;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {e, o}, x;
    cvt.rn.f16x2.e4m3x2 $0, e;
    cvt.rn.f16x2.e4m3x2 $1, o;
    }
    """
)


@gluon.constexpr_function
def lower_rows(tile, warps):
    """Layout of rows 0..7 of a 16-row tensor core result [16, tile]: the registers of the other rows are left
    out.
    """
    first = 2 + warps.bit_length()  # warps take the token bits from 3 on, registers the rest
    registers = [[0, 1]] + [[0, 1 << bit] for bit in range(first, tile.bit_length() - 1)]
    warp = [[0, 1 << bit] for bit in range(3, first)]
    return gl.DistributedLinearLayout(
        registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], warp, [], [8, tile]
    )


@gluon.jit
def split_words(x, KIND: gl.constexpr):
    """Words of two neighbouring 8-bit dims -> the even and the odd dims in FP16, exactly."""
    if KIND == "int8":
        return gl.inline_asm_elementwise(
            _INT8_SPLIT, "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    return gl.inline_asm_elementwise(
        _FP8_SPLIT, "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def load_halves(ring, slot, layout: gl.constexpr, KIND: gl.constexpr):
    """One tile of the ring as two operands over half the dims each: [HALF, TILE]."""
    if KIND == "native":
        return (
            ring.index(slot * 2).permute([1, 0]).load(layout),
            ring.index(slot * 2 + 1).permute([1, 0]).load(layout),
        )
    raw = ring.index(slot).permute([1, 0]).load(layout)
    return raw, raw


@gluon.jit
def box_rows(
    pages_row,
    tile,
    last_page,
    head,
    HKV: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    BOX: gl.constexpr,
):
    """First row of each of a tile's boxes in the flat [pages * heads * page_size] rows. Past the end: the
    last page.
    """
    rows = ()
    for box in gl.static_range(TILE // BOX):
        token = tile * TILE + box * BOX
        page = gl.load(pages_row + gl.minimum(token // PAGE, last_page))
        rows = rows + ((page * HKV + head) * PAGE + token % PAGE,)
    return rows


@gluon.jit
def rows_inside(ready, first, stride, length, TILE: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr):
    """Boxes that lie behind the end of the sequence are replaced by the first box, which never does."""
    safe = ()
    for stage in gl.static_range(STAGES):
        rows = ()
        for box in gl.static_range(TILE // BOX):
            token = (first + stage * stride) * TILE + box * BOX
            rows = rows + (gl.where(token < length, ready[stage][box], ready[0][0]),)
        safe = safe + (rows,)
    return safe


@gluon.jit
def fetch(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    bars,
    slot,
    rows,
    BOXES: gl.constexpr,
    HALVES: gl.constexpr,
    HALF: gl.constexpr,
    BOX: gl.constexpr,
):
    """Start the copies of a tile of K and of V into a slot of the ring."""
    bar = bars.index(slot)
    mbarrier.expect(bar, 2 * HALVES * BOXES * BOX * HALF * 2)
    for half in gl.static_range(HALVES):
        for box in gl.static_range(BOXES):
            part = k_ring.index(slot * HALVES + half).slice(box * BOX, BOX)
            copy_box(k_desc, [rows[box], half * HALF], bar, part)
    for half in gl.static_range(HALVES):
        for box in gl.static_range(BOXES):
            part = v_ring.index(slot * HALVES + half).slice(box * BOX, BOX)
            copy_box(v_desc, [rows[box], half * HALF], bar, part)


@gluon.constexpr_function
def _pairs(tokens, warps):
    """Layout of one word for every two tokens, as the columns of a tensor core result hold them."""
    first = 1 + warps.bit_length()
    registers = [[1 << bit] for bit in range(first, (tokens // 2).bit_length() - 1)]
    warp = [[1 << bit] for bit in range(2, first)]
    return gl.DistributedLinearLayout(registers, [[1], [2], [0], [0], [0]], warp, [], [tokens // 2])


@gluon.jit
def load_pairs(scale, rows, BOX: gl.constexpr, BOXES: gl.constexpr, WARPS: gl.constexpr):
    """A tile's scales as stored, two tokens a word: [TILE // 2]."""
    pairs = gl.arange(0, BOX * BOXES // 2, _pairs(BOX * BOXES, WARPS))
    base = rows[0] // 2 + gl.zeros_like(pairs)
    for box in gl.static_range(1, BOXES):
        base = gl.where(pairs >= box * BOX // 2, rows[box] // 2, base)
    return gl.load(scale + (base + pairs % (BOX // 2)))


@gluon.jit
def unpack(pairs, layout: gl.constexpr, TILE: gl.constexpr):
    """Words of two scales -> FP32 [TILE]. 64-bit words hold FP32 scales, 32-bit words FP16."""
    if pairs.dtype == gl.int64:
        first, second = gl.inline_asm_elementwise(
            "mov.b64 {$0, $1}, $2;", "=r,=r,l", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
    else:
        first, second = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=r,=r,r", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return gl.convert_layout(gl.reshape(gl.join(first, second), [TILE]), layout, assert_trivial=True)
