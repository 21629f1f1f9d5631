"""Whether the reference quantizers, by which the evidence judges stored data, give what was worked out by
hand.
"""

from __future__ import annotations

import torch

from kvbench.formats.kv import KV_FORMATS, KVFormat
from kvbench_kernels.kv.quantize import QUANTIZE

if _missing := [name for name in KV_FORMATS if name not in QUANTIZE]:
    raise ImportError(
        f"No quantizer is registered for KV format {', '.join(_missing)} in kvbench_kernels.kv.quantize."
    )


def reference_fault(fmt: KVFormat) -> str:
    """What the reference quantizer of a format gets wrong on its known row, or ""."""
    known, name = fmt.known_row, f"the reference quantizer of {fmt.name}"
    row = torch.tensor(known.values)
    made = QUANTIZE[fmt.name](row, None if known.given is None else torch.tensor(known.given))
    found, expected = made.codes.double().tolist(), torch.tensor(known.codes).double().tolist()
    if found != expected:
        return f"{name} gives codes {found} for {list(known.values)}, expected {expected}"
    scale = None if made.scales is None else made.scales.item()
    if scale != known.scale:
        return f"{name} gives scale {scale} for {list(known.values)}, expected {known.scale}"
    return ""
