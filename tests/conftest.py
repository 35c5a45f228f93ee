"""Fixtures and settings for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from inflight.layers.native.library import native_library

if TYPE_CHECKING:
    from tests.support.browser import Page

# Tests press Ctrl-C, which a shell switches off for jobs in the background and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# And they send SIGHUP to servers, which `nohup` switches off for all that it starts.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# What tests have frozen is taken apart at the end as ever: some libraries complain about what is left.
atexit.register(gc.unfreeze)

# Machines that run tests are busy and slow at times: that is no failure. Those of CI draw the same examples each time,
# so that a change is not judged by luck; all others explore.
settings.register_profile(
    "tests",
    max_examples=40,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # it shares out the tests, and runs none
        native_library()  # before workers start, each of which would build it
    else:
        interpret_kernels()


def interpret_kernels() -> None:
    """Run kernels in Triton's interpreter, on the CPU, if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when it is imported
        from tests.support.interpreter import repeat_less

        repeat_less()


# Files with a test of half a minute, most of it waiting: no process should begin one last, when the others are done.
# There are few of them, since nothing is computed while all processes wait.
LONG = ("router/ray_cluster/", "server/test_soak")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))


# Folders whose files share engines or runs that take seconds to make: one worker has all of a folder.
TOGETHER = ("tests/bench/compare/", "tests/server/faults/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    def place(nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])

    if config.getvalue("dist") != "loadfile":
        return None
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = place
    return scheduler


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests often wait, for a process to start or for a limit of time to pass."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """Exclude the million objects of imported packages from garbage collection, which takes half a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The tensors here are so small that handing work to torch's threads takes longer than the work. Nor do engines in
    processes of their own share it, with cores that others use; the compiled library in this one does."""
    import torch

    native_library()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def patient_trials() -> Iterator[None]:
    """Trials of grammars are bounded by their CPU time alone, however busy this machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inflight.constraints.validator.WALL_SECONDS", 3600.0)
        yield


@pytest.fixture(scope="session")
def tab() -> Iterator[Page]:
    """The one browser of all tests of pages. Take `page` instead."""
    from tests.support.browser import browser

    with browser() as opened:
        yield opened


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """A tab that must not complain."""
    tab.problems.clear()
    tab.show_as("light")
    yield tab
    tab.leave()
    assert not tab.problems
