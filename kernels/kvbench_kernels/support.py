"""Answers of a kernel to "can you run this?": yes, or no with a reason. Imports neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accepted:
    """`supports(...)` said yes."""


@dataclass(frozen=True)
class Rejected:
    """`supports(...)` said no. `reason` is a stable word, `sentence` tells a person why."""

    reason: str
    sentence: str
