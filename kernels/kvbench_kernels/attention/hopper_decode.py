"""Launches the Hopper decode kernel (hopper_kernel.py) and holds the memory of its partial results."""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvbench_kernels.attention import hopper_kernel
from kvbench_kernels.attention.hopper_kernel import COUNTERS
from kvbench_kernels.attention.hopper_plan import FAN, HEAD_DIMS, KINDS, MAX_GROUP, PAGE_SIZES, Plan
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.launches import launched
from kvbench_kernels.support import MAX_SPLITS

_LOG2E = 1.4426950408889634
_MERGED = max(FAN.values())  # slots for results of the first level of merging
# Scales per row are read two tokens a word: scale dtype -> word dtype.
_SCALE_PAIRS = {"float16": torch.int32, "float32": torch.int64}


@dataclass(frozen=True)
class Workspace:
    """Partial results of a call for each pair of sequence and KV head; one per concurrent call.

    partial [pairs, slots, rows, D] float32, statistics [pairs, slots, rows] float32, counters [pairs, 33]
    int32, which are zero between calls.
    """

    partial: Tensor
    statistics: Tensor
    counters: Tensor


def plan_workspace(
    batch: int, q_heads: int, kv_heads: int, head_dim: int, splits: int, device: torch.device
) -> Workspace:
    """Memory for calls of up to this batch with up to `splits` programs a sequence and KV head."""
    pairs = batch * kv_heads
    slots = pairs * _slots(splits) * _rows(q_heads // kv_heads)
    return Workspace(
        torch.empty(slots * head_dim, dtype=torch.float32, device=device),
        torch.empty(slots, dtype=torch.float32, device=device),
        torch.zeros(pairs * COUNTERS.value, dtype=torch.int32, device=device),
    )


_workspaces: dict[tuple[torch.device, int], Workspace] = {}


def _shared_workspace(q: Tensor, kv_heads: int, splits: int) -> Workspace:
    """One workspace a device and stream, replaced by a larger one if needed.

    A captured graph keeps its addresses: pass a workspace to calls captured before the largest call has run.
    """
    batch, q_heads, dim = q.shape
    key = (q.device, torch.cuda.current_stream(q.device).cuda_stream)
    have = _workspaces.get(key)
    pairs, rows = batch * kv_heads, _rows(q_heads // kv_heads)
    needed = (pairs * _slots(splits) * rows * dim, pairs * _slots(splits) * rows, pairs * COUNTERS.value)
    held = (have.partial, have.statistics, have.counters) if have else ()
    if have is None or any(tensor.numel() < size for tensor, size in zip(held, needed, strict=True)):
        have = plan_workspace(batch, q_heads, kv_heads, dim, splits, q.device)
        _workspaces[key] = have
    return have


def _boxes(cells: Tensor, kind: str, rows: int) -> TensorDescriptor:
    """Pages as flat rows of 16-bit words, in boxes of `rows` rows and half the dims of a head.

    Row coordinates are int32: pages * kv_heads * page_size < 2^31 (256 GB for head_dim 128).
    """
    dim = cells.shape[3]
    flat = cells.view(-1, dim) if kind == "native" else cells.view(torch.int16).view(-1, dim // 2)
    layout = NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=16, rank=2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, dim // 2], layout)


def _slots(splits: int) -> int:
    return splits + _MERGED if splits > 1 else 1


def _rows(group: int) -> int:
    """Query heads a KV head, rounded up to a power of two."""
    return 1 << (group - 1).bit_length()


def _check(cache: LayerPages, q: Tensor, table: Tensor, scaling: float, splits: int) -> str:
    """The kind of payload, or ValueError."""
    kind = KINDS[cache.fmt.payload_dtype]
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"{splits} splits; give 1 (off) to {MAX_SPLITS}, as plan_decode does.")
    if not scaling > 0:
        raise ValueError(f"Scaling {scaling}; the Hopper kernel takes numbers above 0.")
    k, v = cache.k, cache.v
    _, kv_heads, page_size, dim = k.shape
    group = q.shape[1] // kv_heads
    if (
        q.shape[1] % kv_heads
        or group > MAX_GROUP
        or dim not in HEAD_DIMS
        or v.shape != k.shape
        or q.shape[2] != dim
        or page_size not in PAGE_SIZES
    ):
        raise ValueError(
            f"Queries {list(q.shape)}, K pages {list(k.shape)}, V pages {list(v.shape)}: the Hopper kernel "
            f"takes up to {MAX_GROUP} query heads a KV head, head_dim {HEAD_DIMS} for K and V, page_size "
            f"{PAGE_SIZES}; use paged_decode."
        )
    if kind == "native" and k.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"Native pages in {k.dtype}; the Hopper kernel takes float16 and bfloat16.")
    if q.stride(2) != 1 or table.stride(1) != 1 or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError("Pages must be contiguous, and q and the page table dense in their last axis.")
    if kind != "native" and (cache.k_scale is None or cache.v_scale is None):
        raise ValueError(f"KV format {cache.fmt.name!r} needs the scales of K and of V.")
    return kind


# fmt: off
def paged_decode_hopper(
    cache: LayerPages, q: Tensor, table: Tensor, lengths: Tensor, scaling: float, *, splits: int | Plan,
    reads: Tensor | None = None, out: Tensor | None = None, workspace: Workspace | None = None,
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D] in q's dtype: each query is at the last token of its sequence.

    table [B, P] int32: page ids; entries beyond a sequence's length may hold anything. lengths [B] int32:
    tokens to attend to, the query's own included; 0 gives zeros. scaling > 0. splits: plan_decode's answer,
    or the most programs along a sequence, 1 (off) to 256. reads [2] int64: the tokens of each sequence are
    added to the first, and to the second if the pages have 8 bits. ValueError for other arguments.
    """
    plan = splits if isinstance(splits, Plan) else Plan(splits)
    kind = _check(cache, q, table, scaling, plan.splits)
    batch, q_heads, dim = q.shape
    kv_heads, page_size = cache.k.shape[1], cache.page_size
    group, half = q_heads // kv_heads, dim // 2
    out = torch.empty_like(q) if out is None else out
    if batch == 0:
        return out
    splits, tiling = plan.splits, plan.tiling
    # A warp takes at least 16 of the half's dims in the second product.
    warps = min(tiling.warps, half // 16)
    if workspace is None:
        workspace = _shared_workspace(q, kv_heads, splits)
    fmt, k_scale, v_scale = cache.fmt, cache.k_scale, cache.v_scale
    if fmt.scale_per_row:
        assert k_scale is not None  # _check has seen to it
        assert v_scale is not None
        word = _SCALE_PAIRS[str(fmt.scale_dtype)]
        k_scale, v_scale = k_scale.view(word), v_scale.view(word)
    box = min(page_size, tiling.tile)
    paged = hopper_kernel.paged_decode_hopper
    compiled = paged[(kv_heads, splits, batch)](
        q, _boxes(cache.k, kind, box), _boxes(cache.v, kind, box), k_scale, v_scale, table, lengths, out,
        reads, workspace.partial, workspace.statistics, workspace.counters,
        scaling * _LOG2E, q.stride(0), q.stride(1), out.stride(0), out.stride(1), table.stride(0),
        table.shape[1], splits, _slots(splits), -(-plan.least // tiling.tile),
        KIND=kind, DYNAMIC=fmt.scale_per_row, HALF=half, GROUP=group, GP=_rows(group),
        ROWS=8 if group <= 8 else 16, HKV=kv_heads, PAGE=page_size, TILE=tiling.tile, STAGES=tiling.stages,
        FAN=FAN[warps], HAS_READS=reads is not None, WARPS=warps, num_warps=warps, launch_pdl=True,
    )
    launched(paged.fn.__name__, compiled, splits)
    return out
