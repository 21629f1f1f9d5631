"""What the attention benchmark times: our kernel as the engine would take it, and public peers beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_data import HEAD_DIM, KV_HEADS, PAGE, Q_HEADS, SCALING, Data, bytes_of
from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.kv.layout import LayerPages

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Entry:
    """One kernel at a cell. build(data) -> one call a set, each giving [B, Hq, D] in any shape of as many
    elements.

    values: the format whose dequantized values it attends to; cosine: the least that passes.
    """

    name: str
    build: Callable[[Data], list[Call]]
    values: str
    cosine: float
    element_bytes: int | None = None  # a peer's; None: the bytes of KV format `values`
    own: bool = False

    def nbytes(self, lengths: Sequence[int]) -> int:
        if self.element_bytes is None:
            return bytes_of(self.values, lengths)
        return sum(lengths) * 2 * KV_HEADS * HEAD_DIM * self.element_bytes


def ours(data: Data, fmt: str, splits: int | None) -> Callable[..., Tensor]:
    """The kernel that the engine takes: call(cache, q, table, lengths, scaling) -> out."""
    from kvbench_kernels.attention import route
    from kvbench_kernels.support import AttentionNeeds, interpreting

    device = torch.device(data.device)
    shape = (Q_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, PAGE)
    needs = AttentionNeeds(KV_FORMATS[fmt], *shape, "bfloat16", device.type, interpreting())
    plan = route.plan(needs, data.batch, max(data.lengths), sum(data.lengths) // data.batch, splits)
    space = route.workspace(needs, data.batch, plan, device)
    extras = {} if space is None else {"workspace": space}

    def call(cache: LayerPages, *rest: Any) -> Tensor:
        return route.decode_kernel(needs)(cache, *rest, splits=plan, **extras)

    return call


def own_entry(fmt: str, splits: int | None = None) -> Entry:
    def build(data: Data) -> list[Call]:
        kernel = ours(data, fmt, splits)
        caches = [data.pages_of(fmt, s) for s in range(data.sets)]
        return [
            lambda s=s: kernel(caches[s], data.q[s], data.table, data.context, SCALING)  # type: ignore[misc]
            for s in range(data.sets)
        ]

    return Entry(fmt, build, fmt, 0.99999, own=True)


def sdpa(backend: str) -> Callable[[Data], list[Call]]:
    def build(data: Data) -> list[Call]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        k, v = data.contiguous

        def call(s: int) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    data.q[s].unsqueeze(2), k[s], v[s], scale=SCALING, enable_gqa=True
                )

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


def flashinfer_fa2(values: str) -> Callable[[Data], list[Call]]:
    def build(data: Data) -> list[Call]:
        import flashinfer

        k, v, _, _ = data.tokens_first(values)
        counts = torch.tensor([len(row) for row in data.rows], dtype=torch.int32, device=data.device)
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        ids = torch.cat(data.rows)
        last = (data.context - 1) % PAGE + 1
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=data.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=ids.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        wrapper.plan(
            indptr,
            ids,
            last,
            Q_HEADS,
            KV_HEADS,
            HEAD_DIM,
            PAGE,
            q_data_type=torch.bfloat16,
            kv_data_type=k.dtype,
            sm_scale=SCALING,
        )
        scales = {} if values == "native" else {"k_scale": 1.0, "v_scale": 1.0}

        def call(s: int) -> Tensor:
            out: Tensor = wrapper.run(data.q[s], (data.part(k, s), data.part(v, s)), **scales)
            return out

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


def flashinfer_xqa(values: str) -> Callable[[Data], list[Call]]:
    def build(data: Data) -> list[Call]:
        from flashinfer.xqa import xqa

        k, v, _, _ = data.tokens_first(values)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        table = data.table.clamp(min=0)
        lengths = data.context.view(torch.uint32).view(-1, 1)
        workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=data.device)
        semaphores = torch.zeros(8 << 20, dtype=torch.uint32, device=data.device)
        q = data.q.unsqueeze(2)
        out = torch.empty_like(q)

        def call(s: int) -> Tensor:
            xqa(
                q[s],
                data.part(k, s),
                data.part(v, s),
                table,
                lengths,
                out[s],
                workspace,
                semaphores,
                KV_HEADS,
                PAGE,
                kv_scale=1.0,
                sm_count=processors,
            )
            return out[s]

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


def vllm_unified(values: str) -> Callable[[Data], list[Call]]:
    """vLLM's Triton attention with one scale a token and head: three-dimensional grid up to 16 sequences, as
    there.
    """

    def build(data: Data) -> list[Call]:
        from vllm.v1.attention.ops import triton_unified_attention as peer

        segments, most_split = 16, 128 // KV_HEADS
        mode = {"int8_sym": "INT8_PER_TOKEN_HEAD", "fp8_e4m3": "FP8_PER_TOKEN_HEAD"}[values]
        k, v, k_scale, v_scale = data.tokens_first(values)
        if k_scale is None or v_scale is None:
            raise ValueError(f"{values} has no scale a token and head")
        starts = torch.arange(data.batch + 1, dtype=torch.int32, device=data.device)
        one = torch.ones(1, dtype=torch.float32, device=data.device)
        partial = (most_split, Q_HEADS, segments)
        buffers = {
            "softmax_segm_output": torch.empty((*partial, HEAD_DIM), device=data.device),
            "softmax_segm_max": torch.empty(partial, device=data.device),
            "softmax_segm_expsum": torch.empty(partial, device=data.device),
        }
        out = torch.empty_like(data.q)

        def call(s: int) -> Tensor:
            peer.unified_attention(
                q=data.q[s],
                k=data.part(k, s),
                v=data.part(v, s),
                out=out[s],
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=data.context,
                max_seqlen_k=max(data.lengths),
                softmax_scale=SCALING,
                causal=True,
                window_size=(-1, -1),
                block_table=data.table,
                softcap=0,
                q_descale=None,
                k_descale=one,
                v_descale=one,
                seq_threshold_3D=most_split,
                num_par_softmax_segments=segments,
                **buffers,
                kv_quant_mode=peer.KVQuantMode[mode],
                k_scale_cache=data.part(k_scale, s),
                v_scale_cache=data.part(v_scale, s),
            )
            return out[s]

        return [lambda s=s: call(s) for s in range(data.sets)]  # type: ignore[misc]

    return build


# FP8 peers of FlashInfer have one scale a tensor, and XQA rounds queries and probabilities to E4M3 too.
PEERS: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("sdpa_cudnn", sdpa("CUDNN_ATTENTION"), "native", 0.9999, 2),
        Entry("sdpa_flash", sdpa("FLASH_ATTENTION"), "native", 0.9999, 2),
        Entry("fi_fa2_bf16", flashinfer_fa2("native"), "native", 0.9999, 2),
        Entry("fi_fa2_fp8", flashinfer_fa2("fp8_plain"), "fp8_plain", 0.995, 1),
        Entry("fi_xqa_bf16", flashinfer_xqa("native"), "native", 0.9999, 2),
        Entry("fi_xqa_fp8", flashinfer_xqa("fp8_plain"), "fp8_plain", 0.995, 1),
        Entry("vllm_int8", vllm_unified("int8_sym"), "int8_sym", 0.9999),
        Entry("vllm_fp8", vllm_unified("fp8_e4m3"), "fp8_e4m3", 0.9999),
    )
}
COMPILED = ("fi_fa2_bf16", "fi_fa2_fp8", "fi_xqa_bf16", "fi_xqa_fp8")  # by nvcc, at first use
