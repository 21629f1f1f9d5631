"""Token agreement with the native baseline over many greedy steps: teacher-forced, then free.

The baseline's task generates the greedy text and reads it twice more: in chunks with a neighbour in the batch
(the noise floor, A/A), and behind a line end (a flip there means that the text itself is undecided). A
candidate's task reads the baseline's text, then decodes freely from a few steps before the first difference:
these must repeat the teacher-forced argmax, which shows that reading in chunks equals decoding.
"""

from collections.abc import Callable
from typing import Any

from kvbench.engines.protocol import Engine
from kvbench.errors import KvbenchError
from kvbench.files import content_hash
from kvbench.matrix.resolve_backend import check_context
from kvbench.metrics.agreement import NEAR_TIE
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text.decode import Trace, greedy, teacher_forced
from kvbench.runners.text.encode import NEUTRAL, bos_ids, end_ids, head_ids, neutral_ids, perturbed

CHUNK = 64  # tokens of a forward over a known text
BEFORE = 48  # tokens of prompt and native text before the divergence, kept as text for the reader
LEAD = 8  # real decode steps before the divergence that must repeat the teacher-forced argmax


def run(ctx: Context) -> Measurement:
    """Raises Refused("invalid_context") when prompt and steps exceed the model's positions."""
    options = ctx.options
    check_context(ctx.model.facts, options["prompt_tokens"], options["steps"])
    prompt = head_ids(ctx, options["prompt_tokens"])
    neighbour = options["steps"] // CHUNK + 1 + ctx.spec["page_size"] if ctx.is_baseline else 0
    neutral = neutral_ids(ctx.model.tokenizer) if ctx.is_baseline else []
    own = options["prompt_tokens"] + len(neutral) + options["steps"]
    engine = ctx.engine(sequences=1, tokens=own + neighbour)
    samples, facts = (_baseline if ctx.is_baseline else _candidate)(ctx, engine, prompt)
    ends = end_ids(ctx.model.tokenizer, getattr(ctx.model.model, "generation_config", None))
    facts |= {"prompt_tokens": len(prompt), "prompt_sha": content_hash(prompt), "ignore_eos": True}
    facts |= {"steps": options["steps"], "draft": options["draft"], "end_ids": ends}
    return Measurement(samples, facts)


def _baseline(ctx: Context, engine: Engine, prompt: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    steps, draft = ctx.options["steps"], ctx.options["draft"]
    seq = engine.add()
    text = greedy(engine, seq, prompt, steps, draft, _progress(ctx, "greedy", 0))
    engine.truncate(seq, 0)
    progress = _progress(ctx, "re-run", steps)
    again = teacher_forced(engine, seq, prompt, text.best, CHUNK, progress, neighbour=engine.add())
    prefix, unprefixed = _prefix(ctx, prompt, steps)
    behind: list[int] = []
    if prefix:
        engine.truncate(seq, 0)
        progress = _progress(ctx, "behind a line end", 2 * steps)
        behind = teacher_forced(engine, seq, prefix, text.best, CHUNK, progress).best
    samples = {
        "tokens": text.best,
        "margins": [round(x, 6) for x in text.margins],
        "aa_margins": [round(x, 6) for x in again.margins],
        "prefix_tokens": behind,
        "logprob_native_token": [round(x, 6) for x in text.logprobs],
        "continuation": [],
        "continuation_text": "",
        "native_text": ctx.model.tokenizer.decode(text.best),
    }
    mode = f"up to {draft} drafted tokens verified a forward" if draft else "one token a forward"
    facts = {
        "mode": f"greedy, {mode}; A/A re-run in chunks of {CHUNK}, a neighbour in the batch",
        "forwards": text.forwards,
        "aa_disagreements": [i for i, (a, b) in enumerate(zip(text.best, again.best, strict=True)) if a != b],
        "prefix": unprefixed or f"{NEUTRAL!r} before the prompt, ids {neutral_ids(ctx.model.tokenizer)}",
        "checked_decode_steps": [],
    }
    return samples, facts


def _prefix(ctx: Context, prompt: list[int], steps: int) -> tuple[list[int], str]:
    neutral, most = neutral_ids(ctx.model.tokenizer), ctx.model.facts.max_context
    if not neutral:
        return [], "none: the tokenizer has no token for a line end"
    if most is not None and len(prompt) + len(neutral) + steps - 1 > most:
        return [], f"none: prompt and steps take all {most} positions of the model"
    return perturbed(prompt, neutral, bos_ids(ctx.model.tokenizer)), ""


def _candidate(ctx: Context, engine: Engine, prompt: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    assert ctx.baseline is not None
    native: list[int] = ctx.baseline.samples["tokens"]
    if len(native) != ctx.options["steps"] or ctx.baseline.facts["prompt_sha"] != content_hash(prompt):
        raise KvbenchError("The baseline's record has another prompt or number of steps; use --rerun all.")
    # A chunk that is not read back from the pages (`prefill_reads: fresh`) is not what a decode step reads.
    chunk = CHUNK if ctx.options["draft"] and ctx.spec["prefill_reads"] == "stored" else 1
    seq = engine.add()
    trace = teacher_forced(engine, seq, prompt, native, chunk, _progress(ctx, "teacher-forced", 0))
    differs = [i for i, (a, b) in enumerate(zip(trace.best, native, strict=True)) if a != b]
    first = differs[0] if differs else None
    end = len(native) if first is None else min(first + 1 + ctx.options["continuation"], len(native))
    checked, mismatches, free = decode_from(engine, seq, prompt, native, trace, first, end)
    texts = {
        "continuation_text": free,
        "native_text": native[first:end],
        "text_before": [*prompt, *native[:first]][-BEFORE:],
    }
    samples = {
        "tokens": trace.best,
        "margins": [],
        "logprob_native_token": [round(x, 6) for x in trace.logprobs],
        "continuation": free,
        **{name: ctx.model.tokenizer.decode(ids) if free else "" for name, ids in texts.items()},
    }
    facts = {
        "mode": f"teacher-forced, chunks of {chunk}" if chunk > 1 else "teacher-forced, one token a forward",
        "forwards": trace.forwards,
        "checked_decode_steps": checked,
        "decode_near_ties": mismatches,
    }
    return samples, facts


def decode_from(
    engine: Engine, seq: int, prompt: list[int], native: list[int], trace: Trace, first: int | None, end: int
) -> tuple[list[int], list[int], list[int]]:
    """Decode one token a forward: native history before `first` (None: its end), then freely to `end`.

    Returns the steps along the native history, those of them whose near-tie flipped, and the tokens from the
    divergence on. Raises KvbenchError for a flip that is no near-tie.
    """
    anchor = len(native) - 1 if first is None else first
    checked = list(range(max(1, anchor - LEAD), anchor + 1))  # step 0 comes from the prefill in both modes
    engine.truncate(seq, len(prompt) + max(0, anchor - LEAD - 1))
    flipped = []
    for step in checked:
        logits = engine.decode([seq], [native[step - 1]])[0]
        best = int(logits.argmax())
        if best != trace.best[step]:
            gap = float(logits[best] - logits[trace.best[step]])
            if gap > NEAR_TIE[engine.model.dtype_name]:
                raise KvbenchError(
                    f"Step {step}: a real decode step gives token {best}, but the teacher-forced pass gave "
                    f"{trace.best[step]}; the logits differ by {gap:.4g}, more than rounding explains. The "
                    "engine's decode and prefill disagree, so the agreement cannot be trusted."
                )
            flipped.append(step)
    if first is None:
        return checked, flipped, []
    free = [trace.best[first]]
    while first + len(free) < end:
        free.append(int(engine.decode([seq], [free[-1]])[0].argmax()))
    return checked, flipped, free


def _progress(ctx: Context, note: str, before: int) -> Callable[[int], None]:
    total = ctx.options["steps"] * (3 if ctx.is_baseline else 1)
    return lambda done: ctx.progress(before + done, total, note)
