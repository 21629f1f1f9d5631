"""The engine on the Triton backend, its kernels run by the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbench.engine import attention, evidence
from kvbench.engine.layerprobe import probe_layers
from kvbench.engine.probes import probe_prefill, probe_values
from kvbench.formats import KV_FORMATS
from kvbench.record import MISMATCH, VERIFIED, Level
from kvbench_kernels import quantize, route

IDS = [(37 * i + 11) % 97 for i in range(40)]
FORMATS = ["native", "int8_sym", "fp8_e4m3_static"]


def logits(made: Any) -> torch.Tensor:
    """Two prompts of other lengths in a packed forward, more tokens of both, then a decode step."""
    a, b = made.add(), made.add()
    out = made.forward([(a, IDS[:14]), (b, IDS[3:12])])
    out += made.forward([(a, IDS[14:18]), (b, IDS[12:14])], "all")
    out.append(made.decode([a, b], [5, 6]))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("kv_format", "splits"), [*((name, None) for name in KV_FORMATS), ("int8_sym", 1), ("int8_sym", 3)]
)
def test_logits_equal_those_of_the_torch_backend(engine: Any, kv_format: str, splits: int | None) -> None:
    """But for codes that lie on a tie: the last bits of a layer's output can move the next one's codes by one."""
    due = logits(engine("tiny-llama", kv_format))
    found = logits(engine("tiny-llama", kv_format, backend="triton", kv_splits=splits))
    share = 1e-5 if kv_format == "native" else 5e-2
    torch.testing.assert_close(found, due, rtol=0, atol=share * due.abs().max().item())
    assert torch.nn.functional.cosine_similarity(found, due, dim=-1).min() > 0.9995


@pytest.mark.parametrize("model", ["tiny-gemma2", "tiny-gpt-oss"])
def test_windows_soft_caps_and_sinks_equal_those_of_the_torch_backend(engine: Any, model: str) -> None:
    due, found = (logits(engine(model, "native", backend=name, page_size=16)) for name in ("torch", "triton"))
    torch.testing.assert_close(found, due, rtol=0, atol=1e-5 * due.abs().max().item())


def take(engine: Callable[..., Any], kv_format: str) -> dict[str, Level]:
    def make(sequences: int, tokens: int) -> Any:
        return engine("tiny-llama", kv_format, sequences=sequences, tokens=tokens, backend="triton")

    made = make(1, 32)
    seq = made.add()
    made.prefill(seq, IDS[:6])
    made.decode([seq], [7])
    layers = len(made.layers)
    probes = (probe_layers(make, layers, 16), probe_prefill(make, layers), probe_values(make, 16))
    return {level.name: level for level in evidence.examine(made, *probes, reads_due=True).levels}


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_sound_engine_is_verified_at_every_level(engine: Any, kv_format: str) -> None:
    levels = take(engine, kv_format)
    assert {level.state for level in levels.values()} == {VERIFIED}, levels
    e4 = levels["E4"].facts
    assert e4["backend"] == ("gpu" if torch.cuda.is_available() else "interpreter")
    assert e4["decode"] == {f"kv_write_{kv_format}": 1.0, "paged_decode_split": 1.0}
    assert set(e4["prompt"]) == {
        f"kv_write_{kv_format}",
        f"kv_gather_{kv_format}",
        "scaled_dot_product_attention",
    }


def test_attention_by_torch_under_a_triton_request_is_named(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dropped(store: Any, chunk: Any, **options: Any) -> Any:
        return attention.TorchAttention(store, chunk, **options)

    monkeypatch.setitem(attention.ATTENTION, "triton", dropped)
    level = take(engine, "int8_sym")["E4"]
    assert level.state == MISMATCH
    assert "ran paged_attention_torch in a prompt, and backend triton was resolved" in level.sentence


def test_a_scale_that_the_decode_kernel_drops_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = route.decode_kernel

    def deaf(*shape: Any) -> Any:
        kernel = honest(*shape)
        return lambda fmt, q, k, v, ks, vs, *rest, **more: kernel(
            fmt, q, k, v, torch.ones_like(ks), vs, *rest, **more
        )

    monkeypatch.setattr(route, "decode_kernel", deaf)
    levels = take(engine, "int8_sym")
    assert levels["E3"].state == MISMATCH
    assert "changing every stored K scale changes no logit" in levels["E3"].sentence
    assert levels["E5"].state == MISMATCH


def test_a_quantizer_that_writes_other_bytes_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = quantize.quantize_int8_sym
    monkeypatch.setitem(quantize.QUANTIZE, "int8_sym", lambda x, scale: honest(x * 1.01))  # of the reference
    assert take(engine, "int8_sym")["E2"].state == MISMATCH
