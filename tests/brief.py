"""The brief part of the quick tests, which `make test` runs; `make test-rest` runs the others.

A developer waits for `make test`, seven minutes on two cores from an empty clone. Of a test with
many rows it has every fourth, the first among them: most mistakes show in any row. It leaves out
what takes more than a second or so of a core; those tests are named here. All rows of the files
beside this one are brief, since each holds a rule for one file of the package. A new test is brief,
until it is named here. CI runs both parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
SHARE = 4  # one row of so many is brief

# File, below tests/ -> the tests, by name, that `make test-rest` runs.
LATER: dict[str, tuple[str, ...]] = {
    "bench/test_machine.py": ("test_batches_of_a_gpu_fit_its_room_and_vary_by_turn",),
    "bench/test_ops.py": (
        "test_decode_counts_the_bytes_of_keys_and_values",
        "test_the_short_run_ends_with_its_document",
    ),
    "bench/test_serve_probe.py": ("test_bench_serve_tells_what_the_server_adds",),
    "bench/test_serve_steps.py": (
        "test_bench_serve_foresees_a_server_by_its_own_steps",
        "test_the_pace_of_a_machine_is_that_of_its_steps",
    ),
    "distributed/test_inbox.py": ("test_flags_take_turns_with_words_and_parts",),
    "distributed/test_memory.py": ("test_a_rank_holds_its_share",),
    "distributed/test_recurrence.py": (
        "test_a_shared_convolution_is_that_of_one_device",
        "test_a_shared_recurrence_has_the_bits_of_one_device",
        "test_parts_that_begin_anywhere_are_exact",
    ),
    "distributed/test_shards.py": ("test_layers_with_a_state_are_cut_at_their_heads",),
    "engine/tensor_parallel/test_command.py": ("test_generate_gives_the_text_of_one_process",),
    "engine/tensor_parallel/test_device_shards.py": (
        "test_greedy_rows_are_drawn_from_the_largest_logits",
        "test_ranks_draw_together_the_first_of_equal_tokens",
        "test_ranks_stay_in_step_whoever_comes_ends_leaves_and_fails",
        "test_rows_of_groups_and_of_latents_give_the_tokens_of_the_whole",
        "test_rows_of_many_rules_are_drawn_in_one_step",
        "test_rows_of_shards_give_the_tokens_of_the_whole",
        "test_what_is_drawn_from_shares_is_drawn_from_the_whole",
    ),
    "engine/tensor_parallel/test_drafts.py": ("test_another_model_that_guesses_changes_nothing",),
    "engine/tensor_parallel/test_equal.py": ("test_guesses_that_are_verified",),
    "engine/tensor_parallel/test_equal_kinds.py": (
        "test_chunks_and_lost_blocks",
        "test_mixtures_give_the_tokens_and_log_probabilities_of_one_process",
    ),
    "engine/tensor_parallel/test_equal_states.py": (
        "test_states_are_cut_and_give_the_tokens_of_one_process",
    ),
    "engine/tensor_parallel/test_files.py": (
        "test_the_next_workers_find_the_files_of_the_last_ones",
    ),
    "engine/tensor_parallel/test_lost.py": (
        "test_a_worker_that_dies_while_nothing_runs_ends_the_engine",
    ),
    "engine/test_adapters.py": (
        "test_answers_stay_the_same",
        "test_bits_do_not_depend_on_the_adapters_of_neighbours",
        "test_blocks_are_shared_by_requests_of_one_adapter_alone",
        "test_rows_on_the_device_have_the_answers_of_single_steps",
        "test_tokens_are_those_of_the_merged_model",
    ),
    "engine/test_async_llm.py": ("test_threads_and_a_thousand_tasks_come_stall_cancel_and_go",),
    "engine/test_audit.py": (
        "test_a_wrong_checkpoint_of_states_is_found",
        "test_answers_are_those_without_an_audit",
        "test_requests_that_come_run_before_what_is_computed_again",
        "test_what_is_right_is_equal_whatever_happens_to_requests",
    ),
    "engine/test_batch_invariance.py": (
        "test_mixtures_and_layers_with_states_in_the_loop",
        "test_the_training_forward_pass_has_the_gradients_of_torch",
    ),
    "engine/test_beams.py": ("test_no_order_of_beams_makes_a_copy_of_a_copy",),
    "engine/test_compile_ahead.py": (
        "test_a_rehearsal_asks_for_all_that_the_start_asks_for",
        "test_kernels_are_kept_under_the_same_name_in_whatever_order_they_come",
    ),
    "engine/test_config.py": (
        "test_a_field_that_is_added_is_everywhere_without_another_edit",
        "test_what_describes_is_frozen",
    ),
    "engine/test_giving_way.py": (
        "test_a_compiled_step_is_stopped_by_an_arrival_and_texts_stay_the_same",
        "test_what_is_lost_is_earned_before",
    ),
    "engine/test_live_adapter.py": (
        "test_an_engine_that_has_slept_has_the_adapter_again",
        "test_answers_and_recipes_are_those_of_the_adapter_loaded_elsewhere",
        "test_blocks_of_the_old_adapter_are_found_no_more",
        "test_training_and_sampling_differ_by_zero_while_the_adapter_alone_changes",
    ),
    "engine/test_llm.py": ("test_neither_models_nor_a_generation_import_what_they_can_do_without",),
    "engine/test_loop.py": ("test_the_interpreter_ends_whatever_the_engine_is_doing",),
    "engine/test_sampling_options.py": (
        "test_the_story_model_tells_what_transformers_tells_under_the_same_rules",
    ),
    "engine/test_state_simulation.py": (
        "test_the_random_schedules_reach_what_they_are_meant_to_test",
    ),
    "engine/test_state_step.py": ("test_a_step_has_the_bits_of_its_modules",),
    "engine/test_text.py": ("test_any_text_survives_byte_fallback",),
    "engine/test_together.py": ("test_any_mixture_gives_the_tokens_of_a_request_alone",),
    "engine/test_trace.py": ("test_the_command_draws_a_picture",),
    "engine/test_usual_steps.py": ("test_no_ordinary_request_waits_for_a_compiler",),
    "engine/test_weights.py": (
        "test_a_level_that_drops_weights_reads_them_again",
        "test_a_model_whose_layers_keep_states_takes_weights_sleeps_and_is_audited",
        "test_an_engine_that_has_slept_answers_as_before",
        "test_running_requests_wait_are_aborted_or_go_on",
    ),
    "integrations/test_evoformer.py": (
        "test_deepspeeds_function_is_its_formula_with_every_gradient",
    ),
    "integrations/test_transformers.py": ("test_one_graph_without_a_matrix_of_the_mask",),
    "kernels/cpu/test_attention.py": ("test_small_calls_stay_on_their_thread",),
    "kernels/cpu/test_attention_dropout.py": (
        "test_a_packed_sequence_counts_its_own_rows_and_keys",
        "test_a_probability_of_one_drops_everything_but_the_sum",
        "test_the_mask_is_bit_for_bit_the_documented_one",
        "test_values_and_gradients_agree",
    ),
    "kernels/cpu/test_attention_few.py": (
        "test_few_keys_have_the_bits_of_many",
        "test_gradients_have_the_same_bits_however_do_lies",
        "test_the_gradient_of_one_query",
    ),
    "kernels/cpu/test_crew.py": (
        "test_a_forked_child_has_helpers_of_its_own",
        "test_a_helper_that_has_nothing_to_do_takes_no_time",
        "test_a_step_runs_alone_when_they_have_left",
        "test_a_step_runs_alone_where_no_thread_may_begin",
        "test_a_step_waits_for_nobody_who_has_not_come",
        "test_helpers_leave_with_their_program",
        "test_helpers_take_part_and_change_no_bit",
        "test_who_holds_what_helpers_need_to_end_waits_a_bounded_time",
    ),
    "kernels/cpu/test_decode.py": (
        "test_a_query_in_integers_is_2_to_the_minus_16_of_its_largest_element_off",
    ),
    "kernels/cpu/test_instruction_sets.py": ("test_a_few_rows_hold",),
    "kernels/cpu/test_int8.py": ("test_products_are_within_the_budget_of_float64",),
    "kernels/cpu/test_mixture.py": ("test_the_first_of_equal_experts_are_chosen",),
    "kernels/cpu/test_mla.py": (
        "test_bfloat16_agrees_with_float64",
        "test_other_dtypes_agree_with_float64",
    ),
    "kernels/cpu/test_step.py": ("test_cpus_with_less_compute_the_same_function",),
    "kernels/cpu/test_threads.py": (
        "test_a_kernel_is_entered_past_the_search_for_its_code",
        "test_launchers_compile_nothing_when_imported_and_kernels_run_without_a_cache",
    ),
    "kernels/gluon/test_mutations.py": (
        "test_unchanged_kernels_give_the_same_in_every_schedule",
        "test_what_mistakes_change_stands_there_once",
    ),
    "kernels/test_compile.py": (
        "test_compiles_without_a_gpu",
        "test_hopper_kernels_stay_in_registers",
    ),
    "kernels/test_early.py": ("test_nothing_is_written_and_no_program_ends_before_it_has_waited",),
    "kernels/triton/test_recurrent_memory.py": ("test_nothing_outside_is_used",),
    "lab/test_context.py": ("test_rows_of_two_processes",),
    "lab/test_ordered_sums.py": (
        "test_one_sender_sets_the_pace_where_it_takes_longer_than_a_step",
    ),
    "models/test_families.py": ("test_changed_configs_are_built_or_refused_in_a_sentence",),
    "models/test_trained_adapter.py": ("test_gradients_are_those_of_the_sum_in_float64",),
    "ops/latent/test_api.py": ("test_a_step_compiles_into_one_graph",),
    "ops/recurrent/test_causal_conv1d.py": ("test_the_ops_are_opcheck_clean",),
    "ops/recurrent/test_gated_delta.py": ("test_the_ops_are_opcheck_clean",),
    "ops/test_composability.py": (
        "test_dynamic_lengths_share_one_graph_with_the_second_order",
        "test_one_graph_takes_every_argument",
    ),
    "reference/test_incremental.py": (
        "test_flash_moves_less_than_standard_when_sram_exceeds_d_squared",
    ),
    "server/test_any_body.py": ("test_changed_bodies_are_refused_or_served",),
    "server/test_clients.py": ("test_openai_parses_structured_answers_of_both_forms",),
    "server/test_command.py": (
        "test_it_says_what_it_does_serves_and_ends_at_sigterm_when_requests_have",
    ),
    "server/test_differential.py": ("test_every_field_means_the_same_streamed_whole_and_offline",),
    "server/test_engine_process.py": ("test_the_command_serves_drains_and_ends_both",),
    "server/test_page_trees.py": ("test_trees_and_order_are_the_engines",),
    "server/test_spans.py": ("test_nothing_of_it_is_imported_without_being_asked_for",),
    "server/test_weights.py": ("test_an_engine_sleeps_and_wakes",),
    "simulation/test_one_seed.py": (
        "test_every_answer_is_that_of_its_request_alone_or_an_error_with_a_cause",
        "test_the_seeds_reach_what_they_are_meant_to_test",
        "test_two_runs_are_equal_in_other_processes_too",
    ),
    "tools/hub_kernel/test_build.py": (
        "test_it_attends_where_tilewise_is_not_installed",
        "test_it_is_written_again_to_the_same_bytes",
        "test_no_module_imports_the_package_and_every_import_leads_to_a_file",
        "test_the_layout_is_that_of_the_hub",
    ),
    "training/test_rl_example.py": (
        "test_the_difference_is_zero_while_weights_change_and_requests_are_preempted",
    ),
    "training/test_train_adapter.py": ("test_a_few_steps_learn_save_and_serve",),
    "training/test_trainer.py": ("test_a_compiled_step_is_one_graph_with_the_same_losses",),
}


def brief_of(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the brief ones of the collected tests; none is slow or needs a GPU."""
    rows: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_quick = not any(item.get_closest_marker(mark) for mark in ("slow", "gpu"))
        if is_quick and item.path.is_relative_to(_TESTS):
            file = item.path.relative_to(_TESTS).as_posix()
            name = getattr(item, "originalname", None) or item.name
            if name not in LATER.get(file, ()):
                rows[file, item.nodeid.split("[")[0]].append(item)
    return [
        item
        for (file, _), some in rows.items()
        for item in (some[::SHARE] if "/" in file else some)
    ]
