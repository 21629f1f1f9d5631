"""Whether a KV store fits into the device's free memory. Not asked on a CPU, whose memory is
overcommitted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.errors import Refused
from kvbench.formats.kv import KVFormat, KVShape, get_max_kv_blocks, kv_bytes, pages_for

# Kept free: the allocator rounds each of a layer's four tensors up by up to 2 MiB (640 MiB at 80 layers),
# cuBLAS takes 32 MiB of workspace a stream, and the activations of one chunk need room. The torch backend,
# which reads whole contexts, may still run out of memory: that is the cell's error.
RESERVE_BYTES = 2**30


def free_bytes(device: torch.device) -> int | None:
    """Bytes that the device can still give, with what torch only caches given back first; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def check_fits(
    fmt: KVFormat,
    shapes: Sequence[KVShape],
    page_size: int,
    native_dtype: str,
    sequences: int,
    tokens: int,
    free: int,
) -> None:
    """Raises Refused("kv_does_not_fit") when the pages of `sequences` times `tokens` tokens exceed `free`
    bytes less RESERVE_BYTES (less half, where that is smaller: a tiny store runs on a busy device too)."""
    pages = sequences * pages_for(tokens, page_size)
    fitting = get_max_kv_blocks(max(free - RESERVE_BYTES, free // 2), fmt, shapes, page_size, native_dtype)
    if pages <= fitting:
        return
    needed = sum(kv_bytes(fmt, shape, pages * page_size, native_dtype).total for shape in shapes)
    longest = fitting // sequences * page_size
    remedy = (
        f"the largest context that fits is {longest:,} tokens a sequence, generated ones included"
        if longest
        else "not one page a sequence fits, so ask for a smaller batch or free the device"
    )
    raise Refused(
        "kv_does_not_fit",
        f"The {fmt.name} KV cache of {sequences} sequence(s) of {tokens:,} tokens needs {needed:,} B and "
        f"does not fit: {free:,} B are free, of which {min(RESERVE_BYTES, free - free // 2):,} B are kept "
        f"for what runs beside it; {remedy}.",
    )
