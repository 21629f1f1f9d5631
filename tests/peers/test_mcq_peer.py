"""The MCQ runner against lm-evaluation-harness: equal prompts, log-probabilities and picks."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import mcq_peer as peer
from kvbench.data.questions import questions
from kvbench.matrix.cells import CELL_KEYS
from kvbench.runners.text.prompts import LETTERS, TEMPLATES

if TYPE_CHECKING:
    pass

DATA = os.environ.get("KVBENCH_DATA_DIR")
SPEC = {**CELL_KEYS, "model": "smollm2-135m-instruct", "device": "cpu", "dtype": "float32"}

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings(
        "default"
    ),  # lm-eval's and its dependencies' own warnings are not ours to fail on
    pytest.mark.skipif(
        find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install -e '.[lm-eval]'"
    ),
    pytest.mark.skipif(DATA is None, reason="KVBENCH_DATA_DIR is not set: MMLU and C-Eval are not here"),
]


def data_of(folder, task, subjects, limit):
    whole = questions(task, Path(DATA or ""))
    (folder / "peer").mkdir()
    return peer.write_data(folder / "own", task, peer.subset(whole, subjects, limit), whole)


def assert_equal(loaded, folder, task, data, shots):
    """Equal ids and picks, log-probabilities within 1e-3, in batches of 1 and 4."""
    tasks = peer.peer_tasks(folder / "peer", task, data, shots, TEMPLATES[task].delimiter)
    ours = peer.scores_of(peer.own_measure(loaded, SPEC, task, folder / "own", shots))
    assert len(ours) == len(data.questions)
    for batch_size in (1, 4):
        lm = peer.peer_model(loaded, batch_size)
        theirs = peer.peer_scores(lm, tasks)
        assert sorted(theirs) == sorted(ours)
        assert peer.own_encoded(loaded, task, data, shots) == peer.peer_encoded(lm, tasks)
        assert peer.different_picks(ours, theirs) == []
        assert peer.largest_difference(ours, theirs) < 1e-3


@pytest.fixture(scope="module")
def tiny():
    from tests.factories.quality_tools import tiny_model

    return tiny_model(max_context=8192)


@pytest.mark.parametrize(("task", "delimiter"), [("mmlu", " "), ("ceval", ""), ("ceval", " ")])
@pytest.mark.parametrize("shots", [0, 5])
def test_prompts_scores_and_picks_are_those_of_lm_eval(tiny, tmp_path, monkeypatch, task, delimiter, shots):
    """C-Eval with kvbench's join (no space after the colon), and with lm-eval's own: its task file as it is."""
    monkeypatch.setitem(TEMPLATES, task, replace(TEMPLATES[task], delimiter=delimiter))
    assert_equal(tiny, tmp_path, task, data_of(tmp_path, task, subjects=2, limit=6), shots)


@pytest.mark.model
def test_the_default_model_picks_what_lm_eval_picks(tmp_path):
    from kvbench.engines.reference.load import load_model

    loaded = load_model(SPEC, "cpu", "float32")
    data = data_of(tmp_path, "mmlu", subjects=2, limit=4)
    assert_equal(loaded, tmp_path, "mmlu", data, shots=5)
    pairs = peer.own_encoded(loaded, "mmlu", data, 5)
    shared = peer.scores_of(peer.own_measure(loaded, SPEC, "mmlu", tmp_path / "own", 5))
    assert peer.largest_difference(shared, peer.unshared_scores(loaded, SPEC, pairs)) < 1e-3


@pytest.mark.parametrize("task", ["mmlu", "ceval"])
def test_every_subject_has_the_text_of_lm_evals_task_file(task):
    import lm_eval
    import yaml

    pattern, _ = peer.PEER_FILES[task]
    subjects = {q.subject for q in questions(task, Path(DATA or "")).questions}
    assert len(subjects) == {"mmlu": 57, "ceval": 52}[task]
    for subject in subjects:
        path = Path(lm_eval.__file__).parent / "tasks" / pattern.format(subject)
        said = yaml.safe_load(path.read_text(encoding="utf-8"))["description"]
        assert TEMPLATES[task].describe(subject) == said


def test_the_picks_and_differences_of_two_tools_are_compared_by_question():
    a = {"x": [-1.0, -2.0], "y": [-1.0, -2.0]}
    b = {"x": [-1.0, -2.5], "y": [-2.0, -1.5]}
    assert peer.different_picks(a, b) == ["y"]
    assert peer.largest_difference(a, b) == 1.0
    assert LETTERS[peer.pick([-3.0, -1.0, -1.0])] == "B"


@pytest.mark.model
@pytest.mark.parametrize("task", ["mmlu", "arc_easy"])
def test_the_plug_in_gives_the_scores_that_our_runner_stores(tmp_path, task):
    """int8_sym on the default model: scores equal to the last bit."""
    from kvbench.engines.reference.engine import Engine
    from kvbench.lm_eval.model import KvbenchLM
    from kvbench.matrix.resolve_backend import Request, resolve

    data = data_of(tmp_path, task, subjects=2, limit=8)
    lm = KvbenchLM(pretrained=SPEC["model"], kv_format="int8_sym", device="cpu", dtype="float32")
    theirs = peer.peer_scores(lm, peer.peer_tasks(tmp_path / "peer", task, data, 0, " "))
    decision = resolve(Request("int8_sym", "native", "torch", "refuse"), lm.loaded.facts)
    ours = peer.scores_of(
        peer.own_measure(
            lm.loaded, {**SPEC, "kv_format": "int8_sym"}, task, tmp_path / "own", 0,
            lambda sequences, tokens: Engine(lm.loaded, decision, lm.spec, sequences=sequences, tokens=tokens),
        )
    )  # fmt: skip
    assert theirs == ours
    assert lm.get_model_info()["kvbench"]["evidence"] == "verified"
