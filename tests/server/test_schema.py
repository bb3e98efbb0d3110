"""The server's own schema, taken at its word by schemathesis: no 500, and answers as it says.

Needs schemathesis, of the extra `clients`.
"""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tilewise.server.live import live_router
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router
from tilewise.server.routes import admin_router

# These hold the engine, or never end.
LEFT_OUT = ("/pause", "/resume", "/v1/events")


def routers(service):
    makers = (admin_router, live_router, messages_router, responses_router)
    return [make(service) for make in makers]


@pytest.fixture(scope="module")
def running():
    # A short context: an answer has at most so many tokens.
    with serving(FakeEngine(max_model_len=48), routers=routers) as server:
        yield server


def check_all(running, examples, mode):
    """Send drawn requests to every route and compare the answers with the schema."""
    schemathesis = pytest.importorskip("schemathesis", reason="pip install 'tilewise[clients]'")
    checks = pytest.importorskip("schemathesis.checks")
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    modes = schemathesis.GenerationMode
    num_routes = 0
    for found in schema.exclude(path=list(LEFT_OUT)).get_all_operations():
        operation = found.ok()
        num_routes += 1
        if mode == "NEGATIVE" and "requestBody" not in operation.definition.raw:
            continue  # nothing that could be wrong, but for a number in a query

        @settings(
            max_examples=examples, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate],
        )  # fmt: skip
        @given(operation.as_strategy(generation_mode=getattr(modes, mode)))
        def check(case):
            # A schema cannot say every rule: what it allows may still be refused with 400.
            excluded = [checks.positive_data_acceptance]
            answer = case.call(timeout=20)
            if answer.status_code == 504:
                # Its own deadline, which has passed: the only 5xx that a request can ask for.
                assert case.body["timeout"] < 20
                excluded.append(checks.not_a_server_error)
            case.validate_response(answer, excluded_checks=excluded)

        check()
    assert num_routes >= 18


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_drawn_requests_are_answered_as_the_schema_says(running, mode):
    check_all(running, 10, mode)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_many_drawn_requests_are_answered_as_the_schema_says(running, mode):
    check_all(running, 1000, mode)


def test_every_route_says_what_it_answers(running):
    told = httpx.get(f"{running.url}/openapi.json").json()
    assert set(LEFT_OUT) < set(told["paths"])
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            assert set(operation["responses"]) == {"200", "default"}, (method, path)
            reads = method == "post" and path not in ("/pause", "/resume", "/reset_prefix_cache")
            assert ("requestBody" in operation) == reads, (method, path)
    assert "$ref" not in str(told)
