"""Backends as the resolver sees them: what each can run, and why not. Pure: no torch.

`kvbench.engines.reference.backends` holds their code, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.formats.kv import KV_FORMATS
from kvbench.models.attention_facts import ModelFacts
from kvbench_kernels.support import Accepted, Rejected, supports

if TYPE_CHECKING:
    from kvbench.matrix.resolve import Request

# A question put to a backend or a weight format. Each answers from the facts alone.
Support = Callable[["Request", ModelFacts], "Accepted | Rejected"]


@dataclass(frozen=True)
class Backend:
    """supports: whether it can run a request on a model.

    triton: its kernels are written in Triton, which must be installed. splits: `kv_splits` can divide a decode. fused_gemm: it has
    fused products of FP8 weights. graphs: on a GPU, steps can be CUDA graphs and decoder layers compiled.
    """

    name: str
    supports: Support
    triton: bool
    splits: bool
    fused_gemm: bool
    graphs: bool


def _torch_supports(request: Request, facts: ModelFacts) -> Accepted | Rejected:
    """Full and sliding attention, soft-cap and sinks, in every KV format; MLA natively."""
    for attribute, sentence in facts.unsupported:
        return Rejected("attention_unsupported", f"{sentence} (config attribute {attribute})")
    strange = sorted({layer.kind for layer in facts.layers} - {"full", "sliding", "mla"})
    if strange:
        where = [i for i, layer in enumerate(facts.layers) if layer.kind == strange[0]]
        return Rejected(
            "layer_kind_unsupported",
            f"Layer {where[0]} (and {len(where) - 1} more) is of kind {strange[0]!r}; the engine has full, sliding "
            "and MLA attention.",
        )
    if KV_FORMATS[request.kv_format].quantized and any(layer.kind == "mla" for layer in facts.layers):
        return Rejected(
            "mla_not_validated",
            f"The model caches a latent (MLA); {request.kv_format} has not been validated on it, only native has.",
        )
    return Accepted()


def _triton_supports(request: Request, facts: ModelFacts) -> Accepted | Rejected:
    """What the kernels declare, in every layer, and what the torch backend takes too."""
    for layer in facts.layers:
        fmt = KV_FORMATS[request.kv_format]
        needs = layer.needs(fmt, request.page_size, request.dtype, request.device, request.interpreter)
        answer = supports(needs)
        if isinstance(answer, Rejected):
            return answer
    if request.prefill_reads != "stored":
        return Rejected(
            "fresh_reads",
            "The Triton kernels read every token from the pages; prefill_reads: fresh runs on backend torch.",
        )
    return _torch_supports(request, facts)


# The reference: it runs whatever the engine runs, so a request falls back to it.
TORCH = Backend("torch", _torch_supports, triton=False, splits=False, fused_gemm=False, graphs=False)
TRITON = Backend("triton", _triton_supports, triton=True, splits=True, fused_gemm=True, graphs=True)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TORCH, TRITON)}


def best_backend(device: str) -> Backend:
    """What `backend: auto` tries first. Triton's interpreter is for tests, so a CPU gets torch."""
    return TRITON if device == "cuda" else TORCH
