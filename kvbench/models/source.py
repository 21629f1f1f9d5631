"""The meaning of a model name: its files, its facts, and the fingerprint of its content.

A name is, in this order: a config or an alias of the catalog, a .gguf file, a local folder, a hub id
("owner/name"). Nothing is downloaded here and no weights are loaded (see `kvbench.engines.reference.load`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import NotAvailable, Refused, UsageError
from kvbench.files import content_hash, file_sha256, read_json
from kvbench.formats.checkpoint_scales import FETCH_AGAIN, Stored, check_scheme, stored_scales
from kvbench.formats.fp8_checkpoint import Fp8Config, fp8_config, not_native
from kvbench.formats.scales import CALIBRATED, Scale, check_model, from_checkpoint, settle
from kvbench.models.attention_facts import ModelFacts, facts_from_config, sizes_of
from kvbench.models.catalog import ALIASES, CONFIGS
from kvbench.models.download import cached_file, offline
from kvbench.models.gguf import config_of
from kvbench.text import and_more, suggestion

RANDOM_SEED = 0
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# What makes a folder's behaviour: config and tokenizer (.json, .model, .txt, .jinja), weights, own code.
_COUNTED = (".json", ".safetensors", ".model", ".txt", ".jinja", ".py")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def kind_of(name: str) -> str:
    """ "config", "alias", "gguf", "folder" or "hub". Raises UsageError for anything else."""
    if name in CONFIGS:
        return "config"
    if name in ALIASES:
        return "alias"
    path = Path(name).expanduser()
    if len(name) > 1000:
        raise UsageError(f"The model {name[:40]}... has a name of {len(name)} characters; use a shorter one.")
    if path.suffix.lower() in _PICKLES:
        raise UsageError(f"{name} holds pickled weights, which can run code when they are loaded; {_CONVERT}")
    if path.suffix.lower() == ".gguf":
        if path.is_file():
            return "gguf"
        raise UsageError(f"The model file {name} does not exist; check the path (relative to {Path.cwd()}).")
    if path.is_dir():
        return "folder"
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        known = [*ALIASES, *CONFIGS]
        raise UsageError(
            f"The model {name!r} is neither a folder nor a .gguf file here, nor a name that kvbench knows "
            f"({', '.join(known)}), nor a hub id (owner/name).{suggestion(name, known)}"
        )
    return "hub"


_CONVERT = (
    "only safetensors and GGUF are loaded. Convert them once, if you trust their source: "
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('OLD').save_pretrained('NEW')\" and copy the tokenizer files."
)


def uses_random_weights(spec: Mapping[str, Any]) -> bool:
    """Whether the cell runs on seeded random weights: by its spec, or as a config of the catalog."""
    return spec.get("model_weights", "checkpoint") == "random" or spec["model"] in CONFIGS


def folder_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises UsageError when it is missing or a size in it is not positive."""
    path, give = folder / "config.json", "give a folder that holds a transformers model"
    if not path.is_file():
        raise UsageError(f"The folder {folder} has no config.json; {give}.")
    config = read_json(path, FETCH_AGAIN)
    if not isinstance(config, dict):
        raise UsageError(f"{path}: expected a mapping; {give}.")
    for key, value in sizes_of(config).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = f"expected a positive whole number for {key}, got {value!r:.80}"
            raise UsageError(f"{path}: {found}; correct it, {FETCH_AGAIN}.")
    return config


def check_folder_weights(folder: Path) -> None:
    """Raises UsageError unless the folder holds safetensors weights (pickled ones are never loaded)."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in _PICKLES)
    if pickles:
        raise UsageError(f"The folder {folder} holds only pickled weights ({pickles[0]}); {_CONVERT}")
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f"name the file itself: model: {ggufs[0]}" if ggufs else "give a folder with *.safetensors files"
    raise UsageError(f"The folder {folder} holds no safetensors weights; {hint}.")


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read: model.safetensors, else those in the index; [] for neither.

    A folder may hold the same weights again under another name. Raises UsageError for a damaged index, and
    for one that lists missing files or files elsewhere.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    content = read_json(index, FETCH_AGAIN)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise UsageError(f"{index} has no weight_map of tensor names to file names; {FETCH_AGAIN}.")
    if outside := sorted(file for file in set(listed.values()) if Path(file).name != file):
        raise UsageError(
            f"{index} names {outside[0]}, which is not in the same folder: only the folder's own files are "
            "loaded and fingerprinted. Move it there."
        )
    files = [folder / file for file in sorted(set(listed.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UsageError(f"{index} names {missing[0]}{and_more(missing)}, which is not there; {FETCH_AGAIN}.")
    return files


def fingerprint(spec: Mapping[str, Any]) -> str:
    """The model's content as a string for a task's key: equal bytes, equal string. Nothing is downloaded.

    Raises UsageError when the named files do not exist or may not be loaded.
    """
    name = str(spec["model"])
    kind, path = kind_of(name), Path(name).expanduser()
    if uses_random_weights(spec):
        config = model_config(spec)
        content = _hub_fingerprint(name, spec) if config is None else content_hash(config)
        return f"random:{content}:seed{RANDOM_SEED}"
    if kind == "alias":
        return f"sha256:{ALIASES[name].member_sha256}"
    if kind == "gguf":
        return f"sha256:{file_sha256(path)}"
    if kind == "folder":
        folder_config(path)
        check_folder_weights(path)
        files = (p for p in path.iterdir() if p.is_file() and p.suffix in _COUNTED and p.name[0] != ".")
        return f"files:{content_hash({p.name: file_sha256(p) for p in sorted(files)})}"
    return _hub_fingerprint(name, spec)


def config_facts(spec: Mapping[str, Any]) -> ModelFacts:
    """Facts from the config, before loading. Raises NotAvailable for a hub model that is not cached yet."""
    config = model_config(spec)
    if config is None:
        raise NotAvailable(
            f"The config of {spec['model']} is not in the local hub cache; its facts are known after the "
            f"first `kvbench run`, or after `hf download {spec['model']} config.json`."
        )
    return facts_from_config(config)


def model_key(spec: Mapping[str, Any]) -> str:
    """Equal for cells that run on the same loaded model."""
    keys = ("model", "model_weights", "model_revision", "trust_remote_code", "weights", "device", "dtype")
    return content_hash({k: spec[k] for k in keys})


def stored_fp8(spec: Mapping[str, Any]) -> Fp8Config | None:
    """The FP8 config of a folder or cached hub model; None for native weights, or while no config is here.

    Raises UsageError for an unsupported quantization.
    """
    if uses_random_weights(spec) or kind_of(str(spec["model"])) not in ("folder", "hub"):
        return None
    return fp8_config(model_config(spec) or {}, str(spec["model"]))


def check_stored(spec: Mapping[str, Any]) -> None:
    """Raises UsageError for a checkpoint that is incomplete or whose weights this cell cannot load."""
    if stored_fp8(spec) is not None and spec.get("weights", "native") == "native":
        raise not_native(str(spec["model"]))
    if kind_of(str(spec["model"])) == "folder" and not uses_random_weights(spec):
        weight_files(Path(spec["model"]).expanduser())


def checkpoint_files(spec: Mapping[str, Any]) -> list[Path]:
    """The safetensors files of a folder, or of a completely cached hub model; [] for anything else."""
    kind = "random" if uses_random_weights(spec) else kind_of(str(spec["model"]))
    if kind == "folder":
        return weight_files(Path(spec["model"]).expanduser())
    if kind != "hub":
        return []
    cached = cached_file(str(spec["model"]), spec.get("model_revision"), "config.json")
    try:
        return weight_files(cached.parent) if cached else []
    except UsageError:
        return []  # partly cached


def settled_scales(spec: Mapping[str, Any], facts: ModelFacts) -> list[tuple[Scale, Scale]]:
    """The (K, V) scales of each layer, with their sources, that a cell's `scale` means; [] for none.

    Raises Refused for a file of another model (the unquantized model of an FP8 checkpoint is accepted), for a
    checkpoint without the scales, and for lists without one number a layer; NotAvailable for a hub model that
    is not cached.
    """
    scale, layers = spec["scale"], len(facts.layers)
    if scale is None:
        return []
    stored: Stored = {}
    if from_checkpoint(scale):
        _check_has_files(spec)
        check_scheme(model_config(spec) or {}, spec["kv_format"], str(spec["model"]))
        stored = stored_scales(checkpoint_files(spec), layers)
    digests: list[str] = []
    if isinstance(scale, Mapping) and CALIBRATED in scale:
        native = {**spec, "model": spec.get("native_model"), "model_revision": None}
        digests = list(dict.fromkeys(map(fingerprint, [spec, *([native] if native["model"] else [])])))
    check_model(scale, digests, facts.model_type)
    return settle(scale, layers, stored)


def _check_has_files(spec: Mapping[str, Any]) -> None:
    """Raises Refused for a model that cannot hold KV scales, NotAvailable for one that is not cached."""
    name = str(spec["model"])
    of_gguf = "a GGUF file" if kind_of(name) in ("gguf", "alias") else ""
    if what := "random weights" if uses_random_weights(spec) else of_gguf:
        raise Refused(
            "checkpoint_has_no_scales",
            f"scale: {spec['scale']} needs scales in the checkpoint, but {name} is {what} and has none; "
            "write scale: default for 1.0, or give a file of kvbench calibrate.",
        )
    if not checkpoint_files(spec):
        raise NotAvailable(
            f"The scales of {name} are in its files, which are not in the local hub cache; they are known "
            f"after the first `kvbench run`, or after `hf download {name}`."
        )


def check_native(spec: Mapping[str, Any]) -> None:
    """Raises Refused when, by their configs, `native_model` is another model than the FP8 checkpoint.

    Skipped while a config is not cached; the loaded models are compared too.
    """
    if not spec.get("native_model"):
        return
    other = {**spec, "model": spec["native_model"], "model_revision": None, "native_model": None}
    configs = [config for config in map(model_config, (spec, other)) if config is not None]
    if len(configs) < 2:
        return
    mine, its = map(facts_from_config, configs)
    sizes = [sizes_of(config) for config in configs]
    pairs: list[tuple[str, Any, Any]] = [
        ("model_type", mine.model_type, its.model_type),
        ("number of layers", len(mine.layers), len(its.layers)),
        ("attention layers", mine.layers, its.layers),
        *((key, sizes[0][key], sizes[1][key]) for key in sizes[0] if key in sizes[1]),
        ("random weights", uses_random_weights(spec), uses_random_weights(other)),
    ]
    for what, own, found in pairs:
        if own != found:
            shown = "" if what == "attention layers" else f" ({found}, not {own})"
            raise Refused(
                "native_is_another_model",
                f"The native cells would run on {spec['native_model']}, whose {what}{shown} is not that of "
                f"{spec['model']}; name its unquantized model, as in model: {{source: ..., native: ...}}.",
            )


def model_config(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model's config as a dict, or None when it is only on the hub."""
    name = str(spec["model"])
    kind, path = kind_of(name), Path(name).expanduser()
    if kind in ("config", "alias"):
        return dict(CONFIGS[name] if kind == "config" else ALIASES[name].config)
    if kind == "folder":
        return folder_config(path)
    if kind == "gguf":
        return config_of(path)
    cached = cached_file(name, spec.get("model_revision"), "config.json")
    return folder_config(cached.parent) if cached else None


def _hub_fingerprint(name: str, spec: Mapping[str, Any]) -> str:
    """`hub:owner/name@revision`, with `:commit` when the local hub cache has resolved the revision."""
    revision = spec.get("model_revision") or "main"
    cached = cached_file(name, revision, "config.json")
    if cached is None and offline():
        raise UsageError(
            f"The hub model {name}@{revision} is not in the local hub cache and HF_HUB_OFFLINE is set; unset "
            f"it, or fetch the model on a connected machine (hf download {name}) and give its folder."
        )
    commit = f":{cached.parent.name}" if cached else ""
    return f"hub:{name}@{revision}{commit}"
