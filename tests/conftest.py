"""Settings shared by all tests."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio import pytest_plugin
from hypothesis import HealthCheck, settings

from tests.support import memory
from tests.support.amounts import EXAMPLES

# On a busy machine, anything may take long.
settings.register_profile("crow", deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("crow")

_PR_SET_CHILD_SUBREAPER = 36

# The tests, and processes that they start, may keep what they compile. Otherwise, each process would compile all of
# crow again, and each worker would rewrite the assertions of all tests, which takes 20 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Options for this run are not meant for the pytest that tests start in a sandbox.
os.environ.pop("PYTEST_ADDOPTS", None)

# A shell starts what runs in its background without SIGINT, and all processes of the tests would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In the process only tasks may use anyio, not the callbacks of timers. The plugin would let them pass for tasks.
setattr(pytest_plugin, "set_current_async_library", lambda _: None)  # noqa: B010  not a public name


gc.disable()  # while tests are collected: all of that stays


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what stays until the end: it takes half a second to look at all tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def anyio_backend() -> str:
    """Everything runs on asyncio: the protocol's SDK does."""
    return "asyncio"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """The fixture of this name, but in memory if possible, and removed at the end of the test. On a disk, the suite
    waits for flushes and for the removal of small files."""
    with memory.new_directory() as path:
        yield path


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Undo what `start_logging` changes: it configures the whole process."""
    root, own = logging.getLogger(), logging.getLogger("crow")
    handlers, levels = root.handlers[:], (root.level, own.level)
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def adopts_no_orphans() -> Iterator[None]:
    """Undo what `adopt_orphans` changes. Otherwise, this process gets the orphans of later tests and never waits for
    them: they stay as zombies."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
