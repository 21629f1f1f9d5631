"""Made-up pairs of runs for the tests of comparisons: the same work measured twice, with what a test
changes."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.compare.pairing import Stored
from tests.factories.runs.made import CAND, MadeRun, text_facts, written
from tests.factories.runs.timed import timed

ENV: dict[str, Any] = {
    "kvbench": "0.1.0", "kvbench_source": "s", "identity": {"kvbench": "m"}, "python": "3.11.7", "os": "Linux 6",
    "packages": {"torch": "2.13.0", "transformers": "5.24.0", "triton": None}, "cpu": "CPU", "cpu_cores_usable": 2,
    "device": "cpu", "gpus": [], "threads": 1, "omp_num_threads": "1",
}  # fmt: skip
DIGESTS = {"model": "sha256:m", "native": "sha256:m", "data": ["sha256:d"]}


def stored(run: MadeRun, name: str = "A", env: Mapping[str, Any] | None = None, **manifest: Any) -> Stored:
    """The run with an environment and digests where it has none of its own."""
    records = [replace(r, environment=r.environment or {**ENV, **(env or {})}) for r in run.records]
    tasks = tuple(replace(task, digests=task.digests or DIGESTS) for task in run.tasks)
    whole = run.run_with(**{"tasks": tasks, "environment": ENV, **manifest})
    return Stored(name, f"runs/{name}", replace(whole, records=tuple(records)))


def on_disk(run: Stored, folder: Path) -> Path:
    """The run as `kvbench run` leaves it."""
    return written(run.run, folder).path


def latency(
    ratio: float = 1.05, machine: float = 1.0, repeats: int = 20, noise: float = 0.01, seed: int = 0
) -> MadeRun:
    """ITL of 10 ms on a machine `machine` times as slow, the candidate's `ratio` times native's; noise of
    each request's log."""
    draw = random.Random(f"{seed} {ratio} {machine}")
    native = [10 * machine * 2.718281828 ** draw.gauss(0, noise) for _ in range(repeats)]
    own = [10 * machine * ratio * 2.718281828 ** draw.gauss(0, noise) for _ in range(repeats)]
    return timed(own, native, prompt_sha="p")


def perplexity(
    nll: Sequence[float], kld: Sequence[float] | None = None, top1: Sequence[int] | None = None, **facts: Any
) -> MadeRun:
    """A candidate with chunks of 100 tokens, a document each; native has an NLL of 200 a chunk."""
    n = len(nll)
    sums = kld or [1.0 + 0.01 * i for i in range(n)]
    equal = top1 or [95] * n
    chunks = [
        {"nll": nll[i], "tokens": 100, "document": i, "kld": sums[i], "top1_equal": equal[i], "delta_p": 0.0}
        for i in range(n)
    ]
    native = [{"nll": 200.0 + i, "tokens": 100, "document": i} for i in range(n)]
    whole = {"chunks_total": n, **text_facts(100 * n), **facts}
    return MadeRun().measure(
        "perplexity", ({"chunks": chunks}, whole), ({"chunks": native}, whole), "pydoc stream512"
    )


def questions(own: Sequence[int], native: Sequence[int], shift: float = 0.0, **facts: Any) -> MadeRun:
    """Questions with 4 choices whose answer is 0; own, native: what is picked. shift: added to every
    score."""

    def asked(picks: Sequence[int]) -> dict[str, Any]:
        return {
            "questions": [
                {"id": f"q/{i}", "subject": "s", "answer": 0, "scores": [shift + i / 64 - (c != pick) for c in range(4)], "tokens": [1] * 4,
                 "chars": [1] * 4, "truncated": False, "skipped": None}
                for i, pick in enumerate(picks)
            ]
        }  # fmt: skip

    whole = {"task": "cloze", "shots": 0, "data_sha": "d", "total": len(own), **facts}
    return MadeRun().measure("mcq", (asked(own), whole), (asked(native), whole), "cloze 0-shot")


def agreement(own: Sequence[int], native: Sequence[int], **facts: Any) -> MadeRun:
    whole = {"steps": len(own), "prompt_tokens": 4, "prompt_sha": "p", **facts}
    return MadeRun(dtype="float32").measure(
        "agreement",
        ({"tokens": list(own), "margins": [], "logprob_native_token": [-1.0] * len(own)}, whole),
        ({"tokens": list(native), "margins": [1.0] * len(native), "logprob_native_token": []}, whole),
    )


def candidate(run: MadeRun, **fields: Any) -> MadeRun:
    return run.change(CAND, **fields)
