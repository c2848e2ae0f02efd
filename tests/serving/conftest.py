import pytest
from served import served, tiny_chat


@pytest.fixture(scope="session")
def url():
    """A server of the tiny chat model."""
    with served(tiny_chat(), request_metrics=True, max_body=100_000) as address:
        yield address
