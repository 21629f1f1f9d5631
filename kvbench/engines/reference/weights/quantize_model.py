"""Quantizes the linear layers of a loaded native model in place, one by one, to save memory."""

from dataclasses import replace

from torch import nn

from kvbench.engines.reference.weights import blocks
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.engines.reference.weights.tensor_files import check_finite
from kvbench.errors import Refused
from kvbench.formats.fp8_checkpoint import routers


def quantize_model(model: nn.Module, name: str) -> blocks.WeightFacts:
    """Makes every plain nn.Linear of the decoder layers FP8 with block scales.

    Output layer, embeddings, norms and routers stay native. Raises KvbenchError naming a weight that is not
    finite, and Refused when a decoder layer holds weights outside plain linear layers."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}  # not experts
    if not outer:
        sentence = f"The model {name} has no list of decoder layers to quantize; use weights: native."
        raise Refused("no_decoder_layers", sentence)
    layers_name, layers = max(outer.items(), key=lambda item: len(item[1]))
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
    kept, samples, checksums = blocks.sampled(converted), list[blocks.Sample](), dict[str, int]()
    native, shares = blocks.native_checksums(model, converted), dict[str, float]()
    for module_name in converted:
        linear = linears.pop(module_name)
        check_finite(name, [(f"{module_name}.weight", linear.weight)])
        if module_name in kept:
            samples += blocks.samples_of_native(module_name, linear.weight)
        layer = Fp8Linear.quantized(linear)
        held = layer.weight, layer.weight_scale_inv
        checksums[module_name] = blocks.checksum(*held)
        shares[module_name] = blocks.share_of_bound(linear.weight, *held)
        model.set_submodule(module_name, layer)
        del linear  # its weight goes before the next one is quantized
    found = blocks.WeightFacts("fp8_block128", blocks.ON_LOAD, converted, samples=tuple(samples))
    return replace(found, checksums=checksums, native=native, shares=shares)
