"""Paged decode attention for Hopper GPUs, in Gluon: one query token a sequence, one launch.

A program is one, two or four warps. It takes every n-th tile of tokens of one (sequence, KV head), copies
each from its pages with the bulk copy engine into a ring in shared memory, and keeps its own softmax state.
The last program of a (sequence, KV head) to finish merges all results in a fixed order, so results are the
same bits on every call.

8-bit payloads are copied and loaded as 16-bit words of two neighbouring dims, so that ldmatrix loads them in
the layout of the tensor core's operand; each register is then split into the even and the odd dims in FP16.
Q.K is the sum of two products over half the dims. The second product is transposed, O^T = V^T P^T: the upper
rows of a 16-row tile are empty for up to 8 query heads a KV head, and the logits' registers are already P^T's
operand.

Numbers. Each query row is scaled by a power of two to less than 2^15, undone in the logits, so a BF16 query
cannot overflow FP16. K's scale multiplies the logits; V's multiplies P, relative to the largest scale so far,
which multiplies the accumulator, so no scale leaves FP16's range. The softmax reference moves only when a
logit exceeds it by 2^8."""

# Gluon's types are the compiler's, tuples are not unpacked into others, and compile-time conditions stand
# apart from run-time ones.
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvbench_kernels.attention import hopper_tiles as parts

# The second name is Triton 3.6's.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
COUNTERS = gl.constexpr(33)  # of arrived programs, a (sequence, KV head): 32 bundles and the second level
# Added to every exponent: P reaches 2^7 at the reference and 2^15 when the reference lags by 2^8.
_SHIFT = gl.constexpr(7.0)
_LIMIT = gl.constexpr(15.0)


# fmt: off
@gluon.jit(do_not_specialize=["pages_stride", "pages_width", "splits", "slots", "min_tiles"])
def paged_decode_hopper(
    q_ptr, k_desc, v_desc, k_scale, v_scale, pages, lengths, out_ptr, reads,
    partial, lse, counters, scale_log2,
    q_stride_b, q_stride_h, out_stride_b, out_stride_h, pages_stride, pages_width, splits, slots, min_tiles,
    KIND: gl.constexpr, DYNAMIC: gl.constexpr, HALF: gl.constexpr, GROUP: gl.constexpr, GP: gl.constexpr,
    ROWS: gl.constexpr, HKV: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    FAN: gl.constexpr, HAS_READS: gl.constexpr, WARPS: gl.constexpr,
):
    """Grid (KV heads, splits, sequences). The arguments are those of hopper_decode.paged_decode_hopper."""
    BOX: gl.constexpr = min(PAGE, TILE)
    BOXES: gl.constexpr = TILE // BOX
    HALVES: gl.constexpr = 2 if KIND == "native" else 1
    D: gl.constexpr = 2 * HALF
    CELL: gl.constexpr = k_desc.dtype
    DOT: gl.constexpr = CELL if KIND == "native" else gl.float16
    # Warps share a tile: its tokens in Q.K, the output's dims in V^T P^T.
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    q_operand: gl.constexpr = gl.DotOperandLayout(0, mma_s, 2)
    k_operand: gl.constexpr = gl.DotOperandLayout(1, mma_s, 2)
    v_operand: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    p_operand: gl.constexpr = gl.DotOperandLayout(1, mma_o, 2)

    head = gl.program_id(0)
    split = gl.program_id(1)
    seq = gl.program_id(2)

    # The ring: [stage][half] tiles; the copy engine fills a tile box by box, a box being (part of) a page.
    boxes_layout: gl.constexpr = k_desc.layout
    k_ring = gl.allocate_shared_memory(CELL, [STAGES * HALVES, TILE, HALF], boxes_layout)
    v_ring = gl.allocate_shared_memory(CELL, [STAGES * HALVES, TILE, HALF], boxes_layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    # The launch may start before the previous kernel has ended: nothing it writes is touched above this line.
    gdc_wait()
    barrier()  # so that no load moves up across the wait
    gdc_launch_dependents()

    # Logits are [ROWS, TILE]: for 8 rows the upper half of the tensor core's tile is dropped.
    if ROWS == 8:
        logits: gl.constexpr = parts.lower_rows(TILE, WARPS)
    else:
        logits: gl.constexpr = mma_s
    per_token: gl.constexpr = gl.SliceLayout(0, logits)
    per_row: gl.constexpr = gl.SliceLayout(1, logits)
    per_out: gl.constexpr = gl.SliceLayout(0, mma_o)
    # Queries: [16, HALF] twice, scaled by a power of two a row.
    q_row = q_ptr + seq.to(gl.int64) * q_stride_b + head * GROUP * q_stride_h
    if KIND == "native":
        ql: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 8), HALF // 8], [WARPS, 1], [1, 0])
        g = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, ql)), 1)
        d = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, ql)), 0)
        x0 = gl.load(q_row + g * q_stride_h + d, mask=g < GROUP, other=0.0).to(gl.float32)
        x1 = gl.load(q_row + g * q_stride_h + d + HALF, mask=g < GROUP, other=0.0).to(gl.float32)
    else:
        ql: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 4), HALF // 4], [WARPS, 1], [1, 0])
        g = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, ql)), 1)
        d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, ql)), 0)
        x = gl.load(q_row + g * q_stride_h + d, mask=g < GROUP, other=0.0).to(gl.float32)
        x0, x1 = gl.split(gl.reshape(x, [16, HALF, 2]))

    # A program takes every `active`-th tile. Page ids are loaded before the length is known, as if all
    # programs of the row were active.
    length = gl.load(lengths + seq)
    pages_row = pages + seq.to(gl.int64) * pages_stride
    ready = ()
    for stage in gl.static_range(STAGES):
        tile = split + stage * splits
        ready = ready + (parts.box_rows(pages_row, tile, pages_width - 1, head, HKV, PAGE, TILE, BOX),)
    if HAS_READS:
        if (head == 0) & (split == 0):
            gl.atomic_add(reads, length.to(gl.int64), sem="relaxed")
            if KIND != "native":
                gl.atomic_add(reads + 1, length.to(gl.int64), sem="relaxed")
    out_row = out_ptr + seq.to(gl.int64) * out_stride_b + head * GROUP * out_stride_h
    position = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, mma_o)), 1)
    group = gl.expand_dims(gl.arange(0, ROWS, per_out), 0)
    where_out = out_row + group * out_stride_h
    if length <= 0:  # an inactive sequence: zeros, and no page is read
        if split == 0:
            nothing = gl.zeros([HALF, ROWS], out_ptr.dtype.element_ty, mma_o)
            gl.store(where_out + position, nothing, mask=group < GROUP)
            gl.store(where_out + position + HALF, nothing, mask=group < GROUP)
        return
    tiles = (length + TILE - 1) // TILE
    active = gl.minimum(splits, (tiles + min_tiles - 1) // min_tiles)
    if split >= active:
        return
    count = (tiles - split + active - 1) // active
    last_page = (length - 1) // PAGE
    if active != splits:
        again = ()
        for stage in gl.static_range(STAGES):
            tile = split + stage * active
            again = again + (parts.box_rows(pages_row, tile, last_page, head, HKV, PAGE, TILE, BOX),)
        ready = again
    ready = parts.rows_inside(ready, split, active, length, TILE, BOX, STAGES)

    if DYNAMIC:
        # The scales of every tile in the ring, oldest first, before the tiles, behind which they would queue.
        waiting = ()
        for stage in gl.static_range(STAGES - 1):
            waiting = waiting + (
                parts.load_pairs(k_scale, ready[stage], BOX, BOXES, WARPS),
                parts.load_pairs(v_scale, ready[stage], BOX, BOXES, WARPS),
            )
    # Fill the ring.
    for stage in gl.static_range(STAGES - 1):
        if stage < count:
            parts.fetch(k_desc, v_desc, k_ring, v_ring, bars, stage, ready[stage], BOXES, HALVES, HALF, BOX)
    rows_fetch = ready[STAGES - 1]
    tokens = gl.arange(0, TILE, per_token)

    top = gl.maximum(gl.max(gl.abs(x0), 1), gl.max(gl.abs(x1), 1))
    exponent = gl.minimum(gl.maximum((top.to(gl.int32, bitcast=True) >> 23) - 127, -112), 127)
    # A factor that underflows to 0 would turn a masked -inf into NaN.
    exponent = gl.where(top == 0.0, 0, exponent)
    up = ((141 - exponent) << 23).to(gl.float32, bitcast=True)  # 2^(14 - exponent): the largest is < 2^15
    down = ((exponent + 113) << 23).to(gl.float32, bitcast=True)  # its inverse
    q0 = gl.convert_layout((x0 * gl.expand_dims(up, 1)).to(DOT), q_operand)
    q1 = gl.convert_layout((x1 * gl.expand_dims(up, 1)).to(DOT), q_operand)
    down = gl.convert_layout(down, gl.SliceLayout(1, mma_s))
    if ROWS == 8:
        down, _upper = gl.split(gl.permute(gl.reshape(down, [2, 8]), [1, 0]))
    factor = gl.convert_layout(down, per_row) * scale_log2
    if (KIND != "native") and (not DYNAMIC):
        factor = factor * gl.load(k_scale)

    acc0 = gl.zeros([HALF, ROWS], gl.float32, mma_o)
    acc1 = gl.zeros([HALF, ROWS], gl.float32, mma_o)
    reference = gl.full([ROWS], -1e30, gl.float32, per_row)
    weight = gl.zeros([ROWS, 8 if WARPS == 1 else TILE], gl.float32, logits)
    v_top = gl.to_tensor(0.0)
    v_gain = gl.to_tensor(0.0)
    slot = 0
    phase = 0
    slot_fetch = STAGES - 1
    for i in range(count):
        barrier()  # every lane has read the slot that is filled next
        if DYNAMIC:
            waiting = waiting + (
                parts.load_pairs(k_scale, rows_fetch, BOX, BOXES, WARPS),
                parts.load_pairs(v_scale, rows_fetch, BOX, BOXES, WARPS),
            )
            ks = waiting[0]
            vs = waiting[1]
            waiting = waiting[2:]
        if i + STAGES - 1 < count:
            parts.fetch(
                k_desc, v_desc, k_ring, v_ring, bars, slot_fetch, rows_fetch, BOXES, HALVES, HALF, BOX
            )
        ahead = split + (i + STAGES) * active
        rows_fetch = parts.box_rows(pages_row, ahead, last_page, head, HKV, PAGE, TILE, BOX)
        left_tokens = length - (split + i * active) * TILE

        mbarrier.wait(bars.index(slot), phase)
        k0, k1 = parts.load_halves(k_ring, slot, k_operand, KIND)
        if KIND != "native":
            k0, k1 = parts.split_words(k0, KIND)
        s = mma_v2(q0, k0, gl.zeros([16, TILE], gl.float32, mma_s))
        if WARPS == 4:
            s = s + mma_v2(q1, k1, gl.zeros([16, TILE], gl.float32, mma_s))
        else:
            s = mma_v2(q1, k1, s)
        if ROWS == 8:
            s, _unused = gl.split(gl.permute(gl.reshape(s, [2, 8, TILE]), [1, 2, 0]))
            s = gl.convert_layout(s, logits, assert_trivial=True)
        if DYNAMIC:
            vf = parts.unpack(vs, per_token, TILE)
            s = s * gl.expand_dims(parts.unpack(ks, per_token, TILE), 0)
        if left_tokens < TILE:
            s = gl.where(gl.expand_dims(tokens < left_tokens, 0), s, float("-inf"))
            if DYNAMIC:
                vf = gl.where(tokens < left_tokens, vf, 0.0)
        row_top = gl.max(s, 1) * factor
        behind = gl.max(row_top - reference, 0) > _LIMIT
        if DYNAMIC:
            v_here = gl.max(vf, 0)
            behind = behind | (v_here > v_top)
        if behind:
            new = gl.maximum(reference, row_top - _SHIFT)
            alpha = gl.exp2(reference - new)
            reference = new
            weight = weight * gl.expand_dims(alpha, 1)
            if DYNAMIC:
                v_new = gl.where(v_here > v_top, v_here * 2.0, v_top)
                alpha = alpha * (v_top / v_new)
                v_top = v_new
                v_gain = 1.0 / v_new
            alpha = gl.expand_dims(gl.convert_layout(alpha, per_out), 0)
            acc0 = acc0 * alpha
            acc1 = acc1 * alpha
        p = gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(reference, 1))
        if WARPS == 1:
            weight += gl.convert_layout(gl.sum(gl.reshape(p, [ROWS, TILE // 8, 8]), 1), logits)
        else:
            weight += p
        if DYNAMIC:
            p = p * gl.expand_dims(vf * v_gain, 0)
        p = gl.convert_layout(gl.permute(p.to(DOT), [1, 0]), p_operand, assert_trivial=WARPS == 1)
        v0, v1 = parts.load_halves(v_ring, slot, v_operand, KIND)
        if KIND != "int8":
            # 0 * NaN is NaN: values behind the sequence's end must not be multiplied.
            if left_tokens < TILE:
                seen = gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, v_operand)) < left_tokens, 0)
                v0 = gl.where(seen, v0, gl.zeros_like(v0))
                v1 = gl.where(seen, v1, gl.zeros_like(v1))
        if KIND != "native":
            v0, v1 = parts.split_words(v0, KIND)
        acc0 = mma_v2(v0, p, acc0)
        acc1 = mma_v2(v1, p, acc1)
        slot_fetch = slot
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1

    weight_sum = gl.sum(weight, 1)
    total = gl.convert_layout(weight_sum, per_out)
    if DYNAMIC:
        gain = v_top / total
    elif KIND == "native":
        gain = 1.0 / total
    else:
        gain = gl.load(v_scale) / total
    gain = gl.expand_dims(gain, 0)
    acc0 = acc0 * gain
    acc1 = acc1 * gain
    if active == 1:
        if KIND == "native":
            gl.store(where_out + position, acc0.to(out_ptr.dtype.element_ty), mask=group < GROUP)
            gl.store(where_out + position + HALF, acc1.to(out_ptr.dtype.element_ty), mask=group < GROUP)
        else:
            gl.store(where_out + position * 2, acc0.to(out_ptr.dtype.element_ty), mask=group < GROUP)
            gl.store(where_out + position * 2 + 1, acc1.to(out_ptr.dtype.element_ty), mask=group < GROUP)
        return

    # Partial results: slots [0, splits) of the programs, then one a bundle of FAN.
    pair = seq * HKV + head
    partial_row = partial + pair.to(gl.int64) * slots * (GP * D)
    lse_row = lse + pair.to(gl.int64) * slots * GP
    where_partial = partial_row + split * (GP * D) + group * D + position
    gl.store(where_partial, acc0, mask=group < GP)
    gl.store(where_partial + HALF, acc1, mask=group < GP)
    rows_l = gl.arange(0, ROWS, per_row)
    gl.store(lse_row + split * GP + rows_l, reference + gl.log2(weight_sum), mask=rows_l < GP)
    bundle = split // FAN
    bundles = (active + FAN - 1) // FAN
    members = gl.minimum(FAN, active - bundle * FAN)
    counter = counters + pair * COUNTERS
    barrier()
    arrived = gl.atomic_add(counter + bundle, 1, sem="acq_rel", scope="gpu")
    if arrived == members - 1:
        gl.store(counter + bundle, 0)
        acc, total_m, top_m = parts.merge(
            partial_row + bundle * FAN * (GP * D), lse_row + bundle * FAN * GP, members, GP, D, FAN, WARPS
        )
        if bundles == 1:
            parts.store_merged(out_row, out_stride_h, acc, total_m, GROUP, GP, D, KIND, WARPS)
        else:
            ml: gl.constexpr = acc.type.layout
            g2 = gl.arange(0, GP, gl.SliceLayout(1, ml))
            d2 = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, ml)), 0)
            mine = splits + bundle
            gl.store(
                partial_row + mine * (GP * D) + gl.expand_dims(g2, 1) * D + d2,
                acc / gl.expand_dims(total_m, 1),
            )
            gl.store(lse_row + mine * GP + g2, top_m + gl.log2(total_m))
            barrier()
            arrived2 = gl.atomic_add(counter + FAN, 1, sem="acq_rel", scope="gpu")
            if arrived2 == bundles - 1:
                gl.store(counter + FAN, 0)
                acc2, total2, _top2 = parts.merge(
                    partial_row + splits * (GP * D), lse_row + splits * GP, bundles, GP, D, FAN, WARPS
                )
                parts.store_merged(out_row, out_stride_h, acc2, total2, GROUP, GP, D, KIND, WARPS)
