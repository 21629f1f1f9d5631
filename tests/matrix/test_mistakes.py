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


@pytest.mark.parametrize(("text", "lines"), [pytest.param(text, lines, id=text) for text, *lines in CASES])
def test_a22_t2_to_t5_a23_t4_a_mistake_has_place_and_reason(text, lines, tmp_path):
    """A matrix gets a model and a runner, unless its text ends with `...`."""
    gate = text.startswith("# gate")
    if not gate and not text.endswith("..."):
        text += "\nmodel: tiny-llama\n" if "model:" not in text else ""
        text += "\nrunners: {storage: {}}\n" if "runners:" not in text else ""
    (tmp_path / "f.yaml").write_text(text.removesuffix("..."), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        (policy.load if gate else matrix.load)(tmp_path / "f.yaml")
    # Places and reasons first: they must hold whatever the sentences are.
    found = [f"{f.line}:{f.column} {f.code}" for f in caught.value.faults]
    assert found == [" ".join(line.split()[:2]) for line in lines]
    sentences = [fault.sentence.replace(f"{tmp_path}/", "") for fault in caught.value.faults]
    assert sentences == [line.split(" ", 2)[2] for line in lines]


def test_the_file_name_is_the_name_when_it_can_be(tmp_path):
    text = "model: a\naxes: {batch: 1}\nrunners: {storage: {}}\n"
    (tmp_path / "int8-run.yaml").write_text(text)
    assert matrix.load(tmp_path / "int8-run.yaml").name == "int8-run"
    (tmp_path / "My Run.yaml").write_text(text)
    with pytest.raises(UsageError, match=r'"My Run" \(from the file\'s name\)'):
        matrix.load(tmp_path / "My Run.yaml")
