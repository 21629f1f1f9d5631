"""The seam between engines and the rest: a second engine of one package runs a text runner, with the evidence that it declares."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.engines import ENGINES, engine_kind
from kvbench.engines.protocol import Report
from kvbench.errors import KvbenchError, UsageError
from kvbench.evidence.examine import completed
from kvbench.gate.precision import judge_precision
from kvbench.matrix.cells import CELL_KEYS, Task
from kvbench.matrix.runners import RUNNERS
from kvbench.records.record import LEVELS, NOT_AVAILABLE, UNVERIFIED, VERIFIED, Level
from kvbench.run.task.measure import execute
from kvbench.run.task.prepare import Session

TOY = Path(__file__).parent / "toy"


@pytest.fixture
def record(monkeypatch, tmp_path):
    """Perplexity of a short text by the toy engine, as the native baseline's task."""
    monkeypatch.setitem(ENGINES, "toy", "tests.engines.toy.kind")
    (tmp_path / "text.txt").write_text("The cat sat on the mat, and 12 dogs looked at it.\n" * 30)
    runner = RUNNERS["perplexity"]
    options = {name: option.default for name, option in runner.options.items()}
    options |= {"data": str(tmp_path / "text.txt"), "protocol": "stream512"}
    spec = CELL_KEYS | {
        "model": "tiny-llama",
        "model_weights": "random",
        "plumbing": True,
        "device": "cpu",
        "dtype": "float32",
    }
    task = Task("key", "perplexity", "", spec, options, ("cell",), None)
    return execute(task, Session(None, {}, engine="toy"), None, lambda done, total, note: None)


def test_a_second_engine_runs_a_text_runner(record):
    assert (record.status, record.error) == ("ok", None)
    assert sum(chunk["tokens"] for chunk in record.samples["chunks"]) > 1000
    assert record.evidence is not None
    assert record.evidence["reads"]["tokens"] > 1000


def test_its_evidence_is_what_it_declares_and_the_rest_is_not_available(record):
    assert record.evidence is not None
    states = {level["name"]: level["state"] for level in record.evidence["levels"]}
    assert list(states) == list(LEVELS)
    given = {"E1": VERIFIED, "E1-weights": VERIFIED, "E4": UNVERIFIED}
    assert states == {name: given.get(name, NOT_AVAILABLE) for name in LEVELS}


@pytest.mark.parametrize(("rung", "passes"), [("E1", True), ("E2", False), ("E5", False)])
def test_a_gate_asks_for_levels_and_names_those_that_the_engine_cannot_give(record, rung, passes):
    verdict = judge_precision(record.spec, record.decision, record.evidence, record.facts, required=rung)
    assert verdict.reason == ("" if passes else UNVERIFIED)
    if not passes:
        assert "E2: Engine toy cannot give this level." in verdict.sentence
        assert ("E5: Engine toy cannot" in verdict.sentence) == (rung == "E5")


def test_a_level_that_the_engine_does_not_declare_is_an_error():
    from tests.engines.toy.kind import KIND

    report = Report("native", "native", (Level("E1", VERIFIED, ""),), {}, {})
    assert completed(KIND, report).state == UNVERIFIED
    with pytest.raises(KvbenchError, match="E5"):
        completed(KIND, replace(report, levels=(Level("E5", VERIFIED, ""),)))


def test_an_engine_is_one_package_and_one_line():
    """The toy touches nothing else: its files are all in one folder, and no product file names it."""
    assert sorted(path.name for path in TOY.glob("*.py")) == ["__init__.py", "kind.py"]
    product = Path(__file__).parents[2] / "kvbench"
    assert not [path for path in product.rglob("*.py") if "toy" in path.read_text().lower().split()]
    for name in ENGINES:
        kind = engine_kind(name)
        assert kind.name == name
        assert kind.evidence_levels <= set(LEVELS)
    with pytest.raises(UsageError, match="reference"):
        engine_kind("nosuch")
