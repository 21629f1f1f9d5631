"""The `quantization_config` of an FP8 checkpoint with block scales, and what it converts. No torch here.

One layout of quant_method "fp8" is loaded; every other one and every unknown key is refused by name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UsageError
from kvbench.formats.checkpoint_scales import SCHEME, cache_only

BLOCK = (128, 128)
SKIPPED = "modules_to_not_convert"
# Linear layers that choose experts. An error there sends a token to other experts, so FP8 checkpoints keep
# them native.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})

# Names of a weight's scale. It multiplies under both.
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
# dtypes as safetensors writes them. A name that starts with F8 is an 8-bit float.
E4M3 = "F8_E4M3"
SCALE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Key -> accepted values. None: an absent key, or null.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": (list(BLOCK),),
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", "e4m3fn", None),
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8", None),
    "modules_to_convert": ([], None),
    "is_checkpoint_fp8_serialized": (True, None),
    "dequantize": (True, False, None),  # how transformers loads it; the files are the same
}
_WHY = {
    "weight_block_size": "without a block size there is one scale per tensor, which is another format",
    "activation_scheme": "static activation scales would be dropped",
    "fmt": "a byte means another number in other formats (E4M3FNUZ halves it)",
}
# The two names of the list of modules that stay native.
_LISTS = (SKIPPED, "ignored_layers")


@dataclass(frozen=True)
class Fp8Config:
    """FP8 E4M3FN weights in 128x128 blocks. skipped: native modules. ue8m0: scales are powers of two."""

    skipped: tuple[str, ...] = ()
    ue8m0: bool = False
    block: tuple[int, int] = BLOCK

    def skips(self, name: str) -> bool:
        """Whether a module, by its full dotted name, is on the list."""
        return any(matches(pattern, name) for pattern in self.skipped)

    def as_dict(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                "weight_block_size": list(self.block), SKIPPED: list(self.skipped)}  # fmt: skip


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the module, a module around it, or its last whole components. transformers
    reads a pattern in more ways; where that differs, the dtypes in the files disagree, which is an error.
    """
    pairs = [(pattern, name), (pattern.removeprefix("model."), name.removeprefix("model."))]
    return name.endswith("." + pattern) or any(n == p or n.startswith(p + ".") for p, n in pairs)


def routers(names: Collection[str]) -> frozenset[str]:
    """The modules that choose experts, by their name and the experts next to them (a dense layer may be
    called `gate` too). names: dotted names of modules or of their tensors.
    """
    mixtures = {f".{name}.".partition(".experts.")[0][1:] for name in names if ".experts." in f".{name}."}
    modules = {name.removesuffix(".weight") for name in names}
    parts = {name: name.rpartition(".") for name in modules}
    return frozenset(n for n, (parent, _, last) in parts.items() if last in _ROUTERS and parent in mixtures)


def fp8_config(config: Mapping[str, Any], name: str) -> Fp8Config | None:
    """The FP8 config of a config.json, or None for native weights, also where only the cache is quantized.
    Raises UsageError for any other quantization.
    """
    given = config.get("quantization_config")
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping):
        raise _refused(name, "quantization_config", given, "a mapping", "")
    if cache_only(given):
        return None
    for key, accepted in _ACCEPTED.items():
        value = list(given[key]) if isinstance(given.get(key), tuple) else given.get(key)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            shown = " or ".join("no value" if one is None else str(one) for one in accepted)
            raise _refused(name, key, value, shown, _WHY.get(key, ""))
    known = (*_ACCEPTED, *_LISTS, SCHEME)
    if unknown := sorted(k for k, v in given.items() if v is not None and k not in known):
        only, why = f"only the keys {', '.join(known)}", "another key could change what the bytes mean"
        raise _refused(name, unknown[0], given[unknown[0]], only, why)
    return Fp8Config(_skipped(given, name), given.get("scale_fmt") == "ue8m0")


def _skipped(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    given = {key: config[key] for key in _LISTS if config.get(key) is not None}
    for key, value in given.items():
        fits = isinstance(value, Sequence) and not isinstance(value, str)
        if not fits or not all(isinstance(item, str) and item.strip(".") for item in value):
            raise _refused(name, key, value, "a list of module names", "")
    if len(given) > 1 and len({tuple(value) for value in given.values()}) > 1:
        raise _refused(name, _LISTS[1], given[_LISTS[1]], f"the same list as {_LISTS[0]}, or neither", "")
    return tuple(next(iter(given.values()), ()))


def _refused(name: str, key: str, value: Any, accepted: str, why: str) -> UsageError:
    shown = "not given" if value is None else f"{value!s:.80}"
    where = "config.json" if key == "quantization_config" else "quantization_config"
    return UsageError(
        f"The checkpoint {name} is already quantized in an unsupported way: in its {where} {key} is "
        f"{shown}, expected {accepted}{f' ({why})' if why else ''}. Give an FP8 checkpoint with 128x128 "
        "block scales, or the unquantized checkpoint, from which `kvbench quantize` makes one."
    )


def not_native(name: str) -> UsageError:
    """The error for an FP8 checkpoint in a cell with native weights."""
    return UsageError(
        f"The checkpoint {name} is already quantized (fp8, 128x128 blocks), so it cannot be loaded as "
        "weights: native. It has no native weights, and dequantized ones are not native. Name the model for "
        f"cells with native weights, model: {{source: {name}, native: THE_UNQUANTIZED_MODEL}}, or write "
        "weights: fp8_block128."
    )


def converted_modules(
    config: Fp8Config,
    linears: Sequence[str],
    names: Collection[str],
    head: str | None,
    stored: Collection[str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the linear layers that the checkpoint holds as FP8, in order; warnings as sentences).

    linears, names: of the linear layers, and of all modules. head: the output layer, None where it is tied.
    stored: modules with an FP8 weight in the files, which decide for the head: few checkpoints list it.
    """
    converted = tuple(name for name in linears if not config.skips(name) and (name != head or name in stored))
    warnings = tuple(
        f"{SKIPPED} lists {pattern!r}, but the model has no such module: the entry has no effect."
        for pattern in config.skipped
        if not any(matches(pattern, name) for name in names)
    )
    return converted, warnings
