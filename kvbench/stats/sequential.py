"""Sequential looks at a growing sample (`kvbench run --until-decided`), at a corrected level.

Each of K planned looks, the last one included, is judged at 5% / K (Bonferroni), which keeps the joint error
at 5% whatever the dependence. A skewed estimate (`Spread.skewed`) can fail at any look and pass only at its
last one, because at a higher level its intervals are too narrow on the side of a pass.
"""

from dataclasses import dataclass
from typing import Any

from kvbench.stats.intervals import CONFIDENCE


@dataclass(frozen=True)
class Look:
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
    """option: the runner's option that sets the sample size; sizes: its value at each look."""

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
        """The look with that value of the option. Raises ValueError if none has it."""
        return Look(self.sizes.index(size) + 1, len(self.sizes), self.confidence)
