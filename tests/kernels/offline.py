"""Compiles kernels for an H200 without one: `compiled(...)` calls a function of this module where Triton does
not interpret.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = "from tests.kernels import offline; import json, sys; f, a = json.loads(sys.argv[1]); print(json.dumps(getattr(offline, f)(*a)))"


def compiled(function, *arguments):
    """The result of a function of this module, called in a process of its own, since this one may interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-c", CODE, json.dumps([function, arguments])]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def build(kernel, constants, types, aligned, source=None, **options):
    """The compiled kernel, with `.asm` and `.metadata`. types: of the other arguments, i32 where none is
    given.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    fixed = {name: value for name, value in constants.items() if name in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name in aligned and name not in constants)
    }
    made = (source or ASTSource)(kernel, signature, fixed, attrs)
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(kernel):
    """Bytes of local memory per thread: more than 0 where registers were spilled."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", report.stdout))


def products_of(kernel):
    """The tensor-core instructions, each once."""
    return sorted(set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]*", kernel.asm["ptx"])))


def attention(kind, fmt, dtype_name, head_dim=64, group=4, kv_heads=8):
    """Accumulator and operands of every tensor-core instruction, ["f32.f16.f16"], of "decode" or "prefill"."""
    import torch

    from kvbench.formats.kv import KV_FORMATS
    from kvbench_kernels.attention import decode, prefill
    from kvbench_kernels.attention.tiles import kernel_options
    from kvbench_kernels.kv.layout import DTYPES, LayerPages

    pointer = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv"}  # fmt: skip
    dtype, layout = getattr(torch, dtype_name), KV_FORMATS[fmt]
    payload = DTYPES[layout.payload_dtype] if layout.payload_dtype else dtype
    pages = torch.empty(1, kv_heads, 16, head_dim, dtype=payload)
    options = kernel_options(LayerPages(layout, pages, pages, None, None), kv_heads * group, dtype)
    if kind == "decode":
        kernel = decode.paged_decode_split
        tuning = {"M": 16 if group <= 16 else 32, **decode._tuning(options)}
    else:
        kernel, tuning = prefill.paged_prefill_causal, prefill._tuning(options, 4096)
    built = {name: tuning.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**options, **tuning, "SOFTCAP": None, "sinks_ptr": None, "window": None}
    types = {
        "q_ptr": pointer[dtype], "k_ptr": pointer[payload], "v_ptr": pointer[payload], "table_ptr": "*i32",
        "lengths_ptr": "*i32", "starts_ptr": "*i32", "reads_ptr": "*i64", "out_ptr": pointer[dtype],
        "partial_ptr": "*fp32", "statistics_ptr": "*fp32", "scaling": "fp32",
    }  # fmt: skip
    for name in ("k_scale_ptr", "v_scale_ptr"):
        if layout.scale_dtype:
            types[name] = pointer[DTYPES[layout.scale_dtype]]
        else:
            constants[name] = None
    made = build(kernel, constants, types, ("q_stride_row", "q_stride_head"), **built)
    return sorted(
        {found[0] for found in map(re.compile(r"f32\.\w+\.\w+").search, products_of(made)) if found}
    )


def w8a8():
    """Tiling -> (its tensor-core instructions, its stack bytes), for bfloat16 results."""
    from kvbench_kernels.gemm.w8a8 import fp8_matmul_w8a8
    from kvbench_kernels.gemm.w8a8_config import Tiling

    tilings = {
        "128x128": Tiling(128, 128, warps=8),
        "64x128 split": Tiling(64, 128, splits=4),
        "64x64 swap": Tiling(64, 64, stages=6, swap=True),
        "32x64 swap pointers": Tiling(32, 64, swap=True, tma=False),
    }
    found = {}
    for name, tiling in tilings.items():
        constants = {
            "BIAS": False, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "SPLIT": tiling.splits > 1,
            "SWAP": tiling.swap, "EVEN_K": True, "TMA": tiling.tma, "WALK": tiling.ctas > 0,
            "PDL": tiling.pdl,
            "PREFETCH": tiling.prefetch,
        }  # fmt: skip
        types = dict.fromkeys(("x", "w", "w_memory"), "*fp8e4nv") | {"sx": "*fp32", "sw": "*fp32"}
        types |= {"bias": "*bf16", "y": "*bf16", "parts": "*fp32", "tickets": "*i32"}
        if tiling.tma:
            types["x"] = f"tensordesc<fp8e4nv[{tiling.block_m}, 128]>"
            types["w"] = f"tensordesc<fp8e4nv[{min(tiling.block_n, 128)}, 128]>"
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": tiling.pdl}
        kernel = build(fp8_matmul_w8a8, constants, types, ("n", "k", "stride_y"), **options)
        found[name] = products_of(kernel), stack_bytes(kernel)
    return found


def activation():
    """Rows and dtype -> (loads, stores, conversions and divisions, stack bytes); rows of 4096 columns."""
    from kvbench_kernels.gemm.activation import fp8_quantize_activation, launch_shape

    found = {}
    for m in (1, 16, 64, 8192):
        launch = launch_shape(m, 4096)
        constants = {"ROWS": launch.rows, "GROUPS": launch.groups, "VECTOR": launch.vector}
        constants |= {"EVEN_K": True, "PDL": True}
        for dtype in ("bf16", "fp16", "fp32"):
            types = {"x": f"*{dtype}", "codes": "*u8", "scales": "*fp32"}
            aligned = ("k", "stride_x", "stride_scales")
            kernel = build(
                fp8_quantize_activation, constants, types, aligned, num_warps=launch.warps, launch_pdl=True
            )
            seen = re.findall(
                r"\b(?:(?:ld|st)\.global|cvt\.rn\.satfinite|div|rcp)\.[\w.]+", kernel.asm["ptx"]
            )
            found[f"{m} {dtype}"] = sorted(set(seen)), stack_bytes(kernel)
    return found


def w8a16(m, dtype, fields):
    """The tensor-core shapes, local loads and stores, and stack bytes of a tiling for K = 4096."""
    from kvbench_kernels.gemm.w8a16 import w8a16_dot, w8a16_vector
    from kvbench_kernels.gemm.w8a16_config import Tiling, rows_padded
    from kvbench_kernels.splitk import splits_used

    tiling = Tiling(**fields)
    constants = {
        "BIAS": True, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
        "SPLITS": splits_used(tiling, 4096),
        "STAGES": tiling.stages, "EVEN_K": True, "PDL": False,
    }  # fmt: skip
    if tiling.kind == "vector":
        kernel, constants = w8a16_vector, {**constants, "M": m}
    else:
        kernel = w8a16_dot
        constants |= {"M_PAD": rows_padded(m), "SWAP": tiling.swap, "CVT": tiling.cvt}
    types = {"codes": "*i8", "scales": "*fp32", "parts": "*fp32", "tickets": "*i32"}
    types |= dict.fromkeys(("x", "bias", "y"), f"*{dtype}")
    aligned = [name for name in kernel.arg_names if name != "m"]
    made = build(kernel, constants, types, aligned, num_warps=tiling.warps)
    shape = re.compile(r"(mma\.sync|wgmma\.mma_async)[\w.]*?\.(m\d+n\d+k\d+)")
    mma = sorted({" ".join(shape.match(text).groups()) for text in products_of(made)})
    return {
        "mma": mma,
        "local": len(re.findall(r"(?:ld|st)\.local", made.asm["ptx"])),
        "stack": stack_bytes(made),
    }


def hopper_gemm(numbers, bias):
    """What the compiler made of a tiling, given by its fields."""
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from kvbench_kernels.gemm.hopper_gemm import REGISTERS
    from kvbench_kernels.gemm.hopper_gemm_config import HopperTiling
    from kvbench_kernels.gemm.hopper_gemm_kernel import hopper_w8a8_groups

    tiling = HopperTiling(*numbers)

    def boxes(dtype, bits, rows, columns, swizzle=128):
        return f"tensordesc<{dtype}[{rows}, {columns}],{NVMMASharedLayout(swizzle, bits, 2)!r}>"

    constants = {
        "PARTS": tiling.parts, "BLOCK_N": tiling.block_n, "STAGES": tiling.stages, "GROUP": tiling.height,
        "HAS_BIAS": bias, "GROUPS": tiling.groups, "BUFFERS": tiling.buffers, "TURNS": tiling.turns,
        "SPLIT": tiling.splits > 1,
    }  # fmt: skip
    types = {
        "x_desc": boxes("fp8e4nv", 8, 64, 128), "w_desc": boxes("fp8e4nv", 8, tiling.block_n, 128),
        "y_desc": boxes("bf16", 16, 64, tiling.block_n), "scale_desc": boxes("fp32", 32, 1, 64, 0),
        "w_scales": "*bf16" if bias else "*fp32", "bias": "*bf16", "parts": "*fp32", "tickets": "*i32",
    }  # fmt: skip
    if tiling.splits == 1:
        constants |= {"parts": None, "tickets": None}
    options = {"num_warps": 4, "maxnreg": REGISTERS[tiling.groups], "launch_pdl": True}
    made = build(hopper_w8a8_groups, constants, types, (), GluonASTSource, **options)
    ptx = made.asm["ptx"]
    return {
        "products": products_of(made),
        "count": len(re.findall(r"wgmma\.mma_async", ptx)),
        "registers": "setmaxnreg" in ptx,
        "barriers": ptx.count("mbarrier.init"),
        "waits": ptx.count("griddepcontrol.wait"),
        "lets_go": ptx.count("griddepcontrol.launch_dependents"),
        "warps": made.metadata.num_warps,
        "shared": made.metadata.shared,
        "stack": stack_bytes(made),
    }


def kv(fmt):
    """The compiled names and stack bytes of the write and the gather of a KV format, for bfloat16 and heads of 128."""
    from kvbench.formats.kv import KV_FORMATS
    from kvbench_kernels.kv import gather, write

    layout = KV_FORMATS[fmt]
    codes = {None: ("*bf16", "*bf16"), "int8": ("*i8", "*i8"), "float8_e4m3fn": ("*u8", "*i8")}
    written, read = codes[layout.payload_dtype]
    scale = {None: None, "float16": "*fp16", "float32": "*fp32"}[layout.scale_dtype]
    fixed = dict.fromkeys(("DIM", "VALUE_DIM", "BLOCK", "VALUE_BLOCK"), 128)
    fixed |= {"FMT": fmt, "HEADS": 8, "PAGE_SIZE": 16, "TOKENS": 32, "ROWS": 4}
    fixed |= {"E4M3": layout.payload_dtype == "float8_e4m3fn", "ROW_SCALE": layout.scale_per_row}
    found = {}
    for kernel, payload, tensors in (
        (write._kv_write, written, {"k": "*bf16", "v": "*bf16", "slots": "*i64", "health": "*i64"}),
        (gather._kv_gather, read, {"k": "*bf16", "v": "*bf16", "table": "*i32", "reads": "*i64"}),
    ):
        constants = dict(fixed)
        types = {**tensors, "k_pages": payload, "v_pages": payload}
        if scale is None:
            constants |= {"k_scale": None, "v_scale": None}
        else:
            types |= {"k_scale": scale, "v_scale": scale}
        names = {parameter.name for parameter in kernel.params}
        made = build(kernel, {n: v for n, v in constants.items() if n in names}, types, (), num_warps=4)
        found[made.metadata.name] = stack_bytes(made)
    return found
