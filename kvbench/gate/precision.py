"""The first check of every verdict, which no policy removes: requested = resolved = effective, by evidence.

Two settings reach it. With `allow_fallback` a *declared* fallback passes, by name. `evidence` is the highest
rung that must be verified, E5 unless the gate says less: what stands above it may show nothing, and the
outcome says so. What the evidence contradicts never passes, on any rung, and a baseline must be shown to be
native like any other cell.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.gate.verdict import FAIL, NOT_EVALUATED, PASS, Outcome
from kvbench.matrix.cells import Cell, Task, text
from kvbench.matrix.resolve_backend import ASPECTS, AUTO
from kvbench.matrix.runners import RUNNERS
from kvbench.records import record as states
from kvbench.records.record import LEVELS, OK, RUNGS, Evidence, Level, Record, rung
from kvbench.records.run import Run

LIMIT = "requested = resolved = effective, verified"

Spec = Mapping[str, Any]

# Levels that do not apply to a labelled mode, to runners that make no reads, or to native weights.
_MAY_BE_IDLE = {"E3-prefill", "E3-reads", *(level for level in LEVELS if level.endswith("-weights"))}


def precision(run: Run, allow_fallback: bool = False, evidence: str = RUNGS[-1]) -> Iterator[Outcome]:
    """One outcome per cell, or per distinct fault of its records. A cell without evidence never passes."""
    done = {record.key: record for record in run.records if record.status == OK}
    for cell in run.cells.values():
        native = run.cell(cell.baseline).spec
        if quantized := [f"{k} {text(native[k])}" for k in ("weights", "kv_format") if native[k] != "native"]:
            sentence = f"its baseline is not native: {', '.join(quantized)}."
            yield _outcome(cell, FAIL, "native_baseline", sentence)
        tasks = [task for task in run.tasks_of(cell.id) if task.key in done]
        ran = [done[task.key] for task in tasks]
        faults: dict[tuple[str, str], list[str]] = {}
        fallbacks: dict[str, None] = {}
        for task, record in zip(tasks, ran, strict=True):
            verdict = _another_record(cell.spec, task, record) or judge_precision(
                cell.spec, record.decision, record.evidence, record.facts, allow_fallback, evidence
            )
            if not verdict.reason:
                baseline_record = done.get(task.baseline or "")
                verdict = _another_arm(record) or _equal_to_native(record, baseline_record) or verdict
            if verdict.reason:
                faults.setdefault((verdict.reason, verdict.sentence), []).append(record.runner)
            if verdict.fallback:
                fallbacks[verdict.fallback] = None
        for (reason, fault), runners in faults.items():
            yield _outcome(cell, FAIL, reason, f"{fault} (seen in {', '.join(dict.fromkeys(runners))})")
        if not ran:
            sentence = "no task of this cell was measured, so nothing shows what ran."
            yield _outcome(cell, NOT_EVALUATED, "no_evidence", sentence)
        elif not faults:
            yield _outcome(cell, PASS, "verified", _confirmed(cell.spec, ran, list(fallbacks), evidence))


def _outcome(cell: Cell, status: str, reason: str, sentence: str) -> Outcome:
    return Outcome("precision", status, reason, f"{cell.name}: {sentence}", (cell.id,), limit=LIMIT)


@dataclass(frozen=True)
class PrecisionVerdict:
    """reason: a stable word, "" where the effective precision is the requested one; sentence: the same for a
    person; fallback: the declared fallback that was allowed, in words, or ""."""

    reason: str = ""
    sentence: str = ""
    fallback: str = ""


def _another_record(spec: Spec, task: Task, record: Record) -> PrecisionVerdict | None:
    """A verdict where the record was not made by this task for this cell."""
    if record.runner != task.runner:
        runners = f"runner {record.runner}, the task from {task.runner}"
        return PrecisionVerdict("another_record", f"the record is from {runners}: it belongs elsewhere.")
    for what, own, expected in (
        ("the task", record.options, task.options),
        ("the task", record.spec, task.spec),
        ("the cell", record.spec, {key: spec.get(key) for key in record.spec}),
    ):
        for key in {**expected, **own}:
            if own.get(key) != expected.get(key):
                sentence = (
                    f"the record was measured with {key} {text(own.get(key))}, {what} asks for "
                    f"{text(expected.get(key))}: it belongs elsewhere, or the request was changed on the way."
                )
                return PrecisionVerdict("another_record", sentence)
    return None


def judge_precision(
    spec: Spec,
    decision: Mapping[str, Any] | None,
    evidence: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    allow_fallback: bool = False,
    required: str = RUNGS[-1],
) -> PrecisionVerdict:
    """requested = resolved = effective, with all evidence up to the rung `required`. spec: the cell's;
    decision, evidence, facts: a record's."""
    if decision is None:
        sentence = "the record holds no decision, so nothing says what was to run."
        return PrecisionVerdict("no_decision", sentence)
    verdict = _judge_decision(spec, decision, allow_fallback)
    if verdict.reason:
        return verdict
    if evidence is None:
        return PrecisionVerdict("no_evidence", "the record carries no evidence, so nothing shows what ran.")
    levels = tuple(Level(**level) for level in evidence["levels"])
    shown = Evidence(**{**evidence, "levels": tuple(x for x in levels if _counts(x, required))})
    wrong = _contradicted(decision, shown) or _not_shown(decision, levels, shown, required)
    if not wrong.reason and facts.get("scale_kind") == "unknown":
        wrong = PrecisionVerdict(states.MISMATCH, f"mismatch: {facts.get('scale_source')}")
    return wrong if wrong.reason else verdict


def _judge_decision(spec: Spec, decision: Mapping[str, Any], allow_fallback: bool) -> PrecisionVerdict:
    """requested = resolved, or a declared fallback that the gate allows."""
    fallbacks = []
    for aspect in ASPECTS:
        choice = decision[aspect]
        requested, resolved = choice["requested"], choice["resolved"]
        if requested != spec[aspect]:
            asked = f"the matrix asks for {aspect} {spec[aspect]}, but the resolver was asked for {requested}"
            return PrecisionVerdict("request_dropped", f"{asked}: the request was dropped on the way.")
        if requested not in (AUTO, resolved):
            if undeclared := _undeclared(spec, aspect, choice):
                return PrecisionVerdict("undeclared_fallback", undeclared)
            fallbacks.append(f"{aspect} {requested} fell back to {resolved}: {choice['reason']}")
    if fallbacks and not allow_fallback:
        remedy = "Set allow_fallback: true in the gate to accept a declared fallback."
        return PrecisionVerdict("fallback", f"{'; '.join(fallbacks)}. {remedy}")
    return PrecisionVerdict(fallback="; ".join(fallbacks))


def _contradicted(decision: Mapping[str, Any], evidence: Evidence) -> PrecisionVerdict | None:
    """A verdict unless resolved = effective and every level that counts is verified."""
    shown = {"kv_format": evidence.effective, "weights": evidence.effective_weights}
    off = [aspect for aspect in shown if shown[aspect] != decision[aspect]["resolved"]]
    if evidence.state == states.VERIFIED and not off:
        return None
    of = off or ["kv_format"]
    resolved = " and ".join(decision[aspect]["resolved"] for aspect in of)
    effective = " and ".join(shown[aspect] for aspect in of)
    why = f"The engine was made for {effective}: the decision did not reach the engine."
    if evidence.state != states.VERIFIED:
        wanted = (states.MISMATCH,) if evidence.state == states.MISMATCH else states.NOT_SHOWN
        lost = [f"{level.name}: {level.sentence}" for level in evidence.levels if level.state in wanted]
        why = " ".join(lost) or why
    state = evidence.state if evidence.state != states.VERIFIED else states.MISMATCH
    return PrecisionVerdict(state, f"{state}: {resolved} was resolved, the evidence shows {effective}. {why}")


def _not_shown(
    decision: Mapping[str, Any], levels: Sequence[Level], evidence: Evidence, required: str
) -> PrecisionVerdict:
    """Levels that must be verified and are not there, or say that they do not apply."""
    needed = [name for name in LEVELS if rung(name) <= required]
    silent = [x.name for x in evidence.levels if x.name.endswith("-weights") and x.state != states.VERIFIED]
    idle = [
        x.name for x in levels if x.state == states.NOT_APPLICABLE and x.name in set(needed) - _MAY_BE_IDLE
    ]
    lacking = [name for name in needed if name not in {x.name for x in levels}]
    if silent and decision["weights"]["resolved"] != "native":
        sentence = f"{', '.join(silent)} say nothing of the quantized weights; run the matrix again."
    elif idle:
        sentence = f"{', '.join(idle)} say that they do not apply, and they apply to every cell."
    elif lacking:
        sentence = f"the evidence lacks {', '.join(lacking)}; run the matrix again."
    else:
        return PrecisionVerdict()
    return PrecisionVerdict(states.UNVERIFIED, f"unverified: {sentence}")


def _undeclared(spec: Spec, aspect: str, choice: Mapping[str, Any]) -> str:
    """Why a resolution that differs from the request is no declared fallback, or ""."""
    what = f"{aspect} {choice['requested']} was resolved to {choice['resolved']}"
    if choice["requested"] == "native":
        return f"{what}: nothing falls back from native, so what should be native is quantized."
    if choice["reason"] == "requested":
        return f"{what} with the reason of a request that was kept: it was dropped on the way, not declared."
    if spec.get("fallback") != "allow":
        return f"{what} ({choice['reason']}), and the matrix allows no fallback: it was not declared."
    return ""


def _counts(level: Level, required: str) -> bool:
    """A mismatch always counts. The native arm stands on the rungs that are unverified in it."""
    stands_on = level.facts.get("unverified") or [level.name if level.name in LEVELS else RUNGS[0]]
    return level.state == states.MISMATCH or min(map(rung, stands_on)) <= required


def _confirmed(spec: Spec, records: Sequence[Record], fallbacks: Sequence[str], required: str) -> str:
    own = {record.runner for record in records}
    ran = [runner for runner in RUNNERS if runner in own]  # cells of one finding say it alike
    levels: dict[str, dict[str, None]] = {
        states.VERIFIED: {},
        states.UNVERIFIED: {},
        states.NOT_AVAILABLE: {},
    }
    for record in records:
        assert record.evidence is not None
        for level in record.evidence["levels"]:
            levels.get(level["state"], {})[level["name"]] = None
    shown = f"verified by {', '.join(levels[states.VERIFIED])} in {', '.join(ran)}"
    if levels[states.UNVERIFIED]:
        shown += (
            f"; unverified, which the gate allows above {required}: {', '.join(levels[states.UNVERIFIED])}"
        )
    if levels[states.NOT_AVAILABLE]:
        shown += f"; not available from this engine: {', '.join(levels[states.NOT_AVAILABLE])}"
    shown += "."
    if fallbacks:
        return f"a declared fallback, which the gate allows: {'; '.join(fallbacks)}; {shown}"
    weights = "" if spec["weights"] == "native" else f" with {spec['weights']} weights"
    return f"{spec['kv_format']}{weights} is requested, resolved and effective, {shown}"


def _another_arm(record: Record) -> PrecisionVerdict | None:
    """A verdict where times belong to another arm, or to another request than the cell's."""
    if record.runner != "latency" or record.decision is None:
        return None
    shape = record.spec["batch"], record.spec["context"], record.options["new_tokens"]
    tokens = shape[0] * (shape[1] + shape[2] - 1)  # the last generated token is never fed back
    own = {aspect: record.decision[aspect]["resolved"] for aspect in ("kv_format", "weights")}
    native = dict.fromkeys(own, "native")
    for arm in record.samples.get("arms", []):
        expected = {**(native if arm["arm"] == "baseline" else own), "computed_tokens": tokens}
        ran = arm.get("ran", {})
        for what, value in expected.items():
            if ran.get(what) != value:
                found = f"a request of arm {arm['arm']} ran with {what} {ran.get(what, 'unknown')}"
                sentence = f"{found}, expected {value}: the times belong to another arm or cell."
                return PrecisionVerdict("another_arm", sentence)
    return None


# Numbers of a record that no quantized cache leaves as they are, to the last bit.
_NUMBERS: dict[str, Callable[[Mapping[str, Any]], Sequence[Any]]] = {
    "perplexity": lambda samples: [chunk["nll"] for chunk in samples.get("chunks", [])],
    "agreement": lambda samples: samples.get("logprob_native_token", []),
    "mcq": lambda samples: [q["scores"] for q in samples.get("questions", []) if q["skipped"] is None],
}


def _equal_to_native(record: Record, baseline: Record | None) -> PrecisionVerdict | None:
    """E5: a verdict where every number of a quantized cell equals native's bit for bit. Not judged where
    equality has another cause: `prefill_reads: fresh` does not read a prompt back, and the logits of random
    weights hardly depend on attention."""
    numbers = _NUMBERS.get(record.runner)
    if baseline is None or numbers is None or record.decision is None:
        return None
    quantized = [a for a in ("kv_format", "weights") if record.decision[a]["resolved"] != "native"]
    if not quantized or record.spec["prefill_reads"] != "stored" or record.spec["model_weights"] == "random":
        return None
    own, native = numbers(record.samples), numbers(baseline.samples)
    chunks = record.samples.get("native_chunks") if record.runner == "perplexity" else None
    divergences = record.samples.get("kld_tokens") or ()
    if own and chunks and own == numbers({"chunks": chunks}):
        sentence = f"the native pass gave the same {len(own)} numbers: the cell was compared with itself."
    elif len(divergences) > 1 and not any(divergences):
        sentence = f"all {len(divergences)} divergences from native are 0: native was compared with itself."
    elif own and own == native:
        formats = " with ".join(record.decision[aspect]["resolved"] for aspect in quantized)
        what = "a quantized cache" if quantized[0] == "kv_format" else "quantized weights"
        equal = f"all {len(own)} numbers equal native's bit for bit"
        sentence = f"{equal}, which {formats} cannot give: nothing read {what}."
    else:
        return None
    return PrecisionVerdict("equal_to_native", f"E5: {sentence}")
