"""README and docs: links resolve, examples load, commands exist, and numbers are those of the code."""

import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from kvbench.cli.main import COMMANDS, app
from kvbench.formats.kv import KV_FORMATS, WEIGHT_FORMATS, KVShape, get_max_kv_blocks, kv_bytes, weight_bytes
from kvbench.gate import policy
from kvbench.matrix import load as matrix
from kvbench.published.rules import RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
QWEN, SMOL = KVShape(8, 128, 128), KVShape(3, 64, 64)


def blocks(page, language):
    """The fenced blocks of a language, also those inside of a list, without their indent."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@names
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_readme_is_short_and_links_every_page():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(list(DOCS.glob("*.md"))) <= 11
    linked = re.findall(r"\]\((docs/[\w/-]+\.md)\)", text)
    assert {str(page.relative_to(ROOT)) for page in PAGES[1:]} <= set(linked)


@names
def test_every_example_of_a_matrix_or_a_gate_loads(page, tmp_path):
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
def test_every_command_and_option_exists(page):
    commands = get_command(app).commands
    for text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            for command in re.split(r" && | \|\|? |; ", line):
                words = shlex.split(command, comments=True)
                if words[:1] == ["kvbench"] and not words[1].startswith("-"):
                    if commands[words[1]].context_settings.get("ignore_unknown_options"):
                        continue  # lm-eval's own options
                    parameters = commands[words[1]].params
                    known = {name for p in parameters for name in (*p.opts, *p.secondary_opts)}
                    assert {word.split("=")[0] for word in words if word.startswith("-")} - known == set()


def test_the_gates_that_come_with_it_are_listed():
    table = (DOCS / "gates.md").read_text(encoding="utf-8").split("## The gates that come with it")[1]
    assert set(re.findall(r"`(\w+\.yaml)`", table)) == {path.name for path in (ROOT / "gates").glob("*.yaml")}


# docs/formats.md: its numbers are those of the code


def numbers(text):
    return [n.replace(",", "") for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def rows(title):
    """The first table after a line that ends with `title`: first cell to the other cells of its row."""
    text = (DOCS / "formats.md").read_text(encoding="utf-8").split(f"{title}\n\n")[1].split("\n\n")[0]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {row[0]: row[1:] for row in cells}


def test_formats_are_described():
    assert set(rows("## Weight formats")) == set(WEIGHT_FORMATS)
    described = {name: row[2:] for name, row in rows("## KV formats").items()}
    assert list(described) == list(KV_FORMATS)
    for name, fmt in KV_FORMATS.items():
        scale = f"{fmt.scale_bytes} ({fmt.scale_dtype})" if fmt.scale_dtype else ""
        assert described[name] == [scale, f"{fmt.qmax:g}" if fmt.qmax else ""]


def test_formats_bytes_of_a_page_and_of_a_token():
    for name, row in rows("One page of 16 tokens of one layer with 8 heads of 128, in 16 bits:").items():
        for fmt in (KV_FORMATS[part.strip(" `")] for part in name.split(",")):
            size = kv_bytes(fmt, QWEN, 16, "bfloat16")
            shown = [*(numbers(cell)[-1 if "=" in cell else 0] for cell in row[:2]), *numbers(row[2])[:1]]
            total = size.total if fmt.scale_kind != "static" else size.payload
            assert shown == [str(size.payload), str(size.scales), str(total)]
            assert float(numbers(row[3])[0]) == total / 65536
    table = rows("One token in all layers:").values()
    used = [KV_FORMATS[name] for name in ("native", "int8_sym", "fp8_e4m3")]
    for (shape, layers), cells in zip(((QWEN, 36), (SMOL, 30)), table, strict=True):
        expected = [layers * kv_bytes(fmt, shape, 1, "bfloat16").total for fmt in used]
        assert [int(numbers(cell)[0]) for cell in cells] == expected
    native, int8 = (get_max_kv_blocks(2**30, fmt, [QWEN] * 36, 16, "bfloat16") for fmt in used[:2])
    said = f"1 GiB holds {native} pages of 16 tokens of the first shape in 16 bits, and {int8}"
    assert said in " ".join((DOCS / "formats.md").read_text(encoding="utf-8").split())


def test_formats_ratios_of_head_dims():
    """(D + b) / (2 D) for a scale of b bytes per row."""
    text = " ".join((DOCS / "formats.md").read_text(encoding="utf-8").split())
    for name, dim, ratio in (
        ("int8_sym", 64, "0.515625"),
        ("int8_sym", 128, "0.5078125"),
        ("fp8_e4m3", 64, "0.53125"),
        ("fp8_e4m3", 128, "0.515625"),
    ):
        formats, shape = (KV_FORMATS["native"], KV_FORMATS[name]), KVShape(1, dim, dim)
        native, size = (kv_bytes(fmt, shape, 1, "bfloat16").total for fmt in formats)
        assert Fraction(ratio) == Fraction(size, native)
        assert re.search(rf"`{name}` [^;.]*(?:\.\d[^;.]*)*{re.escape(ratio)} at {dim}", text)


def test_formats_bytes_of_weights():
    table = rows("takes a whole scale. Embeddings, norms, biases and the output layer stay native.")
    assert len(table) == 3
    for layer, (codes, scales, total, ratio) in table.items():
        n, k = map(int, layer.split(" x "))
        size = weight_bytes(WEIGHT_FORMATS["fp8_block128"], n, k, "bfloat16")
        assert (numbers(codes)[-1], numbers(scales)[-1]) == (str(size.payload), str(size.scales))
        assert numbers(total) == [str(size.total)]
        assert ratio == f"{size.total / (2 * n * k):.4f}"


def test_the_pages_name_matrices_gates_and_commands_that_exist():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "notes.md")  # a log
    folders = "matrices|gates|examples|benchmarks|kvbench|kernels|tests"
    paths = set(re.findall(rf"\b(?:{folders})/[\w/]+\.(?:yaml|yml|py)", text))
    assert paths
    real = [path for path in paths if "NAME" not in path and "RUNNER" not in path]
    assert [path for path in real if not (ROOT / path).is_file()] == []
    running = (DOCS / "running.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`{name}" not in running and f"kvbench {name}" not in running] == []


def test_the_exit_codes_are_listed():
    table = (DOCS / "running.md").read_text(encoding="utf-8").split("## Exit codes")[1].split("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", table, re.M) == ["0", "1", "2", "3", "4", "130", "141"]


def test_check_table_finds_what_the_page_shows(monkeypatch):
    text = (DOCS / "comparing.md").read_text(encoding="utf-8")
    command, shown = text.split("\n$ kvbench ")[1].split("```")[0].split("\n", 1)
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, command.split())
    places = re.findall(r"^(\S+:\d+: \w+):", shown, re.M)
    assert (done.exit_code, places) == (1, re.findall(r"^(\S+:\d+: \w+):", done.stdout, re.M))
    assert [name for name in RULES if f"`{name}`" not in text] == []
