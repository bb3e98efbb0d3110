"""The model of reproducible sums: what it must give whatever its times are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.ordered_sums import FREE, Row, Times, costs, measured_rows, milliseconds, step_of

ROW = Row(128, 4096, False)


def test_steps_fill_the_measured_time() -> None:
    step = step_of(ROW, 2.0)
    taken = milliseconds(ROW, step, FREE, side_by_side=False, senders=4)
    assert taken == pytest.approx(2.0, rel=0.01)
    waves = ROW.heads * ROW.blocks / 132
    assert step == pytest.approx(2000 / waves / (ROW.n // ROW.tile), rel=0.1)


def test_one_sender_sets_the_pace_where_it_takes_longer_than_a_step() -> None:
    slow = Times(read=0.5, landed=2.0, fence=1.0, ask=1.0, see=0.5)
    one = milliseconds(ROW, 2.0, slow, side_by_side=True, senders=1)
    two = milliseconds(ROW, 2.0, slow, side_by_side=True, senders=2)
    free = milliseconds(ROW, 2.0, FREE, side_by_side=True, senders=1)
    assert one > 1.8 * free  # 4 us a tile
    assert two < 1.2 * free


def test_heads_launched_side_by_side_wait_less() -> None:
    found = costs(Row(64, 4096, False), 2.56)
    assert found["now"] > found["side by side"] + 0.2
    assert found["both"] < 1.1


def test_the_committed_rows_are_found() -> None:
    rows = measured_rows(json.loads(Path("lab/results/hopper_h200.json").read_text()))
    assert len(rows) == 12
    assert {row.d for row, _, _ in rows} == {64, 128}
    assert all(1.0 < cost < 1.4 for _, _, cost in rows)
