"""The helper that works in the namespaces of commands: it opens sockets there, and refreshes mounted layers.

It is a process of its own, because only a process with a single thread may enter a user namespace. It uses only the
standard library. For each request that it reads, it forks a child. The child enters the namespaces of a process, does
what the request asks for, and answers. The helper ends when crow closes the connection.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys

_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWNS = 0x10000000, 0x40000000, 0x20000
_MS_REMOUNT = 32
_NS_GET_USERNS = 0xB701
_IP_FREEBIND = 15
_BACKLOG = 128
_REQUEST_BYTES = 100_000


def _enter(libc: ctypes.CDLL, pid: int, kind: str, flag: int) -> None:
    """Enter a namespace of a process, and before that the user namespace that owns it. `kind` is the namespace's name
    in /proc/PID/ns, and `flag` the constant for `setns`.

    :raises OSError: the process has no such namespace of its own, or the kernel refused.
    """
    namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    if _is_shared(pid, kind):
        raise OSError(f"process {pid} has no namespace {kind} of its own")
    owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    if os.fstat(owner).st_ino != os.stat("/proc/self/ns/user").st_ino and libc.setns(owner, _CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "setns to the user namespace")
    if libc.setns(namespace, flag):
        raise OSError(ctypes.get_errno(), f"setns to the namespace {kind}")


def _is_shared(pid: int, kind: str) -> bool:
    """Return whether a process is in the same namespace of this kind as this process."""
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino


def _refresh(libc: ctypes.CDLL, pid: int, roots: list[bytes]) -> None:
    """Mount the overlays at `roots` again for the command whose first process is `pid`. If a file in the tree below an
    overlay is replaced, the overlay shows the old version of the file until it is mounted again.

    :raises OSError: the namespace cannot be entered, or the kernel refused to mount.
    """
    if _is_shared(pid, "mnt"):  # bubblewrap has mounted the layers in the namespace of its child
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
            pid = int(children.read().split()[0])
    _enter(libc, pid, "mnt", _CLONE_NEWNS)
    for root in roots:
        if libc.mount(b"overlay", root, None, _MS_REMOUNT, None):
            raise OSError(ctypes.get_errno(), "remount")


def _send_listener(connection: socket.socket, port: int) -> None:
    """Open a listening socket in the current network namespace and send it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_IP, _IP_FREEBIND, 1)  # the loopback interface may not be up yet
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
        socket.send_fds(connection, [b"\0"], [listener.fileno()])


def main() -> None:
    """Serve requests on the socket whose number is the first argument.

    The answer to `listen PID PORT` is a listening socket, and the answer to `refresh PID ROOT...` is a zero byte. Zero
    bytes separate the parts of a request. Any other answer is an error message.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    libc = ctypes.CDLL(None, use_errno=True)
    while request := connection.recv(_REQUEST_BYTES):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            what, pid, *more = request.split(b"\0")
            if what == b"refresh":
                _refresh(libc, int(pid), more)
                connection.send(b"\0")
            else:
                _enter(libc, int(pid), "net", _CLONE_NEWNET)
                _send_listener(connection, int(more[0]))
        except (OSError, ValueError, IndexError) as error:
            connection.send(str(error).encode()[:200])
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
