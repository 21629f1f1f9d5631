"""Pages of one file beside the report: its style inside, no scripts, nothing fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench import __version__

_HERE = Path(__file__).parent


def environment() -> Any:
    """Templates of this folder: everything is escaped that is not marked as our own."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(template: str, **values: Any) -> str:
    """A template of this folder with the report's style. Everything else is escaped."""
    from markupsafe import Markup

    css = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    rendered: str = environment().get_template(template).render(css=css, version=__version__, **values)
    return rendered
