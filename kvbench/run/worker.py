"""The process of one job: `python -m kvbench.run.worker JOB.json RUN` measures its tasks into RUN/records.

It writes `begin KEY` and `done KEY` to stdout for each task, and nothing else: what libraries print goes to
stderr. It ends when its stdin closes, so that it never outlives the process that started it.

Where this machine differs from the one in the tasks' keys (versions, device, kvbench's source, the bytes of
model and data), the record is an error that names the difference.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.machine.host import host
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.tasks import key_of
from kvbench.records.record import record_from_dict
from kvbench.records.run import RunDir
from kvbench.run.executors.job import Identities, Job, failed, from_json


def main() -> int:
    if len(sys.argv) != 3:
        print("kvbench.run.worker: give a job file and a run directory.", file=sys.stderr)
        return 2
    # A descriptor of its own for the lines; all other output to stdout, C code included, goes to stderr.
    lines = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    job = from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    work(job, RunDir(Path(sys.argv[2])), lambda word, key: print(word, key, file=lines, flush=True))
    return 0


def work(job: Job, run_dir: RunDir, report: Callable[[str, str], None]) -> None:
    """Measure the job's tasks. report(word, key): "begin" before a task, "done" after its record."""
    from kvbench.run.task.measure import execute
    from kvbench.run.task.prepare import Session

    here = host()
    data_dir = Path(job.data_dir) if job.data_dir is not None else None
    identity = Identities(here.identity, data_dir)
    session = Session(data_dir, here.environment)
    for task in job.tasks:
        report("begin", task.key)
        try:
            own = identity(task)
            other = differing(job.identities.get(task.key, {}), own)
            if not other and key_of(RUNNERS[task.runner], task.spec, task.options, own) != task.key:
                other = "the key does not match the task"
        except KvbenchError as e:
            other = f"its identity cannot be computed here: {e}"
        if other:
            where = here.environment["host"]
            message = f"Not measured on {where}, which differs from the task's key: {other}."
            record = failed(task, "OtherIdentity", message, here.environment)
        else:
            found = job.baselines.get(task.baseline) if task.baseline else None
            baseline = record_from_dict(found, f"the baseline of {job.cell}") if found else None
            record = execute(task, session, baseline, lambda done, total, note: None)
        run_dir.write(record)
        report("done", task.key)


def differing(expected: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """How the identity in a run differs from this process's: `torch 2.13.0 there, 2.12.1 here`, or ""."""
    there, here = ({**of.get("host", {}), **of, "host": None} for of in (expected, own))
    return "; ".join(
        f"{name} {_short(there.get(name))} there, {_short(here.get(name))} here"
        for name in dict.fromkeys((*there, *here))
        if there.get(name) != here.get(name)
    )


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value or "unknown")
    return text if len(text) <= 60 else f"{text[:60]}..."


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
