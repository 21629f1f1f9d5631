"""Loads a checkpoint whose linear layers are FP8 with block scales; codes and scales keep their stored
dtypes.

transformers' own quantizer is not used: without a GPU it dequantizes, and it loads unknown tensors as plain
numbers. Here the files and the config must agree on every tensor, every scale must have exactly its shape,
and every key must be used; anything else is an error that names the key.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.engines.reference.weights.blocks import Sample, checksum, sampled, samples_of_checkpoint
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.engines.reference.weights.tensor_files import TensorFiles, check_finite
from kvbench.errors import KvbenchError
from kvbench.formats import fp8_checkpoint as stored_as
from kvbench.formats.checkpoint_scales import of_cache
from kvbench.formats.fp8_checkpoint import E4M3, SKIPPED, Fp8Config
from kvbench_kernels.gemm.blockwise import BLOCK, scale_shape
from kvbench_kernels.kv.quantize import E4M3_MAX


@dataclass(frozen=True)
class Fp8Model:
    """converted: names of the FP8 layers, in order. scale_dtypes: dtype in the files -> number of scales.
    cache_scales: names of the KV cache scales in the files, which no module takes."""

    model: Any
    converted: tuple[str, ...]
    warnings: tuple[str, ...]
    scale_dtypes: dict[str, int]
    samples: tuple[Sample, ...]
    checksums: dict[str, int]
    cache_scales: tuple[str, ...]


def load_fp8(
    name: str,
    folder: Path,
    config: Any,
    fp8: Fp8Config,
    device: torch.device,
    dtype: torch.dtype,
    remote: bool,
) -> Fp8Model:
    """The model of `folder` on `device`: FP8 tensors stay FP8, all others become `dtype`. name: as the user
    wrote it. config: transformers' config of the folder; fp8: its quantization_config. remote: whether the
    folder's code may run. Raises KvbenchError naming the key."""
    model = _skeleton(config, dtype, remote)
    where = "cpu" if device.type == "cpu" else str(device)
    with TensorFiles(folder, where) as files:
        files.ignore([*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"])
        plan = _plan(name, model, files, fp8)
        dtypes: Counter[str] = Counter()
        kept, samples, checksums = sampled(list(plan.scales)), list[Sample](), dict[str, int]()
        for module_name, scale_key in plan.scales.items():
            linear = model.get_submodule(module_name)
            codes = read_codes(name, files, f"{module_name}.weight", tuple(linear.weight.shape))
            scales, stored_dtype = read_scales(name, files, scale_key, codes, fp8)
            dtypes[stored_dtype] += 1
            checksums[module_name] = checksum(codes, scales)
            if module_name in kept:  # read again, untouched by what the loader does to codes and scales
                raw = files.read(f"{module_name}.weight"), files.read(scale_key)
                samples += samples_of_checkpoint(module_name, *raw)
            model.set_submodule(module_name, Fp8Linear(codes, scales, linear.bias))
        for key, stored_key in plan.native.items():
            tensor = _native(name, files, key, stored_key, model, dtype)
            parent_name, _, attribute = key.rpartition(".")
            parent = model.get_submodule(parent_name)
            is_buffer = attribute in parent._buffers
            setattr(parent, attribute, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
        _check_ties(name, files, plan.ties)
    model.tie_weights()
    model.to(device)  # the buffers that no file holds
    warnings = plan.warnings
    if exact := dtypes["float8_e8m0fnu"]:
        how = "powers of two in one byte (E8M0); they are held as float32, which is exact."
        warnings = (*warnings, f"{exact} scale tensors of the checkpoint are {how}")
    found = (tuple(plan.scales), warnings, dict(dtypes), tuple(samples), checksums, plan.cache_scales)
    return Fp8Model(model, *found)


def _skeleton(config: Any, dtype: torch.dtype, remote: bool) -> Any:
    """The model without memory for its parameters. Buffers that no file holds (rotary) are real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if hasattr(config, "quantization_config"):
        del config.quantization_config  # plain modules, which are replaced below
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote)


@dataclass(frozen=True)
class _Plan:
    """scales: FP8 layer -> its scale's key. native: the model's key -> the files'. ties: pairs held twice."""

    scales: dict[str, str]
    native: dict[str, str]
    warnings: tuple[str, ...]
    ties: list[tuple[str, str]]
    cache_scales: tuple[str, ...]


def _plan(name: str, model: Any, files: TensorFiles, fp8: Fp8Config) -> _Plan:
    """Which key is read for what. Raises KvbenchError where the files, the config and the model disagree."""
    modules = dict(model.named_modules())
    stored_fp8 = {key: key.removesuffix(".weight") for key in files.fp8()}
    tied: dict[str, str] = model.all_tied_weights_keys  # target -> source
    head = next((n for n, m in modules.items() if m is model.get_output_embeddings()), None)
    linears = [n for n, m in modules.items() if type(m) is nn.Linear and f"{n}.weight" not in tied]
    known = {*modules, *(n for n, _ in model.named_parameters()), *(n for n, _ in model.named_buffers())}
    converted, warnings = stored_as.converted_modules(fp8, linears, known, head, stored_fp8.values())
    for key, module_name in stored_fp8.items():
        if module_name not in converted:
            raise KvbenchError(_unexpected_fp8(name, key, modules, fp8, tied))
    scales = {module_name: _scale_key(name, files, module_name) for module_name in converted}
    native, ties = _native_keys(name, model, files, set(converted), tied)
    used = {*scales.values(), *native.values(), *(f"{m}.weight" for m in converted), *(t for t, _ in ties)}
    left = set(files.stored) - used
    cache_scales = tuple(sorted(key for key in left if of_cache(key)))
    _check_all_used(name, left.difference(cache_scales))
    return _Plan(scales, native, warnings, ties, cache_scales)


def _unexpected_fp8(
    name: str, key: str, modules: dict[str, nn.Module], fp8: Fp8Config, tied: dict[str, str]
) -> str:
    """The sentence for a tensor that the files hold as FP8 and the model cannot."""
    what, module_name = f"The checkpoint {name} holds {key} as FP8, but ", key.removesuffix(".weight")
    module = modules.get(module_name)
    if module is not None and fp8.skips(module_name):
        listed = f"{SKIPPED} in its config.json lists {module_name} as native"
        return f"{what}{listed}. Correct the one or the other."
    if key in tied:
        return f"{what}its config.json ties it to {tied[key]}, which is native. Correct tie_word_embeddings."
    kind = "of no plain nn.Linear of the model" if module is None else f"of a {type(module).__name__}"
    return (
        f"{what}it is {kind}: only plain nn.Linear layers are run in FP8 (no experts of a mixture, no "
        "fused modules). Give a dense model, or the unquantized checkpoint."
    )


def _scale_key(name: str, files: TensorFiles, module_name: str) -> str:
    """The key of a converted layer's scale; the layer must be FP8 in the files and have exactly one."""
    weight = f"{module_name}.weight"
    wanted = [f"{module_name}.{scale}" for scale in stored_as.SCALE_NAMES]
    there = [key for key in wanted if key in files.stored]
    stored = files.stored.get(weight)
    if stored is None:
        advice = "fetch it again, or correct its config.json."
        raise KvbenchError(f"The checkpoint {name} has no {weight}; {advice}")
    if not stored.dtype.startswith("F8"):
        raise KvbenchError(
            f"The checkpoint {name} holds {weight} as {stored.dtype}, {'with' if there else 'without'} a "
            f"scale, but its config.json says FP8 for it. List {module_name} in {SKIPPED} if it is native, "
            "or export the checkpoint again."
        )
    if len(there) != 1:
        found = f"both {there[0]} and {there[1]}" if there else f"neither {wanted[0]} nor {wanted[1]}"
        raise KvbenchError(
            f"The checkpoint {name} holds {found} for the FP8 weight {weight}; it must hold one of the "
            "two. Export it again."
        )
    return there[0]


def _native_keys(
    name: str, model: Any, files: TensorFiles, converted: set[str], tied: dict[str, str]
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """(the model's key -> the files' key, for native tensors; tied pairs that the files hold twice)."""
    weights = {f"{module_name}.weight" for module_name in converted}
    native = {key: key for key in model.state_dict() if key not in weights and key not in tied}
    ties = []
    for target, source in tied.items():
        if target in files.stored and source not in files.stored:
            native[source] = target  # either key may be stored for both
        elif target in files.stored:
            ties.append((target, source))
    missing = sorted(key for key, stored in native.items() if stored not in files.stored)
    if missing:
        raise KvbenchError(
            f"The checkpoint {name} has {len(missing)} missing keys, the first is {missing[0]}; the model "
            "would run on random numbers there. Fetch the checkpoint again, or correct its config.json."
        )
    return native, ties


def _check_all_used(name: str, left: set[str]) -> None:
    """An unused scale means that a weight is read without it; another unused key means another model."""
    scales = sorted(key for key in left if "scale" in key.rsplit(".", 1)[-1])
    for what, keys in (("scales", scales), ("tensors", sorted(left))):
        if keys:
            shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise KvbenchError(
                f"The checkpoint {name} holds {len(keys)} {what} that nothing in the model uses: {shown}. "
                "Correct its config.json, or export the checkpoint again."
            )


def _native(
    name: str, files: TensorFiles, key: str, stored_key: str, model: Any, dtype: torch.dtype
) -> Tensor:
    """A native tensor in the model's shape, floats as `dtype`."""
    held = model.get_parameter_or_buffer(key)
    stored = files.stored[stored_key]
    if stored.shape != tuple(held.shape):
        raise KvbenchError(
            f"The tensor {stored_key} of the checkpoint {name} has shape {list(stored.shape)}, the model "
            f"wants {list(held.shape)}. Correct config.json, or fetch the checkpoint again."
        )
    tensor = files.read(stored_key)
    if tensor.is_floating_point() != held.is_floating_point():
        raise KvbenchError(
            f"The tensor {stored_key} of the checkpoint {name} is {stored.dtype}, the model wants "
            f"{'floating-point numbers' if held.is_floating_point() else 'whole numbers'}. Export the "
            "checkpoint again."
        )
    check_finite(name, [(stored_key, tensor)])
    return tensor.to(dtype if held.is_floating_point() else held.dtype)


def _check_ties(name: str, files: TensorFiles, ties: list[tuple[str, str]]) -> None:
    for target, source in ties:
        if not torch.equal(files.read(target), files.read(source)):
            raise KvbenchError(
                f"The checkpoint {name} holds {target} and {source} with different values, but its "
                "config.json ties them. Correct tie_word_embeddings in config.json."
            )


_MAGNITUDE = 0x7F  # all bits but the sign; all of them set is the NaN


def read_codes(name: str, files: TensorFiles, key: str, shape: tuple[int, ...]) -> Tensor:
    """The codes of a weight [N, K], float8_e4m3fn; KvbenchError for another dtype or shape, or a NaN code."""
    stored = files.stored[key]
    if stored.dtype != E4M3:
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} is {stored.dtype}; of the 8-bit floats only {E4M3} "
            "is read. Export the checkpoint again, in E4M3FN."
        )
    if stored.shape != shape:
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} has shape {list(stored.shape)}, the model wants "
            f"{list(shape)}. Correct config.json, or fetch the checkpoint again."
        )
    codes = files.read(key)
    broken = (codes.view(torch.uint8) & _MAGNITUDE) == _MAGNITUDE
    if broken.any():
        at = broken.nonzero()[0].tolist()
        byte = int(codes.view(torch.uint8)[tuple(at)])
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} holds nan at index {at} (the byte 0x{byte:02X}, in "
            "E4M3 an overflow when it was exported); no result on such weights means anything. Fetch the "
            "checkpoint again, or export it again."
        )
    return codes


def read_scales(name: str, files: TensorFiles, key: str, codes: Tensor, fp8: Fp8Config) -> tuple[Tensor, str]:
    """(scales of `codes`, dtype name in the file); powers of two in one byte become float32. KvbenchError for
    a wrong shape or dtype, and for a scale that cannot be right (`_check_scales`)."""
    stored, wanted = files.stored[key], scale_shape(*codes.shape)
    if stored.shape != wanted:
        raise KvbenchError(
            f"The scales {key} of the checkpoint {name} have shape {list(stored.shape)}; a weight "
            f"{list(codes.shape)} in {BLOCK}x{BLOCK} blocks has scales {list(wanted)}. Export the "
            "checkpoint again."
        )
    scales = files.read(key)
    if fp8.ue8m0 and scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    dtype = str(scales.dtype).removeprefix("torch.")
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.float()
    elif dtype not in stored_as.SCALE_DTYPES.values():
        accepted = ", ".join([*stored_as.SCALE_DTYPES.values(), "float8_e8m0fnu"])
        raise KvbenchError(
            f"The scales {key} of the checkpoint {name} are {dtype}; accepted are {accepted}. Export the "
            "checkpoint again."
        )
    _check_scales(name, key, codes, scales, fp8)
    return scales, dtype


def _check_scales(name: str, key: str, codes: Tensor, scales: Tensor, fp8: Fp8Config) -> None:
    values = scales.float()
    wrong, why = ~values.isfinite() | (values < 0), "a scale is a finite number above 0"
    if not wrong.any():
        wrong, why = ~(values * E4M3_MAX).isfinite(), "times 448, the largest code, it overflows float32"
    if not wrong.any() and (values == 0).any():
        wrong, why = _zero_over_codes(codes, values), "the codes of that block are not all 0"
    if not wrong.any() and fp8.ue8m0:
        wrong, why = torch.frexp(values).mantissa != 0.5, "scale_fmt ue8m0 says powers of two"
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise KvbenchError(
            f"The scales {key} of the checkpoint {name} hold {values[tuple(at)].item()} at index {at}; "
            f"{why}. Export the checkpoint again."
        )


def _zero_over_codes(codes: Tensor, values: Tensor) -> Tensor:
    """Whether a block's scale is 0 and a code of it is not: bool, in the scales' shape."""
    wrong = values == 0
    for row, column in wrong.nonzero().tolist():
        block = codes[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        wrong[row, column] = bool((block.view(torch.uint8) & _MAGNITUDE).any())
    return wrong
