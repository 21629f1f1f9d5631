"""Mistakes in matrix and gate files: the place and the reason of each, all at once.

mistakes.txt has a file's text and below it one line for each mistake: `> LINE:COLUMN code sentence`. A reworded sentence
changes that file alone, where all of them are reviewed together.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.gate import policy
from kvbench.matrix import load as matrix
from kvbench.matrix.document import ConfigError, Fault

CASES = [
    block.split("\n> ")
    for block in (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8").strip().split("\n\n")
]


def faults_of(text: str, folder: Path) -> tuple[Fault, ...]:
    """A text with `checks:` is a gate; a matrix gets a model and a runner unless it ends with `...`."""
    path = folder / "f.yaml"
    if text.startswith("# gate\n"):
        load = policy.load
    else:
        load = matrix.load  # type: ignore[assignment]
        if not text.endswith("..."):
            text += "\nmodel: tiny-llama\n" if "model:" not in text else ""
            text += "\nrunners: {storage: {}}\n" if "runners:" not in text else ""
    path.write_text(text.removesuffix("..."), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    return caught.value.faults


def without_folder(sentence: str, folder: Path) -> str:
    return sentence.replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "lines"), [(text, lines) for text, *lines in CASES], ids=[c[0] for c in CASES]
)
def test_a_mistake_has_its_place_its_reason_and_a_sentence(
    text: str, lines: list[str], tmp_path: Path
) -> None:
    faults = faults_of(text, tmp_path)
    assert [f"{f.line}:{f.column} {f.code}" for f in faults] == [" ".join(line.split()[:2]) for line in lines]
    assert [without_folder(f.sentence, tmp_path) for f in faults] == [line.split(" ", 2)[2] for line in lines]


def test_every_reason_occurs() -> None:
    codes = {line.split()[1] for _, *lines in CASES for line in lines}
    assert codes >= {
        "alias", "conflict", "duplicate_key", "empty", "missing_file", "missing_key", "missing_scale", "no_cell",
        "not_accepted", "not_finite", "out_of_domain", "too_large", "too_small", "unknown_key", "unused", "wrong_length",
        "wrong_type",
    }  # fmt: skip


def test_the_file_name_is_the_name_when_it_can_be(tmp_path: Path) -> None:
    text = "model: a\naxes: {batch: 1}\nrunners: {storage: {}}\n"
    (tmp_path / "int8-run.yaml").write_text(text)
    assert matrix.load(tmp_path / "int8-run.yaml").name == "int8-run"
    (tmp_path / "My Run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r'"My Run" \(from the file\'s name\)'):
        matrix.load(tmp_path / "My Run.yaml")
