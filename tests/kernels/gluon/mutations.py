"""Mistakes to make in the product's Hopper kernels, each in one place of their text.

A mistake must be seen by the emulator: as a race, a deadlock, misuse, or wrong numbers. One that is
harmless says why; it is listed because somebody may take the line that it changes for needed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from tests.edits import changed
from tilewise.kernels import gluon
from tools.gluon_emulator import Program

_FOLDER = Path(gluon.__file__).parent


@dataclass(frozen=True)
class Mutation:
    """One change of one kernel function's text.

    Attributes:
        place: "files:function", a pattern of file names in tilewise/kernels/gluon and the function,
            of which one of these files holds what is to be changed.
        old, new: code that stands there exactly once, and what takes its place: see `tests.edits`.
        call: the call that must show it, a key of CALLS in test_gluon_mutations.py.
        harmless: why nothing goes wrong, if nothing does.
    """

    place: str
    old: str
    new: str
    call: str
    harmless: str | None = None

    def program(self) -> Program:
        """Return the kernels with this change."""
        pattern, function = self.place.split(":")
        programs, wrong = [], []
        for file in sorted(_FOLDER.glob(f"{pattern}.py")):
            module = ".".join((gluon.__name__, *file.relative_to(_FOLDER).with_suffix("").parts))
            try:
                text = changed(file.read_text(), function, self.old, self.new)
            except ValueError as error:
                wrong.append(str(error))
            else:
                programs.append(Program({module: functools.partial(_instead, text)}))
        assert len(programs) == 1, f"{len(programs)} functions {self.place} can be changed: {wrong}"
        return programs[0]


def _instead(text: str, _: str) -> str:
    return text


def _without(place: str, line: str, call: str, harmless: str | None = None) -> Mutation:
    return Mutation(place, line, "pass", call, harmless)


def _later(place: str, first: str, second: str, call: str, harmless: str | None = None) -> Mutation:
    """Exchange two neighbours."""
    return Mutation(place, first + second, second + first, call, harmless)


_LOAD_BIAS, _BIAS = "forward/*:_load_bias", "forward/*:_copied_bias"
_LOAD, _QUERIES = "forward/*:load_tiles", "forward/*:_load_queries"
_TILES, _ATTEND = "forward/*:compute_tiles", "forward/*:_attend"
_STEP, _ISSUE = "forward/*:_step", "forward/*:_begin_scores"
_COMPUTE, _PASS = "forward/*:_compute_tile", "forward/*:_pass_by"
_OUT, _SHARED = "forward/*:store_columns", "forward/*:_allocate"
_PV = "    acc, p_before = warpgroup_mma_wait(0, deps=(acc, p_before))\n"
_FREE_V = "    mbarrier.arrive(shared.v_empty.index(before), count=1)\n"
_QK = "    s = warpgroup_mma_wait(1, deps=(s,))\n"
_FREE_K = (
    "    if not tile.release_together:\n"
    "        mbarrier.arrive(shared.k_empty.index(stage), count=1)\n"
)
_ANNOUNCE = "    if tile.dynamic:\n        _announce(shared, group, number)\n"
_LOAD_Q = (
    "    row = rows.first_q + rows.first_row + group * 64\n"
    "    at = [b, rows.h, row, 0]\n"
    "    at_high = [b, rows.h, row, tile.d]\n"
    "    full = shared.q_full.index(group)\n"
    "    _load(q, q_high, at, at_high, full, shared.q, shared.q_high, group, tile)\n"
)

FORWARD = {
    # A bias that comes by copies.
    "a_bias_is_loaded_before_its_place_is_free": _without(
        _LOAD_BIAS, "mbarrier.wait(shared.bias_empty.index(slot), ((step // STAGES) & 1) ^ 1)",
        "biased",
    ),
    "a_bias_is_read_before_it_is_there": _without(
        _BIAS, "mbarrier.wait(shared.bias_full.index(slot), (step // STAGES) & 1)", "biased"
    ),
    "the_wrong_phase_of_a_bias": Mutation(
        _BIAS, "(step // STAGES) & 1", "((step // STAGES) & 1) ^ 1", "biased"
    ),
    "a_bias_of_another_warpgroup": Mutation(
        _LOAD_BIAS, "rows.first_row + group * 64", "rows.first_row", "biased"
    ),
    "a_bias_is_given_back_before_it_is_read": _later(
        _BIAS,
        "    bias = shared.bias.index(slot).reshape([64, tile.keys]).load(sum_layout(tile.keys))\n",
        "    release_loaded(shared.bias_empty.index(slot))\n", "biased",
    ),
    "a_block_passed_by_keeps_its_bias": _without(
        _PASS, "mbarrier.arrive(shared.bias_empty.index(slot), count=1)", "biased_short"
    ),
    # The loader.
    "k_is_loaded_before_its_place_is_free": _without(
        _LOAD, "mbarrier.wait(shared.k_empty.index(stage), phase ^ 1)", "full"
    ),
    "v_is_loaded_before_its_place_is_free": _without(
        _LOAD, "mbarrier.wait(shared.v_empty.index(stage), phase ^ 1)", "full"
    ),
    "q_is_loaded_before_its_place_is_free": _without(
        _QUERIES, "mbarrier.wait(shared.q_empty.index(group), (visit & 1) ^ 1)", "full"
    ),
    "the_wrong_phase_of_free_k": Mutation(
        _LOAD, "k_empty.index(stage), phase ^ 1", "k_empty.index(stage), phase", "full"
    ),
    "the_wrong_phase_of_free_v": Mutation(
        _LOAD, "v_empty.index(stage), phase ^ 1", "v_empty.index(stage), phase", "full"
    ),
    "the_wrong_phase_of_free_q": Mutation(_QUERIES, "(visit & 1) ^ 1", "(visit & 1)", "full"),
    "phases_that_do_not_count_rounds": Mutation(
        _LOAD, "(step // tile.stages) & 1", "step & 1", "full"
    ),
    "v_in_the_wrong_stage": Mutation(
        _LOAD, "shared.v.index(stage)", "shared.v.index((stage + 1) % tile.stages)", "full"
    ),
    "v_reported_at_the_barrier_of_k": Mutation(
        _LOAD, "shared.v_full.index(stage), shared.v.index",
        "shared.k_full.index(stage), shared.v.index", "full",
    ),
    "half_of_the_bytes_of_q_and_k": Mutation(
        "forward/*:_load", "mbarrier.expect(full, tiles.block_type.nbytes)",
        "mbarrier.expect(full, tiles.block_type.nbytes // 2)", "full",
    ),
    "a_tile_announced_after_its_queries": _later(_QUERIES, _ANNOUNCE, _LOAD_Q, "causal"),
    "a_counter_that_is_not_reset": _without(_LOAD, "gl.atomic_xchg(counter, 0)", "causal"),
    "an_end_that_is_not_announced": _without(
        _LOAD, "_announce(shared, group, work.num_tiles)", "causal"
    ),
    "an_end_announced_without_arrival": _without(
        _LOAD, "mbarrier.arrive(shared.q_full.index(group), count=1)", "causal"
    ),
    "a_place_in_the_ring_that_stands_still": Mutation(_LOAD, "step += 1", "step += 0", "full"),
    # Barriers.
    "k_freed_by_one_warpgroup": Mutation(
        _SHARED, "k_empty.index(stage), count=GROUPS", "k_empty.index(stage), count=1", "full"
    ),
    "v_freed_by_one_warpgroup": Mutation(
        _SHARED, "v_empty.index(stage), count=GROUPS", "v_empty.index(stage), count=1", "full"
    ),
    "v_that_arrives_twice": Mutation(
        _SHARED, "v_full.index(stage), count=1", "v_full.index(stage), count=2", "full"
    ),
    # A warpgroup.
    "k_multiplied_before_it_is_there": _without(
        _STEP, "mbarrier.wait(shared.k_full.index(stage), (step // tile.stages) & 1)", "full"
    ),
    "v_multiplied_before_it_is_there": _without(
        _STEP, "mbarrier.wait(shared.v_full.index(before), ((step - 1) // tile.stages) & 1)", "full"
    ),
    "q_multiplied_before_it_is_there": Mutation(
        _COMPUTE, "mbarrier.wait(shared.q_full.index(GROUP), visit & 1)\n    task", "task", "full"
    ),
    "the_last_v_multiplied_before_it_is_there": _without(
        _ATTEND, "mbarrier.wait(shared.v_full.index(stage), (last // tile.stages) & 1)", "full"
    ),
    "the_wrong_phase_of_v": Mutation(
        _STEP, "((step - 1) // tile.stages) & 1", "(step // tile.stages) & 1", "full"
    ),
    "the_values_of_this_step_instead_of_the_last": Mutation(
        _STEP, "before = (step - 1) % tile.stages", "before = step % tile.stages", "full"
    ),
    "v_freed_before_its_product_is_done": _later(_STEP, _PV, _FREE_V, "full"),
    "v_not_freed": _without(_STEP, _FREE_V.strip(), "full"),
    "k_freed_before_its_product_is_done": _later(
        _STEP, _QK, _FREE_K, "full",
        harmless="K of a stage is loaded anew only after V of the stage before has been freed, "
        "which comes after the wait for this product",
    ),
    "a_sum_used_before_it_is_done": Mutation(
        _STEP, "warpgroup_mma_wait(0, deps=(acc, p_before))",
        "warpgroup_mma_wait(1, deps=(acc, p_before))", "full",
    ),
    "scores_used_before_they_are_done": Mutation(
        _STEP, "warpgroup_mma_wait(1, deps=(s,))", "warpgroup_mma_wait(2, deps=(s,))", "full"
    ),
    "q_not_freed": Mutation(
        _ATTEND,
        "    if not tile.q_in_registers:\n"
        "        mbarrier.arrive(shared.q_empty.index(GROUP), count=1)\n",
        "", "full",
    ),
    "a_sum_that_is_not_rescaled": _without(_STEP, "acc = scale_rows(acc, alpha)", "full"),
    "nobody_begins_the_turns": _without(
        _TILES, 'named_barrier("arrive", SCHEDULER_BARRIER, 256, 4)', "full"
    ),
    "a_turn_that_is_not_passed_on": Mutation(_STEP, "_arrive_scheduler(tile, GROUP)", "pass",
    "full"),
    "a_turn_that_is_not_waited_for": _without(
        _ISSUE, 'named_barrier("sync", SCHEDULER_BARRIER + GROUP, 256, 4)', "full"
    ),
    # A warpgroup that has nothing to do.
    "k_that_is_not_read_is_not_freed": _without(
        _PASS, "mbarrier.arrive(shared.k_empty.index(stage), count=1)", "short"
    ),
    "v_that_is_not_read_is_not_freed": _without(
        _PASS, "mbarrier.arrive(shared.v_empty.index(stage), count=1)", "short"
    ),
    "k_freed_before_it_is_there": _without(
        _PASS, "mbarrier.wait(shared.k_full.index(stage), phase)", "wide_short"
    ),
    "v_freed_before_it_is_there": _without(
        _PASS, "mbarrier.wait(shared.v_full.index(stage), phase)", "wide_short"
    ),
    "a_turn_kept_by_who_does_not_multiply": _without(_PASS, "_arrive_scheduler(tile, GROUP)",
    "short"),
    "a_turn_passed_on_before_it_came": _without(
        _PASS, 'named_barrier("sync", SCHEDULER_BARRIER + GROUP, 256, 4)', "short"
    ),
    "q_that_is_not_read_is_not_freed": _without(
        _TILES, "mbarrier.arrive(shared.q_empty.index(GROUP), count=1)", "short"
    ),
    "a_block_that_some_rows_see_is_passed_by": Mutation(
        "forward/span:hidden_steps", "walk.last + 1 - blocks", "walk.last + 2 - blocks", "wide"
    ),
    "o_copied_before_it_is_fenced": Mutation(
        _OUT, "        fence_async_shared()\n        tma_store(", "        tma_store(", "full"
    ),
    "o_overwritten_while_it_is_copied": _without(_OUT, "tma.store_wait(0)", "full"),
    "an_end_before_o_has_left": _without(_TILES, "    tma.store_wait(0)", "full"),
    # What is visible.
    "one_block_too_few_is_masked": Mutation(
        "forward/span:walk_of", "free_begin = gl.maximum(end -",
        "free_begin = gl.maximum(end - 1 -",
        "causal",
    ),
    "values_of_no_sequence_are_not_cleared": Mutation(
        "forward/values:clear_hidden", "gl.where(gl.expand_dims(seen, 1), part.load(layout), 0.0)",
        "part.load(layout)", "nan",
    ),
    "cleared_values_that_are_not_fenced": _without(
        "forward/values:clear_hidden", "fence_async_shared()", "nan"
    ),
}  # fmt: skip

_MOVE, _SEND = "backward/*:_load_step", "backward/*:send_dq"
_PREPOST = "backward/prepost:"
_FOLD, _CONSUME = "backward/*:_step", "backward/*:consume"
_LEAVE, _STORE = "backward/*:leave_dq", "backward/*:store_keys"
_KERNEL = "backward/kernel:attention_bwd_kernel"
_LOAD_APART = "backward/dkdv:load_for_dkdv"
_DV, _DK = "backward/dkdv_warpgroups:make_dv", "backward/dkdv_warpgroups:make_dk"
_DQ_OF_ROWS = "backward/dq_warpgroup:make_dq"
_DKDV = "dv, dk, p_half, ds_half = warpgroup_mma_wait(1, deps=(dv_sum, dk_sum, p_half, ds_half))\n"
_FREE_Q = "    mbarrier.arrive(bars.empty.index(stage), count=1)\n"
_DQ = "        dq = warpgroup_mma_wait(1, deps=(dq_sum,))\n"
_FREE_DS = "        mbarrier.arrive(bars.ds_empty.index(before % 2), count=1)\n"
_SENT = "backward/loader:_send_tile"
_SYNC = '        named_barrier("sync", BARRIER + half, THREADS, 1)\n'
_READ = "        tma.store_wait(HALVES - 1 - half)  # the buffer has been read\n"
_FREE_DQ = "        mbarrier.arrive(bars.dq_empty.index(FIRST + half), count=1)\n"
_COUNTS = (
    "barriers(STAGES, 2),\n"
    "        barriers(2 * variant.senders, 1), barriers(2, 2), barriers(2, 2),"
)

BACKWARD = {
    # A bias that comes by copies.
    "the_bytes_of_a_bias_forgotten": Mutation(
        _MOVE, "NBYTES + bias_desc.block_type.nbytes", "NBYTES", "biased"
    ),
    "a_bias_of_other_keys": Mutation(
        "backward/*:_load_bias", "[b, h, row, work.first_key]", "[b, h, row, 0]", "biased"
    ),
    "a_bias_of_another_tile": Mutation(
        _MOVE, "work, tile * TILE_M, head, places, full", "work, 0, head, places, full", "biased"
    ),
    # The two warps that move tiles.
    "q_is_loaded_before_its_place_is_free": _without(
        _MOVE, "mbarrier.wait(bars.empty.index(stage), ((step // STAGES) & 1) ^ 1)", "causal"
    ),
    "the_wrong_phase_of_free_q": Mutation(
        _MOVE, "((step // STAGES) & 1) ^ 1", "(step // STAGES) & 1", "causal"
    ),
    "v_reported_at_the_barrier_of_k": Mutation(
        _MOVE, "first_key, 0], bars.kv_full.index(1)", "first_key, 0], bars.kv_full.index(0)",
        "causal",
    ),
    "the_bytes_of_lse_forgotten": Mutation(
        _MOVE, "q_desc.block_type.nbytes + lse_desc.block_type.nbytes", "q_desc.block_type.nbytes",
        "causal",
    ),
    "do_of_another_tile": Mutation(
        _MOVE, "tma_load(do_desc, [b, head, row, 0]",
        "tma_load(do_desc, [b, head, row + TILE_M, 0]", "causal",
    ),
    "dq_sent_before_it_is_there": Mutation(
        _SENT, _SYNC, "", "ordered"
    ),
    "dq_freed_while_it_is_sent": Mutation(
        _SENT, _READ, "        pass\n", "ordered"
    ),
    "dq_not_freed": Mutation(
        _SENT, _FREE_DQ, "        pass\n", "ordered"
    ),
    "dq_added_to_what_nobody_stored": Mutation(
        _SENT, "tma_store(dq_desc", "tma_add(dq_desc", "ordered"
    ),
    "dq_stored_over_what_others_added": Mutation(
        _SENT, "            if rank == 0:", "            if rank != 0:", "ordered"
    ),
    "dq_added_before_its_turn": Mutation(_SEND, "while found < rank:", "while False:", "ordered"),
    "dq_told_of_before_it_is_written": Mutation(
        _SEND, "wait_for_copies()\n                gl.atomic_add(semaphores_ptr + at_tile",
        "gl.atomic_add(semaphores_ptr + at_tile", "ordered",
    ),
    "dq_told_of_late_but_before_it_is_written": Mutation(
        _SEND, "wait_for_copies()\n                gl.atomic_add(semaphores_ptr + before",
        "gl.atomic_add(semaphores_ptr + before", "ordered_causal",
    ),
    "dq_never_told_of": _without(
        _SEND, 'gl.atomic_add(semaphores_ptr + at_tile, 1, sem="release")', "ordered"
    ),
    "added_dq_freed_while_it_is_sent": Mutation(
        _SENT, _READ, "        pass\n", "causal"
    ),
    # What CTAs do for one another.
    "row_terms_loaded_before_they_are_there": _without(
        _MOVE, "wait_for_preprocess(work.index, shape, prepost)", "prepost"
    ),
    "dq_added_before_it_is_zero": _without(
        _SEND, "wait_for_preprocess(work.index, shape, prepost)", "prepost",
        harmless="dq is made of row terms, which the loader has waited for; this is for the fence",
    ),
    "dq_rounded_before_it_is_complete": Mutation(
        _PREPOST + "run_prepost", "shape.num_tiles\n", "0\n", "prepost"
    ),
    "dq_called_complete_before_it_is_written": Mutation(
        _SEND, "    wait_for_copies()\n    if LATE and", "    if LATE and", "prepost"
    ),
    "row_terms_of_a_tile_that_is_not_there": _without(
        _PREPOST + "_preprocess", "mbarrier.wait(full.index(stage), (part // STAGES) & 1)",
        "prepost",
    ),
    "dq_of_a_tile_that_is_not_there": _without(
        _PREPOST + "_postprocess",
        "mbarrier.wait(full.index(STAGES + stage), (part // STAGES) & 1)", "prepost",
    ),
    "preprocessing_that_is_not_reported": _without(
        _PREPOST + "_report_preprocess", 'gl.atomic_add(prepost.counts + index, 1, sem="release")',
        "prepost"
    ),
    # Barriers.
    "q_freed_by_one_warpgroup": Mutation(
        _KERNEL, _COUNTS, _COUNTS.replace("(STAGES, 2)", "(STAGES, 1)"), "causal"
    ),
    "ds_complete_with_one_half": Mutation(
        _KERNEL, _COUNTS, _COUNTS.replace("1), barriers(2, 2)", "1), barriers(2, 1)"), "causal",
    ),
    "ds_freed_by_one_warpgroup": Mutation(
        _KERNEL, _COUNTS, _COUNTS.replace("(2, 2), barriers(2, 2)", "(2, 2), barriers(2, 1)"),
        "causal",
    ),
    # A consumer.
    "do_multiplied_before_it_is_there": _without(
        _FOLD, "mbarrier.wait(bars.do_full.index(stage), (step // STAGES) & 1)", "causal"
    ),
    "q_multiplied_before_it_is_there": Mutation(
        _FOLD, ", pred=more)", ", pred=False)", "causal"
    ),
    "k_multiplied_before_it_is_there": _without(
        _CONSUME, "mbarrier.wait(bars.kv_full.index(0), turn & 1)", "causal"
    ),
    "v_multiplied_before_it_is_there": Mutation(
        _CONSUME, "mbarrier.wait(bars.kv_full.index(1), turn & 1)\nclear_keys(", "clear_keys(",
        "causal",
    ),
    "ds_overwritten_while_it_is_multiplied": _without(
        _FOLD, "mbarrier.wait(bars.ds_empty.index(parity), ((step // 2) & 1) ^ 1)", "causal"
    ),
    "ds_that_is_not_fenced": Mutation(
        _FOLD, "    fence_async_shared()\n    mbarrier.arrive(bars.ds_full",
        "    mbarrier.arrive(bars.ds_full", "causal",
    ),
    "ds_multiplied_before_the_other_half_is_there": _without(
        _FOLD, "mbarrier.wait(bars.ds_full.index(before % 2), (before // 2) & 1)", "causal"
    ),
    "the_last_ds_multiplied_before_the_other_half_is_there": _without(
        _CONSUME, "mbarrier.wait(bars.ds_full.index(last % 2), (last // 2) & 1)", "causal"
    ),
    "dq_of_this_step_instead_of_the_last": Mutation(
        _FOLD, "_dq_half(ds_tile(bufs, before % 2,", "_dq_half(ds_tile(bufs, parity,", "causal"
    ),
    "q_freed_before_its_products_are_done": Mutation(
        _FOLD, _DKDV + _FREE_Q, _FREE_Q.strip() + "\n" + _DKDV, "causal"
    ),
    "dk_used_before_it_is_done": Mutation(
        _FOLD, "1, deps=(dv_sum, dk_sum, p_half, ds_half)",
        "2, deps=(dv_sum, dk_sum, p_half, ds_half)", "causal",
    ),
    "dq_used_before_it_is_done": Mutation(
        _FOLD, "warpgroup_mma_wait(1, deps=(dq_sum,))", "warpgroup_mma_wait(2, deps=(dq_sum,))",
        "causal",
    ),
    "ds_freed_before_its_product_is_done": _later(_FOLD, _DQ, _FREE_DS, "causal"),
    "ds_not_freed": _without(_FOLD, _FREE_DS.strip(), "causal"),
    "dq_overwritten_while_it_is_sent": _without(
        _LEAVE, "mbarrier.wait(bars.dq_empty.index(place), phase ^ 1)", "causal"
    ),
    "dq_that_is_not_fenced": _without(_LEAVE, "fence_async_shared()", "causal"),
    "dq_that_nobody_is_told_of": _without(
        _LEAVE, "_tell_sender(step, variant, HALF, THREADS)", "causal"
    ),
    "dk_that_is_not_fenced": _without(_STORE, "fence_async_shared()", "causal"),
    "dk_overwritten_while_it_is_copied": _without(_STORE, "tma.store_wait(0)", "causal"),
    "dk_in_the_wrong_half": Mutation(
        _STORE, "half = buffer.index(0).slice(PART * 64, 64, 2)",
        "half = buffer.index(0).slice(64 - PART * 64, 64, 2)", "causal",
    ),
    "a_diagonal_one_off": Mutation(
        "visible:first_query", "- first_row - window_right", "- first_row - window_right - 1",
        "causal",
    ),
    "queries_of_no_sequence_are_not_cleared": _without(
        _FOLD, "clear_queries(do, work, tile, variant)", "nan"
    ),
    "cleared_keys_that_are_not_fenced": _without(
        "backward/*:clear_keys", "fence_async_shared()", "nan"
    ),
    # Dropout, whose words are drawn a step ahead.
    "words_of_this_step_drawn_for_the_next": Mutation(
        "backward/consumer:_drawn_ahead", "gl.where(more, step + 1, step)", "step", "dropped"
    ),
    "words_of_the_first_head_drawn_for_all": Mutation(
        "backward/consumer:_drawn", "work.head * shape.group_size + g",
        "work.head * shape.group_size", "dropped",
    ),
    "words_that_are_not_drawn_ahead": Mutation(
        _FOLD, "drawn = _drawn_ahead(step, more, work, shape, scores, places, variant, PART)",
        "pass", "dropped",
    ),
    "dropped_gradients_are_kept": Mutation(
        "backward/logits:drop_gradients", "(bits & mask)", "bits", "dropped"
    ),
    "bits_of_the_other_query": Mutation(
        "backward/logits:drop_gradients", "+ 2 * odd", "+ 2 * (1 - odd)", "dropped"
    ),
    "bits_of_the_key_eight_before": Mutation(
        "backward/logits:masks_of_pairs", "_eight_on(l5)", "1 - _eight_on(l5)", "dropped"
    ),
    # Where dq has a kernel of its own.
    "q_of_a_step_loaded_over_one_in_use": _without(
        _LOAD_APART, "mbarrier.wait(bars.q_empty.index(stage), phase)", "apart"
    ),
    "do_of_a_step_loaded_over_one_in_use": _without(
        _LOAD_APART, "mbarrier.wait(bars.do_empty.index(stage), phase)", "apart"
    ),
    "the_bytes_of_the_last_channels_forgotten": Mutation(
        _LOAD_APART, "k_desc.block_type.nbytes + HIGH", "k_desc.block_type.nbytes", "apart"
    ),
    "p_overwritten_before_it_is_read": _without(
        _DV, "mbarrier.wait(bars.p_empty.index(parity), ((step // 2) & 1) ^ 1)", "apart"
    ),
    "p_read_before_it_is_there": _without(
        _DK, "mbarrier.wait(bars.p_full.index(parity), (step // 2) & 1)", "apart"
    ),
    "do_freed_before_its_product_is_done": Mutation(
        _DV, "warpgroup_mma_wait(GROUPS, ", "warpgroup_mma_wait(GROUPS + 1, ", "apart"
    ),
    "q_freed_before_the_product_of_its_last_channels_is_done": Mutation(
        _DK, "1, deps=(dk_sum, dk_high_sum, ds_half, ds_high)",
        "2, deps=(dk_sum, dk_high_sum, ds_half, ds_high)", "apart",
    ),
    "dropped_probabilities_have_a_gradient": Mutation(
        "backward/logits:keep_signed", "gl.where(p > 0.0, dp * keep_scale, 0.0)", "dp * keep_scale",
        "apart",
    ),
    "dk_leaves_through_keys_that_the_other_reads": Mutation(
        _DK, "bufs.p, variant, 0,", "bufs.k_high, variant, 0,", "apart"
    ),
    "k_of_a_tile_loaded_over_one_in_use": _without(
        "backward/dq:load_for_dq",
        "mbarrier.wait(bars.k_empty.index(at), ((slot // SLOTS) & 1) ^ 1)", "apart",
    ),
    "k_of_a_tile_multiplied_before_it_is_there": _without(
        _DQ_OF_ROWS, "mbarrier.wait(bars.k_full.index(at_k), ((slot + BEHIND) // SLOTS) & 1)",
        "apart",
    ),
    "v_of_a_tile_freed_before_its_product_is_done": Mutation(
        _DQ_OF_ROWS, "dp = warpgroup_mma_wait(0, ", "dp = warpgroup_mma_wait(1, ", "apart"
    ),
    "dq_of_rows_that_is_not_fenced": _without(
        "backward/dq_warpgroup:_store_queries", "fence_async_shared()", "apart"
    ),
}  # fmt: skip

_MMA, _MMA_STEP = "mma/forward:attention_fwd_kernel", "mma/forward:_step"
_WAIT_V = "async_copy.wait_group(2 * STAGES - 2)\n"
_COPY_K = "_copy(keys, bias, index + STAGES, shared.k, task0, False, False, tile, variant)\n"

# The forward pass by mma.sync; calls are those of test_mma.py.
MMA_FORWARD = {
    "keys_multiplied_before_they_are_there": Mutation(
        _MMA_STEP, "stage = index % STAGES\n    async_copy.wait_group(2 * STAGES - 2)",
        "stage = index % STAGES\nasync_copy.wait_group(2 * STAGES - 1)", "two_stages",
    ),
    "values_multiplied_before_they_are_there": Mutation(
        _MMA_STEP, _WAIT_V + _COPY_K, _WAIT_V.replace("- 2", "- 1") + _COPY_K, "two_stages"
    ),
    "values_of_one_stage_multiplied_before_they_are_there": Mutation(
        _MMA_STEP, _WAIT_V + _COPY_K, _WAIT_V.replace("- 2", "- 1") + _COPY_K, "one_stage"
    ),
    "queries_read_before_they_are_there": Mutation(
        _MMA, "async_copy.wait_group(2 * tile.stages - 2)",
        "async_copy.wait_group(2 * tile.stages - 1)", "in_registers",
    ),
    "keys_copied_over_those_that_are_multiplied": Mutation(
        _MMA_STEP, "_copy(keys, bias, index + STAGES,", "_copy(keys, bias, index + STAGES + 1,",
        "two_stages",
    ),
    "keys_copied_over_what_other_warps_multiply": Mutation(  # no barrier between
        _MMA_STEP, _WAIT_V + _COPY_K, _COPY_K + _WAIT_V.replace("- 2", "- 1"), "two_stages"
    ),
    "values_copied_over_those_that_are_multiplied": Mutation(
        _MMA_STEP, "following = index + STAGES - 1", "following = index + STAGES", "two_stages"
    ),
    "no_group_where_nothing_is_copied": Mutation(
        "mma/forward:_copy", "async_copy.commit_group()",
        "if index < task.walk.steps:\n    async_copy.commit_group()", "two_stages",
    ),
    "keys_past_the_end_are_read": Mutation(
        "mma/forward:_copy", "FIRST or variant.left or MASK", "variant.left or MASK", "one_stage"
    ),
    "queries_past_the_end_are_read": Mutation(
        _MMA, "None, tile.warps, True, tile.padded", "None, tile.warps, False, tile.padded",
        "one_stage",
    ),
    "both_parts_have_the_first_ones_queries": Mutation(
        _MMA, "first = rows.first_row + PART_ROWS * part", "first = rows.first_row", "two_stages"
    ),
    "both_parts_see_what_the_first_one_sees": Mutation(
        _MMA, "head_of(rows, rows.first_row + PART_ROWS,", "head_of(rows, rows.first_row,",
        "two_stages",
    ),
    "the_second_part_is_multiplied_with_the_first_ones_queries": Mutation(
        "mma/forward:_scores", "_left(q, 1, chunk, tile)", "_left(q, 0, chunk, tile)", "two_stages"
    ),
    "the_second_part_has_the_first_ones_probabilities": Mutation(
        "mma/forward:_add_values", "unpack(p1, v.dtype", "unpack(p0, v.dtype", "two_stages"
    ),
    "sums_are_not_rescaled": _without(
        "mma/forward:_fold", "acc = scale_rows(acc, alpha)", "two_stages"
    ),
    "channels_past_the_width_are_read": Mutation(
        "mma/operands:copy_rows", "channel < rows.width * UNIT", "channel < WIDTH", "padded"
    ),
    "a_tile_without_entries_sees_its_block": _without(
        _MMA, "free_begin = gl.maximum(free_begin, 1)", "masked"
    ),
    "the_second_part_has_the_first_ones_bias": Mutation(
        "mma/forward:_fold", ".slice(PART * ROWS, ROWS)", ".slice(0, ROWS)", "biased"
    ),
    "the_bias_of_the_first_block": Mutation(
        "mma/forward:_copy", "Rows(bias.start + first,", "Rows(bias.start,", "biased"
    ),
    "bias_past_the_last_key_is_read": Mutation(
        "mma/forward:_copy", "width = bias.width - first // UNIT", "width = bias.width", "biased"
    ),
    "the_bias_of_another_stage": Mutation(
        "mma/forward:_fold", "index % tile.bias_stages", "(index + 1) % tile.bias_stages", "biased"
    ),
    "the_bias_of_another_head": Mutation(
        _MMA, "none,\n            rows.h,", "none,\n            rows.h * 0,", "biased"
    ),
    "wide_sums_of_the_first_keys": Mutation(
        "mma/forward:_add_wide_values", "v.slice(chunk * CHUNK, CHUNK)", "v.slice(0, CHUNK)", "wide"
    ),
    "wide_probabilities_of_half_the_keys": Mutation(
        "mma/forward:_add_wide_values", "tile.keys // CHUNK", "tile.keys // CHUNK // 2", "wide"
    ),
    "wide_values_multiplied_before_they_are_there": Mutation(
        _MMA_STEP, _WAIT_V + _COPY_K, _WAIT_V.replace("- 2", "- 1") + _COPY_K, "wide"
    ),
    "rows_past_the_end_are_written": Mutation(
        "mma/forward:_store", "gl.expand_dims(at < rows.length_q, 1)",
        "gl.expand_dims(at >= 0, 1)", "one_stage",
    ),
}  # fmt: skip

_BWD, _BWD_STEP = "mma/backward:attention_bwd_kernel", "mma/backward:_step"
_BWD_ADD, _BWD_STORE = "mma/backward:_add_queries", "mma/backward:_store"
_BWD_WAIT = "async_copy.wait_group(0)\n"
_BWD_COPY = "_copy(step + 1, until, work, shape, scores, places, heads, bufs, variant, grids)\n"
_BWD_AHEAD = f"if not ONE:\n    {_BWD_COPY}"
_BWD_BARRIER = "partition_barrier()\n"

# The backward pass by mma.sync; calls are those of test_mma_bwd.py.
MMA_BACKWARD = {
    "queries_multiplied_before_they_are_there": Mutation(
        _BWD_STEP, _BWD_WAIT, _BWD_WAIT.replace("0", "1"), "two_stages"
    ),
    "queries_of_one_stage_multiplied_before_they_are_there": Mutation(
        _BWD_STEP, _BWD_WAIT, _BWD_WAIT.replace("0", "1"), "one_stage"
    ),
    "queries_copied_over_what_other_warps_multiply": Mutation(  # no barrier between
        _BWD_STEP, _BWD_WAIT + _BWD_AHEAD, _BWD_AHEAD + _BWD_WAIT.replace("0", "1"), "two_stages"
    ),
    "queries_of_one_stage_copied_over_what_other_warps_multiply": Mutation(
        _BWD_STEP, _BWD_BARRIER + _BWD_COPY, _BWD_COPY + _BWD_BARRIER, "one_stage"
    ),
    "queries_copied_to_the_stage_that_is_multiplied": Mutation(
        "mma/backward:_copy", "stage = step % variant.stages",
        "stage = (step + 1) % variant.stages", "two_stages",
    ),
    "the_stage_of_another_step": Mutation(
        _BWD_STEP, "stage = step % variant.stages", "stage = (step + 1) % variant.stages",
        "two_stages",
    ),
    "the_first_queries_of_all_tiles": Mutation(
        "mma/backward:_copy", "first = tile * TILE_M", "first = tile * 0",
        "two_stages",
    ),
    "queries_past_the_end_are_read": Mutation(
        "mma/backward:_copy", "bufs.q.index(stage), None, WARPS, grids.queries_end,",
        "bufs.q.index(stage), None, WARPS, False,", "two_stages",
    ),
    "keys_past_the_end_are_read": Mutation(
        _BWD, "bufs.k, None, WARPS, True,", "bufs.k, None, WARPS, False,", "two_stages"
    ),
    "dk_past_the_end_is_written": Mutation(
        _BWD_STORE, "gl.expand_dims(key < end, 1)", "gl.expand_dims(key >= 0, 1)", "two_stages"
    ),
    "channels_past_the_width_are_written": Mutation(
        _BWD_STORE, "gl.expand_dims(column < width * UNIT, 0)", "gl.expand_dims(column >= 0, 0)",
        "padded",
    ),
    "dv_of_what_dk_is_made_of": Mutation(
        _BWD_STEP, "_add_product(dv, bufs.p,", "_add_product(dv, bufs.ds,", "one_stage"
    ),
    "dq_of_what_dv_is_made_of": Mutation(
        _BWD_STEP, "_add_product(dq, bufs.ds.permute((1, 0)), bufs.k, KEYS)",
        "_add_product(dq, bufs.p.permute((1, 0)), bufs.k, KEYS)", "one_stage",
    ),
    "dq_of_half_the_keys": Mutation(
        _BWD_STEP, "bufs.k, KEYS)", "bufs.k, KEYS // 2)", "one_stage"
    ),
    "dq_of_the_first_head": Mutation(
        "mma/backward:_first_sum", "_plane(work, head, shape, variant)",
        "_plane(work, head * 0, shape, variant)", "two_stages",
    ),
    "dq_stored_by_all": Mutation(_BWD_ADD, "if rank == 0:", "if rank >= 0:", "ordered"),
    "dq_added_before_its_turn": Mutation(
        _BWD_ADD, "while seen < rank:", "while seen < 0:", "ordered"
    ),
    "a_turn_never_ends": _without(_BWD_ADD, "_end_turn(owed, heads)", "ordered"),
    "the_last_turn_never_ends": _without(_BWD, "_end_turn(owed, heads)", "ordered"),
    "a_turn_ends_before_its_sums_are_added": Mutation(
        _BWD_ADD, "_end_turn(owed, heads)", "_end_turn(at_turn, heads)", "ordered"
    ),
    "the_turn_of_another_tile_ends": Mutation(
        _BWD_ADD, "owed = at_turn", "owed = at_turn * 0", "ordered"
    ),
    "ds_of_pairs_that_were_dropped": _without(
        _BWD_STEP, "dp = keep_pairs(dp * scores.keep_scale, words, 0.0)", "dropped"
    ),
    "random_words_of_the_first_keys": Mutation(
        "mma/backward:_kept", "1) + work.first_key // 32", "1)", "dropped"
    ),
    "the_bias_of_the_first_keys": Mutation(
        "mma/backward:_copy", "every.start + work.first_key", "every.start", "biased"
    ),
    "the_bias_of_another_head": Mutation(
        "mma/backward:_copy", "work.b, first * 0, head, strides",
        "work.b, first * 0, head * 0, strides", "biased",
    ),
    "bias_past_the_last_key_is_read": Mutation(
        "mma/backward:_copy", "(shape.seqlen_k - work.first_key) // UNIT", "shape.seqlen_k // UNIT",
        "biased",
    ),
    "steps_without_their_mask": Mutation(
        _BWD, "masked = masked_steps(work) * group_size", "masked = zero", "two_stages"
    ),
    "the_copies_of_a_tile_that_no_query_sees_are_left_behind": _without(
        _BWD, "async_copy.wait_group(0)", "unseen"
    ),
}  # fmt: skip
