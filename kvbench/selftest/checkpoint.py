"""A tiny checkpoint with scales of its KV cache, for the cells whose faults need one."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
from kvbench.models.catalog import TINY

MODEL = "tiny-llama"
K_SCALE, V_SCALE = 0.01, 0.02  # times the layer's number, from 1: all differ


def write_checkpoint(folder: Path) -> None:
    """Random weights in `folder`, with a K and a V scale a layer under the names that exporters give them."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY[MODEL])).save_pretrained(folder)
    finally:
        if bar:
            logging.enable_progress_bar()
    byte_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for layer in range(TINY[MODEL]["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.k_proj.k_scale"] = torch.tensor(K_SCALE * (layer + 1))
        tensors[f"{attention}.v_proj.v_scale"] = torch.tensor(V_SCALE * (layer + 1))
    save_file(tensors, path, metadata={"format": "pt"})
