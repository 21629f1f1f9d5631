"""Every kernel once, on small shapes, for compute-sanitizer; each result is also set against its torch twin.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck  python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.sanitize

Run it once without compute-sanitizer first: it then finds the kernels compiled, which takes longest under it. Formats after
the command (`int8_sym native`) are the only ones that run, so that several can run side by side. Without the
caching allocator every tensor is an allocation of its own, so that memcheck sees an access past its end.
Prints one line a kernel and shape; exit code 1 when a result is wrong (compute-sanitizer has its own for what it finds).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvbench.engine.layer import allocate_layer
from kvbench.formats import KV_FORMATS, KVShape
from kvbench_kernels import decode, gather, prefill, skinny_linear, twins, write
from kvbench_kernels.launches import record
from kvbench_kernels.route import decode_kernel
from kvbench_kernels.support import AttentionNeeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there by the interpreter: TRITON_INTERPRET=1
PAGE, LENGTHS = 16, (1, 17, 70)
SHAPES = ((8, 2, 128), (9, 3, 64), (4, 2, 80))  # query heads, KV heads, head dim


def main() -> int:
    torch.manual_seed(0)
    formats, wrong = sys.argv[1:] or list(KV_FORMATS), 0
    for fmt in formats:
        for heads in SHAPES:
            wrong += attention(fmt, *heads)
    for m in (1, 5, 16):
        x, w = (torch.randn(n, 576, device=DEVICE, dtype=torch.float16) for n in (m, 200))
        wrong += report("skinny_linear", skinny_linear.skinny_linear(x, w), x.double() @ w.double().T, 2e-2)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{', '.join(formats)}: " + ("all as their twins" if not wrong else f"{wrong} wrong"))
    return 1 if wrong else 0


def attention(fmt: str, q_heads: int, kv_heads: int, dim: int) -> int:
    """Write, gather, decode and prefill of three ragged sequences."""
    counts = [-(-n // PAGE) for n in LENGTHS]
    scale = (0.05, 0.05) if KV_FORMATS[fmt].scale_kind == "static" else None
    shape = KVShape(kv_heads, dim, dim)
    live = allocate_layer(KV_FORMATS[fmt], shape, PAGE, sum(counts), torch.bfloat16, DEVICE, scale)
    table = torch.full((len(LENGTHS), max(counts)), -1, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(sum(counts), device=DEVICE).int()
    slots, first = [], 0
    for row, (n, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        table[row, :count] = order[first : first + count]
        token = torch.arange(n, device=DEVICE)
        slots.append(table[row, token // PAGE].long() * PAGE + token % PAGE)
        first += count
    tokens = sum(LENGTHS)
    q, k, v = (randn(tokens, heads, dim) for heads in (q_heads, kv_heads, kv_heads))
    health, reads = (torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (3, 2))
    pages = (live.k, live.v, live.k_scale, live.v_scale)
    write.paged_write(fmt, k, v, torch.cat(slots), *pages, health)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    ends = lengths.cumsum(0)
    starts = torch.cat((torch.zeros(1, device=DEVICE), ends)).int()
    wrong = 0
    found, due = (f(fmt, *pages, table[2:], 70, torch.bfloat16, reads) for f in (gather.paged_gather, twins.paged_gather_torch))  # fmt: skip
    wrong += report(f"gather {fmt} {dim}", found[0], due[0], 0)
    where = (table, lengths)
    last = q[ends - 1]
    needs = AttentionNeeds(fmt, q_heads, kv_heads, dim, dim, PAGE, "bfloat16", DEVICE)
    due = twins.paged_decode_torch(fmt, last, *pages, *where, dim**-0.5, splits=1)
    for splits in (1, 3):
        with record() as launches:
            kernel = decode_kernel(needs)
            found = kernel(fmt, last, *pages, *where, dim**-0.5, splits=splits, reads=reads)
        wrong += report(f"{launches[0].name} {fmt} {dim} splits {splits}", found, due, 2e-2)
        portable = decode.paged_decode(fmt, last, *pages, *where, dim**-0.5, splits=splits, reads=reads)
        wrong += report(f"paged_decode {fmt} {dim} splits {splits}", portable, due, 2e-2)
    chunk = (*where, starts, max(LENGTHS), dim**-0.5)
    found, due = (f(fmt, q, *pages, *chunk) for f in (prefill.paged_prefill, twins.paged_prefill_torch))
    return wrong + report(f"prefill {fmt} {dim}", found, due, 2e-2)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def report(name: str, found: Any, due: Any, share: float) -> int:
    """1 where found is further from due than this share of the largest element."""
    error = (found.double() - due.double()).abs().max().item()
    fine = error <= share * due.double().abs().max().item()
    if not fine:
        print(f"{name}: off by {error:.3g}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
