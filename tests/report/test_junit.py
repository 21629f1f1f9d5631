"""JUnit: who reads nothing else sees green with exit code 0 and no other."""

import io
import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped

from kvbench.gate.builtin_checks import failed_tasks, missing_device
from kvbench.records.record import REFUSED
from kvbench.render.numbers import one_line
from kvbench.report.junit import junit_xml
from tests.factories.runs.reported import outcome as made_outcome
from tests.report.hostile import HOSTILE, all_statuses

RESULTS = {Failure: "failure", Error: "error", Skipped: "skipped"}
INT8 = "int8_sym-1-128"


def suite_of(made):
    """The only suite, read back by junitparser; the text is XML for another parser too."""
    (suite,) = JUnitXml.fromroot(ET.fromstring(junit_xml(made.judged)))
    return suite


def cases_of(made):
    """(class, name) to (word, type, message); "" where it passed."""
    found = {}
    for case in suite_of(made):
        key = (case.classname, case.name)
        assert key not in found
        kinds = [(RESULTS[type(result)], result.type, result.message) for result in case.result]
        found[key] = kinds[0] if kinds else ("", "", "")
    return found


def with_outcomes(made, *outcomes):
    return made.with_outcomes(*outcomes, change=lambda o: None)


def outcome(status, required=True, check="ppl at most 9", cells=()):
    fields = {"metric": "ppl", "limit": "at most 9", "why": "the source"}
    return made_outcome(check, status, f"it is {status}.", cells=cells, required=required, **fields)


def test_a_case_a_check_and_cell_and_one_of_the_verdict(passing):
    cases, names = cases_of(passing), passing.run.names
    expected = {("whole run", "verdict")}
    for o in passing.verdict.outcomes:
        name = f"{o.check} ({o.variant})" if o.variant else o.check
        expected |= {(names[cell], name) for cell in o.cells} or {("whole run", name)}
    assert cases == dict.fromkeys(expected, ("", "", ""))
    shared = [key for key in cases if key[1] == "ppl_delta_pct within [-1, 1] (wikitext2 stream512)"]
    assert len(shared) == 4  # one value on four cells
    made = with_outcomes(passing, *(outcome("fail", cells=["native-1-128"]) for _ in range(3)))
    names = [case.name for case in suite_of(made)]
    assert names == ["verdict", "ppl at most 9", "ppl at most 9 (2)", "ppl at most 9 (3)"]


def test_each_status_has_its_element(passing):
    for status, required, word, verdict in (
        ("pass", True, "", ("", "")),
        ("fail", True, "failure", ("failure", "fail")),
        ("fail", False, "failure", ("failure", "fail")),
        ("inconclusive", True, "failure", ("failure", "inconclusive")),
        ("inconclusive", False, "failure", ("failure", "inconclusive")),
        ("not_evaluated", True, "error", ("error", "not_evaluated")),
        ("not_evaluated", False, "skipped", ("", "")),
    ):
        made = with_outcomes(passing, outcome("pass", check="other"), outcome(status, required))
        cases, message = cases_of(made), f"it is {status}."
        assert cases["whole run", "ppl at most 9"] == ((word, status, message) if word else ("", "", ""))
        assert cases["whole run", "verdict"][:2] == verdict
        own = [case for case in suite_of(made) if case.name == "ppl at most 9"]
        if word in ("failure", "error"):
            texts = [result.text for case in own for result in case.result]
            assert texts == [f"{message}\nThe gate's reason: the source"]
    cases = cases_of(with_outcomes(passing, outcome("not_evaluated", False)))
    assert [cases["whole run", name][0] for name in ("ppl at most 9", "verdict")] == ["skipped", "error"]
    assert cases_of(with_outcomes(passing))["whole run", "verdict"][0] == "error"


STATUSES = st.sampled_from(["pass", "fail", "inconclusive", "not_evaluated"])
CELLS = st.sampled_from([(), ("native-1-128",), ("native-1-128", INT8)])
CHECKS = st.sampled_from(["precision", "device", "skipped", "x"])


@given(st.lists(st.tuples(STATUSES, st.booleans(), CHECKS, CELLS), max_size=6))
def test_green_and_exit_code_0_are_the_same(maker, shapes):
    made = with_outcomes(maker(), *itertools.starmap(outcome, shapes))
    suite = suite_of(made)
    words = [RESULTS[type(result)] for case in suite for result in case.result]
    assert (not {"failure", "error"} & set(words)) == (made.verdict.exit_code == 0)
    counts = [words.count(word) for word in ("failure", "error", "skipped")]
    assert [suite.failures, suite.errors, suite.skipped] == counts
    assert suite.tests == sum(1 for _ in suite)


@pytest.mark.parametrize("required", [False, True])
def test_cells_without_their_device_are_skipped_here_and_fail_in_ci(passing, required):
    error = {"reason": "no_cuda_device", "message": "device cuda was asked for, and this machine has none."}
    lost = {"status": REFUSED, "error": error, "samples": {}, "evidence": None, "decision": None}
    made = passing.with_records(lambda r: replace(r, **lost) if r.spec["kv_format"] == "int8_sym" else r)
    made = with_outcomes(
        made,
        outcome("pass", check="precision", cells=["native-1-128"]),
        outcome("not_evaluated", check="precision", cells=[INT8]),
        outcome("not_evaluated", check="other", cells=["native-1-128"]),
        *missing_device(made.run, required),
        *failed_tasks(made.run),
    )
    assert made.verdict.exit_code == (1 if required else 3)
    cases, names = cases_of(made), made.run.names
    word = "error" if required else "skipped"
    found = [cases[names[INT8], check][0] for check in ("device", "precision")]
    assert found == (["failure", "error"] if required else ["skipped"] * 2)
    assert {value[0] for (_, name), value in cases.items() if name.startswith("skipped")} == {word}
    assert "this machine has none" in cases[names[INT8], "skipped"][2]
    assert cases[names["native-1-128"], "other"][0] == "error"  # it ran, and its check was not evaluated
    assert cases["whole run", "verdict"][0] == ("failure" if required else "error")


def test_the_suite_says_what_was_measured_and_where(failing):
    suite = suite_of(failing)
    want = {f"data_sha256.perplexity {text}": "a1b2c3" for text in ("wikitext2", "pydoc")}
    want |= {"matrix": "matrices/int8.yaml", "matrix_sha256": "9f2c1a7e0b44", "gate": "gates/int8.yaml"}
    want |= {"model": "smollm2-135m-instruct", "command": "kvbench run matrices/int8.yaml"}
    want |= {"verdict": "fail", "exit_code": "1", "environment.torch": "2.13.0", "environment.gpu": "null"}
    assert want.items() <= {p.name: p.value for p in suite.properties()}.items()
    assert (suite.name, suite.timestamp) == ("kvbench int8", "2026-10-01T12:00:00+00:00")
    assert suite.time == pytest.approx(sum(record.seconds for record in failing.records), abs=1e-3)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text(maker, text):
    xml = junit_xml(all_statuses(maker, text).judged)
    root = ET.parse(io.BytesIO(xml.encode())).getroot()
    tags = {element.tag for element in root.iter()}
    assert tags == {"testsuites", "testsuite", "properties", "property", "testcase", "failure", "error"}
    assert one_line(text) in {e.get("message") for e in root.iter() if e.tag in ("failure", "error")}
    names = [case.get("name") for case in root.iter("testcase")]
    assert all(len(name) <= 510 for name in names)
    assert len(text) > 200 or any(one_line(text) in name for name in names)
    assert all(c.isprintable() for e in root.iter() for value in e.attrib.values() for c in value)
