"""What tests of the laboratory share with those of benches."""

from tests.bench.conftest import _environment_of_before, timed_once

__all__ = ["_environment_of_before", "timed_once"]
