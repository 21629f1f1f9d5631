"""What there is: `kvbench models`, `data`, `formats`, `backends` and `schema`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument, Exit, Option

from kvbench.cli import completion, options
from kvbench.cli.loading import check_data_dir, one_of
from kvbench.cli.output import handled, show
from kvbench.errors import UsageError

ACTIONS = ("list", "fetch", "verify")
Action = Annotated[str, Argument(metavar="|".join(ACTIONS), help="What to do")]
_NAMES = "fetch: names to fetch; verify: names, folders or .gguf files (default: all that are here)"
ModelNames = Annotated[list[str] | None, Argument(help=_NAMES, autocompletion=completion.models)]
_SETS = "Texts and question sets (default: all)"
DataNames = Annotated[list[str] | None, Argument(help=_SETS, autocompletion=completion.corpora)]
HeadDim = Annotated[int, Option("--head-dim", help="Elements of a head")]
KvHeads = Annotated[int, Option("--kv-heads", help="KV heads of a layer")]
QHeads = Annotated[int | None, Option("--q-heads", help="Query heads (default: as many as KV heads)")]
Layers = Annotated[int, Option("--layers", help="Layers")]
_CONFIG = "Take the shape from a model's config"
Model = Annotated[str | None, Option("--model", help=_CONFIG, autocompletion=completion.models)]
_DTYPE = "The engine's dtype, that of native pages"
Dtype = Annotated[str, Option("--dtype", metavar=options.DTYPES, help=_DTYPE)]
_DEVICE = "Where the backends would run; auto: on this machine"
Device = Annotated[str, Option("--device", metavar="auto|cpu|cuda", help=_DEVICE)]


def models(action: Action = "list", name: ModelNames = None, json_: options.Json = False) -> None:
    """Show the models known by name, fetch some, or verify those here. verify exits 1 for a broken file."""
    with handled("no partial file is kept; run the same command to continue"):
        from kvbench.models.catalog import ALIASES
        from kvbench.models.download import fetch
        from kvbench.preflight import assets

        names = name or []
        one_of("kvbench models", action, ACTIONS)
        if action == "verify":
            here = names or [held.name for held in assets.models() if held.state == assets.HERE]
            _show_held([assets.verify_model(one) for one in here], json_, named=bool(names))
            return
        if action == "fetch":
            _check_fetchable(names, ", ".join(ALIASES))
            for one in names:
                fetch(one)
        _show_held([held for held in assets.models() if not names or held.name in names], json_)


def data(
    action: Action = "list",
    name: DataNames = None,
    data_dir: options.Data = None,
    json_: options.Json = False,
) -> None:
    """Show the evaluation data, fetch it where allowed, or verify it. verify exits 1 when a set is broken."""
    with handled("run the same command to continue"):
        from kvbench.preflight import assets

        check_data_dir(data_dir)
        one_of("kvbench data", action, ACTIONS)
        known = assets.data_names()
        if unknown := [one for one in name or [] if one not in known]:
            raise UsageError(f"Unknown data {unknown[0]!r}; use one of {', '.join(known)}.")
        if action == "list":
            _show_held([one for one in assets.data(data_dir) if not name or one.name in name], json_)
        elif action == "verify":
            _show_held([assets.verify_data(one, data_dir) for one in name or known], json_, named=bool(name))
        elif not name:
            raise UsageError(f"Name what to fetch: {', '.join(known)}.")
        else:
            _show_held([assets.fetch_data(one, data_dir) for one in name], json_)


def _check_fetchable(names: list[str], aliases: str) -> None:
    from kvbench.models.source import kind_of

    if not names:
        raise UsageError(f"Name what to fetch: {aliases}.")
    for one in names:
        if kind_of(one) == "hub":
            raise UsageError(
                f"{one} is on the hub: the first run downloads it, or use hf download {one}. kvbench models "
                f"fetch downloads {aliases}."
            )
        if kind_of(one) != "alias":
            raise UsageError(f"{one} needs no fetching; kvbench models fetch downloads {aliases}.")


def _show_held(held: Sequence[Any], as_json: bool, named: bool = False) -> None:
    """Models or data. Exits 1 when one is broken, and 3 when one that was named is missing."""
    from kvbench.preflight.assets import BROKEN, NOT_HERE

    lines = "\n".join(one.as_text() for one in held) or "nothing is here to verify"
    show(as_json, [asdict(one) for one in held], lines)
    states = {one.state for one in held}
    if BROKEN in states:
        raise Exit(1)
    if named and NOT_HERE in states:
        raise Exit(3)


def _shape_of(model: str | None, layers: int, kv_heads: int, head_dim: int, q_heads: int | None) -> Any:
    from kvbench.preflight.capabilities import Shape, facts_of

    return facts_of(model) if model else Shape(layers, kv_heads, head_dim, q_heads or kv_heads).facts


def formats(
    head_dim: HeadDim = 128,
    kv_heads: KvHeads = 8,
    layers: Layers = 36,
    q_heads: QHeads = None,
    model: Model = None,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    json_: options.Json = False,
) -> None:
    """Show the formats: storage, bytes a token for a shape, error bounds, and which backends run them."""
    with handled("nothing was written"):
        from kvbench.machine.host import host
        from kvbench.preflight.capabilities import format_rows, weight_rows
        from kvbench_kernels.support import DTYPES

        one_of("--dtype", dtype, DTYPES)
        one_of("--device", device, ("auto", "cpu", "cuda"))
        where = host().device if device == "auto" else device
        facts = _shape_of(model, layers, kv_heads, head_dim, q_heads)
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
    scale = row["scale"]
    if scale != "none":
        scale += f", {row['scale_dtype']} a {row['granularity']}"
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
    model: Model = None,
    json_: options.Json = False,
) -> None:
    """Show the backends: what each supports, whether it runs a shape on this machine, and why not."""
    with handled("nothing was written"):
        from kvbench.machine.host import host
        from kvbench.preflight.capabilities import backend_rows

        here = host()
        why = here.environment["device_reason"]
        facts = _shape_of(model, layers, kv_heads, head_dim, q_heads)
        rows = backend_rows(facts, here, here.environment["packages"]["triton"])
        lines = [f"device here: {here.device} ({why})", *(_backend_text(row) for row in rows)]
        show(json_, {"device": here.device, "device_reason": why, "backends": rows}, "\n".join(lines))


def _backend_text(row: dict[str, Any]) -> str:
    how = " in Triton's interpreter, whose times mean nothing" if row["interpreted"] else ""
    lines = [
        f"\n{row['name']}: {f'runs here{how}' if row['usable'] else 'does not run here'}; {row['what']}",
        f"  devices {', '.join(row['devices'])}; dtypes {', '.join(row['dtypes'])}; head_dim "
        f"{row['head_dims']}; page size {row['page_sizes']}; attention {row['attention']}",
        f"  KV formats here: {', '.join(row['formats']) or 'none'}",
    ]
    return "\n".join(
        [*lines, *(f"  not {', '.join(no['formats'])}: {no['reason']}" for no in row["why_not"])]
    )


def schema(
    kind: Annotated[str, Argument(help="matrix, gate, record, manifest or results")] = "matrix",
) -> None:
    """Print the JSON Schema of matrix or gate files, for editors, or of the files of a run."""
    with handled():
        from kvbench.gate.policy import gate_schema
        from kvbench.matrix.parse import matrix_schema
        from kvbench.records.schema import manifest_schema, record_schema
        from kvbench.report.json import results_schema

        makers = {"matrix": matrix_schema, "gate": gate_schema, "record": record_schema}
        makers |= {"manifest": manifest_schema, "results": results_schema}
        if kind not in makers:
            raise UsageError(f"Unknown schema {kind!r}; use {', '.join(makers)}.")
        print(json.dumps(makers[kind](), indent=2, ensure_ascii=False))
