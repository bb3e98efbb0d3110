"""A plan that fails, made small: what can be left out is, as long as something is still wrong."""

from __future__ import annotations

from tests.simulation.plan import Plan, smaller
from tests.simulation.world import play

MOST_TRIES = 300


def why_fails(plan: Plan) -> str | None:
    """Return what is wrong with a plan, None if nothing is."""
    try:
        play(plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def minimised(plan: Plan) -> tuple[Plan, str]:
    """Return a plan from which nothing can be left out, and what is wrong with it.

    Raises:
        ValueError: nothing is wrong with the plan.
    """
    why = why_fails(plan)
    if why is None:
        raise ValueError(f"plan must fail to be made small, got one that passes, seed {plan.seed}")
    tries = 0
    while tries < MOST_TRIES:
        for one in smaller(plan):
            tries += 1
            found = why_fails(one)
            if found is not None:
                plan, why = one, found
                break
        else:
            break
    return plan, why


def report(plan: Plan) -> str:
    """Return the story of a plan that fails, small, with what runs it again."""
    small, why = minimised(plan)
    lines = [f"seed {plan.seed}: {why}", f"again: python -m tests.simulation {plan.seed}"]
    lines += [f"  settings {small.settings}"]
    lines += [f"  process {small.process}, ranks {small.num_ranks}, step {small.step_s} s"]
    lines += [f"  {client}" for client in small.clients]
    lines += [f"  {event}" for event in small.events]
    return "\n".join(lines)
