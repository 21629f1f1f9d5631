"""The table of metrics: each with its unit, its definition and the values that it can have."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Metric:
    """better: "lower", "higher" or "" (no direction). plausible: closed interval outside which a value is a fault.

    runner: whose records it is derived from. paired: a difference from the baseline; baseline cells have no such row.
    sampled: estimated from a sample, so that it has an interval; where it has none, the sample is too small to judge by.
    none: the value that says that nothing changed, for a metric that compares with native; else None.
    """

    name: str
    runner: str
    unit: str
    better: str
    definition: str
    plausible: tuple[float, float] | None = None
    paired: bool = False
    sampled: bool = False
    none: float | None = None

    @property
    def counted(self) -> str:
        """What the n of its values counts, where an interval can rest on it; "" where it rests on none."""
        if self.name.startswith(("itl_slope", "itl_intercept", "itl_break_even")):
            return "requests"
        return _COUNTED.get(self.runner, "")


# What n counts in a runner's rows that have an interval.
_COUNTED = {
    "parity": "steps",
    "sensitivity": "tokens",
    "latency": "pairs of requests",
    "agreement": "steps",
    "generate": "texts",
    "perplexity": "tokens",
    "mcq": "questions",
}

# The range of values a unit can take at all: a threshold outside it is a slip (95 for a share of 0.95).
UNIT_DOMAIN: dict[str, tuple[float, float]] = {
    "B": (0.0, inf),
    "B/token": (0.0, inf),
    "ratio": (0.0, inf),
    "ms": (0.0, inf),
    "tok/s": (0.0, inf),
    "GB/s": (0.0, inf),
    "share": (0.0, 1.0),
    "p-value": (0.0, 1.0),
    "cosine": (-1.0, 1.0),
    "error": (0.0, inf),
    "logit": (0.0, inf),
    "step": (0.0, inf),
    "questions": (0.0, inf),
    "requests": (0.0, inf),
    "tokens": (0.0, inf),
    "us/token": (-inf, inf),
    "paths": (0.0, inf),
    "codes": (0.0, 256.0),
    "magnitude": (0.0, inf),
    "s": (0.0, inf),
    "ppl": (1.0, inf),
    "nat": (0.0, inf),
    "%": (-100.0, inf),
    "pt": (-100.0, 100.0),
}

_BYTES = (1.0, inf)
_SHARE = (0.0, 1.0)
_TIME = (
    1e-3,
    inf,
)  # no token leaves a model within a microsecond: the clock was read before the work was done
# A quarter of the bytes (FP32 to 8 bits) cannot give a twentieth of the time; one hiccup of the baseline rarely does.
_SPEED = (0.05, inf)
# A model that is certain and right about every token of a text has seen the answer (a missing causal mask).
_PPL = (1.0001, inf)
# No link between a host and one device carries a TB/s: the clock was read before the copies were done.
_BANDWIDTH = (1e-6, 1e3)
_KLD = (-1e-4, inf)  # rounding may leave a divergence of equal distributions a hair below 0

# Of the tokens at these positions of a chunk: late ones attend to more that is stored.
_BY_POSITION = [
    metric
    for low, high in ((0, 63), (64, 127), (128, 255), (256, 511))
    for metric in (
        Metric(f"ppl_at_{low}_{high}", "perplexity", "ppl", "lower",
               f"ppl of the scored tokens at positions {low} to {high} of their chunk", _PPL),
        Metric(f"ppl_delta_pct_at_{low}_{high}", "perplexity", "%", "",
               f"ppl_delta_pct of the scored tokens at positions {low} to {high} of their chunk", (-99.0, inf), paired=True),
    )
]  # fmt: skip

METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        # storage
        Metric("kv_bytes_total", "storage", "B", "lower",
               "payload and scales of all layers, numel x itemsize of the live tensors", _BYTES),
        Metric("kv_bytes_payload", "storage", "B", "lower", "bytes of the stored K and V elements of all layers", _BYTES),
        Metric("kv_bytes_scales", "storage", "B", "lower", "bytes of the stored scales of all layers", (0.0, inf)),
        Metric("kv_bytes_per_token", "storage", "B/token", "lower", "kv_bytes_total over the token slots of the store", _BYTES),
        Metric("kv_bytes_difference", "storage", "B", "lower",
               "bytes by which live tensors and formula differ, added up layer by layer so that nothing cancels; exactly 0", (0.0, 0.0)),
        Metric("kv_ratio", "storage", "ratio", "lower", "kv_bytes_total over the baseline cell's, both live", (0.01, 4.0), paired=True),
        Metric("kv_ratio_16bit", "storage", "ratio", "lower",
               "kv_bytes_total over a 2-byte native store of the same shape and slots", (0.01, 4.0)),
        Metric("weight_bytes", "storage", "B", "lower",
               "bytes of the model's parameters and saved buffers as they live, tied ones once", _BYTES),
        Metric("weight_payload_bytes", "storage", "B", "lower", "bytes of the weights stored as FP8 codes; 0 where all are native", (0.0, inf)),
        Metric("weight_scale_bytes", "storage", "B", "lower", "bytes of their block scales", (0.0, inf)),
        Metric("weight_native_bytes", "storage", "B", "lower",
               "weight_bytes less codes and scales: embeddings, norms, output layer, tied ones once", (0.0, inf)),
        Metric("weight_bytes_difference", "storage", "B", "lower",
               "bytes by which live weights and formula differ, codes, scales and the rest added up apart; exactly 0", (0.0, 0.0)),
        Metric("weight_ratio", "storage", "ratio", "lower", "weight_bytes over the baseline cell's, both live", (0.01, 4.0), paired=True),
        Metric("weight_ratio_16bit", "storage", "ratio", "lower",
               "weight_bytes over 2 bytes for each number that the model has, tied ones once: the published convention", (0.01, 4.0)),
        Metric("model_load_s", "storage", "s", "lower",
               "from the call that loads the model until its weights are on the device, quantizing included; files may be cached", (0.0, inf)),
        Metric("page_table_bytes", "storage", "B", "lower", "bytes of the page table", (0.0, inf)),
        Metric("held_bytes", "storage", "B", "lower",
               "device memory held beyond the weights before the pages were allocated: libraries' workspaces, buffers, rounding", (0.0, inf)),
        Metric("workspace_bytes", "storage", "B", "lower", "device peak beyond what was allocated before the run filled its pages", (0.0, inf)),
        Metric("device_peak_bytes", "storage", "B", "lower", "peak of allocated device memory, weights included", _BYTES),
        # transfer
        Metric("transfer_bytes", "transfer", "B", "lower",
               "bytes of the host's buffers after the pages of the whole batch were swapped out, scales included", _BYTES),
        Metric("transfer_bytes_difference", "transfer", "B", "lower",
               "bytes by which what was moved and the formula differ, added up over layers, swaps and directions; exactly 0", (0.0, 0.0)),
        Metric("transfer_ratio_16bit", "transfer", "ratio", "lower",
               "transfer_bytes over those of the same pages in a 2-byte native format", (0.01, 4.0)),
        Metric("swap_out_gb_s", "transfer", "GB/s", "higher",
               "bytes over seconds from the device to the host, synchronised; median over repeats, 1 GB = 10^9 B", _BANDWIDTH),
        Metric("swap_in_gb_s", "transfer", "GB/s", "higher",
               "bytes over seconds from the host to the device, synchronised; median over repeats, 1 GB = 10^9 B", _BANDWIDTH),
        # parity
        Metric("parity_max_abs", "parity", "error", "lower",
               "largest absolute error of a decode output against the FP32 oracle on dequantized tensors, worst case", (0.0, inf)),
        Metric("parity_cosine_min", "parity", "cosine", "higher",
               "smallest cosine between a decode output and the FP32 oracle, worst case", (-1.0001, 1.0001)),
        Metric("parity_bound_share", "parity", "ratio", "lower",
               "largest error over its bound, of any decode output and of any stored element; above 1 the format's bound is broken", (0.0, inf)),
        Metric("steps_argmax_agreement", "parity", "share", "higher",
               "share of the model-free decode steps whose argmax equals the native one", _SHARE, sampled=True, none=1.0),
        Metric("steps_max_abs", "parity", "error", "lower", "largest absolute error over the model-free decode steps", (0.0, inf)),
        # health
        Metric("health_amax", "health", "magnitude", "", "largest magnitude of K or V in any layer", (0.0, inf)),
        Metric("health_error_max", "health", "error", "lower",
               "distance of stored from original K or V as a share of the original's norm, worst layer and side", (0.0, inf)),
        Metric("health_bound_share", "health", "ratio", "lower",
               "worst stored element's error over what rounding may give it; above 1 the format's bound is broken", (0.0, inf)),
        Metric("health_clip_share", "health", "share", "lower",
               "share of the elements of K or V beyond the largest code, worst layer and side", _SHARE),
        Metric("health_flush_share", "health", "share", "lower",
               "share of the elements of K or V that are not zero and stored as zero, worst layer and side", _SHARE),
        Metric("health_codes_min", "health", "codes", "higher",
               "distinct codes in use (INT8 has 255, E4M3 254 and NaN), fewest of any layer and side", (1.0, 256.0)),
        Metric("health_scale_spread", "health", "ratio", "", "largest over smallest scale of a layer and side, widest", (1.0, inf)),
        # sensitivity: KLD from a native cache on the runner's own texts
        Metric("sens_kld_all", "sensitivity", "nat", "lower",
               "mean KLD of the next-token distribution over a native cache from that with the whole cache quantized; on a native cell "
               "of native run again", _KLD, sampled=True, none=0.0),
        *(Metric(f"sens_kld_{part}", "sensitivity", "nat", "lower", f"mean KLD of the next-token distribution over a native cache from that "
                 f"with {what}", _KLD, paired=True, sampled=True, none=0.0)
          for part, what in (
              ("k", "K quantized in every layer, and V native"),
              ("v", "V quantized in every layer, and K native"),
              ("first", "the first tokens of a text quantized (runner option first_tokens), and the others native"),
              ("others", "the first tokens of a text native, and the others quantized"),
              ("suggested", "the suggested layers native, and the others quantized"),
          )),
        Metric("sens_layer_alone", "sensitivity", "nat", "lower",
               "mean KLD with one layer quantized and the others native, of the layer where it is largest", _KLD, paired=True, sampled=True, none=0.0),
        Metric("sens_layer_gain", "sensitivity", "nat", "",
               "what one layer kept native takes off the mean KLD of a quantized cache, of the layer where it is most", (-inf, inf),
               paired=True, sampled=True, none=0.0),
        # gemm
        Metric("gemm_error_max", "gemm", "error", "lower",
               "largest distance of an output row from float64 x times the dequantized weight, as a share of its norm", (0.0, inf)),
        Metric("gemm_bound_share", "gemm", "ratio", "lower",
               "largest distance of an output row from the product that its path stands for (W8A8: with x as the reference "
               "quantizer leaves it) over what rounding gives the path; above 1 the path computes something else", (0.0, inf)),
        Metric("gemm_boundary_diff", "gemm", "error", "lower",
               "largest change of the first output row, its input the same, from one number of rows of the sweep to the next, "
               "both sides of every boundary of the route among them, as a share of its norm", (0.0, inf)),
        Metric("gemm_boundary_argmax", "gemm", "share", "higher",
               "share of these steps on which the argmax of that row stays", _SHARE),
        Metric("gemm_paths", "gemm", "paths", "", "paths that ran over the sweep; which rows have which stands in the note", (1.0, inf)),
        Metric("gemm_native_time_ratio", "gemm", "ratio", "lower",
               "worst time of a product over F.linear on the dequantized weight in the engine's dtype; GPU, both over the model's "
               "layers of the shape in turn, so that weights are cold where these exceed the L2 (fact timed_with)", _SPEED),
        Metric("gemm_reference_time_ratio", "gemm", "ratio", "lower",
               "worst time of a product over the reference path, which dequantizes and multiplies; GPU, timed likewise", (1e-4, inf)),
        # latency
        Metric("ttft_ms", "latency", "ms", "lower",
               "request submitted to first token on the host, synchronised, sampling included; median over repeats", _TIME),
        Metric("itl_ms", "latency", "ms", "lower",
               "mean gap between consecutive tokens of one sequence, without TTFT; a static batch gives one a step", _TIME),
        Metric("itl_p50_ms", "latency", "ms", "lower", "median gap between consecutive tokens of one sequence", _TIME),
        Metric("itl_p90_ms", "latency", "ms", "lower", "90th percentile of the gaps, an observed gap (rounded up)", _TIME),
        Metric("itl_p99_ms", "latency", "ms", "lower", "99th percentile of the gaps, an observed gap (rounded up)", _TIME),
        Metric("itl_max_ms", "latency", "ms", "lower", "longest gap", _TIME),
        Metric("decode_tok_s", "latency", "tok/s", "higher", "batch * (N - 1) / sum of the N - 1 steps: the batch's rate", (1e-6, 1e9)),
        Metric("prefill_tok_s", "latency", "tok/s", "higher", "batch * prompt tokens of a sequence / TTFT", (1e-6, 1e9)),
        Metric("ttft_cold_ms", "latency", "ms", "lower", "TTFT of the first warm-up request: compilation and allocation included", _TIME),
        Metric("ttft_ratio", "latency", "ratio", "lower",
               "TTFT over the interleaved baseline's, geometric mean over pairs of repeats, t-interval of the log-ratio",
               _SPEED, paired=True, sampled=True, none=1.0),
        Metric("itl_ratio", "latency", "ratio", "lower",
               "mean ITL over the interleaved baseline's, geometric mean over pairs of repeats, t-interval of the log-ratio",
               _SPEED, paired=True, sampled=True, none=1.0),
        Metric("request_ms", "latency", "ms", "lower",
               "request submitted to its last token on the host, by two looks at the clock; median over repeats", _TIME),
        Metric("request_difference_ms", "latency", "ms", "lower",
               "largest distance of a request's time from its TTFT plus its steps; rounding alone", (0.0, 1e-3)),
        Metric("decode_read_gb_s", "latency", "GB/s", "",
               "bytes that a decode step must read (weights without input embeddings and experts, stored K, V and scales) over mean ITL",
               (0.0, inf)),
        Metric("decode_bandwidth_share", "latency", "ratio", "",
               "the same less what the device's cache can hold, over the copy bandwidth (bytes read and written) measured beside it",
               (0.0, 1.2)),
        Metric("latency_drift_pct", "latency", "%", "",
               "change of a request's time from the first request to the last, in %: slope of the line of least squares through "
               "log(time from submission to the last token) over the order of all requests, with a level for each arm and one slope for "
               "both, times the orders between them; t-interval of the slope; from 4 requests on",
               (-100.0, inf), sampled=True),
        Metric("latency_outliers", "latency", "requests", "lower",
               "requests of both arms whose TTFT or mean ITL has a modified z-score above 3.5 (0.6745 |x - median| / MAD, of the logarithms "
               "within the arm) and lies 5% or more from the arm's median; from 5 requests an arm on; outliers stay in every value",
               (0.0, inf)),
        Metric("itl_outlier_share", "latency", "share", "lower",
               "share of the steps that take more than twice the median step of their request (stalls); from 5 steps a request on", _SHARE),
        Metric("throttled_requests", "latency", "requests", "lower",
               "requests of both arms during which the device was slowed down: a throttle reason hw slowdown, sw thermal, hw thermal or hw "
               "power brake before or after, or 1% of its time or more lost to thermal violations or to the CPU quota of the process's "
               "control groups; a power cap is none", (0.0, inf)),
        Metric("itl_slope_us_per_token", "latency", "us/token", "lower",
               "slope of ITL over the context, least squares over requests of the cells that differ in nothing else; t-interval",
               (-inf, inf)),
        Metric("itl_intercept_ms", "latency", "ms", "lower", "ITL of that line at no context; t-interval", (-inf, inf)),
        Metric("itl_break_even_tokens", "latency", "tokens", "lower",
               "context from which on that line lies below the interleaved baseline's; none where they are parallel or it is the steeper",
               (0.0, inf), paired=True),
        Metric("itl_slope_ratio", "latency", "ratio", "lower",
               "slope over the interleaved baseline's, t-interval of the log-ratio", (0.0, inf), paired=True),
        Metric("itl_slope_to_bytes", "latency", "ratio", "",
               "itl_slope_ratio over the ratio of the KV bytes a token; below 1 something besides the bytes made it faster",
               (0.0, inf), paired=True),
        # agreement
        Metric("top1_teacher_forced", "agreement", "share", "higher",
               "share of steps with the native argmax, fed the native history; interval clustered by blocks of 64 consecutive steps, which "
               "share their history and differ together", _SHARE, paired=True, sampled=True, none=1.0),
        Metric("first_divergence", "agreement", "step", "higher",
               "index of the first token of the free-running continuation that differs; right-censored at the number of steps",
               (0.0, inf), paired=True),
        Metric("real_divergence", "agreement", "step", "higher",
               "index of the first token that differs where the native margin is above aa_margin_noise and the baseline agrees with "
               "itself, along the native history; right-censored at the number of steps", (0.0, inf), paired=True),
        Metric("divergence_margin", "agreement", "logit", "lower",
               "native top-2 logit margin at the first divergence: a near-tie below the A/A noise is no real divergence",
               (0.0, inf), paired=True),
        Metric("length_ratio", "agreement", "ratio", "",
               "tokens up to the first one that ends a text, over the baseline's, along the native history; a text that goes on counts "
               "with all its steps", (0.0, inf), paired=True),
        Metric("aa_disagreement", "agreement", "share", "lower",
               "share of steps where the baseline, measured again in chunks with a neighbour in the batch, disagrees with itself: the "
               "noise floor; interval clustered by blocks of 64 steps", _SHARE, sampled=True, none=0.0),
        Metric("prefix_disagreement", "agreement", "share", "lower",
               "share of steps of the baseline's own text whose argmax another one is behind a line end before the prompt, which changes no "
               "meaning: how undecided the text is; interval clustered by blocks of 64 steps", _SHARE, sampled=True),
        Metric("aa_margin_noise", "agreement", "logit", "lower",
               "the most that a step's top-2 logit margin moved between these two runs of the baseline; none where rounding does not explain it",
               (0.0, inf)),
        Metric("native_distinct_4grams", "agreement", "share", "higher",
               "share of the baseline's generated 4-grams that are different; a text that loops tests few choices", _SHARE),
        # generate: medians (lower ones) and shares are over the prompts, positions in what was generated, right-censored at its length
        Metric("gen_distinct_4grams", "generate", "share", "higher",
               "share of the generated 4-grams that are different, up to the first end-of-text token; mean over prompts", _SHARE),
        Metric("gen_loop_tokens", "generate", "tokens", "lower",
               "tokens of the longest loop in any text: one unit over and over, three copies and 12 tokens or more", (0.0, inf)),
        Metric("gen_loop_onset", "generate", "step", "higher",
               "first token of a text's longest loop, its first copy included; median, right-censored", (0.0, inf)),
        Metric("gen_eos", "generate", "step", "", "position of the first end-of-text token; median, right-censored", (0.0, inf)),
        Metric("gen_degenerated", "generate", "share", "lower",
               "share of the texts that from some token on repeat themselves to the end: 32 tokens or more, of which 90% end a "
               "4-gram that stood in the text before; Wilson interval", _SHARE),
        Metric("gen_onset", "generate", "step", "higher", "the token from which they do; median, right-censored", (0.0, inf)),
        Metric("gen_useful_tokens", "generate", "tokens", "higher",
               "tokens before a text only repeats itself or ends, whichever comes first; median, all of its length where it does neither",
               (0.0, inf)),
        Metric("gen_first_divergence", "generate", "step", "higher",
               "first token that is not the baseline's; median, right-censored", (0.0, inf), paired=True),
        Metric("gen_native_degenerated", "generate", "share", "lower",
               "the baseline's own gen_degenerated, beside its candidates", _SHARE, paired=True),
        Metric("gen_native_onset", "generate", "step", "higher", "the baseline's own gen_onset", (0.0, inf), paired=True),
        Metric("gen_collapsed", "generate", "share", "lower",
               "share of the texts that repeat themselves before a quarter of the baseline's own onset (of the length, where it has none), "
               "or end before a quarter of its useful tokens; Wilson interval", _SHARE, paired=True),
        # perplexity
        Metric("ppl", "perplexity", "ppl", "lower", "exp(sum of NLL / scored tokens), never a mean of means", _PPL),
        Metric("ppl_delta_pct", "perplexity", "%", "",
               "(exp(d) - 1) * 100, d the mean NLL difference from the baseline over the same scored tokens; "
               "t-interval clustered by document", (-99.0, inf), paired=True, sampled=True, none=0.0),
        Metric("ppl_aa_pct", "perplexity", "%", "",
               "the same of the baseline run again beside the candidate: the noise floor", (-99.0, inf), paired=True, sampled=True, none=0.0),
        *_BY_POSITION,
        Metric("kld_mean", "perplexity", "nat", "lower",
               "mean KL divergence of the candidate's next-token distribution from the native one, full vocabulary; interval clustered by "
               "document, as of its quantiles", _KLD, paired=True, sampled=True, none=0.0),
        Metric("kld_p50", "perplexity", "nat", "lower", "median KL divergence a token", _KLD, paired=True, sampled=True, none=0.0),
        Metric("kld_p90", "perplexity", "nat", "lower", "90th percentile of the KL divergence a token", _KLD, paired=True, sampled=True, none=0.0),
        Metric("kld_p99", "perplexity", "nat", "lower", "99th percentile of the KL divergence a token", _KLD, paired=True, sampled=True, none=0.0),
        Metric("kld_p999", "perplexity", "nat", "lower", "99.9th percentile of the KL divergence a token", _KLD, paired=True, sampled=True, none=0.0),
        Metric("kld_max", "perplexity", "nat", "lower", "largest KL divergence of a token", _KLD, paired=True),
        Metric("top1_agreement", "perplexity", "share", "higher",
               "share of scored tokens where candidate and native have the same most likely token; Wilson interval of the "
               "number of independent tokens that the documents are worth", _SHARE, paired=True, sampled=True, none=1.0),
        Metric("delta_p_mean", "perplexity", "pt", "",
               "mean change of the probability given to the true token, in percentage points", (-100.0, 100.0), paired=True, sampled=True, none=0.0),
        # mcq
        Metric("mcq_accuracy", "mcq", "share", "higher",
               "share of scored questions whose choice of highest summed logprob is the answer (first one of a tie); Wilson interval", _SHARE, sampled=True),
        Metric("mcq_accuracy_norm", "mcq", "share", "higher", "the same with logprob per token", _SHARE, sampled=True),
        Metric("mcq_accuracy_norm_char", "mcq", "share", "higher", "the same with logprob per character", _SHARE, sampled=True),
        Metric("mcq_macro", "mcq", "share", "higher", "mean over subjects of their accuracy; t-interval over subjects", _SHARE, sampled=True),
        Metric("mcq_delta_pt", "mcq", "pt", "",
               "accuracy less the baseline's on the questions both scored, in points; Bonett-Price interval on the discordant pairs",
               (-100.0, 100.0), paired=True, sampled=True, none=0.0),
        Metric("mcq_mde_pt", "mcq", "pt", "lower",
               "minimum detectable effect: the smallest true change of accuracy that the interval of mcq_delta_pt tells from none with "
               "80% power, given this many discordant pairs", (0.0, inf), paired=True),
        Metric("mcq_recovery", "mcq", "ratio", "higher",
               "accuracy over the baseline's on the questions both scored: 1 plus mcq_delta_pt and its interval over the baseline's accuracy",
               (0.0, inf), paired=True, sampled=True, none=1.0),
        Metric("mcq_agreement", "mcq", "share", "higher",
               "share of the questions both scored where both pick the same choice; Wilson interval", _SHARE, paired=True, sampled=True, none=1.0),
        Metric("mcq_right_to_wrong", "mcq", "share", "lower",
               "share of these questions that the baseline answers and the candidate does not; Wilson interval", _SHARE, paired=True, sampled=True, none=0.0),
        Metric("mcq_wrong_to_right", "mcq", "share", "",
               "share of these questions that the candidate answers and the baseline does not; Wilson interval", _SHARE, paired=True, sampled=True, none=0.0),
        Metric("mcq_wrong_to_wrong", "mcq", "share", "lower",
               "share of these questions that neither answers and whose choice changed; Wilson interval", _SHARE, paired=True, sampled=True, none=0.0),
        Metric("mcq_mcnemar_p", "mcq", "p-value", "",
               "exact McNemar test of equal accuracy on the questions both scored", _SHARE, paired=True),
        Metric("mcq_real_flips", "mcq", "share", "lower",
               "share of the questions both scored where the candidate picks another choice that the baseline scores lower than its own by "
               "more than twice mcq_aa_score_noise, which is what noise on both can make up; Wilson interval",
               _SHARE, paired=True, sampled=True, none=0.0),
        Metric("mcq_aa_disagreement", "mcq", "share", "lower",
               "share of a spread subset of the questions (option aa_limit) whose pick is another one when the baseline scores them again, "
               "no prefix shared, other neighbours, chunks of 64 tokens: the noise floor; Wilson interval", _SHARE, sampled=True, none=0.0),
        Metric("mcq_aa_score_noise", "mcq", "nat", "lower",
               "the most that the summed logprob of a choice moved between these two runs of the baseline; none of fewer than 8 questions, or "
               "where rounding does not explain it", (0.0, inf)),
        Metric("mcq_prefix_disagreement", "mcq", "share", "lower",
               "share of the same questions whose pick is another one behind a line end before the prompt, which changes no meaning: how "
               "fragile they are; Wilson interval", _SHARE, sampled=True),
        Metric("mcq_scored", "mcq", "questions", "higher", "questions scored; n is all that were asked for", (0.0, inf)),
        Metric("truncated_share", "mcq", "share", "lower", "share of the questions whose prompt was truncated", _SHARE),
    )
}  # fmt: skip
