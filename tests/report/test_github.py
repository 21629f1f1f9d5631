"""GitHub Actions: exact commands, lines of the files that were run, a summary below the size limit."""

import hashlib
import re
from dataclasses import replace

import pytest

from kvbench.gate.policy import load
from kvbench.report import github
from kvbench.report.github import MOST, SUMMARY_BYTES, Annotation, Place, annotate, announce, summary
from kvbench.report.markdown import head, sections
from kvbench.report.view import build
from tests.factories.runs.reported import outcome as made_outcome
from tests.report.hostile import HOSTILE, all_statuses

MATRIX = """\
name: int8
model: smollm2-135m-instruct
axes:
  kv_format:
    - native
    - int8_sym
  batch: [1]
runners:
  storage: {}
  perplexity: {}
"""
GATE = """\
name: g
checks:
  - {metric: ppl_delta_pct, within: [-1, 1]}
  - {metric: ppl, where: {batch: 77}, at_most: 9}
"""


def test_escapes_and_commands():
    both = {"100%": "100%25", "%0A": "%250A", "a\r\nb": "a%0D%0Ab", "量化 🙂": "量化 🙂"}
    both["\x1b[31m\x00\u202e"] = "\\x1b[31m\\x00\\u202e"
    for text, escaped in both.items():
        assert github.in_message(text) == github.in_property(text) == escaped
    for text, escaped in (("a:b,c", "a%3Ab%2Cc"), ("::error::x", "%3A%3Aerror%3A%3Ax")):
        assert (github.in_message(text), github.in_property(text)) == (text, escaped)
    odd = Annotation("error", "a: b, 5%", "x: 5%,\ny", Place("a,b:c%.yaml", 1))
    assert odd.command == "::error file=a%2Cb%3Ac%25.yaml,line=1,title=a%3A b%2C 5%25::x: 5%25,%0Ay"
    assert Annotation("error", "t", "s").command == "::error title=t::s"
    place = Place("m.yaml", None)
    assert Annotation("warning", "t", "s", place).command == "::warning file=m.yaml,title=t::s"


def outcome(status, check="c", cells=("int8_sym-1-128",), metric="ppl", sentence="", **fields):
    text = sentence or f"{check} {status}."
    return made_outcome(check, status, text, cells=cells, metric=metric, **fields)


def annotated(made, *outcomes):
    return annotate(made.with_outcomes(*outcomes, change=lambda o: None).judged, {})


def test_the_worst_ten_come_first_and_none_is_hidden(passing):
    order = ["pass a", "not_evaluated b", "inconclusive d", "fail e", "inconclusive f"]
    outcomes = [outcome(*words.split()) for words in order]
    outcomes.insert(2, outcome("not_evaluated", "optional", required=False))
    found = annotated(passing, *outcomes, outcome("fail", "g", required=False))
    sentences = ["e fail.", "g fail.", "b not_evaluated.", "d inconclusive.", "f inconclusive."]
    assert [(a.level, a.sentence) for a in found] == [("error", sentence) for sentence in sentences]
    assert found[3].title == "kvbench inconclusive: d (int8_sym · batch 1 · context 128)"
    assert annotated(passing, outcome("pass")) == []
    checks = [outcome("fail", f"c{i}") for i in range(MOST + 1)]
    assert [a.level for a in annotated(passing, *checks[:MOST])] == ["error"] * MOST
    more = annotated(passing, outcome("inconclusive", "last"), *checks)
    assert [a.sentence for a in more[:MOST]] == [f"c{i} fail." for i in range(MOST)]
    rest = "2 more checks did not pass: c10, last. The report has all of them."
    assert more[MOST:] == [Annotation("warning", "kvbench: 2 more", rest)]
    cells = [cell.id for cell in passing.manifest.cells]
    many = [outcome("fail", "first", [cell]) for cell in cells] + [outcome("fail", "second", cells[:1])]
    found = annotated(passing, *many)
    assert [a.sentence for a in found] == [f"first fail. {len(cells) - 1} more like it.", "second fail."]
    assert re.search(r"first \(.* and \d+ more cells?\)$", found[0].title)
    (long,) = annotated(passing, outcome("fail", "n" * 500, sentence="s" * 5000))
    assert len(long.title) <= 120
    assert long.sentence == "s" * 999 + "…"


@pytest.fixture
def repository(tmp_path):
    for folder, name, text in (("matrices", "int8.yaml", MATRIX), ("gates", "int8.yaml", GATE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    return tmp_path


@pytest.fixture
def stored(passing):
    """The passing run of that matrix: lines of the formats, none for the baselines, which were added."""
    made = moved(passing, "matrices/int8.yaml", sha=hashlib.sha256(MATRIX.encode()).hexdigest())
    lines = {"int8_sym": 6}
    return made.with_cells(lambda cell: replace(cell, line=lines.get(cell.spec["kv_format"])))


def moved(made, path, **fields):
    return made.with_manifest(matrix=replace(made.manifest.matrix, path=path, **fields))


BROKEN = (
    outcome("fail", "on a cell"),
    outcome("fail", "on a baseline", ("native-1-128",)),
    outcome("fail", "of no metric", ("native-1-128",), metric=""),
    outcome("fail", "ppl at most 9 where batch=77", ()),
    outcome("fail", "of the whole run", (), metric=""),
    outcome("fail", "ppl_delta_pct within [-1, 1]", metric="ppl_delta_pct"),
)


def places(stored, repository, gate=True, cwd=None):
    run = stored.with_outcomes(*BROKEN, change=lambda o: None).judged
    policy = load(repository / "gates" / "int8.yaml") if gate else None
    found = github.places_of(run, policy, repository, cwd or repository)
    return [found[id(o)] for o in run.verdict.outcomes]


def test_each_outcome_stands_on_the_line_that_made_it(stored, repository):
    matrix = "matrices/int8.yaml"
    assert places(stored, repository) == [
        Place(matrix, 6),  # - int8_sym
        Place(matrix, 10),  # perplexity: measured ppl on an added baseline
        Place(matrix, 8),  # runners:
        Place("gates/int8.yaml", 4),  # the check that fits no cell
        Place(matrix, 8),
        Place(matrix, 6),  # a check of the gate, on a cell
    ]
    assert places(stored, repository, gate=False)[3] == Place(matrix, 10)
    inside = places(moved(stored, "int8.yaml"), repository, cwd=repository / "matrices")
    whole = places(moved(stored, str(repository / "matrices" / ".." / matrix)), repository)
    assert inside[0] == whole[0] == Place(matrix, 6)  # wherever the command ran
    path = repository / matrix
    path.write_text("# a comment\n" + MATRIX)
    assert places(stored, repository)[:2] == [Place(matrix, None)] * 2  # changed since
    path.unlink()
    assert places(stored, repository) == [None, None, None, Place("gates/int8.yaml", 4), None, None]
    for path in (None, "\x00", "n" * 5000, ".", "gates"):
        assert places(moved(stored, path), repository)[0] is None


def test_commands_are_one_line_each_and_nothing_is_said_outside_github(maker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = re.compile(r"::(error|warning) title=[^:,\n\r]*(?:,[a-z]+=[^:,]*)*::[^\n\r]*")
    for text in HOSTILE:
        run = all_statuses(maker, text).judged
        for line in announce(run, None, {"GITHUB_ACTIONS": "true"}):
            assert command.fullmatch(line), line
            line.encode("utf-8", errors="backslashreplace")
        assert announce(run, None, {}) == announce(run, None, {"CI": "true", "GITHUB_ACTIONS": "false"}) == []
    assert list(tmp_path.iterdir()) == []


def test_a_summary_is_cut_by_whole_sections_and_never_exceeds_the_limit(failing, tmp_path, maker):
    view, run = build(failing.judged), failing.judged
    found = sections(view, run)
    titles, whole = list(found), summary(view, run, SUMMARY_BYTES)
    assert whole == "\n".join([head(view), *found.values()])
    seen = set()
    for room in range(500, len(whole.encode()) + 1000, 389):  # the last room holds the line of names too
        text = summary(view, run, room)
        assert len(text.encode()) <= room
        if not text:
            continue
        kept = re.findall(r"^## (.*)$", text, re.M)
        assert kept == titles[: len(kept)]
        seen.add(len(kept))
        left = f"left out: {', '.join(titles[len(kept) :])}. report.md has them._\n"
        assert text.endswith(left) if len(kept) < len(titles) else "left out" not in text
        assert all(found[title] in text for title in kept)
    assert {0, len(titles)} < seen
    path = tmp_path / "summary"
    path.write_text("before\n")
    for _ in range(2):
        before = path.stat().st_size
        assert announce(failing.judged, None, {"GITHUB_STEP_SUMMARY": str(path)}) == []
        assert path.stat().st_size > before
    assert path.read_text().startswith("before\n\n# kvbench int8: FAIL\n")
    whole = len(summary(view, run, SUMMARY_BYTES).encode())
    least = min(len(text.encode()) for room in range(200, 2000, 50) if (text := summary(view, run, room)))
    edges = [SUMMARY_BYTES - size - i for size in (whole, least) for i in range(5)]
    for full in (0, SUMMARY_BYTES - 3000, SUMMARY_BYTES - 100, SUMMARY_BYTES, SUMMARY_BYTES + 9, *edges):
        path.write_bytes(b"x" * full)
        wrong = github.append_summary(path, view, run)
        assert path.stat().st_size <= max(full, SUMMARY_BYTES)
        assert bool(wrong) == (path.stat().st_size == full)
        assert not wrong or f"has {full:,} of 1,048,576 bytes" in wrong
    made = all_statuses(maker, "量" * 500)
    many = [replace(made.verdict.outcomes[0], sentence=f"{i} " + "s" * 500) for i in range(2000)]
    made = made.with_outcomes(*many)
    text = summary(build(made.judged), made.judged, SUMMARY_BYTES)
    assert 1000 < len(text.encode()) <= SUMMARY_BYTES
    assert "left out" in text
    (line,) = announce(failing.judged, None, {"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert re.search("^kvbench: the step summary .* cannot be written .Is a directory.", line)
