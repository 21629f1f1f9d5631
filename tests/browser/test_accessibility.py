"""axe finds nothing on a passing, a failing, a hostile and a real run, in both schemes, fully opened."""

import pytest
from axe_playwright_python.sync_playwright import Axe

from kvbench.report.sections.card import QUESTIONS

pytestmark = pytest.mark.browser


def violations(page, *rules):
    """All rules of axe, or those that are named; details are opened first, or nobody looks into them."""
    page.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
    options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found = Axe().run(page, options=options).response["violations"]
    return [(rule["id"], rule["nodes"][0]["html"][:300]) for rule in found]


@pytest.mark.parametrize("kind", ["passing", "failing", "hostile", "real"])
def test_axe_finds_no_violation(show, kind):
    assert violations(show(kind)) == []
    if kind in ("passing", "failing"):  # in the dark only colours differ
        assert violations(show(kind, scheme="dark"), "color-contrast") == []


def test_axe_would_find_a_fault_and_the_card_and_the_sections_are_landmarks(show):
    page = show("passing")
    page.locator("html").evaluate("(html) => html.removeAttribute('lang')")
    page.add_style_tag(content=".key { color: #eee !important; }")
    rules = ["color-contrast", "html-has-lang"]
    assert [rule for rule, _ in violations(page, *rules)] == rules
    page = show("failing")
    for name in ("Release card", "Failures and fallbacks", "Checks", "Matrix", "Latency"):
        assert page.get_by_role("region", name=name, exact=True).count() == 1
    assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
    assert page.get_by_role("navigation", name="Contents").count() == 1
    questions = page.get_by_role("region", name="Release card").get_by_role("heading", level=4)
    assert questions.all_inner_texts() == list(QUESTIONS)
