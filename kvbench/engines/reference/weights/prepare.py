"""Converts a GGUF file to a transformers folder once: loading GGUF takes 30 s, loading the folder 1 s."""

import shutil
import sys
import tempfile
from pathlib import Path

from kvbench.errors import KvbenchError, UsageError
from kvbench.files import cache_dir, file_sha256, read_json, write_json

_VERSION = 1  # of what this module writes
_MANIFEST = "kvbench.json"


def prepared(gguf: Path) -> Path:
    """The folder in the cache, keyed by the file's sha256 and transformers' version: config.json,
    model.safetensors (float32, the exact dequantized values), tokenizer files and a manifest. Safe in several
    processes at once. Raises KvbenchError when transformers cannot read the file."""
    import transformers
    from filelock import FileLock

    sha = file_sha256(gguf)
    target = cache_dir() / "prepared" / f"{sha[:16]}-transformers{transformers.__version__}-{_VERSION}"
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if _is_whole(target):
            return target
        for left_over in target.parent.glob(f".part-{target.name}-*"):
            shutil.rmtree(left_over)
        part = Path(tempfile.mkdtemp(prefix=f".part-{target.name}-", dir=target.parent))
        try:
            _convert(gguf, part)
            manifest = {"gguf_sha256": sha, "transformers": transformers.__version__, "version": _VERSION}
            weights_sha = file_sha256(part / "model.safetensors")
            write_json(part / _MANIFEST, {**manifest, "weights_sha256": weights_sha})
            shutil.rmtree(target, ignore_errors=True)  # a damaged one
            part.replace(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _is_whole(folder: Path) -> bool:
    """The weights are read in full when first seen, and remembered by size and mtime afterwards."""
    try:
        manifest = read_json(folder / _MANIFEST)
        return bool(file_sha256(folder / "model.safetensors") == manifest["weights_sha256"])
    except (UsageError, KeyError, TypeError):
        return False


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, NotImplementedError, KeyError, ImportError, RuntimeError) as e:
        raise KvbenchError(
            f"transformers cannot read {gguf} ({type(e).__name__}: {e}); give a folder with safetensors "
            "instead."
        ) from e
    # With these left on, save_pretrained would write GGUF settings or refuse.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
