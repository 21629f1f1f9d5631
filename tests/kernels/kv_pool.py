"""Paged pools with known content for the attention kernels, and what counts as equal to their torch twins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE

FORMATS = tuple(KV_FORMATS)
QUANTIZED = tuple(name for name in FORMATS if name != "native")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Largest error of an element, as a share of the largest element. float32 sums in another order than the twin.
SHARE = {torch.float32: 4e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


@dataclass(frozen=True)
class Pool:
    cache: LayerPages
    table: Tensor
    lengths: Tensor

    @property
    def fmt(self):
        return self.cache.fmt.name

    def row(self, index):
        """The same pages, with one sequence in the batch."""
        one = slice(index, index + 1)
        return Pool(self.cache, self.table[one], self.lengths[one])


def rows_of(lengths, kv_heads, dim, dtype, device, seed):
    """Random rows [kv_heads, length, dim] a sequence; on every device the same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(kv_heads, n, dim, generator=generator).to(device, dtype) for n in lengths]


def make_pool(fmt, keys, values, *, page_size=16, spare=1, poison=False, order_seed=0, static=0.03):
    """The rows of each sequence, quantized, in pages in a random order, `spare` table columns more than
    needed.

    Everything outside of the sequences is 0, or with `poison` what no result may show: K = 1e4, V = NaN,
    scales NaN. Spare columns name a page of no sequence, or none at all.
    """
    lengths = [k.shape[1] for k in keys]
    needed = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(order_seed)).tolist()
    table = torch.full((len(lengths), max(needed) + spare), -1, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        table[row, count : count + 1] = sum(needed)
    found = []
    for side, rows in (("k", keys), ("v", values)):
        head, dim, device = rows[0].shape[0], rows[0].shape[2], rows[0].device
        scale = torch.tensor([static], device=device) if fmt.endswith("static") else None
        results = [QUANTIZE[fmt](x, scale) for x in rows]
        codes = results[0].codes.new_zeros(sum(needed) + 1, head, page_size, dim)
        scales = scale
        if results[0].scales is not None:
            scales = results[0].scales.new_zeros(codes.shape[:3])
        if poison:
            _poison(codes, scales if scale is None else None, side)
        for row, result in enumerate(results):
            for page, start in zip(
                table[row, : needed[row]].tolist(), range(0, lengths[row], page_size), strict=True
            ):
                part = result.codes[:, start : start + page_size]
                _bytes(codes)[page, :, : part.shape[1]] = _bytes(part)
                if result.scales is not None and scales is not None:
                    scales[page, :, : part.shape[1]] = result.scales[:, start : start + page_size]
        found.append((codes, scales))
    (k, k_scale), (v, v_scale) = found
    cache = LayerPages(KV_FORMATS[fmt], k, v, k_scale, v_scale)
    return Pool(cache, table.to(k.device), torch.tensor(lengths, dtype=torch.int32, device=k.device))


def random_pool(
    fmt,
    dtype,
    lengths,
    device,
    *,
    kv_heads=2,
    head_dim=64,
    value_dim=64,
    page_size=16,
    spare=1,
    poison=False,
    order_seed=0,
):
    keys = rows_of(lengths, kv_heads, head_dim, dtype, device, 1)
    values = rows_of(lengths, kv_heads, value_dim, dtype, device, 2)
    return make_pool(
        fmt, keys, values, page_size=page_size, spare=spare, poison=poison, order_seed=order_seed
    )


def queries(*shape, dtype, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)


def assert_close(result, wanted, share=None):
    """Every element within its dtype's share of the largest, and cosine >= 0.99999 over all."""
    assert result.dtype == wanted.dtype
    assert result.shape == wanted.shape
    ours, theirs = (x.double() / wanted.double().abs().max() for x in (result, wanted))
    worst = (ours - theirs).abs().max()
    assert worst <= (share or SHARE[result.dtype]), f"largest error is {worst:.2e} of the largest element"
    cosine = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
    assert cosine >= 0.99999, f"cosine {cosine:.7f}"


def _poison(codes, scales, side):
    if codes.dtype == torch.int8:
        codes.fill_(127)
    elif codes.dtype == torch.float8_e4m3fn:
        codes.view(torch.uint8).fill_(0x7F)
    else:
        codes.fill_(1e4 if side == "k" else torch.nan)
    if scales is not None:
        scales.fill_(torch.nan)


def _bytes(tensor):
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
