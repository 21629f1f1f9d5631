"""The live tensors of one layer's pages (shapes: `kvbench_kernels.kv.layout`); checks of scales and
memory."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.errors import Refused, UsageError
from kvbench.formats.kv import KVFormat, KVShape, get_max_kv_blocks, kv_bytes, pages_for
from kvbench_kernels.kv.layout import LayerPages


def allocate_layer(
    fmt: KVFormat,
    shape: KVShape,
    page_size: int,
    num_pages: int,
    native_dtype: torch.dtype,
    device: torch.device | str,
    scale: tuple[float, float] | None = None,
) -> LayerPages:
    """Uninitialised pages for one layer, with its static (K, V) scales where the format has them."""
    dtype = torch_dtype(fmt.payload_dtype) if fmt.payload_dtype else native_dtype
    rows = (num_pages, shape.kv_heads, page_size)
    scales: list[Tensor | None] = [None, None]
    if fmt.scale_dtype and fmt.scale_kind == "dynamic":
        scales = [torch.empty(rows, dtype=torch_dtype(fmt.scale_dtype), device=device) for _ in range(2)]
    elif fmt.scale_dtype and scale is not None:
        scales = [torch.tensor([s], dtype=torch_dtype(fmt.scale_dtype), device=device) for s in scale]
    return LayerPages(
        fmt,
        torch.empty((*rows, shape.head_dim), dtype=dtype, device=device),
        torch.empty((*rows, shape.value_dim), dtype=dtype, device=device),
        *scales,
    )


def check_scales(
    fmt: KVFormat, layers: int, scale: Sequence[tuple[float, float]] | None
) -> list[tuple[float, float] | None]:
    """The static (K, V) scales a layer, or None a layer; UsageError for any that cannot work."""
    if fmt.scale_kind != "static":
        if scale is not None:
            raise UsageError(f"KV format {fmt.name!r} takes no scale, but one was given; remove `scale`.")
        return [None] * layers
    if scale is None or len(scale) != layers:
        given = "none" if scale is None else f"{len(scale)}"
        raise UsageError(
            f"KV format {fmt.name!r} needs a K and a V scale for each of the {layers} layers; {given} "
            "given. Set `scale` to one number, or to lists with one number a layer."
        )
    for i, pair in enumerate(scale):
        for name, value in zip("kv", pair, strict=True):
            stored = torch.tensor(value, dtype=torch.float32).item() if math.isfinite(value) else value
            if not 0 < stored < math.inf:
                raise UsageError(
                    f"Static {name} scale {value!r} of layer {i} cannot be used: a scale must be a number "
                    "> 0 that float32 holds; correct `scale` in the matrix."
                )
    return list(scale)


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def indexable(tensor: Tensor) -> Tensor:
    """float8 as uint8, which every indexing operation supports; any other dtype as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


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
    pages, budget = sequences * pages_for(tokens, page_size), max(free - RESERVE_BYTES, free // 2)
    fitting = get_max_kv_blocks(budget, fmt, shapes, page_size, native_dtype)
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
        f"does not fit: {free:,} B are free, of which {free - budget:,} B are kept "
        f"for what runs beside it; {remedy}.",
    )
