"""README and docs/: links lead somewhere, examples load, commands exist, and numbers are those of the code."""

from __future__ import annotations

import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from kvbench.cli.main import app
from kvbench.formats.kv import (
    KV_FORMATS,
    WEIGHT_FORMATS,
    KVShape,
    get_max_kv_blocks,
    kv_bytes,
    page_bytes,
    weight_bytes,
)
from kvbench.gate import policy
from kvbench.matrix import load as matrix

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
QWEN, SMOL = KVShape(8, 128, 128), KVShape(3, 64, 64)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, also those inside of a list, without their indent."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@names
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_readme_lists_every_page() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Pages\n")[1].split("\n## ")[0]
    linked = set(re.findall(r"\]\(docs/([\w/-]+\.md)\)", table))
    assert {page.name for page in DOCS.glob("*.md")} <= linked


@names
def test_every_example_of_a_matrix_or_a_gate_loads(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        data = yaml.safe_load(text) or {}
        file = tmp_path / "example.yaml"
        if "checks" in data:
            file.write_text(text, encoding="utf-8")
            assert policy.load(file).checks
        elif "axes" in data:
            (tmp_path / "gate.yaml").write_text("checks: []\n", encoding="utf-8")
            file.write_text(text, encoding="utf-8")
            assert matrix.load(file).cells


@names
def test_every_command_and_option_exists(page: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            for command in re.split(r" && | \| |; ", line):
                words = shlex.split(command, comments=True)
                if words[:1] == ["kvbench"] and not words[1].startswith("-"):
                    if commands[words[1]].context_settings.get("ignore_unknown_options"):
                        continue  # lm-eval's own options
                    known = {
                        name
                        for parameter in commands[words[1]].params
                        for name in (*parameter.opts, *parameter.secondary_opts)
                    }
                    assert {word.split("=")[0] for word in words if word.startswith("-")} - known == set()


def test_the_gates_that_come_with_it_are_listed() -> None:
    table = (DOCS / "gates.md").read_text(encoding="utf-8").split("## The gates that come with it")[1]
    assert set(re.findall(r"`(\w+\.yaml)`", table)) == {path.name for path in (ROOT / "gates").glob("*.yaml")}


# docs/formats.md: what its tables say, worked out again


def numbers(text: str) -> list[str]:
    return [n.replace(",", "") for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def rows(title: str) -> dict[str, list[str]]:
    """The cells of the rows of the first table after this line of docs/formats.md, by the words of the first cell."""
    text = (DOCS / "formats.md").read_text(encoding="utf-8").split(f"{title}\n\n")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize("name", ["native", "int8_sym", "fp8_e4m3"])
def test_formats_bytes_of_a_page(name: str) -> None:
    payload, scales, total, ratio = rows(
        "One page of 16 tokens of one layer with 8 heads of 128, in 16 bits:"
    )[f"`{name}`"]
    due = kv_bytes(KV_FORMATS[name], QWEN, 16, "bfloat16")
    assert (numbers(payload)[-1], numbers(scales)[-1]) == (str(due.payload), str(due.scales))
    assert numbers(total) == [str(due.total)]
    assert float(ratio) == due.total / 65536


def test_formats_bytes_of_static_scales() -> None:
    for name in ("int8_static", "fp8_e4m3_static"):
        due = kv_bytes(KV_FORMATS[name], QWEN, 16, "bfloat16")
        assert (due.payload, due.scales) == (32768, 8)
        assert page_bytes(KV_FORMATS[name], QWEN, 16, "bfloat16") == 32768


def test_formats_bytes_of_a_token() -> None:
    table = rows("A token in all layers:")
    for (shape, layers), cells in zip(((QWEN, 36), (SMOL, 30)), table.values(), strict=True):
        due = [
            layers * kv_bytes(KV_FORMATS[n], shape, 1, "bfloat16").total
            for n in ("native", "int8_sym", "fp8_e4m3")
        ]
        assert [int(numbers(cell)[0]) for cell in cells] == due
    assert 30 * kv_bytes(KV_FORMATS["native"], SMOL, 1, "float32").total == 46080
    pages = [
        get_max_kv_blocks(2**30, KV_FORMATS[n], [QWEN] * 36, 16, "bfloat16") for n in ("native", "int8_sym")
    ]
    assert pages == [455, 896]


def test_formats_ratios_of_head_dims() -> None:
    """(D + b) / (2 D) for a scale of b bytes a row."""
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    said = {
        "int8_sym": "0.515625 at 64 and 0.5078125 at 128",
        "fp8_e4m3": "0.53125 at 64 and 0.515625 at 128",
    }
    for name, words in said.items():
        assert words in text
        for dim, ratio in zip((64, 128), (words.split()[0], words.split()[4]), strict=True):
            fmt, shape = KV_FORMATS[name], KVShape(1, dim, dim)
            due = Fraction(
                kv_bytes(fmt, shape, 1, "bfloat16").total,
                kv_bytes(KV_FORMATS["native"], shape, 1, "bfloat16").total,
            )
            assert Fraction(ratio) == due == Fraction(dim + fmt.scale_bytes, 2 * dim)


def test_formats_bytes_of_weights() -> None:
    table = rows("scale, however small it is. Embeddings, norms, biases and the output layer stay native.")
    assert len(table) == 3
    for layer, (codes, scales, total, ratio) in table.items():
        n, k = map(int, layer.split(" x "))
        due = weight_bytes(WEIGHT_FORMATS["fp8_block128"], n, k, "bfloat16")
        assert (numbers(codes)[-1], numbers(scales)[-1]) == (str(due.payload), str(due.scales))
        assert numbers(total) == [str(due.total)]
        assert ratio == f"{due.total / (2 * n * k):.4f}"


def test_formats_are_all_described() -> None:
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    for name, fmt in KV_FORMATS.items():
        (row,) = [
            r for r in text.splitlines() if r.startswith(f"| `{name}` |") and "FP8" * ("fp8" in name) in r
        ][:1]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[3:] == [
            f"{fmt.scale_bytes} ({fmt.scale_dtype})" if fmt.scale_dtype else "",
            f"{fmt.qmax:g}" if fmt.qmax else "",
        ]
    assert all(f"| `{name}` |" in text for name in WEIGHT_FORMATS)


def test_the_page_of_commands_has_all_of_them() -> None:
    from kvbench.cli.main import COMMANDS

    heads = re.findall(r"^### (.*)$", (DOCS / "commands.md").read_text(encoding="utf-8"), re.M)
    assert {name for head in heads for name in head.split(", ")} == set(COMMANDS)
