"""Merging the partial results of the Hopper decode kernel, in a fixed order."""

# Gluon code, as in hopper_kernel.py.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def merge(partial, lse, count, GP: gl.constexpr, D: gl.constexpr, FAN: gl.constexpr, WARPS: gl.constexpr):
    """Merge `count` normalised results: (sum of outputs [GP, D], its weight [GP], log2 reference [GP])."""
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
            mask=there,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        o = gl.load(
            partial + first * GP * D + inner,
            mask=gl.expand_dims(gl.expand_dims(first + i3 < count, 1), 2),
            other=0.0,
            cache_modifier=".cg",
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
    out_row,
    out_stride_h,
    acc,
    total,
    GROUP: gl.constexpr,
    GP: gl.constexpr,
    D: gl.constexpr,
    KIND: gl.constexpr,
    WARPS: gl.constexpr,
):
    """acc [GP, D], dims ordered as (half, position) -> the output's rows in their natural order."""
    o = acc / gl.expand_dims(total, 1)
    if KIND != "native":
        o = gl.reshape(gl.permute(gl.reshape(o, [GP, 2, D // 2]), [0, 2, 1]), [GP, D])
    LANES: gl.constexpr = min(32, D // 4)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    o = gl.convert_layout(o, layout)
    g = gl.expand_dims(gl.arange(0, GP, gl.SliceLayout(1, layout)), 1)
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
    gl.store(out_row + g * out_stride_h + d, o.to(out_row.dtype.element_ty), mask=g < GROUP)
