"""The run as Markdown (GitHub's dialect), for step summaries and pull requests.

Text from outside is put on one line, and every character that Markdown or HTML would interpret gets a
backslash, so a name is shown as it is: no pipe ends a cell, no backtick opens code, no tag is a tag.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from kvbench.gate.verdict import Outcome
from kvbench.render.labels import Label
from kvbench.render.numbers import NOT_MEASURED, one_line
from kvbench.report.model import JudgedRun, worst
from kvbench.report.sections import checks
from kvbench.report.sections.checks import check_name, mde_text, needed_text, value_text
from kvbench.report.sections.findings import Finding
from kvbench.report.sections.tables import Entry, MetricTable
from kvbench.report.view import View

MOST = 10  # checks in the first table, and places under one finding
NAME_LIMIT = 120  # characters of a name in a table
SENTENCE_LIMIT = 600

# What Markdown, HTML, GitHub's formulas ($), mentions (@) and references (#) begin with.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~$&#@!{}]|(?<![^\W_])_|_(?![^\W_])")

_WORST_COLUMNS = (
    *("Outcome", "Check", "Measured on", "Value", "Limit"),
    *("n", "Detectable", "n needed", "Finding"),
)
_PRECISION_COLUMNS = (
    *("Cell", "Requested", "Resolved", "Effective", "Storage"),
    *("Transfer", "Execution", "Weights", "Evidence"),
)


def report(view: View, run: JudgedRun) -> str:
    """The whole report: `report.md`."""
    return "\n".join([head(view), *sections(view, run).values()])


def head(view: View) -> str:
    """Title, verdict and notices."""
    lines = [f"# kvbench {escaped(view.name)}: {escaped(view.word)}", ""]
    lines += [f"**{escaped(view.word)}.** {escaped(view.headline)} Exit code {view.exit_code}.", ""]
    if view.model:
        lines += [f"Model: {escaped(view.model)}", ""]
    for notice in view.notices:
        lines.append(f"- **{escaped(notice.title)}.** {escaped(notice.sentence, SENTENCE_LIMIT)}")
    return "\n".join(lines).rstrip() + "\n"


def sections(view: View, run: JudgedRun) -> dict[str, str]:
    """Title (plain text) and Markdown of the sections with content, in reading order."""
    made = {
        "Worst checks": _worst(run),
        "Failures": _findings(view.failures),
        "Fallbacks": _fallbacks(view),
        "Not measured in full": _findings(view.gaps),
        "Precision": _precision(view),
        **{table.title: _metrics(table) for table in view.tables},
        "All checks": _checks(view),
        "How to reproduce": _reproduce(view),
    }
    return {title: f"## {escaped(title)}\n\n{body}\n" for title, body in made.items() if body}


def escaped(text: str, limit: int | None = None) -> str:
    """Text from outside on one line, with at most `limit` of its characters and no active markup."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", one_line(text, limit))


def fenced(text: str) -> str:
    """A line of text from outside as a code block; the fence is longer than any in the text."""
    line = one_line(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence}sh\n{line}\n{fence}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table of escaped cells; the last `numbers` columns are set to the right."""
    right = len(heads) - numbers
    rule = ["---:" if i >= right else "---" for i in range(len(heads))]
    lines = [heads, rule, *rows]
    return "\n".join(f"| {' | '.join(cell or ' ' for cell in line)} |" for line in lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    return table(heads, rows, numbers) if rows else ""


def _name(text: str) -> str:
    return escaped(text, NAME_LIMIT)


def _places(labels: Sequence[Label], most: int) -> str:
    return checks.places(labels, most, _name)


def _worst(run: JudgedRun) -> str:
    found = worst(run.verdict.outcomes)
    counts = {(row.cell, row.metric, row.variant): row.n for row in run.rows}
    rest = f"\n\nand {len(found) - MOST} more below." if len(found) > MOST else ""
    return _table(_WORST_COLUMNS, [_outcome(run, outcome, counts) for outcome in found[:MOST]]) + rest


def _outcome(run: JudgedRun, o: Outcome, counts: Mapping[tuple[str, str, str], int | None]) -> list[str]:
    n = counts.get((o.cell or "", o.metric, o.variant))
    return [
        f"**{o.status.replace('_', ' ')}**",
        _name(check_name(o.check, o.variant)),
        _places(run.labels.places(o.cells), 1),
        escaped(value_text(o)),
        _name(o.limit),
        "" if n is None else f"{n:,}",
        escaped(mde_text(o)),
        escaped(needed_text(o)),
        escaped(run.labels.unnamed(o.sentence, o.cells), SENTENCE_LIMIT),
    ]


def _findings(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        why = f" {escaped(finding.why, SENTENCE_LIMIT)}" if finding.why else ""
        lines.append(f"- **{escaped(finding.kind)}**: {escaped(finding.title)}.{why}")
        for item in finding.items[:MOST]:
            lines.append(f"  - _at_ {_places(item.where, MOST)}: {escaped(item.sentence, SENTENCE_LIMIT)}")
        if len(finding.items) > MOST:
            lines.append(f"  - _and {len(finding.items) - MOST} more_")
    return "\n".join(lines)


def _fallbacks(view: View) -> str:
    rows = []
    for fallback in view.fallbacks:
        choice = fallback.choice
        words = map(escaped, (choice.aspect, choice.requested, choice.resolved))
        rows.append([_places(fallback.where, MOST), *words, _name(choice.reason)])
    return _table(("Cell", "What", "Requested", "Resolved", "Why"), rows)


def _precision(view: View) -> str:
    rows = []
    for group in view.precision:
        x = group.line
        words = [x.kv.requested, x.kv.resolved or "not resolved", x.effective]
        words += [x.storage, x.transfer, x.execution, x.effective_weights, x.state]
        rows.append([_places(group.where, 1), *map(_name, words)])
    return _table(_PRECISION_COLUMNS, rows)


def _metrics(metrics: MetricTable) -> str:
    if not metrics.lines or not metrics.brief:
        return ""
    rows = []
    for line in metrics.lines:
        parts = (checks.place(line.label, _name), _name(line.variant), "(partial)" if line.partial else "")
        rows.append([" ".join(filter(None, parts)), *(_value(line.entries[i]) for i in metrics.brief)])
    heads = ["Measured on", *(_name(metrics.columns[i].metric) for i in metrics.brief)]
    foot = f"\n\n{escaped(metrics.footnote)}" if metrics.footnote else ""
    return table(heads, rows, len(metrics.brief)) + foot


def _value(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    if entry.shown.state == "missing":
        return NOT_MEASURED
    count = f" ({entry.shown.n})" if entry.shown.n else ""
    status = f" **{entry.status.replace('_', ' ')}**" if entry.status not in ("", "pass") else ""
    return f"{escaped(entry.shown.brief)}{count}{status}"


def _checks(view: View) -> str:
    rows = []
    for group in view.checks:
        for line in group.lines:
            name = _name(check_name(group.check, line.variant))
            numbers = map(escaped, (line.value, line.mde, line.n_needed))
            rows.append([line.status.replace("_", " "), name, _places(line.where, 2), *numbers])
    return _table(("Outcome", "Check", "Measured on", "Value", "Detectable", "n needed"), rows, 3)


def _reproduce(view: View) -> str:
    source = view.reproduce
    pairs = [
        ("model digest", source.model_digests),
        ("matrix", f"{source.matrix_path}, sha256 {source.matrix_sha}"),
        ("gate", source.gate),
        ("measured", view.created_at),
        *view.environment,
    ]
    facts = table(("What", "Value"), [[escaped(key, 60), escaped(value, 300)] for key, value in pairs])
    return f"{fenced(source.command)}\n\n{facts}"
