"""How many CTAs share a tile of a product along K. Pure: no torch, no triton."""

from __future__ import annotations

from typing import Protocol


class SplitTiling(Protocol):
    """Common to the products' tilings: columns of a step along K, and CTAs that share a tile."""

    @property
    def block_k(self) -> int: ...
    @property
    def splits(self) -> int: ...


def splits_used(tiling: SplitTiling, k: int) -> int:
    """Non-empty splits along K columns, at most tiling.splits: 5 steps in 4 splits of 2 need 3."""
    steps = -(-k // tiling.block_k)
    return -(-steps // -(-steps // tiling.splits))
