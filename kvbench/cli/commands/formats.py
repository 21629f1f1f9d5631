"""`kvbench formats` and `kvbench backends`: the storage formats, their bytes, and what runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvbench.cli.completion import models
from kvbench.cli.exits import handled
from kvbench.cli.options import JsonOption
from kvbench.errors import UsageError

HeadDim = Annotated[int, typer.Option("--head-dim", help="Elements of a head")]
KvHeads = Annotated[int, typer.Option("--kv-heads", help="KV heads of a layer")]
QHeads = Annotated[int | None, typer.Option("--q-heads", help="Query heads (default: as many as KV heads)")]
Layers = Annotated[int, typer.Option("--layers", help="Layers")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Take the shape from a model's config", autocompletion=models)
]


def shape_of(model: str | None, layers: int, kv_heads: int, head_dim: int, q_heads: int | None) -> Any:
    from kvbench.preflight.capabilities import Shape, facts_of

    return facts_of(model) if model else Shape(layers, kv_heads, head_dim, q_heads or kv_heads).facts


def formats(
    head_dim: HeadDim = 128,
    kv_heads: KvHeads = 8,
    layers: Layers = 36,
    q_heads: QHeads = None,
    model: ModelOption = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="float32|bfloat16|float16", help="The engine's dtype, that of native pages"
        ),
    ] = "bfloat16",
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="auto|cpu|cuda", help="Where the backends would run; auto: on this machine"
        ),
    ] = "auto",
    json_: JsonOption = False,
) -> None:
    """Show the formats: what they store, bytes a token for a shape, error bounds, and which backends support
    them or why not."""
    with handled("nothing was written"):
        from kvbench.cli.output import show
        from kvbench.machine.host import host
        from kvbench.preflight.capabilities import format_rows, weight_rows
        from kvbench_kernels.support import DTYPES

        if dtype not in DTYPES:
            raise UsageError(f"--dtype {dtype} is not known; use {', '.join(DTYPES)}.")
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"--device {device} is not known; use auto, cpu or cuda.")
        where = host().device if device == "auto" else device
        facts = shape_of(model, layers, kv_heads, head_dim, q_heads)
        rows, weights = format_rows(facts, where, dtype), weight_rows()
        what = model or f"{layers} layers, {kv_heads} KV heads of {head_dim}"
        title = f"KV formats; bytes of {what} ({dtype} natively); backends on {where}"
        answer = {"device": where, "dtype": dtype, "kv_formats": rows, "weight_formats": weights}
        show(json_, answer, lambda: "\n".join([title, *_format_lines(rows, weights)]))


def _format_lines(rows: list[dict[str, Any]], weights: list[dict[str, Any]]) -> Iterator[str]:
    from kvbench.preflight.capabilities import table

    kv_head = ("format", "payload", "scale", "bytes a token", "to 16 bit", "largest error", "backends")
    yield table(kv_head, [_kv_line(row) for row in rows])
    for name in rows[0]["backends"]:
        for why in dict.fromkeys(row["backends"][name] for row in rows if row["backends"][name]):
            yield f"not {name}: {why}"
    yield "\nWeight formats; a linear layer of 4096x4096; norms, embeddings and the output layer stay native"
    head = ("format", "payload", "scale", "to 16 bit", "largest error")
    yield table(head, [_weight_line(row) for row in weights])


def _kv_line(row: dict[str, Any]) -> tuple[str, ...]:
    fixed = f" + {row['fixed_bytes']:,} once" if row["fixed_bytes"] else ""
    scale = (
        "none" if row["scale"] == "none" else (f"{row['scale']}, {row['scale_dtype']} a {row['granularity']}")
    )
    backends = ", ".join(name for name, no in row["backends"].items() if not no) or "none"
    size = f"{row['bytes_per_token']:,}{fixed}"
    return row["name"], row["payload"], scale, size, f"{row['ratio_16bit']:.7g}", row["error_bound"], backends


def _weight_line(row: dict[str, Any]) -> tuple[str, ...]:
    scale = f"{row['scale_dtype']} a {row['granularity']} block" if row["scale_dtype"] else "none"
    return row["name"], row["payload"], scale, f"{row['ratio_16bit']:.7g}", row["error_bound"]


def backends(
    head_dim: HeadDim = 128,
    kv_heads: KvHeads = 8,
    layers: Layers = 36,
    q_heads: QHeads = None,
    model: ModelOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the backends: what each supports, whether it runs a shape on this machine, and why not."""
    with handled("nothing was written"):
        from kvbench.cli.output import show
        from kvbench.machine.host import host
        from kvbench.preflight.capabilities import backend_rows

        here = host()
        why = here.environment["device_reason"]
        facts = shape_of(model, layers, kv_heads, head_dim, q_heads)
        rows = backend_rows(facts, here, here.environment["packages"]["triton"])
        lines = [
            f"device here: {here.device} ({why})",
            *(line for row in rows for line in _backend_lines(row)),
        ]
        show(json_, {"device": here.device, "device_reason": why, "backends": rows}, "\n".join(lines))


def _backend_lines(row: dict[str, Any]) -> Iterator[str]:
    how = " in Triton's interpreter, whose times mean nothing" if row["interpreted"] else ""
    yield f"\n{row['name']}: {f'runs here{how}' if row['usable'] else 'does not run here'}; {row['what']}"
    yield (
        f"  devices {', '.join(row['devices'])}; dtypes {', '.join(row['dtypes'])}; head_dim "
        f"{row['head_dims']}; "
        f"page size {row['page_sizes']}; attention {row['attention']}"
    )
    yield f"  KV formats here: {', '.join(row['formats']) or 'none'}"
    yield from (f"  not {', '.join(no['formats'])}: {no['reason']}" for no in row["why_not"])
