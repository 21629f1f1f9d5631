"""Pools from a memory budget: as many pages as the formula allows, and the refusal before an allocation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engines.reference.kv.layer import RESERVE_BYTES, check_fits
from kvbench.errors import Refused, UsageError
from kvbench.formats.kv import KV_FORMATS, KVShape, get_max_kv_blocks, kv_bytes, page_bytes

QWEN3_8B = [KVShape(8, 128, 128)] * 36
SHAPES = st.builds(KVShape, st.integers(1, 12), st.integers(1, 256), st.integers(1, 256))


def pool(fmt, shapes, pages, page_size, dtype):
    return sum(kv_bytes(fmt, shape, pages * page_size, dtype).total for shape in shapes)


@given(
    fmt=st.sampled_from(list(KV_FORMATS.values())),
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    budget=st.integers(-10, 2**34),
    exact=st.integers(1, 10**6),
)
def test_a_budget_holds_as_many_pages_as_the_formula_allows(fmt, shapes, page_size, dtype, budget, exact):
    pages = get_max_kv_blocks(budget, fmt, shapes, page_size, dtype)
    assert pool(fmt, shapes, pages + 1, page_size, dtype) > budget
    assert pages == 0 or pool(fmt, shapes, pages, page_size, dtype) <= budget
    # Exactly the bytes of a pool hold it, and one byte less does not.
    full = pool(fmt, shapes, exact, page_size, dtype)
    assert get_max_kv_blocks(full, fmt, shapes, page_size, dtype) == exact
    assert get_max_kv_blocks(full - 1, fmt, shapes, page_size, dtype) == exact - 1


@pytest.mark.parametrize(
    ("fmt", "page", "pages"),
    [("native", 65_536, 29_127), ("int8_sym", 33_280, 57_358), ("int8_static", 32_768, 58_254),
     ("fp8_e4m3", 33_792, 56_488), ("fp8_e4m3_static", 32_768, 58_254)],
)  # fmt: skip
def test_pages_of_64_gib_at_qwen3_8b(fmt, page, pages):
    assert page_bytes(KV_FORMATS[fmt], QWEN3_8B[0], 16, "bfloat16") == page
    assert get_max_kv_blocks(64 * 2**30, KV_FORMATS[fmt], QWEN3_8B, 16, "bfloat16") == pages


@pytest.mark.parametrize(
    ("shapes", "page_size", "dtype", "words"),
    [
        ([], 16, "bfloat16", "Pages of 16 tokens in 0 layers"),
        (QWEN3_8B, 0, "bfloat16", "Pages of 0 tokens in 36 layers"),
        (QWEN3_8B, 16, "float64", "dtype 'float64' is unknown; choose one of float32, bfloat16"),
    ],
)
def test_a_budget_without_a_page_size_or_layers_is_an_error(shapes, page_size, dtype, words):
    with pytest.raises(UsageError, match=words):
        get_max_kv_blocks(10**9, KV_FORMATS["native"], shapes, page_size, dtype)


def fits(fmt, sequences, tokens, free):
    check_fits(KV_FORMATS[fmt], QWEN3_8B, 16, "bfloat16", sequences, tokens, free)


def refusal(*given):
    with pytest.raises(Refused) as caught:
        fits(*given)
    assert caught.value.reason == "kv_does_not_fit"
    return str(caught.value)


def test_a_store_that_does_not_fit_names_the_bytes_and_the_largest_context_that_does():
    """At 32 GiB above the reserve int8_sym has 28,678 pages (33,280 B a layer), 7,169 for each of 4."""
    free = RESERVE_BYTES + 32 * 2**30
    longest = 28_678 // 4 * 16
    fits("int8_sym", 4, longest, free)
    message = refusal("int8_sym", 4, longest + 1, free)
    numbers = (f"needs {4 * 7_170 * 36 * 33_280:,} B", f"{free:,} B are free", "1,073,741,824 B are kept")
    found = (*numbers, "4 sequence(s) of 114,705", "114,704 tokens")
    assert [words for words in found if words not in message] == []
    assert "58,240 tokens" in refusal("native", 4, longest, free)


def test_a_busy_device_still_takes_a_tiny_store_and_refuses_the_rest():
    page = 36 * 33_280
    fits("int8_sym", 1, 16, 2 * page)
    assert "1,198,080 B are kept" in refusal("int8_sym", 1, 17, 2 * page)
    assert "not one page a sequence fits" in refusal("int8_sym", 1, 16, 2 * page - 2)
    assert "not one page a sequence fits" in refusal("int8_sym", 5, 1, 8 * page)
