"""The live tensors of one layer's pages, and the check of their scales. Shapes:
`kvbench_kernels.kv.layout`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.errors import UsageError
from kvbench.formats.kv import KVFormat, KVShape
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
            if not (math.isfinite(stored) and stored > 0):
                raise UsageError(
                    f"Static {name} scale {value!r} of layer {i} cannot be used: a scale must be a number "
                    "> 0 that float32 holds; correct `scale` in the matrix."
                )
    return list(scale)


def torch_dtype(name: str) -> torch.dtype:
    """`"int8"` -> torch.int8."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def indexable(tensor: Tensor) -> Tensor:
    """float8 as uint8, which every indexing operation supports; any other dtype as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
