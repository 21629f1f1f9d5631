"""What GitHub Actions shows of a run: annotations on the lines of the matrix, and the step summary.

Annotations are workflow commands, which the runner finds in either stream; they go to stderr, so that stdout
has only the requested output. GitHub shows ten of a kind a step, so the ten worst are errors and one warning
counts the rest. GitHub drops a summary of more than 1 MiB, so it is cut here by sections, and names what is
missing.

A cell's line is in the manifest: its format among the axes, or its `include` entry. An outcome of a cell
without a line, such as an added baseline, belongs to the runner that measured it. An outcome without a cell
belongs to its check in the gate. If the matrix has changed since the run, no line is named.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.gate.verdict import Outcome
from kvbench.matrix.document import Document
from kvbench.metrics.collect import METRICS
from kvbench.render.numbers import one_line
from kvbench.report.markdown import escaped, head, sections
from kvbench.report.model import JudgedRun, worst
from kvbench.report.sections.checks import count
from kvbench.report.view import View, build

MOST = 10  # annotations of a kind that GitHub shows of a step
SUMMARY_BYTES = 2**20
TITLE_LIMIT, SENTENCE_LIMIT = 120, 1000


@dataclass(frozen=True)
class Place:
    """path: relative to the repository, with `/`; line: from 1, None if unknown."""

    path: str
    line: int | None


@dataclass(frozen=True)
class Annotation:
    """level: error, warning or notice; place: None without a file."""

    level: str
    title: str
    sentence: str
    place: Place | None = None

    @property
    def command(self) -> str:
        """`::error file=matrices/int8.yaml,line=4,title=...::sentence`"""
        properties = {"title": self.title}
        if self.place:
            line = {"line": str(self.place.line)} if self.place.line else {}
            properties = {"file": self.place.path, **line, **properties}
        text = ",".join(f"{key}={in_property(value)}" for key, value in properties.items())
        return f"::{self.level} {text}::{in_message(self.sentence)}"


def in_message(text: str) -> str:
    """Text after the second `::` of a command, with the escapes of GitHub's toolkit."""
    text = "".join(c if c in "\r\n" else one_line(c) for c in text)
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def in_property(text: str) -> str:
    """The value of a command's property, which a colon or a comma would end."""
    return in_message(text).replace(":", "%3A").replace(",", "%2C")


def annotate(run: JudgedRun, places: Mapping[int, Place | None]) -> list[Annotation]:
    """The ten worst findings, and one more that counts the rest. places: by the outcome's `id`.

    Outcomes of one check with one status at one place are one finding: 40 cells must not hide the next check.
    """
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in worst(run.verdict.outcomes):
        key = (outcome.status, outcome.check, outcome.variant, places.get(id(outcome)))
        groups.setdefault(key, []).append(outcome)
    found = list(groups.values())
    shown = [_annotation(run, outcomes, places.get(id(outcomes[0]))) for outcomes in found[:MOST]]
    if rest := found[MOST:]:
        n = sum(map(len, rest))
        checks = ", ".join(dict.fromkeys(outcomes[0].check for outcomes in rest))
        sentence = f"{count(n, 'more check')} did not pass: {checks}. The report has all of them."
        shown.append(Annotation("warning", f"kvbench: {n} more", _cut(sentence)))
    return shown


def _annotation(run: JudgedRun, outcomes: Sequence[Outcome], place: Place | None) -> Annotation:
    first = outcomes[0]
    where = run.labels.places(list(dict.fromkeys(cell for outcome in outcomes for cell in outcome.cells)))
    cells = sum(len(label.cells) for label in where[1:])
    rest = f" and {count(cells, 'more cell')}" if cells else ""
    status = first.status.replace("_", " ")
    title = one_line(f"kvbench {status}: {first.check} ({where[0].text}{rest})", TITLE_LIMIT)
    others = f" {len(outcomes) - 1} more like it." if len(outcomes) > 1 else ""
    return Annotation("error", title, _cut(first.sentence) + others, place)


def _cut(text: str) -> str:
    return text if len(text) <= SENTENCE_LIMIT else f"{text[: SENTENCE_LIMIT - 1]}…"


def places_of(run: JudgedRun, gate: Any, root: Path, cwd: Path) -> dict[int, Place | None]:
    """The place of each outcome, by its `id`. root: the repository; cwd: the base of the manifest's paths."""
    matrix = run.manifest.matrix
    path, same = _file(matrix.path, matrix.sha, cwd)
    document = _read(path) if path and same else None
    lines = {cell.id: cell.line for cell in run.manifest.cells} if same else {}
    checks = {check.name: check.line for check in gate.checks} if gate else {}
    gate_path, _ = _file(gate.path if gate else None, None, cwd)

    def place(outcome: Outcome) -> Place | None:
        if not outcome.cells and gate_path and outcome.check in checks:
            return Place(_relative(gate_path, root), checks[outcome.check])
        if path is None:
            return None
        line = next((lines[cell] for cell in outcome.cells if lines.get(cell)), None)
        if line is None and document:  # of the runner that measured the metric, or of `runners`
            metric = METRICS.get(outcome.metric)
            line = document.mark(("runners", metric.runner) if metric else ("runners",), key=True)[0] or None
        return Place(_relative(path, root), line)

    return {id(outcome): place(outcome) for outcome in run.verdict.outcomes}


def _file(path: object, sha: object, cwd: Path) -> tuple[Path | None, bool]:
    """The file, None if it does not exist, and whether it still has that digest."""
    if not path:
        return None, False
    here = cwd / Path(str(path))
    try:
        return here, hashlib.sha256(here.read_bytes()).hexdigest() == sha
    except (OSError, ValueError):
        return None, False


def _read(path: Path) -> Document | None:
    from kvbench.matrix import yaml as yamlstrict

    try:
        return yamlstrict.read(path)
    except UsageError:
        return None


def _relative(path: Path, root: Path) -> str:
    whole, base = path.resolve(), root.resolve()
    return (whole.relative_to(base) if whole.is_relative_to(base) else whole).as_posix()


def summary(view: View, run: JudgedRun, limit: int) -> str:
    """The report in at most `limit` bytes: whole sections, and the names of the others; "" if none fits."""
    kept, found = head(view), sections(view, run)
    reserve = _bytes(_left_out(list(found)))  # the longest that the last line can be
    left: list[str] = []
    for title, section in found.items():
        text = f"{kept}\n{section}"
        if left or _bytes(text) + reserve > limit:
            left.append(title)
        else:
            kept = text
    text = kept + (_left_out(left) if left else "")
    return text if _bytes(text) <= limit else ""


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", errors="replace"))


def _left_out(titles: Sequence[str]) -> str:
    names = ", ".join(escaped(title, 80) for title in titles)
    return f"\n_Cut to GitHub's size limit for a step summary; left out: {names}. report.md has them._\n"


def append_summary(path: Path, view: View, run: JudgedRun) -> str:
    """Append the summary to the step's file, which may have content. Returns why it could not, or ""."""
    try:
        there = path.stat().st_size if path.exists() else 0
        text = summary(view, run, SUMMARY_BYTES - there - 2)
        if not text:
            return f"the step summary has {there:,} of {SUMMARY_BYTES:,} bytes, so the verdict does not fit"
        with path.open("a", encoding="utf-8", errors="replace", newline="") as f:
            f.write(f"\n{text}\n" if there else text)
    except OSError as e:
        return f"the step summary {path} cannot be written ({e.strerror or e})"
    return ""


def announce(run: JudgedRun, gate: Any, environ: Mapping[str, str]) -> list[str]:
    """The lines for stderr; appends the summary. Only in GitHub Actions. gate: the policy, or None."""
    lines = []
    if environ.get("GITHUB_ACTIONS") == "true":
        places = places_of(run, gate, Path(environ.get("GITHUB_WORKSPACE") or "."), Path.cwd())
        lines = [annotation.command for annotation in annotate(run, places)]
    if summary_file := environ.get("GITHUB_STEP_SUMMARY"):
        fault = append_summary(Path(summary_file), build(run), run)
        lines += [f"kvbench: {fault}; the report is in the run directory."] if fault else []
    return lines
