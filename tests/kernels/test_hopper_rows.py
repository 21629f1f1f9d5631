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
    (RowsTiling(2, 1, 128, 5), 4),
    (RowsTiling(2, 2, 128, 4), 3),
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
