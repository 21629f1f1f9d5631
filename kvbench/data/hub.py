"""Question sets from the hub, as rows of the local layout. Used only when fetching was allowed (`kvbench.data.corpora`)."""

from __future__ import annotations

from typing import Any

from kvbench.data.ceval import SUBJECTS
from kvbench.models.hub import quiet

# task: (repository, config or None for one config a subject, split of the questions, split of the examples)
PLACES: dict[str, tuple[str, str | None, str, str]] = {
    "mmlu": ("cais/mmlu", "all", "test", "dev"),
    "ceval": ("ceval/ceval-exam", None, "val", "dev"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", "validation"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", "validation"),
}


def rows_of(task: str, part: str) -> list[dict[str, Any]]:
    """Rows of one part ("scored" or "shown") with the keys of the local files."""
    quiet()
    from datasets import load_dataset  # takes seconds to import

    repository, config, scored, shown = PLACES[task]
    split = scored if part == "scored" else shown
    configs = [config] if config is not None else sorted(SUBJECTS)
    return [
        as_local(task, name, row) for name in configs for row in load_dataset(repository, name, split=split)
    ]


def as_local(task: str, config: str, row: dict[str, Any]) -> dict[str, Any]:
    """One hub row in the local layout: MMLU answers are indexes, C-Eval choices are columns, ARC choices are nested."""
    if task == "mmlu":
        return {**{k: row[k] for k in ("subject", "question", "choices")}, "answer": "ABCD"[row["answer"]]}
    if task == "ceval":
        return {
            "subject": config,
            "question": row["question"],
            "choices": [row[letter] for letter in "ABCD"],
            "answer": row["answer"],
        }
    return {
        "id": row["id"],
        "question": row["question"],
        "choices": list(row["choices"]["text"]),
        "labels": list(row["choices"]["label"]),
        "answer": row["answerKey"],
    }
