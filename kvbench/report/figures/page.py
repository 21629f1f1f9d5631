"""The figures of a page: each a drawing, its caption and its numbers. Drill-downs are numbers alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.metrics.declare.units import BYTES, CODES, ERROR, GB_PER_S, LOGIT, MS, SHARE, Unit
from kvbench.render.numbers import Shown, one_line, shown, shown_row
from kvbench.render.svg import COLOURS, mark
from kvbench.report.figures import plots
from kvbench.report.figures.costs import PARTS, STORED, TIMED, TimeSeries, crowded, wide
from kvbench.report.figures.drilldown import Grid, Row, chunk_grid, nat, position_grid, question_grid
from kvbench.report.figures.quality import LEVELS, AgreementLine, HealthLine, Passage
from kvbench.report.view import View

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


@dataclass(frozen=True)
class Figure:
    """section: key of the table below it; legend: (mark, colour, name) per series; grids: its numbers;
    sentences: one per series, where there is more to explain; passages: (name, texts) to read.
    """

    section: str
    svg: str
    caption: str
    legend: tuple[tuple[str, int, str], ...] = ()
    grids: Sequence[Grid] = ()
    sentences: Sequence[str] = ()
    passages: Sequence[tuple[str, Passage]] = ()


def figures(view: View) -> tuple[Figure, ...]:
    """All figures, in their order within a section. One that cannot be drawn becomes a sentence."""
    found: list[Figure] = []
    for name, (section, of) in _DRAWN.items():
        if not getattr(view, name):
            continue
        try:
            found.append(of(view))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            why = one_line(f"{type(e).__name__}: {e}", 200)
            found.append(Figure(section, "", f"A plot is missing: its numbers cannot be drawn ({why})."))
    return tuple(found)


def _legend(names: Sequence[str]) -> tuple[tuple[str, int, str], ...]:
    return tuple((mark(i), i % COLOURS, name) for i, name in enumerate(names))


def _bytes(view: View) -> Figure:
    bars = view.bytes
    drawn = [part for part in (*STORED, "workspace") if any(getattr(bar, part) for bar in bars)]
    caption = f"Bytes of {view.bytes_of}: stored for the cache, stacked by part; the sum is next to the bar."
    if any(bar.native16 for bar in bars):
        caption += " The vertical line is a 16-bit native cache of the same shape, by the formula."
    if "workspace" in drawn:
        caption += " Workspace is the peak memory that a prefill and a decode step allocated temporarily."
    elif all(bar.workspace is None for bar in bars):
        caption += " Workspace is not measured on this device."
    svg = plots.bytes_svg(bars, f"Bytes of {view.bytes_of} for the cache, by part, and a 16-bit native cache")
    legend = tuple(("■", PARTS.index(part), PART_NAMES[part]) for part in drawn)
    names = {**PART_NAMES, "native16": "16-bit native"}
    keys = [key for key in names if any(getattr(bar, key) is not None for bar in bars)]  # of some cell
    rows: list[Row] = [(bar.name, *(shown(getattr(bar, key), BYTES) for key in keys)) for bar in bars]
    note = (
        "Payload, scales and page tables are live tensors. Workspace is the peak memory that a prefill and a "
        "decode step allocated temporarily. Other device memory was allocated before the pages, without the "
        "weights; it includes engines of earlier cells. Both are measured on GPUs only. 16-bit native is "
        "computed by the formula."
    )
    grid = Grid("The bytes in numbers", note, ("Cell", *(names[key] for key in keys)), rows)
    return Figure("storage", svg, caption, legend, (grid,))


_OWN_REQUESTS = (
    "Native's line shows the requests of its own cell; ratios are computed from interleaved pairs of "
    "requests, so they can differ."
)


def _itl(view: View) -> Figure:
    return _time("ITL mean", view.itl, "itl", "95% t-intervals over requests")


def _ttft(view: View) -> Figure:
    return _time("TTFT median", view.ttft, "ttft", "95% intervals of the median, which need 6 requests")


def _time(name: str, series: Sequence[TimeSeries], key: str, bars: str) -> Figure:
    svg = plots.times_svg(series, key, f"{name} (ms)", f"{name} by context and batch, one line per format")
    caption = f"{name} by context and batch. Bars: {bars}."
    caption += "" if crowded(series) else " Dots: single requests."
    caption += f" {_OWN_REQUESTS}"
    caption += " The axis is logarithmic." if wide(series) else ""
    caption += "".join(f" Points of {s.name} are not joined: they {s.apart}." for s in series if s.apart)
    rows: list[Row] = []
    for line in series:
        for p in sorted(line.points, key=lambda p: (p.batch, p.context)):
            each = "; ".join(shown(time, MS).text for time in p.repeats[:_MOST_REQUESTS])
            each += f"; ... {len(p.repeats):,} in all" if len(p.repeats) > _MOST_REQUESTS else ""
            value = shown(p.value, MS, (p.low, p.high), p.n)
            rows.append((line.name, f"{p.batch:,}", f"{p.context:,}", value, each))
    note = (
        f"{name} with its 95% interval [low, high] over requests; n is the number of samples. Ratios to the "
        "baseline are paired and are in the table of latencies."
    )
    columns = ("Format", "Batch", "Context", f"{name} (ms)", "Each request (ms)")
    grid = Grid(f"{name} in numbers", note, columns, rows)
    return Figure("latency", svg, caption, _legend([line.name for line in series]), (grid,))


def _roof(view: View) -> Figure:
    roof = view.roof
    assert roof
    caption = "The bytes that a decode step reads (weights, and the cache at its mean length), and its time."
    if roof.copy is not None:
        spread = ""
        if len(roof.copies) > 1:
            low, high = min(roof.copies), max(roof.copies)
            spread = f", median of {len(roof.copies)} records from {low:,.4g} to {high:,.4g}"
        caption += (
            " The line is the shortest possible time at the copy bandwidth measured on this device, "
            f"{roof.copy:,.4g} GB/s read and written{spread}. The distance of a point above the line is time "
            "not spent on reading."
        )
        if roof.caches:
            caption += f" Reads that fit into the cache of {roof.caches[-1]:,} B can be below the line."
    if roof.reason:
        what = "The copy bandwidth of some cells is" if roof.copy else "The copy bandwidth is"
        caption += f" {what} not known: {roof.reason}."
    svg = plots.roof_svg(roof, "Time of a decode step over the bytes that it must read, by cell")
    legend = _legend(list(dict.fromkeys(point.line for point in roof.points)))
    rows: list[Row] = []
    for p in roof.points:
        share = p.share and (shown_row(p.share) if p.share.value is not None else p.share.note)
        reads = (shown(size / 1e6, _MB) for size in (p.weights, p.cache))
        rows.append((p.label.text, *reads, shown_row(p.itl), shown_row(p.rate), share or "not measured"))
    note = (
        "The least bytes that a step must read, averaged over its steps; MB = 10^6 B, GB/s = 10^9 B/s; n is "
        "the number of steps. The share counts only what does not fit into the device's cache."
    )
    names = ("Weights per step", "Cache per step", "ITL mean", "Read rate", "Share of copy bandwidth")
    grid = Grid("Bytes and bandwidth of a step in numbers", note, ("Cell", *names), rows)
    return Figure("latency", svg, caption, legend, (grid,))


def _products(view: View) -> Figure:
    products = view.products
    warm = dict.fromkeys(f" {p.n} x {p.k}: {p.warm}." for p in products if p.warm)
    caption = f"Time of one call by rows of its input, one panel per shape (N x K).{''.join(warm)}"
    if dropped := sum({product.name: product.dropped for product in products}.values()):
        caption += f" {dropped} smaller shapes are not shown."
    svg = plots.products_svg(products, "Time of the linear layers' products by number of rows, by shape")
    rows: list[Row] = []
    for p in products:
        for m, path, calls in p.rows:
            rate = shown(p.weights / calls["us"] / 1e3 if "us" in calls else None, GB_PER_S)
            measured = (shown(calls.get(key), _US) for key in TIMED)
            rows.append((f"{p.name} {p.n} x {p.k}", f"{m:,}", path, *measured, rate))
    timed = (name.capitalize() for name in TIMED.values())
    note = (
        "Median device time per call. Weights read rate: codes and scales of one layer divided by the time; "
        "it can exceed the memory bandwidth if the weights come from a cache."
    )
    columns = ("Product", "Rows", "Path", *timed, "Weights read rate")
    grid = Grid("Times of the products in numbers", note, columns, rows)
    return Figure("gemm", svg, caption, _legend(list(TIMED.values())), (grid,))


def _sweep(view: View) -> Figure:
    sweep = view.sweep
    assert sweep
    svg = plots.scale_svg(sweep, "Perplexity delta and useful tokens by static scale")
    caption = (
        f"{sweep.sentence} An open marker means that the text neither repeated itself nor ended within its "
        "length. Horizontal lines are cells without a single scale."
    )
    return Figure(view.sweep_at, svg, caption, _legend([line.name for line in sweep.all]))


def _kld(view: View) -> Figure:
    lines = view.kld
    caption = (
        "KLD from native's next-token distribution to the candidate's: percentiles over the scored tokens, "
        "log axis. Bars: 95% intervals over documents; the maximum has none."
    )
    if any(row.value is not None and not row.value > 0 for line in lines for row in line.rows.values()):
        caption += " A percentile of 0 cannot be drawn on a log axis; it is in the table."
    svg = plots.kld_svg(lines, "KLD percentiles by cell, log axis")
    rows: list[Row] = []
    for line in lines:
        name = f"{line.name} · {line.variant}" if line.variant else line.name
        values = (shown_row(line.rows[metric]) if metric in line.rows else _BLANK for metric in LEVELS)
        rows.append((f"{name} ({line.partial})" if line.partial else name, *values))
    note = "Nat per token; [low, high] is a 95% interval over documents if there is one; n counts the tokens."
    columns = ("Cell", *(f"{name} (nat)" for name in LEVELS.values()))
    grid = Grid("The percentiles in numbers", note, columns, rows)
    return Figure("quality", svg, caption, _legend(list(LEVELS.values())), (grid,))


def _layers(view: View) -> Figure:
    lines = view.layers
    svg = plots.layers_svg(lines, "KLD by layer: quantized alone, and saved by keeping it native")
    caption = "KLD by layer. Bars: 95% intervals over texts, cut at the edge of the panel."
    note = "Mean KLD per token; [low, high] is a 95% interval over texts; n counts the tokens."
    grids = []
    for line in lines:
        pairs = enumerate(zip(line.alone, line.gains, strict=True))
        rows = [(str(i), nat(a, line.tokens), nat(b, line.tokens, sign=True)) for i, (a, b) in pairs]
        columns = ("Layer", "Quantized alone", "Saved by native")
        grids.append(Grid(f"Each layer of {line.name} in numbers", note, columns, rows))
    sentences = [f"{line.name}: {line.sentence}." for line in lines]
    return Figure("sensitivity", svg, caption, _legend([line.name for line in lines]), grids, sentences)


def _agreement(view: View) -> Figure:
    lines = view.agreement
    caption = (
        "The share of steps so far on which the candidate picks native's token, given native's text. A large "
        "marker is the first divergence: filled if it is real, open if it is a near-tie or not known to be "
        "real. A dashed line is native compared with itself."
    )
    svg = plots.agreement_svg(lines, "Teacher-forced agreement with native by step")
    first = [(line, line.first, line.passage) for line in lines]
    passages = [(f"{x.name}, step {n:,}", text) for x, n, text in first if text and n is not None]
    note = "[low, high] is a 95% interval over blocks of steps; n counts the steps, numbered from 0."
    columns = (
        *("Given native's text", "Steps that agree (A/A: that differ)", "First divergence"),
        *("Native's top-2 margin there", "Divergence is"),
    )
    grid = Grid("Agreement in numbers", note, columns, [_agreement_row(line) for line in lines])
    legend, sentences = _legend([line.name for line in lines]), [f"{x.name} {x.sentence}." for x in lines]
    return Figure("agreement", svg, caption, legend, (grid,), sentences, passages)


def _agreement_row(line: AgreementLine) -> Row:
    name, share = line.name, shown_row(line.share) if line.share else _BLANK
    if line.first is None:
        return name, share, "not applicable" if line.again else f"none in {line.steps:,}", _BLANK, "–"
    word = {True: "real", False: "near-tie", None: "not known"}[line.real]
    return name, share, f"step {line.first:,}", shown(line.margin, LOGIT), word


def _health(view: View) -> Figure:
    lines = view.health
    sides = [side for line in lines for side in line.sides.values()]
    zero = [name.partition(" (")[0] for name, of, _ in plots.HEALTH_PANELS if not any(map(of, sides))]
    caption = "K (solid, filled) and V (dashed, open) by layer. In the range of scales, K is the wide bar."
    if zero:
        caption += f" Not drawn, because they are 0 in every layer: {', '.join(zero)}."
    svg = plots.health_svg(lines, "Numeric health of K and V by layer")
    grids = [_health_grid(line, max(10, _MOST_LAYERS // len(lines))) for line in lines]
    return Figure("health", svg, caption, _legend([line.name for line in lines]), grids)


def _health_grid(line: HealthLine, most: int) -> Grid:
    """The layers of a cell, or the `most` with the largest error."""

    def error(layer: int) -> float:
        return max(float(side["error"]) for (of, _), side in line.sides.items() if of == layer)

    kept, total = line.layers, len(line.layers)
    cut = f"{total} layers"
    if total > most:
        kept = tuple(sorted(line.layers, key=lambda i: (-error(i), i))[:most])
        cut = f"the {most} layers with the largest error of {total}"
    rows: list[Row] = []
    for layer, side in ((layer, side) for layer in kept for side in ("k", "v")):
        if found := line.sides.get((layer, side)):
            n = found["elements"]
            measured = (shown(found["amax"], n=n), shown(found["error"], ERROR))
            shares = (shown(found[key] / n if n else None, SHARE) for key in ("clipped", "flushed"))
            codes = shown(found["codes_used"], CODES) if found["codes_used"] else _BLANK
            scales = (shown(found[key]) if found[key] else _BLANK for key in ("scale_min", "scale_max"))
            rows.append((f"{layer} {side.upper()}", *measured, *shares, codes, *scales))
    columns = (
        *("Layer", "amax", "Round-trip error", "Clipped", "Flushed to 0", "Codes used"),
        *("Smallest scale", "Largest scale"),
    )
    tokens = f" of a text of {line.tokens:,} tokens" if line.tokens else ""
    note = (
        f"K and V{tokens}; n counts the elements. The error is a share of the norm; clipped and flushed are "
        "shares of the elements."
    )
    return Grid(f"Layers of {line.name} in numbers: {cut}", note, columns, rows)


# By the field of the view that is drawn, which is empty where nothing was measured: section and figure.
_DRAWN: Mapping[str, tuple[str, Callable[[View], Figure]]] = {
    "bytes": ("storage", _bytes),
    "itl": ("latency", _itl),
    "ttft": ("latency", _ttft),
    "roof": ("latency", _roof),
    "products": ("gemm", _products),
    "sweep": ("quality", _sweep),
    "kld": ("quality", _kld),
    "layers": ("sensitivity", _layers),
    "agreement": ("agreement", _agreement),
    "health": ("health", _health),
}


def drilldowns(view: View) -> Mapping[str, Sequence[Grid]]:
    """The tables below the table of each section."""
    found: dict[str, list[Grid]] = {}
    for chunks in view.chunks:
        grids = [position_grid(chunks)] if chunks.positions else []
        found.setdefault("quality", []).extend([*grids, chunk_grid(chunks)])
    if view.questions:
        found["mcq"] = list(map(question_grid, view.questions))
    return found
