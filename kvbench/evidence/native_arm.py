"""What the evidence of several engines proves together: the worst of them speaks, and native arms must be native."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.records.record import MISMATCH, RUNGS, UNVERIFIED, VERIFIED, Evidence, Level, rung


def standing(evidence: Evidence) -> tuple[bool, bool, str]:
    """The worst evidence has the smallest: a mismatch, then what is unverified on the lowest rung."""
    silent = [rung(level.name) for level in evidence.levels if level.state == UNVERIFIED]
    return evidence.state == VERIFIED, evidence.state != MISMATCH, min(silent, default=RUNGS[-1])


def native_arm(shown: Sequence[tuple[Evidence, tuple[str, str]]], own: int, beside: int) -> Level:
    """What the arms beside the measured engine prove. shown: the evidence of each and the (cache, weights) that are due, at least one;
    own, beside: tokens that the measured engine and the native ones computed.

    An arm in another format contradicts, whatever else of it is unverified: it must not stand on a rung that a gate leaves out.
    """
    off = [e for e, due in shown if (e.effective, e.effective_weights) != due]
    if off:
        worst = min(off, key=standing)
        lost = next((f" {x.sentence}" for x in worst.levels if x.state == MISMATCH), "")
        sentence = f"it stores {worst.effective} and {worst.effective_weights} weights.{lost}"
        return Level("native-arm", MISMATCH, f"The native arm is not native: {sentence}")
    worst = min((e for e, _ in shown), key=standing)
    if worst.state != VERIFIED:
        lost = next(x.sentence for x in worst.levels if x.state == worst.state)
        silent = [x.name for x in worst.levels if x.state == UNVERIFIED]
        return Level(
            "native-arm", worst.state, f"The native arm is not native: {lost}", {"unverified": silent}
        )
    if own < beside:
        return Level(
            "native-arm",
            MISMATCH,
            f"The measured engine computed {own} tokens and the native one beside it {beside}: the numbers are not the measured "
            "engine's alone.",
        )
    return Level("native-arm", VERIFIED, f"{len(shown)} native engine(s) beside it are native.")
