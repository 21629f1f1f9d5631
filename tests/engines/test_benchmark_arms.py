"""The arms of the engine benchmark: what is timed is what it says."""

import pytest
import torch

from benchmarks.engine import (
    Bench,
    FilledArm,
    Setup,
    TransformersArm,
    cache_argument,
    perplexity,
    plain_transformers,
    random_chunks,
    weights_itl,
    weights_ttft,
)
from kvbench.matrix.cells import CELL_KEYS
from kvbench.runners.timing import measure

IDS = [7, 3, 200, 41, 41, 9]


def test_a_filled_arm_decodes_at_its_context(engine):
    made = engine("tiny-llama", "int8_sym", sequences=2, tokens=64)
    arm = FilledArm(made, 2, 33, 3)
    assert [made.length(seq) for seq in arm.seqs] == [33, 33]
    codes = made.store.layers[3].k.clone()
    timings = measure([("candidate", arm)], new_tokens=3, repeats=2, warmup=1)
    assert [len(t.itl_ms) for t in timings.measured] == [2, 2]
    assert [made.length(seq) for seq in arm.seqs] == [33, 33]
    assert made.computed_tokens == 3 * 3 * 2  # no prompt
    assert made.due_reads == made.store.reads["tokens"] == 4 * 2 * 3 * (34 + 35 + 36)
    table = made.store.tables(arm.seqs)
    assert torch.equal(
        made.store.layers[3].k[table[:, :2]], codes[table[:, :2]]
    )  # the filled pages are as they were
    arm.submit()
    first = list(arm.tokens)
    arm.close()
    arm.submit()
    assert arm.tokens == first


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_the_peer_is_transformers_on_the_same_weights(tiny, engine, model):
    loaded = tiny(model)
    plain = plain_transformers(loaded)
    assert plain.config._attn_implementation == "sdpa"
    assert loaded.model.config._attn_implementation == "kvbench"
    assert plain.lm_head.weight.data_ptr() == loaded.model.lm_head.weight.data_ptr()
    made = engine(model)
    ours = made.prefill(made.add(), IDS, "all")
    with torch.inference_mode():
        theirs = plain(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_the_peer_decodes_over_its_whole_cache(tiny):
    from transformers import DynamicCache

    torch.manual_seed(0)
    plain = plain_transformers(tiny("tiny-llama"))
    arm = TransformersArm(plain, 2, 19, 4)
    filled = [(layer.keys[:, :, :19].clone(), layer.values[:, :, :19].clone()) for layer in arm.cache.layers]
    wanted, ids = [], torch.ones(2, 1, dtype=torch.long)
    grown = DynamicCache(config=plain.config)
    for layer, (k, v) in enumerate(filled):
        grown.update(k, v, layer)
    for _ in range(3):
        with torch.no_grad():
            ids = (
                plain(input_ids=ids, use_cache=True, **{cache_argument(plain): grown})
                .logits[:, -1]
                .argmax(-1, keepdim=True)
            )
        wanted.append(ids.tolist())
    for _ in range(2):  # a request leaves the cache as the next one needs it
        arm.submit()
        got = [arm.ids.tolist()]
        for _ in range(2):
            arm.step()
            got.append(arm.ids.tolist())
        assert got == wanted


def test_a_perplexity_pass_scores_every_token_but_the_first_of_a_chunk(tiny):
    spec = {**CELL_KEYS, "model": "tiny-llama", "device": "cpu", "dtype": "float32"}
    bench = Bench(tiny("tiny-llama"), spec, Setup("tiny-llama", "", "", "", 2, 2), ["native", "int8_sym"], 2)
    found = {(r.metric, r.entry): r for r in perplexity(bench, "2x512")}
    assert set(found) == {(m, f) for m in ("scored_tok_s", "pass_s") for f in ("native", "int8_sym")}
    seconds, rate = found["pass_s", "native"], found["scored_tok_s", "native"]
    assert seconds.low is not None
    assert rate.high == pytest.approx(2 * 511 / seconds.low)
    assert random_chunks(2, 258) == random_chunks(2, 258)


@pytest.mark.slow
def test_fp8_weights_run_beside_the_native_ones(tiny):
    spec = {**CELL_KEYS, "model": "tiny-llama", "device": "cpu", "dtype": "float32"}
    setup = Setup("tiny-llama", "", "", "", 3, 0)
    bench = Bench(tiny("tiny-llama"), spec, setup, ["native"], 1, ["native", "fp8_block128"])
    assert bench.models == {}
    found = weights_itl(bench, "2x33")
    assert [(r.metric, r.entry) for r in found] == [
        ("weights_itl_ms", "native"),
        ("weights_itl_ms", "fp8_block128/int8_sym"),
    ]
    assert all(r.value for r in found)
    made = bench.engine("fp8_block128/int8_sym", 1, 16)
    assert made.model is bench.models["fp8_block128"] is not bench.loaded
    assert (made.decision.weights.resolved, made.decision.kv_format.resolved) == ("fp8_block128", "int8_sym")
    layer = made.model.model.model.layers[0].self_attn.q_proj
    native = bench.loaded.model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.float8_e4m3fn
    wide = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    n, k = native.weight.shape
    close = layer.weight.float() * wide[:n, :k] - native.weight
    assert close.norm() < 0.04 * native.weight.norm()  # the same random weights
    assert bench.engine("int8_sym", 1, 16).model is bench.loaded
    assert [r.entry for r in weights_ttft(bench, "1x40")] == ["native", "fp8_block128/native"]
