"""Free-running text: each token follows from the cell's own; ends, prompts and metrics."""

from types import SimpleNamespace

import pytest

from kvbench.errors import Refused, UsageError
from kvbench.metrics import generate as derived
from kvbench.runners import generate

KEYS = {"new_tokens": 40, "prompts": 3, "prompt_tokens": 16}


def test_every_text_is_the_plain_greedy_text_of_its_prompt(runner_context):
    for fmt in ("native", "int8_sym"):
        ctx = runner_context("generate", kv_format=fmt, **KEYS)
        measured = generate.run(ctx)
        asked = generate.prompts(ctx)
        assert len({tuple(prompt) for prompt in asked}) == 3
        for prompt, text in zip(asked, measured.samples["tokens"], strict=True):
            engine = ctx.engine(sequences=1, tokens=60)
            seq, own = engine.add(), []
            logits = engine.prefill(seq, prompt)
            while len(own) < 40:
                own.append(int(logits[-1].argmax()))
                logits = engine.decode([seq], [own[-1]])
            assert text == own
        assert measured.facts["new_tokens"] == 40
        assert measured.samples["text"] == [ctx.model.tokenizer.decode(t) for t in measured.samples["tokens"]]


def test_prompts_are_the_heads_of_documents(runner_context, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("First paragraph of a text.\n\nSecond one.\n")
    ctx = runner_context("generate", data=str(path), new_tokens=2, prompts=2, prompt_tokens=5)
    assert [ctx.model.tokenizer.decode(p) for p in generate.prompts(ctx)] == ["First", "Secon"]
    ctx = runner_context("generate", data=str(path), prompts=2, prompt_tokens=15)
    assert [ctx.model.tokenizer.decode(p) for p in generate.prompts(ctx)] == [
        "First paragraph",
        "Second one.",
    ]
    with pytest.raises(UsageError, match="has 2 documents, but 3"):
        generate.prompts(runner_context("generate", data=str(path), prompts=3, prompt_tokens=5))
    with pytest.raises(UsageError, match="has no chat template"):
        generate.prompts(runner_context("generate", chat_template=True))
    path.write_text("\n\n")
    with pytest.raises(UsageError, match=r"Document 0 of corpus .* is empty"):
        generate.prompts(runner_context("generate", data=str(path), prompts=1))


def test_a_chat_template_stands_around_the_document(runner_context, monkeypatch):
    ctx = runner_context("generate", chat_template=True, prompts=2)
    monkeypatch.setattr(
        ctx.model.tokenizer, "chat_template", "{% for m in messages %}<{{ m.content }}>{% endfor %}A:"
    )
    first, second = (ctx.model.tokenizer.decode(p) for p in generate.prompts(ctx))
    assert first == "<Tell me a story about a fox and a river.>A:"
    assert second == "<Describe the four seasons in a small town by the sea.>A:"


def test_the_first_end_of_text_is_kept_and_does_not_stop_the_decoding(runner_context, monkeypatch):
    ctx = runner_context("generate", **KEYS)
    plain = generate.run(ctx)
    end = plain.samples["tokens"][0][7]
    monkeypatch.setattr(generate, "end_ids", lambda *holders: [end])
    measured = generate.run(ctx)
    assert measured.samples["tokens"] == plain.samples["tokens"]
    assert measured.samples["eos"] == [
        text.index(end) if end in text else None for text in plain.samples["tokens"]
    ]
    assert measured.facts["eos_tokens"] == [end]


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
    return {v.metric: v for v in derived.values(own, baseline)}


def test_the_metrics_of_a_text_are_exact():
    found = rows(record([LOOP, FRESH, LOOP, FRESH]))
    assert found["gen_degenerated"].value == 0.5
    assert found["gen_onset"].value == 9
    assert found["gen_onset"].n == 64
    assert found["gen_onset"].note == "each: 9, none, 9, none"
    assert found["gen_loop_onset"].value == 4
    assert found["gen_loop_tokens"].value == 60
    assert found["gen_loop_tokens"].note == "period 2, 60 tokens; none; period 2, 60 tokens; none"
    assert found["gen_distinct_4grams"].value == pytest.approx((2 * 6 / 61 + 2) / 4)
    assert (found["gen_eos"].value, found["gen_eos"].n) == (64, 64)
    assert "gen_collapsed" not in found


def test_what_follows_an_end_of_text_counts_for_nothing():
    found = rows(record([LOOP, FRESH], eos=[4, 10]))
    assert found["gen_degenerated"].value == 0
    assert found["gen_loop_tokens"].value == 0
    assert found["gen_eos"].value == 4


def test_a_candidate_is_judged_against_the_natives_own_repetition():
    native = record([FRESH, LATE, LOOP])
    found = rows(record([QUICK, QUICK, LOOP]), native)
    assert found["gen_collapsed"].value == pytest.approx(2 / 3)  # the third does what native does
    assert found["gen_native_degenerated"].value == pytest.approx(2 / 3)
    assert found["gen_native_onset"].note == "each: none, 29, 9"
    assert found["gen_first_divergence"].note == "each: 0, 0, none"
    assert found["gen_first_divergence"].value == 0


def test_a_text_that_ends_at_once_where_natives_goes_on_has_collapsed():
    """As repetition does: useful are the tokens before either."""
    native = record([FRESH, FRESH, LATE, FRESH], eos=[None, 40, None, 8])
    found = rows(record([FRESH, FRESH, LATE, QUICK], eos=[0, 9, 20, None]), native)
    assert found["gen_useful_tokens"].note == "each: 0, 9, 20, 4"
    assert rows(native)["gen_useful_tokens"].note == "each: none, 40, 29, 8"
    assert found["gen_useful_tokens"].value == 4
    assert (
        found["gen_collapsed"].value == 0.75
    )  # 0 of 64, 9 of 40, from 4 where native's 8 tokens loop nowhere; not 20 of 29
    assert (
        rows(record([FRESH], eos=[16]), record([FRESH]))["gen_collapsed"].value == 0
    )  # a quarter is not fewer
    assert rows(record([FRESH], eos=[15]), record([FRESH]))["gen_collapsed"].value == 1


def test_a_prompt_that_native_does_not_answer_tells_nothing_and_one_that_it_answers_still_does():
    """A repetition is measured against native's own onset (none: the whole length)."""
    silent = rows(record([QUICK, QUICK], eos=[None, None]), record([FRESH, FRESH], eos=[0, 20]))
    assert (silent["gen_collapsed"].value, silent["gen_collapsed"].n) == (1.0, 1)
    assert silent["gen_collapsed"].note == "1 more, where native ends at once"
    all_silent = rows(record([QUICK]), record([FRESH], eos=[0]))["gen_collapsed"]
    assert (all_silent.value, all_silent.note) == (None, "native's own texts end at once")


def test_texts_of_other_prompts_are_not_compared():
    found = rows(record([LOOP]), record([LOOP], prompt_sha="b"))
    assert found["gen_collapsed"].value is None
    assert "prompt_sha is 'a' here and 'b' on the baseline" in found["gen_collapsed"].note
