"""The digest of evaluation data that enters a task's key."""

from pathlib import Path

from kvbench.data.corpora import ABSENT, Corpus, corpus, corpus_fingerprint
from kvbench.data.questions import TASKS, Question, QuestionSet, questions, questions_fingerprint

__all__ = ["ABSENT", "Corpus", "Question", "QuestionSet", "corpus", "fingerprint", "questions"]


def fingerprint(name: str, data_dir: Path | None, split: str = "test") -> str:
    """sha256 of a corpus or a question set, or "absent" when it is not there."""
    if name in TASKS:
        return questions_fingerprint(name, data_dir)
    return corpus_fingerprint(name, data_dir, split)
