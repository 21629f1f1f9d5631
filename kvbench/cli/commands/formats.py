"""`kvbench formats`: the storage formats, their bytes, and who takes them."""

from __future__ import annotations

import json
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
            "--dtype", metavar="float32|bfloat16|float16", help="Of the engine, in which native pages are"
        ),
    ] = "bfloat16",
    device: Annotated[
        str,
        typer.Option("--device", metavar="auto|cpu|cuda", help="Where the backends would run; auto: here"),
    ] = "auto",
    json_: JsonOption = False,
) -> None:
    """Show the formats: what they store, bytes a token of a shape, error bounds, and which backends take
    them, or why not."""
    with handled("nothing was written"):
        from kvbench.machine.host import host
        from kvbench.preflight.capabilities import format_rows, table, weight_rows
        from kvbench_kernels.support import DTYPES

        if dtype not in DTYPES or device not in ("auto", "cpu", "cuda"):
            raise UsageError(
                f"--dtype {dtype} --device {device} is not known; use {', '.join(DTYPES)} and auto, cpu or "
                f"cuda."
            )
        where = host().device if device == "auto" else device
        facts = shape_of(model, layers, kv_heads, head_dim, q_heads)
        rows, weights = format_rows(facts, where, dtype), weight_rows()
        if json_:
            print(
                json.dumps({"device": where, "dtype": dtype, "kv_formats": rows, "weight_formats": weights})
            )
            return
        what = model or f"{layers} layers, {kv_heads} KV heads of {head_dim}"
        print(f"KV formats; bytes of {what} ({dtype} natively); backends on {where}")
        head = ("format", "payload", "scale", "bytes a token", "to 16 bit", "largest error", "backends")
        print(table(head, [_kv_line(row) for row in rows]))
        for name in rows[0]["backends"]:
            for why in dict.fromkeys(row["backends"][name] for row in rows if row["backends"][name]):
                print(f"not {name}: {why}")
        print(
            "\nWeight formats; a linear layer of 4096x4096; norms, embeddings and the output layer stay "
            "native"
        )
        print(
            table(
                ("format", "payload", "scale", "to 16 bit", "largest error"),
                [_weight_line(row) for row in weights],
            )
        )


def _kv_line(row: dict[str, Any]) -> tuple[str, ...]:
    fixed = f" + {row['fixed_bytes']:,} once" if row["fixed_bytes"] else ""
    scale = (
        "none" if row["scale"] == "none" else f"{row['scale']}, {row['scale_dtype']} a {row['granularity']}"
    )
    takers = ", ".join(name for name, no in row["backends"].items() if not no) or "none"
    return (row["name"], row["payload"], scale, f"{row['bytes_per_token']:,}{fixed}", f"{row['ratio_16bit']:.7g}",
            row["error_bound"], takers)  # fmt: skip


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
    """Show the backends: what each takes, whether it runs on this machine for a shape, and why not."""
    with handled("nothing was written"):
        from kvbench.machine.host import host
        from kvbench.preflight.capabilities import backend_rows

        here = host()
        facts = shape_of(model, layers, kv_heads, head_dim, q_heads)
        rows = backend_rows(facts, here, here.environment["packages"]["triton"])
        if json_:
            print(
                json.dumps(
                    {
                        "device": here.device,
                        "device_reason": here.environment["device_reason"],
                        "backends": rows,
                    }
                )
            )
            return
        print(f"device here: {here.device} ({here.environment['device_reason']})")
        for row in rows:
            how = " in Triton's interpreter, which is no measure of speed" if row["interpreted"] else ""
            print(
                f"\n{row['name']}: {f'runs here{how}' if row['usable'] else 'does not run here'}; "
                f"{row['what']}"
            )
            print(f"  devices {', '.join(row['devices'])}; dtypes {', '.join(row['dtypes'])}; head_dim "
                  f"{row['head_dims']}; "
                  f"page size {row['page_sizes']}; attention {row['attention']}")  # fmt: skip
            print(f"  KV formats here: {', '.join(row['formats']) or 'none'}")
            for no in row["why_not"]:
                print(f"  not {', '.join(no['formats'])}: {no['reason']}")
