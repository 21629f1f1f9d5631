"""What the ordinary gate does not catch, each with the reason: a table like that of the faults, and a test
holds it to be true.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from kvbench.engines.reference import kind, load
from kvbench.engines.reference.backends import TORCH
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.selftest.fault import Fault
from kvbench.selftest.weights import after_load, copies, named, wrong_at
from kvbench_kernels.attention.reference import paged_gather_torch

Broken = AbstractContextManager[Any]

_LOAD_RANDOM = load._load_random
_held: list[Tensor] = []


def copies_elsewhere(loaded: LoadedModel) -> None:
    _held[:] = copies(loaded)


def source_read_wrongly() -> Broken:
    def loading(*rest: Any) -> Any:
        model, tokenizer, facts = _LOAD_RANDOM(*rest)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.01)
        return model, tokenizer, facts

    return patch.object(load, "_load_random", loading)


def native_norm_changed() -> Broken:
    def loading(*rest: Any) -> LoadedModel:
        loaded = load_model(*rest)
        with torch.no_grad():
            named(loaded, "model.norm.weight").mul_(1.01)
        return loaded

    return patch.object(kind, "load_model", loading)


def native_mlp_dropped() -> Broken:
    return patch.object(LlamaMLP, "forward", lambda self, x: torch.zeros_like(x))


def far_tokens_halved() -> Broken:
    def gather(*rest: Any) -> Any:
        k, v = paged_gather_torch(*rest)
        v[:, :, 80:] *= 0.5
        return k, v

    return patch.object(TORCH, "gather", gather)


HOLES: dict[str, Fault] = {
    "copy_outside_the_model": Fault(
        "16-bit copies of FP8 weights that nothing uses are held outside of the model: only a GPU's "
        "counters (metric held_bytes) show them.",
        "fp8_weights", after_load(copies_elsewhere), "second time"),
    "source_read_wrongly": Fault(
        "A tensor is changed while it is read: what is loaded is compared with what was read, not with the "
        "file.",
        "fp8_weights", source_read_wrongly, "not what was loaded"),
    "norm_changed_beside_native_weights": Fault(
        "A norm of a model with native weights is changed after loading: baseline and cell run on that one "
        "model.",
        "int8_sym", native_norm_changed, "not what was loaded"),
    "mlp_dropped_beside_native_weights": Fault(
        "The MLPs of a model with native weights give zeros: baseline and cell alike.",
        "int8_sym", native_mlp_dropped, "reaches no logit"),
    "gemm_wrong_at_rows_between": Fault(
        "The product takes other scales at 16 rows: the run has 2, 16 and 24, of which its fewest, most "
        "and most frequent are looked at.",
        "fp8_chunks", wrong_at(16), "away from the product with its codes and scales"),
    "wrong_beyond_the_probes": Fault(
        "V is halved from the 81st token on: probes go to two pages and two tokens, 66 at most, and "
        "parity, perplexity and agreement are not in this matrix.",
        "long_context", far_tokens_halved, "attention of layer"),
}  # fmt: skip
