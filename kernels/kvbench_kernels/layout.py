"""What the tensors of a paged cache look like, checked before a kernel gets their addresses.

Payload [pages, Hkv, page_size, D or Dv]; scales [pages, Hkv, page_size] in a dynamic format, [1] in a static one. All
contiguous: the kernels compute every address from the sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench_kernels.quantize import DYNAMIC, QUANTIZE

PAYLOAD = {
    "int8_sym": torch.int8,
    "int8_static": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3_static": torch.float8_e4m3fn,
}
NATIVE = (torch.float16, torch.bfloat16, torch.float32)
SCALE = {
    "int8_sym": torch.float16,
    "int8_static": torch.float32,
    "fp8_e4m3": torch.float32,
    "fp8_e4m3_static": torch.float32,
}


def check_pages(
    fmt: str, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """ValueError where one of them is not what the KV format asks for. Looks at shapes and dtypes, never at values."""
    if fmt not in QUANTIZE:
        raise ValueError(f"Unknown KV format {fmt!r}; known are {', '.join(QUANTIZE)}.")
    accepted = (PAYLOAD[fmt],) if fmt in PAYLOAD else NATIVE
    rows = k_pages.shape[:3]
    for name, pages, scale in (("k", k_pages, k_scale), ("v", v_pages, v_scale)):
        if pages.ndim != 4 or pages.shape[:3] != rows or not pages.is_contiguous():
            raise ValueError(
                f"{name}_pages must be contiguous [pages, Hkv, page_size, head dim], with the same pages for K and V; "
                f"got {list(pages.shape)} with strides {list(pages.stride())} beside K's {list(k_pages.shape)}."
            )
        if pages.dtype not in accepted:
            names = " or ".join(map(str, accepted))
            raise ValueError(f"{name}_pages of KV format {fmt!r} hold {names}, not {pages.dtype}.")
        if fmt not in SCALE:
            if scale is not None:
                raise ValueError(
                    f"KV format {fmt!r} has no scales; pass None for {name}_scale, not a tensor."
                )
            continue
        shape = rows if fmt in DYNAMIC else torch.Size([1])
        if scale is None or (scale.dtype, scale.shape) != (SCALE[fmt], shape) or not scale.is_contiguous():
            given = (
                "None" if scale is None else f"{scale.dtype} {list(scale.shape)}, strides {scale.stride()}"
            )
            raise ValueError(
                f"{name}_scale of KV format {fmt!r} must be contiguous {SCALE[fmt]} {list(shape)}; got {given}."
            )
