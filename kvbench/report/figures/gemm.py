"""Times of the linear layers' products by number of rows, and the rate at which their weights came; only where they were timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.records.record import OK
from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun

# What was timed beside what runs: sample, what it is called.
BESIDE = {"us_native": "16-bit F.linear", "us_reference": "reference path"}

_MOST = 6  # shapes a cell


@dataclass(frozen=True)
class ProductTimes:
    """One shape of one cell, N x K. rows: by M, (path, microseconds of what runs and of what was timed beside it); weights: bytes of one
    layer's codes and scales, by the formula; warm: how calls found their weights, in the runner's words; dropped: how many smaller shapes
    the cell has that are not shown."""

    name: str
    n: int
    k: int
    rows: tuple[tuple[int, str, Mapping[str, float]], ...]
    weights: int
    warm: str
    dropped: int


def product_times(run: JudgedRun, labels: Labels) -> tuple[ProductTimes, ...]:
    """Of quantized weights; the largest shapes of each cell first."""
    found = []
    for record, task in run.done():
        cells = [cell for cell in task.cells if cell in labels.cells]
        if record.runner != "gemm" or record.status != OK or not cells:
            continue
        timed = sorted(
            (product for product in record.samples["products"] if any(row.get("us_reference") for row in product["rows"])),
            key=lambda product: -product["n"] * product["k"],
        )  # fmt: skip
        name = labels.subject("gemm", cells[0]).text
        for product in timed[:_MOST]:
            rows = tuple((row["m"], row["path"], _times(row)) for row in product["rows"] if row.get("us"))
            warm = one_line(str(product.get("timed_with") or ""), 300)
            fmt, n, k = WEIGHT_FORMATS[record.spec["weights"]], product["n"], product["k"]
            held = weight_bytes(fmt, n, k, "bfloat16").total
            found.append(ProductTimes(name, n, k, rows, held, warm, len(timed) - len(timed[:_MOST])))
    return tuple(found)


def _times(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: row[key] for key in ("us", *BESIDE) if row.get(key)}
