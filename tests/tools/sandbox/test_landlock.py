"""Attacks from commands that Landlock confines, and what must go on working. As this user and, for root, as nobody."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crow.tools.sandbox import Confinement
from crow.tools.sandbox.landlock import Landlock, landlock_abi

PROBLEM = Landlock().probe()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "Landlock works")
NOBODY = 65534
USERS = [os.geteuid()] + ([NOBODY] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])
X86 = platform.machine() == "x86_64"


def find_python() -> str:
    """A Python that every user can run."""
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        folders = [folder for folder in Path(path).parents if folder.exists()]
        if os.path.exists(path) and all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders):
            return path
    return sys.executable


PYTHON = find_python()


class Host:
    """A process in crow's place, and the directories of a user.

    home is masked, and home/tools in it is readable, except for home/tools/hidden. workspace is what the command works
    on. Everything else, such as outside, can be read.
    """

    def __init__(self, user: int, base: Path) -> None:
        self.user = user
        self.base = base
        for name in ("workspace", "temporary", "outside", "home/.ssh", "home/tools"):
            (base / name).mkdir(parents=True)
        for name in ("home/.ssh/id", "home/tools/hidden"):
            (base / name).write_text("SECRET")
        (base / "home/tools/program").write_text("#!/bin/sh\necho it runs\n")
        (base / "home/tools/program").chmod(0o755)
        (base / "outside/file").write_text("outside")
        (base / "workspace/file").write_text("inside")
        (base / "workspace/link").symlink_to(base / "home")
        (base / "home/tools/link").symlink_to(base / "home/.ssh")
        for folder, folders, files in os.walk(base):
            for name in (".", *folders, *files):
                os.chown(os.path.join(folder, name), user, user if user == NOBODY else -1, follow_symlinks=False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.sandbox.host", str(user)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "TOKEN": "SECRET"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def run(
        self, script: str, access: str = "read", *, has_network: bool = False, abi: int = 0, more: Any = None
    ) -> tuple[int, str]:
        """Run a confined shell script in the workspace."""
        base, workspace = str(self.base), str(self.base / "workspace")
        paths = {
            "masked": [f"{base}/home"],
            "readable": [f"{base}/home/tools", workspace],
            "writable": [workspace] if access == "write" else [],
            "hidden": [f"{base}/home/tools/hidden"],
        }
        answer = self.ask(
            {
                "argv": ["/bin/bash", "-c", script],
                "access": access,
                "cwd": workspace,
                "env": {
                    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                    "HOME": f"{base}/home",
                    "TMPDIR": f"{base}/temporary",
                    "BASE": base,
                    "CROW": str(self.process.pid),
                    "PYTHON": PYTHON,
                    "LC_ALL": "C",
                },
                "has_network": has_network,
                "abi": abi,
                "temporary": f"{base}/temporary",
                "paths": paths | (more or {}),
            }
        )
        assert isinstance(answer, list), answer
        return answer[0], answer[1]

    def python(self, code: str, access: str = "read", **options: Any) -> tuple[int, str]:
        """Run confined Python code, which has `call`: a system call that returns the error's number or 0."""
        return self.run(f"exec $PYTHON -c {quoted(PRELUDE + textwrap.dedent(code))}", access, **options)


PRELUDE = """
import ctypes, errno, os, socket, sys
base, crow = os.environ["BASE"], int(os.environ["CROW"])
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(*arguments):
    plain = [ctypes.c_long(it) if isinstance(it, int) else it for it in arguments]
    return ctypes.get_errno() if libc.syscall(*plain) < 0 else 0
def attempt(function, *arguments):
    try:
        print("done", function(*arguments))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@pytest.fixture(scope="module", params=USERS, ids=lambda user: "nobody" if user == NOBODY else "this user")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    base = Path(os.path.realpath(tempfile.mkdtemp(prefix="crow-test-")))
    base.chmod(0o755)
    host = Host(request.param, base)
    with host.process:
        yield host
        host.process.communicate(timeout=120)
    shutil.rmtree(base)
    assert host.process.returncode == 0, "an attack ended crow's process"


READS = {
    "a masked file": "cat $BASE/home/.ssh/id",
    "a masked directory": "ls -A $BASE/home; ls -A $BASE/home/.ssh",
    "a hidden file": "cat $BASE/home/tools/hidden",
    "a device": ": < /dev/ptmx && echo SECRET; ls /dev | sed s/^/SECRET/; : < /dev/ptmx",
    "through a link beside a hidden file": "cat $BASE/home/tools/link/id",
    "a hidden file by another spelling": "cat $BASE/home/tools/../tools/./hidden",
    "through a link that was there": "cat link/.ssh/id",
    "through a new link": "ln -s $BASE/home $TMPDIR/l; cat $TMPDIR/l/.ssh/id",
    "through /proc/self/root": "cat /proc/self/root$BASE/home/.ssh/id",
    "through /proc/self/cwd": "cat /proc/self/cwd/../home/.ssh/id",
    "by a working directory": "cd $BASE/home/.ssh && cat id",
    "by a hard link": "ln $BASE/home/.ssh/id $TMPDIR/h; cat $TMPDIR/h",
    "by a hard link to what is hidden": "ln $BASE/home/tools/hidden $TMPDIR/h; cat $TMPDIR/h",
    "by moving it": "mv $BASE/home/.ssh $TMPDIR/s; cat $TMPDIR/s/id",
    "by moving what is hidden": "mv $BASE/home/tools/hidden $TMPDIR/s; cat $TMPDIR/s",
    "by moving the directory above": "mv $BASE/home/tools $TMPDIR/t; cat $TMPDIR/t/hidden",
    "crow's environment": "tr '\\0' '\\n' < /proc/$CROW/environ; tr '\\0' '\\n' < /proc/$PPID/environ",
    "crow's root directory": "cat /proc/$CROW/root$BASE/home/.ssh/id",
    "crow's working directory": "ls /proc/$CROW/cwd/; ls -l /proc/$CROW/fd/",
    "crow's memory": "head -c 10 /proc/$CROW/mem; cat /proc/$CROW/maps && echo SECRET",
    "in a user namespace": "unshare -Ur cat $BASE/home/.ssh/id",
    "in a mount namespace": "unshare -Urm sh -c 'mount --bind $BASE/home $BASE/outside; cat $BASE/outside/.ssh/id'",
    "by chroot": "chroot $BASE/home /bin/cat /.ssh/id; chroot / cat $BASE/home/.ssh/id",
    "by a process that left the group": "setsid --wait cat $BASE/home/.ssh/id",
    "by a shell of its own": "exec -a sh bash -c 'cat $BASE/home/.ssh/id'",
}


@pytest.mark.long
@pytest.mark.parametrize("script", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("access", ["read", "write"])
def test_no_command_reads_what_is_masked_or_hidden(host: Host, access: str, script: str) -> None:
    code, output = host.run(script, access)
    assert "SECRET" not in output
    assert code != 0
    assert host.ask({"secret": f"{host.base}/home/.ssh/id"})["secret"] == "SECRET"


WRITES = {
    "a new file": "echo x > $BASE/outside/new",
    "an existing file": "echo x >> $BASE/outside/file",
    "by truncation": "truncate -s 0 $BASE/outside/file",
    "removal": "rm $BASE/outside/file",
    "a new directory": "mkdir $BASE/outside/new",
    "a new link": "ln -s x $BASE/outside/new",
    "a pipe": "mkfifo $BASE/outside/new",
    "a move within": "mv $BASE/outside/file $BASE/outside/new",
    "a move out of the workspace": "mv file $BASE/outside/new",
    "a move into the workspace": "mv $BASE/outside/file $TMPDIR/moved",
    "a hard link that brings it in": "ln $BASE/outside/file $TMPDIR/in && echo x > $TMPDIR/in",
    "a link that is followed": "ln -s $BASE/outside/file $TMPDIR/s; echo x > $TMPDIR/s",
    "a descriptor opened again": "exec 5< $BASE/outside/file; echo x > /proc/self/fd/5",
    "through /proc/self/root": "echo x > /proc/self/root$BASE/outside/file",
    "the workspace's place": "mv $BASE/workspace $BASE/moved",
    "below /proc": "echo 1000 > /proc/$CROW/oom_score_adj",
    "settings of the kernel": "cat /proc/sys/vm/swappiness > /proc/sys/vm/swappiness",
    "a device": "mknod $TMPDIR/d b 7 0",
    "another terminal": "for t in /dev/pts/[0-9]* /dev/console; do echo x > $t && exit; done; false",
    "a masked place": "echo x > $BASE/home/.bashrc",
    "in a namespace": "unshare -Urm sh -c 'mount -t tmpfs none $BASE/outside && echo x > $BASE/outside/new'",
    "by tar": "tar -cf - file | tar -xf - -C $BASE/outside",
}


@pytest.mark.long
@pytest.mark.parametrize("script", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("access", ["read", "write"])
def test_no_command_writes_outside_of_the_workspace(host: Host, access: str, script: str) -> None:
    code, output = host.run(script, access)
    assert code != 0, output
    assert (host.base / "outside/file").read_text() == "outside"
    assert sorted(os.listdir(host.base / "outside")) == ["file"]
    assert sorted(os.listdir(host.base)) == ["home", "outside", "temporary", "workspace"]
    assert sorted(os.listdir(host.base / "home")) == [".ssh", "tools"]


CHANGES = {
    "writing": "echo x > file",
    "creating": "touch new; test -e new",
    "removing": "rm file",
    "renaming": "mv file other",
    "the mode": "chmod 777 file",
    "the mode by a descriptor": "$PYTHON -c 'import os; os.fchmod(os.open(\"file\", 0), 0o777)'",
    "the owner": "chown $(id -u):$(id -g) file",
    "an attribute": '$PYTHON -c \'import os; os.setxattr("file", "user.x", b"y")\'',
}


@pytest.mark.parametrize("script", CHANGES.values(), ids=CHANGES.keys())
def test_a_read_command_changes_nothing_in_the_workspace(host: Host, script: str) -> None:
    file = host.base / "workspace/file"
    before = file.stat()
    code, output = host.run(script)
    after = file.stat()
    assert code != 0, output
    assert (file.read_text(), after.st_mode, after.st_ctime_ns) == ("inside", before.st_mode, before.st_ctime_ns)
    assert sorted(os.listdir(host.base / "workspace")) == ["file", "link"]


def test_a_file_that_is_opened_for_reading_cannot_be_truncated(host: Host) -> None:
    for abi in (0, 1):
        code = """
            attempt(os.open, base + "/outside/file", os.O_RDONLY | os.O_TRUNC)
            attempt(os.truncate, base + "/outside/file", 0)
            print(call(437, -100, b"/dev/null", b"\\0" * 24, 24) == errno.ENOSYS)
        """
        output = host.python(code, abi=abi)[1].split()
        assert "done" not in output
        assert output[-1] == "True"
        assert (host.base / "outside/file").read_text() == "outside"


def test_the_oldest_landlock_confines_too(host: Host) -> None:
    for script in (READS["a masked file"], READS["by moving it"], WRITES["a new file"], WRITES["a move within"]):
        for access in ("read", "write"):
            code, output = host.run(script, access, abi=1)
            assert code != 0
            assert "SECRET" not in output
    assert host.run("echo x > new && cat new && rm new", "write", abi=1) == (0, "x\n")


def test_what_may_be_read_can_be_read_and_run(host: Host) -> None:
    assert host.run("cat $BASE/outside/file; $BASE/home/tools/program; cat file") == (0, "outsideit runs\ninside")
    assert host.run("ls $BASE/workspace; ls /usr > /dev/null; cat /etc/passwd > /dev/null") == (0, "file\nlink\n")


def test_nothing_is_inherited_from_crow_and_crow_loses_nothing(host: Host) -> None:
    secret = f"{host.base}/home/.ssh/id"
    before = host.ask({"secret": secret})
    handle = host.ask({"open": secret})
    code, output = host.run(f"cat <&{handle}; cat /proc/self/fd/{handle}; cat /dev/fd/{handle}")
    assert code != 0
    assert "SECRET" not in output
    assert host.ask({"secret": secret}) == before
    assert "NoNewPrivs:\t0" in before["limits"]
    status = host.run("grep -E 'NoNewPrivs|CapEff|CapPrm|CapAmb|Seccomp:' /proc/self/status")[1].split("\n")
    nothing = "0" * 16
    assert status[:5] == [f"CapPrm:\t{nothing}", f"CapEff:\t{nothing}", f"CapAmb:\t{nothing}", *status[3:5]]
    assert status[3:5] == ["NoNewPrivs:\t1", "Seccomp:\t2"]


def test_a_set_user_id_program_gives_no_rights(host: Host) -> None:
    if USERS[0] != 0:
        pytest.skip("needs root to make such a program")
    program = host.base / "setuid"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    try:
        assert host.run(f"{program} -u") == (0, f"{host.user}\n")
    finally:
        program.unlink()


@pytest.mark.skipif(landlock_abi() < 6, reason="this kernel's Landlock does not scope signals")
def test_crow_and_its_limits_are_out_of_reach(host: Host) -> None:
    assert host.run("kill -9 $CROW || kill -9 $PPID || kill -STOP $CROW || kill -9 -- -1 || exit 3")[0] == 3
    code = """
        import resource, signal
        attempt(resource.prlimit, crow, resource.RLIMIT_CPU, (0, 0))
        attempt(resource.prlimit, os.getppid(), resource.RLIMIT_NOFILE, (0, 0))
        attempt(signal.pidfd_send_signal, os.pidfd_open(crow), signal.SIGKILL)
    """
    assert host.python(code) == (0, "EPERM\n" * 3)
    assert host.python("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); print(1)") == (0, "1\n")


def test_crow_cannot_be_traced_but_children_can(host: Host) -> None:
    attach, read = (101, 310) if X86 else (117, 270)
    code = f"""
        print(call({attach}, 16, crow, 0, 0) == errno.EPERM, call({attach}, 0x4206, crow, 0, 0) == errno.EPERM)
        here = ctypes.create_string_buffer(8)
        local = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
        remote = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
        print(call({read}, crow, local, 1, remote, 1, 0) == errno.EPERM)
        print(call({read}, os.getpid(), local, 1, remote, 1, 0))
    """
    assert host.python(code) == (0, "True True\nTrue\n0\n")


def test_dangerous_system_calls_are_refused(host: Host) -> None:
    numbers = {"keyctl": (250, 219), "add_key": (248, 217), "bpf": (321, 280), "perf_event_open": (298, 241)}
    numbers |= {"userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)}
    numbers |= {"setns": (308, 268), "open_by_handle_at": (304, 265), "mount": (165, 40), "fsopen": (430, 430)}
    numbers |= {"open_tree": (428, 428), "move_mount": (429, 429), "init_module": (175, 105)}
    column = 0 if X86 else 1
    calls = [pair[column] for pair in numbers.values()]
    unshare = 272 if X86 else 97
    clone = 56 if X86 else 220
    code = f"""
        print(set(call(number, 0, 0, 0, 0, 0) for number in {calls}))
        print(call({unshare}, 0x10000000), call({unshare}, 0x10020000), call({clone}, 0x10000011, 0, 0, 0, 0))
        print(call(435, 0, 0) == errno.ENOSYS)
        import fcntl
        attempt(fcntl.ioctl, 0, 0x5412, b"x")
        attempt(fcntl.ioctl, 0, 0x541C, b"x")
    """
    assert host.python(code) == (0, "{1}\n1 1 1\nTrue\nEPERM\nEPERM\n")


@pytest.mark.skipif(not X86, reason="x32 is a variant of x86_64")
def test_the_numbers_of_another_calling_convention_lead_nowhere(host: Host) -> None:
    assert host.python("print(call(0x40000000 | 41, 2, 1, 0) == errno.ENOSYS)") == (0, "True\n")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to make a call by int 0x80")
    source = 'int main(void){int r;__asm__ volatile("int $0x80":"=a"(r):"a"(20));return r<0;}'
    code, _ = host.run(f"echo {quoted(source)} > $TMPDIR/a.c && gcc -o $TMPDIR/a $TMPDIR/a.c && $TMPDIR/a", "write")
    assert code in (159, -31), "SIGSYS"


FAMILIES = """
attempt(socket.socket, socket.AF_INET)
attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
attempt(socket.socket, socket.AF_INET6)
attempt(socket.socket, socket.AF_INET, socket.SOCK_STREAM, 262)
attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
attempt(socket.socket, socket.AF_UNIX)
attempt(socket.socket, socket.AF_UNIX, socket.SOCK_DGRAM)
attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
attempt(socket.socket, socket.AF_VSOCK)
attempt(socket.socket, 38, socket.SOCK_SEQPACKET)
attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 9)
"""


def test_a_command_has_no_sockets_without_network(host: Host) -> None:
    assert host.python(FAMILIES, "write")[1].split() == ["ENETUNREACH"] * 11
    assert host.python("a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1)); print(len(socket.if_nameindex()))")[
        1
    ].startswith("b'x'\n")


def test_a_pair_of_datagram_sockets_leads_to_no_other_socket(host: Host) -> None:
    path = host.base / "outside" / "datagrams"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        path.chmod(0o777)
        code = f"""
            for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC):
                attempt(lambda: socket.socketpair(socket.AF_UNIX, kind)[0].connect({str(path)!r}))
            attempt(lambda: print(len(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))))
        """
        assert host.python(code, "write", has_network=True)[1].split() == [*["ENETUNREACH"] * 3, "2", "done", "None"]
        path.unlink()


def test_a_command_with_network_has_internet_sockets_only(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        port = server.getsockname()[1]
        code, output = host.python(
            f"{FAMILIES}\nsocket.create_connection(('127.0.0.1', {port})).send(b'hello')", "write", has_network=True
        )
        assert code == 0, output
        connection, _ = server.accept()
        with connection:
            assert connection.recv(5) == b"hello"
    refused = output.split("\n")
    assert [line.split()[0] for line in refused[:3]] == ["done"] * 3
    assert refused[5:11] == ["ENETUNREACH"] * 6


def test_unix_sockets_of_others_cannot_be_reached(host: Host) -> None:
    path = host.base / "outside" / "socket"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(str(path))
        path.chmod(0o777)
        server.listen()
        abstract.bind(f"\0crow-test-{os.getpid()}")
        abstract.listen()
        code = f"""
            for name in ({str(path)!r}, "\\0crow-test-{os.getpid()}"):
                try:
                    socket.socket(socket.AF_UNIX).connect(name)
                except OSError as error:
                    print(errno.errorcode[error.errno])
        """
        assert host.python(code, "write", has_network=True) == (0, "ENETUNREACH\n" * 2)
        path.unlink()


def test_landlock_alone_refuses_tcp_abstract_sockets_and_signals() -> None:
    """The rules hold even if the filter did not exist."""
    if landlock_abi() < 6:
        pytest.skip("needs Landlock of Linux 6.12")
    script = f"""
import ctypes, os, socket, threading
from pathlib import Path
from crow.tools.sandbox import landlock
landlock.landlock_filter = lambda *a, **b: bytes.fromhex("0600000000" "00ff7f")
server = socket.create_server(("127.0.0.1", 0))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0crow-test-{os.getpid()}")
abstract.listen()
def run():
    from crow.tools.sandbox import Confinement
    landlock.Landlock()._restrict_thread(Confinement(access="read", temporary=Path("/nowhere")))
    for connect in (
        lambda: socket.create_connection(server.getsockname()),
        lambda: socket.create_server(("127.0.0.1", 0)),
        lambda: socket.socket(socket.AF_UNIX).connect("\\0crow-test-{os.getpid()}"),
        lambda: os.kill({os.getpid()}, 0),
    ):
        try:
            connect()
            print("done")
        except OSError as error:
            print(error.errno)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout.split() == ["13", "13", "1", "1"], found.stderr


def test_hidden_places_appear_and_vanish_between_two_commands(host: Host) -> None:
    assert host.run("cat $BASE/home/tools/program > /dev/null")[0] == 0
    new = host.base / "home/tools/new"
    new.write_text("new")
    new.chmod(0o644)
    try:
        assert host.run("cat $BASE/home/tools/new") == (0, "new")
        assert host.run("cat $BASE/home/tools/hidden")[0] != 0
    finally:
        new.unlink()


def test_a_workspace_that_became_a_link_gives_no_access(host: Host) -> None:
    victim = host.base / "temporary" / "sub"
    code, output = host.run("ln -s $BASE/home $TMPDIR/sub", "write")
    assert (code, victim.is_symlink()) == (0, True), output
    try:
        for access in ("read", "write"):
            script = "cat $BASE/home/.ssh/id; echo x > $TMPDIR/sub/.bashrc"
            code, output = host.run(script, access, more={"readable": [str(victim)], "writable": [str(victim)]})
            assert code != 0
            assert "SECRET" not in output
            code, output = host.run(
                script, access, more={"readable": [f"{victim}/.ssh"], "writable": [f"{victim}/.ssh"]}
            )
            assert "SECRET" not in output
    finally:
        victim.unlink()


def test_paths_that_do_not_exist_are_left_out(host: Host) -> None:
    assert host.run("echo works", more={"masked": ["/no/such"], "readable": ["/none"], "hidden": ["/x/y"]}) == (
        0,
        "works\n",
    )


def test_a_writable_home_keeps_its_hidden_places(host: Host) -> None:
    home = str(host.base / "home")
    more = {"masked": [home], "readable": [], "writable": [home], "hidden": [f"{home}/.ssh"]}
    code, output = host.run("echo x > $HOME/tools/new && rm $HOME/tools/new; cat $HOME/.ssh/id", "write", more=more)
    assert code != 0
    assert "SECRET" not in output
    assert host.run("mv $HOME/.ssh $HOME/tools/; mv $HOME/tools $HOME/t2", "write", more=more)[0] != 0
    assert (host.base / "home/.ssh/id").read_text() == "SECRET"


def test_what_is_below_a_hidden_place_stays_hidden_although_it_is_named(host: Host) -> None:
    home = str(host.base / "home")
    below = [f"{home}/.ssh/id"]  # as the git directory of a repository in a denied folder
    more = {"readable": below, "writable": [home, *below], "hidden": [f"{home}/.ssh"]}
    for access in ("read", "write"):
        code, output = host.run("cat $HOME/.ssh/id", access, more=more)
        assert code != 0
        assert "SECRET" not in output
    more = {"writable": [home, *below], "fixed": [f"{home}/.ssh"]}
    assert host.run("cat $HOME/.ssh/id && echo x > $HOME/.ssh/id", "write", more=more)[0] != 0
    assert (host.base / "home/.ssh/id").read_text() == "SECRET"


WORKS = {
    "git": """
        git init -q repo && cd repo && git config user.email a@example.org && git config user.name a && echo a > a &&
        git add a && git commit -qm one && git checkout -qb topic && git mv a b && git commit -qam two &&
        git stash list && git log --oneline | wc -l
    """,
    "make gcc": """
        printf 'main(){return 0;}' > a.c && printf 'a: a.c\\n\\tgcc -w -o a a.c\\n' > Makefile &&
        make -s && ./a && echo 2
    """,
    "python3": """
        $PYTHON -c 'import multiprocessing as m, shutil; shutil.copy("file", "copy"); q = m.Queue();
        q.put(sum(m.Pool(2).map(abs, [-1, 1]))); print(q.get())'
    """,
    "node": 'node -e \'require("child_process").exec("echo 2", (e, out) => console.log(out.trim()))\'',
    "bash": """
        cat <(echo 2) <<< b; echo x | tee >(cat > copy) | cat > /dev/null; mktemp > /dev/null; echo -n > /dev/stdout
    """,
    "strace": "strace -f -o trace sh -c '/bin/true; /bin/true' && grep -c 'execve(./bin/true' trace",
    "gdb gcc": """
        printf 'main(){return 2;}' > g.c && gcc -w -g -o g g.c && gdb -batch -ex run ./g 2>&1 | grep -o '2]$' | tr -d ]
    """,
    "sed cp tar": "sed -i s/inside/2/ file && cp -a file other && tar -cf t other && tar -xf t && cat file",
}


@pytest.mark.long
@pytest.mark.parametrize("name", WORKS)
def test_what_must_go_on_working_in_the_workspace(host: Host, name: str) -> None:
    for tool in name.split():
        if shutil.which(tool, path="/usr/local/bin:/usr/bin:/bin") is None:
            pytest.skip(f"needs {tool}")
    workspace = host.base / "workspace"
    try:
        code, output = host.run(textwrap.dedent(WORKS[name]).strip(), "write")
        assert (code, output.strip()) == (0, "2")
    finally:
        for entry in os.listdir(workspace):
            if entry not in ("file", "link"):
                path = workspace / entry
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (workspace / "file").write_text("inside")
        os.chown(workspace / "file", host.user, -1)


def test_read_commands_can_use_temporary_files_and_pipes(host: Host) -> None:
    script = "echo a > $TMPDIR/a && cat < $TMPDIR/a | sort && rm $TMPDIR/a && git -C / --version > /dev/null"
    assert host.run(script) == (0, "a\n")


def test_a_kernel_without_landlock_starts_nothing(tmp_path: Path) -> None:
    sandbox = Landlock(abi=0)
    with pytest.raises(OSError, match="Landlock does not work on this system") as raised:
        sandbox._restrict_thread(Confinement(access="read", temporary=tmp_path))
    assert raised.value.errno == errno.EOPNOTSUPP
    assert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 0, "this thread may still gain privileges"
