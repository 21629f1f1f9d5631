"""The tensor-level oracle and the model-free run: each way a store can be wrong is found."""

import pytest
import torch

from kvbench.engines.reference import attention
from kvbench.evidence.attention_values import element_error
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench.runners import parity
from kvbench.runners.parity import Bench, Case, Geometry

GQA = Geometry("gqa", 8, KVShape(2, 64, 64))
STATIC = (0.05, 0.04)


def bench(fmt="int8_sym", stored=None):
    scale = STATIC if KV_FORMATS[fmt].scale_kind == "static" else None
    return Bench(KV_FORMATS[stored or fmt], KV_FORMATS[fmt], scale, 16, torch.device("cpu"), 0)


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_every_case_is_inside_its_bound(runner_context, fmt):
    scale = {"k": 0.05, "v": [0.04] * 4} if KV_FORMATS[fmt].scale_kind == "static" else None
    ctx = runner_context("parity", kv_format=fmt, scale=scale, lengths=[1, 16, 17, 33], steps=40)
    threads = torch.get_num_threads()
    measured = parity.run(ctx)
    assert torch.get_num_threads() == threads
    cases = measured.samples["cases"]
    assert len(cases) == 3 * 3 * 4 * 3
    heads = {(c["q_heads"], c["kv_heads"], c["head_dim"]) for c in cases}
    assert heads == {(4, 4, 64), (8, 2, 64), (4, 2, 16)}
    assert {c["dtype"] for c in cases} == {"float32", "float16", "bfloat16"}
    assert {c["name"].split()[-1] for c in cases} == {"plain", "zero-rows", "strided"}
    for case in cases:
        assert case["max_abs"] <= case["bound"], case
        assert case["cosine"] > 0.9999, case
    worst = measured.facts["element_error"]["share_of_bound"]
    assert worst == 0 if fmt == "native" else 0 < worst <= 1
    assert measured.facts["scale"] == ((0.05, 0.04) if scale else None)
    assert len(measured.samples["steps"]["argmax_equal"]) == 40
    row, _ = bench(fmt).decode(Case(GQA, torch.float32, 1, "zero-rows"))
    assert (row["max_abs"], row["cosine"]) == (0.0, 1.0)  # A03 T2: a zero token alone comes back exactly


def test_a08_t5_strided_tensors_are_views_with_an_offset():
    x = torch.randn(5, 2, 64).half()
    view = parity.strided(x)
    assert torch.equal(view, x)
    assert not view.is_contiguous()
    assert view.storage_offset() > 0


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(14, 2), (9, 3), (32, 4), (24, 1), (48, 2), (71, 1), (8, 8)]
)
def test_a09_t1_the_oracle_is_plain_attention_and_maps_query_heads_to_kv_heads(q_heads, kv_heads):
    shapes = (q_heads, 4), (3, kv_heads, 4), (3, kv_heads, 5)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    of = [h // (q_heads // kv_heads) for h in range(q_heads)]
    scores = torch.stack([k[:, of[h]] @ q[h] * 0.5 for h in range(q_heads)]).exp()
    expected = torch.stack([scores[h] / scores[h].sum() @ v[:, of[h]] for h in range(q_heads)])
    torch.testing.assert_close(parity.attention(q, k, v, 0.5), expected)


@pytest.mark.parametrize(
    ("fmt", "x", "moved", "share"),
    [
        ("int8_sym", 1.0, 0.0019709, 0.5),  # half a step of 1/127 rounded up to FP16 is at most 0.0039418
        ("native", 1.0, 0.001, float("inf")), ("native", 1.0, 0.0, 0.0),  # native may not move at all
        ("fp8_e4m3", 1.0, 0.0625, 1.0), ("int8_static", 1.0, 0.05, 2.0),
        ("int8_static", 9.0, 2.0, 0.0),  # clipped at 6.35: outside of the bound
    ],
)  # fmt: skip
def test_the_elements_are_held_to_the_format_s_bound(fmt, x, moved, share):
    scale = 0.05 if fmt == "int8_static" else None
    row = torch.tensor([x], dtype=torch.float64)
    got, worst = element_error(KV_FORMATS[fmt], row, scale, row - moved)
    assert worst == pytest.approx(moved)
    assert got == pytest.approx(share, rel=2e-3)


@pytest.mark.parametrize(
    ("fmt", "errors"),
    [("native", (0.0, 0.0, 0.0)), ("int8_sym", (0.0065, 0.068, 0.226)), ("fp8_e4m3", (0.026, 0.026, 0.0265))],
)
def test_a05_t1_the_facts_show_that_an_outlier_channel_turns_the_ranking(runner_context, fmt, errors):
    facts = parity.run(runner_context("parity", kv_format=fmt, lengths=[1], steps=1)).facts
    assert tuple(facts["error_beside_outlier"].values()) == pytest.approx(errors, rel=0.06)


def scales_of(store):
    return [x for x in (store.layers[0].k_scale, store.layers[0].v_scale) if x is not None]


FAULTS = {
    "scale is one": lambda store: [x.fill_(1.0) for x in scales_of(store)],
    "scale never written": lambda store: [x.zero_() for x in scales_of(store)],
    "scale one ulp off": lambda store: store.layers[0].v_scale.view(torch.int16).add_(1),
    "heads swapped": lambda store: store.layers[0].v.copy_(store.layers[0].v.flip(1)),
    "code one off": lambda store: store.layers[0].v.clamp_(max=126).add_(1),
    "pages lost": lambda store: store.layers[0].k[1:].zero_(),
}


def broken(monkeypatch, read):
    """A store whose read(store, honest read, ...) is this one."""
    honest = parity.PagedKVStore.read
    monkeypatch.setattr(parity.PagedKVStore, "read", lambda self, *args: read(self, honest, *args))


def faulty(monkeypatch, fault):
    def read(store, honest, *args):
        FAULTS[fault](store)
        return honest(store, *args)

    broken(monkeypatch, read)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_is_wrong_is_seen(monkeypatch, fault):
    faulty(monkeypatch, fault)
    row, _ = bench().decode(Case(GQA, torch.float32, 33, "plain"))
    assert row["max_abs"] > 10 * row["bound"]


@pytest.mark.parametrize("extra", [-1, 1])
def test_a07_t1_a_read_of_one_token_more_or_less_is_seen(monkeypatch, extra):
    def read(store, honest, layer, pages, length, dtype):
        k, v = honest(store, layer, pages, length + extra, dtype)
        rows = [0, *range(length - 1)]
        return (k, v) if extra > 0 else (k[:, :, rows], v[:, :, rows])

    def attend(q, k, v, s, *rest):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=s, enable_gqa=True)

    broken(monkeypatch, read)
    monkeypatch.setattr(attention, "paged_attention_torch", attend)
    row, _ = bench().decode(Case(GQA, torch.float32, 31, "plain"))
    assert row["max_abs"] > 10 * row["bound"]


@pytest.mark.parametrize("fmt", [f for f in KV_FORMATS if f != "native"])
def test_a01_a_native_store_under_a_quantized_name_is_seen(fmt):
    row, _ = bench(fmt, stored="native").decode(Case(GQA, torch.float32, 33, "plain"))
    assert row["max_abs"] > 10 * row["bound"]


def test_pages_are_shuffled_and_stale(monkeypatch):
    seen = {}

    def read(store, honest, layer, pages, length, dtype):
        stale = (store.layers[layer].k.float().abs().amax((1, 2, 3)) > 0).all()
        seen.update(pages=pages[0].tolist(), stale=stale)
        return honest(store, layer, pages, length, dtype)

    broken(monkeypatch, read)
    bench("native").decode(Case(GQA, torch.float32, 128, "plain"))
    assert len(seen["pages"]) == 8
    assert seen["pages"] != sorted(seen["pages"])
    assert seen["stale"]


def test_model_free_steps_of_native_agree_and_those_of_int8_differ_a_little(monkeypatch):
    steps = bench("native").steps(64, torch.float32)
    assert (steps["argmax_equal"], set(steps["max_abs"])) == ([1] * 64, {0.0})
    steps = bench().steps(300, torch.float32)
    assert len(steps["argmax_equal"]) == 300
    assert sum(steps["argmax_equal"]) / 300 > 0.95
    assert len(steps["max_abs"]) == 100  # bucket maxima of 3 steps
    assert 0 < max(steps["max_abs"]) < 1
    assert 0.999 < steps["cosine_min"] < 1
    assert bench().steps(300, torch.float32) == steps
    faulty(monkeypatch, "scale is one")
    assert sum(bench().steps(64, torch.float32)["argmax_equal"]) / 64 < 0.9
