"""What is read before any number: the verdict in counts, and what changes how the numbers are read, such as
the state of the device while latency was measured.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import CALIBRATED
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS
from kvbench.machine.same_machine import names
from kvbench.matrix.runners import RUNNERS
from kvbench.records.record import ERROR, OK, Record
from kvbench.render.labels import Label
from kvbench.render.numbers import one_line, plain
from kvbench.report.model import JudgedRun, judged
from kvbench.report.sections.checks import count
from kvbench.stats import stability

_MOST = 4  # sentences of a notice
# fact of a state: (name, unit, fact of its limit)
_SHOWN = (
    ("sm_mhz", "SM", "MHz", "sm_max_mhz"),
    ("memory_mhz", "memory", "MHz", "memory_max_mhz"),
    ("temperature_c", "", "°C", ""),
    ("power_w", "", "W", "power_limit_w"),
)
_STATUS_WORDS = {FAIL: "failed", INCONCLUSIVE: "inconclusive", NOT_EVALUATED: "not evaluated", PASS: "passed"}


@dataclass(frozen=True)
class DeviceLine:
    """slowed: why and in how many requests the device was throttled, or ""; others: other processes on the
    GPU, or ""; sentence: everything, with the ranges of each arm.
    """

    label: Label
    slowed: str
    others: str
    sentence: str


@dataclass(frozen=True)
class Notice:
    """tone: "warn" or "info"; remedy: what to do about it."""

    tone: str
    title: str
    found: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.found} {self.remedy}".strip()


def warning(title: str, found: str, remedy: str) -> Notice:
    """A warning always says what to do."""
    return Notice("warn", title, found, remedy)


def info(title: str, found: str, remedy: str = "") -> Notice:
    return Notice("info", title, found, remedy)


def headline(run: JudgedRun) -> str:
    """One sentence of counts: `14 checks: 2 failed, 12 passed; 1 of 26 tasks ended in an error.`"""
    counts = Counter(outcome.status for outcome in run.verdict.outcomes)
    total = sum(counts.values())
    if not total:
        return "No check was evaluated."
    if counts[PASS] == total and run.verdict.exit_code == 0:
        if judged(run):
            sentence = f"All {total} checks passed" if total > 1 else "The only check passed"
        else:
            which = f"all {total} built-in checks" if total > 1 else "the only built-in check"
            sentence = f"No gate was applied; {which} passed"
    else:
        shares = [f"{counts[status]} {word}" for status, word in _STATUS_WORDS.items() if counts[status]]
        sentence = f"{count(total, 'check')}: {', '.join(shares)}"
    errors = sum(record.status == ERROR for record in run.records)
    ended = f"; {errors} of {len(run.manifest.tasks)} tasks ended in an error" if errors else ""
    return f"{sentence}{ended}."


def notices(run: JudgedRun, device: Sequence[DeviceLine] = ()) -> list[Notice]:
    """What changes how every number is read; a throttled device comes first."""
    kinds = (_models, _calibrated, _coverage, _hosts, _stopped, _busy)
    found = [*_device(device)]
    if not judged(run):
        text = "Only the built-in checks (precision, errors, plausible values) ran; no number has a limit."
        remedy = "Pass one with --gate FILE (kvbench init writes one)."
        found.append(warning("No gate was applied", text, remedy))
    return [*found, *(notice for of in kinds for notice in of(run))]


def _device(lines: Sequence[DeviceLine]) -> Iterator[Notice]:
    if slowed := _while_measured((line.label.text, line.slowed) for line in lines):
        remedy = "Let it cool down, or raise its limit (kvbench doctor names it), and measure latency again."
        yield warning("The device was throttled", slowed, remedy)
    if shared := _while_measured((line.label.text, line.others) for line in lines):
        yield info("The GPU was shared", shared)


def _while_measured(found: Iterable[tuple[str, str]]) -> str:
    """(label, text) pairs as one sentence a text; "" where every text is empty."""
    places: dict[str, list[str]] = {}
    for label, text in found:
        if text:
            places.setdefault(text, []).append(label)
    sentences = [f"{', '.join(labels)}: {text}." for text, labels in places.items()]
    return f"While latency was measured. {_first(sentences, ', in the latency section')}" if sentences else ""


def _first(sentences: Sequence[str], where: str = "") -> str:
    rest = len(sentences) - _MOST
    return " ".join((*sentences[:_MOST], *([f"And {rest} more{where}."] if rest > 0 else [])))


def _models(run: JudgedRun) -> Iterator[Notice]:
    specs = [cell.spec for cell in run.manifest.cells]

    def models(key: str, value: Any) -> str:
        return ", ".join(dict.fromkeys(plain(s.get("model"), 60) for s in specs if s.get(key) == value))

    if found := models("trust_remote_code", True):
        sentence = f"Python code that came with {found} was executed (trust_remote_code: true)."
        remedy = "Pin its revision and review that code before you rely on a number."
        yield warning("Remote code trusted", sentence, remedy)
    warned: dict[str, dict[str, None]] = {}
    for record, _ in run.done():
        for text in record.facts.get("weight_warnings", ()):
            warned.setdefault(plain(text, 600), {})[plain(record.spec.get("model"), 60)] = None
    for text, of in warned.items():
        remedy = "If this is not intended, correct the checkpoint or the matrix."
        yield warning("About the weights", f"{', '.join(of)}: {text}", remedy)
    if found := models("plumbing", True):
        sentence = f"{found}: the results show that the parts work together, not how good the model is."
        yield warning("Plumbing test", sentence, "For quality, use a real checkpoint without `plumbing`.")
    if found := models("model_weights", "random"):
        sentence = f"{found} has random weights: bytes and times are valid, quality numbers are meaningless."
        yield warning("Random weights", sentence, "To measure quality, use a real checkpoint.")
    if found := models("prefill_reads", "fresh"):
        sentence = f"{found}: a prompt's own chunk is not read back from the cache (prefill_reads: fresh)."
        remedy = "Use prefill_reads: stored to include the error that a prompt gets from the quantized cache."
        yield warning("Prompts read fresh K/V", sentence, remedy)


def _calibrated(run: JudgedRun) -> Iterator[Notice]:
    """Scale files, and what measures them on the same text that they were calibrated on."""
    found: dict[str, None] = {}
    for record, _ in run.done():
        scale = record.spec.get("scale")
        facts = scale.get(CALIBRATED) if isinstance(scale, dict) else None
        if facts and facts["data_sha256"] == record.facts.get("data_sha"):
            what = f"{record.runner} {plain(record.options.get('data', ''), 60)}".strip()
            found[f"{plain(facts['file'], 60)} by {what}"] = None
    if found:
        sentence = f"{', '.join(found)}: calibrated on the start of the same text; its results are too good."
        remedy = "Calibrate on another text (kvbench calibrate --data), or measure on another."
        yield info("Calibrated on the evaluation text", sentence, remedy)


def _coverage(run: JudgedRun) -> Iterator[Notice]:
    manifest = run.manifest
    if partial := sum(record.partial is not None for record in run.records):
        sentence = f"{partial} of {len(run.records)} results use only part of their data; they are marked."
        yield info("Partial run", sentence, "For a release decision set the limits to null (all data).")
    if share := manifest.shard:
        sentence = (
            f"This run has {len(share.tasks)} of {len(manifest.tasks)} tasks; others are not evaluated, "
            "so this is not a pass of the whole matrix."
        )
        remedy = "Merge the shards: kvbench merge RUN RUN... --out DIR."
        yield info(str(share.shard).capitalize(), sentence, remedy)
    if differences := manifest.merged and manifest.merged.differences:
        found = _first([plain(sentence, 300) for sentence in differences])
        remedy = "Find the cause before comparing: a task should give the same result on every host."
        yield warning("Shards differ", found, remedy)


def _hosts(run: JudgedRun) -> Iterator[Notice]:
    cells: dict[str, list[str]] = {}
    for record, task in run.done():
        if record.status == OK and record.runner in RUNNERS and RUNNERS[record.runner].timed:
            for host in names([record.environment]):
                cells.setdefault(host, []).extend(task.cells)
    if len(cells) > 1:
        parts = []
        for host, ids in list(cells.items())[:_MOST]:
            own = [cell for cell in run.run.cells if cell in ids]
            rest = f" and {count(len(own) - 1, 'more cell')}" if len(own) > 1 else ""
            parts.append(f"{plain(host, 80)}: {run.labels.cell(own[0]).text}{rest}")
        parts += [f"and {len(cells) - _MOST} more"] if len(cells) > _MOST else []
        found = f"Times were measured on different machines and are not combined. {'; '.join(parts)}."
        yield warning("Times of several hosts", found, "To compare times, measure them on one host.")


def _stopped(run: JudgedRun) -> Iterator[Notice]:
    total = len(run.manifest.tasks)
    missing = total - len(run.records)
    if run.manifest.stopped:
        yield info("Stopped early", f"{missing} of {total} tasks were {run.manifest.not_run}.")
    elif missing > 0 and not run.manifest.shard:
        remedy = "Run the same command again: it continues where it stopped."
        yield warning("Unfinished run", f"{missing} of {total} tasks have no record yet.", remedy)
    for runner, look in run.manifest.looks.items():
        if any(record.runner == runner for record in run.records):
            sentence = (
                f"{runner} was judged at {look.place}, at {look.level}, so all looks together are one test. "
                "The detectable effect is given at the same level."
            )
            yield info("Sequential test", sentence)


def _busy(run: JudgedRun) -> Iterator[Notice]:
    """Other work on the machine while latency was measured: a load of more than one process a CPU."""
    loads = [load for record, _ in run.done() if (load := record.facts.get("host_load")) and load.get("cpus")]
    pairs = [(max(x["before"], x["after"]), x["cpus"]) for x in loads]
    high, cpus = max(pairs, key=lambda pair: pair[0] / pair[1], default=(0, 1))
    if high > cpus + 1:
        sentence = f"A load of up to {high:.1f} on {cpus} CPUs while latency was measured affects the times."
        yield warning("The machine was busy", sentence, "Measure again on an idle one (kvbench doctor).")


def device_lines(run: JudgedRun) -> tuple[DeviceLine, ...]:
    """A line for each latency record that has the device's state; older records have none."""
    return tuple(
        _line(record, run.labels.task(task))
        for record, task, _ in run.completed("latency")
        if "device_state" in record.facts
    )


def _line(record: Record, label: Label) -> DeviceLine:
    arms, facts = record.samples.get("arms", ()), record.facts["device_state"]
    slowed = stability.slowdown_text(arms)
    known = sum(stability.slowdown(arm) is not None for arm in arms)
    if slowed:
        state = f"throttled in {slowed}"
    elif known:
        state = f"not throttled in {known} of {len(arms)} requests"
    else:
        state = "whether it was throttled could not be read"
    names = sorted({arm["arm"] for arm in arms}, reverse=True)
    ranges = {name: _ranges([arm for arm in arms if arm["arm"] == name], facts) for name in names}
    parts = [f"{name} {text}" for name, text in ranges.items() if text]
    others = stability.other_processes_text(facts.get("other_processes"))
    unread = [f"{fact} not read: {reason}" for fact, reason in facts.get("unread", {}).items()]
    sentence = "; ".join(filter(None, (state, *parts, others, *unread)))
    return DeviceLine(label, one_line(slowed, 300), one_line(others, 200), one_line(sentence, 1500))


def _ranges(arms: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Of one arm: `SM 1350-1980 of 1980 MHz, 41-62 °C, 240-480 of 700 W, sw power cap in 2, steal 0.4%`."""
    found = []
    for fact, name, unit, limit in _SHOWN:
        if values := stability.device_values(arms, fact):
            ends = dict.fromkeys(f"{end:.0f}" for end in (min(values), max(values)))
            most = f" of {facts[limit]:.0f}" if facts.get(limit) is not None else ""
            found.append(f"{name} {'-'.join(ends)}{most} {unit}".strip())
    states = [(arm["device"]["before"], arm["device"]["after"]) for arm in arms if arm.get("device")]
    if capped := sum(any("sw power cap" in (end.get("reasons") or ()) for end in ends) for ends in states):
        found.append(f"sw power cap in {capped} of {len(arms)}")
    for key, word, ms in (("quota_us", "CPU quota", 1e-3), ("thermal_ns", "thermal violations", 1e-6)):
        if grown := [lost for ends in states if (lost := stability.grown(*ends, key))]:
            found.append(f"{word} took {sum(grown) * ms:.3g} ms")
    grown_both = [[stability.grown(*ends, key) for key in ("steal_ticks", "cpu_ticks")] for ends in states]
    shares = [(steal, ticks) for steal, ticks in grown_both if steal is not None and ticks]
    if stolen := sum(steal for steal, _ in shares):  # by other machines of the host
        found.append(f"steal {stolen / sum(ticks for _, ticks in shares):.1%}")
    return ", ".join(found)
