"""Pages: what a sound engine shows, whatever its windows and its page size; and the reference quantizers' known rows."""

from dataclasses import replace

import pytest
import torch

from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.evidence.known_rows import reference_fault
from kvbench.evidence.page_reads import probe_pages
from kvbench.formats.kv import KV_FORMATS
from kvbench.records.record import MISMATCH, VERIFIED
from kvbench_kernels.kv.quantize import QUANTIZE


def probed(engine, model="tiny-llama", kv_format="int8_sym", page_size=8):
    return probe_pages(
        lambda sequences, tokens: engine(
            model, kv_format, sequences=sequences, tokens=tokens, page_size=page_size
        ),
        page_size,
    )


@pytest.mark.parametrize("page_size", [1, 8, 16, 100])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mistral", "tiny-gemma2", "tiny-gpt-oss"])
def test_a_sound_engine_passes(engine, model, page_size):
    found = probed(engine, model, page_size=page_size)
    assert found.state == VERIFIED, found.sentence


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_in_every_format(engine, kv_format):
    assert probed(engine, kv_format=kv_format).state == VERIFIED


def test_a_latent_cache_passes(engine):
    assert probed(engine, "tiny-deepseek-v2", "native").state == VERIFIED


def test_a_page_that_is_not_read_is_named(engine, monkeypatch):
    honest = PagedKVStore.read

    def first_again(self, layer, pages, *rest):
        pages = pages.clone()
        if pages.shape[1] > 1:
            pages[:, 1] = pages[:, 0]
        return honest(self, layer, pages, *rest)

    monkeypatch.setattr(PagedKVStore, "read", first_again)
    found = probed(engine)
    assert found.state == MISMATCH
    assert found.facts["first_faults"] == [
        "sequence 0 does not read its page 1 (page 1 of the store)",
        "sequence 1 does not read its page 1 (page 4 of the store)",
    ]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_the_reference_quantizers_give_the_known_rows(kv_format):
    assert reference_fault(KV_FORMATS[kv_format]) == ""


@pytest.mark.parametrize("kv_format", [name for name in KV_FORMATS if name != "native"])
def test_a_reference_that_gives_other_codes_is_named(kv_format, monkeypatch):
    honest = QUANTIZE[kv_format]

    def other(x, scale):
        sound = honest(x, scale)
        return replace(sound, codes=sound.codes.view(torch.uint8).roll(1).view(sound.codes.dtype))

    monkeypatch.setitem(QUANTIZE, kv_format, other)
    assert f"the reference quantizer of {kv_format} gives codes" in reference_fault(KV_FORMATS[kv_format])
