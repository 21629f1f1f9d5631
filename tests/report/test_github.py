"""GitHub Actions: exact commands, lines of the files that were run, a summary below the size limit."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.gate.policy import load
from kvbench.gate.verdict import Outcome, Verdict, exit_code_of
from kvbench.report.github import (
    MOST,
    SENTENCE_LIMIT,
    SUMMARY_BYTES,
    TITLE_LIMIT,
    Annotation,
    Place,
    annotate,
    announce,
    append_summary,
    in_message,
    in_property,
    places_of,
    summary,
)
from kvbench.report.markdown import head, sections
from kvbench.report.model import JudgedRun
from kvbench.report.view import build
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


@pytest.mark.parametrize(
    ("text", "message", "value"),
    [
        ("plain", "plain", "plain"),
        ("100%", "100%25", "100%25"),
        ("%0A", "%250A", "%250A"),
        ("a\nb", "a%0Ab", "a%0Ab"),
        ("a\r\nb", "a%0D%0Ab", "a%0D%0Ab"),
        ("a:b,c", "a:b,c", "a%3Ab%2Cc"),
        ("::error::x", "::error::x", "%3A%3Aerror%3A%3Ax"),
        ("\x1b[31m\x00\u202e", "\\x1b[31m\\x00\\u202e", "\\x1b[31m\\x00\\u202e"),
        ("量化 🙂", "量化 🙂", "量化 🙂"),
    ],
)
def test_escapes(text, message, value):
    assert in_message(text) == message
    assert in_property(text) == value


@pytest.mark.parametrize(
    ("annotation", "command"),
    [
        (Annotation("error", "t", "s"), "::error title=t::s"),
        (Annotation("error", "t", "s", Place("m/a.yaml", 7)), "::error file=m/a.yaml,line=7,title=t::s"),
        (Annotation("warning", "t", "s", Place("m.yaml", None)), "::warning file=m.yaml,title=t::s"),
        (
            Annotation("error", "a: b, 5%", "x: 5%,\ny", Place("a,b:c%.yaml", 1)),
            "::error file=a%2Cb%3Ac%25.yaml,line=1,title=a%3A b%2C 5%25::x: 5%25,%0Ay",
        ),
    ],
)
def test_commands(annotation, command):
    assert annotation.command == command


def outcome(status, check="c", cells=("int8_sym-1-128",), metric="ppl", required=True, sentence=""):
    return Outcome(check, metric, cells[0] if cells else None, "", status, None, "",
                   sentence or f"{check} {status}.", required=required, cells=tuple(cells))  # fmt: skip


def run_of(made, *outcomes):
    verdict = Verdict(outcomes, exit_code_of(outcomes))
    return JudgedRun(made.run, made.rows, verdict)


def test_failures_before_inconclusive_before_not_evaluated_and_no_others(passing):
    run = run_of(
        passing,
        outcome("pass", "a"),
        outcome("not_evaluated", "b"),
        outcome("not_evaluated", "optional", required=False),
        outcome("inconclusive", "d"),
        outcome("fail", "e"),
        outcome("inconclusive", "f"),
        outcome("fail", "g", required=False),
    )
    assert [a.sentence for a in annotate(run, {})] == [
        "e fail.", "g fail.", "d inconclusive.", "f inconclusive.", "b not_evaluated.",
    ]  # fmt: skip
    assert {a.level for a in annotate(run, {})} == {"error"}
    assert annotate(run, {})[2].title == "kvbench inconclusive: d (int8_sym · batch 1 · context 128)"
    assert annotate(run_of(passing, outcome("pass")), {}) == []


def test_ten_and_one_that_counts_the_rest(passing):
    exactly = annotate(run_of(passing, *(outcome("fail", f"c{i}") for i in range(MOST))), {})
    assert [a.level for a in exactly] == ["error"] * MOST
    checks = [outcome("inconclusive", "last"), *(outcome("fail", f"c{i}") for i in range(MOST + 1))]
    more = annotate(run_of(passing, *checks), {})
    assert [a.sentence for a in more[:MOST]] == [f"c{i} fail." for i in range(MOST)]
    assert more[MOST:] == [
        Annotation(
            "warning", "kvbench: 2 more", "2 more checks did not pass: c10, last. The report has all of them."
        )
    ]  # fmt: skip


def test_one_check_on_many_cells_does_not_hide_the_next(passing):
    cells = [cell.id for cell in passing.manifest.cells]
    many = [outcome("fail", "first", [cell]) for cell in cells] + [outcome("fail", "second", cells[:1])]
    found = annotate(run_of(passing, *many), {})
    assert [a.sentence for a in found] == [f"first fail. {len(cells) - 1} more like it.", "second fail."]
    assert re.search(r"first \(.* and \d+ more cells?\)$", found[0].title)


def test_long_sentences_are_cut(passing):
    found = annotate(run_of(passing, outcome("fail", "n" * 500, sentence="s" * 5000)), {})
    assert len(found[0].title) <= TITLE_LIMIT
    assert found[0].sentence == "s" * (SENTENCE_LIMIT - 1) + "…"


@pytest.fixture
def repository(tmp_path):
    """A repository with the matrix and the gate."""
    for folder, name, text in (("matrices", "int8.yaml", MATRIX), ("gates", "int8.yaml", GATE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    return tmp_path


@pytest.fixture
def stored(passing):
    """The passing run of that matrix: lines of the formats, none for the baselines, which were added."""
    sha = hashlib.sha256(MATRIX.encode()).hexdigest()
    lines = {"int8_sym": 6}
    made = moved(passing, "matrices/int8.yaml", sha=sha)
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
    run = run_of(stored, *BROKEN)
    policy = load(repository / "gates" / "int8.yaml") if gate else None
    found = places_of(run, policy, repository, cwd or repository)
    return [found[id(o)] for o in run.verdict.outcomes]


def test_each_outcome_stands_on_the_line_that_made_it(stored, repository):
    assert places(stored, repository) == [
        Place("matrices/int8.yaml", 6),  # - int8_sym
        Place("matrices/int8.yaml", 10),  # perplexity: measured ppl on an added baseline
        Place("matrices/int8.yaml", 8),  # runners:
        Place("gates/int8.yaml", 4),  # the check that fits no cell
        Place("matrices/int8.yaml", 8),
        Place("matrices/int8.yaml", 6),  # a check of the gate, on a cell
    ]
    assert places(stored, repository, gate=False)[3] == Place("matrices/int8.yaml", 10)


def test_a_matrix_that_has_changed_has_no_lines(stored, repository):
    path = repository / "matrices" / "int8.yaml"
    path.write_text("# a comment\n" + MATRIX)
    assert places(stored, repository)[:2] == [Place("matrices/int8.yaml", None)] * 2


def test_a_matrix_that_has_gone_is_no_place(stored, repository):
    (repository / "matrices" / "int8.yaml").unlink()
    assert places(stored, repository) == [None, None, None, Place("gates/int8.yaml", 4), None, None]
    assert places(moved(stored, None), repository)[0] is None


def test_paths_are_of_the_repository_wherever_the_command_ran(stored, repository):
    assert places(moved(stored, "int8.yaml"), repository, cwd=repository / "matrices")[0] == Place(
        "matrices/int8.yaml", 6
    )
    whole = str(repository / "matrices" / ".." / "matrices" / "int8.yaml")
    assert places(moved(stored, whole), repository)[0] == Place("matrices/int8.yaml", 6)


@pytest.mark.parametrize("path", ["\x00", "n" * 5000, ".", "gates"])
def test_a_path_that_is_no_file_is_no_place(stored, repository, path):
    assert places(moved(stored, path), repository)[0] is None


def announced(made, environ, gate=None):
    return announce(made.judged, gate, environ)


def test_nothing_is_said_outside_github(failing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert announced(failing, {}) == []
    assert announced(failing, {"CI": "true", "GITHUB_ACTIONS": "false"}) == []
    assert os.listdir(tmp_path) == []


def test_commands_are_one_line_each(maker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in HOSTILE:
        for line in announced(all_statuses(maker, text), {"GITHUB_ACTIONS": "true"}):
            assert re.fullmatch(r"::(error|warning) title=[^:,\n\r]*(?:,[a-z]+=[^:,]*)*::[^\n\r]*", line), (
                line
            )
            line.encode("utf-8", errors="backslashreplace")


def text_of(made, room):
    return summary(build(made.judged), made.judged, room)


def test_a_summary_with_room_is_the_whole_report(failing):
    view, run = build(failing.judged), failing.judged
    whole = text_of(failing, SUMMARY_BYTES)
    assert whole == "\n".join([head(view), *(s.text for s in sections(view, run))])


def test_a_summary_is_cut_by_whole_sections_and_says_which_are_left_out(failing):
    view, run = build(failing.judged), failing.judged
    titles = [s.title for s in sections(view, run)]
    whole = len(text_of(failing, SUMMARY_BYTES).encode())
    seen = set()
    for room in range(500, whole + 1000, 389):  # the last room holds the line of names too
        text = text_of(failing, room)
        assert len(text.encode()) <= room
        if not text:
            continue
        kept = re.findall(r"^## (.*)$", text, re.M)
        assert kept == titles[: len(kept)]
        seen.add(len(kept))
        if len(kept) < len(titles):
            assert text.endswith(f"left out: {', '.join(titles[len(kept) :])}. report.md has them._\n")
        else:
            assert "left out" not in text
        for title, section in zip(kept, sections(view, run), strict=False):
            assert section.text in text, title
    assert {0, len(titles)} < seen


def test_the_summary_is_appended_to_what_the_step_has_written(failing, tmp_path):
    path = tmp_path / "summary"
    path.write_text("before\n")
    assert announced(failing, {"GITHUB_STEP_SUMMARY": str(path)}) == []
    assert path.read_text().startswith("before\n\n# kvbench int8: FAIL\n")
    before = path.stat().st_size
    assert announced(failing, {"GITHUB_STEP_SUMMARY": str(path)}) == []
    assert path.stat().st_size > before


def test_a_step_never_exceeds_the_limit(failing, tmp_path):
    path = tmp_path / "summary"
    view, run = build(failing.judged), failing.judged
    whole = len(summary(view, run, SUMMARY_BYTES).encode())
    least = min(len(text.encode()) for room in range(200, 2000, 50) if (text := summary(view, run, room)))
    edges = [SUMMARY_BYTES - size - i for size in (whole, least) for i in range(5)]
    for full in (0, SUMMARY_BYTES - 3000, SUMMARY_BYTES - 100, SUMMARY_BYTES, SUMMARY_BYTES + 9, *edges):
        path.write_bytes(b"x" * full)
        wrong = append_summary(path, view, run)
        assert path.stat().st_size <= max(full, SUMMARY_BYTES)
        assert bool(wrong) == (path.stat().st_size == full)
        assert not wrong or f"has {full:,} of 1,048,576 bytes" in wrong


def test_a_huge_run_fits(maker):
    """2,000 checks and names of 500 characters."""
    made = all_statuses(maker, "量" * 500)
    many = tuple(replace(made.verdict.outcomes[0], sentence=f"{i} " + "s" * 500) for i in range(2000))
    made = replace(made, verdict=replace(made.verdict, outcomes=many))
    text = text_of(made, SUMMARY_BYTES)
    assert 1000 < len(text.encode()) <= SUMMARY_BYTES
    assert "left out" in text


def test_a_summary_that_cannot_be_written_is_a_sentence(failing, tmp_path):
    (line,) = announced(failing, {"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert line.startswith("kvbench: the step summary ")
    assert "cannot be written (Is a directory)" in line
    assert Path(tmp_path).is_dir()
