"""Single-file pages in the report's style: no external resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench import __version__

_HERE = Path(__file__).parent


def environment() -> Any:
    """The templates of this folder; everything is escaped unless it is marked as Markup."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(template: str, **values: Any) -> str:
    """A template of this folder, rendered with the report's style."""
    from markupsafe import Markup

    css = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    rendered: str = environment().get_template(template).render(css=css, version=__version__, **values)
    return rendered
