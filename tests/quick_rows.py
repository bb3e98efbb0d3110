"""What a quick run on a GPU keeps of the tests that need one: `pytest -m "gpu and not slow"`.

Nearly all of its time kernels are compiled, 1 to 7 s of a core each. Each family of kernels and
each feature keeps a row or a few, and with them all rows that ask for the same kernels; all other
rows run in the whole suite only (`pytest -m gpu`). Rows that need no GPU are none of this
(`slow_rows.py`). Rows of a test that is not named here run in both.
"""

from __future__ import annotations

import re

# File, below tests/ -> test -> the rows that stay, by their ids: a regular expression; None where
# the test does not stay at all. Tests of one name in several classes share their rows.
QUICK_ROWS: dict[str, dict[str, str | None]] = {
    # Hopper forward: each width of heads, each feature once, those that meet in one call.
    "kernels/gluon/test_attention_fwd.py": {
        "test_forward_matches_float64": (
            "more_tiles_than_ctas|causal|d64_causal_long|d256_causal|latent|d40|window_both"
            "|softcap|alibi_both_sides|bias_d128_causal|mask|dropout_causal_d64|packed_causal"
            "|packed_d256|every_feature_packed"
        ),
        "test_edges": (
            "slices_of_one_projection|nan_past_the_lengths|nan_in_keys_that_a_mask_hides"
            "|packed_rows_of_no_sequence"
        ),
        "test_a_thousand_runs_are_bitwise_equal": "more_tiles_than_ctas|packed_causal",
    },
    # Forward by mma.sync, whatever the card: each width, each feature in one call.
    "kernels/gluon/test_mma.py": {
        "test_results_match_float64_on_a_gpu": (
            "causal|d64_causal|d256_causal|mask|packed|every_feature|every_feature_masked_d64"
        ),
        "test_a_thousand_runs_on_a_gpu_are_bitwise_equal": "packed_causal",
    },
    # Hopper backward: widths 64, 128 and wide ones; what is summed in order is run again and again.
    "kernels/gluon/test_attention_bwd.py": {
        "test_gradients_match_float64": (
            "causal_d128|full_2k_d64|padded_d96|window_d64|sinks|bias_d128|dropout_d64|mask_d128"
            "|wide_causal|wide_192_128"
        ),
        "test_reproducible_gradients_match_float64": "causal_2k|packed_d64|wide_causal",
        "test_two_hundred_runs_are_bitwise_equal": "causal_2k|packed_d64|wide_causal",
        "test_calls_that_have_a_way_of_their_own": "causal_1k_d64|full_512_d64|full_8k_uneven_d128",
        "test_dk_and_dv_are_bitwise_equal_in_a_thousand_runs": "causal_2k",
        "test_a_sequence_of_nan_leaves_its_neighbours_alone": "packed_d128",
    },
    "kernels/gluon/test_dropout.py": {
        "test_words_are_the_references": "queries-26-64-.*|keys-255-128-.*|pairs-128-64-.*",
    },
    "kernels/gluon/test_few.py": {
        "test_matches_float64": "(one_query|causal|wide|key_lengths_full|sinks)-.*",
        "test_heads_may_come_before_rows": None,
    },
    "kernels/gluon/test_invariant_linear.py": {
        "test_on_a_gpu_all_kernels_and_tiles_give_the_same_bits": "776-200-torch.bfloat16",
    },
    "kernels/gluon/test_linear.py": {
        "test_on_a_gpu_a_row_does_not_depend_on_others": (
            "(alone|two_warpgroups|early)-torch.bfloat16|parts-torch.float16"
        ),
    },
    "kernels/gluon/test_mla.py": {
        "test_agrees_with_float64_on_a_gpu": "lengths_of_one_and_none|drafts_in_wide_blocks",
        "test_agrees_with_float64_at_serving_size": "runs[01]-.*-16-64|runs0-.*-128-16",
    },
    "kernels/gluon/test_mla_bytes.py": {
        "test_agrees_with_float64_on_a_gpu": "small_blocks.*|two_tiles_of_rows",
        "test_agrees_with_float64_at_serving_size": (
            "runs[01]-.*-16-64-dtype0|runs0-.*-128-64-dtype1"
        ),
    },
    "kernels/gluon/test_paged.py": {
        "test_agrees_with_float64_with_and_without_a_plan": (
            "(decode|padding_rows|window)-torch.int8|(drafts|a_scale_a_head)-torch.float8_e4m3fn"
        ),
        "test_a_cta_takes_several_pairs": "many|drafts",
        "test_single_tokens_beside_prompts_agree_with_float64": "torch.int8",
    },
    "kernels/gluon/test_plan.py": {
        "test_later_calls_are_right": "causal_groups|packed|dropout|few_one",
        "test_in_a_graph_and_after_it": "causal_groups|few_one",
        "test_on_a_side_stream": "packed",
        "test_the_public_call_and_its_gradient_are_right": "nothing|sinks",
    },
    "kernels/test_chains.py": {
        "test_every_run_of_a_chain_gives_the_bits_of_kernels_one_after_the_other": None,
    },
    # Triton: one pass forward and three backward for each row.
    "kernels/triton/test_attention.py": {
        "test_forward_and_gradients_match_float64": (
            "(every_feature|packed_causal_with_every_feature|odd_head_dims|bfloat16)-.*"
        ),
        "test_forward_and_gradients_match_float64_at_size": "causal_2k|causal_d256",
        "test_heads_may_come_before_rows": None,
        "test_rows_need_not_start_on_a_vector_boundary": None,
        "test_small_vectors_may_be_strided": None,
        "test_keys_outside_every_window_may_hold_nan": None,
        "test_keys_past_their_length_may_hold_nan": None,
        "test_inputs_may_be_slices_of_one_packed_projection": None,
        "test_a_gradient_may_be_expanded": None,
        "test_packed_rows_of_no_sequence_are_zero": None,
        "test_empty_sequences": "0-40-.*",
        "test_logits_far_from_zero": "120.0-.*",
        "test_a_sink_of_minus_infinity_is_no_sink": None,
        "test_tiles_may_run_in_any_section_of_heads": None,
        "test_a_batch_stride_may_pass_two_to_the_31_elements": None,
    },
    "kernels/triton/test_attention_bias.py": {
        "test_forward_and_gradients_match_float64": "packed_of_a_head-.*",
        "test_a_bias_of_minus_infinity_leaves_the_sink": None,
        "test_no_gradient_is_computed_for_a_bias_that_needs_none": None,
        "test_a_bias_may_be_strided": None,
        "test_runs_are_bitwise_equal": None,
        "test_empty_sequences": None,
    },
    "kernels/triton/test_attention_dropout.py": {
        "test_forward_and_gradients_match_float64": "with_everything-.*",
        "test_the_mask_is_the_references_bit_for_bit": "0.25-.*",
        "test_everything_may_be_dropped": None,
        "test_runs_are_bitwise_equal": None,
        "test_tiles_do_not_change_the_mask": None,
    },
    "kernels/triton/test_attention_masks.py": {
        "test_forward_and_gradients_match_float64": "(of_each_head|packed)-.*",
        "test_a_causal_mask_is_the_causal_rule": None,
        "test_runs_are_bitwise_equal": None,
        "test_nobody_sees_anything": None,
    },
    "kernels/triton/test_attention_widths.py": {
        "test_forward_and_gradients_match_float64": "12_and_5-.*",
    },
    "kernels/triton/test_cache_ops.py": {
        "test_write_kv_cache_fills_slots_and_nothing_else": "(bf16|odd_heads_and_widths)-.*",
        "test_copy_blocks_copies_both_caches": "(bf16|odd_heads)-.*",
        "test_rope_agrees_with_complex_multiplication": (
            "(packed_bf16-halves|dense_partial_shared_table-interleaved|one_pair-halves)-.*"
        ),
        "test_merge_agrees_with_the_softmax_of_the_union": "(packed_bf16|one_row)-.*",
    },
    "kernels/triton/test_mla.py": {
        "test_agrees_with_float64": "(ragged_batch_with_splits|7_heads_and_odd_widths)-.*",
        "test_agrees_with_float64_at_serving_size": "runs[03]-.*-16",
        "test_batch_invariance_is_bitwise": "5-90-.*",
    },
    "kernels/triton/test_paged.py": {
        "test_agrees_with_float64_on_a_gpu": (
            "decode_ragged_batch_with_splits|decode_mha_d128|decode_everything|decode_d96_dv32"
            "|drafts_in_a_window|prefill_chunk_after_a_prefix|mixed_everything|mixed_invariant"
        ),
        "test_agrees_with_float64_on_a_gpu_in_float32": "prefill",
        "test_agrees_with_float64_on_a_gpu_over_130_000_keys": None,
        "test_a_token_alone_has_the_bits_of_a_chunk_on_a_gpu": (
            "7-300-None-torch.bfloat16|1000-3000-700-torch.float16"
        ),
        "test_batch_invariance_is_bitwise_on_a_gpu": "1-9000-drafts|400-700-prompts",
        "test_repeats_are_bitwise_equal_on_a_gpu": "mixed",
        "test_offsets_past_2_to_the_31_on_a_gpu": "decode",
    },
    # Public calls: what an op prepares for a kernel, whose forms the tests above go through.
    "ops/attention/test_api.py": {
        "test_forward_and_every_gradient_keep_the_budget": (
            "(key_lengths|head_dim_80_value_40)-triton|(gqa_4|sinks|mask_per_head)-gluon"
        ),
        "test_each_dtype_keeps_the_budget": "dtype1-gluon|dtype2-triton",
        "test_causal_hides_what_a_window_shows_to_the_right": "gluon",
        "test_a_scale_of_zero_weighs_all_visible_keys_alike": None,
        "test_window_ends_at_its_last_key": "triton",
        "test_two_runs_are_bitwise_equal": None,
        "test_two_hundred_runs_give_the_same_bits": None,
        "test_packed_sequences_keep_the_budget": "ragged-.*|empty_sequences-gluon",
    },
    "ops/attention/test_fp8.py": {
        "test_hopper_stays_within_its_format": (
            "(causal, grouped|window on both sides|wide)-centred"
        ),
        "test_hopper_caps_logits_and_has_sinks": (
            "causal, grouped-heads-both|wide-tokens-both|one query-heads-cap"
        ),
        "test_hopper_gives_sinks_to_rows_without_keys": None,
        "test_packed_sequences_on_a_gpu": (
            "causal-heads-128-gluon|full-tokens-256-gluon|causal-tokens-128-triton"
        ),
        "test_masks_hide_keys_on_hopper": (
            "lengths-window, both-tokens-64|lengths-full-tokens-256"
        ),
        "test_packed_sequences_have_masks_on_hopper": "causal-128",
        "test_packed_sequences_do_not_feel_one_another": "tokens",
        "test_the_gpu_quantises_packed_sequences_like_the_rule": "128",
        "test_the_gpu_quantises_bit_for_bit_like_the_rule": "bf16-128|fp16-96",
        "test_the_gpu_rotates_like_the_rule": "128",
        "test_hopper_reads_e4m3_as_it_writes_it": "128",
    },
    "ops/attention/test_fp8_tokens.py": {
        "test_on_a_gpu": (
            ".*causal.*-128-gluon|.*seqlens_k.*-256-gluon|.*causal.*-64-triton"
        ),
        "test_the_quantising_kernel_agrees_on_a_gpu": "None-128|3-96",
    },
    "ops/attention/test_max_logits.py": {
        "test_on_a_gpu": "gluon-(causal|bias)|triton-window",
        "test_of_packed_sequences_on_a_gpu": "gluon",
    },
    "ops/attention/test_one_visible_key.py": {
        "test_on_a_gpu": "gluon-dtype0-15.0|triton-dtype2-0.0",
    },
    "ops/attention/test_second_order.py": {
        "test_double_backward_keeps_the_budget_over_many_tiles": ".*bfloat16-everything.*",
    },
    "ops/latent/test_api.py": {
        "test_decode_keeps_the_budget": "(chunks_beside_decode|empty_run_and_empty_sequence)-.*",
        "test_latents_and_rotated_keys_land_side_by_side": "dtype1-.*",
    },
    "ops/latent/test_quantised_latents.py": {
        "test_output_and_lse_keep_the_budget_beside_poison": (
            "odd_widths_and_blocks_of_1-float32-float8.*|prompts_beside_decode-bfloat16-int8.*"
        ),
        "test_a_row_that_is_not_finite_shows_itself_to_those_who_see_it": "int8-.*",
        "test_tiny_latents_do_not_underflow_in_float16": "float8.*",
    },
    "ops/paged/test_api.py": {
        "test_output_and_lse_keep_the_budget": (
            "(decode|chunk_after_a_prefix|window|long_sequence_alone)-.*"
        ),
        "test_output_lies_where_it_is_wanted": "prefill_beside_decode-.*",
        "test_batch_invariance_keeps_the_bits_of_a_row_in_any_run": "torch.bfloat16-own-.*",
    },
    "ops/paged/test_plan.py": {
        "test_a_captured_plan_merges_on_a_gpu_as_a_second_kernel_does": (
            r"32-\(16, 8\)|1-\(32, 8\)"
        ),
    },
    "ops/paged/test_quantised_cache.py": {
        "test_output_and_lse_keep_the_budget_beside_poison": (
            "(decode|window_and_softcap)-int8-.*|(odd_group_and_widths|prefill_beside_decode)-float8.*"
        ),
        "test_narrow_queries_keep_the_budget": (
            "token_scales-bf16-int8-.*|head_scales-fp16-float8.*"
        ),
        "test_tiny_values_do_not_underflow_in_float16": "float8.*",
        "test_a_row_that_was_not_finite_makes_its_sequence_nan": "int8-.*",
        "test_strided_scales_equal_contiguous_ones": "int8-.*",
        "test_bits_are_those_of_the_rule": "4-token_scales-int8-.*|1-head_scales-float8.*",
        "test_what_comes_back_is_within_the_bound": "float8.*",
        "test_strided_caches_and_scales": "int8-.*",
        "test_copies_take_the_scales_along": "float8.*",
    },
    "ops/paged/test_shared_prefixes.py": {
        "test_the_result_is_that_of_every_sequence_alone": (
            "(two_groups_and_one_alone|chunks)-.*"
        ),
        "test_a_batch_that_grows_keeps_its_groups": None,
        "test_a_pass_whose_keys_are_whole_adds_to_what_is_there": "decode-.*",
    },
    "ops/paged/test_tree.py": {
        "test_output_and_lse_keep_the_budget": "(drafts|longer_than_64|window)-.*",
        "test_caches_of_8_bits": "dtype1-.*",
    },
    "ops/test_adjust_logits.py": {
        "test_chosen_rows_are_the_oracles_and_others_keep_their_bits": ".*-3001-.*|parts5-33-.*",
    },
    "ops/test_containment.py": {
        "test_what_lies_behind_a_length_reaches_nothing": "causal-gluon|window_softcap-triton",
        "test_another_packed_sequence_reaches_nothing": "causal-triton",
    },
    # Two sizes of a call are two graphs of torch's compiler; one family trains, by the kernels of
    # one width. What calls keep beside their results is shared by all.
    "ops/test_cuda_graphs.py": {
        "test_a_compiled_call_replays_the_plain_one_at_two_sizes": (
            "reduce-overhead-(causal|linear)"
        ),
        "test_a_length_that_varies_replays_the_plain_call": "few queries",
        "test_training_under_reduce_overhead_follows_plain_training": "dense-False",
        "test_a_captured_training_step_follows_plain_training": "dense-False",
    },
    "ops/test_decode_rows.py": {
        "test_what_starts_a_step_begins_it_and_looks_up": "torch.bfloat16-40-.*",
        "test_what_draws_moves_rows_on_as_what_finishes_a_step": "(greedily|truncated)-.*",
    },
    "ops/test_choose_experts.py": {
        "test_choices_are_the_oracles": "sigmoid_with_groups-.*|softmax_of_the_chosen-.*",
    },
    "ops/test_expert_mlp.py": {
        "test_it_keeps_the_budget": "torch.bfloat16-(37|7)-.*|torch.float32-3-.*",
    },
    # A call of each op; other numbers in its small tensors ask for no other kernel.
    "ops/test_guard_bands.py": {
        "test_kernels_of_a_gpu_stay_inside_of_their_tensors": "0-bfloat16",
    },
    "ops/test_linear.py": {
        "test_every_tile_keeps_the_budget": (
            "(one_slice|ways_and_parts)-16-.*-bias-torch.bfloat16-.*"
            "|(ways|parts)-27-.*-plain-torch.float16-.*|parts-5-8-1-bias-torch.bfloat16-.*"
        ),
        "test_a_row_does_not_depend_on_others": "40-2100-.*",
        "test_an_invariant_product_has_rows_of_their_own": (
            "40-70-torch.bfloat16-.*|1-3-torch.float32-.*"
        ),
        "test_all_tiles_of_an_invariant_product_give_the_same_bits": "200-300-.*",
        "test_a_head_keeps_the_budget_and_beginning_early_its_bits": "2",
    },
    "ops/test_norm.py": {
        "test_the_norm_of_a_sum_keeps_the_budget": (
            r"\(5, 33\)-torch.float32-.*|\(2, 5000\)-torch.bfloat16-.*|\(1, 1\)-torch.float16-.*"
        ),
        "test_parts_are_added_in_their_order_and_rounded": "5-torch.bfloat16-.*|2-torch.float32-.*",
    },
    "ops/test_properties.py": {
        "test_a_window_as_long_as_the_keys_is_causal": None,
        "test_large_logits_stay_finite_at_every_length_of_the_last_tile": "1.0-.*",
        "test_a_constant_bias_moves_only_lse": None,
        "test_a_bias_of_minus_infinity_is_a_mask": None,
    },
    "ops/test_rope_merge.py": {
        "test_rotation_keeps_the_budget": (
            "(packed|no_.*)-False-.*|(dense_own_tables|partial)-True-.*"
        ),
    },
    "ops/test_rope_write.py": {
        "test_q_and_the_cache_keep_the_budget": (
            "(llama|partial_interleaved|many_heads)-torch.bfloat16-.*|qwen3-torch.float16-.*"
            "|(partial|no_rotation)-torch.float32-.*"
        ),
        "test_an_8_bit_cache_holds_what_was_rotated": (
            "token_scales-torch.int8-.*|head_scales-torch.float8.*"
        ),
    },
    "ops/test_sampling.py": {
        "test_tokens_are_those_of_a_float64_sampler": (
            "(plain|min_p_of_the_best|much_of_everything)-ties-.*"
            "|(top_k_of_many|nucleus_of_(hundreds|thousands)|everything)-distinct-.*"
        ),
        "test_logits_of_16_bits_draw_as_if_widened": "dtype1-.*",
        "test_forbidden_tokens_are_never_drawn": "{}-.*|{'top_k': 20}-.*",
        "test_of_a_million_draws_fewer_than_ten_differ": None,
    },
    # What other libraries' calls become; the kernels are those of the tests above.
    "integrations/test_flash_attn.py": {
        "test_apart": (
            "(causal_more_keys|gqa|window_left_causal|alibi|head_dim_59|ragged)-.*"
        ),
        "test_keys_and_values_in_one": "(gqa|ragged)-.*",
        "test_all_in_one": "(softcap|ragged)-.*",
        "test_each_dtype": "dtype1-.*",
        "test_pages_of_any_size_equal_packed_keys": "24-.*",
        "test_every_feature": "right_window-.*",
    },
    "integrations/test_flash_attn_dropout.py": {
        "test_output_and_gradients_are_those_of_the_marked_pattern": "triton-causal",
        "test_the_marks_hold_the_probabilities": "triton-96",
        "test_packed_sequences_are_marked_in_their_own_corner": "triton-True",
    },
    "integrations/test_flash_attn_kvcache.py": {
        "test_output_and_cache_equal_the_walk": (
            "(decode|chunk_causal|page_24|batch_idx|leftpad_chunk|rotary_pairs"
            "|rotary_halves_in_a_window|alibi_after_leftpad|head_dim_59_paged|many_splits)-.*"
        ),
        "test_nothing_waits_for_the_device": "decode|page_16",
    },
    "integrations/test_torch_flash.py": {"test_torch_sends_its_flash_calls_here": "True"},
    "integrations/test_torch_sdpa.py": {
        "test_on_a_gpu": (
            "five_dims|causal_more_queries|gqa_heads_of_their_own|float_mask_of_a_matrix"
            "|bool_mask_of_keys|head_dim_that_no_tile_divides|nothing_at_all"
            "|no_(keys|queries|heads|batch|value_dim|head_dim_causal)"
        ),
    },
    "integrations/test_transformers.py": {
        "test_on_a_gpu": "llama-left|gpt_oss-None|bert-right",
        "test_generate_on_a_gpu_compiles_the_steps_of_a_static_cache": None,
    },
    "training/test_trainer.py": {
        "test_a_step_on_a_gpu_waits_for_nothing_and_gives_the_cpus_losses": "True-LlamaForCausalLM",
        "test_deterministic_steps_on_a_gpu_give_the_same_bits": None,
    },
    # Every engine that starts compiles tens of kernels for its model: a Llama in graphs and without
    # them, a model with windows, one with latents, and one server.
    "engine/test_batch_invariance.py": {"test_on_a_gpu": None},
    "engine/test_beams.py": {"test_beams_on_a_gpu_are_those_of_a_cpu": None},
    "engine/test_compile_ahead.py": {
        "test_a_first_start_on_a_gpu_compiles_nothing_by_itself": None,
    },
    "engine/test_embedding.py": {"test_on_a_gpu_vectors_are_those_of_transformers_too": None},
    "engine/test_graphs.py": {
        "test_a_captured_step_is_the_step_bit_for_bit": "bfloat16",
        "test_neither_graphs_nor_overlap_change_a_token": "float32-llama",
        "test_drawn_tokens_are_the_same_with_graphs_and_without": "mixed_requests",
        "test_a_decode_step_waits_for_nothing": "bfloat16-option0",
        "test_8_bit_caches_take_the_same_path": "int8",
    },
    "engine/test_group_models.py": {
        "test_a_captured_step_equals_the_eager_one_bit_for_bit": "deepseek-bfloat16",
        "test_a_gpu_gives_transformers_tokens": None,
        "test_batch_invariance_holds_in_chunks_and_in_any_batch": "mistral_window-cuda",
    },
    "engine/test_host_cache.py": {
        "test_swapped_sequences_draw_the_tokens_of_each_alone": (
            "device-newest-True-.*|overlap-cheapest-False-.*"
        ),
    },
    "engine/test_loop.py": {
        "test_on_a_gpu_a_step_that_fails_once_is_made_good_by_its_halves": None,
        "test_an_error_that_a_gpu_keeps_ends_the_loop_with_the_reason": None,
    },
    "engine/test_prompt_steps.py": {
        "test_a_step_captured_in_pieces_is_the_step_bit_for_bit": "bfloat16-mistral_window",
        "test_shared_prefixes_stay_outside_of_the_graphs": None,
        "test_llm_captures_steps_with_prompts_and_sizes_its_cache_for_them": None,
    },
    "engine/test_shared_groups.py": {"test_a_captured_step_follows_the_groups": None},
    "engine/test_speculative.py": {
        "test_lookup_on_a_gpu_gives_the_same_tokens": "lazy",
    },
    "engine/tensor_parallel/test_on_one_gpu.py": {
        "test_two_workers_on_one_gpu_give_the_tokens_of_one": "graphs",
    },
    "engine/tensor_parallel/test_on_gpus.py": {
        "test_gpus_give_the_tokens_of_one": "auto-bfloat16-2",
        "test_other_models_on_gpus_give_the_tokens_of_one": None,
        "test_many_greedy_rows_of_two_gpus_are_those_of_one": "lazy",
        "test_blocks_are_counted_on_every_gpu": None,
    },
    "distributed/test_inbox.py": {
        "test_many_sums_in_graphs_of_ranks_that_are_streams": (
            "2-8-8-False-1024|4-7-0-True-1024|4-128-0-True-4096"
        ),
    },
    # Both ranks compile what they run: causal calls on all three ways, documents on one.
    "distributed/test_on_one_gpu.py": {
        "test_two_ranks_share_a_gpu": "(ring|ulysses|gather)-causal|ring-documents",
        "test_ranks_on_one_gpu_that_disagree_are_both_told": "ring",
    },
    "distributed/test_on_gpus.py": {
        "test_two_gpus": "causal-.*|documents-ring",
        "test_two_gpus_that_disagree_are_both_told": "ring",
    },
}  # fmt: skip


def is_quick_row(file: str, name: str) -> bool:
    """Whether a quick run keeps a test, by its file below tests/ and its name with its row's id."""
    test, _, row = name.partition("[")
    rows = QUICK_ROWS.get(file, {}).get(test, ".*")
    return rows is not None and re.fullmatch(rows, row.removesuffix("]")) is not None


def asks_for_gpu_alone(marks: str) -> bool:
    """Whether `-m MARKS` takes tests that need a GPU and no others, as "gpu and not slow" does."""
    return re.fullmatch(r"gpu( and (not )?\w+)*", marks) is not None


def names_a_gpu(text: str) -> bool:
    """Whether a file of tests may have one that needs a GPU: it names one, or those of another."""
    return re.search(r"gpu|cuda|BACKENDS", text, re.IGNORECASE) is not None
