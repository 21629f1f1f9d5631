"""FP8 weights that are not what the cell asks for, or that nothing uses; and what stays native."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from kvbench.engines.reference import kind, load
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.engines.reference.weights import fp8_linear as fp8linear
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.evidence.stored_weights import fp8_modules
from kvbench.runners import gemm, latency
from kvbench.runners.context import Context, Measurement
from kvbench.selftest.fault import Broken, Fault, Inject, Loud, swap
from kvbench_kernels.gemm import fp8_linear
from kvbench_kernels.gemm.blockwise import dequantize_blocks, fp8_dequantize_matmul_torch
from kvbench_kernels.launches import launched
from kvbench_kernels.launches import product as product_of

_RUN, _PRODUCTS, _OP, _MLP = latency.run, gemm.products, fp8linear.fp8_linear_op, LlamaMLP.forward
_QUANTIZED = Fp8Linear.quantized.__func__  # type: ignore[attr-defined]


def after_load(change: Callable[[LoadedModel], object]) -> Inject:
    """`change` is made to every model with FP8 weights when it has been loaded."""

    def loading(*rest: Any) -> LoadedModel:
        loaded = load_model(*rest)
        if loaded.weights.format != "native":
            with torch.no_grad():
                change(loaded)
        return loaded

    return swap(kind, "load_model", loading)


def named(loaded: LoadedModel, end: str) -> Tensor:
    return next(p for name, p in loaded.model.named_parameters() if name.endswith(end))


def quantize_and_dequantize(model: nn.Module, name: str) -> Any:
    """The loader quantizes and puts the dequantized weight into a plain layer."""
    facts = quantize_model(model, name)
    for module_name, module in fp8_modules(model).items():
        plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight.data = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
        plain.register_parameter("bias", module.bias)
        model.set_submodule(module_name, plain.requires_grad_(False))
    return facts


def product(change: Callable[[Tensor, int], Tensor]) -> Inject:
    """The reference product works with other scales; change(scales, rows)."""

    def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_dequantize_matmul_torch(x, codes, change(scales, len(x)), bias)

    return lambda: patch.dict(fp8_linear._PATHS, reference=multiply)


def wrong_at(rows: int) -> Inject:
    return product(lambda scales, m: scales * 1.25 if m == rows else scales)


def by_library(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    launched("cublas")
    return nn.functional.linear(x, dequantize_blocks(codes, scales, x.dtype), bias)


def wrong_in_batches(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Any:
    """The product is right for a matrix, and wrong for the [1, M, K] that the model gives it."""
    return _OP(x, codes, scales * 1.25 if x.ndim == 3 else scales, bias)


def run_and_replace(ctx: Context) -> Measurement:
    """The second run of a model, after its probes, leaves a layer with other code."""
    measured = _RUN(ctx)
    if ctx.spec["weights"] != "native":
        shadow(ctx.model)
    return measured


def drop_and_run(ctx: Context) -> Measurement:
    """MLPs are computed and thrown away, from the second run of a model on."""
    for module in ctx.model.model.modules() if ctx.spec["weights"] != "native" else ():
        if isinstance(module, LlamaMLP):
            module.forward = dropping(module.forward)
    return _RUN(ctx)


def dropping(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.zeros_like(forward(x))


def products_renamed(model: nn.Module) -> list[gemm.Product]:
    """The runner measures each layer under the name of the next one of its kind."""
    return [replace(one, names=one.alike[0].names) if one.alike else one for one in _PRODUCTS(model)]


def shadow(loaded: LoadedModel) -> None:
    """A layer computes with a dequantized copy, and reports the name of the expected kernel."""
    module = fp8_modules(loaded.model)["model.layers.2.mlp.down_proj"]
    copy = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)

    def forward(x: Tensor) -> Tensor:
        with product_of(x.numel() // x.shape[-1], *copy.shape):
            launched("fp8_dequantize_matmul_torch")
        return nn.functional.linear(x, copy)

    module.forward = forward  # type: ignore[method-assign]


def layer_between(loaded: LoadedModel) -> None:
    """Samples of the source are of layers 0, 1 and 3 of 4."""
    fp8_modules(loaded.model)["model.layers.2.mlp.down_proj"].weight_scale_inv.data.mul_(1.5)


def quantized_wrongly_between() -> Broken:
    """The same before the checksum is taken: the 7 modules of layer 2 are the 15th to the 21st."""
    made = count()

    def quantized(cls: type[Fp8Linear], linear: nn.Linear) -> Fp8Linear:
        layer: Fp8Linear = _QUANTIZED(cls, linear)
        if next(made) // 7 % 4 == 2:
            layer.weight_scale_inv.data.mul_(1.5)
        return layer

    return patch.object(Fp8Linear, "quantized", classmethod(quantized))


def copies(loaded: LoadedModel) -> Iterator[Tensor]:
    for module in fp8_modules(loaded.model).values():
        yield dequantize_blocks(module.weight.data, module.weight_scale_inv.data, torch.bfloat16)


def copy_in_a_layer(loaded: LoadedModel) -> None:
    for module, copy in zip(fp8_modules(loaded.model).values(), copies(loaded), strict=True):
        vars(module)["shadow"] = copy


def copy_in_the_model(loaded: LoadedModel) -> None:
    vars(loaded.model)["shadows"] = list(copies(loaded))


Weights = partial(Fault, cell="fp8_weights")
LoudWeights = partial(Weights, silent=False)
AWAY = r"q_proj is .* away from the product with its codes and scales"
NOT_DOUBLED = r"doubling the scales of model\.layers\.2\.mlp\.down_proj does not double its output"

FAULTS: dict[str, Fault] = {
    "weights_dequantized_at_load": LoudWeights(
        "FP8 weights are dequantized when they are loaded.",
        swap(load, "quantize_model", quantize_and_dequantize),
        r"q_proj is stored as native \(float32\), expected fp8_block128",
    ),
    "gemm_ignores_scales": Weights(
        "The product takes the codes for the weight.",
        product(lambda scales, m: torch.ones_like(scales)),
        r"doubling the scales of \S*q_proj does not double its output",
    ),
    "gemm_takes_scales_of_other_blocks": Weights(
        "The product takes the scales in the reverse order.", product(lambda s, m: s.flip(0, 1)), AWAY
    ),
    "gemm_rounds_scales": Weights(
        "The product rounds its FP32 scales to BF16.", product(lambda s, m: s.bfloat16()), AWAY
    ),
    "gemm_by_another_kernel": Weights(
        "A library multiplies by the dequantized weight.",
        lambda: patch.dict(fp8_linear._PATHS, reference=by_library),
        r"cublas computed .* and path reference was expected",
    ),
    "gemm_on_a_shadow": Weights(
        "One layer multiplies by a dequantized copy of its weight.", after_load(shadow), NOT_DOUBLED
    ),
    "gemm_wrong_at_two_rows": Weights(
        "The product takes other scales at two rows, of a decode step of two sequences.",
        wrong_at(2),
        rf"{AWAY}, by path reference at 2 rows",
    ),
    "layer_replaced_by_the_run": Weights(
        "A run leaves a layer that multiplies by a copy, when the model's probes have been taken.",
        swap(latency, "run", run_and_replace),
        NOT_DOUBLED,
    ),
    "gemm_wrong_in_batches": Weights(
        "The product takes other scales for [1, M, K] than for [M, K].",
        swap(fp8linear, "fp8_linear_op", wrong_in_batches),
        AWAY,
    ),
    "mlps_dropped_by_the_run": Weights(
        "A run drops the MLPs of its model, whose probes have been taken.",
        swap(latency, "run", drop_and_run),
        r"the output of model\.layers\.0\.mlp\.down_proj reaches no logit",
    ),
    "gemm_measures_another_layer": Loud(
        "The runner of products measures a layer under another's name.",
        swap(gemm, "products", products_renamed),
        r"The layer measured as \S+ is another layer of the model",
        "fp8_products",
    ),
    "gemm_leaves_a_shape_out": Loud(
        "The runner of products measures all shapes but one.",
        swap(gemm, "products", lambda model: _PRODUCTS(model)[1:]),
        r"as one product \d+ times, but 0 would be measured",
        "fp8_products",
    ),
    "weights_changed_in_a_layer_between_samples": Weights(
        "The scales of a layer that no sample is of are changed after loading.",
        after_load(layer_between),
        r"layers\.2\.mlp\.down_proj: codes or scales are not those that the layer was loaded with",
    ),
    "weights_quantized_wrongly_in_a_layer_between_samples": Weights(
        "The scales of a layer that no sample is of are wrong from the beginning.",
        quantized_wrongly_between,
        r"layers\.2\.self_attn\.q_proj: stored values were made up to .* from the native weight",
    ),
    "weights_held_twice_in_a_layer": LoudWeights(
        "Each FP8 layer keeps a 16-bit copy of its weight.",
        after_load(copy_in_a_layer),
        r"q_proj holds \d+ B beside its codes, in shadow: its weight a second time",
    ),
    "weights_held_twice_in_the_model": LoudWeights(
        "The model keeps 16-bit copies of its FP8 weights outside of the layers.",
        after_load(copy_in_the_model),
        r"the model holds \d+ B outside its parameters, in shadows",
    ),
    "norm_changed_at_load": Weights(
        "The last norm, which stays native, is changed after loading.",
        after_load(lambda m: named(m, "model.norm.weight").mul_(1.01)),
        r"model\.norm\.weight, which is native, is not what was loaded",
    ),
    "output_layer_changed_at_load": Weights(
        "The output layer, which stays native, is changed after loading.",
        after_load(lambda m: named(m, "lm_head.weight").mul_(1.01)),
        r"lm_head\.weight, which is native, is not what was loaded",
    ),
    "bias_changed_at_load": Fault(
        "The bias of an FP8 layer is changed after loading.",
        after_load(lambda m: named(m, "layers.2.self_attn.k_proj.bias").zero_()),
        r"layers\.2\.self_attn\.k_proj\.bias, which is native, is not what was loaded",
        "fp8_biases",
    ),
    "mlp_output_dropped": Weights(
        "The MLP of each layer is computed, and its output thrown away.",
        swap(LlamaMLP, "forward", lambda self, x: torch.zeros_like(_MLP(self, x))),
        r"the output of model\.layers\.0\.mlp\.gate_proj reaches no logit",
    ),
}
