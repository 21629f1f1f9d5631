"""What the attention kernels accept, and the words of what they do not."""

from dataclasses import replace

import pytest

from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix import resolve_backend as decision
from kvbench_kernels import support
from kvbench_kernels.support import Accepted, AttentionNeeds, Rejected, StoredFormat, supports

QWEN = AttentionNeeds(KV_FORMATS["int8_sym"], 32, 8, 128, 128, 16, "bfloat16", "cuda")


@pytest.mark.parametrize(
    "change",
    [
        {},
        *({"fmt": fmt} for fmt in KV_FORMATS.values()),
        *({"head_dim": d, "value_dim": d} for d in (16, 64, 80, 96, 112, 128, 192, 256)),
        {"head_dim": 192},
        *({"page_size": p} for p in (16, 32, 64)),
        *({"q_heads": 8 * g} for g in (1, 3, 7, 24)),
        {"q_heads": 71, "kv_heads": 1},
        *({"dtype": d} for d in ("float16", "float32")),
        {"sliding_window": 4096, "softcap": 50.0, "sinks": True},
        {"device": "cpu", "interpreter": True},
    ],
)
def test_what_is_accepted(change):
    assert supports(replace(QWEN, **change)) == Accepted()


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"device": "cpu"}, "no_gpu", "the cache is on 'cpu'; use torch"),
        (
            {"fmt": StoredFormat("int4", "int8", "tensor", "float32", ("torch",))},
            "kv_format",
            "KV format 'int4'",
        ),
        ({"dtype": "float64"}, "dtype", "no query dtype float64"),
        ({"q_heads": 33, "kv_heads": 2}, "heads_do_not_divide", "33 query heads on 2 KV heads"),
        ({"q_heads": 3, "kv_heads": 2}, "heads_do_not_divide", "3 query heads on 2 KV heads"),
        ({"kv_heads": 0}, "heads_do_not_divide", "32 query heads on 0 KV heads"),
        ({"head_dim": 72}, "head_dim", "no head_dim 72; they take multiples of 16 from 16 to 256"),
        ({"head_dim": 576}, "head_dim", "no head_dim 576"),
        ({"value_dim": 8}, "value_dim", "no value_dim 8"),
        ({"page_size": 8}, "page_size", "no page size 8 tokens; they take 16, 32, 64"),
        ({"sliding_window": 0}, "sliding_window", "0 tokens"),
        ({"softcap": 0.0}, "softcap", "0.0"),
        ({"softcap": float("nan")}, "softcap", "nan"),
    ],
)
def test_what_is_rejected_and_in_which_words(change, reason, words):
    answer = supports(replace(QWEN, **change))
    assert isinstance(answer, Rejected)
    assert answer.reason == reason
    assert words in answer.sentence


def test_the_resolver_and_the_kernels_speak_of_the_same_answers():
    assert decision.Accepted is support.Accepted
    assert decision.Rejected is support.Rejected


@pytest.mark.parametrize(
    ("value", "due"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False), (None, False)]
)
def test_the_interpreter_is_told_as_triton_tells_it(monkeypatch, value, due):
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert support.interpreting() is due
