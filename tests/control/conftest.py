"""The environments of tests are registered."""

import pytest

from helpers import counting_environment, toy_envs


@pytest.fixture(autouse=True)
def _registered() -> None:
    counting_environment.register()
    toy_envs.register()
