"""Block-scaled FP8 matrix products for Hopper GPUs, in Gluon: y = x w^T with a scale a row and 128 columns of x.

A CTA is one warp that copies tiles into a ring in shared memory and one or two groups of four warps that multiply. It
takes every n-th tile of y, and the copies of its next tile run while the last one is stored.

Numbers. The tensor core adds FP8 products with 14 bits or so, so a sum ends after 128 columns: it starts from zero
and is added, times both scales, to an FP32 sum of its own registers. One group does that while the other multiplies.
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
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
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
    x_desc, w_desc, x_ring, w_ring, full, empty, steps, m_tiles, n_tiles,
    BOXES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The copying warp. A slot is filled once every multiplying group has said that it has read it."""
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        for step in range(steps):
            # On a fresh barrier, the phase before the first counts as complete.
            mbarrier.wait(empty.index(slot), phase ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (BOXES * ROWS + BLOCK_N) * BLOCK_K)
            copy_in(w_desc, [j * BLOCK_N, step * BLOCK_K], bar, w_ring.index(slot))
            for box in gl.static_range(BOXES):
                row = (i * BOXES + box) * ROWS
                copy_in(x_desc, [row, step * BLOCK_K], bar, x_ring.index(slot * BOXES + box))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _multiply(
    x_ring, w_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m, stride_scales, steps, m_tiles, n_tiles,
    WHO: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Group WHO of GROUPS: PARTS times 64 rows of the tile.

    With TURNS the groups hand products to the tensor core in turn, so that it works on one while the other adds up.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    BOXES: gl.constexpr = GROUPS * PARTS
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, mma)
    slot = 0
    phase = 0
    turn = 1 - WHO  # the first group's first turn comes without the other's word
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        w_row = w_scales + (j * BLOCK_N // BLOCK_K) * steps
        first = (i * BOXES + WHO * PARTS) * ROWS
        # Rows beyond x take the scale of its last one; their codes are zeros, and they are not stored.
        rows = ()
        sums = ()
        scales = ()
        for part in gl.static_range(PARTS):
            row = first + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
            rows = rows + (gl.minimum(row, m - 1),)
            sums = sums + (zero,)
            scales = scales + (gl.load(x_scales + rows[part]),)
        w_scale = gl.load(w_row).to(gl.float32)
        product = zero
        for step in range(steps):
            following = gl.minimum(step + 1, steps - 1)
            mbarrier.wait(full.index(slot), phase)
            added = ()
            for part in gl.static_range(PARTS):
                x = x_ring.index(slot * BOXES + WHO * PARTS + part)
                w = w_ring.index(slot).permute((1, 0))
                if TURNS:
                    mbarrier.wait(turns.index(WHO), turn)
                    turn = turn ^ 1
                product = warpgroup_mma(x, w, product, use_acc=steps < 0, is_async=True)
                if TURNS:
                    mbarrier.arrive(turns.index(1 - WHO))
                if part == 0:
                    # The next step's scales, asked for once the tensor core has work: a warp that needs one too soon
                    # would not hand it the rest.
                    w_coming = gl.load(w_row + following).to(gl.float32)
                    coming = ()
                    for p in gl.static_range(PARTS):
                        coming = coming + (gl.load(x_scales + (rows[p] + following * stride_scales)),)
                product = warpgroup_mma_wait(0, deps=[product])
                if part == PARTS - 1:
                    mbarrier.arrive(empty.index(slot))
                more = sums[part] + product * gl.expand_dims(scales[part] * w_scale, 1)
                if part != PARTS - 1:
                    # Pins the additions here: after the next product they would need its registers twice.
                    more = warpgroup_mma_wait(0, deps=[more])
                added = added + (more,)
            sums = added
            scales = coming
            w_scale = w_coming
            slot, phase = _next(slot, phase, STAGES)
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
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "stride_scales", "steps", "m_tiles", "n_tiles"])
def hopper_w8a8_groups(
    x_desc, w_desc, y_desc, x_scales, w_scales, bias, m, stride_scales, steps, m_tiles, n_tiles,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), any number. Boxes of x_desc are [64, 128], of w_desc [BLOCK_N, 128], of y_desc [64, BLOCK_N].

    w_scales [N/128, steps]; x_scales [M, steps] with stride (1, stride_scales); steps = K/128. A tile has
    GROUPS * PARTS * 64 rows and BLOCK_N columns, 64 or 128. Torch twin: hopper_gemm.hopper_w8a8_torch.
    """
    BOXES: gl.constexpr = GROUPS * PARTS
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BOXES, ROWS, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    y_buffers = gl.allocate_shared_memory(y_desc.dtype, [GROUPS * BUFFERS, ROWS, BLOCK_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
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
                    x_ring, w_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 0, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS,
                    BUFFERS, TURNS,
                )),
                (_copy, (
                    x_desc, w_desc, x_ring, w_ring, full, empty, steps, m_tiles, n_tiles,
                    BOXES, BLOCK_N, STAGES, GROUP,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_ring, w_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 0, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS,
                    BUFFERS, TURNS,
                )),
                (_multiply, (
                    x_ring, w_ring, full, empty, turns, y_desc, y_buffers, x_scales, w_scales, bias, m,
                    stride_scales, steps, m_tiles, n_tiles, 1, GROUPS, PARTS, BLOCK_N, STAGES, GROUP, HAS_BIAS,
                    BUFFERS, TURNS,
                )),
                (_copy, (
                    x_desc, w_desc, x_ring, w_ring, full, empty, steps, m_tiles, n_tiles,
                    BOXES, BLOCK_N, STAGES, GROUP,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


@gluon.jit
def _fill(
    x_desc, w_desc, x_ring, w_ring, full, slot, i, j, step, PARTS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Start the copies of a step into a slot."""
    bar = full.index(slot)
    mbarrier.expect(bar, (PARTS * ROWS + BLOCK_N) * BLOCK_K)
    copy_in(w_desc, [j * BLOCK_N, step * BLOCK_K], bar, w_ring.index(slot))
    for part in gl.static_range(PARTS):
        copy_in(x_desc, [(i * PARTS + part) * ROWS, step * BLOCK_K], bar, x_ring.index(slot * PARTS + part))


@gluon.jit(do_not_specialize=["m", "stride_scales", "steps", "m_tiles", "n_tiles"])
def hopper_w8a8_single(
    x_desc, w_desc, y_desc, x_scales, w_scales, bias, m, stride_scales, steps, m_tiles, n_tiles,
    PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """As hopper_w8a8_groups, with one group of warps that copies too: a program a tile, several on a multiprocessor."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * PARTS, ROWS, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    buffer = gl.allocate_shared_memory(y_desc.dtype, [ROWS, BLOCK_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    barrier()
    i, j = _place(gl.program_id(0), m_tiles, n_tiles, GROUP)
    for stage in gl.static_range(STAGES - 1):
        if stage < steps:
            _fill(x_desc, w_desc, x_ring, w_ring, full, stage, i, j, stage, PARTS, BLOCK_N)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, mma)
    w_row = w_scales + (j * BLOCK_N // BLOCK_K) * steps
    first = i * PARTS * ROWS
    rows = ()
    sums = ()
    scales = ()
    for part in gl.static_range(PARTS):
        row = first + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
        rows = rows + (gl.minimum(row, m - 1),)
        sums = sums + (zero,)
        scales = scales + (gl.load(x_scales + rows[part]),)
    w_scale = gl.load(w_row).to(gl.float32)
    product = zero
    slot = 0
    phase = 0
    for step in range(steps):
        barrier()  # every warp is done with the slot that is filled next
        before = gl.where(slot == 0, STAGES - 1, slot - 1)
        if step + STAGES - 1 < steps:
            _fill(x_desc, w_desc, x_ring, w_ring, full, before, i, j, step + STAGES - 1, PARTS, BLOCK_N)
        following = gl.minimum(step + 1, steps - 1)
        mbarrier.wait(full.index(slot), phase)
        added = ()
        for part in gl.static_range(PARTS):
            x = x_ring.index(slot * PARTS + part)
            w = w_ring.index(slot).permute((1, 0))
            product = warpgroup_mma(x, w, product, use_acc=steps < 0, is_async=True)
            if part == 0:
                w_coming = gl.load(w_row + following).to(gl.float32)
                coming = ()
                for p in gl.static_range(PARTS):
                    coming = coming + (gl.load(x_scales + (rows[p] + following * stride_scales)),)
            product = warpgroup_mma_wait(0, deps=[product])
            more = sums[part] + product * gl.expand_dims(scales[part] * w_scale, 1)
            if part != PARTS - 1:
                more = warpgroup_mma_wait(0, deps=[more])
            added = added + (more,)
        sums = added
        scales = coming
        w_scale = w_coming
        slot, phase = _next(slot, phase, STAGES)
    if HAS_BIAS:
        column = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        shift = gl.expand_dims(gl.load(bias + column).to(gl.float32), 0)
    for part in gl.static_range(PARTS):
        out = sums[part]
        if HAS_BIAS:
            out = out + shift
        tma.store_wait(0)
        buffer.store(out.to(y_desc.dtype))
        fence_async_shared()
        copy_out(y_desc, [first + part * ROWS, j * BLOCK_N], buffer)
    tma.store_wait(0)
