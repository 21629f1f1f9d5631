"""What a decode step reads, and the settings that it ran with, off real engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvbench.runners import latency
from kvbench.runners.latency import device_facts, kv_bytes_per_token, step_weight_bytes
from kvbench.runners.storage import weights_bytes


class Decoder(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed_tokens = nn.Embedding(100, 8)
        self.proj = nn.Linear(8, 8, bias=False)
        self.experts = nn.ModuleList([nn.Linear(8, 16, bias=False) for _ in range(4)])
        self.lm_head = nn.Linear(8, 100, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_the_output_layer_once_and_neither_embedding_nor_experts(tied):
    model = Decoder(tied)
    assert step_weight_bytes(model) == 4 * (8 * 8 + 100 * 8)
    assert weights_bytes(model) == step_weight_bytes(model) + 4 * 4 * 8 * 16 + (0 if tied else 4 * 100 * 8)


def test_bytes_of_a_token_are_those_of_the_live_pages(runner_context):
    """tiny-llama in float32: int8_sym takes (D + 2) / (4 D) of native."""
    engine = runner_context("latency", kv_format="int8_sym").engine(sequences=2, tokens=33)
    layers = len(engine.layers)
    heads, dim = engine.layers[0].shape.kv_heads, engine.layers[0].shape.head_dim
    assert kv_bytes_per_token(engine) == layers * 2 * heads * (dim + 2)
    native = runner_context("latency").engine(sequences=2, tokens=33)
    assert kv_bytes_per_token(native) == layers * 2 * heads * dim * 4


def test_layers_with_a_window_are_left_out(runner_context):
    from dataclasses import replace

    engine = runner_context("latency").engine(sequences=1, tokens=16)
    whole = kv_bytes_per_token(engine)
    engine.layers = (replace(engine.layers[0], sliding_window=8), *engine.layers[1:])
    assert kv_bytes_per_token(engine) == whole * (len(engine.layers) - 1) / len(engine.layers)


def test_no_copy_is_timed_on_a_cpu():
    facts = device_facts(torch.device("cpu"))
    assert facts == {"copy_gb_s": None, "copy_reason": "no copy is timed on a cpu", "cache_bytes": None}


def test_both_arms_say_what_they_are_and_read_and_requests_have_totals(runner_context, as_baseline):
    keys = {"batch": 2, "context": 17, "new_tokens": 3, "repeats": 1}
    ctx = runner_context("latency", **keys)
    alone = latency.run(ctx)
    assert set(alone.facts["arms"]) == {"candidate"}
    measured = latency.run(
        runner_context("latency", baseline=as_baseline(ctx, alone), kv_format="int8_sym", **keys)
    )
    own, native = (measured.facts["arms"][name] for name in ("candidate", "baseline"))
    assert own["settings"] == native["settings"]
    assert (own["settings"]["backend"], own["settings"]["dtype"]) == ("torch", "float32")
    assert own["settings"]["kernels"]
    assert own["reads"]["weight_bytes"] == native["reads"]["weight_bytes"] > 0
    dim = runner_context("latency").model.layers[0].shape.head_dim
    ratio = own["reads"]["kv_bytes_per_token"] / native["reads"]["kv_bytes_per_token"]
    assert ratio == (dim + 2) / (4 * dim)
    assert measured.facts["copy_reason"] == "no copy is timed on a cpu"
    for request in measured.samples["arms"]:
        assert request["total_ms"] == pytest.approx(request["ttft_ms"] + sum(request["itl_ms"]))
