"""Perplexity through the pages against a plain transformers forward over the same chunks.

    python benchmarks/perplexity.py [--model smollm2-135m-instruct] [--chunks 8] [--rounds 3] [--formats
    native,int8_sym]

Correctness comes first: the native engine's summed NLL must equal the plain forward's to 1e-4 relative, or no
time is printed. Then the arms alternate for `rounds` rounds and the ratio of medians is reported; the last
line on stdout is one JSON object. Text: WikiText-2 test where KVBENCH_DATA_DIR has it, else the built-in
corpus.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvbench.data.fingerprint import corpus
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import load_model
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import Request, resolve

CHUNK = 512


def nll(logits: Tensor, ids: list[int]) -> float:
    """Summed NLL of tokens 1.. given logits [n, V] of positions 0..n-1, in float64."""
    logits = logits[:-1].float()
    targets = torch.tensor(ids[1:], device=logits.device)
    return float((logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]).double().sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", default="native,int8_sym,fp8_e4m3")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    spec = {**CELL_KEYS, "model": args.model, "device": device, "dtype": dtype, "batch": 1, "context": CHUNK}
    loaded = load_model(spec, device, dtype)
    plain = copy.deepcopy(loaded.model)
    plain.set_attn_implementation("sdpa")
    data_dir = os.environ.get("KVBENCH_DATA_DIR")
    name = "wikitext2" if data_dir else "pydoc"
    text = corpus(name, Path(data_dir) if data_dir else None, "test").text
    ids = loaded.tokenizer(text[: args.chunks * CHUNK * 8], add_special_tokens=False)["input_ids"]
    chunks = [ids[i * CHUNK : (i + 1) * CHUNK] for i in range(args.chunks)]

    def plain_pass() -> float:
        total = 0.0
        with torch.inference_mode():
            for chunk in chunks:
                out = plain(input_ids=torch.tensor([chunk], device=device), use_cache=False)
                total += nll(out.logits[0], chunk)
        return total

    def engine_pass(kv_format: str) -> Callable[[], float]:
        decision = resolve(Request(kv_format, "native", "torch", "refuse"), loaded.facts)
        engine = Engine(loaded, decision, spec, sequences=1, tokens=CHUNK)

        def run() -> float:
            total = 0.0
            for chunk in chunks:
                seq = engine.add()
                total += nll(engine.prefill(seq, chunk, "all"), chunk)
                engine.free(seq)
            return total

        return run

    arms: dict[str, Callable[[], float]] = {"plain transformers": plain_pass}
    arms |= {f: engine_pass(f) for f in args.formats.split(",")}
    sums = {arm: run() for arm, run in arms.items()}  # also the warm-up
    scored = sum(len(c) - 1 for c in chunks)
    difference = (
        abs(sums["native"] - sums["plain transformers"]) / sums["plain transformers"]
        if "native" in sums
        else None
    )
    if difference is not None and difference > 1e-4:
        raise SystemExit(
            f"The native engine's NLL differs from plain transformers' by {difference:.2e} relative; no time "
            "counts."
        )
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_ in range(args.rounds):
        order = list(arms) if round_ % 2 == 0 else list(reversed(arms))
        for arm in order:
            start = time.perf_counter()
            arms[arm]()
            times[arm].append(time.perf_counter() - start)
    base = statistics.median(times["plain transformers"])
    result = {
        "model": args.model,
        "data": name,
        "device": device,
        "dtype": dtype,
        "chunks": args.chunks,
        "scored": scored,
        "native_nll_relative_difference": difference,
        "arms": {
            arm: {
                "ppl": math.exp(sums[arm] / scored),
                "seconds": [round(t, 3) for t in ts],
                "time_over_plain": statistics.median(ts) / base,
            }
            for arm, ts in times.items()
        },
    }
    for arm, ts in times.items():
        print(
            f"{arm:20} ppl {math.exp(sums[arm] / scored):9.4f}  {statistics.median(ts):7.2f} s  "
            f"{statistics.median(ts) / base:.3f}x"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
