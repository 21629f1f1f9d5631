"""The verdict on a run: the built-in checks first, then the gate's, each with a status, a reason and a
sentence.

`kvbench.gate.decide` judges a value with an interval. A value that should have an interval and has too few
samples for one is inconclusive. An exact value (bytes, a worst case) is judged by itself. A NaN fails; a
missing value never passes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvbench.gate import builtin_checks as builtin
from kvbench.gate.builtin_checks import by_task, label, some
from kvbench.gate.decide import Limits, Ruling, broken, corrected, decide
from kvbench.gate.latency_validity import doubt
from kvbench.gate.policy import Check, Gate, load
from kvbench.gate.precision import precision
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, Outcome, Verdict, exit_code_of
from kvbench.matrix.cells import text
from kvbench.metrics.collect import METRICS, Row
from kvbench.records.record import Record
from kvbench.records.run import Run
from kvbench.records.shards import Share
from kvbench.stats.intervals import CONFIDENCE
from kvbench.stats.power import Spread
from kvbench.stats.sequential import Look

__all__ = ["Outcome", "evaluate", "load"]


def evaluate(gate: Gate | None, run: Run, rows: Sequence[Row], require_device: bool = False) -> Verdict:
    """rows: those of `metrics.collect.derive(run)`; gate None: only the built-in checks run; require_device:
    whether cells whose device is missing fail instead of being skipped."""
    outcomes = [
        *(precision(run, gate.allow_fallback, gate.evidence) if gate else precision(run)),
        *builtin.missing_device(run, require_device),
        *builtin.merged_differences(run),
        *builtin.failed_tasks(run),
        *builtin.empty_results(run, rows),
        *builtin.implausible_values(run, rows),
        *builtin.degenerate_scores(run),
    ]
    if gate:
        found = [one for check in gate.checks for one in _check(check, run, rows)]
        cases = [one for one in found if isinstance(one, _Case)]
        p_values = corrected([case.p_value for case in cases], [case.family for case in cases])
        ruled = dict(zip(map(id, cases), p_values, strict=True))
        own = [_judge(one, gate, *ruled[id(one)]) if isinstance(one, _Case) else one for one in found]
        if all(outcome.status == NOT_EVALUATED for outcome in own):
            n = len(gate.checks)
            sentence = f"none of the {n} checks of the gate {gate.name} was evaluated, so it does not pass."
            own.append(Outcome("gate", NOT_EVALUATED, "nothing_evaluated", sentence))
        outcomes += own
    if share := run.manifest.shard:
        outcomes = _of_shard(outcomes, run, share)
    return Verdict(tuple(outcomes), exit_code_of(outcomes, whole=not share), whole=not share)


def _of_shard(outcomes: Iterable[Outcome], run: Run, share: Share) -> list[Outcome]:
    """The outcomes of a shard: first that it is no whole run; tasks of other shards are not required."""
    mine = [task for task in run.tasks if task.key in share.tasks]
    measured = {(task.runner, task.variant, cell) for task in mine for cell in task.cells}
    shown = {cell for _, _, cell in measured}

    def elsewhere(o: Outcome) -> bool:
        if o.status != NOT_EVALUATED or not o.required:
            return False
        if o.metric:
            return measured.isdisjoint((METRICS[o.metric].runner, o.variant, cell) for cell in o.cells)
        return o.check in ("precision", "gate") and shown.isdisjoint(o.cells)

    sentence = (
        f"{share.shard}: {len(share.tasks)} of {len(run.tasks)} tasks are measured here; the run is judged "
        "after `kvbench merge` of all shards."
    )
    first = Outcome("shard", NOT_EVALUATED, "shard", sentence, required=False)
    return [first, *(replace(o, required=False) if elsewhere(o) else o for o in outcomes)]


@dataclass(frozen=True, eq=False)
class _Case:
    """A value that a check judges, on the cells that share it. waiting: it is planned, not measured yet."""

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
        """The key of the checks that make the same claim; a value without an interval is alone."""
        alone = id(self) if self.spread is None and not self.waiting else None
        return self.check.metric, self.row.variant, self.check.low, self.check.high, alone


def _check(check: Check, run: Run, rows: Sequence[Row]) -> Iterator[Outcome | _Case]:
    """One case per value, which cells that share a task share; an outcome for values that are missing."""
    metric = METRICS[check.metric]
    cells = [cell for cell in run.cells.values() if check.picks(cell.spec)]
    if not cells:
        chosen = ", ".join(f"{key}={text(value)}" for key, value in check.where.items() if key != "variant")
        sentence = f"{check.metric} was not measured: no cell of this run has {chosen or 'anything'}."
        yield _missing(check, "no_cell", (), sentence)
        return
    expected = [cell.id for cell in cells if not (metric.paired and cell.is_baseline)]
    if not expected:
        why = "it compares with the baseline, and the check selects only baselines"
        sentence = f"{check.metric} was not measured: {why}."
        yield _missing(check, "only_baselines", (), sentence)
        return
    variant = check.where.get("variant")
    of_metric = [row for row in rows if row.metric == check.metric and row.cell in expected]
    mine = [row for row in of_metric if variant in (None, row.variant)]
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
        waiting = early and task is not None and record is None  # otherwise the family is known in the end
        subject = f"{label(row)} on {some(shared, run.names)}"
        yield _Case(check, row, shared, subject, record, run.manifest.looks.get(metric.runner), waiting)


def _missing(check: Check, reason: str, cells: tuple[str, ...], sentence: str) -> Outcome:
    """Nothing to judge is a failure of a required check, never a pass."""
    ruling, variant = (
        Ruling(FAIL if check.required else NOT_EVALUATED, reason, ""),
        check.where.get("variant"),
    )
    return _outcome(check, ruling, sentence, cells, str(variant or ""))


def _judge(case: _Case, gate: Gate, adjusted: float, family: int) -> Outcome:
    row, value = case.row, case.row.value
    if value is None:
        ruling = Ruling(NOT_EVALUATED, "not_measured", "")
        rest = f"was not measured: {row.note.rstrip('.') or 'no reason was recorded'}"
    elif not math.isfinite(value):
        ruling = Ruling(FAIL, "not_finite", "")
        note = f" ({row.note})" if row.note else ""
        rest = f"is {value}{note}, which is within no limit ({case.check.limit})"
    elif row.partial and not gate.allow_partial:
        ruling = Ruling(NOT_EVALUATED, "partial", "")
        remedy = "a partial result counts only with allow_partial: true in the gate"
        rest = f"is {row.unit.text(value)}, but partial ({row.partial}); {remedy}"
    else:
        sampled = METRICS[row.metric].sampled
        ruling = decide(value, case.spread, row.n, sampled, case.limits, adjusted, family, case.look)
        more = _more(ruling, row) if ruling.status == INCONCLUSIVE else ""
        if case.record and (cause := doubt(case.record, row, case.limits, ruling.status, case.confidence)):
            ruling = Ruling(INCONCLUSIVE, "unstable_machine", f"{ruling.text}, but {cause}", ruling.mde)
        found = f"is {row.unit.text(value)}{_spread(row)}; the limit is {case.check.limit}"
        rest = f"{found}: {ruling.text}{more}{_at(case)}"
    outcome = _outcome(case.check, ruling, f"{case.subject} {rest}.", case.cells, row.variant)
    if case.look:
        outcome = replace(outcome, look=case.look.place, level=case.look.confidence)
    return replace(outcome, value=value)


def _more(ruling: Ruling, row: Row) -> str:
    """The end of an inconclusive sentence: the detectable effect, and the deciding number of samples."""
    parts = [row.note.rstrip(".")] if row.note else []
    if ruling.mde is not None:
        distance = f"{row.unit.text(ruling.mde, 3)} from the limit"
        far = "no possible value" if math.isinf(ruling.mde) else distance
        parts.append(f"minimum detectable effect: {far}")
    if ruling.n_needed is not None:
        counted = METRICS[row.metric].counted
        parts.append(f"at this value n={ruling.n_needed:,}{counted and ' '}{counted} would decide")
    elif ruling.no_n:
        parts.append(ruling.no_n)
    return f" ({'; '.join(parts)})" if parts else ""


def _at(case: _Case) -> str:
    """The look and the confidence, with the interval of that confidence."""
    ends = f": {case.spread.low:.6g} to {case.spread.high:.6g}" if case.spread else ""
    return f" ({case.look.place}, judged at {case.look.level}{ends})" if case.look else ""


def _spread(row: Row) -> str:
    parts = []
    if row.low is not None and row.high is not None:
        parts.append(f"95% interval {row.low:.6g} to {row.high:.6g}")
    if row.n is not None:
        parts.append(f"n={row.n:,}")
    return f" ({', '.join(parts)})" if parts else ""


def _outcome(check: Check, ruling: Ruling, sentence: str, cells: tuple[str, ...], variant: str) -> Outcome:
    found = Outcome(check.name, ruling.status, ruling.reason, sentence, cells, check.metric, variant)
    found = replace(found, limit=check.limit, bounds=(check.low, check.high), required=check.required)
    return replace(found, why=check.why, mde=ruling.mde, n_needed=ruling.n_needed)
