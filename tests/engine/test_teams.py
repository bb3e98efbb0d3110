"""How many threads a step is given, from made-up times."""

from __future__ import annotations

from tilewise.engine.steps.teams import LATEST, SOONEST, STEPS, TRIAL, Teams


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


def nearly(best):
    """Seconds of each team, so alike that a trial takes all of its steps."""
    return lambda team: 1.0 + 0.3 * (team != best)


def test_both_teams_are_tried_in_turns_and_the_faster_is_kept():
    for faster in (1, 4):
        chosen = drive(Teams(), TRIAL + SOONEST, nearly(faster))
        assert chosen[:TRIAL] == [4, 4, 1, 1] * STEPS
        assert chosen[TRIAL:] == [faster] * SOONEST


def test_a_team_that_is_far_slower_is_given_up_sooner():
    for faster in (1, 4):
        chosen = drive(Teams(), 8 + SOONEST, lambda team, best=faster: 1.0 + (team != best))
        assert chosen == [4, 4, 1, 1] * 2 + [faster] * SOONEST


def test_a_slower_team_is_tried_ever_more_seldom():
    chosen = drive(Teams(), 20_000, nearly(1))
    ends, wait = [TRIAL], SOONEST
    while ends[-1] + wait + TRIAL < 20_000:
        ends.append(ends[-1] + wait + TRIAL)
        wait = min(2 * wait, LATEST)
    assert len(ends) < 13
    for end in ends:
        assert chosen[end - TRIAL : end] == [4, 4, 1, 1] * STEPS
    assert chosen[: ends[-1]].count(4) == 2 * STEPS * len(ends)


def test_a_team_that_becomes_faster_is_taken():
    teams = Teams()
    drive(teams, TRIAL + SOONEST, nearly(1))
    later = drive(teams, TRIAL + 20, nearly(4))
    assert later[TRIAL:] == [4] * 20


def test_steps_that_become_faster_by_themselves_are_fair_to_both():
    """As after a prompt, when pages and caches are new: steps take less and less."""
    for faster in (1, 4):
        teams, ages = Teams(), iter(range(10_000))

        def seconds(team, best=faster, ages=ages):
            return nearly(best)(team) * (1.0 + 0.6 * 0.8 ** next(ages))

        chosen = drive(teams, TRIAL + 20, seconds)
        assert chosen[TRIAL:] == [faster] * 20


def test_a_step_that_wakes_helpers_does_not_count():
    before = []

    def seconds(team):
        is_woken = team == 4 and before[-1:] != [4]
        before.append(team)
        return 9.0 if is_woken else nearly(4)(team)

    assert drive(Teams(), TRIAL + 20, seconds)[TRIAL:] == [4] * 20


def test_one_slow_step_changes_nothing():
    for slow in range(TRIAL + SOONEST):
        teams = Teams()
        drive(teams, slow, nearly(4))
        drive(teams, 1, lambda team: 100.0)
        drive(teams, TRIAL + SOONEST - slow - 1, nearly(4))
        chosen = drive(teams, TRIAL + SOONEST, nearly(4))
        assert set(chosen[TRIAL:]) == {4}


def test_times_of_a_team_that_was_not_chosen_do_not_count():
    teams = Teams()
    for _ in range(100):
        teams.record(5, 4, 3, 0.1)
        teams.record(5, 4, 1, 0.1)
    assert drive(teams, TRIAL + 5, nearly(4))[-1] == 4
