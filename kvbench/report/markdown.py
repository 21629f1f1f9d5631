"""The run as Markdown (GitHub's dialect): the verdict, the worst checks, small tables. For step summaries and pull requests.

Text from outside is one line in which every character that Markdown or HTML would read stands behind a backslash, so a name
is shown as it is: no pipe ends a cell, no backtick opens code, no tag is a tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import NOT_MEASURED, one_line
from kvbench.report.model import JudgedRun, OutcomeLike, worst
from kvbench.report.sections.findings import Finding
from kvbench.report.sections.tables import Entry, MetricTable, limit_text, mde_text, needed_text, value_text
from kvbench.report.view import View

MOST = 10  # checks in the first table, and places under one finding
NAME_LIMIT = 120  # characters of a name in a table
SENTENCE_LIMIT = 600

# What Markdown, HTML, GitHub's formulas ($), mentions (@) and references (#) begin with.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~$&#@!{}]|(?<![^\W_])_|_(?![^\W_])")


@dataclass(frozen=True)
class Section:
    """title: plain text; body: Markdown."""

    title: str
    body: str

    @property
    def text(self) -> str:
        return f"## {escaped(self.title)}\n\n{self.body}\n"


def report(view: View, run: JudgedRun) -> str:
    """The whole report: `report.md`."""
    return "\n".join([head(view), *(section.text for section in sections(view, run))])


def head(view: View) -> str:
    """Title, verdict and what changes how every number is to be read."""
    lines = [f"# kvbench {escaped(view.name)}: {escaped(view.word)}", ""]
    lines += [f"**{escaped(view.word)}.** {escaped(view.headline)} Exit code {view.exit_code}.", ""]
    if view.model:
        lines += [f"Model: {escaped(view.model)}", ""]
    lines += [
        f"- **{escaped(notice.title)}.** {escaped(notice.sentence, SENTENCE_LIMIT)}"
        for notice in view.notices
    ]
    return "\n".join(lines).rstrip() + "\n"


def sections(view: View, run: JudgedRun) -> list[Section]:
    """In the order in which they are read; a section without content is left out."""
    made = [
        Section("Worst checks", _worst(run)),
        Section("Failures", _findings(view.failures)),
        Section("Fallbacks", _fallbacks(view)),
        Section("Not measured in full", _findings(view.gaps)),
        Section("Precision", _precision(view)),
        *(Section(table.title, _metrics(table)) for table in view.tables),
        Section("All checks", _checks(view)),
        Section("How to get this again", _reproduce(view)),
    ]
    return [section for section in made if section.body]


def escaped(text: str, limit: int | None = None) -> str:
    """Text from outside, inline: one line, at most `limit` characters of it (before the backslashes), nothing in it markup."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", one_line(text, limit))


def fenced(text: str) -> str:
    """A line of text from outside to be copied as it is: a block whose fence is longer than any in it."""
    line = one_line(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence}sh\n{line}\n{fence}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table of escaped cells; the last `numbers` columns are set to the right."""
    right = len(heads) - numbers
    rule = ["---:" if i >= right else "---" for i in range(len(heads))]
    lines = [heads, rule, *rows]
    return "\n".join(f"| {' | '.join(cell or ' ' for cell in line)} |" for line in lines)


def _worst(run: JudgedRun) -> str:
    found = worst(run.verdict.outcomes)
    if not found:
        return ""
    labels = Labels(run.run)
    counts = {(row.cell, row.metric, row.variant): row.n for row in run.rows}
    rows = [_outcome(outcome, labels, counts) for outcome in found[:MOST]]
    heads = (
        "Outcome",
        "Check",
        "Measured on",
        "Value",
        "Limit",
        "n",
        "Detectable",
        "n needed",
        "What was found",
    )
    more = len(found) - MOST
    rest = f"\n\nand {more} more below." if more > 0 else ""
    return table(heads, rows) + rest


def _outcome(
    outcome: OutcomeLike, labels: Labels, counts: Mapping[tuple[str, str, str], int | None]
) -> list[str]:
    n = counts.get((outcome.cell or "", outcome.metric, outcome.variant))
    return [
        f"**{outcome.status.replace('_', ' ')}**",
        escaped(_named(outcome.check, outcome.variant), NAME_LIMIT),
        _places(labels.places(outcome.cells), 1),
        escaped(value_text(outcome)),
        escaped(limit_text(outcome.limit), NAME_LIMIT),
        "" if n is None else f"{n:,}",
        escaped(mde_text(outcome)),
        escaped(needed_text(outcome)),
        escaped(labels.unnamed(outcome.sentence, outcome.cells), SENTENCE_LIMIT),
    ]


def _findings(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        why = f" {escaped(finding.why, SENTENCE_LIMIT)}" if finding.why else ""
        lines.append(f"- **{escaped(finding.kind)}**: {escaped(finding.title)}.{why}")
        lines += [
            f"  - _at_ {_places(item.where, MOST)}: {escaped(item.sentence, SENTENCE_LIMIT)}"
            for item in finding.items[:MOST]
        ]
        if len(finding.items) > MOST:
            lines.append(f"  - _and {len(finding.items) - MOST} more_")
    return "\n".join(lines)


def _fallbacks(view: View) -> str:
    rows = [
        [
            _places(fallback.where, MOST),
            escaped(fallback.choice.aspect),
            escaped(fallback.choice.requested),
            escaped(fallback.choice.resolved),
            escaped(fallback.choice.reason, NAME_LIMIT),
        ]
        for fallback in view.fallbacks
    ]
    return table(("Cell", "What", "Requested", "Resolved", "Why"), rows) if rows else ""


def _precision(view: View) -> str:
    rows = []
    for group in view.precision:
        line = group.line
        words = (line.kv.requested, line.kv.resolved or "not resolved", line.effective, line.storage, line.transfer,
                 line.execution, line.effective_weights, line.state)  # fmt: skip
        rows.append([_places(group.where, 1), *(escaped(word, NAME_LIMIT) for word in words)])
    heads = ("Cell", "Requested", "Resolved", "Effective", "Storage", "Transfer", "Execution", "Weights", "Evidence")  # fmt: skip
    return table(heads, rows) if rows else ""


def _metrics(table_: MetricTable) -> str:
    """A line a subject; each value with its unit, interval and n."""
    shown = [i for i, column in enumerate(table_.columns) if column.brief]
    if not table_.lines or not shown:
        return ""
    rows = []
    for line in table_.lines:
        name = _joined(
            _place(line.label), escaped(line.variant, NAME_LIMIT), "(partial)" if line.partial else ""
        )
        rows.append([name, *(_value(line.entries[i]) for i in shown)])
    heads = ["Measured on", *(escaped(table_.columns[i].metric, NAME_LIMIT) for i in shown)]
    foot = f"\n\n{escaped(table_.footnote)}" if table_.footnote else ""
    return table(heads, rows, len(shown)) + foot


def _value(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    if entry.shown.state == "missing":
        return NOT_MEASURED
    count = f" (n = {entry.shown.n.removeprefix('n = ')})" if entry.shown.n else ""
    status = f" **{entry.status.replace('_', ' ')}**" if entry.status not in ("", "pass") else ""
    return f"{escaped(entry.shown.brief)}{count}{status}"


def _checks(view: View) -> str:
    rows = []
    for group in view.checks:
        for line in group.lines:
            rows.append([
                line.status.replace("_", " "),
                escaped(_named(group.check, line.variant), NAME_LIMIT),
                _places(line.where, 2),
                escaped(line.value),
                escaped(line.mde),
                escaped(line.n_needed),
            ])  # fmt: skip
    return (
        table(("Outcome", "Check", "Measured on", "Value", "Detectable", "n needed"), rows, 3) if rows else ""
    )


def _reproduce(view: View) -> str:
    again = view.reproduce
    pairs = [
        ("model's digest", again.model_digests),
        ("matrix", f"{again.matrix_path}, sha256 {again.matrix_sha}"),
        ("gate", again.gate),
        ("measured", view.created_at),
        *view.environment,
    ]
    facts = table(("What", "Value"), [[escaped(k, 60), escaped(v, 300)] for k, v in pairs])
    return f"{fenced(again.command)}\n\n{facts}"


def _named(check: str, variant: str) -> str:
    return f"{check} ({variant})" if variant and variant not in check else check


def _places(labels: Sequence[Label], most: int) -> str:
    names = [_place(label) for label in labels[:most]]
    rest = sum(len(label.cells) for label in labels[most:])
    return "; ".join(names) + (f" and {rest} more cell{'s' if rest > 1 else ''}" if rest else "")


def _place(label: Label) -> str:
    cells = f" ({len(label.cells)} cells)" if len(label.cells) > 1 else ""
    return escaped(label.text, NAME_LIMIT) + cells


def _joined(*parts: Any) -> str:
    return " ".join(part for part in parts if part)
