"""The engine on the Triton backend, its kernels run by the interpreter; tests/gpu has it on a GPU.

Two layers and few tokens: the interpreter takes some 20 ms for each program of a kernel.
"""

import json
from dataclasses import replace

import pytest
import torch

from kvbench.engines.reference import attention, backends
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.evidence import examine as evidence
from kvbench.evidence.attention_values import probe_prefill, probe_values
from kvbench.evidence.layer_reads import probe_layers
from kvbench.evidence.page_reads import probe_pages
from kvbench.formats.kv import KV_FORMATS
from kvbench.models.catalog import TINY
from kvbench.records.record import MISMATCH, VERIFIED
from kvbench_kernels.attention import prefill, reference, route
from kvbench_kernels.kv import quantize
from kvbench_kernels.support import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="Kernels are compiled for a GPU here.")

IDS = [(37 * i + 11) % 97 for i in range(40)]
LAYERS = 2
WINDOW = 8  # tokens; shorter than the prompts


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """two_layers(name): a folder with the config of a built-in model, with two layers and a short window."""

    def make(name):
        folder = tmp_path_factory.getbasetemp() / f"two-layers-{name}"
        if not folder.exists():
            config = {**TINY[name], "num_hidden_layers": LAYERS}
            if "sliding_window" in config:
                config |= {"sliding_window": WINDOW, "layer_types": config["layer_types"][:LAYERS]}
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


def logits(made):
    """Two prompts of other lengths in a packed forward, more tokens of both, then a decode step."""
    a, b = made.add(), made.add()
    out = made.forward([(a, IDS[:14]), (b, IDS[3:12])])
    out += made.forward([(a, IDS[14:18]), (b, IDS[12:14])], "all")
    out.append(made.decode([a, b], [5, 6]))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("kv_format", "splits"), [*((name, None) for name in KV_FORMATS), ("int8_sym", 1), ("int8_sym", 3)]
)
def test_logits_equal_those_of_the_torch_backend(engine, two_layers, kv_format, splits):
    """But for codes that lie on a tie: the last bits of a layer's output can move the next one's codes by one."""
    model = two_layers("tiny-llama")
    due = logits(engine(model, kv_format))
    found = logits(engine(model, kv_format, backend="triton", kv_splits=splits))
    share = 1e-5 if kv_format == "native" else 5e-2
    torch.testing.assert_close(found, due, rtol=0, atol=share * due.abs().max().item())
    assert torch.nn.functional.cosine_similarity(found, due, dim=-1).min() > 0.9995


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gpt-oss"])
def test_windows_soft_caps_and_sinks_equal_those_of_the_torch_backend(engine, two_layers, name):
    model = two_layers(name)
    due, found = (logits(engine(model, "native", backend=backend)) for backend in ("torch", "triton"))
    torch.testing.assert_close(found, due, rtol=0, atol=1e-5 * due.abs().max().item())


@pytest.fixture
def maker(engine, two_layers):
    """maker(): a maker of engines of int8_sym, (sequences, tokens) -> Engine."""

    def made(kv_format="int8_sym", model=None, **keys):
        def make(sequences, tokens):
            own = model or two_layers("tiny-llama")
            return engine(own, kv_format, sequences=sequences, tokens=tokens, backend="triton", **keys)

        return make

    return made


def levels_of(made, *probes, prompt=IDS[:6]):
    """The evidence of an engine that has run a prompt and a decode step."""
    made.prefill(seq := made.add(), prompt)
    made.decode([seq], [7])
    return {level.name: level for level in evidence.examine(made, *probes, reads_expected=True).levels}


@pytest.mark.slow
def test_a_sound_engine_is_verified_at_every_level(maker):
    make = maker()
    probes = (
        probe_layers(make, LAYERS, 16),
        probe_pages(make, 16),
        probe_prefill(make, LAYERS),
        probe_values(make, 16),
    )
    levels = levels_of(make(1, 32), *probes)
    kv = {"E1", "E2", "E3", "E3-layers", "E3-pages", "E3-prefill", "E3-reads", "E4", "E5"}
    assert set(levels) == kv | {"E1-weights", "E4-weights"}
    assert {level.state for level in levels.values()} == {VERIFIED}, levels


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3_static"])
def test_a11_t3_e4_names_the_kernels_and_where_they_ran(maker, kv_format):
    e4 = levels_of(maker(kv_format)(1, 32))["E4"]
    assert e4.state == VERIFIED
    assert e4.facts["backend"] == "interpreter"
    written, gathered = f"kv_write_{kv_format}", f"kv_gather_{kv_format}"
    assert e4.facts["decode"] == {written: 1.0, "paged_decode_split": 1.0}
    assert set(e4.facts["prompt"]) == {written, gathered, "scaled_dot_product_attention"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gpt-oss"])
def test_windows_soft_caps_and_sinks_are_within_the_bound_of_e5(maker, two_layers, name):
    level = probe_values(maker(model=two_layers(name)), 16)
    assert level.state == VERIFIED, level


@pytest.mark.slow
@pytest.mark.parametrize("attribute", ["backend", "decode_mode", "compile_mode"])
def test_a_choice_lost_between_decision_and_engine_is_named(maker, attribute):
    made = maker()(1, 32)
    if attribute == "backend":
        made.backend = made.store.backend = backends.TORCH  # both, so that all kernels are of one backend
    else:  # as if a GPU had been asked for: the engine itself stays eager and uncompiled
        aspect = attribute.removesuffix("_mode")
        choice = replace(
            getattr(made.decision, aspect), resolved={"decode": "graph", "compile": "layer"}[aspect]
        )
        made.decision = replace(made.decision, **{aspect: choice})
    level = levels_of(made)["E4"]
    assert level.state == MISMATCH
    assert f"the engine runs {attribute.removesuffix('_mode')} " in level.sentence


@pytest.mark.slow
def test_full_layers_beside_sliding_ones_are_verified(maker, tmp_path):
    """They take other kernels for a prompt: each kind is compared with its own."""
    kinds = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    sizes = {"sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": LAYERS}
    (tmp_path / "config.json").write_text(json.dumps({**TINY["tiny-qwen2"], **kinds, **sizes}))
    e4 = levels_of(maker(model=str(tmp_path))(1, 32))["E4"]
    assert e4.state == VERIFIED, e4
    assert {"paged_prefill_causal", "scaled_dot_product_attention"} <= set(e4.facts["prompt"])


# Faults of the code below the engine: each takes `monkeypatch`.


def torch_attends(patch):
    patch.setattr(backends.TRITON, "attention", lambda *args, **keys: attention.TorchAttention(*args, **keys))


def gathers_in_decode(patch):
    honest = attention.TritonAttention.attend

    def attend(self, layer, q, k, v, scaling, *more):
        if self.new > 1:
            return honest(self, layer, q, k, v, scaling, *more)
        self.store.write(layer, self.slots, k, v)
        return self._alike(layer, q, scaling, self.past)

    patch.setattr(attention.TritonAttention, "attend", attend)


def attends_silently(patch):
    patch.setattr(route, "paged_decode", lambda cache, q, *rest, **more: q.clone())


def without_k_scales(owner, name):
    def fault(patch):
        honest = getattr(owner, name)

        def deaf(cache, *rest, **more):
            return honest(cache._replace(k_scale=torch.ones_like(cache.k_scale)), *rest, **more)

        patch.setattr(owner, name, deaf)

    return fault


def own_kv_of_a_chunk(patch):
    """Pages are read, and counted, in full; then the chunk's own K/V are taken as computed."""
    written = {}
    write, read = PagedKVStore.write, PagedKVStore.read

    def noted(self, layer, slots, k, v):
        written[layer] = k.clone(), v.clone()
        write(self, layer, slots, k, v)

    def late(self, layer, pages, length, dtype):
        stored = read(self, layer, pages, length, dtype)
        new = len(written[layer][0]) // len(pages)
        if length > new > 1:
            for x, own in zip(stored, written[layer], strict=True):
                x[:, :, -new:] = own.reshape(len(pages), new, *own.shape[1:]).transpose(1, 2)
        return stored

    patch.setattr(PagedKVStore, "write", noted)
    patch.setattr(PagedKVStore, "read", late)


def rows_of_another(patch):
    honest = route.paged_decode

    def crossed(cache, q, pages, *rest, **more):
        mixed = pages.clone()
        mixed[1:, 1:] = pages[0, 1:]  # from the second page on
        return honest(cache, q, mixed, *rest, **more)

    patch.setattr(route, "paged_decode", crossed)


def other_bytes(patch):
    honest = quantize.quantize_int8_sym
    patch.setitem(quantize.QUANTIZE, "int8_sym", lambda x, scale: honest(x * 1.01))  # of the reference


def splits_dropped(until):
    """From `until` tokens on. No probe of E4 has 20."""

    def fault(patch):
        honest = route.plan

        def plan(needs, batch, longest, mean, splits):
            return honest(needs, batch, longest, mean, splits if longest < until else 1)

        patch.setattr(route, "plan", plan)

    return fault


def twin_from_20_tokens(patch):
    honest = route.paged_decode

    def decode(cache, q, pages, lengths, *rest, **more):
        kernel = honest if lengths.max() < 20 else reference.paged_decode_torch
        return kernel(cache, q, pages, lengths, *rest, **more)

    patch.setattr(route, "paged_decode", decode)


DEAF, DEAF_PROMPT = without_k_scales(route, "paged_decode"), without_k_scales(prefill, "paged_prefill")
SPLIT = "kv_splits 3 was asked for, and the"
FAULTS = {
    "torch": (torch_attends, "E4", "ran paged_attention_torch in a prompt, and backend triton was resolved"),
    "gather": (gathers_in_decode, "E4", "no attention"),
    "silent": (attends_silently, "E4", "launched only kv_write_int8_sym in a decode step, and no attention"),
    "deaf": (DEAF, "E3", "changing every stored K scale changes no logit"),
    "deaf values": (DEAF, "E5", ""),
    "deaf prompts": (DEAF_PROMPT, "E5", ""),
    "own K/V": (own_kv_of_a_chunk, "E5", ""),
    "rows": (rows_of_another, "E5", ""),
    "bytes": (other_bytes, "E2", ""),
    "splits": (splits_dropped(0), "E4", f"{SPLIT} decode step was split in [1]"),
    "splits of the run": (splits_dropped(20), "E4", f"{SPLIT} measured run has decodes split in [1]"),
    "twin": (twin_from_20_tokens, "E4", "ran paged_decode_torch 1 times in the measured run"),
}


@pytest.mark.parametrize(
    "name", [name if name == "bytes" else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_is_named(maker, monkeypatch, name):
    fault, level, said = FAULTS[name]
    fault(monkeypatch)
    make = maker(kv_splits=3 if "splits" in name else None)
    prompt = IDS[:20] if name in ("twin", "splits of the run") else IDS[:6]
    found = probe_values(make, 16) if level == "E5" else levels_of(make(1, 48), prompt=prompt)[level]
    assert found.state == MISMATCH
    assert said in found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
def test_splits_that_are_kept_are_verified(maker, splits):
    level = levels_of(maker(kv_splits=splits)(1, 32))["E4"]
    assert level.state == VERIFIED, level
    assert ("paged_decode_combine" in level.facts["decode"]) == (splits > 1)


@pytest.mark.slow
def test_a_probe_of_values_goes_through_the_split_kernel_and_its_combine(maker, monkeypatch):
    seen = []
    honest = route.paged_decode
    monkeypatch.setattr(route, "paged_decode", lambda *a, **k: seen.append(k["splits"]) or honest(*a, **k))
    assert probe_values(maker(), 16).state == VERIFIED
    assert {1, 2} == set(seen)


def e4_of(made):
    return next(x for x in evidence.examine(made, reads_expected=True).levels if x.name == "E4")


def test_a_run_that_never_attended_in_a_layer_is_named(maker, monkeypatch):
    """Silence in the measured run is no proof: here layer 1 attends from the probes on."""
    honest, probing = attention.TritonAttention.attend, []

    def attend(self, layer, q, *rest):
        return honest(self, layer, q, *rest) if probing or layer == 0 else q.clone()

    monkeypatch.setattr(attention.TritonAttention, "attend", attend)
    made = maker()(1, 32)
    made.prefill(made.add(), IDS[:6])
    probing.append(True)
    level = e4_of(made)
    assert level.state == MISMATCH
    assert "layer 1 stored K/V 0 times in the 1 forwards of the measured run" in level.sentence


@pytest.mark.parametrize(
    ("owner", "kernel", "sentence"),
    [
        (prefill, "paged_prefill", "attended 2 times in the 3 forwards"),
        (route, "paged_decode", "attended 2 times in the 3 forwards"),
        (backends.TRITON, "write", "stored K/V 0 times in the 3 forwards"),
        (
            backends.TRITON,
            "gather",
            "gathered pages 0 times in the 3 forwards of the measured run, expected 1",
        ),
    ],
)
def test_a_kernel_that_was_replaced_in_the_measured_run_alone_is_named(
    maker, monkeypatch, owner, kernel, sentence
):
    """By the right numbers of a silent twin. The run has unlike prompts, one alone, and a decode step."""
    made = maker()(3, 32)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "launched", lambda *a, **k: None)
        patch.setattr(owner, kernel, getattr(reference, f"paged_{kernel.removeprefix('paged_')}_torch"))
        seqs = [made.add() for _ in range(3)]
        made.forward([(seqs[0], IDS[:6]), (seqs[1], IDS[:9])])
        made.prefill(seqs[2], IDS[:6])
        made.decode(seqs, [7, 7, 7])
    level = e4_of(made)
    assert level.state == MISMATCH
    assert sentence in level.sentence


@pytest.mark.slow
def test_the_measured_run_of_e4_is_counted_without_the_probes(maker):
    made = maker()(1, 32)
    made.prefill(seq := made.add(), IDS[:6])
    made.decode([seq], [7])
    made.decode([seq], [8])
    assert e4_of(made).facts["measured_run"] == {
        "kv_gather_int8_sym": 1, "kv_write_int8_sym": 3, "paged_decode_split": 2, "scaled_dot_product_attention": 1
    }  # fmt: skip
