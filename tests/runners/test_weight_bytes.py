"""Bytes of a model's weights, live and by formula, and the ratios that come of them (A15)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.engines.reference.weights.blocks import ON_LOAD, WeightFacts
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.metrics.collect import METRICS, implausible
from kvbench.models.catalog import SHAPES
from kvbench.runners import storage
from kvbench.runners.storage import formula, weight_facts, weights_bytes
from tests.factories.runs.made import BASE, CAND, MadeRun, layers, storage_facts

SMOLLM = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip


def shape_of(config, dtype=torch.bfloat16):
    """A model without storage, all of whose linear layers but the output's are said to be quantized."""
    config = dict(config)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    linear = tuple(n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head")
    return SimpleNamespace(model=model, dtype=dtype, weights=WeightFacts("fp8_block128", ON_LOAD, linear))


def test_a15_t3_smollm_counts_its_tied_embedding_once():
    """49,152 x 576 in BF16 are 56,623,104 B; the output layer is the same tensor."""
    native = formula(shape_of(SMOLLM), "native")
    assert native == {"payload": 0, "scales": 0, "native": 269_030_016}
    fp8 = formula(shape_of(SMOLLM), "fp8_block128")
    norms = 2 * (30 * 2 * 576 + 576)
    assert fp8 == {"payload": 106_168_320, "scales": 30_000, "native": 56_623_104 + norms}
    # An embedding that is a fifth of the model keeps it over 60% of its 16-bit size.
    assert sum(fp8.values()) / sum(native.values()) == pytest.approx(0.605478, abs=1e-6)


def test_smollm_in_float32_is_the_gates_ratio():
    fp8 = formula(shape_of(SMOLLM, torch.float32), "fp8_block128")
    assert sum(fp8.values()) == 219_585_072
    assert sum(fp8.values()) / 538_060_032 == pytest.approx(0.40810516, abs=1e-8)
    assert sum(fp8.values()) / 269_030_016 == pytest.approx(0.81621031, abs=1e-8)


def test_a15_t4_the_remainder_of_an_8b_model_counts():
    """The file is 57.6% of Qwen3-8B (55.6% was published); codes alone would be 42%."""
    shape = shape_of(SHAPES["qwen3-8b-shape"])
    fp8, native = formula(shape, "fp8_block128"), formula(shape, "native")
    assert fp8 == {"payload": 6_945_767_424, "scales": 1_695_744, "native": 2_489_935_872}
    assert sum(native.values()) == 16_381_470_720
    assert sum(fp8.values()) / sum(native.values()) == pytest.approx(0.57610206, abs=1e-8)


@pytest.fixture
def quantized():
    config = {**SMOLLM, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 100,
              "num_attention_heads": 3, "num_key_value_heads": 1}  # fmt: skip
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(made)
    names = quantize_model(model, "m").modules
    weights = WeightFacts("fp8_block128", ON_LOAD, names, load_seconds=1.5)
    return SimpleNamespace(model=model, dtype=torch.float32, weights=weights)


def test_live_bytes_are_the_formulas_with_ragged_blocks(quantized):
    facts = weight_facts(quantized, "fp8_block128")
    # 192 x 192 and 64 x 192 have 2 x 2 and 1 x 2 blocks, 320 x 192 has 3 x 2.
    payload = 2 * (2 * 192 * 192 + 2 * 64 * 192 + 3 * 320 * 192)
    scales = 2 * 4 * (2 * 4 + 2 * 2 + 3 * 6)
    native = 4 * (100 * 192 + 5 * 192)
    assert (facts["weight_payload_bytes"], facts["weight_scale_bytes"]) == (payload, scales)
    assert facts["weight_native_bytes"] == native
    assert facts["weight_bytes_formula"] == {"payload": payload, "scales": scales, "native": native}
    assert facts["weights_bytes"] == payload + scales + native
    assert facts["weight_native16_bytes"] == 2 * (payload + native // 4)
    assert (facts["weight_source"], facts["load_seconds"]) == (ON_LOAD, 1.5)


def test_a_dequantized_weight_is_off_the_formula(quantized):
    """As transformers does where it finds no FP8 device: the module is there, its weight is not FP8."""
    name = quantized.weights.modules[0]
    module = quantized.model.get_submodule(name)
    plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
    quantized.model.set_submodule(name, plain)
    facts = weight_facts(quantized, "fp8_block128")
    assert facts["weight_bytes_formula"]["payload"] - facts["weight_payload_bytes"] == 192 * 192
    assert facts["weight_native_bytes"] - facts["weight_bytes_formula"]["native"] == 4 * 192 * 192


def test_a_second_copy_is_off_the_formula(quantized):
    quantized.model.register_buffer("kept", torch.zeros(100, 192))
    facts = weight_facts(quantized, "fp8_block128")
    assert facts["weight_native_bytes"] - facts["weight_bytes_formula"]["native"] == 4 * 100 * 192


def test_the_storage_runner_has_the_weights_of_its_model(runner_context):
    ctx = runner_context("storage", batch=1, context=16)
    facts = storage.run(ctx).facts
    assert facts["weights_bytes"] == weights_bytes(ctx.model.model) == facts["weight_native_bytes"]
    assert facts["weight_bytes_formula"] == {"payload": 0, "scales": 0, "native": facts["weights_bytes"]}
    assert facts["load_seconds"] > 0


# derive


def weights(payload, scales, native, off=0):
    due = {"payload": payload, "scales": scales, "native": native}
    return storage_facts(16, 100, weights_bytes=payload + scales + native + off, weight_payload_bytes=payload,
                         weight_scale_bytes=scales, weight_native_bytes=native + off, weight_bytes_formula=due,
                         weight_native16_bytes=269_030_016, load_seconds=2.5)  # fmt: skip


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


def test_bytes_off_the_formula_are_named_and_impossible():
    row = run(off=-4).row("weight_bytes_difference")
    assert (row.value, row.note) == (4, "native -4 B")
    assert implausible(METRICS[row.metric], row.value)


def test_a_record_without_a_formula_has_no_difference_rather_than_zero():
    made = MadeRun().measure("storage", *[(layers(22, 10, 0), storage_facts(16, 100))] * 2)
    assert made.row("weight_bytes_difference").value is None
    assert made.row("weight_payload_bytes").value is None
    assert made.row("weight_ratio").value == 1.0
