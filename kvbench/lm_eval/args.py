"""A cell from keyword arguments, for callers that have no matrix: the same keys, values and refusals.

Left out are the keys that a caller's own texts decide (batch, context), what is about a baseline (native_model), and the modes in
which numbers do not come from the stored cache (prefill_reads: fresh) or from another format than was asked for (fallback: allow).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import of_file, read
from kvbench.machine.host import Host
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.expand import resolve_auto
from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.matrix.rules import accepted
from kvbench.text import suggestion

# Argument -> cell key, where lm-eval's models have a name of their own for it.
RENAMED = {"pretrained": "model", "revision": "model_revision"}
_NOT_TAKEN = ("batch", "context", "native_model", "model_weights", "prefill_reads", "fallback")

ARGUMENTS: dict[str, str] = {
    **RENAMED,
    **{key: key for key in CELL_KEYS if key not in _NOT_TAKEN and key not in RENAMED.values()},
}


def check_known(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError for an argument that nothing reads: it would be dropped in silence."""
    names = list(known)
    for name in given:
        if name not in names:
            raise UsageError(
                f"The argument {name} is not known; accepted are {', '.join(names)}.{suggestion(name, names)}"
            )


def cell_of(given: Mapping[str, Any], host: Host) -> dict[str, Any]:
    """The whole spec of the cell that the arguments (keys of `ARGUMENTS`) ask for, device and dtype as this machine has them.

    Raises UsageError for a value that its key does not accept, and for a scale or a path that the format does not take.
    """
    spec = dict(CELL_KEYS)
    for name, value in given.items():
        spec[ARGUMENTS[name]] = accepted(CELL_OPTIONS[ARGUMENTS[name]], value, name)
    if spec["model"] is None:
        raise UsageError(
            "The argument pretrained is missing: a name, folder or .gguf file of a model is due."
        )
    _settle_scale(spec)
    if spec["weights"] == "native" and spec["gemm"] != "auto":
        raise UsageError(
            f"gemm={spec['gemm']} is given, and native weights have no FP8 product; leave it out, or ask for weights=fp8_block128."
        )
    return resolve_auto(spec, host)


def dropped(given: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """The first argument that the cell does not have as it was given, in a sentence, or "".

    auto became what this machine has, and a file of scales the scales in it: those two are not compared.
    """
    for name, value in given.items():
        key = ARGUMENTS[name]
        due = accepted(CELL_OPTIONS[key], value, name)
        settled = (key in ("device", "dtype") and due == "auto") or (
            key == "scale" and isinstance(due, str) and due.endswith(".json")
        )
        if not settled and spec[key] != due:
            return f"{name}={due} was given, and the cell has {key}={spec[key]}: the argument was changed on the way."
    return ""


def _settle_scale(spec: dict[str, Any]) -> None:
    """A static format has a scale, no other one has; a file of scales is read, and is for the format."""
    name, scale = spec["kv_format"], spec["scale"]
    static = [fmt.name for fmt in KV_FORMATS.values() if fmt.scale_kind == "static"]
    if name in static and scale is None:
        raise UsageError(
            f"kv_format={name} needs a scale; add one, as in scale=0.05, scale=checkpoint or scale=FILE.json."
        )
    if name not in static and scale is not None:
        raise UsageError(
            f"A scale is given, and kv_format={name} takes none; the static formats do: {', '.join(static)}."
        )
    if isinstance(scale, str) and scale.endswith(".json"):
        spec["scale"] = read(Path(scale))
        if (made_for := (of_file(spec["scale"]) or {}).get("format")) != name:
            raise UsageError(
                f"The scale file {scale} is for {made_for}, and kv_format is {name}; calibrate for it: kvbench calibrate MODEL "
                f"OUT.json --format {name}."
            )
