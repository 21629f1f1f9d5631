"""Whatever a matrix says: cells are complete and unique, and keys follow content alone."""

import itertools
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.load import load

VALUES = {
    "kv_format": ["native", "int8_sym", "fp8_e4m3", "int8_static"], "batch": [1, 2, 4], "context": [8, 16],
    "page_size": [8, 16], "backend": ["torch", "triton"], "scale": [0.05, 1, {"k": 0.5, "v": 1}],
    "model": ["a", "b", {"source": "b", "weights": "random"}],
}  # fmt: skip


def points(keys):
    optional = {key: st.sampled_from(VALUES[key]) for key in keys}
    return st.fixed_dictionaries({}, optional=optional).filter(bool)


@st.composite
def matrices(draw):
    """Mostly matrices that are accepted: static formats have a scale, scales a static format."""
    keys = draw(st.lists(st.sampled_from(list(VALUES)), unique=True, min_size=1))
    axes = {key: draw(st.lists(st.sampled_from(VALUES[key]), min_size=1, max_size=3)) for key in keys}
    if "scale" in axes:
        axes["kv_format"] = [*axes.get("kv_format", []), "int8_static"]
    elif "kv_format" in axes:
        axes["kv_format"] = [fmt for fmt in axes["kv_format"] if fmt != "int8_static"] or ["int8_sym"]
    include = draw(st.lists(points(list(VALUES)), max_size=3))
    for i, entry in enumerate(include):
        static = entry.get("kv_format") == "int8_static"
        kept = {key: value for key, value in entry.items() if static or key != "scale"}
        include[i] = {"scale": 0.05, **kept} if static else kept
    fixable = [key for key in ("batch", "page_size", "backend") if key not in axes]
    return {
        **({} if "model" in axes else {"model": "a"}),
        "axes": axes,
        "engine": draw(points(fixable)) if fixable and draw(st.booleans()) else {},
        "include": [entry for entry in include if entry],
        "exclude": draw(st.lists(points(keys), max_size=2)),
        "runners": {"storage": {}, "perplexity": {"data": ["pydoc", "wikitext2"]}},
    }


def shuffled(data, draw):
    """The same content with the keys of every mapping in another order."""
    if isinstance(data, dict):
        return {key: shuffled(data[key], draw) for key in draw(st.permutations(list(data)))}
    return [shuffled(part, draw) for part in data] if isinstance(data, list) else data


def loaded(tmp_path, data):
    """The matrix, or None when it is refused: a random one may lack a scale. JSON is YAML."""
    (tmp_path / "m.yaml").write_text(json.dumps(data))
    try:
        return load(tmp_path / "m.yaml")
    except UsageError as e:
        complaints = str(e)
    assert all(line.split(": ")[0].count(":") == 2 for line in complaints.splitlines()), complaints
    return None


SHARED = [HealthCheck.function_scoped_fixture]
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=SHARED)


@PROPERTY
@given(data=matrices())
def test_every_cell_is_complete_unique_and_has_a_baseline(tmp_path, data):
    if (matrix := loaded(tmp_path, data)) is None:
        return
    assert matrix.cells
    by_id = {cell.id: cell for cell in matrix.cells}
    assert len(by_id) == len(matrix.cells) == len({cell.name for cell in matrix.cells})
    assert len({task.key for task in matrix.tasks}) == len(matrix.tasks)
    for cell in matrix.cells:
        assert list(cell.spec) == list(CELL_KEYS)
        # What depends on the model's facts stays auto, and is decided when it is loaded.
        undecided = {key for key, value in cell.spec.items() if value == "auto"}
        assert undecided <= {"backend", "gemm", "decode", "compile"}
        assert cell.spec["model"] is not None
        assert (cell.spec["scale"] is not None) == cell.spec["kv_format"].endswith("_static")
        native = {**cell.spec, "kv_format": "native", "weights": "native", "scale": None}
        assert by_id[cell.baseline].spec == native
        assert cell.is_baseline == (cell.spec == native)
        measured = sorted(f"{t.runner} {t.variant}" for t in matrix.tasks if cell.id in t.cells)
        assert measured == ["perplexity pydoc stream512", "perplexity wikitext2 stream512", "storage "]
    order = [cell.is_baseline for cell in matrix.cells]
    assert order == sorted(order, reverse=True)


@PROPERTY
@given(data=matrices(), draws=st.data())
def test_same_content_same_keys_whatever_the_order_of_keys(tmp_path, data, draws):
    one, other = loaded(tmp_path, data), loaded(tmp_path, shuffled(data, draws.draw))
    assert (one is None) == (other is None)
    if one and other:
        assert {cell.id for cell in one.cells} == {cell.id for cell in other.cells}
        assert {task.key for task in one.tasks} == {task.key for task in other.tasks}


@PROPERTY
@given(
    axes=st.fixed_dictionaries({key: st.lists(st.sampled_from(VALUES[key]), min_size=1, unique=True)
                                for key in ("batch", "context", "page_size")}),
    exclude=st.lists(points(["batch", "context", "page_size"]), max_size=3),
)  # fmt: skip
def test_cross_product_less_exclude_is_what_itertools_says(tmp_path, axes, exclude, picked):
    expected = [
        point
        for point in itertools.product(*axes.values())
        if not any(all(dict(zip(axes, point, strict=True))[k] == v for k, v in e.items()) for e in exclude)
    ]
    matrix = loaded(tmp_path, {"model": "a", "axes": axes, "exclude": exclude, "runners": {"storage": {}}})
    assert (picked(matrix, *axes) if matrix else []) == expected
