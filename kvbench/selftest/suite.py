"""The suite: a clean run of each cell, a run with each fault, and the verdict of the ordinary gate.

A run is that of `kvbench run`: matrix -> tasks -> records on disk -> metrics -> gate. Models are loaded,
engines made and probes taken again for each, so no fault affects the next.
"""

import gc
import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvbench.errors import KvbenchError, UsageError
from kvbench.gate import evaluate as gates
from kvbench.gate.verdict import PASS, Outcome, Verdict
from kvbench.machine.host import host
from kvbench.matrix import load as matrix
from kvbench.metrics import collect as metrics
from kvbench.metrics.collect import Row
from kvbench.models.source import fingerprint
from kvbench.records.run import Run, RunDir
from kvbench.run.execute import Setup, run
from kvbench.run.progress import Silent
from kvbench.selftest.checkpoint import write_checkpoint
from kvbench.selftest.fault import CELLS, CHECKPOINT, NEEDS_CUDA, Fault, Inject

HERE = Path(__file__).parent
GATE = HERE / "gate.yaml"
CLEAN = nullcontext

CAUGHT, MISSED, SKIPPED = "caught", "missed", "skipped"  # of a run with a fault
PASSED, FAILED = "passed", "failed"  # of one without

_LEVEL = re.compile(r"\b(E\d(?:-\w+)?|native-arm): ")  # before the sentence of a level of evidence


@dataclass(frozen=True)
class Result:
    """Of one run. status: caught, missed or skipped; of a run without a fault passed, failed or skipped.

    by: the level of evidence, or the check, whose sentence names the cause. exit_code: of the verdict, None
    where there is none. sentence: what named the cause; of a missed fault, the report; of a skipped one, why.
    cause: of a fault that was caught, the part of the sentence that names the cause.
    """

    name: str
    status: str
    by: str
    exit_code: int | None
    sentence: str
    seconds: float
    cause: str = ""

    def line(self) -> str:
        """`caught  scale_zero  E2, 1.2 s`, and below it the cause; a missed or skipped one with why."""
        said = "" if self.status in (CAUGHT, PASSED) else f": {self.sentence}"
        said += f"\n{'':8}{self.cause}" if self.cause else ""
        return f"{self.status:8}{self.name:54}{self.by + ', ' if self.by else ''}{self.seconds:.1f} s{said}"


@dataclass(frozen=True)
class Score:
    """clean: a result for each cell that faults were injected into; faults: one each."""

    clean: tuple[Result, ...]
    faults: tuple[Result, ...]

    @property
    def caught(self) -> int:
        return sum(r.status == CAUGHT for r in self.faults)

    @property
    def of(self) -> int:
        """The faults that could run here."""
        return sum(r.status != SKIPPED for r in self.faults)

    @property
    def exit_code(self) -> int:
        """0 when every clean run passes and every fault that can run was caught, of at least one; else 1."""
        sound = all(r.status != FAILED for r in self.clean)
        return 0 if sound and self.caught == self.of > 0 else 1

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "caught": self.caught, "of": self.of, "exit_code": self.exit_code}

    def last_line(self) -> str:
        skipped = len(self.faults) - self.of
        beside = f", {skipped} skipped" if skipped else ""
        bad = [r.name for r in self.clean if r.status == FAILED]
        unsound = f"; but a run without a fault does not pass ({', '.join(bad)}), so nothing counts"
        return f"caught {self.caught} of {self.of}{beside}{unsound if bad else ''}"


def run_suite(
    faults: Mapping[str, Fault], chosen: Iterable[str] = (), say: Callable[[Result], None] = lambda _: None
) -> Score:
    """Runs the chosen faults (all where none is) after a clean run of each cell that they need.

    say(result): called after each run. Raises UsageError for a name that is not in `faults`.
    """
    names = list(dict.fromkeys(chosen)) or list(faults)
    if unknown := [name for name in names if name not in faults]:
        raise UsageError(f"Fault {unknown[0]!r} is unknown; choose from {', '.join(faults)}.")
    clean, results = [], []
    with quick():
        for cell in dict.fromkeys(faults[name].cell for name in names):
            clean.append(clean_run(cell))
            say(clean[-1])
        for name in names:
            results.append(fault_run(name, faults[name]))
            say(results[-1])
    return Score(tuple(clean), tuple(results))


@contextmanager
def quick() -> Iterator[None]:
    """One thread, and what exists already is left out of garbage collection: a run takes half of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def clean_run(cell: str) -> Result:
    """The cell without a fault: exit code 0, or no result of a fault counts."""
    name, started = f"no fault, {cell}", time.perf_counter()
    if reason := _lacking(cell):
        return Result(name, SKIPPED, "", None, reason, 0.0)
    verdict = judged(measured(cell, CLEAN))
    status = FAILED if verdict.exit_code else PASSED
    return Result(name, status, "", verdict.exit_code, _said(_wrong(verdict)), time.perf_counter() - started)


def fault_run(name: str, fault: Fault) -> Result:
    """The fault injected, and whether the verdict names it."""
    if reason := _lacking(fault.cell):
        return Result(name, SKIPPED, "", None, reason, 0.0)
    started = time.perf_counter()
    found = caught(name, fault, measured_with(fault))
    return replace(found, seconds=time.perf_counter() - started)


@dataclass(frozen=True)
class Measured:
    """What one run left, with its derived rows."""

    run: Run
    rows: list[Row]


def measured(cell: str, inject: Inject) -> Measured:
    """Runs the cell's matrix with something injected."""
    with tempfile.TemporaryDirectory(prefix="kvbench-selftest-") as folder:
        run_dir, checkpoint, here = RunDir(Path(folder) / "run"), Path(folder) / "checkpoint", host()
        words = [word.replace(CHECKPOINT, str(checkpoint)) for word in CELLS[cell]]
        if words != list(CELLS[cell]):
            write_checkpoint(checkpoint)
        with inject():
            loaded = matrix.load(HERE / "matrix.yaml", words, host=here, fingerprint_model=fingerprint)
            run(loaded, Setup(run_dir, here.environment, Silent, rerun="all"))
            left = run_dir.load()
            return Measured(left, metrics.derive(left))


def measured_with(fault: Fault) -> Measured | KvbenchError:
    """The run with the fault, or the error that ended it."""
    try:
        return measured(fault.cell, fault.inject)
    except KvbenchError as e:
        return e


def judged(measured: Measured, gate: Path = GATE) -> Verdict:
    """The verdict of the ordinary gate, which no fault breaks."""
    return gates.evaluate(gates.load(gate), measured.run, measured.rows)


def caught(name: str, fault: Fault, run: Measured | KvbenchError) -> Result:
    """Whether the run is refused, or fails its gate, with a sentence that names the fault."""
    if isinstance(run, KvbenchError):
        named = re.search(fault.says, str(run))
        cause = _cause(str(run), 0) if named else ""
        return Result(name, CAUGHT if named else MISSED, "refused", run.exit_code, str(run), 0.0, cause)
    verdict = judged(run)
    wrong = _wrong(verdict)
    for outcome in wrong:
        if (found := re.search(fault.says, outcome.sentence)) and verdict.exit_code:
            levels = list(_LEVEL.finditer(outcome.sentence, 0, found.end()))
            by, start = (levels[-1][1], levels[-1].start()) if levels else (outcome.check, 0)
            cause = _cause(outcome.sentence, start)
            return Result(name, CAUGHT, by, verdict.exit_code, outcome.sentence, 0.0, cause)
    said = f"nothing says {fault.says!r}: " if wrong else ""
    return Result(name, MISSED, "", verdict.exit_code, said + _said(wrong), 0.0)


def _lacking(cell: str) -> str:
    """Why the cell cannot run here, or ""."""
    if cell in NEEDS_CUDA and host().device != "cuda":
        return f"needs a CUDA device: {host().environment['device_reason']}"
    return ""


def _cause(sentence: str, start: int) -> str:
    """The sentence from a level's name on, up to the next one; on one line, cut where it is long."""
    following = _LEVEL.search(sentence, start + 1)
    end = following.start() if following else None
    return textwrap.shorten(sentence[start:end], 400, placeholder=" ...")


def _wrong(verdict: Verdict) -> Sequence[Outcome]:
    return [outcome for outcome in verdict.outcomes if outcome.status != PASS]


def _said(wrong: Sequence[Outcome]) -> str:
    """What two checks say first: that nothing was measured comes before why."""
    first: dict[str, str] = {}
    for outcome in wrong:
        first.setdefault(outcome.check, outcome.sentence)
    return " ".join([*first.values()][:2]) or "every check passed"


def listing(faults: Mapping[str, Fault], holes: Mapping[str, Fault]) -> list[dict[str, Any]]:
    """Each fault and hole: its name, what it breaks, the cell, whether it is silent, and a line of text."""
    rows = []
    for kind, table in (("fault", faults), ("hole", holes)):
        for name, fault in table.items():
            line = f"{kind:6}{name:54}{fault.breaks}"
            facts = {"breaks": fault.breaks, "cell": fault.cell, "silent": fault.silent}
            rows.append({"name": name, "kind": kind, **facts, "line": line})
    return rows
