"""Whether kvbench runs in CI, and whether a missing device fails the run.

Cells that need a missing GPU are skipped on a laptop, and fail on a CI machine.
"""

from collections.abc import Mapping

REQUIRE_GPU = "KVBENCH_REQUIRE_GPU"
_NO = frozenset({"", "0", "false", "no", "off"})


def says_yes(value: str | None) -> bool:
    return value is not None and value.strip().lower() not in _NO


def in_ci(environ: Mapping[str, str]) -> bool:
    """Whether `CI` is set, as GitHub, GitLab, Buildkite, CircleCI and others do."""
    return says_yes(environ.get("CI"))


def device_required(option: bool | None, environ: Mapping[str, str]) -> bool:
    """Whether a cell whose device is missing fails: by the option, `KVBENCH_REQUIRE_GPU`, or in CI."""
    if option is not None:
        return option
    return says_yes(environ[REQUIRE_GPU]) if REQUIRE_GPU in environ else in_ci(environ)
