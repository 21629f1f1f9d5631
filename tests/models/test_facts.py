"""Facts are read from the config's attributes, for every kind of attention that transformers has."""

import pytest

from kvbench.errors import UsageError
from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes
from kvbench.models.attention_facts import facts_from_config

PLAIN = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}  # fmt: skip


def config(**changes):
    return {**PLAIN, **changes}


def kinds(**changes):
    return [layer.kind for layer in facts_from_config(config(**changes)).layers]


def unsupported(**changes):
    return [attribute for attribute, _ in facts_from_config(config(**changes)).unsupported]


@pytest.mark.parametrize(
    ("changes", "q_heads", "shape"),
    [
        ({}, 4, KVShape(4, 16, 16)),
        ({"num_key_value_heads": 2}, 4, KVShape(2, 16, 16)),
        ({"num_key_value_heads": 1}, 4, KVShape(1, 16, 16)),
        ({"num_key_value_heads": 2, "head_dim": 80}, 4, KVShape(2, 80, 80)),
        ({"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}, 4, KVShape(4, 192, 128)),
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 4}, 4, KVShape(1, 16, 16)),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 4,
         KVShape(2, 16, 16)),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}, 9, KVShape(3, 64, 64)),
    ],
    ids=["mha", "gqa", "mqa", "head_dim", "value_dim", "falcon-mqa", "falcon-gqa", "smollm2"],
)  # fmt: skip
def test_heads_and_dims(changes, q_heads, shape):
    layer = facts_from_config(config(**changes)).layers[0]
    assert (layer.q_heads, layer.shape) == (q_heads, shape)


def test_gpt2_names_are_read():
    facts = facts_from_config(
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 96, "n_head": 12, "n_positions": 1024, "attn_pdrop": 0.1,
         "scale_attn_weights": True, "reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False}
    )  # fmt: skip
    assert facts.layers[1].shape == KVShape(12, 8, 8)
    assert (facts.max_context, facts.unsupported) == (1024, ())


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "expected"), [(24, 2, 64, 12_288), (30, 3, 64, 23_040), (36, 8, 128, 147_456)]
)
def test_a09_t3_kv_bytes_a_token(layers, heads, dim, expected):
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads * 3, "num_key_value_heads": heads}
    facts = facts_from_config(config(**sizes, head_dim=dim))
    assert sum(kv_bytes(KV_FORMATS["native"], x.shape, 1, "bfloat16").total for x in facts.layers) == expected


def test_a10_t1_a_distill_named_deepseek_is_gqa():
    facts = facts_from_config(
        config(model_type="qwen2", _name_or_path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", num_key_value_heads=2,
               sliding_window=4096, use_sliding_window=False, max_window_layers=2, attention_dropout=0.0)
    )  # fmt: skip
    assert {layer.kind for layer in facts.layers} == {"full"}
    assert facts.layers[0].shape == KVShape(2, 16, 16)
    assert facts.unsupported == ()


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "minicpm3", "named_like_nothing"])
def test_a10_t1_mla_is_known_by_its_latent(model_type):
    facts = facts_from_config(
        config(model_type=model_type, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
               v_head_dim=128, num_key_value_heads=4, head_dim=64)
    )  # fmt: skip
    assert {layer.kind for layer in facts.layers} == {"mla"}
    assert facts.layers[0].shape == KVShape(4, 192, 128)
    assert facts.unsupported == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 24}, ["sliding"] * 4),
        ({"sliding_window": None}, ["full"] * 4),
        ({"sliding_window": 24, "use_sliding_window": False}, ["full"] * 4),
        ({"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 3}, ["full"] * 3 + ["sliding"]),
        ({"sliding_window": 24, "sliding_window_pattern": 2}, ["sliding", "full"] * 2),
        ({"sliding_window": 24, "model_type": "gemma2"}, ["sliding", "full"] * 2),
        ({"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"] * 2}, ["full", "sliding"] * 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, ["linear_attention", "full"] * 2),
        ({"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 8192}, ["chunked_attention"] * 4),
        ({"layers_block_type": ["mamba", "attention"] * 2, "mamba_d_state": 16}, ["mamba", "full"] * 2),
    ],
)  # fmt: skip
def test_layer_kinds(changes, expected):
    assert kinds(**changes) == expected
    assert unsupported(**changes) == []


def test_only_sliding_layers_have_a_window():
    changes = {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"] * 2}
    facts = facts_from_config(config(**changes))
    assert [layer.sliding_window for layer in facts.layers] == [None, 24, None, 24]


def test_soft_cap_and_sinks():
    gemma2 = facts_from_config(
        config(model_type="gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    )
    gpt_oss = facts_from_config(config(model_type="gpt_oss"))
    assert [layer.softcap for layer in gemma2.layers] == [50.0] * 4
    assert gemma2.unsupported == ()
    assert all(layer.sinks for layer in gpt_oss.layers)
    assert not any(layer.sinks for layer in gemma2.layers)


def test_per_layer_config_overrides_one_layer():
    facts = facts_from_config(config(head_dim=16, per_layer_config={"02": {"head_dim": 32}}))
    assert [layer.shape.head_dim for layer in facts.layers] == [16, 16, 32, 16]


@pytest.mark.parametrize(
    ("changes", "attribute"),
    [
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"alibi": True}, "alibi"),
        ({"model_type": "bloom"}, "alibi"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"index_topk": 2048}, "index_topk"),
        ({"attn_config": {"alibi": True}}, "attn_config"),
        ({"attention_value_scale": 0.707}, "attention_value_scale"),
        ({"swa_num_attention_heads": 8}, "swa_num_attention_heads"),
        ({"local_attention": 128}, "local_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"cross_attention_layers": [1, 3]}, "cross_attention_layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"per_layer_config": {"01": {"attention_something": 3}}}, "attention_something"),
        ({"quantum_attention_rank": 7}, "quantum_attention_rank"),
        ({"new_softcap": 7.0}, "new_softcap"),
    ],
)
def test_a10_t3_what_the_engine_does_not_implement_is_named(changes, attribute):
    facts = facts_from_config(config(**changes))
    assert [name for name, _ in facts.unsupported] == [attribute]
    assert facts.unsupported[0][1].endswith((".", ";"))


@pytest.mark.parametrize("off", [None, False, 0, 0.0, [], {}])
def test_an_attribute_that_is_off_is_no_mechanism(off):
    assert unsupported(quantum_attention_rank=off, attn_type=off) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "attention_dropout": 0.1},
        {"query_pre_attn_scalar": 256, "attention_multiplier": 0.0078125},
        {"chunk_size_feed_forward": 64, "final_logit_softcapping": 30.0},
        {
            "image_token_index": 7,
            "decoder_sparse_step": 1,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        },
    ],
)
def test_what_transformers_does_itself_is_harmless(changes):
    assert unsupported(**changes) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2048),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}}, 2048),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 2048),
    ],
)  # fmt: skip
def test_max_context(changes, expected):
    assert facts_from_config(config(**changes)).max_context == expected


def test_the_language_part_of_a_multimodal_config():
    facts = facts_from_config(
        {"model_type": "gemma3", "vision_config": {"num_attention_heads": 7, "window_size": 3},
         "text_config": config(model_type="gemma3_text", num_key_value_heads=2)}
    )  # fmt: skip
    assert (facts.model_type, facts.layers[0].shape) == ("gemma3_text", KVShape(2, 16, 16))
    assert facts.unsupported == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers .*, got 'four'"),
        ({"hidden_size": 66}, "hidden size of 66"),
        ({"num_key_value_heads": True}, "num_key_value_heads .*, got True"),
        ({"layer_types": ["full_attention"] * 3}, "lists 3 layer types for 4 layers"),
        *(
            (
                {"num_attention_heads": q, "num_key_value_heads": 2, "head_dim": 16},
                f"{q} query heads on 2 KV heads in layer 0",
            )
            for q in (33, 3)
        ),
    ],
)
def test_a_config_that_describes_no_decoder_is_an_error(changes, words):
    with pytest.raises(UsageError, match=words):
        facts_from_config(config(**changes))
