"""JUnit: who reads nothing else sees green with exit code 0 and no other."""

from __future__ import annotations

import io
import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped

from kvbench.gate.builtin_checks import failed_tasks, missing_device
from kvbench.gate.verdict import Outcome, Verdict, exit_code_of
from kvbench.records.record import REFUSED
from kvbench.render.numbers import one_line
from kvbench.report.junit import junit_xml
from tests.report.hostile import HOSTILE, all_statuses

RESULTS = {Failure: "failure", Error: "error", Skipped: "skipped"}


def suite_of(made):
    """The only suite, read back by junitparser; the text is XML for another parser too."""
    text = junit_xml(made.judged)
    ET.fromstring(text)
    (suite,) = JUnitXml.fromroot(ET.fromstring(text))
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
    kept = tuple(outcomes)
    verdict = Verdict(kept, exit_code_of(kept))
    return replace(made, verdict=verdict)


def outcome(status, required=True, check="ppl at most 9", cells=(), variant=""):
    more = {"limit": "at most 9", "required": required, "why": "the source"}
    return Outcome(check, status, "", f"it is {status}.", tuple(cells), "ppl", variant, **more)


def test_a_case_a_check_and_cell_and_one_of_the_verdict(passing):
    cases = cases_of(passing)
    expected = {("whole run", "verdict")}
    names = passing.run.names
    for o in passing.verdict.outcomes:
        name = f"{o.check} ({o.variant})" if o.variant else o.check
        expected |= {(names[cell], name) for cell in o.cells} or {("whole run", name)}
    assert set(cases) == expected
    assert set(cases.values()) == {("", "", "")}
    shared = [key for key in cases if key[1] == "ppl_delta_pct within [-1, 1] (wikitext2 stream512)"]
    assert len(shared) == 4  # one value on four cells


@pytest.mark.parametrize(
    ("status", "required", "word", "kind", "verdict"),
    [
        ("pass", True, "", "", ("", "")),
        ("fail", True, "failure", "fail", ("failure", "fail")),
        ("fail", False, "failure", "fail", ("failure", "fail")),
        ("inconclusive", True, "failure", "inconclusive", ("failure", "inconclusive")),
        ("inconclusive", False, "failure", "inconclusive", ("failure", "inconclusive")),
        ("not_evaluated", True, "error", "not_evaluated", ("error", "not_evaluated")),
        ("not_evaluated", False, "skipped", "not_evaluated", ("", "")),
    ],
)
def test_each_status_has_its_element(passing, status, required, word, kind, verdict):
    made = with_outcomes(passing, outcome("pass", check="other"), outcome(status, required))
    cases = cases_of(made)
    message = f"it is {status}." if word else ""
    assert cases["whole run", "ppl at most 9"] == (word, kind, message)
    assert cases["whole run", "verdict"][:2] == verdict
    texts = [result.text for case in suite_of(made) for result in case.result if case.name == "ppl at most 9"]
    if word in ("failure", "error"):
        assert texts == [f"{message}\nThe gate's reason: the source"]


STATUSES = st.sampled_from(["pass", "fail", "inconclusive", "not_evaluated"])
SHAPES = st.lists(
    st.tuples(STATUSES, st.booleans(),
              st.sampled_from([(), ("native-1-128",), ("native-1-128", "int8_sym-1-128")]),
              st.sampled_from(["precision", "device", "skipped", "x"])), max_size=6
)  # fmt: skip


@given(SHAPES)
def test_green_and_exit_code_0_are_the_same(maker, shapes):
    made = with_outcomes(maker(), *(outcome(s, r, check=c, cells=cells) for s, r, cells, c in shapes))
    suite = suite_of(made)
    words = [RESULTS[type(result)] for case in suite for result in case.result]
    green = not {"failure", "error"} & set(words)
    assert green == (made.verdict.exit_code == 0)
    assert (suite.failures, suite.errors, suite.skipped) == tuple(
        map(words.count, ("failure", "error", "skipped"))
    )
    assert suite.tests == sum(1 for _ in suite)


def test_where_all_was_skipped_the_verdict_is_an_error(passing):
    cases = cases_of(with_outcomes(passing, outcome("not_evaluated", False)))
    assert cases["whole run", "ppl at most 9"][0] == "skipped"
    assert cases["whole run", "verdict"][0] == "error"
    assert cases_of(with_outcomes(passing))["whole run", "verdict"][0] == "error"


def lacking(made):
    """The run on a machine without the GPU that its int8_sym cells ask for."""
    error = {"reason": "no_cuda_device", "message": "device cuda was asked for, and this machine has none."}
    return made.with_records(
        lambda r: (
            replace(r, status=REFUSED, error=error, samples={}, evidence=None, decision=None)
            if r.spec["kv_format"] == "int8_sym"
            else r
        )
    )


@pytest.mark.parametrize("required", [False, True])
def test_cells_without_their_device_are_skipped_here_and_fail_in_ci(passing, required):
    made = lacking(passing)
    found = [
        outcome("pass", check="precision", cells=["native-1-128"]),
        outcome("not_evaluated", check="precision", cells=["int8_sym-1-128"]),
        outcome("not_evaluated", check="other", cells=["native-1-128"]),
        *missing_device(made.run, required),
        *failed_tasks(made.run),
    ]
    made = with_outcomes(made, *found)
    assert made.verdict.exit_code == (1 if required else 3)
    cases = cases_of(made)
    int8 = made.run.names["int8_sym-1-128"]
    word = "error" if required else "skipped"
    assert cases[int8, "device"][0] == ("failure" if required else "skipped")
    assert cases[int8, "precision"][0] == word
    assert {value[0] for (where, name), value in cases.items() if name.startswith("skipped")} == {word}
    assert "this machine has none" in cases[int8, "skipped"][2]
    native = made.run.names["native-1-128"]
    assert cases[native, "other"][0] == "error"  # it ran, and its check was not evaluated
    assert cases["whole run", "verdict"][0] == ("failure" if required else "error")


def test_equal_cases_are_told_apart(passing):
    made = with_outcomes(passing, *(outcome("fail", cells=["native-1-128"]) for _ in range(3)))
    names = [case.name for case in suite_of(made)]
    assert names == ["verdict", "ppl at most 9", "ppl at most 9 (2)", "ppl at most 9 (3)"]


def test_the_suite_says_what_was_measured_and_where(failing):
    suite = suite_of(failing)
    properties = {p.name: p.value for p in suite.properties()}
    want = {
        "model": "smollm2-135m-instruct", "matrix": "matrices/int8.yaml", "matrix_sha256": "9f2c1a7e0b44",
        "gate": "gates/int8.yaml", "command": "kvbench run matrices/int8.yaml", "verdict": "fail",
        "exit_code": "1",
        "environment.torch": "2.13.0", "environment.gpu": "null",
        "data_sha256.perplexity wikitext2": "a1b2c3", "data_sha256.perplexity pydoc": "a1b2c3",
    }  # fmt: skip
    assert want.items() <= properties.items()
    assert suite.name == "kvbench int8"
    assert suite.timestamp == "2026-10-01T12:00:00+00:00"
    assert suite.time == pytest.approx(sum(record.seconds for record in failing.records), abs=1e-3)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text(maker, text):
    made = all_statuses(maker, text)
    xml = junit_xml(made.judged)
    xml.encode("utf-8")
    root = ET.parse(io.BytesIO(xml.encode())).getroot()
    tags = {element.tag for element in root.iter()}
    assert tags == {"testsuites", "testsuite", "properties", "property", "testcase", "failure", "error"}
    messages = {e.get("message") for e in root.iter() if e.tag in ("failure", "error")}
    assert one_line(text) in messages
    names = [case.get("name") for case in root.iter("testcase")]
    assert all(len(name) <= 510 for name in names)
    assert len(text) > 200 or any(one_line(text) in name for name in names)
    strange = [c for c in itertools.chain(*(e.attrib.values() for e in root.iter())) if not c.isprintable()]
    assert strange == []
