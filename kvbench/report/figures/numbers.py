"""The tables of numbers next to plots and below metric tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.metrics.declare.units import BYTES, CODES, ERROR, GB_PER_S, LOGIT, MS, NAT, SHARE, Unit
from kvbench.render.numbers import Shown, shown, shown_row
from kvbench.report.figures.agreement import AgreementLine
from kvbench.report.figures.divergence import LEVELS, KldLine
from kvbench.report.figures.drilldown import Chunks, Questions
from kvbench.report.figures.health import HealthLine
from kvbench.report.figures.sensitivity import LayerLine
from kvbench.report.figures.series import ByteBar, TimeSeries
from kvbench.report.figures.speed import TIMED, ProductTimes, Roof, RoofPoint
from kvbench.stats.intervals import Estimate

PART_NAMES = {
    "payload": "payload",
    "scales": "scales",
    "page_table": "page tables",
    "workspace": "workspace",
    "held": "other device memory",
}

_MOST_LAYERS = 120  # rows of all health tables together
_MOST_REQUESTS = 12  # times of single requests in a row

_MB, _US = Unit("MB", "10^6 bytes"), Unit("µs", "microseconds")
_BLANK = Shown("–", state="missing")

Cell = str | Shown
Row = tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """summary: shown while the table is closed; note: how to read it; rows: the first cell is the row
    heading.
    """

    summary: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def bytes_table(bars: Sequence[ByteBar]) -> Grid:
    """The bytes of each cell, without columns that no cell measured."""
    names = {**PART_NAMES, "native16": "16-bit native"}
    keys = [key for key in names if any(getattr(bar, key) is not None for bar in bars)]
    rows: list[Row] = [(bar.name, *(shown(getattr(bar, key), BYTES) for key in keys)) for bar in bars]
    note = (
        "Payload, scales and page tables are live tensors. Workspace is the peak memory that a prefill and a "
        "decode step allocated temporarily. Other device memory was allocated before the pages, without the "
        "weights; it includes engines of earlier cells. Both are measured on GPUs only. 16-bit native is "
        "computed by the formula."
    )
    return Grid("The bytes in numbers", note, ("Cell", *(names[key] for key in keys)), tuple(rows))


def times(series: Sequence[TimeSeries], name: str) -> Grid:
    """Each point of a plot of times, with the single requests."""
    rows: list[Row] = []
    for line in series:
        for p in sorted(line.points, key=lambda p: (p.batch, p.context)):
            value = shown(p.value, MS, low=p.low, high=p.high, n=p.n)
            rows.append((line.name, f"{p.batch:,}", f"{p.context:,}", value, _requests(p.repeats)))
    note = (
        f"{name} with its 95% interval [low, high] over requests; n is the number of samples. Ratios to the "
        "baseline are paired and are in the table of latencies."
    )
    columns = ("Format", "Batch", "Context", f"{name} (ms)", "Each request (ms)")
    return Grid(f"{name} in numbers", note, columns, tuple(rows))


def _requests(repeats: Sequence[float]) -> str:
    text = "; ".join(shown(each, MS).text for each in repeats[:_MOST_REQUESTS])
    return text if len(repeats) <= _MOST_REQUESTS else f"{text}; ... {len(repeats):,} in all"


def roof(of: Roof) -> Grid:
    """Bytes, time and read rate of each cell's decode step."""
    rows: list[Row] = []
    for p in of.points:
        weights, cache = shown(p.weights / 1e6, _MB), shown(p.cache / 1e6, _MB)
        rows.append((p.label.text, weights, cache, shown_row(p.itl), shown_row(p.rate), _copy_share(p)))
    note = (
        "The least bytes that a step must read, averaged over its steps; MB = 10^6 B, GB/s = 10^9 B/s; n is "
        "the number of steps. The share counts only what does not fit into the device's cache."
    )
    columns = (
        "Cell",
        "Weights per step",
        "Cache per step",
        "ITL mean",
        "Read rate",
        "Share of copy bandwidth",
    )
    return Grid("Bytes and bandwidth of a step in numbers", note, columns, tuple(rows))


def _copy_share(point: RoofPoint) -> Cell:
    if point.share is None:
        return "not measured"
    return shown_row(point.share) if point.share.value is not None else point.share.note


def products(found: Sequence[ProductTimes]) -> Grid:
    """Each shape and number of rows: the times of all paths, and the rate of reading the weights."""
    rows: list[Row] = []
    for p in found:
        for m, path, calls in p.rows:
            rate = shown(p.weights / calls["us"] / 1e3 if "us" in calls else None, GB_PER_S)
            measured = (shown(calls.get(key), _US) for key in TIMED)
            rows.append((f"{p.name} {p.n} x {p.k}", f"{m:,}", path, *measured, rate))
    columns = (
        "Product",
        "Rows",
        "Path",
        *(name.capitalize() for name in TIMED.values()),
        "Weights read rate",
    )
    note = (
        "Median device time per call. Weights read rate: codes and scales of one layer divided by the time; "
        "it can exceed the memory bandwidth if the weights come from a cache."
    )
    return Grid("Times of the products in numbers", note, columns, tuple(rows))


def kld(lines: Sequence[KldLine]) -> Grid:
    """The KLD percentiles of each cell."""
    rows: list[Row] = []
    for line in lines:
        values = (shown_row(line.rows[metric]) if metric in line.rows else _BLANK for metric in LEVELS)
        variant, partial = (
            f" · {line.variant}" * bool(line.variant),
            f" ({line.partial})" * bool(line.partial),
        )
        rows.append((f"{line.name}{variant}{partial}", *values))
    note = "Nat per token; [low, high] is a 95% interval over documents if there is one; n counts the tokens."
    columns = ("Cell", *(f"{name} (nat)" for name in LEVELS.values()))
    return Grid("The percentiles in numbers", note, columns, tuple(rows))


def layers(line: LayerLine) -> Grid:
    """KLD by layer: quantized alone, and saved by keeping it native."""
    rows = tuple(
        (str(i), _estimated(alone, line.tokens), _estimated(gain, line.tokens, signed=True))
        for i, (alone, gain) in enumerate(zip(line.alone, line.gains, strict=True))
    )
    note = "Mean KLD per token; [low, high] is a 95% interval over texts; n counts the tokens."
    return Grid(
        f"Each layer of {line.name} in numbers", note, ("Layer", "Quantized alone", "Saved by native"), rows
    )


def agreement(lines: Sequence[AgreementLine]) -> Grid:
    """The share of agreement and the first divergence of each line."""
    words = {True: "real", False: "near-tie", None: "not known"}
    rows: list[Row] = []
    for line in lines:
        share = shown_row(line.share) if line.share else _BLANK
        if line.first is None:
            first: Row = ("not applicable" if line.again else f"none in {line.steps:,}", _BLANK, "–")
        else:
            first = (f"step {line.first:,}", shown(line.margin, LOGIT), words[line.real])
        rows.append((line.name, share, *first))
    columns = (
        "Given native's text",
        "Steps that agree (A/A: that differ)",
        "First divergence",
        "Native's top-2 margin there",
        "Divergence is",
    )
    note = (
        "[low, high] is a 95% interval over blocks of steps; n counts the steps. Steps are numbered from 0."
    )
    return Grid("Agreement in numbers", note, columns, tuple(rows))


def health(lines: Sequence[HealthLine]) -> tuple[Grid, ...]:
    """One table per cell, cut to the layers with the largest error if all of them would be too long."""
    most = max(10, _MOST_LAYERS // len(lines))
    return tuple(_health(line, most) for line in lines)


def _health(line: HealthLine, most: int) -> Grid:
    def error(layer: int) -> float:
        sides = (line.sides.get((layer, side)) for side in ("k", "v"))
        return max(float(side["error"]) for side in sides if side)

    kept, total = line.layers, len(line.layers)
    cut = f"{total} layers"
    if total > most:
        kept = tuple(sorted(line.layers, key=lambda i: (-error(i), i))[:most])
        cut = f"the {most} layers with the largest error of {total}"
    rows: list[Row] = []
    for layer in kept:
        for side in ("k", "v"):
            if found := line.sides.get((layer, side)):
                n = found["elements"]
                shares = (shown(found[key] / n if n else None, SHARE) for key in ("clipped", "flushed"))
                codes = shown(found["codes_used"], CODES) if found["codes_used"] else _BLANK
                scales = (shown(found[key]) if found[key] else _BLANK for key in ("scale_min", "scale_max"))
                measured = (shown(found["amax"], n=n), shown(found["error"], ERROR))
                rows.append((f"{layer} {side.upper()}", *measured, *shares, codes, *scales))
    columns = (
        "Layer",
        "amax",
        "Round-trip error",
        "Clipped",
        "Flushed to 0",
        "Codes used",
        "Smallest scale",
        "Largest scale",
    )
    tokens = f" of a text of {line.tokens:,} tokens" if line.tokens else ""
    note = (
        f"K and V{tokens}; n counts the elements. The error is a share of the norm; clipped and flushed are "
        "shares of the elements."
    )
    return Grid(f"Layers of {line.name} in numbers: {cut}", note, columns, tuple(rows))


def positions(of: Chunks) -> Grid:
    """NLL delta and KLD by position inside a chunk."""
    rows: list[Row] = []
    for p in of.positions:
        divergence = (_estimated(p.kld, p.tokens), shown(p.most, NAT)) if p.kld else ()
        rows.append((f"{p.low} to {p.high}", _estimated(p.delta, p.tokens, signed=True), *divergence))
    with_kld = of.positions[0].kld is not None
    columns = ("Position", "NLL delta", *(("KLD mean", "Largest KLD") if with_kld else ()))
    note = (
        "Scored tokens by their position in a chunk; nat per token; [low, high] is a 95% interval over "
        f"{of.documents} documents; n counts the tokens."
    )
    if not with_kld:
        note += " There is no KLD by position, because the record keeps only a sample of the tokens."
    return Grid(f"By position: {of.subject.text}", note, columns, tuple(rows))


def _estimated(of: Estimate, n: int, signed: bool = False) -> Shown:
    low, high = of.interval or (None, None)
    return shown(of.value, NAT, low=low, high=high, n=n, signed=signed)


def chunks(of: Chunks) -> Grid:
    """The chunks that changed most."""
    rows: list[Row] = []
    for c in of.lines:
        nll = (shown(c.native_nll, NAT, n=c.tokens), shown(c.nll, NAT), shown(c.delta, NAT, signed=True))
        rows.append((f"{c.index}", c.document, *nll, shown(c.kld, NAT), shown(c.equal, SHARE)))
    some = f"the worst {len(rows)} of {of.total:,}" if len(rows) < of.total else f"all {of.total:,}"
    columns = ("Chunk", "Document", "Native NLL", "NLL", "NLL delta", "KLD mean", "Same top-1")
    order = "KLD" if any(c.kld is not None for c in of.lines) else "NLL delta"
    note = (
        f"Sorted by {order}, worst first; nat per token; n counts the scored tokens. A single chunk has no "
        "interval. Chunks are numbered from 0 in the order of the text."
    )
    return Grid(f"By chunk, {some}: {of.subject.text}", note, columns, tuple(rows))


def questions(of: Questions) -> Grid:
    """The questions whose picks or scores changed most."""
    words = {True: "beyond noise", False: "near-tie", None: "noise not known"}
    rows: list[Row] = []
    for q in of.lines:
        change = f"{q.change} ({words[q.real]})" if q.change else "same pick"
        margins = (shown(x if math.isfinite(x) else None, NAT) for x in (q.native_margin, q.margin))
        rows.append((q.id, q.subject, q.gold, q.native, q.own, change, *margins, shown(q.moved, NAT)))
    columns = (
        "Question",
        "Subject",
        "Answer",
        "Native picks",
        "Candidate picks",
        "Change",
        "Native's margin",
        "Candidate's margin",
        "Score changed by",
    )
    noise = f"The noise is not known: {of.why}."
    if of.noise is not None:
        noise = f"Native's own scores change by up to {of.noise:.3g} nat when they are computed again."
    note = (
        "Changed picks first, right to wrong before the others, then by the largest change of a choice's "
        f"score. Margin: summed logprob of the pick over the next best choice. {noise}"
    )
    cut = f"{len(rows)} of {of.total:,} shown" if len(rows) < of.total else f"all {of.total:,} shown"
    summary = f"Questions of {of.subject.text}: {of.flips:,} of {of.total:,} picks differ, {cut}"
    return Grid(summary, note, columns, tuple(rows))
