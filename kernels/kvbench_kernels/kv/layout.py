"""What the tensors of a paged cache look like, checked before a kernel gets their addresses.

Payload [pages, Hkv, page_size, D or Dv]; scales [pages, Hkv, page_size] in a dynamic format, [1] in a static one. All
contiguous: the kernels compute every address from the sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench_kernels.kv.quantize import DYNAMIC, QUANTIZE
from kvbench_kernels.support import AttentionNeeds, interpreting

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


def attention_needs(
    fmt: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    sliding_window: int | None,
    softcap: float | None,
    sinks: bool,
) -> AttentionNeeds:
    """What attention of q [N, Hq, D] over these pages asks of the kernels."""
    _, kv_heads, page_size, head_dim = k_pages.shape
    return AttentionNeeds(
        fmt, q.shape[1], kv_heads, head_dim, v_pages.shape[3], page_size, str(q.dtype).removeprefix("torch."),
        q.device.type, interpreting(), sliding_window, softcap, sinks,
    )  # fmt: skip


def check_write(
    fmt: str,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    health: Tensor,
) -> None:
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or slots.shape != k.shape[:1]:
        raise ValueError(
            f"k {list(k.shape)}, v {list(v.shape)} and slots {list(slots.shape)} do not fit each other: "
            f"[N, Hkv, D], [N, Hkv, Dv] and [N] are expected."
        )
    check_pages(fmt, k_pages, v_pages, k_scale, v_scale)
    for name, x, pages in (("k", k, k_pages), ("v", v, v_pages)):
        if x.dtype not in NATIVE or x.shape[1:] != (pages.shape[1], pages.shape[3]):
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)}; pages {list(pages.shape)} take float16, bfloat16 or float32 "
                f"[N, {pages.shape[1]}, {pages.shape[3]}]."
            )
    if (
        slots.dtype != torch.int64
        or slots.stride(0) != 1
        or health.shape != (3,)
        or health.dtype != torch.int64
    ):
        raise ValueError(
            f"slots must be dense int64 and health int64 [3]; got {slots.dtype} with stride {slots.stride(0)}, "
            f"and {health.dtype} {list(health.shape)}."
        )


def check_gather(
    fmt: str,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    pages: Tensor,
    length: int,
) -> None:
    check_pages(fmt, k_pages, v_pages, k_scale, v_scale)
    needed = -(-length // k_pages.shape[2])
    if pages.ndim != 2 or needed > pages.shape[1] or (pages.shape[1] > 1 and pages.stride(1) != 1):
        raise ValueError(
            f"{length} tokens need a page table [B, {needed} or more] with dense rows; "
            f"got {list(pages.shape)} with strides {list(pages.stride())}."
        )


def unsigned(pages: Tensor) -> Tensor:
    """E4M3 as uint8: its codes are made with integers."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def signed(pages: Tensor) -> Tensor:
    """E4M3 as int8: its codes are taken apart with integers."""
    return pages.view(torch.int8) if pages.dtype == torch.float8_e4m3fn else pages
