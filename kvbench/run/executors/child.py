"""Runs one job in a fresh process (`kvbench.run.worker`) and reports how the process ended if it crashed."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import kvbench
import kvbench_kernels.support
from kvbench.matrix.cells import Task
from kvbench.run.executors.job import Job

_TAIL_LINES, _TAIL_BYTES = 12, 8192
_PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Crash:
    """A process that ended without its records: how, the last lines of its stderr, the current task's key."""

    words: str  # `was ended by signal 11 (SIGSEGV)`
    tail: tuple[str, ...]
    key: str | None  # None where no task had begun

    def message(self, task: Task, cell: str) -> str:
        if task.key == self.key:
            return f"The process of {cell} {self.words} while it measured this task."
        return f"Not measured: the process of {cell} {self.words} before this task."


class Children:
    """The running processes; `stop` ends them all and refuses new ones."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self.stopped = False

    def run(
        self, job: Job, run_dir: Path, done: Callable[[str], None], extra: Mapping[str, str] | None = None
    ) -> Crash | None:
        """Run the job. done(key): called when a task's record is written; extra: more environment variables.

        Returns the crash, None where every task has its record (or `stop` was called).
        """
        with tempfile.TemporaryDirectory(prefix="kvbench-job-") as folder, tempfile.TemporaryFile() as stderr:
            path = Path(folder) / "job.json"
            path.write_text(job.to_json(), encoding="utf-8")
            with self._lock:
                if self.stopped:
                    return None
                process = subprocess.Popen(
                    [sys.executable, "-m", "kvbench.run.worker", str(path), str(run_dir.absolute())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    encoding="ascii",
                    errors="replace",
                    cwd=job.cwd if Path(job.cwd).is_dir() else None,
                    env=_variables(job, extra or {}),
                    start_new_session=True,  # Ctrl-C reaches only the driver, which ends its children
                )
                self._running.add(process)
            key: str | None = None
            left = {task.key for task in job.tasks}
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    word, _, key = line.strip().partition(" ")
                    if word == "done" and key in left:
                        left.remove(key)
                        done(key)
                code = process.wait()
            with self._lock:
                self._running.discard(process)
            if not left or self.stopped:
                return None
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = stderr.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
            return Crash(ending(code), tuple(tail), key if key in left else None)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            running = list(self._running)
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, sent)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE)


def ending(code: int) -> str:
    """How a process with that return code ended, as the end of a sentence."""
    if code >= 0:
        return f"ended with exit code {code} and without its records"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    memory = "; the system sends it when memory runs out" if name == "SIGKILL" else ""
    return f"was ended by signal {-code} ({name}{memory})"


def python_path() -> str:
    """PYTHONPATH with the folders of kvbench and kvbench_kernels first, so that a process has this code."""
    files = (kvbench.__file__, kvbench_kernels.support.__file__)
    roots = dict.fromkeys(str(Path(file).absolute().parents[1]) for file in files)
    return os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])


def _variables(job: Job, extra: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in job.variables}
    own |= {name: value for name, value in job.variables.items() if value is not None}
    return {**own, "PYTHONPATH": python_path(), **extra}
