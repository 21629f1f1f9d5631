"""Products whose CTAs share a tile along K, and programmatic dependent launch."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench_kernels.gemm import skinny_config, w8a8_config

_MAX_TILES = 65536
_tickets: dict[torch.device, Tensor] = {}


def splits_used(tiling: skinny_config.Tiling | w8a8_config.Tiling, k: int) -> int:
    """Non-empty splits along K columns, at most tiling.splits: 5 steps in 4 splits of 2 need 3."""
    steps = -(-k // tiling.block_k)
    return -(-steps // -(-steps // tiling.splits))


@triton.jit
def is_last(tickets, tile, splits):  # type: ignore
    """True in the CTA that stores its part of a tile last. Call it after the store; it resets the ticket."""
    tl.debug_barrier()
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(tickets + tile, 0)
    return last


def shared_tiles(out: Tensor, tiles: int, splits: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Memory for the float32 parts of `tiles` tiles and their tickets; `out` twice for a single split."""
    if splits == 1:
        return out, out
    parts = torch.empty((tiles, splits, rows, columns), dtype=torch.float32, device=out.device)
    return parts, tickets_of(out.device, tiles)


def tickets_of(device: torch.device, tiles: int) -> Tensor:
    """One int32 zero a tile, allocated once a device; every launch leaves it at zero.

    Calls on one device must be on one stream at a time. Raises ValueError for more than 65,536 tiles,
    RuntimeError if the first call on a device is being captured.
    """
    if tiles > _MAX_TILES:
        raise ValueError(f"{tiles} tiles cannot be split along K; at most {_MAX_TILES}. Use splits=1.")
    if device not in _tickets:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("The first split product of a device cannot be captured; run it once before.")
        _tickets[device] = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    return _tickets[device]


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels can start before the previous ones have ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 3 in the interpreter, so that programs walk through several tiles there."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 3
