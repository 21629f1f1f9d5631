"""How a Hopper decode call is divided, and what is refused with which reason."""

from dataclasses import replace

import pytest

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention.hopper_plan import (
    FOUR_WARPS,
    FOUR_WARPS_DEEP,
    MAX_SPLITS,
    ONE_WARP,
    ONE_WARP_DEEP,
    TWO_WARPS,
    Plan,
    execution,
    plan_decode,
    supports_hopper,
)
from kvbench_kernels.support import Accepted, AttentionNeeds, Rejected

H200 = 132
NEEDS = AttentionNeeds(
    fmt=KV_FORMATS["int8_sym"],
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    value_dim=128,
    page_size=16,
    dtype="bfloat16",
    device="cuda",
)


@pytest.mark.parametrize(
    ("fmt", "batch", "length", "expected"),
    [
        ("int8_sym", 1, 1024, Plan(16, 1, FOUR_WARPS)),
        ("int8_sym", 1, 8192, Plan(32, 1, FOUR_WARPS)),
        ("int8_sym", 1, 131072, Plan(49, 1, FOUR_WARPS)),
        ("int8_sym", 8, 4096, Plan(6, 1, FOUR_WARPS)),
        ("int8_static", 8, 32768, Plan(8, 1, TWO_WARPS)),
        ("int8_sym", 64, 8192, Plan(1, 1, TWO_WARPS)),
        ("fp8_e4m3", 1, 1024, Plan(16, 1, FOUR_WARPS)),
        ("fp8_e4m3", 8, 4096, Plan(8, 1, ONE_WARP)),
        ("fp8_e4m3_static", 8, 32768, Plan(16, 1, ONE_WARP)),
        ("fp8_e4m3", 64, 1024, Plan(1, 1, TWO_WARPS)),
        ("native", 1, 1024, Plan(16, 1, FOUR_WARPS_DEEP)),
        ("native", 1, 131072, Plan(33, 1, ONE_WARP_DEEP)),
        ("native", 8, 4096, Plan(4, 1, ONE_WARP)),
        ("native", 64, 8192, Plan(1, 1, ONE_WARP)),
    ],
)
def test_measured_cells(fmt, batch, length, expected):
    assert plan_decode(KV_FORMATS[fmt], batch, 8, length, H200) == expected


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_every_program_has_a_tile_and_is_resident(fmt):
    for batch in (1, 2, 3, 7, 16, 33, 64, 500):
        for kv_heads in (1, 2, 8):
            for length in (0, 1, 15, 64, 65, 1000, 5000, 131_072):
                plan = plan_decode(KV_FORMATS[fmt], batch, kv_heads, length, H200)
                tiles = max(1, -(-length // plan.tiling.tile))
                assert 1 <= plan.splits <= min(tiles, MAX_SPLITS)
                # 8 programs of one warp, 6 of two or 3 of four fit an SM.
                resident = {1: 8, 2: 6, 4: 3}[plan.tiling.warps] * H200
                assert plan.splits == 1 or batch * kv_heads * plan.splits <= resident


def test_mixed_lengths_get_more_and_smaller_programs():
    lengths = [65536] + [4096] * 31
    mixed = plan_decode(KV_FORMATS["int8_sym"], 32, 8, max(lengths), H200, sum(lengths) / 32)
    alike = plan_decode(KV_FORMATS["int8_sym"], 32, 8, max(lengths), H200)
    assert (alike.splits, alike.least) == (2, 1)
    assert (mixed.splits, mixed.least) == (31, 530)
    # The long sequence's programs have about four times the tokens of a short one's.
    assert 65536 / mixed.splits < 4.2 * mixed.least


def test_execution():
    assert execution(KV_FORMATS["native"], "bfloat16") == "bfloat16 x bfloat16 -> float32"
    assert execution(KV_FORMATS["int8_sym"], "bfloat16") == "float16 x float16 -> float32"


def test_what_is_served():
    assert supports_hopper(NEEDS, (9, 0)) == Accepted()
    assert (
        supports_hopper(replace(NEEDS, q_heads=9, kv_heads=3, head_dim=64, value_dim=64), (9, 0))
        == Accepted()
    )


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({}, (8, 0), "no_hopper"),
        ({}, (10, 0), "no_hopper"),
        ({"device": "cpu"}, (9, 0), "no_hopper"),
        ({"interpreter": True}, (9, 0), "no_hopper"),
        ({"dtype": "float32"}, (9, 0), "dtype"),
        ({"q_heads": 33}, (9, 0), "heads_do_not_divide"),
        ({"q_heads": 136}, (9, 0), "group"),
        ({"head_dim": 96, "value_dim": 96}, (9, 0), "head_dim"),
        ({"value_dim": 64}, (9, 0), "head_dim"),
        ({"page_size": 8}, (9, 0), "page_size"),
        ({"sliding_window": 64}, (9, 0), "sliding_window"),
        ({"softcap": 50.0}, (9, 0), "softcap"),
        ({"sinks": True}, (9, 0), "sinks"),
    ],
)
def test_what_is_refused(changes, capability, reason):
    answer = supports_hopper(replace(NEEDS, **changes), capability)
    assert isinstance(answer, Rejected)
    assert answer.reason == reason
