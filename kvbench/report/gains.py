"""Whether a candidate format is worth it: bytes and times against the baseline, each cell by its own interval. Pure."""

from __future__ import annotations

from collections import Counter

from kvbench.metrics import METRICS, Row
from kvbench.report.candidate import Answer, Case, Figure, all_cells, count, more
from kvbench.report.fmt import NOT_MEASURED, number, shown_row


def worth(case: Case) -> Answer:
    """Bytes and time against the baseline, each cell by its interval."""
    question = "Is it worth it?"
    checks = case.about(case.own, cost=True)
    figures = tuple(_worst(case, metric) for metric in ("kv_ratio", "kv_ratio_16bit", "weight_ratio", "itl_ratio", "ttft_ratio")
                    if case.rows(metric) and not _idle(case, metric))  # fmt: skip
    if broken := [o for o in checks if o.status == "fail"]:
        return Answer(question, "no", "fail", case.said(broken[0]), figures, more(broken))
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


# (bytes are saved, decoding is faster / slower / open / mixed or None): the answer. None: not measured.
_WORTH = {
    (True, "faster"): ("yes", "pass"),
    (True, "slower"): ("bytes for time", "partial"),
    (True, "open"): ("in bytes", "partial"),
    (True, "mixed"): ("in part", "partial"),
    (True, None): ("in bytes", "partial"),
    (False, "faster"): ("in time", "partial"),
    (False, "slower"): ("no", "fail"),
    (False, "open"): ("not shown", "inconclusive"),
    (False, "mixed"): ("in part", "partial"),
    (False, None): ("no", "fail"),
    (None, "faster"): ("in time", "partial"),
    (None, "slower"): ("not shown", "inconclusive"),
    (None, "open"): ("not shown", "inconclusive"),
    (None, "mixed"): ("in part", "partial"),
}


def _worst(case: Case, metric: str) -> Figure:
    """The largest value over the candidate's cells, by the end of its interval; the range of all beside it."""
    rows = case.rows(metric)
    row = max(rows, key=lambda r: r.value if r.high is None else r.high)  # type: ignore[arg-type,return-value]
    values = sorted(r.value for r in rows if r.value is not None)
    same = values[0] == values[-1]
    ends = "" if same else f": {number(values[0], 'ms')} to {number(values[-1], 'ms')}"
    note = (
        f"{'the same in' if same else 'the worst of'} {all_cells(len(rows))}{ends}" if len(rows) > 1 else ""
    )
    where = case.labels.subject(METRICS[metric].runner, row.cell) if not same else None
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
        if values:
            worst = max(values)
            wide = [r.value for r in case.rows(of) if r.value is not None]
            against = f" ({number(100 * max(wide), '%')}% of 16 bits)" if wide else ""
            change = "fewer" if worst < 1 else "more"
            parts.append(
                f"{what}: {number(abs(100 * (1 - worst)), '%')}% {change} bytes than the baseline{against}."
            )
            saved.append(worst < 1)
    return " ".join(parts), any(saved) if saved else None


def _speed(case: Case) -> tuple[str, str | None]:
    """How decoding and the first token compare, cell by cell, and decoding's word."""
    words, told = {}, []
    for metric, what in (("itl_ratio", "Decoding"), ("ttft_ratio", "The first token")):
        rows = case.rows(metric)
        counts = Counter(_pace(row) for row in rows)
        if rows:
            said = ", ".join(f"{word} in {counts[word]}" for word in _PACES if counts[word])
            told.append(f"{what}: {said} of {count(len(rows), 'cell')}.")
            words[metric] = next(iter(counts)) if len(counts) == 1 else "mixed"
    if not told:
        return "Speed was not measured.", None
    word = words.get("itl_ratio")
    return " ".join(told), "open" if word == _TOO_FEW else word


_TOO_FEW = "too few samples"
_PACES = ("slower", "faster", "open", _TOO_FEW)


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
