"""What is read before any number: the verdict in counts, and what changes the meaning of everything below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import CALIBRATED
from kvbench.records.record import ERROR
from kvbench.render.labels import Labels
from kvbench.render.numbers import plain
from kvbench.report.model import JudgedRun, judged
from kvbench.report.sections.device import DeviceLine
from kvbench.report.sections.scaleout import scale_out

_MOST = 4  # sentences of a notice
_ABOUT_WEIGHTS = "Where that is not meant, correct the checkpoint or the matrix."
_COOL = "Let it cool, or lift the limit (kvbench doctor names it), and measure latency again."

_STATUS_WORDS = {
    "pass": "passed",
    "fail": "failed",
    "inconclusive": "inconclusive",
    "not_evaluated": "not evaluated",
}


@dataclass(frozen=True)
class Notice:
    """Something that must be read before any number. tone: "warn" or "info"; remedy: what to do about it, which a warning always
    says."""

    tone: str
    title: str
    found: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.found} {self.remedy}".strip()


def headline(run: JudgedRun) -> str:
    """One sentence of counts: `2 of 14 checks failed, 12 passed; 1 task ended in an error.`"""
    counts = Counter(outcome.status for outcome in run.verdict.outcomes)
    total = sum(counts.values())
    if not total:
        return "No check was evaluated."
    if counts["pass"] == total and run.verdict.exit_code == 0 and not judged(run):
        many = f"all {total} checks that always run" if total > 1 else "the only check that always runs"
        sentence = f"No gate was judged; {many} passed"
    elif counts["pass"] == total and run.verdict.exit_code == 0:
        sentence = f"All {total} checks passed" if total > 1 else "The only check passed"
    else:
        order = ("fail", "inconclusive", "not_evaluated", "pass")
        shares = [f"{counts[status]} {_STATUS_WORDS[status]}" for status in order if counts[status]]
        sentence = f"{total} check{'s' if total > 1 else ''}: {', '.join(shares)}"
    errors = sum(record.status == ERROR for record in run.records)
    tasks = len(run.manifest.tasks)
    ended = f"; {errors} of {tasks} tasks ended in an error" if errors else ""
    return f"{sentence}{ended}."


def notices(run: JudgedRun, labels: Labels, device: Sequence[DeviceLine] = ()) -> list[Notice]:
    """What changes how every number below is to be read; a device that was slowed down comes first."""
    specs = [cell.spec for cell in labels.cells.values()]
    found = [
        *_of_device(device, "warn", "The device was slowed down", lambda line: line.slowed, _COOL),
        *_of_device(device, "info", "The GPU was shared", lambda line: line.others),
    ]
    if not judged(run):
        found.append(
            Notice(
                "warn",
                "No gate was judged",
                "Only the checks that always run were (precision, errors, possible values); no number was held to a limit.",
                "Name a policy: --gate FILE (kvbench init writes one).",
            )
        )

    def models(key: str, value: Any) -> str:
        return ", ".join(dict.fromkeys(plain(s.get("model"), 60) for s in specs if s.get(key) == value))

    if names := models("trust_remote_code", True):
        found.append(
            Notice(
                "warn",
                "Remote code trusted",
                f"Python code that came with {names} was run (trust_remote_code: true).",
                "Pin its revision, and read that code before you believe a number.",
            )
        )
    warned: dict[str, dict[str, None]] = {}
    for record, _ in run.done():
        for sentence in record.facts.get("weight_warnings", ()):
            warned.setdefault(plain(sentence, 600), {})[plain(record.spec.get("model"), 60)] = None
    found += [
        Notice("warn", "About the weights", f"{', '.join(names)}: {sentence}", _ABOUT_WEIGHTS)
        for sentence, names in warned.items()
    ]
    if names := models("plumbing", True):
        found.append(
            Notice(
                "warn",
                "Plumbing run",
                f"{names}: results show that the parts work together, not what a model's quality is.",
                "For that name a checkpoint and leave out plumbing.",
            )
        )
    if names := models("model_weights", "random"):
        found.append(
            Notice(
                "warn",
                "Random weights",
                f"{names} has random weights: bytes and times are real, quality numbers mean nothing.",
                "For these name a checkpoint.",
            )
        )
    if names := models("prefill_reads", "fresh"):
        found.append(
            Notice(
                "warn",
                "Prompts read fresh K/V",
                f"{names}: a prompt's own chunk is not read back from the quantized store (prefill_reads: fresh).",
                "Only prefill_reads: stored shows what a prompt costs that reads what was stored.",
            )
        )
    if texts := _measured_where_calibrated(run):
        found.append(
            Notice(
                "info",
                "Scales calibrated on the text they are measured on",
                f"{', '.join(texts)}: the file's scales come from tokens at the head of the same text, which flatters them there. "
                "Calibrate on another text (kvbench calibrate --data), or measure on another.",
            )
        )
    partial = sum(record.partial is not None for record in run.records)
    if partial:
        found.append(
            Notice(
                "info",
                "Partial run",
                f"{partial} of {len(run.records)} results cover less than the whole; they are marked.",
                "A release is judged on whole sets: limits set to null.",
            )
        )
    found += [Notice(*said) for said in scale_out(run, labels)]
    missing = len(run.manifest.tasks) - len(run.records)
    if run.manifest.stopped:
        tasks = f"{missing} of {len(run.manifest.tasks)} tasks were"
        found.append(Notice("info", "Stopped early", f"{tasks} {run.manifest.not_run}."))
    elif missing > 0 and not run.manifest.shard:
        found.append(
            Notice(
                "warn",
                "Unfinished run",
                f"{missing} of {len(run.manifest.tasks)} tasks have no record yet.",
                "Run the same command again: it goes on where it was.",
            )
        )
    found += [
        Notice(
            "info",
            "Judged while it grew",
            f"{runner} was judged at {look.place}, at {look.level}, so that all of its looks together are one test; what is "
            "detectable is said at that level too.",
        )
        for runner, look in run.manifest.looks.items()
        if any(record.runner == runner for record in run.records)
    ]
    if busy := _busy(run):
        found.append(
            Notice("warn", "The machine was busy", busy, "Measure again on a free one (kvbench doctor).")
        )
    return found  # fmt: skip


def _measured_where_calibrated(run: JudgedRun) -> list[str]:
    """`scales.json by perplexity pydoc`: files of scales and what measures them on the text that they were calibrated on."""
    found: dict[str, None] = {}
    for record, _ in run.done():
        scale = record.spec.get("scale")
        facts = scale.get(CALIBRATED) if isinstance(scale, dict) else None
        if facts and facts["data_sha256"] == record.facts.get("data_sha"):
            what = f"{record.runner} {plain(record.options.get('data', ''), 60)}".strip()
            found[f"{plain(facts['file'], 60)} by {what}"] = None
    return list(found)


def _of_device(
    lines: Sequence[DeviceLine], tone: str, title: str, said: Callable[[DeviceLine], str], remedy: str = ""
) -> list[Notice]:
    """One notice of all latency records of which this is to be said, by what it says."""
    places: dict[str, list[str]] = {}
    for line in lines:
        if sentence := said(line):
            places.setdefault(sentence, []).append(line.label.text)
    sentences = [f"{', '.join(labels)}: {sentence}." for sentence, labels in places.items()]
    if not sentences:
        return []
    more = len(sentences) - _MOST
    rest = f" And {more} more, in the lines of latency." if more > 0 else ""
    found = f"While latency was measured. {' '.join(sentences[:_MOST])}{rest}"
    return [Notice(tone, title, found, remedy)]


def _busy(run: JudgedRun) -> str:
    """What else ran while latency was measured: a load of more than a process for each CPU, or ""."""
    loads = [load for record, _ in run.done() if (load := record.facts.get("host_load")) and load.get("cpus")]
    worst = max(loads, key=lambda load: max(load["before"], load["after"]) / load["cpus"], default=None)
    if worst is None or max(worst["before"], worst["after"]) <= worst["cpus"] + 1:
        return ""
    high = max(worst["before"], worst["after"])
    return f"A load of up to {high:.1f} on {worst['cpus']} CPUs while latency was measured: times are of a machine that does other work too."
