"""The `quantization_config` of an FP8 checkpoint with block scales: what it says, and which modules it converts. No torch.

What transformers and vLLM call quant_method "fp8" has several layouts; one is loaded here, and every other is refused
by name. A key that is not known here is refused too: it could change what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UsageError
from kvbench.formats.checkpoint_scales import SCHEME, cache_only

BLOCK = (128, 128)
SKIPPED = "modules_to_not_convert"
# Linear layers that choose experts: a code's error there sends a token elsewhere, so every FP8 checkpoint leaves them.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})

# The scale of a weight, by the names that exporters give it. It multiplies under both.
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
# As safetensors writes dtypes. Anything that starts with F8 is an 8-bit float.
E4M3 = "F8_E4M3"
SCALE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Key -> the values under which the files hold what is read here. None stands for an absent key or null.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": (list(BLOCK),),
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", "e4m3fn", None),
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8", None),
    "modules_to_convert": ([], None),
    "is_checkpoint_fp8_serialized": (True, None),
    "dequantize": (True, False, None),  # how transformers is to load it; says nothing of the files
}
_WHY = {
    "weight_block_size": "without a block size there is one scale a tensor, which is another format",
    "activation_scheme": "given activation scales would be dropped",
    "fmt": "the same byte is another number there (E4M3FNUZ halves it), or another format",
}
# The list of modules that stay native, by its two names.
_LISTS = (SKIPPED, "ignored_layers")


@dataclass(frozen=True)
class Fp8Config:
    """FP8 E4M3FN weights with one scale a 128x128 block, activations quantized when they come.

    skipped: the config's list of modules that stay native; empty where it has an empty one or none. ue8m0: scales are
    powers of two, in one byte or in float32.
    """

    skipped: tuple[str, ...] = ()
    ue8m0: bool = False
    block: tuple[int, int] = BLOCK

    def skips(self, name: str) -> bool:
        """Whether a module (its full dotted name) is on the list."""
        return any(matches(pattern, name) for pattern in self.skipped)

    def as_dict(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                "weight_block_size": list(self.block), SKIPPED: list(self.skipped)}  # fmt: skip


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the module, one that holds it, or its last components; whole components only.

    `mlp.gate` is `model.layers.0.mlp.gate` and not `model.layers.0.mlp.gate_proj`. transformers also takes a pattern as
    a regular expression and as any last letters of a name; where that makes a difference, the file's dtypes disagree
    with the config as it is read here, and that is an error.
    """
    pairs = [(pattern, name), (pattern.removeprefix("model."), name.removeprefix("model."))]
    return name.endswith("." + pattern) or any(n == p or n.startswith(p + ".") for p, n in pairs)


def routers(names: Collection[str]) -> frozenset[str]:
    """Those modules that choose experts: by their name, and by experts beside them. A dense layer may be called `gate` too.

    names: dotted names of modules or of tensors in them.
    """
    mixtures = {f".{name}.".partition(".experts.")[0][1:] for name in names if ".experts." in f".{name}."}
    modules = {name.removesuffix(".weight") for name in names}
    parts = {name: name.rpartition(".") for name in modules}
    return frozenset(n for n, (parent, _, last) in parts.items() if last in _ROUTERS and parent in mixtures)


def fp8_config(config: Mapping[str, Any], name: str) -> Fp8Config | None:
    """What config.json says of its weights: None for native ones, also where the cache is quantized and nothing else. Raises
    UsageError for any other quantization."""
    said = config.get("quantization_config")
    if said is None or said == {}:
        return None
    if not isinstance(said, Mapping):
        raise _refused(name, "quantization_config", said, "a mapping", "")
    if cache_only(said):
        return None
    for key, accepted in _ACCEPTED.items():
        value = said.get(key)
        if isinstance(value, tuple):
            value = list(value)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            raise _refused(name, key, value, " or ".join(_shown(one) for one in accepted), _WHY.get(key, ""))
    known = (*_ACCEPTED, *_LISTS, SCHEME)
    unknown = sorted(k for k, v in said.items() if v is not None and k not in known)
    if unknown:
        other = f"no key but {', '.join(known)}"
        raise _refused(name, unknown[0], said[unknown[0]], other, "it could change what bytes mean")
    return Fp8Config(_skipped(said, name), said.get("scale_fmt") == "ue8m0")


def _skipped(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    given = {key: said[key] for key in _LISTS if said.get(key) is not None}
    for key, value in given.items():
        fits = isinstance(value, Sequence) and not isinstance(value, str)
        if not fits or not all(isinstance(item, str) and item.strip(".") for item in value):
            raise _refused(name, key, value, "a list of module names", "")
    if len(given) > 1 and len({tuple(value) for value in given.values()}) > 1:
        raise _refused(name, _LISTS[1], given[_LISTS[1]], f"the same list as {_LISTS[0]}, or neither", "")
    return tuple(next(iter(given.values()), ()))


def _shown(value: Any) -> str:
    return "no value" if value is None else str(value)


def _refused(name: str, key: str, value: Any, accepted: str, why: str) -> UsageError:
    shown = str(value)
    shown = shown if len(shown) <= 80 else shown[:80] + "..."
    where = "config.json" if key == "quantization_config" else "quantization_config"
    what = f"in its {where} {key} is {'not given' if value is None else shown}"
    return UsageError(
        f"The checkpoint {name} is already quantized, in a way that is not loaded here: {what}, "
        f"accepted is {accepted}{f' ({why})' if why else ''}. Give an FP8 checkpoint with 128x128 block scales, or the "
        "unquantized checkpoint, of which `kvbench quantize` makes one."
    )


def not_native(name: str) -> UsageError:
    """An FP8 checkpoint in a cell with native weights."""
    return UsageError(
        f"The checkpoint {name} is already quantized (fp8, 128x128 blocks), so it cannot be loaded as weights: native; its "
        "native weights are not in it, and dequantized ones are not native. Name the model that cells with native weights "
        f"run on, model: {{source: {name}, native: THE_UNQUANTIZED_MODEL}}, or write weights: fp8_block128."
    )


def converted_modules(
    config: Fp8Config,
    linears: Sequence[str],
    names: Collection[str],
    head: str | None,
    stored: Collection[str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the linear layers that the checkpoint holds as FP8, in order; warnings as sentences).

    linears: dotted names of the plain linear layers; names: those of all modules, parameters and buffers. head: the
    output layer, None where it is tied to the embedding and so native. stored: modules whose weight the files hold as
    FP8; asked of the head only, which stays native in most checkpoints whether they list it or not.
    """
    converted = tuple(name for name in linears if not config.skips(name) and (name != head or name in stored))
    warnings = tuple(
        f"{SKIPPED} lists {pattern!r}, which is no module of the model: nothing stays native because of it."
        for pattern in config.skipped
        if not any(matches(pattern, name) for name in names)
    )
    return converted, warnings
