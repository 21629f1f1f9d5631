"""Linear layers on the skinny kernels: a few rows on a GPU go there, everything else stays F.linear.

`replace_linears(model)` changes the class of the modules, not their parameters, names or state. The kernels
are behind two custom ops, opaque to torch.compile, whose first CUDA call imports Triton.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbench_kernels.gemm.skinny_config import supports_skinny
from kvbench_kernels.support import Accepted

# Projections that transformers feeds with the same tensor, in the order of their calls.
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@torch.library.custom_op("kvbench::skinny_linear", mutates_args=())
def skinny_linear_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] of few rows, weight [N, K], bias [N] or None -> [..., N]; this is the torch reference."""
    return F.linear(x, weight, bias)


@skinny_linear_op.register_kernel("cuda")
def _skinny_linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not takes_skinny(x, weight):
        return F.linear(x, weight, bias)
    from kvbench_kernels.gemm.skinny_linear import skinny_linear

    return skinny_linear(x if x.stride(-1) == 1 else x.contiguous(), weight, bias)


@skinny_linear_op.register_fake
def _skinny_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("kvbench::skinny_linear_many", mutates_args=())
def skinny_linear_many_op(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """x [..., K], up to three weights [N_i, K], biases or [] -> [..., N_i] each, in one launch."""
    return [F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]


@skinny_linear_many_op.register_kernel("cuda")
def _skinny_linear_many_cuda(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    if not all(takes_skinny(x, weight) for weight in weights):
        return [F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    from kvbench_kernels.gemm.skinny_linear import skinny_linear_many

    return list(skinny_linear_many(x if x.stride(-1) == 1 else x.contiguous(), weights, biases or None))


@skinny_linear_many_op.register_fake
def _skinny_linear_many_fake(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], w.shape[0])) for w in weights]


class SkinnyLinear(nn.Linear):
    """nn.Linear whose product with few rows on CUDA is the skinny op.

    group: the modules that share this one's input, itself first, on the first of a group only. Its call
    computes all of them, and `ahead` of the others is (input, output) until their own call with the very same
    input tensor takes it."""

    group: tuple[SkinnyLinear, ...]
    ahead: tuple[Tensor, Tensor] | None

    def forward(self, input: Tensor) -> Tensor:
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead[0] is input:
            return ahead[1]
        # Compiled code always calls the op, which decides when it runs: a choice by the number of rows here
        # would compile the code again on either side of it.
        if not (torch.compiler.is_compiling() and input.is_cuda) and not takes_skinny(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        if len(self.group) < 2:
            return cast(Tensor, skinny_linear_op(input, self.weight, self.bias))
        biases = [] if self.bias is None else [m.bias for m in self.group]
        outs = skinny_linear_many_op(input, [m.weight for m in self.group], biases)
        for module, out in zip(self.group[1:], outs[1:], strict=True):
            module.ahead = (input, out)
        return cast(Tensor, outs[0])


def takes_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the skinny kernels take F.linear(x, weight), by shapes, dtype and device."""
    if x.device.type != "cuda" or x.dtype != weight.dtype or not weight.is_contiguous():
        return False
    n, k = weight.shape
    dtype = str(x.dtype).removeprefix("torch.")
    return isinstance(supports_skinny(x.numel() // k, n, k, dtype), Accepted)


def replace_linears(model: nn.Module, grouped: bool = True) -> int:
    """Makes every plain nn.Linear of `model` a SkinnyLinear, in place; returns how many.

    grouped: siblings that share their input (q, k, v; gate, up) become one launch. Subclasses of nn.Linear
    stay as they are. Inference only: the ops have no gradient."""
    replaced = 0
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            module.__class__ = SkinnyLinear
            skinny = cast(SkinnyLinear, module)
            skinny.group, skinny.ahead = (), None
            replaced += 1
    if grouped:
        for module in model.modules():
            for names in SHARED_INPUT:
                _group([getattr(module, name, None) for name in names])
    return replaced


def _group(siblings: list[object]) -> None:
    """Joins siblings that are all SkinnyLinear, with equal columns, and all or none with a bias."""
    linears = [m for m in siblings if isinstance(m, SkinnyLinear)]
    kinds = {(m.in_features, m.weight.dtype, m.bias is None) for m in linears}
    if len(linears) == len(siblings) and len(kinds) == 1:
        linears[0].group = tuple(linears)
