"""Products whose CTAs share a tile along K: who comes last adds the parts. And programmatic dependent launch,
where it is.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_TILES = 65536
_tickets: dict[torch.device, Tensor] = {}


@triton.jit
def is_last(tickets, tile, splits):  # type: ignore
    """True in the CTA that stores its part of a tile last. Call it after the store; it resets the ticket."""
    tl.debug_barrier()
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(tickets + tile, 0)
    return last


def tickets_of(device: torch.device, tiles: int) -> Tensor:
    """One int32 zero a tile, made once a device and left at zero by every launch.

    Calls on one device must be on one stream at a time. Raises ValueError for more than 65,536 tiles,
    RuntimeError where the first call of a device is being captured.
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
    """Whether kernels can be launched before those in front have ended."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
