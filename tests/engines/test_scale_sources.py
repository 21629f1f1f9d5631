"""Scales of a KV cache, from checkpoint to store: the values of the files, each with its source, each read."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import load_model
from kvbench.engines.reference.weights.quantize_checkpoint import quantize_checkpoint
from kvbench.errors import Refused
from kvbench.evidence.examine import examine
from kvbench.evidence.scale_sources import expected_scales, live_scales, provenance
from kvbench.formats.scales import Scale, settle
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import Request, resolve
from kvbench.models.source import config_facts, settled_scales
from kvbench.models.weight_bytes import weight_sizes
from kvbench.records.record import MISMATCH, VERIFIED, Level
from kvbench.report.sections.provenance import UNKNOWN
from kvbench.selftest.checkpoint import write_checkpoint
from kvbench.selftest.table import FAULTS
from tests.factories.checkpoints import FILE, configure, edit
from tests.factories.jobs import Job, flat

LAYERS = 4
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
CACHE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
STATIC = "kv_format: [native, fp8_e4m3_static], scale: checkpoint"
AT = "model.layers.{}.self_attn.{}"
K_0, K_2, V_2 = (
    AT.format(at, name) for at, name in ((0, "k_proj.k_scale"), (2, "k_proj.k_scale"), (2, "v_proj.v_scale"))
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Native weights; layer i has the scales 0.01 (i + 1) of K and 0.02 (i + 1) of V, in float32."""
    folder = tmp_path_factory.mktemp("whole")
    write_checkpoint(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


def held(x):
    return torch.tensor(x, dtype=torch.float32).item()


def entry(layer, **own):
    values = {"k": held(0.01 * (layer + 1)), "v": held(0.02 * (layer + 1))}
    read = {"k_source": "checkpoint", "v_source": "checkpoint", "k_read": True, "v_read": True}
    return {"layer": layer, **values, **read, **own}


ENTRIES = [entry(i) for i in range(LAYERS)]


@pytest.fixture
def run(folder, tmp_path):
    """run(axes, source=, engine=, runners=): the exit code, what was said, and the job."""

    def go(axes, source=folder, engine="{context: 20}", runners="{storage: {}}"):
        model = f"model: {{source: '{source}', plumbing: true}}\naxes: {{{axes}}}"
        text = f"name: scales\n{model}\nengine: {engine}\nrunners: {runners}\ngate: gate.yaml\n"
        job = Job(tmp_path, text, "checks: [{metric: kv_bytes_difference, equals: 0}]")
        shutil.rmtree(job.out, ignore_errors=True)
        result = job()
        return result.exit_code, flat(result.output), job

    return go


def test_a_checkpoints_scales_reach_the_store_and_the_report_says_from_where(folder, run):
    """With a kv_cache_scheme beside native weights, for which transformers would ask for another library."""
    configure(folder, CACHE)
    both = "{storage: {}, latency: {new_tokens: 3, repeats: 1, warmup: 0}}"
    code, said, job = run("kv_format: [native, fp8_e4m3_static, int8_sym], scale: checkpoint", runners=both)
    assert code == 0, said
    fp8 = [r["facts"] for r in job.of(kv_format="fp8_e4m3_static")]
    assert len(fp8) == 2
    for facts in fp8:
        assert facts["scales"] == ENTRIES
        assert facts["scale_kind"] == "checkpoint"
        assert facts["scale_source"] == "checkpoint: all 8 scales from its files"
        assert "weight_warnings" not in facts  # nothing of the files is unread here
    for record in job.of(kv_format="native") + job.of(kv_format="int8_sym"):  # but there
        (warning,) = record["facts"]["weight_warnings"]
        assert f"scales of a KV cache ({K_0} and 7 more), which are not read" in warning
    assert all("scales" not in r["facts"] for r in job.of(kv_format="native"))
    assert "4 of 4 layers read: checkpoint 4" in job.page
    assert "4 of 4 layers read: dynamic 4" in job.page
    row = '<th scope="row">3</th><td class="num">0.04</td><td>checkpoint</td><td>yes</td><td class="num">0.08</td>'
    assert row in job.page


@pytest.mark.slow
def test_a_layer_without_a_scale_is_refused_and_is_1_where_that_is_asked_for(folder, run):
    edit(folder, {K_2: None})
    code, said, job = run(STATIC)
    assert code == 3, said
    (record,) = job.of(kv_format="fp8_e4m3_static")
    assert (record["status"], record["error"]["reason"]) == ("refused", "checkpoint_has_no_scales")
    due = "The checkpoint has no K scale for layer 2; write scale: checkpoint_or_default"
    assert record["error"]["message"].startswith(due)
    code, said, job = run(f"{STATIC}_or_default")
    assert code == 0, said
    (record,) = job.of(kv_format="fp8_e4m3_static")
    assert record["facts"]["scales"] == [*ENTRIES[:2], entry(2, k=1.0, k_source="default"), ENTRIES[3]]
    assert record["facts"]["scale_kind"] == "checkpoint + default"
    assert "4 of 4 layers read: K checkpoint 3, default 1; V checkpoint 4" in job.page
    assert '<th scope="row">2</th><td class="num">1</td><td>default</td>' in job.page
    assert "<td>checkpoint + default</td>" in job.page  # the precision table's own


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a02_t3_a_bad_scale_of_a_checkpoint_is_refused_before_the_run(folder, tmp_path, value):
    edit(folder, {K_2: torch.tensor(value)})
    axes = "{kv_format: fp8_e4m3_static, scale: [checkpoint, checkpoint_or_default]}"
    job = Job(
        tmp_path, f"model: {{source: '{folder}', plumbing: true}}\naxes: {axes}\nrunners: {{storage: {{}}}}\n"
    )
    said = f"refused (checkpoint_scale_unusable): The tensor {K_2} of model.safetensors holds {value:.6g}"
    assert flat(job(command="plan").output).count(said) == 2


def spec_of(folder, kv_format, scale):
    own = {"model": str(folder), "kv_format": kv_format, "scale": scale, "device": "cpu", "dtype": "float32"}
    return {**CELL_KEYS, **own, "page_size": 8}


def engine_on(folder, kv_format="fp8_e4m3_static", scale="checkpoint"):
    spec = spec_of(folder, kv_format, scale)
    loaded = load_model(spec, "cpu", "float32")
    decision = resolve(Request(kv_format, spec["weights"], "torch", "refuse"), loaded.facts)
    return Engine(loaded, decision, spec, sequences=2, tokens=24)


def e2_of(engine):
    return next(level for level in examine(engine, reads_expected=False).levels if level.name == "E2")


def sources(engine, levels=()):
    return [
        (row["k_source"], row["v_source"]) for row in provenance(engine, live_scales(engine.store), levels)
    ]


X = [0.3, -0.4, 1.2, 4.5, -4.9, 8.0]
FINE = ([6, -8, 24, 90, -98, 127], [0.3, -0.4, 1.2, 4.5, -4.9, 6.35], 2)
COARSE = ([0, 0, 1, 4, -5, 8], [0, 0, 1, 4, -5, 8], 0)


USED = [
    ("checkpoint", "checkpoint", FINE), ("default", "default", COARSE), (0.05, "given", FINE), (1.0, "given", COARSE),
]  # fmt: skip


@pytest.mark.parametrize(("scale", "source", "due"), USED)
def test_a02_t1_the_scale_that_is_asked_for_is_used_and_named(folder, scale, source, due):
    """And what it clips is counted (T2): 8.0 at 0.05 becomes 6.35."""
    codes, back, clipped = due
    configure(folder, {**CACHE, "kv_cache_scheme": {**SCHEME, "type": "int"}})
    edit(folder, lambda t: {k: torch.tensor([0.05]) for k in t if k.endswith(("k_scale", "v_scale"))})
    engine = engine_on(folder, "int8_static", scale)
    assert set(sources(engine)) == {(source, source)}
    store = engine.store
    seq = store.add()
    store.reserve(seq, 1)
    x = torch.zeros(1, store.shapes[0].kv_heads, store.shapes[0].head_dim)
    x[0, 0, : len(X)] = torch.tensor(X)
    store.write(1, store.slots_for(seq, 0, 1), x, x)
    store.commit(seq, 1)
    page = int(store.tables([seq])[0, 0])
    assert store.layers[1].k[page, 0, 0, : len(X)].tolist() == codes
    k, v = store.read(1, store.tables([seq]), 1, torch.float32)
    torch.testing.assert_close(k[0, 0, 0, : len(X)], torch.tensor(back).float(), rtol=1e-6, atol=0)
    assert torch.equal(k, v)
    assert store.health()[1]["clipped"] == clipped


def test_a02_t4_a_checkpoints_scales_survive_a_second_engine_and_a_second_warm_up(folder):
    first = engine_on(folder)
    before = live_scales(first.store)
    second = Engine(first.model, first.decision, first.spec, sequences=2, tokens=24)
    for engine in (first, second, first):
        seq = engine.add()
        engine.prefill(seq, [1, 2, 3])
        engine.free(seq)
    due = [{"k": row["k"], "v": row["v"]} for row in ENTRIES]
    assert before == live_scales(first.store) == live_scales(second.store) == due


def renamed(name):
    """Every scale of the cache gets the name that `name(key, side)` gives it."""

    def change(tensors):
        for key in [key for key in tensors if key.endswith(("k_scale", "v_scale"))]:
            tensors[name(key, key[-7])] = tensors.pop(key).bfloat16()  # kv_scale: V's, written last

    return change


OWN = ["{0}_scale", "attn.{0}_scale", "{0}_proj.output_scale", "{0}_proj.{0}_scale", "kv_scale"]
NAMES = [*(("model.", name) for name in OWN)]
NAMES += [(p, OWN[3]) for p in ("", "language_model.model.", "model.language_model.")]


@pytest.mark.parametrize(("prefix", "name"), NAMES)
def test_a14_t2_both_readings_know_every_name_and_no_other_tower(folder, prefix, name):
    """The loader's, by a pattern and from bytes, and the evidence's, by names and torch."""
    own = name.format

    def named(key, side):
        return f"{prefix}{key.split('.', 1)[1].split('_attn.')[0]}_attn.{own(side)}"

    edit(folder, renamed(named))
    edit(folder, {K_0.replace("model.", "vision_tower.", 1): torch.tensor(1.0)})
    engine, stored = engine_on(folder), load_file(folder / FILE)
    for layer, due in enumerate(expected_scales(engine)):
        for side, scale in zip("kv", due, strict=True):
            tensor = f"{prefix}layers.{layer}.self_attn.{own(side)}"
            assert scale == Scale(stored[tensor].double().item(), "checkpoint", tensor)
            assert engine.model.cache_scales[layer, side].value == scale.value


@pytest.mark.parametrize("prefix", ["vision_tower.", "draft."])
def test_scales_of_another_tower_or_format_are_no_scales(folder, prefix):
    with pytest.raises(Refused, match=r"are for fp8_e4m3_static \(its config.json has no kv_cache_scheme"):
        settled_scales(spec := spec_of(folder, "int8_static", "checkpoint"), config_facts(spec))
    edit(folder, renamed(lambda key, side: key.replace("model.", prefix, 1)))
    with pytest.raises(Refused, match="has no KV cache scales for any of its 4 layers"):
        engine_on(folder)
    engine = engine_on(folder, scale="checkpoint_or_default")
    assert {scale for pair in expected_scales(engine) for scale in pair} == {Scale(1.0, "default")}
    (said,) = engine.model.warnings("checkpoint_or_default")
    assert (
        f"({prefix}{AT[6:].format(0, 'k_proj.k_scale')} and 7 more), which are not read: they are of" in said
    )


def test_a_scale_of_a_layer_that_the_model_has_not_is_warned_of(folder):
    model = engine_on(folder).model
    assert model.warnings("checkpoint") == ()
    edit(folder, {AT.format(99, "k_scale"): torch.tensor(0.5)})
    (said,) = engine_on(folder).model.warnings("checkpoint")
    due = "which are not read: the model has 4 layers, and these are of later ones."
    assert said.endswith(f"({AT.format(99, 'k_scale')}), {due}")


def test_scales_of_all_shards_reach_the_store(folder):
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    parts = {k: f"{'b' if 'v_scale' in k else 'a'}.safetensors" for k in tensors}
    for part in set(parts.values()):
        own = {k: tensors[k] for k in tensors if parts[k] == part}
        save_file(own, folder / part, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    assert [row["v"] for row in live_scales(engine_on(folder).store)] == [row["v"] for row in ENTRIES]


@pytest.mark.slow
def test_an_fp8_checkpoint_keeps_its_scales_of_the_cache(folder, run, tmp_path):
    fp8 = tmp_path / "fp8"
    scales = {k: v for k, v in load_file(folder / FILE).items() if k.endswith(("k_scale", "v_scale"))}
    quantize_checkpoint(str(folder), fp8)
    edit(fp8, scales)
    configure(fp8, {"kv_cache_scheme": SCHEME})
    axes = "kv_format: [fp8_e4m3_static, int8_sym], scale: checkpoint"
    code, said, job = run(axes, f"{fp8}', native: '{folder}", "{context: 20, weights: fp8_block128}")
    assert code == 0, said
    (static,), (dynamic,) = job.of(kv_format="fp8_e4m3_static"), job.of(kv_format="int8_sym")
    assert static["facts"]["scales"] == ENTRIES
    assert "weight_warnings" not in static["facts"]
    assert "scales of a KV cache" in dynamic["facts"]["weight_warnings"][0]


def test_a_scale_that_is_not_the_files_has_no_source_and_fails_e2(folder):
    engine = engine_on(folder)
    engine.store.layers[2].v_scale.fill_(1.0)
    e2 = e2_of(engine)
    assert e2.state == MISMATCH
    assert f"layer 2 V: the stored scale is 1, checkpoint was 0.06 ({V_2})" in e2.sentence
    assert sources(engine) == [("checkpoint", None if at == 2 else "checkpoint") for at in range(LAYERS)]


def test_a_scale_of_1_is_the_checkpoints_only_where_the_files_say_so(folder):
    edit(folder, {K_2: torch.tensor(1.0)})
    with FAULTS["checkpoint_scales_dropped"].inject():
        engine = engine_on(folder)
    assert [k for k, _ in sources(engine)] == [None, None, "checkpoint", None]


def test_files_that_change_after_loading_are_a_mismatch_and_a_lost_scale_is_not_taken_for_1(folder):
    """The evidence reads them again; what was loaded is not compared with itself."""
    engine = engine_on(folder)
    edit(folder, {K_2: torch.tensor(0.5)})
    assert "layer 2 K: the stored scale is 0.03, checkpoint was 0.5" in e2_of(engine).sentence
    edit(folder, {K_2: None})
    with pytest.raises(Refused, match="have no scale of K for layer 2"):
        expected_scales(engine)


GIVEN = {"k": [0.1, 0.2, 0.3, 0.4], "v": [0.5, 0.6, 0.7, 0.8]}
ROLLED = [
    (GIVEN, "layer 0 K: the stored scale is 0.2, given was 0.1"),
    ({**GIVEN, "file": {"file": "s.json"}}, "layer 0 K: the stored scale is 0.2, file was 0.1"),
    ("checkpoint", f"layer 0 K: the stored scale is 0.02, checkpoint was 0.01 ({K_0})"),
]


@pytest.mark.parametrize(("scale", "said"), ROLLED, ids=["given", "file", "checkpoint"])
def test_scales_that_settle_hands_to_the_wrong_layer_fail_e2(folder, monkeypatch, scale, said):
    """Everywhere: the evidence lays them out itself."""

    def rolled(*given):
        pairs = settle(*given)
        return pairs[1:] + pairs[:1]

    for module in [m for name, m in sys.modules.items() if name.startswith("kvbench.")]:
        if getattr(module, "settle", None) is settle:
            monkeypatch.setattr(module, "settle", rolled)
    e2 = e2_of(engine_on(folder, scale=scale))
    assert e2.state == MISMATCH
    assert said in e2.sentence


def test_read_is_what_the_probe_showed_and_nothing_else(folder):
    engine = engine_on(folder)
    live = live_scales(engine.store)
    facts = {"moved": {"k_scale": [0, 1, 3], "v_scale": [0, 1]}, "unmoved": {"k_scale": [2], "v": [3]}}
    rows = provenance(engine, live, [Level("E3-layers", VERIFIED, "", facts)])
    assert [row["k_read"] for row in rows] == [True, True, False, True]
    assert [row["v_read"] for row in rows] == [True, True, None, None]
    assert all(row["k_read"] is None for row in provenance(engine, live, ()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_format", "source"), [("int8_sym", "dynamic"), ("fp8_e4m3_static", "checkpoint")]
)
def test_a_scale_that_attention_ignores_is_said_not_to_be_read(run, kv_format, source):
    scale = ", scale: checkpoint" if source == "checkpoint" else ""
    with FAULTS["v_scale_not_read"].inject():
        code, _, job = run(f"kv_format: [native, {kv_format}]{scale}")
    assert code == 1
    (record,) = job.of(kv_format=kv_format)
    assert [(row["k_read"], row["v_read"]) for row in record["facts"]["scales"]] == [(True, False)] * LAYERS
    assert f"0 of 4 layers read: {source} 4" in job.page
    assert '<td class="is-fail">no</td>' in job.page


def test_scales_of_the_cache_are_no_weights_in_the_plan(folder):
    spec = spec_of(folder, "fp8_e4m3_static", "checkpoint")
    loaded = load_model(spec, "cpu", "float32")
    total = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    assert weight_sizes(spec, config_facts(spec), "native").total == total


@pytest.mark.slow
def test_a_record_and_its_report_never_say_checkpoint_of_what_is_not(run):
    with FAULTS["checkpoint_scales_dropped"].inject():
        code, said, job = run(STATIC)
    assert code == 1
    assert "layer 0 K: the stored scale is 1, checkpoint was 0.01" in said
    (record,) = job.of(kv_format="fp8_e4m3_static")
    found = [(row["k"], row["k_source"], row["v_source"]) for row in record["facts"]["scales"]]
    assert (found, record["facts"]["scale_kind"]) == ([(1.0, None, None)] * LAYERS, "unknown")
    assert f"4 of 4 layers read: {UNKNOWN} 4" in job.page
    assert "<td>checkpoint</td>" not in job.page.split("Scales of")[1].split("Reasons and evidence")[0]


@pytest.mark.parametrize("kv_format", ["int8_sym", "fp8_e4m3"])
def test_dynamic_scales_are_the_range_of_the_tokens_that_are_there(folder, kv_format):
    engine = engine_on(folder, kv_format, None)
    store, counts = engine.store, (11, 3)
    for pages in store.layers:  # what no token wrote is in no range
        pages.k_scale.fill_(float("nan"))
        pages.v_scale.fill_(float("nan"))
    assert live_scales(store)[0] == {"k": None, "v": None}
    seqs = [engine.add() for _ in counts]
    engine.forward([(seq, list(range(n))) for seq, n in zip(seqs, counts, strict=True)], "none")
    slots = torch.cat([store.slots_for(seq, 0, n) for seq, n in zip(seqs, counts, strict=True)])
    for found, pages in zip(live_scales(store), store.layers, strict=True):
        for side, scale in (("k", pages.k_scale), ("v", pages.v_scale)):
            own = scale[slots // 8, :, slots % 8]
            assert found[side] == [own.min().item(), own.max().item()]


def test_a_run_that_computes_no_token_has_the_probes_dynamic_scales(run):
    """The storage runner counts pages that nothing has written: what fresh memory holds is no scale."""
    code, said, job = run("kv_format: [native, int8_sym]")
    assert code == 0, said
    (record,) = job.of(kv_format="int8_sym")
    for row in record["facts"]["scales"]:
        assert row["k_source"] == row["v_source"] == "dynamic"
        assert row["k_read"] is row["v_read"] is True
        assert all(0 < low < high < 1 for low, high in (row["k"], row["v"]))


@pytest.mark.parametrize("scale", ["checkpoint", "checkpoint_or_default"])
def test_a_gguf_file_has_none(scale):
    spec = spec_of("smollm2-135m-instruct", "fp8_e4m3_static", scale)
    with pytest.raises(Refused, match="smollm2-135m-instruct is a GGUF file") as e:
        settled_scales(spec, config_facts(spec))
    assert e.value.reason == "checkpoint_has_no_scales"
