"""Live bytes of real stores and weights against the formulas, and the metrics of weights (A01, A15, A24)."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.engines.reference.weights.blocks import ON_LOAD, WeightFacts
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.errors import KvbenchError
from kvbench.formats.kv import KV_FORMATS
from kvbench.metrics.collect import METRICS, implausible
from kvbench.models.catalog import SHAPES
from kvbench.runners import storage
from kvbench.runners.storage import formula, weight_facts, weights_bytes
from tests.factories.runs.made import BASE, CAND, MadeRun, layers, storage_facts

# tiny-llama: 4 layers, 2 KV heads of 16. 2 sequences of 33 tokens take 3 pages of 16 each = 96 slots, so a
# layer holds 2 * 96 * 2 * 16 = 6,144 elements and 2 * 96 * 2 = 384 rows.
EXPECTED = {
    "native": (24576, 0, "float32"),
    "int8_sym": (6144, 768, "int8"),
    "int8_static": (6144, 8, "int8"),
    "fp8_e4m3": (6144, 1536, "float8_e4m3fn"),
    "fp8_e4m3_static": (6144, 8, "float8_e4m3fn"),
}


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_bytes_of_every_layer_equal_the_formula(runner_context, fmt):
    scale = 0.05 if KV_FORMATS[fmt].scale_kind == "static" else None
    ctx = runner_context("storage", kv_format=fmt, scale=scale, batch=2, context=33)
    measured = storage.run(ctx)
    payload, scales, dtype = EXPECTED[fmt]
    due = {"expected_payload": payload, "expected_scales": scales}
    layer = {"payload": payload, "scales": scales, "dtype": dtype, **due}
    assert measured.samples["layers"] == [{"layer": i, **layer} for i in range(4)]
    facts = measured.facts
    assert (facts["tokens"], facts["page_table_bytes"]) == (96, 6 * 8)
    assert (facts["native16_bytes"], facts["native_dtype"]) == (4 * 12288, "float32")
    assert facts["device_peak_bytes"] is facts["workspace_bytes"] is facts["held_bytes"] is None  # A24 T4
    assert facts["weights_bytes"] == weights_bytes(ctx.model.model) == facts["weight_native_bytes"]
    assert facts["weight_bytes_formula"] == {"payload": 0, "scales": 0, "native": facts["weights_bytes"]}
    assert facts["load_seconds"] > 0


HELD = 33_554_432  # what cuBLAS takes on Hopper with the first GEMM and keeps


def facts_on_a_counting_device(runner_context, monkeypatch, contexts, copy):
    """Facts and KV bytes of int8_sym cells one after the other, on an allocator that counts as CUDA's does.

    It knows the bytes live and their peak since the last reset. Every forward has 1,000 B of workspace a
    token; an engine's store is its pages and `copy` times as much again.
    """
    live = peak = 0

    def use(size):
        nonlocal live, peak
        live += size
        peak = max(peak, live)

    def reset(device):
        nonlocal peak
        peak = live

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: live)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(storage, "_has_counters", lambda device: True)

    def engine(**size):
        made = plain(**size)
        use(sum(made.store.live_bytes(i).total for i in range(4)) * (1 + copy))
        forward = made.forward

        def with_workspace(work, logits):
            size = sum(len(tokens) for _, tokens in work) * 1000
            use(size)
            try:
                return forward(work, logits)
            finally:
                use(-size)

        made.forward = with_workspace
        return made

    use(weights_bytes(runner_context("storage").model.model) + HELD)
    found = {}
    for context in contexts:
        ctx = runner_context("storage", kv_format="int8_sym", context=context)
        plain = ctx.engine
        object.__setattr__(ctx, "engine", engine)
        measured = storage.run(ctx)
        kv = sum(layer["payload"] + layer["scales"] for layer in measured.samples["layers"])
        found[context] = measured.facts, kv
        use(-kv * (1 + copy))
    return found


@pytest.mark.parametrize("copy", [0, 1])
def test_a24_t2_the_peak_is_the_cells_own_and_no_part_has_a_second_copy(runner_context, monkeypatch, copy):
    """A second copy of the pages; the big cell first."""
    found = facts_on_a_counting_device(runner_context, monkeypatch, (500, 20), copy)
    for context, (facts, kv) in found.items():
        assert (facts["held_bytes"], facts["workspace_bytes"]) == (HELD, (context - 1) * 1000)
        parts = facts["weights_bytes"] + facts["held_bytes"] + kv + facts["workspace_bytes"]
        assert facts["device_peak_bytes"] - parts == copy * kv


def test_a01_t1_a_store_that_is_native_or_larger_than_asked_is_seen(runner_context):
    ctx = runner_context("storage", kv_format="int8_sym", batch=2, context=33)
    engine, native = ctx.engine, ctx.native

    def dropped(**size):
        made = native(**size)
        made.decision = engine(**size).decision
        return made

    object.__setattr__(ctx, "engine", dropped)
    layer = storage.run(ctx).samples["layers"][0]
    assert (layer["dtype"], layer["payload"], layer["expected_payload"]) == ("float32", 24576, 6144)
    assert (layer["scales"], layer["expected_scales"]) == (0, 768)
    object.__setattr__(ctx, "engine", lambda sequences, tokens: engine(sequences=3, tokens=tokens))
    with pytest.raises(KvbenchError, match="use 6 pages, but the store has 9"):
        storage.run(ctx)


def test_a15_t3_tied_weights_count_once_and_slices_of_one_buffer_are_not_tied():
    model, mapped, whole = nn.Module(), nn.Module(), torch.zeros(120)
    model.embedding = nn.Embedding(49152, 576, dtype=torch.bfloat16)
    model.head = nn.Linear(576, 49152, bias=False, dtype=torch.bfloat16)
    model.register_buffer("table", torch.zeros(1000), persistent=False)
    assert weights_bytes(model) == 2 * 56_623_104
    model.head.weight = model.embedding.weight
    assert weights_bytes(model) == 56_623_104
    # Two parameters that are slices of one mapped buffer share a storage and are still two.
    mapped.a, mapped.b = nn.Parameter(whole[:40]), nn.Parameter(whole[60:])
    assert weights_bytes(mapped) == 400


SMOLLM = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
          "tie_word_embeddings": True}  # fmt: skip


def shape_of(config, dtype=torch.bfloat16):
    """A model without storage, all of whose linear layers but the output's are said to be quantized."""
    config = dict(config)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    linear = tuple(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")
    return SimpleNamespace(model=model, dtype=dtype, weights=WeightFacts("fp8_block128", ON_LOAD, linear))


def test_a15_t3_smollm_counts_its_tied_embedding_once():
    native = formula(shape_of(SMOLLM), "native")
    assert native == {"payload": 0, "scales": 0, "native": 269_030_016}
    fp8 = formula(shape_of(SMOLLM), "fp8_block128")
    norms = 2 * (30 * 2 * 576 + 576)
    assert fp8 == {"payload": 106_168_320, "scales": 30_000, "native": 56_623_104 + norms}  # 49,152 x 576
    # An embedding that is a fifth of the model keeps it over 60% of its 16-bit size.
    assert sum(fp8.values()) / sum(native.values()) == pytest.approx(0.605478, abs=1e-6)
    fp32 = sum(formula(shape_of(SMOLLM, torch.float32), "fp8_block128").values())  # the gates' ratios
    assert fp32 == 219_585_072
    assert fp32 / 538_060_032 == pytest.approx(0.40810516, abs=1e-8)
    assert fp32 / 269_030_016 == pytest.approx(0.81621031, abs=1e-8)


def test_a15_t4_the_remainder_of_an_8b_model_counts():
    """The file is 57.6% of Qwen3-8B (55.6% was published); codes alone would be 42%."""
    shape = shape_of(SHAPES["qwen3-8b-shape"])
    fp8, native = formula(shape, "fp8_block128"), formula(shape, "native")
    assert fp8 == {"payload": 6_945_767_424, "scales": 1_695_744, "native": 2_489_935_872}
    assert sum(native.values()) == 16_381_470_720
    assert sum(fp8.values()) / sum(native.values()) == pytest.approx(0.57610206, abs=1e-8)


@pytest.fixture
def quantized():
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 100}
    config = {**SMOLLM, **sizes, "num_attention_heads": 3, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    weights = WeightFacts("fp8_block128", ON_LOAD, quantize_model(model, "m").modules, load_seconds=1.5)
    return SimpleNamespace(model=model, dtype=torch.float32, weights=weights)


def test_live_bytes_are_the_formulas_with_ragged_blocks(quantized):
    facts = weight_facts(quantized, "fp8_block128")
    # 192 x 192 and 64 x 192 have 2 x 2 and 1 x 2 blocks, 320 x 192 has 3 x 2.
    payload = 2 * (2 * 192 * 192 + 2 * 64 * 192 + 3 * 320 * 192)
    scales = 2 * 4 * (2 * 4 + 2 * 2 + 3 * 6)
    native = 4 * (100 * 192 + 5 * 192)
    expected = {"weight_payload_bytes": payload, "weight_scale_bytes": scales, "weight_native_bytes": native}
    expected |= {"weight_bytes_formula": {"payload": payload, "scales": scales, "native": native}}
    expected |= {"weights_bytes": payload + scales + native, "weight_source": ON_LOAD, "load_seconds": 1.5}
    assert facts == expected | {"weight_native16_bytes": 2 * (payload + native // 4)}


def test_a_dequantized_weight_and_a_second_copy_are_off_the_formula(quantized):
    """As transformers does where it finds no FP8 device: the module is there, its weight is not FP8."""
    quantized.model.register_buffer("kept", torch.zeros(100, 192))
    facts = weight_facts(quantized, "fp8_block128")
    assert facts["weight_native_bytes"] - facts["weight_bytes_formula"]["native"] == 4 * 100 * 192
    quantized.model.set_submodule(quantized.weights.modules[0], nn.Linear(192, 192, bias=False))
    facts = weight_facts(quantized, "fp8_block128")
    assert facts["weight_bytes_formula"]["payload"] - facts["weight_payload_bytes"] == 192 * 192
    off = facts["weight_native_bytes"] - facts["weight_bytes_formula"]["native"]
    assert off == 4 * (192 * 192 + 100 * 192)


# derive


def weights(payload, scales, native, off=0):
    due = {"payload": payload, "scales": scales, "native": native}
    facts = {"weight_payload_bytes": payload, "weight_scale_bytes": scales, "weight_bytes_formula": due}
    facts |= {"weights_bytes": payload + scales + native + off, "weight_native_bytes": native + off}
    return storage_facts(16, 100, **facts, weight_native16_bytes=269_030_016, load_seconds=2.5)


def run(off=0):
    fp8 = (layers(22, 10, 0), weights(106_168_320, 30_000, 113_386_752, off))
    return MadeRun().measure("storage", fp8, (layers(22, 10, 0), weights(0, 0, 538_060_032)))


def test_a24_weight_metrics_are_exact():
    made = run()
    values = {name: made.row(name).value for name in METRICS if name.startswith(("weight", "model_load"))}
    assert values == {
        "weight_bytes": 219_585_072,
        "weight_payload_bytes": 106_168_320,
        "weight_scale_bytes": 30_000,
        "weight_native_bytes": 113_386_752,
        "weight_bytes_difference": 0,
        "weight_ratio": 219_585_072 / 538_060_032,
        "weight_ratio_16bit": 219_585_072 / 269_030_016,
        "model_load_s": 2.5,
    }
    assert made.row("weight_ratio", CAND).baseline == BASE
    assert made.row("weight_ratio_16bit", BASE).value == 2.0
    assert made.row("weight_scale_bytes", BASE).value == 0
    row = run(off=-4).row("weight_bytes_difference")
    assert (row.value, row.note) == (4, "native -4 B")
    assert implausible(METRICS[row.metric], row.value)


def test_a_record_without_a_formula_has_no_difference_rather_than_zero():
    made = MadeRun().measure("storage", *[(layers(22, 10, 0), storage_facts(16, 100))] * 2)
    assert made.row("weight_bytes_difference").value is made.row("weight_payload_bytes").value is None
    assert made.row("weight_ratio").value == 1.0
