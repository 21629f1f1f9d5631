"""The paged kernels' twins in torch: the same signatures and results, on any device, without Triton.

The torch backend of the engine writes and reads its pages with them, and the kernels are tested against them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench_kernels.attention.reference import paged_attention_torch
from kvbench_kernels.kv.layout import check_gather, check_write, signed, unsigned
from kvbench_kernels.kv.quantize import DYNAMIC, QUANTIZE, dequantize
from kvbench_kernels.launches import launched


def paged_write_torch(
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
    """The twin of paged_write in torch. It waits for the device: the stored rows are chosen by their slots."""
    check_write(fmt, k, v, slots, k_pages, v_pages, k_scale, v_scale, health)
    stored = slots >= 0
    page, offset = slots[stored] // k_pages.shape[2], slots[stored] % k_pages.shape[2]
    for x, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        result = QUANTIZE[fmt](x[stored], None if fmt in DYNAMIC else scale)
        unsigned(pages)[page, :, offset] = unsigned(result.codes.to(pages.dtype))
        if result.scales is not None and scale is not None:
            scale[page, :, offset] = result.scales
        health += torch.stack((result.clipped, result.nonfinite, result.overflow))
    launched("paged_write_torch")


def paged_gather_torch(
    fmt: str,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    pages: Tensor,
    length: int,
    dtype: torch.dtype,
    reads: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The twin of paged_gather in torch."""
    check_gather(fmt, k_pages, v_pages, k_scale, v_scale, pages, length)
    token = torch.arange(length, device=pages.device)
    page = pages[:, token // k_pages.shape[2]].long()  # [B, length]
    offset = (token % k_pages.shape[2]).expand_as(page)
    out = []
    for payload, scale in ((k_pages, k_scale), (v_pages, v_scale)):
        codes = signed(payload)[page, :, offset].transpose(1, 2).contiguous().view(payload.dtype)
        if scale is not None and fmt in DYNAMIC:
            scale = scale[page, :, offset].transpose(1, 2)
        out.append(dequantize(fmt, codes, scale, dtype))
    if reads is not None:
        reads += page.numel() * torch.tensor([1, int(k_pages.element_size() == 1)], device=reads.device)
    launched("paged_gather_torch")
    return out[0], out[1]


def paged_decode_torch(
    fmt: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    pages: Tensor,
    lengths: Tensor,
    scaling: float,
    *,
    splits: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    reads: Tensor | None = None,
) -> Tensor:
    """The twin of paged_decode: sequence by sequence, dequantized, in float32. `splits` changes nothing here."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_pages.shape[3])
    for row, length in enumerate(lengths.tolist()):
        count_reads(reads, length, k_pages, v_pages)
        if length:
            k, v = gather_float(fmt, k_pages, v_pages, k_scale, v_scale, pages[row], length)
            query = q[row].float()[None, :, None]
            result = paged_attention_torch(query, k, v, scaling, length - 1, sliding_window, softcap, sinks)
            out[row] = result[0, :, 0].to(q.dtype)
    launched("paged_decode_torch", splits=splits)
    return out


def gather_float(
    fmt: str,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    pages: Tensor,
    length: int,
) -> tuple[Tensor, Tensor]:
    """One sequence's K [1, Hkv, length, D] and V, dequantized to float32. pages: its row of the table."""
    page_size = k_pages.shape[2]
    used = pages[: -(-length // page_size)].long()
    found = []
    for codes, scale in ((k_pages, k_scale), (v_pages, v_scale)):
        mine = _in_order(
            codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes, used, length
        )
        if fmt in DYNAMIC and scale is not None:
            scale = _in_order(scale, used, length)
        found.append(dequantize(fmt, mine.view(codes.dtype), scale, torch.float32)[None])
    return found[0], found[1]


def _in_order(paged: Tensor, used: Tensor, length: int) -> Tensor:
    return paged[used].transpose(0, 1).flatten(1, 2)[:, :length]


def count_reads(reads: Tensor | None, length: int, k_pages: Tensor, v_pages: Tensor) -> None:
    """What the kernels add to `reads` for one sequence."""
    if reads is not None:
        reads[0] += length
        if k_pages.element_size() == 1 and v_pages.element_size() == 1:
            reads[1] += length


def paged_prefill_torch(
    fmt: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    pages: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    max_new: int,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    reads: Tensor | None = None,
) -> Tensor:
    """The twin of paged_prefill: sequence by sequence, dequantized, in float32."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_pages.shape[3])
    starts = query_starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        begin, end = starts[row], starts[row + 1]
        count_reads(reads, length, k_pages, v_pages)
        if end > begin:
            k, v = gather_float(fmt, k_pages, v_pages, k_scale, v_scale, pages[row], length)
            query = q[begin:end].float().transpose(0, 1)[None]
            result = paged_attention_torch(
                query, k, v, scaling, length - (end - begin), sliding_window, softcap, sinks
            )
            out[begin:end] = result[0].transpose(0, 1).to(q.dtype)
    launched("paged_prefill_torch")
    return out
