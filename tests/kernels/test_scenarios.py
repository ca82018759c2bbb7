"""The public reports about attention kernels that kvtide's kernels are held against: which tests replay each of them.

A report is a symptom seen elsewhere; its scenario is the smallest call that shows it. Each has tests here, or a reason
why it cannot have one. `tests` are "file: function, function"; a name that no longer exists fails.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDER = Path(__file__).parent


class Scenario(NamedTuple):
    """One report: its number, where it was reported, what went wrong, the tests, and what no test here can show."""

    number: int
    report: str
    symptom: str
    tests: tuple[str, ...]
    not_tested: str | None = None


DECODE, TRITON = "test_mla_decode: ", "test_triton_mla: "
FAULTS, ADAPTERS = "test_reported_faults: ", "test_adapters: "
NO_GPU = "the rest needs a GPU: "

SCENARIOS = (
    Scenario(
        1,
        "vllm 57017, 57094",
        "one row of length 0 makes NaN of the whole batch",
        (
            TRITON + "test_rows_of_no_key_are_zero_and_leave_others_alone_1_2_20",
            FAULTS + "test_a_row_of_no_key_changes_no_other_row_1",
            DECODE + "test_no_visible_key_gives_nothing_reports_1_2_5_20",
        ),
    ),
    Scenario(
        2,
        "flashinfer 2883; vllm 37442, 37815, 38359",
        "NaN in padded rows where the table is wide",
        (
            ADAPTERS + "test_ragged_rows_over_a_poisoned_pool, test_nothing_to_see_anywhere",
            FAULTS + "test_tables_of_odd_widths_34",
        ),
    ),
    Scenario(
        3,
        "flashinfer 4975",
        "out is not written where the LSE is -inf, and spoils a later merge",
        (
            "test_merge: test_nothing_is_the_identity_reports_3_4",
            FAULTS + "test_whatever_a_kernel_leaves_where_no_key_is_seen_2_3_5_6",
        ),
    ),
    Scenario(
        4,
        "flashinfer 4051, 5262",
        "the merge of two empty states is NaN",
        (
            "test_merge: test_nothing_is_the_identity_reports_3_4",
            TRITON + "test_unwritten_scratch_is_not_read_24, test_splits",
        ),
    ),
    Scenario(
        5,
        "flashinfer 4452",
        "a finite LSE for rows that see nothing",
        (
            TRITON + "test_first_tokens_of_a_row_shorter_than_its_query_see_nothing_5",
            DECODE + "test_no_visible_key_gives_nothing_reports_1_2_5_20",
        ),
    ),
    Scenario(
        6,
        "flash-attention 978; FlashMLA's tests",
        "+inf or -inf for rows that see nothing",
        (
            FAULTS + "test_whatever_a_kernel_leaves_where_no_key_is_seen_2_3_5_6",
            ADAPTERS + "test_ragged_rows_over_a_poisoned_pool",
        ),
    ),
    Scenario(
        7,
        "flashinfer 941",
        "NaN in the tail of the last page",
        (DECODE + "test_ragged_rows", TRITON + "test_splits", FAULTS + "test_infinity_in_unused_slots_7_8_9"),
    ),
    Scenario(
        8,
        "flash-attention 1745, 2374; vllm 936, 47305",
        "scores are masked, but not values",
        (
            FAULTS + "test_infinity_in_unused_slots_7_8_9",
            TRITON + "test_matches_float64_attention",
            "test_registry: test_kernels_that_read_unused_slots_need_a_finite_pool",
        ),
    ),
    Scenario(
        9,
        "vllm 57156, 57158",
        "masked entries are read as block 0, which holds NaN",
        (
            TRITON + "test_windows_do_not_read_what_has_left_them_9",
            ADAPTERS + "test_windows",
            FAULTS + "test_infinity_in_unused_slots_7_8_9",
        ),
    ),
    Scenario(
        10,
        "vllm 47671",
        "int32 offsets of high blocks",
        (
            TRITON + "test_offsets_beyond_int32_10_12_13",
            DECODE + "test_a_pool_beyond_int32_reports_10_13",
            FAULTS + "test_nothing_is_read_behind_tables_and_lengths_10_14_33",
        ),
    ),
    Scenario(
        11,
        "lightseekorg/tokenspeed 501",
        "int32 offsets of high slots in cache writes",
        (
            "test_write: test_slots_of_millions_report_11",
            "test_triton_write: test_slots_beyond_int32_11",
        ),
    ),
    Scenario(
        12,
        "sglang 20389",
        "int32 offsets in a query beyond 2**31 elements",
        (TRITON + "test_offsets_beyond_int32_10_12_13",),
    ),
    Scenario(
        13,
        "vllm 50427",
        "a wrapped offset that is mapped: wrong, without a fault",
        (TRITON + "test_offsets_beyond_int32_10_12_13", DECODE + "test_a_pool_beyond_int32_reports_10_13"),
    ),
    Scenario(
        14,
        "vllm 51848, 51065",
        "more query rows than the table has rows",
        (FAULTS + "test_nothing_is_read_behind_tables_and_lengths_10_14_33",),
    ),
    Scenario(
        15,
        "vllm 45227",
        "a schedule made for one query token is used for four",
        (
            FAULTS + "test_no_schedule_is_used_for_another_q_len_15",
            ADAPTERS + "test_flashmla_gets_a_fresh_schedule_each_time",
        ),
    ),
    Scenario(
        16,
        "flashinfer 3929, 4059, 4382",
        "requests after the first are wrong at 5 to 7 query tokens",
        (
            TRITON + "test_identical_requests_give_identical_rows_16",
            DECODE + "test_equal_rows_give_equal_results_report_16",
        ),
    ),
    Scenario(
        17,
        "sglang 12295",
        "padded query tokens shift the mask",
        (
            TRITON + "test_padded_query_tokens_17",
            ADAPTERS + "test_query_lengths_per_row",
            "test_gqa: test_rows_with_fewer_query_tokens_report_17",
            "test_triton_gqa: test_padded_query_tokens",
        ),
    ),
    Scenario(
        18,
        "flashinfer 2856",
        "a result of the right shape is refused with several query tokens",
        (
            DECODE + "test_a_given_out_may_be_strided_report_18",
            TRITON + "test_strided_query_and_results_18",
            ADAPTERS + "test_half_precision_and_a_result_in_somebodys_buffer",
        ),
    ),
    Scenario(
        19,
        "vllm 33664, 35969",
        "rows of length 0 whose entries are -1",
        (
            FAULTS + "test_rows_of_no_key_may_have_entries_of_minus_one_19",
            FAULTS + "test_rows_of_no_key_may_have_entries_of_minus_one_in_adapters_19",
        ),
    ),
    Scenario(
        20,
        "sglang 5516, 5875",
        "a batch of empty rows, or a table of no columns",
        (
            DECODE + "test_no_rows_and_no_columns_report_20",
            TRITON + "test_rows_of_no_key_are_zero_and_leave_others_alone_1_2_20, test_empty_batch",
            ADAPTERS + "test_nothing_to_see_anywhere",
            "test_gqa: test_nothing_at_all_report_20",
        ),
    ),
    Scenario(
        21,
        "NVIDIA/cutlass 2274; sglang 6101; vllm 17745",
        "large queries overflow the LSE of splits",
        (DECODE + "test_large_queries_report_21", TRITON + "test_large_queries_21"),
    ),
    Scenario(
        22,
        "vllm 24966, 25509, 26026",
        "the reduction of splits hangs in batches",
        (FAULTS + "test_every_batch_with_every_number_of_splits_22",),
        "foreign kernels' hangs: they need those kernels and a GPU",
    ),
    Scenario(
        23,
        "TensorRT-LLM 15138",
        "scratch sized by heads, and written by tiles",
        (TRITON + "test_nothing_beside_scratch_and_results_is_written_23",),
    ),
    Scenario(
        24,
        "ROCm/aiter 4350",
        "NaN at random, from splits that nobody wrote",
        (TRITON + "test_unwritten_scratch_is_not_read_24", FAULTS + "test_twenty_runs_give_the_same_bits_24"),
        NO_GPU + "a race between programs cannot happen in the interpreter, which runs them one by one",
    ),
    Scenario(
        25,
        "ROCm/aiter 4555",
        "a captured graph keeps the one split of its short capture",
        (
            TRITON + "test_splits_follow_capacity_and_not_lengths_25",
            FAULTS + "test_launches_stay_right_when_lengths_change_25_35",
        ),
    ),
    Scenario(
        26,
        "FlashMLA 212; tokenspeed 904; ROCm/aiter 4378",
        "a row's result depends on the rest of the batch",
        (
            TRITON + "test_row_alone_equals_row_in_batch_26, test_invariant_schedules_cut_by_position",
            DECODE + "test_batch_invariance_report_26",
            ADAPTERS + "test_one_split_when_rows_must_not_depend_on_their_batch",
        ),
    ),
    Scenario(
        27,
        "vllm 47079; sglang 34240",
        "LSEs of base 2 are merged as natural ones",
        (
            FAULTS + "test_two_halves_of_the_keys_are_the_whole_27",
            FAULTS + "test_two_halves_of_the_keys_are_the_whole_in_adapters_27",
            "test_merge: test_halves_of_the_keys_are_the_whole_report_27",
        ),
    ),
    Scenario(
        28,
        "vllm-fork 15, 17",
        "one stride for both inputs of a merge",
        ("test_merge: test_strides_of_each_side_are_its_own_report_28",),
    ),
    Scenario(
        29,
        "ROCm/aiter 3498",
        "a page stride that is not the page's length",
        (
            TRITON + "test_pages_apart_29",
            DECODE + "test_ragged_rows",
            ADAPTERS + "test_the_cache_is_passed_as_it_lies",
            "test_support: test_a_re_cut_reaches_every_token_of_every_block",
        ),
    ),
    Scenario(
        30,
        "sglang 34765",
        "the FP8 scale reaches keys, and not values",
        (
            DECODE + "test_k_scale_reaches_keys_and_values_report_30",
            TRITON + "test_fp8_scale_reaches_keys_and_values_30_31",
            ADAPTERS + "test_fp8_scales_reach_keys_and_values",
            "test_gqa: test_fp8_caches_with_scales_of_their_own_report_30",
        ),
    ),
    Scenario(
        31,
        "vllm 42956",
        "a scale chosen by the latent saturates the rope",
        (
            "test_write: test_a_rope_twenty_times_the_latent_report_31",
            TRITON + "test_fp8_scale_reaches_keys_and_values_30_31",
        ),
    ),
    Scenario(
        32,
        "vllm 51011",
        "12 heads in FP8 are wrong in batches",
        (TRITON + "test_odd_head_counts_32", ADAPTERS + "test_head_counts"),
    ),
    Scenario(
        33,
        "vllm 53982; rocm-libraries 6932",
        "a read behind the block table",
        (FAULTS + "test_nothing_is_read_behind_tables_and_lengths_10_14_33",),
    ),
    Scenario(
        34,
        "vllm 39324; flashinfer 3915",
        "tables have to be padded to 128 tokens",
        (FAULTS + "test_tables_of_odd_widths_34",),
    ),
    Scenario(
        35,
        "vllm 27128",
        "more splits than at the capture",
        (
            FAULTS + "test_launches_stay_right_when_lengths_change_25_35",
            TRITON + "test_splits_follow_capacity_and_not_lengths_25",
        ),
    ),
    Scenario(
        36,
        "vllm 22738",
        "a cached choice hides a forced one",
        (
            FAULTS + "test_what_is_forced_is_seen_by_a_call_like_an_earlier_one_36",
            "test_registry: test_the_cache_holds_numbers_and_tells_calls_apart",
            "test_registry: test_the_choice_is_logged_once_with_what_came_before",
        ),
    ),
    Scenario(
        37,
        "sglang 27460",
        "a buffer too small for what is written into it",
        (
            FAULTS + "test_the_workspace_holds_every_split_37",
            TRITON + "test_nothing_beside_scratch_and_results_is_written_23",
            ADAPTERS + "test_one_zeroed_workspace_for_all_calls",
        ),
    ),
    Scenario(
        38,
        "ROCm/aiter 5194",
        "a cache owns, and drops, a tensor that a graph uses",
        (
            FAULTS + "test_no_tensor_of_a_call_is_kept_38",
            ADAPTERS + "test_the_scale_is_read_from_the_device_once",
            "test_registry: test_the_cache_holds_numbers_and_tells_calls_apart",
        ),
    ),
    Scenario(
        39,
        "triton 10573",
        "one configuration is compiled wrongly for H100",
        ("test_compile: test_decode, test_merge, test_gqa", "test_gpu_benchmark: test_a_wrong_kernel_is_called_wrong"),
        NO_GPU + "only a run shows wrong code, so benchmarks/gpu_mla.py checks every tile before it times any",
    ),
)


@lru_cache
def functions(file: str) -> set[str]:
    """Names of the tests that a file defines at its top level."""
    tree = ast.parse((FOLDER / f"{file}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_there_are_thirty_nine_in_order() -> None:
    assert [scenario.number for scenario in SCENARIOS] == list(range(1, 40))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: f"{scenario.number}")
def test_every_report_has_tests_that_exist(scenario: Scenario) -> None:
    assert scenario.tests or scenario.not_tested
    for place in scenario.tests:
        file, _, names = place.partition(": ")
        missing = set(names.split(", ")) - functions(file)
        assert not missing, f"{file} has no {missing}"
