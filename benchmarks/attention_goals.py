"""The rows of the attention benchmark, its goals set before measuring, and the table that is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.goals import Finding, finding

SDPA = ("sdpa_cudnn", "sdpa_flash")
FP8_PEERS = ("fi_fa2_fp8", "fi_xqa_fp8", "vllm_fp8")
QUANTIZED = ("int8_sym", "fp8_e4m3")
GB = 1e9

# A goal holds for `entries` at the cells that `cells` names, or at all whose KV bytes (`of`: the entry's own,
# or those of another entry at the same cell) lie in [min, max). `measure` is one of MEASURES.
GOALS: dict[str, dict[str, Any]] = {
    "A1 large": {
        "entries": ("int8_sym",),
        "min": 0.5 * GB,
        "measure": "share",
        "at_least": 0.90,
        "sentence": "int8_sym reads at 90% of B or more where it has 500 MB of KV or more",
    },
    "A1 8x32k, 64x4k": {
        "entries": ("int8_sym",),
        "cells": ("8x32768", "64x4096"),
        "measure": "us",
        "at_most": 141,
        "sentence": "int8_sym takes at most 141 us at 8x32k and 64x4k",
    },
    "A1 136 MB": {
        "entries": ("int8_sym",),
        "min": 0.136 * GB,
        "max": 0.5 * GB,
        "measure": "share",
        "at_least": 0.80,
        "sentence": "int8_sym reads at 80% of B or more from 136 MB on",
    },
    "A1 68 MB": {
        "entries": ("int8_sym",),
        "min": 0.068 * GB,
        "max": 0.136 * GB,
        "measure": "share",
        "at_least": 0.65,
        "sentence": "int8_sym reads at 65% of B or more from 68 MB on",
    },
    "A2 large": {
        "entries": ("fp8_e4m3",),
        "min": 0.5 * GB,
        "measure": "share",
        "at_least": 0.90,
        "sentence": "fp8_e4m3 reads at 90% of B or more where it has 500 MB of KV or more",
    },
    "A2 elsewhere": {
        "entries": ("fp8_e4m3",),
        "max": 0.5 * GB,
        "measure": "over_int8",
        "at_most": 1.05,
        "sentence": "fp8_e4m3 takes at most 1.05x int8_sym's time elsewhere",
    },
    "A3 large": {
        "entries": ("native",),
        "min": GB,
        "measure": "share",
        "at_least": 0.93,
        "sentence": "bf16 reads at 93% of B or more where it has 1 GB of KV or more",
    },
    "A3 SDPA": {
        "entries": ("native",),
        "measure": "over_sdpa",
        "at_most": 1.05,
        "sentence": "bf16 takes at most 1.05x the time of the better of cuDNN and flash SDPA at every cell",
    },
    "A4 large": {
        "entries": QUANTIZED,
        "of": "native",
        "min": GB,
        "measure": "speedup",
        "at_least": 1.75,
        "sentence": "INT8 and FP8 are 1.75x as fast as our bf16 or more where that has 1 GB of KV or more",
    },
    "A4 everywhere": {
        "entries": QUANTIZED,
        "measure": "speedup",
        "at_least": 1.0,
        "sentence": "INT8 and FP8 are never slower than our bf16",
    },
    "A5 time": {
        "entries": tuple(f"write {f}" for f in QUANTIZED),
        "measure": "us",
        "at_most": 3,
        "sentence": "quantize and paged scatter take at most 3 us for 1, 8 and 64 tokens",
    },
    "A5 launches": {
        "entries": tuple(f"write {f}" for f in QUANTIZED),
        "measure": "launches",
        "at_most": 1,
        "sentence": "quantize and paged scatter of K and V are one launch",
    },
    "A5 mixed": {
        "entries": QUANTIZED,
        "cells": ("mixed",),
        "measure": "share",
        "at_least": 0.80,
        "sentence": "mixed lengths (1x64k and 31x4k) read at 80% of B or more",
    },
    "A6": {
        "entries": QUANTIZED,
        "measure": "over_fp8_peer",
        "at_most": 1.0,
        "sentence": "INT8 and FP8 are at or below the best FP8 peer at every cell",
    },
}


@dataclass(frozen=True)
class Row:
    """One entry at one cell. us: median and range over rounds, None where it has no time (`failed` says why).

    nbytes: KV bytes that a call reads (payload and scales), or writes. cosine: smallest over sequences and
    heads against the oracle, max_abs: largest error. kernels: what one call of ours launched.
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
