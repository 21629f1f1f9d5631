"""Whether times were measured on one machine. Times of different machines are never pooled.

A machine is a host name, a boot and a GPU: two boots of one name may be two machines, and two GPUs of one
type are two devices. Records without a host count as one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Environment = Mapping[str, Any]


def apart(environments: Iterable[Environment]) -> str:
    """Why times of these environments are not pooled, as a predicate of a plural subject, or "".

    `were measured on different hosts (a, b), whose times are never pooled`
    """
    found = list(environments)
    hosts = _distinct(e.get("host") for e in found)
    if len(hosts) > 1:
        return f"were measured on different hosts ({_listed(hosts, 'unnamed')}), whose times are never pooled"
    boots = _distinct(e.get("boot_id") for e in found)
    if len(boots) > 1:
        listed = _listed(boots, "unknown")
        return (
            f"were measured in different boots of {hosts[0]} ({listed}), which may be two machines of one "
            "name"
        )
    gpus = _distinct(_gpu(e) for e in found)
    if len(gpus) > 1:
        listed = _listed(gpus, "none")
        return f"were measured on different GPUs of {hosts[0]} ({listed}), whose times are never pooled"
    return ""


def _listed(values: Iterable[Any], missing: str) -> str:
    return ", ".join(str(value or missing) for value in values)


def names(environments: Iterable[Environment]) -> list[str]:
    """The named hosts, in order of appearance."""
    return [str(host) for host in _distinct(e.get("host") for e in environments) if host]


def _gpu(environment: Environment) -> Any:
    """The id of the GPU in use: the first visible one."""
    gpus = environment.get("gpus") or ()
    return gpus[0].get("uuid") if gpus and environment.get("device") == "cuda" else None


def _distinct(values: Iterable[Any]) -> Sequence[Any]:
    return list(dict.fromkeys(values))
