"""Whether times were measured on one machine. Times of different machines are never pooled.

A machine is a host name, a boot and a GPU: two boots of one name may be two machines, and two GPUs of one
type are two devices. Records without a host count as one machine.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Environment = Mapping[str, Any]


def apart(environments: Iterable[Environment]) -> str:
    """Why times of these environments are not pooled, as a predicate of a plural subject, or "".

    `were measured on different hosts (a, b), whose times are never pooled`
    """
    found = list(environments)
    hosts, boots = [e.get("host") for e in found], [e.get("boot_id") for e in found]
    for values, missing, where, why in (
        (hosts, "unnamed", "on different hosts", "whose times are never pooled"),
        (boots, "unknown", "in different boots of {0}", "which may be two machines of one name"),
        ([_gpu(e) for e in found], "none", "on different GPUs of {0}", "whose times are never pooled"),
    ):
        distinct = list(dict.fromkeys(values))
        if len(distinct) > 1:
            listed = ", ".join(str(value or missing) for value in distinct)
            return f"were measured {where.format(hosts[0])} ({listed}), {why}"
    return ""


def names(environments: Iterable[Environment]) -> list[str]:
    """The named hosts, in order of appearance."""
    return [str(host) for host in dict.fromkeys(e.get("host") for e in environments) if host]


def _gpu(environment: Environment) -> Any:
    """The id of the GPU in use: the first visible one."""
    gpus = environment.get("gpus") or ()
    return gpus[0].get("uuid") if gpus and environment.get("device") == "cuda" else None
