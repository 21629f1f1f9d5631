"""The attention features that a model needs, read from its config: a dict in, `ModelFacts` out.

Features are read from attributes, never from a model's name: a distill called "DeepSeek" is plain GQA, and
`kv_lora_rank` makes an MLA model. The tables by `model_type` hold only what transformers keeps in code.

Unknown means unsupported: an attribute about attention that is set and in none of the known lists becomes an
entry of `ModelFacts.unsupported`, so that a new mechanism is refused instead of ignored.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UsageError
from kvbench.formats.kv import KVFormat, KVShape
from kvbench_kernels.support import AttentionNeeds


@dataclass(frozen=True)
class LayerFacts:
    """One attention layer. kind: "full", "sliding", "mla" or the config's own word for anything else."""

    kind: str
    q_heads: int
    shape: KVShape
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def needs(
        self, fmt: KVFormat, page_size: int, dtype: str, device: str, interpreter: bool
    ) -> AttentionNeeds:
        """What the layer needs from the attention kernels."""
        heads = self.q_heads, self.shape.kv_heads, self.shape.head_dim, self.shape.value_dim
        mask = self.sliding_window, self.softcap, self.sinks
        return AttentionNeeds(fmt, *heads, page_size, dtype, device, interpreter, *mask)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model, from its config (before loading) and its modules (after); both must agree.

    max_context: None without a limit in the config. unsupported: (attribute, sentence) of each attribute of
    the config that the engine does not implement.
    """

    model_type: str
    layers: tuple[LayerFacts, ...]
    max_context: int | None
    unsupported: tuple[tuple[str, str], ...] = ()


# The same fact under the names that transformers' configs give it, best first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_Q_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim")
_LAYER_KINDS = ("layer_types", "layers_block_type")
_TEXT_PARTS = ("text_config", "llm_config", "language_config")

_KINDS = {"full_attention": "full", "attention": "full", "sliding_attention": "sliding"}

# Every n-th layer is full, the others slide, as transformers fills in where an older config.json is silent.
_PATTERN_BY_TYPE = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}
# Models with a learned sink logit for each head: a parameter of the module, without a key in the config.
_SINKS_BY_TYPE = frozenset({"gpt_oss", "flint", "granite_swa", "granitemoe_swa"})
# Models that add position biases to the scores, without a key in the config.
_ALIBI_BY_TYPE = frozenset({"bloom"})

# A key that matches is about attention; if it is set, it must be in one of the lists below.
_ABOUT_ATTENTION = re.compile(
    r"attn|attention|window|softcap|sink(?!horn)|alibi|chunk|kv_shared|share\w*_kv|kv_share|bidirectional|"
    r"is_causal|index_|indexer|mamba|ssm_|recurrent|kv_channels|block_configs|block_sparse|random_blocks|"
    r"position_bias|conv_L_cache|(swa|global|local)\w*_head|heads?_\w*per_layer|qk_l2_clip|rel_l2_clip"
)

# Read by this module, or covered by what it reads.
_READ = frozenset({
    *_LAYERS, *_HIDDEN, *_Q_HEADS, *_KV_HEADS, *_CONTEXT, *_LAYER_KINDS,
    "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "_sliding_window_pattern",
    "attn_logit_softcapping", "kv_lora_rank", "alibi", "original_max_position_embeddings",
    "attention_chunk_size",  # read with layer_types; refused without
    "global_attn_every_n_layers",  # afmoe: already spelled out in its layer_types; refused without
})  # fmt: skip

# Handled in the model's own module outside of the attention function, or without effect in inference.
_HARMLESS = frozenset({
    "attention_bias", "attention_out_bias", "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob",
    "attention_multiplier",  # arrives as the attention function's `scaling`
    "attention_in_multiplier", "attention_out_multiplier",  # falcon_h1: on the projections
    "query_pre_attn_scalar",  # gemma: likewise
    # on queries or outputs
    "attn_scale", "attn_temperature_tuning", "attn_output_gate", "use_attention_gate",
    "scale_attn_weights",  # gpt2: the usual 1/sqrt(head_dim); arrives as `scaling`
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
    "attention_k_eq_v",  # gemma4: V comes from K's projection; both arrive
    "parallel_attn", "num_ln_in_parallel_attn", "n_layers_per_attn_res_block",  # where the residual goes
    "final_logit_softcapping", "moe_router_logit_softcapping", "mlp_gate_softcap", "mlp_up_softcap",
    "chunk_size_feed_forward", "chunk_size_lm_head", "shared_expert_sink",
    "output_attentions", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "attention_implementation",
})  # fmt: skip


def facts_from_config(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of the decoder that `config` (a config.json, or `model.config.to_dict()`) describes.

    Raises UsageError when the config describes no decoder with attention heads, or heads that do not divide.
    """
    text = _text_part(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    n_layers = _whole(text, _LAYERS, model_type)
    kinds = _kinds(text, model_type, n_layers)
    overrides = _per_layer_overrides(text)
    layers = tuple(_layer({**text, **overrides.get(i, {})}, model_type, kinds[i], i) for i in range(n_layers))
    unsupported = (*_outside_decoder(config, text), *_unsupported(text, model_type, layers))
    return ModelFacts(model_type, layers, _max_context(text), tuple(dict.fromkeys(unsupported)))


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The common sizes of a decoder that the config gives; lists with one value a layer are left out."""
    text = _text_part(config)
    return {k: text[k] for k in _SIZES if text.get(k) is not None and not isinstance(text[k], list)}


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of a multimodal config, else the config itself."""
    parts = (config.get(key) for key in _TEXT_PARTS if _first(config, _LAYERS) is None)
    return next((part for part in parts if isinstance(part, Mapping)), config)


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((config[k] for k in keys if config.get(k) is not None), None)


def _whole(config: Mapping[str, Any], keys: Sequence[str], model_type: str, layer: int | None = None) -> int:
    """The first of `keys` that is set, as a positive int; a list holds one value a layer."""
    value = _first(config, keys)
    if layer is not None and isinstance(value, list | tuple) and layer < len(value):
        value = value[layer]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"The model config ({model_type}): expected a positive whole number for {' / '.join(keys)}, got "
            f"{value!r}; use a decoder model with attention layers."
        )
    return value


def _per_layer_overrides(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`per_layer_config: {"05": {"head_dim": 512}}` as {5: {...}}."""
    given = config.get("per_layer_config")
    return {int(i): over for i, over in given.items()} if isinstance(given, Mapping) else {}


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window in tokens, with the token itself, or None without a window."""
    window = config.get("sliding_window")
    off = config.get("use_sliding_window") is False
    return None if off or not isinstance(window, int) or window < 1 else window


def _kinds(config: Mapping[str, Any], model_type: str, n_layers: int) -> list[str]:
    """The kind of each layer: "full", "sliding", or the config's own word for anything else."""
    given = _first(config, _LAYER_KINDS)
    if given is not None:
        if len(given) != n_layers:
            raise UsageError(
                f"The model config ({model_type}) lists {len(given)} layer types for {n_layers} layers; "
                "correct layer_types in config.json so that it has one entry a layer."
            )
        return [_KINDS.get(str(kind), str(kind)) for kind in given]
    if _window(config) is None:
        return ["full"] * n_layers
    if config.get("use_sliding_window") and isinstance(config.get("max_window_layers"), int):
        return ["sliding" if i >= config["max_window_layers"] else "full" for i in range(n_layers)]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    every = pattern if isinstance(pattern, int) else _PATTERN_BY_TYPE.get(model_type)
    return ["sliding" if every is None or (i + 1) % every else "full" for i in range(n_layers)]


def _layer(config: Mapping[str, Any], model_type: str, kind: str, index: int) -> LayerFacts:
    q_heads = _whole(config, _Q_HEADS, model_type, index)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        kv_heads = 1  # falcon and gpt_bigcode have a flag for MQA
    else:
        given = _first(config, _KV_HEADS) is not None
        kv_heads = _whole(config, _KV_HEADS, model_type, index) if given else q_heads
    if q_heads % kv_heads:
        raise UsageError(
            f"The model config ({model_type}) has {q_heads} query heads on {kv_heads} KV heads in layer "
            f"{index}; the query heads must be a multiple of the KV heads. Correct num_key_value_heads in "
            "config.json."
        )
    if config.get("kv_lora_rank") is not None and kind in ("full", "sliding"):
        # transformers expands the latent before attention, so K and V have one head for each query head.
        keys = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        nope, rope, value = (_whole(config, (key,), model_type) for key in keys)
        kind, shape = "mla", KVShape(q_heads, nope + rope, value)
    else:
        shape = KVShape(kv_heads, *_dims(config, model_type, q_heads))
    window = _window(config) if kind == "sliding" else None
    cap = config.get("attn_logit_softcapping")
    return LayerFacts(kind, q_heads, shape, window, float(cap) if cap else None, model_type in _SINKS_BY_TYPE)


def _dims(config: Mapping[str, Any], model_type: str, q_heads: int) -> tuple[int, int]:
    """(head_dim of K, of V)."""
    if config.get("head_dim") is not None:
        head_dim = _whole(config, ("head_dim",), model_type)
    elif (hidden := _whole(config, _HIDDEN, model_type)) % q_heads:
        raise UsageError(
            f"The model config ({model_type}) has no head_dim, and its hidden size of {hidden} is not a "
            f"multiple of {q_heads} heads; add head_dim to config.json."
        )
    else:
        head_dim = hidden // q_heads
    value = config.get("v_head_dim")
    return head_dim, value if isinstance(value, int) and value > 0 else head_dim


def _max_context(config: Mapping[str, Any]) -> int | None:
    """Positions of the model, with the factor of a scaled rope; None for alibi."""
    limit = _first(config, _CONTEXT)
    if config.get("alibi") or not isinstance(limit, int) or limit < 1:
        return None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = rope.get("factor") if isinstance(rope, Mapping) else None
    if factor and (rope.get("rope_type") or rope.get("type")) in ("linear", "dynamic", "yarn"):
        original = rope.get("original_max_position_embeddings") or limit
        return max(limit, int(original * factor))
    return limit


def _is_set(value: Any) -> bool:
    """Whether the value is something other than off, empty or zero."""
    return value not in (None, False, 0, 0.0, "", "none") and value != [] and value != {}


def _outside_decoder(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for part in (config, text):
        if part.get("is_encoder_decoder"):
            yield "is_encoder_decoder", "The model has an encoder; kvbench runs decoder-only models."
        if part.get("add_cross_attention"):
            yield "add_cross_attention", "The model attends to another sequence; kvbench stores none."


def _unsupported(
    config: Mapping[str, Any], model_type: str, layers: Sequence[LayerFacts]
) -> Iterator[tuple[str, str]]:
    known = _READ | _HARMLESS | {"add_cross_attention"}
    spelled_out = _first(config, _LAYER_KINDS) is not None
    if config.get("alibi") or model_type in _ALIBI_BY_TYPE:
        yield "alibi", "The model adds position biases (ALiBi) to its scores; the engine adds none."
    embedding = config.get("position_embedding_type")
    if embedding not in (None, "absolute", "learned", "rope", "rotary", "nope"):
        yield "position_embedding_type", f"Position embedding {embedding!r} changes the scores."
    for key in ("attention_chunk_size", "global_attn_every_n_layers"):
        if not spelled_out and _is_set(config.get(key)):
            yield key, f"{key} = {config[key]!r} without layer_types: which layers it means is unknown."
    if any(layer.kind == "sliding" and layer.sliding_window is None for layer in layers):
        yield "sliding_window", "layer_types has sliding layers, but sliding_window is not set."
    over = (o for o in _per_layer_overrides(config).values() if isinstance(o, Mapping))
    for key, value in [*config.items(), *(item for o in over for item in o.items())]:
        # Of layers that layer_types names, their kind decides.
        named = spelled_out and re.match(r"mamba|ssm_|linear_|recurrent|conv_", key)
        if key not in known and _ABOUT_ATTENTION.search(key) and _is_set(value) and not named:
            shown = f"{value!r:.60}"
            yield key, f"The model config sets {key} = {shown}, which kvbench's engine does not implement."
