"""Looks: a sample that is judged while it grows (`kvbench run --until-decided`), at a level that pays for every look planned.

A claim that is tested at each of K looks is decided wrongly more often than once. So each look is judged at a K-th of 5%
(Bonferroni), the last one too: over all of them no more than 5% is spent, however the looks depend on each other. K is what was
planned before anything was measured, however many were taken. A skewed estimate (`Spread.skewed`) passes at its last look only: so
far out its intervals end too early on the side of a pass, and a level cannot pay for that. It may fail at any.

The manifest says it, so that records are judged again alike:

    "until_decided": {"looks": {"perplexity": {"option": "limit_chunks", "sizes": [4, 32, null]}},
                      "decided": {"check": "kv_ratio at most 0.6", "after": "stage 0 (exact bytes)"} or null}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.stats.intervals import CONFIDENCE


@dataclass(frozen=True)
class Looks:
    """option: the runner's option that grows; sizes: its value in each look, the last one the matrix's own."""

    option: str
    sizes: tuple[Any, ...]

    @property
    def confidence(self) -> float:
        return 1 - (1 - CONFIDENCE) / len(self.sizes)


@dataclass(frozen=True)
class Look:
    """The number-th look of `of`, judged at `confidence`."""

    number: int
    of: int
    confidence: float

    @property
    def last(self) -> bool:
        return self.number == self.of

    @property
    def place(self) -> str:
        return f"look {self.number} of {self.of}"

    @property
    def level(self) -> str:
        return f"{100 * self.confidence:.3g}%"


def looks_of(manifest: Mapping[str, Any]) -> dict[str, Look]:
    """The look at which each runner's tasks of this manifest stand; runners that were looked at once are left out.

    Raises ValueError or TypeError where the tasks are not of a look that was planned.
    """
    planned = (manifest.get("until_decided") or {}).get("looks", {})
    found: dict[str, Look] = {}
    for task in manifest["tasks"]:
        if task["runner"] in planned:
            plan = planned[task["runner"]]
            looks = Looks(plan["option"], tuple(plan["sizes"]))
            number = looks.sizes.index(task["options"][looks.option]) + 1
            look = Look(number, len(looks.sizes), looks.confidence)
            if found.setdefault(task["runner"], look) != look:
                raise ValueError(f"the tasks of {task['runner']} are of different looks")
    return found


def decided(manifest: Mapping[str, Any]) -> Mapping[str, str] | None:
    """What made every task without a record needless: {"check", "after"}, or None."""
    found: Mapping[str, str] | None = (manifest.get("until_decided") or {}).get("decided")
    return found


def not_run(manifest: Mapping[str, Any]) -> str:
    """Why a task of the manifest has no record: left out once the verdict was decided, another shard's, or just not run."""
    if by := decided(manifest):
        return f"not run: the verdict was decided by {by['check']} after {by['after']}"
    shard = manifest.get("shard")
    return f"not run in shard {shard['number']} of {shard['of']}" if shard else "not run"
