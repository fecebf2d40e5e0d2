"""What every test shares: the bed for several ranks, the searchers' profiles, one thread, one seed."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.bed import state
from tests.bed.plugin import *  # noqa: F403

torch.set_num_threads(1)
# A search by default is short and always the same; `make fuzz` goes on with new examples.
settings.register_profile("default", max_examples=50, derandomize=True, deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", max_examples=5000, deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random numbers."""
    state.seed()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Pass over the tests for an accelerator where there is none."""
    if item.get_closest_marker("device") and not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")


@pytest.fixture
def sequences(request: pytest.FixtureRequest) -> int:
    """How many random sequences of actions a test runs: none but under ``make fuzz``."""
    if request.config.getoption("--hypothesis-profile") != "fuzz":
        pytest.skip("for make fuzz")
    return 500
