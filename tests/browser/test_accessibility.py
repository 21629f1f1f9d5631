"""axe finds nothing: on a passing, a failing, a hostile and a real run, in both schemes, everything opened."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["passing", "failing", "hostile", "formats", "real"])
def test_axe_finds_no_violation(show, kind, scheme):
    page = show(kind, scheme=scheme)
    page.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
    found = Axe().run(page).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"][:300]) for rule in found] == []


def test_axe_would_find_one(show):
    page = show("passing")
    page.locator("html").evaluate("(html) => html.removeAttribute('lang')")
    assert [rule["id"] for rule in Axe().run(page).response["violations"]] == ["html-has-lang"]


def test_the_card_and_the_sections_are_landmarks_with_names(show):
    page = show("failing")
    for name in ("Release card", "Failures and fallbacks", "Checks", "Matrix", "Latency"):
        assert page.get_by_role("region", name=name, exact=True).count() == 1
    assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
    assert page.get_by_role("navigation", name="Contents").count() == 1
    questions = (
        page.get_by_role("region", name="Release card").get_by_role("heading", level=4).all_inner_texts()
    )
    assert questions == [
        "Is it really running?",
        "Is it safe?",
        "Is it worth it?",
        "What would change the verdict?",
    ]
