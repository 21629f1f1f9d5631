"""Corpora and question sets: found, cut, hashed, and never replaced."""

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest

from kvbench.data import fingerprint as data
from kvbench.data.corpora import WIKITEXT_SHA, offsets, wikitext_from_raw
from kvbench.data.hub import as_local
from kvbench.data.questions import CLOZE_CONTEXT, CLOZE_WORDS, TASKS, cloze
from kvbench.errors import KvbenchError, NotAvailable, UsageError

DATA = Path(os.environ["KVBENCH_DATA_DIR"]) if "KVBENCH_DATA_DIR" in os.environ else None
needs_data = pytest.mark.skipif(DATA is None, reason="KVBENCH_DATA_DIR is not set")

WIKI = " \n = Du Fu = \n \n A poet . \n = 1 rad and k = \n 1 ohm \n \n = = Life = = \n \n Born . \n \n = Kiss = You = \n \n A song . \n \n"


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.delenv("KVBENCH_ALLOW_HUB", raising=False)


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def mmlu_row(subject, answer="B", choices=("1", "2", "3", "4")):
    return {"subject": subject, "question": "How many?", "choices": choices, "answer": answer}


def test_wikitext_is_cut_as_its_recipe_says():
    text = wikitext_from_raw(WIKI, "test", "sha", "source")
    assert text.rows[:4] == ("", " = Du Fu = \n", "", " A poet . \n")
    assert "".join(text.raw) == WIKI
    assert text.text == "\n\n".join(text.rows)
    assert text.documents == (0, 11)  # articles, not sections or formulas
    starts = offsets(text.stream, text.documents)
    assert starts[0] == 0
    assert text.text[starts[1] :].startswith(" = Kiss = You = \n")
    raw_starts = offsets(text.raw, text.documents)
    assert WIKI[raw_starts[1] :].startswith(" = Kiss = You = \n")
    # without a last newline
    text = wikitext_from_raw(" = A = \n \n words", "test", "sha", "source")
    assert "".join(text.raw) == " = A = \n \n words"
    assert text.rows == (" = A = \n", "", " words")


def test_a_local_wikitext_file_is_read_and_hashed(tmp_path):
    path = tmp_path / "wikitext-2-raw" / "wiki.valid.raw"
    path.parent.mkdir()
    path.write_bytes(WIKI.encode())
    text = data.corpus("wikitext2", tmp_path, "validation")
    assert text.sha256 == hashlib.sha256(WIKI.encode()).hexdigest()
    assert text.sha256 == data.fingerprint("wikitext2", tmp_path, "validation")
    assert "NOT the published bytes" in text.source
    assert data.fingerprint("wikitext2", tmp_path, "test") == "absent"


@pytest.mark.parametrize("name", ["wikitext2", "mmlu", "ceval", "arc_easy", "arc_challenge"])
@pytest.mark.parametrize("where", ["none", "empty"])
def test_absent_data_is_not_available_with_the_command_and_nothing_stands_in(name, where, tmp_path):
    folder = tmp_path if where == "empty" else None
    read = data.questions if name in TASKS else data.corpus
    with pytest.raises(NotAvailable, match=r"set KVBENCH_ALLOW_HUB=1") as e:
        read(name, folder)
    assert "--data-dir" in str(e.value)
    assert data.fingerprint(name, folder) == "absent"


def test_one_missing_file_of_a_question_set_makes_it_absent(tmp_path):
    write_rows(tmp_path / "mmlu" / "test.jsonl.gz", [mmlu_row("anatomy")])
    assert data.fingerprint("mmlu", tmp_path) == "absent"
    with pytest.raises(NotAvailable, match=r"mmlu/dev\.jsonl\.gz"):
        data.questions("mmlu", tmp_path)


def test_the_hub_is_asked_only_when_allowed(monkeypatch):
    assert data.fingerprint("wikitext2", Path("hub"), "test") == WIKITEXT_SHA["test"]
    assert data.fingerprint("mmlu", None) == "absent"
    monkeypatch.setenv("KVBENCH_ALLOW_HUB", "1")
    assert data.fingerprint("mmlu", None) not in ("absent", data.fingerprint("ceval", None))


def test_hub_rows_become_rows_of_the_local_layout():
    mmlu = {"subject": "anatomy", "question": "q", "choices": ["w", "x", "y", "z"], "answer": 2}
    assert as_local("mmlu", "all", mmlu)["answer"] == "C"
    ceval = {"id": 0, "question": "q", "A": "1", "B": "2", "C": "3", "D": "4", "answer": "D"}
    ceval["explanation"] = ""
    assert as_local("ceval", "law", ceval) == {
        "subject": "law", "question": "q", "choices": ["1", "2", "3", "4"], "answer": "D",
    }  # fmt: skip
    arc = {"id": "x", "question": "q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
    assert as_local("arc_easy", "ARC-Easy", arc) == {
        "id": "x", "question": "q", "choices": ["a", "b"], "labels": ["1", "2"], "answer": "2",
    }  # fmt: skip


def test_unknown_names_are_usage_errors_that_list_the_known():
    with pytest.raises(UsageError, match="wikitext2, pydoc, instructions, or the path"):
        data.corpus("wikitext3", None)
    with pytest.raises(UsageError, match="test, validation"):
        data.corpus("wikitext2", None, "train")
    with pytest.raises(UsageError, match="cloze, mmlu, ceval"):
        data.questions("mmul", None)
    assert data.fingerprint("wikitext3", None) == "absent"


def test_a_text_file_is_cut_into_lines_and_paragraphs(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes("\none\r\ntwo\n\n\nthree\u2028x\n  \nfour".encode())
    text = data.corpus(str(path), None)
    assert text.rows == ("\n", "one\r\n", "two\n", "\n", "\n", "three\u2028x\n", "  \n", "four")
    assert text.documents == (0, 5, 7)
    assert text.text.encode() == path.read_bytes()
    assert text.sha256 == data.fingerprint(str(path), None) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert str(tmp_path) not in text.source


def test_text_that_is_not_utf8_or_empty(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        data.corpus(str(tmp_path / "latin.txt"), None)
    (tmp_path / "empty.txt").write_bytes(b"")
    text = data.corpus(str(tmp_path / "empty.txt"), None)
    assert (text.rows, text.text, text.documents) == ((), "", (0,))


def test_pydoc_is_always_there_and_named_by_hash():
    text = data.corpus("pydoc", None)
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest() == data.fingerprint("pydoc", None)
    assert len(text.documents) == len(text.rows) > 50
    assert text.text == "\n\n".join(text.rows)


def test_questions_keep_the_file_and_its_examples(tmp_path):
    write_rows(tmp_path / "mmlu" / "test.jsonl.gz", [mmlu_row("b"), mmlu_row("b", "D"), mmlu_row("a", "A")])
    write_rows(tmp_path / "mmlu" / "dev.jsonl.gz", [mmlu_row("a"), mmlu_row("b", "C"), mmlu_row("b")])
    found = data.questions("mmlu", tmp_path)
    assert [(q.id, q.answer) for q in found.questions] == [("b/0", 1), ("b/1", 3), ("a/0", 0)]
    assert [q.answer for q in found.examples["b"]] == [2, 1]
    assert found.sha256 == data.fingerprint("mmlu", tmp_path)
    write_rows(tmp_path / "mmlu" / "dev.jsonl.gz", [mmlu_row("a")])
    assert data.fingerprint("mmlu", tmp_path) != found.sha256


def test_arc_labels_may_be_digits_and_answers_may_be_missing(tmp_path):
    row = {"id": "m", "question": "q", "choices": ["a", "b", "c"], "labels": ["1", "2", "3"], "answer": "3"}
    write_rows(tmp_path / "arc" / "easy_test.jsonl.gz", [row, {**row, "id": "n", "answer": "E"}])
    write_rows(tmp_path / "arc" / "easy_validation.jsonl.gz", [row])
    found = data.questions("arc_easy", tmp_path)
    questions = [(q.id, q.answer, q.subject) for q in found.questions]
    assert questions == [("m", 2, "arc_easy"), ("n", None, "arc_easy")]


def test_broken_rows_are_errors_that_name_the_place(tmp_path):
    write_rows(tmp_path / "mmlu" / "dev.jsonl.gz", [mmlu_row("a")])
    with gzip.open(tmp_path / "mmlu" / "test.jsonl.gz", "wt", encoding="utf-8") as f:
        f.write(json.dumps(mmlu_row("a")) + "\n{broken\n")
    with pytest.raises(KvbenchError, match=r"test\.jsonl\.gz, line 2: not JSON"):
        data.questions("mmlu", tmp_path)
    write_rows(tmp_path / "mmlu" / "test.jsonl.gz", [{"subject": "a", "question": "q", "answer": "A"}])
    with pytest.raises(KvbenchError, match=r"mmlu, row 1: KeyError\('choices'\)"):
        data.questions("mmlu", tmp_path)


def test_cloze_has_one_true_continuation_and_is_the_same_every_time():
    text = data.corpus("pydoc", None)
    first, again, other = cloze(text), cloze(text), cloze(text, seed=1)
    assert first == again
    assert first.questions != other.questions
    assert first.sha256 != other.sha256
    joined = [" ".join(row.split()) for row in text.rows]
    for q in first.questions:
        assert q.answer is not None
        assert len(set(q.choices)) == 4
        assert {len((c or "").split()) for c in q.choices} == {CLOZE_WORDS}
        assert len(q.question.split()) == CLOZE_CONTEXT
        assert any(q.question + (q.choices[q.answer] or "") in row for row in joined)
    assert len({q.question for q in first.questions}) == 200
    assert {q.answer for q in first.questions} == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["only a few words here\n", ("word " * 60 + "\n\n") * 9])
def test_cloze_refuses_a_corpus_that_is_too_short_or_says_one_thing(text, tmp_path):
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(KvbenchError, match="too little running text"):
        cloze(data.corpus(str(tmp_path / "short.txt"), None))


@needs_data
def test_published_files_have_the_published_counts_and_hashes():
    for split, rows in (("test", 4358), ("validation", 3760)):
        text = data.corpus("wikitext2", DATA, split)
        assert (len(text.rows), len(text.documents)) == (rows, 60)
        assert text.sha256 == WIKITEXT_SHA[split] == data.fingerprint("wikitext2", DATA, split)
    counts = {"mmlu": 14042, "ceval": 1346, "arc_easy": 2376, "arc_challenge": 1172}
    for task, count in counts.items():
        found = data.questions(task, DATA)
        assert len(found.questions) == len({q.id for q in found.questions}) == count
        assert all(q.answer is not None for q in found.questions)
        assert all(len(shown) >= 5 for shown in found.examples.values())
