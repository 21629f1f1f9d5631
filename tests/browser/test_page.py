"""The page in a real browser: every width, both schemes, keyboard, with scripts and without."""

import re

import pytest

pytestmark = pytest.mark.browser

KINDS = ("passing", "failing", "hostile", "formats", "real")
OPEN = "(all) => all.forEach((one) => { one.open = true; })"
REMOVE = "(all) => all.forEach((one) => one.remove())"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def column(page, table, place):
    read = "(rows, i) => rows.map((row) => row.cells[i].innerText)"
    return page.locator(f"{table} tbody tr").evaluate_all(read, place)


PAGES = [*((kind, True) for kind in KINDS), ("failing", False), ("hostile", False)]


@pytest.mark.parametrize(("kind", "scripts"), PAGES)
@pytest.mark.parametrize("width", [360, 1400])
def test_the_page_itself_never_scrolls_sideways(show, kind, width, scripts):
    page = show(kind, width=width, scripts=scripts)
    assert page.evaluate(OVERFLOW) == 0
    page.locator("details").evaluate_all(OPEN)
    assert page.evaluate(OVERFLOW) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_scripts_everything_is_there_and_no_control_pretends_to_work(show, kind):
    with_scripts, plain = show(kind), show(kind, scripts=False)
    read = """(e) => { const c = e.cloneNode(true);
        c.querySelectorAll('script').forEach((s) => s.remove()); return c.textContent; }"""
    words = []
    for page in (with_scripts, plain):
        page.locator(".controls").evaluate_all(REMOVE)
        words.append(" ".join(page.locator("main").evaluate(read).split()))
    assert words[0] == words[1]
    assert plain.locator("button, input, select").count() == 0
    assert with_scripts.locator("button.sort").count() > 10


def test_the_keyboard_reaches_the_skip_link_and_sorts_by_number_both_ways_and_back(show):
    page = show("passing")
    page.keyboard.press("Tab")
    link = page.locator(":focus")
    assert link.inner_text() == "Skip to the verdict"
    assert link.bounding_box()["width"] > 50  # it can be seen now
    assert link.evaluate("(e) => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page = show("passing")
    table = "#latency > .scroll > table"
    heads = page.locator(f"{table} thead th")
    place = next(i for i, text in enumerate(heads.all_inner_texts()) if text.startswith("Decode"))
    head, before = heads.nth(place), column(page, table, place)
    head.locator("button").focus()
    numbers = [float(text.split()[0]) for text in before]
    rising = sorted(numbers)
    assert rising != numbers
    for order, want in (("ascending", rising), ("descending", rising[::-1])):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == order
        assert [float(text.split()[0]) for text in column(page, table, place)] == want
    page.keyboard.press("Enter")
    assert (head.get_attribute("aria-sort"), column(page, table, place)) == (None, before)
    head = heads.nth(2)  # the ratio: baselines have none, and come last
    assert "ITL ratio" in head.inner_text()
    for _ in range(2):
        head.locator("button").click()
        assert [text.startswith("–") for text in column(page, table, 2)] == [False] * 4 + [True] * 4


def test_rows_are_filtered_by_words_and_by_outcome(show):
    page = show("failing")
    box = page.get_by_role("searchbox", name="Filter rows: Every check")
    outcome = page.get_by_role("combobox", name="Outcome: Every check")
    rows = page.locator("#checks tbody tr:not(.group)")
    box.fill("int8_sym layer 7")
    (shown,) = (row for row in rows.all() if row.is_visible())
    assert "Layer 7 of 30" in shown.inner_text()
    assert page.locator("#checks [role=status]").inner_text() == f"1 of {rows.count()} rows"
    assert sum(group.is_visible() for group in page.locator("#checks .group").all()) == 1
    box.fill("")
    outcome.select_option("fail")
    assert sum(row.is_visible() for row in rows.all()) == page.locator("#checks .row-fail").count() == 2
    outcome.select_option("")
    assert all(row.is_visible() for row in rows.all())


def test_a_value_of_the_matrix_has_its_shade_is_read_out_and_leads_to_its_line(show):
    page = show("formats")
    table = page.locator(".heat", has_text="Latency: ITL mean")
    read = "(c) => [Number(c.querySelector('data').value), Number(c.className.match(/q(\\d)/)[1])]"
    steps = [step for _, step in sorted(table.locator("tbody td").evaluate_all(f"(all) => all.map({read})"))]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 8)
    cell = page.locator("#matrix .heat td a").first
    cell.focus()
    said = page.locator("#matrix .readout").inner_text()
    assert said.startswith("native · batch 1 baseline, context 128: 5,898,240 B n = 30")
    page.keyboard.press("Enter")
    line = page.locator(":target")
    assert line.locator("xpath=ancestor::section").get_attribute("id") == "storage"
    assert "5,898,240 B" in line.inner_text()
    page.wait_for_function(
        """() => { const box = document.querySelector(':target').getBoundingClientRect();
        return box.top >= 0 && box.bottom <= innerHeight; }"""
    )


def luminance(colour):
    """Of `rgb(1, 2, 3)` or `color(srgb 0.1 0.2 0.3)`: WCAG's relative luminance."""
    numbers = [float(x) for x in re.findall(r"[\d.]+(?:e-\d+)?", colour)[:3]]
    channels = numbers if "srgb" in colour else [x / 255 for x in numbers]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_every_shade_of_the_scale_keeps_its_contrast(show, scheme):
    page = show("formats", scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")  # the page follows the reader's scheme
    shades = [f"q{i}" for i in range(9)] + [f"{arm}{i}" for arm in ("lo", "hi") for i in range(1, 5)]
    found = page.locator(".heat td.num").first.evaluate(
        """(cell, shades) => shades.map((shade) => {
          cell.className = `num ${shade}`;
          const parts = [cell, ...cell.querySelectorAll("a, small, .unit")];
          return [getComputedStyle(cell).backgroundColor, parts.map((part) => getComputedStyle(part).color)];
        })""",
        shades,
    )
    backgrounds = [background for background, _ in found]
    assert len(set(backgrounds)) == 9 + 4  # the arm below no change has the hue of the plain scale
    for background, colours in found:
        for colour in colours:
            light, dark = sorted((luminance(background), luminance(colour)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (background, colour)


def test_nothing_moves_and_on_paper_everything_is_open_and_no_control_is_printed(show):
    page = show("failing")
    moving = """[...document.querySelectorAll("*")].filter((e) => {
      const style = getComputedStyle(e);
      const moves = style.animationName !== "none" || parseFloat(style.transitionDuration) > 0;
      return moves || style.scrollBehavior !== "auto";
    }).map((e) => e.tagName)"""
    assert page.evaluate(moving) == []  # whether or not a reader wants motion
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert not any(control.is_visible() for control in page.locator(".controls, nav").all())
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_the_policy_lets_no_other_script_run(show):
    page = show("passing")
    page.locator("main").evaluate(
        """(main) => {
          const refuse = (event) => { window.refused = event.violatedDirective; };
          document.addEventListener("securitypolicyviolation", refuse);
          const script = document.createElement("script");
          script.textContent = "window.harmed = 1";
          main.append(script);
        }"""
    )
    page.wait_for_function("window.refused")
    assert page.evaluate("window.harmed") is None
    (said,) = show.complaints
    assert "violates the following Content Security Policy" in said
    show.complaints.clear()


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "plain"])
def test_a_hostile_name_is_read_and_never_run(show, scripts):
    page = show("hostile", scripts=scripts)
    page.locator("details").evaluate_all(OPEN)
    for place in page.locator("text=onmouseover").all()[:5]:
        place.hover(force=True)
    assert page.evaluate("window.harmed") is None
    assert page.locator("img, iframe, object, [onmouseover], [onerror], a:not([href^='#'])").count() == 0
    text = page.locator("body").inner_text()
    assert "<script>window.harmed = 1</script>" in text
    assert '=HYPERLINK("http://example.invalid")\\nnext line 量化键值缓存' in text
    assert "\u202e" not in text
