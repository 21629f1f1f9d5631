"""The transfer runner: exact bytes both ways, bit identity, bandwidth, and recorded precision (A08)."""

import pytest
import torch

from kvbench.engines.reference.kv import store as store_module
from kvbench.engines.reference.kv import swap
from kvbench.errors import KvbenchError
from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix.cells import CELL_KEYS, Task
from kvbench.run.task.measure import execute
from kvbench.run.task.prepare import Session
from kvbench.runners import transfer
from tests.factories.runs.made import BASE, CAND, MadeRun

# tiny-llama: 4 layers, 2 KV heads of 16. 2 sequences of 33 tokens have 6 pages of 16: 6,144 elements and 384
# rows a layer.
LAYER = {
    "native": (24_576, "float32"),
    "int8_sym": (6_144 + 768, "int8 + float16 scales"),
    "int8_static": (6_144, "int8"),
    "fp8_e4m3": (6_144 + 1_536, "float8_e4m3fn + float32 scales"),
    "fp8_e4m3_static": (6_144, "float8_e4m3fn"),
}


def given(fmt):
    return {"kv_format": fmt, "scale": 0.05 if KV_FORMATS[fmt].scale_kind == "static" else None}


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_a08_t1_what_is_moved_each_way_is_the_formula(runner_context, fmt):
    ctx = runner_context("transfer", **given(fmt), batch=2, context=33, repeats=2, warmup=1)
    measured = transfer.run(ctx)
    swaps, facts = measured.samples["swaps"], measured.facts
    assert [(s["order"], s["way"]) for s in swaps] == [(0, "out"), (0, "in"), (1, "out"), (1, "in")]
    assert [(s["order"], s["way"]) for s in measured.samples["warmup"]] == [(-1, "out"), (-1, "in")]
    assert all(s["layer_bytes"] == [LAYER[fmt][0]] * 4 and s["seconds"] > 0 for s in swaps)
    assert facts["expected_layer_bytes"] == [LAYER[fmt][0]] * 4
    assert (facts["tokens"], facts["pages"], facts["pinned"]) == (96, 6, False)
    assert facts["native16_bytes"] == 4 * 12_288


@pytest.mark.parametrize(
    ("name", "words"),
    [("k", "Layer 2: k of"), ("v_scale", "Layer 2: v_scale of"), ("order", "Layer 0: k of")],
)
def test_a08_t2_a_swap_that_loses_a_part_leaves_no_result(runner_context, monkeypatch, name, words):
    def lossy(host, layers, pages):
        lost = getattr(layers[2], name).view(torch.uint8) if name != "order" else torch.empty(0)
        kept = lost.clone()
        swap.copy_in(host, layers, pages.flip(0) if name == "order" else pages)
        lost.copy_(kept)

    monkeypatch.setattr(store_module, "copy_in", lossy)
    with pytest.raises(KvbenchError, match=f"{words} sequence 0 changed"):
        transfer.run(runner_context("transfer", kv_format="int8_sym", batch=2, context=33, warmup=0))


FAST = ("int8_sym", "fp8_e4m3_static")  # the other formats take the same path


@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, marks=[] if fmt in FAST else [pytest.mark.slow]) for fmt in KV_FORMATS]
)
def test_the_records_transfer_precision_is_that_of_the_hosts_buffers(fmt):
    session, found = Session(None, {}), {}
    fixed = {"model": "tiny-llama", "model_weights": "random", "device": "cpu", "dtype": "float32"}
    spec = {**CELL_KEYS, **fixed, **given(fmt), "batch": 2, "context": 17}
    for runner, options in (("transfer", {"repeats": 1, "warmup": 0}), ("storage", {})):
        task = Task("k", runner, "", spec, options, ("c",), None)
        record = execute(task, session, None, lambda done, total, note: None)
        assert record.error is None
        assert record.evidence["effective"] == fmt
        assert {x["state"] for x in record.evidence["levels"]} <= {"verified", "not_applicable"}
        found[runner] = record.evidence["precision"]["transfer"]
        assert "kv_clipped" not in record.facts  # random bytes are no values that a scale was too small for
    assert found == {"transfer": LAYER[fmt][1], "storage": "not measured"}


def swaps(*seconds, layer_bytes=(33_280, 33_280)):
    """Samples of swaps with (out, in) seconds each, all of the same bytes a layer."""
    made = [
        {"order": i, "way": way, "seconds": s, "layer_bytes": list(layer_bytes)}
        for i, pair in enumerate(seconds)
        for way, s in zip(("out", "in"), pair, strict=True)
    ]
    return {"swaps": made, "warmup": []}


def made(samples):
    def facts(size):
        return {"expected_layer_bytes": [size, size], "native16_bytes": 131_072}

    native = swaps((1e-3, 1e-3), layer_bytes=(65_536, 65_536)), facts(65_536)
    return MadeRun().measure("transfer", (samples, facts(33_280)), native)


def test_bytes_ratio_and_median_bandwidth_each_way():
    run = made(swaps((2e-6, 4e-6), (1e-6, 5e-6), (9e-6, 6e-6)))
    expected = {"transfer_bytes": (66_560, 131_072), "transfer_ratio_16bit": (0.5078125, 1.0)}
    assert {name: (run.row(name).value, run.row(name, BASE).value) for name in expected} == expected
    assert run.row("swap_out_gb_s").value == pytest.approx(66_560 / 2e-6 / 1e9)
    assert run.row("swap_in_gb_s").value == pytest.approx(66_560 / 5e-6 / 1e9)
    assert (run.row("swap_in_gb_s").n, run.row("swap_in_gb_s").unit.name) == (3, "GB/s")
    assert run.row("transfer_bytes_difference").value == 0
    metrics = [{row.metric for row in run.rows() if row.cell == cell} for cell in (CAND, BASE)]
    assert metrics[0] == metrics[1]


def test_a08_t1_differences_of_layers_do_not_cancel_and_unmeasured_swaps_count_too():
    row = made(swaps((1e-6, 1e-6), layer_bytes=(32_768, 32_768))).row("transfer_bytes_difference")
    assert (row.value, row.n) == (4 * 512, 4)  # without scales
    assert row.note == "4 of 4 layers moved differ from the formula"
    samples = swaps((1e-6, 1e-6))
    samples["swaps"][0]["layer_bytes"] = [33_280 + 512, 33_280 - 512]
    assert made(samples).row("transfer_bytes_difference").value == 1024
    samples = swaps((1e-6, 1e-6))
    samples["warmup"] = swaps((1.0, 1.0), layer_bytes=(33_280, 0))["swaps"]
    run = made(samples)
    assert run.row("transfer_bytes_difference").value == 2 * 33_280
    assert run.row("swap_out_gb_s").value == pytest.approx(66.56)
