"""Cases of the stress beside attention's tables: Hopper's products, and the largest logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.kernels.kernel_stress import Prepared, Results

PRODUCTS = ((1, 1024, 1024), (9, 4096, 1000), (64, 776, 200), (33, 200, 40))
MANY = ((70, 776, 264), (300, 1024, 512))


def _product(tile: Any, rows: int, channels: int, outputs: int) -> Prepared:
    from tests.kernels.gluon.test_linear import make_product
    from tilewise.kernels.gluon.step import linear

    x, weight, bias = (t.cuda() for t in make_product(rows, channels, outputs))
    return Prepared(lambda: {"y": linear.launch(x, weight, bias, tile)})


def _product_of_many(tile: Any, rows: int, channels: int, outputs: int) -> Prepared:
    from tests.kernels.gluon.test_linear import make_product
    from tilewise.kernels.gluon.step import invariant_linear

    x, weight, bias = (t.cuda() for t in make_product(rows, channels, outputs))
    return Prepared(lambda: {"y": invariant_linear.launch_many(x, weight, bias, tile)})


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

    def lazily(make: Callable[..., Prepared], *arguments: Any) -> Callable[[], Prepared]:
        return lambda: make(*arguments)

    for name, tile in test_linear.TILES.items():
        for shape in PRODUCTS:
            yield f"products/{name}_{'_'.join(map(str, shape))}", lazily(_product, tile, *shape)
    for name, tile in test_invariant_linear.TILES.items():
        for shape in MANY:
            title = f"products_of_many/{name}_{'_'.join(map(str, shape))}"
            yield title, lazily(_product_of_many, tile, *shape)
    for name in test_max_logits.CALLS:
        yield f"largest_logits/{name}", lazily(_largest_logits, name)
