"""Requests made up from the server's own description: never a fault of the server, never a status that is not described."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance
from served import served, tiny_chat

from foredraft.serving import Settings, app

schema = schemathesis.openapi.from_dict(app(tiny_chat(), Settings(model="tiny")).openapi())


@pytest.fixture(scope="module")
def impatient():
    with served(tiny_chat(), max_body=100_000, request_timeout=0.5) as url:
        yield url


def test_the_description_is_whole():
    paths = schema.raw_schema["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health", "/metrics"} <= set(paths)
    assert all("422" not in operation["responses"] for path in paths.values() for operation in path.values())
    assert "temperature" in schema.raw_schema["components"]["schemas"]["ChatRequest"]["properties"]
    kinds = {path: set(paths[path]["post"]["responses"]["200"]["content"]) for path in ("/v1/completions", "/tokenize")}
    assert kinds == {"/v1/completions": {"application/json", "text/event-stream"}, "/tokenize": {"application/json"}}
    assert schema.raw_schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


HOW = {"deadline": None, "phases": [Phase.explicit, Phase.generate], "suppress_health_check": list(HealthCheck)}


def check(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url)
    late = response.status_code == 504  # a request may take half a second here
    case.validate_response(response, checks=[status_code_conformance] if late else [not_a_server_error, status_code_conformance])


@schema.parametrize()
@settings(max_examples=4, derandomize=True, **HOW)
def test_nothing_made_up_breaks_it(case: schemathesis.Case, impatient: str):
    check(case, impatient)


@pytest.mark.nightly
@schema.parametrize()
@settings(max_examples=200, **HOW)
def test_nothing_made_up_breaks_it_in_many_tries(case: schemathesis.Case, impatient: str):
    check(case, impatient)
