"""All faults by name, and the known holes: what the ordinary gate does not catch, each with the reason.

A fault is one entry in the file of its kind; a new kind is a file and its place here. A test holds each hole
to be true.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from kvbench.engines.reference import kind, load
from kvbench.engines.reference.backends import TORCH
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.selftest import hops, pages, values, weights
from kvbench.selftest.fault import Fault, swap
from kvbench.selftest.weights import after_load, copies, named, wrong_at
from kvbench_kernels.attention.reference import paged_gather_torch

_LOAD_RANDOM = load._load_random
_held: list[Tensor] = []


def hold_copies(loaded: LoadedModel) -> None:
    _held[:] = copies(loaded)


def load_wrongly(*rest: Any) -> Any:
    model, tokenizer, facts = _LOAD_RANDOM(*rest)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    return model, tokenizer, facts


def load_with_another_norm(*rest: Any) -> LoadedModel:
    loaded = load_model(*rest)
    with torch.no_grad():
        named(loaded, "model.norm.weight").mul_(1.01)
    return loaded


def gather_far_tokens_halved(*rest: Any) -> Any:
    k, v = paged_gather_torch(*rest)
    v[:, :, 80:] *= 0.5
    return k, v


FAULTS: dict[str, Fault] = {**hops.FAULTS, **values.FAULTS, **pages.FAULTS, **weights.FAULTS}

HOLES: dict[str, Fault] = {
    "copy_outside_the_model": Fault(
        "Unused 16-bit copies of FP8 weights outside of the model: only held_bytes on a GPU shows them.",
        after_load(hold_copies),
        "second time",
        "fp8_weights",
    ),
    "source_read_wrongly": Fault(
        "A tensor is changed while it is read: what is loaded is compared with what was read, not the file.",
        swap(load, "_load_random", load_wrongly),
        "not what was loaded",
        "fp8_weights",
    ),
    "norm_changed_beside_native_weights": Fault(
        "A norm of a model with native weights is changed after loading: baseline and cell share it.",
        swap(kind, "load_model", load_with_another_norm),
        "not what was loaded",
    ),
    "mlp_dropped_beside_native_weights": Fault(
        "The MLPs of a model with native weights give zeros: baseline and cell alike.",
        swap(LlamaMLP, "forward", lambda self, x: torch.zeros_like(x)),
        "reaches no logit",
    ),
    "gemm_wrong_at_rows_between": Fault(
        "The product takes other scales at 16 rows: the run has 2, 16 and 24, of which its fewest, most and "
        "most frequent are looked at.",
        wrong_at(16),
        "away from the product with its codes and scales",
        "fp8_chunks",
    ),
    "wrong_beyond_the_probes": Fault(
        "V is halved from the 81st token on: probes go to two pages and two tokens, 66 at most, and parity, "
        "perplexity and agreement are not in this matrix.",
        swap(TORCH, "gather", gather_far_tokens_halved),
        "attention of layer",
        "long_context",
    ),
}
