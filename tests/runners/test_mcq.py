"""Multiple choice through real engines on a tiny model: scores, shared prefixes, denominators, truncation."""

import gzip
import json

import pytest
import torch

from kvbench.data.fingerprint import questions
from kvbench.data.questions import Question
from kvbench.errors import KvbenchError, NotAvailable, UsageError
from kvbench.runners import mcq
from kvbench.runners.text.encode import Encoder, Fitted, Pair, bos_ids, neutral_ids
from kvbench.runners.text.prompts import TEMPLATES
from kvbench.runners.text.scoring import batches, capacity, group, score
from tests.factories.quality_tools import context, reference_logprobs, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_context=2048)


def row(subject, number, answer="A", choices=None):
    choices = choices or [f"it binds {number} names", "it raises", "nothing at all", "None"]
    question = f"What does statement {number} of the {subject} reference do?"
    return {"subject": subject, "question": question, "choices": choices, "answer": answer}


def arc_row(number, labels="ABCD"):
    choices = [f"the object number {number}", "a type", "a very long name of a class", "two", "no"]
    own = {"choices": choices[: len(labels)], "labels": list(labels), "answer": labels[-1]}
    return {"id": f"q{number}", "question": "What is bound?", **own}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two subjects of four questions with five examples each, and five ARC questions of 3 to 5 choices."""
    path = tmp_path_factory.mktemp("data")
    subjects, labels = ("lambda_forms", "yield"), ("ABCD", "1234", "123", "ABCDE", "ABC")
    write(path / "mmlu/test.jsonl.gz", [row(s, n, "ABCD"[n]) for s in subjects for n in range(4)])
    write(path / "mmlu/dev.jsonl.gz", [row(s, n + 10) for s in subjects for n in range(5)])
    write(path / "arc/easy_test.jsonl.gz", [arc_row(n, own) for n, own in enumerate(labels)])
    write(path / "arc/easy_validation.jsonl.gz", [arc_row(n) for n in range(10, 15)])
    return path


def measure(model, folder, task, **changes):
    return mcq.run(context(model, "mcq", tasks=task, data_dir=folder, **changes))


def encoder_of(model, folder, task):
    examples, first = questions(task, folder).examples, bos_ids(model.tokenizer)
    return Encoder(TEMPLATES[task], model.tokenizer, False, None, examples, first)


def ids_of(model, text):
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def pairs_of(model, folder, task, shots):
    data, encoder = questions(task, folder), encoder_of(model, folder, task)
    first = [q for q in data.questions if q.subject == data.questions[0].subject]
    return [f.pair for f in encoder.subject(first, shots) if f.pair is not None]


def scores_of(model, pairs, share=True, kv_format="native", chunk=512):
    g = group(pairs, share)
    ctx = context(model, "mcq", kv_format=kv_format)
    engine = ctx.engine(sequences=1, tokens=capacity([g], CPU, 16) * 16)
    found, computed = {}, 0
    for batch, scores, tokens in score(engine, g, chunk):
        found |= dict(zip(batch, scores, strict=True))
        computed += tokens
    assert computed == engine.computed_tokens
    assert engine.store.table.entries() == 0
    return [found[i] for i in range(len(pairs))], computed


@pytest.mark.parametrize(("task", "shots"), [("mmlu", 0), ("mmlu", 5), ("arc_easy", 0), ("arc_easy", 5)])
def test_scores_are_those_of_plain_forwards_over_each_whole_string(model, folder, task, shots):
    """Those behind a line end are those of the string with the line end's id before it."""
    data, encoder = questions(task, folder), encoder_of(model, folder, task)
    neutral = neutral_ids(model.tokenizer)
    measured = measure(model, folder, task, shots=shots)
    found, facts = measured.samples["questions"], measured.facts
    assert [r["id"] for r in found] == [q.id for q in data.questions]
    assert str(neutral) in facts["prefix"]
    for q, r in zip(data.questions, found, strict=True):
        prompt, *wholes = encoder.texts(q, shots)
        start = len(ids_of(model, prompt))
        for text, got, behind, n in zip(wholes, r["scores"], r["prefix_scores"], r["tokens"], strict=True):
            ids = ids_of(model, text)
            assert n == len(ids) - start
            assert got == pytest.approx(float(reference_logprobs(model, ids)[start - 1 :].sum()), abs=1e-4)
            moved = float(reference_logprobs(model, [*neutral, *ids])[start:].sum())
            assert behind == pytest.approx(moved, abs=1e-4)
            assert behind != pytest.approx(got, abs=1e-3)
        assert r["pick"] == r["scores"].index(max(r["scores"]))
    letters = {f" {letter}": [ids_of(model, f" {letter}")] for letter in "ABCD"}
    assert facts["choice_ids"] == (letters if task == "mmlu" else {})  # A18 T1
    if task == "mmlu":  # work is counted against whole prompts
        assert facts["subjects"] == 2
        assert facts["computed_tokens"] == facts["prefix_tokens"] + facts["question_tokens"]
        assert facts["unshared_tokens"] == 4 * facts["prefix_tokens"] + facts["question_tokens"]


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3"])
@pytest.mark.parametrize("task", ["mmlu", "arc_easy"])
def test_a_shared_prefix_and_a_small_chunk_change_no_score(model, folder, task, kv_format):
    pairs = pairs_of(model, folder, task, 5)
    shared, few = scores_of(model, pairs, True, kv_format)
    alone, many = scores_of(model, pairs, False, kv_format)
    # Another batching rounds otherwise in the last bit, and in a quantized store that can move a code by a
    # whole step.
    tolerance = 1e-3 if kv_format == "native" else 5e-2
    for a, b in zip(shared, alone, strict=True):
        assert a == pytest.approx(b, abs=tolerance)
        assert a.index(max(a)) == b.index(max(b))
    prefix = len(group(pairs).prefix)
    assert prefix > 100
    assert many - few == prefix * (len(pairs) - 1)
    if kv_format == "native":
        for a, b in zip(shared, scores_of(model, pairs, chunk=7)[0], strict=True):
            assert a == pytest.approx(b, abs=1e-4)


# the noise floor


def test_mixed_batches_are_other_neighbours():
    """Six questions of 100 to 350 tokens, 512 a forward."""
    pairs = [Pair(tuple(range(n)), ((1,), (2,)), False) for n in (100, 150, 200, 250, 300, 350)]
    assert batches(group(pairs, False), CPU) == [[0, 1, 2], [3], [4], [5]]
    assert batches(group(pairs, False, mixed=True), CPU) == [[5, 0], [4, 1], [3, 2]]
    assert batches(group(pairs[:5], False, mixed=True), CPU) == [[4, 0], [3, 1], [2]]
    assert (group(pairs[:1]).prefix, group(pairs[:1]).items) == ((), (pairs[0],))  # nothing to share


@pytest.mark.parametrize(("task", "shots"), [("mmlu", 5), ("arc_easy", 0)])
def test_the_baseline_scores_a_spread_subset_again_in_other_company(model, folder, task, shots, monkeypatch):
    seen = []  # groups that the runner scores, and in which chunks
    real = mcq.score
    monkeypatch.setattr(mcq, "score", lambda engine, g, n: seen.append((g, n)) or real(engine, g, n))
    found = measure(model, folder, task, shots=shots, aa_limit=3)
    rows = found.samples["questions"]
    again = [r["id"] for r in rows if "aa_scores" in r]
    spread = ["lambda_forms/0", "lambda_forms/1", "yield/0"]
    assert again == (spread if task == "mmlu" else [r["id"] for r in rows[:3]])
    subjects = 2 if task == "mmlu" else 1
    first, (g, chunk), behind = seen[:subjects], seen[subjects], seen[subjects + 1 :]
    assert (g.prefix, g.mixed, chunk, len(g.items)) == ((), True, 64, 3)
    assert all(c == 512 and not own.mixed for own, c in (*first, *behind))
    assert len(behind) == subjects
    for r in (r for r in rows if "aa_scores" in r):
        assert r["aa_scores"] == pytest.approx(r["scores"], abs=1e-3)
        assert r["aa_scores"].index(max(r["aa_scores"])) == r["pick"]
    assert found.facts["aa_questions"] == 3
    assert found.facts["computed_tokens"] == sum(
        len(own.prefix) + sum(len(i.context) + sum(len(c) - 1 for c in i.continuations) for i in own.items)
        for own, _ in first
    )


def test_only_the_baseline_is_scored_again_and_0_switches_it_off(model, folder):
    whole, off = measure(model, folder, "mmlu"), measure(model, folder, "mmlu", aa_limit=0)
    assert all("aa_scores" in r and "prefix_scores" in r for r in whole.samples["questions"])
    own = measure(model, folder, "mmlu", kv_format="int8_sym", baseline=whole)
    for plain in (off, own):
        assert not [k for r in plain.samples["questions"] for k in r if k in ("aa_scores", "prefix_scores")]
        assert "aa_questions" not in plain.facts
    for a, b in zip(whole.samples["questions"], off.samples["questions"], strict=True):
        assert a["scores"] == b["scores"]
    some = measure(model, folder, "mmlu", limit=3)  # from every subject, and partial
    assert [r["id"] for r in some.samples["questions"]] == ["lambda_forms/0", "lambda_forms/1", "yield/0"]
    assert some.partial == "3 of 8 questions"
    scores = {r["id"]: r["scores"] for r in whole.samples["questions"]}
    for r in some.samples["questions"]:
        assert r["scores"] == pytest.approx(scores[r["id"]], abs=1e-4)


def test_what_a_line_end_would_push_out_of_the_window_is_left_out(folder):
    pairs = pairs_of(tiny_model(max_context=2048), folder, "mmlu", 0)
    longest = max(len(p.context) + max(map(len, p.continuations)) - 1 for p in pairs)
    found = measure(tiny_model(max_context=longest), folder, "mmlu")
    assert found.facts["truncated"] == 0
    assert all("aa_scores" in r for r in found.samples["questions"])
    fits = ["prefix_scores" in r for r in found.samples["questions"]]
    assert set(fits) == {True, False}  # the longest falls out of the window, the others stay


def test_a18_t3_a_row_holds_what_every_norm_needs():
    q = Question("x", "x", "q", ("ab", "abcdefgh"), 1)
    pair = Pair((1,), ((2, 3), tuple(range(8))), False)
    r = mcq._row(q, Fitted(pair, 0, 0), [-1.0, -2.0], TEMPLATES["arc_easy"])
    assert (r["pick"], r["scores"], r["tokens"], r["chars"]) == (0, [-1.0, -2.0], [2, 8], [2, 8])


def test_a18_t4_t5_every_question_is_scored_or_counted_as_skipped(model, tmp_path):
    choices = [[a, b, "丙", "丁"] for a, b in (("it raises", "no"), ("甲", ""), ("甲", None))]
    choices.append(["Ａ项", "None", "Na", "全角，"])
    rows = [*(row("law", i, choices=own) for i, own in enumerate(choices)), row("law", 4, answer="E")]
    write(tmp_path / "ceval/val.jsonl.gz", rows)
    write(tmp_path / "ceval/dev.jsonl.gz", [row("law", 9)])
    found = measure(model, tmp_path, "ceval")
    reasons = [r["skipped"] or "" for r in found.samples["questions"]]
    assert [bool(reason) for reason in reasons] == [False, True, True, False, True]
    assert len(set(reasons)) == 4
    counts = {"total": 5, "asked": 5, "scored": 2, "skipped": 3, "truncated": 0}
    assert found.facts.items() >= counts.items()
    assert found.samples["questions"][1]["scores"] == []
    assert found.partial is None
    assert "without a space" in found.facts["prompt_policy"]
    write(tmp_path / "ceval/val.jsonl.gz", rows[-1:])
    with pytest.raises(KvbenchError, match="None of 1 ceval questions"):
        measure(model, tmp_path, "ceval")


def test_a19_t2_what_does_not_fit_loses_examples_and_then_tokens_or_fails_the_cell(folder):
    small = tiny_model(max_context=256)
    with pytest.raises(KvbenchError, match="8 of 8 mmlu questions do not fit the model's 256 positions"):
        measure(small, folder, "mmlu", shots=5, max_truncated=0.99)
    found = measure(small, folder, "mmlu", shots=5, max_truncated=1.0)
    assert found.facts["truncated"] == found.facts["scored"] == 8
    rows = found.samples["questions"]
    assert all(r["truncated"] and 0 < r["dropped_shots"] < 5 and not r["dropped_tokens"] for r in rows)
    found = measure(tiny_model(max_context=32), folder, "mmlu", max_truncated=1.0)
    assert all(r["truncated"] and r["dropped_tokens"] > 0 for r in found.samples["questions"])
    assert found.facts["scored"] == 8


def test_ties_are_counted_and_a_nan_is_an_error_not_a_pick(folder):
    found = measure(tiny_model(uniform=True), folder, "mmlu")
    assert found.facts["ties"] == 8
    assert {r["pick"] for r in found.samples["questions"]} == {0}
    broken = tiny_model()
    broken.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(KvbenchError, match="not a number"):
        measure(broken, folder, "mmlu")


def test_cloze_needs_no_data_and_options_that_do_not_go_together_are_refused(model, folder, monkeypatch):
    found = mcq.run(context(model, "mcq", tasks="cloze", limit=12))
    assert (found.facts["scored"], found.facts["total"]) == (12, 200)
    assert all(len(r["scores"]) == 4 and min(r["tokens"]) > 1 for r in found.samples["questions"])
    monkeypatch.delenv("KVBENCH_ALLOW_HUB", raising=False)
    with pytest.raises(UsageError, match="cloze has fewer than 5 examples"):
        measure(model, folder, "cloze", shots=5)
    with pytest.raises(UsageError, match="no chat template"):
        measure(model, folder, "mmlu", chat_template=True)
    with pytest.raises(NotAvailable):
        measure(model, folder, "ceval")
