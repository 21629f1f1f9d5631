"""Page pools for the kernels' tests: every byte known before anything is written."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.kv.layout import DTYPES as DTYPES_BY_NAME
from kvbench_kernels.kv.layout import LayerPages

FORMATS = tuple(KV_FORMATS)
QUANTIZED = FORMATS[1:]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FILL = 0xAA


@dataclass
class Pool:
    cache: LayerPages
    health: Tensor

    @property
    def fmt(self):
        return self.cache.fmt.name

    def content(self):
        """All bytes of all tensors, and the counts."""
        return [*map(raw, self.cache.tensors().values()), self.health.tolist()]


def raw(tensor):
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def filled(shape, dtype, device):
    """Every byte 0xAA."""
    return (
        torch.full((*shape, dtype.itemsize), FILL, dtype=torch.uint8, device=device).view(dtype).squeeze(-1)
    )


def make_pool(
    fmt,
    device,
    dtype=torch.float32,
    *,
    pages=4,
    heads=2,
    page_size=16,
    dim=64,
    value_dim=None,
    scale=(0.05, 0.03),
):
    layout = KV_FORMATS[fmt]
    payload = DTYPES_BY_NAME[layout.payload_dtype] if layout.payload_dtype else dtype
    rows = (pages, heads, page_size)
    scales = [None, None]
    if layout.scale_kind == "static":
        scales = [torch.tensor([s], device=device) for s in scale]
    elif layout.scale_dtype:
        scales = [filled(rows, DTYPES_BY_NAME[layout.scale_dtype], device) for _ in range(2)]
    k, v = (filled((*rows, d), payload, device) for d in (dim, value_dim or dim))
    return Pool(LayerPages(layout, k, v, *scales), torch.zeros(3, dtype=torch.int64, device=device))


def hard_rows(tokens, heads, dim, dtype, device, seed=0):
    """[tokens, heads, dim] of every magnitude, with zeros, ties, subnormals and non-finite elements among
    them.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=generator)
    x *= 2.0 ** torch.randint(-30, 24, (tokens, heads, 1), generator=generator)
    flat = x.view(tokens * heads, dim)
    specials = [
        torch.zeros(dim),
        torch.full((dim,), 1e-42),
        torch.arange(dim) + 0.5,
        torch.tensor([127.0, *[i + 0.5 for i in range(dim - 1)]]),
        torch.tensor([1e7, *[1.0] * (dim - 1)]),
    ]
    for i, row in enumerate(specials[: len(flat)]):
        flat[-1 - i] = row
    for i, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        flat[i % len(flat), (7 * i) % dim] = bad
    return x.to(dtype).to(device)
