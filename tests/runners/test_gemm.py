"""Products of linear layers by path: sweep of rows, route map and metrics (A13, A16)."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from kvbench.engines.reference.weights import fp8_linear as fp8linear
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear, join_siblings
from kvbench.errors import KvbenchError
from kvbench.metrics import gemm as derived
from kvbench.runners import gemm
from kvbench_kernels.gemm import fp8_linear
from kvbench_kernels.gemm.blockwise import dequantize_blocks
from kvbench_kernels.launches import launched
from tests.factories.runs.made import record

A16_ROWS = [1, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65]


class Attention(nn.Module):
    """Three projections that share an input, and one that does not."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(384, 384), nn.Linear(384, 128)
        self.v_proj, self.o_proj = nn.Linear(384, 128), nn.Linear(384, 192)


class Model(nn.Module):
    """Two blocks and an output layer."""

    def __init__(self, fp8=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.lm_head = nn.Linear(384, 1000)
        self.to(dtype)
        for block in self.layers if fp8 else ():
            for name, module in list(block.named_children()):
                setattr(block, name, Fp8Linear.quantized(module))

    def get_output_embeddings(self):
        return self.lm_head


def bench(rows, dtype=torch.float32, path="auto"):
    return gemm.Bench(path, torch.device("cpu"), dtype, {"rows": rows, "max_rows": 70, "seed": 0}, 0)


def product_of(name, model):
    return next(p for p in gemm.products(model) if p.names == (f"layers.0.{name}",))


def test_layers_under_other_names_and_layers_left_out_are_refused():
    model = Model()
    found = gemm.products(model)
    gemm.check_all(model, found)
    first = found[-1]
    for wrong, words in (
        ([*found[:-1], replace(first, names=first.alike[0].names)], "another layer"),
        ([*found[:-1], replace(first, n=first.n + 1)], f"{first.n + 1} x {first.k}"),
        (found[1:], r"layers\.0\.q_proj .* 1 times, but 0"),
        ([*found, found[-1]], r"o_proj .* 1 times, but 2"),
    ):
        with pytest.raises(KvbenchError, match=words):
            gemm.check_all(model, wrong)
    join_siblings(model)  # q, k and v are one product now, so apart they are not this model's
    gemm.check_all(model, gemm.products(model))
    with pytest.raises(KvbenchError, match=r"q_proj and .*k_proj and .*v_proj as one product 1 times"):
        gemm.check_all(model, found)


def scaled(monkeypatch, layer, factor, rows):
    """The reference path multiplies the scales of one layer by `factor`, for this number of rows only."""
    honest, wrong = fp8_linear._PATHS["reference"], layer.weight.data_ptr()

    def path(x, codes, scales, bias=None):
        hit = codes.data_ptr() == wrong and len(x) == rows
        return honest(x, codes, scales * factor if hit else scales, bias)

    monkeypatch.setitem(fp8_linear._PATHS, "reference", path)


def test_the_worst_layer_of_a_shape_counts_and_one_without_a_number_is_the_worst(monkeypatch):
    model = Model()
    product = product_of("o_proj", model)
    assert all(row["distance"] <= row["bound"] for row in bench([1, 5]).measure(product)["rows"])
    scaled(monkeypatch, model.layers[1].o_proj, 1.25, 5)
    one, five = bench([1, 5]).measure(product)["rows"]
    assert one["distance"] <= one["bound"]
    assert (five["layer"], round(five["error"], 2)) == ("layers.1.o_proj", 0.25)
    assert five["distance"] > five["bound"]
    product = product_of("k_proj", model)
    assert len(product.layers) == 4
    scaled(monkeypatch, product.layers[1].modules[0], math.nan, 1)  # sound ones come after it
    (row,) = bench([1]).measure(product)["rows"]
    assert (str(row["error"]), str(row["distance"])) == ("nan", "nan")
    assert row["layer"] == product.layers[1].names[0]


def test_each_shape_is_measured_once_and_siblings_that_are_one_product_are_one():
    model = Model()
    assert join_siblings(model) == 2
    found = gemm.products(model)
    assert [(p.n, p.k, [layer.names for layer in p.layers]) for p in found] == [
        (640, 384, [tuple(f"layers.{i}.{name}_proj" for name in "qkv") for i in range(2)]),
        (192, 384, [(f"layers.{i}.o_proj",) for i in range(2)]),
    ]
    # Codes, scales of whole and begun blocks, and biases: bytes of one layer.
    assert [p.nbytes for p in found] == [640 * 384 + 4 * 5 * 3 + 4 * 640, 192 * 384 + 4 * 2 * 3 + 4 * 192]
    x, block = torch.randn(3, 384), model.layers[0]
    assert torch.equal(found[0](x), torch.cat([block.q_proj(x), block.k_proj(x), block.v_proj(x)], -1))
    parts = [dequantize_blocks(m.weight, m.weight_scale_inv) for m in found[0].modules]
    assert torch.equal(torch.cat(parts), found[0].weight())
    native = [(p.n, p.k, p.quantized) for p in gemm.products(Model(fp8=False))]
    assert native == [(384, 384, False), (128, 384, False), (192, 384, False)]  # without the output layer
    with pytest.raises(KvbenchError, match="no linear layer"):
        gemm.products(nn.Sequential(nn.LayerNorm(4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a16_t1_every_number_of_rows_is_the_product_with_the_dequantized_weight(dtype):
    """K = 384, N = 640 and a ragged 192: bias and tail block are part of the product (A13 T3)."""
    for product in gemm.products(Model(dtype=dtype)):
        with fp8linear.using("reference"):
            measured = bench(A16_ROWS, dtype, "reference").measure(product)
        ran = [(row["m"], row["path"], tuple(row["kernels"])) for row in measured["rows"]]
        assert ran == [(m, "reference", ("fp8_dequantize_matmul_torch",)) for m in A16_ROWS]
        assert all(row["distance"] <= row["bound"] for row in measured["rows"])
        assert measured["routes"] == [[1, 70, "reference"]]


def simt(x, codes, scales, bias, path):
    """W8A16 whatever path was asked for."""
    launched("w8a16_dot")
    return x @ dequantize_blocks(codes, scales).t()


def test_a_wrong_tail_path_or_shape_is_found(monkeypatch):
    """Output columns from 128 on use the scales of the block before, as if blocks had 96 rows."""
    right = fp8linear.fp8_linear

    def wrong(*given):
        y = right(*given)
        y[:, 128:] *= 1.01
        return y

    monkeypatch.setattr(fp8linear, "fp8_linear", wrong)
    measured = bench([1, 9]).measure(gemm.products(Model())[-1])
    assert all(row["distance"] > 100 * row["bound"] for row in measured["rows"])
    product = gemm.products(Model())[0]
    monkeypatch.setattr(fp8linear, "fp8_linear", simt)
    with pytest.raises(KvbenchError, match=r"expected path reference, got w8a16 \(w8a16_dot\)"):
        bench([1]).measure(product)
    monkeypatch.setattr(fp8linear, "fp8_linear", right)
    assert product(torch.empty(0, 384)).shape == (0, 384)
    one = replace(product, modules=(lambda x: torch.empty(1, 384),))
    with pytest.raises(KvbenchError, match=r"expected shape \[0, 384\] for no rows, got \[384\]"):
        bench([1])._check_no_rows(one, torch.empty(2, 384))


def test_a16_t2_both_sides_of_a_boundary_are_measured_with_the_same_first_row(monkeypatch):
    """w8a16 up to 32 rows and w8a8 above."""

    def path(m, *_):
        return "w8a16" if m <= 32 else "w8a8"

    def product(x, codes, scales, bias, _):
        if path(len(x)) == "w8a16":
            return simt(x, codes, scales, bias, _) + bias
        launched("fp8_quantize_activation")
        launched("fp8_matmul_w8a8")
        used = gemm.dequantize_activation(*gemm.quantize_activation_torch(x))
        return used @ dequantize_blocks(codes, scales).t() + bias

    monkeypatch.setattr(gemm, "route", path)
    monkeypatch.setattr(fp8linear, "fp8_linear", product)
    measured = bench([1, 9]).measure(gemm.products(Model())[0])
    rows = measured["rows"]
    assert measured["routes"] == [[1, 32, "w8a16"], [33, 70, "w8a8"]]
    assert gemm.route_map(measured["routes"]) == "1..32 w8a16, 33.. w8a8"
    assert measured["boundaries"] == [32, 33]
    assert {row["m"]: row["path"] for row in rows} == {1: "w8a16", 9: "w8a16", 32: "w8a16", 33: "w8a8"}
    assert max(row["row0_diff"] for row in rows[:3]) < 1e-6
    # The step is the cost of quantizing x: W8A8 and W8A16 differ, and both are inside their bounds.
    assert 0.005 < rows[3]["row0_diff"] < 0.0625
    assert rows[3]["error"] > 1000 * rows[2]["error"]
    assert all(row["distance"] <= row["bound"] for row in rows)


def test_the_runner_measures_a_loaded_model_with_an_x_of_outliers(runner_context):
    assert torch.equal(gemm.probe_input(3, 513, 64)[:5], gemm.probe_input(3, 5, 64))
    x = gemm.probe_input(0, 2000, 64)
    assert x[:, ::16].std() > 25 > 1.1 > x[:, 1].std()
    measured = gemm.run(runner_context("gemm", rows=[1, 3]))
    assert measured.facts["routes"] == dict.fromkeys(measured.facts["routes"], "1.. native")
    assert (measured.facts["timed_with"], measured.facts["dtype"]) == (None, "float32")
    assert {row["path"] for p in measured.samples["products"] for row in p["rows"]} == {"native"}


# times


L2 = 62_914_560  # of an H200


@pytest.mark.parametrize(
    ("sizes", "l2", "layers"),
    [
        ([25_171_968] * 36, L2, 10),  # the layers of Qwen3-8B: codes and float32 scales
        ([16_781_312] * 36, L2, 15), ([100_687_872] * 36, L2, 3), ([50_343_936] * 36, L2, 5),
        ([1_770_000] * 30, L2, 30),  # there are no more
        ([100] * 9, 100, 4), ([99] * 9, 100, 5), ([10, 390, 30], 100, 2),
        ([1000, 1000], 100, 1),  # whose own end has taken the place of its beginning
    ],
)  # fmt: skip
def test_calls_go_over_as_many_layers_as_fill_the_l2_four_times(sizes, l2, layers):
    assert gemm.in_turn(sizes, l2) == layers


def test_the_fact_names_what_was_cold():
    found = [gemm.warmth(held, 100) for held in (0, 100, 101, 399, 400)]
    assert found == ["warm", "warm", "partly cold", "partly cold", "cold"]
    head = "CUDA events over 10 of 36 layers in turn, L2 62,914,560 B: weights "
    text = gemm.turn(10, 36, 251_719_680, 503_439_360, L2, 8 * 10**9)
    assert text == f"{head}251,719,680 B, cold; native ones 503,439,360 B, cold"
    head += "53,000,000 B, warm; native ones 106,000,000 B, partly cold; the model's "
    for model, words in ((60_000_000, "60,000,000 B fit into"), (163_000_000, "163,000,000 B exceed")):
        text = gemm.turn(10, 36, 53_000_000, 106_000_000, L2, model)
        assert text.startswith(f"{head}{words} the L2")


@pytest.mark.parametrize(("layers", "order"), [(1, "aaaaa"), (3, "abcabc"), (7, "abcdefg")])
def test_a_sample_is_whole_turns_and_its_time_is_that_of_a_call(layers, order, monkeypatch):
    """On a device whose clock goes on by 2 us a call, and by 1 s in the wait before."""
    clock, made, waits = [0.0], [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = clock[0]

        def synchronize(self):
            made.append("|")

        def elapsed_time(self, end):
            return end.ms - self.ms

    def wait(cycles):
        waits.append(cycles)
        clock[0] += 1e3

    def call(name):
        made.append(name)
        clock[0] += 2e-3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", wait)
    names = "abcdefg"[:layers]
    assert gemm.microseconds([lambda name=name: call(name) for name in names]) == pytest.approx(2, rel=1e-5)
    assert "".join(made) == names + f"{order}|" * gemm.ROUNDS
    assert waits == [gemm.WAIT_CYCLES * len(order)] * gemm.ROUNDS


@pytest.fixture
def timings(monkeypatch):
    """Time products as on a device with an L2 of 20,000 B; collects each timing's path and arguments."""
    made = []

    def microseconds(calls):
        for call in calls:
            call()
        made.append((fp8linear._gemm, [call.args for call in calls]))
        return float(len(made))

    monkeypatch.setattr(gemm, "microseconds", microseconds)
    monkeypatch.setattr(gemm.Bench, "timing", True)
    monkeypatch.setattr(gemm.Bench, "l2", 20_000)
    return made


def test_every_arm_is_timed_over_the_same_layers(timings):
    product = gemm.products(Model())[1]
    assert (len(product.layers), product.nbytes) == (4, 49_676)
    with fp8linear.using("auto"):
        measured = bench([1, 9]).measure(product)
    times = [[row[key] for key in ("us", "us_native", "us_reference")] for row in measured["rows"]]
    assert times == [[1, 2, 3], [4, 5, 6]]
    assert [path for path, _ in timings] == ["auto", "auto", "reference"] * 2
    used = product.layers[:2]
    for m, (own, native, reference) in ((1, timings[:3]), (9, timings[3:])):
        for _, calls in (own, reference):
            assert [modules for modules, _ in calls] == [layer.modules for layer in used]
            assert {len(x) for _, x in calls} == {m}
        for (x, weight, bias), layer in zip(native[1], used, strict=True):
            assert len(x) == m
            assert torch.equal(weight, layer.weight())
            assert torch.equal(bias, layer.bias)
    words = "over 2 of 4 layers in turn, L2 20,000 B: weights 99,352 B, cold; native ones 393,216 B, cold"
    assert words in measured["timed_with"]


@pytest.mark.usefixtures("timings")
def test_a_path_that_was_not_expected_gives_no_result_in_any_layer_that_is_timed(monkeypatch):
    product, real = gemm.products(Model())[1], fp8linear.fp8_linear
    dropped = product.layers[1].modules[0].weight.data_ptr()

    def other(x, codes, *rest):
        return (simt if codes.data_ptr() == dropped else real)(x, codes, *rest)

    monkeypatch.setattr(fp8linear, "fp8_linear", other)
    words = r"layers\.0\.v_proj \(1 x 128 x 384\): expected path reference, got w8a16"
    with pytest.raises(KvbenchError, match=words):
        bench([1]).measure(product)


@pytest.mark.usefixtures("timings")
def test_the_record_has_for_each_shape_what_was_cold(runner_context, monkeypatch):
    monkeypatch.setattr(gemm.Bench, "l2", 70_000)
    found = gemm.run(runner_context("gemm", rows=[1])).facts["timed_with"]
    assert set(found) == {"64 x 64", "32 x 64", "128 x 64", "64 x 128"}
    assert [shape for shape, text in found.items() if "the model's 724,224 B exceed" in text] == ["32 x 64"]
    assert "over 4 of 4 layers in turn, L2 70,000 B: weights 131,072 B, partly cold" in found["64 x 128"]


# derive


def row(m, path, error, us=None, reference=None, **more):
    kept = {"m": m, "path": path, "kernels": [], "error": error, "distance": error, "bound": 0.01}
    times = {} if us is None else {"us": us, "us_native": 10.0, "us_reference": reference}
    return {**kept, "row0_diff": 0.0, "row0_argmax": 5, "row0_argmax_equal": True, **times, **more}


def values(rows):
    product = {"n": 576, "k": 192, "modules": ["o_proj"], "calls_a_forward": 1, "routes": [], "rows": rows}
    routes = {"576 x 192": "1..32 w8a16, 33.. w8a8", "192 x 576": "1.. w8a8", "64 x 576": "1.. w8a8"}
    own = record("gemm", {"products": [product]}, {"routes": routes})
    return {value.metric: value for value in derived.values(own, None)}


SWEEP = [
    row(32, "w8a16", 0.004, 5.0, 100.0),
    row(33, "w8a8", 0.03, 12.0, 80.0, distance=0.002, row0_diff=0.027, row0_argmax_equal=False),
    row(64, "w8a8", 0.02, 8.0, 80.0, distance=0.001),
]


def test_the_worst_of_all_rows_counts_and_is_named():
    found = values(SWEEP)
    paths = "1..32 w8a16, 33.. w8a8 (N x K: 576 x 192); 1.. w8a8 (N x K: 192 x 576, 64 x 576)"
    noted = {
        "error_max": (0.03, "w8a16 0.004, w8a8 0.03"),
        "paths": (2, paths),
        "bound_share": (0.4, "worst: 576 x 192, 32 rows, w8a16"),
        "boundary_diff": (0.027, "worst: 576 x 192, 32 rows w8a16 to 33 rows w8a8"),
        "native_time_ratio": (1.2, "worst: 576 x 192, 33 rows, w8a8"),
    }
    assert {name: (found[f"gemm_{name}"].value, found[f"gemm_{name}"].note) for name in noted} == noted
    assert (found["gemm_boundary_argmax"].value, found["gemm_reference_time_ratio"].value) == (0.5, 0.15)
    counts = {"bound_share": 3, "boundary_diff": 2, "boundary_argmax": 2, "native_time_ratio": 3}
    assert {name: found[f"gemm_{name}"].n for name in counts} == counts
    # The worst counts, not the first.
    small = [row(8, "reference", 0.001), row(9, "w8a16", 0.001, row0_diff=0.002)]
    assert values([*small, *SWEEP])["gemm_boundary_diff"].value == 0.027
    assert values(SWEEP[:1])["gemm_boundary_diff"].value is None
    for rows in ([row(1, "reference", 0.0)], [row(1, "native", 0.0, us=1.0)]):
        ratio = values(rows)["gemm_native_time_ratio"]
        assert (ratio.value, ratio.n) == (None, 0)
    found = values([row(1, "w8a16", 0.004), row(2, "w8a16", math.nan)])
    assert math.isnan(found["gemm_error_max"].value)
    assert math.isnan(found["gemm_bound_share"].value)
    assert found["gemm_bound_share"].note == "worst: 576 x 192, 2 rows, w8a16"
