"""A cell from keyword arguments, for callers without a matrix: the same keys, values and refusals."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.formats.scales import STATIC, of_file, read
from kvbench.machine.host import Host
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.expand import resolve_auto
from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.matrix.rules import accepted
from kvbench.text import suggestion

# Argument -> cell key, where lm-eval's models use another name.
RENAMED = {"pretrained": "model", "revision": "model_revision"}
_NOT_TAKEN = ("batch", "context", "native_model", "model_weights", "prefill_reads", "fallback")

ARGUMENTS: dict[str, str] = {
    **RENAMED,
    **{key: key for key in CELL_KEYS if key not in _NOT_TAKEN and key not in RENAMED.values()},
}


def check_known(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError for an unknown argument, which would otherwise be ignored silently."""
    names = list(known)
    for name in given:
        if name not in names:
            raise UsageError(
                f"The argument {name} is not known; accepted are {', '.join(names)}.{suggestion(name, names)}"
            )


def cell_of(given: Mapping[str, Any], host: Host) -> dict[str, Any]:
    """The full spec of the cell that the arguments (keys of `ARGUMENTS`) describe, on this machine."""
    spec = dict(CELL_KEYS)
    for name, value in given.items():
        spec[ARGUMENTS[name]] = accepted(CELL_OPTIONS[ARGUMENTS[name]], value, name)
    if spec["model"] is None:
        raise UsageError("The argument pretrained is missing; give a name, folder or .gguf file of a model.")
    _settle_scale(spec)
    if spec["weights"] == "native" and spec["gemm"] != "auto":
        raise UsageError(
            f"gemm={spec['gemm']} is given, but native weights have no FP8 product; leave it out, or set "
            "weights=fp8_block128."
        )
    return resolve_auto(spec, host)


def dropped(given: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """A sentence on the first argument whose value in the cell differs from the given one, or ""; auto and a
    file of scales become this machine's value and its scales.
    """
    for name, value in given.items():
        key = ARGUMENTS[name]
        expected = accepted(CELL_OPTIONS[key], value, name)
        auto = key in ("device", "dtype") and expected == "auto"
        from_file = key == "scale" and isinstance(expected, str) and expected.endswith(".json")
        if not (auto or from_file) and spec[key] != expected:
            return f"{name}={expected} was given, but the cell has {key}={spec[key]}: it was changed."
    return ""


def _settle_scale(spec: dict[str, Any]) -> None:
    """Check that static formats, and no others, have a scale, and read a file of scales."""
    name, scale = spec["kv_format"], spec["scale"]
    if name in STATIC and scale is None:
        how = "add one, as in scale=0.05, scale=checkpoint or scale=FILE.json"
        raise UsageError(f"kv_format={name} needs a scale; {how}.")
    if name not in STATIC and scale is not None:
        takes = f"the static formats do: {', '.join(STATIC)}"
        raise UsageError(f"A scale is given, but kv_format={name} takes none; {takes}.")
    if isinstance(scale, str) and scale.endswith(".json"):
        spec["scale"] = read(Path(scale))
        if (made_for := (of_file(spec["scale"]) or {}).get("format")) != name:
            raise UsageError(
                f"The scale file {scale} is for {made_for}, but kv_format is {name}; calibrate for it: "
                f"kvbench calibrate MODEL OUT.json --format {name}."
            )
