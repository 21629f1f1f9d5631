"""What GitHub Actions shows of a run: annotations on the lines of the matrix, and the summary of the step.

Annotations are workflow commands, lines that the runner finds in either stream; they go to stderr, so stdout stays what was
asked for. GitHub shows ten of a kind a step, so the ten worst are errors and one warning says how many more there are.
A summary of more than 1 MiB a step is dropped whole, so it is cut here, by sections, and says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line
from kvbench.report.markdown import escaped, head, sections
from kvbench.report.model import JudgedRun, OutcomeLike, worst
from kvbench.report.places import Place, places_of
from kvbench.report.view import View, build

MOST = 10  # annotations of a kind that GitHub shows of a step
SUMMARY_BYTES = 2**20
TITLE_LIMIT, SENTENCE_LIMIT = 120, 1000


@dataclass(frozen=True)
class Annotation:
    """level: error, warning or notice; place: None where it is about no file."""

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
        said = ",".join(f"{key}={in_property(value)}" for key, value in properties.items())
        return f"::{self.level} {said}::{in_message(self.sentence)}"


def in_message(text: str) -> str:
    """Text behind the second `::` of a command, with the escapes of GitHub's toolkit."""
    return _printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def in_property(text: str) -> str:
    """The value of a command's property, where a colon or a comma would end it."""
    return in_message(text).replace(":", "%3A").replace(",", "%2C")


def _printable(text: str) -> str:
    """Line ends stay, for the escapes above; whatever else is not printable is shown as its escape."""
    return "".join(c if c in "\r\n" else one_line(c) for c in text)


def annotate(run: JudgedRun, places: Mapping[int, Place | None]) -> list[Annotation]:
    """The ten worst findings, and one more that counts the rest. places: by the outcome's `id`.

    The outcomes of one check with one status at one place are one finding: 40 cells must not hide the next check.
    """
    groups: dict[tuple[object, ...], list[OutcomeLike]] = {}
    for outcome in worst(run.verdict.outcomes):
        key = (outcome.status, outcome.check, outcome.variant, places.get(id(outcome)))
        groups.setdefault(key, []).append(outcome)
    labels = Labels(run.run)
    found = list(groups.values())
    shown = [_annotation(outcomes, labels, places.get(id(outcomes[0]))) for outcomes in found[:MOST]]
    if more := found[MOST:]:
        count = sum(map(len, more))
        which = ", ".join(dict.fromkeys(outcomes[0].check for outcomes in more))
        sentence = f"{count} more {'checks' if count > 1 else 'check'} did not pass: {which}. The report has all of them."
        shown.append(Annotation("warning", f"kvbench: {count} more", _cut(sentence)))
    return shown


def _annotation(outcomes: Sequence[OutcomeLike], labels: Labels, place: Place | None) -> Annotation:
    first = outcomes[0]
    where = labels.places(list(dict.fromkeys(cell for outcome in outcomes for cell in outcome.cells)))
    cells = sum(len(label.cells) for label in where[1:])
    more = f" and {cells} more cell{'s' if cells > 1 else ''}" if cells else ""
    status = first.status.replace("_", " ")
    title = one_line(f"kvbench {status}: {first.check} ({where[0].text}{more})", TITLE_LIMIT)
    others = len(outcomes) - 1
    rest = f" {others} more like it." if others else ""
    return Annotation("error", title, _cut(first.sentence) + rest, place)


def _cut(text: str) -> str:
    return text if len(text) <= SENTENCE_LIMIT else f"{text[: SENTENCE_LIMIT - 1]}…"


def summary(view: View, run: JudgedRun, room: int) -> str:
    """The Markdown report in at most `room` bytes: whole sections, in order, and a line that names those left out."""
    kept = [head(view)]
    left: list[str] = []
    size = len(kept[0].encode("utf-8", errors="replace"))
    all_ = sections(view, run)
    # Room for the line that names the sections: all of their titles.
    reserve = len(_missing([section.title for section in all_]).encode("utf-8", errors="replace"))
    for section in all_:
        text = "\n" + section.text
        bytes_ = len(text.encode("utf-8", errors="replace"))
        if left or size + bytes_ + reserve > room:
            left.append(section.title)
            continue
        kept.append(text)
        size += bytes_
    text = "".join([*kept, _missing(left) if left else ""])
    return text if len(text.encode("utf-8", errors="replace")) <= room else ""


def _missing(titles: Sequence[str]) -> str:
    names = ", ".join(escaped(title, 80) for title in titles)
    return f"\n_Cut to GitHub's limit for the summary of a step; left out: {names}. report.md has them._\n"


def append_summary(path: Path, view: View, run: JudgedRun) -> str:
    """Append the summary to the step's file, which other commands may have written to. Returns why it was not, or ""."""
    try:
        there = path.stat().st_size if path.exists() else 0
        text = summary(view, run, SUMMARY_BYTES - there - 2)
        if not text:
            return f"the step summary has {there:,} of {SUMMARY_BYTES:,} bytes, too many to add the verdict"
        with path.open("a", encoding="utf-8", errors="replace", newline="") as f:
            f.write(f"\n{text}\n" if there else text)
    except OSError as e:
        return f"the step summary {path} cannot be written ({e.strerror or e})"
    return ""


def announce(run: JudgedRun, gate: Any, environ: Mapping[str, str]) -> list[str]:
    """The lines for stderr; appends the summary. Nothing outside GitHub Actions. gate: the policy that judged, or None."""
    lines = []
    if environ.get("GITHUB_ACTIONS") == "true":
        root = Path(environ.get("GITHUB_WORKSPACE") or ".")
        places = places_of(run, gate, root, Path.cwd())
        lines = [annotation.command for annotation in annotate(run, places)]
    if summary_file := environ.get("GITHUB_STEP_SUMMARY"):
        wrong = append_summary(Path(summary_file), build(run), run)
        lines += [f"kvbench: {wrong}; the report is in the run directory."] if wrong else []
    return lines
