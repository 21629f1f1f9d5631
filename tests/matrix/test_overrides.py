"""`--set`: values by the YAML rules, mistakes with the words of the option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbench.matrix.load import Matrix
from kvbench.matrix.overrides import apply
from kvbench.matrix.yaml import parse

Make = Callable[..., Matrix]
Refused = Callable[..., list[str]]
Picked = Callable[..., list[tuple[Any, ...]]]


def test_set_replaces_values_by_the_yaml_rules(make: Make, picked: Picked) -> None:
    text = "axes: {kv_format: native, batch: [1, 2]}\nengine: {page_size: 16}\nrunners: {mcq: {limit: 24}}"
    matrix = make(text, ["axes.kv_format=[native,int8_sym]", "axes.page_size=[8, 16]", "engine.batch=3", "runners.mcq.limit=null",
                         "runners.mcq.max_truncated=1e-2", "runners.parity={}", "name=other"])  # fmt: skip
    assert matrix.name == "other"
    assert picked(matrix, "kv_format", "page_size", "batch") == [
        ("native", 8, 3), ("native", 16, 3), ("int8_sym", 8, 3), ("int8_sym", 16, 3),
    ]  # fmt: skip
    assert (matrix.tasks[0].options["limit"], matrix.tasks[0].options["max_truncated"]) == (None, 0.01)
    assert matrix.source["axes"] == {"kv_format": ["native", "int8_sym"], "page_size": [8, 16]}
    assert matrix.cells[-1].line is None  # its format is not in the file


def test_set_of_a_model_replaces_the_axis(make: Make, picked: Picked) -> None:
    matrix = make("axes: {model: [a, b], batch: 1}", ["model={source: c, weights: random}"])
    assert picked(matrix, "model", "model_weights") == [("c", "random")]
    assert picked(make("model: a\naxes: {batch: 1}", ["axes.model=[b, c]"]), "model") == [("b",), ("c",)]


def test_what_cannot_be_set_is_said_with_the_words_of_the_option(refused: Refused) -> None:
    text = "axes: {kv_format: [native], batch: 1}\ntreshold: 1\nrunners: {mcq: {}}"
    words = [
        "axes.kv_format=[int8_sim]", "axs.batch=[1]", "axes.bach=[1]", "runners.mcq.limt=3", "runners.mqc.limit=3",
        "axes.batch.x=1", "engine.page_size", "name=", "=1", "engine.dtype=[1", "engine.a=1", "engine.b=1",
    ]  # fmt: skip
    lines = refused(text, words)
    assert len(lines) == len(words) + 1
    assert lines[-1].startswith("m.yaml:2:1: treshold is not a key of a matrix")
    said = dict(line.split(": ", 1) for line in lines[:-1])
    assert list(said) != sorted(said)  # in the order of faults, not of the alphabet
    assert said["--set axes.kv_format=[int8_sim]"].endswith("Did you mean int8_sym?")
    assert said["--set axs.batch=[1]"].endswith("Did you mean axes?")
    assert said["--set axes.bach=[1]"].endswith("Did you mean batch?")
    assert said["--set runners.mcq.limt=3"].endswith("Did you mean limit?")
    assert said["--set runners.mqc.limit=3"] == (
        "runners has no mqc; it has: mcq. Did you mean mcq? To add it, write --set runners.mqc={limit: ...}."
    )
    assert (
        said["--set axes.batch.x=1"] == "axes.batch is no mapping, so no key of it can be set; set it whole."
    )
    assert said["--set engine.page_size"] == "write a path, '=' and a value, as in --set axes.batch=[1,4]."
    assert said["--set =1"] == said["--set engine.page_size"]
    assert said["--set name="] == "there is no value after '='; write null where null is meant."
    assert said["--set engine.dtype=[1"].startswith("value:1:3: this is not YAML")
    assert said["--set engine.a=1"].startswith("a is not a key of engine")
    assert said["--set engine.b=1"].startswith("b is not a key of engine")


def test_the_loaded_document_stays_as_it_was() -> None:
    document = parse("axes: {batch: [1]}", "f.yaml")
    assert apply(document, ["axes.batch=2"]).data == {"axes": {"batch": 2}}
    assert document.data == {"axes": {"batch": [1]}}
