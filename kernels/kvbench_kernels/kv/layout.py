"""The tensors of a paged cache, their checks before a kernel gets their addresses, and flat offsets."""

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench_kernels.support import AttentionNeeds, StoredFormat, interpreting

DTYPES = {name: getattr(torch, name) for name in ("int8", "float8_e4m3fn", "float16", "float32")}
NATIVE = (torch.float16, torch.bfloat16, torch.float32)


class LayerPages(NamedTuple):
    """One layer's K and V in pages, as every paged kernel takes them.

    k [pages, Hkv, page_size, D], v [pages, Hkv, page_size, Dv]; scales [pages, Hkv, page_size] if the format
    has one per row, [1] if one per tensor, else None. All are contiguous.
    """

    fmt: StoredFormat
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def eight_bit(self) -> bool:
        """Whether K and V are both stored in 8 bits per element."""
        return self.k.element_size() == 1 and self.v.element_size() == 1

    def sides(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """(payload, scales) of K and of V."""
        return (self.k, self.k_scale), (self.v, self.v_scale)

    def side(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Payload and scales of "k" or "v"."""
        return self.sides()["kv".index(name)]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name."""
        named = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def paged(self) -> dict[str, Tensor]:
        """The tensors whose first axis is the page, so without static scales."""
        return {name: tensor for name, tensor in self.tensors().items() if tensor.ndim > 1}


def check_pages(cache: LayerPages) -> None:
    """ValueError if a tensor's shape, dtype or layout does not fit the KV format."""
    fmt = cache.fmt
    accepted = (DTYPES[fmt.payload_dtype],) if fmt.payload_dtype else NATIVE
    rows = cache.k.shape[:3]
    for name, (pages, scale) in zip("kv", cache.sides(), strict=True):
        if pages.ndim != 4 or pages.shape[:3] != rows or not pages.is_contiguous():
            raise ValueError(
                f"{name}_pages must be contiguous [pages, Hkv, page_size, head dim], with the same pages for "
                f"K and V; got {list(pages.shape)} with strides {list(pages.stride())}, and K's are "
                f"{list(cache.k.shape)}."
            )
        if pages.dtype not in accepted:
            names = " or ".join(map(str, accepted))
            raise ValueError(f"{name}_pages of KV format {fmt.name!r} hold {names}, not {pages.dtype}.")
        if fmt.scale_dtype is None:
            if scale is not None:
                raise ValueError(f"KV format {fmt.name!r} has no scales; {name}_scale must be None.")
            continue
        shape, dtype = rows if fmt.scale_per_row else torch.Size([1]), DTYPES[fmt.scale_dtype]
        if scale is None or (scale.dtype, scale.shape) != (dtype, shape) or not scale.is_contiguous():
            got = "None" if scale is None else f"{scale.dtype} {list(scale.shape)}, strides {scale.stride()}"
            raise ValueError(
                f"{name}_scale of KV format {fmt.name!r} must be contiguous {dtype} {list(shape)}; got {got}."
            )


def attention_needs(
    cache: LayerPages, q: Tensor, sliding_window: int | None, softcap: float | None, sinks: bool
) -> AttentionNeeds:
    """What attention of q [N, Hq, D] over these pages asks of the kernels."""
    _, kv_heads, page_size, dim = cache.k.shape
    sizes = (q.shape[1], kv_heads, dim, cache.v.shape[3], page_size)
    where = (str(q.dtype).removeprefix("torch."), q.device.type, interpreting())
    return AttentionNeeds(cache.fmt, *sizes, *where, sliding_window, softcap, sinks)


def check_write(cache: LayerPages, k: Tensor, v: Tensor, slots: Tensor, health: Tensor) -> None:
    """ValueError for tensors that do not fit each other."""
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or slots.shape != k.shape[:1]:
        raise ValueError(
            f"k {list(k.shape)}, v {list(v.shape)} and slots {list(slots.shape)} do not fit each other: "
            f"[N, Hkv, D], [N, Hkv, Dv] and [N] are expected."
        )
    check_pages(cache)
    for name, x, pages in (("k", k, cache.k), ("v", v, cache.v)):
        if x.dtype not in NATIVE or x.shape[1:] != (pages.shape[1], pages.shape[3]):
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)}; pages {list(pages.shape)} take float16, bfloat16 or "
                f"float32 [N, {pages.shape[1]}, {pages.shape[3]}]."
            )
    dense = slots.dtype == torch.int64 and slots.stride(0) == 1
    if not dense or health.shape != (3,) or health.dtype != torch.int64:
        raise ValueError(
            f"slots must be dense int64 and health int64 [3]; got {slots.dtype} with stride "
            f"{slots.stride(0)}, and {health.dtype} {list(health.shape)}."
        )


def check_gather(cache: LayerPages, table: Tensor, length: int) -> None:
    """ValueError for pages that do not fit their format and for a table that is too short."""
    check_pages(cache)
    needed = -(-length // cache.page_size)
    if table.ndim != 2 or needed > table.shape[1] or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"{length} tokens need a page table [B, {needed} or more] with dense rows; "
            f"got {list(table.shape)} with strides {list(table.stride())}."
        )


def unsigned(pages: Tensor) -> Tensor:
    """E4M3 as uint8: its codes are made with integers."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def signed(pages: Tensor) -> Tensor:
    """E4M3 as int8: its codes are decoded with integers."""
    return pages.view(torch.int8) if pages.dtype == torch.float8_e4m3fn else pages


def flat_offset(index: Tensor, stride: int, within: Tensor | int = 0) -> Tensor:
    """index * stride + within as int64, whatever integer dtype `index` has.

    A K page of 16 tokens, 8 heads of 128 has 16,384 elements, so page 131,072 already starts at 2^31.
    """
    return index.to(torch.int64) * stride + within
