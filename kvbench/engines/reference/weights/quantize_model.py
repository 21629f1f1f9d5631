"""Quantizes the linear layers of a loaded native model in place, one by one, so that little memory is needed
beside it."""

from __future__ import annotations

from torch import nn

from kvbench.engines.reference.weights.blocks import (
    ON_LOAD,
    Sample,
    WeightFacts,
    checksum,
    native_checksums,
    sampled,
    samples_of_native,
    share_of_bound,
)
from kvbench.engines.reference.weights.finite import check_finite
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.errors import Refused
from kvbench.formats.fp8_checkpoint import routers


def quantize_model(model: nn.Module, name: str) -> WeightFacts:
    """Makes every plain nn.Linear of the decoder layers FP8 with block scales. Output layer, embeddings,
    norms and routers stay native. Raises KvbenchError naming a weight that is not finite, and Refused for a
    model whose layers hold weights in anything but plain linear layers: they would stay native unseen."""
    layers_name, layers = _decoder_layers(model, name)
    linears = {f"{layers_name}.{n}": m for n, m in layers.named_modules() if type(m) is nn.Linear}
    choosing = routers([n for n, _ in model.named_modules()])
    plain = {id(m.weight) for m in linears.values()}
    for key, parameter in layers.named_parameters(prefix=layers_name):
        owner = key.rpartition(".")[0]
        if parameter.ndim > 1 and id(parameter) not in plain and owner not in choosing:
            raise Refused(
                "weights_not_linear",
                f"The model {name} cannot be quantized to fp8_block128: {key} is a weight of a "
                f"{type(model.get_submodule(owner)).__name__}, and only plain nn.Linear layers are (no "
                "experts of a mixture, no fused modules). Use weights: native for it.",
            )
    converted = tuple(n for n in linears if n not in choosing)
    kept, samples, checksums = sampled(converted), list[Sample](), dict[str, int]()
    native, shares = native_checksums(model, converted), dict[str, float]()
    for module_name in converted:
        linear = linears.pop(module_name)
        check_finite(name, [(f"{module_name}.weight", linear.weight)])
        if module_name in kept:
            samples += samples_of_native(module_name, linear.weight)
        layer = Fp8Linear.quantized(linear)
        checksums[module_name] = checksum(layer.weight, layer.weight_scale_inv)
        shares[module_name] = share_of_bound(linear.weight, layer.weight, layer.weight_scale_inv)
        model.set_submodule(module_name, layer)
        del linear  # its weight goes before the next one is quantized
    return WeightFacts(
        "fp8_block128",
        ON_LOAD,
        converted,
        samples=tuple(samples),
        checksums=checksums,
        native=native,
        shares=shares,
    )


def _decoder_layers(model: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """The longest list of blocks that is in no other list; experts are lists inside it."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}
    if not outer:
        raise Refused(
            "no_decoder_layers",
            f"The model {name} has no list of decoder layers, so nothing says what to quantize; use "
            "weights: native.",
        )
    return max(outer.items(), key=lambda item: len(item[1]))
