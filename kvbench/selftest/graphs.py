"""Faults of CUDA graphs, which need a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from kvbench.engines.reference.graph import DecodeGraph
from kvbench.selftest.fault import Fault


def old_scales() -> AbstractContextManager[Any]:
    """A decode step is captured over copies of the scales, so its replays see them as they were then."""
    honest = DecodeGraph.__init__

    def init(self: DecodeGraph, engine: Any, *rest: Any) -> None:
        layers = engine.store.layers
        kept = list(layers)
        for at, pages in enumerate(kept):
            if pages.k_scale is not None:
                k_scale, v_scale = (s.nan_to_num(1.0, 1.0, 1.0) for s in (pages.k_scale, pages.v_scale))
                layers[at] = pages._replace(k_scale=k_scale, v_scale=v_scale)
        vars(self)["old"] = list(layers)  # a graph does not keep what it reads
        try:
            honest(self, engine, *rest)
        finally:
            layers[:] = kept

    return patch.object(DecodeGraph, "__init__", init)


FAULTS: dict[str, Fault] = {
    "graph_replays_old_scales": Fault(
        "A CUDA graph of a decode step replays with the scales of its capture.",
        "cuda", old_scales, r"changing every stored K scale changes no logit"),
}  # fmt: skip
