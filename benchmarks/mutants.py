"""How many small faults the tests notice, on a fixed sample of mutants.

    python -m benchmarks.mutants sample LIST [ID,...]           # draws from this tree, without those named
    python -m benchmarks.mutants find LIST NEW                  # finds them here; draws lost ones anew
    python -m benchmarks.mutants cover STATE [TESTS ...]        # learns which tests execute which line
    python -m benchmarks.mutants run LIST STATE RESULTS [CAP]   # goes on where it was interrupted
    python -m benchmarks.mutants report LIST RESULTS

A mutant changes one comparison, operator, condition, number, return value or statement, never a docstring, an
annotation or a sentence. It is known by its function, its statement (without block and sentences), its node,
which of equal ones it is, and the kind of change; so it is found again in a module that was moved or renamed.

`run` patches a copy of the tree in STATE and runs the tests that execute the line in a fork, fastest first,
CAP seconds of them at most (60; as `cover` measured them). A failing test or a timeout kills the mutant; a
test that fails without the mutant too kills nothing. SIGINT ends `cover` early, with the tests that ran.
Needs the package coverage.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Mutant = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {
    "gate": "gate judge guards doubts policy verdict precision foreseen",
    "metrics": "derive/* metrics",
    "formats": "formats scales cachescales fp8config",
    "stats": "stats multiplicity power fits looks steadiness timing",
}
EACH = 50
NOT_RUN = {"kernels", "gpu", "selftest", "browser", "peers"}
MARKS = "not gpu and not browser and not peer and not ray and not model"
OPTIONS = ("-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", MARKS,
           "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".*_cache")
PRELOADED = ("torch", "transformers", "scipy.stats", "pandas", "pyarrow.parquet", "typer.testing", "yaml")
MEMORY = 8 * 2**30
OURS = 70  # exit code of a fault in here

_PAIRS = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)
SWAPS: dict[type, type] = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])} | {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# Functions, variables and arguments of these names hold sentences.
PROSE = re.compile(
    "(words|text|sentence|praise|say|label|hint|title|summary|message|phrase|note|place|why)s?$"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IDENTITY = ("function", "statement", "node", "kind", "occurrence")
# What must agree. The looser two count only where one place fits.
LEVELS = {
    "as it was": IDENTITY,
    "statement edited": ("function", "node", "kind"),
    "function renamed": ("statement", "node", "kind"),
}


def is_text(node: ast.AST | None) -> bool:
    """Whether an expression is a piece of a sentence: a short or an empty string is, a plain word is none."""
    match node:
        case ast.Constant(value=str(value)):
            return len(value) < 3 or " " in value
        case ast.BinOp(left=one, right=other):
            return is_text(one) or is_text(other)
        case ast.IfExp(body=one, orelse=other):
            return is_text(one) and is_text(other)
    return isinstance(node, ast.JoinedStr)


def is_prose(node: ast.AST) -> bool:
    """What is not mutated, with all that is in it."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return bool(PROSE.search(name))
        case (
            ast.AugAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name) | ast.keyword(arg=str(name))
        ):
            return bool(PROSE.search(name))
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr():
            return True
    return isinstance(node, ast.IfExp) and is_text(node)


class _NoText(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("text")

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("text") if is_text(node) else node


def dump(node: ast.AST) -> str:
    """ast.dump without the block of a statement and without sentences."""
    bare = copy.copy(node)
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(getattr(bare, block, None), list):
            setattr(bare, block, [])
    return ast.dump(_NoText().visit(copy.deepcopy(bare)))


def changes(node: Any) -> Iterator[tuple[str, Any, str]]:
    """(kind, the node that is replaced, the source in its place) of each mutant of this very node."""

    def having(**fields: Any) -> str:
        other = copy.copy(node)
        vars(other).update(fields)
        return ast.unparse(other) if isinstance(node, ast.stmt) else f"({ast.unparse(other)})"

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield f"compare {i}", node, having(ops=[*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS and not is_text(node):
            yield "arithmetic", node, having(op=SWAPS[type(op)]())
        case ast.BoolOp(op=op):
            yield "and/or", node, having(op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "negation", node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, repr(value + 1 if isinstance(value, int) else 2 * value or 1.0)
        case ast.IfExp(body=body, orelse=orelse):
            yield "branches", node, having(body=orelse, orelse=body)
        case ast.comprehension(ifs=tests):
            for i, test in enumerate(tests):
                yield f"filter {i}", test, "True"
        case ast.If(test=test, body=[first, *_]) if not isinstance(first, ast.Raise):
            yield "branch", test, "False"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) or is_text(value)):
            yield "return", node, "return None"
        case ast.Raise() | ast.Continue():
            yield "statement", node, "pass"
        case ast.Expr(value=ast.Yield(value=value)) if not is_text(value):
            yield "statement", node, "pass"
        case ast.Expr(value=ast.Call(args=args)) if not any(map(is_text, args)):
            yield "statement", node, "pass"


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file. at_import: whether the module's import executes the place; span: in bytes."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    seen: Counter[tuple[str, ...]] = Counter()

    def walk(node: Any, scope: str, statement: ast.AST, at_import: bool) -> None:
        statement = node if isinstance(node, ast.stmt) else statement
        for kind, at, new in changes(node):
            key = (scope or "<module>", dump(statement), dump(at), kind)
            span = starts[at.lineno - 1] + at.col_offset, starts[at.end_lineno - 1] + at.end_col_offset
            place = {"path": str(path.relative_to(ROOT)), "lines": [at.lineno, at.end_lineno], "span": span}
            change = {"old": source[slice(*span)].decode(), "new": new, "at_import": at_import}
            found.append(dict(zip(IDENTITY, (*key, seen[key]), strict=True)) | place | change)
            seen[key] += 1
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "exc", "msg"):
                continue
            inside = field == "body" and isinstance(node, (*FUNCTIONS, ast.ClassDef))
            name = f"{scope}.{node.name}".lstrip(".") if inside else scope
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not is_prose(child):
                    walk(child, name, statement, at_import and not (inside and isinstance(node, FUNCTIONS)))

    tree = ast.parse(source)
    walk(tree, "", tree, True)
    return found


def shuffled(pool: list[Mutant], group: str, seed: str) -> list[Mutant]:
    random.Random(seed).shuffle(pool)
    for one in pool:
        what = "\0".join(str(one[key]) for key in ("path", *IDENTITY))
        one |= {"id": hashlib.sha1(what.encode()).hexdigest()[:8], "group": group}
    return pool


def sample(chosen: str, dropped: str = "") -> None:
    found: list[list[Mutant]] = []
    for group, names in GROUPS.items():
        paths = sorted(path for name in names.split() for path in (ROOT / "kvbench").glob(f"{name}.py"))
        pool = shuffled([one for path in paths for one in mutants_of(path)], group, f"1 {group}")
        found.append([one for one in pool if one["id"] not in dropped.split(",")][:EACH])
        print(f"{group}: {EACH} of {len(pool)}")
    write(chosen, [one for row in zip(*found, strict=True) for one in row])  # the groups in turns


def find(chosen: str, new: str) -> None:
    wanted: list[Mutant] = read(chosen)
    tree = [one for path in sorted((ROOT / "kvbench").rglob("*.py")) for one in mutants_of(path)]
    found: dict[str, Mutant] = {}
    taken: set[int] = set()
    for level, keys in LEVELS.items():
        by: dict[tuple[Any, ...], list[Mutant]] = defaultdict(list)
        for one in tree:
            by[tuple(one[key] for key in keys)].append(one)
        for old in wanted:
            # A number or a name alone does not say where it stands.
            if old["id"] in found or (
                "statement" not in keys and old["node"].startswith(("Constant", "Name"))
            ):
                continue
            fits = [one for one in by[tuple(old[key] for key in keys)] if id(one) not in taken]
            if len(fits) > 1:
                fits = [one for one in fits if Path(one["path"]).stem == Path(old["path"]).stem]
            if len(fits) == 1:
                taken.add(id(fits[0]))
                found[old["id"]] = fits[0] | {"id": old["id"], "group": old["group"], "found": level}
    for group in GROUPS:
        lost = [old for old in wanted if old["group"] == group and old["id"] not in found]
        where = {one["path"] for one in found.values() if one["group"] == group}
        pool = [one for one in tree if one["path"] in where and id(one) not in taken]
        for old, one in zip(lost, shuffled(pool, group, f"again {group}"), strict=False):
            taken.add(id(one))
            found[old["id"]] = one | {"replaces": old["id"], "found": "not: drawn anew"}
            print(f"not found: {shown(old)}")
    print(Counter(one["found"] for one in found.values()))
    write(new, [found[old["id"]] for old in wanted if old["id"] in found])


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def write(path: str, content: Any) -> None:
    part = Path(f"{path}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def not_copied(folder: str, names: list[str]) -> set[str]:
    return NOT_COPIED(folder, names) | ({"runs"} if Path(folder) == ROOT else set())


def fresh(state: str) -> Path:
    tree = Path(state).resolve() / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, ignore=not_copied)
    return tree


def pytest_in(tree: Path, arguments: list[str], plugin: object) -> int:
    """pytest in this process, which takes the project from `tree`, as what its tests start does."""
    import pytest

    own = {str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "kernels"), ""}
    sys.path[:] = [str(tree), str(tree / "kernels"), *(path for path in sys.path if path not in own)]
    sys.modules.pop("benchmarks", None)
    os.environ |= {"PYTHONPATH": f"{tree}:{tree / 'kernels'}", "OMP_NUM_THREADS": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.chdir(tree)
    return int(pytest.main([*OPTIONS, f"--basetemp={tree.parent / 'tmp'}", *arguments], plugins=[plugin]))


def cover(state: str, *folders: str) -> None:
    import coverage
    import pytest

    tree = fresh(state)
    data, source, settings = f"{tree.parent}/coverage.db", f"{tree}/kvbench", tree.parent / "coveragerc"
    quiet = "no-data-collected,module-not-imported,module-not-measured"
    settings.write_text(
        f"[run]\ndata_file = {data}\nparallel = true\nsource = {source}\ncontext = ${{MUTANTS_TEST}}\n"
        f"disable_warnings = {quiet}\n"
    )
    measured = coverage.Coverage(data_file=data, config_file=False, source=[source], messages=False)
    seconds: dict[str, float] = defaultdict(float)
    failed: set[str] = set()

    class Watch:
        test = ""

        def switch(self, context: str) -> None:
            measured.switch_context(context)
            os.environ["MUTANTS_TEST"] = context  # for what the test starts

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[Any]:
            self.test = item.nodeid
            self.switch(self.test)
            return (yield)

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
            """What several tests share counts for all tests of the file."""
            if fixturedef.scope != "function":
                self.switch(self.test.partition("::")[0])
            try:
                return (yield)
            finally:
                self.switch(self.test)

        def pytest_runtest_logreport(self, report: Any) -> None:
            seconds[report.nodeid] += report.duration
            if report.failed:
                failed.add(report.nodeid)

    measured.start()
    os.environ["COVERAGE_PROCESS_START"] = str(settings)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    tests = sorted(str(one) for one in (tree / "tests").iterdir() if one.is_dir() and one.name not in NOT_RUN)
    pytest_in(tree, list(folders) or tests, Watch())
    measured.stop()
    measured.combine()
    measured.save()
    write(f"{tree.parent}/tests.json", {"seconds": seconds, "failed": sorted(failed)})
    os._exit(0)  # a thread of an interrupted test may still wait


class Tests:
    """The tests as `cover` saw them. failed: without a mutant; sound: known to pass without one."""

    def __init__(self, state: str) -> None:
        import coverage

        self.tree = fresh(state)
        self.data = coverage.CoverageData(str(self.tree.parent / "coverage.db"))
        self.data.read()
        known = read(f"{self.tree.parent}/tests.json")
        self.seconds: dict[str, float] = known["seconds"]
        self.failed, self.sound = set(known["failed"]), set[str]()
        self.of_file: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            self.of_file[test.partition("::")[0]].append(test)

    def of(self, mutant: Mutant, cap: float) -> list[str]:
        """Tests that execute a mutant, fastest first, and `cap` seconds of them, or one."""
        lines = self.data.contexts_by_lineno(str(self.tree / mutant["path"]))
        first, last = mutant["lines"]
        contexts = {name for line in (lines if mutant["at_import"] else range(first, last + 1))
                    for name in lines.get(line, ())}  # fmt: skip
        found = {test for name in contexts for test in self.of_file.get(name, [name])}
        chosen: list[str] = []
        for test in sorted(found & self.seconds.keys() - self.failed, key=lambda x: (self.seconds[x], x)):
            cap -= self.seconds[test]
            if chosen and cap < 0:
                break
            chosen.append(test)
        return chosen

    def first_failure(self, tests: list[str]) -> str:
        """The first of the tests that fails in a fork, or another word for a bad end; "" where all pass."""
        answer, log = self.tree.parent / "answer", self.tree.parent / "last.log"
        answer.write_text("")
        log.write_text("")
        rank = {test: i for i, test in enumerate(tests)}

        class Chosen:
            def pytest_collection_modifyitems(self, items: list[Any]) -> None:
                items[:] = sorted((x for x in items if x.nodeid in rank), key=lambda x: rank[x.nodeid])

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed and not answer.read_text():
                    answer.write_text(report.nodeid)

        if not (child := os.fork()):
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
                for stream in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
                files = sorted({test.partition("::")[0] for test in tests})
                code = pytest_in(self.tree, ["-x", "--timeout=40", *files], Chosen())
            except BaseException:
                traceback.print_exc()
                code = OURS
            sys.stdout.flush()
            os._exit(code)
        until = time.monotonic() + 60 + 3 * sum(map(self.seconds.__getitem__, tests))
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timeout"
            time.sleep(0.02)
        if (code := os.waitstatus_to_exitcode(ended[1])) in (OURS, 5):
            raise SystemExit(f"No test ran, see {log}.")
        return answer.read_text() or ("" if code == 0 else f"pytest ended with {code}")


def run(chosen: str, state: str, into: str, cap: str = "60") -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    for name in PRELOADED:  # once, for all forks
        importlib.import_module(name)
    tests = Tests(state)
    results: dict[str, Mutant] = read(into) if Path(into).exists() else {}
    for number, mutant in enumerate(read(chosen), 1):
        if mutant["id"] in results:
            continue
        start = time.monotonic()
        source, place = (ROOT / mutant["path"]).read_bytes(), tests.tree / mutant["path"]
        begin, end = mutant["span"]
        if source[begin:end].decode() != mutant["old"]:
            raise SystemExit(f"{shown(mutant)} is not in this tree: use find first.")
        killer, due = "", tests.of(mutant, float(cap))
        while due:
            place.write_bytes(source[:begin] + mutant["new"].encode() + source[end:])
            os.utime(place, (number, number))  # unlike that of any compiled module
            killer = tests.first_failure(due)
            place.write_bytes(source)
            alone = [killer] if killer in tests.seconds else due[:1]
            if not killer or killer in tests.sound or not tests.first_failure(alone):
                tests.sound |= {killer} & tests.seconds.keys()
                break
            tests.failed |= set(alone)
            due = [test for test in due if test not in alone]
        results[mutant["id"]] = {
            "killer": killer if due else "", "tests": len(due), "seconds": round(time.monotonic() - start, 1)
        }  # fmt: skip
        write(into, results)
        print(number, shown(mutant), results[mutant["id"]], flush=True)


def shown(one: Mutant) -> str:
    change = " ".join(f"{one['old']} -> {one['new']}".split())
    return f"{one['group']} {one['id']} {one['path']}:{one['lines'][0]} {one['function']}: {change}"


def report(chosen: str, into: str) -> None:
    results = read(into)
    done = [one for one in read(chosen) if one["id"] in results]
    for one in done:
        if not results[one["id"]]["killer"]:
            print(f"{shown(one)} ({results[one['id']]['tests']} tests)")
    for group in (*GROUPS, ""):
        killed = [bool(results[one["id"]]["killer"]) for one in done if group in ("", one["group"])]
        print(f"{group or 'all'}: {sum(killed)} of {len(killed)} killed")
    print(f"{sum(results[one['id']]['seconds'] for one in done) / 60:.0f} minutes")


if __name__ == "__main__":
    commands: dict[str, Any] = {one.__name__: one for one in (sample, find, cover, run, report)}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
