"""Whether a candidate format is worth it: bytes and times relative to the baseline. Pure."""

from __future__ import annotations

from collections import Counter
from math import isfinite

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED
from kvbench.metrics.collect import METRICS, Row
from kvbench.metrics.declare.units import MS, PERCENT
from kvbench.render.numbers import shown_row
from kvbench.report.sections.candidate import COST, Answer, Case, Figure, all_cells, others, runner_of
from kvbench.report.sections.wording import count

_FIGURES = ("kv_ratio", "kv_ratio_16bit", "weight_ratio", "itl_ratio", "ttft_ratio")
FASTER, SLOWER, UNDECIDED = "faster", "slower", "undecided"
_TOO_FEW, _UNTIMED = "too few samples", "not measured"
_PACES = (SLOWER, FASTER, UNDECIDED, _TOO_FEW, _UNTIMED)

# (are bytes saved, decoding over all cells): the reason of the answer. None: not measured. Decoding: "faster"
# in all cells, "partly" in some and slower in none, "slower" in some and faster in none, "mixed" both,
# "undecided" neither.
_WORTH = {
    (True, FASTER): "smaller_and_faster",
    (True, "partly"): "mixed",
    (True, "mixed"): "mixed",
    (True, SLOWER): "smaller_but_slower",
    (True, UNDECIDED): "smaller",
    (True, None): "smaller_speed_unknown",
    (False, FASTER): "faster_only",
    (False, "partly"): "mixed",
    (False, "mixed"): "mixed",
    (False, SLOWER): "neither",
    (False, UNDECIDED): "undecided",
    (False, None): "neither",
    (None, FASTER): "faster_only",
    (None, "partly"): "mixed",
    (None, "mixed"): "mixed",
    (None, SLOWER): "undecided",
    (None, UNDECIDED): "undecided",
}


def worth(case: Case) -> Answer:
    """Bytes and times relative to the baseline, each cell by its whole interval."""
    checks = case.about(case.own, cost=True)
    figures = tuple(
        _worst(case, metric) for metric in _FIGURES if case.rows(metric) and not _unchanged(case, metric)
    )
    if failed := [o for o in checks if o.status == FAIL]:
        return Answer("check_failed", case.sentence(failed[0]), figures, others(failed))
    if failed := [o for o in case.related if o.status == FAIL and runner_of(o) in (*COST, "")]:
        return Answer("baseline_failed", f"The baseline failed: {case.sentence(failed[0])}")
    if open_ := [o for o in checks if o.status == INCONCLUSIVE]:
        return Answer("inconclusive", case.sentence(open_[0]), figures, others(open_))
    bytes_text, saves = _bytes(case)
    time_text, speed = _speed(case)
    if saves is None and speed is None:
        return Answer("nothing_measured", "Neither bytes nor times were compared with a baseline.")
    sentences = [bytes_text, time_text]
    if speed and {line.ran_on for line in case.lines} & {"torch", "interpreter"}:
        sentences.append("Attention ran in PyTorch, the reference; a compiled kernel has other times.")
    missing = [case.sentence(o) for o in checks if o.status == NOT_EVALUATED and o.required]
    return Answer(_WORTH[saves, speed], " ".join(filter(None, sentences)), figures, tuple(missing[:2]))


def _worst(case: Case, metric: str) -> Figure:
    """The largest value over the candidate's cells, by the end of its interval, with the range of all."""
    rows = [(r, r.value) for r in case.rows(metric) if r.value is not None]
    odd = [r for r, value in rows if not isfinite(value)]
    worst = (
        odd[0] if odd else max(rows, key=lambda pair: pair[1] if pair[0].high is None else pair[0].high)[0]
    )
    low, high = min(value for _, value in rows), max(value for _, value in rows)
    same = not odd and low == high
    ends = "" if same or odd else f": {MS.number(low)} to {MS.number(high)}"
    n, total = len({r.cell for r, _ in rows}), len(case.candidate.cells)
    cells = all_cells(n) if n == total else f"{n} of {count(total, 'cell')}"
    word = "measured in" if n == 1 else "the same in" if same else "the worst of"
    note = f"{word} {cells}{ends}" if total > 1 else ""
    where = case.labels.subject(METRICS[metric].runner, worst.cell) if not same or n < total else None
    return Figure(metric, shown_row(worst), where, "", note)


def _unchanged(case: Case, metric: str) -> bool:
    """Whether the ratio is of something that the candidate leaves native."""
    if metric.startswith("kv_ratio"):
        return case.candidate.kv_format == "native"
    return metric == "weight_ratio" and case.candidate.weights in ("native", "None")


def _bytes(case: Case) -> tuple[str, bool | None]:
    """The saved bytes as text, and whether any are saved; None where no bytes were compared."""
    parts, saved = [], []
    for metric, what in (("kv_ratio", "KV cache"), ("weight_ratio", "Weights")):
        values = (
            [] if _unchanged(case, metric) else [r.value for r in case.rows(metric) if r.value is not None]
        )
        if not all(map(isfinite, values)):
            parts.append(f"{what}: a ratio to the baseline is not a number.")
            saved.append(False)
        elif values:
            worst = max(values)
            wide = [
                r.value for r in case.rows(f"{metric}_16bit") if r.value is not None and isfinite(r.value)
            ]
            of_16bit = f" ({PERCENT.number(100 * max(wide))}% of 16 bits)" if wide else ""
            change = f"{PERCENT.number(abs(100 * (1 - worst)))}% {'fewer' if worst < 1 else 'more'} bytes"
            parts.append(f"{what}: {change} than the baseline{of_16bit}.")
            saved.append(worst < 1)
    return " ".join(parts), any(saved) if saved else None


def _speed(case: Case) -> tuple[str, str | None]:
    """How decoding and the first token compare cell by cell, and one word for decoding over all cells."""
    words, parts = {}, []
    total = len(case.candidate.cells)
    for metric, what in (("itl_ratio", "Decoding"), ("ttft_ratio", "The first token")):
        if rows := case.rows(metric):
            counts = Counter(map(_pace, rows)) + Counter({_UNTIMED: total - len(rows)})
            cells = ", ".join(f"{word} in {counts[word]}" for word in _PACES if counts[word])
            parts.append(f"{what}: {cells} of {count(total, 'cell')}.")
            words[metric] = _over_all(counts, total)
    return " ".join(parts) or "Speed was not measured.", words.get("itl_ratio")


def _pace(row: Row) -> str:
    """By the whole interval: below 1 the candidate is faster."""
    if row.low is None or row.high is None:
        return _TOO_FEW
    return FASTER if row.high < 1 else SLOWER if row.low > 1 else UNDECIDED


def _over_all(counts: Counter[str], total: int) -> str:
    if counts[SLOWER]:
        return "mixed" if counts[FASTER] else SLOWER
    return UNDECIDED if not counts[FASTER] else FASTER if counts[FASTER] == total else "partly"
