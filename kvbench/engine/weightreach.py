"""Whether the output of every FP8 layer reaches the logits: an MLP that is computed and then dropped is no part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.core import Engine
from kvbench.engine.evidence import probe_ids
from kvbench.engine.weightevidence import fp8_modules

PROMPT = 3  # tokens of a row: with one, attention is 1 whatever q and k are


@torch.inference_mode()
def unreached(make: Callable[[int, int], Engine], modules: int) -> Iterator[str]:
    """One row a module, all in one packed forward: the module's output for its row is negated, and the row must move.

    make(sequences, tokens): an engine made as the measured one; modules: how many FP8 layers its model has.
    """
    engine = make(modules + 1, PROMPT)
    ids, seqs = probe_ids(engine, PROMPT), [engine.add() for _ in range(modules + 1)]

    def forward() -> Tensor:
        for seq in seqs:
            engine.truncate(seq, 0)
        # All rows: a hook finds a module's rows by their number, and the output layer has as many as logits are asked for.
        found = engine.forward([(seq, ids) for seq in seqs], "all")
        return torch.stack([rows.flatten() for rows in found])

    with engine.eagerly(lambda attention: attention), ExitStack() as hooks:
        reference = forward()
        for row, module in enumerate(fp8_modules(engine.model.model).values(), start=1):
            hooks.enter_context(module.register_forward_hook(_negating(row)))
        change = (forward() - reference).abs().amax(-1).nan_to_num(nan=torch.inf).tolist()
    for row, name in enumerate(fp8_modules(engine.model.model), start=1):
        if change[row] <= 10 * change[0]:  # row 0 was left alone: what rows share
            yield f"the output of {name} reaches no logit: the model drops it"


def _negating(row: int) -> Callable[[Any, Any, Tensor], Tensor]:
    def hook(module: Any, arguments: Any, output: Tensor) -> Tensor:
        changed = output.clone()
        changed.view(-1, changed.shape[-1])[row * PROMPT : (row + 1) * PROMPT].neg_()
        return changed

    return hook
