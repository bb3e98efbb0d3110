"""Plant known mistakes in a copy of the repository, one at a time: some test must fail.

    python -m tests.mutants [PART OF A NAME ...]

These are mistakes of host code, of CPU kernels, of portable kernels in the interpreter and of the
reference. Those of Hopper's kernels are tables that the emulator's tests run; `make mutants` runs
both. A mistake that no test sees ends the run with status 1, and so does code that is no longer
there to be changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.edits import changed

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 900  # the tests of one mistake, some of which compile kernels first


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: what it changes, below the repository's root.
        function: the function that it changes, by its qualified name; the whole file if empty.
        old, new: code that stands there exactly once, and what takes its place: see `tests.edits`.
        tests: arguments of pytest, of which one must fail.
    """

    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Make the change in a copy of the repository."""
        path = root / self.file
        path.write_text(changed(path.read_text(), self.function, self.old, self.new))


_ALLOCATOR, _PREFIX = "tilewise/cache/allocator.py", "tilewise/cache/prefix.py"
_TABLES = "tilewise/engine/tables/block_tables.py"
_PLAIN = "tilewise/engine/scheduling/plain_steps.py"
_TEST_PLAIN = ("tests/engine/test_plain_steps.py",)
_TEST_GROUPS = ("tests/engine/test_group_simulation.py", "-k", "any_schedule")
_TEST_LOGPROBS = ("tests/engine/test_device_runner.py", "-k", "same or late")
_OP, _ARGUMENTS = "tilewise/ops/attention/op.py", "tilewise/ops/attention/arguments.py"
_CALL = "tilewise/ops/call.py"
_STEP_OP, _TEST_STEP_OP = "tilewise/ops/step.py", "tests/ops/test_step.py"
_TEST_RECORDED, _TEST_ATTENTION = (
    "tests/ops/attention/test_recorded.py",
    "tests/ops/attention/test_api.py",
)
_TILE, _TEST_TRITON = (
    "tilewise/kernels/triton/attention/tile.py",
    "tests/kernels/triton/test_attention.py",
)
_WALK, _MERGE = "tilewise/kernels/triton/attention/walk.py", "tilewise/kernels/triton/merge.py"
_VISIBLE = "tilewise/kernels/triton/visible.py"
_STANDARD, _TEST_STANDARD = "tilewise/reference/standard.py", ("tests/reference/test_standard.py",)
_SDPA, _TEST_SDPA = (
    "tilewise/integrations/torch_sdpa.py",
    "tests/integrations/test_torch_sdpa.py",
)
_LINKED = "tilewise/kernels/cpu/machine/linked.py"
_TEST_LINKED = "tests/kernels/cpu/test_linked.py"

_SCAN, _SCAN_TRITON = (
    f"tilewise/kernels/{backend}/recurrent/scan.py" for backend in ("cpu", "triton")
)
_PAIRS, _STEP, _REVERSE = (
    f"tilewise/kernels/triton/recurrent/{name}.py" for name in ("pairs", "step", "backward")
)
_TEST_REVERSE = ("tests/kernels/triton/test_recurrent_backward.py", "-m", "not gpu", "-k")
_TAPS, _TAPS_TRITON = (
    f"tilewise/kernels/{backend}/recurrent/convolution.py" for backend in ("cpu", "triton")
)
_TEST_STATES = ("tests/ops/recurrent/test_gated_delta.py", "-m", "not slow and not gpu", "-k")
_TEST_CPU_STEP = ("tests/engine/test_cpu_step.py", "-k")
_TEST_STATE_LAYERS = ("tests/nn/test_states.py", "-k")
_TEST_STATE_FAMILIES = ("tests/models/test_state_families.py", "-k")
_WIRE = "tilewise/engine/tensor_parallel/wire.py"
_TEST_WIRE = ("tests/engine/tensor_parallel/test_wire.py",)
_TEST_CUT_STATES = ("tests/distributed/test_shards.py", "-m", "not gpu", "-k")
_RECURRENCE = "tilewise/kernels/cpu/step/recurrence.py"
_TEST_STATE_STEP = ("tests/engine/test_state_step.py", "-k")
_TEST_TAPS = ("tests/ops/recurrent/test_causal_conv1d.py", "-k")

MUTANTS = {
    # The block allocator and the prefix cache.
    "a_block_is_freed_by_the_first_of_its_owners": Mutant(
        _ALLOCATOR, "BlockAllocator.release", "if self._ref[block] == 0:\nself._link(block)",
        "self._link(block)", ("tests/cache/test_allocator.py",),
    ),
    "worthless_blocks_are_reused_last": Mutant(
        _ALLOCATOR, "BlockAllocator._link",
        "before = self._prev[end] if self._cached[block] else end", "before = self._prev[end]",
        ("tests/cache/test_allocator.py",),
    ),
    "a_shared_free_block_stays_in_the_free_list": Mutant(
        _ALLOCATOR, "BlockAllocator.share", "self._unlink(block)", "pass",
        ("tests/cache/test_allocator.py",),
    ),
    "the_last_token_is_found_too": Mutant(
        _PREFIX, "PrefixCache.find", "(len(token_ids) - 1) // size * size",
        "len(token_ids) // size * size", ("tests/cache/test_prefix.py",),
    ),
    "a_block_is_found_behind_any_parent": Mutant(
        _PREFIX, "PrefixCache.register", "parent.children.get(key)",
        "self._roots[salt].children.get(key)", ("tests/cache/test_prefix.py",),
    ),
    # Groups of layers with windows.
    "a_window_is_a_key_too_short": Mutant(
        _PREFIX, "first_block", "max(0, position - window + 1) // block_size",
        "max(0, position - window + 2) // block_size", _TEST_GROUPS,
    ),
    "a_block_is_freed_that_the_first_query_of_a_run_still_sees": Mutant(
        _TABLES, "BlockTables.extend",
        "self._pass(seq, number, first_block(start, pool.window, size))",
        "self._pass(seq, number, first_block(end - 1, pool.window, size))", _TEST_GROUPS,
    ),
    "a_hit_is_what_the_last_group_has": Mutant(
        _PREFIX, "PrefixCache.find", "is_hit &= runs[group]", "is_hit = runs[group]",
        _TEST_GROUPS,
    ),
    "a_hit_with_a_hole_before_the_last_block": Mutant(
        _PREFIX, "PrefixCache.find", "runs[group] + 1 if is_there else 0",
        "runs[group] + is_there", _TEST_GROUPS,
    ),
    "admission_forgets_that_a_window_begins_inside_a_block": Mutant(
        "tilewise/engine/tables/admission.py", "window_blocks",
        "(window + num_tokens + block_size - 3) // block_size + 1",
        "(window + num_tokens + block_size - 3) // block_size", _TEST_GROUPS,
    ),
    "a_block_behind_a_window_is_given_away_beside_an_unfinished_step": Mutant(
        _TABLES, "BlockTables._pass", "self.let_go(number, passed)",
        "self.release_now(number, passed)", _TEST_GROUPS,
    ),
    "a_block_behind_a_window_is_kept": Mutant(
        _TABLES, "BlockTables._pass", "if first > gone[number]:",
        "if False:", _TEST_GROUPS,
    ),
    "a_hit_is_remembered_after_its_content_is_gone": Mutant(
        _PREFIX, "PrefixCache.prune", "self.version += 1", "pass",
        ("tests/cache/test_prefix.py",),
    ),
    "only_the_first_group_copies_what_is_shared": Mutant(
        _TABLES, "BlockTables.extend", "if is_shared:", "if is_shared and number == 0:",
        _TEST_GROUPS,
    ),
    "what_was_found_inside_a_block_of_a_group_is_written_in_place": Mutant(
        _TABLES, "BlockTables.extend", "plans.append((owners > 1 or is_found, grown))",
        "plans.append((owners > 1, grown))", _TEST_GROUPS,
    ),
    "a_block_begins_inside_one_that_a_group_has_lost": Mutant(
        _PREFIX, "PrefixCache.begins_inside", "if min(child.blocks) >= 0:",
        "if child.blocks[0] >= 0:", _TEST_GROUPS,
    ),
    "a_forgotten_block_is_still_begun_inside": Mutant(
        _PREFIX, "PrefixCache.forget", "_take_out(first, root)",
        "del root.children[first.tokens]", ("tests/cache/test_prefix.py",),
    ),
    "a_block_taken_over_in_another_group_is_not_told": Mutant(
        "tilewise/engine/tables/holdings.py", "Holdings.retell",
        "told[number - 1] = min(", "told[number - 1] = max(", _TEST_GROUPS,
    ),
    "what_was_damaged_is_found_in_another_group": Mutant(
        _PREFIX, "PrefixCache.forget",
        "self.allocators[group].unmark_cached(block)", "pass", _TEST_GROUPS,
    ),
    # Log-probabilities of steps on a device.
    "log_probabilities_of_all_steps_are_read_to_one_place": Mutant(
        "tilewise/engine/captured/runner.py", "DeviceRunner._decode",
        "self.logprobs.room_of(logprobs.tensors, place)",
        "self.logprobs.room_of(logprobs.tensors, 0)", _TEST_LOGPROBS,
    ),
    "log_probabilities_are_those_of_the_rows_in_order": Mutant(
        "tilewise/engine/steps/step_logprobs.py", "StepLogprobs.asking",
        "asking.sort(key=lambda i: rows[i])", "rows = sorted(rows)", _TEST_LOGPROBS,
    ),
    "memory_for_few_log_probabilities_is_used_for_many": Mutant(
        "tilewise/engine/steps/step_logprobs.py", "StepLogprobs.room_of",
        "if [(x.dtype, x.shape[1:]) for x in kept] !=",
        "if not kept and [(x.dtype, x.shape[1:]) for x in kept] !=", _TEST_LOGPROBS,
    ),
    "the_token_that_a_search_chose_is_not_sent": Mutant(
        "tilewise/engine/captured/batch.py", "DeviceBatch._follow_decode", "elif run.is_chosen:",
        "elif False:", ("tests/engine/test_device_batch.py",),
    ),
    "a_row_that_begins_elsewhere_is_told_its_token_alone": Mutant(
        "tilewise/engine/captured/batch.py", "DeviceBatch._follow_decode",
        "if next_of[row] != start:", "if next_of[row] < 0:",
        ("tests/engine/test_device_batch.py",),
    ),
    # Plain steps that go on with the same sequences.
    "steady_steps_go_on_though_a_table_has_changed": Mutant(
        _PLAIN, "Steady.goes_on", "and tables.num_merged == self._num_merged", "", _TEST_PLAIN,
    ),
    "steady_steps_go_on_behind_the_length_of_one": Mutant(
        _PLAIN, "Steady.goes_on", "and number < self._end", "", _TEST_PLAIN,
    ),
    "steady_steps_leave_out_who_could_begin": Mutant(
        _PLAIN, "Steady.goes_on", "and not self._may_admit(count)", "", _TEST_PLAIN,
    ),
    "steady_steps_go_on_with_who_has_ended": Mutant(
        _PLAIN, "Steady.goes_on", "roster.num_changes == self._num_changes and", "",
        _TEST_PLAIN,
    ),
    "steady_steps_end_nobody_by_length": Mutant(
        _PLAIN, "Steady.take", "or number + 1 >= self._end", "", _TEST_PLAIN,
    ),
    "steady_steps_end_nobody_by_a_token": Mutant(
        _PLAIN, "Steady.take", "or not self._end_ids.isdisjoint(ids)", "", _TEST_PLAIN,
    ),
    "steady_steps_give_tokens_to_who_has_ended": Mutant(
        _PLAIN, "Steady.take", "or self.roster.num_changes != self._num_changes", "", _TEST_PLAIN,
    ),
    "steady_steps_make_blocks_findable_a_step_late": Mutant(
        _PLAIN, "Steady.take", "for place in self._at(number + 1):",
        "for place in self._at(number):", _TEST_PLAIN,
    ),
    "steady_steps_count_slots_wrong": Mutant(
        _PLAIN, "Steady.describe", "self.tables.block_size - len(sequences)",
        "self.tables.block_size", _TEST_PLAIN,
    ),
    "steady_steps_that_were_taken_back_go_on": Mutant(
        "tilewise/engine/scheduling/withdrawal.py", "withdraw", "scheduler.steady.forget()", "",
        ("tests/engine/test_scheduler_simulation.py",),
    ),
    # Calls whose plans are known.
    "a_call_is_known_without_the_strides_of_its_tensors": Mutant(
        _CALL, "key_of", "key += (x.shape, x.stride(), x.dtype, x.device)",
        "key += (x.shape, x.dtype, x.device)", (_TEST_RECORDED,),
    ),
    "a_call_is_known_without_the_dtypes_of_its_tensors": Mutant(
        _CALL, "key_of", "key += (x.shape, x.stride(), x.dtype, x.device)",
        "key += (x.shape, x.stride(), x.device)", (_TEST_RECORDED,),
    ),
    "a_call_is_known_without_the_shapes_of_its_tensors": Mutant(
        _CALL, "key_of", "key += (x.shape, x.stride(), x.dtype, x.device)",
        "key += (x.stride(), x.dtype, x.device)", (_TEST_RECORDED,),
    ),
    "a_call_forgets_deterministic_mode": Mutant(
        _ARGUMENTS, "AttentionSignature.numbers", "torch.are_deterministic_algorithms_enabled()",
        "False", (_TEST_RECORDED,),
    ),
    "a_call_in_deterministic_mode_is_taken_for_the_latest_one": Mutant(
        _CALL, "repeat", "or _is_deterministic()", "", (_TEST_RECORDED,),
    ),
    "a_call_that_is_watched_is_taken_for_the_latest_one": Mutant(
        _CALL, "repeat", "or not unseen()", "", (_TEST_RECORDED,),
    ),
    "a_call_of_other_numbers_is_taken_for_the_latest_one": Mutant(
        _CALL, "repeat", "or not all(map(is_, rest, latest.rest))", "", (_TEST_RECORDED,),
    ),
    "a_step_is_known_without_the_strides_of_its_tensors": Mutant(
        _STEP_OP, "_key", "key += (x.shape, x.stride(), x.dtype, x.device)",
        "key += (x.shape, x.dtype, x.device)", (_TEST_STEP_OP,),
    ),
    "a_step_is_known_without_what_begins_early": Mutant(
        _STEP_OP, "_key", "[name, early.chosen()]", "[name]", (_TEST_STEP_OP,),
    ),
    "a_step_is_known_without_where_its_tensors_begin": Mutant(
        _STEP_OP, "_key", "if odd & 15:", "if False:", (_TEST_STEP_OP,),
    ),
    "a_step_at_odd_addresses_is_taken_for_another": Mutant(
        _STEP_OP, "step.call", "odd & 15 or (each.learns and torch.is_grad_enabled())",
        "each.learns and torch.is_grad_enabled()", (_TEST_STEP_OP,),
    ),
    "a_step_that_is_watched_is_repeated": Mutant(
        _STEP_OP, "step.call", "and unseen()", "", (_TEST_STEP_OP,),
    ),
    "a_step_whose_gradient_is_wanted_is_repeated": Mutant(
        _STEP_OP, "step.call", "odd & 15 or (each.learns and torch.is_grad_enabled())", "odd & 15",
        (_TEST_STEP_OP,),
    ),
    "a_tensor_that_a_step_is_given_twice_is_one": Mutant(
        _STEP_OP, "_planned", "x = each[place] = x.detach()", "pass", (_TEST_STEP_OP,),
    ),
    "a_gradient_of_a_gradient_is_taken_for_the_last_one": Mutant(
        "tilewise/ops/attention/recorded.py", "_Node.backward",
        "if not (others or dlse is not None or do is None or torch.is_grad_enabled()):",
        "if not (others or dlse is not None or do is None):", (_TEST_RECORDED,),
    ),
    "a_mask_is_known_without_what_it_covers": Mutant(
        _ARGUMENTS, "AttentionSignature.numbers", "(mask.shape, mask.device)", "mask.device",
        (_TEST_RECORDED,),
    ),
    "slopes_that_learn_are_taken_for_others": Mutant(
        _ARGUMENTS, "AttentionSignature.numbers", "slopes is not None and slopes.requires_grad",
        "False", (_TEST_RECORDED,),
    ),
    "a_gradient_is_known_without_the_layouts_of_its_tensors": Mutant(
        _OP, "BoundAttention._gradient_plan", "lies = lies and x.is_contiguous()", "",
        (_TEST_RECORDED,),
    ),
    "what_is_marked_as_negated_is_read_as_it_lies": Mutant(
        "tilewise/ops/derivatives.py", "are_plain", "or x.is_neg()", "", (_TEST_RECORDED,),
    ),
    # What arguments mean.
    "a_window_with_a_right_side_forgets_causal": Mutant(
        _ARGUMENTS, "AttentionSignature.options", "window_bounds(self.causal, self.window)",
        "window_bounds(self.causal and self.window is None, self.window)",
        (_TEST_ATTENTION, "-k", "causal_hides and reference"),
    ),
    "a_scale_of_zero_is_the_default": Mutant(
        "tilewise/ops/checks.py", "scale_of", "if softmax_scale is None:",
        "if not softmax_scale:", (_TEST_ATTENTION, "-k", "reference"),
    ),
    # Kernels of the CPU.
    "the_last_row_of_a_left_window_gets_no_gradient": Mutant(
        "tilewise/kernels/cpu/visible.py", "seeing_rows",
        "end = min(q_len, key + count - offset + sizes.window_left)",
        "end = min(q_len, key + count - offset + sizes.window_left - 1)",
        ("tests/kernels/cpu/test_attention.py", "-k", "values_and_gradients and window"),
    ),
    "a_sink_that_is_nan_is_none": Mutant(
        "tilewise/kernels/cpu/attention/softmax.py", "join_sink", "if sink != -math.inf:",
        "if sink > -math.inf:", ("tests/ops/test_containment.py", "-k", "sink and cpu"),
    ),
    "the_end_of_a_row_is_activated_by_torch": Mutant(
        "tilewise/nn/layers.py", "activate", "if name is None or x.dtype",
        "if True or name is None or x.dtype",
        ("tests/nn/test_layers.py", "-k", "alone_and_among"),
    ),
    "a_sequence_is_longer_than_the_call_says": Mutant(
        "tilewise/kernels/cpu/attention/problem.py", "check_longest", "if longest > most:",
        "if longest > most + 1:",
        ("tests/kernels/cpu/test_attention_packed.py", "-k", "longer_than or not_longer"),
    ),
    "a_text_is_counted_to_its_end": Mutant(
        "tilewise/server/limits.py", "refuse_uncountable", "if found > most:",
        "if found > 99 * most:",
        ("tests/server/test_keys_and_limits.py", "-k", "millions_of_tokens"),
    ),
    "a_schema_holds_from_the_first_token": Mutant(
        "tilewise/server/chat_job.py", "ChatJob._suit_sampling",
        'changed["structured"] = replace(structured, lead=lead)', "pass",
        ("tests/server/test_reasoning.py", "-k", "follows_its_form and template and json_schema"),
    ),
    "a_stop_string_ends_the_reasoning": Mutant(
        "tilewise/engine/outputs.py", "Generation.__init__", "reasoning=sampling.reasoning", "",
        ("tests/server/test_reasoning.py", "-k", "stop_string and template"),
    ),
    "a_channels_text_is_content": Mutant(
        "tilewise/server/harmony.py", "HarmonyParser._open",
        '"reasoning" if channel == "analysis" else "content"', '"content"',
        ("tests/server/test_harmony.py", "-k", "is_read_however"),
    ),
    "tools_do_not_choose_the_template": Mutant(
        "tilewise/server/chat.py", "ChatTemplate._source_of",
        "if request.tools and TOOL_USE in self.named:", "if False:",
        ("tests/server/test_templates.py", "-k", "named_templates"),
    ),
    "the_last_tokens_are_free": Mutant(
        "tilewise/engine/closing.py", "Closers.narrow", "if not end or left > len(end) + SPARE:",
        "if True:", ("tests/engine/test_structured_work.py", "-k", "strings_without_end"),
    ),
    "the_first_split_of_a_window_begins_late": Mutant(
        "tilewise/kernels/cpu/paged/decode.py", "plan_decode",
        "first = first_seen(window_left, 1, length, 0) // SPLIT",
        "first = first_seen(window_left, 0, length, 0) // SPLIT",
        ("tests/kernels/cpu/test_paged.py", "-k", "whose_first_key_ends_a_split"),
    ),
    "rows_of_a_tree_are_those_of_all_sequences": Mutant(
        "tilewise/kernels/cpu/paged/plan.py", "_subset",
        "mask = mask._replace(tree_starts=mask.tree_starts[chosen])", "pass",
        ("tests/ops/paged/test_tree.py", "-k", "without_new_tokens and cpu"),
    ),
    "scratch_of_the_forward_pass_grows_with_pairs": Mutant(
        "tilewise/kernels/cpu/attention/forward.py", "_new_scratch", "scratch(rows * ldv, like),",
        "scratch(rows * ldv + problem.arrays.starts[0, Q_LEN] * problem.arrays.starts[0, "
        "K_LEN], like),",
        ("tests/kernels/cpu/test_attention.py", "-k", "scratch_of_the_forward_pass"),
    ),
    "the_last_of_an_odd_number_of_values_may_be_infinite": Mutant(
        "tilewise/kernels/cpu/machine/source.py", "are_finite", "if count % 2 == 1:", "if False:",
        ("tests/kernels/cpu/test_attention_few.py", "-k", "where_they_lie and float32"),
    ),
    "half_a_block_has_five_rows": Mutant(
        "tilewise/kernels/cpu/machine/blocks.py", "set_first", "if rows > HALF:",
        "if rows > HALF + 1:", ("tests/kernels/cpu/test_blocks.py",),
    ),
    "values_where_they_lie_are_those_of_the_first_tile": Mutant(
        "tilewise/kernels/cpu/attention/forward.py", "pack_stored",
        "values.start + key * values.row, values.row", "values.start, values.row",
        ("tests/kernels/cpu/test_attention_few.py", "-k", "where_they_lie and float32"),
    ),
    "delta_with_the_gradient_of_lse_added": Mutant(
        "tilewise/kernels/cpu/attention/delta.py", "delta_of_rows",
        "sizes.v_head_dim) - delta[at]", "sizes.v_head_dim) + delta[at]",
        ("tests/kernels/cpu/test_blocks.py", "-k", "delta"),
    ),
    "delta_of_another_head": Mutant(
        "tilewise/kernels/cpu/attention/delta.py", "delta_of_rows",
        "query * sizes.o_row + head * sizes.o_head", "query * sizes.o_row",
        ("tests/kernels/cpu/test_blocks.py", "-k", "delta"),
    ),
    # How kernels of the CPU are made.
    "a_part_is_linked_before_what_calls_it": Mutant(
        _LINKED, "_LinkedLibrary._parts", "return list(reversed(found))", "return list(found)",
        (_TEST_LINKED,),
    ),
    "a_part_that_two_kernels_parts_hold_is_there_twice": Mutant(
        _LINKED, "_LinkedLibrary.finalize", "_let_be_repeated(self._final_module)", "",
        (_TEST_LINKED,),
    ),
    "a_part_is_linked_without_what_it_calls": Mutant(
        _LINKED, "_LinkedLibrary._get_module_for_linking", "for library in self._parts():",
        "for library in self._parts()[:0]:", (_TEST_LINKED,),
    ),
    # Portable kernels, in the interpreter.
    "a_tile_at_the_diagonal_is_not_masked": Mutant(
        _VISIBLE, "span_of_tile", "full_end = tl.minimum(tl.maximum(first + shift",
        "full_end = tl.minimum(tl.maximum(last + shift", (_TEST_TRITON, "-k", "causal-cpu"),
    ),
    "a_window_loses_its_first_key": Mutant(
        _VISIBLE, "keys_of_rows", "begin = tl.maximum(diagonal - window_left, 0)",
        "begin = tl.maximum(diagonal - window_left + 1, 0)",
        (_TEST_TRITON, "-k", "sliding_window-cpu"),
    ),
    "queries_are_aligned_to_the_first_key": Mutant(
        _VISIBLE, "key_at", "return rows + (length_k - length_q)", "return rows",
        (_TEST_TRITON, "-k", "causal_fewer_queries-cpu"),
    ),
    "a_sequence_reads_the_slopes_of_the_first": Mutant(
        _TILE, "slope_of_head", "extras.alibi + b * extras.alibi_batch + h", "extras.alibi + h",
        ("tests/ops/attention/test_api.py", "-k", "alibi_per_sequence and triton"),
    ),
    "a_cap_bends_small_logits_the_other_way": Mutant(
        _TILE, "tanh", "series, -1.0 / 3.0)", "series, 1.0 / 3.0)",
        (_TEST_TRITON, "-k", "softcap-cpu"),
    ),
    "a_row_that_sees_nothing_counts_beside_its_sink": Mutant(
        "tilewise/kernels/triton/attention/forward.py", "attention_fwd_kernel",
        "l = tl.fma(l, alpha, tl.exp2(sink_log2 - shift))", "l += tl.exp2(sink_log2 - shift)",
        (_TEST_TRITON, "-k", "sinks_in_empty_rows-cpu"),
    ),
    "a_key_head_is_given_the_gradient_of_one_query_head": Mutant(
        "tilewise/kernels/triton/attention/dkdv.py", "attention_bwd_dkdv_kernel",
        "h = h_k * group_size + g", "h = h_k * group_size",
        (_TEST_TRITON, "-k", "grouped_heads-cpu"),
    ),
    "a_gradient_forgets_that_of_lse": Mutant(
        "tilewise/kernels/triton/attention/rows.py", "attention_bwd_rows_kernel",
        "delta -= tl.load", "delta += tl.load", (_TEST_TRITON, "-k", "no_tile_whole-cpu"),
    ),
    "a_mask_beside_a_window_loses_its_last_tile": Mutant(
        _VISIBLE, "lists_of_tile", "begin // SIZE, tl.cdiv(end, SIZE)",
        "begin // SIZE, end // SIZE",
        ("tests/kernels/triton/test_attention_masks.py", "-m", "", "-k", "beside_a_window-cpu"),
    ),
    "a_tile_of_keys_reads_the_bits_of_the_first": Mutant(
        _VISIBLE, "pairs_of_entry", "within, first % variant.mask_k", "within, first * 0",
        ("tests/kernels/triton/test_attention_masks.py", "-m", "", "-k", "cpu"),
    ),
    "a_window_is_walked_without_its_left_edge": Mutant(
        _WALK, "walk", "if part > 0 or HAS_FIRST:", "if part > 0:",
        (_TEST_TRITON, "-k", "sliding_window-cpu"),
    ),
    "values_are_walked_by_the_steps_of_keys": Mutant(
        _WALK, "_walk_range", "b += b_step", "b += a_step",
        ("tests/kernels/triton/test_attention_widths.py", "-k", "cpu"),
    ),
    "a_run_in_a_window_begins_at_its_last_query": Mutant(
        _VISIBLE, "first_key_of_run", "tl.maximum(seqlen_k - run - WINDOW_LEFT, 0)",
        "tl.maximum(seqlen_k - 1 - WINDOW_LEFT, 0)",
        ("tests/kernels/triton/test_paged.py", "-k", "drafts_in_a_window and not gpu"),
    ),
    "a_side_without_keys_is_merged": Mutant(
        _MERGE, "_merge_kernel", "mask=inside & (weight_a > 0.0)[:, None]", "mask=inside",
        ("tests/kernels/triton/test_cache_ops.py", "-k", "saw_nothing"),
    ),
    "parts_forget_how_far_the_maximum_rose": Mutant(
        _MERGE, "add_parts", "l * alpha + tl.sum(weight, 0)", "l + tl.sum(weight, 0)",
        ("tests/kernels/triton/test_paged.py", "-k", "more_splits_than_one_tile"),
    ),
    "a_merged_row_of_nan_has_seen_nothing": Mutant(
        _MERGE, "store_whole", "seen = l != 0.0", "seen = l > 0.0",
        ("tests/kernels/gluon/test_mla.py", "-k", "row_of_nan"),
    ),
    "a_sum_of_parts_is_not_rounded": Mutant(
        "tilewise/kernels/triton/step/norm.py", "_norm_kernel", "if PARTS > 0:\nx = x.to(dtype)",
        "if PARTS > 1:\n    x = x", ("tests/ops/test_norm.py", "-k", "parts"),
    ),
    "a_gate_lies_as_its_rows_do": Mutant(
        "tilewise/kernels/triton/step/activation.py", "_gated_mul_kernel",
        "gate_ptr + row * stride_gate", "gate_ptr + row * stride_x",
        ("tests/ops/test_gated_mul.py", "-k", "lie_apart and triton"),
    ),
    "a_gates_function_is_not_rounded": Mutant(
        "tilewise/kernels/triton/step/activation.py", "_gated_mul_kernel",
        "_applied(gate, FUNCTION).to(dtype).to(tl.float32)", "_applied(gate, FUNCTION)",
        ("tests/ops/test_gated_mul.py", "-k", "budget and triton"),
    ),
    # The truth.
    "the_truth_counts_a_sink_as_a_key_that_is_seen": Mutant(
        _STANDARD, "_forward", "s.new_full((q.shape[1],), -math.inf)",
        "s.new_zeros((q.shape[1],))", _TEST_STANDARD,
    ),
    "the_truth_forgets_the_gradient_of_lse": Mutant(
        _STANDARD, "attention_backward", "u = u - dlse.unsqueeze(-1)", "u = u + 0",
        _TEST_STANDARD,
    ),
    "the_truth_has_no_slope_of_the_cap": Mutant(
        _STANDARD, "attention_backward", "ds * f.slope * f.scale", "ds * f.scale", _TEST_STANDARD,
    ),
    "the_truth_gives_each_query_head_a_key_head": Mutant(
        _STANDARD, "attention_backward", "x.unflatten(1, (k.shape[2], -1)).sum(dim=2)",
        "x.unflatten(1, (-1, k.shape[2])).sum(dim=1)", _TEST_STANDARD,
    ),
    "the_truth_of_packed_rows_crops_a_bias_at_its_end": Mutant(
        _STANDARD, "_crop", "tensor[..., :seqlen_k]", "tensor[..., -seqlen_k:]", _TEST_STANDARD,
    ),
    "the_truth_merges_a_side_without_keys": Mutant(
        "tilewise/reference/merge.py", "merge_states", "torch.where(seen, parts, 0.0)", "parts",
        ("tests/reference/test_merge.py",),
    ),
    "the_truth_writes_rows_that_have_no_slot": Mutant(
        "tilewise/reference/paged.py", "write_kv_cache", "rows = slot_mapping >= 0",
        "rows = slot_mapping >= -1", ("tests/reference/test_paged.py",),
    ),
    "the_truth_of_8_bits_saturates_early": Mutant(
        "tilewise/reference/quantise.py", "quantise", ".clamp(-limit, limit)",
        ".clamp(1 - limit, limit - 1)", ("tests/reference/test_quantise.py",),
    ),
    "the_truth_of_top_p_parts_what_is_equal": Mutant(
        "tilewise/reference/sampling.py", "_mass_above", "ordered[..., 1:] != ordered[..., :-1]",
        "ordered[..., 1:] == ordered[..., 1:]", ("tests/reference/test_sampling.py",),
    ),
    "the_truth_drops_one_in_256_more": Mutant(
        "tilewise/reference/dropout.py", "keep_mask", "numbers >= dropout_threshold",
        "numbers > dropout_threshold", ("tests/reference/test_dropout.py",),
    ),
    # What was wrong where torch's calls are taken.
    "a_mask_that_wants_a_gradient_is_read_once": Mutant(
        _SDPA, "_bias", "if not (attn_mask.requires_grad or transforms_active()):", "if True:",
        (_TEST_SDPA, "-k", "expanded_mask"),
    ),
    "a_mask_of_one_dim_is_refused": Mutant(
        _SDPA, "_bias", "fits = attn_mask.dim() <= len(full)",
        "fits = 2 <= attn_mask.dim() <= len(full)", (_TEST_SDPA, "-k", "one_dim"),
    ),
    "a_refusal_is_not_of_torchs_kind": Mutant(
        _SDPA, "scaled_dot_product_attention",
        'RuntimeError(f"dropout_p must lie in [0, 1], got {dropout_p}")',
        'ValueError(f"dropout_p must lie in [0, 1], got {dropout_p}")',
        (_TEST_SDPA, "-k", "refusals"),
    ),
    "a_result_lies_as_it_was_computed": Mutant(
        _SDPA, "_laid_out_as", "return o.permute(dims).contiguous().permute(places)", "return o",
        (_TEST_SDPA, "-k", "lies_in_memory"),
    ),
    "a_head_without_channels_is_refused": Mutant(
        _SDPA, "scaled_dot_product_attention", "if q.shape[-1] == 0:", "if False:",
        (_TEST_SDPA, "-k", "equal_torch"),
    ),
    "autocast_lowers_float64": Mutant(
        _ARGUMENTS, "autocast", "and x.dtype != torch.float64 for x", "for x",
        ("tests/ops/test_library.py", "-k", "leaves_float64"),
    ),
    "a_bias_that_keys_share_gets_what_rounding_left": Mutant(
        _OP, "BoundAttention.backward", "if bias is not None and is_row_bias:", "if False:",
        (_TEST_ATTENTION, "-k", "keys_share"),
    ),
    "vmap_over_a_cache_ends_inside_torch": Mutant(
        "tilewise/ops/paged/op.py", "", 'refuse_vmap("paged_attention")', "",
        ("tests/ops/test_transforms.py", "-k", "ops_of_a_cache"),
    ),
    "flash_attention_3_ignores_used_rows": Mutant(
        "tilewise/integrations/flash_attn_interface.py", "flash_attn_varlen_func",
        "edges_q = edges_of(seqused_q)", "edges_q = cu_seqlens_q",
        ("tests/integrations/test_flash_attn_interface.py", "-k", "used"),
    ),
    "a_chunk_of_a_cache_begins_with_its_sequence": Mutant(
        "tilewise/integrations/flash_attn/chunks.py", "cut_cached",
        "starts = cut.starts if leftpad is None else cut.starts + leftpad.view(-1, 1)",
        "starts = cut.starts * 0 if leftpad is None else cut.starts + leftpad.view(-1, 1)",
        ("tests/integrations/test_flash_attn_chunks.py", "-k", "start_of_a_chunk"),
    ),
    "positions_of_packed_sequences_are_not_looked_at": Mutant(
        "tilewise/masks/of_transformers.py", "Pattern._apart",
        "expressible = ((positions.diff() == 1) | begins[:, 1:]).all()",
        "expressible = torch.ones((), dtype=torch.bool, device=device)",
        ("tests/integrations/test_transformers_mask.py", "-k", "no_indices"),
    ),
    "wide_integers_are_cut": Mutant(
        "tilewise/ops/checks.py", "as_int32",
        "return tensor.clamp(_INT32.min, _INT32.max).to(torch.int32)",
        "return tensor.to(torch.int32)", ("tests/ops/test_integer_dtypes.py", "-k", "not_cut"),
    ),
    "a_first_call_waits_without_a_word": Mutant(
        "tilewise/kernels/cpu/machine/telling.py", "telling", "timer.start()", "pass",
        ("tests/kernels/cpu/test_telling.py",),
    ),
    # What a checkpoint's files say.
    "a_prompt_is_cut_as_training_was": Mutant(
        "tilewise/engine/tokenizer_files.py", "_from_tokenizer_json", "library.no_truncation()",
        "", ("tests/engine/test_tokenizer_files.py", "-k", "cuts_nor_fills"),
    ),
    "a_token_that_is_declared_twice_is_added_once": Mutant(
        "tilewise/engine/tokenizer_files.py", "_add", "not in there and token not in tokens:",
        "not in there | {_text_of(t) for t in tokens}:",
        ("tests/engine/test_tokenizer_files.py", "-k", "special_tokens_map"),
    ),
    "scaling_beside_newer_settings_is_lost": Mutant(
        "tilewise/models/hf_rope.py", "_settings", "if not scaling:",
        "if parameters or not scaling:", ("tests/models/test_config.py", "-k", "older_spelling"),
    ),
    "a_trained_head_is_left_in_the_file": Mutant(
        "tilewise/models/weights.py", "has_own_head", "return any(", "return False and any(",
        ("tests/models/test_weights.py", "-k", "head_of_its_own"),
    ),
    "a_model_too_large_is_found_out_by_the_kernel": Mutant(
        "tilewise/models/registry.py", "load_model", "before(model)", "pass",
        ("tests/engine/test_memory.py", "-k", "does_not_fit"),
    ),
    # States of layers that remember by them.
    "a_chunk_of_a_state_begins_where_the_call_does": Mutant(
        _SCAN, "scan", "p = start % CHUNK", "p = 0", (*_TEST_STATES, "parts and not interpreted"),
    ),
    "a_state_is_not_kept_when_its_chunk_is_full": Mutant(
        _SCAN, "scan", "if crossed:", "if crossed and p > 0:",
        (*_TEST_STATES, "at_chunks and not interpreted"),
    ),
    "a_slot_is_read_at_the_start_of_a_sequence": Mutant(
        _SCAN, "scan", "if start >= CHUNK or (not has_slots and before.size > 0):",
        "if has_slots or before.size > 0:", (*_TEST_STATES, "used_again and not interpreted"),
    ),
    "an_update_is_kept_a_token_late": Mutant(
        _SCAN, "scan", "store_row(like, wide, updates, s * width, one, address, value_dim)",
        "store_row(like, wide, updates, max(s - 1, 0) * width, one, address, value_dim)",
        (*_TEST_STATES, "parts and not interpreted"),
    ),
    "a_kept_key_is_that_of_the_token_before": Mutant(
        _SCAN, "keep_keys", "(first + position - start) * k_row",
        "(first + max(position - start - 1, 0)) * k_row",
        (*_TEST_STATES, "parts and not interpreted"),
    ),
    "a_token_fades_by_its_own_decay": Mutant(
        _SCAN, "_fade_keys", "if back > 0:\n                d = d * decays[s + 1]",
        "d = d * decays[s]", (*_TEST_STATES, "budget and not interpreted"),
    ),
    "a_gpus_state_is_kept_a_chunk_late": Mutant(
        _SCAN_TRITON, "_scan_kernel", "is_changed = total // TOKENS > start // TOKENS",
        "is_changed = total // TOKENS > start // TOKENS + 1",
        (*_TEST_STATES, "parts and interpreted"),
    ),
    "an_open_chunk_changes_a_gpus_state": Mutant(
        _SCAN_TRITON, "_scan_kernel", "is_full = (chunk + 1) * TOKENS <= total",
        "is_full = chunk >= 0", (*_TEST_STATES, "parts and interpreted"),
    ),
    "a_kept_value_is_computed_again": Mutant(
        _SCAN_TRITON, "_scan_kernel", "is_kept = position < start", "is_kept = position < 0",
        (*_TEST_STATES, "parts and interpreted"),
    ),
    "a_triangle_is_inverted_without_its_last_blocks": Mutant(
        _PAIRS, "inverse_of", "tl.static_range(1, blocks)", "tl.static_range(1, blocks - 1)",
        (*_TEST_STATES, "budget and interpreted"),
    ),
    "a_decay_by_channel_reaches_over_a_block": Mutant(
        _PAIRS, "pairs_by_channel", "in_block = row % SUB >= back", "in_block = row >= back",
        (*_TEST_STATES, "budget and interpreted and channel"),
    ),
    "a_decoded_token_is_not_added_to_its_chunks_state": Mutant(
        _STEP, "_token", "if place == TOKENS - 1:", "if place == TOKENS:",
        (*_TEST_STATES, "parts and interpreted"),
    ),
    "a_decoded_tokens_value_is_kept_a_row_late": Mutant(
        _STEP, "_finish", "x = tl.where((row == place)", "x = tl.where((row == place - 1)",
        (*_TEST_STATES, "parts and interpreted"),
    ),
    "a_decoded_tokens_row_of_the_inverse_is_kept_at_the_start": Mutant(
        _STEP, "_token", "t_at = kept_t_ptr + place * (NUM_HEADS * TOKENS) + row",
        "t_at = kept_t_ptr + row", (*_TEST_STATES, "parts and interpreted"),
    ),
    "a_decoded_token_forgets_the_one_before_it": Mutant(
        _STEP, "_row_of_t", "tl.static_range(SUB - 1)", "tl.static_range(SUB - 2)",
        (*_TEST_STATES, "parts and interpreted"),
    ),
    "a_gpus_gradient_of_a_last_decay_is_lost": Mutant(
        _REVERSE, "_keys_kernel", "tl.where(row == TOKENS - 1, dlast, 0.0)", "0.0 * dlast",
        (*_TEST_REVERSE, "float32"),
    ),
    "a_gpus_gradient_of_a_state_skips_what_corrects_it": Mutant(
        _REVERSE, "_gradients_after",
        "dstate = tl.dot(tl.trans(w), -y, dstate, input_precision=PRECISION)",
        "dstate += 0.0", (*_TEST_REVERSE, "float32"),
    ),
    "gradients_of_a_last_decay_are_lost": Mutant(
        "tilewise/ops/recurrent/chunks.py", "gradient", "drunning[:, :, -1:] += dlast", "pass",
        (*_TEST_STATES, "gradients"),
    ),
    "a_convolution_forgets_the_tokens_before_a_step": Mutant(
        _TAPS, "convolve", "position >= 0", "position >= num_channels",
        (*_TEST_TAPS, "parts and not interpreted"),
    ),
    "a_convolutions_state_is_a_token_late": Mutant(
        _TAPS, "convolve", "(starts[sequence] + t) % num_kept",
        "(starts[sequence] + t + 1) % num_kept",
        (*_TEST_TAPS, "parts and not interpreted"),
    ),
    "a_gpus_gradient_reaches_into_the_next_sequence": Mutant(
        _TAPS_TRITON, "_dx_kernel", "row + later < end", "row + later < num_rows",
        (*_TEST_TAPS, "gpus_kernels and not cuda"),
    ),
    "a_gpus_gradient_of_a_weight_is_that_of_the_tap_before": Mutant(
        _TAPS_TRITON, "_dz_kernel", "tl.where(which == tap,", "tl.where(which == tap + 1,",
        (*_TEST_TAPS, "gpus_kernels and not cuda"),
    ),
    "a_compiled_step_keeps_no_keys_of_open_chunks": Mutant(
        _RECURRENCE, "keep_rows", "len(batch.state_slots)", "types.int64(0)",
        (*_TEST_STATE_STEP, "qwen3_5"),
    ),
    "a_compiled_step_forgets_the_limits_of_time_steps": Mutant(
        _RECURRENCE, "weigh_rows", "if has_limits:", "if num_rows < 0:",
        (*_TEST_STATE_STEP, "mamba2"),
    ),
    "a_compiled_decodes_states_are_those_of_other_sequences": Mutant(
        "tilewise/engine/steps/decode_arrays.py", "DecodeArrays.fill",
        "[s.state_slot for s in sequences]", "[s.state_slot for s in reversed(sequences)]",
        ("tests/engine/test_state_models.py", "-m", "not gpu", "-k", "together and qwen3_5"),
    ),
    "a_compiled_gated_norm_averages_over_a_whole_row": Mutant(
        "tilewise/kernels/cpu/step/gated.py", "gate_rows",
        "types.float64(simd.sum_lanes(squares)) / dim",
        "types.float64(simd.sum_lanes(squares)) / width", (*_TEST_STATE_STEP, "qwen3_5"),
    ),
    # Slots and checkpoints of states.
    "a_rollback_forgets_the_convolution": Mutant(
        "tilewise/cache/spec.py", "StateSpec.convolution", "STATE_CHUNK + self.conv_width - 1",
        "self.conv_width - 1", ("tests/cache/test_states.py",),
    ),
    "a_checkpoint_is_of_the_tokens_behind_its_place": Mutant(
        "tilewise/cache/states.py", "StateStorage._rows", "positions.unsqueeze(1) + back",
        "positions.unsqueeze(1) + back + 1", ("tests/cache/test_states.py",),
    ),
    "a_fork_forgets_the_convolution": Mutant(
        "tilewise/cache/states.py", "StateStorage.fork",
        "for tensor in (*stack.recurrence, stack.convolution):", "for tensor in stack.recurrence:",
        ("tests/cache/test_states.py",),
    ),
    "a_checkpoint_is_shared_before_it_was_written": Mutant(
        "tilewise/engine/steps/runner.py", "ModelRunner._compute",
        "begin_states(self.storage.states, batch)",
        "end_states(self.storage.states, batch)\nbegin_states(self.storage.states, batch)\n"
        "batch = replace(batch, states=batch.states._replace(saves=()))",
        ("tests/engine/test_state_moves.py",),
    ),
    "a_part_of_a_step_restores_nothing": Mutant(
        "tilewise/engine/batch.py", "Batch.part",
        "states=self.states.of_slots({s.state_slot for s in sequences})", "states=NO_STATE_MOVES",
        ("tests/engine/test_state_moves.py",),
    ),
    "a_hit_needs_no_checkpoint": Mutant(
        "tilewise/engine/tables/holdings.py", "Holdings.__init__", "[*windows, 2]",
        "[*windows, 1]", ("tests/engine/test_state_tables.py",),
    ),
    "a_tail_stays_when_the_text_has_grown": Mutant(
        "tilewise/engine/tables/state_tables.py", "StateTables._put",
        "self._drop_tail(*before)", "pass", ("tests/engine/test_state_tables.py",),
    ),
    "the_slots_of_rows_that_do_not_run_stay": Mutant(
        "tilewise/engine/steps/state_moves.py", "FixedStates.write",
        "slots = np.full(bucket, -1, np.int64)", "slots = self.slots[:bucket].numpy().copy()",
        ("tests/engine/test_state_moves.py", "-k", "rows"),
    ),
    # States of several processes.
    "copies_of_states_are_not_told_to_workers": Mutant(
        _WIRE, "BatchReader.read", "StateMoves(*(tuple(map(tuple, moves)) for moves in states))",
        "StateMoves()", _TEST_WIRE,
    ),
    "workers_count_on_where_a_checkpoint_is_kept": Mutant(
        _WIRE, "_is_more", "any(batch.other_copies) or any(batch.states)",
        "any(batch.other_copies)", _TEST_WIRE,
    ),
    "workers_have_the_slots_of_the_step_before": Mutant(
        _WIRE, "BatchWriter._row", "run.state_slot", "-1", _TEST_WIRE,
    ),
    "a_rank_has_the_gates_of_mamba_in_place_of_its_values": Mutant(
        "tilewise/distributed/shards.py", "_rows_of_mixer", '"in_proj": (heads, *convolved, each)',
        '"in_proj": (*convolved, heads, each)', (*_TEST_CUT_STATES, "mamba2"),
    ),
    "a_rank_skips_by_all_heads_of_mamba": Mutant(
        "tilewise/distributed/shards.py", "_rows_of_mixer", '"d": (each,),',
        '"d": ((mixer.num_heads, 1, True),),', (*_TEST_CUT_STATES, "mamba2"),
    ),
    # Layers with states in models.
    "a_gate_is_read_as_the_query": Mutant(
        "tilewise/models/weight_table.py", "gate_rows", "for which in (1, 0)",
        "for which in (0, 1)", (*_TEST_STATE_FAMILIES, "probabilities and qwen3_5"),
    ),
    "a_gate_of_attention_is_left_out": Mutant(
        "tilewise/nn/attention.py", "Attention.forward",
        "o = self.gate(gate, o)", "pass",
        (*_TEST_STATE_FAMILIES, "probabilities and qwen3_next"),
    ),
    "a_mixer_beside_attention_is_left_out": Mutant(
        "tilewise/models/native.py", "NativeLayer._mixed", "o if mixed is None else mixed + o", "o",
        (*_TEST_STATE_FAMILIES, "probabilities and falcon_h1"),
    ),
    "a_step_begins_each_sequence_anew": Mutant(
        "tilewise/models/native.py", "NativeLayer._mixed", "starts=ctx.states.starts",
        "starts=ctx.states.starts * 0", (*_TEST_STATE_FAMILIES, "chunks and qwen3_5"),
    ),
    "keys_of_a_recurrence_have_any_length": Mutant(
        "tilewise/nn/gated_delta_net.py", "GatedDeltaNet.inputs",
        "(unit_length(part.unflatten(-1, (-1, config.key_dim))) for part in (q, k))",
        "(part.unflatten(-1, (-1, config.key_dim)) for part in (q, k))",
        (*_TEST_STATE_LAYERS, "transformers and qwen3_5"),
    ),
    "a_norm_is_before_the_gate_of_mamba": Mutant(
        "tilewise/nn/gated_norm.py", "GatedRMSNorm.forward", "if self.gate_first:", "if False:",
        (*_TEST_STATE_LAYERS, "transformers and bamba"),
    ),
    "a_shared_block_is_added_to_the_stream": Mutant(
        "tilewise/models/native.py", "NativeLayer._after_shared",
        "self._written(self._mixed(h, None, ctx, None, {}), None), stream",
        "self._written(self._mixed(h, None, ctx, None, {}), None), stream + beside",
        (*_TEST_STATE_FAMILIES, "probabilities and zamba2"),
    ),
    "a_shared_block_reads_the_stream_alone": Mutant(
        "tilewise/models/shared_block.py", "SharedBlock.forward",
        "torch.cat((stream, embedded), dim=-1)", "torch.cat((stream, stream), dim=-1)",
        (*_TEST_STATE_FAMILIES, "probabilities and zamba2"),
    ),
    "keys_of_a_shared_block_have_no_adapters": Mutant(
        "tilewise/models/shared_block.py", "SharedBlockTurn.of_heads",
        "(self.k_up, k)", "(self.k_up, 0 * k)", (*_TEST_STATE_FAMILIES, "probabilities and zamba2"),
    ),
    "attention_of_a_shared_block_has_no_adapters": Mutant(
        "tilewise/models/native.py", "NativeLayer.__init__",
        "config.hidden_size, own.shared, own.attention, own.feed_forward",
        "config.hidden_size, replace(own.shared, has_attention_adapters=False), own.attention,"
        " own.feed_forward", (*_TEST_STATE_FAMILIES, "probabilities and zamba2"),
    ),
    "time_steps_have_no_limits": Mutant(
        "tilewise/nn/mamba2.py", "Mamba2.mix", "config.dt_limits != (0.0, math.inf)", "False",
        (*_TEST_STATE_LAYERS, "transformers and bamba"),
    ),
    "what_decays_is_rounded_to_16_bits": Mutant(
        "tilewise/nn/states.py", "StateLayer._apply", "parameter.dtype.itemsize < 4", "False",
        (*_TEST_STATE_LAYERS, "bfloat16 and kimi"),
    ),
    "a_head_reads_the_state_as_the_token": Mutant(
        "tilewise/models/multi_token_head.py", "MultiTokenHead.forward",
        "torch.cat(both, dim=-1)", "torch.cat(both[::-1], dim=-1)",
        ("tests/engine/test_own_head.py", "-k", "one_more and Qwen3_5]"),
    ),
    "the_head_of_a_text_part_is_left_out": Mutant(
        "tilewise/models/text_part.py", "", '_PLAIN = ("lm_head.", "model.", "mtp.")',
        '_PLAIN = ("lm_head.", "model.")', ("tests/models/test_text_part.py", "-k", "tensors_have"),
    ),
    # The compiled step of a CPU, beside the modules.
    "a_layer_has_no_factor_in_a_compiled_step": Mutant(
        "tilewise/models/native_program.py", "_Writer._layer",
        "None if layer.token_gate is not None else scale", "None",
        (*_TEST_CPU_STEP, "gemma4 and experts and float32 and bits_of"),
    ),
    "queries_do_not_grow_in_a_compiled_step": Mutant(
        "tilewise/models/native_program.py", "_Writer._heads",
        "None if growth is None else step.Growth", "None if True else step.Growth",
        (*_TEST_CPU_STEP, "ministral3 and float32 and bits_of"),
    ),
    "keys_that_are_values_are_read_behind_them": Mutant(
        "tilewise/kernels/cpu/step/program.py", "Program.rotate",
        "op[K_AT if v_is_k else V_AT]", "op[V_AT]",
        (*_TEST_CPU_STEP, "gemma4 and experts and float32 and bits_of"),
    ),
    "chunks_are_windows_in_a_compiled_step": Mutant(
        "tilewise/kernels/cpu/step/program.py", "Program.attend",
        "op[CHUNK_KEYS] = window", "op[CHUNK_KEYS] = 0",
        (*_TEST_CPU_STEP, "llama4 and float32 and bits_of"),
    ),
    "experts_without_gates_have_one_on_a_gpu": Mutant(
        "tilewise/kernels/triton/experts/launch.py", "launch", "GATED=inner != outputs",
        "GATED=True", ("tests/ops/test_expert_mlp.py", "-k", "budget"),
    ),
    # How kernels of a stress are handed out.
    "nothing_runs_while_something_is_compiled": Mutant(
        "tests/kernels/stress_queue.py", "drive.hand_out", "left > LEAST and",
        'left > LEAST and not cases.count("warming") and',
        ("tests/lab/test_stress_kernels.py", "-k", "while_others_compile"),
    ),
}  # fmt: skip


def verdict(mutant: Mutant, root: Path) -> str:
    """Return "seen", "NOT SEEN" or what went wrong, of a mistake in the copy `root`."""
    kept = (root / mutant.file).read_text()
    try:
        mutant.plant(root)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests],
            cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True,
            timeout=_TIMEOUT_S,
        )  # fmt: skip
    except ValueError as error:
        return f"NOT PLANTED: {error}"
    except subprocess.TimeoutExpired:
        return "seen"  # a loop without end
    finally:
        (root / mutant.file).write_text(kept)
    if done.returncode == 1:  # of pytest: tests ran, and some failed
        return "seen"
    return "NOT SEEN" if done.returncode == 0 else f"NO RESULT\n{done.stdout[-2000:]}"


def main(arguments: list[str] | None = None) -> int:
    """Plant the mistakes whose names hold one of the words; return 0 if all are seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names; all mistakes without any")
    words = parser.parse_args(arguments).words
    names = [name for name in MUTANTS if not words or any(word in name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", ".venv*", ".cache", "*_cache", "__pycache__")
        shutil.copytree(ROOT, root, ignore=ignored)
        for name in names:
            found = verdict(MUTANTS[name], root)
            missed += found != "seen"
            print(f"{found:10}{name}", flush=True)
    print(f"{len(names) - missed} of {len(names)} mistakes are seen")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
