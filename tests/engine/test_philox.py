"""The counter-based generator gives the numbers of its paper, whatever is asked for beside them."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.engine.steps.philox import philox4x32, uniforms


def words(*values):
    return tuple(np.array([v], dtype=np.uint64) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_the_reference_implementation(counter, key, expected):
    assert tuple(int(w[0]) for w in philox4x32(words(*counter), words(*key))) == expected


def test_a_number_does_not_depend_on_its_neighbours():
    together = uniforms([3, 3, 9, -1, 2**64 + 3], [0, 5, 5, 2**40, 0])
    alone = [uniforms([s], [c])[0] for s, c in ((3, 0), (3, 5), (9, 5), (-1, 2**40), (3, 0))]
    assert together.tolist() == alone
    assert len(set(alone)) == 4  # only the seeds that agree in their low 64 bits agree


def test_numbers_are_uniform_along_seeds_and_along_counters():
    n = 100_000
    for u in (uniforms([7] * n, range(n)), uniforms(range(n), [7] * n)):
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.histogram(u, bins=100, range=(0, 1))[0]
        chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
        assert chi_square < 148.2  # 99.9th percentile of 99 degrees of freedom
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
