"""Decoder layers compiled one by one: one compilation serves all layers, so start-up stays short.

A layer has two compiled forms: "decode" for fixed shapes, and "prefill" for any number of tokens. Attention
is an opaque operator in both (`kvbench.engines.reference.binding`), so the compiler sees no pages.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvbench.errors import KvbenchError

SHAPES = 64  # compilations of one form, one a batch size


class CompiledLayers:
    """The decoder layers of `model`; outside of `running` they run as transformers wrote them."""

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        self._form: str | None = None
        self._layers = decoder_layers(model)
        written = {type(layer): type(layer).forward for layer in self._layers}
        self._forms: dict[str, dict[type, Callable[..., Any]]] = {
            "decode": {t: _compile(f, backend, False) for t, f in written.items()},
            "prefill": {t: _compile(f, backend, True) for t, f in written.items()},
        }
        for layer in self._layers:
            layer.forward = functools.partial(self._forward, layer)

    def _forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = type(layer)
        form = kind.forward if self._form is None else self._forms[self._form][kind]
        return form(layer, *args, **kwargs)

    @contextmanager
    def running(self, form: str) -> Iterator[None]:
        """Layers run in this form inside the `with`. A layer that cannot be compiled is a KvbenchError."""
        self._form = form
        try:
            with torch._dynamo.config.patch(recompile_limit=SHAPES):
                yield
        except torch._dynamo.exc.TorchDynamoException as e:
            first = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
            raise KvbenchError(
                f"The decoder layers could not be compiled ({first}); set `compile: off` for this model."
            ) from e
        finally:
            self._form = None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the model's longest list of blocks that hold attention."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    holding = [
        blocks
        for blocks in lists
        if any(hasattr(part, "kvbench_handle") for block in blocks for part in block.modules())
    ]
    if not holding:
        raise KvbenchError("The model has no list of decoder layers to compile; set `compile: off`.")
    return max(holding, key=len)


def _compile(forward: Callable[..., Any], backend: str, dynamic: bool) -> Callable[..., Any]:
    """Compiles a copy: compiled code is cached by code object, and each form and model needs its own."""
    code = forward.__code__.replace(co_name=f"{forward.__code__.co_name}_{'any' if dynamic else 'fixed'}")
    of = forward
    copy = types.FunctionType(code, of.__globals__, of.__name__, of.__defaults__, of.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    compiled: Callable[..., Any] = torch.compile(copy, fullgraph=True, dynamic=dynamic, backend=backend)
    return compiled
