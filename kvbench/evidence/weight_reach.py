"""Whether the output of every FP8 layer reaches the logits, or is computed and then dropped."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.evidence.probe_values import Make, eager, probe_ids
from kvbench.evidence.stored_weights import fp8_modules

PROMPT = 3  # tokens of a row: with one, attention is always 1


Work = Callable[[str, Fp8Linear, Tensor, Tensor], None]


@torch.inference_mode()
def unreached(make: Make, names: Sequence[str], work: Work) -> Iterator[str]:
    """One row a name, all in one forward: the module's output for its row is negated; the row must move.

    names: of FP8 layers. work(name, module, input, output): called for each before anything is negated.
    """
    engine = make(len(names) + 1, PROMPT)
    ids, seqs = probe_ids(engine, PROMPT), [engine.add() for _ in range(len(names) + 1)]
    modules = fp8_modules(engine.model.model)

    def forward() -> Tensor:
        for seq in seqs:
            engine.truncate(seq, 0)
        # All rows: a hook finds a module's rows by their number, and the output layer has those asked for.
        found = engine.forward([(seq, ids) for seq in seqs], "all")
        return torch.stack([rows.flatten() for rows in found])

    with eager(engine), ExitStack() as hooks:
        with ExitStack() as watched:
            for name, module in modules.items():
                watched.enter_context(module.register_forward_hook(_telling(name, work)))
            reference = forward()
        for row, name in enumerate(names, start=1):
            hooks.enter_context(modules[name].register_forward_hook(_negating(row)))
        change = (forward() - reference).abs().amax(-1).nan_to_num(nan=torch.inf).tolist()
    for row, name in enumerate(names, start=1):
        if change[row] <= 10 * change[0]:  # row 0 was left alone: what rows share
            yield f"the output of {name} reaches no logit: the model drops it"


def last_of_each(names: Sequence[str]) -> list[str]:
    """The last layer of each module that holds some (o_proj of an attention): the others feed it."""
    return list({name.rpartition(".")[0]: name for name in names}.values())


def _telling(name: str, work: Work) -> Callable[[Any, Any, Tensor], None]:
    return lambda module, arguments, output: work(name, module, arguments[0], output)


def _negating(row: int) -> Callable[[Any, Any, Tensor], Tensor]:
    def hook(module: Any, arguments: Any, output: Tensor) -> Tensor:
        changed = output.clone()
        changed.view(-1, changed.shape[-1])[row * PROMPT : (row + 1) * PROMPT].neg_()
        return changed

    return hook
