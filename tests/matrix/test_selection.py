"""`-k`: cells by an expression, with their baselines. `--set`: values by the YAML rules."""

import pytest

from kvbench.errors import UsageError
from kvbench.matrix.document import ConfigError
from kvbench.matrix.overrides import apply
from kvbench.matrix.yaml import parse

GRID = "axes: {kv_format: [int8_sym, fp8_e4m3], batch: [1, 16], context: [8]}"


@pytest.mark.parametrize(
    ("expression", "rest"),
    [
        ("kv_format=int8_sym", ["int8_sym 1", "int8_sym 16"]), ("batch=1", ["int8_sym 1", "fp8_e4m3 1"]),
        ("batch=1 and int8", ["int8_sym 1"]), ("INT8 and not batch=1", ["int8_sym 16"]),
        ("not (batch=1 or fp8)", ["int8_sym 16"]), ("not not fp8", ["fp8_e4m3 1", "fp8_e4m3 16"]),
        ("fp8 or int8 and batch=1", ["int8_sym 1", "fp8_e4m3 1", "fp8_e4m3 16"]),
        ("kv_format=fp8_e4m3,batch=16", ["fp8_e4m3 16"]), ("kv_format=native", []),
        ("dtype=float32 and plumbing=false and scale=null and fp8 and batch=1", ["fp8_e4m3 1"]),
    ],
)  # fmt: skip
def test_select_keeps_the_cells_and_their_baselines(make, expression, rest):
    whole, some = make(GRID), make(GRID, select=expression)
    chosen = [f"{c.spec['kv_format']} {c.spec['batch']}" for c in some.cells if not c.is_baseline]
    assert chosen == rest
    assert all(cell in whole.cells for cell in some.cells)  # names and ids as in the whole matrix
    wanted = {cell.baseline for cell in (some.cells if rest else whole.cells) if rest or cell.is_baseline}
    assert {cell.id for cell in some.cells if cell.is_baseline} == wanted
    assert {task.key for task in some.tasks} <= {task.key for task in whole.tasks}


def test_select_finds_a_scale_by_its_value(make, picked):
    matrix = make("axes: {kv_format: int8_static, scale: [0.05, 1]}", select="scale=5e-2")
    assert picked(matrix, "scale") == [(None,), (0.05,)]


@pytest.mark.parametrize(
    ("expression", "words"),
    [("int8_sim", "selects no cell; the cells are:\n  kv_format=native,batch=1\n"), ("", "the end"),
     ("int8 and", "the end"), ("or int8", "'or'"), ("(int8", "parenthesis"), ("int8 fp8", "'fp8'"),
     ("int8)", "')'"),
     ("kv_fromat=native", "Did you mean kv_format?")],
)  # fmt: skip
def test_an_expression_that_is_refused(make, expression, words):
    with pytest.raises(UsageError) as caught:
        make(GRID, select=expression)
    assert str(caught.value).startswith(f"-k {expression!r} ")
    assert words in str(caught.value)


def test_set_replaces_values_by_the_yaml_rules(make, picked):
    text = "axes: {kv_format: native, batch: [1, 2]}\nengine: {page_size: 16}\nrunners: {mcq: {limit: 24}}"
    given = [
        "axes.kv_format=[native,int8_sym]", "axes.page_size=[8, 16]", "engine.batch=3", "name=other",
        "runners.mcq.limit=null", "runners.mcq.max_truncated=1e-2", "runners.parity={}",
    ]  # fmt: skip
    matrix = make(text, given)
    assert matrix.name == "other"
    assert picked(matrix, "kv_format", "page_size", "batch") == [
        ("native", 8, 3), ("native", 16, 3), ("int8_sym", 8, 3), ("int8_sym", 16, 3),
    ]  # fmt: skip
    assert (matrix.tasks[0].options["limit"], matrix.tasks[0].options["max_truncated"]) == (None, 0.01)
    assert matrix.source["axes"] == {"kv_format": ["native", "int8_sym"], "page_size": [8, 16]}
    assert matrix.cells[-1].line is None  # its format is not in the file


def test_set_of_a_model_replaces_the_axis(make, picked):
    matrix = make("axes: {model: [a, b], batch: 1}", ["model={source: c, weights: random}"])
    assert picked(matrix, "model", "model_weights") == [("c", "random")]
    assert picked(make("model: a\naxes: {batch: 1}", ["axes.model=[b, c]"]), "model") == [("b",), ("c",)]


def test_an_override_that_cannot_be_applied_is_named(make):
    text = "axes: {kv_format: [native], batch: 1}\ntreshold: 1\nrunners: {mcq: {}}"
    wanted = {
        "axes.batch.x=1": ("override", "axes.batch is not a mapping"),
        "axes.kv_format=[int8_sim]": ("not_accepted", "Did you mean int8_sym?"),
        "axs.batch=[1]": ("unknown_key", "Did you mean axes?"),
        "axes.bach=[1]": ("unknown_key", "Did you mean batch?"),
        "runners.mcq.limt=3": ("unknown_key", "Did you mean limit?"),
        "runners.mqc.limit=3": ("override", "--set runners.mqc={limit: ...}."),
        "engine.page_size": ("override", "as in --set axes.batch=[1,4]."),
        "name=": ("override", "write null for null."),
        "=1": ("override", "as in --set axes.batch=[1,4]."),
        "engine.dtype=[1": ("override", "value:1:3: this is not YAML"),
        "engine.a=1": ("unknown_key", "unknown key a in engine"),
        "engine.b=1": ("unknown_key", "unknown key b in engine"),
    }
    with pytest.raises(ConfigError) as caught:
        make(text, list(wanted))
    *faults, in_file = caught.value.faults
    assert (in_file.where.rpartition("/")[2], in_file.code) == ("m.yaml:2:1", "unknown_key")
    assert {f.where[6:]: f.code for f in faults} == {words: code for words, (code, _) in wanted.items()}
    assert all(wanted[f.where.removeprefix("--set ")][1] in f.sentence for f in faults)


def test_the_loaded_document_stays_as_it_was():
    document = parse("axes: {batch: [1]}", "f.yaml")
    assert apply(document, ["axes.batch=2"]).data == {"axes": {"batch": 2}}
    assert document.data == {"axes": {"batch": [1]}}
