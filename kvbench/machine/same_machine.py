"""Whether times were taken on one machine: those of several are never joined into one number. Pure.

A machine is a host by its name, as it was booted, and the GPU that ran: two boots of one name may be two machines, and two GPUs of one
type are two devices. A record of before hosts were recorded names none; such records are of one machine among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Environment = Mapping[str, Any]


def apart(environments: Iterable[Environment]) -> str:
    """Why times measured under these environments are not joined, to be read after a subject in the plural, or "".

    `were measured on different hosts (a, b), whose times are never pooled`
    """
    found = list(environments)
    hosts = _distinct(e.get("host") for e in found)
    if len(hosts) > 1:
        named = ", ".join(str(host or "one that is not named") for host in hosts)
        return f"were measured on different hosts ({named}), whose times are never pooled"
    boots = _distinct(e.get("boot_id") for e in found)
    if len(boots) > 1:
        named = ", ".join(str(boot or "unknown") for boot in boots)
        return (
            f"were measured in different boots of {hosts[0]} ({named}), which may be two machines of one name"
        )
    gpus = _distinct(_gpu(e) for e in found)
    if len(gpus) > 1:
        named = ", ".join(str(gpu or "none") for gpu in gpus)
        return f"were measured on different GPUs of {hosts[0]} ({named}), whose times are never pooled"
    return ""


def names(environments: Iterable[Environment]) -> list[str]:
    """The hosts that are named, in the order in which they come."""
    return [str(host) for host in _distinct(e.get("host") for e in environments) if host]


def _gpu(environment: Environment) -> Any:
    """The id of the GPU that runs: the first visible one."""
    gpus = environment.get("gpus") or ()
    return gpus[0].get("uuid") if gpus and environment.get("device") == "cuda" else None


def _distinct(values: Iterable[Any]) -> Sequence[Any]:
    return list(dict.fromkeys(values))
