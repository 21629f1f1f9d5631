"""TTFT and ITL of one batch at one context length, interleaved with the native engine.

A candidate's task measures the arms "baseline" and "candidate" (A B B A ...). A baseline's task measures one
engine repeatedly, with all requests called "candidate"; neighbours give the noise floor. Both arms get the
same prompts of seeded random token ids. The record holds raw samples with the device's state before and after
each request.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.errors import Refused
from kvbench.evidence.kernels import backend_label
from kvbench.files import content_hash
from kvbench.machine.device_state import DeviceState
from kvbench.runners.context import Context, Measurement
from kvbench.runners.reads import arm_facts, device_facts
from kvbench.runners.timing import Timing, measure

if TYPE_CHECKING:
    from kvbench.engines.reference.engine import Engine
    from kvbench.engines.reference.load import LoadedModel

SEED = 0

# Most prefill shapes captured as CUDA graphs: each one costs time and memory in the first request.
SHAPES = 32


class EngineArm:
    """A static batch on an engine: all prompts are submitted at once, and each step gives every sequence one
    token.

    prompts: token ids of each sequence; chunk: most tokens of a prefill forward, over all sequences;
    new_tokens: tokens of a request, whose pages are reserved when it is submitted. Tokens are sampled
    (greedily) on the device.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], chunk: int, new_tokens: int) -> None:
        self.engine, self.prompts, self.new_tokens = engine, prompts, new_tokens
        self.plan = list(prefill_plan([len(p) for p in prompts], chunk))
        self.shapes = prompt_shapes(self.plan)
        self.seqs: list[int] = []
        self.tokens: list[int] = []
        self._before = 0  # tokens that the engine had computed when the request was submitted

    def submit(self) -> None:
        self._before = self.engine.computed_tokens
        self.seqs = [self.engine.add() for _ in self.prompts]
        for seq, prompt in zip(self.seqs, self.prompts, strict=True):
            self.engine.store.reserve(seq, len(prompt) + self.new_tokens - 1)
        for shape in self.shapes:  # captured in the first request, which is a warm-up if there is one
            self.engine.capture_prompts(*shape)
        last: dict[int, Tensor] = {}
        for forward in self.plan:
            work = [(self.seqs[row], self.prompts[row][start:stop]) for row, start, stop in forward]
            logits = self.engine.forward(work, "last")
            last.update((row, out[-1]) for (row, _, _), out in zip(forward, logits, strict=True))
        rows = torch.stack([last[row] for row in range(len(self.prompts))])
        self.tokens = rows.argmax(dim=-1).tolist()  # on the host: part of the time

    @property
    def captured(self) -> int:
        """Number of a request's prefill forwards that are replays of CUDA graphs."""
        return sum(shape_of(forward) in self.engine.prompt_graphs for forward in self.plan)

    def step(self) -> None:
        self.tokens = self.engine.greedy_step(self.seqs, self.tokens)

    def synchronize(self) -> None:
        self.engine.synchronize()

    def ran(self) -> dict[str, Any]:
        """The formats of this arm's engine, and the tokens that it computed for the request."""
        return {
            "kv_format": self.engine.store.fmt.name,
            "weights": self.engine.model.weights.format,
            "computed_tokens": self.engine.computed_tokens - self._before,
        }

    def close(self) -> None:
        for seq in self.seqs:
            self.engine.free(seq)
        self.seqs = []


def prefill_plan(lengths: Sequence[int], chunk: int) -> Iterator[list[tuple[int, int, int]]]:
    """Forwards of at most `chunk` tokens that prefill all prompts in order, as (row, start, stop) pieces.

    A long prompt takes several forwards and short ones share one: [5, 5] in chunks of 4 is
    [(0, 0, 4)], [(0, 4, 5), (1, 0, 3)], [(1, 3, 5)].
    """
    forward: list[tuple[int, int, int]] = []
    room = chunk
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            forward.append((row, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield forward
                forward, room = [], chunk
    if forward:
        yield forward


Shape = tuple[int, int, int]


def shape_of(forward: Sequence[tuple[int, int, int]]) -> Shape | None:
    """(sequences, tokens held, tokens added) of a forward whose pieces are equal; None for others."""
    (start, stop), *others = {piece[1:] for piece in forward}
    return None if others else (len(forward), start, stop - start)


def prompt_shapes(plan: Sequence[Sequence[tuple[int, int, int]]]) -> list[Shape]:
    """The distinct shapes of the forwards, at most `SHAPES`."""
    shapes = dict.fromkeys(shape for forward in plan if (shape := shape_of(forward)) is not None)
    return list(shapes)[:SHAPES]


def random_prompts(model: LoadedModel, batch: int, context: int) -> list[list[int]]:
    """`batch` prompts of `context` ids, drawn with a fixed seed from the ids that are not special."""
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    ids = [i for i in range(model.vocab_size) if i not in special]
    rng = random.Random(SEED)
    return [rng.choices(ids, k=context) for _ in range(batch)]


def run(ctx: Context) -> Measurement:
    batch, context, new_tokens = ctx.spec["batch"], ctx.spec["context"], ctx.options["new_tokens"]
    prompts = random_prompts(ctx.model, batch, context)
    capacity = {"sequences": batch, "tokens": context + new_tokens}

    def arm(engine: Engine) -> EngineArm:
        return EngineArm(engine, prompts, ctx.spec["prefill_chunk"], new_tokens)

    engine = ctx.engine(**capacity)
    _refuse_interpreter(engine)
    arms = [("candidate", arm(engine))]
    if not ctx.is_baseline:
        arms.insert(0, ("baseline", arm(ctx.native(**capacity))))
    load_before = os.getloadavg()[0]
    with closing(DeviceState(ctx.model.device)) as state:
        others = [state.others()]
        timings = measure(
            arms,
            new_tokens=new_tokens,
            repeats=ctx.options["repeats"],
            warmup=ctx.options["warmup"],
            progress=ctx.progress,
            read_state=state.read,
        )
        others.append(state.others())
        device_state = _state_facts(state, others)
    shape = {"prefill_tokens": batch * context, "batch": batch, "new_tokens": new_tokens}
    samples = {
        "arms": [
            {"arm": t.arm, "order": t.order, **_times(t), **shape, "device": t.device}
            for t in timings.measured
        ],
        "warmup": [{"arm": t.arm, **_times(t)} for t in timings.warmup],
    }
    facts = {
        "clock": "perf_counter",
        "synchronised": True,
        "host_load": {"before": load_before, "after": os.getloadavg()[0], "cpus": os.cpu_count()},
        "threads": torch.get_num_threads(),
        "prompt": f"seeded random token ids (seed {SEED}), special tokens left out",
        "prompt_sha": content_hash(prompts),
        "prefill_forwards": len(arms[-1][1].plan),
        "prefill_graphs": arms[-1][1].captured,
        "decode": arms[-1][1].engine.decode_mode,
        "layers": arms[-1][1].engine.compile_mode,
        "backend": backend_label(arms[-1][1].engine),
        "repeats": ctx.options["repeats"],
        "warmup": ctx.options["warmup"],
        "arms": {name: arm_facts(arm.engine) for name, arm in arms},
        **device_facts(ctx.model.device),
        "device_state": device_state,
    }
    return Measurement(samples, facts)


def _refuse_interpreter(engine: Engine) -> None:
    if backend_label(engine) == "interpreter":
        raise Refused(
            "interpreter_latency",
            "latency on backend triton with TRITON_INTERPRET set would time Triton's interpreter, not the "
            "kernels; unset TRITON_INTERPRET and measure on a CUDA device, or set backend: torch.",
        )


def _state_facts(state: DeviceState, others: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """others: before the first request and after the last; the larger count is stored."""
    known = [found for found in others if found is not None]
    return {
        **state.fixed(),
        "found_by": state.found_by or None,
        "other_processes": max(known, key=lambda found: found["count"]) if known else None,
        "unread": dict(state.unread),
    }


def _times(timing: Timing) -> dict[str, Any]:
    return {
        "ttft_ms": timing.ttft_ms,
        "itl_ms": list(timing.itl_ms),
        "total_ms": timing.total_ms,
        "ran": dict(timing.ran),
    }
