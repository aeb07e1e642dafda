"""Confined commands that attack what they must not reach, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crow.tools import CommandAccess
from crow.tools.workspace import DiskWorkspace
from tests.tools.confined import USERS, Place, as_user, available, run
from tests.tools.test_confinement import GIT

users = pytest.mark.parametrize("user", USERS)

SETUP = (
    f"{GIT} init -q && {GIT} commit -q --allow-empty -m one && mkdir .vscode sub empty && "
    "echo '{}' >.vscode/tasks.json && echo rules >AGENTS.md && ln -s AGENTS.md CLAUDE.md && "
    "echo rules >sub/AGENTS.md && ln -s .git/config shortcut && ln -s ../../outside escape && "
    "ln -s ../empty .git/modules && printf '#!/bin/sh\\n' >.git/hooks/pre-push"
)

WRITES = {
    "outside": "echo x >$OUTSIDE/file; rm -f $OUTSIDE/file; chmod 777 $OUTSIDE; touch $OUTSIDE/new",
    "through a link": "echo x >escape/file; echo x >>shortcut",
    "hard links": "ln $OUTSIDE/file a; ln .git/config b; ln AGENTS.md c; for f in [abc]; do echo x >>$f; rm $f; done",
    "git config": "git config alias.x '!sh'; echo x >>.git/config; cp /dev/null .git/config; rm -f .git/config",
    "git hooks": "echo x >.git/hooks/pre-push; echo x >.git/hooks/pre-commit; chmod +x .git/hooks/*; rm -rf .git/hooks",
    "git info": (
        "rm -rf .git/info; mv .git/info .git/i; mkdir -p .git/info; echo '* filter=x' >.git/info/attributes; "
        "echo x >>.git/info/exclude; echo x >.git/n; mv -f .git/n .git/info/exclude; rm -f .git/info/exclude .git/n; "
        "ln -s ../../escape/file .git/info/grafts"
    ),
    "renamed repository": "mv .git x; mv .git/hooks .git/old; mv .git/config .git/old; rm -rf x",
    "moved root": "cd ..; mv project p2; mkdir project; mkdir -p project/.git/hooks",
    "instructions": "echo x >>AGENTS.md; rm -f AGENTS.md; mv sub/AGENTS.md y; echo x >sub/AGENTS.md; rm -f y",
    "replaced link": "rm CLAUDE.md; echo x >CLAUDE.md",
    "editor settings": "rm -rf .vscode; mv .vscode v; echo x >.vscode/tasks.json; touch .vscode/extensions.json",
    "new files": "echo x >.envrc; echo x >.mcp.json; mkdir -p .husky empty/.git/hooks; echo x >.husky/p; rmdir empty",
    "new repository": "mkdir empty/objects empty/refs; echo 'ref: refs/heads/x' >empty/HEAD; echo x >empty/config",
    "mounts": (
        "umount .git/config; mount -o remount,bind,rw .git/config; mount --bind /tmp .git/hooks; unshare -Urm sh -c "
        "'umount .git/config; umount -l .git/config; mount -o remount,bind,rw .git/config; mount -o remount,rw /; "
        "echo x >>.git/config; echo x >>AGENTS.md; touch /usr/escaped'; touch /usr/escaped"
    ),
    "crow's own": "echo x >~/.config/crow/config.toml; rm -rf ~/.config; mkdir -p ~/.config/crow",
    "home": "echo x >~/.bashrc; echo x >>~/.ssh/authorized_keys",
    "system": "touch /etc/x /usr/escaped",
}

LANDLOCK_ALLOWS = ("outside", "renamed repository")
"""Attacks that Landlock alone does not stop: changed modes outside, and deleted parts of git that are not protected."""


def tree_of(base: Path) -> dict[str, str]:
    """Everything below a directory except for logs and objects of git."""
    found = {}
    for path in sorted(base.rglob("*")):
        name = str(path.relative_to(base))
        if name.startswith("caches") or any(part in path.parts for part in ("objects", "logs", "index")):
            continue
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = oct(path.stat().st_mode) + (path.read_text() if path.is_file() else "")
    return found


def existing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.lexists(path)]


async def attacked(workspace: DiskWorkspace, place: Place, attack: str) -> Any:
    """What an attack has changed, with the output of its commands. None if that is nothing."""
    (place.root / "empty").mkdir(exist_ok=True)
    before = tree_of(place.base)
    outputs = [await run(workspace, "write", WRITES[attack]), await run(workspace, "read", WRITES[attack])]
    after = tree_of(place.base)
    if attack == "new files":  # removing an ordinary directory is allowed
        assert before.pop("home/project/empty")
        after.pop("home/project/empty", None)
    if attack == "new repository":  # without HEAD it is none
        after = {path: state for path, state in after.items() if path in before or path.endswith("HEAD")}
        shutil.rmtree(place.root / "empty")
    escaped = existing(["/usr/escaped", "/etc/x"])
    return None if after == before and not escaped else [before, after, escaped, outputs]


@pytest.mark.long
@users
def test_a_write_changes_nothing_outside_and_nothing_protected(user: str) -> None:
    """The attacks run one after another, since none of them leaves anything to the next one."""

    async def scenario(place: Place) -> Any:
        os.environ["OUTSIDE"] = str(place.outside)
        workspace = place.open()
        assert (await run(workspace, "full", SETUP)) == (0, "")
        is_bubblewrap = (await workspace.sandbox_status()).name.startswith("bubblewrap")
        attacks = [attack for attack in WRITES if is_bubblewrap or attack not in LANDLOCK_ALLOWS]
        changes = {attack: await attacked(workspace, place, attack) for attack in attacks}
        before = tree_of(place.base)
        await workspace.close()
        changes["the end of the session"] = None if tree_of(place.base) == before else tree_of(place.base)
        return changes

    changes = as_user(user, scenario)
    assert {attack: change for attack, change in changes.items() if change is not None} == {}


READS = (
    "cat ~/.ssh/id_ed25519 ~/.config/crow/config.toml $OUTSIDE/secret; ls ~/.ssh ~/.config/crow",
    "for p in /proc/[0-9]*; do cat $p/root$HOME/.ssh/id_ed25519; cat $p/cwd/../.ssh/id_ed25519; done",
    "for f in /proc/[0-9]*/fd/*; do timeout 1 head -c 100 $f </dev/null & done; wait",
    "cat /proc/[0-9]*/environ | tr '\\0' '\\n'; cat /proc/[0-9]*/cmdline",
    "unshare -Urm sh -c 'umount -l $HOME; umount -lR /tmp; mount -t proc proc /proc; cat ~/.ssh/id_ed25519'",
    "cat ../.ssh/id_ed25519 ../../home/.ssh/id_ed25519; ln -s $HOME/.ssh keys; cat keys/id_ed25519; cat /etc/shadow",
)


@pytest.mark.long
@users
def test_no_secret_can_be_read(user: str) -> None:
    async def scenario(place: Place) -> Any:
        os.environ |= {"OUTSIDE": str(place.outside), "MY_TOKEN": "PRI" + "VATE", "OPENAI_API_KEY": "PRI" + "VATE"}
        (place.outside / "secret").write_text("PRIVATE")
        del os.environ["MY_TOKEN"]
        workspace = place.open()
        accesses: tuple[CommandAccess, ...] = ("read", "write")
        ended = await asyncio.gather(*(run(workspace, access, command) for access in accesses for command in READS))
        await workspace.close()
        return [output for _, output in ended]

    outputs = as_user(user, scenario)
    assert [output for output in outputs if "PRIVATE" in output or "root:" in output] == []


def test_hidden_places_stay_hidden_if_home_is_the_workspace() -> None:
    async def scenario(place: Place) -> Any:
        (place.home / "dotfiles").mkdir()
        (place.home / "dotfiles" / "netrc").write_text("PRIVATE")
        (place.home / "dotfiles" / "gitconfig").write_text("")
        for name in ("netrc", "gitconfig"):
            (place.home / f".{name}").symlink_to(place.home / "dotfiles" / name)
        workspace = place.open(place.home)
        results = []
        accesses: tuple[CommandAccess, ...] = ("read", "write")
        for access in accesses:
            _, output = await run(
                workspace,
                access,
                "cat .ssh/id_ed25519 .config/crow/config.toml .netrc dotfiles/netrc; rm -rf .ssh; chmod 777 .ssh; "
                "ls .ssh .config/crow; mv .config c2; echo x >.ssh/authorized_keys; "
                "echo x >.config/crow/config.toml; echo x >.bashrc",
            )
            results.append("PRIVATE" in output)
        kept = [(place.home / ".ssh/id_ed25519").read_text(), (place.own / "config.toml").read_text()]
        return results, kept, sorted(os.listdir(place.home / ".ssh")), (place.home / ".bashrc").exists()

    assert as_user(USERS[0], scenario) == [[False, False], ["PRIVATE", "PRIVATE"], ["id_ed25519"], False]


KERNEL = " ".join(
    (
        *("/sys", "/proc/irq", "/proc/sysrq-trigger", *(f"/proc/sys/{name}" for name in ("vm", "dev", "debug", "fs"))),
        *(f"/proc/sys/kernel/{name}" for name in ("core_pattern", "panic", "modprobe", "randomize_va_space")),
    )
)
"""Settings of the kernel. The rest of /proc/sys/kernel belongs to the command's own namespaces."""


@contextmanager
def listening(place: Place) -> Iterator[tuple[int, list[socket.socket]]]:
    """A TCP port, a socket in a directory that is readable, and an abstract socket."""
    servers = [socket.create_server(("127.0.0.1", 0))]
    for address in (str(place.home / "socket"), f"\0crow-test-{os.getpid()}"):
        servers.append(socket.socket(socket.AF_UNIX))
        servers[-1].bind(address)
        servers[-1].listen()
    try:
        yield servers[0].getsockname()[1], servers
    finally:
        for server in servers:
            server.close()


@users
def test_no_socket_of_the_machine_can_be_reached(user: str) -> None:
    async def scenario(place: Place) -> Any:
        with listening(place) as (port, servers):
            outputs = [
                await run(place.open(), "write", f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo connected"),
                await run(
                    place.open(),
                    "read",
                    "ls -A /run /var/run/ | grep -v '^/' | tr -d '\\n'; cat /proc/net/unix | wc -l",
                ),
            ]
            if available("perl"):
                script = (
                    "use Socket; for my $a (@ARGV) { $a =~ s/^@/\\0/; socket(my $s, AF_UNIX, SOCK_STREAM, 0); "
                    'print "connected\\n" if connect($s, pack_sockaddr_un($a)) }'
                )
                command = f"perl -e '{script}' {place.home}/socket @crow-test-{os.getpid()}"
                outputs.append(await run(place.open(), "write", command))
            reached = []
            for server in servers:
                server.setblocking(False)
                try:
                    server.accept()[0].close()
                    reached.append(True)
                except BlockingIOError:
                    reached.append(False)
        return outputs, reached

    outputs, reached = as_user(user, scenario, needs="bubblewrap")
    assert reached == [False, False, False]
    assert not any("connected" in output for _, output in outputs)
    assert outputs[1] == [0, "1\n"]


@pytest.mark.long
@users
def test_a_command_has_no_power_over_other_processes_or_the_kernel(user: str) -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        status = await run(workspace, "write", "grep -E '^(CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs)' /proc/self/status")
        commands = [
            f"kill -9 {os.getpid()}; kill -9 {os.getppid()}; kill -0 {os.getpid()} && echo reached",
            "mknod disk b 254 0 && echo reached; mknod kmsg c 1 11 && echo reached",
            "ls /dev/[svx]d* && echo reached; ls /dev/mem && echo reached; cat /proc/1/mem && echo reached",
            ": </dev/tty && echo reached; ls /dev/pts | grep -q '[0-9]' && echo reached",
            "chroot / true && echo reached; hostname other && echo reached; true",
            # opened, but nothing is written
            f"find {KERNEL} -maxdepth 4 -type f | grep -v mqueue | while read f; do : >>$f && echo reached $f; done",
            "unshare -Urmpf sh -c 'mkdir /tmp/p; mount -t proc p /tmp/p; : >>/tmp/p/sys/kernel/panic' && echo reached",
            "su -c 'echo reached' root </dev/null; sudo -n echo reached",
            "echo $$ >/sys/fs/cgroup/cgroup.procs && echo reached",
        ]
        outputs = [await run(workspace, "write", command) for command in commands]
        return status, [output for _, output in outputs if "reached" in output]

    status, reached = as_user(user, scenario, needs="bubblewrap")
    zero = "0" * 16
    assert status[1].split() == [
        *("CapPrm:", zero, "CapEff:", zero, "CapBnd:", zero, "CapAmb:", zero, "NoNewPrivs:", "1"),
    ]
    assert reached == []
