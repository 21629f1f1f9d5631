"""The HTML report: one file with its style and plots inside, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvbench import __version__
from kvbench.report.figures import drilldowns, figures
from kvbench.report.fmt import one_line
from kvbench.report.view import View

_HERE = Path(__file__).parent

# A byte budget for the matrix's source on the page; the whole of it is in run.json.
_SOURCE_LIMIT = 100_000


def render(view: View) -> str:
    """The page as text. Everything that came from outside is escaped; only our own style and plots are not."""
    import jinja2
    from markupsafe import Markup

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template("page.html.j2").render(
        view=view,
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        figures=[replace(f, svg=Markup(f.svg)) for f in figures(view)],
        drilldowns=drilldowns(view),
        source=_yaml(view.reproduce.source),
        version=__version__,
    )


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
