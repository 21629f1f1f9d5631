"""The verdict as JUnit XML: a test case for each check and cell, and one for the verdict itself.

    pass                              the case passed
    fail                              failure
    inconclusive                      failure, of type inconclusive: too little data to decide
    not_evaluated, required           error
    not_evaluated, not required       skipped
    not_evaluated because the cell's device is missing, where that is not a failure    skipped

The case `verdict` passes only with exit code 0, so a CI system that reads only this file is green exactly if
the command succeeded, even if all checks were skipped.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbench.gate.builtin_checks import DEVICE, SKIPPED
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS, Outcome
from kvbench.matrix.cells import one_model
from kvbench.render.numbers import one_line, plain
from kvbench.report.model import JudgedRun, model_digests, verdict_word
from kvbench.report.sections.checks import check_name
from kvbench.report.sections.notices import headline

if TYPE_CHECKING:
    from junitparser import TestCase

VERDICT = "verdict"
NAME_LIMIT = 500


def junit_xml(run: JudgedRun) -> str:
    """`report.junit.xml`: one suite. Characters that XML does not allow become their escapes."""
    from junitparser import JUnitXml, TestSuite

    suite = TestSuite(f"kvbench {one_line(run.manifest.name, NAME_LIMIT)}")
    suite.timestamp = one_line(str(run.manifest.created_at))
    for name, value in _properties(run).items():
        number = value is None or isinstance(value, bool | int | float)
        text = json.dumps(value) if number else plain(value, NAME_LIMIT)
        suite.add_property(one_line(name, NAME_LIMIT), text)
    suite.add_testcase(_verdict(run))
    without, taken = _cells_without_device(run), Counter[tuple[str, str]]()
    for outcome in run.verdict.outcomes:
        name = check_name(outcome.check, outcome.variant)
        for cell in outcome.cells or ("",):
            where = run.run.names.get(cell, cell) or "whole run"
            taken[where, name] += 1
            n = taken[where, name]
            case = _case(where, name if n == 1 else f"{name} ({n})")
            case.result = _result(outcome, bool(outcome.cells) and without.issuperset(outcome.cells))
            suite.add_testcase(case)
    suite.time = round(sum(record.seconds for record in run.records), 3)
    xml = JUnitXml("kvbench")
    xml.add_testsuite(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{xml.tostring().decode("utf-8")}\n'


def _case(where: str, name: str) -> TestCase:
    from junitparser import TestCase

    return TestCase(one_line(name, NAME_LIMIT), classname=one_line(where, NAME_LIMIT))


def _result(outcome: Outcome, skipped: bool) -> list[Any]:
    from junitparser import Error, Failure, Skipped

    if outcome.status == PASS:
        return []
    sentence = one_line(outcome.sentence)
    bad = outcome.status in (FAIL, INCONCLUSIVE)
    if not bad and (skipped or not outcome.required):
        return [Skipped(sentence, outcome.status)]
    result = (Failure if bad else Error)(sentence, outcome.status)
    # The text is all that some CI systems show.
    why = f"\nThe gate's reason: {one_line(outcome.why)}" if outcome.why else ""
    result.text = f"{sentence}{why}"
    return [result]


def _cells_without_device(run: JudgedRun) -> frozenset[str]:
    """Cells with skipped tasks because their device is missing; none if that is a failure."""
    if any(o.check == DEVICE and o.status == FAIL for o in run.verdict.outcomes):
        return frozenset()
    return frozenset(cell for o in run.verdict.outcomes if o.check in (DEVICE, SKIPPED) for cell in o.cells)


def _verdict(run: JudgedRun) -> TestCase:
    from junitparser import Error, Failure

    case, code, word = _case("whole run", VERDICT), run.verdict.exit_code, run.verdict.word
    if code:
        sentence = f"{one_line(word).replace('_', ' ')}: {headline(run)} Exit code {code}."
        case.result = [(Failure if code in (1, 4) else Error)(sentence, word)]
    return case


def _properties(run: JudgedRun) -> dict[str, Any]:
    manifest = run.manifest
    matrix, here = manifest.matrix, manifest.environment
    data = {task.title: record.facts.get("data_sha") for record, task in run.done()}
    return {
        "model": one_model([cell.spec for cell in manifest.cells]) or "several, see each cell",
        "model_digest": model_digests(manifest.tasks) or None,
        "matrix": matrix.path,
        "matrix_sha256": matrix.sha,
        "gate": manifest.gate,
        "command": shlex.join(manifest.command),
        "verdict": verdict_word(run),
        "exit_code": run.verdict.exit_code,
        **{f"environment.{key}": value for key, value in here.items() if not isinstance(value, Mapping)},
        **{f"version.{key}": value for key, value in dict(here.get("packages") or {}).items()},
        **{f"data_sha256.{title}": sha for title, sha in data.items() if sha},
    }
