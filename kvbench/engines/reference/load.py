"""Loads a model for the engine: weights from safetensors or GGUF, or seeded random ones from a config.

Weights are native, or FP8 with block scales: stored in the checkpoint, or quantized here after loading.
Pickled weights are never loaded, and remote code only with `trust_remote_code: true`. Only a hub id or an
alias uses the network.
"""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from kvbench.engines.reference.binding import Binding, bind
from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.engines.reference.compiled import CompiledLayers
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.weights import tensor_files
from kvbench.engines.reference.weights.blocks import CHECKPOINT, WeightFacts, native_checksums
from kvbench.engines.reference.weights.fp8_checkpoint import load_fp8
from kvbench.engines.reference.weights.fp8_linear import join_siblings
from kvbench.engines.reference.weights.linear import replace_linears
from kvbench.engines.reference.weights.prepare import prepared
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.engines.reference.weights.tensor_files import TensorFiles
from kvbench.errors import KvbenchError, UsageError
from kvbench.formats.checkpoint_scales import FETCH_AGAIN, Stored, of_cache, stored_scales
from kvbench.formats.fp8_checkpoint import Fp8Config, fp8_config, not_native
from kvbench.formats.scales import from_checkpoint
from kvbench.matrix.resolve_backend import Request, resolve
from kvbench.models import source as sources
from kvbench.models.attention_facts import LayerFacts, ModelFacts, facts_from_config
from kvbench.models.catalog import ALIASES, CONFIGS
from kvbench.models.download import cached_file, fetch
from kvbench.models.source import folder_config, kind_of

Spec = Mapping[str, Any]  # of a cell
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A transformers decoder in inference mode, bound to our attention, and what is known of it.

    facts: from its config, confirmed by one forward. binding: where an engine puts its step. sha:
    `kvbench.models.source.fingerprint` of the cell. random: seeded random weights, which have no quality.
    files: its safetensors files."""

    model: nn.Module
    tokenizer: Any
    facts: ModelFacts
    binding: Binding
    name: str
    sha: str
    device: torch.device
    dtype: torch.dtype
    random: bool
    weights: WeightFacts = field(default_factory=WeightFacts)
    files: tuple[Path, ...] = ()

    @functools.cached_property
    def cache_scales(self) -> Stored:
        """The KV scales in its files. Raises Refused for a value that is no scale."""
        return stored_scales(self.files, len(self.layers))

    def warnings(self, scale: Any = None) -> tuple[str, ...]:
        """Sentences on what a cell with this `scale` leaves unread, and on the weights."""
        read = self.cache_scales.values() if from_checkpoint(scale) else ()
        unread = set(self.weights.cache_scales).difference(*(held.tensors for held in read))
        return (*tensor_files.unread_cache_scales(unread, len(self.layers)), *self.weights.warnings)

    @functools.cached_property
    def compiled(self) -> CompiledLayers:
        """The decoder layers in their compiled forms."""
        return CompiledLayers(self.model)

    @property
    def layers(self) -> tuple[LayerFacts, ...]:
        return self.facts.layers

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)


def load_model(spec: Spec, device: str, dtype: str) -> LoadedModel:
    """The cell's model on `device` ("cpu" or "cuda"), by the spec's keys of the model and `weights`.

    dtype: a name of `DTYPES`, for the weights that are not quantized. Raises UsageError for a name, folder or
    file that cannot be used, KvbenchError when fetching or loading fails, Refused when the engine would have
    to drop something that the model needs."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    name, started = str(spec["model"]), time.perf_counter()
    random, where = sources.uses_random_weights(spec), torch.device(device)
    load = _load_random if random else _load_checkpoint
    model, tokenizer, weights = load(spec, kind_of(name), where, DTYPES[dtype])
    model.eval().requires_grad_(False)
    if spec.get("weights", "native") == "fp8_block128" and weights.source != CHECKPOINT:
        made = quantize_model(model, name)
        weights = replace(made, warnings=weights.warnings, cache_scales=weights.cache_scales)
    elif weights.source == CHECKPOINT:
        weights = replace(weights, native=native_checksums(model, weights.modules))
    join_siblings(model)
    if where.type == "cuda":
        replace_linears(model)  # the same products for every backend and format of the run
        torch.cuda.synchronize(where)
    weights = replace(weights, load_seconds=time.perf_counter() - started)
    facts = facts_from_config(model.config.to_dict())
    resolve(Request("native", "native", "torch", "refuse"), facts)  # refuses what cannot even run natively
    known = facts, bind(model, facts, where), name, sources.fingerprint(spec)
    files = tuple(sources.checkpoint_files(spec))
    return LoadedModel(model, tokenizer, *known, where, DTYPES[dtype], random, weights, files)


def _load_checkpoint(
    spec: Spec, kind: str, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any, WeightFacts]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name = str(spec["model"])
    source, options = _source(spec, kind)
    if kind != "hub":
        sources.check_folder_weights(Path(source))
        sources.weight_files(Path(source))  # transformers does not name a broken index
        fp8_config(folder_config(Path(source)), name)  # nor a quantization_config that is not a mapping
    try:
        config = AutoConfig.from_pretrained(source, **options)
        fp8 = fp8_config(config.to_dict(), name)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        if fp8 is not None:
            model, weights = _load_fp8(spec, kind, config, fp8, device, dtype)
        else:
            if hasattr(config, "quantization_config"):  # of the cache alone
                del config.quantization_config  # transformers would ask for a library that quantizes the rest
                options["config"] = config
            model, info = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
            if folder := _folder(spec, kind, source):
                tensor_files.check_plain(name, folder, model)
            _check_complete(name, info)
            unread = [str(key) for key in info.get("unexpected_keys") or ()]
            scales = tuple(filter(of_cache, unread))
            weights = WeightFacts(warnings=tensor_files.check_unread(name, unread), cache_scales=scales)
            tensor_files.check_finite(name, model.state_dict().items())
            model = model.to(device)
    except load_faults() as e:
        raise KvbenchError(_load_sentence(name, kind, e)) from e
    _check_tokenizer(name, tokenizer)
    return model, tokenizer, weights


def _load_fp8(
    spec: Spec, kind: str, config: Any, fp8: Fp8Config, device: torch.device, dtype: torch.dtype
) -> tuple[Any, WeightFacts]:
    """An FP8 checkpoint, for a cell with FP8 weights; a hub model is downloaded (never pickles)."""
    from huggingface_hub import snapshot_download

    name, remote = str(spec["model"]), bool(spec.get("trust_remote_code"))
    if spec.get("weights", "native") != "fp8_block128":
        raise not_native(name)
    folder = Path(name).expanduser()
    if kind == "hub":
        patterns = ["*.safetensors", "*.json", *(["*.py"] if remote else [])]
        wanted = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}
        folder = Path(snapshot_download(name, revision=spec.get("model_revision") or "main", **wanted))
    got = load_fp8(name, folder, config, fp8, device, dtype, remote)
    with TensorFiles(folder) as files:
        stored = tuple(key.removesuffix(".weight") for key in files.fp8())
    facts = WeightFacts("fp8_block128", CHECKPOINT, got.converted, got.warnings, got.cache_scales, stored)
    facts = replace(facts, scale_dtypes=got.scale_dtypes, samples=got.samples, checksums=got.checksums)
    return got.model, facts


def _folder(spec: Spec, kind: str, source: str) -> Path | None:
    """The folder of the loaded files; None where the hub cache is switched off."""
    if kind != "hub":
        return Path(source)
    cached = cached_file(str(spec["model"]), spec.get("model_revision"), "config.json")
    return cached.parent if cached else None


def _source(spec: Spec, kind: str) -> tuple[str, dict[str, Any]]:
    """(what from_pretrained is given, its options)."""
    name = str(spec["model"])
    options: dict[str, Any] = {"trust_remote_code": bool(spec.get("trust_remote_code"))}
    if kind == "hub":
        return name, {**options, "revision": spec.get("model_revision") or "main"}
    if kind == "alias":
        folder = prepared(fetch(name))
    else:
        path = Path(name).expanduser()
        folder = prepared(path) if kind == "gguf" else path
        folder_config(folder)
    return str(folder), {**options, "local_files_only": True}


def _check_complete(name: str, info: Mapping[str, Any]) -> None:
    """KvbenchError for a missing tensor, which transformers would fill with random numbers."""
    for what in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(what) or ())
        if keys:
            raise KvbenchError(
                f"The checkpoint {name} has {len(keys)} {what.replace('_', ' ')}, the first is {keys[0]}; "
                "the model would run on random numbers there. Fetch the checkpoint again, or correct its "
                "config.json."
            )


def _check_tokenizer(name: str, tokenizer: Any) -> None:
    """KvbenchError for a tokenizer of the wrong class, which can lose text without an error."""
    probe = "The cat, 12 dogs."
    back = tokenizer.decode(tokenizer(probe, add_special_tokens=False)["input_ids"], skip_special_tokens=True)
    if "".join(back.casefold().split()) != "".join(probe.casefold().split()):
        raise KvbenchError(
            f"The tokenizer of {name} ({type(tokenizer).__name__}) turns {probe!r} into tokens that read "
            f"{back!r}; check tokenizer_class in its tokenizer_config.json and model_type in its config.json."
        )


def load_faults() -> tuple[type[Exception], ...]:
    """What transformers raises for unusable files and configs (ZeroDivisionError: a size of 0)."""
    from huggingface_hub.errors import StrictDataclassError

    of_files = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
    return (*of_files, AttributeError, TypeError, ZeroDivisionError, AssertionError, StrictDataclassError)


def _load_sentence(name: str, kind: str, error: Exception) -> str:
    from huggingface_hub.errors import StrictDataclassError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_config = isinstance(error, StrictDataclassError)  # says in a second line what is wrong with the key
    reason = " ".join(lines[: 2 if of_config else 1])
    if kind == "hub":
        hint = "check the id, the revision and the network, or give a local folder"
    elif of_config:
        hint = f"correct its config.json, {FETCH_AGAIN}"
    else:
        hint = "check that the folder is a whole transformers model with its tokenizer, and its config.json"
    return f"The model {name} could not be loaded ({type(error).__name__}: {reason}); {hint}."


def _load_random(
    spec: Spec, kind: str, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any, WeightFacts]:
    """Weights from a fixed seed. Biases are drawn too, so that dropping one changes the output."""
    from transformers import AutoModelForCausalLM

    config, tokenizer = _random_config(spec, kind)
    if config.vocab_size < len(tokenizer):
        raise UsageError(
            f"The config of {spec['model']} has a vocabulary of {config.vocab_size}, its tokenizer "
            f"{len(tokenizer)} tokens; correct vocab_size in config.json."
        )
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(sources.RANDOM_SEED)
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=bool(spec.get("trust_remote_code"))
            )
        except (ValueError, AttributeError, TypeError, ZeroDivisionError, AssertionError) as e:
            raise KvbenchError(_load_sentence(str(spec["model"]), kind, e)) from e
        std = getattr(config, "initializer_range", None) or 0.02
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                nn.init.normal_(parameter.data, std=std)
    return model, tokenizer, WeightFacts()


def _random_config(spec: Spec, kind: str) -> tuple[Any, Any]:
    """(config, tokenizer); the byte tokenizer where there are no tokenizer files."""
    from transformers import AutoConfig, AutoTokenizer

    name = str(spec["model"])
    if kind in ("config", "alias"):
        config = CONFIGS[name] if kind == "config" else ALIASES[name].config
        return AutoConfig.for_model(**config), byte_tokenizer()
    source, options = _source(spec, kind)
    try:
        config = AutoConfig.from_pretrained(source, **options)
        has_tokenizer = kind == "hub" or (Path(source) / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(source, **options) if has_tokenizer else byte_tokenizer()
    except load_faults() as e:
        raise KvbenchError(_load_sentence(name, kind, e)) from e
    return config, tokenizer
