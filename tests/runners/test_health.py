"""Numeric health: exact on made tensors, and telling on a real store with good and bad scales."""

import math
from types import SimpleNamespace

import pytest
import torch

from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.formats.kv import KV_FORMATS
from kvbench.gate.evaluate import evaluate
from kvbench.gate.verdict import FAIL
from kvbench.metrics import health as derived
from kvbench.records.record import LEVELS, VERIFIED, Level
from kvbench.runners import health
from kvbench_kernels.kv.quantize import QUANTIZE
from tests.factories.runs.made import MadeRun, evidence


def sides(runner_context, fmt="int8_sym", scale=None, **options):
    measured = health.run(runner_context("health", kv_format=fmt, scale=scale, tokens=40, **options))
    return measured.samples["sides"], measured.facts


def rows(found):
    return {v.metric: v for v in derived.values(SimpleNamespace(samples={"sides": found}), None)}


def test_numbers_of_one_side_are_exact():
    """Static INT8, scale 0.5: 100 is clipped to 63.5, 0.2 rounds to zero, 1.2 becomes 1.0, -3 stays."""
    x = torch.tensor([[[100.0, 0.2, 1.2, -3.0]]])
    q = QUANTIZE["int8_static"](x, torch.tensor(0.5))
    side = health.Side(KV_FORMATS["int8_static"])
    side.add(x, q.codes, torch.tensor([0.5]))
    found = side.numbers()
    expected = {"elements": 4, "clipped": 1, "flushed": 1, "codes_used": 4, "amax": 100.0}
    expected |= {"scales_log2": {"-1": 1}, "scale_min": 0.5, "scale_max": 0.5}
    assert found.items() >= expected.items()
    x64 = x.double()
    error = math.sqrt(36.5**2 + x64[0, 0, 1].item() ** 2 + (x64[0, 0, 2].item() - 1) ** 2)
    assert found["error"] == pytest.approx(error / x64.norm().item(), rel=1e-12)
    assert found["bound_share"] == pytest.approx(0.2 / 0.250001, rel=1e-6)  # the clipped one has no bound


def test_chunks_add_up_to_the_whole():
    torch.manual_seed(0)
    x = torch.randn(12, 2, 16)
    q = QUANTIZE["fp8_e4m3"](x, None)
    whole, parts = health.Side(KV_FORMATS["fp8_e4m3"]), health.Side(KV_FORMATS["fp8_e4m3"])
    whole.add(x, q.codes, q.scales)
    for at in (slice(0, 5), slice(5, 12)):
        parts.add(x[at], q.codes[at], q.scales[at])
    one, other = whole.numbers(), parts.numbers()
    for key in ("error", "rms"):
        assert other.pop(key) == pytest.approx(one.pop(key), rel=1e-12)
    assert one == other


@pytest.mark.parametrize(("fmt", "chunk"), [("int8_sym", 512), ("int8_sym", 7), ("fp8_e4m3", 512)])
def test_a_dynamic_format_clips_nothing_and_keeps_its_bound(runner_context, fmt, chunk):
    found, facts = sides(runner_context, fmt, prefill_chunk=chunk)
    assert [(s["layer"], s["side"]) for s in found] == [(layer, side) for layer in range(4) for side in "kv"]
    assert facts["format"] == fmt
    for side in found:
        assert (side["elements"], side["clipped"]) == (40 * 2 * 16, 0)
        assert 0 < side["bound_share"] <= 1
        assert 0 < side["error"] < 0.05
        assert sum(side["scales_log2"].values()) == 40 * 2
        assert 60 < side["codes_used"] <= 255
    assert list(derived.faults(SimpleNamespace(samples={"sides": found}, facts=facts), 4)) == []


def test_native_has_no_error_and_no_codes(runner_context):
    found, facts = sides(runner_context, "native")
    assert all(s["error"] == 0 and s["bound_share"] == 0 and s["codes_used"] is None for s in found)
    assert "health_codes_min" not in rows(found)
    assert rows(found)["health_amax"].value > 0
    assert list(derived.faults(SimpleNamespace(samples={"sides": found}, facts=facts), 4)) == []


def test_a_scale_too_large_flushes_and_one_too_small_clips(runner_context):
    large, small = (rows(sides(runner_context, "int8_static", scale=s)[0]) for s in (1.0, 0.001))
    assert large["health_flush_share"].value > 0.2
    assert large["health_clip_share"].value == 0
    assert large["health_codes_min"].value < 20
    assert small["health_clip_share"].value > 0.5
    assert small["health_flush_share"].value < 0.01


def test_one_bad_layer_is_named(runner_context, monkeypatch):
    """Layer 1 stores V at half its size: the mean moves a little, the worst says where."""
    right = PagedKVStore.write

    def halved(self, layer, slots, k, v):
        right(self, layer, slots, k, v * (0.5 if layer == 1 else 1.0))

    monkeypatch.setattr(PagedKVStore, "write", halved)
    found = rows(sides(runner_context, "int8_sym")[0])
    assert found["health_error_max"].value == pytest.approx(0.5, abs=0.01)
    assert found["health_error_max"].note.startswith("worst: layer 1 V; mean 0.06")
    assert found["health_bound_share"].value > 10


# Sides that cannot be


def side(layer, name, **numbers):
    plain = {"amax": 1.0 + layer, "rms": 0.5, "error": 0.01, "bound_share": 0.5, "clipped": 0, "flushed": 0}
    codes = {"codes_used": 8, "scale_min": 0.1, "scale_max": 0.2, "nonfinite": 0, "scales_log2": {"-4": 2}}
    return {"layer": layer, "side": name, "elements": 8, **plain, **codes, **numbers}


def whole(layers=3):
    return [side(layer, name, rms=0.5 + (name == "v")) for layer in range(layers) for name in "kv"]


def judged(found, fmt="int8_sym", layers=3):
    """What the gate finds on a candidate of that format with so many layers (None: no number)."""
    native = ({"sides": whole()}, {"format": "native"})
    run = MadeRun(fmt).measure("health", ({"sides": found}, {"format": fmt}), native)
    facts = {"E1": {"layers": layers} if layers else {}}
    levels = [Level(name, VERIFIED, "as it should be", facts.get(name, {})) for name in LEVELS]
    run.change("cand", evidence=evidence(fmt, *levels))
    outcomes = evaluate(None, run.run, run.rows()).outcomes
    faults = [o for o in outcomes if (o.check, o.status) == ("plausible", FAIL)]
    assert {o.reason for o in faults} <= {"impossible_sides"}
    return [o.sentence.partition(": ")[2] for o in faults]


@pytest.mark.parametrize(
    ("sides", "layers", "fault"),
    [
        (whole(), 3, None), (whole(), None, None),
        (whole()[:2], 3, "layer 1 K is missing"), (whole()[:-1], 3, "layer 2 V is missing"),
        (whole()[:-1], None, "layer 2 V is missing"),
        ([*whole(), side(1, "v")], 3, "layer 1 V is given 2 times"), (whole(4), 3, "layer 3 K is given"),
    ],
)  # fmt: skip
def test_each_layer_of_the_store_has_k_and_v_once(sides, layers, fault):
    found = judged(sides, layers=layers)
    assert len(found) == (fault is not None)
    assert all(fault in sentence for sentence in found)


def test_a_layer_with_the_numbers_of_another_or_without_a_loss_is_impossible():
    copied = [{**one, "layer": layer} for layer in range(3) for one in whole()[:2]]
    assert judged(copied) == ["layer 1 K has the numbers of layer 0 K, to the last digit (and 3 more)."]
    near = [{**one, "rms": one["rms"] + 1e-9 * one["layer"]} for one in copied]
    assert judged(near) == []
    assert judged([{**one, "amax": 0.0, "error": 0.0} for one in copied]) == []
    found = whole()
    found[3]["error"] = 0.0
    assert judged(found) == ["layer 1 V lost nothing (error 0) in int8_sym, though it holds values up to 2."]
    assert judged(found, "native") == []
