"""Files of scales: refused by name when they do not fit, part of every key, and told apart."""

import json

import pytest

from kvbench.errors import Refused, UsageError
from kvbench.formats.checkpoint_scales import StoredScale
from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import Scale, check_model, origin, read, settle, short
from kvbench.matrix.load import load
from kvbench.models.source import fingerprint
from kvbench.preflight.plan import plan_cell, plan_json, plan_text
from kvbench.run.execute import Plan

CONTENT = {
    "kvbench_scales": 1, "model": "tiny-llama", "model_digest": "sha256:one", "format": "int8_static",
    "method": "amax", "per": "layer", "data": "pydoc", "data_sha256": "d", "text_sha": "0123456789abcdef",
    "tokens": 4096, "window": 512, "dtype": "float32", "kvbench": "0", "k": [0.5, 0.25, 0.5, 0.25],
    "v": [0.125, 1, 0.125, 1],
}  # fmt: skip
LAYERS = {"0": 0.5, "1": 0.25, "3": 0.125, "2": 1}
FP8 = "{kv_format: [native, fp8_e4m3_static], scale: s.json}"


@pytest.fixture
def file(tmp_path):
    """file(**changes): a file of scales beside the matrix; a change to None leaves the key out."""

    def make(**changes):
        content = {k: v for k, v in {**CONTENT, **changes}.items() if v is not None}
        (tmp_path / "s.json").write_text(json.dumps(content))
        return tmp_path / "s.json"

    return make


@pytest.fixture
def published(tmp_path):
    """published(model_type, **changes of kv_cache): a file in the form that engines publish."""

    def make(model_type="llama", **cache):
        content = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": LAYERS}, **cache}
        (tmp_path / "s.json").write_text(json.dumps({"model_type": model_type, "kv_cache": content}))
        return tmp_path / "s.json"

    return make


@pytest.fixture
def matrix(tmp_path):
    def make(axes="{kv_format: [native, int8_sym, int8_static], scale: [0.05, s.json]}"):
        text = f"model: {{source: tiny-llama, plumbing: true}}\naxes: {axes}\nrunners: {{health: {{}}}}\n"
        (tmp_path / "m.yaml").write_text(text)
        return load(tmp_path / "m.yaml")

    return make


def cell(matrix):
    return next(c for c in matrix.cells if isinstance(c.spec["scale"], dict))


def refusal(make, *args):
    with pytest.raises(UsageError) as caught:
        make(*args)
    return str(caught.value)


def test_a_file_stands_in_the_cell_with_its_content_and_is_part_of_the_tasks_key(file, matrix):
    def key(**changes):
        file(**changes)
        made = matrix()
        return next(t.key for t in made.tasks if t.cells == (cell(made).id,))

    other_text = {"text_sha": "another"}  # the same numbers
    assert key() == key()
    assert len({key(), key(v=[0.125, 1, 0.125, 1.0000001]), key(**other_text)}) == 3
    file()
    found = cell(matrix())
    scale = found.spec["scale"]
    assert (scale["k"], scale["v"]) == ([0.5, 0.25, 0.5, 0.25], [0.125, 1.0, 0.125, 1.0])
    calibrated = scale["calibrated"]
    assert (calibrated["file"], calibrated["text_sha"]) == ("s.json", "0123456789abcdef")
    assert found.name == f"kv_format=int8_static,scale=calibrated-amax-{calibrated['sha'][:6]}"


FLOAT32 = "expected a number that float32 holds"
FAULTS = [
    ({"format": "fp8_e4m3_static"}, "is for fp8_e4m3_static, and the cell has int8_static"),
    ({"format": "int8_sym"}, "has 'int8_sym' for format, expected int8_static or fp8_e4m3_static"),
    ({"k": [0.5, 0.0, 1, 1]}, "has 0.0 for k of layer 1, expected a finite number above 0"),
    *(({"v": [0.5, bad, 1, 1]}, f"has {bad} for v of layer 1") for bad in (float("nan"), True)),
    ({"v": [0.5, 10**400, 1, 1]}, f"has {10**79} for v of layer 1, {FLOAT32}, 1.4e-45 to 3.4e+38"),
    ({"k": [0.5, 1, 1e39, 1]}, f"has 1e+39 for k of layer 2, {FLOAT32}"),
    ({"v": []}, "has no list of scales for v"), ({"v": [1, 1, 1]}, "has 4 layers for k and 3 for v"),
    ({"method": None}, "has missing or unknown keys: method"),
    ({"tokens": "many"}, "has 'many' for tokens, expected int"),
    ({"kvbench_scales": 2}, "has version 2, expected 1"), ({"kvbench_scales": None}, "holds no scales"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), FAULTS)
def test_a_file_that_does_not_fit_is_refused_with_its_name_and_place(file, matrix, changes, words):
    file(**changes)
    message = refusal(matrix)
    assert f"s.json {words}" in message
    assert "m.yaml:2:66: " in message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist; its path is relative to the matrix file"),
        (lambda path: path.write_text("{"), "is not valid JSON"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.symlink_to(path), r"cannot be reached (Too many levels of symbolic links)"),
        (lambda path: path.symlink_to(path.parent / "gone"), "is a link to a file that does not exist"),
    ],
    ids=["missing", "no JSON", "folder", "loop", "dangling"],
)
def test_a_path_that_cannot_be_read_is_refused(matrix, tmp_path, make, words):
    make(tmp_path / "s.json")
    assert f"s.json {words}" in refusal(matrix)


@pytest.mark.parametrize(
    ("form", "old", "new", "key"),
    [
        ("file", '"k": [', '"k": [9, 9, 9, 9], "k": [', "k"),
        ("file", '"model": ', '"model": "other", "model": ', "model"),
        ("published", '"0": 0.5', '"0": 0.25, "0": 0.5', "0"),
    ],
)
def test_a_duplicate_key_is_refused(request, form, old, new, key):
    path = request.getfixturevalue(form)()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UsageError, match=rf"s\.json is not valid JSON .*'{key}'"):
        read(path)


def test_another_model_or_number_of_layers_is_refused(file, matrix):
    scale = read(file())
    check_model(scale, ["sha256:two", "sha256:one"], "llama")
    check_model(0.05, ["sha256:two"], "llama")
    with pytest.raises(Refused) as model:
        check_model(scale, ["sha256:two"], "llama")
    with pytest.raises(Refused) as count:
        settle(scale, 30, {})
    assert (model.value.reason, count.value.reason) == ("scale_of_another_model", "scale_count")
    problem = plan_cell(cell(matrix())).problem
    assert problem.startswith("refused (scale_of_another_model): The scale file s.json")


def test_the_plan_says_where_each_scale_comes_from(file, matrix):
    file(model_digest=fingerprint({"model": "tiny-llama"}))
    made = matrix()
    cells = [plan_cell(c) for c in made.cells]
    assert all(c.problem is None for c in cells)
    shown = plan_json(made, cells, Plan((), ()))["cells"]
    sha = cell(made).spec["scale"]["calibrated"]["sha"][:12]
    assert [c["scale"]["kind"] for c in shown] == ["none", "dynamic", "static", "calibrated"]
    words = "calibrated, amax per layer over 4,096 tokens of pydoc (text 0123456789ab), float32"
    calibrated = f"file s.json ({sha}): {words}"
    assert shown[3]["scale"]["source"] == calibrated
    text = plan_text(made, cells, Plan((), ()), {"device": "cpu"})
    for source in (
        calibrated,
        "given: 0.05 for K and V in every layer",
        "dynamic: one per token and KV head",
    ):
        assert f"scale: {source}" in text
    assert "scale: none" not in text


@pytest.mark.parametrize(
    ("fmt", "scale", "kind", "source"),
    [
        ("native", None, "none", "none: values are stored as they are"),
        ("fp8_e4m3", None, "dynamic", "dynamic: one per token and KV head"),
        ("int8_static", 0.05, "static", "given: 0.05 for K and V in every layer"),
        ("int8_static", {"k": 0.1, "v": 0.2}, "static", "given: 0.1 for K and 0.2 for V in every layer"),
        ("int8_static", {"k": [1.0], "v": [1.0]}, "static", "given per layer, digest "),
    ],
)
def test_origins_are_told_apart(fmt, scale, kind, source):
    found = origin(KV_FORMATS[fmt], scale)
    assert (found[0], found[1][: len(source)]) == (kind, source)
    assert short({"k": 0.05, "v": 0.1}) == "k0.05/v0.1"
    assert short({"k": [1.0], "v": [2.0]}).startswith("layers-")


def test_a_published_file_is_one_number_a_layer_for_both_sides(published, matrix):
    published()
    found = cell(matrix(FP8))
    scale = found.spec["scale"]
    assert scale["k"] == scale["v"] == [0.5, 0.25, 1.0, 0.125]
    assert found.name == f"kv_format=fp8_e4m3_static,scale=file-{scale['file']['sha'][:6]}"
    plan = plan_cell(found)
    assert plan.problem is None
    kind, source = origin(KV_FORMATS["fp8_e4m3_static"], scale, plan.scales)
    assert (kind, plan.scales[2][1]) == ("file", Scale(1.0, "file"))
    assert source.startswith(f"file s.json ({scale['file']['sha'][:12]}): ")
    assert source.endswith("fp8_e4m3_static")
    message = refusal(matrix, "{kv_format: int8_static, scale: s.json}")
    assert "s.json is for fp8_e4m3_static, and the cell has int8_static" in message
    published(**ranks({"0": 0.5, "1": 0.5}, {"0": 0.5, "1": 0.5}))  # that say the same
    assert cell(matrix(FP8)).spec["scale"]["k"] == [0.5, 0.5]


def ranks(*layers):
    return {"scaling_factor": {str(rank): found for rank, found in enumerate(layers)}}


NO_MAPPING = "has no mapping of ranks to layers"
PUBLISHED_FAULTS = [
    ({"dtype": "int8"}, "has 'int8' for dtype, expected float8_e4m3fn"),
    ({"dtype": None}, "has None for dtype"),
    *((cache, NO_MAPPING) for cache in ({"scaling_factor": {}}, {"scaling_factor": [0.5]}, ranks({}))),
    (ranks({"0": 0.5, "2": 1}), "has no scale for layer 1 in rank 0"),
    (ranks({"3": 0.5}), "has no scale for layers 0, 1, 2 in rank 0"),
    (ranks({"0": 0.0}), "has 0.0 for layer 0 of rank 0, expected a finite number above 0"),
    *((ranks({"0": bad}), f"has {bad} for layer 0") for bad in (-1, float("nan"), float("inf"), True)),
    (ranks({"0": 10**400}), f"for layer 0 of rank 0, {FLOAT32}, 1.4e-45 to 3.4e+38"),
    (ranks({"0": 1e-46}), f"has 1e-46 for layer 0 of rank 0, {FLOAT32}"),
    (ranks({"k": 0.5}), "has 'k' for a layer of rank 0"),
    (ranks({"0": 1, "01": 1}), "has '01' for a layer of rank 0"),
    (ranks({"0": 1, "9" * 5000: 1}), f"has '{'9' * 79} for a layer of rank 0"),
    (ranks({"0": 0.5}, {"0": 0.25}), "has 0.25 for layer 0 of rank 1 and 0.5 of rank 0"),
    (ranks({"0": 0.5}, {"0": 0.5, "1": 1}), "has 1 for layer 1 of rank 1 and None of rank 0"),
    ({"more": 1}, "has no mapping of dtype and scaling_factor"),
]


@pytest.mark.parametrize(("cache", "words"), PUBLISHED_FAULTS)
def test_a02_t3_a_published_file_that_does_not_fit_is_refused_with_its_place(published, matrix, cache, words):
    published(**cache)
    message = refusal(matrix, FP8)
    assert words in message
    assert "m.yaml:2:53: " in message


@pytest.mark.parametrize(
    ("model_type", "layers", "reason", "words"),
    [
        ("qwen2", 4, "scale_of_another_model", "type qwen2"),
        ("llama", 2, "scale_count", "layers 2, 3 of the model's 4"),
        ("llama", 5, "scale_count", "5 layers and the model has 4"),
    ],
)
def test_a_published_file_is_for_its_model_type_and_its_layers(
    published, matrix, model_type, layers, reason, words
):
    published(model_type, **ranks({str(i): 0.5 for i in range(layers)}))
    problem = plan_cell(cell(matrix(FP8))).problem
    assert problem.startswith(f"refused ({reason}): ")
    assert words in problem


def test_given_default_and_checkpoint_are_told_apart_before_anything_runs(matrix):
    made = matrix("{kv_format: fp8_e4m3_static, scale: [1.0, default, checkpoint, checkpoint_or_default]}")
    cells = [plan_cell(c) for c in made.cells if not c.is_baseline]
    shown = [c["scale"] for c in plan_json(made, [*cells], Plan((), ()))["cells"]]
    assert [s["kind"] for s in shown[:2]] == ["static", "default"]
    assert shown[0]["source"].startswith("given:")
    assert shown[1]["source"].startswith("default: 1.0 for K and V in every layer")
    for found in cells[2:]:  # a config with random weights
        assert found.problem.startswith("refused (checkpoint_has_no_scales): scale: checkpoint")
        assert "tiny-llama" in found.problem


HELD = {(layer, side): StoredScale(0.5, (f"{layer}.{side}",), "f") for layer in range(8) for side in "kv"}


def test_each_side_of_each_layer_has_its_own_source():
    stored = {key: held for key, held in HELD.items() if key not in ((1, "k"), (1, "v"), (2, "v"))}
    pairs, default = settle("checkpoint_or_default", 3, stored), Scale(1.0, "default")
    assert pairs == [
        (Scale(0.5, "checkpoint", "0.k"), Scale(0.5, "checkpoint", "0.v")),
        (default, default),
        (Scale(0.5, "checkpoint", "2.k"), default),
    ]
    fp8, asked = KV_FORMATS["fp8_e4m3_static"], "checkpoint_or_default"
    kind, source = origin(fp8, asked, pairs)
    assert kind == "checkpoint + default"
    found = ("checkpoint: 3 of 6 scales", "default: 1.0 for K of layer 1 and V of layers 1, 2")
    assert [words for words in found if words not in source] == []
    assert origin(fp8, asked, settle(asked, 3, {}))[0] == "default"
    assert origin(fp8, "checkpoint", settle("checkpoint", 3, HELD))[0] == "checkpoint"
    assert settle("default", 2, HELD) == [(default, default)] * 2
    assert settle(1.0, 1, HELD) == [(Scale(1.0, "given"), Scale(1.0, "given"))]


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (HELD, "has no KV cache scales for any of its 8 layers"),
        ([(2, "k"), (2, "v")], "has no K and V scales for layer 2"),
        ([(2, "k")], "has no K scale for layer 2"),
        ([(0, "k"), *((i, "v") for i in range(1, 8))],
         "has no K scale for layer 0 and no V scale for layers 1, 2, 3, 4 and 3 more"),
    ],
)  # fmt: skip
def test_a02_t3_layers_without_a_scale_are_named(gone, words):
    with pytest.raises(Refused) as e:
        settle("checkpoint", 8, {key: held for key, held in HELD.items() if key not in gone})
    assert e.value.reason == "checkpoint_has_no_scales"
    assert f"The checkpoint {words};" in str(e.value)
    assert "checkpoint_or_default" in str(e.value)


@pytest.mark.parametrize("model_type", ["", None, 7])
def test_a_published_file_names_its_model_type(published, matrix, model_type):
    published(model_type, **ranks({str(i): 0.5 for i in range(4)}))
    with pytest.raises(UsageError, match="for model_type, expected the model's type"):
        matrix(FP8)
