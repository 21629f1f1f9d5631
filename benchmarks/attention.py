"""Paged decode attention and the quantizing write on one GPU, beside public kernels in the same run.

    python -m benchmarks.attention [--cells 8x16384,64x8192] [--formats native,int8_sym,fp8_e4m3] [--peers sdpa_cudnn,...]
                                   [--rounds 5] [--splits N] [--out DIR]
    python -m benchmarks.attention --warm all   # FlashInfer compiles at first use: all its peers, in parallel, beforehand

Geometry of Qwen3-8B: 32 query heads, 8 KV heads, head_dim 128, pages of 16 tokens. A cell is BATCHxCONTEXT, or `mixed`:
one sequence of 65,536 tokens and 31 of 4,096.

Protocol. Every entry of a cell works on the same random data in its own layout: as many buffer sets as make 256 MB of KV
(4x the L2), in one CUDA graph, so that each call finds cold caches. The result of every call is compared with FP32
attention over the dequantized values before anything is timed: an entry that fails has no time. Then the entries take
turns, forwards and backwards, for `rounds` rounds; median, smallest and largest are reported. B, the copy bandwidth
(bytes read plus written), is measured before and after, and the larger counts. TB/s are those of KV bytes, scales
included. The goals are a table (`GOALS`), each printed as reached, missed or not measured. Exit status 1 when a kernel
of ours failed its check.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import Finding, as_json, chosen, finding, goal_lines
from kvbench.formats import KV_FORMATS, KVShape, kv_bytes, pages_for
from kvbench_kernels.quantize import DYNAMIC, QUANTIZE, dequantize

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SCALING = HEAD_DIM**-0.5
SHAPE = KVShape(KV_HEADS, HEAD_DIM, HEAD_DIM)
STATIC_SCALE = 0.05
COLD_BYTES = 256_000_000  # of KV in one graph: more than four times the L2 of 60 MB
REPLAYS = 4  # a sample
DEVICE = "cuda"
CELLS = "1x1024,1x16384,1x131072,8x4096,8x16384,8x32768,32x8192,64x1024,64x4096,64x8192,mixed"
FORMATS = "native,int8_sym,fp8_e4m3"
WRITE_TOKENS = (1, 8, 64)
MIXED = (65536, *[4096] * 31)


# Goals ------------------------------------------------------------------------------------------------------------

SDPA = ("sdpa_cudnn", "sdpa_flash")
FP8_PEERS = ("fi_fa2_fp8", "fi_xqa_fp8", "vllm_fp8")
QUANTIZED = ("int8_sym", "fp8_e4m3")
GB = 1e9

# A goal holds for `entries` at the cells that `cells` names, or at all whose KV bytes (`of`: the entry's own, or those of
# another entry at the same cell) lie in [min, max). `measure` is one of MEASURES.
GOALS: dict[str, dict[str, Any]] = {
    "A1 large": {"entries": ("int8_sym",), "min": 0.5 * GB, "measure": "share", "at_least": 0.90,
                 "sentence": "int8_sym reads at 90% of B or more where it has 500 MB of KV or more"},
    "A1 8x32k, 64x4k": {"entries": ("int8_sym",), "cells": ("8x32768", "64x4096"), "measure": "us", "at_most": 141,
                        "sentence": "int8_sym takes at most 141 us at 8x32k and 64x4k"},
    "A1 136 MB": {"entries": ("int8_sym",), "min": 0.136 * GB, "max": 0.5 * GB, "measure": "share", "at_least": 0.80,
                  "sentence": "int8_sym reads at 80% of B or more from 136 MB on"},
    "A1 68 MB": {"entries": ("int8_sym",), "min": 0.068 * GB, "max": 0.136 * GB, "measure": "share", "at_least": 0.65,
                 "sentence": "int8_sym reads at 65% of B or more from 68 MB on"},
    "A2 large": {"entries": ("fp8_e4m3",), "min": 0.5 * GB, "measure": "share", "at_least": 0.90,
                 "sentence": "fp8_e4m3 reads at 90% of B or more where it has 500 MB of KV or more"},
    "A2 elsewhere": {"entries": ("fp8_e4m3",), "max": 0.5 * GB, "measure": "over_int8", "at_most": 1.05,
                     "sentence": "fp8_e4m3 takes at most 1.05x int8_sym's time elsewhere"},
    "A3 large": {"entries": ("native",), "min": GB, "measure": "share", "at_least": 0.93,
                 "sentence": "bf16 reads at 93% of B or more where it has 1 GB of KV or more"},
    "A3 SDPA": {"entries": ("native",), "measure": "over_sdpa", "at_most": 1.05,
                "sentence": "bf16 takes at most 1.05x the time of the better of cuDNN and flash SDPA at every cell"},
    "A4 large": {"entries": QUANTIZED, "of": "native", "min": GB, "measure": "speedup", "at_least": 1.75,
                 "sentence": "INT8 and FP8 are 1.75x as fast as our bf16 or more where that has 1 GB of KV or more"},
    "A4 everywhere": {"entries": QUANTIZED, "measure": "speedup", "at_least": 1.0,
                      "sentence": "INT8 and FP8 are never slower than our bf16"},
    "A5 time": {"entries": tuple(f"write {f}" for f in QUANTIZED), "measure": "us", "at_most": 3,
                "sentence": "quantize and paged scatter take at most 3 us for 1, 8 and 64 tokens"},
    "A5 launches": {"entries": tuple(f"write {f}" for f in QUANTIZED), "measure": "launches", "at_most": 1,
                    "sentence": "quantize and paged scatter of K and V are one launch"},
    "A5 mixed": {"entries": QUANTIZED, "cells": ("mixed",), "measure": "share", "at_least": 0.80,
                 "sentence": "mixed lengths (1x64k and 31x4k) read at 80% of B or more"},
    "A6": {"entries": QUANTIZED, "measure": "over_fp8_peer", "at_most": 1.0,
           "sentence": "INT8 and FP8 are at or below the best FP8 peer at every cell"},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One entry at one cell. us: median and range over rounds, None where it has no time (`failed` says why).

    nbytes: KV bytes that a call reads (payload and scales), or writes. cosine: smallest over sequences and heads against
    the oracle, max_abs: largest error. kernels: what one call of ours launched.
    """

    cell: str
    entry: str
    nbytes: int
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    cosine: float | None = None
    max_abs: float | None = None
    kernels: tuple[str, ...] = ()
    failed: str = ""

    @property
    def tb_s(self) -> float | None:
        return self.nbytes / self.us / 1e6 if self.us else None


Here = Mapping[str, Row]  # the rows of one cell by entry


def _best(here: Here, names: Iterable[str]) -> float | None:
    return min((here[n].us for n in names if n in here and here[n].us), default=None)  # type: ignore[type-var]


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


MEASURES: dict[str, Callable[[Row, Here, float], float | None]] = {
    "us": lambda row, here, b: row.us,
    "share": lambda row, here, b: _ratio(row.tb_s, b),
    "launches": lambda row, here, b: float(len(row.kernels)) if row.kernels else None,
    "speedup": lambda row, here, b: _ratio(_best(here, ["native"]), row.us),
    "over_int8": lambda row, here, b: _ratio(row.us, _best(here, ["int8_sym"])),
    "over_sdpa": lambda row, here, b: _ratio(row.us, _best(here, SDPA)),
    "over_fp8_peer": lambda row, here, b: _ratio(row.us, _best(here, FP8_PEERS)),
}
# What has no peer at a cell: a contiguous cache has one length.
_NO_PEER = {("mixed", "over_sdpa")}


def evaluate(goal: Mapping[str, Any], rows: Sequence[Row], b: float) -> list[Finding]:
    """What a goal asks, cell by cell. b: copy bandwidth in TB/s."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, {})[row.entry] = row
    found = []
    for row in rows:
        here = cells[row.cell]
        if row.entry not in goal["entries"] or (row.cell, goal["measure"]) in _NO_PEER:
            continue
        if row.cell not in goal.get("cells", (row.cell,)):
            continue
        sized = here.get(goal.get("of", row.entry))
        if sized is None or not goal.get("min", 0) <= sized.nbytes < goal.get("max", math.inf):
            continue
        value = MEASURES[goal["measure"]](row, here, b)
        found.append(finding(goal, row.cell, row.entry, value))
    return found


def table(rows: Sequence[Row], b: float) -> str:
    """The rows as text, cell by cell."""
    lines = [
        f"{'cell':>9}  {'entry':16} {'us':>8} {'min - max':>17} {'TB/s':>6} {'of B':>6}  {'1-cosine':>8}"
    ]
    for row in rows:
        head = f"{row.cell:>9}  {row.entry:16} "
        if row.us is None or row.us_min is None or row.us_max is None:
            lines.append(f"{head}{row.failed}")
            continue
        spread = f"{row.us_min:.2f} - {row.us_max:.2f}"
        distance = "exact" if row.cosine is None else f"{max(1 - row.cosine, 0.0):.1e}"
        speed = f"{row.tb_s:6.2f} {row.tb_s / b:6.1%}" if row.tb_s and row.cosine is not None else f"{'':13}"
        lines.append(f"{head}{row.us:8.2f} {spread:>17} {speed}  {distance:>8}")
    return "\n".join(lines)


# Data -------------------------------------------------------------------------------------------------------------


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

    sets: buffer sets; the pages of set s are rows s * pages to (s + 1) * pages of the pool, and every set has the same
    page table, a random permutation. q [sets, B, Hq, D].
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
                scale = None if fmt in DYNAMIC else torch.full((1,), STATIC_SCALE, device=self.device)
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
            if scale is not None and fmt in DYNAMIC:
                scale = self.part(scale, s)[ids]
            values = dequantize(fmt, codes, scale, torch.float32)
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


# Entries ----------------------------------------------------------------------------------------------------------

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Entry:
    """One kernel at a cell. build(data) -> one call a set, each giving [B, Hq, D] in any shape of as many elements.

    values: the format whose dequantized values it attends to; cosine: the least that passes.
    """

    name: str
    build: Callable[[Data], list[Call]]
    values: str
    cosine: float
    element_bytes: int | None = None  # a peer's; None: the bytes of KV format `values`
    own: bool = False

    def nbytes(self, lengths: Sequence[int]) -> int:
        if self.element_bytes is None:
            return bytes_of(self.values, lengths)
        return sum(lengths) * 2 * KV_HEADS * HEAD_DIM * self.element_bytes


def ours(data: Data, fmt: str, splits: int | None) -> Callable[..., Tensor]:
    """The kernel that the engine takes: call(q, k_pages, v_pages, k_scale, v_scale, pages, lengths, scaling) -> out."""
    from kvbench_kernels import route
    from kvbench_kernels.support import AttentionNeeds, interpreting

    needs = AttentionNeeds(
        fmt,
        Q_HEADS,
        KV_HEADS,
        HEAD_DIM,
        HEAD_DIM,
        PAGE,
        "bfloat16",
        torch.device(data.device).type,
        interpreting(),
    )
    plan = route.plan(needs, data.batch, max(data.lengths), sum(data.lengths) // data.batch, splits)
    space = route.workspace(needs, data.batch, plan, torch.device(data.device))
    extras = {} if space is None else {"workspace": space}

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return route.decode_kernel(needs)(fmt, q, k, v, *rest, splits=plan, **extras)

    return call


def own_entry(fmt: str, splits: int | None = None) -> Entry:
    def build(data: Data) -> list[Call]:
        kernel = ours(data, fmt, splits)
        k, v, k_scale, v_scale = data.paged(fmt)

        def call(s: int) -> Tensor:
            scales = [data.part(x, s) if fmt in DYNAMIC and x is not None else x for x in (k_scale, v_scale)]
            return kernel(
                data.q[s], data.part(k, s), data.part(v, s), *scales, data.table, data.context, SCALING
            )

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return Entry(fmt, build, fmt, 0.99999, own=True)


def sdpa(backend: str) -> Callable[[Data], list[Call]]:
    def build(data: Data) -> list[Call]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        k, v = data.contiguous

        def call(s: int) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    data.q[s].unsqueeze(2), k[s], v[s], scale=SCALING, enable_gqa=True
                )

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


def flashinfer_fa2(values: str) -> Callable[[Data], list[Call]]:
    def build(data: Data) -> list[Call]:
        import flashinfer

        k, v, _, _ = data.tokens_first(values)
        counts = torch.tensor([len(row) for row in data.rows], dtype=torch.int32, device=data.device)
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        ids = torch.cat(data.rows)
        last = (data.context - 1) % PAGE + 1
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=data.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2",
            paged_kv_indptr_buffer=indptr.clone(), paged_kv_indices_buffer=ids.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(indptr, ids, last, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=torch.bfloat16,
                     kv_data_type=k.dtype, sm_scale=SCALING)  # fmt: skip
        scales = {} if values == "native" else {"k_scale": 1.0, "v_scale": 1.0}

        def call(s: int) -> Tensor:
            out: Tensor = wrapper.run(data.q[s], (data.part(k, s), data.part(v, s)), **scales)
            return out

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


def flashinfer_xqa(values: str) -> Callable[[Data], list[Call]]:
    def build(data: Data) -> list[Call]:
        from flashinfer.xqa import xqa

        k, v, _, _ = data.tokens_first(values)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        table = data.table.clamp(min=0)
        lengths = data.context.view(torch.uint32).view(-1, 1)
        workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=data.device)
        semaphores = torch.zeros(8 << 20, dtype=torch.uint32, device=data.device)
        q = data.q.unsqueeze(2)
        out = torch.empty_like(q)

        def call(s: int) -> Tensor:
            xqa(q[s], data.part(k, s), data.part(v, s), table, lengths, out[s], workspace, semaphores, KV_HEADS, PAGE,
                kv_scale=1.0, sm_count=processors)  # fmt: skip
            return out[s]

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


def vllm_unified(values: str) -> Callable[[Data], list[Call]]:
    """vLLM's Triton attention with one scale a token and head: three-dimensional grid up to 16 sequences, as there."""

    def build(data: Data) -> list[Call]:
        from vllm.v1.attention.ops import triton_unified_attention as peer

        segments, most_split = 16, 128 // KV_HEADS
        mode = {"int8_sym": "INT8_PER_TOKEN_HEAD", "fp8_e4m3": "FP8_PER_TOKEN_HEAD"}[values]
        k, v, k_scale, v_scale = data.tokens_first(values)
        if k_scale is None or v_scale is None:
            raise ValueError(f"{values} has no scale a token and head")
        starts = torch.arange(data.batch + 1, dtype=torch.int32, device=data.device)
        one = torch.ones(1, dtype=torch.float32, device=data.device)
        partial = (most_split, Q_HEADS, segments)
        buffers = {
            "softmax_segm_output": torch.empty((*partial, HEAD_DIM), device=data.device),
            "softmax_segm_max": torch.empty(partial, device=data.device),
            "softmax_segm_expsum": torch.empty(partial, device=data.device),
        }
        out = torch.empty_like(data.q)

        def call(s: int) -> Tensor:
            peer.unified_attention(
                q=data.q[s], k=data.part(k, s), v=data.part(v, s), out=out[s], cu_seqlens_q=starts, max_seqlen_q=1,
                seqused_k=data.context, max_seqlen_k=max(data.lengths), softmax_scale=SCALING, causal=True,
                window_size=(-1, -1), block_table=data.table, softcap=0, q_descale=None, k_descale=one, v_descale=one,
                seq_threshold_3D=most_split, num_par_softmax_segments=segments, **buffers,
                kv_quant_mode=peer.KVQuantMode[mode], k_scale_cache=data.part(k_scale, s),
                v_scale_cache=data.part(v_scale, s),
            )  # fmt: skip
            return out[s]

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


# FP8 peers of FlashInfer have one scale a tensor, and XQA rounds queries and probabilities to E4M3 too.
PEERS: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("sdpa_cudnn", sdpa("CUDNN_ATTENTION"), "native", 0.9999, 2),
        Entry("sdpa_flash", sdpa("FLASH_ATTENTION"), "native", 0.9999, 2),
        Entry("fi_fa2_bf16", flashinfer_fa2("native"), "native", 0.9999, 2),
        Entry("fi_fa2_fp8", flashinfer_fa2("fp8_plain"), "fp8_plain", 0.995, 1),
        Entry("fi_xqa_bf16", flashinfer_xqa("native"), "native", 0.9999, 2),
        Entry("fi_xqa_fp8", flashinfer_xqa("fp8_plain"), "fp8_plain", 0.995, 1),
        Entry("vllm_int8", vllm_unified("int8_sym"), "int8_sym", 0.9999),
        Entry("vllm_fp8", vllm_unified("fp8_e4m3"), "fp8_e4m3", 0.9999),
    )
}
COMPILED = ("fi_fa2_bf16", "fi_fa2_fp8", "fi_xqa_bf16", "fi_xqa_fp8")  # by nvcc, at first use


# Measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """A captured graph whose result was right. calls keeps the buffers that the graph reads."""

    graph: Any
    calls: list[Call]
    per_replay: int
    row: Row


def capture(calls: Sequence[Callable[[], Any]]) -> tuple[Any, list[Any]]:
    """(CUDA graph of all calls, what each returned); the first call runs before, so that it may compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = [call() for call in calls]
    torch.cuda.synchronize()
    return graph, outs


def prepare(cell: str, entry: Entry, data: Data) -> Ready | Row:
    """A checked graph, or a row that says why there is none."""
    nbytes = entry.nbytes(data.lengths)
    try:
        calls = entry.build(data)
        kernels = launched_by(calls[0]) if entry.own else ()
        graph, outs = capture(calls)
        for out in outs:
            out.fill_(math.nan)  # what a call does not write must not look right
        graph.replay()
        torch.cuda.synchronize()
        got = torch.stack([out.reshape(data.q.shape[1:]) for out in outs])
        cosine, max_abs = compare(got, data.oracle(entry.values))
    except Exception as e:  # a peer that cannot run is a line of the table
        if "CUDA error" in str(e):
            raise  # sticky: nothing after it would be true
        return Row(cell, entry.name, nbytes, failed=f"cannot run: {first_line(e)}")
    row = Row(cell, entry.name, nbytes, cosine=cosine, max_abs=max_abs, kernels=kernels)
    if not cosine >= entry.cosine:
        return Row(cell, entry.name, nbytes, cosine=cosine, max_abs=max_abs, kernels=kernels,
                   failed=f"FAILED: cosine {cosine:.7f} against the oracle, {entry.cosine} is due")  # fmt: skip
    return Ready(graph, calls, len(calls), row)


def launched_by(call: Call) -> tuple[str, ...]:
    """Names of the kernels of ours that one call launches."""
    from kvbench_kernels.launches import record

    with record() as launches:
        call()
    torch.cuda.synchronize()
    return tuple(launch.name for launch in launches)


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:110]}" if lines else type(error).__name__


def sample(ready: Ready) -> float:
    """us a call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ready.graph.replay()
    start.record()
    for _ in range(REPLAYS):
        ready.graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / REPLAYS / ready.per_replay


def alternate(
    entries: Sequence[Ready], rounds: int, take: Callable[[Ready], float] = sample
) -> list[list[float]]:
    """Samples of each entry; the entries take turns, forwards and then backwards."""
    times: list[list[float]] = [[] for _ in entries]
    for round_ in range(rounds):
        order = range(len(entries))
        for i in order if round_ % 2 == 0 else reversed(order):
            times[i].append(take(entries[i]))
    return times


def timed(row: Row, times: Sequence[float]) -> Row:
    return replace(row, us=statistics.median(times), us_min=min(times), us_max=max(times))


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 2 GB, bytes read plus written; median of 7."""
    source = torch.randn(1_000_000_000, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    rates = []
    for _ in range(8):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        rates.append(2 * source.nbytes / start.elapsed_time(stop) / 1e9)
    return statistics.median(rates[1:])


def measure_cell(cell: str, entries: Sequence[Entry], rounds: int) -> list[Row]:
    lengths = lengths_of(cell)
    smallest = min(e.nbytes(lengths) for e in entries)
    data = Data(lengths, -(-COLD_BYTES // smallest))
    prepared = [prepare(cell, entry, data) for entry in entries]
    times = iter(alternate([p for p in prepared if isinstance(p, Ready)], rounds))
    return [timed(p.row, next(times)) if isinstance(p, Ready) else p for p in prepared]


def measure_writes(formats: Sequence[str], rounds: int) -> list[Row]:
    """The quantizing write of K and V of n tokens, one row each: cells "write 1", "write 8", ..."""
    return [row for tokens in WRITE_TOKENS for row in _measure_write(tokens, formats, rounds)]


def _measure_write(tokens: int, formats: Sequence[str], rounds: int) -> list[Row]:
    sets = 64
    pages = COLD_BYTES // (2 * PAGE * KV_HEADS * HEAD_DIM)
    k, v = (
        torch.randn((sets, tokens, KV_HEADS, HEAD_DIM), device=DEVICE, dtype=torch.bfloat16) for _ in "kv"
    )
    slots = torch.randperm(pages * PAGE, device=DEVICE)[: sets * tokens].view(sets, tokens)
    prepared = [_prepare_write(fmt, k, v, slots, pages) for fmt in formats]
    times = iter(alternate([p for p in prepared if isinstance(p, Ready)], rounds))
    return [timed(p.row, next(times)) if isinstance(p, Ready) else p for p in prepared]


def _prepare_write(fmt: str, k: Tensor, v: Tensor, slots: Tensor, pages: int) -> Ready | Row:
    cell, name = f"write {slots.shape[1]}", f"write {fmt}"
    scale = None if fmt in DYNAMIC or fmt == "native" else torch.full((1,), STATIC_SCALE, device=DEVICE)
    wanted = [QUANTIZE[fmt](x, scale) for x in (k, v)]
    nbytes = bytes_of(fmt, [slots.shape[1]])
    shape = (pages, KV_HEADS, PAGE, HEAD_DIM)
    store = [torch.zeros(shape, dtype=w.codes.dtype, device=DEVICE) for w in wanted]
    scales = [
        scale if w.scales is None else torch.zeros(shape[:3], dtype=w.scales.dtype, device=DEVICE)
        for w in wanted
    ]
    health = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    try:
        from kvbench_kernels.write import paged_write

        calls = [
            lambda s=s: paged_write(fmt, k[s], v[s], slots[s], *store, *scales, health)  # type: ignore[misc]
            for s in range(k.shape[0])
        ]
        kernels = launched_by(calls[0])
        graph, _ = capture(calls)
        graph.replay()
        torch.cuda.synchronize()
    except Exception as e:
        if "CUDA error" in str(e):
            raise
        return Row(cell, name, nbytes, failed=f"cannot run: {first_line(e)}")
    page, offset = slots // PAGE, slots % PAGE
    for w, codes, stored in zip(wanted, store, scales, strict=True):
        equal = torch.equal(codes.view(torch.uint8)[page, :, offset], w.codes.view(torch.uint8))
        if w.scales is not None and stored is not None:
            equal = equal and torch.equal(stored[page, :, offset], w.scales)
        if not equal:
            return Row(
                cell, name, nbytes, kernels=kernels, failed="FAILED: stored bytes are not the quantizer's"
            )
    return Ready(graph, calls, len(calls), Row(cell, name, nbytes, kernels=kernels))


# Command ----------------------------------------------------------------------------------------------------------


def warm(names: Sequence[str]) -> None:
    """Compile peers: one here, several each in a process of its own."""
    if len(names) == 1:
        entry = PEERS[names[0]]
        entry.build(Data((1024, 1024), 1))[0]()
        torch.cuda.synchronize()
        return
    running = {
        n: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attention", "--warm", n], stderr=subprocess.PIPE, text=True
        )
        for n in names
    }
    for name, process in running.items():
        _, error = process.communicate()
        tail = error.strip().splitlines()[-1:] if process.returncode else []
        print(f"warm {name}: {'; '.join(tail) or 'built'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--peers", default=",".join(PEERS), help="'' for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--splits", type=int, default=None, help="programs along a sequence, instead of the default's"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for attention.json")
    parser.add_argument("--warm", default=None, metavar="PEERS", help="compile these peers (or all) and stop")
    args = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    formats = chosen(args.formats, KV_FORMATS, "The format")
    peers = chosen(args.peers, PEERS, "The peer")
    cells = {cell: lengths_of(cell) for cell in args.cells.split(",") if cell}
    names = chosen(",".join(COMPILED) if args.warm == "all" else args.warm or "", PEERS, "The peer")
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch sees none.")
    torch.manual_seed(0)
    if names:
        warm(names)
        return
    entries = [*(own_entry(fmt, args.splits) for fmt in formats), *(PEERS[name] for name in peers)]
    before = copy_bandwidth()
    rows: list[Row] = []
    for cell in cells:
        found = measure_cell(cell, entries, args.rounds)
        print(table(found, before), flush=True)
        rows += found
        torch.cuda.empty_cache()
    found = measure_writes(formats, args.rounds)
    print(table(found, before), flush=True)
    rows += found
    after = copy_bandwidth()
    b = max(before, after)
    lines = goal_lines(GOALS, lambda goal: evaluate(goal, rows, b))
    print(
        f"B: {before:.3f} TB/s before, {after:.3f} after; {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    print("\n".join(lines))
    if args.out:
        import triton

        args.out.mkdir(parents=True, exist_ok=True)
        result = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "copy_tb_s": [before, after], "rounds": args.rounds, "splits": args.splits,
            "rows": [asdict(r) | {"tb_s": r.tb_s, "share": r.tb_s / b if r.tb_s else None} for r in rows],
            "goals": as_json(GOALS, lambda goal: evaluate(goal, rows, b)),
        }  # fmt: skip
        (args.out / "attention.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    own = {*formats, *(f"write {fmt}" for fmt in formats)}
    if any(r.failed for r in rows if r.entry in own):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
