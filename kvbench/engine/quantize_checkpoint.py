"""Writes a native checkpoint as one whose linear layers are FP8 with block scales: a folder that transformers loads too."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from kvbench.engine.fp8linear import Fp8Linear
from kvbench.engine.load import DTYPES, load_model
from kvbench.engine.quantize_model import quantize_model
from kvbench.errors import KvbenchError, UsageError
from kvbench.formats import DTYPE_BYTES
from kvbench.fp8config import BLOCK, Fp8Config
from kvbench.models import folder_config, kind_of, uses_random_weights

SHARD = "5GB"


@dataclass(frozen=True)
class Written:
    """converted: dotted names of the FP8 layers. dtype: of everything else. Bytes are those of the weights in memory, tied
    ones once; before: all of them in `dtype`. warnings: sentences."""

    model: str
    folder: str
    dtype: str
    converted: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    warnings: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.bytes_after / self.bytes_before

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def as_text(self) -> str:
        lines = [
            f"{self.folder}: {len(self.converted)} linear layers in FP8 (E4M3, one float32 scale a {BLOCK[0]}x{BLOCK[1]} "
            f"block), the rest {self.dtype}.",
            f"Weights: {self.bytes_before:,} B before, {self.bytes_after:,} B after, ratio {self.ratio:.4f}.",
            *(f"Warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


def quantize_checkpoint(name: str, out: Path, dtype: str | None = None) -> Written:
    """Reads the native checkpoint `name` and writes `out`, whole or not at all.

    dtype: of what stays native; None for the checkpoint's own, bfloat16 where it has none. Codes are made of the values
    that the checkpoint stores, whatever dtype the rest gets. Raises UsageError for an `out` that is there and for a
    model without native weights.
    """
    _check(name, out, dtype)
    own = _own_dtype(name)
    loaded = load_model({"model": name}, "cpu", own or "float32")
    rest = dtype or own or "bfloat16"
    model: Any = loaded.model
    converted = quantize_model(model, name).modules
    model.to(DTYPES[rest])
    native = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    model.config.quantization_config = Fp8Config(skipped=tuple(native)).as_dict()
    before, after = _bytes(model, rest)
    _write(model, loaded.tokenizer, out)
    return Written(name, str(out), rest, converted, before, after, _ragged(model, converted))


def _check(name: str, out: Path, dtype: str | None) -> None:
    """What can be refused before anything is loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    kind_of(name)
    if uses_random_weights({"model": name}):
        raise UsageError(
            f"The model {name} is a config with random weights, of which a checkpoint would say nothing; give a folder, a "
            ".gguf file, a hub id or smollm2-135m-instruct. A matrix takes it as it is, with weights: fp8_block128."
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is there already; give a folder that does not exist yet, or an empty one.")


def _own_dtype(name: str) -> str | None:
    """The dtype that the checkpoint's config names; None for a GGUF file, whose values are float32 when dequantized."""
    kind = kind_of(name)
    if kind == "folder":
        config = folder_config(Path(name).expanduser())
        said = config.get("dtype") or config.get("torch_dtype")
    elif kind == "hub":
        from transformers import AutoConfig

        try:
            said = str(AutoConfig.from_pretrained(name).dtype).removeprefix("torch.")
        except (OSError, ValueError):
            return None  # loading says what is wrong
    else:
        return None
    return said if said in DTYPES else None


def _bytes(model: nn.Module, dtype: str) -> tuple[int, int]:
    """(bytes with every weight in `dtype`, bytes as they are)."""
    after = sum(p.numel() * p.element_size() for p in model.parameters())  # tied ones come once
    saved = 0
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            held = (module.weight, module.weight_scale_inv)
            saved += module.weight.numel() * DTYPE_BYTES[dtype]
            saved -= sum(t.numel() * t.element_size() for t in held)
    return after + saved, after


def _write(model: Any, tokenizer: Any, out: Path) -> None:
    """`out` appears when all of it is on the disk. A process killed before leaves a folder beside it, `out` never."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        try:
            model.save_pretrained(part, max_shard_size=SHARD)
            tokenizer.save_pretrained(part)
        except (ValueError, NotImplementedError, RuntimeError) as e:
            raise KvbenchError(
                f"transformers cannot write {type(model).__name__} as a folder ({type(e).__name__}: {e}); nothing was left at "
                f"{out}."
            ) from e
        for path in [*part.iterdir(), part]:
            if path.suffix == ".safetensors":
                path.chmod((part / "config.json").stat().st_mode)  # they come readable by their owner only
            _sync(path)
        part.replace(out)
        _sync(out.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ragged(model: nn.Module, converted: tuple[str, ...]) -> tuple[str, ...]:
    """transformers 5.24 without a GPU divides a dimension evenly by its scales: 192 columns become 96 and 96."""
    tails = {
        size: name
        for name in reversed(converted)
        for size in model.get_submodule(name).weight.shape  # type: ignore[union-attr]
        if size > BLOCK[0] and size % BLOCK[0]
    }
    if not tails:
        return ()
    shown = ", ".join(f"{size} of {name}" for size, name in sorted(tails.items()))
    return (
        f"Dimensions above {BLOCK[0]} that are no multiple of it ({shown}) end in a smaller block. kvbench reads them so; "
        "transformers, where it dequantizes for want of a GPU, takes all blocks for equal: it refuses the folder, or reads "
        "wrong values without a word.",
    )
