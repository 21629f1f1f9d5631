"""Expected bytes of a model's weights, from the headers of its files or its config; no tensor is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kvbench.formats.checkpoint_scales import of_cache, read_headers
from kvbench.formats.fp8_checkpoint import E4M3, SCALE_DTYPES, SCALE_NAMES, routers
from kvbench.formats.kv import DTYPE_BYTES, WEIGHT_FORMATS, weight_bytes
from kvbench.models.attention_facts import ModelFacts
from kvbench.models.source import checkpoint_files, model_config, stored_fp8

# Families whose decoder layers are q, k, v, o, gate, up and down: (biases of q, k and v; norms of q and k).
_DENSE = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype, as safetensors writes it, and shape


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of codes, scales and native tensors. ratio: of their sum to the bytes of all-native weights."""

    payload: int
    scales: int
    native: int
    ratio: float

    @property
    def total(self) -> int:
        return self.payload + self.scales + self.native


def weight_sizes(spec: Mapping[str, Any], facts: ModelFacts, weights: str) -> WeightSizes | None:
    """Expected bytes in the resolved format `weights`; None if only the loaded model shows them.

    Raises UsageError for an incomplete file.
    """
    config, files = model_config(spec) or {}, checkpoint_files(spec)
    if config.get("model_type") != facts.model_type:
        return None  # a multimodal model: the facts are those of its language part
    tensors = {key: (header.dtype, header.shape) for key, header in read_headers(files).items()}
    if files:
        linear, numbers = _linear(tensors), _numbers(tensors, config)
    elif stored_fp8(spec) is None:
        linear, numbers = _of_config(config, facts)
    else:
        return None
    if not numbers or (weights != "native" and any(".experts." in key for key in tensors)):
        return None  # experts are refused
    whole = numbers * DTYPE_BYTES[spec["dtype"]]
    if weights == "native":
        return WeightSizes(0, 0, whole, 1.0)
    held = [weight_bytes(WEIGHT_FORMATS[weights], n, k, spec["dtype"], scale) for n, k, scale in linear]
    payload, scales = sum(one.payload for one in held), sum(one.scales for one in held)
    native = (numbers - sum(n * k for n, k, _ in linear)) * DTYPE_BYTES[spec["dtype"]]
    return WeightSizes(payload, scales, native, (payload + scales + native) / whole)


def _linear(tensors: Tensors) -> list[tuple[int, int, str]]:
    """(N, K, dtype name of the scales) of the weights that are FP8 in the files, or become FP8 on load."""
    of_files = any(dtype == E4M3 for dtype, _ in tensors.values())
    linear, choosing = [], routers(tensors)
    for key, (dtype, shape) in tensors.items():
        module, _, last = key.rpartition(".")
        in_a_layer = re.search(r"\.\d+\.", key) and module not in choosing
        if last == "weight" and len(shape) == 2 and (dtype == E4M3 if of_files else in_a_layer):
            stored = next((tensors[k][0] for name in SCALE_NAMES if (k := f"{module}.{name}") in tensors), "")
            linear.append((*shape, SCALE_DTYPES.get(stored, "float32")))
    return linear


def _numbers(tensors: Tensors, config: Mapping[str, Any]) -> int:
    """Number of weights, without scales, rotary frequencies, and a tied output layer."""
    left_out = {*SCALE_NAMES, "inv_freq"}
    if config.get("tie_word_embeddings") and "model.embed_tokens.weight" in tensors:
        left_out.add("lm_head.weight")
    return sum(
        prod(shape)
        for key, (_, shape) in tensors.items()
        if not {key, key.rpartition(".")[2]} & left_out and not of_cache(key)
    )


def _of_config(config: Mapping[str, Any], facts: ModelFacts) -> tuple[list[tuple[int, int, str]], int]:
    """(linear layers as above, number of weights), or ([], 0) if the config is not enough."""
    sizes: list[Any] = [config.get(key) for key in ("hidden_size", "intermediate_size", "vocab_size")]
    other = facts.model_type not in _DENSE or config.get("attention_bias") or config.get("mlp_bias")
    if other or not all(isinstance(size, int) for size in sizes):
        return [], 0
    hidden, inner, vocab = sizes
    biases, norms = _DENSE[facts.model_type]
    shapes: list[tuple[int, int]] = []
    rest = hidden + vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    for layer in facts.layers:
        head = layer.shape.head_dim
        q, kv = layer.q_heads * head, layer.shape.kv_heads * head
        shapes += [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        rest += 2 * hidden + (q + 2 * kv if biases else 0) + (2 * head if norms else 0)
    return [(n, k, "float32") for n, k in shapes], rest + sum(n * k for n, k in shapes)
