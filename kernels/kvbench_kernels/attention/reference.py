"""Attention over K and V in torch, and a torch twin of each paged kernel, on any device and without Triton.

Shapes: B batch, Hq query heads, Hkv KV heads, G = Hq // Hkv, T queries, L keys, D and Dv head dims. Query
head h reads KV head h // G. Query t stands at position causal_offset + t and sees the keys j <= position; in
a sliding layer also position - j < sliding_window must hold.
"""

from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench_kernels.kv.layout import LayerPages, check_gather, check_write, signed, unsigned
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize
from kvbench_kernels.launches import launched


def paged_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    causal_offset: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, T, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv] -> [B, Hq, T, Dv] in q's dtype.

    causal_offset: position of the first query. softcap: scores become cap * tanh(score / cap) before the
    mask. sinks [Hq]: one more logit a query head in the softmax, without a value. ValueError for query heads
    that are no multiple of the KV heads, and for missing keys.
    """
    group = group_size(q.shape[1], k.shape[1])
    queries = q.shape[2]
    end = causal_offset + queries
    if causal_offset < 0 or end > k.shape[2]:
        raise ValueError(
            f"{queries} queries from position {causal_offset} need {end} keys, but {k.shape[2]} were given; "
            "write the chunk to the store before it is read."
        )
    # Keys that no query sees are cut off, so that nothing in them can reach the result.
    start = 0 if sliding_window is None else max(0, causal_offset + 1 - sliding_window)
    k, v = k[:, :, start:end], v[:, :, start:end]
    mask = _mask(queries, end - start, sliding_window, q.device)
    if softcap is not None or sinks is not None:
        return _explicit(q, k, v, scaling, mask, softcap, sinks)
    if queries == 1:
        # The G query heads of a KV head become its G query rows, so that K and V are never repeated.
        rows = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
        out = F.scaled_dot_product_attention(rows, k, v, scale=scaling)
        return out.reshape(q.shape[0], q.shape[1], 1, v.shape[3])
    square = start == 0 and end == queries and (sliding_window is None or sliding_window >= end)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if square else mask, is_causal=square, scale=scaling, enable_gqa=group > 1
    )


def group_size(q_heads: int, kv_heads: int) -> int:
    """Query heads a KV head; ValueError if they do not divide."""
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            f"{q_heads} query heads on {kv_heads} KV heads: the query heads must be a multiple of the KV "
            "heads; check num_attention_heads and num_key_value_heads in the model's config."
        )
    return q_heads // kv_heads


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """cap * tanh(scores / cap): 100 under a cap of 50 becomes 48.2014."""
    return cap * torch.tanh(scores / cap)


def _mask(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """[T, keys] bool, True where visible. The last query stands at the last key."""
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries)
    distance = distance - torch.arange(keys, device=device)
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Plain softmax attention for soft-caps and sinks, in float32, or float64 if q is."""
    batch, q_heads, queries, _ = q.shape
    group = q_heads // k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).reshape(batch, k.shape[1], group, queries, q.shape[3])
    scores = grouped @ k.to(dtype).transpose(-1, -2).unsqueeze(2) * scaling  # [B, Hkv, G, T, keys]
    if cap is not None:
        scores = soft_cap(scores, cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.to(dtype).reshape(1, k.shape[1], group, 1, 1).expand(batch, -1, -1, queries, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.to(dtype).unsqueeze(2)).reshape(batch, q_heads, queries, v.shape[3]).to(q.dtype)


def paged_write_torch(cache: LayerPages, k: Tensor, v: Tensor, slots: Tensor, health: Tensor) -> None:
    """paged_write in torch. It waits for the device, to select the stored rows."""
    check_write(cache, k, v, slots, health)
    stored = slots >= 0
    page, offset = slots[stored] // cache.page_size, slots[stored] % cache.page_size
    fmt = cache.fmt
    for x, (pages, scale) in zip((k, v), cache.sides(), strict=True):
        result = QUANTIZE[fmt.name](x[stored], None if fmt.scale_per_row else scale)
        unsigned(pages)[page, :, offset] = unsigned(result.codes.to(pages.dtype))
        if result.scales is not None and scale is not None:
            scale[page, :, offset] = result.scales
        health += torch.stack((result.clipped, result.nonfinite, result.overflow))
    launched("paged_write_torch")


def paged_gather_torch(
    cache: LayerPages, table: Tensor, length: int, dtype: torch.dtype, reads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """paged_gather in torch."""
    check_gather(cache, table, length)
    token = torch.arange(length, device=table.device)
    page = table[:, token // cache.page_size].long()  # [B, length]
    offset = (token % cache.page_size).expand_as(page)
    out = []
    for payload, scale in cache.sides():
        codes = signed(payload)[page, :, offset].transpose(1, 2).contiguous().view(payload.dtype)
        if scale is not None and cache.fmt.scale_per_row:
            scale = scale[page, :, offset].transpose(1, 2)
        out.append(dequantize(codes, scale, dtype))
    if reads is not None:
        reads += page.numel() * torch.tensor([1, int(cache.eight_bit)], device=reads.device)
    launched("paged_gather_torch")
    return out[0], out[1]


class Extras(TypedDict, total=False):
    """Options of a paged attention, as in paged_attention_torch; reads [2] int64: tokens are added."""

    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None
    reads: Tensor | None


def paged_decode_torch(
    cache: LayerPages,
    q: Tensor,
    table: Tensor,
    lengths: Tensor,
    scaling: float,
    *,
    splits: int,
    **extras: Unpack[Extras],
) -> Tensor:
    """paged_decode in torch: sequence by sequence, dequantized, in float32. `splits` changes nothing."""
    out = _sequences(cache, q, table, lengths, torch.arange(len(q) + 1), scaling, **extras)
    launched("paged_decode_torch", splits=splits)
    return out


def paged_prefill_torch(
    cache: LayerPages,
    q: Tensor,
    table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    max_new: int,
    scaling: float,
    **extras: Unpack[Extras],
) -> Tensor:
    """paged_prefill in torch: sequence by sequence, dequantized, in float32."""
    out = _sequences(cache, q, table, lengths, query_starts, scaling, **extras)
    launched("paged_prefill_torch")
    return out


def _sequences(
    cache: LayerPages,
    q: Tensor,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scaling: float,
    reads: Tensor | None = None,
    **extras: Any,
) -> Tensor:
    """Causal attention of q's rows starts[b] to starts[b + 1], the last tokens of sequence b; else zeros."""
    out = q.new_zeros(q.shape[0], q.shape[1], cache.v.shape[3])
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if reads is not None:
            reads += length * torch.tensor([1, int(cache.eight_bit)], device=reads.device)
        if length and end > begin:
            k, v = gather_float(cache, table[row], length)
            query, past = q[begin:end].float().transpose(0, 1)[None], length - (end - begin)
            result = paged_attention_torch(query, k, v, scaling, past, **extras)
            out[begin:end] = result[0].transpose(0, 1).to(q.dtype)
    return out


def gather_float(cache: LayerPages, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K [1, Hkv, length, D] and V of the sequence with the table row `pages`, dequantized to float32."""
    used = pages[: -(-length // cache.page_size)].long()
    found = []
    for codes, scale in cache.sides():
        mine = _in_order(unsigned(codes), used, length).view(codes.dtype)
        if scale is not None and cache.fmt.scale_per_row:
            scale = _in_order(scale, used, length)
        found.append(dequantize(mine, scale, torch.float32)[None])
    return found[0], found[1]


def _in_order(paged: Tensor, used: Tensor, length: int) -> Tensor:
    return paged[used].transpose(0, 1).flatten(1, 2)[:, :length]
