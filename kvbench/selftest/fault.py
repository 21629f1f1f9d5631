"""What a fault is, and the cells that faults are injected into."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """breaks: what is broken, in a sentence; cell: a name of `CELLS`; inject(): breaks the live code inside
    its `with`.

    says: a regular expression that a sentence of the verdict must match, so that whoever reads it knows what
    is broken.
    silent: without the probes of evidence, and without a check of the gate that asks for it, nothing shows
    it; False: it shows in dtypes, bytes, decisions or values too.
    """

    breaks: str
    cell: str
    inject: Callable[[], AbstractContextManager[Any]]
    says: str
    silent: bool = True


# In a word of a cell: the folder of a checkpoint that is written for the run.
CHECKPOINT = "{checkpoint}"

# Variants of matrix.yaml by name, as the words of --set. Each holds a cell with kv_format int8_sym, which the
# gate asks for.
CELLS: dict[str, tuple[str, ...]] = {
    "int8_sym": (),
    "int8_static": ("axes={kv_format: [int8_sym, int8_static], scale: 0.05}",),
    "checkpoint_scales": (
        f"model={{source: '{CHECKPOINT}', plumbing: true}}",
        "axes={kv_format: [int8_sym, fp8_e4m3_static], scale: checkpoint}",
    ),
    "fp8_e4m3": ("axes={kv_format: [int8_sym, fp8_e4m3]}",),
    "fp8_weights": ("model.source=tiny-wide", "axes={kv_format: [int8_sym], weights: [fp8_block128]}"),
    "fp8_chunks": (
        "model.source=tiny-wide",
        "axes={kv_format: [int8_sym], weights: [fp8_block128]}",
        "engine.prefill_chunk=24",
    ),
    "fp8_products": (
        "model.source=tiny-wide",
        "axes={kv_format: [int8_sym], weights: [fp8_block128]}",
        "runners={storage: {}, latency: {new_tokens: 3, repeats: 1, warmup: 0}, gemm: {rows: [1, 2], "
        "max_rows: 4}}",
    ),
    "fp8_biases": ("model.source=tiny-qwen2", "axes={kv_format: [int8_sym], weights: [fp8_block128]}"),
    "long_context": ("engine.context=100",),
    "cuda": (
        "engine.device=cuda",
        "engine.backend=triton",
        "engine.dtype=bfloat16",
        "engine.page_size=16",
        "engine.decode=graph",
        "engine.compile=off",
    ),
}

# Cells that need more than a CPU.
NEEDS_CUDA = frozenset({"cuda"})
