"""What lies below one number: the questions whose pick changed, and the chunks and positions of a text that changed most.

Each list is worst first and cut to a number of lines that keeps the page small; how many there are in all is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvbench.metrics import mcq, perplexity
from kvbench.metrics.declare.value import incomparable
from kvbench.records.record import OK, Record
from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Estimate, clustered_mean, clustered_ratio, largest

# What became of a pick, worst first; a choice without a number has none.
_CHANGES = ("no number", "right to wrong", "wrong to right", "wrong to wrong", "")

# Lines of one list, and of all lists of a kind together.
MOST, IN_ALL = 25, 200


@dataclass(frozen=True)
class QuestionLine:
    """gold, native, own: letters of the answer and of the first picks; change: of a pick, "" where it is the same; margin, native_margin:
    summed logprob of the first pick over the next, nat; moved: the most that a choice's score moved, nat; real: beyond the baseline's own
    noise, None where that is not known."""

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
    """flips: questions whose pick changed, of total that both sides scored; noise: how far the baseline's own scores move, nat, or None
    and why not."""

    name: str
    variant: str
    partial: str
    lines: tuple[QuestionLine, ...]
    flips: int
    total: int
    noise: float | None
    why: str


@dataclass(frozen=True)
class ChunkLine:
    """index: of the chunk in the record; nll: nat a token of native and of the candidate; kld: nat a token, None where it was not measured;
    equal: share of equal top-1 picks, or None."""

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
    """One bucket of positions inside a chunk: NLL delta and KLD, nat a token, over the documents; kld, most: None where the record keeps only
    a sample of the tokens."""

    low: int
    high: int
    tokens: int
    delta: Estimate
    kld: Estimate | None
    most: float | None


@dataclass(frozen=True)
class Chunks:
    """lines: the worst by KLD, or by NLL delta where there is none, of `total`; documents: of all chunks."""

    name: str
    variant: str
    partial: str
    lines: tuple[ChunkLine, ...]
    total: int
    documents: int
    positions: tuple[PositionLine, ...]


Pair = tuple[str, str, Record, Record]  # name, variant, the candidate's record, its baseline's


def question_lists(run: JudgedRun, labels: Labels) -> tuple[Questions, ...]:
    """A list a candidate and question set, where the two may be compared and scored something in common."""
    pairs = _pairs(run, labels, "mcq", mcq.COMPARABLE)
    most = _most(len(pairs))
    found = []
    for name, variant, record, native in pairs:
        noise, why = mcq.score_noise(native)
        own, other = (
            {q["id"]: q for q in r.samples.get("questions", ()) if q["skipped"] is None}
            for r in (record, native)
        )
        common = [_question(own[key], other[key], noise) for key in own if key in other]
        if not common:
            continue
        common.sort(key=lambda q: (_CHANGES.index(q.change), -q.moved))
        flips = sum(bool(q.change) for q in common)
        found.append(
            Questions(
                name,
                variant,
                one_line(record.partial or "", 200),
                tuple(common[:most]),
                flips,
                len(common),
                noise,
                one_line(why, 300),
            )
        )
    return tuple(found)  # fmt: skip


def _question(own: Mapping[str, Any], native: Mapping[str, Any], noise: float | None) -> QuestionLine:
    a, b = _pick(native["scores"]), _pick(own["scores"])
    gold, change = own["answer"], ""
    if a is None or b is None:
        change = "no number"
    elif a != b:
        change = "right to wrong" if a == gold else "wrong to right" if b == gold else "wrong to wrong"
    real = None
    if a is not None and b is not None and a != b and noise is not None:
        real = native["scores"][a] - native["scores"][b] > 2 * noise  # as in `mcq_real_flips`
    return QuestionLine(
        one_line(str(own["id"]), 80), one_line(str(own["subject"]), 60), _letter(gold), _letter(a), _letter(b), change,
        _margin(native["scores"]), _margin(own["scores"]),
        largest(abs(x - y) for x, y in zip(own["scores"], native["scores"], strict=True)), real,
    )  # fmt: skip


def _pick(scores: Sequence[float]) -> int | None:
    """The first of the highest scores; None where a choice has no number."""
    if any(map(math.isnan, scores)):
        return None
    return max(range(len(scores)), key=lambda i: scores[i])


def _margin(scores: Sequence[float]) -> float:
    first, *rest = sorted(scores, reverse=True)
    return first - rest[0] if rest else math.nan


def _letter(choice: int | None) -> str:
    """A for the first choice, as the prompts of lettered tasks have it; a number past the alphabet."""
    if choice is None:
        return "none"
    return chr(ord("A") + choice) if choice < 26 else str(choice + 1)


def chunk_lists(run: JudgedRun, labels: Labels) -> tuple[Chunks, ...]:
    """A list a candidate and corpus, where the two may be compared and scored the same tokens."""
    pairs = _pairs(run, labels, "perplexity", perplexity.COMPARABLE)
    most = _most(len(pairs))
    found = []
    for name, variant, record, native in pairs:
        own, other = record.samples.get("chunks"), native.samples.get("chunks")
        if (
            not own
            or not other
            or [(c["tokens"], c["document"]) for c in own] != [(c["tokens"], c["document"]) for c in other]
        ):
            continue
        lines = [_chunk(i, *both) for i, both in enumerate(zip(own, other, strict=True)) if both[0]["tokens"]]
        worst = sorted(lines, key=lambda c: (-(c.delta if c.kld is None else c.kld), c.index))
        documents = len({c["document"] for c in own})
        found.append(
            Chunks(
                name,
                variant,
                one_line(record.partial or "", 200),
                tuple(worst[:most]),
                len(lines),
                documents,
                _positions(record, native),
            )
        )
    return tuple(found)  # fmt: skip


def _chunk(index: int, own: Mapping[str, Any], native: Mapping[str, Any]) -> ChunkLine:
    n = own["tokens"]
    kld, equal = own.get("kld"), own.get("top1_equal")
    return ChunkLine(
        index, one_line(str(own["document"]), 80), n, native["nll"] / n, own["nll"] / n,
        None if kld is None else kld / n, None if equal is None else equal / n,
    )  # fmt: skip


def _positions(record: Record, native: Record) -> tuple[PositionLine, ...]:
    edges, chunks = record.facts.get("positions"), record.samples["chunks"]
    both = [*chunks, *native.samples["chunks"]]
    if (
        not edges
        or edges != native.facts.get("positions")
        or not all("by_position" in chunk for chunk in both)
    ):
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
    """KLD of each token, by chunk and bucket; empty where the record keeps a sample of them and does not say of which."""
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


def _pairs(run: JudgedRun, labels: Labels, runner: str, comparable: Sequence[str]) -> list[Pair]:
    found = []
    for record, task in run.done():
        native = run.run.record(task.baseline)
        cells = [cell for cell in task.cells if cell in labels.cells]
        if (
            record.runner != runner
            or record.status != OK
            or not cells
            or native is None
            or native.status != OK
        ):
            continue
        if not incomparable(record, native, comparable):
            found.append((labels.subject(runner, cells[0]).text, one_line(task.variant, 60), record, native))
    return found


def _most(lists: int) -> int:
    return max(5, min(MOST, IN_ALL // max(1, lists)))
