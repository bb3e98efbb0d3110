"""How many threads a step is given, from made-up times."""

from __future__ import annotations

from tilewise.engine.teams import LATEST, SOONEST, STEPS, Teams


def drive(teams, steps, seconds_of):
    """Run so many steps of which each team takes seconds_of(team); return the teams chosen."""
    chosen = []
    for _ in range(steps):
        team = teams.choose(5, 4)
        teams.record(5, 4, team, seconds_of(team))
        chosen.append(team)
    return chosen


def test_one_thread_is_never_asked_about():
    teams = Teams()
    assert teams.choose(3, 1) == 1
    teams.record(3, 1, 1, 1.0)
    assert teams.choose(3, 1) == 1


def test_both_teams_are_tried_and_the_faster_is_kept():
    for faster in (1, 4):
        chosen = drive(Teams(), 2 * STEPS + 20, lambda team, best=faster: 1.0 + (team != best))
        assert sorted(set(chosen[: 2 * STEPS])) == [1, 4]
        assert set(chosen[2 * STEPS :]) == {faster}


def test_a_slower_team_is_tried_ever_more_seldom():
    chosen = drive(Teams(), 20_000, lambda team: float(team))
    trials = chosen[2 * STEPS :].count(4)
    rounds = 0
    wait, total = SOONEST, 0
    while total + wait < 20_000:
        total, rounds, wait = total + wait, rounds + 1, min(2 * wait, LATEST)
    assert trials <= STEPS * rounds
    assert trials >= STEPS * (rounds - 1)


def test_a_team_that_becomes_faster_is_taken():
    teams = Teams()
    drive(teams, 50, lambda team: float(team))
    later = drive(teams, SOONEST + 20, lambda team: 1.0 / team)
    assert later[-1] == 4


def test_one_slow_step_changes_nothing():
    teams = Teams()
    drive(teams, 20, lambda team: 1.0 / team)
    drive(teams, 1, lambda team: 100.0)
    assert set(drive(teams, 20, lambda team: 1.0 / team)) == {4}
