"""The tables of numbers that stand beside plots and below metric tables: what each shows, in which unit, out of how many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.metrics.declare.units import BYTES, CODES, ERROR, GB_PER_S, LOGIT, MS, NAT, SHARE, Unit
from kvbench.render.numbers import Shown, shown, shown_row
from kvbench.report.figures.agreement import AgreementLine
from kvbench.report.figures.divergence import LEVELS, KldLine
from kvbench.report.figures.drilldown import Chunks, Questions
from kvbench.report.figures.gemm import BESIDE, ProductTimes
from kvbench.report.figures.health import HealthLine
from kvbench.report.figures.roofline import Roof
from kvbench.report.figures.sensitivity import LayerLine
from kvbench.report.figures.series import ByteBar, TimeSeries
from kvbench.stats.intervals import Estimate

PART_NAMES = {
    "payload": "payload",
    "scales": "scales",
    "page_table": "page tables",
    "workspace": "workspace",
    "held": "held beside the weights",
}

# Layers of all cells' tables of health together; of more, each table has its worst.
_MOST_LAYERS = 120

# Requests of a cell that are written out.
_MOST_REQUESTS = 12

_MB, _US = Unit("MB", "10^6 bytes"), Unit("µs", "microseconds")
_BLANK = Shown("–", state="missing")

Cell = str | Shown
Row = tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """summary: what stands on it while it is closed; note: how to read it; rows: the first cell of each is its heading."""

    summary: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def bytes_table(bars: Sequence[ByteBar]) -> Grid:
    """What no cell measured has no column."""
    names = {**PART_NAMES, "native16": "16-bit native"}
    shown_of = [key for key in names if any(getattr(bar, key) is not None for bar in bars)]
    rows: tuple[Row, ...] = tuple(
        (bar.name, *(shown(getattr(bar, key), BYTES) for key in shown_of)) for bar in bars
    )
    note = (
        "Payload, scales and page tables are live tensors. Workspace: the most that a prefill and a step took beyond what was there before; held: what "
        "was on the device before there were pages, less the weights, earlier cells' engines among it. Both are counted on a GPU alone. 16-bit native is the formula's."
    )
    return Grid("The bytes in numbers", note, ("Cell", *(names[key] for key in shown_of)), rows)


def times(series: Sequence[TimeSeries], name: str) -> Grid:
    rows: tuple[Row, ...] = tuple(
        (
            line.name, f"{p.batch:,}", f"{p.context:,}", shown(p.value, MS, low=p.low, high=p.high, n=p.n),
            _each(p.repeats),
        )
        for line in series for p in sorted(line.points, key=lambda p: (p.batch, p.context))
    )  # fmt: skip
    note = f"{name}, [low, high] its 95% interval over requests, n the samples of the value. Ratios to the baseline stand in the table of latencies: they are paired."
    return Grid(
        f"{name} in numbers", note, ("Format", "Batch", "Context", f"{name} (ms)", "Each request (ms)"), rows
    )


def _each(repeats: Sequence[float]) -> str:
    """The first requests one by one, and how many there are where these are not all."""
    text = "; ".join(shown(each, MS).text for each in repeats[:_MOST_REQUESTS])
    return text if len(repeats) <= _MOST_REQUESTS else f"{text}; ... {len(repeats):,} in all"


def roof(of: Roof) -> Grid:
    rows: tuple[Row, ...] = tuple(
        (
            p.label.text, shown(p.weights / 1e6, _MB), shown(p.cache / 1e6, _MB), shown_row(p.itl), shown_row(p.rate),
            shown_row(p.share) if p.share and p.share.value is not None else (p.share.note if p.share else "not measured"),
        )
        for p in of.points
    )  # fmt: skip
    columns = ("Cell", "Weights a step", "Cache a step", "ITL mean", "Read at", "Share of copy bandwidth")
    note = "Bytes that a step must read at the least, in the mean over its steps; 1 MB is 10^6 B, 1 GB/s 10^9 B a second. n is the steps. The share is of what does not fit the device's cache."
    return Grid("Bytes and bandwidth of a step in numbers", note, columns, rows)


def products(found: Sequence[ProductTimes]) -> Grid:
    rows: tuple[Row, ...] = tuple(
        (
            f"{p.name} {p.n} x {p.k}", f"{m:,}", path, *(shown(times.get(key), _US) for key in ("us", *BESIDE)),
            shown(p.weights / times["us"] / 1e3 if "us" in times else None, GB_PER_S),
        )
        for p in found for m, path, times in p.rows
    )  # fmt: skip
    columns = (
        "Product",
        "Rows",
        "Path",
        "What runs",
        *(f"{name}" for name in BESIDE.values()),
        "Weights read at",
    )
    note = "Medians of device time a call. Weights read at: codes and scales of one layer over the time; where they come out of a cache it may exceed the memory's bandwidth."
    return Grid("Times of the products in numbers", note, columns, rows)


def kld(lines: Sequence[KldLine]) -> Grid:
    rows: tuple[Row, ...] = tuple(
        (f"{line.name}{f' · {line.variant}' if line.variant else ''}{f' ({line.partial})' if line.partial else ''}",
         *(shown_row(line.rows[metric]) if metric in line.rows else _BLANK for metric in LEVELS))
        for line in lines
    )  # fmt: skip
    note = "nat a token; [low, high] is a 95% interval over documents where one exists, n the tokens."
    return Grid(
        "The percentiles in numbers", note, ("Cell", *(f"{name} (nat)" for name in LEVELS.values())), rows
    )


def layers(line: LayerLine) -> Grid:
    rows: tuple[Row, ...] = tuple(
        (str(i), _estimated(alone, line.tokens), _estimated(gain, line.tokens, signed=True))
        for i, (alone, gain) in enumerate(zip(line.alone, line.gains, strict=True))
    )  # fmt: skip
    note = "Mean KLD a token; [low, high] is a 95% interval over texts, n the tokens."
    return Grid(
        f"Each layer of {line.name} in numbers", note, ("Layer", "Quantized alone", "Gained by native"), rows
    )


def agreement(lines: Sequence[AgreementLine]) -> Grid:
    words = {True: "real", False: "near-tie", None: "not known"}
    rows: tuple[Row, ...] = tuple(
        (
            line.name, shown_row(line.share) if line.share else _BLANK,
            "not asked" if line.again else f"none in {line.steps:,}" if line.first is None else f"step {line.first:,}",
            shown(line.margin, LOGIT) if line.first is not None else _BLANK,
            words[line.real] if line.first is not None else "–",
        )
        for line in lines
    )  # fmt: skip
    columns = (
        "Read along native's text",
        "Steps that agree (A/A: that flip)",
        "First divergence",
        "Native's top-2 margin there",
        "Divergence is",
    )
    note = "[low, high] is a 95% interval over blocks of steps, n the steps. Steps count from 0."
    return Grid("Agreement in numbers", note, columns, rows)


def health(lines: Sequence[HealthLine]) -> tuple[Grid, ...]:
    """A table a cell, whole, or with the layers that lost most where all of them would be too many lines."""
    most = max(10, _MOST_LAYERS // len(lines))
    return tuple(_health(line, most) for line in lines)


def _health(line: HealthLine, most: int) -> Grid:
    def error(layer: int) -> float:
        return max(
            (line.sides[layer, side]["error"] for side in ("k", "v") if (layer, side) in line.sides),
            default=0.0,
        )

    kept = (
        line.layers if len(line.layers) <= most else sorted(line.layers, key=lambda i: (-error(i), i))[:most]
    )
    rows: list[Row] = []
    for layer in kept:
        for side in ("k", "v"):
            if found := line.sides.get((layer, side)):
                n = found["elements"]
                rows.append((
                    f"{layer} {side.upper()}", shown(found["amax"], n=n), shown(found["error"], ERROR),
                    *(shown(found[key] / n if n else None, SHARE) for key in ("clipped", "flushed")),
                    shown(found["codes_used"], CODES) if found["codes_used"] else _BLANK,
                    *(shown(found[key]) if found[key] else _BLANK for key in ("scale_min", "scale_max")),
                ))  # fmt: skip
    cut = (
        f"the {most} layers with the largest error of {len(line.layers)}"
        if len(kept) < len(line.layers)
        else f"{len(kept)} layers"
    )
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
    note = f"K and V{tokens}; n the elements of each. Error is a share of the norm, clipped and flushed are shares of the elements."
    return Grid(f"Layers of {line.name} in numbers: {cut}", note, columns, tuple(rows))


def positions(of: Chunks) -> Grid:
    rows: list[Row] = []
    for p in of.positions:
        row: list[Cell] = [f"{p.low} to {p.high}", _estimated(p.delta, p.tokens, signed=True)]
        row += [_estimated(p.kld, p.tokens), shown(p.most, NAT)] if p.kld else []
        rows.append(tuple(row))
    columns = ("Position", "NLL delta", *(("KLD mean", "Largest KLD") if of.positions[0].kld else ()))
    note = f"Scored tokens by their place in a chunk; nat a token, [low, high] a 95% interval over {of.documents} documents, n the tokens."
    if not of.positions[0].kld:
        note += " The record does not hold the KLD of every token, so there is none by position."
    return Grid(f"By position: {_where(of)}", note, columns, tuple(rows))


def _estimated(of: Estimate, n: int, signed: bool = False) -> Shown:
    low, high = of.interval or (None, None)
    return shown(of.value, NAT, low=low, high=high, n=n, signed=signed)


def chunks(of: Chunks) -> Grid:
    rows: tuple[Row, ...] = tuple(
        (
            f"{c.index}", c.document, shown(c.native_nll, NAT, n=c.tokens), shown(c.nll, NAT), shown(c.delta, NAT, signed=True),
            shown(c.kld, NAT), shown(c.equal, SHARE),
        )
        for c in of.lines
    )  # fmt: skip
    some = f"the worst {len(rows)} of {of.total:,}" if len(rows) < of.total else f"all {of.total:,}"
    columns = ("Chunk", "Document", "Native NLL", "NLL", "NLL delta", "KLD mean", "Same top-1")
    by = "KLD" if any(c.kld is not None for c in of.lines) else "NLL delta"
    note = f"Worst {by} first; nat a token, n the scored tokens. One chunk has no interval. Chunks count from 0 in the order of the text."
    return Grid(f"By chunk, {some}: {_where(of)}", note, columns, rows)


def questions(of: Questions) -> Grid:
    words = {True: "beyond noise", False: "near-tie", None: "noise not known"}
    rows: tuple[Row, ...] = tuple(
        (
            q.id, q.subject, q.gold, q.native, q.own, f"{q.change} ({words[q.real]})" if q.change else "same pick",
            *(shown(x if math.isfinite(x) else None, NAT) for x in (q.native_margin, q.margin)), shown(q.moved, NAT),
        )
        for q in of.lines
    )  # fmt: skip
    columns = (
        "Question",
        "Subject",
        "Gold",
        "Native picks",
        "Candidate picks",
        "Change",
        "Native's margin",
        "Candidate's margin",
        "Score moved by",
    )
    noise = (
        f"Native's own scores move by up to {of.noise:.3g} nat when it is scored again."
        if of.noise is not None
        else f"Noise is not known: {of.why}."
    )
    cut = f"{len(rows)} of {of.total:,} shown" if len(rows) < of.total else f"all {of.total:,} shown"
    note = f"Changed picks first, right to wrong before the others, then by how far a choice's score moved. Margin: summed logprob of the pick over the next best. {noise}"
    return Grid(
        f"Questions of {_where(of)}: {of.flips:,} of {of.total:,} picks differ, {cut}", note, columns, rows
    )


def _where(of: Chunks | Questions) -> str:
    name = f"{of.name} · {of.variant}" if of.variant else of.name
    return f"{name} ({of.partial})" if of.partial else name
