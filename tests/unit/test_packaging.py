"""The package's shape: what may import what, what starts without torch, and that nothing is called `kernels`."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "transformers",
    "pandas",
    "scipy",
    "matplotlib",
    "datasets",
    "triton",
    "huggingface_hub",
    "gguf",
)

# Layers from the top down. A file imports from its own layer and from those below it.
# selftest breaks all of them on purpose. session joins engine and runners to carry out one task; run and plan only order tasks, and need no torch for it.
LAYERS = ("cli", "selftest", "lmeval", "run", "session", "runners", "engine", "kernels", "base")
RUN = frozenset({"run", "untildecided", "canary", "plan", "validation", "merge", "executors", "worker"})


def layer_of(module: str) -> str:
    """`kvbench.engine.load` -> "engine". gate and report are base: they work on stored records."""
    parts = module.split(".")
    if parts[:2] == ["kvbench_kernels", "support"]:
        return "base"  # what the kernels can do: the resolver asks it, without torch
    if parts[0] == "kvbench_kernels":
        return "kernels"
    name = parts[1] if len(parts) > 1 else ""
    if name in ("selftest", "lmeval", "session", "runners", "engine"):
        return name
    if name in ("cli", "commands", "__main__"):
        return "cli"
    return "run" if name in RUN else "base"


def source_files() -> list[Path]:
    return sorted([*(ROOT / "kvbench").rglob("*.py"), *(ROOT / "kernels" / "kvbench_kernels").rglob("*.py")])


def module_name(path: Path) -> str:
    base = ROOT / "kernels" if "kernels" in path.relative_to(ROOT).parts else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, inside_functions: bool) -> set[str]:
    """Modules imported at run time; those under `if TYPE_CHECKING` do not count."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_type_checking(node):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found |= imports(node, inside_functions)
    return found


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards_only(path: Path) -> None:
    own = layer_of(module_name(path))
    # The composition layers import the heavy ones inside functions, so that `plan` starts fast.
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name in imports(tree, inside_functions=True):
        if name.split(".")[0] in ("kvbench", "kvbench_kernels"):
            target = layer_of(name)
            assert LAYERS.index(target) >= LAYERS.index(own), f"{own} imports {name} from the layer above"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_know_nothing_of_kvbench(path: Path) -> None:
    if layer_of(module_name(path)) == "kernels":
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [n for n in imports(tree, inside_functions=True) if n.split(".")[0] == "kvbench"]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_base_and_composition_import_nothing_heavy_at_the_top(path: Path) -> None:
    if layer_of(module_name(path)) in ("base", "run", "cli"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        heavy = [n for n in imports(tree, inside_functions=False) if n.split(".")[0] in HEAVY]
        assert heavy == []


def test_importing_the_base_loads_no_torch() -> None:
    """The same for what is imported in turn, in a fresh interpreter: every base module at once."""
    modules = [m for m in map(module_name, source_files()) if layer_of(m) == "base"]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += f"print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_kernels_is_no_regular_package() -> None:
    """transformers imports a package of that name if there is one; ours is kernels/kvbench_kernels."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT / "kernels")
    kvbench_kernels = importlib.util.find_spec("kvbench_kernels")
    assert kvbench_kernels is not None
    assert kvbench_kernels.origin is not None


def test_every_package_is_in_the_wheel() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(config["tool"]["setuptools"]["packages"])
    found = {module_name(p) for p in source_files() if p.name == "__init__.py"}
    assert listed == found


def test_pytest_does_not_put_test_folders_on_the_path() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "--import-mode=importlib" in config["tool"]["pytest"]["ini_options"]["addopts"]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < 400, f"{path.name} has {lines} lines; one concept a file"


def test_the_tree_in_the_readme_is_the_tree_on_disk() -> None:
    """Every module of the folders that the README spells out; runners, derive and report go by folder there."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("```\nkvbench/\n")[1].split("```")[0]
    told = set(re.findall(r"^ +(\w+\.py)", tree, re.M))
    folders = ("kvbench", "kvbench/engine", "kvbench/selftest", "kernels/kvbench_kernels")
    found = {path.name for folder in folders for path in (ROOT / folder).glob("*.py") if path.name[0] != "_"}
    assert told == found


def test_the_tests_of_the_known_failures_exist() -> None:
    """Every test that docs/known-failures.md names is there, and every test named after one of its cases is in it."""
    text = (ROOT / "docs" / "known-failures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (A\d\d T\d) \|[^|]*\|([^|]*)\|([^|]*)\|$", text, re.M)
    named = {name for _, tests, _ in rows for name in re.findall(r"`(test_\w+)`", tests)}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.M)}
    assert named - there == set()
    cases = tuple(f"test_{case.lower().replace(' ', '_')}_" for case, _, _ in rows)
    assert {name for name in there if name.startswith(cases)} - named == set()
    assert all("`test_" in tests or "Not applicable: " in note for _, tests, note in rows)


def test_a23_t5_an_exit_code_survives_a_pipe_where_ci_sets_pipefail(tmp_path: Path) -> None:
    """`tee` ends with 0 whatever the gate says, so the script and the example must set it."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^set -euo pipefail$", script, re.M)
    assert script.index("pipefail") < script.index("step make")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all("pipefail" in p for p in readme.split("\n\n") if "| tee" in p)
    assert "| tee" in readme
    command = f"{sys.executable} -m kvbench gate {tmp_path / 'nothing'} 2>&1 | tee {tmp_path / 'log'}"
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}

    def code(text: str) -> int:
        return subprocess.run(
            ["bash", "-c", text], env=os.environ | path, cwd=tmp_path, capture_output=True, check=False
        ).returncode

    assert code(f"set -o pipefail; {command}") == 2
    assert code(command) == 0


def test_every_document_that_a_message_names_is_there() -> None:
    sources = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *source_files()]
    text = "".join(p.read_text(encoding="utf-8") for p in sources)
    assert "docs/matrices.md" in text
    assert not [name for name in set(re.findall(r"docs/[\w-]+\.md", text)) if not (ROOT / name).is_file()]


def test_help_shows_what_stands_in_for_an_option() -> None:
    """Square brackets would be markup to typer's other printer, and vanish."""
    from typer.testing import CliRunner

    from kvbench.cli import app

    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    shown = " ".join(shown.split())
    assert "default: runs/" in shown
    assert "default: the one the matrix names" in shown


def test_the_hub_serves_as_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from kvbench.cli import app

    monkeypatch.chdir(tmp_path)
    plan = ["plan", str(ROOT / "matrices" / "smoke.yaml"), "--data-dir"]
    assert CliRunner().invoke(app, [*plan, "hub"]).exit_code == 0
    assert CliRunner().invoke(app, [*plan, "nosuch"]).exit_code == 2


def test_the_hub_libraries_are_silenced_before_they_are_imported() -> None:
    """They read telemetry and verbosity settings at import, so importing any engine module must set them first."""
    code = (
        "import kvbench.engine.binding, huggingface_hub.constants as c, transformers\n"
        "print(c.HF_HUB_DISABLE_TELEMETRY, transformers.logging.get_verbosity() >= 40)"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True True"
