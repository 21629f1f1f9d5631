"""The cells of the attention benchmark: geometry, random caches in every layout, and the FP32 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes, pages_for
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SCALING = HEAD_DIM**-0.5
SHAPE = KVShape(KV_HEADS, HEAD_DIM, HEAD_DIM)
STATIC_SCALE = 0.05
COLD_BYTES = 256_000_000  # of KV in one graph: more than four times the L2 of 60 MB
DEVICE = "cuda"
MIXED = (65536, *[4096] * 31)


def lengths_of(cell: str) -> tuple[int, ...]:
    """Tokens of each sequence: "8x16384" or "mixed"; SystemExit for anything else."""
    if cell == "mixed":
        return MIXED
    batch, _, context = cell.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
        raise SystemExit(f"The cell {cell!r} is neither BATCHxCONTEXT, as in 8x16384, nor mixed.")
    return (int(context),) * int(batch)


def bytes_of(fmt: str, lengths: Sequence[int]) -> int:
    """KV bytes that attention over `lengths` reads in `fmt`, scales included."""
    return kv_bytes(KV_FORMATS[fmt], SHAPE, sum(lengths), "bfloat16").total


Paged = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # K and V pages, and their scales


class Data:
    """One random cache of a cell in bf16, and the layouts made from it when an entry first asks.

    sets: buffer sets; the pages of set s are rows s * pages to (s + 1) * pages of the pool, and every set has
    the same page table, a random permutation. q [sets, B, Hq, D].
    """

    def __init__(self, lengths: Sequence[int], sets: int, device: str = DEVICE) -> None:
        self.lengths, self.sets, self.device = tuple(lengths), sets, device
        self.batch = len(lengths)
        rows = [pages_for(n, PAGE) for n in lengths]
        self.pages = sum(rows)
        ids = torch.randperm(self.pages, device=device).to(torch.int32)
        self.rows = list(torch.split(ids, rows))
        self.table = torch.full((self.batch, max(rows)), -1, dtype=torch.int32, device=device)
        for i, row in enumerate(self.rows):
            self.table[i, : len(row)] = row
        self.context = torch.tensor(lengths, dtype=torch.int32, device=device)
        shape = (sets * self.pages, KV_HEADS, PAGE, HEAD_DIM)
        self.k, self.v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in "kv")
        self.q = torch.randn((sets, self.batch, Q_HEADS, HEAD_DIM), device=device, dtype=torch.bfloat16)
        self._paged: dict[str, Paged] = {"native": (self.k, self.v, None, None)}
        self._oracle: dict[str, Tensor] = {}

    def part(self, x: Tensor, s: int) -> Tensor:
        """The pages of set s."""
        return x[s * self.pages : (s + 1) * self.pages]

    def pages_of(self, fmt: str, s: int) -> LayerPages:
        """The pages of set s in a KV format, as the kernels take them."""
        asked, (k, v, *scales) = KV_FORMATS[fmt], self.paged(fmt)
        k_scale, v_scale = (self.part(x, s) if x is not None and asked.scale_per_row else x for x in scales)
        return LayerPages(asked, self.part(k, s), self.part(v, s), k_scale, v_scale)

    def paged(self, fmt: str) -> Paged:
        """All sets in a KV format, [pages, Hkv, page, D] and scales [pages, Hkv, page] or [1].

        "fp8_plain" is E4M3 with a scale of 1, what a peer with one scale a tensor gets.
        """
        if fmt not in self._paged:
            if fmt == "fp8_plain":
                self._paged[fmt] = (
                    self.k.to(torch.float8_e4m3fn),
                    self.v.to(torch.float8_e4m3fn),
                    None,
                    None,
                )
            else:
                scale = (
                    None
                    if KV_FORMATS[fmt].scale_per_row
                    else torch.full((1,), STATIC_SCALE, device=self.device)
                )
                k, v = QUANTIZE[fmt](self.k, scale), QUANTIZE[fmt](self.v, scale)
                self._paged[fmt] = (
                    (k.codes, v.codes, k.scales, v.scales)
                    if scale is None
                    else (k.codes, v.codes, scale, scale)
                )
        return self._paged[fmt]

    @cached_property
    def contiguous(self) -> tuple[Tensor, Tensor]:
        """K and V [sets, B, Hkv, context, D] of sequences of one length; ValueError for mixed lengths."""
        if len(set(self.lengths)) > 1:
            raise ValueError("a contiguous cache has one length for all sequences")

        def gather(x: Tensor) -> Tensor:
            rows = x.view(self.sets, self.pages, KV_HEADS, PAGE, HEAD_DIM)[:, self.table.long()]
            joined = rows.transpose(2, 3).reshape(self.sets, self.batch, KV_HEADS, -1, HEAD_DIM)
            return joined[:, :, :, : self.lengths[0]].contiguous()

        return gather(self.k), gather(self.v)

    def tokens_first(self, fmt: str) -> Paged:
        """`paged` with heads inside tokens: [pages, page, Hkv, D], scales float32 [pages, page, Hkv]."""
        name = f"{fmt} tokens first"
        if name not in self._paged:
            k, v, k_scale, v_scale = self.paged(fmt)
            scales = [
                None if x is None else x.transpose(1, 2).float().contiguous() for x in (k_scale, v_scale)
            ]
            self._paged[name] = (
                k.transpose(1, 2).contiguous(),
                v.transpose(1, 2).contiguous(),
                scales[0],
                scales[1],
            )
        return self._paged[name]

    def oracle(self, fmt: str) -> Tensor:
        """[sets, B, Hq, D] float32: attention over the dequantized values, in FP32."""
        if fmt not in self._oracle:
            out = torch.empty(self.q.shape, dtype=torch.float32, device=self.device)
            for s in range(self.sets):
                for b in range(self.batch):
                    k, v = (self._values(fmt, s, b, side) for side in (0, 1))
                    out[s, b] = attention(self.q[s, b].float(), k, v)
            self._oracle[fmt] = out
        return self._oracle[fmt]

    def _values(self, fmt: str, s: int, b: int, side: int) -> Tensor:
        """[Hkv, length, D] float32: what the stored codes of one sequence stand for."""
        paged = self.paged(fmt)
        ids = self.rows[b].long()
        codes, scale = picked(self.part(paged[side], s), ids), paged[2 + side]
        if fmt == "fp8_plain":
            values = codes.float()
        else:
            if scale is not None and KV_FORMATS[fmt].scale_per_row:
                scale = self.part(scale, s)[ids]
            values = dequantize(codes, scale, torch.float32)
        return values.transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, : self.lengths[b]]


def picked(x: Tensor, ids: Tensor) -> Tensor:
    """x[ids] for any dtype: indexing does not know every 8-bit float on every device."""
    return x.view(torch.uint8)[ids].view(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [Hq, D], k and v [Hkv, L, D], all float32 -> [Hq, D]; group query head h on KV head h // group."""
    grouped = q.view(k.shape[0], -1, q.shape[-1])
    weights = (grouped @ k.transpose(1, 2) * SCALING).softmax(-1)
    return (weights @ v).view(q.shape)


def compare(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """(smallest cosine of a row of the last axis, largest absolute error), in float64; NaN stays NaN."""
    got, wanted = got.double(), wanted.double()
    cosine = (got * wanted).sum(-1) / (got.norm(dim=-1) * wanted.norm(dim=-1))
    # min() of a tensor with NaN is NaN, as it must be: no comparison passes then.
    return float(cosine.min()), float((got - wanted).abs().max())
