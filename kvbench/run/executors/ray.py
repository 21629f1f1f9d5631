"""`--executor ray`: each cell in a fresh process of a Ray cluster; the driver writes the records.

Joins the cluster at RAY_ADDRESS, else the one on this machine, else starts a local one for the run. A unit
(`Unit`) is one Ray task, never retried, on one GPU where the matrix asks for cuda, else on all CPUs of a
node, because timed work runs alone. Each job runs as under `--executor local`, with the same reports of
crashes; a lost worker or node is an error of the unit's tasks.
"""

import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.machine.host import host
from kvbench.matrix.load import Matrix
from kvbench.records.record import record_from_dict
from kvbench.records.run import RunDir
from kvbench.run.execute import Plan, Watcher
from kvbench.run.executors.child import Children, Crash, python_path
from kvbench.run.executors.job import Unit, from_json, waves, with_baselines
from kvbench.run.executors.local import Reporter

# Ray reads these on import: no usage reports, and a task without a GPU keeps the GPUs that its machine shows.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class OnRay:
    data_dir: Path | None

    def __call__(self, matrix: Matrix, plan: Plan, run_dir: RunDir, watcher: Watcher) -> None:
        here = host()
        reporter = Reporter(matrix, plan, run_dir, watcher, here.environment)
        ray = module()
        with _cluster(ray):
            measure = ray.remote(max_retries=0, max_calls=1)(measure_unit)
            for wave in waves(matrix, plan.todo, self.data_dir, here.identity):
                _do(ray, measure, [with_baselines(unit, run_dir) for unit in wave], reporter)


def module() -> Any:
    """The ray module. Raises UsageError with the command that installs it."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        install = 'install it: pip install "kvbench[ray]"'
        raise UsageError(f"--executor ray needs Ray, which is not installed; {install}") from None
    return ray


def measure_unit(jobs: Sequence[str]) -> list[str]:
    """Run the jobs (JSON) in turn on a worker, each in a fresh process; returns their results (JSON).

    A result is {"environment": of this machine, "records": [...], "crash": {...} or null}.
    """
    children, answers = Children(), []
    for text in jobs:
        with tempfile.TemporaryDirectory(prefix="kvbench-ray-") as folder:
            run_dir = RunDir(Path(folder))
            keys: list[str] = []
            crash = children.run(from_json(text), run_dir.path, keys.append)
            records = [asdict(record) for key in keys if (record := run_dir.read(key))]
            found = {"environment": host().environment, "records": records, "crash": crash and asdict(crash)}
            answers.append(json.dumps(found, ensure_ascii=False))
    return answers


def _do(ray: Any, measure: Any, units: Sequence[Unit], reporter: Reporter) -> None:
    """Run all units of a wave and write their records as they come back."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = max((node.get("CPU", 1) for node in nodes), default=1)
    # Where no node has a GPU, the job reports that itself instead of waiting for one.
    has_gpu = any(node.get("GPU", 0) >= 1 for node in nodes)
    pending = {}
    for unit in units:
        on_gpu = unit.jobs[0].device == "cuda" and has_gpu
        ask = {"num_gpus": 1, "num_cpus": 1} if on_gpu else {"num_cpus": cpus}
        pending[measure.options(**ask).remote([job.to_json() for job in unit.jobs])] = unit
    while pending:
        (ready, *_), _ = ray.wait(list(pending), num_returns=1)
        unit = pending.pop(ready)
        try:
            answers = [json.loads(text) for text in ray.get(ready)]
        except ray.exceptions.RayError as e:
            tail = tuple(str(e).splitlines()[-12:])
            lost = Crash(f"was lost: Ray reports {type(e).__name__}", tail, None)
            for job in unit.jobs:
                reporter.crashed(job, lost)
            continue
        for job, answer in zip(unit.jobs, answers, strict=True):
            for data in answer["records"]:
                record = record_from_dict(data, f"the returned record of {job.cell}")
                reporter.run_dir.write(record)
                reporter.done(job, record.key)
            if crash := answer["crash"]:
                reporter.crashed(job, Crash(**{**crash, "tail": tuple(crash["tail"])}), answer["environment"])


@contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """A connection to a cluster, to one that ends with the run, or the present one of this process."""
    if ray.is_initialized():
        yield
        return
    try:
        _join(ray)
        yield
    finally:
        ray.shutdown()


def _join(ray: Any) -> None:
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": python_path()}},
    }
    address = os.environ.get("RAY_ADDRESS")
    if address and not answers(address):
        raise UsageError(
            f"Nothing answers at RAY_ADDRESS={address}; start a cluster there (ray start --head), "
            "or unset the variable to run on this machine."
        )
    try:
        ray.init(address=address or "auto", **options)
    except (ConnectionError, RuntimeError, ValueError) as e:
        if address:
            raise UsageError(
                f"The Ray cluster at RAY_ADDRESS={address} could not be joined "
                f"({str(e).splitlines()[0][:200]}); see Ray's output above, for example for a missing token. "
                "Unset the variable to run on this machine."
            ) from None
        ray.init(address="local", **options)


def answers(address: str, seconds: float = 5) -> bool:
    """Whether something listens at `host:port` (Ray takes minutes to find out); True for other addresses."""
    host_name, _, port = address.rpartition(":")
    if not host_name or "/" in host_name or not port.isdigit():
        return True
    try:
        with socket.create_connection((host_name.strip("[]"), int(port)), timeout=seconds):
            return True
    except (OSError, OverflowError):
        return False
