"""Free-running text: each token follows from the cell's own; ends, prompts and metrics."""

from types import SimpleNamespace

import pytest

from kvbench.errors import Refused, UsageError
from kvbench.metrics import generate as derived
from kvbench.runners import generate
from kvbench.runners.text.decode import greedy

KEYS = {"new_tokens": 40, "prompts": 3, "prompt_tokens": 16}


@pytest.mark.parametrize("fmt", ["native", "int8_sym"])
def test_every_text_is_the_plain_greedy_text_of_its_prompt(runner_context, monkeypatch, fmt):
    """The first end of text is kept and does not stop the decoding."""
    ctx = runner_context("generate", kv_format=fmt, **KEYS)
    measured, asked = generate.run(ctx), generate.prompts(ctx)
    texts = measured.samples["tokens"]
    assert len({tuple(prompt) for prompt in asked}) == 3
    for prompt, text in zip(asked, texts, strict=True):
        engine = ctx.engine(sequences=1, tokens=60)
        assert text == greedy(engine, engine.add(), prompt, 40, 0).best
    assert measured.facts["new_tokens"] == 40
    assert measured.samples["text"] == [ctx.model.tokenizer.decode(text) for text in texts]
    end = texts[0][7]
    monkeypatch.setattr(generate, "end_ids", lambda *holders: [end])
    again = generate.run(ctx)
    assert again.samples["tokens"] == texts
    assert again.samples["eos"] == [text.index(end) if end in text else None for text in texts]
    assert again.facts["eos_tokens"] == [end]


def test_prompts_are_the_heads_of_documents(runner_context, tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("First paragraph of a text.\n\nSecond one.\n")

    def prompts(**keys):
        ctx = runner_context("generate", **{"data": str(path), **keys})
        return [ctx.model.tokenizer.decode(p) for p in generate.prompts(ctx)]

    assert prompts(new_tokens=2, prompts=2, prompt_tokens=5) == ["First", "Secon"]
    assert prompts(prompts=2, prompt_tokens=15) == ["First paragraph", "Second one."]
    with pytest.raises(UsageError, match="has 2 documents, but 3"):
        prompts(prompts=3, prompt_tokens=5)
    with pytest.raises(UsageError, match="has no chat template"):
        prompts(chat_template=True)
    path.write_text("\n\n")
    with pytest.raises(UsageError, match=r"Document 0 of corpus .* is empty"):
        prompts(prompts=1)
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}A:"
    monkeypatch.setattr(runner_context("generate").model.tokenizer, "chat_template", template)
    assert prompts(data="instructions", chat_template=True, prompts=2) == [
        "<Tell me a story about a fox and a river.>A:",
        "<Describe the four seasons in a small town by the sea.>A:",
    ]


def test_more_tokens_than_positions_are_refused_before_any_work(runner_context):
    ctx = runner_context("generate", prompts=1, prompt_tokens=16, new_tokens=4090)
    object.__setattr__(ctx, "engine", lambda **size: pytest.fail("an engine was made"))
    with pytest.raises(Refused, match="4096"):
        generate.run(ctx)


def record(texts, eos=None, **facts):
    facts = {"prompts": len(texts), "new_tokens": 64, "prompt_sha": "a", "eos_tokens": [0]} | facts
    samples = {"tokens": texts, "eos": eos or [None] * len(texts)}
    return SimpleNamespace(samples=samples, facts=facts, protocol=1)


FRESH = list(range(100, 164))
LOOP = [*FRESH[:4], *[1, 2] * 30]  # repeats itself from token 4 + 2 + 3
LATE = [*FRESH[:24], *[1, 2] * 20]  # from token 29
QUICK = [9] * 64  # from token 4


def rows(own, baseline=None):
    return {v.metric.removeprefix("gen_"): v for v in derived.values(own, baseline)}


def test_the_metrics_of_a_text_are_exact():
    found = rows(record([LOOP, FRESH, LOOP, FRESH]))
    values = {"degenerated": 0.5, "onset": 9, "loop_onset": 4, "loop_tokens": 60, "eos": 64}
    assert {name: found[name].value for name in values} == values
    assert found["onset"].n == found["eos"].n == 64
    assert found["onset"].note == "each: 9, none, 9, none"
    assert found["loop_tokens"].note == "period 2, 60 tokens; none; period 2, 60 tokens; none"
    assert found["distinct_4grams"].value == pytest.approx((2 * 6 / 61 + 2) / 4)
    assert "collapsed" not in found
    found = rows(record([LOOP, FRESH], eos=[4, 10]))  # what follows an end of text counts for nothing
    assert (found["degenerated"].value, found["loop_tokens"].value, found["eos"].value) == (0, 0, 4)


def test_a_candidate_is_judged_against_the_natives_own_repetition():
    found = rows(record([QUICK, QUICK, LOOP]), record([FRESH, LATE, LOOP]))
    assert found["collapsed"].value == pytest.approx(2 / 3)  # the third does what native does
    assert found["native_degenerated"].value == pytest.approx(2 / 3)
    assert found["native_onset"].note == "each: none, 29, 9"
    assert (found["first_divergence"].value, found["first_divergence"].note) == (0, "each: 0, 0, none")


def test_a_text_that_ends_at_once_where_natives_goes_on_has_collapsed():
    """As repetition does: useful are the tokens before either."""
    native = record([FRESH, FRESH, LATE, FRESH], eos=[None, 40, None, 8])
    found = rows(record([FRESH, FRESH, LATE, QUICK], eos=[0, 9, 20, None]), native)
    assert (found["useful_tokens"].value, found["useful_tokens"].note) == (4, "each: 0, 9, 20, 4")
    assert rows(native)["useful_tokens"].note == "each: none, 40, 29, 8"
    # 0 of 64, 9 of 40, from 4 where native's 8 tokens loop nowhere; not 20 of 29
    assert found["collapsed"].value == 0.75
    for end, collapsed in ((16, 0), (15, 1)):  # a quarter is not fewer
        assert rows(record([FRESH], eos=[end]), record([FRESH]))["collapsed"].value == collapsed


def test_a_prompt_that_native_does_not_answer_tells_nothing_and_one_that_it_answers_still_does():
    """A repetition is measured against native's own onset (none: the whole length)."""
    silent = rows(record([QUICK, QUICK]), record([FRESH, FRESH], eos=[0, 20]))["collapsed"]
    assert (silent.value, silent.n, silent.note) == (1.0, 1, "1 more, where native ends at once")
    all_silent = rows(record([QUICK]), record([FRESH], eos=[0]))["collapsed"]
    assert (all_silent.value, all_silent.note) == (None, "native's own texts end at once")
    other = rows(record([LOOP]), record([LOOP], prompt_sha="b"))["collapsed"]
    assert other.value is None
    assert "prompt_sha is 'a' here and 'b' on the baseline" in other.note
