"""Servers with tokens, and a crow that is started as a child process."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from pathlib import Path

from tests.crow import SECRETS, Crow, bridge, configure, fork_server, serving
from tests.hook import Hook
from tests.ports import free_port


async def test_users_are_principals_and_see_only_what_is_shared_with_them(tmp_path: Path) -> None:
    roots = tmp_path / "roots"
    for name in ("ann", "bob"):
        (roots / name).mkdir(parents=True)
    with serving(tmp_path, f'[serve]\nroots = ["{roots}/{{principal}}"]\n') as crow:
        tokens = {f"TOKEN_{name}": crow.command("serve", "token", "add", name).split()[-1] for name in ("ann", "bob")}
        principals = "".join(
            f'[principals.{name}]\ntoken_env = "TOKEN_{name}"\ncwd = "{roots}/{name}"\n' for name in ("ann", "bob")
        )
        async with Hook() as hook:
            port = free_port()
            chats = hook.settings("team", port).replace('bob = "ann"', 'bob = "bob"')
            async with bridge(configure(tmp_path, crow, chats, principals), SECRETS | tokens):
                await hook.write(port, "1", "say mine", place="ours")
                await hook.wait(lambda: hook.texts("ours") == ["mine"])
                await hook.write(port, "2", "say hi", user="bob", place="ours")
                await hook.wait(lambda: len(hook.texts("ours")) == 2)
                refused = hook.texts("ours")[1]
                assert refused.startswith("⚠ The session of this channel belongs to ann.")
                session = refused.split()[-3]
                assert refused.endswith(f"`crow sessions share {session} bob --write`")
                await asyncio.to_thread(crow.command, "sessions", "share", session, "bob", "--write")
                await hook.write(port, "3", "summarise", user="bob", place="ours")
                await hook.wait(lambda: "say mine" in hook.texts("ours")[-1])
                await hook.write(port, "4", "say his", user="bob", place="his")
                await hook.wait(lambda: hook.texts("his") == ["his"])
        owners = dict(crow.rows("SELECT alias, principal FROM sessions WHERE alias IS NOT NULL"))
        assert owners == {"team:ours": "ann", "team:his": "bob"}


async def test_a_crow_of_its_own_is_started_again_and_its_answer_found(crow: Crow, tmp_path: Path) -> None:
    """The child process has no cursors, so the answer of an interrupted turn comes from the whole history."""
    pids, wrapper = tmp_path / "pids", tmp_path / "wrapper"
    wrapper.write_text(
        f'#!/bin/sh\necho $$ >> {pids}\nenv | grep -c "TOKEN\\|SECRET" > {tmp_path}/secrets\n'
        f"CROW_HOME={tmp_path}/home CROW_MODEL=offline exec {shlex.join(fork_server.command())} acp\n"
    )
    wrapper.chmod(0o700)
    os.environ["HOOK_SECRET"] = SECRETS["HOOK_SECRET"]
    try:
        async with Hook() as hook:
            port = free_port()
            path = configure(
                tmp_path,
                crow,
                hook.settings("child", port, "edits = true"),
                server=f"command = {json.dumps([str(wrapper)])}",
            )
            async with bridge(path):
                await hook.write(port, "1", "say one")
                await hook.wait(lambda: hook.texts() == ["one"])
                await hook.write(port, "2", "count to 1000")
                await hook.wait(lambda: len(hook.texts()) == 2 and "5" in hook.texts()[1])
                os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
                await hook.write(port, "3", "say three")
                await hook.wait(lambda: hook.texts()[2:] == ["three"])
                cut = hook.texts()[1]
                assert cut.startswith("1\n2\n3\n4\n5\n")
                assert cut.count("\n5\n") == 1
                assert "interrupted" in cut
            async with bridge(path):
                await hook.write(port, "4", "say four")
                await hook.wait(lambda: hook.texts()[3:] == ["four"])
    finally:
        del os.environ["HOOK_SECRET"]
    assert (tmp_path / "secrets").read_text().strip() == "0"
    assert len(pids.read_text().split()) == 3
