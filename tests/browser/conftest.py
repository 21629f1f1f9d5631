"""Pages of made-up runs and of one real one, each written once, for the Chromium of tests/conftest.py."""

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.report.html import render
from kvbench.report.view import build
from tests.factories.runs.reported import fail, make
from tests.report.hostile import hostile

# Markup, handlers, a formula, a newline, Chinese, a direction override and 500 characters without a break.
NASTY = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
    '"onmouseover="window.harmed = 1" =HYPERLINK("http://example.invalid")\n'
    f"next line 量化键值缓存 \u202ertl עברית {'n' * 500}"
)
MATRIX = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes: {kv_format: [native, int8_sym], context: [20, 40]}
runners:
  storage: {}
  latency: {new_tokens: 3, repeats: 2, warmup: 1}
  agreement: {steps: 24, prompt_tokens: 12, continuation: 4}
"""


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """`pages(kind)`: the page of a passing, failing, hostile, many-formats or real run, made on first use."""
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    formats = ("native", "int8_sym", "int8_static", "fp8_e4m3")
    makers = {
        "passing": make,
        "failing": lambda: fail(make()),
        "hostile": lambda: hostile(make, NASTY),
        "formats": lambda: make(formats=formats, contexts=(128, 512, 2048)),
    }

    def page(kind):
        if kind not in made:
            made[kind] = folder / f"{kind}.html"
            if kind == "real":  # what `kvbench run` writes of a small matrix
                (folder / "m.yaml").write_text(MATRIX)
                words = ["run", str(folder / "m.yaml"), "--out", str(folder / "out")]
                assert CliRunner().invoke(app, words).exit_code == 0
                (folder / "out" / "report.html").rename(made[kind])
            else:
                made[kind].write_text(render(build(makers[kind]().judged)), encoding="utf-8")
        return made[kind]

    return page


@pytest.fixture
def show(chromium, pages):
    """`show(kind, width=, scheme=, scripts=)`: the page, opened from its file with the network blocked.

    Fails at the end of the test if the page requested anything but its file, or logged a message.
    """
    asked, complaints, contexts = [], [], []

    def go(kind, width=1400, scheme="light", scripts=True, **more):
        looks = {"color_scheme": scheme, "java_script_enabled": scripts, **more}
        context = chromium.new_context(viewport={"width": width, "height": 900}, **looks)
        contexts.append(context)
        url = pages(kind).as_uri()

        def gate(route):
            if route.request.url.split("#")[0] == url:
                return route.continue_()
            asked.append(route.request.url)
            return route.abort()

        context.route("**/*", gate)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    go.complaints = complaints
    yield go
    for context in contexts:
        context.close()
    assert (asked, complaints) == ([], [])
