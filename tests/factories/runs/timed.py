"""Made-up latency runs: the times of both arms and the device's state, request by request."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.factories.runs.made import MadeRun

QUIET: dict[str, Any] = {"reasons": [], "sm_mhz": 1980, "thermal_ns": 0, "quota_us": 0}


def state(*reasons: str, sm: int = 1980, **after: Any) -> dict[str, Any]:
    """A GPU before and after a request, under `reasons` at its end; after: what else was then."""
    return {"before": QUIET, "after": {**QUIET, "reasons": list(reasons), "sm_mhz": sm, **after}}


def request(
    name: str,
    order: int,
    itl: float | Sequence[float],
    device: Mapping[str, Any] | None = None,
    ttft: float = 50.0,
) -> dict[str, Any]:
    """itl: ms of each of 6 steps, or of every step."""
    gaps = list(itl) if isinstance(itl, Sequence) else [itl] * 6
    return {
        "arm": name, "order": order, "ttft_ms": ttft, "itl_ms": gaps, "total_ms": ttft + sum(gaps),
        "prefill_tokens": 128, "batch": 1, "new_tokens": len(gaps) + 1, "device": device,
        "ran": {"kv_format": "native" if name == "baseline" else "int8_sym", "weights": "native",
                "computed_tokens": 128 + len(gaps)},
    }  # fmt: skip


def abba(repeats: int) -> list[str]:
    """The arms in the order of the runner: A B, B A, A B, ..."""
    rounds = [("baseline", "candidate"), ("candidate", "baseline")]
    return [name for i in range(repeats) for name in rounds[i % 2]]


def timed(
    own: Sequence[float],
    other: Sequence[float],
    *,
    names: Sequence[str] = (),
    devices: Mapping[int, Mapping[str, Any]] | None = None,
    quiet: bool = True,
    **facts: Any,
) -> MadeRun:
    """own, other: ITL of each request of the candidate and of the baseline, in their order; names: the arm of
    each order, A B B A where not given; devices: order -> state, others are quiet (or were not read, where
    `quiet` is false)."""
    names = names or abba(len(own))
    times = {"candidate": iter(own), "baseline": iter(other)}
    still = state() if quiet else None
    arms = [
        request(name, i, next(times[name]), (devices or {}).get(i, still)) for i, name in enumerate(names)
    ]
    alone = [
        {**request("candidate", i, itl), "ran": request("baseline", i, itl)["ran"]}
        for i, itl in enumerate(other)
    ]
    cold = [{"arm": "candidate", "ttft_ms": 50.0, "itl_ms": [1.0]}]
    run = MadeRun("int8_sym", batch=1, context=128)
    return run.measure(
        "latency",
        ({"arms": arms, "warmup": cold}, facts),
        ({"arms": alone, "warmup": cold}, {}),
        new_tokens=7, repeats=len(own),
    )  # fmt: skip
