"""What one command has compiled, the next one reads."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(compiled_once: None) -> None:
    pass
