"""The verdict as JUnit XML: a test case a check and cell, and one for the verdict itself.

    pass                              the case passed
    fail                              failure
    inconclusive                      failure, of type inconclusive: the data cannot decide, and nothing ships on it
    not_evaluated, required           error
    not_evaluated, not required       skipped
    not_evaluated for want of the cell's device, where that is no failure    skipped

The case `verdict` passes with exit code 0 and no other, so who reads nothing but this file never sees green where the command
ended otherwise: where all was skipped, nothing was shown.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvbench.gate.builtin_checks import DEVICE, SKIPPED
from kvbench.matrix.cells import one_model
from kvbench.render.numbers import one_line, plain
from kvbench.report.model import JudgedRun, OutcomeLike, model_digests, verdict_word
from kvbench.report.sections.notices import headline

if TYPE_CHECKING:
    from junitparser import TestCase

VERDICT = "verdict"
NAME_LIMIT = 500


def junit_xml(run: JudgedRun) -> str:
    """`report.junit.xml`: one suite. Characters that XML cannot hold are shown as their escapes."""
    from junitparser import JUnitXml, TestSuite

    suite = TestSuite(f"kvbench {one_line(run.manifest.name, NAME_LIMIT)}")
    suite.timestamp = one_line(str(run.manifest.created_at))
    for name, value in _properties(run):
        suite.add_property(name, value)
    suite.add_testcase(_verdict(run))
    without = _cells_without_device(run)
    taken: dict[tuple[str, str], int] = {}
    for outcome in run.verdict.outcomes:
        for where, name in _cases(run, outcome):
            n = taken[where, name] = taken.get((where, name), 0) + 1
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


def _cases(run: JudgedRun, outcome: OutcomeLike) -> Iterator[tuple[str, str]]:
    """(class, name) of an outcome's cases: its cells and its check, "whole run" where it is about no cell."""
    names = run.run.names
    variant = outcome.variant
    name = f"{outcome.check} ({variant})" if variant and variant not in outcome.check else outcome.check
    for cell in outcome.cells or ("",):
        yield names.get(cell, cell) or "whole run", name


def _result(outcome: OutcomeLike, skipped: bool) -> list[Any]:
    from junitparser import Error, Failure, Skipped

    sentence = one_line(outcome.sentence)
    if outcome.status == "pass":
        return []
    if outcome.status in ("fail", "inconclusive"):
        return [_filled(Failure(sentence, outcome.status), outcome)]
    if outcome.required and not skipped:
        return [_filled(Error(sentence, outcome.status), outcome)]
    return [Skipped(sentence, outcome.status)]


def _filled(result: Any, outcome: OutcomeLike) -> Any:
    """The sentence as text too, which some readers show alone, with the limit's reason."""
    why = f"\nThe gate's reason: {one_line(outcome.why)}" if outcome.why else ""
    result.text = f"{one_line(outcome.sentence)}{why}"
    return result


def _cells_without_device(run: JudgedRun) -> frozenset[str]:
    """Cells of which something was skipped for want of their device; none where that is a failure."""
    if any(o.check == DEVICE and o.status == "fail" for o in run.verdict.outcomes):
        return frozenset()
    return frozenset(cell for o in run.verdict.outcomes if o.check in (DEVICE, SKIPPED) for cell in o.cells)


def _verdict(run: JudgedRun) -> TestCase:
    from junitparser import Error, Failure

    case = _case("whole run", VERDICT)
    code, word = run.verdict.exit_code, run.verdict.word
    if code:
        sentence = f"{one_line(word).replace('_', ' ')}: {headline(run)} Exit code {code}."
        case.result = [(Failure if code in (1, 4) else Error)(sentence, word)]
    return case


def _properties(run: JudgedRun) -> Iterator[tuple[str, str]]:
    """What was measured, of what, where; digests of matrix, data and code."""
    manifest = run.manifest
    matrix, here = manifest.matrix, manifest.environment
    found: Mapping[str, Any] = {
        "model": one_model([cell.spec for cell in manifest.cells]) or "several, named by each cell",
        "model_digest": model_digests(manifest.tasks) or None,
        "matrix": matrix.path,
        "matrix_sha256": matrix.sha,
        "gate": manifest.gate,
        "command": shlex.join(manifest.command),
        "verdict": verdict_word(run),
        "exit_code": run.verdict.exit_code,
        **{f"environment.{key}": value for key, value in here.items() if not isinstance(value, Mapping)},
        **{f"version.{key}": value for key, value in dict(here.get("packages") or {}).items()},
        **{f"data_sha256.{key}": value for key, value in _data(run).items()},
    }
    for key, value in found.items():
        yield one_line(key, NAME_LIMIT), _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return plain(value, NAME_LIMIT)


def _data(run: JudgedRun) -> dict[str, Any]:
    """Digests of the texts and question sets that were measured with, by what was measured."""
    return {
        task.title: record.facts["data_sha"] for record, task in run.done() if record.facts.get("data_sha")
    }
