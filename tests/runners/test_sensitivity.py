"""The cost of each part of the cache: exact where the answer is known, and on a model with a bad layer."""

from types import SimpleNamespace

import pytest
import torch

from kvbench.errors import KvbenchError, UsageError
from kvbench.formats.kv import KV_FORMATS
from kvbench.metrics import sensitivity as derived
from kvbench.runners import sensitivity
from kvbench.runners.sensitivity import Part, Writes, suggest
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize

SMALL = {"documents": 2, "tokens": 24}
BASELINE = SimpleNamespace()
WRONG = "the parts are not what this cell stores"


def measured(make, **keys):
    return sensitivity.run(make("sensitivity", BASELINE, **{**SMALL, "kv_format": "int8_sym", **keys}))


def by_part(found):
    return {(part["kind"], part["of"]): part["texts"] for part in found.samples["parts"]}


def total(texts):
    return sum(kld for _, kld, _ in texts)


def rows(samples, facts, baseline=BASELINE):
    record = SimpleNamespace(samples=samples, facts=facts)
    return {value.metric: value for value in derived.values(record, baseline)}


@pytest.mark.parametrize(
    ("fmt", "scale", "piece"),
    [("int8_sym", None, 7), ("int8_sym", None, 512), ("fp8_e4m3", None, 512), ("int8_static", 0.05, 512),
     ("fp8_e4m3_static", {"k": 0.02, "v": 0.01}, 7)],
)  # fmt: skip
def test_everything_quantized_is_the_cell_s_own_engine_to_the_last_bit(runner_context, fmt, scale, piece):
    """Dynamic and given scales, K's and V's apart, in one forward and in pieces."""
    found = measured(runner_context, kv_format=fmt, scale=scale, prefill_chunk=piece)
    assert found.facts["largest_logit_difference_from_engine"] == 0
    assert total(by_part(found)["all", None]) > 0


def test_every_layer_side_and_token_range_is_a_part(runner_context):
    found = measured(runner_context, kv_format="fp8_e4m3", budget_pct=0.0)
    parts = by_part(found)
    layers = {(kind, i) for kind in ("alone", "kept") for i in range(4)}
    others = {("side", "k"), ("side", "v"), ("tokens", "first"), ("tokens", "others")}
    assert set(parts) == {("all", None), *others, *layers}
    assert {tuple(n for n, _, _ in texts) for texts in parts.values()} == {(23, 23)}
    assert all(total(texts) > 0 for texts in parts.values())
    assert found.facts["suggested"] == []
    parts = by_part(measured(runner_context, first_tokens=24))  # more than the text has: all of it
    assert parts["tokens", "first"] == parts["all", None]
    assert [kld for _, kld, _ in parts["tokens", "others"]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("start", "expected"), [(0, [False, False, True, True, False]), (3, [True, False, False, False, False])]
)
def test_tokens_are_counted_from_the_head_of_the_text(start, expected):
    """Part [2, 4) of layer 0 in a forward that begins at `start`; other layers are left alone."""
    writes = Writes(SimpleNamespace(store=SimpleNamespace(fmt=KV_FORMATS["int8_sym"])))
    writes.part, writes.start = Part("tokens", "some", frozenset({0}), "k", first=2, end=4), start
    x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    k, v = writes.before_write(0, torch.arange(5), x, x)
    assert (k != x).flatten(1).any(1).tolist() == expected
    assert v is x
    made = QUANTIZE["int8_sym"](x, None)
    assert torch.equal(k[expected], dequantize(made.codes, made.scales, x.dtype)[expected])
    assert all(held is x for held in writes.before_write(1, torch.arange(5), x, x))


def test_a_layer_that_costs_more_is_named_and_kept(runner_context):
    """One layer's given scale is far too large, in K and in V: its loss is the model's."""
    scale = {side: [0.1, 0.1, 50.0, 0.1] for side in "kv"}
    found = measured(runner_context, kv_format="int8_static", scale=scale, budget_pct=80.0)
    values = rows(found.samples, found.facts)
    for metric in ("sens_layer_alone", "sens_layer_gain"):
        assert values[metric].note.startswith("2 documents; layer 2; mean ")
    assert found.facts["suggested"] == [2]
    assert values["sens_kld_suggested"].value < values["sens_kld_all"].value / 5
    assert "layer 2 native: " in values["sens_kld_suggested"].note


def test_a_native_cell_has_native_again_and_no_divergence(runner_context):
    found = sensitivity.run(runner_context("sensitivity", **SMALL))
    assert by_part(found) == {("all", None): [[23, 0.0, 23], [23, 0.0, 23]]}
    ((metric, value),) = rows(found.samples, found.facts, None).items()
    assert (metric, value.value) == ("sens_kld_all", 0.0)


def test_parts_that_are_not_what_the_cell_stores_are_an_error(runner_context, monkeypatch):
    """The emulated K is off by one part in a thousand: its KLD would look like any other."""
    honest = sensitivity.dequantize
    monkeypatch.setattr(sensitivity, "dequantize", lambda *args: honest(*args) * 1.001)
    with pytest.raises(KvbenchError, match=WRONG):
        measured(runner_context)


def changed_logits(monkeypatch, backend, change):
    """`change(logits, own)` makes the logits; own: of the cell's engine, not of the emulator."""
    honest = sensitivity._Texts._logits

    def logits(self, engine, ids, writes, part):
        return change(honest(self, engine, ids, writes, part), writes is None)

    monkeypatch.setattr(sensitivity, "backend_label", lambda engine: backend)
    monkeypatch.setattr(sensitivity._Texts, "_logits", logits)


def skipping(monkeypatch, skips):
    """The emulation leaves native what `skips(part, layer)` says."""
    honest = Writes.before_write

    def before_write(self, layer, slots, k, v):
        skipped = self.part and skips(self.part, layer)
        return (k, v) if skipped else honest(self, layer, slots, k, v)

    monkeypatch.setattr(Writes, "before_write", before_write)


@pytest.mark.parametrize("layer", range(4))
def test_an_emulation_that_skips_a_layer_is_an_error_on_every_backend(runner_context, monkeypatch, layer):
    monkeypatch.setattr(sensitivity, "backend_label", lambda engine: "triton")
    skipping(monkeypatch, lambda part, at: at == layer)
    with pytest.raises(
        KvbenchError, match=r"\(up to 0\.001 of the largest, .* in float32\): the parts are not"
    ):
        measured(runner_context)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.125), ("float16", 0.125)])
def test_logits_of_other_kernels_may_be_so_far_apart_and_no_farther(runner_context, monkeypatch, dtype, most):
    """Native, so both engines give the same logits; the emulator's are moved by a share of the largest."""
    share = 0.9
    changed_logits(monkeypatch, "triton", lambda x, own: x if own else x + share * most * x.abs().max())
    ctx = runner_context("sensitivity", dtype=dtype, documents=1, tokens=24)
    facts = sensitivity.run(ctx).facts
    moved = share * most * facts["largest_logit"]
    assert facts["largest_logit_difference_from_engine"] == pytest.approx(moved, rel=0.1)
    share = 1.1
    with pytest.raises(KvbenchError, match=WRONG):
        sensitivity.run(ctx)


@pytest.mark.parametrize(("wrong", "backend"), [("nan", "torch"), ("nan", "triton"), ("inf", "triton")])
def test_own_logits_that_are_no_numbers_are_an_error(runner_context, monkeypatch, wrong, backend):
    at, new = (torch.tensor([3]), torch.tensor([5])), torch.tensor(float(wrong))
    changed_logits(monkeypatch, backend, lambda x, own: x.index_put(at, new) if own else x)
    with pytest.raises(KvbenchError, match=f"a logit differs by {wrong} from the engine in int8_sym"):
        measured(runner_context)


@pytest.mark.parametrize("kinds", [("side",), ("tokens",), ("alone",), ("side", "tokens", "alone", "kept")])
def test_parts_that_nothing_was_quantized_of_are_an_error(runner_context, monkeypatch, kinds):
    skipping(monkeypatch, lambda part, layer: part.kind in kinds)
    named = ", ".join(kind for kind in kinds if kind != "kept")
    with pytest.raises(KvbenchError, match=f"every part of kind {named} costs exactly 0"):
        measured(runner_context)


def part(kind, of, *klds):
    return {"kind": kind, "of": of, "texts": [[10, kld * 10, 10] for kld in klds]}


def test_one_part_may_cost_nothing_and_so_may_all_where_the_whole_does():
    some = [part("all", None, 1.0), part("alone", 0, 0.0), part("alone", 1, 0.5), part("side", "k", 0.0)]
    assert sensitivity.untouched(some) == "side"
    assert sensitivity.untouched([*some, part("side", "v", 1.0)]) == ""
    assert sensitivity.untouched([part("all", None, 0.0), part("alone", 0, 0.0)]) == ""
    assert sensitivity.untouched([part("all", None, 1.0)]) == ""


def test_the_store_writes_as_before_afterwards_and_too_few_documents_are_refused(runner_context):
    ctx = runner_context("sensitivity", BASELINE, kv_format="int8_sym", **SMALL)
    native, like = ctx.emulator(1, 16), ctx.engine(1, 16)
    with pytest.raises(ZeroDivisionError), native.store.observed(Writes(like)):
        1 / 0  # noqa: B018
    assert native.store.observers == ()
    with pytest.raises(UsageError, match="documents, but 100000"):
        measured(runner_context, documents=100_000)


@pytest.mark.parametrize(
    ("room", "extra", "chosen"),
    [
        (0.0, [1, 1, 1], []), (1.0, [1, 1, 1], [1]), (2.0, [1, 1, 1], [1, 2]),
        (99.0, [1, 1, 1], [1, 2]),  # layer 0 gains nothing by being native
        (2.0, [1, 2, 0.5], [1]),  # 0.25 a byte against 0.2; what is left fits nothing
        (2.0, [1, 4, 0.5], [2]),
        (2.0, [1, 0, 0.5], [2]),  # a layer that takes no more bytes is native already
    ],
)  # fmt: skip
def test_layers_are_chosen_by_what_they_gain_a_byte(room, extra, chosen):
    found = [part("all", None, 1.0), part("kept", 0, 1.1), part("kept", 1, 0.5), part("kept", 2, 0.9)]
    assert suggest(found, extra, room) == chosen


def test_values_are_means_over_tokens_with_intervals_over_texts():
    parts = [part("all", None, 0.1, 0.3), part("kept", 0, 0.05, 0.15), part("alone", 0, 0.02, 0.02)]
    facts = {"suggested": [], "extra_bytes_per_token": [5.0], "suggested_extra_bytes_per_token": 0.0}
    facts |= {"budget_bytes_per_token": 1.0, "budget_pct": 10.0, "quantized_bytes_per_token": 10.0}
    found = rows({"parts": parts}, facts)
    assert found["sens_kld_all"].value == pytest.approx(0.2)
    gain, suggested = found["sens_layer_gain"], found["sens_kld_suggested"]
    assert (gain.value, gain.units) == (pytest.approx(0.1), 2)
    # t with one degree of freedom is 12.706; the gains are 0.05 and 0.15, so the mean's error is 0.05
    assert gain.high == pytest.approx(0.1 + 12.7062 * 0.05, rel=1e-4)
    assert found["sens_layer_alone"].value == pytest.approx(0.02)
    assert (suggested.value, suggested.note) == (None, "no layer fits 10% more bytes; one takes 50.0%")
