"""The HTML report: one file with its style, plots and one small script; it loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.render.numbers import one_line
from kvbench.report import standalone
from kvbench.report.budget import LIMIT, STEPS, shorter
from kvbench.report.figures.page import Figure, drilldowns, figures
from kvbench.report.view import View

_HERE = Path(__file__).parent

# Characters of the matrix's source on the page; run.json has all of it.
_SOURCE_LIMIT = 100_000


def render(view: View) -> str:
    """The page as text, shortened step by step while it is larger than LIMIT."""
    from markupsafe import Markup

    drawings = [replace(figure, svg=Markup(figure.svg)) for figure in figures(view)]
    html = page(view, drawings)
    for step in STEPS:
        if len(html.encode("utf-8", errors="replace")) <= LIMIT:
            break
        view = shorter(view, step)
        html = page(view, drawings)
    return html


def page(view: View, drawings: Sequence[Figure]) -> str:
    """The view as one page. Everything is escaped except the page's own style, script and plots."""
    from markupsafe import Markup

    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return standalone.page(
        "page.html.j2",
        view=view,
        script=Markup(script),
        script_hash=_csp_hash(script),
        figures=drawings,
        drilldowns=drilldowns(view),
        source=_yaml(view.reproduce.source),
    )


def _csp_hash(script: str) -> str:
    """The only script that the page's content security policy allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _yaml(source: Mapping[str, object]) -> str:
    """The matrix as YAML, cut at the limit with a comment."""
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
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
