"""Checkpoints of random tiny models in a folder: written, changed and loaded."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.engines.reference.load import load_model
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.formats.fp8_checkpoint import Fp8Config
from kvbench.models.catalog import TINY

FILE = "model.safetensors"


def random_model(base="tiny-llama", dtype=torch.float32, **changes):
    """A seeded model of a built-in config with `changes`."""
    config = AutoConfig.for_model(**{**TINY[base], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def native(folder, dtype=torch.float32, **changes):
    """The folder, which holds a native checkpoint."""
    model = random_model(dtype=dtype, **changes)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def fp8(folder, base="tiny-llama", dtype=torch.float32, **changes):
    """The quantized model that the folder holds as an FP8 checkpoint."""
    model = random_model(base, dtype, **changes)
    quantize_model(model, base)
    model.config.quantization_config = Fp8Config(("lm_head",)).as_dict()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    del model.config.quantization_config
    return model


def edit(folder, change):
    """Change tensors. change: new ones by name (None deletes), or a function of all that may return such."""
    tensors = {k: v.clone() for k, v in load_file(folder / FILE).items()}
    new = change(tensors) if callable(change) else change
    tensors |= new if isinstance(new, dict) else {}
    kept = {k: v.clone().contiguous() for k, v in tensors.items() if v is not None}
    save_file(kept, folder / FILE, metadata={"format": "pt"})


def configure(folder, quantization=None, **changes):
    """Change keys of config.json and of its quantization_config."""
    config = json.loads((folder / "config.json").read_text()) | changes
    if quantization:
        config["quantization_config"] = config.get("quantization_config", {}) | quantization
    (folder / "config.json").write_text(json.dumps(config))


def load(folder, dtype="float32", weights="fp8_block128"):
    return load_model({"model": str(folder), "weights": weights}, "cpu", dtype)


def logits(model):
    """[1, 20, V], by transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.arange(20)[None], use_cache=False).logits


def raw(tensor):
    return tensor.view(torch.uint8)
