"""Cases of a kernel's test: the full product on a GPU, a small cover of it where Triton's interpreter runs
the kernels.
"""

import itertools
from typing import TypeVar

import torch

Case = TypeVar("Case")


def cover(cases, features, cost=lambda _: 1.0):
    """All cases on a GPU. Elsewhere cheap ones that show every feature that a case has: greedy, always the
    same.
    """
    left = list(cases)
    if torch.cuda.is_available():
        return left
    shown = {feature for case in left for feature in features(case)}
    found = []
    while shown:
        best = max(left, key=lambda case: len(shown.intersection(features(case))) / cost(case))
        shown.difference_update(features(best))
        found.append(best)
    return found


def grid(*axes):
    """Every combination of one value from each axis; elsewhere a cover of every pair of values."""
    values = [list(axis) for axis in axes]
    found = cover(
        itertools.product(*(range(len(axis)) for axis in values)),
        lambda case: itertools.combinations(enumerate(case), min(2, len(case))),
    )
    return [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in found]
