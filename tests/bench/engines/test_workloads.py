"""The workloads are drawn as their sources draw them."""

from __future__ import annotations

from tilewise.bench.engines import workloads


def test_nanos_requests_have_the_published_number_of_tokens():
    found = workloads.nano()
    assert (len(found.prompts), found.tokens_in, found.tokens_out) == (256, 142_827, 133_966)
    lengths = [*map(len, found.prompts), *found.new_tokens]
    assert (min(lengths), max(lengths)) >= (100, 1000)
    assert max(lengths) <= 1024
    assert max(map(max, found.prompts)) <= 10_000
    assert (found.temperature, found.max_num_seqs, found.n) == (0.6, 256, 1)


def test_fixed_prompts_share_no_first_block_and_stay_in_the_vocabulary():
    found = workloads.fixed(64, 32, 5, vocab_size=300)
    assert len({tuple(prompt[:16]) for prompt in found.prompts}) == 64
    assert {len(prompt) for prompt in found.prompts} == {32}
    assert 10 <= min(map(min, found.prompts)) <= max(map(max, found.prompts)) < 300
    assert (found.tokens_in, found.tokens_out, found.max_len) == (64 * 32, 64 * 5, 37)


def test_samples_count_every_sample():
    found = workloads.samples()
    assert (len(found.prompts), found.n, found.tokens_in) == (128, 1024, 128 * 256)
    assert found.tokens_out == 128 * 1024 * 128
    assert found.max_num_seqs == 4096
    assert workloads.samples(prompts=1, n=8).max_num_seqs == 8


def test_a_request_says_all_that_a_worker_needs():
    asked = workloads.fixed(2, 3, 4, vocab_size=100).as_request()
    assert asked["do"] == "generate"
    assert (asked["new_tokens"], asked["temperature"], asked["n"]) == ([4, 4], 0.0, 1)
