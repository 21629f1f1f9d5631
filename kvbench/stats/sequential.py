"""Looks: a sample that is judged while it grows (`kvbench run --until-decided`), at a level that pays for every look planned.

A claim that is tested at each of K looks is decided wrongly more often than once. So each look is judged at a K-th of 5%
(Bonferroni), the last one too: over all of them no more than 5% is spent, however the looks depend on each other. K is what was
planned before anything was measured, however many were taken. A skewed estimate (`Spread.skewed`) passes at its last look only: so
far out its intervals end too early on the side of a pass, and a level cannot pay for that. It may fail at any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.stats.intervals import CONFIDENCE


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


@dataclass(frozen=True)
class Looks:
    """option: the runner's option that grows; sizes: its value in each look, the last one the matrix's own."""

    option: str
    sizes: tuple[Any, ...]

    @property
    def confidence(self) -> float:
        return 1 - (1 - CONFIDENCE) / len(self.sizes)

    @property
    def several(self) -> bool:
        return len(self.sizes) > 1

    def to_dict(self) -> dict[str, Any]:
        return {"option": self.option, "sizes": list(self.sizes)}

    def look_of(self, size: Any) -> Look:
        """The look with that value of the option. Raises ValueError where none has it."""
        return Look(self.sizes.index(size) + 1, len(self.sizes), self.confidence)
