"""Every warning says what to do about it; and a run that no gate judged does not end with the word of one that passed."""

from __future__ import annotations

import ast
import io
import json
from dataclasses import replace
from pathlib import Path

import kvbench
from kvbench.gate.verdict import Verdict
from kvbench.report.console import show
from kvbench.report.json import result_json
from kvbench.report.sections.notices import Notice
from kvbench.report.view import build


def test_every_warning_has_a_remedy():
    """Read off the source: a notice that a test has no run for must have one too."""
    found = []
    for path in Path(kvbench.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Notice", "_of_device"):
                words = [ast.unparse(a) for a in node.args]
                if "'warn'" in words:
                    found.append((path.name, node.lineno, len(words)))
    assert len(found) >= 9
    short = [one for one in found if one[2] < 4]
    assert short == [], "a Notice of tone warn takes tone, title, what was found and what to do about it"


def test_a_notice_is_read_as_one_sentence_after_the_other():
    assert Notice("warn", "T", "It is so.", "Mend it.").sentence == "It is so. Mend it."
    assert Notice("info", "T", "It is so.").sentence == "It is so."


def unjudged(made):
    """The same run as no gate judged it: the outcomes of a policy's checks are left out."""
    kept = tuple(o for o in made.verdict.outcomes if not o.metric)
    return replace(made.with_manifest(gate=None).judged, verdict=Verdict(kept, 0))


def test_no_gate_is_no_pass(passing):
    judged = unjudged(passing)
    view = build(judged)
    assert (view.word, view.tone, view.exit_code) == ("NOT JUDGED", "incomplete", 0)
    many = len(judged.verdict.outcomes)
    assert view.headline == f"No gate was judged; all {many} checks that always run passed."
    assert view.notices[0].remedy == "Name a policy: --gate FILE (kvbench init writes one)."
    out = io.StringIO()
    show(view, out)
    assert (
        out.getvalue()
        .rstrip()
        .endswith(f"NOT JUDGED  No gate was judged; all {many} checks that always run passed. Exit code 0.")
    )
    assert json.loads(json.dumps(result_json(judged), allow_nan=False))["verdict"] == "not_judged"
    assert result_json(passing.judged)["verdict"] == "pass"


def test_what_fails_without_a_gate_is_a_failure(passing):
    judged = unjudged(passing)
    first = replace(judged.verdict.outcomes[0], status="fail")
    view = build(replace(judged, verdict=Verdict((first, *judged.verdict.outcomes[1:]), 1)))
    assert (view.word, view.tone) == ("FAIL", "fail")
