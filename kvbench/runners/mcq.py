"""Multiple choice by log-probability (MMLU, C-Eval, ARC, cloze): lm-eval's prompts and scoring.

For the noise floor the baseline's task scores a spread subset twice more: with other neighbours in the batch,
and after a line end, which does not change the meaning.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from kvbench.data.questions import Question, questions
from kvbench.errors import KvbenchError, UsageError
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text import encode
from kvbench.runners.text.encode import Encoder, Fitted, Pair
from kvbench.runners.text.prompts import TEMPLATES, Template, continuations, problem, spread
from kvbench.runners.text.scoring import Group, capacity, group, score

AA_CHUNK = 64  # tokens of a sequence a forward when the baseline is scored again

Asked = list[Question]
Pairs = dict[str, Pair]  # by id
Scores = dict[str, dict[str, list[float]]]  # by pass and id, one for each choice


def run(ctx: Context) -> Measurement:
    """Raises NotAvailable for a set that is not here, UsageError for options in conflict, KvbenchError."""
    options, tokenizer, window = ctx.options, ctx.model.tokenizer, ctx.model.facts.max_context
    task, shots, chat = options["tasks"], options["shots"], options["chat_template"]
    data = questions(task, ctx.data_dir)
    encoder = Encoder(TEMPLATES[task], tokenizer, chat, window, data.examples, encode.bos_ids(tokenizer))
    asked = spread(data.questions, options["limit"])
    if chat:
        encode.check_chat(tokenizer)
    if short := {q.subject for q in asked if len(data.examples.get(q.subject, ())) < shots}:
        raise UsageError(
            f"{data.name} has fewer than {shots} examples for {', '.join(sorted(short))}; use `shots: 0`."
        )
    fitted: dict[str, Fitted] = {}
    for qs in _by_subject([q for q in asked if problem(q) is None]).values():
        fitted |= {q.id: f for q, f in zip(qs, encoder.subject(qs, shots), strict=True)}
    truncated = sum(f.truncated for f in fitted.values())
    if truncated > options["max_truncated"] * len(asked):
        raise KvbenchError(
            f"{truncated} of {len(asked)} {task} questions do not fit the model's {window} positions with "
            f"{shots} examples; `max_truncated` allows a share of {options['max_truncated']}. Use fewer "
            "shots or raise it."
        )
    pairs = {key: f.pair for key, f in fitted.items() if f.pair is not None}
    scores, work = _score(ctx, [q for q in asked if q.id in pairs], pairs, encoder)
    unfitted, template = Fitted(None, 0, 0), encoder.template
    rows = [_row(q, fitted.get(q.id, unfitted), scores["scores"].get(q.id), template) for q in asked]
    for row in rows:
        again = ("aa_scores", "prefix_scores")
        row.update({name: scores[name][row["id"]] for name in again if row["id"] in scores[name]})
    scored = [r for r in rows if r["skipped"] is None]
    if not scored:
        raise KvbenchError(f"None of {len(asked)} {task} questions could be scored: {rows[0]['skipped']}.")
    facts = {
        "task": task,
        "shots": shots,
        "choice_ids": _choice_ids(asked, pairs, encoder),
        "prompt_policy": encoder.template.policy + ("; in the tokenizer's chat template" if chat else ""),
        "bos": encode.bos_policy(tokenizer),
        "total": len(data.questions),
        "asked": len(asked),
        "scored": len(scored),
        "skipped": len(rows) - len(scored),
        "truncated": truncated,
        "merged_joins": sum(pair.merged for pair in pairs.values()),
        "ties": sum(r["tie"] for r in scored),
        **work,
    }
    facts |= {"data_sha": data.sha256, "data_source": data.source, "data_license": data.license}
    partial = f"{len(asked)} of {len(data.questions)} questions" if len(asked) < len(data.questions) else None
    return Measurement({"questions": rows}, facts, partial)


def _by_subject(qs: Asked) -> dict[str, Asked]:
    found: dict[str, Asked] = defaultdict(list)
    for q in qs:
        found[q.subject].append(q)
    return found


@dataclass(frozen=True)
class Pass:
    """Questions `ids` scored together as `group` (same order) in chunks, and stored as `name`."""

    name: str
    note: str
    ids: tuple[str, ...]
    group: Group
    chunk: int


def _score(ctx: Context, scored: Asked, pairs: Pairs, encoder: Encoder) -> tuple[Scores, dict[str, Any]]:
    """Scores by pass ("scores"; for the baseline also "aa_scores", "prefix_scores") and id, and facts."""
    page, chunk = ctx.spec["page_size"], ctx.spec["prefill_chunk"]
    plan = []
    for subject, qs in _by_subject(scored).items():
        ids = tuple(q.id for q in qs)
        plan.append(Pass("scores", subject, ids, group([pairs[key] for key in ids]), chunk))
    work: dict[str, Any] = {
        "subjects": len(plan),
        "computed_tokens": 0,
        "prefix_tokens": sum(len(p.group.prefix) for p in plan),
        "question_tokens": sum(len(item.context) for p in plan for item in p.group.items),
        "unshared_tokens": sum(len(pair.context) for pair in pairs.values()),
    }
    if ctx.is_baseline and ctx.options["aa_limit"] and plan:
        again, facts = _again(ctx, scored, pairs, encoder)
        plan += again
        work |= facts
    scores: Scores = defaultdict(dict)
    if not plan:
        return scores, work
    engine = ctx.engine(sequences=1, tokens=capacity([p.group for p in plan], ctx.model.device, page) * page)
    total, done = sum(len(p.ids) for p in plan), 0
    for p in plan:
        for batch, found_scores, computed in score(engine, p.group, p.chunk):
            scores[p.name] |= {p.ids[i]: own for i, own in zip(batch, found_scores, strict=True)}
            done += len(batch)
            if p.name == "scores":
                work["computed_tokens"] += computed
            ctx.progress(done, total, p.note)
    return scores, work


def _again(ctx: Context, scored: Asked, pairs: Pairs, encoder: Encoder) -> tuple[list[Pass], dict[str, Any]]:
    """The passes of the baseline's noise floor over a spread subset, and their facts: with no shared prefix,
    all subjects and lengths mixed and small chunks; and behind a line end, where that fits the window.
    """
    subset = spread(scored, ctx.options["aa_limit"])
    ids = tuple(q.id for q in subset)
    whole = group([pairs[key] for key in ids], False, mixed=True)
    passes = [Pass("aa_scores", "again", ids, whole, AA_CHUNK)]
    neutral, chunk = encode.neutral_ids(ctx.model.tokenizer), ctx.spec["prefill_chunk"]
    prefix = f"{encode.NEUTRAL!r} before the prompt, ids {neutral}"
    for subject, qs in _by_subject(subset if neutral else []).items():
        fits = {}
        for q in qs:
            context = tuple(encode.perturbed(pairs[q.id].context, neutral, encoder.first))
            behind = replace(pairs[q.id], context=context)
            if not encode.overflow(behind, encoder.window):
                fits[q.id] = behind
        if fits:
            passes.append(Pass("prefix_scores", subject, tuple(fits), group(list(fits.values())), chunk))
    facts = {
        "aa_questions": len(subset),
        "aa_mode": f"no prefix shared, questions mixed over subjects and lengths, chunks of {AA_CHUNK}",
        "prefix": prefix if neutral else "none: the tokenizer has no token for a line end",
    }
    return passes, facts


def _row(q: Question, fitted: Fitted, scores: list[float] | None, template: Template) -> dict[str, Any]:
    """One question's row of the record. pick: the first of the highest scores, as in lm-eval."""
    skipped = problem(q)
    if skipped is None and (fitted.pair is None or scores is None):
        skipped = "no token of an answer is left to score behind a context"
    row: dict[str, Any] = {"id": q.id, "subject": q.subject, "answer": q.answer, "skipped": skipped}
    row |= {"dropped_shots": fitted.dropped_shots, "dropped_tokens": fitted.dropped_tokens}
    row |= {
        "truncated": fitted.truncated,
        "scores": [],
        "tokens": [],
        "chars": [],
        "pick": None,
        "tie": False,
    }
    if skipped is not None or fitted.pair is None or scores is None:
        return row
    if any(math.isnan(s) for s in scores):
        raise KvbenchError(f"A score of question {q.id} is not a number; the engine gave NaN logits.")
    best = max(scores)
    return row | {
        "scores": scores,
        "tokens": [len(c) for c in fitted.pair.continuations],
        "chars": [len(answer) for answer in template.answers(q)],
        "pick": scores.index(best),
        "tie": scores.count(best) > 1,
    }


def _choice_ids(asked: Asked, pairs: Pairs, encoder: Encoder) -> dict[str, list[list[int]]]:
    """The distinct ids that were scored for each letter; empty where choices are texts."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for q in (q for q in asked if encoder.template.letters and q.id in pairs):
        texts = continuations(encoder.template, q, encoder.chat)
        for text, c in zip(texts, pairs[q.id].continuations, strict=True):
            if list(c) not in found[text]:
                found[text].append(list(c))
    return dict(found)
