"""The matrix of a command, with the facts of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.cli.options import check_data_dir


def load_matrix(
    matrix: Path,
    overrides: list[str],
    select: str | None,
    data_dir: Path | None,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
    device: str | None = None,
) -> tuple[Any, Mapping[str, Any]]:
    """The matrix and this machine's environment. device: what `device: auto` means instead of this
    machine's."""
    from kvbench.data.fingerprint import fingerprint as data_fingerprint
    from kvbench.machine.host import host
    from kvbench.matrix.load import load
    from kvbench.models.source import fingerprint as model_fingerprint

    check_data_dir(data_dir)
    here = replace(host(), device=device) if device else host()
    loaded = load(
        matrix,
        overrides,
        select,
        host=here,
        fingerprint_model=model_fingerprint,
        fingerprint_data=lambda name, split: data_fingerprint(name, data_dir, split),
        sizes=sizes or {},
    )
    return loaded, here.environment


def policy_for(gate: Path | None, loaded: Any) -> Any:
    """The policy of --gate, else the one that the matrix names; None without either."""
    from kvbench.gate import policy

    path = gate or loaded.gate
    return policy.load(path) if path else None
