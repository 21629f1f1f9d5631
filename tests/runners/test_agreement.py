"""Greedy decoding with and without drafts; agreement along the native text and after a divergence."""

import math

import pytest

from kvbench.errors import KvbenchError, Refused, UsageError
from kvbench.runners import agreement
from kvbench.runners.text.decode import greedy, propose, teacher_forced
from kvbench.runners.text.encode import bos_ids, head_ids, neutral_ids, perturbed
from tests.factories.quality_tools import word_tokenizer

PROMPT = [72, 101, 108, 108, 111, 44, 32, 72, 101]
STEPS = 96
# A K/V that differs in its last bit may be stored as the neighbouring code.
TOLERANCE = {"native": 1e-3, "int8_sym": 5e-2}


@pytest.mark.parametrize(
    ("history", "n", "proposed"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]), ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], 2, [7, 1]),  # the latest
        ([5, 1, 2, 9, 8, 1, 2], 1, [9]), ([4, 7, 8, 4], 2, [7, 8]),  # no match of 3, nor of 2
        ([7, 7, 7], 4, [7, 7, 7, 7]), ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a loop runs on
        ([1, 2, 3], 4, []), ([1], 4, []), ([1, 1], 0, []),
    ],
)  # fmt: skip
def test_drafts_are_what_followed_the_latest_longest_match(history, n, proposed):
    before = list(history)
    assert propose(history, n) == proposed
    assert history == before


def engine_of(runner_context, **keys):
    return runner_context("agreement", **keys).engine(sequences=2, tokens=len(PROMPT) + STEPS)


def baseline_of(runner_context, as_baseline, **keys):
    ctx = runner_context("agreement", **keys)
    return as_baseline(ctx, agreement.run(ctx))


@pytest.fixture(params=["tiny-llama", "looping"])
def model(request):
    """One text hardly ever repeats (drafts are rejected), the other loops (they are kept)."""
    return request.getfixturevalue("looping_model") if request.param == "looping" else request.param


@pytest.mark.parametrize("fmt", ["native", "int8_sym"])
@pytest.mark.parametrize(("draft", "steps"), [(8, 1), (8, 2), (1, STEPS), (8, STEPS)])
def test_drafted_text_equals_plain_greedy_exactly(runner_context, model, fmt, draft, steps):
    engine = engine_of(runner_context, model=model, kv_format=fmt)
    seq = engine.add()
    plain = greedy(engine, seq, PROMPT, steps, 0)
    assert (plain.forwards, engine.length(seq)) == (steps, len(PROMPT) + steps - 1)
    engine.truncate(seq, 0)
    drafted = greedy(engine, seq, PROMPT, steps, draft)
    assert drafted.best == plain.best
    assert drafted.margins == pytest.approx(plain.margins, abs=TOLERANCE[fmt])
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE[fmt])
    assert engine.length(seq) == len(PROMPT) + steps - 1
    if steps == STEPS and "looping" in model:
        assert drafted.forwards < 0.75 * steps


def test_a_trace_is_that_of_the_whole_history_read_anew(runner_context):
    """Plain greedy takes its argmax; along another history the log-probabilities are of its tokens."""
    engine = engine_of(runner_context)
    seq, other = engine.add(), [10, 20, 30, 40]
    text = greedy(engine, seq, PROMPT, 20, 0)
    engine.truncate(seq, 0)
    forced = teacher_forced(engine, seq, PROMPT, other, 2)
    for trace, tokens in ((text, text.best), (forced, other)):
        engine.truncate(seq, 0)
        logits = engine.prefill(seq, PROMPT + tokens[:-1], "all")[len(PROMPT) - 1 :]
        assert trace.best == logits.argmax(-1).tolist()
        top = logits.topk(2).values
        assert trace.margins == pytest.approx((top[:, 0] - top[:, 1]).tolist(), abs=1e-3)
        expected = [row.log_softmax(-1)[token].item() for row, token in zip(logits, tokens, strict=True)]
        assert trace.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("fmt", ["native", "int8_sym"])
@pytest.mark.parametrize(("chunk", "neighbour"), [(1, False), (7, True), (500, False)])
def test_a_text_read_in_chunks_is_the_one_that_was_decoded(runner_context, fmt, chunk, neighbour):
    """A neighbour in the batch reads its own text and changes no argmax."""
    engine = engine_of(runner_context, kv_format=fmt)
    seq, beside = engine.add(), engine.add() if neighbour else None
    text = greedy(engine, seq, PROMPT, STEPS, 0)
    engine.truncate(seq, 0)
    trace = teacher_forced(engine, seq, PROMPT, text.best, chunk, neighbour=beside)
    assert trace.best == text.best
    assert trace.logprobs == pytest.approx(text.logprobs, abs=TOLERANCE[fmt])
    assert engine.length(seq) == len(PROMPT) + STEPS - 1
    assert trace.forwards == 1 + math.ceil((STEPS - 1) / chunk)
    assert beside is None or engine.length(beside) == trace.forwards - 1


@pytest.mark.parametrize("draft", [0, 4])
def test_the_baseline_keeps_its_text_margins_and_noise_floor(runner_context, draft):
    """Behind a line end: as one prefill of the whole history with its id before, after any BOS."""
    ctx = runner_context("agreement", steps=STEPS, prompt_tokens=24, draft=draft)
    seen, tokenizer = [], ctx.model.tokenizer
    object.__setattr__(ctx, "progress", lambda done, total, note: seen.append((done, total, note)))
    measured = agreement.run(ctx)
    samples, facts = measured.samples, measured.facts
    assert len(samples["tokens"]) == len(samples["margins"]) == len(samples["logprob_native_token"]) == STEPS
    assert min(samples["margins"]) >= 0 > max(samples["logprob_native_token"])
    assert samples["aa_margins"] == pytest.approx(samples["margins"], abs=1e-3)
    assert samples["native_text"] == tokenizer.decode(samples["tokens"])
    neutral, bos = neutral_ids(tokenizer), bos_ids(tokenizer)
    assert tokenizer.decode(neutral) == "\n"
    expected = {"aa_disagreements": [], "end_ids": [tokenizer.eos_token_id], "steps": STEPS, "draft": draft}
    expected |= {"prompt_tokens": 24, "ignore_eos": True, "prefix": f"'\\n' before the prompt, ids {neutral}"}
    assert facts.items() >= expected.items()
    assert facts["mode"].startswith("greedy, up to 4 drafted" if draft else "greedy, one token")
    assert (2 * STEPS, 3 * STEPS, "re-run") in seen
    assert seen[-1] == (3 * STEPS, 3 * STEPS, "behind a line end")
    engine = ctx.engine(sequences=1, tokens=24 + 1 + STEPS)
    history = [*bos, *neutral, *head_ids(ctx, 24)[len(bos) :], *samples["tokens"][:-1]]
    logits = engine.prefill(engine.add(), history, "all")[24:]
    assert samples["prefix_tokens"] == logits.argmax(-1).tolist()
    assert samples["prefix_tokens"] != samples["tokens"]  # the line end is really there


def test_a_line_end_needs_room_and_a_token_and_stands_behind_the_bos(runner_context):
    ctx = runner_context("agreement", steps=4, prompt_tokens=24)
    assert agreement._prefix(ctx, [1] * 4092, 4)[0] != []  # 4092 + 1 + 4 - 1 positions
    reason = "none: prompt and steps take all 4096 positions of the model"
    assert agreement._prefix(ctx, [1] * 4093, 4) == ([], reason)
    assert neutral_ids(word_tokenizer(["a", " "])) == []
    assert perturbed([1, 5, 6], [9], [1]) == [1, 9, 5, 6]
    assert perturbed([5, 1, 6], [9], [1]) == [9, 5, 1, 6]
    assert perturbed([5, 6], [9, 8], []) == [9, 8, 5, 6]


@pytest.mark.parametrize(
    ("model", "draft", "more"),
    [("tiny-llama", 0, 12), ("tiny-llama", 4, 4000), ("tiny-qwen2", 4, 0), ("tiny-qwen2", 4, 12)],
)
def test_a_candidate_diverges_where_its_own_greedy_text_does(runner_context, as_baseline, model, draft, more):
    keys = {"model": model, "steps": STEPS, "prompt_tokens": 24, "draft": draft, "continuation": more}
    baseline = baseline_of(runner_context, as_baseline, **keys)
    native = baseline.samples["tokens"]
    ctx = runner_context("agreement", baseline=baseline, kv_format="int8_sym", **keys)
    measured = agreement.run(ctx)
    samples, facts = measured.samples, measured.facts
    first = next(i for i, (a, b) in enumerate(zip(samples["tokens"], native, strict=True)) if a != b)
    assert first == {"tiny-llama": 2, "tiny-qwen2": 24}[model]
    engine, prompt = ctx.engine(sequences=1, tokens=24 + STEPS), head_ids(ctx, 24)
    own = greedy(engine, engine.add(), prompt, STEPS, 0).best
    assert own[:first] == native[:first]
    end = min(first + 1 + more, STEPS)
    assert samples["continuation"] == own[first:end]
    before = [*prompt, *native[:first]][-agreement.BEFORE :]
    texts = {"continuation_text": own[first:end], "native_text": native[first:end], "text_before": before}
    for name, ids in texts.items():
        assert samples[name] == ctx.model.tokenizer.decode(ids)
    assert facts["checked_decode_steps"] == list(range(max(1, first - 8), first + 1))
    assert facts["decode_near_ties"] == []
    assert facts["mode"] == f"teacher-forced, {'chunks of 64' if draft else 'one token a forward'}"


def test_native_against_itself_never_diverges_and_is_still_decoded_at_the_end(runner_context, as_baseline):
    keys = {"steps": STEPS, "prompt_tokens": 24, "draft": 4}
    baseline = baseline_of(runner_context, as_baseline, **keys)
    measured = agreement.run(runner_context("agreement", baseline=baseline, **keys))
    expected = {
        "tokens": baseline.samples["tokens"],
        "continuation": [],
        "native_text": "",
        "text_before": "",
    }
    assert measured.samples.items() >= expected.items()
    assert measured.facts["checked_decode_steps"] == list(range(STEPS - 9, STEPS))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_divergence_at_the_very_first_step_is_handled(runner_context, as_baseline, steps):
    keys = {"steps": steps, "prompt_tokens": 24}
    baseline = baseline_of(runner_context, as_baseline, **keys)
    own = baseline.samples["tokens"][0]
    baseline.samples["tokens"][:] = [own + 1 if own < 250 else own - 1] * steps
    measured = agreement.run(runner_context("agreement", baseline=baseline, **keys))
    assert measured.samples["tokens"][0] == measured.samples["continuation"][0] == own
    assert len(measured.samples["continuation"]) == steps
    assert measured.facts["checked_decode_steps"] == []


def test_a_decode_that_differs_from_reading_in_chunks_is_a_fault(runner_context, as_baseline):
    keys = {"steps": 32, "prompt_tokens": 24, "draft": 4}
    ctx = runner_context("agreement", baseline=baseline_of(runner_context, as_baseline, **keys), **keys)
    engine = ctx.engine(sequences=1, tokens=24 + 32)
    real = engine.decode
    engine.decode = lambda seqs, tokens: -real(seqs, tokens)
    object.__setattr__(ctx, "engine", lambda **size: engine)
    with pytest.raises(KvbenchError, match="decode and prefill disagree"):
        agreement.run(ctx)


def test_a19_t4_what_cannot_be_compared_or_does_not_fit_is_refused(runner_context, as_baseline, tmp_path):
    baseline = baseline_of(runner_context, as_baseline, steps=4, prompt_tokens=24)
    keys = {"steps": 4, "prompt_tokens": 24, "draft": 4, "prefill_reads": "fresh"}  # which is no decode
    measured = agreement.run(runner_context("agreement", baseline=baseline, kv_format="int8_sym", **keys))
    assert measured.facts["mode"] == "teacher-forced, one token a forward"
    with pytest.raises(KvbenchError, match="another prompt"):
        agreement.run(runner_context("agreement", baseline=baseline, steps=4, prompt_tokens=25))
    (data := tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(UsageError, match="has 10 tokens, but 24"):
        agreement.run(runner_context("agreement", steps=4, prompt_tokens=24, data=str(data)))
    ctx = runner_context("agreement", steps=4074, prompt_tokens=24)
    object.__setattr__(ctx, "engine", lambda **size: pytest.fail("an engine was made"))
    with pytest.raises(Refused, match="4096") as e:
        agreement.run(ctx)
    assert e.value.reason == "invalid_context"
