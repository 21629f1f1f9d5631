"""The HTML report: one file with its style, its plots and one small script inside; complete without the script, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from kvbench import __version__
from kvbench.report.budget import LIMIT, STEPS, shorter
from kvbench.report.fmt import one_line
from kvbench.report.plots import COLOURS, bytes_svg, itl_svg, layers_svg, mark, scale_svg
from kvbench.report.view import View

_HERE = Path(__file__).parent

# A byte budget for the matrix's source on the page; the whole of it is in run.json.
_SOURCE_LIMIT = 100_000


def render(view: View) -> str:
    """The page as text, shortened step by step where it would be larger than it may be."""
    plots = _plots(view)
    html = page(view, plots)
    for step in STEPS:
        if len(html.encode("utf-8", errors="replace")) <= LIMIT:
            break
        view = shorter(view, step)
        html = page(view, plots)
    return html


def page(view: View, plots: Mapping[str, object]) -> str:
    """The view as one page. Everything that came from outside is escaped; only our own style, script and plots are not."""
    import jinja2
    from markupsafe import Markup

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return env.get_template("page.html.j2").render(
        view=view,
        script=Markup(script),
        script_hash=_csp_hash(script),
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        source=_yaml(view.reproduce.source),
        version=__version__,
        **plots,
    )


def _plots(view: View) -> dict[str, object]:
    """The drawings with their legends, as the template names them; drawn once however often the page is laid out."""
    from markupsafe import Markup

    itl, kv, scales, layers = "", "", "", ""
    if view.itl:
        itl = itl_svg(view.itl, "Mean inter-token latency by context and batch, one line a format")
    if view.bytes:
        kv = bytes_svg(view.bytes, f"KV cache bytes of {view.bytes_of}, payload and scales stacked")
    if view.sweep:
        scales = scale_svg(view.sweep, "Perplexity delta and useful tokens by static scale")
    if view.layers:
        layers = layers_svg(view.layers, "KLD by layer: quantized alone, and gained where it is kept native")
    return {
        "itl_plot": Markup(itl),
        "bytes_plot": Markup(kv),
        "itl_legend": [(mark(i), i % COLOURS, series.name) for i, series in enumerate(view.itl)],
        "scale_plot": Markup(scales),
        "scale_legend": [
            (mark(i), i % COLOURS, line.name) for i, line in enumerate(view.sweep.all if view.sweep else ())
        ],
        "layers_plot": Markup(layers),
        "layers_legend": [(mark(i), i % COLOURS, line.name) for i, line in enumerate(view.layers)],
    }


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
