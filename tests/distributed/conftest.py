"""Four gloo processes for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    started = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()
