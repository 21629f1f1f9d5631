"""native-arm: whether the other engines of a task are native; and the worst evidence of several engines."""

from collections.abc import Sequence
from typing import Any

from kvbench.records.record import MISMATCH, NOT_SHOWN, RUNGS, VERIFIED, Evidence, Level, rung

Formats = tuple[str, str]  # of the KV cache and of the weights


def rank(evidence: Evidence) -> tuple[bool, bool, str]:
    """The worst evidence has the smallest: a mismatch, then what is unverified on the lowest rung."""
    unverified = [rung(level.name) for level in evidence.levels if level.state in NOT_SHOWN]
    return evidence.state == VERIFIED, evidence.state != MISMATCH, min(unverified, default=RUNGS[-1])


def _effective(evidence: Evidence) -> Formats:
    return evidence.effective, evidence.effective_weights


def worst_of(examined: Sequence[tuple[Evidence, Any]], expected: Formats) -> tuple[Evidence, Any]:
    """The worst evidence with what comes with it: other formats than expected first."""
    return min(examined, key=lambda pair: (_effective(pair[0]) == expected, rank(pair[0])))


def native_arm(shown: Sequence[tuple[Evidence, Formats]], own: int, native: int) -> Level:
    """The level. An engine in another format is a mismatch even where its other levels are unverified.

    shown: the evidence of each other engine, at least one, with its expected formats; own, native: tokens
    that the measured engines and the native ones computed.
    """
    name, wrong = "native-arm", "The native arm is not native"
    if off := [evidence for evidence, formats in shown if _effective(evidence) != formats]:
        worst = min(off, key=rank)
        lost = next((f" {x.sentence}" for x in worst.levels if x.state == MISMATCH), "")
        sentence = f"it stores {worst.effective} and {worst.effective_weights} weights.{lost}"
        return Level(name, MISMATCH, f"{wrong}: {sentence}")
    worst = min((evidence for evidence, _ in shown), key=rank)
    if worst.state != VERIFIED:
        states = (MISMATCH,) if worst.state == MISMATCH else NOT_SHOWN
        lost = next(x.sentence for x in worst.levels if x.state in states)
        unverified = [x.name for x in worst.levels if x.state in NOT_SHOWN]
        return Level(name, worst.state, f"{wrong}: {lost}", {"unverified": unverified})
    if own < native:
        tokens = f"The measured engine computed {own} tokens and the native one {native}"
        return Level(name, MISMATCH, f"{tokens}: the numbers are not only the measured engine's.")
    return Level(name, VERIFIED, f"{len(shown)} native engine(s) of the task are native.")
