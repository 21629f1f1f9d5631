"""Matrix files: types, accepted values, every mistake at once and with its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UsageError
from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix.load import Matrix, load
from kvbench.matrix.runners import RUNNERS

Make = Callable[..., Matrix]
Refused = Callable[..., list[str]]
Picked = Callable[..., list[tuple[Any, ...]]]

ROOT = Path(__file__).parents[2]


def test_a22_t2_a_boolean_or_a_number_where_a_name_is_due(refused: Refused) -> None:
    assert refused(
        """\
        axes: {kv_format: [native, true, 8, NO, on]}
        engine: {fallback: off, dtype: false, backend: 1}
        """
    ) == [
        "m.yaml:1:28: kv_format is the boolean true where one of native, int8_sym, int8_static, fp8_e4m3, fp8_e4m3_static is due.",
        "m.yaml:1:34: kv_format is the number 8 where one of native, int8_sym, int8_static, fp8_e4m3, fp8_e4m3_static is due; put it in quotes if it is a name.",
        'm.yaml:1:37: kv_format is "NO", which is not accepted; one of native, int8_sym, int8_static, fp8_e4m3, fp8_e4m3_static is due.',
        'm.yaml:1:41: kv_format is "on", which is not accepted; one of native, int8_sym, int8_static, fp8_e4m3, fp8_e4m3_static is due.',
        'm.yaml:2:20: fallback is "off", which is not accepted; one of refuse, allow is due.',
        "m.yaml:2:32: dtype is the boolean false where one of auto, float32, bfloat16, float16 is due.",
        "m.yaml:2:48: backend is the number 1 where one of torch, triton, auto is due; put it in quotes if it is a name.",
    ]


def test_a22_t3_a_key_twice_is_reported_with_the_other_mistakes(refused: Refused) -> None:
    assert refused("axes: {batch: [1]}\ngatee: x\naxes: {batch: [2]}\n") == [
        "m.yaml:2:1: gatee is not a key of a matrix; accepted: name, model, axes, engine, include, exclude, runners, gate."
        " Did you mean gate?",
        "m.yaml:3:1: the key axes stands twice (first in line 1); keep one of them.",
    ]


def test_a22_t4_nearest_match_for_values_and_keys(refused: Refused) -> None:
    lines = refused(
        """\
        axes:
          kv_format: [int8_sim]
          kv_fromat: [native]
        engine:
          page_sise: 16
        include:
          - {contex: 8}
        runners:
          perplexty: {}
          mcq: {task: [cloze], shots: 3}
          storage: {x: 1}
        treshold: 1
        """
    )
    assert [line.split(" ")[0] + line[line.rfind(". ") + 1 :] for line in lines] == [
        "m.yaml:2:15: Did you mean int8_sym?",
        "m.yaml:3:3: Did you mean kv_format?",
        "m.yaml:5:3: Did you mean page_size?",
        "m.yaml:7:6: Did you mean context?",
        "m.yaml:9:3: Did you mean perplexity?",
        "m.yaml:10:9: Did you mean tasks?",
        "m.yaml:10:31:" + lines[6][lines[6].rfind(". ") + 1 :],
        "m.yaml:11:13:" + lines[7][lines[7].rfind(". ") + 1 :],
        "m.yaml:12:1:" + lines[8][lines[8].rfind(". ") + 1 :],
    ]
    assert lines[6] == "m.yaml:10:31: shots is 3, which is not accepted; one of 0, 5 is due."
    assert lines[7] == "m.yaml:11:13: storage takes no option, so no x."
    assert lines[8].startswith("m.yaml:12:1: treshold is not a key of a matrix; accepted: name, model, axes,")


def test_a22_t5_a_scalar_axis_is_a_list_of_one(make: Make, picked: Picked) -> None:
    one = make("axes: {kv_format: int8_sym, batch: 8}")
    many = make("axes: {kv_format: [int8_sym], batch: [8]}")
    assert [c.id for c in one.cells] == [c.id for c in many.cells]
    assert picked(one, "kv_format", "batch") == [("native", 8), ("int8_sym", 8)]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            '[1, "8"]',
            'batch is the text "8" where a whole number of at least 1 is due; write 8 without quotes.',
        ),
        ("[1, 1_0]", 'batch is the text "1_0" where a whole number of at least 1 is due; write 10.'),
        ("[1, four]", 'batch is the text "four" where a whole number of at least 1 is due.'),
        ("[1, .nan]", "batch is the number .nan where a whole number of at least 1 is due."),
        ("[1, 2.0]", "batch is the number 2.0 where a whole number of at least 1 is due; write 2."),
        ("[1, 0]", "batch is 0; the smallest accepted is 1."),
        ("[1, -4]", "batch is -4; the smallest accepted is 1."),
        ("[1, true]", "batch is the boolean true where a whole number of at least 1 is due."),
        ("[1, ~]", "batch is null where a whole number of at least 1 is due."),
        ("[1, [2]]", "batch is a list [2] where a whole number of at least 1 is due."),
        ("[1, {a: 2}]", 'batch is a mapping {"a": 2} where a whole number of at least 1 is due.'),
    ],
)
def test_a22_t5_nothing_is_cast(refused: Refused, value: str, sentence: str) -> None:
    assert refused(f"axes: {{batch: {value}}}") == [f"m.yaml:1:19: {sentence}"]


def test_more_splits_than_a_kernel_takes_are_refused(refused: Refused) -> None:
    assert refused("axes: {kv_splits: [256, 257]}") == [
        "m.yaml:1:25: kv_splits is 257; the largest accepted is 256."
    ]


def test_a22_t5_nan_is_refused_wherever_a_number_is_due(refused: Refused) -> None:
    assert refused(
        """\
        axes: {kv_format: int8_static, scale: [.nan, .inf, 0, -1.5, "0.05", true]}
        runners:
          mcq: {max_truncated: .nan}
        """
    ) == [
        "m.yaml:1:40: scale holds .nan; a scale is a finite number above 0.",
        "m.yaml:1:46: scale holds .inf; a scale is a finite number above 0.",
        "m.yaml:1:52: scale holds 0; a scale is a finite number above 0.",
        "m.yaml:1:55: scale holds -1.5; a scale is a finite number above 0.",
        'm.yaml:1:61: scale holds the text "0.05" where a number above 0, default, checkpoint, checkpoint_or_default, a .json file of scales, or {k: ..., v: ...} with a number or a list of one a layer each is due; write 0.05 without quotes.',
        "m.yaml:1:69: scale holds the boolean true where a number above 0, default, checkpoint, checkpoint_or_default, a .json file of scales, or {k: ..., v: ...} with a number or a list of one a layer each is due.",
        "m.yaml:3:24: max_truncated is .nan where a finite number is due.",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- a", "m.yaml:1:1: a matrix is a mapping with the keys name, model, axes, engine, include, exclude, runners, gate."),
        ("axes: [kv_format]", 'm.yaml:1:7: axes is ["kv_format"] where a mapping is due, as in {kv_format: [native, int8_sym]}.'),
        ("axes: {batch: []}", "m.yaml:1:15: batch has no value; an axis takes at least one."),
        ("name: Int8 run\naxes: {batch: 1}", 'm.yaml:1:7: name is "Int8 run"; a name is made of a-z, 0-9, _ and -, as in int8-batch.'),
        ("name: 8\naxes: {batch: 1}", "m.yaml:1:7: name is the number 8 where text is due; put it in quotes if it is a name."),
        ("batch: 8\naxes: {}", "m.yaml:1:1: batch is a cell key; put it under axes (to vary it) or under engine (to fix it)."),
        ("axes: {batch: 1}\nmodel: 7", "m.yaml:2:8: model is the number 7 where text is due; put it in quotes if it is a name."),
        ("axes: {batch: 1}\nmodel: ''", "m.yaml:2:8: model is an empty text where text is due."),
        ("axes: {batch: 1}\nmodel: {weights: random}", "m.yaml:2:8: model has no source; name the alias, hub id, folder or .gguf file."),
        ("axes: {batch: 1}\nmodel: {source: a, weights: randm}",
         'm.yaml:2:29: weights is "randm", which is not accepted; one of checkpoint, random is due. Did you mean random?'),
        ("axes: {batch: 1}\nengine: {model: a}", "m.yaml:2:10: model goes to the top of the file, not under engine."),
        ("axes: {batch: 1}\nengine: {batch: 2}", "m.yaml:2:10: batch is given by axes.batch and again by engine; keep one."),
        ("axes: {batch: 1, model: [a, b]}\nmodel: c", "m.yaml:1:18: model is given by model and again by axes.model; keep one."),
        ("axes: {batch: 1, model_weights: [random]}\nmodel: {source: c, weights: random}",
         "m.yaml:1:18: model_weights is given by model and again by axes.model_weights; keep one."),
        ("axes: {batch: 1}\ninclude: {batch: 2}", "m.yaml:2:10: include takes a list of mappings, as in [{kv_format: int8_sym, batch: 8}]."),
        ("axes: {batch: 1}\ninclude: [{}]", "m.yaml:2:11: an entry of include is a mapping of cell keys, not {}."),
        ("axes: {batch: 1}\ninclude: [{batch: [2, 3]}]", "m.yaml:2:19: batch is a list in include, which takes one value; write an entry for each."),
        ("axes: {batch: 1}\nexclude: [{context: 8}]", "m.yaml:2:12: exclude names context, which is no axis; axes: batch."),
        ("axes: {batch: 1}\nexclude: [{batch: 1}]", "m.yaml:2:10: exclude leaves no cell; remove an entry, or add cells under include."),
        ("axes: {batch: 1}\nrunners: [storage]", "m.yaml:2:10: runners is a list where a mapping is due; write each as `storage: {}`."),
        ("axes: {batch: 1}\nrunners: {parity: {lengths: []}}", "m.yaml:2:29: lengths has no value; it takes at least one."),
        ("axes: {batch: 1}\nrunners: {parity: 5}", "m.yaml:2:19: parity is 5 where a mapping is due, as in parity: {}."),
        ("axes: {batch: 1}\nrunners: {}",
         "m.yaml:2:10: the matrix names no runner; name one or more under runners: storage, transfer, parity, health, sensitivity, gemm, latency, agreement, generate, perplexity, mcq."),
        ("axes: {batch: 1}\ngate: nothing.yaml", "m.yaml:2:7: the gate file nothing.yaml does not exist; its path is relative to the matrix file."),
        ("axes: {batch: 1}\ngate: true", "m.yaml:2:7: gate is the boolean true where text is due."),
        ("axes: {batch: 1}\nengine: {model_revision: 1234567}",
         "m.yaml:2:26: model_revision is the number 1234567 where text is due; put it in quotes if it is a name."),
    ],
)  # fmt: skip
def test_a_mistake_says_where_what_and_what_next(refused: Refused, text: str, line: str) -> None:
    assert refused(text, bare=text == "- a")[0] == line


@pytest.mark.parametrize("text", ["axes: {}", "runners: {storage: {}}", "axes:\ninclude: []"])
def test_an_empty_matrix_is_an_error(refused: Refused, text: str) -> None:
    assert refused(text) == [
        "m.yaml:1:1: the matrix is empty: it has no axes and no include; write axes: {kv_format: [native, int8_sym]}."
    ]


def test_a_matrix_of_fixed_keys_alone_is_not_called_empty(refused: Refused) -> None:
    assert refused(
        "model: {source: tiny-llama, plumbing: true}\nengine: {kv_format: int8_sym, batch: 4}"
    ) == [
        "m.yaml:2:9: engine fixes keys of the cells that axes and include make, and the matrix has neither, so it has no cell; "
        "move a key to axes, as in axes: {kv_format: [int8_sym]}."
    ]


def test_no_model_is_an_error(refused: Refused) -> None:
    assert refused("axes: {batch: 1}\nrunners: {storage: {}}", bare=True) == [
        "m.yaml:1:1: no model is named; write it at the top, as in model: smollm2-135m-instruct."
    ]


def test_the_file_name_is_the_name_when_it_can_be(tmp_path: Path) -> None:
    text = "model: a\naxes: {batch: 1}\nrunners: {storage: {}}\n"
    (tmp_path / "int8-run.yaml").write_text(text)
    assert load(tmp_path / "int8-run.yaml").name == "int8-run"
    (tmp_path / "My Run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r'name is "My Run" \(from the file\'s name\)'):
        load(tmp_path / "My Run.yaml")


def test_the_gate_is_found_beside_the_matrix(make: Make, tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text("checks: []")
    assert make("axes: {batch: 1}\ngate: g.yaml").gate == tmp_path / "g.yaml"
    assert make("axes: {batch: 1}\ngate: ~").gate is None


@pytest.mark.parametrize(
    ("name", "cells", "tasks"),
    [
        ("smoke", 12, 84),
        ("int8", 8, 40),
        ("int8_scales", 10, 30),
        ("fp8_kv", 24, 48),
        ("kv_h200", 33, 69),
        ("fp8_weights", 15, 33),
        ("fp8_quality", 4, 24),
    ],
)
def test_the_shipped_matrices_load(name: str, cells: int, tasks: int) -> None:
    matrix = load(ROOT / f"matrices/{name}.yaml")
    assert (matrix.name, len(matrix.cells), len(matrix.tasks)) == (name, cells, tasks)
    assert matrix.gate is not None
    assert matrix.gate.name == f"{name}.yaml"


def test_smoke_has_every_format_and_runner() -> None:
    matrix = load(ROOT / "matrices/smoke.yaml")
    assert {t.runner for t in matrix.tasks} == set(RUNNERS)
    assert {c.spec["kv_format"] for c in matrix.cells} == set(KV_FORMATS)
