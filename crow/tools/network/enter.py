"""The helper that opens listening sockets in the network namespaces of commands.

A process of its own with nothing but the standard library, because only a process with one thread may enter a user
namespace. For each process id that it reads, it forks a child, which enters the namespaces of this process, opens a
socket there and sends it back. It ends when crow closes the connection.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NS_GET_USERNS = 0xB701
IP_FREEBIND = 15
BACKLOG = 128


def enter(libc: ctypes.CDLL, pid: int) -> None:
    """Enter the network namespace of a process, and first the user namespace that owns it. :raises OSError: this is not
    possible."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if os.fstat(network).st_ino == os.stat("/proc/self/ns/net").st_ino:
        raise OSError(f"process {pid} has no network namespace of its own")
    owner = fcntl.ioctl(network, NS_GET_USERNS)
    if os.fstat(owner).st_ino != os.stat("/proc/self/ns/user").st_ino and libc.setns(owner, CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "setns to the user namespace")
    if libc.setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns to the network namespace")


def send_listener(connection: socket.socket, port: int) -> None:
    """Open a listening socket in the current network namespace and send it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_IP, IP_FREEBIND, 1)  # the loopback interface may not be up yet
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
        socket.send_fds(connection, [b"\0"], [listener.fileno()])


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    libc = ctypes.CDLL(None, use_errno=True)
    while request := connection.recv(64):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            pid, port = map(int, request.split())
            enter(libc, pid)
            send_listener(connection, port)
        except (OSError, ValueError) as error:
            connection.send(str(error).encode()[:200])
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
