"""Multiple-choice questions: found, read and hashed.

    mmlu, ceval, arc_easy, arc_challenge   gzipped JSON lines below the data directory, or the hub if allowed
    cloze                                  made here from a corpus: which of four continuations is true

Text is kept verbatim, upstream's mistakes included: scores on corrected questions would compare with
nobody's.
"""

import gzip
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.data.corpora import ABSENT, Corpus, corpus, file_sha, hub_allowed, local, not_available
from kvbench.errors import KvbenchError, UsageError


@dataclass(frozen=True)
class Question:
    """One question. choices hold None or "" where the data does; answer: index of the right choice, or None
    when it is not among the choices. The runner counts both as skipped.
    """

    id: str
    subject: str
    question: str
    choices: tuple[str | None, ...]
    answer: int | None


@dataclass(frozen=True)
class QuestionSet:
    """questions in file order; examples: the solved ones of each subject, in the order they are shown."""

    name: str
    questions: tuple[Question, ...]
    examples: Mapping[str, tuple[Question, ...]]
    sha256: str
    source: str
    license: str


@dataclass(frozen=True)
class Source:
    """Files below the data directory. scored, shown: paths of the questions and of the examples."""

    scored: str
    shown: str
    source: str
    license: str


SOURCES: dict[str, Source] = {
    "mmlu": Source("mmlu/test.jsonl.gz", "mmlu/dev.jsonl.gz", "MMLU, test split, examples from dev", "MIT"),
    "ceval": Source(
        "ceval/val.jsonl.gz", "ceval/dev.jsonl.gz", "C-Eval, val split, examples from dev",
        "CC BY-NC-SA 4.0 (non-commercial)",
    ),
    "arc_easy": Source(
        "arc/easy_test.jsonl.gz", "arc/easy_validation.jsonl.gz",
        "ARC-Easy, test split, examples from validation", "CC BY-SA 4.0",
    ),
    "arc_challenge": Source(
        "arc/challenge_test.jsonl.gz", "arc/challenge_validation.jsonl.gz",
        "ARC-Challenge, test split, examples from validation", "CC BY-SA 4.0",
    ),
}  # fmt: skip
TASKS = ("cloze", *SOURCES)

# The cloze set: questions, words of context, words of each continuation, seed.
CLOZE_QUESTIONS, CLOZE_CONTEXT, CLOZE_WORDS, CLOZE_SEED = 200, 48, 8, 0


def questions(task: str, data_dir: Path | None) -> QuestionSet:
    """Read the question set `task`. Raises NotAvailable when it is not here, KvbenchError for a broken
    file.
    """
    if task == "cloze":
        return cloze(corpus("pydoc", data_dir))
    source = _source(task)
    paths = _paths(source, data_dir)
    if paths is not None:
        rows = [_read(path) for path in paths]
        sha, where = _combined(file_sha(path) for path in paths), "local files"
    elif hub_allowed(data_dir):
        from kvbench.data.hub import rows_of

        rows = [rows_of(task, part) for part in ("scored", "shown")]
        sha = hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()
        where = "hub"
    else:
        raise not_available(task, data_dir, f"{source.scored} and {source.shown}")
    scored, shown = (_parse(part, task) for part in rows)
    examples: dict[str, list[Question]] = defaultdict(list)
    for q in shown:
        examples[q.subject].append(q)
    shots = {subject: tuple(rows) for subject, rows in examples.items()}
    return QuestionSet(task, tuple(scored), shots, sha, f"{source.source}, {where}", source.license)


def questions_fingerprint(task: str, data_dir: Path | None) -> str:
    """sha256 over the files of the set (for cloze: of its corpus and recipe), or "absent".

    Content on the hub is known only once it is fetched; until then the digest is of the place's name.
    """
    if task == "cloze":
        return _cloze_sha(corpus("pydoc", data_dir))
    paths = _paths(_source(task), data_dir)
    if paths is not None:
        return _combined(file_sha(path) for path in paths)
    return _combined(["hub", task]) if hub_allowed(data_dir) else ABSENT


def cloze(text: Corpus, count: int = CLOZE_QUESTIONS, seed: int = CLOZE_SEED) -> QuestionSet:
    """Questions whose context is a stretch of `text` and whose choices continue it: the true continuation,
    and three of the same length from elsewhere in the corpus. Same corpus, count and seed: same questions.

    Raises KvbenchError when the corpus is too short for it.
    """
    rng = random.Random(f"cloze {seed} {text.sha256}")
    pieces = _prose(text.rows)
    too_short = KvbenchError(
        f"The corpus {text.name} has too little running text for a cloze set (4 different stretches of "
        f"{CLOZE_CONTEXT + CLOZE_WORDS} words); use a longer one."
    )
    if len(pieces) < 4:
        raise too_short
    weights = [len(p) - (CLOZE_CONTEXT + CLOZE_WORDS) + 1 for p in pieces]

    def draw() -> tuple[int, int]:
        piece = rng.choices(range(len(pieces)), weights)[0]
        return piece, rng.randrange(weights[piece])

    found: list[Question] = []
    seen: set[str] = set()
    for _ in range(4 * count):  # a corpus that repeats itself has fewer questions than places
        if len(found) == count:
            break
        piece, start = draw()
        words, split = pieces[piece], start + CLOZE_CONTEXT
        context = " ".join(words[start:split])
        if context in seen:
            continue
        seen.add(context)
        choices = [_continuation(words, split)]
        for other, at in (draw() for _ in range(100)):
            candidate = _continuation(pieces[other], at + CLOZE_CONTEXT)
            if other != piece and candidate not in choices:
                choices.append(candidate)
            if len(choices) == 4:
                break
        else:
            raise too_short
        order = rng.sample(range(4), 4)
        shuffled = tuple(choices[i] for i in order)
        found.append(Question(f"cloze/{len(found)}", "cloze", context, shuffled, order.index(0)))
    source = f"{len(found)} cloze questions (seed {seed}) made from {text.source}"
    return QuestionSet("cloze", tuple(found), {}, _cloze_sha(text, count, seed), source, text.license)


def _cloze_sha(text: Corpus, count: int = CLOZE_QUESTIONS, seed: int = CLOZE_SEED) -> str:
    return _combined(["cloze", text.sha256, *map(str, (count, seed, CLOZE_CONTEXT, CLOZE_WORDS))])


def _continuation(words: list[str], at: int) -> str:
    return " " + " ".join(words[at : at + CLOZE_WORDS])


def _prose(rows: Iterable[str]) -> list[list[str]]:
    """Words of the paragraphs that are long enough for a question. Tables, code and headings are left out: a
    paragraph has no line that is indented or begins a table, and single spaces join its words so that layout
    gives no clue.
    """
    found = []
    for row in rows:
        for paragraph in re.split(r"\n\s*\n", row.strip("\n")):
            lines = paragraph.strip("\n").split("\n")
            if any(line.startswith(("   ", "|", "+")) for line in lines):
                continue
            words = " ".join(lines).split()
            if len(words) >= CLOZE_CONTEXT + CLOZE_WORDS:
                found.append(words)
    return found


def _source(task: str) -> Source:
    if task not in SOURCES:
        raise UsageError(f"There is no question set {task!r}; use one of {', '.join(TASKS)}.")
    return SOURCES[task]


def _paths(source: Source, data_dir: Path | None) -> tuple[Path, Path] | None:
    scored, shown = (local(data_dir, *name.split("/")) for name in (source.scored, source.shown))
    return (scored, shown) if scored is not None and shown is not None else None


def _combined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read(path: Path) -> list[dict[str, Any]]:
    rows = []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as f:
        for number, line in enumerate(f, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as e:
                raise KvbenchError(f"{path}, line {number}: not JSON ({e}); fetch the file again.") from None
    return rows


def _parse(rows: list[dict[str, Any]], task: str) -> list[Question]:
    """MMLU and C-Eval rows have a subject and a letter; ARC rows have an id, and labels that may be
    digits.
    """
    parsed = []
    seen: dict[str, int] = defaultdict(int)
    for number, row in enumerate(rows, start=1):
        try:
            subject = row.get("subject", task)
            labels = list(row.get("labels", "ABCD"))
            key = str(row.get("id", f"{subject}/{seen[subject]}"))
            answer = labels.index(row["answer"]) if row["answer"] in labels else None
            parsed.append(Question(key, subject, row["question"], tuple(row["choices"]), answer))
        except (KeyError, TypeError) as e:
            raise KvbenchError(
                f"{task}, row {number}: {e!r} in {sorted(row)}; fetch the data again."
            ) from None
        seen[subject] += 1
    return parsed
