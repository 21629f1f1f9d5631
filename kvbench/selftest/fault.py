"""A fault, and the cells that faults are injected into."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

Broken = AbstractContextManager[Any]
Inject = Callable[[], Broken]  # breaks the live code inside its `with`


@dataclass(frozen=True)
class Fault:
    """breaks: what is broken, in a sentence; cell: a name of `CELLS`.

    says: a regular expression that a sentence of the verdict must match, so that it names the cause. silent:
    only the probes of evidence, or a check that asks for it, show it; False: dtypes, bytes or values do too.
    """

    breaks: str
    inject: Inject
    says: str
    cell: str = "int8_sym"
    silent: bool = True


Loud = partial(Fault, silent=False)


def swap(target: Any, name: str, new: Any) -> Inject:
    """An inject: `target` has `new` under this name."""
    return partial(patch.object, target, name, new)


# In a word of a cell: the folder of a checkpoint that is written for the run.
CHECKPOINT = "{checkpoint}"

_FP8 = ("model.source=tiny-wide", "axes={kv_format: [int8_sym], weights: [fp8_block128]}")
_CUDA = "device=cuda backend=triton dtype=bfloat16 page_size=16 decode=graph compile=off"
_GEMM = "gemm: {rows: [1, 2], max_rows: 4}"

# Variants of matrix.yaml by name, as the words of --set. Each has a cell with kv_format int8_sym, which the
# gate asks for.
CELLS: dict[str, tuple[str, ...]] = {
    "int8_sym": (),
    "int8_static": ("axes={kv_format: [int8_sym, int8_static], scale: 0.05}",),
    "checkpoint_scales": (
        f"model={{source: '{CHECKPOINT}', plumbing: true}}",
        "axes={kv_format: [int8_sym, fp8_e4m3_static], scale: checkpoint}",
    ),
    "fp8_e4m3": ("axes={kv_format: [int8_sym, fp8_e4m3]}",),
    "fp8_weights": _FP8,
    "fp8_chunks": (*_FP8, "engine.prefill_chunk=24"),
    "fp8_products": (
        *_FP8,
        f"runners={{storage: {{}}, latency: {{new_tokens: 3, repeats: 1, warmup: 0}}, {_GEMM}}}",
    ),
    "fp8_biases": ("model.source=tiny-qwen2", _FP8[1]),
    "long_context": ("engine.context=100",),
    "cuda": tuple(f"engine.{word}" for word in _CUDA.split()),
}

NEEDS_CUDA = frozenset({"cuda"})  # cells that need more than a CPU
