"""The Hopper FP8 product of few rows without a GPU: its tiles, what it refuses, what the compiler makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench_kernels.blockwise import empty_activation_scales, quantize_activation_torch, quantize_blocks
from kvbench_kernels.hopper_rows import hopper_rows
from kvbench_kernels.hopper_rows_config import (
    MEASURED,
    RowsTiling,
    config,
    pieces,
    supports_hopper_rows,
)
from kvbench_kernels.support import Accepted, Rejected

ROOT = Path(__file__).resolve().parents[2]
COMPILED = [
    (RowsTiling(2, 1, 64, 8), 4),
    (RowsTiling(2, 1, 128, 5), 3),
    (RowsTiling(2, 2, 64, 5), 4),
    (RowsTiling(1, 1, 32, 8), 1),
    (RowsTiling(2, 1, 64, 11, turns=True), 2),
    (RowsTiling(2, 2, 32, 9, turns=True), 2),
]


def facts(numbers: list[Any], sharing: int, bias: bool) -> dict[str, Any]:
    """What compiling for an H200 gives. Called in a process that does not interpret."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from kvbench_kernels.hopper_rows import REGISTERS
    from kvbench_kernels.hopper_rows_kernel import hopper_w8a8_rows

    tiling = RowsTiling(*numbers)

    def boxes(dtype: str, bits: int, box: list[int], swizzle: int) -> str:
        return f"tensordesc<{dtype}{box},{NVMMASharedLayout(swizzle, bits, len(box))!r}>"

    constants = {
        "GROUPS": tiling.groups, "PARTS": tiling.parts, "TOKENS": tiling.tokens, "STAGES": tiling.stages,
        "PIECES": sharing, "HAS_BIAS": bias, "EARLY": tiling.early, "TURNS": tiling.turns,
    }  # fmt: skip
    types = {
        "w_desc": boxes("fp8e4nv", 8, [64, 128], 128), "x_desc": boxes("fp8e4nv", 8, [tiling.tokens, 128], 128),
        "s_desc": boxes("fp32", 32, [tiling.tokens], 0), "y_desc": boxes("bf16", 16, [tiling.tokens, 64], 128),
        "w_scales": "*fp32", "bias": "*bf16", "parts": "*fp32", "tickets": "*i32",
    }  # fmt: skip
    names = [parameter.name for parameter in hopper_w8a8_rows.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")
    }
    built = triton.compile(
        GluonASTSource(hopper_w8a8_rows, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "maxnreg": REGISTERS[tiling.groups]},
    )
    ptx = built.asm["ptx"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    work = Path(os.environ["WORK"])
    (work / "kernel.cubin").write_bytes(built.asm["cubin"])
    (work / "kernel.ptx").write_text(ptx)
    (work / "kernel.ttgir").write_text(built.asm["ttgir"])
    usage = subprocess.run(
        [tool, "-res-usage", work / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    return {
        "products": sorted(set(re.findall(r"wgmma\.mma_async\S+", ptx))),
        "count": len(re.findall(r"wgmma\.mma_async", ptx)),
        "atomics": len(re.findall(r"atom\.global", ptx)),
        "waits": len(re.findall(r"griddepcontrol\.wait", ptx)),
        "warps": built.metadata.num_warps,
        "shared": built.metadata.shared,
        "usage": usage,
    }


def compiled(tiling: RowsTiling, sharing: int, where: Path, bias: bool = False) -> dict[str, Any]:
    code = "from tests.kernels.test_hopper_rows import facts; import json, sys; print(json.dumps(facts(*json.loads(sys.argv[1]))))"
    numbers = [getattr(tiling, name) for name in RowsTiling.__dataclass_fields__]
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "WORK": str(where)}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([numbers, sharing, bias])],
        env=clean, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(("tiling", "sharing"), COMPILED, ids=str)
def test_the_compiler_gives_fp8_products_without_spilled_registers(
    tiling: RowsTiling, sharing: int, tmp_path: Path
) -> None:
    found = compiled(tiling, sharing, tmp_path, bias=tiling.parts == 2)
    shape = f"m64n{tiling.tokens}k32"
    assert found["products"] == [f"wgmma.mma_async.sync.aligned.{shape}.f32.e4m3.e4m3"]
    assert found["count"] == 4 * tiling.groups * tiling.parts  # 128 columns
    assert found["atomics"] == (tiling.across if sharing > 1 else 0)
    assert found["waits"] == tiling.across + 1
    assert found["warps"] == 4 * (tiling.groups + 1)
    assert found["shared"] <= tiling.shared_bytes
    assert "STACK:0 " in found["usage"]


def test_every_tiling_of_the_table_can_be_built() -> None:
    for (m, n, _), tiling in MEASURED.items():
        assert tiling.problem(m) is None
        assert n % tiling.rows == 0
    for tiling, _ in COMPILED:
        assert tiling.problem(tiling.tokens) is None
    for m in (1, 17, 32, 33, 64, 65, 128):
        for n, k in ((128, 128), (6144, 4096), (4096, 12288), (100_096, 4096)):
            chosen = config(m, n, k)
            assert chosen.problem(m) is None
            assert n % chosen.rows == 0
            assert chosen.programs >= 1


@pytest.mark.parametrize(
    ("tiles", "steps", "programs"),
    [(1, 1, 1), (48, 32, 132), (32, 32, 128), (3, 5, 7), (3, 5, 15), (24, 96, 5)],
)
def test_programs_share_the_units_evenly_and_have_at_most_two_pieces(
    tiles: int, steps: int, programs: int
) -> None:
    units = tiles * steps
    owners: list[set[int]] = [set() for _ in range(tiles)]
    slots: set[tuple[int, bool]] = set()
    for program in range(programs):
        first, end = program * units // programs, (program + 1) * units // programs
        assert units // programs <= end - first <= units // programs + 1
        for tile in range(first // steps, (end - 1) // steps + 1):
            start, stop = max(first - tile * steps, 0), min(end - tile * steps, steps)
            assert start < stop
            owners[tile].add(program)
            for unit in (tile * steps + start, tile * steps + stop - 1):
                assert ((unit + 1) * programs - 1) // units == program
            if stop - start < steps:
                # Where the kernel puts the piece, and where it looks for it.
                head = ((tile * steps + 1) * programs - 1) // units
                assert (start == 0) == (program == head)
                assert (program, start == 0) not in slots
                slots.add((program, start == 0))
    assert max(map(len, owners)) == pieces(tiles, steps, programs)
    assert all(owner == set(range(min(owner), max(owner) + 1)) for owner in owners)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": 3}, "3 groups of 1 parts and 64 tokens make no tile"),
        ({"tokens": 48}, "48 tokens make no tile"),
        ({"tokens": 32}, "40 rows of x exceed the tile's 32"),
        ({"stages": 1}, "1 stages and 0 programs"),
        ({"stages": 9}, "9 stages take 240528 bytes of shared memory, and 232448 exist"),
        ({"groups": 1, "turns": True}, "turns of 1 groups"),
    ],
)
def test_what_is_no_tiling(changes: dict[str, Any], words: str) -> None:
    problem = replace(COMPILED[0][0], **changes).problem(40)
    assert problem is not None
    assert words in problem


def test_supports() -> None:
    assert supports_hopper_rows(17, 128, 128, "bfloat16") == Accepted()
    assert supports_hopper_rows(128, 24576, 4096, "float16") == Accepted()
    for arguments, reason in {
        (32, 24576, 4096, "float32"): "dtype",
        (0, 128, 128, "bfloat16"): "rows",
        (129, 128, 128, "bfloat16"): "rows",
        (32, 192, 128, "bfloat16"): "shape",
        (32, 128, 576, "bfloat16"): "shape",
    }.items():
        answer = supports_hopper_rows(*arguments)
        assert isinstance(answer, Rejected)
        assert answer.reason == reason


def test_what_is_refused() -> None:
    torch.manual_seed(0)
    x, sx = quantize_activation_torch(torch.randn(5, 256))
    w, sw = quantize_blocks(torch.randn(128, 256))
    with pytest.raises(ValueError, match="on cpu; the Hopper product takes one CUDA device"):
        hopper_rows(x, sx, w, sw)
    with pytest.raises(ValueError, match=r"codes of x are \[5, 256\] torch.float32"):
        hopper_rows(x.float(), sx, w, sw)
    with pytest.raises(ValueError, match="128 x 128 cannot multiply x of 5 x 256"):
        hopper_rows(x, sx, w[:, :128].contiguous(), sw)
    with pytest.raises(ValueError, match="A weight of 64 x 256 is no whole number"):
        hopper_rows(x, sx, w[:64], sw)
    with pytest.raises(ValueError, match="Results of float32"):
        hopper_rows(x, sx, w, sw, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="129 rows of x; it takes 1 to 128"):
        hopper_rows(x[:1].expand(129, 256).contiguous(), empty_activation_scales(129, 256, x.device), w, sw)
    with pytest.raises(
        ValueError, match=r"dense along M, with columns at .* Make them with empty_activation_scales"
    ):
        hopper_rows(x, sx.contiguous(), w, sw)
    # The copy engine cannot begin at the second column of these.
    with pytest.raises(ValueError, match="columns at multiples of 16 bytes"):
        hopper_rows(x, torch.empty(2, 5).t(), w, sw)
    with pytest.raises(ValueError, match=r"scales of w are \[1, 1\]"):
        hopper_rows(x, sx, w, sw[:, :1])
    with pytest.raises(ValueError, match=r"bias is \[128\] torch.float32"):
        hopper_rows(x, sx, w, sw, torch.zeros(128))
    with pytest.raises(ValueError, match=r"out is \[5, 64\]"):
        hopper_rows(x, sx, w, sw, out=torch.empty(5, 64, dtype=torch.bfloat16))
