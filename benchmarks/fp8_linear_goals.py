"""The rows of the FP8 linear benchmark, its goals set before measuring, the tables printed, and the route
they suggest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fp8_linear_entries import ALONE, HYBRIDS, NATIVE, ROUTED, WHOLE_PEERS
from benchmarks.goals import Finding, finding

DECODE = (1, 2, 4, 8, 16, 32, 64)
LIMITS = {"gate_up": 27.5, "down": 15.6, "qkv": 9.8, "o": 7.8}  # us, M = 1..16
SHARE = 1.15  # of that, at M = 32 and 64


# A goal holds for what is routed, at the cells whose shape is in `shapes`, whose M lies in [min, max] and,
# where `rows` names some, is one of these. `measure` is one of MEASURES.


def _time_goals() -> dict[str, dict[str, Any]]:
    goals: dict[str, dict[str, Any]] = {}
    for shape, limit in LIMITS.items():
        goals[f"B1 {shape}"] = {
            "shapes": (shape,),
            "max": 16,
            "measure": "us",
            "at_most": limit,
            "sentence": f"{shape} takes at most {limit} us for 1 to 16 rows, quantization of x included",
        }
        goals[f"B1 {shape} 32, 64"] = {
            "shapes": (shape,),
            "rows": (32, 64),
            "measure": "us",
            "at_most": round(SHARE * limit, 2),
            "sentence": f"{shape} takes at most {SHARE * limit:.1f} us for 32 and 64 rows, {SHARE}x that",
        }
    return goals


GOALS: dict[str, dict[str, Any]] = {
    **_time_goals(),
    "B1 peers": {
        "rows": DECODE,
        "measure": "over_peer",
        "at_most": 1.0,
        "sentence": "at or below the best peer, quantization included, up to 64 rows",
    },
    "B1 hybrids": {
        "rows": DECODE,
        "measure": "over_hybrid",
        "at_most": 1.0,
        "sentence": "at or below the best peer's product behind our quantizer, up to 64 rows",
    },
    "B2 decode": {
        "max": 32,
        "measure": "speedup",
        "at_least": 1.6,
        "sentence": "1.6x as fast as bf16 cuBLAS or more, up to 32 rows",
    },
    "B2 prefill": {
        "min": 2048,
        "measure": "speedup",
        "at_least": 1.25,
        "sentence": "1.25x as fast as bf16 cuBLAS or more, from 2048 rows on",
    },
    "B2 everywhere": {
        "measure": "speedup",
        "at_least": 1.0,
        "sentence": "never slower than bf16 cuBLAS, from 1 to 8192 rows",
    },
    "B3 product": {
        "min": 4096,
        "measure": "tflops_alone",
        "at_least": 1200,
        "sentence": "1200 TFLOP/s or more from 4096 rows on, the product alone",
    },
    "B3 quantized": {
        "min": 4096,
        "measure": "tflops",
        "at_least": 1100,
        "sentence": "1100 TFLOP/s or more from 4096 rows on, quantization included",
    },
    "B3 names": {
        "measure": "kernels",
        "at_least": 1,
        "sentence": "every product's path and kernels are in the record",
    },
}


@dataclass(frozen=True)
class Row:
    """One entry for one shape and number of rows. us: median and range over rounds, None where there is no
    time: then `word` says why in the table and `failed` in a sentence.

    off_weight, off_product: relative error against float32 products of the dequantized weight with x as it
    is, and with x quantized (None where x is not). path: as routed, of ours; kernels: what one call of ours
    launched.
    """

    shape: str
    m: int
    n: int
    k: int
    entry: str
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    off_weight: float | None = None
    off_product: float | None = None
    path: str = ""
    kernels: tuple[str, ...] = ()
    word: str = ""
    failed: str = ""

    @property
    def cell(self) -> str:
        return f"{self.shape} M={self.m}"

    @property
    def tflops(self) -> float | None:
        return 2 * self.m * self.n * self.k / self.us / 1e6 if self.us else None


Here = Mapping[str, Row]  # the rows of one cell by entry


def _best(here: Here, names: Iterable[str]) -> float | None:
    return min((here[n].us for n in names if n in here and here[n].us), default=None)  # type: ignore[type-var]


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def _tflops_alone(row: Row, here: Here) -> float | None:
    alone = here.get(ALONE.get(row.path, row.entry))
    return alone.tflops if alone else None


MEASURES: dict[str, Callable[[Row, Here], float | None]] = {
    "us": lambda row, here: row.us,
    "tflops": lambda row, here: row.tflops,
    "tflops_alone": _tflops_alone,
    "speedup": lambda row, here: _ratio(_best(here, [NATIVE]), row.us),
    "over_peer": lambda row, here: _ratio(row.us, _best(here, WHOLE_PEERS)),
    "over_hybrid": lambda row, here: _ratio(row.us, _best(here, HYBRIDS)),
    "kernels": lambda row, here: float(len(row.kernels)) if row.path else None,
}


def by_cell(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, {})[row.entry] = row
    return cells


def evaluate(goal: Mapping[str, Any], rows: Sequence[Row]) -> list[Finding]:
    """What a goal asks, cell by cell."""
    found = []
    for here in by_cell(rows).values():
        row = here.get(ROUTED)
        if row is None or row.shape not in goal.get("shapes", (row.shape,)):
            continue
        if not goal.get("min", 1) <= row.m <= goal.get("max", math.inf):
            continue
        if row.m not in goal.get("rows", (row.m,)):
            continue
        found.append(finding(goal, row.cell, row.entry, MEASURES[goal["measure"]](row, here)))
    return found


# Tables -----------------------------------------------------------------------------------------------------


def header(entries: Sequence[str]) -> str:
    cells = " ".join(f"{short(name):>8}" for name in entries)
    return f"{'us':>13} {cells}  {'of cuBLAS':>9}  spread  path: kernels"


def short(name: str) -> str:
    """A name of at most eight letters."""
    return (
        name.replace("deepgemm", "dg")
        .replace("flashinfer", "fi")
        .replace("scaled_mm", "scmm")
        .replace("hopper_alone", "hop_alon")
        .replace("w8a8_alone", "w8a8_aln")[:8]
    )


def line(here: Here, entries: Sequence[str]) -> str:
    """A cell's times in us, or the word that says why there is none, and what is known of what is routed."""
    cells = []
    for name in entries:
        row = here.get(name)
        text = "-" if row is None else row.word if row.us is None else f"{row.us:.1f}"
        cells.append(f"{text:>8}")
    some = next(iter(here.values()))
    routed = here.get(ROUTED)
    tail = ""
    if routed is not None:
        over = _ratio(routed.us, _best(here, [NATIVE]))
        spread = (
            (routed.us_max - routed.us_min) / routed.us
            if routed.us and routed.us_min is not None and routed.us_max is not None
            else None
        )
        tail = (
            f"  {'-' if over is None else f'{over:.3f}':>9}  {'-' if spread is None else f'{spread:.1%}':>6}"
        )
        tail += f"  {routed.path}: {' + '.join(routed.kernels)}"
    return f"{some.shape:>7}{some.m:>6} {' '.join(cells)}{tail}"


def errors(rows: Sequence[Row]) -> list[str]:
    """Largest errors by entry and path."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.off_weight is not None:
            groups.setdefault((row.entry, row.path), []).append(row)
    lines = [f"{'largest relative error':26} {'dequantized weight':>18} {'quantized operands':>18}"]
    for (entry, path), of in groups.items():
        weight = max(r.off_weight for r in of if r.off_weight is not None)
        product = max((r.off_product for r in of if r.off_product is not None), default=None)
        name = f"{entry} {path}" if entry == ROUTED else entry
        lines.append(f"{name:26} {weight:>18.1e} {'-' if product is None else f'{product:.1e}':>18}")
    return lines


def failures(rows: Sequence[Row]) -> list[str]:
    """Why there is no time, once for each entry and reason, with the cells."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.failed and row.word != "-":
            groups.setdefault((row.entry, row.failed), []).append(row.cell)
    return [
        f"{entry} {cells[0]}{f' and {len(cells) - 1} more' if len(cells) > 1 else ''}: {why}"
        for (entry, why), cells in groups.items()
    ]


# Route ------------------------------------------------------------------------------------------------------


# The entries that are a path of `fp8_route`, quantization of x included.
PATHS = ("w8a16", "w8a8", "hopper")


def suggested_route(rows: Sequence[Row]) -> list[str]:
    """For `MEASURED` of `kvbench_kernels.gemm.fp8_route`: the fastest path of each shape at the rows that
    were measured.
    """
    fastest: dict[tuple[int, int, str], list[str]] = {}
    for here in by_cell(rows).values():
        timed = [row for entry in PATHS if (row := here.get(entry)) and row.us is not None]
        if timed:
            best = min(timed, key=lambda row: row.us or 0.0)
            told = f"{best.m} {best.entry} {best.us:.1f}"
            fastest.setdefault((best.n, best.k, best.shape), []).append(told)
    return [
        "# Fastest path by (N, K): rows of x, path, us.",
        *(f"    ({n}, {k}): {', '.join(told)}  # {shape}" for (n, k, shape), told in fastest.items()),
    ]
