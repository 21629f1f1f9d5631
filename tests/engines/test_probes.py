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
from kvbench.evidence import attention_values as probes
from kvbench.evidence import examine as evidence
from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve import request_of, resolve
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, UNVERIFIED, VERIFIED
from kvbench_kernels.attention import reference
from kvbench_kernels.kv import quantize

LAYERS = 4  # of tiny-llama


def values(engine, kv_format="int8_sym", page_size=8, **keys):
    def make(sequences, tokens):
        return engine(
            "tiny-llama", kv_format, sequences=sequences, tokens=tokens, page_size=page_size, **keys
        )

    return probes.probe_values(make, page_size)


def prefill(engine, kv_format="int8_sym", **keys):
    def make(sequences, tokens):
        return engine("tiny-llama", kv_format, sequences=sequences, tokens=tokens, **keys)

    return probes.probe_prefill(make, LAYERS)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("page_size", [1, 8, 100])
def test_a_sound_engine_passes(engine, kv_format, page_size):
    assert values(engine, kv_format, page_size).state == VERIFIED
    assert prefill(engine, kv_format, page_size=page_size).state == VERIFIED


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("model", "dtype"), [("tiny-qwen2", "bfloat16"), ("tiny-qwen2", "float16"), ("tiny-wide", "bfloat16")]
)
def test_sound_engines_in_16_bits_pass_where_scores_are_large(model, dtype, kv_format):
    """The reference dequantizes K to the query's dtype; tiny-qwen2's biases make scores of which that is more than all other rounding."""
    spec = {
        **CELL_KEYS,
        "model": model,
        "kv_format": kv_format,
        "device": "cpu",
        "dtype": dtype,
        "page_size": 8,
    }
    loaded = load_model(spec, "cpu", dtype)
    decision = resolve(request_of(spec), loaded.facts)
    found = probes.probe_values(
        lambda n, tokens: Engine(loaded, decision, spec, sequences=n, tokens=tokens), 8
    )
    assert found.state == VERIFIED, found.sentence


@pytest.mark.parametrize("kv_format", ["int8_static", "fp8_e4m3_static"])
def test_values_that_are_all_stored_as_zero_are_no_sign_of_another_path(engine, kv_format):
    """With a scale far too large V is nothing, and then what K holds shows in no logit: the probes make V visible first."""
    from kvbench.evidence.layer_reads import probe_layers

    def make(sequences, tokens):
        return engine(
            "tiny-llama", kv_format, sequences=sequences, tokens=tokens, scale={"k": 0.05, "v": 1e4}
        )

    for found in (
        probes.probe_prefill(make, LAYERS),
        probe_layers(make, LAYERS, 16),
        probes.probe_values(make, 16),
    ):
        assert found.state == VERIFIED, found.sentence


def test_a_prompt_that_is_not_read_back_is_still_named_where_v_is_zero(engine, monkeypatch):
    fresh(monkeypatch, 1)
    found = prefill(engine, "int8_static", scale={"k": 0.05, "v": 1e4})
    assert found.state == MISMATCH
    assert "layer 1 K" in found.sentence


def test_a_model_whose_rows_share_arithmetic_passes(engine):
    def make(sequences, tokens):
        return engine("tiny-gpt-oss", "int8_sym", sequences=sequences, tokens=tokens)

    layers = len(make(1, 16).layers)
    assert probes.probe_prefill(make, layers).state == VERIFIED
    assert probes.probe_values(make, 16).state == VERIFIED


def fresh(monkeypatch, layer):
    """Attention of `layer` reads the pages, throws its own chunk away and takes the fresh K/V."""
    honest = TorchAttention._read

    def read(self, at, group, k, v):
        old = honest(self, at, group, k, v)
        if at != layer or group.new == 1:
            return old
        own = (x.reshape(len(group.pages), group.new, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        return tuple(torch.cat([x[:, :, : -group.new], y], 2) for x, y in zip(old, own, strict=True))

    monkeypatch.setattr(TorchAttention, "_read", read)


def test_a_prompt_that_is_not_read_back_in_one_layer_is_named(engine, monkeypatch):
    fresh(monkeypatch, 1)
    found = prefill(engine)
    assert found.state == MISMATCH
    assert "layer 1 K (and 1 more)" in found.sentence


def test_fresh_prefill_reads_are_a_mode_of_their_own(engine):
    assert prefill(engine, prefill_reads="fresh").state == NOT_APPLICABLE
    assert values(engine, prefill_reads="fresh").state == VERIFIED


@pytest.mark.parametrize("axis", [1, 2])
def test_the_scale_of_a_neighbour_is_found(engine, monkeypatch, axis):
    honest = reference.dequantize

    def other(codes, scale, dtype):
        return honest(codes, scale if scale is None else scale.roll(1, axis), dtype)

    monkeypatch.setattr(reference, "dequantize", other)
    assert values(engine).state == MISMATCH


def test_halved_values_are_found(engine, monkeypatch):
    honest = reference.dequantize
    monkeypatch.setattr(reference, "dequantize", lambda *a: honest(*a) * 0.5)
    found = values(engine)
    assert found.state == MISMATCH
    assert "what the codes and scales stand for" in found.sentence


@pytest.mark.parametrize("kv_format", ["native", "int8_sym"])
def test_pages_in_the_wrong_order_are_found(engine, monkeypatch, kv_format):
    honest = PagedKVStore.read
    monkeypatch.setattr(PagedKVStore, "read", lambda self, at, p, *a: honest(self, at, p.flip(1), *a))
    assert values(engine, kv_format).state == MISMATCH


@pytest.mark.parametrize("fault", ["halved", "-128"])
def test_a_quantizer_that_breaks_its_format_is_found(engine, monkeypatch, fault):
    def broken(x, scale):
        sound = quantize.quantize_int8_sym(x)
        if fault == "halved":
            return replace(sound, scales=sound.scales / 2)
        return replace(sound, codes=torch.where(sound.codes == -127, -128, sound.codes))

    monkeypatch.setitem(quantize.QUANTIZE, "int8_sym", broken)
    found = values(engine)
    assert found.state == MISMATCH
    assert "is off by" in found.sentence


def test_logits_that_are_native_are_named(engine, monkeypatch):
    monkeypatch.setattr(core, "store_format", lambda decision: KV_FORMATS["native"])
    assert "as close to native values as to the stored ones" in values(engine).sentence


def reads(made):
    found = evidence.examine(made, reads_expected=True)
    return next(x for x in found.levels if x.name == "E3-reads")


def test_a_run_that_read_less_than_it_attended_to_fails(engine, monkeypatch):
    monkeypatch.setattr(TORCH, "attention", lambda *a, **k: TorchAttention(*a, **{**k, "fresh": True}))
    made = engine(kv_format="int8_sym")
    seq = made.add()
    made.prefill(seq, list(range(10)))
    made.decode([seq], [3])
    assert reads(made).state == MISMATCH


def test_a_run_that_read_no_token_proves_nothing(engine):
    made = engine(kv_format="int8_sym", prefill_reads="fresh")
    made.prefill(made.add(), list(range(10)))
    assert reads(made).state == UNVERIFIED
    made = engine(kv_format="native", prefill_reads="fresh")
    made.prefill(made.add(), list(range(10)))
    assert reads(made).state == VERIFIED
