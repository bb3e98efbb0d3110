"""Failures that other engines and servers had, and the test of each that would have found it here.

56 classes of failures of vLLM, SGLang, transformers, nano-vllm, mini-sglang, llama.cpp and others,
from their issues and security advisories (read 2026-11-20, those from 49 on 2026-11-28). What
cannot happen here says why.
docs/design/failures.md has these tests beside the server's own (`tests/server/test_failures.py`).
"""

from __future__ import annotations

import ast
import functools
import re
import tracemalloc
from pathlib import Path

import pytest

from tests.engine.simulator import VirtualModel
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler

ROOT = Path(__file__).parents[1]
E, S, C = "tests/engine/test_", "tests/server/test_", "tests/cache/test_"

FAILURES: dict[int, tuple[str, tuple[str, ...]]] = {
    # Liveness
    1: ("a request larger than the cache, within the context, waits for ever",
        (E + "scheduler.py::test_a_request_larger_than_the_cache_is_refused_with_the_numbers",)),
    2: ("few blocks hang the engine",
        (E + "scheduler_simulation.py::test_any_schedule_gives_the_tokens_of_a_request_alone",)),
    3: ("a block that nobody may use is counted as room",
        (E + "scheduler.py::test_a_request_of_exactly_the_cache_ends_and_uses_every_block",)),
    4: ("those that run and those that are skipped fill the seats for ever",
        (E + "scheduler.py::test_more_samples_than_seats_run_in_turns",
         E + "scheduler.py::test_who_waits_for_a_block_keeps_nobody_else_waiting")),
    5: ("a request waits for blocks from elsewhere that never come",
        (E + "host_cache.py::test_a_transfer_that_fails_ends_nobody_and_what_did_not_move_is_"
         "computed_again",)),
    6: ("the same in engines made from others",
        (E + "tier_simulation.py::test_any_schedule_gives_the_tokens_of_a_request_alone",)),
    7: ("health is good while the engine hangs",
        (S + "lifecycle.py::test_health_is_bad_when_work_is_there_and_no_step_ends",)),
    8: ("a request larger than the pool kills the thread and all its neighbours",
        (E + "scheduler.py::test_a_refused_request_hurts_nobody",)),
    9: ("a prompt that is too long is dropped and its client waits",
        (E + "async_llm.py::test_a_very_long_prompt_is_refused_like_a_short_one",
         S + "story.py::test_what_can_never_fit_is_refused_with_the_numbers")),
    10: ("full swap space kills the engine",
         (E + "swap_space.py::test_a_full_swap_space_falls_to_recomputing",)),
    # Leaks
    11: ("main memory grows with the requests served",
         ("tests/test_failures_of_others.py::test_nothing_is_kept_of_requests_that_ended",
          E + "cpu_step.py::test_memory_does_not_grow_with_the_lengths_of_prompts")),
    12: ("a leak of blocks is found when the server dies of it",
         (E + "scheduler_simulation.py::test_any_schedule_gives_the_tokens_of_a_request_alone",
          C + "allocator.py::test_damage_is_named")),
    13: ("a client that leaves is computed for, or its abort kills the engine",
         (S + "lifecycle.py::test_a_client_that_leaves_ends_its_work_at_once",
          S + "lifecycle.py::test_clients_that_leave_stall_and_abort_leave_nothing_behind",
          E + "scheduler.py::test_an_abort_in_flight_drops_its_results_and_keeps_those_of_others")),
    # Preemption and overlap
    14: ("blocks are freed while a step reads them, or tokens that are on their way are counted "
         "twice",
         (E + "scheduler.py::test_who_lacks_a_block_waits_for_those_of_an_unfinished_step",
          E + "scheduler.py::test_a_stop_found_late_drops_one_run_and_shows_nothing_of_it",
          E + "device_runner.py::test_log_probabilities_that_are_read_late_are_those_of_their_step",
          E + "planted_mistakes.py::test_a_planted_mistake_shows")),
    15: ("who is preempted loses its place",
         (E + "scheduler.py::test_a_preempted_request_keeps_its_place_in_the_queue",)),
    16: ("penalties and drafts together crash",
         (E + "speculative.py::test_guesses_beside_swapped_and_adjusted_requests_change_nothing",)),
    # Memory at the start
    17: ("free memory is counted wrong at the start",
         (E + "sizing.py::test_a_cache_gets_what_step_and_graphs_leave",
          E + "sizing.py::test_what_does_not_fit_is_refused_with_the_sizes")),
    # Prefix cache
    18: ("prompts are made that collide",
         (C + "prefix.py::test_colliding_hashes_do_not_share",)),
    19: ("a salt is taken for something else of the key",
         (C + "prefix.py::test_a_salt_cannot_pose_as_a_block",
          S + "keys_and_limits.py::test_salts_of_different_callers_never_collide")),
    20: ("a hash without a secret collides",
         (C + "prefix.py::test_colliding_hashes_do_not_share",)),
    21: ("a collision gives wrong keys in silence",
         (C + "prefix.py::test_colliding_hashes_do_not_share",)),
    22: ("a hash of integers is taken for the tokens",
         (C + "prefix.py::test_the_boundaries_of_tokens_are_part_of_the_key",)),
    23: ("times tell whose prompts are cached",
         (S + "keys_and_limits.py::test_a_keys_identity_salts_the_cache_and_names_the_user",
          E + "scheduler.py::test_a_prompt_finds_nothing_in_part_of_its_first_block_or_across_"
          "salts")),
    # What is read from others
    **dict.fromkeys(
        range(24, 33),
        ("objects of others are unpickled, or come over an open socket",
         ("tests/test_failures_of_others.py::test_nothing_is_unpickled_and_no_socket_takes_objects",
          E + "block_files.py::test_a_torn_file_is_a_miss")),
    ),
    # Templates
    33: ("arguments of a template change what the server does",
         (S + "templates.py::test_arguments_of_a_template_may_not_replace_messages",)),
    34: ("a client's template runs without end",
         (S + "templates.py::test_a_requests_own_template_needs_permission",
          S + "templates.py::test_a_template_that_does_wrong_is_an_error_and_the_next_one_works")),
    35: ("a model's template runs code",
         (S + "templates.py::test_a_template_that_does_wrong_is_an_error_and_the_next_one_works",)),
    # Requests that cost too much
    36: ("n is huge", (E + "request.py::test_values_out_of_range_are_refused_by_name",)),
    37: ("best_of is huge", (E + "request.py::test_values_out_of_range_are_refused_by_name",)),
    38: ("an empty prompt kills the server",
         (E + "scheduler.py::test_an_empty_prompt_is_refused",)),
    39: ("a huge header", (S + "lifecycle.py::test_headers_over_the_limit_are_431",)),
    40: ("a wrong schema, expression or tool crashes",
         (E + "sampling_options.py::test_descriptions_that_do_not_compile_are_refused_and_others_"
          "go_on", S + "chat_tools.py::test_what_is_wrong_with_tools_is_named")),
    41: ("compiled grammars fill the disk: here they are kept nowhere",
         ("tests/test_failures_of_others.py::test_grammars_are_not_kept_on_disk",)),
    42: ("a huge choice or a deep grammar exhausts the stack",
         (E + "request.py::test_descriptions_of_a_text_are_checked",
          E + "sampling_options.py::test_descriptions_that_do_not_compile_are_refused_and_others_"
          "go_on")),
    43: ("log-probabilities of a prompt exhaust the memory",
         (E + "sampling_options.py::test_prompts_are_scored_in_slices_of_bounded_memory",
          E + "request.py::test_values_out_of_range_are_refused_by_name")),
    44: ("a field out of its range reaches the engine",
         (E + "request.py::test_values_of_the_wrong_type_are_refused_by_name",
          S + "openai_client.py::test_what_is_wrong_is_named")),
    45: ("images and videos exhaust the memory: there are none, and fields for them are refused",
         (S + "openai_client.py::test_what_is_wrong_is_named",)),
    46: ("a number of tokens to drop from a context is trusted: there is no such field",
         (S + "openai_client.py::test_what_is_wrong_is_named",)),
    # Keys
    47: ("keys are compared in a time that tells of them",
         (S + "keys_and_limits.py::test_a_ring_finds_keys_and_nothing_else",)),
    48: ("a key guards some routes only",
         (S + "keys_and_limits.py::test_every_route_but_two_needs_a_key",)),
    # Of 2026
    49: ("a checkpoint's config names modules or kernels, which are run",
         (E + "odd_checkpoints.py::test_a_checkpoint_runs_nothing_that_it_names",)),
    50: ("a Host header moves the path that is looked at",
         (S + "browsers.py::test_a_host_header_moves_no_path",)),
    51: ("a salt keeps the model's cache apart, and not the draft model's",
         (E + "speculative.py::test_a_draft_model_has_nothing_that_a_request_of_another_salt_has_"
          "left",)),
    52: ("a schema that compiles for hours holds every compiler",
         (E + "trials.py::test_a_description_without_an_end_is_ended_and_known_from_then_on",
          E + "trials.py::test_one_process_is_left_for_others")),
    53: ("a body of many small things holds the event loop",
         (S + "bodies.py::test_a_body_that_holds_too_much_is_refused_before_it_is_parsed",
          S + "bodies.py::test_no_body_holds_the_event_loop")),
    54: ("bodies of many clients fill the memory",
         (S + "bodies.py::test_room_for_bodies_is_bounded_shared_and_given_back",)),
    55: ("a process that is started in a folder imports what lies there",
         ("tests/test_children.py::test_a_template_is_rendered_by_modules_of_this_environment",
          "tests/test_children.py::test_every_process_has_the_environment_that_forbids_it")),
    56: ("a file of weights names files elsewhere",
         ("tests/models/test_weights.py::test_an_index_names_no_file_outside_of_its_folder",)),
}  # fmt: skip


@functools.cache
def functions_of(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {n.name for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_failure_has_a_test_that_exists():
    assert sorted(FAILURES) == list(range(1, 57))
    for number, (_, tests) in FAILURES.items():
        for test in tests:
            path, name = test.split("::")
            known = functions_of(ROOT / path)
            assert any(each.startswith(name) for each in known), f"{number}: {test}"


def test_nothing_is_unpickled_and_no_socket_takes_objects():
    """Weights are safetensors, or pickles of which only tensors are taken; requests are JSON.

    Cached blocks are files with a checksum.

    Objects go to the processes that compile kernels alone, and come by the pipes of a parent.
    """
    with_children = {
        ROOT / "tilewise/kernels/host" / name
        for name in ("compile_worker.py", "requests.py", "side_by_side.py")
    }
    unsafe = re.compile(r"^\s*(import|from) (pickle|cloudpickle|dill|shelve|marshal|zmq)\b", re.M)
    loads = re.compile(
        r"\b(joblib\.load|read_pickle)\(|\bnp\.load\((?!.*allow_pickle=False)"
        r"|\btorch\.load\((?!.*weights_only=True)"
    )
    for path in sorted((ROOT / "tilewise").rglob("*.py")):
        text = path.read_text()
        code = "\n".join(line.split("#")[0] for line in text.splitlines())
        assert bool(unsafe.search(code)) == (path in with_children), path
        assert path not in with_children or not re.search(r"\bsocket\b", code), path
        assert not loads.search(code), path


def test_grammars_are_not_kept_on_disk():
    for name in ("structured.py", "sampling_options.py", "trials.py"):
        text = (ROOT / "tilewise/engine" / name).read_text().replace('open("/proc/self/statm")', "")
        assert not re.search(r"\b(open|diskcache|write_bytes|write_text|mkdir)\(", text)


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_kept_of_requests_that_ended(overlap):
    """The memory of a scheduler that has served 1,600 requests is that of one that served 1,000."""
    scheduler = Scheduler(
        40, 4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_swap_blocks=20,
        max_in_flight=1 + overlap, scheduling_policy="fair",
    )  # fmt: skip
    scheduler.trace.capacity = 500
    model, unfinished = VirtualModel(scheduler), []

    def serve(first: int, last: int) -> None:
        for number in range(first, last, 10):
            for i in range(number, number + 10):
                prompt = [i % 5, *range(i % 11), i % 7]
                scheduler.add(Request(
                    f"r{i}", prompt, SamplingParams(max_tokens=3, n=1 + i % 2, seed=i),
                    user=f"u{i % 40}", salt=str(i % 3), deadline_s=1000.0 if i % 3 else None,
                ))  # fmt: skip
                if i % 13 == 0:
                    scheduler.abort(f"r{i}")
            while scheduler.has_unfinished() or unfinished:
                while len(unfinished) < scheduler.max_in_flight:
                    batch = scheduler.schedule()
                    if batch is None:
                        break
                    model.submit(batch)
                    unfinished.append(batch)
                if unfinished:
                    batch = unfinished.pop(0)
                    scheduler.update(batch, model.result(batch))
        model.tables.clear()  # the model's own

    tracemalloc.start()
    try:
        serve(0, 1000)
        before, _ = tracemalloc.get_traced_memory()
        serve(1000, 1600)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 60_000, f"{(after - before) / 600:.0f} bytes a request stay"
