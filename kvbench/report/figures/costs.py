"""The data of the figures of times, bytes and speed limits, from rows and records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import median
from typing import Any

from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.machine.same_machine import apart
from kvbench.metrics.collect import Row
from kvbench.metrics.latency import step_bytes
from kvbench.render.labels import Label
from kvbench.render.numbers import finite, one_line
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Interval, clustered_ratio, median_interval

STORED = ("payload", "scales", "page_table")
PARTS = (*STORED, "workspace", "held")
# The timed paths by their key in the record: the one that the cell uses first.
TIMED = {"us": "selected path", "us_native": "16-bit F.linear", "us_reference": "reference path"}

_MOST_BARS = 24  # more cells than that show only the largest shape
_MOST_DOTS = 400  # more requests cannot be told apart, and each adds text to the page
_MOST_SHAPES = 6  # of one cell
_LOG_FROM = 8  # a larger ratio of the largest to the smallest value takes a logarithmic axis

Arms = Sequence[Mapping[str, Any]]
Times = tuple[tuple[float, ...], Interval | None]  # one value per request, and an interval over them


@dataclass(frozen=True)
class TimePoint:
    """value, low, high, repeats: ms; repeats: one value per measured request; n: samples of the value."""

    batch: int
    context: int
    value: float
    low: float | None
    high: float | None
    repeats: tuple[float, ...]
    n: int | None = None


@dataclass(frozen=True)
class TimeSeries:
    """Cells that differ only in batch and context. apart: why their points are not joined, or ""."""

    name: str
    points: tuple[TimePoint, ...]
    apart: str = ""


@dataclass(frozen=True)
class ByteBar:
    """One cell's bytes; None: not measured.

    payload, scales, page_table: live tensors of the cache; workspace, held: `workspace_bytes` and
    `held_bytes`; native16: a 2-byte native cache of the same shape, by the formula.
    """

    name: str
    payload: int
    scales: int
    page_table: int | None = None
    workspace: int | None = None
    held: int | None = None
    native16: int | None = None


@dataclass(frozen=True)
class RoofPoint:
    """weights, cache: mean bytes read per step; itl, rate, share: rows of `itl_ms`, `decode_read_gb_s` and
    `decode_bandwidth_share` (without a value where its note gives a reason).
    """

    label: Label
    line: str
    weights: float
    cache: float
    itl: Row
    rate: Row
    share: Row | None


@dataclass(frozen=True)
class Roof:
    """copies: GB/s of each record that timed one; reason: why some have none; caches: device cache bytes."""

    points: tuple[RoofPoint, ...]
    copies: tuple[float, ...]
    reason: str
    caches: tuple[int, ...]

    @property
    def copy(self) -> float | None:
        """The median copy bandwidth over the records, GB/s."""
        return median(self.copies) if self.copies else None


@dataclass(frozen=True)
class ProductTimes:
    """One shape N x K of one cell. rows: (M, selected path, microseconds by key of `TIMED`); weights: bytes
    of one layer's codes and scales, by the formula; warm: the runner's description of the cache state;
    dropped: how many smaller shapes of the cell are left out.
    """

    name: str
    n: int
    k: int
    rows: tuple[tuple[int, str, Mapping[str, float]], ...]
    weights: int
    warm: str
    dropped: int


def _requests(metric: str, arms: Arms) -> Times:
    """Each request's time, and its interval: of the mean ITL a t-interval over requests; of the median TTFT
    one by order statistics, which takes at least 6 requests.
    """
    if metric == "ttft_ms":
        times = tuple(arm["ttft_ms"] for arm in arms)
        return times, median_interval(times)
    gaps = [arm["itl_ms"] for arm in arms if arm["itl_ms"]]
    if not gaps:
        return (), None
    sums, counts = [fsum(each) for each in gaps], [len(each) for each in gaps]
    whole = clustered_ratio(sums, counts, range(len(gaps)))
    return tuple(total / n for total, n in zip(sums, counts, strict=True)), whole.interval


def _candidate_arms(samples: Mapping[str, Any]) -> Arms:
    return [arm for arm in samples.get("arms", ()) if arm["arm"] == "candidate"]


def time_series(run: JudgedRun, metric: str) -> tuple[TimeSeries, ...]:
    """The points of `itl_ms` (mean) or `ttft_ms` (median)."""
    labels = run.labels
    found: dict[str, Times] = {}
    machines: dict[str, Mapping[str, Any]] = {}
    for record, _, cells in run.completed("latency"):
        found.update(dict.fromkeys(cells, _requests(metric, _candidate_arms(record.samples))))
        machines.update(dict.fromkeys(cells, record.environment))
    points: dict[str, list[TimePoint]] = {}
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    rows = [row for row in run.rows if row.metric == metric and row.cell in labels.cells]
    for row in sorted(rows, key=lambda row: labels.rank(labels.cell(row.cell))):
        if (value := finite(row.value)) is None:
            continue
        spec = labels.cells[row.cell].spec
        repeats, interval = found.get(row.cell, ((), None))
        low, high = (row.low, row.high) if row.low is not None else interval or (None, None)
        name = labels.cell(row.cell).without("batch", "context")
        point = TimePoint(spec["batch"], spec["context"], value, low, high, repeats, row.n)
        points.setdefault(name, []).append(point)
        hosts.setdefault(name, []).append(machines.get(row.cell, {}))
    return tuple(TimeSeries(name, tuple(own), apart(hosts[name])) for name, own in points.items())


def shapes(series: Sequence[TimeSeries]) -> tuple[list[int], list[int]]:
    """The batches and the contexts of all series, ascending."""
    points = [point for line in series for point in line.points]
    return sorted({p.batch for p in points}), sorted({p.context for p in points})


def wide(series: Sequence[TimeSeries]) -> bool:
    """Whether the values span so much that they need a logarithmic axis."""
    values = [point.value for line in series for point in line.points]
    return min(values) > 0 and max(values) > _LOG_FROM * min(values)


def crowded(series: Sequence[TimeSeries]) -> bool:
    """Whether there are too many single requests to draw."""
    return sum(len(point.repeats) for line in series for point in line.points) > _MOST_DOTS


def byte_bars(run: JudgedRun) -> tuple[tuple[ByteBar, ...], str]:
    """One bar per cell, or per cell of the largest shape if there are too many; and which cells these are."""
    labels, native16 = run.labels, dict[str, int]()
    for record, _, cells in run.completed("storage"):
        if record.facts.get("native16_bytes"):
            native16.update(dict.fromkeys(cells, record.facts["native16_bytes"]))
    sizes = {cell: each.spec["batch"] * each.spec["context"] for cell, each in labels.cells.items()}
    of, shown = "each cell", list(sizes)
    if len(shown) > _MOST_BARS:
        of, shown = "the largest cells", [cell for cell in shown if sizes[cell] == max(sizes.values())]
    found = {(row.cell, row.metric): row.value for row in run.rows}
    values = {key: int(value) for key, x in found.items() if (value := finite(x)) is not None}
    bars = []
    for label in sorted((labels.cell(cell) for cell in shown), key=labels.rank):
        cell = label.cells[0]
        payload, scales = (values.get((cell, f"kv_bytes_{part}")) for part in PARTS[:2])
        if payload is not None and scales is not None:
            table, workspace, held = (values.get((cell, f"{part}_bytes")) for part in PARTS[2:])
            bars.append(ByteBar(label.text, payload, scales, table, workspace, held, native16.get(cell)))
    return tuple(bars), of


def roof(run: JudgedRun) -> Roof | None:
    """The points of all cells with a timed decode step; None if there are none."""
    rows = {(row.cell, row.metric): row for row in run.rows}
    points: list[RoofPoint] = []
    copies: list[float] = []
    machines: list[Mapping[str, Any]] = []
    reasons: list[str] = []
    caches: set[int] = set()
    for record, _, cells in run.completed("latency"):
        arms, facts = _candidate_arms(record.samples), record.facts
        reads = facts.get("arms", {}).get("candidate", {}).get("reads")
        found = []
        for cell in cells if arms and reads else ():
            itl, rate = rows.get((cell, "itl_ms")), rows.get((cell, "decode_read_gb_s"))
            if itl and rate and all((finite(row.value) or 0) > 0 for row in (itl, rate)):
                label, share = run.labels.cell(cell), rows.get((cell, "decode_bandwidth_share"))
                line = label.without("batch", "context")
                found.append(RoofPoint(label, line, *step_bytes(arms[0], reads), itl, rate, share))
        points += found
        if found and facts.get("copy_gb_s"):
            copies.append(facts["copy_gb_s"])
            machines.append(record.environment)
        elif found:
            reasons.append(one_line(str(facts.get("copy_reason") or "it is not in the record"), 200))
        if found and facts.get("cache_bytes"):
            caches.add(facts["cache_bytes"])
    if not points:
        return None
    if separate := apart(machines):
        copies, reasons = [], [*reasons, f"the records that timed a copy {separate}"]
    points.sort(key=lambda point: run.labels.rank(point.label))
    return Roof(tuple(points), tuple(copies), "; ".join(dict.fromkeys(reasons)), tuple(sorted(caches)))


def product_times(run: JudgedRun) -> tuple[ProductTimes, ...]:
    """The timed shapes of quantized weights, the largest shapes of each cell first."""
    found = []
    for record, _, cells in run.completed("gemm"):
        timed = [p for p in record.samples["products"] if any(row.get("us_reference") for row in p["rows"])]
        timed.sort(key=lambda product: -product["n"] * product["k"])
        name, dropped = run.labels.subject("gemm", cells[0]).text, max(0, len(timed) - _MOST_SHAPES)
        for product in timed[:_MOST_SHAPES]:
            fmt, n, k = WEIGHT_FORMATS[record.spec["weights"]], product["n"], product["k"]
            rows = tuple(
                (row["m"], row["path"], {key: row[key] for key in TIMED if row.get(key)})
                for row in product["rows"]
                if row.get("us")
            )
            warm = one_line(str(product.get("timed_with") or ""), 300)
            size = weight_bytes(fmt, n, k, "bfloat16").total
            found.append(ProductTimes(name, n, k, rows, size, warm, dropped))
    return tuple(found)
