"""Records and manifests of older schemas, lifted version by version to today's.

What an older version did not look at is not made up: a level of evidence that it did not have becomes `unverified` with that
reason, so a lifted record is reported and compared like any other and passes no precision check. Filled in are only keys that
did not exist, with the value that stands for "nothing was asked": the code of the time had no other way.

    schema 1   the first: formats, decision, evidence E1 to E3, samples; soon decode and compile too, and E4 and E5
    schema 2   E4 and E5 in every record; cells know kv_splits, decode and compile
    schema 3   weights: evidence of their own (E1-weights to E5-weights, effective_weights), the path of their products (gemm), the
               unquantized model beside an FP8 checkpoint (native_model)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Data = dict[str, Any]

# The levels that a record of each version must have, and older ones may lack.
_LEVELS_2 = ("E3-prefill", "E4", "E5")
_LEVELS_3 = ("E1-weights", "E2-weights", "E3-weights", "E4-weights", "E5-weights")


def _record_to_2(data: Data) -> Data:
    """Records of the first hours know nothing of graphs and compiled layers, which did not exist: steps were eager."""
    lifted = {**data, "spec": _spec_2(data["spec"]), "schema": 2}
    if data["decision"] is not None:
        lifted["decision"] = {
            "decode": _choice("auto", "eager"),
            "compile": _choice("auto", "off"),
            **data["decision"],
        }
    if data["evidence"] is not None:
        lifted["evidence"] = _with_levels(data["evidence"], _LEVELS_2, 2)
    return lifted


def _record_to_3(data: Data) -> Data:
    """What the weights really were is unknown: nothing looked at them. An old record that says so all the same was changed by hand."""
    lifted = {**data, "spec": _spec_3(data["spec"]), "schema": 3}
    if data["decision"] is not None:
        native = data["decision"]["weights"]["resolved"] == "native"
        lifted["decision"] = {"gemm": _choice("auto", "native" if native else "unknown"), **data["decision"]}
    if data["evidence"] is not None:
        kept = [one for one in data["evidence"]["levels"] if one["name"] not in _LEVELS_3]
        levels = _with_levels({**data["evidence"], "levels": kept}, _LEVELS_3, 3)
        lifted["evidence"] = {**levels, "effective_weights": "unknown"}
    return lifted


def _manifest_to_2(data: Data) -> Data:
    return _with_specs(data, _spec_2, 2)


def _manifest_to_3(data: Data) -> Data:
    return _with_specs(data, _spec_3, 3)


def _spec_2(spec: Mapping[str, Any]) -> Data:
    return {**spec, **_missing(spec, {"kv_splits": None, "decode": "auto", "compile": "auto"})}


def _spec_3(spec: Mapping[str, Any]) -> Data:
    return {**spec, **_missing(spec, {"native_model": None, "gemm": "auto"})}


def _missing(data: Mapping[str, Any], defaults: Data) -> Data:
    return {key: value for key, value in defaults.items() if key not in data}


def _with_specs(data: Data, lift: Callable[[Mapping[str, Any]], Data], version: int) -> Data:
    parts = {key: [{**one, "spec": lift(one["spec"])} for one in data[key]] for key in ("cells", "tasks")}
    return {**data, **parts, "schema": version}


def _choice(requested: str, resolved: str) -> Data:
    return {
        "requested": requested,
        "resolved": resolved,
        "reason": "before_this_choice",
        "rejected": [],
        "sentence": "The record is older than this choice.",
    }


def _with_levels(evidence: Mapping[str, Any], names: Iterable[str], since: int) -> Data:
    sentence = f"not looked at: the record is older than schema {since}, the first with this evidence; run the matrix again"
    have = {level["name"] for level in evidence["levels"]}
    added = [
        {"name": name, "state": "unverified", "sentence": sentence, "facts": {}}
        for name in names
        if name not in have
    ]
    return {**evidence, "levels": [*evidence["levels"], *added]}


# By the version that is read: what makes it one of the next.
RECORDS: dict[int, Callable[[Data], Data]] = {1: _record_to_2, 2: _record_to_3}
MANIFESTS: dict[int, Callable[[Data], Data]] = {1: _manifest_to_2, 2: _manifest_to_3}


def lift(data: Data, steps: Mapping[int, Callable[[Data], Data]]) -> Data:
    """`data` as the newest version that `steps` lead to; a version that they do not know stays as it is.

    Raises KeyError, TypeError or AttributeError where it is not what its version says.
    """
    while type(version := data.get("schema")) is int and version in steps:
        data = steps[version](data)
    return data
