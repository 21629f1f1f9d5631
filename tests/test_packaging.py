"""The package's shape: what may import what, what starts without torch, and that nothing is called `kernels`."""

import ast
import graphlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
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

# Every package and module of kvbench, from the ground up: a file imports from its own package and from those before it.
# What is not listed fails. selftest breaks the packages before it on purpose.
LAYERS = (
    "errors", "files", "text", "formats", "models", "data", "machine", "stats", "matrix", "records", "metrics", "render", "gate",
    "compare", "published", "report", "engines", "evidence", "runners", "run", "preflight", "lm_eval", "selftest", "cli",
)  # fmt: skip
# These import torch, transformers and their like at the top; all others inside the functions that need them, so that `plan` starts fast.
HEAVY_PACKAGES = frozenset({"engines", "evidence", "runners", "lm_eval", "selftest"})
HEAVY_MODULES = frozenset(f"kvbench.run.task.{name}" for name in ("prepare", "measure"))  # when a task runs


def package_of(module):
    """`kvbench.gate.policy` -> "gate"; "" for kvbench itself, which imports nothing and may be imported by all."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_light(module):
    """Whether importing the module may load nothing heavy."""
    if module.startswith("kvbench_kernels"):
        return module in (
            "kvbench_kernels",
            "kvbench_kernels.support",
        )  # the resolver asks what the kernels can do
    return module not in HEAVY_MODULES and package_of(module) not in HEAVY_PACKAGES


def source_files():
    return sorted([*(ROOT / "kvbench").rglob("*.py"), *(ROOT / "kernels" / "kvbench_kernels").rglob("*.py")])


def module_name(path):
    base = ROOT / "kernels" if "kernels" in path.relative_to(ROOT).parts else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node):
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree, inside_functions):
    """Modules imported at run time; those under `if TYPE_CHECKING` do not count."""
    found = set()
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


TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in source_files()}


def test_imports_go_one_way():
    """Imports inside functions count too. An unlisted package is a ValueError."""
    wrong = []
    for module, tree in TREES.items():
        if module.split(".")[0] == "kvbench" and module not in ("kvbench", "kvbench.__main__"):
            own = LAYERS.index(package_of(module))
            targets = {
                n for n in imports(tree, inside_functions=True) if n in TREES and n.startswith("kvbench.")
            }
            wrong += [f"{module} imports {name}" for name in targets if LAYERS.index(package_of(name)) > own]
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others():
    graph = {
        module: {name for name in imports(tree, inside_functions=True) if name in TREES and name != module}
        for module, tree in TREES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_kernels_know_nothing_of_kvbench():
    kernels = [tree for module, tree in TREES.items() if module.startswith("kvbench_kernels")]
    assert kernels
    assert not [n for t in kernels for n in imports(t, inside_functions=True) if n.split(".")[0] == "kvbench"]


def test_light_modules_import_nothing_heavy_at_the_top():
    light = {
        module: imports(tree, inside_functions=False) for module, tree in TREES.items() if is_light(module)
    }
    assert [(m, n) for m, names in light.items() for n in names if n.split(".")[0] in HEAVY] == []


def test_importing_the_light_modules_loads_no_torch():
    """The same for what is imported in turn, in a fresh interpreter: every light module at once."""
    modules = [module for module in TREES if is_light(module) and module != "kvbench.__main__"]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += f"print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_kernels_is_no_regular_package():
    """transformers imports a package of that name if there is one; ours is kernels/kvbench_kernels."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT / "kernels")
    kvbench_kernels = importlib.util.find_spec("kvbench_kernels")
    assert kvbench_kernels is not None
    assert kvbench_kernels.origin is not None


def test_every_package_is_in_the_wheel():
    """setuptools finds packages by their __init__.py, so every folder with Python files needs one."""
    assert [str(p) for p in source_files() if not (p.parent / "__init__.py").exists()] == []
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert config["packages"]["find"] == {
        "where": [".", "kernels"],
        "include": ["kvbench*", "kvbench_kernels*"],
    }


def test_pytest_does_not_put_test_folders_on_the_path():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "--import-mode=importlib" in config["tool"]["pytest"]["ini_options"]["addopts"]


def test_files_stay_small():
    """One concept a file."""
    assert {str(p): n for p in source_files() if (n := len(p.read_text("utf-8").splitlines())) > 400} == {}


def test_folders_stay_small():
    """At most 16 Python files a folder, `__init__` included; kvbench/ itself at most 6."""
    counts = Counter(path.parent for path in source_files())
    assert {str(f): n for f, n in counts.items() if n > (6 if f.name == "kvbench" else 16)} == {}


def test_the_tree_in_the_readme_is_the_tree_on_disk():
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("```\nkvbench/\n")[1].split("```")[0]
    told = set(re.findall(r"^  (\w+)/", tree, re.M))
    assert told == {p.parent.name for p in (ROOT / "kvbench").glob("*/__init__.py")}
    assert set(LAYERS) == told | {"errors", "files", "text"}


def test_every_known_failure_has_a_test():
    """A case of docs/limits.md is tested by a `test_..aNN_tM_...`; every such name belongs to a case."""
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split("## Known failures")[1]
    groups = re.findall(r"^\*\*(A\d\d) (.*?)(?=^\*\*A|\Z)", text, re.M | re.S)
    cases = {f"{group}_{case}".lower() for group, body in groups for case in re.findall(r"\b(T\d):", body)}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names, tested = "".join(re.findall(r"^def test(_\w+)", sources, re.M)), set()
    for group, first, last in re.findall(r"_(a\d\d)_t(\d)(?:_(?:to_)?t(\d))?(?=_)", names):
        tested |= {f"{group}_t{n}" for n in range(int(first), int(last or first) + 1)}
    assert (cases - tested, tested - cases) == (set(), set())


def test_a23_t5_an_exit_code_survives_a_pipe_where_ci_sets_pipefail(tmp_path):
    """`tee` ends with 0 whatever the gate says, so the script and the example must set it."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^set -euo pipefail$", script, re.M)
    assert script.index("pipefail") < script.index("step make")
    command = f"{sys.executable} -m kvbench gate {tmp_path / 'nothing'} 2>&1 | tee {tmp_path / 'log'}"
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}

    def code(text):
        return subprocess.run(
            ["bash", "-c", text], env=os.environ | path, cwd=tmp_path, capture_output=True, check=False
        ).returncode

    assert code(f"set -o pipefail; {command}") == 2
    assert code(command) == 0


def test_every_document_that_a_message_names_is_there():
    sources = [
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "examples").glob("*"),
        *source_files(),
    ]
    text = "".join(p.read_text(encoding="utf-8") for p in sources)
    names = set(re.findall(r"docs/[\w/-]+\.md", text))
    assert "docs/matrices.md" in names
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_help_shows_what_stands_in_for_an_option():
    """Square brackets would be markup to typer's other printer, and vanish."""
    from typer.testing import CliRunner

    from kvbench.cli.main import app

    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    shown = " ".join(shown.split())
    assert "default: runs/" in shown
    assert "default: the one the matrix names" in shown


def test_the_hub_serves_as_data_folder(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from kvbench.cli.main import app

    monkeypatch.chdir(tmp_path)
    plan = ["plan", str(ROOT / "matrices" / "smoke.yaml"), "--data-dir"]
    assert CliRunner().invoke(app, [*plan, "hub"]).exit_code == 0
    assert CliRunner().invoke(app, [*plan, "nosuch"]).exit_code == 2


def test_the_hub_libraries_are_silenced_before_they_are_imported():
    """They read telemetry and verbosity settings at import, so importing any engine module must set them first."""
    code = (
        "import kvbench.engines.reference.binding, huggingface_hub.constants as c, transformers\n"
        "print(c.HF_HUB_DISABLE_TELEMETRY, transformers.logging.get_verbosity() >= 40)"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True True"
