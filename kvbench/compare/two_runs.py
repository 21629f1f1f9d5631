"""`kvbench compare`: whether a stored run is better or worse than another, from both raw samples. Pure.

    worse, better   the whole interval is beyond the margin, also after Holm's correction over the family
    same            the whole interval is within the margin and there was enough data to detect the margin,
                    or all compared numbers are equal to the last bit
    undecided       anything else, and what the machine's state may explain
    not_evaluated   one of the two runs has no result, or the times are from two machines
    not_judged      shown only: a value without samples that can be paired

The rule is `kvbench.gate.decide` with the margin as the limit on both sides of no change. A family is one
metric and variant over cells and runs. The metric's own direction separates better from worse.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from kvbench.compare import result
from kvbench.compare.pairing import TIMED, Pair, Side, Stored, match_cells, pairs_of
from kvbench.compare.result import BETTER, NOT_EVALUATED, NOT_JUDGED, SAME, UNDECIDED, WORSE, Finding
from kvbench.errors import UsageError
from kvbench.gate import evaluate as gate
from kvbench.gate import latency_validity as doubts
from kvbench.gate.decide import Limits, broken, corrected, decide
from kvbench.gate.verdict import FAIL, PASS
from kvbench.metrics.collect import METRICS
from kvbench.metrics.declare.metric import ALONE, BESIDE, EXACT, Effect, Measured, Unable
from kvbench.records.record import NOT_EVALUATED as TASK_NOT_EVALUATED
from kvbench.render.numbers import counted_of
from kvbench.stats.power import Spread

UNJUDGED = "shown, not judged: it has no samples that can be paired"


def compare(
    runs: Sequence[Stored],
    chosen: Sequence[Collection[str] | None] = (),
    only: Collection[str] = (),
    margin: float | None = None,
) -> result.Comparison:
    """Each run compared with the first. chosen: ids of the cells of each run (None: all); only: metrics
    (empty: all); margin: in % or points, for everything but bytes. UsageError for incomparable runs."""
    reference, chosen = runs[0], list(chosen) or [None] * len(runs)
    wanted = [
        pair
        for run in runs[1:]
        for pair in pairs_of(reference, run, chosen[0])
        if not only or any(METRICS[metric].runner == pair.runner for metric in only)
    ]
    refuse(runs, wanted)
    findings = judge(wanted, only, margin)
    each = list(zip(runs, chosen, strict=True))
    faults = tuple(fault for run, cells in each for fault in faults_of(run, cells))
    extra = dict.fromkeys(said for run, cells in each[1:] for said in only_there(reference, run, cells))
    return result.Comparison(tuple(runs), faults, (*named(wanted), *extra), tuple(findings), margin)


def refuse(runs: Sequence[Stored], pairs: Sequence[Pair]) -> None:
    """Raises UsageError where the runs are unlike, or have nothing in common."""
    unlike = list(dict.fromkeys(sentence for pair in pairs for sentence in pair.unlike))
    where = " and ".join(f"{run.name} ({run.path})" for run in runs)
    if unlike:
        lines = "\n".join(f"  {sentence}." for sentence in unlike)
        raise UsageError(
            f"{where} may not be compared, since they did not measure the same work:\n{lines}\n"
            "Measure again with equal settings, or select what is comparable with -k and --only."
        )
    if not any(pair.second for pair in pairs):
        cells = (f"  {run.name}: {', '.join(cell.name for cell in run.run.manifest.cells)}" for run in runs)
        names = "\n".join(cells)
        raise UsageError(f"{where} have no task in common; their cells are:\n{names}")


def named(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Differences that do not prevent a comparison, after the records that both runs share: one measurement
    does not show how far two measurements differ."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for pair in pairs:
        if pair.shared:
            found.setdefault((pair.first.run.name, pair.there), {})[pair.first.task.title] = None
    same = "{} and {} share the same records, measured once, of {}"
    shared = [same.format(*names, ", ".join(works)) for names, works in found.items()]
    return tuple(dict.fromkeys((*shared, *(sentence for pair in pairs for sentence in pair.named))))


def faults_of(run: Stored, chosen: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """(run, what fails in it without any policy): its evidence, impossible values, degenerate scores."""
    for o in gate.evaluate(None, run.run, list(run.rows.values())).outcomes:
        if o.status == FAIL and (chosen is None or not o.cells or set(o.cells) & set(chosen)):
            yield run.name, f"{o.check}: {o.sentence}"


def only_there(first: Stored, second: Stored, chosen: Collection[str] | None) -> Iterator[str]:
    """Work that only the second run has, so it is compared with nothing."""
    partner, _ = match_cells(first.run.manifest.cells, second.run.manifest.cells)
    back = {there: here for here, there in partner.items()}
    for task in second.run.tasks:
        mine = [cell for cell in task.cells if chosen is None or cell in chosen]
        work = task.runner, task.variant
        if mine and not any(first.run.task_at(back.get(cell, ""), *work) for cell in mine):
            at = place_of(second, task.runner, mine[0])
            yield f"only {second.name} has {task.title} on {at}, so it is compared with nothing"


def judge(pairs: Sequence[Pair], only: Collection[str] = (), margin: float | None = None) -> list[Finding]:
    """A finding for every metric of comparable pairs; the families of Holm's correction span all of them."""
    found = [finding for pair in pairs for finding in _raw(pair, only)]
    cases = [(pair, f, _limits(f.effect, margin), _spread(f.effect)) for pair, f in found if f.effect]
    families = [(f.metric, f.variant, id(f) if spread is None else None) for _, f, _, spread in cases]
    p_values = corrected([broken(spread, limits) for *_, limits, spread in cases], families)
    ruled = {id(case[1]): _ruled(*case, *p) for case, p in zip(cases, p_values, strict=True)}
    return [ruled.get(id(finding), finding) for _, finding in found]


def _raw(pair: Pair, only: Collection[str]) -> Iterator[tuple[Pair, Finding]]:
    """Findings that still need a decision (those with an effect), and those that do not."""
    first, second, run = pair.first, pair.second, pair.first.run
    names, label = run.run.names, run.labels.subject(pair.runner, first.cell)
    base = Finding(
        (run.name, pair.there),
        "",
        pair.runner,
        first.task.variant,
        first.cell,
        place_of(run, pair.runner, first.cell),
        tuple(names[cell] for cell in label.cells if cell in names),
        NOT_EVALUATED,
        "",
    )
    if second is None:
        yield pair, replace(base, reason=f"{base.runs[1]} has no such task")
        return
    if first.missing and second.missing:
        absent = {s.record.status for s in (first, second) if s.record} == {TASK_NOT_EVALUATED}
        reason = f"neither run has a result ({first.missing.rstrip('.')})"
        yield pair, replace(base, outcome=NOT_JUDGED if absent else NOT_EVALUATED, reason=reason)
        return
    if first.missing or second.missing:
        side = first if first.missing else second
        yield pair, replace(base, reason=f"{side.run.name} has no result ({side.missing.rstrip('.')})")
        return
    try:
        found = changes(first, second)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
        unread = f"the samples of one of the two cannot be read ({type(e).__name__}: {e})"
        yield pair, replace(base, reason=unread)
        return
    other_machine = f"times of two machines are never compared ({pair.machine})"
    for metric in METRICS.values():
        if metric.runner != pair.runner or (only and metric.name not in only):
            continue
        at = [side.run.rows.get((side.cell, metric.name, side.task.variant)) for side in (first, second)]
        one = replace(base, metric=metric.name, first=at[0], second=at[1])
        change = found.get(metric.name)
        exact = isinstance(change, Effect) and change.kind is EXACT
        if pair.machine and pair.runner in TIMED and not exact:
            if metric.effect:
                yield pair, replace(one, reason=other_machine)
        elif isinstance(change, Unable):
            yield pair, replace(one, reason=change.why)
        elif change is not None:
            words = dict.fromkeys(filter(None, (change.subset, *(row.partial for row in at if row))))
            yield pair, replace(one, effect=change, partial="; ".join(words) if change.sampled else "")
        elif all(row is not None and row.value is not None for row in at):
            yield pair, replace(one, outcome=NOT_JUDGED, reason=UNJUDGED)


def changes(first: Side, second: Side) -> dict[str, Effect | Unable]:
    """The change of each metric that has one. Raises what reading damaged samples raises."""
    assert first.record and second.record  # noqa: PT018
    sides = Measured(first.record, first.native), Measured(second.record, second.native)
    own = [metric for metric in METRICS.values() if metric.runner == first.task.runner and metric.effect]
    return {m.name: change for m in own if m.effect and (change := m.effect(m, *sides))}


def place_of(run: Stored, runner: str, cell: str) -> str:
    """`int8_sym batch 1 context 512`: the keys of a cell that the runner depends on and the run varies."""
    return run.labels.subject(runner, cell).text.replace(" · ", " ")


def _limits(effect: Effect, margin: float | None) -> Limits:
    """Limits at the same distance on both sides of no change."""
    most = effect.kind.margin if margin is None or effect.kind is EXACT else margin
    least = 100 * (1 / (1 + most / 100) - 1) if effect.unit == "%" else -most
    return Limits(least, most, 0.0)


def _spread(effect: Effect) -> Spread | None:
    if effect.low is None or effect.high is None or not math.isfinite(effect.value):
        return None
    return Spread(effect.value, effect.low, effect.high, effect.unit, effect.units)


def _ruled(
    pair: Pair, finding: Finding, limits: Limits, spread: Spread | None, adjusted: float, family: int
) -> Finding:
    effect = finding.effect
    assert effect is not None
    known = replace(finding, margin=limits.high, family=family)
    if not math.isfinite(effect.value):
        return replace(known, effect=None, reason="one of the two values is not a number")
    if effect.identical:
        reason = "" if effect.kind is EXACT else "every number is the same to the last bit"
        return replace(known, outcome=SAME, reason=reason)
    ruling = decide(effect.value, spread, effect.n, effect.sampled, limits, adjusted, family)
    known = replace(known, adjusted=adjusted if spread else None, mde=ruling.mde, n_needed=ruling.n_needed)
    beyond = WORSE if (effect.value > 0) == (METRICS[finding.metric].better == "lower") else BETTER
    outcome = {PASS: SAME, FAIL: beyond}.get(ruling.status, UNDECIDED)
    within = f"within {limits.high:g} {effect.unit}".replace(" %", "%")
    if outcome == UNDECIDED:
        more = f"; {ruling.no_n}" if ruling.no_n else ""
        if needed := ruling.n_needed:
            more = f"; n needed: about {needed:,} {counted_of(needed, effect.counted)} in each run"
        return replace(known, outcome=outcome, reason=f"{within}: {ruling.text}{more}")
    if why := _machine_state(pair, effect, outcome, limits):
        return replace(known, outcome=UNDECIDED, reason=f"it would be {outcome}, but {why}")
    reason = "exact" if effect.kind is EXACT else within if outcome == SAME else ""
    return replace(known, outcome=outcome, reason=reason)


def _machine_state(pair: Pair, effect: Effect, outcome: str, limits: Limits) -> str:
    """Why the machine's state makes a time unreliable, or "": as a gate checks a time against a limit
    (`kvbench.gate.latency_validity`), with the other run's for it; a time without native also by the load."""
    if pair.runner != "latency" or pair.second is None:
        return ""
    metric = effect.metric.replace("_ms", "_ratio") if effect.kind is BESIDE else effect.metric
    sides = (pair.first, pair.second)
    values = [side.run.rows.get((side.cell, metric, side.task.variant)) for side in sides]
    up, ends = effect.value > 0, (1 + limits.low / 100, 1 + limits.high / 100)
    reasons = [_busy(side) for side in sides] if effect.kind is ALONE else []
    for i, (side, row) in enumerate(zip(sides, values, strict=True)):
        other = values[1 - i]
        if row is None or other is None or other.value is None or side.record is None:
            return ""
        low, high = (other.value * end for end in ends)
        higher = up == (i == 1)  # this run's times are the longer ones
        held = Limits(-math.inf, high) if higher else Limits(low, math.inf)
        if outcome == SAME:
            held = Limits(low, high)
        if why := doubts.doubt(side.record, row, held, PASS if outcome == SAME else FAIL):
            reasons.append(f"in {side.run.name} {why}")
    return "; ".join(filter(None, reasons))


def _busy(side: Side) -> str:
    """A sentence if other processes kept the CPUs busy, or ""."""
    load = side.record.facts.get("host_load") if side.record else None
    if not load or not load.get("cpus") or (high := max(load["before"], load["after"])) <= load["cpus"] + 1:
        return ""
    under = f"{side.run.name} was measured under a load of {high:.1f} on {load['cpus']} CPUs"
    return f"{under}, and no interleaved native arm cancels that"
