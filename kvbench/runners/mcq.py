"""Multiple choice by log-probability (MMLU, C-Eval, ARC, cloze): lm-eval's prompts and scoring, question by question.

Raw outcomes only: the summed log-probability of each choice, its tokens and characters, and the pick. Accuracy, norms
and paired differences are derived on reading. The baseline's task scores a spread subset twice more, for the noise floor: again with
other neighbours, and behind a line end, which changes no meaning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.data.questions import Question, QuestionSet, questions
from kvbench.errors import KvbenchError, UsageError
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text.encode import (
    NEUTRAL,
    Fitted,
    Pair,
    bos_ids,
    bos_policy,
    neutral_ids,
    overflow,
    perturbed,
)
from kvbench.runners.text.encoder import Encoder
from kvbench.runners.text.prompts import TEMPLATES, Template, continuations, problem, spread
from kvbench.runners.text.scoring import Group, capacity, group, score

AA_CHUNK = 64  # tokens of a sequence a forward when the baseline is scored again


def run(ctx: Context) -> Measurement:
    """Raises NotAvailable for a set that is not here, UsageError for options that do not go together, KvbenchError when
    more than `max_truncated` of the questions do not fit the model or none can be scored.
    """
    options = ctx.options
    task, shots = options["tasks"], options["shots"]
    data = questions(task, ctx.data_dir)
    encoder = Encoder(
        TEMPLATES[task],
        ctx.model.tokenizer,
        options["chat_template"],
        ctx.model.facts.max_context,
        data.examples,
        bos_ids(ctx.model.tokenizer),
    )
    asked = spread(data.questions, options["limit"])
    _check(data, encoder, shots, asked)
    fitted: dict[str, Fitted] = {}
    for qs in _by_subject([q for q in asked if problem(q) is None]).values():
        fits = encoder.subject(qs, shots)
        fitted |= {q.id: f for q, f in zip(qs, fits, strict=True)}
    truncated = sum(f.truncated for f in fitted.values())
    if truncated > options["max_truncated"] * len(asked):
        raise KvbenchError(
            f"{truncated} of {len(asked)} {task} questions do not fit the model's {encoder.window} positions with {shots} "
            f"examples; `max_truncated` allows a share of {options['max_truncated']}. Use fewer shots or raise it."
        )
    scores, work = _score(ctx, asked, fitted, encoder)
    rows = [_row(q, fitted.get(q.id), scores["scores"].get(q.id), encoder.template) for q in asked]
    for name in ("aa_scores", "prefix_scores"):
        for row in rows:
            if row["id"] in scores[name]:
                row[name] = scores[name][row["id"]]
    scored = [r for r in rows if r["skipped"] is None]
    if not scored:
        raise KvbenchError(f"None of {len(asked)} {task} questions could be scored: {rows[0]['skipped']}.")
    facts = {
        "task": task,
        "shots": shots,
        "choice_ids": _choice_ids(asked, fitted, encoder),
        "prompt_policy": encoder.template.policy
        + ("; in the tokenizer's chat template" if encoder.chat else ""),
        "bos": bos_policy(ctx.model.tokenizer),
        "total": len(data.questions),
        "asked": len(asked),
        "scored": len(scored),
        "skipped": len(rows) - len(scored),
        "truncated": truncated,
        "merged_joins": sum(f.pair.merged for f in fitted.values() if f.pair),
        "ties": sum(r["tie"] for r in scored),
        "data_sha": data.sha256,
        "data_source": data.source,
        "data_license": data.license,
        **work,
    }
    partial = f"{len(asked)} of {len(data.questions)} questions" if len(asked) < len(data.questions) else None
    return Measurement({"questions": rows}, facts, partial)


def _by_subject(qs: Sequence[Question]) -> dict[str, list[Question]]:
    found: dict[str, list[Question]] = defaultdict(list)
    for q in qs:
        found[q.subject].append(q)
    return found


def _check(data: QuestionSet, encoder: Encoder, shots: int, asked: Sequence[Question]) -> None:
    if encoder.chat and not getattr(encoder.tokenizer, "chat_template", None):
        raise UsageError(
            "chat_template: true, but the model's tokenizer has no chat template; set it to false."
        )
    short = {q.subject for q in asked if len(data.examples.get(q.subject, ())) < shots}
    if short:
        raise UsageError(
            f"{data.name} has fewer than {shots} examples for {', '.join(sorted(short))}; use `shots: 0`."
        )


def _score(
    ctx: Context, asked: Sequence[Question], fitted: Mapping[str, Fitted], encoder: Encoder
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
    """Scores by pass ("scores", and of the baseline "aa_scores" and "prefix_scores") and question key, and facts of the work: what
    was computed, what whole prompts would have been, and how the baseline was scored again.
    """
    pairs: dict[str, dict[str, Pair]] = defaultdict(dict)
    for q in asked:
        found = fitted.get(q.id)
        if found is not None and found.pair is not None:
            pairs[q.subject][q.id] = found.pair
    groups = {subject: group(list(own.values())) for subject, own in pairs.items()}
    page, chunk = ctx.spec["page_size"], ctx.spec["prefill_chunk"]
    work: dict[str, Any] = {
        "subjects": len(groups),
        "computed_tokens": 0,
        "prefix_tokens": sum(len(g.prefix) for g in groups.values()),
        "question_tokens": sum(len(item.context) for g in groups.values() for item in g.items),
        "unshared_tokens": sum(len(p.context) for own in pairs.values() for p in own.values()),
    }
    plan = [Pass("scores", subject, tuple(pairs[subject]), g, chunk) for subject, g in groups.items()]
    if ctx.is_baseline and ctx.options["aa_limit"] and plan:
        again, said = _again(ctx, [q for q in asked if q.id in pairs[q.subject]], pairs, encoder)
        plan += again
        work |= said
    scores: dict[str, dict[str, list[float]]] = defaultdict(dict)
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


@dataclass(frozen=True)
class Pass:
    """Questions `ids` that are scored together, as `group` (in the same order), in pieces of `chunk` tokens; scores go under `name`."""

    name: str
    note: str
    ids: tuple[str, ...]
    group: Group
    chunk: int


def _again(
    ctx: Context, scored: Sequence[Question], pairs: Mapping[str, Mapping[str, Pair]], encoder: Encoder
) -> tuple[list[Pass], dict[str, Any]]:
    """The passes that the baseline scores again for its noise floor, over a spread subset, and their facts.

    Once as it is, with all that may not matter changed: no prefix is shared, questions of all subjects stand side by side, long
    beside short, in small chunks. And once behind a line end, shared by subject as before; what would no longer fit the model
    is left out.
    """
    subset = spread(scored, ctx.options["aa_limit"])
    whole = [pairs[q.subject][q.id] for q in subset]
    passes = [
        Pass("aa_scores", "again", tuple(q.id for q in subset), group(whole, False, mixed=True), AA_CHUNK)
    ]
    neutral = neutral_ids(ctx.model.tokenizer)
    said = f"{NEUTRAL!r} before the prompt, ids {neutral}"
    for subject, qs in _by_subject(subset if neutral else []).items():
        own = {q.id: pairs[subject][q.id] for q in qs}
        behind = {
            key: Pair(tuple(perturbed(p.context, neutral, encoder.first)), p.continuations, p.merged)
            for key, p in own.items()
        }
        fits = {key: p for key, p in behind.items() if not overflow(p, encoder.window)}
        if fits:
            passes.append(
                Pass(
                    "prefix_scores",
                    subject,
                    tuple(fits),
                    group(list(fits.values())),
                    ctx.spec["prefill_chunk"],
                )
            )
    facts = {
        "aa_questions": len(subset),
        "aa_mode": f"no prefix shared, questions mixed over subjects and lengths, chunks of {AA_CHUNK}",
        "prefix": said if neutral else "none: the tokenizer has no token for a line end",
    }
    return passes, facts


def _row(
    q: Question, fitted: Fitted | None, scores: list[float] | None, template: Template
) -> dict[str, Any]:
    """One question's line of the record. pick: the first of the highest scores, as lm-eval takes it."""
    row: dict[str, Any] = {
        "id": q.id,
        "subject": q.subject,
        "answer": q.answer,
        "scores": [],
        "tokens": [],
        "chars": [],
        "pick": None,
        "tie": False,
        "truncated": fitted is not None and fitted.truncated,
        "dropped_shots": fitted.dropped_shots if fitted else 0,
        "dropped_tokens": fitted.dropped_tokens if fitted else 0,
        "skipped": problem(q),
    }
    if row["skipped"] is None and (fitted is None or fitted.pair is None or scores is None):
        row["skipped"] = "no token of an answer is left to score behind a context"
    if row["skipped"] is not None or fitted is None or fitted.pair is None or scores is None:
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


def _choice_ids(
    asked: Sequence[Question], fitted: Mapping[str, Fitted], encoder: Encoder
) -> dict[str, list[list[int]]]:
    """The ids that were scored for each letter (every distinct list of them); empty where choices are texts."""
    found: dict[str, list[list[int]]] = {}
    if not encoder.template.letters:
        return found
    for q in asked:
        own = fitted.get(q.id)
        if own is None or own.pair is None:
            continue
        for text, c in zip(
            continuations(encoder.template, q, encoder.chat), own.pair.continuations, strict=True
        ):
            ids = found.setdefault(text, [])
            if list(c) not in ids:
                ids.append(list(c))
    return found
