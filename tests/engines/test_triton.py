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
    """two_layers(name): a folder with the config of the built-in tiny model `name` with two layers and a short window."""

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


def maker(engine, model, kv_format):
    def make(sequences, tokens):
        return engine(model, kv_format, sequences=sequences, tokens=tokens, backend="triton")

    return make


def levels_of(made, *probes):
    """The evidence of an engine that has run a prompt and a decode step."""
    seq = made.add()
    made.prefill(seq, IDS[:6])
    made.decode([seq], [7])
    return {level.name: level for level in evidence.examine(made, *probes, reads_expected=True).levels}


@pytest.mark.slow
def test_a_sound_engine_is_verified_at_every_level(engine, two_layers):
    make = maker(engine, two_layers("tiny-llama"), "int8_sym")
    probes = (
        probe_layers(make, LAYERS, 16),
        probe_pages(make, 16),
        probe_prefill(make, LAYERS),
        probe_values(make, 16),
    )
    levels = levels_of(make(1, 32), *probes)
    assert set(levels) == {
        "E1",
        "E2",
        "E3",
        "E3-layers",
        "E3-pages",
        "E3-prefill",
        "E3-reads",
        "E4",
        "E5",
        "E1-weights",
        "E4-weights",
    }
    assert {level.state for level in levels.values()} == {VERIFIED}, levels


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3_static"])
def test_a11_t3_e4_names_the_kernels_and_where_they_ran(engine, two_layers, kv_format):
    e4 = levels_of(maker(engine, two_layers("tiny-llama"), kv_format)(1, 32))["E4"]
    assert e4.state == VERIFIED
    assert e4.facts["backend"] == "interpreter"
    assert e4.facts["decode"] == {f"kv_write_{kv_format}": 1.0, "paged_decode_split": 1.0}
    assert set(e4.facts["prompt"]) == {
        f"kv_write_{kv_format}",
        f"kv_gather_{kv_format}",
        "scaled_dot_product_attention",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gpt-oss"])
def test_windows_soft_caps_and_sinks_are_within_the_bound_of_e5(engine, two_layers, name):
    level = probe_values(maker(engine, two_layers(name), "int8_sym"), 16)
    assert level.state == VERIFIED, level


@pytest.mark.slow
def test_attention_by_torch_under_a_triton_request_is_named(engine, two_layers, monkeypatch):
    def dropped(store, chunk, **options):
        return attention.TorchAttention(store, chunk, **options)

    monkeypatch.setattr(backends.TRITON, "attention", dropped)
    level = levels_of(maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 32))["E4"]
    assert level.state == MISMATCH
    assert "ran paged_attention_torch in a prompt, and backend triton was resolved" in level.sentence


@pytest.mark.slow
@pytest.mark.parametrize("attribute", ["backend", "decode_mode", "compile_mode"])
def test_a_choice_lost_between_decision_and_engine_is_named(engine, two_layers, monkeypatch, attribute):
    made = maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 32)
    if attribute == "backend":
        made.backend = made.store.backend = backends.TORCH  # both, so that all kernels are of one backend
    else:  # as if a GPU had been asked for: the engine itself stays eager and uncompiled
        aspect, resolved = {"decode_mode": ("decode", "graph"), "compile_mode": ("compile", "layer")}[
            attribute
        ]
        choice = replace(getattr(made.decision, aspect), resolved=resolved)
        made.decision = replace(made.decision, **{aspect: choice})
    level = levels_of(made)["E4"]
    assert level.state == MISMATCH
    assert f"the engine runs {attribute.removesuffix('_mode')} " in level.sentence


@pytest.mark.slow
def test_a_decode_step_by_gather_and_a_library_is_named(engine, two_layers, monkeypatch):
    honest = attention.TritonAttention.attend

    def attend(self, layer, q, k, v, scaling, *more):
        if self.new > 1:
            return honest(self, layer, q, k, v, scaling, *more)
        self.store.write(layer, self.slots, k, v)
        return self._alike(layer, q, scaling, self.past)

    monkeypatch.setattr(attention.TritonAttention, "attend", attend)
    level = levels_of(maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 32))["E4"]
    assert level.state == MISMATCH
    assert "no attention" in level.sentence


@pytest.mark.slow
def test_a_decode_step_without_an_attention_kernel_is_named(engine, two_layers, monkeypatch):
    monkeypatch.setattr(route, "paged_decode", lambda cache, q, *rest, **more: q.clone())  # says nothing
    level = levels_of(maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 32))["E4"]
    assert level.state == MISMATCH
    assert "launched only kv_write_int8_sym in a decode step, and no attention" in level.sentence


@pytest.mark.slow
def test_full_layers_beside_sliding_ones_are_verified(engine, tmp_path):
    """They take other kernels for a prompt: each kind is compared with its own."""
    kinds = {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    config = {**TINY["tiny-qwen2"], **kinds, "max_window_layers": 1, "num_hidden_layers": LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    e4 = levels_of(maker(engine, str(tmp_path), "int8_sym")(1, 32))["E4"]
    assert e4.state == VERIFIED, e4
    assert {"paged_prefill_causal", "scaled_dot_product_attention"} <= set(e4.facts["prompt"])


@pytest.mark.slow
def test_a_scale_that_the_decode_kernel_drops_is_named(engine, two_layers, monkeypatch):
    honest = route.paged_decode

    def deaf(cache, *rest, **more):
        return honest(cache._replace(k_scale=torch.ones_like(cache.k_scale)), *rest, **more)

    monkeypatch.setattr(route, "paged_decode", deaf)
    make = maker(engine, two_layers("tiny-llama"), "int8_sym")
    levels = levels_of(make(1, 32), probe_values(make, 16))
    assert levels["E3"].state == MISMATCH
    assert "changing every stored K scale changes no logit" in levels["E3"].sentence
    assert levels["E5"].state == MISMATCH


@pytest.mark.slow
def test_a_later_chunk_that_is_not_read_back_is_named(engine, two_layers, monkeypatch):
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

    monkeypatch.setattr(PagedKVStore, "write", noted)
    monkeypatch.setattr(PagedKVStore, "read", late)
    assert probe_values(maker(engine, two_layers("tiny-llama"), "int8_sym"), 16).state == MISMATCH


@pytest.mark.slow
def test_unlike_prompts_that_lose_their_scales_are_named(engine, two_layers, monkeypatch):
    honest = prefill.paged_prefill

    def deaf(cache, *rest, **more):
        return honest(cache._replace(k_scale=torch.ones_like(cache.k_scale)), *rest, **more)

    monkeypatch.setattr(prefill, "paged_prefill", deaf)
    assert probe_values(maker(engine, two_layers("tiny-llama"), "int8_sym"), 16).state == MISMATCH


@pytest.mark.slow
def test_a_row_that_reads_another_rows_pages_is_named(engine, two_layers, monkeypatch):
    honest = route.paged_decode

    def crossed(cache, q, pages, *rest, **more):
        mixed = pages.clone()
        mixed[1:, 1:] = pages[0, 1:]  # from the second page on
        return honest(cache, q, mixed, *rest, **more)

    monkeypatch.setattr(route, "paged_decode", crossed)
    assert probe_values(maker(engine, two_layers("tiny-llama"), "int8_sym"), 16).state == MISMATCH


def test_a_quantizer_that_writes_other_bytes_is_named(engine, two_layers, monkeypatch):
    honest = quantize.quantize_int8_sym
    monkeypatch.setitem(quantize.QUANTIZE, "int8_sym", lambda x, scale: honest(x * 1.01))  # of the reference
    assert levels_of(maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 32))["E2"].state == MISMATCH


@pytest.mark.slow
def test_splits_that_are_dropped_on_the_way_are_named(engine, two_layers, monkeypatch):
    honest = route.plan
    monkeypatch.setattr(
        route, "plan", lambda needs, batch, longest, mean, splits: honest(needs, batch, longest, mean, None)
    )
    made = engine(two_layers("tiny-llama"), "int8_sym", sequences=1, tokens=32, backend="triton", kv_splits=3)
    level = levels_of(made)["E4"]
    assert level.state == MISMATCH
    assert "kv_splits 3 was asked for, and the decode step was split in [1]" in level.sentence


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
def test_splits_that_are_kept_are_verified(engine, two_layers, splits):
    made = engine(
        two_layers("tiny-llama"), "int8_sym", sequences=1, tokens=32, backend="triton", kv_splits=splits
    )
    level = levels_of(made)["E4"]
    assert level.state == VERIFIED, level
    assert ("paged_decode_combine" in level.facts["decode"]) == (splits > 1)


@pytest.mark.slow
def test_a_twin_that_ran_in_the_measured_run_alone_is_named(engine, two_layers, monkeypatch):
    """From 20 tokens on, which no probe of E4 has: what ran is told by the measured run."""
    honest = route.paged_decode

    def decode(cache, q, pages, lengths, *rest, **more):
        kernel = honest if lengths.max() < 20 else reference.paged_decode_torch
        return kernel(cache, q, pages, lengths, *rest, **more)

    monkeypatch.setattr(route, "paged_decode", decode)
    made = maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 48)
    made.prefill(seq := made.add(), IDS[:20])
    made.decode([seq], [7])
    level = next(x for x in evidence.examine(made, reads_expected=True).levels if x.name == "E4")
    assert level.state == MISMATCH
    assert "ran paged_decode_torch 1 times in the measured run" in level.sentence


@pytest.mark.slow
def test_a_probe_of_values_goes_through_the_split_kernel_and_its_combine(engine, two_layers, monkeypatch):
    seen = []
    honest = route.paged_decode
    monkeypatch.setattr(route, "paged_decode", lambda *a, **k: seen.append(k["splits"]) or honest(*a, **k))
    assert probe_values(maker(engine, two_layers("tiny-llama"), "int8_sym"), 16).state == VERIFIED
    assert {1, 2} == set(seen)


def test_a_run_that_never_attended_in_a_layer_is_named(engine, two_layers, monkeypatch):
    """Silence in the measured run is no proof: here layer 1 attends from the probes on."""
    honest, probing = attention.TritonAttention.attend, []

    def attend(self, layer, q, *rest):
        return honest(self, layer, q, *rest) if probing or layer == 0 else q.clone()

    monkeypatch.setattr(attention.TritonAttention, "attend", attend)
    made = maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 32)
    made.prefill(made.add(), IDS[:6])
    probing.append(True)
    level = next(x for x in evidence.examine(made, reads_expected=True).levels if x.name == "E4")
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
def test_a_kernel_that_was_silently_replaced_in_the_measured_run_alone_is_named(
    engine, two_layers, monkeypatch, owner, kernel, sentence
):
    """By the right numbers of a twin that says nothing. The run has unlike prompts, one alone, and a decode step."""
    made = maker(engine, two_layers("tiny-llama"), "int8_sym")(3, 32)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "launched", lambda *a, **k: None)
        patch.setattr(owner, kernel, getattr(reference, f"paged_{kernel.removeprefix('paged_')}_torch"))
        seqs = [made.add() for _ in range(3)]
        made.forward([(seqs[0], IDS[:6]), (seqs[1], IDS[:9])])
        made.prefill(seqs[2], IDS[:6])
        made.decode(seqs, [7, 7, 7])
    level = next(x for x in evidence.examine(made, reads_expected=True).levels if x.name == "E4")
    assert level.state == MISMATCH
    assert sentence in level.sentence


@pytest.mark.slow
def test_splits_that_are_dropped_in_the_measured_run_alone_are_named(engine, two_layers, monkeypatch):
    """From 20 tokens on, which no probe of E4 has."""
    honest = route.plan
    monkeypatch.setattr(
        route, "plan",
        lambda needs, batch, longest, mean, splits: honest(needs, batch, longest, mean, splits if longest < 20 else 1),
    )  # fmt: skip
    made = engine(two_layers("tiny-llama"), "int8_sym", sequences=1, tokens=48, backend="triton", kv_splits=3)
    made.prefill(seq := made.add(), IDS[:20])
    made.decode([seq], [7])
    level = next(x for x in evidence.examine(made, reads_expected=True).levels if x.name == "E4")
    assert level.state == MISMATCH
    assert "kv_splits 3 was asked for, and the measured run has decodes split in [1]" in level.sentence


@pytest.mark.slow
def test_the_measured_run_of_e4_is_counted_without_the_probes(engine, two_layers):
    made = maker(engine, two_layers("tiny-llama"), "int8_sym")(1, 32)
    made.prefill(seq := made.add(), IDS[:6])
    made.decode([seq], [7])
    made.decode([seq], [8])
    e4 = next(x for x in evidence.examine(made, reads_expected=True).levels if x.name == "E4")
    assert e4.facts["measured_run"] == {
        "kv_gather_int8_sym": 1, "kv_write_int8_sym": 3, "paged_decode_split": 2, "scaled_dot_product_attention": 1
    }  # fmt: skip
