"""Greedy decoding with and without drafts; agreement along the native text and after a divergence."""

import math

import pytest

from kvbench.errors import KvbenchError, Refused, UsageError
from kvbench.runners import agreement
from kvbench.runners.text.decode import greedy, propose, teacher_forced
from kvbench.runners.text.encode import bos_ids, head_ids, neutral_ids, perturbed

PROMPT = [72, 101, 108, 108, 111, 44, 32, 72, 101]
STEPS = 96
# A K/V that differs in its last bit may be stored as the neighbouring code.
TOLERANCE = {"native": 1e-3, "int8_sym": 5e-2}


@pytest.mark.parametrize(
    ("history", "n", "proposed"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], 2, [7, 1]),  # the latest occurrence
        ([5, 1, 2, 9, 8, 1, 2], 1, [9]),  # no match of 3: one of 2
        ([4, 7, 8, 4], 2, [7, 8]),  # nor of 2: one of 1
        ([7, 7, 7], 4, [7, 7, 7, 7]),  # a loop runs on
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([1, 1], 0, []),
    ],
)
def test_drafts_are_what_followed_the_latest_longest_match(history, n, proposed):
    before = list(history)
    assert propose(history, n) == proposed
    assert history == before


def engine_of(runner_context, **keys):
    return runner_context("agreement", **keys).engine(sequences=1, tokens=len(PROMPT) + STEPS)


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
    assert plain.forwards == steps
    assert engine.length(seq) == len(PROMPT) + steps - 1
    engine.truncate(seq, 0)
    drafted = greedy(engine, seq, PROMPT, steps, draft)
    assert drafted.best == plain.best
    assert drafted.margins == pytest.approx(plain.margins, abs=TOLERANCE[fmt])
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE[fmt])
    assert engine.length(seq) == len(PROMPT) + steps - 1
    if steps == STEPS and "looping" in model:
        assert drafted.forwards < 0.75 * steps


def test_plain_greedy_takes_the_argmax_of_the_whole_history_read_anew(runner_context):
    engine = engine_of(runner_context)
    seq = engine.add()
    trace = greedy(engine, seq, PROMPT, 20, 0)
    engine.truncate(seq, 0)
    logits = engine.prefill(seq, PROMPT + trace.best[:-1], "all")[len(PROMPT) - 1 :]
    assert trace.best == logits.argmax(-1).tolist()
    top = logits.topk(2).values
    assert trace.margins == pytest.approx((top[:, 0] - top[:, 1]).tolist(), abs=1e-3)
    assert trace.logprobs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-3)


@pytest.mark.parametrize("fmt", ["native", "int8_sym"])
@pytest.mark.parametrize("chunk", [1, 7, 500])
def test_a_text_read_in_chunks_gives_the_argmax_and_logprobs_it_was_decoded_with(runner_context, fmt, chunk):
    engine = engine_of(runner_context, kv_format=fmt)
    seq = engine.add()
    text = greedy(engine, seq, PROMPT, STEPS, 0)
    engine.truncate(seq, 0)
    trace = teacher_forced(engine, seq, PROMPT, text.best, chunk)
    assert trace.best == text.best
    assert trace.logprobs == pytest.approx(text.logprobs, abs=TOLERANCE[fmt])
    assert engine.length(seq) == len(PROMPT) + STEPS - 1
    assert trace.forwards == 1 + math.ceil((STEPS - 1) / chunk)


def test_along_another_history_logprobs_are_of_its_tokens(runner_context):
    engine = engine_of(runner_context)
    seq = engine.add()
    other = [10, 20, 30, 40]
    trace = teacher_forced(engine, seq, PROMPT, other, 2)
    engine.truncate(seq, 0)
    logits = engine.prefill(seq, PROMPT + other[:-1], "all")[len(PROMPT) - 1 :]
    expected = [row.log_softmax(-1)[token].item() for row, token in zip(logits, other, strict=True)]
    assert trace.logprobs == pytest.approx(expected, abs=1e-3)
    assert trace.best == logits.argmax(-1).tolist()


@pytest.mark.parametrize("draft", [0, 4])
def test_the_baseline_keeps_its_text_margins_and_noise_floor(runner_context, draft):
    ctx = runner_context("agreement", steps=STEPS, prompt_tokens=24, draft=draft)
    seen = []
    object.__setattr__(ctx, "progress", lambda done, total, note: seen.append((done, total, note)))
    measured = agreement.run(ctx)
    samples, facts = measured.samples, measured.facts
    assert len(samples["tokens"]) == len(samples["margins"]) == len(samples["logprob_native_token"]) == STEPS
    assert min(samples["margins"]) >= 0
    assert max(samples["logprob_native_token"]) < 0
    assert facts["aa_disagreements"] == []
    assert samples["aa_margins"] == pytest.approx(samples["margins"], abs=1e-3)
    assert facts["end_ids"] == [ctx.model.tokenizer.eos_token_id]
    assert (facts["steps"], facts["prompt_tokens"], facts["draft"], facts["ignore_eos"]) == (
        STEPS,
        24,
        draft,
        True,
    )
    assert facts["mode"].startswith("greedy, up to 4 drafted" if draft else "greedy, one token")
    assert samples["native_text"] == ctx.model.tokenizer.decode(samples["tokens"])
    assert (2 * STEPS, 3 * STEPS, "re-run") in seen
    assert seen[-1] == (3 * STEPS, 3 * STEPS, "behind a line end")


def test_the_baselines_text_is_read_once_more_behind_a_line_end(runner_context):
    """Against one prefill of the whole history with the line end's id before it, and behind any BOS."""
    ctx = runner_context("agreement", steps=STEPS, prompt_tokens=24)
    measured = agreement.run(ctx)
    neutral, bos = neutral_ids(ctx.model.tokenizer), bos_ids(ctx.model.tokenizer)
    assert ctx.model.tokenizer.decode(neutral) == "\n"
    prompt = head_ids(ctx, 24)
    engine = ctx.engine(sequences=1, tokens=24 + 1 + STEPS)
    history = [*bos, *neutral, *prompt[len(bos) :], *measured.samples["tokens"][:-1]]
    logits = engine.prefill(engine.add(), history, "all")[24:]
    assert measured.samples["prefix_tokens"] == logits.argmax(-1).tolist()
    assert measured.samples["prefix_tokens"] != measured.samples["tokens"]  # the line end is really there
    assert measured.facts["prefix"] == f"'\\n' before the prompt, ids {neutral}"


def test_a_text_that_fills_the_models_positions_has_no_room_for_a_line_end(runner_context):
    ctx = runner_context("agreement", steps=4, prompt_tokens=24)
    assert agreement._prefix(ctx, [1] * 4092, 4)[0] != []  # 4092 + 1 + 4 - 1 positions
    prefix, reason = agreement._prefix(ctx, [1] * 4093, 4)
    assert (prefix, reason) == ([], "none: prompt and steps take all 4096 positions of the model")


def test_a_line_end_stands_behind_the_bos_that_the_tokenizer_puts_first():
    assert perturbed([1, 5, 6], [9], [1]) == [1, 9, 5, 6]
    assert perturbed([5, 1, 6], [9], [1]) == [9, 5, 1, 6]
    assert perturbed([5, 6], [9, 8], []) == [9, 8, 5, 6]


def test_a_tokenizer_without_a_line_end_gives_none():
    from tests.factories.quality_tools import word_tokenizer

    assert neutral_ids(word_tokenizer(["a", " "])) == []


@pytest.mark.parametrize(
    ("model", "draft", "continuation"),
    [("tiny-llama", 0, 12), ("tiny-llama", 4, 4000), ("tiny-qwen2", 4, 0), ("tiny-qwen2", 4, 12)],
)
def test_a_candidate_diverges_where_its_own_greedy_text_does(
    runner_context, as_baseline, model, draft, continuation
):
    keys = {"model": model, "steps": STEPS, "prompt_tokens": 24, "draft": draft, "continuation": continuation}
    ctx = runner_context("agreement", **keys)
    baseline = as_baseline(ctx, agreement.run(ctx))
    native = baseline.samples["tokens"]
    ctx = runner_context("agreement", baseline=baseline, kv_format="int8_sym", **keys)
    measured = agreement.run(ctx)
    tokens = measured.samples["tokens"]
    first = next(i for i, (a, b) in enumerate(zip(tokens, native, strict=True)) if a != b)
    assert first == {"tiny-llama": 2, "tiny-qwen2": 24}[model]

    engine = ctx.engine(sequences=1, tokens=24 + STEPS)
    own = greedy(engine, engine.add(), head_ids(ctx, ctx.options["prompt_tokens"]), STEPS, 0).best
    assert own[:first] == native[:first]
    end = min(first + 1 + continuation, STEPS)
    assert measured.samples["continuation"] == own[first:end]
    assert measured.samples["continuation_text"] == ctx.model.tokenizer.decode(own[first:end])
    assert measured.samples["native_text"] == ctx.model.tokenizer.decode(native[first:end])
    before = [*head_ids(ctx, 24), *native[:first]][-agreement.BEFORE :]
    assert measured.samples["text_before"] == ctx.model.tokenizer.decode(before)
    assert measured.facts["checked_decode_steps"] == list(range(max(1, first - 8), first + 1))
    assert measured.facts["decode_near_ties"] == []
    assert measured.facts["mode"] == (
        "teacher-forced, chunks of 64" if draft else "teacher-forced, one token a forward"
    )


def test_a_neighbour_in_the_batch_reads_its_own_text_and_changes_no_argmax(runner_context):
    engine = engine_of(runner_context)
    seq, beside = engine.add(), engine.add()
    text = greedy(engine, seq, PROMPT, 40, 0)
    engine.truncate(seq, 0)
    again = teacher_forced(engine, seq, PROMPT, text.best, 10, neighbour=beside)
    assert again.best == text.best
    assert engine.length(beside) == again.forwards - 1
    assert engine.length(seq) == len(PROMPT) + 39


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2"])
def test_two_real_runs_of_the_baseline_have_no_real_divergence(runner_context, as_baseline, model):
    from kvbench.metrics.agreement import values

    keys = {"model": model, "steps": STEPS, "prompt_tokens": 24}
    ctx = runner_context("agreement", **keys)
    baseline = as_baseline(ctx, agreement.run(ctx))
    other = runner_context("agreement", baseline=baseline, **{**keys, "draft": 4})
    found = {v.metric: v for v in values(as_baseline(other, agreement.run(other)), baseline)}
    assert found["real_divergence"].value == STEPS
    assert found["aa_margin_noise"].value < 1e-3
    assert found["top1_teacher_forced"].high == 1


def test_native_against_itself_never_diverges_and_is_still_decoded_at_the_end(runner_context, as_baseline):
    keys = {"steps": STEPS, "prompt_tokens": 24, "draft": 4}
    ctx = runner_context("agreement", **keys)
    baseline = as_baseline(ctx, agreement.run(ctx))
    measured = agreement.run(runner_context("agreement", baseline=baseline, **keys))
    assert measured.samples["tokens"] == baseline.samples["tokens"]
    assert measured.samples["continuation"] == []
    assert measured.samples["native_text"] == measured.samples["text_before"] == ""
    assert measured.facts["checked_decode_steps"] == list(range(STEPS - 9, STEPS))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_divergence_at_the_very_first_step_is_handled(runner_context, as_baseline, steps):
    keys = {"steps": steps, "prompt_tokens": 24}
    ctx = runner_context("agreement", **keys)
    baseline = as_baseline(ctx, agreement.run(ctx))
    own = baseline.samples["tokens"][0]
    other = [own + 1 if own < 250 else own - 1] * steps
    baseline.samples["tokens"][:] = other
    measured = agreement.run(runner_context("agreement", baseline=baseline, **keys))
    assert measured.samples["tokens"][0] == own
    assert measured.samples["continuation"][0] == own
    assert len(measured.samples["continuation"]) == steps
    assert measured.facts["checked_decode_steps"] == []


def test_a_decode_that_differs_from_reading_in_chunks_is_a_fault(runner_context, as_baseline):
    keys = {"steps": 32, "prompt_tokens": 24, "draft": 4}
    ctx = runner_context("agreement", **keys)
    baseline = as_baseline(ctx, agreement.run(ctx))
    ctx = runner_context("agreement", baseline=baseline, **keys)
    make = ctx.engine

    def broken(**size):
        engine = make(**size)
        real = engine.decode
        engine.decode = lambda seqs, tokens: -real(seqs, tokens)
        return engine

    object.__setattr__(ctx, "engine", broken)
    with pytest.raises(KvbenchError, match="decode and prefill disagree"):
        agreement.run(ctx)


def test_a_chunk_read_fresh_is_no_decode_so_steps_are_single(runner_context, as_baseline):
    keys = {"steps": 8, "prompt_tokens": 24, "draft": 4, "prefill_reads": "fresh"}
    ctx = runner_context("agreement", **keys)
    baseline = as_baseline(ctx, agreement.run(ctx))
    measured = agreement.run(runner_context("agreement", baseline=baseline, kv_format="int8_sym", **keys))
    assert measured.facts["mode"] == "teacher-forced, one token a forward"


def test_a_baseline_of_another_prompt_is_refused(runner_context, as_baseline):
    ctx = runner_context("agreement", steps=4, prompt_tokens=24)
    baseline = as_baseline(ctx, agreement.run(ctx))
    with pytest.raises(KvbenchError, match="another prompt"):
        agreement.run(runner_context("agreement", baseline=baseline, steps=4, prompt_tokens=25))


def test_a19_t4_more_steps_than_the_model_has_positions_are_refused_before_any_work(runner_context):
    ctx = runner_context("agreement", steps=4074, prompt_tokens=24)
    object.__setattr__(ctx, "engine", lambda **size: pytest.fail("an engine was made"))
    with pytest.raises(Refused, match="4096") as e:
        agreement.run(ctx)
    assert e.value.reason == "invalid_context"


def test_a_text_shorter_than_the_prompt_is_a_usage_error(runner_context, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Too short.")
    with pytest.raises(UsageError, match="has 10 tokens, but 24"):
        agreement.run(runner_context("agreement", steps=4, prompt_tokens=24, data=str(path)))
