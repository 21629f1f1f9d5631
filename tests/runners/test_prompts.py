"""Prompts, joint encoding, BOS and truncation of the multiple-choice tasks (A18, A19)."""

from __future__ import annotations

import pytest

from kvbench.data.corpora import corpus
from kvbench.data.questions import Question, cloze
from kvbench.runners.text import encoder
from kvbench.runners.text.encode import (
    Pair,
    bos_ids,
    bos_policy,
    common_prefix,
    fit,
    join,
    overflow,
    plain_ids,
    strings,
)  # fmt: skip
from kvbench.runners.text.encoder import Encoder, ids_by_head
from kvbench.runners.text.prompts import TEMPLATES, continuations, messages, plain, problem, spread
from tests.factories.quality_tools import bpe_tokenizer, word_tokenizer

ANATOMY = Question("a/0", "human_aging", " Which bone? \n", ("ulna", "rib", "None", "jaw"), 2)
SHOT = Question("a/1", "human_aging", "Which organ?", ("heart", "lung", "skin", "liver"), 0)


def encoder_for(task: str, tokenizer: object = None, **changes: object) -> Encoder:
    tokenizer = tokenizer or bpe_tokenizer()
    fields: dict[str, object] = {
        "template": TEMPLATES[task], "tokenizer": tokenizer, "chat": False, "window": None,
        "examples": {"human_aging": [SHOT] * 5, "law": [SHOT] * 5}, "first": bos_ids(tokenizer),
    }  # fmt: skip
    return Encoder(**(fields | changes))  # type: ignore[arg-type]


def test_mmlu_prompt_is_lm_evals() -> None:
    assert plain(TEMPLATES["mmlu"], ANATOMY, [SHOT]) == (
        "The following are multiple choice questions (with answers) about human aging.\n\n"
        "Which organ?\nA. heart\nB. lung\nC. skin\nD. liver\nAnswer: A\n\n"
        "Which bone?\nA. ulna\nB. rib\nC. None\nD. jaw\nAnswer:"
    )
    assert continuations(TEMPLATES["mmlu"], ANATOMY, chat=False) == [" A", " B", " C", " D"]


def test_ceval_prompt_is_lm_evals_with_the_subjects_chinese_name() -> None:
    q = Question("l/0", "law", "下列选项正确的是____。", ("Ａ项", "None", "甲", "乙"), 1)
    assert plain(TEMPLATES["ceval"], q, [q]) == (
        "以下是中国关于法学的单项选择题，请选出其中的正确答案。\n\n"
        "下列选项正确的是____。\nA. Ａ项\nB. None\nC. 甲\nD. 乙\n答案：B\n\n"
        "下列选项正确的是____。\nA. Ａ项\nB. None\nC. 甲\nD. 乙\n答案："
    )


def test_arc_prompt_scores_the_choices_texts() -> None:
    q = Question("m", "arc_easy", "What melts?", ("ice", "rock", "iron"), 0)
    assert plain(TEMPLATES["arc_easy"], q, [q]) == (
        "Question: What melts?\nAnswer: ice\n\nQuestion: What melts?\nAnswer:"
    )
    assert continuations(TEMPLATES["arc_challenge"], q, chat=False) == [" ice", " rock", " iron"]


def test_cloze_joins_to_the_corpus_own_text() -> None:
    q = cloze(corpus("pydoc", None), count=1).questions[0]
    assert q.answer is not None
    true = continuations(TEMPLATES["cloze"], q, chat=False)[q.answer]
    assert true.startswith(" ")
    assert plain(TEMPLATES["cloze"], q, []) + true == q.question + true


def test_a_chat_is_turns_and_its_answer_has_no_delimiter() -> None:
    turns = messages(TEMPLATES["mmlu"], ANATOMY, [SHOT])
    assert [t["role"] for t in turns] == ["system", "user", "assistant", "user"]
    assert turns[2]["content"] == "A"
    assert turns[3]["content"].startswith("Which bone?\nA. ulna")
    assert turns[3]["content"].endswith("\nAnswer:")
    assert continuations(TEMPLATES["mmlu"], ANATOMY, chat=True) == ["A", "B", "C", "D"]


def test_a18_t1_answer_colon_wants_space_a_and_a_full_width_colon_wants_a() -> None:
    tokenizer = bpe_tokenizer()
    spaced, bare = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (" A", "A"))
    assert (len(spaced), len(bare)) == (1, 1)
    assert spaced != bare
    mmlu = encoder_for("mmlu").subject([ANATOMY], 0)[0].pair
    ceval = encoder_for("ceval").subject([ANATOMY], 0)[0].pair
    assert mmlu is not None
    assert ceval is not None
    assert list(mmlu.continuations[0]) == spaced
    assert list(ceval.continuations[0]) == bare


def test_a18_t2_a_token_across_the_join_is_scored_not_lost() -> None:
    tokenizer = word_tokenizer(["Say", " ", "Ans", "wer", "Answer", "other"])
    ids = plain_ids(tokenizer, strings("Say Ans", ["wer", "other"]))
    assert tokenizer.convert_ids_to_tokens(ids[1]) == ["Say", " ", "Answer"]
    pair = join(ids[0], ids[1:], [])
    assert pair is not None
    assert pair.merged
    assert tokenizer.convert_ids_to_tokens(list(pair.context)) == ["Say", " "]
    # Both choices score the same text from there on, "Answer" and "Ansother".
    assert [tokenizer.convert_ids_to_tokens(list(c)) for c in pair.continuations] == [
        ["Answer"],
        ["Ans", "other"],
    ]


def test_a18_t2_a_merge_at_the_very_start_needs_a_bos_to_stand_on() -> None:
    tokenizer = word_tokenizer(["Ans", "wer", "Answer"])
    ids = plain_ids(tokenizer, strings("Ans", ["wer"]))
    assert join(ids[0], ids[1:], []) is None
    pair = join(ids[0], ids[1:], [7])
    assert pair is not None
    assert (pair.context, len(pair.continuations[0])) == ((7,), 1)


def test_an_answer_without_a_token_cannot_be_scored() -> None:
    assert join([1, 2], [[1, 2, 3], [1, 2]], []) is None


def test_spaces_that_end_the_prompt_go_to_the_answer() -> None:
    assert strings("Answer: ", ["A"]) == ["Answer:", "Answer: A"]
    ids = plain_ids(bpe_tokenizer(), strings("Answer: ", ["A"]))
    pair = join(ids[0], ids[1:], [])
    assert pair is not None
    assert not pair.merged
    assert list(pair.continuations[0]) == bpe_tokenizer()(" A", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("choices", "answer", "why"),
    [
        (("a", "", "c", "d"), 0, "choice 1 is empty"),
        (("a", "b", None, "d"), 0, "choice 2 is missing"),
        (("a", "b", "c", "d"), None, "the answer is not among the choices"),
        (("None", "Na", "Ａ", "空"), 1, None),
    ],
)
def test_a18_t4_t5_empty_and_missing_choices_are_named_and_literal_none_is_text(
    choices: tuple[str | None, ...], answer: int | None, why: str | None
) -> None:
    assert problem(Question("x", "law", "q", choices, answer)) == why


def with_bos(tokenizer: object) -> object:
    from tokenizers.processors import TemplateProcessing

    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>"
    )  # type: ignore[attr-defined, call-arg]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def test_a19_t1_exactly_one_bos_or_a_stated_policy() -> None:
    import copy

    bare = bpe_tokenizer()
    assert bos_ids(bare) == []
    assert "id 0" in bos_policy(bare)
    assert "none added" in bos_policy(bare)
    adds = with_bos(copy.deepcopy(bare))
    assert bos_ids(adds) == [0]
    assert bos_policy(adds).startswith("one: the tokenizer puts [0] first")
    pair = encoder_for("mmlu", adds).subject([ANATOMY], 0)[0].pair
    assert pair is not None
    assert (pair.context[0], pair.context.count(0)) == (0, 1)
    assert 0 not in pair.continuations[0]


def test_a19_t1_a_template_that_emits_bos_gets_no_second_one() -> None:
    import copy

    adds = with_bos(copy.deepcopy(bpe_tokenizer()))
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    for text in (template, template.removeprefix("{{ bos_token }}")):
        adds.chat_template = text  # type: ignore[attr-defined]
        pair = encoder_for("mmlu", adds, chat=True).subject([ANATOMY], 1)[0].pair
        assert pair is not None
        assert (pair.context[0], pair.context.count(0)) == (0, 1)


def test_a19_t2_980_of_1109_tokens_do_not_fit_128() -> None:
    pair = Pair(tuple(range(1108)), ((1,),), False)
    assert overflow(pair, 128) == 980
    fitted = fit(lambda shots: pair, 0, 128, bos=0)
    assert fitted.dropped_tokens == 980
    assert fitted.truncated
    assert fitted.pair is not None
    assert fitted.pair.context == tuple(range(980, 1108))
    assert overflow(fitted.pair, 128) == 0


def test_a19_t2_the_bos_survives_the_cut() -> None:
    fitted = fit(lambda shots: Pair((7, *range(100)), ((1, 2),), False), 0, 50, bos=1)
    assert fitted.pair is not None
    assert (fitted.pair.context[0], fitted.pair.context[1:]) == (7, tuple(range(52, 100)))
    assert len(fitted.pair.context) + 2 == 50 + 1


def test_a19_t3_whole_shots_go_first_and_task_question_and_bos_stay() -> None:
    whole = encoder_for("mmlu").subject([ANATOMY], 5)[0]
    three = encoder_for("mmlu").subject([ANATOMY], 3)[0].pair
    assert whole.pair is not None
    assert three is not None
    assert not whole.truncated
    fitted = encoder_for("mmlu", window=len(three.context) + 3).subject([ANATOMY], 5)[0]
    assert (fitted.pair, fitted.dropped_shots, fitted.dropped_tokens) == (three, 2, 0)
    assert fitted.truncated
    text = bpe_tokenizer().decode(list(three.context))
    assert text == plain(TEMPLATES["mmlu"], ANATOMY, [SHOT] * 3)


def test_a_question_without_room_for_anything_is_not_scored() -> None:
    assert fit(lambda shots: Pair((1, 2, 3), (tuple(range(9)),), False), 2, 8, bos=0).pair is None


def test_exactly_the_window_is_not_truncated() -> None:
    pair = Pair(tuple(range(128)), ((1,), (1,)), False)
    assert overflow(pair, 128) == 0
    assert overflow(pair, 127) == 1
    assert overflow(pair, None) == 0


def test_common_prefix_leaves_each_context_a_token() -> None:
    assert common_prefix([(1, 2, 3), (1, 2, 4, 5)]) == 2
    assert common_prefix([(1, 2), (1, 2, 4)]) == 1
    assert common_prefix([(1, 2)]) == 1
    assert common_prefix([(1, 2), (3, 4)]) == 0


def test_a_head_encoded_once_gives_the_ids_of_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bpe_tokenizer()
    endings = ["it", "2", "\nhere", "Answer: A", "été", "", "  x", "that"]
    questions = [
        Question(f"a/{i}", "human_aging", f"{end} so?", ("1", " 2", "x", ""), 0)
        for i, end in enumerate(endings)
    ]
    shots = {
        "human_aging": [Question("s", "human_aging", "Which organ pumps blood? " * 5, SHOT.choices, 0)] * 5
    }
    texts = [t for q in questions for t in encoder_for("mmlu", examples=shots).texts(q, 5)]
    calls: list[int] = []

    def counting(tokenizer: object, texts: list[str]) -> list[list[int]]:
        calls.append(sum(map(len, texts)))
        return plain_ids(tokenizer, texts)

    monkeypatch.setattr(encoder, "plain_ids", counting)
    assert ids_by_head(tokenizer, texts) == plain_ids(tokenizer, texts)
    assert sum(calls) < sum(map(len, texts)) / 2


def test_a_tokenizer_that_does_not_split_at_the_cut_gets_whole_texts() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, **{chr(c): c for c in range(9, 127)}, "\u2581": 130}
    inner = Tokenizer(
        models.WordPiece(
            words, unk_token="<unk>", continuing_subword_prefix="", max_input_chars_per_word=10**6
        )
    )  # type: ignore[call-arg]
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    texts = ["line\n" * 200 + tail for tail in ("a", "b", "c")]
    assert ids_by_head(tokenizer, texts) == plain_ids(tokenizer, texts)
    assert plain_ids(tokenizer, ["line\nline"])[0] != [
        i for t in ("line\n", "line") for i in plain_ids(tokenizer, [t])[0]
    ]


def test_a_limit_is_spread_over_subjects_round_robin() -> None:
    qs = [
        Question(f"{s}/{i}", s, "q", ("a", "b"), 0)
        for s, n in (("x", 4), ("y", 1), ("z", 3))
        for i in range(n)
    ]
    assert [q.id for q in spread(qs, 5)] == ["x/0", "x/1", "y/0", "z/0", "z/1"]
    assert [q.id for q in spread(qs, 2)] == ["x/0", "y/0"]
    assert spread(qs, None) == spread(qs, 99) == qs
