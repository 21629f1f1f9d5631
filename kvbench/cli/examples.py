"""One or two examples a command, which end its help. A test parses all and runs those that are cheap."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("kvbench init mine --model smollm2-135m-instruct --format "
             "int8_sym", "kvbench init mine/fp8.yaml --format fp8_e4m3"),
    "validate": ("kvbench validate matrices/int8.yaml "
                 "gates/int8.yaml", "kvbench validate matrices/int8.yaml --device cuda --json"),
    "plan": ("kvbench plan "
             "matrices/int8.yaml", "kvbench plan matrices/int8.yaml -k 'int8_sym and batch=4' "
                                   "--until-decided"),
    "run": (
        "kvbench run matrices/int8.yaml --canary",
        "kvbench run matrices/int8.yaml --set model=OWNER/MODEL --gate gates/int8.yaml --data-dir DIR",
    ),
    "gate": ("kvbench gate runs/int8 --gate gates/int8.yaml",),
    "report": ("kvbench report runs/int8",),
    "merge": ("kvbench merge runs/int8.shard-1-of-2 runs/int8.shard-2-of-2 --out runs/int8",),
    "compare": (
        "kvbench compare runs/before runs/after",
        "kvbench compare runs/before runs/after -k int8_sym --only itl_ms --markdown change.md",
    ),
    "history": ("kvbench history runs --only itl_ratio --html history.html",),
    "check-table": ("kvbench check-table reports/reference/fp8_itl.csv",),
    "reproduce": ("kvbench reproduce --list", "kvbench reproduce fp8 kv-bytes --markdown bytes.md"),
    "selftest": ("kvbench selftest --list", "kvbench selftest --fault graph_replays_old_scales"),
    "calibrate": ("kvbench calibrate smollm2-135m-instruct scales.json --format int8_static --method p99.9",),
    "quantize": ("kvbench quantize OWNER/MODEL fp8-model --dtype bfloat16",),
    "lm-eval": ("kvbench lm-eval --model kvbench --model_args "
                "pretrained=smollm2-135m-instruct,kv_format=int8_sym --tasks arc_easy",),
    "schema": ("kvbench schema > matrix.schema.json", "kvbench schema gate > gate.schema.json"),
    "formats": ("kvbench formats --head-dim 64 --kv-heads 3 --layers "
                "30", "kvbench formats --model qwen3-8b-shape --device cuda"),
    "backends": ("kvbench backends", "kvbench backends --model tiny-gemma2 --json"),
    "doctor": ("kvbench doctor", "kvbench doctor --data-dir DIR --json"),
    "models": ("kvbench models", "kvbench models fetch smollm2-135m-instruct"),
    "data": ("kvbench data --data-dir DIR", "kvbench data verify wikitext2 mmlu --data-dir DIR"),
}  # fmt: skip


def epilog(command: str) -> str | None:
    """The end of a command's help, a line an example; \\b keeps the help's printer from joining the lines."""
    if not (examples := EXAMPLES.get(command)):
        return None
    head = f"Example{'s' if len(examples) > 1 else ''}:"
    return "\n".join(["\b", head, *(f"  {line}" for line in examples)])
