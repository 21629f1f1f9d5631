"""`--executor local`: each cell in a fresh process on this machine, one at a time per GPU, one at a time on a
CPU.

A lane runs one job at a time, on a leased GPU or on the CPU. Lanes take units (`Unit`) until none is left.
With `--jobs N` above 1 the CPU has N lanes for work that is not timed; timed work runs afterwards, alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.machine.host import host
from kvbench.matrix.load import Matrix
from kvbench.matrix.runners import RUNNERS
from kvbench.records.run import RunDir
from kvbench.run.execute import Plan, Watcher, announce, cell_label
from kvbench.run.executors.child import Children, Crash
from kvbench.run.executors.job import Job, Unit, failed, split_timed, waves, with_baselines
from kvbench.run.executors.lease import leased

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
        here = host()
        reporter = Reporter(matrix, plan, run_dir, watcher, here.environment)
        for wave in waves(matrix, plan.todo, self.data_dir, here.identity):
            ready = [with_baselines(unit, run_dir) for unit in wave]
            on_gpu = [unit.device == "cuda" and here.device == "cuda" for unit in ready]
            gpu = [unit for unit, is_on in zip(ready, on_gpu, strict=True) if is_on]
            cpu = [unit for unit, is_on in zip(ready, on_gpu, strict=True) if not is_on]
            gpus = like_the_first(here.environment["gpus"])
            _do(gpu, gpus[: self.jobs], reporter)
            beside, alone = _parted(cpu, self.jobs or 1)
            _do(beside, [CPU] * (self.jobs or 1), reporter)
            _do(alone, [CPU], reporter)


def notices(environment: Mapping[str, Any], devices: Sequence[str], jobs: int | None) -> list[str]:
    """Notices to print before the run. devices: of its cells."""
    found = []
    if "cpu" in devices and (jobs or 1) > 1:
        timed = ", ".join(runner.name for runner in RUNNERS.values() if runner.timed)
        found.append(
            f"up to {jobs} cells run at once on the CPU; timed runners ({timed}) run alone after them."
        )
    if "cuda" in devices and environment["device"] == "cuda":
        gpus, every = like_the_first(environment["gpus"]), environment["gpus"]
        if len(gpus) < len(every):
            found.append(f"{len(gpus)} of {len(every)} GPUs are used: the task keys name {every[0]['name']}.")
        if jobs is not None and jobs > len(gpus):
            found.append(
                f"--jobs {jobs} is more than the {len(gpus)} GPUs here; each GPU runs one cell at a time."
            )
    return found


def like_the_first(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of the GPUs of the type that the task keys name."""
    return [gpu["uuid"] for gpu in gpus if gpu["name"] == gpus[0]["name"]]


def _parted(units: Sequence[Unit], jobs: int) -> tuple[list[Unit], list[Unit]]:
    """(units that may run next to others, units that run alone); with one job at a time all run alone."""
    if jobs == 1:
        return [], list(units)
    parts = [split_timed(unit) for unit in units]
    # On one machine, the cells of a line can be split for work that is not timed.
    beside = [Unit((job,)) for part, _ in parts if part for job in part.jobs]
    return beside, [part for _, part in parts if part]


class Reporter:
    """Shows the progress of finished tasks and writes the records of crashed ones; called from one thread."""

    def __init__(
        self, matrix: Matrix, plan: Plan, run_dir: RunDir, watcher: Watcher, environment: Mapping[str, Any]
    ) -> None:
        self.run_dir, self._watcher, self._environment = run_dir, watcher, environment
        self._matrix = matrix
        self._count = len(plan.reused)
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
        """Write an error for each task of the job without a record, with the tail of stderr for the current
        one.
        """
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
    threads = [
        threading.Thread(
            target=_lane, args=(lane, todo, events, children, reporter.run_dir.path), daemon=True
        )
        for lane in lanes[: len(units)]
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
    try:
        while not children.stopped and not todo.empty():
            if gpu == CPU:
                _work({}, todo, events, children, run_dir)
                continue
            with leased(gpu, _TRY) as ours:
                if ours:
                    _work({"CUDA_VISIBLE_DEVICES": gpu}, todo, events, children, run_dir)
                elif not waited:
                    waited = True
                    announce(f"{gpu} is leased by another kvbench run; waiting for it.")
    except BaseException as e:
        events.put(e)


def _work(
    extra: Mapping[str, str],
    todo: queue.SimpleQueue[Unit],
    events: queue.Queue[Event],
    children: Children,
    run_dir: Path,
) -> None:
    """Run units until none is left."""
    while not children.stopped:
        try:
            unit = todo.get_nowait()
        except queue.Empty:
            return
        for job in unit.jobs:

            def done(key: str, job: Job = job) -> None:
                events.put((job, key))

            if crash := children.run(job, run_dir, done, extra):
                events.put((job, crash))
