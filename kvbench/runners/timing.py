"""The timing loop: warm up, then interleave two arms, over anything that can submit, step and synchronise.

    TTFT   request submitted -> first token on the host, device synchronised, sampling included
    ITL    gap between consecutive tokens of a sequence; one sample a step of a static batch; excludes TTFT

Garbage is collected before the first request and not again until the last one has ended. Each arm has its own
warm-up requests of the measured shapes, so that compiling never falls into a measured one.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

Clock = Callable[[], float]


class Arm(Protocol):
    """One engine with one fixed request (a static batch).

    submit() starts it up to its first token, step() adds one token to each sequence; both may return before
    the device is done. synchronize() returns when the latest token is on the host. ran(): what served it.
    """

    def submit(self) -> None: ...
    def step(self) -> None: ...
    def synchronize(self) -> None: ...
    def ran(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Timing:
    """One request. order: its place in the measured schedule (2i and 2i + 1 are a pair); -1 for a warm-up.
    total_ms: up to the last token. device: its state before and after, read outside of the time.
    """

    arm: str
    order: int
    ttft_ms: float
    itl_ms: tuple[float, ...]
    total_ms: float
    ran: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Timings:
    warmup: tuple[Timing, ...]
    measured: tuple[Timing, ...]


def time_request(
    label: str, order: int, arm: Arm, new_tokens: int, clock: Clock = time.perf_counter
) -> Timing:
    """Time one request of `new_tokens` tokens; a single token has a TTFT and no ITL."""
    if new_tokens < 1:
        raise ValueError(f"new_tokens: expected at least 1, got {new_tokens}.")
    try:
        arm.synchronize()  # no earlier request is still running
        start = clock()
        arm.submit()
        arm.synchronize()
        first = last = clock()
        gaps = []
        for _ in range(new_tokens - 1):
            arm.step()
            arm.synchronize()
            now = clock()
            gaps.append((now - last) * 1e3)
            last = now
        ran = arm.ran()
    finally:
        arm.close()
    return Timing(label, order, (first - start) * 1e3, tuple(gaps), (last - start) * 1e3, ran)


def measure(
    arms: Sequence[tuple[str, Arm]],
    *,
    new_tokens: int,
    repeats: int,
    warmup: int,
    clock: Clock = time.perf_counter,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
    read_state: Callable[[], Mapping[str, Any]] | None = None,
) -> Timings:
    """`warmup` unmeasured requests an arm, then `repeats` rounds of all arms in the order A B, B A, A B, ...

    The alternation cancels a drift of the machine (heat, another tenant) to first order over two pairs.
    """
    total = len(arms) * (warmup + repeats)
    warm, measured = list[Timing](), list[Timing]()

    def timed(order: int, label: str, arm: Arm, note: str) -> Timing:
        progress(len(warm) + len(measured), total, f"{note} {label}")
        return time_request(label, order, arm, new_tokens, clock)

    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for label, arm in (one for one in arms for _ in range(warmup)):
            warm.append(timed(-1, label, arm, "warm-up"))
        for round_ in range(repeats):
            for label, arm in arms if round_ % 2 == 0 else reversed(arms):
                before = read_state() if read_state else None
                timing = timed(len(measured), label, arm, "request")
                state = {"before": before, "after": read_state()} if read_state else None
                measured.append(replace(timing, device=state))
    finally:
        if was_enabled:
            gc.enable()
    progress(total, total, "")
    return Timings(tuple(warm), tuple(measured))
