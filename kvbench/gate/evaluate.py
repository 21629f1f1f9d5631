"""The verdict on a run: the built-in checks first, then the gate's, each with a status, a reason and a
sentence.

`kvbench.gate.decide` judges a value with an interval: by the whole interval, corrected for the number of
checks that make its claim, also those that a run which stops early has not measured yet. A value that should
have an interval and has too few samples for one is inconclusive. An exact value (bytes, a worst case) is
judged by itself. A NaN fails; a missing value never passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbench.gate.builtin_checks import (
    by_task,
    degenerate_scores,
    empty_results,
    failed_tasks,
    implausible_values,
    label,
    merged_differences,
    missing_device,
    some,
)
from kvbench.gate.decide import Limits, Ruling, broken, corrected, decide
from kvbench.gate.latency_validity import doubt
from kvbench.gate.policy import Check, Gate, load
from kvbench.gate.precision import precision
from kvbench.gate.shards import exit_code_of as exit_code_of_shard
from kvbench.gate.shards import judged as of_one_shard
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, Outcome, Verdict, exit_code_of
from kvbench.matrix.cells import text
from kvbench.metrics.collect import METRICS, Row
from kvbench.records.record import Record
from kvbench.records.run import Run
from kvbench.stats.intervals import CONFIDENCE
from kvbench.stats.power import Spread
from kvbench.stats.sequential import Look

__all__ = ["Check", "Gate", "Outcome", "Verdict", "evaluate", "load"]


def evaluate(gate: Gate | None, run: Run, rows: Sequence[Row], require_device: bool = False) -> Verdict:
    """The verdict. rows: those of `metrics.derive(run)`; gate None: only the built-in checks run.

    require_device: whether cells whose device is missing fail instead of being skipped.
    """
    outcomes = [
        *(precision(run, gate.allow_fallback, gate.evidence) if gate else precision(run)),
        *missing_device(run, require_device),
        *merged_differences(run),
        *failed_tasks(run),
        *empty_results(run, rows),
        *implausible_values(run, rows),
        *degenerate_scores(run),
    ]
    if gate:
        found = [one for check in gate.checks for one in _check(check, run, rows)]
        cases = [one for one in found if isinstance(one, _Case)]
        p_values = corrected([case.p_value for case in cases], [case.family for case in cases])
        ruled = dict(zip(map(id, cases), p_values, strict=True))
        own = [_judge(one, gate, *ruled[id(one)]) if isinstance(one, _Case) else one for one in found]
        if all(outcome.status == NOT_EVALUATED for outcome in own):
            sentence = (
                f"none of the {len(gate.checks)} checks of the gate {gate.name} was evaluated, so it does "
                "not pass."
            )
            own.append(
                Outcome("gate", "", None, "", NOT_EVALUATED, None, "", sentence, reason="nothing_evaluated")
            )
        outcomes += own
    if share := run.manifest.shard:
        outcomes = of_one_shard(outcomes, run.tasks, share, lambda metric: METRICS[metric].runner)
        return Verdict(tuple(outcomes), exit_code_of_shard(outcomes), whole=False)
    return Verdict(tuple(outcomes), exit_code_of(outcomes))


@dataclass(frozen=True, eq=False)
class _Case:
    """One value that a check judges, on the cells that share it. look: None where a sample is judged once;
    waiting: the value is planned and not measured yet."""

    check: Check
    row: Row
    cells: tuple[str, ...]
    subject: str
    record: Record | None
    look: Look | None
    waiting: bool

    @property
    def limits(self) -> Limits:
        """The check's limits, without an end that no value can exceed (a share of 1)."""
        metric = METRICS[self.row.metric]
        least, most = metric.unit.low, metric.unit.high
        low = self.check.low if self.check.low > least else -math.inf
        high = self.check.high if self.check.high < most else math.inf
        return Limits(low, high, metric.none)

    @property
    def spread(self) -> Spread | None:
        row = self.row
        if row.value is None or row.low is None or row.high is None:
            return None
        return Spread(row.value, row.low, row.high, row.unit.name, row.units).at(self.confidence)

    @property
    def confidence(self) -> float:
        return self.look.confidence if self.look else CONFIDENCE

    @property
    def p_value(self) -> float:
        return broken(self.spread, self.limits)

    @property
    def family(self) -> tuple[object, ...]:
        """The key of the checks that make the same claim. A value without an interval is alone; a planned one
        counts, with p = 1.
        """
        alone = id(self) if self.spread is None and not self.waiting else None
        return self.check.metric, self.row.variant, self.check.low, self.check.high, alone


def _check(check: Check, run: Run, rows: Sequence[Row]) -> Iterator[Outcome | _Case]:
    """One case per value (cells that share a task share a value), and an outcome for values that are missing
    altogether.
    """
    metric = METRICS[check.metric]
    cells = [cell for cell in run.cells.values() if check.picks(cell.spec)]
    if not cells:
        chosen = ", ".join(f"{key}={text(value)}" for key, value in check.where.items() if key != "variant")
        sentence = f"{check.metric} was not measured: no cell of this run has {chosen or 'anything'}."
        yield _missing(check, "no_cell", (), sentence)
        return
    expected = [cell.id for cell in cells if not (metric.paired and cell.is_baseline)]
    if not expected:
        sentence = (
            f"{check.metric} was not measured: it compares with the baseline, and the check selects only "
            "baselines."
        )
        yield _missing(check, "only_baselines", (), sentence)
        return
    variant = check.where.get("variant")
    mine = [
        r for r in rows if r.metric == check.metric and r.cell in expected and variant in (None, r.variant)
    ]
    absent = tuple(cell for cell in expected if cell not in {row.cell for row in mine})
    if absent:
        of = f" of {variant}" if variant else ""
        subject = f"{check.metric}{of} on {some(absent, run.names)}"
        sentence = f"{subject} was not measured: the run has no {metric.runner} task for it."
        yield _missing(check, "no_task", absent, sentence)
    early = run.manifest.until_decided is not None or run.manifest.shard is not None
    for row, shared in by_task(run, mine):
        task = run.task_at(row.cell, metric.runner, row.variant)
        record = run.record(task.key) if task else None
        # Where every task runs, the family is known in the end.
        waiting = early and task is not None and record is None
        subject = f"{label(row)} on {some(shared, run.names)}"
        yield _Case(check, row, shared, subject, record, run.manifest.looks.get(metric.runner), waiting)


def _missing(check: Check, reason: str, cells: tuple[str, ...], sentence: str) -> Outcome:
    """Nothing to judge is a failure of a required check, never a pass."""
    ruling = Ruling(FAIL if check.required else NOT_EVALUATED, reason, "")
    return _outcome(check, ruling, sentence, None, cells, str(check.where.get("variant", "")))


def _judge(case: _Case, gate: Gate, adjusted: float, family: int) -> Outcome:
    row, value = case.row, case.row.value
    if value is None:
        ruling = Ruling(NOT_EVALUATED, "not_measured", "")
        rest = f"was not measured: {row.note.rstrip('.') or 'no reason was recorded'}"
    elif not math.isfinite(value):
        ruling = Ruling(FAIL, "not_finite", "")
        rest = (
            f"is {value}{f' ({row.note})' if row.note else ''}, which is within no limit ({case.check.limit})"
        )
    elif row.partial and not gate.allow_partial:
        ruling = Ruling(NOT_EVALUATED, "partial", "")
        rest = (
            f"is {row.unit.text(value)}, but partial ({row.partial}); a partial result counts only with "
            "allow_partial: true in the gate"
        )
    else:
        sampled = METRICS[row.metric].sampled
        ruling = decide(value, case.spread, row.n, sampled, case.limits, adjusted, family, case.look)
        more = _more(ruling, row) if ruling.status == INCONCLUSIVE else ""
        if case.record and (cause := doubt(case.record, row, case.limits, ruling.status, case.confidence)):
            ruling = Ruling(INCONCLUSIVE, "unstable_machine", f"{ruling.text}, but {cause}", ruling.mde)
        found = f"is {row.unit.text(value)}{_spread(row)}; the limit is {case.check.limit}"
        rest = f"{found}: {ruling.text}{more}{_at(case)}"
    return _outcome(case.check, ruling, f"{case.subject} {rest}.", value, case.cells, row.variant, case.look)


def _more(ruling: Ruling, row: Row) -> str:
    """The end of an inconclusive sentence: the minimum detectable effect, and the deciding number of
    samples.
    """
    parts = [row.note.rstrip(".")] if row.note else []
    if ruling.mde is not None:
        far = (
            "no possible value"
            if math.isinf(ruling.mde)
            else f"{row.unit.text(ruling.mde, 3)} from the limit"
        )
        parts.append(f"minimum detectable effect: {far}")
    if ruling.n_needed is not None:
        counted = METRICS[row.metric].counted
        parts.append(f"at this value n={ruling.n_needed:,}{counted and ' '}{counted} would decide")
    elif ruling.no_n:
        parts.append(ruling.no_n)
    return f" ({'; '.join(parts)})" if parts else ""


def _at(case: _Case) -> str:
    """The look and the confidence, with the interval of that confidence."""
    if case.look is None:
        return ""
    spread = case.spread
    ends = f": {spread.low:.6g} to {spread.high:.6g}" if spread else ""
    return f" ({case.look.place}, judged at {case.look.level}{ends})"


def _spread(row: Row) -> str:
    parts = []
    if row.low is not None and row.high is not None:
        parts.append(f"95% interval {row.low:.6g} to {row.high:.6g}")
    if row.n is not None:
        parts.append(f"n={row.n:,}")
    return f" ({', '.join(parts)})" if parts else ""


def _outcome(
    check: Check,
    ruling: Ruling,
    sentence: str,
    value: float | None,
    cells: tuple[str, ...],
    variant: str,
    look: Look | None = None,
) -> Outcome:
    return Outcome(
        check=check.name,
        metric=check.metric,
        cell=cells[0] if cells else None,
        variant=variant,
        status=ruling.status,
        reason=ruling.reason,
        value=value,
        limit=check.limit,
        sentence=sentence,
        required=check.required,
        why=check.why,
        cells=cells,
        mde=ruling.mde,
        n_needed=ruling.n_needed,
        look=look.place if look else "",
        level=look.confidence if look else None,
        bounds=(check.low, check.high),
    )
