"""What crow says about errors of the system."""

from __future__ import annotations

import errno
import ssl

import pytest

from crow.domain.errors import lacks_memory


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (ssl.SSLError("[CRYPTO] malloc failure (_ssl.c:3098)"), True),
        (ssl.SSLError("[SSL] certificate verify failed"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("cannot schedule new futures"), False),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (ImportError("No module named 'x'"), False),
        (SystemError("error return without exception set"), True),
        (SystemError("bad argument to internal function"), False),
        (ExceptionGroup("a task group", [ValueError("x"), ExceptionGroup("another", [MemoryError()])]), True),
        (ExceptionGroup("a task group", [ValueError("x")]), False),
    ],
)
def test_a_lack_of_memory_is_recognised_in_each_form(error: Exception, is_lack: bool) -> None:
    assert lacks_memory(error) == is_lack
