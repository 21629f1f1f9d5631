"""The cost of each part of the cache: exact where the answer is known, and on a model with a bad layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.errors import KvbenchError, UsageError
from kvbench.formats.kv import KV_FORMATS
from kvbench.metrics import sensitivity as derived
from kvbench.runners import sensitivity
from kvbench.runners.sensitivity import Part, Writes, suggest
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize

SMALL = {"documents": 2, "tokens": 24}
BASELINE: Any = SimpleNamespace()


def measured(make, **keys):
    return sensitivity.run(make("sensitivity", BASELINE, **{**SMALL, **keys}))


def by_part(found):
    return {(part["kind"], part["of"]): part["texts"] for part in found.samples["parts"]}


def total(texts):
    return sum(kld for _, kld, _ in texts)


@pytest.mark.parametrize(
    ("fmt", "scale"), [("int8_sym", None), ("fp8_e4m3", None), ("int8_static", 0.05), ("fp8_e4m3_static", {"k": 0.02, "v": 0.01})]
)  # fmt: skip
@pytest.mark.parametrize("piece", [7, 512])
def test_everything_quantized_is_the_cell_s_own_engine_to_the_last_bit(runner_context, fmt, scale, piece):
    """Dynamic and given scales, K's and V's apart, in one forward and in pieces."""
    found = measured(runner_context, kv_format=fmt, scale=scale, prefill_chunk=piece)
    assert found.facts["largest_logit_difference_from_engine"] == 0
    assert total(by_part(found)["all", None]) > 0


def test_every_layer_side_and_token_range_is_a_part(runner_context):
    found = measured(runner_context, kv_format="fp8_e4m3", budget_pct=0.0)
    parts = by_part(found)
    layers = {(kind, i) for kind in ("alone", "kept") for i in range(4)}
    assert set(parts) == {
        ("all", None), ("side", "k"), ("side", "v"), ("tokens", "first"), ("tokens", "others"), *layers
    }  # fmt: skip
    assert {tuple(n for n, _, _ in texts) for texts in parts.values()} == {(23, 23)}
    assert all(total(texts) > 0 for texts in parts.values())
    assert found.facts["suggested"] == []


def test_first_tokens_beyond_the_text_are_all_of_it(runner_context):
    parts = by_part(measured(runner_context, kv_format="int8_sym", first_tokens=24))
    assert parts["tokens", "first"] == parts["all", None]
    assert [kld for _, kld, _ in parts["tokens", "others"]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("start", "expected"), [(0, [False, False, True, True, False]), (3, [True, False, False, False, False])]
)
def test_tokens_are_counted_from_the_head_of_the_text(start, expected):
    """Part [2, 4) of a forward whose first token stands at `start`."""
    like = SimpleNamespace(fmt=KV_FORMATS["int8_sym"])
    writes = Writes(SimpleNamespace(store=like))
    writes.part, writes.start = Part("tokens", "some", frozenset({0}), "k", first=2, end=4), start
    x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    held = writes.before_write(0, torch.arange(5), x, x)
    assert (held[0] != x).flatten(1).any(1).tolist() == expected
    assert torch.equal(held[1], x)
    made = QUANTIZE["int8_sym"](x, None)
    back = dequantize(made.codes, made.scales, x.dtype)
    assert torch.equal(held[0][expected], back[expected])


def test_another_layer_s_writes_are_left_alone():
    writes = Writes(SimpleNamespace(store=None))
    writes.part = Part("alone", 1, frozenset({1}))
    x = torch.randn(3, 2, 16)
    held = writes.before_write(0, torch.arange(3), x, x)
    assert held[0] is x
    assert held[1] is x


def test_a_layer_that_costs_more_is_named_and_kept(runner_context):
    """One layer's given scale is far too large, in K and in V: its loss is the model's."""
    scales = [0.1, 0.1, 50.0, 0.1]
    found = measured(
        runner_context, kv_format="int8_static", scale={"k": scales, "v": scales}, budget_pct=80.0
    )
    rows = {value.metric: value for value in derived.values(found_record(found), BASELINE)}
    assert rows["sens_layer_alone"].note.startswith("2 documents; layer 2; mean ")
    assert rows["sens_layer_gain"].note.startswith("2 documents; layer 2; mean ")
    assert found.facts["suggested"] == [2]
    assert rows["sens_kld_suggested"].value < rows["sens_kld_all"].value / 5
    assert "layer 2 native: " in rows["sens_kld_suggested"].note


def found_record(found):
    return SimpleNamespace(samples=found.samples, facts=found.facts)


def test_a_native_cell_has_native_again_and_no_divergence(runner_context):
    found = sensitivity.run(runner_context("sensitivity", **SMALL))
    assert by_part(found) == {("all", None): [[23, 0.0, 23], [23, 0.0, 23]]}
    (value,) = derived.values(found_record(found), None)
    assert (value.metric, value.value) == ("sens_kld_all", 0.0)


def test_parts_that_are_not_what_the_cell_stores_are_an_error(runner_context, monkeypatch):
    """The emulated K is off by one part in a thousand: its KLD would look like any other."""
    honest = sensitivity.dequantize
    monkeypatch.setattr(sensitivity, "dequantize", lambda *args: honest(*args) * 1.001)
    with pytest.raises(KvbenchError, match="the parts are not what this cell stores"):
        measured(runner_context, kv_format="int8_sym")


def changed_logits(monkeypatch, change):
    """`change(logits, own)` makes the logits; own: of the cell's engine, not of the emulator."""
    honest = sensitivity._Texts._logits

    def logits(self, engine, ids, writes, part):
        return change(honest(self, engine, ids, writes, part), writes is None)

    monkeypatch.setattr(sensitivity._Texts, "_logits", logits)


def elsewhere(monkeypatch):
    """A backend whose kernels may round elsewhere."""
    monkeypatch.setattr(sensitivity, "backend_label", lambda engine: "triton")


def skipping(monkeypatch, skips):
    """The emulation leaves native what `skips(part, layer)` says."""
    honest = Writes.before_write

    def before_write(self, layer, slots, k, v):
        skipped = self.part and skips(self.part, layer)
        return (k, v) if skipped else honest(self, layer, slots, k, v)

    monkeypatch.setattr(Writes, "before_write", before_write)


@pytest.mark.parametrize("layer", range(4))
def test_an_emulation_that_skips_a_layer_is_an_error_on_every_backend(runner_context, monkeypatch, layer):
    elsewhere(monkeypatch)
    skipping(monkeypatch, lambda part, at: at == layer)
    with pytest.raises(
        KvbenchError, match=r"\(up to 0\.001 of the largest, .*, is rounding in float32\): the parts are not"
    ):
        measured(runner_context, kv_format="int8_sym")


@pytest.mark.parametrize(("share", "stands"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.125), ("float16", 0.125)])
def test_logits_of_other_kernels_may_be_so_far_apart_and_no_farther(
    runner_context, monkeypatch, dtype, most, share, stands
):
    """Native, so both engines give the same logits; the emulator's are moved by a share of the largest."""
    elsewhere(monkeypatch)
    changed_logits(monkeypatch, lambda x, own: x if own else x + share * most * x.abs().max())
    ctx = runner_context("sensitivity", dtype=dtype, documents=1, tokens=24)
    if stands:
        facts = sensitivity.run(ctx).facts
        moved = share * most * facts["largest_logit"]
        assert facts["largest_logit_difference_from_engine"] == pytest.approx(moved, rel=0.1)
    else:
        with pytest.raises(KvbenchError, match="the parts are not what this cell stores"):
            sensitivity.run(ctx)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_logits_of_the_own_engine_that_are_no_numbers_are_an_error(
    runner_context, monkeypatch, backend, wrong
):
    monkeypatch.setattr(sensitivity, "backend_label", lambda engine: backend)
    at = (torch.tensor([3]), torch.tensor([5]))
    new = torch.tensor(wrong)
    changed_logits(monkeypatch, lambda x, own: x.index_put(at, new) if own else x)
    with pytest.raises(KvbenchError, match=f"a logit differs by {wrong} from the engine in int8_sym"):
        measured(runner_context, kv_format="int8_sym")


@pytest.mark.parametrize("kinds", [("side",), ("tokens",), ("alone",), ("side", "tokens", "alone", "kept")])
def test_parts_that_nothing_was_quantized_of_are_an_error(runner_context, monkeypatch, kinds):
    skipping(monkeypatch, lambda part, layer: part.kind in kinds)
    named = ", ".join(kind for kind in kinds if kind != "kept")
    with pytest.raises(KvbenchError, match=f"every part of kind {named} costs exactly 0"):
        measured(runner_context, kv_format="int8_sym")


def test_one_part_may_cost_nothing_and_so_may_all_where_the_whole_does():
    some = [part("all", None, 1.0), part("alone", 0, 0.0), part("alone", 1, 0.5), part("side", "k", 0.0)]
    assert sensitivity.untouched(some) == "side"
    assert sensitivity.untouched([*some, part("side", "v", 1.0)]) == ""
    assert sensitivity.untouched([part("all", None, 0.0), part("alone", 0, 0.0)]) == ""
    assert sensitivity.untouched([part("all", None, 1.0)]) == ""


def test_the_store_writes_as_before_afterwards(runner_context):
    ctx = runner_context("sensitivity", BASELINE, kv_format="int8_sym", **SMALL)
    native, like = ctx.emulator(1, 16), ctx.engine(1, 16)
    with pytest.raises(ZeroDivisionError), native.store.observed(Writes(like)):
        1 / 0  # noqa: B018
    assert native.store.observers == ()


def test_a_corpus_with_fewer_documents_is_refused(runner_context):
    with pytest.raises(UsageError, match="documents, but 100000"):
        measured(runner_context, kv_format="int8_sym", documents=100_000)


# The list


def part(kind, of, kld):
    return {"kind": kind, "of": of, "texts": [[10, kld * 10, 10]]}


@pytest.mark.parametrize(
    ("room", "extra", "chosen"),
    [
        (0.0, [1, 1, 1], []),
        (1.0, [1, 1, 1], [1]),
        (2.0, [1, 1, 1], [1, 2]),
        (99.0, [1, 1, 1], [1, 2]),  # layer 0 gains nothing by being native
        (2.0, [1, 2, 0.5], [1]),  # 0.25 a byte against 0.2; what is left fits nothing
        (2.0, [1, 4, 0.5], [2]),
        (2.0, [1, 0, 0.5], [2]),  # a layer that takes no more bytes is native already
    ],
)
def test_layers_are_chosen_by_what_they_gain_a_byte(room, extra, chosen):
    found = [part("all", None, 1.0), part("kept", 0, 1.1), part("kept", 1, 0.5), part("kept", 2, 0.9)]
    assert suggest(found, extra, room) == chosen


def test_values_are_means_over_tokens_with_intervals_over_texts():
    parts = [
        {"kind": "all", "of": None, "texts": [[10, 1.0, 9], [10, 3.0, 8]]},
        {"kind": "kept", "of": 0, "texts": [[10, 0.5, 9], [10, 1.5, 8]]},
        {"kind": "alone", "of": 0, "texts": [[10, 0.2, 9], [10, 0.2, 8]]},
    ]
    facts = {"suggested": [], "extra_bytes_per_token": [5.0], "suggested_extra_bytes_per_token": 0.0}
    facts |= {"budget_bytes_per_token": 1.0, "budget_pct": 10.0, "quantized_bytes_per_token": 10.0}
    found: Any = SimpleNamespace(samples={"parts": parts}, facts=facts)
    rows = {v.metric: v for v in derived.values(found, BASELINE)}
    assert rows["sens_kld_all"].value == pytest.approx(0.2)
    gain = rows["sens_layer_gain"]
    assert (gain.value, gain.units) == (pytest.approx(0.1), 2)
    # t with one degree of freedom is 12.706; the gains are 0.05 and 0.15, so the mean's error is 0.05
    assert gain.high == pytest.approx(0.1 + 12.7062 * 0.05, rel=1e-4)
    assert rows["sens_layer_alone"].value == pytest.approx(0.02)
    assert rows["sens_kld_suggested"].value is None
    assert rows["sens_kld_suggested"].note == "no layer fits 10% more bytes; one takes 50.0%"
