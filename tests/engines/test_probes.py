"""The probes: what a sound engine shows, and each way in which attention may work on something else."""

from dataclasses import replace

import pytest
import torch

from kvbench.engines.reference import engine as core
from kvbench.engines.reference.attention import TorchAttention
from kvbench.engines.reference.backends import TORCH
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.engines.reference.load import load_model
from kvbench.evidence.attention_values import probe_prefill, probe_values
from kvbench.evidence.examine import examine
from kvbench.evidence.layer_reads import probe_layers
from kvbench.evidence.page_reads import probe_pages
from kvbench.evidence.stored_kv import reference_fault
from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import request_of, resolve
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, UNVERIFIED, VERIFIED
from kvbench_kernels.kv import quantize
from kvbench_kernels.kv.quantize import QUANTIZE

LAYERS = 4  # of tiny-llama
ZERO_V = {"scale": {"k": 0.05, "v": 1e4}}  # a scale far too large: V is stored as zeros


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("page_size", [1, 8, 100])
def test_a_sound_engine_passes(maker, kv_format, page_size):
    make = maker(kv_format=kv_format, page_size=page_size)
    assert probe_values(make, page_size).state == VERIFIED
    assert probe_prefill(make, LAYERS).state == VERIFIED
    assert probe_pages(make, page_size).state == VERIFIED


@pytest.mark.parametrize(
    ("model", "page_size"), [("tiny-mistral", 8), ("tiny-gemma2", 1), ("tiny-gpt-oss", 16)]
)
def test_windows_and_rows_that_share_arithmetic_pass(maker, model, page_size):
    make = maker(model, page_size=page_size)
    assert probe_pages(make, page_size).state == VERIFIED
    assert probe_values(make, page_size).state == VERIFIED
    assert probe_prefill(make, len(make(1, 16).layers)).state == VERIFIED


def test_a_latent_cache_passes(maker):
    assert probe_pages(maker("tiny-deepseek-v2", "native", page_size=8), 8).state == VERIFIED


LARGE_SCORES = [("tiny-qwen2", "bfloat16"), ("tiny-qwen2", "float16"), ("tiny-wide", "bfloat16")]


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3"])
@pytest.mark.parametrize(("model", "dtype"), LARGE_SCORES)
def test_sound_engines_in_16_bits_pass_where_scores_are_large(model, dtype, kv_format):
    """The reference dequantizes K to the query's dtype; the biases of tiny-qwen2 make scores whose error exceeds all others."""
    own = {"model": model, "kv_format": kv_format, "device": "cpu", "dtype": dtype, "page_size": 8}
    spec = {**CELL_KEYS, **own}
    loaded = load_model(spec, "cpu", dtype)
    decision = resolve(request_of(spec), loaded.facts)
    found = probe_values(lambda n, tokens: Engine(loaded, decision, spec, sequences=n, tokens=tokens), 8)
    assert found.state == VERIFIED, found.sentence


@pytest.mark.parametrize("kv_format", ["int8_static", "fp8_e4m3_static"])
def test_values_that_are_all_stored_as_zero_are_no_sign_of_another_path(maker, kv_format):
    """What K holds shows in no logit where V is nothing: the probes make V visible first."""
    make = maker(kv_format=kv_format, **ZERO_V)
    for found in (probe_prefill(make, LAYERS), probe_layers(make, LAYERS, 16), probe_values(make, 16)):
        assert found.state == VERIFIED, found.sentence


@pytest.mark.parametrize(("kv_format", "keys", "said"), [
    ("int8_sym", {}, "layer 1 K (and 1 more)"), ("int8_static", ZERO_V, "layer 1 K"),
])  # fmt: skip
def test_a_prompt_that_is_not_read_back_in_one_layer_is_named(maker, monkeypatch, kv_format, keys, said):
    """Attention of layer 1 reads the pages, throws its own chunk away and takes the fresh K/V."""
    honest = TorchAttention._read

    def read(self, at, group, k, v):
        old = honest(self, at, group, k, v)
        if at != 1 or group.new == 1:
            return old
        own = (x.reshape(len(group.pages), group.new, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        return tuple(torch.cat([x[:, :, : -group.new], y], 2) for x, y in zip(old, own, strict=True))

    monkeypatch.setattr(TorchAttention, "_read", read)
    found = probe_prefill(maker(kv_format=kv_format, **keys), LAYERS)
    assert found.state == MISMATCH
    assert said in found.sentence


def test_fresh_prefill_reads_are_a_mode_of_their_own(maker):
    make = maker(prefill_reads="fresh", page_size=8)
    assert probe_prefill(make, LAYERS).state == NOT_APPLICABLE
    assert probe_values(make, 8).state == VERIFIED


@pytest.mark.parametrize("kv_format", ["native", "int8_sym"])
def test_pages_in_the_wrong_order_are_found(maker, monkeypatch, kv_format):
    honest = PagedKVStore.read
    monkeypatch.setattr(PagedKVStore, "read", lambda self, at, p, *a: honest(self, at, p.flip(1), *a))
    assert probe_values(maker(kv_format=kv_format, page_size=8), 8).state == MISMATCH


def test_a_page_that_is_not_read_is_named(maker, monkeypatch):
    honest = PagedKVStore.read

    def first_again(self, layer, pages, *rest):
        pages = pages.clone()
        pages[:, 1:2] = pages[:, :1]
        return honest(self, layer, pages, *rest)

    monkeypatch.setattr(PagedKVStore, "read", first_again)
    found = probe_pages(maker(page_size=8), 8)
    assert found.state == MISMATCH
    assert found.facts["first_faults"] == [
        "sequence 0 does not read its page 1 (page 1 of the store)",
        "sequence 1 does not read its page 1 (page 4 of the store)",
    ]


@pytest.mark.parametrize("fault", ["halved", "-128"])
def test_a_quantizer_that_breaks_its_format_is_found(maker, monkeypatch, fault):
    def broken(x, scale):
        sound = quantize.quantize_int8_sym(x)
        if fault == "halved":
            return replace(sound, scales=sound.scales / 2)
        return replace(sound, codes=torch.where(sound.codes == -127, -128, sound.codes))

    monkeypatch.setitem(QUANTIZE, "int8_sym", broken)
    found = probe_values(maker(page_size=8), 8)
    assert found.state == MISMATCH
    assert "is off by" in found.sentence


def test_logits_that_are_native_are_named(maker, monkeypatch):
    monkeypatch.setattr(core, "store_format", lambda decision: KV_FORMATS["native"])
    assert "as close to native values as to the stored ones" in probe_values(maker(page_size=8), 8).sentence


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_reference_that_gives_other_codes_than_the_known_rows_is_named(kv_format, monkeypatch):
    assert reference_fault(KV_FORMATS[kv_format]) == ""
    honest = QUANTIZE[kv_format]

    def other(x, scale):
        sound = honest(x, scale)
        return replace(sound, codes=sound.codes.view(torch.uint8).roll(1).view(sound.codes.dtype))

    monkeypatch.setitem(QUANTIZE, kv_format, other)
    said = f"the reference quantizer of {kv_format} gives codes"
    assert said in reference_fault(KV_FORMATS[kv_format]) or kv_format == "native"


def reads(made):
    """The level of the reads of a run on that engine."""
    seq = made.add()
    made.prefill(seq, list(range(10)))
    if made.spec["prefill_reads"] != "fresh":
        made.decode([seq], [3])
    return next(x for x in examine(made, reads_expected=True).levels if x.name == "E3-reads").state


def test_a_run_that_read_less_than_it_attended_to_fails_and_one_that_read_nothing_proves_nothing(
    engine, monkeypatch
):
    assert reads(engine(kv_format="int8_sym", prefill_reads="fresh")) == UNVERIFIED
    assert reads(engine(kv_format="native", prefill_reads="fresh")) == VERIFIED
    monkeypatch.setattr(TORCH, "attention", lambda *a, **k: TorchAttention(*a, **{**k, "fresh": True}))
    assert reads(engine(kv_format="int8_sym")) == MISMATCH
