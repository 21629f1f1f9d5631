"""FP8 E4M3FN with block scales, in torch: the reference that every kernel and checkpoint must match.

Weights [N, K] have one scale a 128x128 block, activations [M, K] one a row and 128 columns. The last blocks
of a dimension may be smaller: 192 columns are 128 and 64. A scale multiplies, also if a checkpoint calls it
`weight_scale_inv`. Blocks are quantized as rows are by `kv.quantize.quantize_fp8_e4m3`, but elements of
activations are multiplied by the reciprocal of their scale, rounded to float32, instead of divided."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench_kernels.kv.quantize import E4M3_MAX, E4M3_MIN_SCALE, e4m3_to_float, quantize_fp8_e4m3
from kvbench_kernels.launches import launched

BLOCK = 128
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_ROWS = 8 * BLOCK  # rows that the reference product dequantizes at a time


def blocks(size: int) -> int:
    """Blocks along a dimension of `size`: ceil(size / 128)."""
    return -(-size // BLOCK)


def scale_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of the scales of a weight [n, k]: 576 x 2048 has 5 x 16."""
    return blocks(n), blocks(k)


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [N, K] -> codes [N, K] float8_e4m3fn, scales [ceil(N/128), ceil(K/128)] float32, all > 0."""
    n, k = w.shape
    nb, kb = scale_shape(n, k)
    whole = F.pad(w.float(), (0, kb * BLOCK - k, 0, nb * BLOCK - n))
    rows = whole.view(nb, BLOCK, kb, BLOCK).permute(0, 2, 1, 3).reshape(nb, kb, BLOCK * BLOCK)
    q = quantize_fp8_e4m3(rows)
    assert q.scales is not None
    # As bytes: not every torch release copies float8 through a permuted view.
    codes = q.codes.view(torch.uint8).view(nb, kb, BLOCK, BLOCK).permute(0, 2, 1, 3)
    codes = codes.reshape(nb * BLOCK, kb * BLOCK)[:n, :k].contiguous()
    return codes.view(torch.float8_e4m3fn), q.scales


def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [N, K] times scales [ceil(N/128), ceil(K/128)] in float32, rounded once -> [N, K].

    Raises ValueError for scales of another shape.
    """
    n, k = codes.shape
    _check_shape(codes, scales)
    wide = scales.float().repeat_interleave(BLOCK, 1)[:, :k]
    values, whole = e4m3_to_float(codes), n // BLOCK
    values[: whole * BLOCK].view(whole, BLOCK, k).mul_(wide[:whole, None])
    if n % BLOCK:
        values[whole * BLOCK :].mul_(wide[-1])
    return values.to(dtype)


def _check_shape(codes: Tensor, scales: Tensor) -> None:
    if scales.shape != scale_shape(*codes.shape):
        raise ValueError(
            f"A weight of {list(codes.shape)} in {BLOCK}x{BLOCK} blocks has scales "
            f"{list(scale_shape(*codes.shape))}; these are {list(scales.shape)}."
        )


def quantize_activation_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] float8_e4m3fn, scales [M, ceil(K/128)] float32: one a row and 128 columns.

    Scales are stored column by column, padded to a multiple of 128 (`empty_activation_scales`).
    """
    m, k = x.shape
    kb = blocks(k)
    wide = F.pad(x.float(), (0, kb * BLOCK - k)).view(m, kb, BLOCK)
    broken = (wide - wide) != 0  # NaN and infinities
    finite = wide.masked_fill(broken, 0.0)
    # Each division is by a tensor: torch on CUDA multiplies by the reciprocal of a Python number.
    s = (finite.abs().amax(-1) / wide.new_full((), E4M3_MAX)).clamp_(min=E4M3_MIN_SCALE)
    inverse = torch.ones_like(s) / s
    scaled = (finite * inverse.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).masked_fill_(broken, torch.nan)
    # As bytes: not every torch release copies float8 through a cut view.
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(m, kb * BLOCK)[:, :k].contiguous()
    scales = empty_activation_scales(m, k, x.device)
    scales.copy_(s)
    launched("fp8_quantize_activation_torch")
    return codes.view(torch.float8_e4m3fn), scales


def dequantize_activation(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [M, K], scales [M, ceil(K/128)] -> [M, K] float32."""
    return e4m3_to_float(codes) * scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]


def empty_activation_scales(m: int, k: int, device: torch.device) -> Tensor:
    """[M, ceil(K/128)] float32 with stride (1, 128 * ceil(M/128))."""
    return torch.empty(blocks(k), blocks(m) * BLOCK, dtype=torch.float32, device=device)[:, :m].t()


def with_rows_behind(x: Tensor) -> Tensor:
    """x [M, columns] with the undefined rows behind it, up to a multiple of 128; x itself without room there.

    A tile reads these rows faster than the copy engine fills in zeros: a product of 65 rows took 1.2 to 1.5
    times as long as one of 128 (docs/notes.md).
    """
    rows = blocks(len(x)) * BLOCK
    last = x.storage_offset() + (rows - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1)
    there = (last + 1) * x.element_size() <= x.untyped_storage().nbytes()
    return x.as_strided((rows, x.shape[1]), x.stride()) if there else x


def fp8_dequantize_matmul_torch(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The reference product: x [M, K] times the dequantized weight [N, K] (rounded to x's dtype) -> [M, N].

    `REFERENCE_ROWS` rows of the weight exist in x's dtype at a time. ValueError for scales of another shape.
    """
    _check_shape(codes, scales)
    n = codes.shape[0]
    y = x.new_empty(x.shape[0], n)
    for start in range(0, n, REFERENCE_ROWS):
        end = min(start + REFERENCE_ROWS, n)
        w = dequantize_blocks(codes[start:end], scales[start // BLOCK : blocks(end)], x.dtype)
        y[:, start:end] = F.linear(x, w, None if bias is None else bias[start:end])
    launched("fp8_dequantize_matmul_torch")
    return y
