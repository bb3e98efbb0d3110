"""The page of recipes: what was measured, and what the clock says where nothing was."""

from __future__ import annotations

import pytest

from tilewise import cli
from tools.site import recipes
from tools.site.recipes import RECIPES, Recipe, fits, measured, simulated


def test_the_page_is_what_results_and_clock_say():
    page = recipes.PAGE.read_text(encoding="utf-8")
    assert recipes.written(page) == page, "python -m tools.site.recipes writes it"


@pytest.mark.parametrize("recipe", RECIPES, ids=[f"{r.model} on {r.hardware}" for r in RECIPES])
def test_a_recipe_is_either_measured_or_simulated_and_says_more_for_more_sequences(recipe):
    assert bool(recipe.result) != bool(recipe.profile)
    rates = measured(recipe) if recipe.result else simulated(recipe)
    assert len(rates) >= 2
    assert [rates[batch] for batch in sorted(rates)] == sorted(rates.values())
    words = ["serve", recipe.model, "--tensor-parallel-size", str(recipe.gpus)]
    assert cli._parser().parse_known_args(words)[1] == []


def test_a_model_without_room_has_no_rate():
    small = Recipe("x", "llama-3-70b", "1 H100", profile="h100")
    assert not fits(small, 1)
    assert simulated(small) == {}
    assert fits(small._replace(gpus=4), 32)
