"""Live bytes of real stores against the formula, and weights counted once (A01, A15, A24)."""

import pytest
import torch
from torch import nn

from kvbench.errors import KvbenchError
from kvbench.formats.kv import KV_FORMATS
from kvbench.runners import storage

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
    measured = storage.run(runner_context("storage", kv_format=fmt, scale=scale, batch=2, context=33))
    payload, scales, dtype = EXPECTED[fmt]
    assert measured.samples["layers"] == [
        {
            "layer": i,
            "payload": payload,
            "scales": scales,
            "expected_payload": payload,
            "expected_scales": scales,
            "dtype": dtype,
        }
        for i in range(4)
    ]
    facts = measured.facts
    assert (facts["tokens"], facts["page_table_bytes"]) == (96, 6 * 8)
    assert facts["native16_bytes"] == 4 * 12288
    assert facts["native_dtype"] == "float32"


def test_a24_t4_what_a_cpu_cannot_measure_is_null(runner_context):
    facts = storage.run(runner_context("storage", batch=1, context=16)).facts
    assert facts["device_peak_bytes"] is None
    assert facts["workspace_bytes"] is None
    assert facts["held_bytes"] is None


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
    plain = runner_context("storage").engine

    def engine(**size):
        made = plain(**size)
        use(kv_of(made) * (1 + copy))
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

    def kv_of(made):
        return sum(made.store.live_bytes(i).total for i in range(4))

    use(storage.weights_bytes(runner_context("storage").model.model) + HELD)
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


def parts(facts, kv):
    return facts["weights_bytes"] + facts["held_bytes"] + kv + facts["workspace_bytes"]


def test_a24_t2_the_peak_is_the_cells_own_and_its_parts_add_up(runner_context, monkeypatch):
    """The big cell first."""
    found = facts_on_a_counting_device(runner_context, monkeypatch, (500, 20), copy=0)
    for context, (facts, kv) in found.items():
        assert (facts["held_bytes"], facts["workspace_bytes"]) == (HELD, (context - 1) * 1000)
        assert parts(facts, kv) == facts["device_peak_bytes"]


def test_a24_t2_a_second_copy_of_the_pages_is_in_no_part(runner_context, monkeypatch):
    (facts, kv) = facts_on_a_counting_device(runner_context, monkeypatch, (500,), copy=1)[500]
    assert facts["device_peak_bytes"] - parts(facts, kv) == kv


@pytest.mark.parametrize(("tokens", "slots"), [(1, 16), (15, 16), (16, 16), (17, 32)])
def test_a07_t1_pages_are_counted_at_their_edges(runner_context, tokens, slots):
    assert storage.run(runner_context("storage", batch=1, context=tokens)).facts["tokens"] == slots


def test_a01_t1_a_store_that_is_native_under_int8_shows_in_the_bytes(runner_context):
    ctx = runner_context("storage", kv_format="int8_sym", batch=2, context=33)
    engine = ctx.engine
    native = ctx.native

    def dropped(**size):
        made = engine(**size)
        made.store = native(**size).store
        return made

    object.__setattr__(ctx, "engine", dropped)
    layer = storage.run(ctx).samples["layers"][0]
    assert (layer["dtype"], layer["payload"], layer["expected_payload"]) == ("float32", 24576, 6144)
    assert (layer["scales"], layer["expected_scales"]) == (0, 768)


def test_a_store_of_another_size_than_asked_is_refused(runner_context):
    ctx = runner_context("storage", batch=2, context=33)
    engine = ctx.engine
    object.__setattr__(
        ctx, "engine", lambda sequences, tokens: engine(sequences=sequences + 1, tokens=tokens)
    )
    with pytest.raises(KvbenchError, match="use 6 pages, but the store has 9"):
        storage.run(ctx)


def test_a15_t3_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embedding = nn.Embedding(49152, 576, dtype=torch.bfloat16)
            self.head = nn.Linear(576, 49152, bias=False, dtype=torch.bfloat16)
            if tied:
                self.head.weight = self.embedding.weight
            self.register_buffer("table", torch.zeros(1000), persistent=False)

    assert storage.weights_bytes(Tied(True)) == 56_623_104
    assert storage.weights_bytes(Tied(False)) == 2 * 56_623_104


def test_weights_of_one_file_are_not_taken_for_tied():
    """Two parameters that are slices of one mapped buffer share a storage and are still two."""

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.zeros(120)
            self.a, self.b = nn.Parameter(whole[:40]), nn.Parameter(whole[60:])

    assert storage.weights_bytes(Mapped()) == 400
