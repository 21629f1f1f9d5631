"""The HTML report: one file with its style, its plots and one small script inside; complete without the script, nothing fetched."""

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

# A byte budget for the matrix's source on the page; the whole of it is in run.json.
_SOURCE_LIMIT = 100_000


def render(view: View) -> str:
    """The page as text, shortened step by step where it would be larger than it may be."""
    drawings = _drawings(view)
    html = page(view, drawings)
    for step in STEPS:
        if len(html.encode("utf-8", errors="replace")) <= LIMIT:
            break
        view = shorter(view, step)
        html = page(view, drawings)
    return html


def page(view: View, drawings: Sequence[Figure]) -> str:
    """The view as one page. Everything that came from outside is escaped; only our own style, script and plots are not."""
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


def _drawings(view: View) -> list[Figure]:
    """The figures, drawn once however often the page is laid out; what is drawn is our own markup."""
    from markupsafe import Markup

    return [replace(figure, svg=Markup(figure.svg)) for figure in figures(view)]


def _csp_hash(script: str) -> str:
    """What the page's policy lets run: this script and nothing else, whatever a name may smuggle in."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _yaml(source: Mapping[str, object]) -> str:
    """The matrix as YAML, for reading; cut (and said so) past the budget."""
    import yaml

    dumped: str = yaml.safe_dump(_plain(source), sort_keys=False, allow_unicode=True, width=100)
    text = "\n".join(one_line(line) for line in dumped.split("\n"))
    if len(text) <= _SOURCE_LIMIT:
        return text
    return f"{text[:_SOURCE_LIMIT]}\n# cut here: {len(text):,} characters in all; run.json has the rest\n"


def _plain(value: object) -> object:
    """Only what YAML can say safely: mappings, lists, strings, numbers."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
