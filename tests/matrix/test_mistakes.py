"""Mistakes in matrix and gate files: the place and the reason of each, all at once.

mistakes.txt has a file's text and below it one line for each mistake: `> LINE:COLUMN code sentence`. A
reworded sentence changes that file alone, where all of them are reviewed together.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.gate import policy
from kvbench.matrix import load as matrix
from kvbench.matrix.document import ConfigError

CASES = [
    block.split("\n> ")
    for block in (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8").strip().split("\n\n")
]
MATRICES = [pytest.param(text, lines, id=text) for text, *lines in CASES if not text.startswith("# gate")]
GATES = [pytest.param(text, lines, id=text) for text, *lines in CASES if text.startswith("# gate")]


def check(error: ConfigError, lines: list[str], folder: Path) -> None:
    """Places and reasons first: they must hold whatever the sentences are."""
    found = [f"{f.line}:{f.column} {f.code}" for f in error.faults]
    assert found == [" ".join(line.split()[:2]) for line in lines]
    sentences = [fault.sentence.replace(f"{folder}/", "") for fault in error.faults]
    assert sentences == [line.split(" ", 2)[2] for line in lines]


@pytest.mark.parametrize(("text", "lines"), MATRICES)
def test_a22_t2_to_t5_a_mistake_in_a_matrix_has_place_and_reason(text, lines, tmp_path):
    """A model and a runner are added, unless the text ends with `...`."""
    path = tmp_path / "f.yaml"
    if not text.endswith("..."):
        text += "\nmodel: tiny-llama\n" if "model:" not in text else ""
        text += "\nrunners: {storage: {}}\n" if "runners:" not in text else ""
    path.write_text(text.removesuffix("..."), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        matrix.load(path)
    check(caught.value, lines, tmp_path)


@pytest.mark.parametrize(("text", "lines"), GATES)
def test_a23_t4_a_mistake_in_a_gate_has_place_and_reason(text, lines, tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        policy.load(path)
    check(caught.value, lines, tmp_path)


def test_every_reason_occurs():
    codes = {line.split()[1] for _, *lines in CASES for line in lines}
    assert codes >= {
        "alias", "conflict", "duplicate_key", "empty", "missing_file", "missing_key", "missing_scale",
        "no_cell",
        "not_accepted", "not_finite", "out_of_domain", "too_large", "too_small", "unknown_key", "unused",
        "wrong_length",
        "wrong_type",
    }  # fmt: skip


def test_the_file_name_is_the_name_when_it_can_be(tmp_path):
    text = "model: a\naxes: {batch: 1}\nrunners: {storage: {}}\n"
    (tmp_path / "int8-run.yaml").write_text(text)
    assert matrix.load(tmp_path / "int8-run.yaml").name == "int8-run"
    (tmp_path / "My Run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r'"My Run" \(from the file\'s name\)'):
        matrix.load(tmp_path / "My Run.yaml")
