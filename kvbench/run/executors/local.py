"""`--executor local`: each cell in a fresh process on this machine, one at a time per GPU or on the CPU.

A lane runs one job at a time, on a leased GPU or on the CPU. Lanes take units (`Unit`) until none is left.
With `--jobs N` above 1 the CPU has N lanes for work that is not timed; timed work runs afterwards, alone.
"""

import queue
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvbench.files import cache_dir
from kvbench.machine.host import host
from kvbench.matrix.load import Matrix
from kvbench.matrix.runners import RUNNERS
from kvbench.records.run import RunDir
from kvbench.run.execute import Plan, Watcher, announce, cell_label
from kvbench.run.executors.child import Children, Crash
from kvbench.run.executors.job import Job, Unit, failed, split_timed, waves, with_baselines

CPU = ""  # a lane without a GPU
_TRY = 0.5  # seconds between two tries to lease a GPU

# What a lane reports: (job, key of a task with a written record, or a crash), or an error of the lane itself.
Event = tuple[Job, str | Crash] | BaseException


@dataclass(frozen=True)
class Local:
    """jobs: how many cells run at once; None: one per GPU, and one on a CPU."""

    data_dir: Path | None
    jobs: int | None = None

    def __call__(self, matrix: Matrix, plan: Plan, run_dir: RunDir, watcher: Watcher) -> None:
        here, jobs = host(), self.jobs or 1
        reporter = Reporter(matrix, plan, run_dir, watcher, here.environment)
        for wave in waves(matrix, plan.todo, self.data_dir, here.identity):
            parts: tuple[list[Unit], list[Unit]] = [], []
            for unit in wave:
                on_gpu = unit.jobs[0].device == "cuda" and here.device == "cuda"
                parts[on_gpu].append(with_baselines(unit, run_dir))
            cpu, gpu = parts
            _do(gpu, like_the_first(here.environment["gpus"])[: self.jobs], reporter)
            if jobs > 1:
                split = [split_timed(unit) for unit in cpu]
                # On one machine, the cells of a line can be split for work that is not timed.
                _do([Unit((job,)) for part, _ in split if part for job in part.jobs], [CPU] * jobs, reporter)
                cpu = [part for _, part in split if part]
            _do(cpu, [CPU], reporter)


@contextmanager
def leased(uuid: str, seconds: float) -> Iterator[bool]:
    """Whether the GPU was leased to this process within so many seconds, so that no other run measures on it.

    A lease is a file lock in kvbench's cache folder that ends with its process. Other programs can still use
    the GPU; the latency runner detects them.
    """
    folder = cache_dir() / "leases"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock")
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def notices(environment: Mapping[str, Any], devices: Sequence[str], jobs: int | None) -> list[str]:
    """Notices to print before the run. devices: of its cells."""
    found = []
    if "cpu" in devices and (jobs or 1) > 1:
        timed = ", ".join(runner.name for runner in RUNNERS.values() if runner.timed)
        found.append(f"up to {jobs} cells run at once on the CPU; timed runners ({timed}) run alone after.")
    if "cuda" in devices and environment["device"] == "cuda":
        gpus, every = like_the_first(environment["gpus"]), environment["gpus"]
        if len(gpus) < len(every):
            found.append(f"{len(gpus)} of {len(every)} GPUs are used: the task keys name {every[0]['name']}.")
        if jobs is not None and jobs > len(gpus):
            found.append(f"--jobs {jobs} is more than the {len(gpus)} GPUs here, and each runs one cell.")
    return found


def like_the_first(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of the GPUs of the type that the task keys name."""
    return [gpu["uuid"] for gpu in gpus if gpu["name"] == gpus[0]["name"]]


class Reporter:
    """Shows the progress of finished tasks and writes the records of crashed ones; called from one thread."""

    def __init__(
        self, matrix: Matrix, plan: Plan, run_dir: RunDir, watcher: Watcher, environment: Mapping[str, Any]
    ) -> None:
        self.run_dir, self._watcher, self._environment = run_dir, watcher, environment
        self._matrix, self._count = matrix, len(plan.reused)
        self._done: set[str] = set()

    def done(self, job: Job, key: str) -> None:
        """The record of this task of the job is in the run directory."""
        task = next(task for task in job.tasks if task.key == key)
        record = self.run_dir.read(key)
        if record is None:
            raise RuntimeError(f"the worker of {job.cell} reported task {key} as done but wrote no record")
        self._done.add(key)
        self._count += 1
        self._watcher.task(self._count, task, cell_label(self._matrix, task))
        self._watcher.finished(record)

    def crashed(self, job: Job, crash: Crash, environment: Mapping[str, Any] | None = None) -> None:
        """Write an error for each task without a record, with the tail of stderr for the current one."""
        for task in job.tasks:
            if task.key not in self._done:
                tail = crash.tail if task.key == crash.key or crash.key is None else ()
                message = crash.message(task, job.cell)
                self.run_dir.write(failed(task, "Crash", message, environment or self._environment, tail))
                self.done(job, task.key)


def _do(units: Sequence[Unit], lanes: Sequence[str], reporter: Reporter) -> None:
    """Run all units on the lanes. An exception, Ctrl-C included, ends the children first."""
    if not units:
        return
    todo: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for unit in units:
        todo.put(unit)
    events: queue.Queue[Event] = queue.Queue()
    children = Children()
    arguments = (todo, events, children, reporter.run_dir.path)
    threads = [
        threading.Thread(target=_lane, args=(lane, *arguments), daemon=True) for lane in lanes[: len(units)]
    ]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or not events.empty():
            try:
                event = events.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(event, BaseException):
                raise event
            job, what = event
            if isinstance(what, Crash):
                reporter.crashed(job, what)
            else:
                reporter.done(job, what)
    finally:
        children.stop()
        for thread in threads:
            thread.join()


def _lane(
    gpu: str, todo: queue.SimpleQueue[Unit], events: queue.Queue[Event], children: Children, run_dir: Path
) -> None:
    waited = False

    def run(job: Job, extra: Mapping[str, str]) -> None:
        if crash := children.run(job, run_dir, lambda key: events.put((job, key)), extra):
            events.put((job, crash))

    def work(extra: Mapping[str, str]) -> None:
        """Run units until none is left."""
        while not children.stopped:
            try:
                unit = todo.get_nowait()
            except queue.Empty:
                return
            for job in unit.jobs:
                run(job, extra)

    try:
        while not children.stopped and not todo.empty():
            if gpu == CPU:
                work({})
                continue
            with leased(gpu, _TRY) as ours:
                if ours:
                    work({"CUDA_VISIBLE_DEVICES": gpu})
                elif not waited:
                    waited = True
                    announce(f"{gpu} is leased by another kvbench run; waiting for it.")
    except BaseException as e:
        events.put(e)
