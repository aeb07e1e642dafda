"""A principal sees its own sessions and those that are shared with it, and nothing of any other."""

from __future__ import annotations

import inspect
import re
import sqlite3
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.adapters import open_admin
from crow.domain.entries import CallRef, Entry, File, NewEntry, PromptName, Remark
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession
from crow.domain.messages import Text
from crow.store import NewSession, Scope, SessionChanges, Share, Store, Token
from crow.store.principals import PrincipalStore, session_view
from crow.store.sqlite.store import SqliteStore
from crow.store.watching import Watcher
from tests.store.scenes import add, begin, converse, history, ids, make_older, new_session, result, row_ids, said
from tests.support.amounts import examples

SECRET = "xylophone"

METHODS = sorted(name for name in {*dir(Store), *dir(Watcher)} if not name.startswith("_"))

READS = frozenset(
    {
        *(
            "session",
            "open_session",
            "tail",
            "history",
            "entry",
            "result",
            "queued",
            "unstored_end",
            "count_messages",
            "usage_by_model",
            "compacted",
        ),
        *(
            "moves",
            "outline",
            "entries_beyond",
            "file_changes",
            "search",
            "scan",
            "subagents",
            "fork_session",
            "sessions",
        ),
        *("shares", "access_of", "sees_entries", "watch"),
    }
)
"""What a share for reading allows."""

WRITES = frozenset(
    {
        *("merge_metadata", "enqueue", "replace_queued", "drop_prompt", "take_turn", "append", "renew_lease"),
        *("move_leaf", "save_draft", "create_session", "cancel_turn", "named_prompt"),
    }
)
"""What a share for writing allows in addition."""

OWNS = frozenset({"update_session", "delete_session", "move_alias", "share_session"})
"""What only the owner may do. `update_session` is called with an alias."""

TOKENS = frozenset({"add_token", "token", "tokens", "note_token_use", "revoke_token"})

OTHERS = frozenset(
    {
        *("warning", "notifies", "session_by_alias", "is_known_directory", "disown", "learned", "learn", "tidy"),
        "directories",
        *("hurry", "close"),
    }
)
"""Methods that no share changes, or that have a test of their own."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the arguments of a method name: a session of somebody, or nothing that exists."""

    session: str
    alias: str
    entry: int
    leaf: int | None
    assistant: int
    cwd: str
    message_id: str


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A store in which `ann` has a session with everything in it, and `bob` has one of his own."""

    store: Store
    ann: PrincipalStore
    bob: PrincipalStore
    secret: Target
    unknown: Target


async def make_scene(store: Store) -> Scene:
    ann, bob = PrincipalStore(store, "ann"), PrincipalStore(store, "bob")
    await ann.create_session(new_session("a1", cwd="/ann", alias="home", title=f"{SECRET} title"))
    user = await begin(ann, "a1", f"{SECRET} one")
    (asked,) = await add(ann, "a1", said(f"{SECRET} two", calls=1), turn=user.turn)
    done = result(asked.id, f"{SECRET} three")
    file = File(call=done.call, path="/ann/a", before=SECRET.encode(), after_hash="h")
    await add(ann, "a1", file, done, turn=user.turn, release=True)
    left = (await ann.session("a1")).leaf
    await converse(ann, "a1", f"{SECRET} four")
    leaf = (await ann.session("a1")).leaf
    await ann.move_leaf("a1", leaf=leaf, to=left, reason="undo")
    await ann.create_session(new_session("a1-task", cwd="/ann", parent_id="a1"))
    await converse(ann, "a1-task", f"{SECRET} five")
    await ann.fork_session("a1", "a2", entry=user.id, cwd="/ann", additional_directories=())
    await ann.enqueue("a1", (Text(text=SECRET),), "waiting", name=PromptName(id="p1", digest="d"))
    await bob.create_session(new_session("b1", cwd="/bob"))
    await converse(bob, "b1", "hello")
    secret = Target(
        session="a1", alias="home", entry=user.id, leaf=left, assistant=asked.id, cwd="/ann", message_id="waiting"
    )
    unknown = Target(
        session="a9", alias="away", entry=987_654, leaf=987_653, assistant=987_652, cwd="/nobody", message_id="none"
    )
    return Scene(store=store, ann=ann, bob=bob, secret=secret, unknown=unknown)


@pytest.fixture
async def scene(store: Store) -> Scene:
    return await make_scene(store)


def arguments(name: str, target: Target) -> dict[str, Any]:
    """Arguments for a method of the store, all about `target`."""
    known: dict[str, Any] = {
        "new": NewSession(id="made", cwd="/x", model="m", mode="ask", parent_id=target.session),
        "session_id": target.session,
        "session_ids": [target.session],
        "new_id": "made",
        "entry": None,
        "entry_id": target.entry,
        "entries": [target.entry],
        "cwd": target.cwd,
        "additional_directories": (),
        "metadata": None,
        "alias": target.alias,
        "to": "b1" if name == "move_alias" else target.entry,
        "paths": [target.cwd],
        "changes": SessionChanges(alias="taken"),
        "patch": {"a": 1},
        "result_bytes": None,
        "call": CallRef(assistant=target.assistant, index=0),
        "parts": (Text(text="mine"),),
        "message_id": target.message_id,
        "leaf": target.leaf,
        "turn": 1,
        "cut": None,
        "release": False,
        "end": (),
        "reason": "undo",
        "kinds": ("user", "assistant"),
        "after": 0,
        "after_leaf": target.leaf,
        "text": "mine",
        "thought": "",
        "query": SECRET,
        "scope": Scope(cwd=target.cwd),
        "limit": 20,
        "without": frozenset[str](),
        "base_url": "http://x",
        "model": "m",
        "facts": {},
        "principal": "bob",
        "access": "read",
        "cursor": None,
        "archived": None,
        "seen_by": "ann",
        "token": Token(id="t", principal="bob", hash="h"),
        "token_id": "t",
        "name": PromptName(id="p1", digest="d"),
        "command_id": "",
        "is_cancelled": True,
        "used_ms": 1,
    }
    if name == "append":
        known |= {"entries": [NewEntry(body=Remark(text="mine", message_id="m"))], "changes": None}
    if name == "share_session":
        known["principal"] = "eve"
    method = getattr(Store, name, None) or getattr(Watcher, name)
    wanted = [one for one in inspect.signature(method).parameters if one != "self"]
    missing = [one for one in wanted if one not in known]
    assert not missing, f"Store.{name} has new parameters: say here what a stranger would pass for {missing}."
    return {one: known[one] for one in wanted}


async def outcome(store: Store, name: str, target: Target) -> str:
    """What a call gives, in words that name the target by its role."""
    if name in ("warning", "notifies"):
        return store.warning
    try:
        given = getattr(store, name)(**arguments(name, target))
        if isinstance(given, AsyncGenerator) and name == "watch":
            async with aclosing(given):
                given = await anext(given)
        elif isinstance(given, AsyncIterator):
            given = [entry async for batch in given for entry in batch]
        elif inspect.isawaitable(given):
            given = await given
        told = repr(given)
    except CrowError as error:
        told = f"{type(error).__name__}: {error}"
    if name == "directories":  # it names no target, and its numbers are no entries
        return told
    for value, role in ((target.session, "SESSION"), (str(target.entry), "ENTRY"), (str(target.leaf), "LEAF")):
        told = re.sub(rf"\b{re.escape(value)}\b", role, told)
    return told


async def stored(store: Store) -> object:
    """All that the owner sees of its sessions."""
    seen: list[object] = []
    for name in ("a1", "a1-task", "a2"):
        row = replace(await store.session(name), updated_ms=0)
        seen += [row, await history(store, name), await store.moves(name), await store.queued(name)]
        seen += [await store.usage_by_model(name), await store.shares(name)]
    return seen


def test_every_method_of_a_store_has_a_rule_for_principals() -> None:
    assert set(METHODS) == READS | WRITES | OWNS | TOKENS | OTHERS, "decide who may call the new method"
    assert [name for name in METHODS if name not in vars(PrincipalStore)] == []


async def test_a_stranger_gets_from_every_method_what_it_gets_for_an_unknown_id(scene: Scene) -> None:
    before = await stored(scene.store)
    names = list(METHODS)
    for start in range(0, len(names), 10):
        for name in (tried := names[start : start + 10]):
            told = await outcome(scene.bob, name, scene.secret)
            assert SECRET not in told.replace(repr(SECRET), ""), name
            assert told == await outcome(scene.bob, name, scene.unknown), name
        assert await stored(scene.store) == before, tried


async def test_a_stranger_costs_the_same_statements_as_an_unknown_id(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        scene = await make_scene(store)
        statements: list[str] = []
        for connection in (store.database._writer, await store.database._open_reader()):
            await connection.run(lambda one: one.set_trace_callback(statements.append))

        async def taken(name: str, target: Target) -> list[str]:
            statements.clear()
            await outcome(scene.bob, name, target)
            return [re.sub(r"'[^']*'|\b[0-9]+\b", "?", one) for one in statements]

        for name in METHODS:
            if name not in ("close", "tidy", "learned"):  # the last is cached, and names no session
                assert await taken(name, scene.secret) == await taken(name, scene.unknown), name
    finally:
        await store.close()


@pytest.mark.long
@pytest.mark.parametrize("access", ["read", "write"])
async def test_a_share_allows_what_it_says_and_no_more(scene: Scene, access: Any) -> None:
    await scene.ann.share_session("a1", "bob", access)
    allowed = READS | (WRITES if access == "write" else frozenset())
    for name in sorted(OWNS | (WRITES - allowed)):
        before = await stored(scene.store)
        assert (await outcome(scene.bob, name, scene.secret)).startswith(
            "ArgumentError: Session SESSION is shared with"
        )
        assert await stored(scene.store) == before, name
    for name in sorted(READS):
        told = await outcome(scene.bob, name, scene.secret)
        assert "Error" not in told, name
    for name in sorted(WRITES & allowed):
        told = await outcome(scene.bob, name, scene.secret)
        assert not re.search("shared with you|not found", told), name
    await scene.ann.share_session("a1", "bob", None)
    await scene.bob.delete_session("made")  # his fork would still show him what it contains
    for name in sorted((READS | WRITES | OWNS) - {"create_session", "fork_session"}):
        assert await outcome(scene.bob, name, scene.secret) == await outcome(scene.bob, name, scene.unknown), name


async def test_a_share_covers_subagents_of_now_and_later_but_no_other_session(scene: Scene) -> None:
    await scene.ann.share_session("a1", "bob", "read")
    await scene.ann.create_session(new_session("a1-later", cwd="/ann", parent_id="a1"))
    assert [await scene.bob.access(name) for name in ("a1", "a1-task", "a1-later")] == ["read"] * 3
    assert await scene.bob.access("a2") is None
    assert row_ids((await scene.bob.sessions()).rows) == ["b1", "a1"]
    assert (await scene.bob.session("a1")).alias is None
    with pytest.raises(ArgumentError, match="Share the session that started it, a1"):
        await scene.ann.share_session("a1-task", "bob", "read")
    with pytest.raises(ArgumentError, match="belongs to ann already"):
        await scene.ann.share_session("a1", "ann", "read")
    await scene.ann.share_session("a1", "bob", None)
    assert [await scene.bob.access(name) for name in ("a1", "a1-task", "a1-later")] == [None] * 3


async def test_only_the_owner_sees_with_whom_else_a_session_is_shared(scene: Scene) -> None:
    for name in ("bob", "eve"):
        await scene.ann.share_session("a1", name, "read")
    made = {share.principal: share for share in await scene.ann.shares("a1")}
    assert made["eve"] == Share(session="a1", principal="eve", access="read", created_ms=made["eve"].created_ms)
    assert made.keys() == {"bob", "eve"}
    assert [share.principal for share in await scene.bob.shares("a1")] == ["bob"]
    assert await scene.bob.access_of("a1", "eve") is None


async def test_a_fork_of_a_shared_session_is_the_forkers_own_and_shows_only_what_was_shared(scene: Scene) -> None:
    """No entries are copied, so the fork is in the owner's conversation; what the owner adds later stays hidden."""
    await scene.ann.share_session("a1", "bob", "read")
    fork = await scene.bob.fork_session("a1", "f1", entry=None, cwd="/bob", additional_directories=())
    assert (fork.principal, fork.title) == ("bob", f"{SECRET} title (fork 1)")
    await scene.ann.share_session("a1", "bob", None)
    later = await converse(scene.ann, "a1", f"{SECRET} later")
    seen = ids(await history(scene.bob, "f1"))
    assert seen == ids(await history(scene.ann, "a1"))[: len(seen)]
    (hit, *_) = await scene.bob.search(f"{SECRET} one")
    assert hit.session == "f1"
    assert await scene.bob.entry(seen[0]) is not None
    row = await scene.bob.session("f1")
    for hidden in later:
        assert await scene.bob.entry(hidden.id) is None
        assert await scene.bob.entries_beyond(hidden.id, None, ("user", "assistant")) == ()
        with pytest.raises(ArgumentError, match=f"Entry {hidden.id} is not in the conversation of session f1"):
            await scene.bob.move_leaf("f1", leaf=row.leaf, to=hidden.id, reason="rewind")
        with pytest.raises(ArgumentError, match=f"Entry {hidden.id} is not in conversation {row.conversation};"):
            await scene.bob.fork_session("f1", "f2", entry=hidden.id, cwd="/bob", additional_directories=())
    (asked,) = await add(scene.ann, "a1", said("look", calls=1))
    (done,) = await add(scene.ann, "a1", result(asked.id, SECRET))
    assert await scene.ann.result("a1", CallRef(assistant=asked.id, index=0)) == done
    assert await scene.bob.result("f1", CallRef(assistant=asked.id, index=0)) is None
    await scene.ann.delete_session("a1")
    await scene.store.tidy()
    assert ids(await history(scene.bob, "f1")) == seen


async def test_the_owner_of_a_session_does_not_see_what_others_add_to_their_forks(scene: Scene) -> None:
    await scene.ann.share_session("a1", "bob", "write")
    await scene.bob.fork_session("a1", "f1", entry=None, cwd="/bob", additional_directories=())
    added = await converse(scene.bob, "f1", "mine alone")
    row = await scene.ann.session("a1")
    with pytest.raises(ArgumentError):
        await scene.ann.move_leaf("a1", leaf=row.leaf, to=added[0].id, reason="rewind")
    assert await scene.ann.search("mine alone") == ()
    assert "f1" not in row_ids((await scene.ann.sessions()).rows)


async def test_each_principal_has_its_own_aliases(scene: Scene) -> None:
    await scene.bob.update_session("b1", SessionChanges(alias="home"))
    await scene.store.create_session(new_session("local", alias="home"))
    found = [await one.session_by_alias("home") for one in (scene.ann, scene.bob, scene.store)]
    assert [row.id if row else None for row in found] == ["a1", "b1", "local"]
    admin = open_admin(scene.store)
    assert await admin.find("home") == "local"
    await scene.store.delete_session("local")
    with pytest.raises(ArgumentError, match='No session "home"'):
        await admin.find("home")
    with pytest.raises(ArgumentError, match='Alias "home" belongs to session b1'):
        await scene.bob.create_session(new_session("b2", alias="home"))


async def test_what_may_be_prompted_by_others_reaches_only_the_shared_session(scene: Scene) -> None:
    """The tools and commands of an open session run for whoever prompts, so they use a store of the session."""
    row = await scene.ann.session("a1")
    view = session_view(scene.ann, row)
    assert {hit.session for hit in await view.search(SECRET)} >= {"a1", "a2"}
    assert row_ids((await view.sessions()).rows) == ["a1", "a2"]
    await scene.ann.share_session("a1", "bob", "write")
    assert {hit.session for hit in await view.search(SECRET)} == {"a1"}
    assert (await view.sessions()).rows == ()
    assert await view.session_by_alias("home") == await scene.ann.session("a1")
    assert (await view.session("a1-task")).parent_id == "a1"
    with pytest.raises(NoSuchSession):
        await view.session("a2")
    for attempt in (
        view.fork_session("a1", "x", entry=None, cwd="/", additional_directories=()),
        view.create_session(new_session("x")),
    ):
        with pytest.raises(ArgumentError, match="not available while the session is shared"):
            await attempt
    fork = (await converse(scene.ann, "a2", "only in the fork"))[0]
    assert await view.entry(fork.id) is None
    await view.create_session(new_session("a1-new", parent_id="a1"))
    assert (await scene.store.session("a1-new")).principal == "ann"
    await converse(view, "a1-new", "a task")
    local = session_view(scene.store, await scene.store.create_session(new_session("mine")))
    assert {hit.session for hit in await local.search("hello")} == {"b1"}
    await scene.store.share_session("mine", "bob", "write")
    assert await local.search("hello") == ()


async def test_subagents_that_are_each_others_parents_are_no_subagents_of_a_shared_session(
    sqlite_store: SqliteStore,
) -> None:
    home = await sqlite_store.create_session(replace(new_session("home"), principal="ann"))
    for name in ("a", "b"):
        await sqlite_store.create_session(new_session(name))
    with closing(sqlite3.connect(sqlite_store.database.path, isolation_level=None)) as connection:
        connection.execute("UPDATE sessions SET parent_id = iif(id = 'a', 'b', 'a') WHERE id IN ('a', 'b')")
    view = session_view(sqlite_store, home)
    await sqlite_store.share_session("home", "bob", "read")
    with anyio.fail_after(60), pytest.raises(NoSuchSession):
        await view.session("a")


async def test_the_list_of_a_principal_reads_nothing_of_others(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        bob, steps = PrincipalStore(store, "bob"), 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        await (await store.database._open_reader()).run(lambda one: one.set_progress_handler(count, 1))
        assert (await bob.sessions()).rows == ()
        alone, steps = steps, 0
        await store.database.write(
            lambda sql: sql.execute(
                "INSERT INTO sessions (id, conversation, cwd, model, mode, has_prompt, principal, created_ms,"
                " updated_ms) WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)"
                " SELECT 's' || i, 1, '/', 'm', 'ask', 1, 'ann', 0, 0 FROM n"
            )
        )
        assert (await bob.sessions()).rows == ()
        assert steps < alone + 50  # 500 sessions of others would take thousands
    finally:
        await store.close()


async def test_deleting_needs_the_owner_and_ends_the_shares(scene: Scene) -> None:
    await scene.ann.share_session("a1", "bob", "write")
    with pytest.raises(ArgumentError, match="only its owner"):
        await scene.bob.delete_session("a1")
    await scene.ann.delete_session("a1")
    with pytest.raises(NoSuchSession):
        await scene.bob.session("a1")
    assert await scene.bob.access("a1") is None
    with pytest.raises(NoSuchSession):
        await scene.ann.session("a1")


async def test_tokens_are_stored_listed_and_revoked_once(store: Store) -> None:
    first = Token(id="one", principal="ann", hash="h", label="laptop", created_ms=5, expires_ms=9)
    for token in (first, Token(id="two", principal="bob", hash="k", created_ms=6)):
        await store.add_token(token)
    with pytest.raises(ArgumentError, match="one is taken"):
        await store.add_token(first)
    await store.note_token_use("one", 7)
    assert await store.token("one") == replace(first, used_ms=7)
    assert await store.revoke_token("one")
    assert not await store.revoke_token("one")
    assert not await store.revoke_token("none")
    assert [(token.id, token.revoked_ms is None) for token in await store.tokens()] == [("one", False), ("two", True)]
    assert await store.token("none") is None


async def test_a_database_of_an_older_version_keeps_its_sessions_numbers_and_aliases(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    store = await SqliteStore.open(path)
    for name in ("s1", "s2"):
        await store.create_session(new_session(name, title=f"title {name}", alias=f"alias {name}"))
    await converse(store, "s1", "hello")
    await store.close()
    make_older(path, 9)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM sessions WHERE id = 's2'")
        connection.commit()
    store = await SqliteStore.open(path)
    try:
        row = await store.session("s1")
        assert (row.alias, row.principal, row.title) == ("alias s1", None, "title s1")
        await store.create_session(new_session("s3", title="new"))
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT id, number FROM sessions ORDER BY number").fetchall() == [
                ("s1", 1),
                ("s3", 3),
            ]
        assert [hit.session for hit in await store.search("title")] == ["s1"]
    finally:
        await store.close()


PRINCIPALS = ("ann", "bob", "eve")

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("new", "say", "say", "fork", "fork", "share", "share", "unshare", "delete", "undo", "alias")),
        st.sampled_from(PRINCIPALS),
        st.sampled_from(PRINCIPALS),
        st.integers(0, 7),
        st.booleans(),
    ),
    min_size=6,
    max_size=24,
)


@dataclass
class Known:
    """What the model knows of a session: who may do what, and the words on its path."""

    owner: str
    words: list[str]
    shares: dict[str, str]
    alias: str | None = None


class Model:
    """Plain rules, beside a real store, for `Known` sessions."""

    def __init__(self, store: Store) -> None:
        self.views = {name: PrincipalStore(store, name) for name in PRINCIPALS}
        self.known: dict[str, Known] = {}
        self.made = 0

    def may(self, who: str, name: str) -> str | None:
        known = self.known[name]
        return "own" if known.owner == who else known.shares.get(who)

    async def step(self, kind: str, who: str, other: str, which: int, flag: bool) -> None:
        view, named = self.views[who], f"s{self.made}"
        if kind == "new" or not self.known:
            self.made += 1
            await view.create_session(new_session(named))
            self.known[named] = Known(owner=who, words=[], shares={})
            return
        name = sorted(self.known)[which % len(self.known)]
        known, access = self.known[name], self.may(who, name)
        word = f"word{self.made}x"
        self.made += 1
        attempts: dict[str, tuple[str, Callable[[], Any]]] = {
            "say": ("write", lambda: converse(view, name, word)),
            "fork": (
                "read",
                lambda: view.fork_session(name, named, entry=None, cwd="/", additional_directories=()),
            ),
            "share": ("own", lambda: view.share_session(name, other, "write" if flag else "read")),
            "unshare": ("own", lambda: view.share_session(name, other, None)),
            "delete": ("own", lambda: view.delete_session(name)),
            "undo": ("write", lambda: undo(view, name)),
            "alias": ("own", lambda: view.update_session(name, SessionChanges(alias="a"))),
        }
        need, attempt = attempts[kind]
        allowed = access == "own" or access == need or (access == "write" and need == "read")
        if kind in ("share", "unshare") and other == known.owner:
            allowed = False
        if kind == "alias" and any(one.alias and one.owner == who for key, one in self.known.items() if key != name):
            allowed = False
        try:
            await attempt()
        except NoSuchSession:
            assert access is None, (kind, who, name)
            return
        except ArgumentError:
            assert access is not None, (kind, who, name)
            assert not allowed, (kind, who, name)
            return
        assert allowed or (kind == "delete" and access is None), (kind, who, name)
        if not allowed:
            return
        match kind:
            case "say":
                known.words.append(word)
            case "fork":
                self.known[named] = Known(owner=who, words=list(known.words), shares={})
            case "share":
                known.shares[other] = "write" if flag else "read"
            case "unshare":
                known.shares.pop(other, None)
            case "delete":
                del self.known[name]
            case "undo":
                del known.words[-1:]
            case "alias":
                known.alias = "a"

    async def check(self, store: Store) -> None:
        listed = {name for name in self.known if (await store.session(name)).has_prompt}
        for who, view in self.views.items():
            mine = {name for name in self.known if self.may(who, name)}
            page = await view.sessions(limit=100)
            assert {row.id for row in page.rows} == mine & listed
            hits = await view.search("word", limit=1_000)
            assert {hit.session for hit in hits} <= mine
            aliased = await view.session_by_alias("a")
            own = [name for name, known in self.known.items() if known.owner == who and known.alias]
            assert [aliased.id] == own if aliased else not own
            for name, known in self.known.items():
                assert await view.access(name) == self.may(who, name)
                if name not in mine:
                    with pytest.raises(NoSuchSession):
                        await view.tail(name)
                    continue
                texts = [part.text for entry in await history(view, name) for part in getattr(entry.body, "parts", ())]
                assert texts == known.words


async def undo(view: Store, name: str) -> None:
    """Move a session to before its last prompt."""
    row = await view.session(name)
    prompts: list[Entry] = [entry for entry in await history(view, name) if hasattr(entry.body, "parts")]
    if not prompts:
        await view.merge_metadata(name, {})
        return
    await view.move_leaf(name, leaf=row.leaf, to=prompts[-1].parent, reason="undo")


@settings(max_examples=examples(10), deadline=None)
@given(steps=STEPS)
def test_whatever_principals_do_each_sees_what_the_rules_say(steps: list[tuple[str, str, str, int, bool]]) -> None:
    anyio.run(live, steps)


async def live(steps: list[tuple[str, str, str, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = await SqliteStore.open(Path(directory) / "crow.db")
        try:
            model = Model(store)
            for step in steps:
                await model.step(*step)
            await model.check(store)
        finally:
            await store.close()
