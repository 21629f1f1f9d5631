"""What an environment says of the CI system that kvbench runs in, and what that changes.

A GPU that is not there is a fact of a laptop and a fault of a CI machine: the cells that ask for it are skipped here and fail
there. A bar that moves means nothing in a log.
"""

from __future__ import annotations

from collections.abc import Mapping

REQUIRE_GPU = "KVBENCH_REQUIRE_GPU"
_NO = frozenset({"", "0", "false", "no", "off"})


def says_yes(value: str | None) -> bool:
    return value is not None and value.strip().lower() not in _NO


def in_ci(environ: Mapping[str, str]) -> bool:
    """Whether `CI` is set, as GitHub, GitLab, Buildkite, CircleCI and others do."""
    return says_yes(environ.get("CI"))


def device_required(option: bool | None, environ: Mapping[str, str]) -> bool:
    """Whether a cell that asks for a device that is not here fails: as the command line says, else as
    `KVBENCH_REQUIRE_GPU` says, else in CI."""
    if option is not None:
        return option
    return says_yes(environ[REQUIRE_GPU]) if REQUIRE_GPU in environ else in_ci(environ)
