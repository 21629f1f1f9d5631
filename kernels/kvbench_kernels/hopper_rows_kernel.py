"""Block-scaled FP8 product of up to 128 rows for Hopper GPUs, in Gluon: y = x w^T at the speed of reading w.

The weights stand on the tensor core's rows, 64 at a time, and the rows of x (tokens), padded to 32, 64 or 128, on its
columns. A CTA is one warp that copies into a ring in shared memory and one or two groups of four warps that multiply.

Work is counted in units: 128 columns of one tile of w. Each of the P programs takes an equal run of units, column blocks
first, so that all finish together whatever the shape. A tile that several programs share is added up by the one that
comes last, in the order of K: the same bits on every call.

The weights do not depend on the kernel in front, which quantizes x: the ring is filled with them before the wait for it.

Numbers. The tensor core adds FP8 products with 14 bits or so, so a sum ends after 128 columns: it starts from zero
and is added, times both scales, to an FP32 sum of its own registers.
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
from triton.language.extra.cuda import gdc_wait

# Names that changed after Triton 3.6, which has the second of each.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

BLOCK_K = gl.constexpr(128)  # columns that share scales: one unit, one slot of the ring
ROWS = gl.constexpr(64)  # of w in one instruction, and in one box of the copy engine


@gluon.jit
def _begin(program, programs, units):
    """The first unit of a program."""
    return program * units // programs


@gluon.jit
def _owner(unit, programs, units):
    """The program that has a unit: the last one that begins at it or before."""
    return ((unit + 1) * programs - 1) // units


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr, STRIDE: gl.constexpr = 1):
    """The slot STRIDE after this one, and the parity of the barrier's phase there."""
    around = slot + STRIDE >= STAGES
    return gl.where(around, slot + STRIDE - STAGES, slot + STRIDE), gl.where(around, phase ^ 1, phase)


@gluon.jit
def _copy_w(w_desc, w_ring, full, slot, unit, steps, BOXES: gl.constexpr, TOKENS: gl.constexpr):
    """Starts the copies of a unit's weights; the barrier then also waits for the codes and scales of x."""
    tile = unit // steps
    step = unit - tile * steps
    bar = full.index(slot)
    mbarrier.expect(bar, (BOXES * ROWS + TOKENS) * BLOCK_K + TOKENS * 4)
    for box in gl.static_range(BOXES):
        copy_in(w_desc, [(tile * BOXES + box) * ROWS, step * BLOCK_K], bar, w_ring.index(slot * BOXES + box))


@gluon.jit
def _copy_x(x_desc, s_desc, x_ring, s_ring, full, slot, unit, steps, stride_scales):
    """Starts the copies of what a unit needs of x."""
    step = unit % steps
    bar = full.index(slot)
    copy_in(x_desc, [0, step * BLOCK_K], bar, x_ring.index(slot))
    # A box begins at a multiple of 16 bytes or is an illegal instruction: stride_scales is a multiple of 4.
    copy_in(s_desc, [step * stride_scales], bar, s_ring.index(slot))


@gluon.jit
def _copy(
    w_desc, x_desc, s_desc, w_ring, x_ring, s_ring, full, empty, steps, units, stride_scales,
    BOXES: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp. A slot is filled again once every multiplying group has said that it has read it."""
    first = _begin(gl.program_id(0), gl.num_programs(0), units)
    end = _begin(gl.program_id(0) + 1, gl.num_programs(0), units)
    if not EARLY:
        gdc_wait()
        barrier()  # so that no copy moves up across the wait
    for stage in gl.static_range(STAGES):
        if first + stage < end:
            _copy_w(w_desc, w_ring, full, stage, first + stage, steps, BOXES, TOKENS)
    if EARLY:
        gdc_wait()
        barrier()
    for stage in gl.static_range(STAGES):
        if first + stage < end:
            _copy_x(x_desc, s_desc, x_ring, s_ring, full, stage, first + stage, steps, stride_scales)
    slot = 0
    phase = 0
    for unit in range(first + STAGES, end):
        mbarrier.wait(empty.index(slot), phase)
        _copy_w(w_desc, w_ring, full, slot, unit, steps, BOXES, TOKENS)
        _copy_x(x_desc, s_desc, x_ring, s_ring, full, slot, unit, steps, stride_scales)
        slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _finish(out, row, y_desc, buffer, bias, HAS_BIAS: gl.constexpr):
    """Stores finished sums [64, TOKENS] as columns from `row` on of y; rows beyond y's last are left out."""
    if HAS_BIAS:
        shift = gl.load(bias + row + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout)))
        out = out + gl.expand_dims(shift.to(gl.float32), 1)
    tma.store_wait(0)  # what the buffer held is out
    buffer.permute((1, 0)).store(out.to(y_desc.dtype))
    fence_async_shared()
    copy_out(y_desc, [0, row], buffer)


@gluon.jit
def _multiply(
    w_ring, x_ring, s_ring, full, empty, exchange, given, y_desc, y_buffers, w_scales, bias, parts, tickets, steps, units,
    WHO: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Group WHO of GROUPS: PARTS times 64 rows of each tile; with TURNS every other unit of the whole tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    ACROSS: gl.constexpr = 1 if TURNS else GROUPS  # groups that divide a tile's rows
    PLACE: gl.constexpr = 0 if TURNS else WHO
    STRIDE: gl.constexpr = GROUPS if TURNS else 1
    BOXES: gl.constexpr = ACROSS * PARTS
    of_row: gl.constexpr = gl.SliceLayout(1, mma)
    of_token: gl.constexpr = gl.SliceLayout(0, mma)
    PIECE: gl.constexpr = ROWS * TOKENS
    # Pieces lie with a token's rows side by side, and are added up in a layout that reads and stores them so.
    add: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    zero = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first = _begin(program, programs, units)
    end = _begin(program + 1, programs, units)
    inside = gl.expand_dims(gl.arange(0, ROWS, of_row), 1) + ROWS * gl.expand_dims(
        gl.arange(0, TOKENS, of_token), 0
    )
    inside_add = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, add)), 1) + ROWS * gl.expand_dims(
        gl.arange(0, TOKENS, gl.SliceLayout(0, add)), 0
    )
    buffer = y_buffers.index(PLACE)
    if not EARLY:
        gdc_wait()
        barrier()
    slot = WHO if TURNS else 0
    phase = 0
    turn = 0
    product = zero
    for tile in range(first // steps, (end - 1) // steps + 1):
        start = gl.maximum(first - tile * steps, 0)
        stop = gl.minimum(end - tile * steps, steps)
        begin = start
        if TURNS:
            begin = start + (tile * steps + start - first + WHO) % 2
        box = tile * BOXES + PLACE * PARTS
        w_row = w_scales + (box * ROWS // BLOCK_K) * steps
        sums = ()
        for _part in gl.static_range(PARTS):
            sums = sums + (zero,)
        w_scale = gl.load(w_row + gl.minimum(begin, stop - 1)).to(gl.float32)
        for step in range(begin, stop, STRIDE):
            following = gl.minimum(step + STRIDE, stop - 1)
            mbarrier.wait(full.index(slot), phase)
            x = x_ring.index(slot).permute((1, 0))
            added = ()
            for part in gl.static_range(PARTS):
                w = w_ring.index(slot * BOXES + PLACE * PARTS + part)
                product = warpgroup_mma(w, x, product, use_acc=steps < 0, is_async=True)
                if part == 0:
                    # While the tensor core works: this step's scales of x, and the next one's of w.
                    w_coming = gl.load(w_row + following).to(gl.float32)
                    factor = gl.expand_dims(s_ring.index(slot).load(of_token) * w_scale, 0)
                product = warpgroup_mma_wait(0, deps=[product])
                if part == PARTS - 1:
                    barrier()  # every warp has read the slot
                    mbarrier.arrive(empty.index(slot))
                more = sums[part] + product * factor
                if part != PARTS - 1:
                    # Pins the additions here: after the next product they would need its registers twice.
                    more = warpgroup_mma_wait(0, deps=[more])
                added = added + (more,)
            sums = added
            w_scale = w_coming
            slot, phase = _next(slot, phase, STAGES, STRIDE)

        if TURNS:
            # The second group gives its sums to the first: given[0] says so, given[1] that the first has taken them.
            if WHO == 1:
                mbarrier.wait(given.index(1), turn ^ 1)
                for part in gl.static_range(PARTS):
                    exchange.index(part).store(sums[part])
                barrier()
                mbarrier.arrive(given.index(0))
            else:
                mbarrier.wait(given.index(0), turn)
                added = ()
                for part in gl.static_range(PARTS):
                    added = added + (sums[part] + exchange.index(part).load(mma),)
                sums = added
                barrier()
                mbarrier.arrive(given.index(1))
            turn = turn ^ 1
        if PLACE == WHO:
            # x came after the kernel in front had ended; what that kernel reads or writes may be written from here on.
            gdc_wait()
            barrier()
            if PIECES == 1:
                for part in gl.static_range(PARTS):
                    _finish(sums[part], (box + part) * ROWS, y_desc, buffer, bias, HAS_BIAS)
            else:
                if (start == 0) & (stop == steps):
                    for part in gl.static_range(PARTS):
                        _finish(sums[part], (box + part) * ROWS, y_desc, buffer, bias, HAS_BIAS)
                else:
                    # A program has at most two pieces: of the tile it begins inside, and of the one it ends inside.
                    mine = program * 2 + (start == 0).to(gl.int32)
                    to = parts + (mine * ACROSS + PLACE).to(gl.int64) * (PARTS * PIECE)
                    for part in gl.static_range(PARTS):
                        gl.store(to + part * PIECE + inside, sums[part])
                    head = _owner(tile * steps, programs, units)
                    tail = _owner(tile * steps + steps - 1, programs, units)
                    ticket = tickets + tile * ACROSS + PLACE
                    barrier()  # all pieces of this group are stored
                    arrived = gl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
                    if arrived == tail - head:
                        gl.store(ticket, 0)
                        for part in gl.static_range(PARTS):
                            source = parts + part * PIECE
                            at = ((head * 2 + 1) * ACROSS + PLACE).to(gl.int64) * (PARTS * PIECE)
                            total = gl.load(source + at + inside_add, cache_modifier=".cg")
                            for piece in gl.static_range(1, PIECES):
                                at = ((head + piece) * 2 * ACROSS + PLACE).to(gl.int64) * (PARTS * PIECE)
                                kept = head + piece <= tail
                                total += gl.load(
                                    source + at + inside_add, mask=kept, other=0.0, cache_modifier=".cg"
                                )
                            _finish(total, (box + part) * ROWS, y_desc, buffer, bias, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps", "units", "stride_scales"])
def hopper_w8a8_rows(
    w_desc, x_desc, s_desc, y_desc, w_scales, bias, parts, tickets, steps, units, stride_scales,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
    HAS_BIAS: gl.constexpr, EARLY: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), at most one a unit. Torch twin: hopper_gemm.hopper_w8a8_torch.

    Boxes of w_desc are [64, 128], of x_desc [TOKENS, 128], of y_desc [TOKENS, 64], of s_desc (x's scales as one row
    of numbers, stride_scales apart a step) [TOKENS]. w_scales [N/128, steps]. A tile is GROUPS * PARTS * 64 rows of w, or
    with TURNS, where the two groups take units of the same tile in turn, PARTS * 64;
    units = tiles * steps, steps = K/128. At most PIECES programs share a tile. parts: float32
    [programs, 2, groups a tile, PARTS, 64, TOKENS]; tickets: a zero a tile and group; both unused with PIECES = 1.
    """
    ACROSS: gl.constexpr = 1 if TURNS else GROUPS
    BOXES: gl.constexpr = ACROSS * PARTS
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BOXES, ROWS, BLOCK_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    y_buffers = gl.allocate_shared_memory(y_desc.dtype, [ACROSS, TOKENS, ROWS], y_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], s_desc.layout)
    exchange = s_ring
    if TURNS:
        exchange = gl.allocate_shared_memory(
            gl.float32, [PARTS, ROWS, TOKENS], gl.SwizzledSharedLayout(2, 1, 16, order=[1, 0])
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(given.index(i), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=ACROSS)
    fence_async_shared()
    # The tuples stand in the calls: assigned to a name, their constants would become run-time values.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_ring, x_ring, s_ring, full, empty, exchange, given, y_desc, y_buffers, w_scales, bias, parts,
                    tickets, steps, units, 0, GROUPS, PARTS, TOKENS, STAGES, PIECES, HAS_BIAS, EARLY, TURNS,
                )),
                (_copy, (
                    w_desc, x_desc, s_desc, w_ring, x_ring, s_ring, full, empty, steps, units, stride_scales,
                    BOXES, TOKENS, STAGES, EARLY,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    w_ring, x_ring, s_ring, full, empty, exchange, given, y_desc, y_buffers, w_scales, bias, parts,
                    tickets, steps, units, 0, GROUPS, PARTS, TOKENS, STAGES, PIECES, HAS_BIAS, EARLY, TURNS,
                )),
                (_multiply, (
                    w_ring, x_ring, s_ring, full, empty, exchange, given, y_desc, y_buffers, w_scales, bias, parts,
                    tickets, steps, units, 1, GROUPS, PARTS, TOKENS, STAGES, PIECES, HAS_BIAS, EARLY, TURNS,
                )),
                (_copy, (
                    w_desc, x_desc, s_desc, w_ring, x_ring, s_ring, full, empty, steps, units, stride_scales,
                    BOXES, TOKENS, STAGES, EARLY,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
