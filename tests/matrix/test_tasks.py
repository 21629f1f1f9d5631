"""Tasks: each piece of work once, under a key that follows everything that decides its result."""

import json
from dataclasses import replace

import pytest

from kvbench.errors import NotAvailable, UsageError
from kvbench.matrix.load import Host
from kvbench.matrix.runners import RUNNERS

TEXTS = "perplexity: {data: [wikitext2, pydoc]}, mcq: {tasks: [cloze, mmlu], shots: 5}"
ALL = f"runners: {{storage: , parity: , latency: , agreement: , {TEXTS}}}"


def test_tasks_once_a_scope_in_cell_then_runner_order(make):
    matrix = make(f"axes: {{kv_format: [native, int8_sym], batch: [1, 4]}}\n{ALL}")
    own, texts = ["storage", "latency"], ["perplexity wikitext2 stream512", "perplexity pydoc stream512"]
    first = ["storage", "parity", "latency", "agreement", *texts, "mcq cloze 5-shot", "mcq mmlu 5-shot"]
    assert [f"{t.runner} {t.variant}".strip() for t in matrix.tasks] == [*first, *own, *first, *own]
    native, quantized = [c.id for c in matrix.cells[:2]], [c.id for c in matrix.cells[2:]]
    for task in matrix.tasks:
        scoped = {"batch", "context"} <= set(task.spec)
        assert scoped == (task.runner in ("storage", "latency"))
        cells = native if task.spec["kv_format"] == "native" else quantized
        assert list(task.cells) == cells if not scoped else task.cells[0] in cells and len(task.cells) == 1


def test_each_task_points_at_the_same_work_on_the_baseline(make):
    matrix = make(f"axes: {{kv_format: [int8_sym], batch: [1, 4]}}\n{ALL}")
    by_key = {task.key: task for task in matrix.tasks}
    assert len(by_key) == len(matrix.tasks)
    for task in matrix.tasks:
        if task.spec["kv_format"] == "native":
            assert task.baseline is None
        else:
            base = by_key[task.baseline or ""]
            assert (base.runner, base.variant, base.options) == (task.runner, task.variant, task.options)
            assert {**task.spec, "kv_format": "native"} == base.spec


def test_options_are_expanded_in_declared_order_and_a_scalar_becomes_a_list(make):
    runners = "runners: {parity: {seed: 3, lengths: 7}, mcq: {max_truncated: 1}}"
    matrix = make(f"axes: {{kv_format: native}}\n{runners}")
    twice = make("axes: {kv_format: native}\nrunners: {perplexity: {data: [pydoc, pydoc]}}")
    assert [(task.cells, task.options["data"]) for task in twice.tasks] == [((twice.cells[0].id,), "pydoc")]
    assert list(matrix.tasks[0].options.items()) == [("lengths", [7]), ("steps", 2048), ("seed", 3)]
    assert list(matrix.tasks[1].options) == list(RUNNERS["mcq"].options)
    assert json.dumps(matrix.tasks[1].options["max_truncated"]) == "1.0"


def test_keys_follow_everything_that_decides_a_result(make, monkeypatch):
    text = "axes: {kv_format: native}\nrunners: {perplexity: {data: wikitext2, split: validation}}"
    seen = []

    def keys(text=text, **kwargs):
        return tuple(task.key for task in make(text, **kwargs).tasks)

    def data(name, split):
        seen.append((name, split))
        return "d1"

    def absent(name, split):
        raise NotAvailable("fetch it")

    different = {
        keys(), keys(host=Host("cpu", {"torch": "2.13"})), keys(fingerprint_model=lambda spec: "m1"),
        keys(fingerprint_data=data), keys(text.replace("validation", "test")),
        keys(text + "\nengine: {page_size: 32}"),
    }  # fmt: skip
    assert len(different) == 6
    assert seen == [("wikitext2", "validation")]
    assert keys(text + "\nengine: {batch: 7}") == keys()  # perplexity does not depend on the batch
    before, own = keys(), RUNNERS["perplexity"]
    monkeypatch.setitem(RUNNERS, "perplexity", replace(own, protocol=own.protocol + 1))
    assert keys() != before
    gone = keys(fingerprint_data=absent)
    assert gone != keys(fingerprint_data=data)


def test_a_model_that_means_nothing_is_located(make):
    def unknown(spec):
        raise UsageError(f"the model {spec['model']} is not known.")

    text = "axes:\n  kv_format: native\n  model: [smolm]\n"
    with pytest.raises(UsageError, match=r"m\.yaml:3:11: the model smolm is not known\."):
        make(text, fingerprint_model=unknown)
    with pytest.raises(UsageError, match=r"^--set axes\.model=tinny: the model tinny is not known\."):
        make(text, ["axes.model=tinny"], fingerprint_model=unknown)
