"""The pytest side: tests marked with ``ranks`` run in the workers, all others in this process."""

from __future__ import annotations

import inspect

import pytest

from tests.bed.job import Job
from tests.bed.pool import Bed, describe

__all__ = ["bed", "pytest_configure", "pytest_generate_tests", "pytest_pyfunc_call", "pytest_unconfigure",
           "rank"]

_BED = pytest.StashKey[Bed]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BED] = Bed()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_BED].close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each world size."""
    if marker := metafunc.definition.get_closest_marker("ranks"):
        if "world" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world")
        metafunc.parametrize("world", marker.args, ids=[f"{count}ranks" for count in marker.args])


@pytest.fixture
def bed(request: pytest.FixtureRequest) -> Bed:
    """The session's pools, for the tests of the bed itself."""
    return request.config.stash[_BED]


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> None:
    """Filled in by each worker; only a test marked with ``ranks`` has one."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("a test that takes `rank` needs @ranks(…)", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks, in place of a call here."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    filters = [*pyfuncitem.config.getini("filterwarnings"),
               *(line for mark in pyfuncitem.iter_markers("filterwarnings") for line in mark.args)]
    job = Job.of(pyfuncitem.function, arguments, filters)
    world = pyfuncitem.callspec.params["world"]
    reports = pyfuncitem.config.stash[_BED].run(world, job, marker.kwargs.get("timeout", 90.0))
    if any(report.outcome not in ("passed", "skipped") for report in reports):
        pytest.fail(describe(reports), pytrace=False)
    if skipped := [report for report in reports if report.outcome == "skipped"]:
        pytest.skip(skipped[0].text)
    return True
