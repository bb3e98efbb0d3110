"""Rows of wide grids that run with the slow tests, and what the everyday run keeps of each grid.

A grid crosses what a kernel does with dtypes, backends and forms. Where a mistake shows in any row
of a group of them, the everyday run has the cheapest of the group; the others, named here, run with
`make test-slow`. A new row of a grid runs every day, until it is named here.
"""

from __future__ import annotations

import re

# File, below tests/ -> test -> the rows, by their ids, that are slow: a regular expression.
# Comments name what is left.
# Of a test without rows, or of which no row stays, None stands in their place.
SLOW_ROWS: dict[str, dict[str, str | None]] = {
    # Gated delta beside attention has the ways in which states are cut, moved and taken back; the
    # other kinds of states one row each.
    "engine/test_state_models.py": {
        "test_texts_have_the_bits_that_each_has_alone": (
            "(?!qwen3_5-|falcon_h1-main memory|kimi_linear-guesses|lfm2-few blocks|mamba2-main).*"
            "|qwen3_5-(together|wide blocks|in small chunks)"
        ),
        "test_rows_that_live_on_the_device_have_their_states_there": (
            "(?!True-qwen3_5|qwen3_5-True).*"
        ),
        "test_a_step_that_failed_leaves_no_trace_in_states": "(?!qwen3_5|mamba2).*",
        "test_texts_have_the_bits_that_each_has_alone_on_a_gpu": ".*(lfm2|falcon_h1|zamba2).*",
    },
    # Planted mistakes that show that the emulator and its proof see races. The kernels themselves
    # are judged by the rows that stay; `make mutants` runs all mistakes. Of each kind of kernel
    # some stay here: of the forward pass, the backward pass, 8 bits, latents, pages and few rows.
    "kernels/gluon/test_schedules.py": {
        # Halves that are seen and packed sequences change which tiles there are, not who waits.
        "test_no_schedule_lets_two_accesses_meet": (
            "backward_(in_turns_full|in_turns_half_seen|packed)"
        ),
        "test_every_schedule_sees_the_mistake_and_so_does_the_proof": (
            "(?!q_of_rows_multiplied_before_it_is_there|a_number_read_before_it_is_announced"
            "|dq_handed_over_before_it_is_written|8_bits_o_overwritten_while_it_is_copied"
            "|values_cleared_before_they_are_there|a_page_|sums_loaded_over_those).*"
        ),
        "test_a_mistake_is_seen": (
            "(?!the_wrong_phase_of_ds$|8_bits_v_multiplied_before_it_is_there|a_page_used"
            "|the_wrong_phase_of_a_stage|the_turn_passed_to_oneself).*"
        ),
        # Two recordings of the forward and the backward pass show as well that warps lag.
        "test_barriers_among_the_warps_of_a_partition_are_needed": "packed_causal",
    },
    "kernels/gluon/test_mutations.py": {
        "test_a_mistake_in_the_forward_pass_is_seen": "(?!k_is_loaded|nobody_begins).*",
        "test_a_mistake_in_the_backward_pass_is_seen": "(?!ds_multiplied|dq_added).*",
    },
    "kernels/gluon/test_fp8_emulated.py": {
        "test_mistakes_with_scales_of_tokens_are_seen": "(?!.*produce).*",
        "test_mistakes_with_masks_are_seen": "(?!.*words_of).*",
        "test_mistakes_with_packed_sequences_are_seen": "(?!.*_load_q).*",
        # Scales of heads and of tokens go the same ways: those of tokens keep the causal rule and
        # windows, those of heads tails and lengths.
        "test_queries_and_keys_have_scales_of_their_own": "lengths|tails, grouped|more queries.*",
        "test_the_kernel_computes_the_rule": "window|causal",
        # Scales of heads have all that may be added; those of tokens each of it once.
        "test_logits_are_capped_and_heads_have_sinks": (
            "tokens-(cap, causal, wide|sinks|both, (more queries than keys|window))"
        ),
        "test_sequences_may_be_packed": (
            "tokens-packed(, full|, window|, wide|, one query each)?"
            "|heads-packed, (of all lengths|full|wide, both)"
        ),
        "test_masks_hide_keys": (
            "tokens-(mask(, heads, causal|, empty tiles|, full, causal)?|packed, mask)"
            "|heads-mask, (full, causal|lengths, both)|tokens-mask, sequences, window"
        ),
    },
    "kernels/gluon/test_max_logits.py": {
        "test_a_mistake_is_seen": "(?!of_hidden_keys).*",
    },
    # Devices of compute capability 8.9 have other tiles: every day three calls of theirs, all of
    # those of 8.0. Of mistakes a race, an end that is passed, and an order that is lost stay.
    "kernels/gluon/test_mma_bwd.py": {
        "test_calls_of_mistakes_are_right_without_them": "biased",
        "test_gradients_match_float64": "(?!plain|window|groups).*-89",
        "test_an_ordered_gradient_has_the_bits_of_any_schedule": "plain|causal|d128",
        "test_a_mistake_is_seen": (
            "(?!queries_multiplied|queries_past|dk_past|dq_added|a_turn_ends).*"
        ),
    },
    "kernels/gluon/test_mla.py": {
        "test_every_mistake_with_small_blocks_is_seen": "(?!rows_of_no_key).*",
        "test_every_mistake_is_seen": "(?!slots_behind).*",
    },
    # The cap chooses one form of the softmax, whatever it is: one cap with each call, another cap
    # and another dtype where blocks, lengths and documents have edges, none with four calls.
    "kernels/gluon/test_one_visible_key.py": {
        "test_o_is_the_value": (
            "(?!causal|packed).*-50.0-.*|(?!left_edge|key_lengths).*-15.0-dtype3"
            "|(?!two_queries|the_own_key-|packed|mask).*-0.0-.*"
        ),
        "test_queries_and_keys_have_no_gradient": ".*-50.0|packed-0.0",
        "test_a_mistake_is_seen": "(?!rows_without_a_maximum).*",
    },
    # A form's hand-overs are proved for every schedule in test_schedules.py; its numbers are judged
    # here on full calls, those of the causal rule in the forms that causal calls choose.
    "kernels/gluon/test_forms_of_step.py": {
        "test_gradients_match_float64": (
            "causal_d128-(flat_by_query|flat_without_prepost|together_in_tiles)"
            "|full_d64-(together|together_in_one_loop)"
        ),
        # These constants change neither the form nor the order of these calls: to the bit the same
        # is computed in the rows that stay.
        "test_reproducible_sums_are_those_of_other_ways_to_the_bit": (
            "constants0-(full_d128|causal_d128|causal_d64|window_d64)"
            "|constants1-(full_d128|causal_d64|window_d64)|constants2-(full_d64|full_d128|causal_d64|window_d64)"
        ),
        "test_what_is_dropped_has_float64s_gradients": (
            "(?!full_d128).*-long|(full|group)_d64-short|(full|group|mask)_d128-short"
        ),
    },
    # Each choice of a tile is crossed with the others in slow rows only.
    "kernels/gluon/test_paged.py": {
        "test_with_a_plan_agrees_with_float64_in_the_emulator": "one_scale|nothing_to_see",
    },
    "kernels/gluon/test_emulated.py": {
        "test_tiles_in_any_order": "True-False|False-True",
        "test_turns_and_queries_in_registers": "True-True|False-False",
        "test_warpgroups_without_rows_let_the_others_multiply": "False-.*",
        "test_blocks_hidden_from_a_warpgroup_are_passed_by": "False-(causal|window|lengths)",
        "test_nobody_waits_for_who_does_not_run": "window0-True|window1-False",
        "test_sums_that_are_rescaled_late_have_the_same_bits": "options[12]-dims1",
        # Steps of 4,096 rows, which is all of a head, are those of every other test of sinks.
        "test_it_matches_float64": ".*-(512|4096)|(separate_dq|sequences)-128",
        "test_nobody_waits_where_heads_are_launched_side_by_side": "full|dropout|window|lengths",
        "test_others_are_loaded": "(?!of_keys$).*",
        # Each damage of edges with one kind of call, each kind with one damage.
        "test_edges_of_a_packed_batch_lead_outside_of_no_tensor": (
            "far_and_negative-(?!plain).*|nothing_lies_inside-(?!separate_dq).*"
            "|first_edges_lie_behind-(?!mask).*|last_edges_lie_before-(?!bias).*"
        ),
        # Every day the mask of wide tiles, a window on both sides and documents stay.
        "test_both_directions_match_float64": (
            "window_to_the_right_only|alibi_of_sequences|packed_with_a_window|causal_fewer_queries"
            "|even|every_tile_whole|sliding_window|grouped_heads|bias|bias_of_keys|mask"
        ),
    },
    # The kernels of one query's gradient and of a tile's are compiled in float64 for these rows
    # alone; all others in float64 judge masks, dropout and packing to the last digits, and share
    # what is compiled. float32 has all their rules.
    "kernels/cpu/test_attention_few.py": {
        "test_the_gradient_of_one_query": "float64-.*",
        "test_gradients_of_a_tile_have_the_bits_of_many": "float64-.*",
        "test_gradients_have_the_same_bits_however_do_lies": "float64-.*",
    },
    # Decoding in float64 likewise: other dtypes have it with all features, and test_decode.py what
    # has a width of its own.
    "kernels/cpu/test_attention.py": {
        "test_values_and_gradients_keep_the_budget": "one query-float64",
    },
    # Every day a stress of the package itself is refused; that one of the copy begins is seen here
    # and by who runs it.
    "kernels/gluon/test_delays.py": {
        "test_a_stress_with_stalls_is_of_the_copy": "copy",
    },
    # Where a machine has a matrix unit, every day vector units run backward in bfloat16 here, whose
    # words are packed in pairs, and in float64 elsewhere, which shares all of its code with
    # float32; a machine without one runs all dtypes on them in test_attention.py.
    "kernels/cpu/test_attention_backward.py": {
        "test_vector_units_keep_the_budget_where_the_matrix_unit_is_taken": ".*-float(16|32)",
        "test_long_and_wide_calls_keep_the_budget": ".*-float16",
    },
    # A kernel is compiled for each dtype: float64 alone is in no engine.
    "kernels/cpu/test_decode_tiles.py": {
        "test_a_row_alone_has_the_bits_of_a_chunk": (
            ".*-float64"
            "|2-(one head a group|twenty heads a group|odd widths|small blocks|wide blocks)"
        ),
    },
    # A cache of another dtype than the queries' is read by a kernel of its own: float16 stays.
    "kernels/cpu/test_paged.py": {
        "test_the_cache_may_have_a_dtype_of_its_own": "torch.float32-torch.bfloat16",
    },
    # AVX2 stays: what has wider vectors and no tiles differs from it in width alone.
    "kernels/cpu/test_step.py": {
        "test_cpus_with_less_compute_the_same_function": "no tiles",
    },
    # A list of a step is compiled for each dtype: every day float32 and bfloat16.
    "engine/test_cpu_step.py": {
        "test_logits_are_within_the_budget_of_float64": "torch.float16-.*",
    },
    # Random schedules: every day the first 40 or 50, in which nearly all planted mistakes show, and
    # those in which the others show (test_planted_mistakes.py).
    "engine/test_scheduler_simulation.py": {
        "test_any_schedule_gives_the_tokens_of_a_request_alone": "[2-7]-.*",
    },
    "engine/test_group_simulation.py": {
        "test_any_schedule_of_groups_gives_the_tokens_of_a_request_alone": "[2-7]",
    },
    "engine/test_tier_simulation.py": {
        "test_any_schedule_gives_the_tokens_of_a_request_alone": "[2-7]",
    },
    "engine/test_beam_tiers.py": {
        "test_any_schedule_gives_the_beams_and_tokens_of_a_request_alone": "[2-7]",
    },
    "engine/test_whole_simulation.py": {
        "test_any_schedule_gives_the_beams_and_tokens_of_a_request_alone": "[12]",
    },
    "engine/test_device_batch.py": {"test_rows_follow_any_history": "[23]"},
    "engine/test_trace.py": {
        "test_the_events_say_who_holds_every_block": "[3-5]-.*",
        "test_the_events_tell_of_beams_and_guesses": "[3-5]-.*",
    },
    # Compiled ahead, captured or plain: rows of each family stay in two ways of running.
    "engine/test_group_models.py": {
        "test_greedy_tokens_equal_transformers": (
            "(gpt_oss|deepseek_yarn|qwen2_layer_types)-(together|small_steps|swapped)"
            "|(gemma3|deepseek|mistral_window)-(chunked|preempted|uncached)"
            "|gemma3-swapped|gpt_oss-(chunked|uncached)|deepseek_yarn-preempted"
        ),
        "test_samples_share_a_prompt_and_part": "deepseek|gemma3|qwen2_layer_types",
        "test_rows_on_a_device_give_transformers_tokens": ".*-60-True|.*-24-False",
        "test_beams_fork_and_are_dropped_in_all_groups": "gemma3|deepseek_yarn|qwen2_layer_types",
        "test_a_step_that_failed_once_is_run_again_with_the_blocks_it_was_told": (
            "(mistral_window|gemma3|deepseek)-True|(qwen2_layer_types|gpt_oss|deepseek_yarn)-False"
        ),
    },
    "engine/test_speculative.py": {
        "test_a_draft_model_of_another_vocabulary_is_refused": "gpt2",
        "test_any_schedule_with_drafts_gives_the_tokens_of_a_request_alone": "[23]-.*",
        "test_guesses_beside_swapped_and_adjusted_requests_change_nothing": "gpt2-.*|llama-lookup",
        "test_any_schedule_with_trees_gives_the_tokens_of_a_request_alone": "False",
        "test_greedy_tokens_are_those_of_transformers": (
            "gpt2-(whole prompts|no prefix cache|chunks)-.*"
        ),
        "test_what_is_drawn_has_the_exact_distribution": "rule[01]-(tree|draft)|rule2-tree",
    },
    "engine/test_sampling_options.py": {
        "test_tokens_are_those_of_transformers_in_a_mixed_batch": "200-.*-plain|20-.*-rows",
        "test_repetition_penalty_bad_words_and_min_length_together": (
            "0.6-(rows|plain)|1.3-compiled"
        ),
        "test_prompt_logprobs_in_chunks_after_hits_and_preempted": "14-64-.*|14-5-rows",
        "test_seeded_samples_with_penalties_are_the_same_alone_and_preempted": "rows",
        "test_structured_json_always_parses": "40-(plain|rows)|300-rows",
    },
    "engine/test_beams.py": {
        "test_beams_are_those_of_transformers": "gpt2-.*|llama-fewer seats than beams",
        "test_a_prompt_that_is_found_in_the_cache_gives_the_same_beams": "gpt2",
        "test_shared_blocks_hold_what_whole_copies_would": "float32",
        "test_any_schedule_gives_the_beams_of_a_search_alone": "[2-5]-.*",
    },
    # Four workers share a plain model every day, two one with windows, one with latents and a
    # mixture of experts over latents.
    "engine/tensor_parallel/test_equal_kinds.py": {
        "test_mixtures_give_the_tokens_and_log_probabilities_of_one_process": "(?!deepseek_v3).*",
        "test_chunks_and_lost_blocks": "windows-.*",
        "test_common_beginnings_and_forks": "windows-4",
        "test_the_cache_is_the_one_of_the_whole_model": "windows-4",
    },
    "engine/test_own_head.py": {
        "test_a_good_head_is_right_and_a_late_one_is_wrong_but_harmless": (
            "(?!deep.*states|qwen3_5-states).*"
        ),
    },
    "engine/tensor_parallel/test_equal.py": {
        "test_steps_that_go_on_are_told_in_a_word": "4",
        "test_sequences_that_lose_their_blocks": "4-swap|2-recompute",
        "test_prompts_in_chunks_beside_one_another": "4",
    },
    "engine/tensor_parallel/test_files.py": {
        "test_the_next_workers_find_the_files_of_the_last_ones": "windows|latents",
    },
    # Runs of a step that fails: each of them greedy and drawn, whole and in chunks, but not all.
    "engine/test_faults.py": {
        "test_logits_that_are_not_finite_end_their_own_request": (
            "(plain|device)-.*-64|(plain|device) with overlap-.*-5"
        ),
        "test_who_breaks_the_step_ends_alone": (
            "(plain|device)-[13]-.*|(plain|device) with overlap-[024]-.*|compiled.*-[12]-.*"
        ),
        "test_a_retry_finds_no_damaged_block": "(plain|device)-64|(plain|device) with overlap-6",
    },
    "bench/test_attention.py": {
        "test_every_table_runs_and_the_last_line_is_all_of_it": None,
        "test_a_failure_is_a_row_and_the_run_goes_on": "error[12]-.*",
    },
    # Each op is checked dense and packed by the kind of its arguments; of those behind the second
    # derivative dense calls stay.
    "ops/test_library.py": {
        "test_ops_of_attention_with_every_argument_are_opcheck_clean": (
            "(attention_second|attention_curve|attention_tangent|attention_fwd_max)-packed"
        ),
    },
    # The causal rule and a window have edges inside of tiles, beside those of lengths.
    "ops/test_containment.py": {
        "test_another_packed_sequence_reaches_nothing": "plain-triton-interpreted",
        "test_what_lies_behind_a_length_reaches_nothing": "plain-triton-interpreted",
    },
    # Kernels know numbers of 2 and of 4 bytes apart, sums of all and dealt ones, and ranks: each
    # pair of a dtype with a way or a number of ranks stays, and of 2 bytes each way with each
    # number; of sums with flags, 2 and 4 bytes with each number.
    "distributed/test_inbox.py": {
        "test_sums_of_ranks_in_turn": "(all-4|dealt-2)-(bfloat16|float32)|(all-2|dealt-4)-float16",
        "test_sums_with_flags_of_ranks_in_turn": "4-bfloat16|2-float16",
    },
    "distributed/test_memory.py": {
        "test_a_rank_holds_its_share": "ulysses",
        "test_a_gather_holds_the_keys_of_all": None,
    },
    "training/test_trainer.py": {
        "test_a_compiled_step_is_one_graph_with_the_same_losses": "bert-False",
    },
    "ops/attention/test_max_logits.py": {
        "test_is_that_of_float64": "triton-(plain|negative_scale|bias|alibi|dropout)",
    },
    # Each class of LLM's calls leaves its thread in the same place.
    "engine/test_loop.py": {
        "test_the_interpreter_ends_whatever_the_engine_is_doing": (
            "the engine is idle|a stream is open"
        ),
        "test_an_llm_that_nobody_holds_is_freed_with_its_thread": "abort|pause",
    },
    "engine/test_together.py": {
        "test_any_mixture_gives_the_tokens_of_a_request_alone": (
            "plain-overlap-.*|device-in turn-.*"
        ),
    },
    "engine/test_batch_invariance.py": {
        "test_generated_log_probabilities_are_those_of_the_training_forward_pass": (
            ".*-(chunks 64|chunks 7|swapped|preempted|alone)"
        ),
        "test_other_models_alone_preempted_and_by_both_forward_passes": (
            "(gpt2|gemma3|gpt_oss)-torch.float32"
        ),
        "test_mixtures_and_layers_with_states_in_the_loop": (
            "test_state_families-(zamba2|granitemoehybrid|falcon_h1)-.*"
        ),
    },
    # The interpreter runs one program after another: that a call leaves nothing behind for the next
    # one is seen in test_attention.py and, of sums in memory, in test_attention_bias.py.
    "kernels/triton/test_attention_dropout.py": {"test_runs_are_bitwise_equal": "cpu"},
    "kernels/triton/test_attention_masks.py": {"test_runs_are_bitwise_equal": "cpu"},
    # The interpreter has no launcher to go past: there, what the kernels give twice is compared,
    # as every case of "where it is wanted" does. On a GPU this runs as ever.
    "ops/paged/test_api.py": {
        "test_launches_past_triton_have_the_bits_of_its_own": "triton-interpreted",
    },
    # Interpreted kernels of Triton are held to float64 feature by feature in kernels/triton; here
    # stay, of what an op prepares for them, rows that join several features.
    "ops/attention/test_api.py": {
        "test_forward_and_every_gradient_keep_the_budget": (
            "(plain|exact_tiles|mqa|gqa_3|window_of_17|window_both_sides|window_right_only|softcap"
            "|alibi|sinks|head_dim_96|head_dim_80_value_40|head_dim_256|large_scale|all_at_once"
            "|bias_full|bias_a_column|bias_of_all_heads|mask_per_head|dropout_nearly_all"
            "|dropout_of_everything|head_dim_512|bias_a_column_with_sinks|bias_a_number"
            "|more_keys_than_queries)-triton-interpreted"
        ),
        # In float32 this is a row of the test above, gqa_4.
        "test_each_dtype_keeps_the_budget": "dtype2-triton-interpreted",
    },
    # The cap chooses a form of the softmax and the dtype the conversions beside it: each once, on
    # the kernels of the interpreter; two queries over one key have both crossed every day.
    "ops/attention/test_one_visible_key.py": {
        "test_of_a_window_of_the_own_key": (
            r"\('triton', torch\.(bfloat16\)-(0|15)|float16\)-(0|50)|float32\)-(15|50))\.0"
        ),
    },
    # Rows of logits that are all different are drawn by the same passes as those with equal ones.
    "ops/test_sampling.py": {
        "test_tokens_are_those_of_a_float64_sampler": (
            "(?!nucleus_of_hundreds|top_k_of_many).*-distinct-triton-interpreted"
        ),
    },
    # In the interpreter a step of adapters takes as long whatever surrounds it: captured steps have
    # the kernels of the others.
    "engine/test_adapters.py": {
        "test_rows_on_the_device_have_the_answers_of_single_steps": "as_they_are|padded",
        "test_answers_stay_the_same": "recomputed|drafts|chunks",
        "test_tokens_are_those_of_the_merged_model": "b|c",
    },
    # Damage of all kinds is found by the same comparison: of each place some stay.
    "engine/test_audit.py": {
        "test_a_block_that_changes_while_a_request_reads_it_is_found_in_that_request": (
            "zero|one_value|heads_swapped|one_layer_stale|token_late|k_for_v"
        ),
        "test_a_step_with_wrong_tables_is_found_in_one_of_its_requests": (
            "slot_of_another|table_one_off|table_of_another|token_of_another|length_one_short"
        ),
        "test_a_step_that_gives_wrong_numbers_is_found_in_one_of_its_requests": (
            "(?!one row a little off).*"
        ),
        "test_other_weights_are_no_difference": None,
        "test_an_adapter_of_another_request_is_found": None,
    },
    "test_failures_of_others.py": {
        "test_nothing_is_kept_of_requests_that_ended": "False",
    },
    # Gated delta has all that cutting a state needs.
    "engine/tensor_parallel/test_equal_states.py": {
        "test_states_are_cut_and_give_the_tokens_of_one_process": "(?!qwen3_5$).*",
    },
    "engine/tensor_parallel/test_device_shards.py": {
        "test_ranks_stay_in_step_whoever_comes_ends_leaves_and_fails": "True",
    },
    # One process guesses every day, and two with another model.
    "engine/tensor_parallel/test_drafts.py": {
        "test_a_model_that_guesses_for_itself": "[24]",
        "test_models_with_windows": None,
    },
    # That a worker dies is seen in test_lost.py, that a server's engine does in
    # test_engine_process.py.
    "engine/tensor_parallel/test_command.py": {
        "test_a_server_whose_worker_is_killed_says_so_and_ends_with_exit_code_1": None,
    },
    "distributed/test_exchange.py": {
        "test_a_torch_that_knows_of_no_ranks_is_told_of": None,
    },
    # Steps of a layer are compiled every day; products of weights of few bits wait in the same way.
    "kernels/test_early.py": {
        "test_products_of_quantised_weights_write_nothing_before_they_have_waited": None,
        "test_what_is_late_does_not_wait": None,
    },
    # What is compiled is looked at with the slow cases of test_compile.py.
    "kernels/gluon/test_fp8.py": {
        "test_loops_over_keys_multiply_e4m3_and_leave_the_registers_alone": None,
    },
    # Each of these compiles a kernel of its own: one stays.
    "kernels/cpu/test_decode.py": {
        "test_rounded_queries_keep_the_budget": "longer than integers may be-bfloat16",
    },
    # What a start compiles on a GPU: every day it is rehearsed, and nothing compiled.
    "engine/test_compile_ahead.py": {
        "test_a_start_finds_on_disk_what_other_processes_compiled": None,
    },
    "engine/test_compiled_ahead.py": {
        "test_no_step_needs_another_kernel": "qwen3-0.6b-False|three a group, few rows-True",
        "test_nor_does_one_over_windows_or_latents": "mistral_window|deepseek_q_rank_biases",
        "test_samples_of_a_prompt_need_no_other_kernel": "200",
        "test_sequences_that_change_their_logits_launch_nothing_new": "False",
    },
    # In bfloat16 every day what moves or loses blocks, and guesses.
    "engine/test_bfloat16.py": {
        "test_what_a_request_goes_through_changes_no_token": (
            "one at a time|fair|no prefix cache|lookup"
        ),
        "test_beams_in_turns_are_those_of_beams_side_by_side_and_score_as_in_transformers": None,
        "test_blocks_of_files_change_no_token": None,
    },
    # An adapter of the model's dtype shares memory with the engine, one in float32 is copied: each
    # in one of the tests.
    "engine/test_live_adapter.py": {
        "test_training_and_sampling_differ_by_zero_while_the_adapter_alone_changes": "bfloat16",
        "test_an_engine_that_has_slept_has_the_adapter_again": "(?!2-None).*",
        "test_a_wrong_adapter_is_refused_before_anything_is_written": "copied",
    },
    "engine/test_weights.py": {
        "test_rounds_of_steps_updates_and_sleep_leave_nothing_behind": None,
        "test_an_engine_that_has_slept_answers_as_before": "1",
        "test_a_model_whose_layers_keep_states_takes_weights_sleeps_and_is_audited": (
            "(?!qwen3_5).*"
        ),
    },
    "engine/test_giving_way.py": {
        "test_after_a_step_of_newcomers_alone_who_reads_its_tokens_has_a_moment": "fcfs",
    },
    "engine/test_state_simulation.py": {
        "test_any_schedule_of_states_gives_the_beams_and_tokens_of_a_request_alone": "[02]",
    },
    # A form in turns runs each rule once here; its hand-overs are proved in test_schedules.py.
    "kernels/gluon/test_turns.py": {
        "test_gradients_match_float64": "full_d128|causal_d64|groups|window_to_the_right",
        "test_default_calls_match_float64": "causal_not_level|causal_little",
        "test_queries_that_a_warpgroup_does_not_see_are_passed_by": "2",
    },
    "kernels/gluon/test_wide.py": {
        "test_agrees_with_float64": "no_tile_whole|window",
    },
    # Of what is on in every_feature rows alone stay where they have edges of their own.
    "kernels/triton/test_attention.py": {
        "test_forward_and_gradients_match_float64": (
            "(packed|every_tile_whole|one_key_head)-cpu"
        ),
    },
    "kernels/triton/test_recurrent_backward.py": {
        "test_gradients_keep_the_budget": (
            "(packed|strong_decay|mamba|grouped_heads)-bfloat16-interpreted"
        ),
    },
    "kernels/triton/test_recurrent_memory.py": {
        "test_nothing_outside_is_used": r"\{'(is_delta|heads)'.*",
    },
    "kernels/triton/test_paged.py": {
        "test_a_token_alone_has_the_bits_of_a_chunk": "200-260-None-torch.float32",
        "test_batch_invariance_is_bitwise": "1-500-.*",
    },
    # A call is forced by its form's grammar: of each kind of form one is named or required.
    "server/test_formats_served.py": {
        "test_a_call_that_is_asked_for_is_made_whatever_the_model_would_write": (
            "named-(mistral|kimi_k2|qwen3_coder|gemma4)|required-(none|mistral|qwen3_coder)"
        ),
    },
    "server/test_lifecycle.py": {
        "test_a_forked_server_gives_requests_other_names": None,
        "test_a_key_with_a_passphrase_is_one_sentence_and_no_question": None,
    },
    "server/test_chaos.py": {
        "test_memory_stays_while_clients_come_and_go": None,
    },
    "server/test_clients.py": {
        "test_openai_must_call_the_tool_that_it_names": None,
    },
    "server/test_page_trees.py": {
        "test_trees_and_order_are_the_engines": "False",
    },
    # An engine in another process is asked in the same words.
    "server/test_adapters.py": {
        "test_the_model_of_a_request_is_an_adapter": "apart",
        "test_an_adapter_is_loaded_and_unloaded": "apart",
    },
    "server/test_weights.py": {
        "test_an_engine_sleeps_and_wakes": "apart",
    },
    "server/test_recipes.py": {
        "test_a_served_answer_is_verified_by_another_engine": "apart-samples",
    },
    "server/test_strict_tools.py": {
        "test_no_further_call_is_written_where_one_is_all_that_may_be_made": (
            "(responses|messages)-.*"
        ),
        "test_streamed_calls_of_strict_tools_follow_their_schema": "more[12]",
    },
    "server/test_reasoning.py": {
        "test_an_answer_follows_its_form_behind_the_reasoning": (
            "channels-(json_schema|named)|the model opens it-json_schema"
        ),
        "test_other_forms_have_the_same_items_whole_and_streamed": "the template opens it-.*",
    },
    "server/test_any_body.py": {
        "test_changed_bodies_for_an_encoder_are_refused_or_served": "Model-200",
    },
    "server/test_engine_process.py": {
        "test_integers_of_any_size_mean_what_they_mean_in_one_process": (
            "9223372036854775808|18446744073709551616|-9223372036854775809"
        ),
    },
    # The short run of test_ops.py ends with a document every day.
    "bench/test_engine.py": {
        "test_the_packaged_model_is_measured_here": None,
    },
    "bench/test_serve_steps.py": {
        "test_a_machine_that_slows_down_is_foreseen_from_the_windows_beside": None,
        "test_a_window_is_foreseen_from_the_others": None,
    },
    "bench/test_train.py": {
        "test_all_ways_start_from_one_model_and_see_the_same_tokens": "(gpt2|bert)-tiny",
    },
    "engine/test_prompt_steps.py": {
        "test_padding_changes_no_token": (
            "deepseek_q_rank_biases|llama|qwen3_norm_wide_heads|qwen2_second_layer_window"
        ),
    },
    "engine/test_newcomers.py": {
        "test_any_schedule_with_newcomers_gives_the_tokens_of_a_request_alone": "False",
    },
    "engine/test_device_runner.py": {
        "test_a_step_that_fails_midway_leaves_a_clean_engine": (
            "[13]-KeyboardInterrupt|[26]-RuntimeError"
        ),
    },
    "engine/test_graphs.py": {
        "test_overlap_changes_no_token": "400-.*",
    },
    "bench/test_serve.py": {
        "test_a_trace_is_sent_as_it_was_and_served_in_virtual_time": "azure.csv",
    },
    "lab/test_ordered_sums.py": {
        "test_steps_fill_the_measured_time": None,
    },
    "lab/test_attention_plots.py": {
        "test_results_that_are_not_there_leave_their_plots": None,
    },
    "lab/test_tune_paged.py": {
        "test_every_candidate_is_right_and_the_shipped_one_comes_first": None,
    },
    "ops/attention/test_second_order.py": {
        "test_the_oracle_as_a_backend_is_differentiable_twice": "packed_with_everything",
    },
    # Every day in float32; adapters and bfloat16 are those of engine/test_live_adapter.py.
    "training/test_rl_example.py": {
        "test_the_difference_is_zero_while_weights_change_and_requests_are_preempted": (
            "bfloat16, adapters, sequence level"
        ),
        "test_the_mismatch_that_others_have_can_be_put_back": None,
    },
    # Three processes compile and load; what a file may hold is checked without them.
    "kernels/test_kernel_file.py": {
        "test_a_kernel_that_another_machine_compiled_is_found_and_told": None,
    },
    "ops/attention/test_recorded.py": {
        "test_calls_are_right_without_names_that_are_private_to_torch": None,
    },
}  # fmt: skip


def is_slow_row(file: str, name: str) -> bool:
    """Whether a test, by its file below tests/ and its name with its row's id, is named here."""
    test, bracket, row = name.partition("[")
    named = SLOW_ROWS.get(file, {})
    if test not in named:
        return False
    rows = named[test]
    return rows is None or (bool(bracket) and re.fullmatch(rows, row[:-1]) is not None)
