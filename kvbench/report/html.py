"""The HTML report: one file with its style, plots and one small script; it loads nothing.

The page stays below its size limit however large the matrix: what is left out is named in a notice. The CSV
and JSON files always have everything.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.render.numbers import one_line
from kvbench.report.figures.page import Figure, drilldowns, figures
from kvbench.report.sections.notices import info
from kvbench.report.sections.tables import Line, MetricTable
from kvbench.report.view import View

_HERE = Path(__file__).parent
LIMIT = 2_000_000  # bytes
TITLE = "Shortened page"
_LINES = 40  # of a table, if even the brief columns of all lines are too many
_SOURCE_LIMIT = 100_000  # characters of the matrix's source on the page; run.json has all of it


def page(template: str, **values: Any) -> str:
    """A template of this folder with the report's style; everything is escaped unless marked as Markup."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    rendered: str = environment.get_template(template).render(css=css, version=__version__, **values)
    return rendered


def render(view: View) -> str:
    """The page as text, shortened step by step while it is larger than LIMIT."""
    from markupsafe import Markup

    drawings = [replace(figure, svg=Markup(figure.svg)) for figure in figures(view)]
    html = _page(view, drawings)
    for step in STEPS:
        if len(html.encode("utf-8", errors="replace")) <= LIMIT:
            break
        view = shorter(view, step)
        html = _page(view, drawings)
    return html


def _page(view: View, drawings: Sequence[Figure]) -> str:
    from markupsafe import Markup

    script = (_HERE / "page.js").read_text(encoding="utf-8")
    # The only script that the page's content security policy allows.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page(
        "page.html.j2",
        view=view,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        figures=drawings,
        drilldowns=drilldowns(view),
        source=_yaml(view.reproduce.source),
    )


def _yaml(source: Mapping[str, object]) -> str:
    import yaml

    dumped: str = yaml.safe_dump(_plain(source), sort_keys=False, allow_unicode=True, width=100)
    text = "\n".join(one_line(line) for line in dumped.split("\n"))
    if len(text) <= _SOURCE_LIMIT:
        return text
    return f"{text[:_SOURCE_LIMIT]}\n# cut: {len(text):,} characters in total; run.json has the rest\n"


def _plain(value: object) -> object:
    """The value with only mappings, lists, strings and numbers, which YAML can dump safely."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


Step = tuple[str, Callable[[View], View]]


def shorter(view: View, step: Step) -> View:
    """The view without what the step leaves out, and with a notice about it before all others."""
    sentence, leave_out = step
    begin = f"To stay under {LIMIT // 1_000_000} MB:"
    before = next((n.sentence for n in view.notices if n.title == TITLE), begin)
    others = (notice for notice in view.notices if notice.title != TITLE)
    return replace(leave_out(view), notices=(info(TITLE, f"{before} {sentence}"), *others))


def _brief(view: View) -> View:
    def table(one: MetricTable) -> MetricTable:
        flagged = {i for line in one.lines for i in _flagged(line)}
        kept = [i for i, column in enumerate(one.columns) if column.brief or i in flagged]
        columns = tuple(one.columns[i] for i in kept)
        lines = tuple(replace(line, entries=tuple(line.entries[i] for i in kept)) for line in one.lines)
        return replace(one, columns=columns, lines=lines)

    return replace(view, tables=tuple(map(table, view.tables)))


def _flagged(line: Line) -> list[int]:
    return [i for i, entry in enumerate(line.entries) if entry and entry.status in ("fail", "inconclusive")]


def _few_lines(view: View) -> View:
    """Lines with a check that did not pass come first into the selection; the order stays."""

    def first(table: MetricTable) -> MetricTable:
        ranked = sorted(range(len(table.lines)), key=lambda i: not _flagged(table.lines[i]))
        return replace(table, lines=tuple(table.lines[i] for i in sorted(ranked[:_LINES])))

    return replace(view, tables=tuple(map(first, view.tables)), cells=view.cells[:_LINES])


# Taken in turn until the page fits.
STEPS: tuple[Step, ...] = (
    ("Only the main columns are shown (results_long.csv has every metric).", _brief),
    (
        "How each value was measured is left out (the records have it).",
        lambda view: replace(
            view, tables=tuple(replace(x, facts=()) for x in view.tables), proofs=view.proofs[:_LINES]
        ),
    ),
    (
        "Lists of questions, chunks and positions are left out (the records have them).",
        lambda view: replace(view, questions=(), chunks=()),
    ),
    ("Heat tables are left out.", lambda view: replace(view, heats=())),
    (
        f"Tables show {_LINES} lines, failed and inconclusive checks first (results_long.csv has all).",
        _few_lines,
    ),
)
