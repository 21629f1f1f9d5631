"""Writes a native checkpoint with its linear layers in FP8 with block scales; transformers can load it."""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from kvbench.engines.reference.load import DTYPES, load_faults, load_model
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.errors import KvbenchError, UsageError
from kvbench.formats.fp8_checkpoint import BLOCK, Fp8Config
from kvbench.formats.kv import DTYPE_BYTES
from kvbench.models.source import folder_config, kind_of, stored_fp8, uses_random_weights

SHARD = "5GB"
_FREE = "give a folder that does not exist yet, or an empty one."


@dataclass(frozen=True)
class Written:
    """converted: names of the FP8 layers. dtype: of all other weights. Bytes count the weights in memory,
    tied ones once; before: with every weight in `dtype`."""

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
        how = f"FP8 (E4M3, one float32 scale a {BLOCK[0]}x{BLOCK[1]} block)"
        sizes = f"{self.bytes_before:,} B before, {self.bytes_after:,} B after, ratio {self.ratio:.4f}"
        text = f"{self.folder}: {len(self.converted)} linear layers in {how}, the rest {self.dtype}.\n"
        return text + "\n".join([f"Weights: {sizes}.", *(f"Warning: {w}" for w in self.warnings)])


def quantize_checkpoint(name: str, out: Path, dtype: str | None = None) -> Written:
    """Reads the native checkpoint `name` and writes the folder `out`, completely or not at all.

    dtype: of the weights that stay native; None for the checkpoint's own, bfloat16 where it names none. The
    codes are computed from the stored values, whatever `dtype` is. Raises UsageError, before anything is
    loaded, for an `out` that exists or cannot be written and for a model without native weights."""
    out = _checked(name, out, dtype)
    own = _own_dtype(name)
    if stored_fp8({"model": name}) is not None:
        raise UsageError(
            f"The checkpoint {name} is already quantized (fp8, 128x128 blocks), so there is nothing to do; "
            "use it as it is, with weights: fp8_block128."
        )
    loaded = load_model({"model": name}, "cpu", own or "float32")
    rest = dtype or own or "bfloat16"
    model: Any = loaded.model
    converted = quantize_model(model, name).modules
    model.to(DTYPES[rest])
    native = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    model.config.quantization_config = Fp8Config(skipped=tuple(native)).as_dict()
    before, after = _bytes(model, rest)
    written = Written(name, str(out), rest, converted, before, after, _ragged(model, converted))
    _write(model, loaded.tokenizer, out)
    return written


def _checked(name: str, out: Path, dtype: str | None) -> Path:
    """`out` as an absolute path, after the checks that need no model."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    kind_of(name)
    if uses_random_weights({"model": name}):
        raise UsageError(
            f"The model {name} is a config with random weights, so there is nothing to write; give a folder, "
            "a .gguf file, a hub id or smollm2-135m-instruct. A matrix can quantize it on load, with "
            "weights: fp8_block128."
        )
    try:
        return _checked_out(name, out)
    except (OSError, RuntimeError) as e:  # RuntimeError: ~nobody, or a link to itself
        raise UsageError(
            f"{out} cannot be written ({getattr(e, 'strerror', None) or e}); give a folder that does not "
            "exist yet, where you may write."
        ) from None


def _checked_out(name: str, out: Path) -> Path:
    given = out.expanduser()
    if given.is_symlink() and not given.exists():
        raise UsageError(f"{out} is a link to {given.readlink()}, which is not there; {_FREE}")
    out = given.resolve()
    if kind_of(name) == "folder":
        model = Path(name).expanduser().resolve()
        folder_config(model)  # a folder without config.json is not a model
        if model == out or model in out.parents:
            raise UsageError(
                f"{out} is the folder of the model {name}, or lies in it; give a folder outside, so that "
                "the model stays as it is."
            )
    _check_free(out)
    above = next(p for p in out.parents if os.path.lexists(p))
    for folder in (above, out) if out.exists() else (above,):
        os.rmdir(tempfile.mkdtemp(dir=folder, prefix=".kvbench-"))  # permission bits do not tell of /proc
    if out.exists() and out.stat().st_dev != above.stat().st_dev:
        what = "a mount point, onto which no folder can be moved"
        raise UsageError(f"{out} is {what}; give a folder that is in it.")
    return out


def _check_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is there already; {_FREE}")


def _own_dtype(name: str) -> str | None:
    """The dtype that the checkpoint's config names; None for a GGUF file, whose values become float32."""
    kind, named = kind_of(name), None
    if kind == "folder":
        config = folder_config(Path(name).expanduser())
        named = config.get("dtype") or config.get("torch_dtype")
    elif kind == "hub":
        from transformers import AutoConfig

        with suppress(*load_faults()):  # loading says what is wrong
            named = str(AutoConfig.from_pretrained(name).dtype).removeprefix("torch.")
    return named if isinstance(named, str) and named in DTYPES else None


def _bytes(model: nn.Module, dtype: str) -> tuple[int, int]:
    """(bytes with every weight in `dtype`, bytes as they are)."""
    after = sum(p.numel() * p.element_size() for p in model.parameters())  # tied ones come once
    saved = 0
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            saved += module.weight.numel() * DTYPE_BYTES[dtype]
            saved -= sum(t.numel() * t.element_size() for t in (module.weight, module.weight_scale_inv))
    return after + saved, after


def _write(model: Any, tokenizer: Any, out: Path) -> None:
    """Writes a folder next to `out` and moves it into place when all files are on the disk. A killed process
    leaves that folder, and the next one removes it; any other failure leaves nothing."""
    made = [p for p in out.parents if not p.exists()]  # the deepest first
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _part(out) as part:
            _save(model, tokenizer, part, out)
            for path in [*part.iterdir(), part]:
                if path.suffix == ".safetensors":  # safetensors makes them readable by the owner only
                    path.chmod((part / "config.json").stat().st_mode)
                _sync(path)
            _place(part, out)
    except BaseException as e:
        for path in made:
            with suppress(OSError):  # another process put something there
                path.rmdir()
        if isinstance(e, OSError):
            raise KvbenchError(_no_room(out, e.strerror or str(e))) from e
        raise


def _no_room(out: Path, why: str) -> str:
    advice = "nothing was left of it. Fix it and run the same command again."
    return f"{out} could not be written ({why}); {advice}"


@contextmanager
def _part(out: Path) -> Iterator[Path]:
    """A new folder next to `out`, removed at the end. Removes those of killed processes first."""
    for left in out.parent.iterdir():
        prefix, _, pid = left.name.rpartition("-")
        if prefix != f"{out.name}.part" or not pid.isdecimal() or left.is_symlink() or not left.is_dir():
            continue
        if int(pid) == os.getpid() or not Path("/proc", pid).exists():
            with suppress(OSError), _locked(left):  # locked: by a process of another container
                shutil.rmtree(left, ignore_errors=True)
    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    part.mkdir()
    try:
        with _locked(part, required=False):
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(folder: Path, required: bool = True) -> Iterator[None]:
    """required: raises OSError while another process holds the lock, and on file systems without locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if required:
                raise
        yield
    finally:
        os.close(handle)


def _save(model: Any, tokenizer: Any, part: Path, out: Path) -> None:
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        model.save_pretrained(part, max_shard_size=SHARD)
        tokenizer.save_pretrained(part)
    except (ValueError, NotImplementedError, RuntimeError) as e:
        raise KvbenchError(
            f"transformers cannot write {type(model).__name__} as a folder ({type(e).__name__}: {e}); "
            f"nothing was left at {out}."
        ) from e
    except OSError:
        raise
    except Exception as e:  # a full disk: SafetensorError from the weights, Exception from the tokenizer
        raise KvbenchError(_no_room(out, str(e))) from e


def _place(part: Path, out: Path) -> None:
    """Moves the files into place: an existing folder is kept, and config.json comes last."""
    _check_free(out)
    files = sorted((p.name for p in part.iterdir()), key=lambda name: name == "config.json")
    there = out.is_dir()
    try:
        if there:
            for name in files:
                (part / name).replace(out / name)
            _sync(out)
        else:
            part.replace(out)
        _sync(out.parent)
    except BaseException:
        for path in [out / name for name in files if not (part / name).exists()]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not there and not part.exists():
            out.rmdir()
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ragged(model: nn.Module, converted: tuple[str, ...]) -> tuple[str, ...]:
    """A warning on ragged blocks: transformers 5.24 without a GPU splits 192 columns into 96 and 96."""
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
        f"Dimensions above {BLOCK[0]} that are no multiple of it ({shown}) end in a smaller block. kvbench "
        "reads them correctly. transformers without a GPU assumes equal blocks: it refuses the folder, or "
        "silently reads wrong values.",
    )
