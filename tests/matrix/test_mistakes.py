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

TEXT = (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8")
CASES = [block.split("\n> ") for block in TEXT.strip().split("\n\n")]


def cases(gates):
    found = [
        pytest.param(text, lines, id=text) for text, *lines in CASES if text.startswith("# gate") is gates
    ]
    return pytest.mark.parametrize(("text", "lines"), found)


def check(load, text, lines, tmp_path):
    (tmp_path / "f.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "f.yaml")
    # Places and reasons first: they must hold whatever the sentences are.
    found = [f"{f.line}:{f.column} {f.code}" for f in caught.value.faults]
    assert found == [" ".join(line.split()[:2]) for line in lines]
    sentences = [fault.sentence.replace(f"{tmp_path}/", "") for fault in caught.value.faults]
    assert sentences == [line.split(" ", 2)[2] for line in lines]


@cases(gates=False)
def test_a22_t2_to_t5_a_mistake_in_a_matrix_has_place_and_reason(text, lines, tmp_path):
    """A model and a runner are added, unless the text ends with `...`."""
    if not text.endswith("..."):
        text += "\nmodel: tiny-llama\n" if "model:" not in text else ""
        text += "\nrunners: {storage: {}}\n" if "runners:" not in text else ""
    check(matrix.load, text.removesuffix("..."), lines, tmp_path)


@cases(gates=True)
def test_a23_t4_a_mistake_in_a_gate_has_place_and_reason(text, lines, tmp_path):
    check(policy.load, text, lines, tmp_path)


def test_the_file_name_is_the_name_when_it_can_be(tmp_path):
    text = "model: a\naxes: {batch: 1}\nrunners: {storage: {}}\n"
    (tmp_path / "int8-run.yaml").write_text(text)
    assert matrix.load(tmp_path / "int8-run.yaml").name == "int8-run"
    (tmp_path / "My Run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r'"My Run" \(from the file\'s name\)'):
        matrix.load(tmp_path / "My Run.yaml")
