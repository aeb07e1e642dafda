"""Clients of one user learn that another client has changed the list of sessions, and where sessions are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crow.domain.errors import StoreError
from crow.frontend.requester import Requester
from crow.protocol.frames import RequestError
from crow.store import SessionChanges, SessionRow, Store
from crow.store.principals import PrincipalStore
from tests.support.scripted_model import Say
from tests.support.shared_host import Watcher, shared


def changes(client: Watcher) -> list[tuple[str, str]]:
    """What the client was told about the list of sessions."""
    found = []
    for update in client.kinds_and_texts():
        told = update.get("_meta", {}).get("crow", {}).get("sessionList")
        if told is not None:
            assert {key for key in update if key != "_meta"} == {"sessionUpdate"}, "nothing of the session itself"
            found.append((told["change"], told["sessionId"]))
    return found


async def test_other_clients_are_told_of_every_change(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=["hi"])) as on:
        watcher, actor = await on.client(), await on.client()
        own = await watcher.new()
        session = await actor.new(_meta={"crow": {"alias": "nest"}})
        await actor.prompt(session, "hello")
        await actor.prompt(session, "/title Twigs")
        await actor.prompt(session, "/archive")
        await actor.prompt(session, "/archive undo")
        await actor.prompt(session, "/new")
        await actor.prompt(session, "/clear")
        await actor.call("session/set_title", sessionId=session, title="Straw")
        await actor.call("session/archive", sessionId=session)
        await actor.call("session/unarchive", sessionId=session)
        await actor.call("session/set_title", sessionId=session, title="Wool")
        await actor.call("session/delete", sessionId=session)
        await watcher.until(lambda _: ("deleted", session) in changes(watcher))
        told = changes(watcher)
        made = [each for each in told if each[0] == "created" and each[1] not in (own, session)]
        assert len(made) == 1, "by /new"
        names = [change for change, about in told if about == session]
        assert names == [
            *("created", "renamed", "renamed", "archived", "unarchived"),
            *("renamed", "archived", "unarchived", "renamed", "deleted"),
        ]


async def test_a_client_of_another_user_is_told_nothing(tmp_path: Path) -> None:
    def as_user(name: str, connection: str) -> Requester:
        return Requester(connection_id=connection, view=lambda store: PrincipalStore(store, principal=name))

    async with shared(tmp_path, Say(text=["hi"]), has_principals=True) as on:
        ann = await on.client(requester=as_user("ann", "a"))
        again = await on.client(requester=as_user("ann", "b"))
        bob = await on.client(requester=as_user("bob", "c"))
        await bob.new()
        await again.new()
        session = await ann.new()
        await ann.prompt(session, "hello")
        await ann.call("session/delete", sessionId=session)
        await again.until(lambda _: ("deleted", session) in changes(again))
        assert changes(bob) == []


async def test_a_list_has_the_directories_if_the_client_asks(tmp_path: Path) -> None:
    async with shared(tmp_path, *(Say(text=["hi"]) for _ in range(3))) as on:
        client = await on.client()
        for name in ("one", "one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            answer = await client.call("session/new", cwd=str(tmp_path / name), mcpServers=[])
            await client.prompt(answer["sessionId"], "hello")

        async def directories(**params: Any) -> Any:
            return (await client.call("session/list", **params)).get("_meta", {}).get("crow", {}).get("directories")

        found = await directories(_meta={"crow": {"directories": True}}, cwd=str(tmp_path / "one"))
        assert [(Path(each["cwd"]).name, each["sessions"]) for each in found] == [("two", 1), ("one", 2)]
        assert all(each["updatedAt"].endswith("Z") or "+" in each["updatedAt"] for each in found)
        assert await directories() is None


async def test_a_word_finds_sessions_by_id_alias_title_or_the_start_of_the_id(tmp_path: Path) -> None:
    async with shared(tmp_path, *(Say(text=["hi"]) for _ in range(3))) as on:
        client = await on.client()
        first = (await client.call("session/new", cwd=str(tmp_path), mcpServers=[], _meta={"crow": {"alias": "work"}}))[
            "sessionId"
        ]
        second = await client.new()
        await client.prompt(first, "hello\nthere")
        await client.prompt(second, "build it")
        await client.prompt(second, "/title The nest")

        async def found(name: str) -> list[str]:
            listed = await client.call("session/list", _meta={"crow": {"name": name}})
            return [each["sessionId"] for each in listed["sessions"]]

        assert await found(first) == await found("work") == [first]
        assert await found(second) == await found("The nest") == await found(second[:-1]) == [second]
        assert set(await found("crow-")) == {first, second}
        assert await found("nest") == []
        (info,) = (await client.call("session/list", _meta={"crow": {"name": "work"}}))["sessions"]
        assert info["_meta"]["crow"]["alias"] == "work"
        await client.prompt(first, "again")
        assert await client.call("_session/prompts", sessionId=first) == {
            "prompts": [{"number": 1, "text": "hello"}, {"number": 2, "text": "again"}]
        }


class ReadOnly(PrincipalStore):
    """A store in which no session can be deleted or archived."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, None)

    async def delete_session(self, session_id: str) -> None:
        raise StoreError("The database is read-only.")

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:
        raise StoreError("The database is read-only.")


async def test_other_clients_are_not_told_of_a_change_that_could_not_be_stored(tmp_path: Path) -> None:
    async with shared(tmp_path) as on:
        watcher, actor = await on.client(), await on.client(requester=Requester(view=ReadOnly))
        await watcher.new()
        session = await actor.new()
        for method in ("session/archive", "session/delete"):
            with pytest.raises(RequestError, match="read-only"):
                await actor.call(method, sessionId=session)
        await actor.new()
        await watcher.until(lambda _: len(changes(watcher)) > 1)
        assert [change for change, _ in changes(watcher)] == ["created", "created"]
