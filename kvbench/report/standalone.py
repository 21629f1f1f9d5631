"""Pages of one file beside the report: its style inside, no scripts, nothing fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench import __version__

_HERE = Path(__file__).parent


def page(template: str, **values: Any) -> str:
    """A template of this folder with the report's style. Everything else is escaped."""
    import jinja2
    from markupsafe import Markup

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    return env.get_template(template).render(css=css, version=__version__, **values)
