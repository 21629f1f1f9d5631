"""The metric tables of a report, declared: which metrics, in which order, under which headings.

A metric that no section names is not lost: it goes into a last table of its own (`OTHER`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """key: anchor on the page; runner: whose records it shows, or None; columns: (metric, heading) pairs;
    brief: the metrics that a console has room for; note: how to read the table, in one or two sentences; footnote:
    what a console, which has no room for the note, says under a table that compares with baselines; facts: whether how its
    runner measured stands under it; over: the cell key that a value spans (cells that differ in it alone make one line); such a table
    is shown where it has a value.
    """

    key: str
    title: str
    runner: str | None
    columns: tuple[tuple[str, str], ...]
    brief: frozenset[str]
    note: str
    footnote: str = ""
    facts: bool = True
    over: str = ""


SECTIONS: tuple[Section, ...] = (
    Section("storage", "Storage", "storage", (
        ("kv_bytes_total", "KV total"),
        ("kv_bytes_per_token", "KV a token"),
        ("kv_ratio_16bit", "Ratio to 16-bit"),
        ("kv_ratio", "Ratio to baseline"),
        ("kv_bytes_difference", "Live minus formula"),
        ("kv_bytes_payload", "KV payload"),
        ("kv_bytes_scales", "KV scales"),
        ("page_table_bytes", "Page table"),
        ("held_bytes", "Held before"),
        ("workspace_bytes", "Workspace"),
        ("device_peak_bytes", "Device peak"),
    ), frozenset({"kv_bytes_total", "kv_bytes_per_token", "kv_bytes_difference", "kv_ratio", "kv_ratio_16bit"}),
        "Bytes are counted from the live tensors and set against the format's formula, layer by layer. The ratio to "
        "the baseline divides by the baseline cell's live bytes, the ratio to 16-bit by a 2-byte native of the same "
        "shape: in fp32 the two differ. On a GPU the peak is weights, KV, what was held before the pages were made, and "
        "workspace, each measured at its own moment. MiB is 2^20 B, MB is 10^6 B."),
    Section("weights", "Weights", "storage", (
        ("weight_bytes", "Weights"),
        ("weight_ratio_16bit", "Ratio to 16-bit"),
        ("weight_ratio", "Ratio to baseline"),
        ("weight_bytes_difference", "Live minus formula"),
        ("weight_payload_bytes", "FP8 codes"),
        ("weight_scale_bytes", "Scales"),
        ("weight_native_bytes", "Native remainder"),
        ("model_load_s", "Load time"),
    ), frozenset({"weight_bytes", "weight_ratio_16bit", "weight_ratio", "weight_bytes_difference", "model_load_s"}),
        "The native remainder is embeddings, output layer and norms, tied ones once: where it is large, FP8 weights take well "
        "over half. The ratio to 16-bit divides by 2 bytes for each number of the model, the published convention; the ratio "
        "to the baseline by its live bytes, which are 4 each in fp32. Load times are of files that may be cached.", facts=False),
    Section("gemm", "Products", "gemm", (
        ("gemm_error_max", "Worst error"),
        ("gemm_bound_share", "Worst share of bound"),
        ("gemm_boundary_diff", "Worst step of row 0"),
        ("gemm_boundary_argmax", "Steps with equal argmax"),
        ("gemm_native_time_ratio", "Worst time to native"),
        ("gemm_reference_time_ratio", "Worst time to reference"),
        ("gemm_paths", "Paths, by rows"),
    ), frozenset({"gemm_error_max", "gemm_bound_share", "gemm_boundary_diff", "gemm_native_time_ratio", "gemm_paths"}),
        "Linear layers over a sweep of rows (M), against float64 on the dequantized weight. Paths: reference dequantizes and "
        "multiplies; w8a16 keeps x as it is; w8a8 and hopper quantize x too, which costs some 3% of error. The bound is of what a "
        "path computes, so the quantization of x is not in it. Row 0 has the same input at every M: what it steps by where the "
        "route changes is what a token's value depends on its neighbours in a batch."),
    Section("transfer", "Transfer", "transfer", (
        ("transfer_bytes", "Bytes moved"),
        ("transfer_ratio_16bit", "Ratio to 16-bit"),
        ("transfer_bytes_difference", "Moved minus formula"),
        ("swap_out_gb_s", "Swap out"),
        ("swap_in_gb_s", "Swap in"),
    ), frozenset({"transfer_bytes", "transfer_ratio_16bit", "transfer_bytes_difference", "swap_out_gb_s", "swap_in_gb_s"}),
        "The pages of the cell's batch and context go to the host (pinned memory on a GPU) and come back, bit for bit, "
        "scales included. 1 GB/s is 10^9 B a second."),
    Section("latency", "Latency", "latency", (
        ("itl_ms", "ITL mean"),
        ("itl_ratio", "ITL ratio"),
        ("ttft_ms", "TTFT median"),
        ("ttft_ratio", "TTFT ratio"),
        ("decode_tok_s", "Decode"),
        ("prefill_tok_s", "Prefill"),
        ("itl_p50_ms", "ITL p50"),
        ("itl_p90_ms", "ITL p90"),
        ("itl_p99_ms", "ITL p99"),
        ("itl_max_ms", "ITL max"),
        ("ttft_cold_ms", "TTFT cold"),
        ("request_ms", "Request"),
        ("request_difference_ms", "Request minus its parts"),
        ("decode_read_gb_s", "Read in decode"),
        ("decode_bandwidth_share", "Share of copy bandwidth"),
        ("latency_drift_pct", "Drift over the run"),
        ("latency_outliers", "Outlying requests"),
        ("itl_outlier_share", "Stalled steps"),
        ("throttled_requests", "Slowed-down requests"),
    ), frozenset({"itl_ms", "itl_ratio", "ttft_ms", "ttft_ratio", "decode_tok_s"}),
        "ITL is the gap between consecutive tokens of one sequence, TTFT the time to the first token; neither holds "
        "warm-up, which is the cold column. Ratios are paired with baseline arms that were run interleaved; below 1 "
        "the candidate is faster. Drift, outliers and slowdowns say whether the machine held still; outliers stay in every value.",
        "Ratios are paired with the baseline's requests that ran interleaved with the candidate's; the row of native above is of its "
        "own cell's requests, so the two need not agree."),
    Section("contexts", "ITL over the context", "latency", (
        ("itl_slope_us_per_token", "Slope"),
        ("itl_intercept_ms", "At no context"),
        ("itl_break_even_tokens", "Break-even"),
        ("itl_slope_ratio", "Slope ratio"),
        ("itl_slope_to_bytes", "Slope ratio to bytes"),
    ), frozenset({"itl_slope_us_per_token", "itl_break_even_tokens", "itl_slope_ratio", "itl_slope_to_bytes"}),
        "A line of least squares through the requests of the cells that differ in their context alone, against the one through the "
        "baseline's interleaved requests. From the break-even on the candidate is the faster. A slope ratio below the ratio of the KV "
        "bytes (the last column below 1) is not the format's doing alone.", facts=False, over="context"),
    Section("quality", "Quality", "perplexity", (
        ("ppl", "Perplexity"),
        ("ppl_delta_pct", "Perplexity delta"),
        ("ppl_aa_pct", "Baseline run again"),
        ("kld_mean", "KLD mean"),
        ("kld_p50", "KLD p50"),
        ("kld_p90", "KLD p90"),
        ("kld_p99", "KLD p99"),
        ("kld_p999", "KLD p99.9"),
        ("kld_max", "KLD max"),
        ("top1_agreement", "Top-1 agreement"),
        ("delta_p_mean", "Delta-p mean"),
    ), frozenset({"ppl", "ppl_delta_pct", "kld_mean", "kld_p99", "top1_agreement"}),
        "KLD goes from the native next-token distribution to the candidate's, over the whole vocabulary. The "
        "perplexity delta is a paired log-ratio. Intervals are clustered by document. The baseline run again is the noise floor."),
    Section("positions", "Perplexity by position", "perplexity", tuple(
        (f"{metric}_at_{low}_{high}", f"{heading} {low}-{high}")
        for low, high in ((0, 63), (64, 127), (128, 255), (256, 511))
        for metric, heading in (("ppl", "At"), ("ppl_delta_pct", "Delta"))
    ), frozenset({"ppl_delta_pct_at_0_63", "ppl_delta_pct_at_256_511"}),
        "Scored tokens by their place in the chunk. A token at 300 attends to 300 stored ones, a token at 10 to ten: what builds up "
        "over a context shows as deltas that grow to the right.", facts=False),
    Section("agreement", "Token agreement", "agreement", (
        ("top1_teacher_forced", "Teacher-forced top-1"),
        ("first_divergence", "First divergence"),
        ("divergence_margin", "Native margin there"),
        ("real_divergence", "Beyond near-ties"),
        ("aa_disagreement", "A/A noise floor"),
        ("aa_margin_noise", "A/A margin noise"),
        ("prefix_disagreement", "Line end before"),
        ("length_ratio", "Length to native"),
        ("native_distinct_4grams", "Native text, distinct 4-grams"),
    ), frozenset({"top1_teacher_forced", "first_divergence", "real_divergence", "aa_disagreement", "prefix_disagreement", "native_distinct_4grams"}),
        "Teacher-forced: the share of steps on which the candidate picks the native token along the native history. "
        "The first divergence is counted from step 0. One where the native margin is within the A/A noise is a "
        "near-tie; beyond near-ties is the first that is none. Line end before: the share of native's own steps that a line "
        "end before the prompt changes, the scale on which the candidate's share may be read."),
    Section("generate", "Free-running text", "generate", (
        ("gen_collapsed", "Collapsed"),
        ("gen_useful_tokens", "Useful tokens"),
        ("gen_degenerated", "Degenerated"),
        ("gen_onset", "Onset"),
        ("gen_native_degenerated", "Native degenerated"),
        ("gen_native_onset", "Native onset"),
        ("gen_loop_onset", "Longest loop from"),
        ("gen_loop_tokens", "Its tokens"),
        ("gen_distinct_4grams", "Distinct 4-grams"),
        ("gen_first_divergence", "First divergence"),
        ("gen_eos", "End of text"),
    ), frozenset({"gen_collapsed", "gen_useful_tokens", "gen_degenerated", "gen_onset", "gen_native_onset", "gen_first_divergence", "gen_distinct_4grams"}),
        "Each cell writes its own greedy text. Useful are its tokens before it only repeats itself or ends. A small model repeats itself "
        "natively too: collapsed is what repeats itself before a quarter of native's own onset, or ends before a quarter of what native "
        "says. Medians over the prompts; each prompt's value stands in the note."),
    Section("mcq", "Multiple choice", "mcq", (
        ("mcq_accuracy", "Accuracy"),
        ("mcq_delta_pt", "Accuracy delta"),
        ("mcq_mde_pt", "Detectable at 80% power"),
        ("mcq_recovery", "Accuracy to native"),
        ("mcq_agreement", "Same pick"),
        ("mcq_right_to_wrong", "Right to wrong"),
        ("mcq_wrong_to_right", "Wrong to right"),
        ("mcq_wrong_to_wrong", "Wrong to another wrong"),
        ("mcq_real_flips", "Flips beyond noise"),
        ("mcq_aa_disagreement", "A/A noise floor"),
        ("mcq_aa_score_noise", "A/A score noise"),
        ("mcq_prefix_disagreement", "Line end before"),
        ("mcq_mcnemar_p", "McNemar p"),
        ("mcq_macro", "Macro average"),
        ("mcq_accuracy_norm", "Accuracy by token"),
        ("mcq_accuracy_norm_char", "Accuracy by character"),
        ("mcq_scored", "Scored"),
        ("truncated_share", "Truncated"),
    ), frozenset({"mcq_accuracy", "mcq_delta_pt", "mcq_mde_pt", "mcq_agreement", "mcq_real_flips", "mcq_aa_disagreement", "mcq_scored"}),
        "Choices are scored by summed logprob; the delta is paired question by question with the baseline. A "
        "delta smaller than what is detectable at 80% power may be there unseen: such a sample decides nothing about it. The "
        "noise floor is of native scored again, with other neighbours; line end before: picks of native that a line end before "
        "the prompt changes. Flips beyond noise are changed picks that this noise does not explain."),
    Section("parity", "Parity with the oracle", "parity", (
        ("parity_max_abs", "Worst absolute error"),
        ("parity_bound_share", "Worst share of bound"),
        ("parity_cosine_min", "Lowest cosine"),
        ("steps_argmax_agreement", "Steps with equal argmax"),
        ("steps_max_abs", "Worst error over steps"),
    ), frozenset({"parity_max_abs", "parity_bound_share", "parity_cosine_min", "steps_argmax_agreement"}),
        "Decode through the store against an FP32 oracle on the dequantized tensors, and a long model-free run. A "
        "share of the bound above 1 is outside what the format allows."),
    Section("health", "Numeric health", "health", (
        ("health_error_max", "Worst error"),
        ("health_bound_share", "Worst share of bound"),
        ("health_clip_share", "Most clipped"),
        ("health_flush_share", "Most flushed to zero"),
        ("health_codes_min", "Fewest codes used"),
        ("health_scale_spread", "Widest scales"),
        ("health_amax", "Largest magnitude"),
    ), frozenset({"health_error_max", "health_clip_share", "health_flush_share", "health_codes_min"}),
        "K and V of a text as each layer produced them against what its pages hold, the worst layer and side; its name and the "
        "mean stand in the note. Clipping is a scale too small, flushing and few codes one too large."),
    Section("sensitivity", "Sensitivity", "sensitivity", (
        ("sens_kld_all", "All quantized"),
        ("sens_kld_k", "K alone"),
        ("sens_kld_v", "V alone"),
        ("sens_kld_first", "First tokens alone"),
        ("sens_kld_others", "All but first tokens"),
        ("sens_layer_alone", "Worst layer alone"),
        ("sens_layer_gain", "Most from one native"),
        ("sens_kld_suggested", "Suggested native"),
    ), frozenset({"sens_kld_all", "sens_kld_k", "sens_kld_v", "sens_layer_alone", "sens_layer_gain", "sens_kld_suggested"}),
        "KLD from native with a part of the cache quantized and the rest stored as it is; layers stand in the notes. What layers take "
        "off together is not the sum of what each does, so the suggested list was run too."),
)  # fmt: skip

OTHER = Section("other", "Other metrics", None, (), frozenset(), "Metrics that have no table of their own.")
