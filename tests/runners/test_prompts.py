"""Prompts, joint encoding, BOS and truncation of the multiple-choice tasks (A18, A19)."""

import copy

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvbench.data.corpora import corpus
from kvbench.data.questions import Question, cloze
from kvbench.runners.text import encode
from kvbench.runners.text.encode import Encoder, Pair, bos_ids, fit, ids_by_head, join, plain_ids
from kvbench.runners.text.prompts import TEMPLATES, continuations, messages, plain, problem, spread
from tests.factories.quality_tools import bpe_tokenizer, word_tokenizer

ANATOMY = Question("a/0", "human_aging", " Which bone? \n", ("ulna", "rib", "None", "jaw"), 2)
SHOT = Question("a/1", "human_aging", "Which organ?", ("heart", "lung", "skin", "liver"), 0)


def encoder_for(task, tokenizer=None, **changes):
    tokenizer = tokenizer or bpe_tokenizer()
    fields = {"template": TEMPLATES[task], "tokenizer": tokenizer, "chat": False}
    fields |= {"window": None, "first": bos_ids(tokenizer)}
    return Encoder(**(fields | {"examples": {"human_aging": [SHOT] * 5}} | changes))


def ids_of(text):
    return bpe_tokenizer()(text, add_special_tokens=False)["input_ids"]


def pair_of(task, tokenizer=None, shots=0, **changes):
    return encoder_for(task, tokenizer, **changes).subject([ANATOMY], shots)[0].pair


LAW = Question("l/0", "law", "下列选项正确的是____。", ("Ａ项", "None", "甲", "乙"), 1)
LAW_TEXT = "下列选项正确的是____。\nA. Ａ项\nB. None\nC. 甲\nD. 乙\n答案："
MELTS = Question("m", "arc_easy", "What melts?", ("ice", "rock", "iron"), 0)
MMLU_TEXT = (
    "The following are multiple choice questions (with answers) about human aging.\n\n"
    "Which organ?\nA. heart\nB. lung\nC. skin\nD. liver\nAnswer: A\n\n"
    "Which bone?\nA. ulna\nB. rib\nC. None\nD. jaw\nAnswer:"
)


@pytest.mark.parametrize(
    ("task", "question", "shot", "prompt", "choices"),
    [
        ("mmlu", ANATOMY, SHOT, MMLU_TEXT, [" A", " B", " C", " D"]),
        ("ceval", LAW, LAW,
         f"以下是中国关于法学的单项选择题，请选出其中的正确答案。\n\n{LAW_TEXT}B\n\n{LAW_TEXT}", ["A", "B", "C", "D"]),
        ("arc_easy", MELTS, MELTS, "Question: What melts?\nAnswer: ice\n\nQuestion: What melts?\nAnswer:",
         [" ice", " rock", " iron"]),
    ],
    ids=["mmlu", "ceval", "arc"],
)  # fmt: skip
def test_prompts_and_choices_are_lm_evals(task, question, shot, prompt, choices):
    assert plain(TEMPLATES[task], question, [shot]) == prompt
    assert continuations(TEMPLATES[task], question, chat=False) == choices


def test_cloze_joins_to_the_corpus_own_text_and_a_chat_is_turns_without_delimiter():
    q = cloze(corpus("pydoc", None), count=1).questions[0]
    true = continuations(TEMPLATES["cloze"], q, chat=False)[q.answer]
    assert true.startswith(" ")
    assert plain(TEMPLATES["cloze"], q, []) + true == q.question + true
    turns = messages(TEMPLATES["mmlu"], ANATOMY, [SHOT])
    assert [t["role"] for t in turns] == ["system", "user", "assistant", "user"]
    assert [t["content"] for t in turns[2:]] == ["A", MMLU_TEXT.split("\n\n")[-1]]
    assert continuations(TEMPLATES["mmlu"], ANATOMY, chat=True) == ["A", "B", "C", "D"]


def test_a18_t1_answer_colon_wants_space_a_and_a_full_width_colon_wants_a():
    (spaced,), (bare,) = ids_of(" A"), ids_of("A")
    assert spaced != bare
    assert [pair_of(task).continuations[0] for task in ("mmlu", "ceval")] == [(spaced,), (bare,)]


def joined(tokenizer, prompt, answers, bos=()):
    ids = plain_ids(tokenizer, encode.strings(prompt, answers))
    return join(ids[0], ids[1:], list(bos))


def test_a18_t2_a_token_across_the_join_is_scored_not_lost():
    tokenizer = word_tokenizer(["Say", " ", "Ans", "wer", "Answer", "other"])
    tokens = tokenizer.convert_ids_to_tokens
    pair = joined(tokenizer, "Say Ans", ["wer", "other"])
    assert pair.merged
    assert tokens(list(pair.context)) == ["Say", " "]
    # Both choices score the same text from there on, "Answer" and "Ansother".
    assert [tokens(list(c)) for c in pair.continuations] == [["Answer"], ["Ans", "other"]]
    # A merge at the very start needs a BOS to stand on.
    tokenizer = word_tokenizer(["Ans", "wer", "Answer"])
    assert joined(tokenizer, "Ans", ["wer"]) is None
    pair = joined(tokenizer, "Ans", ["wer"], [7])
    assert (pair.context, len(pair.continuations[0])) == ((7,), 1)
    assert join([1, 2], [[1, 2, 3], [1, 2]], []) is None  # an answer without a token
    # Spaces that end the prompt go to the answer.
    assert encode.strings("Answer: ", ["A"]) == ["Answer:", "Answer: A"]
    pair = joined(bpe_tokenizer(), "Answer: ", ["A"])
    assert (pair.merged, list(pair.continuations[0])) == (False, ids_of(" A"))


@pytest.mark.parametrize(
    ("choices", "answer", "why"),
    [
        (("a", "", "c", "d"), 0, "choice 1 is empty"), (("a", "b", None, "d"), 0, "choice 2 is missing"),
        (("a", "b", "c", "d"), None, "the answer is not among the choices"),
        (("None", "Na", "Ａ", "空"), 1, None),
    ],
)  # fmt: skip
def test_a18_t4_t5_empty_and_missing_choices_are_named_and_literal_none_is_text(choices, answer, why):
    assert problem(Question("x", "law", "q", choices, answer)) == why


def with_bos():
    """The BPE tokenizer, with `<s>` put first."""
    inner = copy.deepcopy(bpe_tokenizer().backend_tokenizer)
    inner.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def test_a19_t1_exactly_one_bos_or_a_stated_policy():
    bare, adds = bpe_tokenizer(), with_bos()
    assert (bos_ids(bare), bos_ids(adds)) == ([], [0])
    assert all(words in encode.bos_policy(bare) for words in ("id 0", "none added"))
    assert encode.bos_policy(adds).startswith("one: the tokenizer puts [0] first")
    pair = pair_of("mmlu", adds)
    assert (pair.context[0], pair.context.count(0)) == (0, 1)
    assert 0 not in pair.continuations[0]


@pytest.mark.parametrize("start", ["{{ bos_token }}", ""])
def test_a19_t1_a_template_that_emits_bos_gets_no_second_one(start):
    adds = with_bos()
    turns = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    adds.chat_template = start + turns
    pair = pair_of("mmlu", adds, 1, chat=True)
    assert (pair.context[0], pair.context.count(0)) == (0, 1)


def test_a19_t2_980_of_1109_tokens_do_not_fit_128_and_the_bos_survives_the_cut():
    pair = Pair(tuple(range(1108)), ((1,),), False)
    assert encode.overflow(pair, 128) == 980
    fitted = fit(lambda shots: pair, 0, 128, bos=0)
    assert (fitted.dropped_tokens, fitted.truncated) == (980, True)
    assert fitted.pair.context == tuple(range(980, 1108))
    assert [encode.overflow(fitted.pair, window) for window in (128, 127, None)] == [0, 1, 0]
    fitted = fit(lambda shots: Pair((7, *range(100)), ((1, 2),), False), 0, 50, bos=1)
    assert fitted.pair.context == (7, *range(52, 100))  # 49, and 2 of the answer, whose last is not fed
    # A question without room for anything is not scored.
    assert fit(lambda shots: Pair((1, 2, 3), (tuple(range(9)),), False), 2, 8, bos=0).pair is None


def test_a19_t3_whole_shots_go_first_and_task_question_and_bos_stay():
    assert not encoder_for("mmlu").subject([ANATOMY], 5)[0].truncated
    three = pair_of("mmlu", shots=3)
    fitted = encoder_for("mmlu", window=len(three.context) + 3).subject([ANATOMY], 5)[0]
    assert (fitted.pair, fitted.dropped_shots, fitted.dropped_tokens) == (three, 2, 0)
    assert fitted.truncated
    text = bpe_tokenizer().decode(list(three.context))
    assert text == plain(TEMPLATES["mmlu"], ANATOMY, [SHOT] * 3)


def test_common_prefix_leaves_each_context_a_token():
    cases = ([(1, 2, 3), (1, 2, 4, 5)], [(1, 2), (1, 2, 4)], [(1, 2)], [(1, 2), (3, 4)])
    assert [encode.common_prefix(contexts) for contexts in cases] == [2, 1, 1, 0]


def test_a_head_encoded_once_gives_the_ids_of_whole_texts(monkeypatch):
    tokenizer = bpe_tokenizer()
    endings = ["it", "2", "\nhere", "Answer: A", "été", "", "  x", "that"]
    questions = [Question("a", "human_aging", f"{end} so?", ("1", " 2", "x", ""), 0) for end in endings]
    shot = Question("s", "human_aging", "Which organ pumps blood? " * 5, SHOT.choices, 0)
    own = encoder_for("mmlu", examples={"human_aging": [shot] * 5})
    texts = [t for q in questions for t in own.texts(q, 5)]
    seen = []
    monkeypatch.setattr(encode, "plain_ids", lambda own, some: seen.extend(some) or plain_ids(own, some))
    assert ids_by_head(tokenizer, texts) == plain_ids(tokenizer, texts)
    assert len("".join(seen)) < len("".join(texts)) / 2


def test_a_tokenizer_that_does_not_split_at_the_cut_gets_whole_texts():
    words = {"<unk>": 0, **{chr(c): c for c in range(9, 127)}, "\u2581": 130}
    settings = {"continuing_subword_prefix": "", "max_input_chars_per_word": 10**6}
    inner = Tokenizer(models.WordPiece(words, unk_token="<unk>", **settings))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    texts = ["line\n" * 200 + tail for tail in ("a", "b", "c")]
    assert ids_by_head(tokenizer, texts) == plain_ids(tokenizer, texts)
    apart = [i for t in ("line\n", "line") for i in plain_ids(tokenizer, [t])[0]]
    assert plain_ids(tokenizer, ["line\nline"])[0] != apart


def test_a_limit_is_spread_over_subjects_round_robin():
    sizes = {"x": 4, "y": 1, "z": 3}
    qs = [Question(f"{s}/{i}", s, "q", ("a", "b"), 0) for s, n in sizes.items() for i in range(n)]
    assert [q.id for q in spread(qs, 5)] == ["x/0", "x/1", "y/0", "z/0", "z/1"]
    assert [q.id for q in spread(qs, 2)] == ["x/0", "y/0"]
    assert spread(qs, None) == spread(qs, 99) == qs
