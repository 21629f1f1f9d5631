"""Block-scaled FP8 products for Hopper GPUs, in Gluon: y = x w^T with a scale a row and 128 columns of x.

A CTA is one warp that copies tiles into a ring in shared memory and one to three groups of four warps that
multiply. It takes every n-th work item, and copies its next item while the last one is stored. An item is a
tile of y or, for the tiles of an incomplete last wave, a part of its columns of x and w: several CTAs share
such a tile, and the last to arrive adds the parts in the order of K, so results are the same bits on every
call. The first weights are copied before the wait for the previous kernel, which quantizes x.

Numbers. The tensor core adds FP8 products with about 14 bits, so a sum ends after 128 columns: it starts from
zero and is added, times both scales, to an FP32 sum in registers. One group does that while another
multiplies."""

# Gluon code, as in hopper_kernel.py.
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The second name of each is Triton 3.6's.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
memory = gl.shared_memory_descriptor
reinterpret = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

BLOCK_K = gl.constexpr(128)  # columns that share scales: one step
EARLY = gl.constexpr(2)  # steps of weights that are copied before the wait for x; more would delay x
ROWS = gl.constexpr(64)  # of x in one instruction, and in one box of the copy engine


# fmt: off
@gluon.jit
def _place(tile, m_tiles, n_tiles, GROUP: gl.constexpr):
    """(row, column) of a tile: down GROUP rows, then the next column, so that neighbours share reads."""
    group = tile // (GROUP * n_tiles)
    height = gl.minimum(m_tiles - group * GROUP, GROUP)
    inside = tile - group * GROUP * n_tiles
    return group * GROUP + inside % height, inside // height


@gluon.jit
def _item(item, whole, rest, splits, steps, SPLIT: gl.constexpr):
    """(tile, first step, end): items are `whole` tiles, first parts of the `rest`, second parts, .."""
    tile = item
    first = 0
    end = steps
    if SPLIT:
        if item >= whole:
            part = (item - whole) // rest
            tile = whole + (item - whole) % rest
            first = part * steps // splits
            end = (part + 1) * steps // splits
    return tile, first, end


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    """The next slot, and the parity of its barrier's phase."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _copy_w(w_desc, w_ring, bar, slot, j, step, BYTES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Start the copy of a step's weights; the barrier expects all bytes of the step."""
    mbarrier.expect(bar, BYTES)
    copy_in(w_desc, [j * BLOCK_N, step * BLOCK_K], bar, w_ring.index(slot))


@gluon.jit
def _copy(
    x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles, n_tiles, whole, rest,
    splits, BOXES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """The copying warp. A slot is filled when every multiplying group has read it."""
    BYTES: gl.constexpr = (BOXES * ROWS + BLOCK_N) * BLOCK_K + BOXES * ROWS * 4  # codes, and the scales of x
    tile, first, end = _item(gl.program_id(0), whole, rest, splits, steps, SPLIT)
    i, j = _place(tile, m_tiles, n_tiles, GROUP)
    early = gl.minimum(end - first, EARLY)
    for step in range(early):
        _copy_w(w_desc, w_ring, full.index(step), step, j, first + step, BYTES, BLOCK_N)
    gdc_wait()
    barrier()  # so that no copy moves up across the wait
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), whole + rest * splits, gl.num_programs(0)):
        tile, first, end = _item(item, whole, rest, splits, steps, SPLIT)
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        for step in range(first, end):
            bar = full.index(slot)
            if early > 0:
                early -= 1
            else:
                # On a fresh barrier, the phase before the first counts as complete.
                mbarrier.wait(empty.index(slot), phase ^ 1)
                _copy_w(w_desc, w_ring, bar, slot, j, step, BYTES, BLOCK_N)
            for box in gl.static_range(BOXES):
                row = (i * BOXES + box) * ROWS
                copy_in(x_desc, [row, step * BLOCK_K], bar, x_ring.index(slot * BOXES + box))
                # A box must begin at a multiple of 16 bytes, so scales of weights cannot be copied like this.
                copy_in(scale_desc, [step, row], bar, scale_ring.index(slot * BOXES + box))
            slot, phase = _next(slot, phase, STAGES)
    gdc_launch_dependents()


@gluon.jit
def _multiply(
    x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, w_scales, bias, steps, m_tiles,
    n_tiles, whole, rest, splits, parts, tickets,
    WHO: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr, TURNS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Group WHO of GROUPS: PARTS times 64 rows of the tile.

    With TURNS the groups use the tensor core in turn, so that it works on one product while the other groups
    add; otherwise groups that start together also end together, and the tensor core waits."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    of_row: gl.constexpr = gl.SliceLayout(1, mma)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOXES: gl.constexpr = GROUPS * PARTS
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, mma)
    slot = 0
    phase = 0
    turn = 1 if WHO == 0 else 0  # the first group's first turn waits for nobody
    gdc_wait()
    barrier()
    for item in range(gl.program_id(0), whole + rest * splits, gl.num_programs(0)):
        tile, start, end = _item(item, whole, rest, splits, steps, SPLIT)
        i, j = _place(tile, m_tiles, n_tiles, GROUP)
        first = (i * BOXES + WHO * PARTS) * ROWS
        w_row = w_scales + (j * BLOCK_N // BLOCK_K) * steps
        sums = ()
        for _part in gl.static_range(PARTS):
            sums = sums + (zero,)
        w_scale = gl.load(w_row + start).to(gl.float32)
        product = zero
        for step in range(start, end):
            following = gl.minimum(step + 1, end - 1)
            mbarrier.wait(full.index(slot), phase)
            added = ()
            for part in gl.static_range(PARTS):
                box = slot * BOXES + WHO * PARTS + part
                if TURNS:
                    mbarrier.wait(turns.index(WHO), turn)
                    turn = turn ^ 1
                product = hopper.warpgroup_mma(
                    x_ring.index(box), w_ring.index(slot).permute((1, 0)), product,
                    use_acc=steps <= 0, is_async=True
                )
                if TURNS:
                    mbarrier.arrive(turns.index((WHO + 1) % GROUPS))
                if part == 0:
                    # Load the next step's scale after the tensor core has work: a warp that waits for a scale
                    # would not issue the rest.
                    w_coming = gl.load(w_row + following).to(gl.float32)
                scale = reinterpret(scale_ring.index(box), gl.float32, [ROWS], flat).load(of_row) * w_scale
                product = hopper.warpgroup_mma_wait(0, deps=[product])
                if part == PARTS - 1:
                    mbarrier.arrive(empty.index(slot))
                more = sums[part] + product * gl.expand_dims(scale, 1)
                if part != PARTS - 1:
                    # Keeps the additions here: after the next product they would need its registers twice.
                    more = hopper.warpgroup_mma_wait(0, deps=[more])
                added = added + (more,)
            sums = added
            w_scale = w_coming
            slot, phase = _next(slot, phase, STAGES)
        if SPLIT:
            if item >= whole:
                _share(
                    sums, parts, tickets, (item - whole) % rest, (item - whole) // rest, splits, y_desc,
                    y_buffers, bias, first, j, mma, WHO, GROUPS, PARTS, BLOCK_N, HAS_BIAS, BUFFERS,
                )
            else:
                _store(sums, y_desc, y_buffers, bias, first, j, mma, WHO, PARTS, BLOCK_N, HAS_BIAS, BUFFERS)
        else:
            _store(sums, y_desc, y_buffers, bias, first, j, mma, WHO, PARTS, BLOCK_N, HAS_BIAS, BUFFERS)
    tma.store_wait(0)


@gluon.jit
def _share(
    sums, parts, tickets, tile, split, splits, y_desc, y_buffers, bias, first, j, mma: gl.constexpr,
    WHO: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr,
    HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr,
):
    """Store one part of a group's rows of a tile; the last group to arrive adds all parts and stores y."""
    PIECE: gl.constexpr = ROWS * BLOCK_N
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, mma)), 1)
    inside = rows * BLOCK_N + gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma)), 0)
    mine = parts + (tile * GROUPS + WHO) * splits * PARTS * PIECE
    for part in gl.static_range(PARTS):
        gl.store(mine + (split * PARTS + part) * PIECE + inside, sums[part])
    barrier()  # all of this group's part is stored
    ticket = tickets + tile * GROUPS + WHO
    arrived = gl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
    if arrived == splits - 1:
        gl.store(ticket, 0)
        for part in gl.static_range(PARTS):
            piece = mine + part * PIECE + inside
            total = gl.zeros([ROWS, BLOCK_N], gl.float32, mma)
            for s in range(splits):
                more = gl.load(piece + s * PARTS * PIECE, mask=s != split, other=0.0, cache_modifier=".cg")
                total += gl.where(s == split, sums[part], more)
            _store_rows(total, y_desc, y_buffers, bias, first, j, part, mma, WHO, BLOCK_N, HAS_BIAS, BUFFERS)


@gluon.jit
def _store(
    sums, y_desc, y_buffers, bias, first, j, mma: gl.constexpr, WHO: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr, HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr,
):
    """Store a group's rows of a tile, rounded, to y; the copies may still run at the end."""
    for part in gl.static_range(PARTS):
        _store_rows(sums[part], y_desc, y_buffers, bias, first, j, part, mma, WHO, BLOCK_N, HAS_BIAS, BUFFERS)


@gluon.jit
def _store_rows(
    out, y_desc, y_buffers, bias, first, j, part: gl.constexpr, mma: gl.constexpr, WHO: gl.constexpr,
    BLOCK_N: gl.constexpr, HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr,
):
    """Store 64 of these rows."""
    if HAS_BIAS:
        column = j * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        out = out + gl.expand_dims(gl.load(bias + column).to(gl.float32), 0)
    buffer = y_buffers.index(WHO * BUFFERS + part % BUFFERS)
    tma.store_wait(BUFFERS - 1)  # what the buffer held is out
    buffer.store(out.to(y_desc.dtype))
    fence_async_shared()
    copy_out(y_desc, [first + part * ROWS, j * BLOCK_N], buffer)


@gluon.jit(do_not_specialize=["steps", "m_tiles", "n_tiles", "whole", "rest", "splits"])
def hopper_w8a8_groups(
    x_desc, w_desc, y_desc, scale_desc, w_scales, bias, parts, tickets, steps, m_tiles, n_tiles, whole, rest,
    splits, GROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr, TURNS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Grid (programs,), any number. Torch twin: w8a8.w8a8_torch.

    Boxes: x_desc [64, 128], w_desc [BLOCK_N, 128], y_desc [64, BLOCK_N], scale_desc (x's scales [steps, M])
    [1, 64]. w_scales [N/128, steps], steps = K/128. A tile has GROUPS * PARTS * 64 rows, BLOCK_N columns.
    whole + rest = m_tiles * n_tiles; each tile of the rest is shared by `splits` items. parts: float32 [rest,
    GROUPS, splits, PARTS, 64, BLOCK_N]; tickets: a zero a tile of the rest and group. None without SPLIT."""
    BOXES: gl.constexpr = GROUPS * PARTS
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BOXES, ROWS, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES * BOXES, 1, ROWS], scale_desc.layout)
    y_buffers = gl.allocate_shared_memory(y_desc.dtype, [GROUPS * BUFFERS, ROWS, BLOCK_N], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # No barriers without turns: the compiler reuses memory that nothing waits on, and a barrier's memory must
    # hold a barrier until it is invalidated.
    turns = empty
    if TURNS:
        turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
        for who in gl.static_range(GROUPS):
            mbarrier.init(turns.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    # The tuples are written in the calls: assigned to a name, their constants would become run-time values.
    if GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, w_scales, bias,
                         steps, m_tiles, n_tiles, whole, rest, splits, parts, tickets, 0, GROUPS, PARTS,
                         BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS, TURNS, SPLIT)),
            (_copy, (x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles,
                     n_tiles, whole, rest, splits, BOXES, BLOCK_N, STAGES, GROUP, SPLIT)),
        ], [1], [24])
    elif GROUPS == 2:
        gl.warp_specialize([
            (_multiply, (x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, w_scales, bias,
                         steps, m_tiles, n_tiles, whole, rest, splits, parts, tickets, 0, GROUPS, PARTS,
                         BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS, TURNS, SPLIT)),
            (_multiply, (x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, w_scales, bias,
                         steps, m_tiles, n_tiles, whole, rest, splits, parts, tickets, 1, GROUPS, PARTS,
                         BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS, TURNS, SPLIT)),
            (_copy, (x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles,
                     n_tiles, whole, rest, splits, BOXES, BLOCK_N, STAGES, GROUP, SPLIT)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_multiply, (x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, w_scales, bias,
                         steps, m_tiles, n_tiles, whole, rest, splits, parts, tickets, 0, GROUPS, PARTS,
                         BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS, TURNS, SPLIT)),
            (_multiply, (x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, w_scales, bias,
                         steps, m_tiles, n_tiles, whole, rest, splits, parts, tickets, 1, GROUPS, PARTS,
                         BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS, TURNS, SPLIT)),
            (_multiply, (x_ring, w_ring, scale_ring, full, empty, turns, y_desc, y_buffers, w_scales, bias,
                         steps, m_tiles, n_tiles, whole, rest, splits, parts, tickets, 2, GROUPS, PARTS,
                         BLOCK_N, STAGES, GROUP, HAS_BIAS, BUFFERS, TURNS, SPLIT)),
            (_copy, (x_desc, w_desc, scale_desc, x_ring, w_ring, scale_ring, full, empty, steps, m_tiles,
                     n_tiles, whole, rest, splits, BOXES, BLOCK_N, STAGES, GROUP, SPLIT)),
        ], [4, 4, 1], [160, 160, 24])
