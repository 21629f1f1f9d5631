"""Whether a checkpoint's tensors are numbers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from kvbench.errors import KvbenchError


def check_finite(name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises KvbenchError for a weight that is NaN or infinite, naming tensor and index."""
    for key, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if all(bound.isfinite() for bound in tensor.aminmax()):  # no mask as large as the tensor
            continue
        at = (~tensor.isfinite()).nonzero()[0].tolist()
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} holds {tensor[tuple(at)].item()} at index {at}; no "
            "result on such weights means anything. Fetch the checkpoint again, or export it again."
        )
