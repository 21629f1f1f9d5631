"""FP8 products looked at after a run: at which of its rows, at work in the model, by 128 columns."""

import pytest
import torch
from torch import nn

from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.evidence import weight_products as weightprobe
from kvbench.evidence.examine import ReferenceExaminer
from kvbench.evidence.products import Products, rows_of
from kvbench.records.record import MISMATCH, VERIFIED
from kvbench_kernels.gemm import blockwise, fp8_linear
from kvbench_kernels.gemm.blockwise import dequantize_blocks
from tests.engines.test_weight_evidence import decided, loaded_as, maker, modules_of, some, spec_of


def products(change):
    """A product that gives change(x, y, scales) for the sound y."""
    honest = blockwise.fp8_dequantize_matmul_torch
    return lambda x, codes, scales, bias=None: change(x, honest(x, codes, scales, bias))


def shapes_of(loaded, rows):
    return {module.weight.shape: rows for module in modules_of(loaded).values()}


@pytest.mark.parametrize("model", ["tiny-wide", "tiny-qwen2"])
def test_products_are_looked_at_again_at_the_rows_of_the_run(model, monkeypatch):
    """Sound ones at the model's own probes, and with biases; wrong ones only at rows that the run had."""
    loaded, held = loaded_as(model=model), ReferenceExaminer()
    name, runs = "fp8_dequantize_matmul_torch", ((2, 1), (24, 9), (131, 1))
    ran = Products({(name, (m, *shape)): calls for m, calls in runs for shape in shapes_of(loaded, ())})

    def levels(ran):
        return list(held.weight_probes(loaded, decided(loaded), spec_of(model=model), ran))

    assert all(x.state == VERIFIED for x in levels(ran))
    assert levels(ran)[2].facts["after_run"]["rows"] == {"reference": [1, 2, 24, 131]}
    wrong = products(lambda x, y: y * 1.01 if len(x) == 24 else y)
    monkeypatch.setitem(fp8_linear._PATHS, "reference", wrong)
    assert all(x.state == VERIFIED for x in levels(Products()))
    assert [x.state for x in levels(ran)] == [VERIFIED, VERIFIED, MISMATCH]
    assert "by path reference at 24 rows" in levels(ran)[2].sentence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", ["tiny-wide", "tiny-qwen2", "tiny-qwen3"])
def test_sound_models_hold_at_the_rows_of_a_run_in_every_dtype(model, dtype):
    loaded = loaded_as(model=model, dtype=dtype)
    make = maker(loaded, model=model, dtype=dtype)
    first = weightprobe.probe_weights(loaded, decided(loaded), make)
    after = weightprobe.probe_after(loaded, decided(loaded), shapes_of(loaded, [2, 33, 100]), make)
    assert [x.sentence for x in (*first, *after) if x.state != VERIFIED] == []


def test_what_a_layer_gives_at_work_in_the_model_is_compared(fp8):
    """A forward that is wrong only for what the model gives it, which has no outliers as the probes have."""
    name, module = some(fp8)
    honest = module.forward
    module.forward = lambda x: honest(x) * (1.01 if x.abs().max() < 20 else 1)
    assert all(x.state == VERIFIED for x in weightprobe.probe_weights(fp8, decided(fp8)))
    e5 = weightprobe.probe_after(fp8, decided(fp8), {}, maker(fp8))[2]
    assert e5.state == MISMATCH
    assert name in e5.sentence


def test_one_block_of_a_wide_layer_with_a_wrong_scale_is_found(monkeypatch):
    """A tenth more in one block of 256 is 0.6% of a row, and 2.5% of its 128 columns."""
    torch.manual_seed(0)
    layer = Fp8Linear.quantized(nn.Linear(2048, 2048, bias=False))
    x = torch.randn(64, 2048)
    wrong = layer.weight_scale_inv.data.clone()
    wrong[3, 5] *= 1.1
    y = blockwise.fp8_dequantize_matmul_torch(x, layer.weight.data, wrong).bfloat16()
    stored = dequantize_blocks(layer.weight.data, layer.weight_scale_inv.data).double()
    due, allowed = x.double() @ stored.t(), weightprobe.TOLERANCE[torch.bfloat16]
    assert weightprobe.row_distance(y.double(), due) < allowed
    assert weightprobe.block_distance(y, x.double(), stored) > allowed
    sound = due.float().bfloat16().double()
    assert weightprobe.block_distance(sound, x.double(), stored) < allowed


def test_a_bias_far_larger_than_the_product_is_rounded_by_its_own_size():
    """As the K biases of Qwen2."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 256).double() / 16, torch.randn(9, 256).double()
    bias, allowed = 300 * torch.randn(64).bfloat16(), weightprobe.TOLERANCE[torch.bfloat16]
    y = (x @ weight.t() + bias.double()).bfloat16()
    assert weightprobe.block_distance(y, x, weight, bias) < allowed
    assert weightprobe.block_distance(y, x, weight, 1.02 * bias) > allowed
    assert weightprobe.block_distance(y - bias, x, weight) > allowed


def test_all_rows_of_few_are_compared_and_one_of_every_stripe_of_many():
    assert weightprobe.compared(64).tolist() == list(range(64))
    many = weightprobe.compared(4097).tolist()
    assert {row // 32 for row in many} == set(range(129))
    assert {row % 32 for row in many} == set(range(32))
    assert many[-1] == 4096


def test_one_row_that_is_wrong_or_no_number_is_found(fp8, monkeypatch):
    """The last row of a tail that a tile does not fill; and NaN in a row that is not compared."""
    shapes = shapes_of(fp8, [21])

    def spoilt(row, factor):
        """What changes one row of the products of 21 rows."""
        rows = torch.where(torch.arange(21) == row, factor, 1.0)[:, None]
        return products(lambda x, y: y * rows if len(x) == 21 else y)

    assert {x.state for x in weightprobe.probe_after(fp8, decided(fp8), shapes)} == {VERIFIED}
    for row, factor in ((20, 1.01), (0, 1.01), (1, float("nan"))):
        monkeypatch.setitem(fp8_linear._PATHS, "reference", spoilt(row, factor))
        assert weightprobe.probe_after(fp8, decided(fp8), shapes)[2].state == MISMATCH


def test_a_run_is_looked_at_where_it_was_least_most_and_most_often():
    """By kernel: each may have its own code. Quantizations and empty products are no products."""
    counts = {
        ("w8a16_matmul", (1, 8, 4)): 2, ("w8a16_matmul", (3, 8, 4)): 9, ("w8a16_matmul", (5, 8, 4)): 1,
        ("w8a16_matmul", (16, 8, 4)): 2, ("hopper_w8a8", (64, 8, 4)): 1, ("hopper_w8a8", (512, 8, 4)): 1,
        ("fp8_quantize_activation", (99, 8, 4)): 5, ("w8a16_matmul", (0, 8, 4)): 50,
        ("w8a16_matmul", (7, 4, 8)): 1,
    }  # fmt: skip
    assert rows_of(Products(counts)) == {(8, 4): [1, 3, 16, 64, 512], (4, 8): [7]}
    assert rows_of(Products()) == {}


def test_a_layer_that_the_model_no_longer_calls_is_named_after_the_run(fp8):
    """Its code is called past its hooks, so that nothing at work in the model was compared: no proof."""
    name, _ = some(fp8, "layers.1.mlp.up_proj")
    mlp = fp8.model.get_submodule(name.removesuffix(".up_proj"))
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj.forward(x))
    e3 = weightprobe.probe_after(fp8, decided(fp8), {}, maker(fp8))[1]
    assert e3.state == MISMATCH
    assert f"{name} is not called" in e3.sentence
