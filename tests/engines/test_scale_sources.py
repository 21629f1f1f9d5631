"""Scales of a KV cache from a checkpoint to the store: each value is the files', each source is what it says, each was read."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import load_model
from kvbench.engines.reference.weights.quantize_checkpoint import quantize_checkpoint
from kvbench.errors import Refused
from kvbench.evidence.examine import examine
from kvbench.evidence.scale_sources import expected_scales, live_scales, provenance
from kvbench.formats.scales import Scale, settle
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve import Request, resolve
from kvbench.models.source import config_facts, settled_scales
from kvbench.models.weight_bytes import weight_sizes
from kvbench.records.record import MISMATCH, VERIFIED, Level
from kvbench.report.sections.provenance import UNKNOWN
from kvbench.selftest.checkpoint import write_checkpoint
from kvbench.selftest.table import FAULTS

Tensors = dict[str, Tensor]
LAYERS = 4
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
AT = "model.layers.{}.self_attn.{}"
K_2 = AT.format(2, "k_proj.k_scale")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Native weights; layer i has the scales 0.01 (i + 1) of K and 0.02 (i + 1) of V, in float32."""
    folder = tmp_path_factory.mktemp("whole")
    write_checkpoint(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(folder, change):
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def quantization(folder, **said):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **said}
    (folder / "config.json").write_text(json.dumps(config))


def run(folder, tmp_path, axes, **keys):
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    (tmp_path / "gate.yaml").write_text("checks: [{metric: kv_bytes_difference, equals: 0}]")
    (tmp_path / "m.yaml").write_text(
        f"name: scales\nmodel: {{source: '{folder}', plumbing: true}}\naxes: {{{axes}}}\n"
        f"engine: {keys.get('engine', '{context: 20}')}\n"
        f"runners: {keys.get('runners', '{storage: {}, latency: {new_tokens: 3, repeats: 1, warmup: 0}}')}\ngate: gate.yaml\n"
    )
    result = CliRunner().invoke(
        app, ["run", str(tmp_path / "m.yaml"), "--out", str(out)], env={"COLUMNS": "200"}
    )
    return result.exit_code, " ".join(result.output.split()), out


def records(out, kv_format):
    found = [json.loads(path.read_text()) for path in (out / "records").glob("*.json")]
    return [r for r in found if r["spec"]["kv_format"] == kv_format]


def entry(layer, k, v, k_source="checkpoint", v_source="checkpoint"):
    held = [torch.tensor(x, dtype=torch.float32).item() for x in (k, v)]
    return {"layer": layer, "k": held[0], "v": held[1], "k_source": k_source, "v_source": v_source,
            "k_read": True, "v_read": True}  # fmt: skip


def test_a_checkpoints_scales_reach_the_store_and_the_report_says_from_where(folder, tmp_path):
    """With a kv_cache_scheme beside native weights, for which transformers would ask for another library."""
    quantization(folder, quant_method="compressed-tensors", config_groups={}, kv_cache_scheme=SCHEME)
    axes = "kv_format: [native, fp8_e4m3_static, int8_sym], scale: checkpoint"
    code, said, out = run(folder, tmp_path, axes)
    assert code == 0, said
    fp8 = records(out, "fp8_e4m3_static")
    assert len(fp8) == 2
    for record in fp8:
        assert record["facts"]["scales"] == [entry(i, 0.01 * (i + 1), 0.02 * (i + 1)) for i in range(LAYERS)]
        assert record["facts"]["scale_kind"] == "checkpoint"
        assert record["facts"]["scale_source"] == "checkpoint: all 8 scales from its files"
        assert "weight_warnings" not in record["facts"]  # nothing of the files is unread here
    for record in records(out, "native") + records(out, "int8_sym"):  # but there
        (warning,) = record["facts"]["weight_warnings"]
        assert (
            f"scales of a KV cache ({AT.format(0, 'k_proj.k_scale')} and 7 more), which are not read"
            in warning
        )
    assert all("scales" not in r["facts"] for r in records(out, "native"))
    page = (out / "report.html").read_text()
    assert "4 of 4 layers read: checkpoint 4" in page
    assert "4 of 4 layers read: dynamic 4" in page
    assert (
        '<th scope="row">3</th><td class="num">0.04</td><td>checkpoint</td><td>yes</td><td class="num">0.08</td>'
        in page
    )


@pytest.mark.slow
def test_a_layer_without_a_scale_is_refused_and_is_1_where_that_is_asked_for(folder, tmp_path):
    edit(folder, lambda tensors: tensors.pop(K_2))
    code, said, out = run(folder, tmp_path, "kv_format: [native, fp8_e4m3_static], scale: checkpoint")
    assert code == 3, said
    for record in records(out, "fp8_e4m3_static"):
        assert (record["status"], record["error"]["reason"]) == ("refused", "checkpoint_has_no_scales")
        assert record["error"]["message"].startswith(
            "The checkpoint has no K scale for layer 2; write scale: checkpoint_or_default"
        )
    code, said, out = run(
        folder, tmp_path, "kv_format: [native, fp8_e4m3_static], scale: checkpoint_or_default"
    )
    assert code == 0, said
    for record in records(out, "fp8_e4m3_static"):
        due = [entry(i, 0.01 * (i + 1), 0.02 * (i + 1)) for i in range(LAYERS)]
        due[2] = entry(2, 1.0, 0.06, k_source="default")
        assert record["facts"]["scales"] == due
        assert record["facts"]["scale_kind"] == "checkpoint + default"
    page = (out / "report.html").read_text()
    assert "4 of 4 layers read: K checkpoint 3, default 1; V checkpoint 4" in page
    assert '<th scope="row">2</th><td class="num">1</td><td>default</td>' in page
    assert "<td>checkpoint + default</td>" in page  # the precision table's own


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a02_t3_a_bad_scale_of_a_checkpoint_is_refused_before_the_run(folder, tmp_path, value):
    edit(folder, lambda tensors: tensors.update({K_2: torch.tensor(value)}))
    (tmp_path / "m.yaml").write_text(
        f"model: {{source: '{folder}', plumbing: true}}\naxes: {{kv_format: fp8_e4m3_static, scale: [checkpoint, checkpoint_or_default]}}\n"
        "runners: {storage: {}}\n"
    )
    said = " ".join(CliRunner().invoke(app, ["plan", str(tmp_path / "m.yaml")]).output.split())
    assert (
        said.count(
            f"refused (checkpoint_scale_unusable): The tensor {K_2} of model.safetensors holds {value:.6g}"
        )
        == 2
    )


def spec_of(folder, kv_format, scale, **keys):
    return {**CELL_KEYS, "model": str(folder), "kv_format": kv_format, "scale": scale, "device": "cpu", "dtype": "float32",
            "page_size": 8, **keys}  # fmt: skip


def engine_on(folder, kv_format, scale, **keys):
    spec = spec_of(folder, kv_format, scale, **keys)
    loaded = load_model(spec, "cpu", "float32")
    decision = resolve(Request(kv_format, spec["weights"], "torch", "refuse"), loaded.facts)
    return Engine(loaded, decision, spec, sequences=2, tokens=24)


X = [0.3, -0.4, 1.2, 4.5, -4.9, 8.0]


@pytest.mark.parametrize(
    ("scale", "codes", "back"),
    [
        ("checkpoint", [6, -8, 24, 90, -98, 127], [0.3, -0.4, 1.2, 4.5, -4.9, 6.35]),
        ("default", [0, 0, 1, 4, -5, 8], [0, 0, 1, 4, -5, 8]),
        (0.05, [6, -8, 24, 90, -98, 127], [0.3, -0.4, 1.2, 4.5, -4.9, 6.35]),
    ],
)
def test_a02_t1_a_checkpoints_scale_is_the_one_that_is_used(folder, scale, codes, back):
    """And what it clips is counted (T2): 8.0 at 0.05 becomes 6.35."""
    quantization(
        folder, quant_method="compressed-tensors", config_groups={}, kv_cache_scheme={**SCHEME, "type": "int"}
    )
    edit(
        folder, lambda t: t.update({k: torch.tensor([0.05]) for k in t if k.endswith(("k_scale", "v_scale"))})
    )
    store = engine_on(folder, "int8_static", scale).store
    seq = store.add()
    store.reserve(seq, 1)
    x = torch.zeros(1, store.shapes[0].kv_heads, store.shapes[0].head_dim)
    x[0, 0, : len(X)] = torch.tensor(X)
    slots = store.slots_for(seq, 0, 1)
    store.write(1, slots, x, x)
    store.commit(seq, 1)
    page = int(store.tables([seq])[0, 0])
    assert store.layers[1].k[page, 0, 0, : len(X)].tolist() == codes
    k, v = store.read(1, store.tables([seq]), 1, torch.float32)
    torch.testing.assert_close(
        k[0, 0, 0, : len(X)], torch.tensor(back, dtype=torch.float32), rtol=1e-6, atol=0
    )
    assert torch.equal(k, v)
    assert store.health()[1]["clipped"] == (2 if codes[-1] == 127 else 0)


def test_a02_t4_a_checkpoints_scales_survive_a_second_engine_and_a_second_warm_up(folder):
    first = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    before = live_scales(first.store)
    second = Engine(first.model, first.decision, first.spec, sequences=2, tokens=24)
    for engine in (first, second, first):
        seq = engine.add()
        engine.prefill(seq, [1, 2, 3])
        engine.free(seq)
    due = [
        {"k": torch.tensor(0.01 * (i + 1)).item(), "v": torch.tensor(0.02 * (i + 1)).item()}
        for i in range(LAYERS)
    ]
    assert before == live_scales(first.store) == live_scales(second.store) == due


NAMES = ["{0}_scale", "attn.{0}_scale", "{0}_proj.output_scale", "{0}_proj.{0}_scale"]


@pytest.mark.parametrize("name", [*NAMES, "kv_scale"])
def test_a14_t2_both_readings_know_every_name(folder, name):
    """The loader's, by a pattern and from bytes, and the evidence's, by names and torch."""

    def rename(tensors):
        for layer in range(LAYERS):
            for side in "kv":
                value = tensors.pop(AT.format(layer, f"{side}_proj.{side}_scale"))
                tensors[AT.format(layer, name.format(side))] = value.bfloat16()  # kv_scale: V's, written last

    edit(folder, rename)
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    stored = load_file(folder / "model.safetensors")
    assert engine.model.warnings("checkpoint") == ()
    for layer, due in enumerate(expected_scales(engine)):
        for side, scale in zip("kv", due, strict=True):
            tensor = AT.format(layer, name.format(side))
            assert (scale.value, scale.source, scale.tensor) == (
                stored[tensor].double().item(),
                "checkpoint",
                tensor,
            )
            assert engine.model.cache_scales[layer, side].value == scale.value


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_both_readings_know_every_prefix_and_no_other_tower(folder, prefix):
    def rename(tensors):
        for key in [key for key in tensors if key.endswith(("k_scale", "v_scale"))]:
            tensors[key.replace("model.", prefix, 1)] = value = tensors.pop(key)
            tensors[key.replace("model.", "vision_tower.", 1)] = value + 1

    edit(folder, rename)
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    for layer, due in enumerate(expected_scales(engine)):
        for side, scale in zip("kv", due, strict=True):
            assert scale.tensor == f"{prefix}layers.{layer}.self_attn.{side}_proj.{side}_scale"
            assert engine.model.cache_scales[layer, side].value == scale.value < 1


@pytest.mark.parametrize("prefix", ["vision_tower.", "draft."])
def test_another_towers_scales_alone_are_no_scales(folder, prefix):
    def rename(tensors):
        for key in [key for key in tensors if key.endswith(("k_scale", "v_scale"))]:
            tensors[key.replace("model.", prefix, 1)] = tensors.pop(key)

    edit(folder, rename)
    with pytest.raises(Refused, match="has no KV cache scales for any of its 4 layers"):
        engine_on(folder, "fp8_e4m3_static", "checkpoint")
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint_or_default")
    assert {scale for pair in expected_scales(engine) for scale in pair} == {Scale(1.0, "default")}
    (said,) = engine.model.warnings("checkpoint_or_default")
    assert (
        f"({prefix}layers.0.self_attn.k_proj.k_scale and 7 more), which are not read: they are of other"
        in said
    )


def test_a_scale_of_a_layer_that_the_model_has_not_is_warned_of(folder):
    edit(folder, lambda t: t.update({AT.format(99, "k_scale"): torch.tensor(0.5)}))
    model = engine_on(folder, "fp8_e4m3_static", "checkpoint").model
    assert model.warnings("checkpoint") == (
        f"The checkpoint holds scales of a KV cache ({AT.format(99, 'k_scale')}), which are not read: the model has 4 layers, and these "
        "are of later ones.",
    )


def test_scales_of_all_shards_reach_the_store(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {"a": [k for k in tensors if "v_scale" not in k], "b": [k for k in tensors if "v_scale" in k]}
    for part, keys in names.items():
        save_file({k: tensors[k] for k in keys}, folder / f"{part}.safetensors", metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {k: f"{part}.safetensors" for part, keys in names.items() for k in keys},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    assert [float(f"{row['v']:.6g}") for row in live_scales(engine.store) or ()] == [0.02, 0.04, 0.06, 0.08]


@pytest.mark.slow
def test_an_fp8_checkpoint_keeps_its_scales_of_the_cache(folder, tmp_path):
    fp8 = tmp_path / "fp8"
    scales = {
        k: v for k, v in load_file(folder / "model.safetensors").items() if k.endswith(("k_scale", "v_scale"))
    }
    quantize_checkpoint(str(folder), fp8)
    edit(fp8, lambda tensors: tensors.update(scales))
    quantization(fp8, kv_cache_scheme=SCHEME)
    axes = "kv_format: [fp8_e4m3_static, int8_sym], scale: checkpoint"
    (tmp_path / "m.yaml").write_text("")
    code, said, out = run(
        f"{fp8}', native: '{folder}", tmp_path, axes, engine="{context: 20, weights: fp8_block128}", runners="{storage: {}}"
    )  # fmt: skip
    assert code == 0, said
    (record,) = records(out, "fp8_e4m3_static")
    assert record["facts"]["scales"] == [entry(i, 0.01 * (i + 1), 0.02 * (i + 1)) for i in range(LAYERS)]
    assert "weight_warnings" not in record["facts"]
    (other,) = records(out, "int8_sym")
    assert "scales of a KV cache" in other["facts"]["weight_warnings"][0]


def test_a_scale_that_is_not_the_files_has_no_source_and_fails_e2(folder):
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    scale = engine.store.layers[2].v_scale
    assert scale is not None
    scale.fill_(1.0)
    left = live_scales(engine.store)
    evidence = examine(engine, reads_expected=False)
    e2 = next(level for level in evidence.levels if level.name == "E2")
    assert e2.state == MISMATCH
    assert (
        f"layer 2 V: the stored scale is 1, checkpoint was 0.06 ({AT.format(2, 'v_proj.v_scale')})"
        in e2.sentence
    )
    rows = provenance(engine, left or [], evidence.levels)
    assert [(row["k_source"], row["v_source"]) for row in rows] == [
        ("checkpoint", "checkpoint"), ("checkpoint", "checkpoint"), ("checkpoint", None), ("checkpoint", "checkpoint"),
    ]  # fmt: skip
    assert rows[2]["v"] == 1.0


def test_a_scale_of_1_is_the_checkpoints_only_where_the_files_say_so(folder):
    edit(folder, lambda tensors: tensors.update({K_2: torch.tensor(1.0)}))
    with FAULTS["checkpoint_scales_dropped"].inject():
        engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    sources = [row["k_source"] for row in provenance(engine, live_scales(engine.store) or [], ())]
    assert sources == [None, None, "checkpoint", None]


def test_files_that_change_after_loading_are_a_mismatch(folder):
    """The evidence reads them again; what was loaded is not compared with itself."""
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    edit(folder, lambda tensors: tensors.update({K_2: torch.tensor(0.5)}))
    e2 = next(level for level in examine(engine, reads_expected=False).levels if level.name == "E2")
    assert "layer 2 K: the stored scale is 0.03, checkpoint was 0.5" in e2.sentence


ROLLED = {
    "list": {"k": [0.1, 0.2, 0.3, 0.4], "v": [0.5, 0.6, 0.7, 0.8]},
    "file": {"k": [0.1, 0.2, 0.3, 0.4], "v": [0.5, 0.6, 0.7, 0.8], "file": {"file": "s.json"}},
    "checkpoint": "checkpoint",
}


@pytest.mark.parametrize(("scale", "said"), [
    ("list", "layer 0 K: the stored scale is 0.2, given was 0.1"),
    ("file", "layer 0 K: the stored scale is 0.2, file was 0.1"),
    ("checkpoint", f"layer 0 K: the stored scale is 0.02, checkpoint was 0.01 ({AT.format(0, 'k_proj.k_scale')})"),
])  # fmt: skip
def test_scales_that_settle_hands_to_the_wrong_layer_fail_e2(folder, monkeypatch, scale, said):
    """Everywhere: the evidence lays them out itself."""

    def rolled(*given):
        pairs = settle(*given)
        return pairs[1:] + pairs[:1]

    for module in [m for name, m in sys.modules.items() if name.startswith("kvbench.")]:
        if getattr(module, "settle", None) is settle:
            monkeypatch.setattr(module, "settle", rolled)
    engine = engine_on(folder, "fp8_e4m3_static", ROLLED[scale])
    e2 = next(level for level in examine(engine, reads_expected=False).levels if level.name == "E2")
    assert e2.state == MISMATCH
    assert said in e2.sentence


def test_files_that_lose_a_scale_after_loading_are_refused_and_not_taken_for_1(folder):
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    edit(folder, lambda tensors: tensors.pop(K_2))
    with pytest.raises(Refused, match="have no scale of K for layer 2"):
        expected_scales(engine)


def test_read_is_what_the_probe_showed_and_nothing_else(folder):
    engine = engine_on(folder, "fp8_e4m3_static", "checkpoint")
    live = live_scales(engine.store) or []
    facts = {"moved": {"k_scale": [0, 1, 3], "v_scale": [0, 1]}, "unmoved": {"k_scale": [2], "v": [3]}}
    rows = provenance(engine, live, [Level("E3-layers", VERIFIED, "", facts)])
    assert [row["k_read"] for row in rows] == [True, True, False, True]
    assert [row["v_read"] for row in rows] == [True, True, None, None]
    assert all(row["k_read"] is None for row in provenance(engine, live, ()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_format", "source"), [("int8_sym", "dynamic"), ("fp8_e4m3_static", "checkpoint")]
)
def test_a_scale_that_attention_ignores_is_said_not_to_be_read(folder, tmp_path, kv_format, source):
    scale = ", scale: checkpoint" if source == "checkpoint" else ""
    axes = f"kv_format: [native, {kv_format}]{scale}"
    with FAULTS["v_scale_not_read"].inject():
        code, _, out = run(folder, tmp_path, axes, runners="{storage: {}}")
    assert code == 1
    (record,) = records(out, kv_format)
    assert [(row["k_read"], row["v_read"]) for row in record["facts"]["scales"]] == [(True, False)] * LAYERS
    page = (out / "report.html").read_text()
    assert f"0 of 4 layers read: {source} 4" in page
    assert '<td class="is-fail">no</td>' in page


def test_scales_of_the_cache_are_no_weights_in_the_plan(folder):
    spec = spec_of(folder, "fp8_e4m3_static", "checkpoint")
    found = weight_sizes(spec, config_facts(spec), "native")
    loaded = load_model(spec, "cpu", "float32")
    assert found is not None
    assert found.total == sum(p.numel() * p.element_size() for p in loaded.model.parameters())


@pytest.mark.slow
def test_a_record_and_its_report_never_say_checkpoint_of_what_is_not(folder, tmp_path):
    with FAULTS["checkpoint_scales_dropped"].inject():
        code, said, out = run(folder, tmp_path, "kv_format: [native, fp8_e4m3_static], scale: checkpoint")
    assert code == 1
    assert "layer 0 K: the stored scale is 1, checkpoint was 0.01" in said
    for record in records(out, "fp8_e4m3_static"):
        assert [(row["k"], row["k_source"], row["v_source"]) for row in record["facts"]["scales"]] == [
            (1.0, None, None)
        ] * LAYERS
        assert record["facts"]["scale_kind"] == "unknown"
    page = (out / "report.html").read_text()
    assert f"4 of 4 layers read: {UNKNOWN} 4" in page
    assert "<td>checkpoint</td>" not in page[page.index("Scales of") : page.index("Reasons and evidence")]


@pytest.mark.parametrize("kv_format", ["int8_sym", "fp8_e4m3"])
def test_dynamic_scales_are_the_range_of_the_tokens_that_are_there(folder, kv_format):
    engine = engine_on(folder, kv_format, None)
    for pages in engine.store.layers:  # what no token wrote is in no range
        for side in ("k", "v"):
            scale = pages.side(side)[1]
            assert scale is not None
            scale.fill_(float("nan"))
    assert (live_scales(engine.store) or [{}])[0] == {"k": None, "v": None}
    seqs = [engine.add(), engine.add()]
    engine.forward([(seqs[0], list(range(11))), (seqs[1], [7, 8, 9])], "none")
    found = live_scales(engine.store) or []
    for layer, pages in enumerate(engine.store.layers):
        for side in ("k", "v"):
            scale = pages.side(side)[1]
            assert scale is not None
            held = [
                scale[page, head, at].item()
                for seq, count in zip(seqs, (11, 3), strict=True)
                for page, start in zip(
                    engine.store.tables([seq])[0].tolist(), range(0, count, 8), strict=False
                )
                for at in range(min(8, count - start))
                for head in range(scale.shape[1])
            ]
            assert found[layer][side] == [min(held), max(held)]
            assert len(held) == 14 * scale.shape[1]


def test_a_run_that_computes_no_token_has_the_probes_dynamic_scales(folder, tmp_path):
    """The storage runner counts pages that nothing has written: what fresh memory holds is no scale."""
    code, said, out = run(folder, tmp_path, "kv_format: [native, int8_sym]", runners="{storage: {}}")
    assert code == 0, said
    (record,) = records(out, "int8_sym")
    for row in record["facts"]["scales"]:
        assert (row["k_source"], row["v_source"], row["k_read"], row["v_read"]) == (
            "dynamic",
            "dynamic",
            True,
            True,
        )
        assert all(0 < low < high < 1 for low, high in (row["k"], row["v"]))


@pytest.mark.parametrize(
    ("kv_format", "scale", "source"), [("int8_static", 0.05, "given"), ("int8_static", 1.0, "given"), ("int8_static", "default", "default")]
)  # fmt: skip
def test_given_and_default_are_told_apart_at_the_same_value(folder, kv_format, scale, source):
    engine = engine_on(folder, kv_format, scale)
    rows = provenance(engine, live_scales(engine.store) or [], ())
    assert {(row["k_source"], row["v_source"]) for row in rows} == {(source, source)}
    assert {row["k"] for row in rows} == {torch.tensor(1.0 if scale == "default" else scale).item()}


def test_scales_that_are_not_for_the_format_are_refused(folder, tmp_path):
    code, said, _ = run(
        folder, tmp_path, "kv_format: [native, int8_static], scale: checkpoint", runners="{storage: {}}"
    )
    assert code == 3
    assert "are for fp8_e4m3_static (its config.json has no kv_cache_scheme" in said


def test_a_gguf_file_has_none():
    for word in ("checkpoint", "checkpoint_or_default"):
        spec = {**CELL_KEYS, "model": "smollm2-135m-instruct", "kv_format": "fp8_e4m3_static", "scale": word}
        with pytest.raises(Refused, match="smollm2-135m-instruct is a GGUF file") as e:
            settled_scales(spec, config_facts(spec))
        assert e.value.reason == "checkpoint_has_no_scales"
