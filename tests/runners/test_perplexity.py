"""Perplexity through real engines on a tiny model: protocols, divergence, the native re-run, refusals."""

import math

import pytest
import torch

from kvbench.data.corpora import corpus
from kvbench.errors import KvbenchError, NotAvailable, Refused
from kvbench.runners import perplexity
from kvbench.runners.perplexity import KEPT, Divergence, Pass, chunk_text, rerun_difference
from kvbench.runners.text.chunking import Chunk
from kvbench.runners.text.logits import Compared, logprobs
from tests.factories.quality_tools import bpe_tokenizer, context, reference_logprobs, tiny_model

PROTOCOLS = ("stream512", "rows512", "llamacpp")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """About 1,500 tokens in paragraphs, with rows of nothing, of one token and of many."""
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("x\n\n" + corpus("pydoc", None).text[:3500], encoding="utf-8")
    return path


def measure(model, text, **changes):
    return perplexity.run(context(model, "perplexity", data=str(text), **changes))


def nll_of(measured):
    return [c["nll"] for c in measured.samples["chunks"]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prefill_chunk", [512, 100])
def test_a17_t1_uniform_logits_give_the_vocabulary_size(text, protocol, prefill_chunk):
    flat = tiny_model(uniform=True)
    measured = measure(flat, text, protocol=protocol, spec={"prefill_chunk": prefill_chunk})
    vocabulary = flat.model.config.vocab_size
    for chunk in measured.samples["chunks"]:
        assert math.exp(chunk["nll"] / chunk["tokens"]) == pytest.approx(vocabulary, rel=1e-12)
    assert sum(c["tokens"] for c in measured.samples["chunks"]) == measured.facts["scored"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_native_sums_are_those_of_a_plain_forward(model, text, protocol):
    measured = measure(model, text, protocol=protocol)
    chunks = chunk_text(protocol, corpus(str(text), None), model.tokenizer)[0].chunks
    assert len(chunks) == len(measured.samples["chunks"]) > 1
    for chunk, got in zip(chunks, measured.samples["chunks"], strict=True):
        exact = (-reference_logprobs(model, list(chunk.tokens))[chunk.skip - 1 :]).tolist()
        at = [[x for i, x in enumerate(exact, chunk.skip) if low <= i < high]
              for low, high in ((0, 64), (64, 128), (128, 256), (256, 512))]  # fmt: skip
        assert got == {
            "tokens": chunk.scored,
            "nll": pytest.approx(sum(exact), rel=1e-5),
            "document": chunk.document,
            "by_position": [[len(part), pytest.approx(sum(part), rel=1e-5)] for part in at],
        }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a17_t5_a_text_with_nothing_to_score_is_an_error_not_a_nan(model, tmp_path, protocol):
    for content in ("", "x"):
        (tmp_path / "none.txt").write_text(content)
        with pytest.raises(KvbenchError, match="nothing to score"):
            measure(model, tmp_path / "none.txt", protocol=protocol)


def test_a17_t5_rows_packed_together_score_as_each_alone(model, tmp_path):
    words = ["the value of the", "an object is a thing that has a value and a type"]
    (tmp_path / "both.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "rows.txt").write_text("x\n\n  \nthe value of the object\n", encoding="utf-8")
    measured = measure(model, tmp_path / "rows.txt", protocol="rows512")
    assert (measured.facts["skipped_rows"], measured.facts["empty_rows"]) == (1, 2)
    assert len(measured.samples["chunks"]) == 1
    both = measure(model, tmp_path / "both.txt", protocol="rows512")
    assert len(both.samples["chunks"]) == 2
    for line, chunk in zip(words, both.samples["chunks"], strict=True):
        (tmp_path / "one.txt").write_text(line, encoding="utf-8")
        alone = measure(model, tmp_path / "one.txt", protocol="rows512").samples["chunks"][0]
        assert chunk["tokens"] == alone["tokens"]
        assert chunk["nll"] == pytest.approx(alone["nll"], rel=1e-6)


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3"])
def test_a03_t3_one_repeated_token_with_zeroed_values_has_a_finite_perplexity(kv_format):
    zeroed = tiny_model()
    outputs = []
    for layer in zeroed.model.model.layers:
        layer.self_attn.v_proj.weight.zero_()
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    ctx = context(zeroed, "perplexity", kv_format=kv_format)
    chunk = Chunk((42,) * 40, 1, 0)
    (rows,) = Pass(ctx.engine(sequences=1, tokens=40), 512).forward([chunk])
    assert len(outputs) == 2
    assert all(torch.equal(x, torch.zeros_like(x)) for x in outputs)
    nll = -logprobs(rows, torch.tensor(chunk.tokens[1:]))
    assert math.isfinite(math.exp(float(nll.mean())))


def test_the_facts_say_what_the_number_is_of(model, text, backwards):
    facts = measure(model, text).facts
    tokens = len(bpe_tokenizer()(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    expected = {"tokens": tokens, "scored": tokens - facts["chunks_total"], "seconds_native": None}
    expected |= {"protocol": "stream512", "split": "whole", "bos": "none", "stride": 512, "chunk": 512}
    expected |= {"text": "raw", "data_sha": corpus(str(text), None).sha256}
    assert facts.items() >= expected.items()
    assert 0 < facts["seconds_candidate"] < 60  # A21 T4: not by the wall clock


def test_a_candidate_is_compared_with_a_native_pass_that_repeats_the_baseline(model, text):
    baseline = measure(model, text)
    assert set(baseline.samples) == {"chunks"}
    found = measure(model, text, kv_format="int8_sym", baseline=baseline)
    assert found.samples["native_chunks"] == baseline.samples["chunks"]
    assert found.facts["native_rerun_max_abs_nll"] == 0.0
    assert found.samples["chunks"] != baseline.samples["chunks"]
    assert found.facts["seconds_native"] > 0
    kld, tokens = found.samples["kld"], found.samples["kld_tokens"]
    assert kld["n"] == found.facts["scored"] == len(tokens) == len(found.samples["delta_p"])
    assert 0 < kld["p50"] < kld["p90"] < kld["p99"] <= kld["p999"] <= kld["max"]
    assert min(tokens) >= 0
    assert kld["mean"] == pytest.approx(sum(tokens) / kld["n"], rel=1e-5)
    assert 0 < found.samples["top1_equal"] <= kld["n"]
    own = found.samples["chunks"]
    assert sum(c["kld"] for c in own) == pytest.approx(kld["mean"] * kld["n"])
    assert sum(c["delta_p"] for c in own) == pytest.approx(found.samples["delta_p_mean"] * kld["n"])
    assert sum(c["top1_equal"] for c in own) == found.samples["top1_equal"]
    assert all(c["kept"] == c["tokens"] for c in own)
    again = measure(model, text, baseline=baseline)
    assert (again.samples["kld"]["max"], set(again.samples["delta_p"])) == (0.0, {0.0})
    assert again.samples["top1_equal"] == again.facts["scored"]
    alone = measure(model, text, kv_format="fp8_e4m3", baseline=baseline, kld=False)
    assert (set(alone.samples), alone.facts["seconds_native"]) == ({"chunks"}, None)


def test_a_limit_is_partial_and_spread_evenly_and_a_prefill_chunk_changes_no_sum(model, text):
    long, pieces = (measure(model, text, kv_format="int8_sym", spec={"prefill_chunk": n}) for n in (512, 96))
    assert nll_of(pieces) == pytest.approx(nll_of(long), rel=1e-5)
    whole, some = measure(model, text), measure(model, text, limit_chunks=2)
    every = nll_of(whole)
    assert nll_of(some) == [every[0], every[len(every) // 2]]
    assert some.partial == f"2 of {len(every)} chunks, spread evenly"
    assert (whole.partial, measure(model, text, limit_chunks=99).partial) == (None, None)


def test_a_model_shorter_than_a_chunk_and_a_corpus_that_is_not_here_are_refused(model, text, monkeypatch):
    with pytest.raises(Refused, match="512 tokens, but the model has 256") as e:
        measure(tiny_model(max_context=256), text)
    assert e.value.reason == "invalid_context"
    monkeypatch.delenv("KVBENCH_ALLOW_HUB", raising=False)
    with pytest.raises(NotAvailable):
        perplexity.run(context(model, "perplexity", data="wikitext2"))


def test_of_many_tokens_a_seeded_sample_is_kept_and_the_statistics_are_exact():
    n = KEPT + 7
    values = torch.arange(n, dtype=torch.float64)
    found = Divergence()
    for part in values.split(1000):
        found.add(Compared(part, part, part, part < 10, -part))
    samples = found.samples()
    assert samples == found.samples()
    assert len(samples["kld_tokens"]) == len(samples["delta_p"]) == KEPT
    assert samples["kld_tokens"] == [-x for x in samples["delta_p"]]
    for i, chunk in enumerate(found.by_chunk()):
        assert chunk["kept"] == sum(1000 * i <= x < 1000 * (i + 1) for x in samples["kld_tokens"])
    assert samples["kld"] == {
        "mean": (n - 1) / 2, "n": n, "max": n - 1.0,
        **{name: pytest.approx(level * (n - 1)) for name, level in perplexity.QUANTILES.items()},
    }  # fmt: skip
    assert (samples["delta_p_mean"], samples["top1_equal"]) == (-(n - 1) / 2, 10)


def test_a_rerun_of_other_chunks_is_an_error():
    record = [{"tokens": 3, "nll": 1.5, "document": 0}]
    assert rerun_difference(record, [{"tokens": 3, "nll": 1.25, "document": 0}]) == 0.25
    with pytest.raises(KvbenchError, match="other chunks"):
        rerun_difference(record, [{"tokens": 2, "nll": 1.5, "document": 0}])
