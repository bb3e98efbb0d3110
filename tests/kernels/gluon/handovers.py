"""Mistakes where one partition hands memory over to another, in every Hopper kernel.

Each must be seen by the emulator, or by one of some hundred schedules in which what a run of it did
is replayed: many are right whenever all warps of a partition go on together. `call` is a key of
`gluon_schedules.CASES`.
"""

from __future__ import annotations

from tests.kernels.gluon.mutations import Mutation, _later, _without

_LOAD, _QUERIES = "forward/loader:load_tiles", "forward/loader:_load_queries"
_TILES, _ATTEND = "forward/warpgroup:compute_tiles", "forward/warpgroup:_attend"
_STEP, _PASS = "forward/warpgroup:_step", "forward/warpgroup:_pass_by"
_Q_FREE = "    mbarrier.wait(shared.q_empty.index(group), (visit & 1) ^ 1)\n"
_ANNOUNCE = "    if tile.dynamic:\n        _announce(shared, group, number)\n"
_LAST_V = "            mbarrier.wait(shared.v_full.index(stage), (at // tile.stages) & 1)\n"

FORWARD = {
    "a_tile_announced_before_the_last_number_is_read": _later(
        _QUERIES, _Q_FREE, _ANNOUNCE, "packed_causal"
    ),
    "the_end_announced_before_the_last_number_is_read": _without(
        _LOAD, "mbarrier.wait(shared.q_empty.index(group), (visit & 1) ^ 1)", "packed_causal"
    ),
    "a_number_read_before_it_is_announced": Mutation(
        _TILES,
        "            mbarrier.wait(shared.q_full.index(GROUP), visit & 1)\n            lane",
        "            lane", "packed_causal",
    ),
    "q_given_back_before_it_is_in_registers": Mutation(
        _ATTEND,
        "        q = q.load(operand_layout(tile.keys))\n"
        "        release_loaded(shared.q_empty.index(GROUP))\n",
        "        mbarrier.arrive(shared.q_empty.index(GROUP), count=1)\n"
        "        q = q.load(operand_layout(tile.keys))\n",
        "packed_causal",
    ),
    "q_given_back_unread_before_it_has_come": Mutation(
        _TILES,
        "                mbarrier.wait(shared.q_full.index(GROUP), visit & 1)\n"
        "                mbarrier.arrive(",
        "                mbarrier.arrive(", "packed_causal",
    ),
    "the_turn_passed_to_oneself": Mutation(
        "forward/warpgroup:_arrive_scheduler",
        "SCHEDULER_BARRIER + (GROUP + 1) % tile.warpgroups",
        "SCHEDULER_BARRIER + GROUP", "packed_causal",
    ),
    "values_cleared_before_they_are_there": Mutation(
        _ATTEND, _LAST_V + "            clear_hidden(", "            clear_hidden(",
        "packed_causal",
    ),
    "values_of_a_mask_cleared_before_they_are_there": _without(
        "forward/step:_clear_values",
        "mbarrier.wait(task.shared.v_full.index(stage), (step // tile.stages) & 1)", "masked",
    ),
    "another_stage_of_v_given_back": Mutation(
        _STEP, "shared.v_empty.index(before)", "shared.v_empty.index(stage)", "every_tile_alike"
    ),
    "another_stage_of_k_given_back_unread": Mutation(
        _PASS, "shared.k_empty.index(stage)", "shared.k_empty.index(0)", "packed_causal"
    ),
    "the_wrong_phase_of_a_block_that_is_passed_by": Mutation(
        _PASS, "((step + index) // tile.stages) & 1", "(index // tile.stages) & 1", "wide"
    ),
    "the_bytes_of_the_rest_forgotten": Mutation(
        "forward/loader:_load", "tiles.block_type.nbytes + rests.block_type.nbytes",
        "tiles.block_type.nbytes", "latent_heads",
    ),
    "the_second_half_of_o_written_over_the_first": _without(
        "forward/epilogue:store_columns", "tma.store_wait(0)", "wide"
    ),
}  # fmt: skip

_PREPOST, _KEYS = "backward/prepost:run_prepost", "backward/loader:_load_step"
_LAST_DQ = "        dq = warpgroup_mma_wait(0, deps=(dq_sum,))\n"
_FREE_DS_AND_K = (
    "        if variant.several:\n"
    "            mbarrier.arrive(bars.ds_empty.index(last % 2), count=1)\n"
    "            mbarrier.arrive(bars.kv_empty.index(0), count=1)\n"
)
_CONSUME, _FOLD = "backward/consumer:consume", "backward/consumer:_step"
_DQ = "backward/dq_warpgroup:make_dq"
_DV, _DK = "backward/dkdv_warpgroups:make_dv", "backward/dkdv_warpgroups:make_dk"

BACKWARD = {
    "sums_loaded_over_those_that_some_warp_reads": Mutation(
        _PREPOST, "            partition_barrier()\n            if variant.prepost",
        "            if variant.prepost", "backward_prepost",
    ),
    "the_wrong_phase_of_ds": Mutation(
        _FOLD, "mbarrier.wait(bars.ds_full.index(before % 2), (before // 2) & 1)",
        "mbarrier.wait(bars.ds_full.index(before % 2), ((before // 2) & 1) ^ 1)", "backward",
    ),
    "the_wrong_buffer_of_ds_given_back": Mutation(
        _FOLD, "bars.ds_empty.index(before % 2), count=1", "bars.ds_empty.index(parity), count=1",
        "backward",
    ),
    "dq_handed_over_before_it_is_written": _later(
        "backward/consumer:leave_dq", "    fence_async_shared()\n",
        "    _tell_sender(step, variant, HALF, THREADS)\n", "backward",
    ),
    "the_wrong_phase_of_dq": Mutation(
        "backward/consumer:leave_dq", "phase ^ 1", "phase", "backward"
    ),
    "dq_given_back_before_it_is_sent_on_in_order": _later(
        "backward/loader:_send_tile",
        "        tma.store_wait(HALVES - 1 - half)  # the buffer has been read\n",
        "        mbarrier.arrive(bars.dq_empty.index(FIRST + half), count=1)\n",
        "backward_in_order",
    ),
    "the_wrong_phase_of_dq_of_two_senders": Mutation(
        "backward/consumer:leave_dq", "phase = (step // 2) & 1", "phase = step & 1",
        "backward_in_order_by_two",
    ),
    "one_buffer_of_dq_for_two_senders": Mutation(
        "backward/consumer:leave_dq", "tile = bufs.dq.index(place)", "tile = bufs.dq.index(0)",
        "backward_in_order_by_two",
    ),
    "another_senders_dq_given_back": Mutation(
        "backward/loader:_send_tile", "bars.dq_empty.index(FIRST + half)",
        "bars.dq_empty.index(half)", "backward_in_order_by_two",
    ),
    # Tiles of keys that follow one another.
    "k_of_the_next_tile_loaded_before_its_place_is_free": _without(
        _KEYS, "mbarrier.wait(bars.kv_empty.index(0), (turn & 1) ^ 1)", "backward_in_turns"
    ),
    "v_of_the_next_tile_loaded_before_its_place_is_free": _without(
        _KEYS, "mbarrier.wait(bars.kv_empty.index(1), (turn & 1) ^ 1)", "backward_in_turns"
    ),
    "the_wrong_phase_of_free_k": Mutation(
        _KEYS, "bars.kv_empty.index(0), (turn & 1) ^ 1", "bars.kv_empty.index(0), turn & 1",
        "backward_in_turns",
    ),
    "k_given_back_before_its_last_product_is_done": Mutation(
        _CONSUME, _LAST_DQ + _FREE_DS_AND_K, _FREE_DS_AND_K + _LAST_DQ, "backward_in_turns_full"
    ),
    "v_given_back_before_dk_has_left": Mutation(
        _CONSUME, "bufs.v, variant, PART, variant.width)\nmbarrier.arrive(",
        "bufs.v, variant, PART, variant.width, WAIT=False)\nmbarrier.arrive(",
        "backward_in_turns",
    ),
    "dk_written_over_dv_that_leaves": _without(
        _CONSUME, "tma.store_wait(0)", "backward_in_turns_full"
    ),
    "the_last_ds_not_given_back": _without(
        _CONSUME, "mbarrier.arrive(bars.ds_empty.index(last % 2), count=1)",
        "backward_in_turns_full",
    ),
    "notes_read_before_they_are_there": _without(
        "backward/consumer:_next_work", "mbarrier.wait(bars.kv_full.index(0), turn & 1)",
        "backward_in_turns",
    ),
    "notes_of_another_tile": Mutation(
        "backward/span:note_work", "turn % 2 * NOTES", "0", "backward_in_turns"
    ),
    "queries_passed_by_whose_ds_nobody_fences": _without(
        "backward/consumer:_see_half", "fence_async_shared()", "backward_in_turns_half_seen"
    ),
    "q_of_rows_multiplied_before_it_is_there": _without(
        _DQ, "mbarrier.wait(bars.q_full.index(PART), 0)", "backward_apart"
    ),
    "k_of_rows_given_back_before_its_product_is_done": Mutation(
        _DQ, "dq, ds_half = warpgroup_mma_wait(0, deps=(dq_sum, ds_half))",
        "dq, ds_half = warpgroup_mma_wait(1, deps=(dq_sum, ds_half))", "backward_wide",
    ),
    "p_handed_over_before_it_is_written": _later(
        _DV, "        bufs.p.index(parity).reshape([64, 64]).store(sent)\n",
        "        mbarrier.arrive(bars.p_full.index(parity), count=1)\n", "backward_apart",
    ),
    "v_of_keys_multiplied_before_it_is_there": _without(
        _DK, "mbarrier.wait(bars.kv_full.index(1), 0)", "backward_apart"
    ),
}  # fmt: skip

_CONSUME_8 = "forward/fp8/kernel:_consume"
_ADD = "latent/values:"
_VALUES = "        value_bytes = v_tiles.index(stage).load(value_bytes_layout(N, W))\n"
_SCALES = (
    "        if shape.slot_scales:\n"
    "            k_scales = _scales_of(ring.k_scale.index(stage), shape)\n"
    "            v_scales = _scales_of(ring.v_scale.index(stage), shape)\n"
)
_FREE_PAGE = "        release_loaded(ring.empty.index(stage))\n"

OTHERS = {
    "8_bits_v_multiplied_before_it_is_there": _without(
        _CONSUME_8, "mbarrier.wait(bars.v_full.index(last), ((done - 1) // C.STAGES) & 1)",
        "8_bits",
    ),
    "8_bits_the_first_k_multiplied_before_it_is_there": _without(
        _CONSUME_8, "mbarrier.wait(bars.k_full.index(stage), (done // C.STAGES) & 1)", "8_bits"
    ),
    "8_bits_o_overwritten_while_it_is_copied": Mutation(
        "forward/fp8/kernel:_store", "        tma.store_wait(0)\n", "        pass\n", "8_bits"
    ),
    "8_bits_the_turn_passed_to_oneself": Mutation(
        "forward/fp8/step:arrive_scheduler", "(CONSUMER + 1) % C.NUM_CONSUMERS", "CONSUMER",
        "8_bits"
    ),
    "8_bits_q_and_its_notes_read_before_they_are_there": _without(
        _CONSUME_8, "mbarrier.wait(bars.q_full.index(CONSUMER), visit & 1)", "8_bits"
    ),
    "8_bits_v_given_back_before_its_product_is_done": _later(
        "forward/fp8/step:step",
        "    acc, acc2 = add_values(acc, acc2, p, alpha, smem, last, C)\n",
        "    mbarrier.arrive(bars.v_empty.index(last), count=1)\n", "8_bits",
    ),
    "a_page_used_before_it_is_there": _without(
        "paged/decode:_fold_pair",
        "mbarrier.wait(ring.full.index(stage), step // shape.stages & 1)", "paged_decode",
    ),
    "a_page_loaded_over_one_in_use": _without(
        "paged/decode:_load_tile", "mbarrier.wait(ring.empty.index(stage), parity)", "paged_decode"
    ),
    "a_page_given_back_before_its_values_are_read": Mutation(
        "paged/decode:_fold_pair", _VALUES + _SCALES + _FREE_PAGE, _FREE_PAGE + _VALUES + _SCALES,
        "paged_decode",
    ),
    "the_scales_of_a_page_not_waited_for": Mutation(
        "paged/decode:_allocate", "33 if shape.slot_scales else 1", "1", "paged_decode"
    ),
    "the_scales_of_a_page_announced_before_they_are_copied": _later(
        "paged/decode:_load_scales",
        "    async_copy.async_copy_global_to_shared(ring.v_scale.index(stage), v_at)\n",
        "    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)\n",
        "paged_decode_with_a_plan",
    ),
    "latents_loaded_over_queries_that_some_warp_reads": Mutation(
        "latent/scores:_begin",
        "    partition_barrier()  # all have read what the next tile overwrites\n", "", "latents",
    ),
    "an_item_told_over_one_that_is_read": _without(
        "latent/scores:_score_item", "wait_slot(visit, shared)", "latents"
    ),
    "the_right_half_given_back_before_its_product_is_done": _later(
        _ADD + "_add_right", "    o, o_tail = warpgroup_mma_wait(0, deps=(o, o_tail))\n",
        "    mbarrier.arrive(shared.empty.index(stage), count=1)\n", "latents",
    ),
    "an_item_given_back_before_it_is_read": _later(
        _ADD + "_end",
        "    part, row, rows = read(shared, slot, PART), read(shared, slot, ROW), "
        "read(shared, slot, COUNT)\n",
        "    mbarrier.arrive(shared.item_empty.index(slot), count=1)\n", "latents",
    ),
    "p_of_latents_handed_over_before_it_is_made": Mutation(
        "latent/scores:_score_item",
        "        m, l = _fold_tile(s, m, l, at + index, factor, shared)\n",
        "        mbarrier.arrive(shared.p_full.index((at + index) % 3), count=1)\n"
        "        m, l = _fold_tile(s, m, l, at + index, factor, shared)\n",
        "latents",
    ),
    "latents_of_8_bits_given_back_before_they_are_read": Mutation(
        "latent/bytes/values:_add_tile",
        "    low, high = value_halves("
        "shared.latent_tiles.index(place + 1).load(value_bytes_layout()))\n"
        "    release_loaded(shared.empty.index(stage))\n",
        "    release_loaded(shared.empty.index(stage))\n"
        "    low, high = value_halves("
        "shared.latent_tiles.index(place + 1).load(value_bytes_layout()))\n",
        "latents_of_8_bits",
    ),
    "p_of_8_bits_given_back_before_its_product_is_done": _later(
        "latent/bytes/values:_add_tile",
        "    o_next, o, x, y = warpgroup_mma_wait(0, deps=(o_next, o, x, y))\n",
        "    mbarrier.arrive(shared.p_empty.index(slot), count=1)\n", "latents_of_8_bits",
    ),
    "a_scale_of_8_bits_read_before_it_is_there": _without(
        "latent/bytes/values:add_items",
        "mbarrier.wait(shared.scale_full.index(slot), visit // 2 & 1)", "latents_of_8_bits",
    ),
}  # fmt: skip

_ROWS = "step/rows:_multiply"
_NARROW = "quantised/narrow_rows:_multiply_tiles"
PRODUCTS = {
    "codes_multiplied_before_they_are_there": _without(
        _NARROW, "mbarrier.wait(full.index(stage), count // shape.stages & 1)", "rounded_rows"
    ),
    "codes_loaded_over_some_in_use": _without(
        "quantised/narrow_rows:_load_tiles",
        "mbarrier.wait(empty.index(stage), (count // shape.stages & 1) ^ 1)", "rounded_rows",
    ),
    "codes_given_back_before_their_product_is_done": _later(
        _NARROW, "            sum2 = _add(sum2, part2, of_x * factor2, 0)\n",
        "            mbarrier.arrive(empty.index(stage), count=1)\n", "rounded_rows",
    ),
    "a_stage_multiplied_before_it_is_there": _without(
        _ROWS, "mbarrier.wait(ring.full.index(stage), (step // shape.stages) & 1)", "few_rows"
    ),
    "the_wrong_phase_of_a_stage": Mutation(
        _ROWS, "(step // shape.stages) & 1", "step & 1", "few_rows"
    ),
    "another_stage_loaded": Mutation(
        _ROWS, "ahead * shape.tile_k, stage)", "ahead * shape.tile_k, ahead % 2)", "few_rows"
    ),
    "a_stage_loaded_before_its_product_is_done": Mutation(
        _ROWS, "acc = warpgroup_mma_wait(0, deps=(acc,))\nahead",
        "acc = warpgroup_mma_wait(1, deps=(acc,))\nahead", "few_rows",
    ),
    "the_bytes_of_x_forgotten": Mutation(
        "step/rows:_load", "weight.block_type.nbytes + x.block_type.nbytes",
        "weight.block_type.nbytes", "few_rows",
    ),
    "the_bytes_of_an_early_weight_forgotten": Mutation(
        "step/rows:_begin", "weight.block_type.nbytes + x.block_type.nbytes",
        "x.block_type.nbytes", "few_rows_early",
    ),
    "arrivals_left_behind": _without(
        "step/rows:finish_parts", "gl.atomic_xchg(arrived + tile, 0)", "few_rows"
    ),
}  # fmt: skip

# The race of 2026-11-22 (docs/design/hopper.md): the copy engine goes past a barrier.
_RELEASE, _FENCE = "device/barriers:release_loaded", "fence_async_shared()"
UNFENCED = {
    "q_given_back_under_loads_that_are_not_fenced": _without(_RELEASE, _FENCE, "packed_causal"),
    "p_lse_and_delta_given_back_under_loads_that_are_not_fenced": _without(
        _RELEASE, _FENCE, "backward_apart"
    ),
    "a_page_given_back_under_loads_that_are_not_fenced": _without(
        _RELEASE, _FENCE, "paged_decode"
    ),
    "latents_of_8_bits_given_back_under_loads_that_are_not_fenced": _without(
        _RELEASE, _FENCE, "latents_of_8_bits"
    ),
    "sums_of_dq_loaded_over_loads_that_are_not_fenced": Mutation(
        _PREPOST, "fence_async_shared()\npartition_barrier()\nif variant.prepost",
        "partition_barrier()\nif variant.prepost", "backward_prepost",
    ),
}  # fmt: skip
HANDOVERS = FORWARD | BACKWARD | OTHERS | PRODUCTS | UNFENCED
