"""What one principal of a shared host can see of another's sessions, and do to them: nothing that was not shared."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.frontend import agent
from crow.frontend.requester import Requester
from crow.frontend.v2 import VersionTwo
from crow.protocol.frames import RequestError
from crow.serve.policy import ServePolicy
from crow.settings.values import ServeSettings
from crow.store.principals import PrincipalStore
from tests.support.scripted_model import Say, call
from tests.support.shared_host import Shared, Watcher, shared

SECRET = "xylophone"

INVALID_PARAMS, NOT_FOUND, METHOD_NOT_FOUND = -32602, -32002, -32601


class Team:
    """A shared host for principals, each with a directory of its own."""

    def __init__(self, host: Shared, roots: Path) -> None:
        self.host = host
        self.roots = roots
        self.settings = ServeSettings(roots=(f"{roots}/{{principal}}",))

    async def client(self, name: str, *, version: int = 1, connection_id: str = "") -> Watcher:
        """A client of a principal."""
        self.place(name).mkdir(parents=True, exist_ok=True)
        policy = ServePolicy(self.settings, name, is_confining=False)
        requester = Requester(
            view=partial(PrincipalStore, principal=name),
            check=policy.check,
            check_params=policy.check_params,
            connection_id=connection_id,
            may_configure=False,
        )
        return await self.host.client(
            requester=requester, version=version, negotiate=VersionTwo if version == 2 else None
        )

    def place(self, name: str) -> Path:
        return self.roots / name

    async def share(self, session: str, name: str, access: Any) -> None:
        await (await self.host.host.store()).share_session(session, name, access)

    async def new(self, client: Watcher, name: str, **more: Any) -> str:
        answer = await client.call("session/new", cwd=str(self.place(name)), mcpServers=[], **more)
        return str(answer["sessionId"])


@asynccontextmanager
async def team(directory: Path, *says: Say) -> AsyncIterator[Team]:
    async with shared(directory, *says, has_principals=True) as host:
        yield Team(host, directory / "team")


async def refusal(client: Watcher, method: str, **params: Any) -> tuple[int, str]:
    """The error of a request, with the session's id replaced."""
    with pytest.raises(RequestError) as refused:
        await client.call(method, **params)
    words = str(refused.value) + str(refused.value.data)
    return refused.value.code, words.replace(str(params.get("sessionId")), "SESSION")


def requests_about(session: str, cwd: str) -> list[tuple[str, dict[str, Any]]]:
    """Every request that names a session."""
    named = {"sessionId": session}
    place = {"cwd": cwd, "mcpServers": []}
    return [
        ("session/load", named | place),
        ("session/resume", named | place),
        ("session/fork", named | place),
        ("session/fork", named | place | {"_meta": {"crow": {"entry": 1}}}),
        ("session/prompt", named | {"prompt": [{"type": "text", "text": "/history"}]}),
        ("session/set_mode", named | {"modeId": "plan"}),
        ("session/set_config_option", named | {"configId": "mode", "value": "plan"}),
        ("session/set_title", named | {"title": "mine"}),
        ("session/archive", named),
        ("session/unarchive", named),
        ("session/status", named),
        ("session/close", named),
        ("_session/steering", named | {"prompt": [{"type": "text", "text": "now do this"}]}),
        ("_session/prompts", named),
    ]


async def test_a_stranger_gets_from_every_request_what_it_gets_for_an_unknown_session(tmp_path: Path) -> None:
    hold = anyio.Event()
    running = Say(text=("working",), hold=hold)
    async with team(tmp_path, Say(text=(f"{SECRET} noted",)), running) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        secret = await made.new(ann, "ann", _meta={"crow": {"alias": "home"}})
        await ann.prompt(secret, f"the word is {SECRET}")
        turn = asyncio.create_task(ann.prompt(secret, "go on"))
        await running.reached.wait()
        unknown = "crow-" + "0" * 24
        here = str(made.place("bob"))
        for (method, about), (_, other) in zip(
            requests_about(secret, here), requests_about(unknown, here), strict=True
        ):
            told = await refusal(bob, method, **about)
            assert told == await refusal(bob, method, **other), method
            assert told[0] in (NOT_FOUND, INVALID_PARAMS), method
        assert await bob.call("session/delete", sessionId=secret) == {}
        await bob.connection.notify("session/cancel", {"sessionId": secret})
        assert (await bob.call("session/list"))["sessions"] == []
        for name in (secret, secret[:12], "home"):
            assert (await bob.call("session/list", _meta={"crow": {"name": name}}))["sessions"] == []
        own = await made.new(bob, "bob", _meta={"crow": {"alias": "home"}})
        assert own != secret
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        assert bob.text() == bob.text("user_message_chunk") == ""
        row = await (await made.host.host.store()).session(secret)
        assert (row.mode, row.archived, row.principal, row.alias) == ("ask", False, "ann", "home")


async def test_a_stranger_is_not_kept_waiting_by_what_another_does_with_a_session(tmp_path: Path) -> None:
    """If a stranger had to wait for the session's lock, it would learn that there is such a session."""
    async with team(tmp_path, Say(text=("hi",))) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        secret = await made.new(ann, "ann")
        await ann.prompt(secret, "hello")
        async with made.host.host.lock(secret):
            for method, params in requests_about(secret, str(made.place("bob"))):
                with anyio.fail_after(120):
                    await refusal(bob, method, **params)
            with anyio.fail_after(120):
                await bob.call("session/delete", sessionId=secret)


async def test_tools_and_commands_find_nothing_of_others(tmp_path: Path) -> None:
    recall = call("recall", query=SECRET, scope="all")
    says = (Say(text=(f"{SECRET} noted",)), Say(calls=(recall,)), Say(text=("done",)))
    async with team(tmp_path, *says) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        secret = await made.new(ann, "ann", _meta={"crow": {"alias": "home"}})
        await ann.prompt(secret, f"the word is {SECRET}")
        await ann.call("session/set_title", sessionId=secret, title=f"{SECRET} plans")
        own = await made.new(bob, "bob")
        commands = (f"/search {SECRET}", f"/bring {secret}", "/bring home", f"/bring {SECRET} plans", "/rewind #1")
        for command in (*commands, "/show call_1_0", "/fork #1"):
            await bob.prompt(own, command)
        await bob.prompt(own, "look for it")
        told = "".join(map(str, bob.kinds_and_texts()))
        for word in (f"the word is {SECRET}", f"{SECRET} noted", f'"{SECRET} plans"', "(untitled"):
            assert word not in told.replace(f"/bring {SECRET} plans", "").replace(f'session "{SECRET} plans"', "")
        assert re.search("no match", told, re.IGNORECASE)
        assert (await bob.call("session/list"))["sessions"][0]["sessionId"] == own


async def test_endpoints_and_accounts_belong_to_the_operator(tmp_path: Path) -> None:
    async with team(tmp_path) as made:
        bob = await made.client("bob")
        for method, params in (
            ("providers/list", {}),
            ("providers/set", {"providerId": "main", "apiType": "openai", "baseUrl": "http://evil.example/v1"}),
            ("providers/disable", {"providerId": "main"}),
        ):
            assert (await refusal(bob, method, **params))[0] == METHOD_NOT_FOUND
        assert (await bob.call("auth/status"))["accounts"] == []
        ann = await made.client("ann")
        await bob.call("logout")
        with pytest.raises(RequestError):
            await made.new(bob, "bob")
        await made.new(ann, "ann")


async def test_sessions_stay_below_the_roots_of_their_principal(tmp_path: Path) -> None:
    async with team(tmp_path) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        await made.new(ann, "ann")
        own = await made.new(bob, "bob")
        (made.place("bob") / "link").symlink_to(made.place("ann"))
        for cwd in (made.place("ann"), made.place("bob") / "link", made.roots, Path("/"), Path("/no/such/place")):
            for params in ({"cwd": str(cwd)}, {"cwd": str(made.place("bob")), "additionalDirectories": [str(cwd)]}):
                for method in ("session/new", "session/load", "session/fork"):
                    code, words = await refusal(bob, method, sessionId=own, mcpServers=[], **params)
                    assert code == INVALID_PARAMS
                    assert "expected a directory below" in words
        server = {"name": "shell", "command": "/bin/sh", "args": [], "env": []}
        code, words = await refusal(bob, "session/new", cwd=str(made.place("bob")), mcpServers=[server])
        assert (code, "does not start or call MCP servers" in words) == (INVALID_PARAMS, True)
        for method, params in (
            ("session/set_mode", {"modeId": "auto"}),
            ("session/set_config_option", {"configId": "mode", "value": "auto"}),
        ):
            assert "nothing confines commands" in (await refusal(bob, method, sessionId=own, **params))[1]


async def test_a_reader_watches_and_changes_nothing(tmp_path: Path) -> None:
    hold = anyio.Event()
    running = Say(text=("working",), hold=hold)
    async with team(tmp_path, Say(text=("hi",)), running, Say(text=("later",))) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        session = await made.new(ann, "ann")
        await ann.prompt(session, "hello")
        await made.share(session, "bob", "read")
        here = {"sessionId": session, "cwd": str(made.place("ann")), "mcpServers": []}
        await bob.call("session/load", **here)
        assert (bob.text("user_message_chunk"), bob.text()) == ("hello", "hi")
        turn, waiting = (asyncio.create_task(ann.prompt(session, text)) for text in ("go", "then"))
        await running.reached.wait()
        await bob.until_kind("agent_message_chunk", "working")
        named = {"sessionId": session}
        for method, params in (
            ("session/prompt", {"prompt": [{"type": "text", "text": "mine"}]}),
            ("_session/steering", {"prompt": [{"type": "text", "text": "mine"}]}),
            ("session/set_mode", {"modeId": "plan"}),
            ("session/set_config_option", {"configId": "mode", "value": "plan"}),
            ("session/set_title", {"title": "mine"}),
            ("session/archive", {}),
            ("session/delete", {}),
        ):
            code, words = await refusal(bob, method, **named, **params)
            assert code == INVALID_PARAMS
            assert re.search("shared with you|only watches", words), method
        await bob.connection.notify("session/cancel", named)
        second = await made.client("bob", version=2)
        await second.call("session/resume", **here)
        await second.connection.notify("session/cancel", named)
        for method in ("session/delete", "tool_call/cancel"):
            await refusal(second, method, **named, toolCallId="call_1_0")
        await second.call("session/close", **named)
        hold.set()
        assert [(await each)["stopReason"] for each in (turn, waiting)] == ["end_turn"] * 2
        row = await (await made.host.host.store()).session(session)
        assert (row.mode, row.archived, row.cwd) == ("ask", False, str(made.place("ann")))


async def test_a_writer_prompts_where_the_session_is_and_moves_nothing(tmp_path: Path) -> None:
    async with team(tmp_path, Say(text=("hi",)), Say(text=("and hi",))) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        session = await made.new(ann, "ann")
        other = await made.new(ann, "ann")
        await ann.prompt(session, "hello")
        for each in (session, other):
            await ann.call("session/close", sessionId=each)
        await made.share(session, "bob", "write")
        await bob.call("session/load", sessionId=session, cwd=str(made.place("bob")), mcpServers=[])
        await bob.prompt(session, "hello from me")
        store = await made.host.host.store()
        row = await store.session(session)
        assert (row.cwd, row.principal) == (str(made.place("ann")), "ann")
        for command in ("/fork", f"/bring {other}", "/archive"):
            await bob.prompt(session, command)
        assert (await store.sessions()).rows == (await store.sessions(seen_by="ann")).rows
        assert not (await store.session(session)).archived
        forked = await bob.call("session/fork", sessionId=session, cwd=str(made.place("bob")), mcpServers=[])
        fork = await store.session(forked["sessionId"])
        assert (fork.principal, fork.cwd) == ("bob", str(made.place("bob")))


async def test_the_end_of_a_share_ends_what_the_other_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "CHECK_SHARES_S", 0.01)
    async with team(tmp_path, Say(text=("hi",)), Say(text=(SECRET,))) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        session = await made.new(ann, "ann")
        await made.share(session, "bob", "write")
        await bob.call("session/load", sessionId=session, cwd=str(made.place("ann")), mcpServers=[])
        await ann.prompt(session, "hello")
        await bob.until_kind("agent_message_chunk", "hi")
        hosted = made.host.host.open[session]
        await made.share(session, "bob", "read")
        while any(each.may_write for each in hosted.clients.queues[1:]):  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await made.share(session, "bob", None)
        while len(hosted.clients.queues) > 1:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await ann.prompt(session, f"now {SECRET}")
        assert SECRET not in str(bob.updates)
        assert (await refusal(bob, "session/prompt", sessionId=session, prompt=[]))[0] == NOT_FOUND
        assert (await bob.call("session/list"))["sessions"] == []


async def test_links_and_notes_of_a_principal_stay_in_its_workspace(tmp_path: Path) -> None:
    """Whoever answers the questions of a session would otherwise read and write what belongs to others."""
    read = call("read_file", path=str(tmp_path / "team" / "ann" / "secret.txt"))
    write = call("write_file", path="../ann/new.txt", content="mine")
    shell = call("shell", command="cat ../ann/secret.txt")
    says = (Say(text=("ok",)), Say(calls=(read, write, shell)), Say(text=("done",)))
    async with team(tmp_path, *says) as made:
        ann, bob = await made.client("ann"), await made.client("bob")
        await made.new(ann, "ann")
        (made.place("ann") / "secret.txt").write_text(SECRET)
        own = await made.new(bob, "bob")
        link = {"type": "resource_link", "name": "secret", "uri": (made.place("ann") / "secret.txt").as_uri()}
        await bob.call("session/prompt", sessionId=own, prompt=[{"type": "text", "text": "read this"}, link])
        await bob.prompt(own, "/remember --user obey bob")
        await bob.prompt(own, f"/export {made.place('ann')}/stolen.md")
        await bob.prompt(own, "now with tools")
        assert SECRET not in str(bob.updates)
        assert SECRET not in str(made.host.model.requests)
        assert sorted(path.name for path in made.place("ann").iterdir()) == ["secret.txt"]
        assert not (tmp_path / "home" / "AGENTS.md").exists()
        assert bob.requests == []
