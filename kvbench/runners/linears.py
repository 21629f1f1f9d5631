"""The products of a forward's linear layers: modules of one call, and calls of the same shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.errors import KvbenchError
from kvbench.evidence.stored_weights import fp8_modules, groups
from kvbench_kernels.gemm.blockwise import dequantize_blocks

Linear = nn.Linear | Fp8Linear


@dataclass(frozen=True)
class Product:
    """Modules that one call computes together (q, k, v; gate, up; or a single one), the first of their shape.

    alike: the same product of the model's other layers of this shape; timed calls go over all of them in
    turn.
    """

    names: tuple[str, ...]
    modules: tuple[Linear, ...]
    n: int
    k: int
    alike: tuple[Product, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        # [1, M, K], as from the engine. Modules of one product recognise each other by the same input tensor.
        batch = x[None]
        return torch.cat([module(batch) for module in self.modules], dim=-1)[0]

    @property
    def quantized(self) -> bool:
        return isinstance(self.modules[0], Fp8Linear)

    @property
    def layers(self) -> tuple[Product, ...]:
        """All calls of this shape in a forward, this one first."""
        return (self, *self.alike)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and biases in the modules."""
        return sum(held.nbytes for module in self.modules for held in module.parameters())

    @property
    def bias(self) -> Tensor | None:
        biases: list[Tensor] = [module.bias for module in self.modules if module.bias is not None]
        return torch.cat(biases) if biases else None

    def weight(self) -> Tensor:
        """[N, K] in float32: the dequantized or the native weight."""
        return torch.cat(
            [
                dequantize_blocks(m.weight.data, m.weight_scale_inv.data)
                if isinstance(m, Fp8Linear)
                else m.weight.data.float()
                for m in self.modules
            ]
        )


def products(model: nn.Module) -> list[Product]:
    """The products of the FP8 linear layers, or of all but the output layer if there are none, by shape."""
    output = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    linears: dict[str, Linear] = {**fp8_modules(model)} or {
        name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
    }
    names = {id(m): name for name, m in linears.items()}
    calls: list[tuple[Linear, ...]] = [tuple(getattr(m, "group", ())) or (m,) for m in linears.values()]
    followers = {id(m) for call in calls for m in call[1:]}
    shapes: dict[tuple[int, int], list[Product]] = {}
    for call in calls:
        if id(call[0]) not in followers:
            n, k = sum(m.out_features for m in call), call[0].in_features
            product = Product(tuple(names[id(m)] for m in call), call, n, k)
            shapes.setdefault((n, k), []).append(product)
    if not shapes:
        raise KvbenchError(
            "The model has no linear layer other than its output layer, so there is no product to measure."
        )
    return [replace(first, alike=tuple(others)) for first, *others in shapes.values()]


def check_all(model: nn.Module, found: Sequence[Product]) -> None:
    """Raises KvbenchError unless the layers have the products' names and shapes and are a forward's calls."""
    seen: list[tuple[str, ...]] = []
    for layer in (layer for product in found for layer in product.layers):
        for name, module in zip(layer.names, layer.modules, strict=True):
            if model.get_submodule(name) is not module:
                raise KvbenchError(f"The layer measured as {name} is another layer of the model.")
        seen.append(layer.names)
        shape = sum(m.out_features for m in layer.modules), layer.modules[0].in_features
        if shape != (layer.n, layer.k):
            raise KvbenchError(
                f"{layer.names[0]} is {shape[0]} x {shape[1]}, but would be measured as {layer.n} x "
                f"{layer.k}."
            )
    expected = Counter(tuple(name for name, _ in group) for group in groups(model))
    measured = Counter(seen)
    for names in expected | measured if expected else ():
        if expected[names] != measured[names]:
            raise KvbenchError(
                f"A forward computes {' and '.join(names)} as one product {expected[names]} times, but "
                f"{measured[names]} would be measured; the measurement would not match the model's calls."
            )
