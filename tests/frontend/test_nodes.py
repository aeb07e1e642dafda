"""Several hosts on one PostgreSQL database: clients of one follow what another does, and take over from it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import asyncpg
import pytest

from crow.domain.entries import NewEntry, Note
from crow.domain.events import TurnBegan, TurnEnded
from crow.frontend.requester import Requester
from crow.protocol.frames import RequestError
from crow.store.postgres import paths
from crow.store.postgres.store import PostgresStore
from crow.store.principals import PrincipalStore
from tests.frontend.test_cursors import CURSORS, V1, V2, Params, back, cursor_of, reload, script, seen
from tests.support.postgres import new_database
from tests.support.scripted_model import Say, call
from tests.support.shared_host import Shared, Watcher, shared

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The module's database and its tests share an event loop."""
    return "asyncio"


@pytest.fixture(scope="module")
async def database() -> AsyncIterator[str]:
    """A database for the tests of this module."""
    async with new_database() as url:
        yield url


@asynccontextmanager
async def nodes(
    directory: Path, database: str, says: tuple[Say, ...], others: tuple[Say, ...] = (), *, has_principals: bool = False
) -> AsyncIterator[tuple[Shared, Shared]]:
    """Two nodes; the models say this."""
    async with (
        shared(directory, *says, database_url=database, node="one", has_principals=has_principals) as one,
        shared(directory, *others, database_url=database, node="two", has_principals=has_principals) as other,
    ):
        yield one, other


async def follows(host: Shared, client: Watcher, session: str) -> None:
    """Wait until a client of this host has been sent what the newest stored entry adds."""
    store = await host.host.store()
    row = await store.session(session)
    hosted = host.host.open[session]
    assert hosted.follower is not None
    await hosted.follower.reached(row.newest_entry)
    for attachment in hosted.clients.queues:
        await attachment.flushed()


@pytest.mark.long
@pytest.mark.parametrize(("seed", "version"), [(0, V1), (1, V1), (2, V2)])
async def test_a_client_of_another_node_misses_and_repeats_nothing(
    tmp_path: Path, database: str, seed: int, version: Params
) -> None:
    holds: list[anyio.Event] = []
    turns = script(random.Random(seed), holds)
    says = tuple(say for turn in turns for say in turn)
    async with nodes(tmp_path, database, says) as (one, other):
        (one.cwd / "there.txt").write_text("text\n")
        writer, watcher = await one.client(), await other.client(**version)
        session = await writer.new()
        start = cursor_of(await watcher.open("session/resume", session))
        come_back: list[tuple[int, Watcher]] = []
        for number, turn in enumerate(turns):
            prompting = asyncio.create_task(writer.prompt(session, f"go {number}"))
            for say in turn:
                await say.reached.wait()
                await follows(other, watcher, session)
                for count in {0, len(watcher.updates) // 2, len(watcher.updates)}:
                    cursor = cursor_of(watcher.updates[count - 1]) if count else start
                    come_back.append((count, await back(other, session, cursor, **version)))
                late = await other.client()
                await late.open("session/load", session)
                come_back.append((-1, late))
                assert say.hold is not None
                say.hold.set()
            assert (await prompting)["stopReason"] == "end_turn"
            await writer.prompt(session, "/context")
        await follows(other, watcher, session)
        everything = seen(watcher.updates)
        assert everything == await reload(one, session) == await reload(other, session)
        for count, client in come_back:
            assert seen(watcher.updates[: max(0, count)] + client.updates) == everything, count
            assert "No answer" not in str(client.updates)
        for count in range(len(watcher.updates) + 1):
            cursor = cursor_of(watcher.updates[count - 1]) if count else start
            client = await back(one, session, cursor, **version)
            assert seen(watcher.updates[:count] + client.updates) == everything, count
            await client.drop()


async def with_waiting_prompt(
    one: Shared, other: Shared, say: Say
) -> tuple[Watcher, Watcher, str, asyncio.Task[Any], asyncio.Task[Any]]:
    """A client of each node. `one` runs the turn of its client's prompt, and is answered with `say`. The prompt of the
    other client waits and is already stored. Returns the clients, the session's id and the two requests."""
    ann, bob = await one.client(), await other.client()
    session = await ann.new()
    await bob.open("session/load", session)
    turn = asyncio.create_task(ann.prompt(session, "a"))
    await say.reached.wait()
    waiting = asyncio.create_task(bob.prompt(session, "b"))
    store = await other.host.store()
    while not await store.queued(session):  # noqa: ASYNC110
        await anyio.sleep(0.01)
    return ann, bob, session, turn, waiting


async def test_a_prompt_waits_for_the_turn_of_another_node_and_then_runs(tmp_path: Path, database: str) -> None:
    hold = anyio.Event()
    first, second = Say(text=("One.",), hold=hold), Say(text=("Two.",))
    async with nodes(tmp_path, database, (first, Say(text=("Three.",))), (second,)) as (one, other):
        ann, bob, session, turn, waiting = await with_waiting_prompt(one, other, first)
        store = await other.host.store()
        assert not other.model.requests
        hold.set()
        assert (await turn)["stopReason"] == (await waiting)["stopReason"] == "end_turn"
        assert not await store.queued(session)
        await follows(one, ann, session)
        assert (await ann.prompt(session, "c"))["stopReason"] == "end_turn"
        await follows(other, bob, session)
        everything = await reload(other, session)
        assert [text for _, _, text in everything] == ["a", "One.", "b", "Two.", "c", "Three."]
        for client, own in ((ann, {"a", "c"}), (bob, {"b"})):
            shown = [each for each in seen(client.updates) if each[0] != "call"]
            assert shown == [each for each in everything if each[2] not in own]
        # The other node has sent the whole conversation to its model, without a remark about other processes.
        assert "One." in str(other.model.requests[0])
        assert "Another process" not in str(one.model.requests[-1])


async def test_a_waiting_prompt_can_be_cancelled(tmp_path: Path, database: str) -> None:
    hold = anyio.Event()
    first = Say(text=("One.",), hold=hold)
    async with nodes(tmp_path, database, (first,), ()) as (one, other):
        _, bob, session, turn, waiting = await with_waiting_prompt(one, other, first)
        await follows(other, bob, session)
        store = await other.host.store()
        hosted = other.host.open[session]
        hosted.session.withdraw(hosted.session.queue[0])  # what $/cancel_request does
        assert (await waiting)["stopReason"] == "cancelled"
        assert not await store.queued(session)
        assert isinstance(hosted.clients.feed.last_turn, TurnBegan)
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        assert [text for _, _, text in await reload(other, session)] == ["a", "One."]


async def test_a_cancellation_reaches_the_node_that_runs_the_turn(tmp_path: Path, database: str) -> None:
    first = Say(text=("One.",), calls=(call("nothing"),), hold=anyio.Event())
    async with nodes(tmp_path, database, (first, Say(text=("Two.",)))) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        turn = asyncio.create_task(ann.prompt(session, "a"))
        await first.reached.wait()
        await bob.until_kind("session_info_update", "running")
        await bob.connection.cancel(session)
        assert (await turn)["stopReason"] == "cancelled"
        await bob.until_kind("session_info_update", "cancelled")
        # It concerns that turn only.
        assert (await ann.prompt(session, "b"))["stopReason"] == "end_turn"


async def test_settings_and_titles_reach_the_other_nodes(tmp_path: Path, database: str) -> None:
    async with nodes(tmp_path, database, (Say(text=("One.",)),)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        await ann.prompt(session, "hello")
        await bob.until_kind("session_info_update", "hello")
        await bob.call("session/set_title", sessionId=session, title="Greeting")
        await ann.until_kind("session_info_update", "Greeting")
        await bob.call("session/set_mode", sessionId=session, modeId="plan")
        await ann.until_kind("current_mode_update", "plan")
        assert one.host.open[session].session.branch.row.mode == "plan"
        await bob.call("session/set_config_option", sessionId=session, configId="thought_level", value="high")
        await ann.until(lambda updates: any("'currentValue': 'high'" in str(each) for each in updates))
        assert (await ann.call("session/list"))["sessions"] == (await bob.call("session/list"))["sessions"]


async def test_settings_of_another_node_that_were_read_along_with_own_changes_are_shown_once(
    tmp_path: Path, database: str
) -> None:
    async with nodes(tmp_path, database, (Say(text=("One.",)),)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        await ann.prompt(session, "hello")
        await ann.call("session/set_mode", sessionId=session, modeId="auto")
        branch, store = one.host.open[session].session.branch, await one.host.store()
        async with branch._lock:
            await bob.call("session/set_title", sessionId=session, title="Greeting")
            await bob.call("session/set_mode", sessionId=session, modeId="plan")
            branch.row = await store.session(session)  # as when this node stores something else
        await bob.call("session/set_config_option", sessionId=session, configId="thought_level", value="high")
        await ann.until(lambda updates: any("'currentValue': 'high'" in str(each) for each in updates))
        updates = ann.kinds_and_texts()
        titles = [
            each["title"] for each in updates if each["sessionUpdate"] == "session_info_update" and "title" in each
        ]
        modes = [each["currentModeId"] for each in updates if each["sessionUpdate"] == "current_mode_update"]
        assert (titles, modes) == (["hello", "Greeting"], ["auto", "plan"])


async def test_undo_and_deletion_reach_the_other_nodes(tmp_path: Path, database: str) -> None:
    says = tuple(Say(text=(text,)) for text in ("One.", "Two."))
    async with nodes(tmp_path, database, says, (Say(text=("Three.",)),)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        for text in ("a", "b", "/undo"):
            await ann.prompt(session, text)
        await follows(other, bob, session)
        branches = [host.host.open[session].session.branch for host in (one, other)]
        assert branches[0].leaf == branches[1].leaf
        assert [entry.id for entry in branches[0].entries] == [entry.id for entry in branches[1].entries]
        await bob.prompt(session, "c")
        assert "Two." not in str(other.model.requests[0].messages)
        await ann.call("session/delete", sessionId=session)
        while session in other.host.open:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        with pytest.raises(RequestError, match="Session not found"):
            await bob.prompt(session, "d")


async def test_a_session_names_the_node_that_has_its_files(tmp_path: Path, database: str) -> None:
    says, others = (Say(text=("One.",)), Say(text=("Three.",))), (Say(text=("Two.",)),)
    async with nodes(tmp_path, database, says, others) as (one, other):
        ann, bob = await one.client(), await other.client(capabilities={"_meta": {"notices": True}})
        session = await ann.new()
        await ann.prompt(session, "a")
        place = one.cwd.rename(tmp_path / "away")  # as if the nodes shared no disk
        problem = f"The files of this session are on node one, in {one.cwd}. That directory does not exist here."
        for method in ("session/load", "session/resume"):
            await bob.open(method, session)
            await bob.until(lambda updates: any(problem in str(each) for each in updates))
            bob.updates.clear()
        await bob.open("session/load", session)
        assert bob.text().startswith("One.")
        for text in ("b", "/retry"):
            with pytest.raises(RequestError, match="are on node one, in") as raised:
                await bob.prompt(session, text)
            assert (raised.value.code, raised.value.data["reason"]) == (-32602, "files_elsewhere")
        assert not other.model.requests
        assert (await bob.prompt(session, "/history"))["stopReason"] == "end_turn"
        with pytest.raises(RequestError, match="are on node one, in"):  # a command does not move the session here
            await bob.prompt(session, "b")
        place.rename(one.cwd)
        assert (await bob.prompt(session, "b"))["stopReason"] == "end_turn"
        listed = (await ann.call("session/list"))["sessions"]
        assert next(each for each in listed if each["sessionId"] == session)["_meta"] == {"crow": {"node": "two"}}
        await ann.prompt(session, "c")


async def test_a_node_that_wakes_up_after_a_take_over_ends_its_turn(tmp_path: Path, database: str) -> None:
    first = Say(text=("One.",), hold=anyio.Event())
    async with nodes(tmp_path, database, (first, Say(text=("Three.",))), (Say(text=("Two.",)),)) as (one, other):
        ann, bob, session, turn, waiting = await with_waiting_prompt(one, other, first)
        connection = await asyncpg.connect(database)
        owner = await connection.fetchval("SELECT owner FROM crow.sessions WHERE id = $1", session)
        while not other.model.requests:  # as if the lease of the first node had ended
            await connection.execute("UPDATE crow.owners SET signed_ms = 0 WHERE owner = $1", owner)
            await anyio.sleep(0.01)
        await connection.execute("UPDATE crow.owners SET signed_ms = crow.now_ms() WHERE owner = $1", owner)
        await connection.close()
        assert (await waiting)["stopReason"] == "end_turn"
        with pytest.raises(RequestError, match="Another process took over session"):
            await turn
        await follows(one, ann, session)
        await ann.until_kind("agent_message_chunk", "Two.")
        branch, store = one.host.open[session].session.branch, await one.host.store()
        while branch.leaf != (await store.session(session)).leaf:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        assert [entry.id for entry in branch.entries] == [entry.id for entry in (await store.tail(session)).entries]
        assert (await ann.prompt(session, "c"))["stopReason"] == "end_turn"
        await follows(other, bob, session)
        texts = [text for _, _, text in await reload(other, session)]
        assert (texts[0], *texts[-4:]) == ("a", "b", "Two.", "c", "Three.")


async def test_principals_follow_only_what_they_may_see_and_a_stranger_cancels_nothing(
    tmp_path: Path, database: str
) -> None:
    def requester(principal: str) -> Requester:
        return Requester(view=partial(PrincipalStore, principal=principal), may_configure=False)

    hold = anyio.Event()
    first = Say(text=("One.",), hold=hold)
    async with nodes(tmp_path, database, (first,), (Say(text=("Two.",)),), has_principals=True) as (one, other):
        ann = await one.client(requester=requester("ann"))
        session = await ann.new()
        turn = asyncio.create_task(ann.prompt(session, "a"))
        await first.reached.wait()
        store = await one.host.store()
        await store.share_session(session, "carl", "read")
        again, bob, carl = [await other.client(requester=requester(name)) for name in ("ann", "bob", "carl")]
        for client in (again, carl):
            await client.open("session/load", session)
        with pytest.raises(RequestError, match="Session not found"):
            await bob.open("session/load", session)
        for client in (bob, carl):  # one may not even see it, the other may only read it
            await client.connection.cancel(session)
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        assert (await again.prompt(session, "b"))["stopReason"] == "end_turn"
        await follows(other, carl, session)
        assert carl.text() == again.text() == "One.Two."
        assert [len((await each.call("session/list"))["sessions"]) for each in (ann, again, bob, carl)] == [1, 1, 0, 1]


async def test_a_client_that_comes_to_a_node_which_lags_behind_gets_nothing_twice(
    tmp_path: Path, database: str
) -> None:
    says = (Say(text=("One.",), calls=(call("nothing"),)), Say(text=("Two.",)))
    async with nodes(tmp_path, database, says) as (one, other):
        ann, bob = await one.client(capabilities=CURSORS), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        async with other.host.open[session].session.branch._lock:  # as if the database did not answer
            await ann.prompt(session, "a")
            coming = asyncio.create_task(back(other, session, cursor_of(ann.updates[-1])))
            while len(other.clients) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await asyncio.wait([coming], timeout=0.3)
        again = await coming
        await follows(other, again, session)
        assert seen(ann.updates + again.updates) == seen(ann.updates)
        assert again.text() == ""


async def test_a_node_that_lags_by_several_batches_shows_an_unfinished_answer_once(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "PATH_BATCH", 2)
    hold = anyio.Event()
    last = Say(text=("Three.",), hold=hold)
    says = (Say(text=("One.",), calls=(call("nothing"),)), Say(text=("Two.",), calls=(call("nothing"),)), last)
    async with nodes(tmp_path, database, says) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        async with other.host.open[session].session.branch._lock:  # as if the database did not answer
            turn = asyncio.create_task(ann.prompt(session, "a"))
            await last.reached.wait()
            store = cast(PostgresStore, await one.host.store())
            async with aclosing(store.watch(session)) as all_news:
                while (await anext(all_news)).draft is None:
                    pass
        await bob.until_kind("agent_message_chunk", "Three.")
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        await follows(other, bob, session)
        assert bob.text() == "One.Two.Three."


@asynccontextmanager
async def unreadable_drafts(database: str) -> AsyncIterator[None]:
    """Lock the table of unfinished answers, so that nobody can read it."""
    connection = await asyncpg.connect(database)
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE crow.drafts IN ACCESS EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


async def test_a_client_can_load_a_session_while_its_unfinished_answer_cannot_be_read(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = anyio.Event()
    say = Say(text=("One.",), hold=hold)
    async with nodes(tmp_path, database, (say,)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        turn = asyncio.create_task(ann.prompt(session, "a"))
        await say.reached.wait()
        with monkeypatch.context() as impatient, anyio.fail_after(60):
            impatient.setattr("crow.agent.sessions.following.CATCH_UP_S", 0.1)
            async with unreadable_drafts(database):
                await bob.open("session/load", session)
                assert bob.text() == ""
        await bob.until_kind("agent_message_chunk", "One.")
        hold.set()
        assert (await turn)["stopReason"] == "end_turn"
        await follows(other, bob, session)
        assert bob.text() == "One."


async def test_a_turn_with_an_entry_that_was_stored_unconfirmed_blocks_no_node(tmp_path: Path, database: str) -> None:
    hold = anyio.Event()
    first = Say(text=("One.",), hold=hold)
    async with nodes(tmp_path, database, (first,), (Say(text=("Two.",)),)) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await bob.open("session/load", session)
        turn = asyncio.create_task(ann.prompt(session, "a"))
        await first.reached.wait()
        branch, store = one.host.open[session].session.branch, await one.host.store()
        note = NewEntry(body=Note(about="label", value="x"))
        await store.append(session, leaf=branch.leaf, turn=branch.turn, entries=[note])  # its reply does not come
        hold.set()
        with pytest.raises(RequestError, match="Another process"):
            await turn
        assert (await bob.prompt(session, "b"))["stopReason"] == "end_turn"
        assert (await store.session(session)).state == "idle"


async def test_the_turn_of_a_node_that_died_before_it_stored_anything_ends_for_clients(
    tmp_path: Path, database: str
) -> None:
    async with nodes(tmp_path, database, ()) as (one, other):
        ann, bob = await one.client(), await other.client()
        session = await ann.new()
        await ann.prompt(session, "/context")
        store = await one.host.store()
        row = await store.session(session)
        await store.take_turn(session, None, leaf=row.leaf, command_id="m")
        await bob.open("session/load", session)
        feed = other.host.open[session].clients.feed
        assert isinstance(feed.last_turn, TurnBegan)
        connection = await asyncpg.connect(database)
        owner = await connection.fetchval("SELECT owner FROM crow.sessions WHERE id = $1", session)
        while (await store.session(session)).state == "running":  # as if the lease of the first node had ended
            await connection.execute("UPDATE crow.owners SET signed_ms = 0 WHERE owner = $1", owner)
            await anyio.sleep(0.01)
        await connection.close()
        await follows(other, bob, session)
        assert isinstance(feed.last_turn, TurnEnded)
