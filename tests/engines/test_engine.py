"""The engine against plain transformers, for prefill and for decode over the pages."""

import pytest
import torch

from kvbench.errors import KvbenchError, Refused
from kvbench.formats.kv import KV_FORMATS

FAMILIES = [
    "tiny-llama",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-mistral",
    "tiny-gemma2",
    "tiny-gpt-oss",
    "tiny-deepseek-v2",
]


def close(kv_format):
    """Largest logit difference between runs that batch the same tokens otherwise.

    Native: float32 rounding of other GEMM shapes. Quantized: such a rounding can carry a K/V element over a tie, and
    its code moves by one whole step; equality bit for bit at equal K/V is the store's own test (tests/unit).
    """
    return 1e-4 if kv_format == "native" else 5e-3


def ids(n, seed=0):
    return torch.randint(0, 250, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def plain():
    """Logits [n, V] of the same weights through transformers' own eager attention."""
    import copy

    twins = {}

    def forward(loaded, tokens):
        if id(loaded) not in twins:
            twins[id(loaded)] = copy.deepcopy(loaded.model)
            twins[id(loaded)].set_attn_implementation("eager")
        with torch.inference_mode():
            return twins[id(loaded)](input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    return forward


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_native_prefill_equals_transformers(engine, plain, family, length):
    made = engine(family)
    tokens = ids(length)
    got = made.prefill(made.add(), tokens, "all")
    torch.testing.assert_close(got, plain(made.model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [1, 15, 16, 17, 31])
def test_native_decode_over_pages_equals_transformers(engine, plain, family, start):
    made = engine(family)
    tokens = ids(start + 4)
    reference = plain(made.model, tokens)
    seq = made.add()
    made.prefill(seq, tokens[:start])
    for at in range(start, start + 4):
        torch.testing.assert_close(made.decode([seq], [tokens[at]])[0], reference[at], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["tiny-llama", "tiny-mistral", "tiny-gemma2"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_chunked_prefill_equals_one_pass(engine, plain, family, chunk):
    made = engine(family, prefill_chunk=chunk)
    tokens = ids(40)
    torch.testing.assert_close(
        made.prefill(made.add(), tokens, "all"), plain(made.model, tokens), atol=1e-4, rtol=0
    )


def test_a10_t2_soft_cap_and_window_are_seen_by_this_test(tiny, plain):
    """The comparison above would be blind if the cap or the window changed nothing on these weights."""
    import copy

    loaded, tokens = tiny("tiny-gemma2"), ids(40)
    reference = plain(loaded, tokens)
    for name in ("attn_logit_softcapping", "sliding_window"):
        twin = copy.deepcopy(loaded.model)
        twin.set_attn_implementation("eager")
        # Q and K of these tiny weights give small scores; a gain brings the cap into play, as trained models do.
        for attention in (layer.self_attn for layer in twin.model.layers):
            attention.q_proj.weight.data *= 12
            attention.k_proj.weight.data *= 12
        with torch.inference_mode():
            on = twin(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            for attention in (layer.self_attn for layer in twin.model.layers):
                setattr(attention, name, None)
            if name == "sliding_window":
                twin.config.sliding_window = 4096
            off = twin(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        assert (on - off).abs().max() > 1e-3, name
    assert reference.isfinite().all()


def test_a10_t2_logits_with_a_working_soft_cap_equal_eager(tiny):
    """Q/K gain x12: the capped scores reach the cap's bend, and the engine must follow eager there."""
    import copy

    from kvbench.engines.reference.binding import bind
    from kvbench.engines.reference.engine import Engine
    from kvbench.engines.reference.load import LoadedModel
    from kvbench.matrix.cells import CELL_KEYS
    from kvbench.matrix.resolve_backend import Request, resolve

    source = tiny("tiny-gemma2")
    model = copy.deepcopy(source.model)
    for attention in (layer.self_attn for layer in model.model.layers):
        attention.q_proj.weight.data *= 12
        attention.k_proj.weight.data *= 12
        del attention.kvbench_handle
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    binding = bind(model, source.facts, torch.device("cpu"))
    loaded = LoadedModel(
        model, source.tokenizer, source.facts, binding, "x", "x", source.device, source.dtype, True
    )
    decision = resolve(Request("native", "native", "torch", "refuse"), loaded.facts)
    made = Engine(loaded, decision, dict(CELL_KEYS), sequences=1, tokens=48)
    tokens = ids(40)
    with torch.inference_mode():
        reference = eager(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(made.prefill(made.add(), tokens, "all"), reference, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3", "int8_static", "fp8_e4m3_static"])
def test_a07_t5_ragged_batches_equal_solo_runs(engine, kv_format):
    """Batch 4 -> 2 -> 3 with unequal lengths: every row is what it is alone."""
    prompts = [ids(n, seed=n) for n in (5, 17, 16, 33)]
    solo = []
    for prompt in prompts:
        alone = engine(kv_format=kv_format, sequences=1)
        seq = alone.add()
        solo.append([alone.prefill(seq, prompt)[0], alone.decode([seq], [7])[0], alone.decode([seq], [9])[0]])
    made = engine(kv_format=kv_format, sequences=4)
    seqs = [made.add() for _ in prompts]
    first = made.forward(list(zip(seqs, prompts, strict=True)))
    for row, want in zip(first, solo, strict=True):
        torch.testing.assert_close(row[0], want[0], atol=close(kv_format), rtol=0)
    made.free(seqs[0])
    made.free(seqs[2])
    for row, at in zip(made.decode([seqs[1], seqs[3]], [7, 7]), (1, 3), strict=True):
        torch.testing.assert_close(row, solo[at][1], atol=close(kv_format), rtol=0)
    again = made.add()
    made.prefill(again, prompts[0])
    made.decode([again], [7])
    rows = made.decode([seqs[1], again, seqs[3]], [9, 9, 9])
    for row, at in zip(rows, (1, 0, 3), strict=True):
        torch.testing.assert_close(row, solo[at][2], atol=close(kv_format), rtol=0)


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3", "int8_static", "fp8_e4m3_static"])
@pytest.mark.parametrize("length", [16, 17, 40])
def test_a08_t2_the_next_logits_after_a_swap_are_the_same(engine, kv_format, length):
    """Swapped out, the pages overwritten with 0x7F, swapped in: a scale left behind would show."""
    made = engine(kv_format=kv_format)
    seq = made.add()
    made.prefill(seq, ids(length))
    expected = made.decode([seq], [7])
    made.truncate(seq, length)
    made.swap_out(seq)
    for pages in made.store.layers:
        for tensor in pages.paged().values():
            tensor.view(torch.uint8).fill_(0x7F)
    made.swap_in(seq)
    assert torch.equal(made.decode([seq], [7]), expected)


def test_a_swapped_sequence_takes_no_forward_and_its_neighbours_do(engine):
    made = engine(kv_format="int8_sym", sequences=3)
    away, here = made.add(), made.add()
    made.forward([(away, ids(17)), (here, ids(20, seed=1))])
    expected = made.decode([here], [7])
    made.truncate(here, 20)
    made.swap_out(away)
    computed = made.computed_tokens
    for use in (
        lambda: made.decode([here, away], [7, 7]),
        lambda: made.prefill(away, [1, 2]),
        lambda: made.fork(away),
        lambda: made.truncate(away, 3),
    ):
        with pytest.raises(KvbenchError, match=f"Sequence {away} is swapped out"):
            use()
    with pytest.raises(KvbenchError, match="Refusing to free swapped pages"):
        made.free(away)
    assert (made.computed_tokens, made.length(here), made.length(away)) == (computed, 20, 17)
    assert torch.equal(made.decode([here], [7]), expected)
    made.discard_swapped(away)
    assert made.store.sequences() == [here]


def test_a_store_that_does_not_fit_is_refused_before_it_is_allocated(engine, monkeypatch):
    """tiny-llama in float32: 4 layers of 2 KV heads of 16, 4,096 B a page and layer native, 1,152 B int8_sym."""
    from kvbench.engines.reference import engine as core

    monkeypatch.setattr(core, "free_bytes", lambda device: 2 * 12 * 4 * 1_152)
    monkeypatch.setattr(core, "PagedKVStore", None)
    with pytest.raises(TypeError):  # as far as the allocation, which is not there
        engine(kv_format="int8_sym", sequences=2, tokens=96)
    with pytest.raises(Refused, match="largest context that fits is 96 tokens") as caught:
        engine(kv_format="int8_sym", sequences=2, tokens=97)
    assert caught.value.reason == "kv_does_not_fit"
    with pytest.raises(Refused, match=r"The native KV cache of 2 sequence.* needs 196,608 B"):
        engine(kv_format="native", sequences=2, tokens=96)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kv_format", [name for name, fmt in KV_FORMATS.items() if fmt.quantized])
def test_a06_t3_a_nonfinite_element_leaves_no_result(engine, kv_format, value):
    """One element of one row, on the V side."""
    made = engine(kv_format=kv_format)
    seq = made.add()
    made.prefill(seq, ids(3))
    made.check_health()
    shape = made.store.shapes[2]
    v = torch.ones(1, shape.kv_heads, shape.value_dim)
    v[0, 1, 5] = value
    made.store.write(2, made.store.slots_for(seq, 1, 1), torch.ones_like(v), v)
    with pytest.raises(KvbenchError, match=r"Layer 2: 1 nonfinite K/V values"):
        made.check_health()


@pytest.mark.parametrize(("value", "word"), [(1e7, "overflow"), (float("nan"), "nonfinite")])
def test_a04_t4_what_the_format_cannot_hold_leaves_no_result(engine, value, word):
    made = engine(kv_format="int8_sym")
    seq = made.add()
    made.prefill(seq, ids(3))
    made.check_health()
    shape = made.store.shapes[1]
    k = torch.full((1, shape.kv_heads, shape.head_dim), value)
    made.store.write(1, made.store.slots_for(seq, 0, 1), k, torch.zeros_like(k))
    with pytest.raises(KvbenchError, match=rf"Layer 1: \d+ {word} K/V values"):
        made.check_health()


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3"])
def test_prefill_and_decode_read_the_same_stored_values(engine, kv_format):
    """Quantize-then-attend: a token sees the same stored K/V whether it came in a chunk or alone."""
    tokens = ids(40)
    whole = engine(kv_format=kv_format)
    at_once = whole.prefill(whole.add(), tokens, "all")
    made = engine(kv_format=kv_format)
    seq = made.add()
    for at, token in enumerate(tokens):
        torch.testing.assert_close(made.decode([seq], [token])[0], at_once[at], atol=close(kv_format), rtol=0)


def test_fresh_prefill_is_another_number_than_stored_prefill(engine):
    tokens = ids(24)
    stored = engine(kv_format="int8_static", scale=0.2)
    fresh = engine(kv_format="int8_static", scale=0.2, prefill_reads="fresh")
    native = engine()
    a, b, c = (e.prefill(e.add(), tokens) for e in (stored, fresh, native))
    torch.testing.assert_close(b, c, atol=1e-5, rtol=0)
    assert not torch.allclose(a, c, atol=1e-4, rtol=0)


def test_forks_share_their_prefix_and_part_ways(engine):
    made = engine(kv_format="int8_sym", sequences=4)
    head, tails = ids(21), [ids(6, seed=5), ids(9, seed=6)]
    root = made.add()
    made.prefill(root, head)
    children = [made.fork(root) for _ in tails]
    rows = made.forward(list(zip(children, tails, strict=True)), "all")
    for row, tail in zip(rows, tails, strict=True):
        alone = engine(kv_format="int8_sym")
        want = alone.prefill(alone.add(), head + tail, "all")[-len(tail) :]
        torch.testing.assert_close(row, want, atol=close("int8_sym"), rtol=0)


def test_a_context_beyond_the_model_is_refused(engine):
    made = engine(tokens=96)
    limit = made.model.facts.max_context
    big = engine(sequences=1, tokens=limit + 16)
    with pytest.raises(Refused, match="exceeds the model's limit") as caught:
        big.forward([(big.add(), ids(limit + 1))])
    assert caught.value.reason == "invalid_context"


def test_a_full_store_says_so(engine):
    made = engine(sequences=1, tokens=16)
    with pytest.raises(KvbenchError, match="page"):
        made.prefill(made.add(), ids(17))


def test_a_model_called_past_its_engine_is_an_error(tiny):
    with pytest.raises(KvbenchError, match="outside of an engine"):
        tiny("tiny-llama").model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_a10_t3_an_attention_argument_that_would_be_dropped_is_refused():
    from kvbench.engines.reference.binding import Binding, _observe

    class Attention(torch.nn.Module):
        is_causal = True

    x = torch.zeros(1, 2, 1, 4)
    call = {
        "module": Attention(),
        "query": x,
        "key": x,
        "value": x,
        "mask": None,
        "kwargs": {"position_bias": x.sum() + 1},
    }
    with pytest.raises(Refused, match="position_bias"):
        _observe(3, call, Binding())


def test_static_scales_need_one_value_a_layer(engine):
    with pytest.raises(Refused, match="layers"):
        engine(kv_format="int8_static", scale={"k": [0.1], "v": [0.1, 0.1, 0.1]})
