"""Drill-downs: the questions whose pick changed, and the chunks and positions of a text that changed most.

Each list is sorted worst first and cut to keep the page small; it holds the full count.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvbench.metrics import mcq, perplexity
from kvbench.metrics.declare.units import NAT, SHARE
from kvbench.metrics.declare.value import incomparable
from kvbench.records.record import OK, Record
from kvbench.render.numbers import Shown, one_line, shown
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Estimate, clustered_mean, clustered_ratio, largest

NO_NUMBER, NO_CHANGE = "no number", ""
_CHANGES = (NO_NUMBER, "right to wrong", "wrong to right", "wrong to wrong", NO_CHANGE)  # worst first
_MOST, _MOST_IN_ALL = 25, 200  # lines of one list, and of all lists of a kind


Row = tuple[str | Shown, ...]


@dataclass(frozen=True)
class Grid:
    """A table of numbers. summary: shown while it is closed; rows: the first cell is the row heading."""

    summary: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True)
class QuestionLine:
    """gold, native, own: letters of the answer and of both picks; margin, native_margin: summed logprob of
    the pick over the next best choice, nat; moved: the largest change of a choice's score, nat; real: whether
    the change exceeds the baseline's own noise, None if that is not known.
    """

    id: str
    subject: str
    gold: str
    native: str
    own: str
    change: str
    native_margin: float
    margin: float
    moved: float
    real: bool | None


@dataclass(frozen=True)
class Questions:
    """subject: what was asked, with the part that was used: `int8_sym · mcq cloze (first 4 of 20)`; flips:
    changed picks of `total`; noise: how far the baseline's own scores move, nat, or None and `why`.
    """

    subject: str
    lines: tuple[QuestionLine, ...]
    flips: int
    total: int
    noise: float | None
    why: str


@dataclass(frozen=True)
class ChunkLine:
    """nll, native_nll, kld: nat per token; equal: share of equal top-1 picks; None: not measured."""

    index: int
    document: str
    tokens: int
    native_nll: float
    nll: float
    kld: float | None
    equal: float | None

    @property
    def delta(self) -> float:
        return self.nll - self.native_nll


@dataclass(frozen=True)
class PositionLine:
    """Positions low to high inside a chunk: NLL delta and KLD, nat per token, clustered by document. kld,
    most: None if the record keeps only a sample of the tokens.
    """

    low: int
    high: int
    tokens: int
    delta: Estimate
    kld: Estimate | None
    most: float | None


@dataclass(frozen=True)
class Chunks:
    """lines: the worst of `total` chunks by KLD, or by NLL delta if there is no KLD."""

    subject: str
    lines: tuple[ChunkLine, ...]
    total: int
    documents: int
    positions: tuple[PositionLine, ...]


def question_lists(run: JudgedRun) -> tuple[Questions, ...]:
    """One list per candidate and question set that is comparable and shares scored questions."""
    pairs = list(_pairs(run, "mcq", mcq.COMPARABLE))
    found = []
    for subject, record, native in pairs:
        noise, why = mcq.score_noise(native)
        own, other = (
            {q["id"]: q for q in r.samples.get("questions", ()) if q["skipped"] is None}
            for r in (record, native)
        )
        lines = [_question(own[key], other[key], noise) for key in own if key in other]
        lines.sort(key=lambda q: (_CHANGES.index(q.change), -q.moved))
        flips = sum(q.change != NO_CHANGE for q in lines)
        if lines:
            kept = tuple(lines[: _most(len(pairs))])
            found.append(Questions(subject, kept, flips, len(lines), noise, one_line(why, 300)))
    return tuple(found)


def _question(own: Mapping[str, Any], native: Mapping[str, Any], noise: float | None) -> QuestionLine:
    before, after, gold = native["scores"], own["scores"], own["answer"]
    a, b = _pick(before), _pick(after)
    change, real = NO_CHANGE, None
    if a is None or b is None:
        change = NO_NUMBER
    elif a != b:
        change = "right to wrong" if a == gold else "wrong to right" if b == gold else "wrong to wrong"
        real = None if noise is None else before[a] - before[b] > 2 * noise  # as in `mcq_real_flips`
    moved = largest(abs(x - y) for x, y in zip(after, before, strict=True))
    name, subject = one_line(str(own["id"]), 80), one_line(str(own["subject"]), 60)
    margins = _margin(before), _margin(after)
    return QuestionLine(name, subject, _letter(gold), _letter(a), _letter(b), change, *margins, moved, real)


def _pick(scores: Sequence[float]) -> int | None:
    """The first of the highest scores; None if a score is NaN."""
    return None if any(map(math.isnan, scores)) else max(range(len(scores)), key=lambda i: scores[i])


def _margin(scores: Sequence[float]) -> float:
    first, *rest = sorted(scores, reverse=True)
    return first - rest[0] if rest else math.nan


def _letter(choice: int | None) -> str:
    """A for the first choice, as in the prompts of lettered tasks; a number after Z."""
    if choice is None:
        return "none"
    return chr(ord("A") + choice) if choice < 26 else str(choice + 1)


def chunk_lists(run: JudgedRun) -> tuple[Chunks, ...]:
    """One list per candidate and corpus that is comparable and scored the same tokens."""
    pairs = list(_pairs(run, "perplexity", perplexity.COMPARABLE))
    found = []
    for subject, record, native in pairs:
        own, other = (r.samples.get("chunks") or [] for r in (record, native))
        extents = [[(chunk["tokens"], chunk["document"]) for chunk in chunks] for chunks in (own, other)]
        if not own or extents[0] != extents[1]:
            continue
        lines = []
        for i, (chunk, base) in enumerate(zip(own, other, strict=True)):
            if n := chunk["tokens"]:
                sums = map(chunk.get, ("kld", "top1_equal"))
                kld, equal = (None if total is None else total / n for total in sums)
                document = one_line(str(chunk["document"]), 80)
                lines.append(ChunkLine(i, document, n, base["nll"] / n, chunk["nll"] / n, kld, equal))
        lines.sort(key=lambda c: (-(c.delta if c.kld is None else c.kld), c.index))
        documents, positions = len({c["document"] for c in own}), _positions(record, native)
        found.append(Chunks(subject, tuple(lines[: _most(len(pairs))]), len(lines), documents, positions))
    return tuple(found)


def _positions(record: Record, native: Record) -> tuple[PositionLine, ...]:
    edges, chunks = record.facts.get("positions"), record.samples["chunks"]
    both = [*chunks, *native.samples["chunks"]]
    if not edges or edges != native.facts.get("positions") or not all("by_position" in c for c in both):
        return ()
    divergence = _kld_by_position(record)
    found = []
    for bucket, (low, high) in enumerate(pairwise(edges)):
        own, other = ([c["by_position"][bucket] for c in r.samples["chunks"]] for r in (record, native))
        kept = [i for i, (tokens, _) in enumerate(own) if tokens]
        if not kept:
            continue
        counts, owners = [own[i][0] for i in kept], [chunks[i]["document"] for i in kept]
        delta = clustered_ratio([own[i][1] - other[i][1] for i in kept], counts, owners)
        kld, most = None, None
        if divergence:
            each = [divergence[i][bucket] for i in kept]
            kld = clustered_mean([math.fsum(tokens) for tokens in each], counts, owners)
            most = largest(value for tokens in each for value in tokens)
        found.append(PositionLine(low, high - 1, sum(counts), delta, kld, most))
    return tuple(found)


def _kld_by_position(record: Record) -> list[list[Sequence[float]]]:
    """The KLD of each token, by chunk and bucket; empty if the record keeps only a sample of the tokens."""
    kept, chunks = record.samples.get("kld_tokens") or (), record.samples["chunks"]
    if len(kept) != sum(chunk["tokens"] for chunk in chunks):
        return []
    found, at = [], 0
    for chunk in chunks:
        parts = []
        for tokens, _ in chunk["by_position"]:  # a chunk's tokens are in the order of their positions
            parts.append(kept[at : at + tokens])
            at += tokens
        found.append(parts)
    return found if at == len(kept) else []


def _pairs(run: JudgedRun, runner: str, comparable: Sequence[str]) -> Iterator[tuple[str, Record, Record]]:
    """Candidates with a comparable baseline: the subject, the candidate's record and the baseline's."""
    for record, task, cells in run.completed(runner):
        native = run.run.record(task.baseline)
        if native is not None and native.status == OK and not incomparable(record, native, comparable):
            name, variant = run.labels.subject(runner, cells[0]).text, one_line(task.variant, 60)
            name = f"{name} · {variant}" if variant else name
            partial = f" ({one_line(record.partial, 200)})" if record.partial else ""
            yield f"{name}{partial}", record, native


def _most(lists: int) -> int:
    return max(5, min(_MOST, _MOST_IN_ALL // max(1, lists)))


def position_grid(of: Chunks) -> Grid:
    """NLL delta and KLD by position inside a chunk."""
    rows: list[Row] = []
    for p in of.positions:
        divergence = (nat(p.kld, p.tokens), shown(p.most, NAT)) if p.kld else ()
        rows.append((f"{p.low} to {p.high}", nat(p.delta, p.tokens, sign=True), *divergence))
    with_kld = of.positions[0].kld is not None
    columns = ("Position", "NLL delta", *(("KLD mean", "Largest KLD") if with_kld else ()))
    note = (
        "Scored tokens by their position in a chunk; nat per token; [low, high] is a 95% interval over "
        f"{of.documents} documents; n counts the tokens."
    )
    if not with_kld:
        note += " There is no KLD by position, because the record keeps only a sample of the tokens."
    return Grid(f"By position: {of.subject}", note, columns, rows)


def nat(of: Estimate, n: int, sign: bool = False) -> Shown:
    return shown(of.value, NAT, of.interval or (None, None), n, sign)


def chunk_grid(of: Chunks) -> Grid:
    """The chunks that changed most."""
    rows: list[Row] = []
    for c in of.lines:
        nll = (shown(c.native_nll, NAT, n=c.tokens), shown(c.nll, NAT), shown(c.delta, NAT, sign=True))
        rows.append((f"{c.index}", c.document, *nll, shown(c.kld, NAT), shown(c.equal, SHARE)))
    some = f"the worst {len(rows)} of {of.total:,}" if len(rows) < of.total else f"all {of.total:,}"
    columns = ("Chunk", "Document", "Native NLL", "NLL", "NLL delta", "KLD mean", "Same top-1")
    order = "KLD" if any(c.kld is not None for c in of.lines) else "NLL delta"
    note = (
        f"Sorted by {order}, worst first; nat per token; n counts the scored tokens. A single chunk has no "
        "interval. Chunks are numbered from 0 in the order of the text."
    )
    return Grid(f"By chunk, {some}: {of.subject}", note, columns, rows)


def question_grid(of: Questions) -> Grid:
    """The questions whose picks or scores changed most."""
    words = {True: "beyond noise", False: "near-tie", None: "noise not known"}
    rows: list[Row] = []
    for q in of.lines:
        change = f"{q.change} ({words[q.real]})" if q.change else "same pick"
        margins = (shown(x if math.isfinite(x) else None, NAT) for x in (q.native_margin, q.margin))
        rows.append((q.id, q.subject, q.gold, q.native, q.own, change, *margins, shown(q.moved, NAT)))
    columns = (
        *("Question", "Subject", "Answer", "Native picks", "Candidate picks", "Change"),
        *("Native's margin", "Candidate's margin", "Score changed by"),
    )
    noise = f"The noise is not known: {of.why}."
    if of.noise is not None:
        noise = f"Native's own scores change by up to {of.noise:.3g} nat when they are computed again."
    note = (
        "Changed picks first, right to wrong before the others, then by the largest change of a choice's "
        f"score. Margin: summed logprob of the pick over the next best choice. {noise}"
    )
    cut = f"{len(rows)} of {of.total:,} shown" if len(rows) < of.total else f"all {of.total:,} shown"
    summary = f"Questions of {of.subject}: {of.flips:,} of {of.total:,} picks differ, {cut}"
    return Grid(summary, note, columns, rows)
