"""`kvbench backends`: what executes attention and products, and whether it runs here."""

from __future__ import annotations

import json

from kvbench.cli.commands.formats import HeadDim, KvHeads, Layers, ModelOption, QHeads, shape_of
from kvbench.cli.exits import handled
from kvbench.cli.options import JsonOption


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
                f"\n{row['name']}: {f'runs here{how}' if row['usable'] else 'does not run here'}; {row['what']}"
            )
            print(f"  devices {', '.join(row['devices'])}; dtypes {', '.join(row['dtypes'])}; head_dim {row['head_dims']}; "
                  f"page size {row['page_sizes']}; attention {row['attention']}")  # fmt: skip
            print(f"  KV formats here: {', '.join(row['formats']) or 'none'}")
            for no in row["why_not"]:
                print(f"  not {', '.join(no['formats'])}: {no['reason']}")
