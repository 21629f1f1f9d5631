"""Block-scaled FP8 matrix products for Hopper GPUs, in Gluon: y = x w^T with a scale a row and 128 columns of x.

A CTA is one warp that copies tiles into a ring in shared memory and one to three groups of four warps that multiply. It
takes every n-th tile of y, and the copies of its next tile run while the last one is stored.

Numbers. The tensor core adds FP8 products with 14 bits or so, so a sum ends after 128 columns: it starts from zero
and is added, times both scales, to an FP32 sum of its own registers. One group does that while another multiplies.
"""

# Gluon code, as in hopper_kernel.py.
# mypy: ignore-errors
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Names that changed after Triton 3.6, which has the second of each.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

BLOCK_K = gl.constexpr(128)  # columns that share scales: one step
ROWS = gl.constexpr(64)  # of x in one instruction, and in one box of the copy engine


@gluon.jit
def _place(tile, m_tiles, n_tiles, GROUP: gl.constexpr):
    """(row of tiles, column of tiles): down GROUP rows, then the next column, so that what runs together shares reads."""
    group = tile // (GROUP * n_tiles)
    height = gl.minimum(m_tiles - group * GROUP, GROUP)
    inside = tile - group * GROUP * n_tiles
    return group * GROUP + inside % height, inside // height


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The slot after this one, and the parity of the barrier's phase there."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _copy(
    x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles, n_tiles, BOXES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """The copying warp. A slot is filled once every multiplying group has said that it has read it."""
    BYTES: gl.constexpr = (BOXES * ROWS + BLOCK_N) * BLOCK_K + (BOXES * ROWS * 4 if COPIED else 0)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        for step in range(steps):
            # On a fresh barrier, the phase before the first counts as complete.
            mbarrier.wait(empty.index(slot), phase ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            copy_in(w_desc, [j * BLOCK_N, step * BLOCK_K], bar, w_ring.index(slot))
            for box in gl.static_range(BOXES):
                row = (i * BOXES + box) * ROWS
                copy_in(x_desc, [row, step * BLOCK_K], bar, x_ring.index(slot * BOXES + box))
                if COPIED:
                    # A box begins at a multiple of 16 bytes or is an illegal instruction: a weight's scale cannot come so.
                    copy_in(scale_desc, [step, row], bar, scale_ring.index(slot * BOXES + box))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _multiply(
    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
    stride_scales, steps, m_tiles, n_tiles,
    WHO: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr, TURNS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Group WHO of GROUPS: PARTS times 64 rows of the tile.

    With TURNS the groups hand products to the tensor core in turn, so that it works on one while the others add up: its
    instructions come from all warps that have some, so groups that start together end together, and it waits.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    of_row: gl.constexpr = gl.SliceLayout(1, mma)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOXES: gl.constexpr = GROUPS * PARTS
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, mma)
    slot = 0
    phase = 0
    turn = 1 if WHO == 0 else 0  # the first group's first turn comes without another's word
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        first = (i * BOXES + WHO * PARTS) * ROWS
        w_row = w_scales + (j * BLOCK_N // BLOCK_K) * steps
        # Rows beyond x take the scale of its last one; their codes are zeros, and they are not stored.
        rows = ()
        sums = ()
        scales = ()
        start = gl.minimum(0, steps - 1)  # 0; written so, the generated code is the one that was measured
        for part in gl.static_range(PARTS):
            row = first + part * ROWS + gl.arange(0, ROWS, of_row)
            rows = rows + (gl.minimum(row, m - 1),)
            sums = sums + (zero,)
            if not COPIED:
                scales = scales + (gl.load(x_scales + (rows[part] + start * stride_scales)),)
        w_scale = gl.load(w_row + start).to(gl.float32)
        product = zero
        for step in range(steps):
            following = gl.minimum(step + 1, steps - 1)
            mbarrier.wait(full.index(slot), phase)
            added = ()
            for part in gl.static_range(PARTS):
                box = slot * BOXES + WHO * PARTS + part
                if TURNS:
                    mbarrier.wait(turns.index(WHO), turn)
                    turn = turn ^ 1
                product = warpgroup_mma(
                    x_ring.index(box), w_ring.index(slot).permute((1, 0)), product, use_acc=steps <= 0, is_async=True
                )  # fmt: skip
                if TURNS:
                    mbarrier.arrive(turns.index((WHO + 1) % GROUPS))
                if part == 0:
                    # The next step's scales, asked for once the tensor core has work: a warp that needs one too soon
                    # would not hand it the rest.
                    w_coming = gl.load(w_row + following).to(gl.float32)
                    coming = ()
                    if not COPIED:
                        for p in gl.static_range(PARTS):
                            coming = coming + (gl.load(x_scales + (rows[p] + following * stride_scales)),)
                if COPIED:
                    scale = (
                        reinterpret(scale_ring.index(box), gl.float32, [ROWS], flat).load(of_row) * w_scale
                    )
                else:
                    scale = scales[part] * w_scale
                product = warpgroup_mma_wait(0, deps=[product])
                if part == PARTS - 1:
                    mbarrier.arrive(empty.index(slot))
                more = sums[part] + product * gl.expand_dims(scale, 1)
                if part != PARTS - 1:
                    # Pins the additions here: after the next product they would need its registers twice.
                    more = warpgroup_mma_wait(0, deps=[more])
                added = added + (more,)
            sums = added
            scales = coming
            w_scale = w_coming
            slot, phase = _next(slot, phase, STAGES)
        _store(sums, y_desc, y_buffers, bias, first, j, mma, WHO, PARTS, BLOCK_N, HAS_BIAS, BUFFERS)
    tma.store_wait(0)


@gluon.jit
def _store(
    sums, y_desc, y_buffers, bias, first, j, mma: gl.constexpr, WHO: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr, HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """A group's rows of a tile, rounded, to y; the copies may still run at the end."""
    if HAS_BIAS:
        column = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        shift = gl.expand_dims(gl.load(bias + column).to(gl.float32), 0)
    for part in gl.static_range(PARTS):
        out = sums[part]
        if HAS_BIAS:
            out = out + shift
        buffer = y_buffers.index(WHO * BUFFERS + part % BUFFERS)
        tma.store_wait(BUFFERS - 1)  # what the buffer held is out
        buffer.store(out.to(y_desc.dtype))
        fence_async_shared()
        copy_out(y_desc, [first + part * ROWS, j * BLOCK_N], buffer)


@gluon.jit(do_not_specialize=["m", "stride_scales", "steps", "m_tiles", "n_tiles"])
def hopper_w8a8_groups(
    x_desc, w_desc, y_desc, scale_desc, x_scales, w_scales, bias, m, stride_scales, steps, m_tiles, n_tiles,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr, TURNS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), any number. Boxes of x_desc are [64, 128], of w_desc [BLOCK_N, 128], of y_desc [64, BLOCK_N].

    w_scales [N/128, steps]; x_scales [M, steps] with stride (1, stride_scales); steps = K/128. A tile has
    GROUPS * PARTS * 64 rows and BLOCK_N columns, 64 or 128. With COPIED the scales of x come through the ring, by
    scale_desc [steps, M] in boxes [1, 64]: stride_scales is a multiple of 4. Else scale_desc is None.
    Torch twin: w8a8.w8a8_torch.
    """
    BOXES: gl.constexpr = GROUPS * PARTS
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BOXES, ROWS, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    scale_ring = x_ring
    if COPIED:
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES * BOXES, 1, ROWS], scale_desc.layout)
    y_buffers = gl.allocate_shared_memory(y_desc.dtype, [GROUPS * BUFFERS, ROWS, BLOCK_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(GROUPS):
        mbarrier.init(turns.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    # The tuples stand in the calls: assigned to a name, their constants would become run-time values.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 0, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS,
                    TURNS, COPIED,
                )),
                (_copy, (
                    x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles, n_tiles,
                    BOXES, BLOCK_N, STAGES, GROUP, COPIED,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 0, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS,
                    TURNS, COPIED,
                )),
                (_multiply, (
                    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 1, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS,
                    TURNS, COPIED,
                )),
                (_copy, (
                    x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles, n_tiles,
                    BOXES, BLOCK_N, STAGES, GROUP, COPIED,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 0, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS,
                    TURNS, COPIED,
                )),
                (_multiply, (
                    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 1, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS,
                    TURNS, COPIED,
                )),
                (_multiply, (
                    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 2, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS,
                    TURNS, COPIED,
                )),
                (_copy, (
                    x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles, n_tiles,
                    BOXES, BLOCK_N, STAGES, GROUP, COPIED,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
