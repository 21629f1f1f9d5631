"""What is known of a loaded model's weights: the format that they are in, where it came from, and which modules it is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CHECKPOINT, ON_LOAD, NATIVE = "checkpoint", "quantized on load", "native"


@dataclass(frozen=True)
class WeightFacts:
    """format: a name of `kvbench.formats.WEIGHT_FORMATS`, as loaded. source: one of the three words above.

    modules: dotted names of the quantized linear layers, in the model's order. warnings: sentences for the report.
    scale_dtypes: dtype names of the scales as the checkpoint stores them, with how many tensors have each.
    load_seconds: from the call until the weights are on the device, by a monotonic clock.
    """

    format: str = "native"
    source: str = NATIVE
    modules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scale_dtypes: Mapping[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
