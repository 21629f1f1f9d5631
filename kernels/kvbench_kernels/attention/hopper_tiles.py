"""Parts of the Hopper decode kernel: tiles, their pages, codes and scales; the merge of partial results."""

# Gluon code, as in hopper_kernel.py.
# mypy: ignore-errors
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# The second name is Triton 3.6's.
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_INT8_SPLIT = gl.constexpr("""{
    .reg .b32 x, e, o, m; xor.b32 x, $2, 0x80808080; mov.b32 m, 0x64806480;
    prmt.b32 e, x, 0x64646464, 0x4240; prmt.b32 o, x, 0x64646464, 0x4341; sub.f16x2 $0, e, m;
    sub.f16x2 $1, o, m;
}""")
_FP8_SPLIT = gl.constexpr("""{
    .reg .b32 x; .reg .b16 e, o; prmt.b32 x, $2, 0, 0x3120; mov.b32 {e, o}, x;
    cvt.rn.f16x2.e4m3x2 $0, e; cvt.rn.f16x2.e4m3x2 $1, o;
}""")


# fmt: off
@gluon.constexpr_function
def lower_rows(tile, warps):
    """Layout of rows 0..7 of a tensor core result [16, tile], without the registers of the other rows."""
    first = 2 + warps.bit_length()  # warps take the token bits from 3 on, registers the rest
    registers = [[0, 1]] + [[0, 1 << bit] for bit in range(first, tile.bit_length() - 1)]
    warp = [[0, 1 << bit] for bit in range(3, first)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [8, tile])


@gluon.jit
def split_words(x, KIND: gl.constexpr):
    """Words of two neighbouring 8-bit dims -> the even and the odd dims in FP16, exactly."""
    CODE: gl.constexpr = _INT8_SPLIT if KIND == "int8" else _FP8_SPLIT
    return gl.inline_asm_elementwise(
        CODE, "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def load_halves(ring, slot, layout: gl.constexpr, KIND: gl.constexpr):
    """A tile of the ring as two operands [HALF, TILE], over half the dims each."""
    if KIND == "native":
        first = ring.index(slot * 2).permute([1, 0]).load(layout)
        return first, ring.index(slot * 2 + 1).permute([1, 0]).load(layout)
    raw = ring.index(slot).permute([1, 0]).load(layout)
    return raw, raw


@gluon.jit
def box_rows(
    pages_row, tile, last_page, head,
    HKV: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, BOX: gl.constexpr,
):
    """First flat row [pages * heads * page_size] of each box of a tile; of the last page past the end."""
    rows = ()
    for box in gl.static_range(TILE // BOX):
        token = tile * TILE + box * BOX
        page = gl.load(pages_row + gl.minimum(token // PAGE, last_page))
        rows = rows + ((page * HKV + head) * PAGE + token % PAGE,)
    return rows


@gluon.jit
def rows_inside(ready, first, stride, length, TILE: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr):
    """Replace boxes behind the end of the sequence by the first box, which is never behind it."""
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
    k_desc, v_desc, k_ring, v_ring, bars, slot, rows,
    BOXES: gl.constexpr, HALVES: gl.constexpr, HALF: gl.constexpr, BOX: gl.constexpr,
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
    """Layout of one word per two tokens, as in the columns of a tensor core result."""
    first = 1 + warps.bit_length()
    registers = [[1 << bit] for bit in range(first, (tokens // 2).bit_length() - 1)]
    warp = [[1 << bit] for bit in range(2, first)]
    return gl.DistributedLinearLayout(registers, [[1], [2], [0], [0], [0]], warp, [], [tokens // 2])


@gluon.jit
def load_pairs(scale, rows, BOX: gl.constexpr, BOXES: gl.constexpr, WARPS: gl.constexpr):
    """A tile's stored scales, two tokens a word: [TILE // 2]."""
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
        )
    return gl.convert_layout(gl.reshape(gl.join(first, second), [TILE]), layout, assert_trivial=True)


@gluon.jit
def merge(partial, lse, count, GP: gl.constexpr, D: gl.constexpr, FAN: gl.constexpr, WARPS: gl.constexpr):
    """(sum of outputs [GP, D], its weight [GP], log2 reference [GP]) of `count` normalised results."""
    # Results at a time: 128 registers of them in flight.
    CH: gl.constexpr = min(FAN, max(1, 4096 * WARPS // (GP * D)))
    LANES: gl.constexpr = min(32, D // 4)
    BY_ROW: gl.constexpr = min(WARPS, GP)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 32 // LANES, LANES], [WARPS // BY_ROW, BY_ROW, 1], [2, 1, 0]
    )
    per_row: gl.constexpr = gl.SliceLayout(2, layout)
    i = gl.arange(0, CH, gl.SliceLayout(1, per_row))
    g = gl.arange(0, GP, gl.SliceLayout(0, per_row))
    i3 = gl.arange(0, CH, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    g3 = gl.arange(0, GP, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    d3 = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    inner = gl.expand_dims(gl.expand_dims(g3, 0) + gl.expand_dims(i3, 1) * GP, 2) * D
    inner = inner + gl.expand_dims(gl.expand_dims(d3, 0), 1)
    acc = gl.zeros([GP, D], gl.float32, gl.SliceLayout(0, layout))
    top = gl.full([GP], -1e30, gl.float32, gl.SliceLayout(0, per_row))
    total = gl.zeros([GP], gl.float32, gl.SliceLayout(0, per_row))
    for first in range(0, count, CH):
        there = gl.expand_dims(first + i < count, 1)
        w = gl.load(
            lse + first * GP + gl.expand_dims(i, 1) * GP + gl.expand_dims(g, 0),
            mask=there, other=float("-inf"), cache_modifier=".cg",
        )
        o = gl.load(
            partial + first * GP * D + inner, mask=gl.expand_dims(gl.expand_dims(first + i3 < count, 1), 2),
            other=0.0, cache_modifier=".cg",
        )
        new = gl.maximum(top, gl.max(w, 0))
        alpha = gl.exp2(top - new)
        w = gl.exp2(w - gl.expand_dims(new, 0))
        total = total * alpha + gl.sum(w, 0)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(0, layout))), 1)
        acc = acc + gl.sum(o * gl.expand_dims(w, 2), 0)
        top = new
    return (
        acc,
        gl.convert_layout(total, gl.SliceLayout(1, gl.SliceLayout(0, layout))),
        gl.convert_layout(top, gl.SliceLayout(1, gl.SliceLayout(0, layout))),
    )


@gluon.jit
def store_merged(
    out_row, out_stride_h, acc, total,
    GROUP: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, KIND: gl.constexpr, WARPS: gl.constexpr,
):
    """Store acc [GP, D], dims ordered as (half, position), in the natural order of the output's rows."""
    o = acc / gl.expand_dims(total, 1)
    if KIND != "native":
        o = gl.reshape(gl.permute(gl.reshape(o, [GP, 2, D // 2]), [0, 2, 1]), [GP, D])
    LANES: gl.constexpr = min(32, D // 4)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    o = gl.convert_layout(o, layout)
    g = gl.expand_dims(gl.arange(0, GP, gl.SliceLayout(1, layout)), 1)
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
    gl.store(out_row + g * out_stride_h + d, o.to(out_row.dtype.element_ty), mask=g < GROUP)
