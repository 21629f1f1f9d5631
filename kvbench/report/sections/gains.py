"""Whether a candidate format is worth it: bytes and times against the baseline, each cell by its own interval. Pure."""

from __future__ import annotations

from collections import Counter
from math import isfinite

from kvbench.metrics.collect import METRICS, Row
from kvbench.metrics.declare.units import MS, PERCENT
from kvbench.render.numbers import NOT_MEASURED, shown_row
from kvbench.report.sections.candidate import COST, Answer, Case, Figure, all_cells, count, more, runner_of


def worth(case: Case) -> Answer:
    """Bytes and time against the baseline, each cell by its interval."""
    question = "Is it worth it?"
    checks = case.about(case.own, cost=True)
    figures = tuple(_worst(case, metric) for metric in ("kv_ratio", "kv_ratio_16bit", "weight_ratio", "itl_ratio", "ttft_ratio")
                    if case.rows(metric) and not _idle(case, metric))  # fmt: skip
    if broken := [o for o in checks if o.status == "fail"]:
        return Answer(question, "no", "fail", case.said(broken[0]), figures, more(broken))
    if doubt := [o for o in case.beside if o.status == "fail" and runner_of(o) in (*COST, "")]:
        said = f"What it is compared with failed: {case.said(doubt[0])}"
        return Answer(question, "not shown", "inconclusive", said)
    if open_ := [o for o in checks if o.status == "inconclusive"]:
        return Answer(question, "open", "inconclusive", case.said(open_[0]), figures, more(open_))
    bytes_, saves = _bytes(case)
    time, speed = _speed(case)
    sentence = " ".join(part for part in (bytes_, time, _caveat(case) if speed else "") if part)
    if saves is None and speed is None:
        return Answer(
            question, NOT_MEASURED, "incomplete", "Neither bytes nor times were compared with a baseline."
        )
    word, tone = _WORTH[saves, speed]
    lacking = [case.said(o) for o in checks if o.status == "not_evaluated" and o.required]
    return Answer(question, word, tone, sentence, figures, tuple(lacking[:2]))


# (bytes are saved, decoding is faster / in some cells, in none slower / slower, in none faster / both / open or None): the answer. None: not measured.
_WORTH = {
    (True, "faster"): ("yes", "pass"),
    (True, "partly"): ("in part", "partial"),
    (True, "slower"): ("bytes for time", "partial"),
    (True, "open"): ("in bytes", "partial"),
    (True, "mixed"): ("in part", "partial"),
    (True, None): ("in bytes", "partial"),
    (False, "faster"): ("in time", "partial"),
    (False, "partly"): ("in part", "partial"),
    (False, "slower"): ("no", "fail"),
    (False, "open"): ("not shown", "inconclusive"),
    (False, "mixed"): ("in part", "partial"),
    (False, None): ("no", "fail"),
    (None, "faster"): ("in time", "partial"),
    (None, "partly"): ("in part", "partial"),
    (None, "slower"): ("not shown", "inconclusive"),
    (None, "open"): ("not shown", "inconclusive"),
    (None, "mixed"): ("in part", "partial"),
}


def _worst(case: Case, metric: str) -> Figure:
    """The largest value over the candidate's cells, by the end of its interval; the range of all beside it."""
    rows = case.rows(metric)
    odd = [r for r in rows if r.value is None or not isfinite(r.value)]
    row = odd[0] if odd else max(rows, key=lambda r: r.value if r.high is None else r.high)  # type: ignore[arg-type,return-value]
    values = sorted(r.value for r in rows if r.value is not None)
    same = not odd and values[0] == values[-1]
    ends = "" if same or odd else f": {MS.number(values[0])} to {MS.number(values[-1])}"
    n, total = len({r.cell for r in rows}), len(case.candidate.cells)
    cells = all_cells(n) if n == total else f"{n} of {count(total, 'cell')}"
    word = "the same in" if same and n > 1 else "the worst of" if n > 1 else "measured in"
    note = f"{word} {cells}{ends}" if total > 1 else ""
    where = case.labels.subject(METRICS[metric].runner, row.cell) if not same or n < total else None
    return Figure(metric, shown_row(row), where, "", note)


def _idle(case: Case, metric: str) -> bool:
    """Ratios of what the candidate leaves native say nothing of it."""
    return (metric.startswith("kv_ratio") and case.candidate.kv_format == "native") or (
        metric == "weight_ratio" and case.candidate.weights in ("native", "None")
    )


def _bytes(case: Case) -> tuple[str, bool | None]:
    """What is saved, in words, and whether anything is; None where no bytes were compared."""
    parts, saved = [], []
    for metric, what, of in (
        ("kv_ratio", "KV cache", "kv_ratio_16bit"),
        ("weight_ratio", "Weights", "weight_ratio_16bit"),
    ):
        values = (
            [r.value for r in case.rows(metric) if r.value is not None] if not _idle(case, metric) else []
        )
        if not all(map(isfinite, values)):
            parts.append(f"{what}: a ratio to the baseline is no number.")
            saved.append(False)
        elif values:
            worst = max(values)
            wide = [r.value for r in case.rows(of) if r.value is not None and isfinite(r.value)]
            against = f" ({PERCENT.number(100 * max(wide))}% of 16 bits)" if wide else ""
            change = "fewer" if worst < 1 else "more"
            parts.append(
                f"{what}: {PERCENT.number(abs(100 * (1 - worst)))}% {change} bytes than the baseline{against}."
            )
            saved.append(worst < 1)
    return " ".join(parts), any(saved) if saved else None


def _speed(case: Case) -> tuple[str, str | None]:
    """How decoding and the first token compare, cell by cell, and decoding's word."""
    words, told = {}, []
    for metric, what in (("itl_ratio", "Decoding"), ("ttft_ratio", "The first token")):
        rows = case.rows(metric)
        counts = Counter(_pace(row) for row in rows)
        total = len(case.candidate.cells)
        counts[_UNTIMED] = total - len(rows)
        if rows:
            said = ", ".join(f"{word} in {counts[word]}" for word in _PACES if counts[word])
            told.append(f"{what}: {said} of {count(total, 'cell')}.")
            words[metric] = _over_all(counts, total)
    if not told:
        return "Speed was not measured.", None
    return " ".join(told), words.get("itl_ratio")


_TOO_FEW, _UNTIMED = "too few samples", "not measured"
_PACES = ("slower", "faster", "open", _TOO_FEW, _UNTIMED)


def _over_all(counts: Counter[str], total: int) -> str:
    """One word for all cells; what no interval tells is neither slower nor faster."""
    if counts["slower"]:
        return "mixed" if counts["faster"] else "slower"
    return "open" if not counts["faster"] else "faster" if counts["faster"] == total else "partly"


def _pace(row: Row) -> str:
    """By the whole interval: below 1 the candidate is faster."""
    if row.low is None or row.high is None:
        return _TOO_FEW
    return "faster" if row.high < 1 else "slower" if row.low > 1 else "open"


def _caveat(case: Case) -> str:
    ran = {line.ran_on for line in case.lines}
    return (
        "Attention ran in PyTorch, the reference: a compiled kernel has other times."
        if ran & {"torch", "interpreter"}
        else ""
    )
