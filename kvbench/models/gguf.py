"""The metadata of a GGUF file under the names of a config.json, read without tensors or torch."""

from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.files import cache_dir, file_sha256, read_json, write_json

# Keys after "<architecture>."; other `attention.*` keys keep their name: an unknown mechanism is noticed.
_NAMES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    **{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
}
_IGNORED = frozenset(
    f"attention.{x}" for x in ("layer_norm_rms_epsilon", "layer_norm_epsilon", "scale", "causal")
)
_TYPES = {"gptoss": "gpt_oss", "gpt-oss": "gpt_oss", "gemma3": "gemma3_text"}


def config_of(path: Path) -> dict[str, Any]:
    """The config, read once (a few seconds, for the vocabulary) and then cached by the file's sha256.

    Raises UsageError when the file is not a GGUF file.
    """
    memo = cache_dir() / "gguf-configs" / f"{file_sha256(path)}.json"
    if memo.is_file():
        remembered: dict[str, Any] = read_json(memo)
        return remembered
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as e:
        raise UsageError(f"{path} is not a readable GGUF file ({e}); fetch it again.") from None
    architecture = str(reader.fields["general.architecture"].contents())
    config: dict[str, Any] = {"model_type": _TYPES.get(architecture, architecture)}
    for key, field in reader.fields.items():
        name = key.removeprefix(f"{architecture}.")
        if name in _NAMES:
            config[_NAMES[name]] = field.contents()
        elif name != key and "attention" in name and name not in _IGNORED:
            config[name] = field.contents()
    write_json(memo, config)
    return config
