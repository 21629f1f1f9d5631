"""The Hugging Face libraries kept quiet, and the local hub cache read without any network."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def quiet() -> None:
    """Call before the first import of huggingface_hub or transformers: they read these when they are imported.

    No telemetry and no advice; progress bars only where somebody watches. What the user has set stays.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # it asks a hub service to convert pickles
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def cached_file(repo: str, revision: str | None, file: str) -> Path | None:
    """`file` of a hub repository where the local hub cache has it, else None. No network."""
    quiet()
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision or "main")
    return Path(found) if isinstance(found, str) else None


def offline() -> bool:
    """Whether the user has forbidden the hub's network (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    quiet()
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
