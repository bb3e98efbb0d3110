"""Cases of the stress beside attention's tables: Hopper's products, and the largest logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from tests.kernels.kernel_stress import Prepared, Results

PRODUCTS = ((1, 1024, 1024), (9, 4096, 1000), (64, 776, 200), (33, 200, 40))
MANY = ((70, 776, 264), (300, 1024, 512))


def _product(launch: Callable[..., Tensor], tile: Any, shape: tuple[int, int, int]) -> Prepared:
    from tests.kernels.gluon.test_linear import make_product

    x, weight, bias = (t.cuda() for t in make_product(*shape))
    return Prepared(lambda: {"y": launch(x, weight, bias, tile)})


def _largest_logits(name: str) -> Prepared:
    from tests.kernels.attention_problem import make_problem
    from tests.kernels.gluon.test_max_logits import CALLS
    from tests.kernels.planned import hopper_results

    p = make_problem(CALLS[name], "cuda")
    spec = p.spec._replace(needs_max=True)

    def run() -> Results:
        found = hopper_results(p.q, p.k, p.v, spec, **p.tensors)
        return {
            name: x for name, x in zip(("o", "lse", "max"), found, strict=True) if x is not None
        }

    return Prepared(run)


def step_cases() -> Iterator[tuple[str, Callable[[], Prepared]]]:
    """Yield "family/name" and what prepares the case."""
    from tests.kernels.gluon import test_invariant_linear, test_linear, test_max_logits
    from tilewise.kernels.gluon.step import invariant_linear, linear

    families = (
        ("products", linear.launch, test_linear.TILES, PRODUCTS),
        ("products_of_many", invariant_linear.launch_many, test_invariant_linear.TILES, MANY),
    )
    for family, launch, tiles, shapes in families:
        for name, tile in tiles.items():
            for shape in shapes:
                title = f"{family}/{name}_{'_'.join(map(str, shape))}"
                yield title, partial(_product, launch, tile, shape)
    for name in test_max_logits.CALLS:
        yield f"largest_logits/{name}", partial(_largest_logits, name)
