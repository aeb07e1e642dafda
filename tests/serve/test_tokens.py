"""Tokens: what is accepted, what is refused and how, and what ends when one is revoked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from crow.cli import main
from crow.domain.errors import ArgumentError
from crow.serve.tokens import (
    FAILURES,
    FAILURES_PER_S,
    MAX_ADDRESSES,
    USED_MS,
    Authenticator,
    BadToken,
    FailureLimit,
    Grant,
    TooManyFailures,
    new_token,
)
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import new_session


@pytest.fixture
async def sqlite_store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """An empty store."""
    store = await SqliteStore.open(tmp_path / "crow.db")
    yield store
    await store.close()


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000


async def test_a_token_is_accepted_until_it_expires_or_is_revoked(sqlite_store: SqliteStore) -> None:
    clock = Clock()
    text, token = new_token("ann", label="laptop", expires_ms=2_000_000, now_ms=clock.ms)
    await sqlite_store.add_token(token)
    auth = Authenticator(sqlite_store, now_ms=clock, monotonic=clock.monotonic)
    assert await auth.authenticate(text, "10.0.0.1") == Grant(principal="ann", token_id=token.id)
    clock.ms = 2_000_000
    with pytest.raises(BadToken):
        await auth.authenticate(text, "10.0.0.1")
    other, revoked = new_token("ann", now_ms=clock.ms)
    await sqlite_store.add_token(revoked)
    await auth.authenticate(other, "10.0.0.1")
    assert await sqlite_store.revoke_token(revoked.id)
    with pytest.raises(BadToken):
        await auth.authenticate(other, "10.0.0.1")


async def test_nothing_but_the_exact_token_is_accepted_and_every_refusal_reads_the_same(
    sqlite_store: SqliteStore,
) -> None:
    text, token = new_token("ann")
    await sqlite_store.add_token(token)
    stranger, _ = new_token("bob")
    mixed, _ = new_token("ann")
    wrong = [
        None,
        "",
        "crow_",
        text[:-1],
        text + "a",
        text.upper(),
        f" {text}",
        f"{text}\n",
        text.replace("crow_", "crow-"),
        stranger,
        f"{text[:15]}{mixed[15:]}",
        token.hash,
        "crow_" + "ä" * 69,
        "crow_\0" + text[6:],
        "x" * 1_000_000,
    ]
    for each in wrong:
        auth = Authenticator(sqlite_store)
        with pytest.raises(BadToken) as refused:
            await auth.authenticate(each, "::1")
        assert str(refused.value) == str(BadToken())
    assert text[15:67] not in repr(await sqlite_store.tokens())


async def test_wrong_tokens_are_limited_for_an_address_but_a_valid_one_always_gets_in(
    sqlite_store: SqliteStore,
) -> None:
    clock = Clock()
    text, token = new_token("ann", now_ms=clock.ms)
    await sqlite_store.add_token(token)
    auth = Authenticator(sqlite_store, now_ms=clock, monotonic=clock.monotonic)
    for _ in range(FAILURES):
        with pytest.raises(BadToken):
            await auth.authenticate("wrong", "192.0.2.1")
    with pytest.raises(TooManyFailures) as limited:
        await auth.authenticate("wrong", "192.0.2.1")
    assert limited.value.retry_after_s == pytest.approx(1 / FAILURES_PER_S)
    with pytest.raises(BadToken):
        await auth.authenticate("wrong", "192.0.2.2")
    with pytest.raises(BadToken):
        await auth.authenticate(None, "192.0.2.1")
    assert (await auth.authenticate(text, "192.0.2.1")).principal == "ann"
    clock.ms += round(1000 / FAILURES_PER_S)
    with pytest.raises(BadToken):
        await auth.authenticate("wrong", "192.0.2.1")


def test_failures_of_many_addresses_take_bounded_memory() -> None:
    limit = FailureLimit(lambda: 0.0)
    for number in range(MAX_ADDRESSES * 2):
        limit.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(limit) == MAX_ADDRESSES
    limit = FailureLimit(lambda: 0.0)
    waits = [limit.count(f"2001:db8:0:1::{number:x}") for number in range(FAILURES + 1)]
    assert waits[-1] > 0 == max(waits[:-1])
    assert limit.count("::ffff:192.0.2.1") == limit.count("192.0.2.1") == 0
    assert len(limit) == 2
    limit.count("not an address" * 1000)
    limit.count("fe80::1%eth0")


async def test_revoking_a_token_ends_its_connections_and_no_others(sqlite_store: SqliteStore) -> None:
    clock = Clock()
    _, first = new_token("ann", now_ms=clock.ms)
    _, second = new_token("ann", now_ms=clock.ms, expires_ms=clock.ms + 1)
    for token in (first, second):
        await sqlite_store.add_token(token)
    auth = Authenticator(sqlite_store, now_ms=clock, monotonic=clock.monotonic)
    ended: list[str] = []
    grants = [Grant(principal="ann", token_id=token.id) for token in (first, first, second)]
    with (
        auth.connected(grants[0], lambda _: ended.append("one")),
        auth.connected(grants[1], lambda reason: ended.append(reason)),
        auth.connected(grants[2], lambda _: ended.append("three")),
    ):
        await auth.check()
        assert ended == []
        await sqlite_store.revoke_token(first.id)
        await auth.check()
        await auth.check()
        assert ended == ["one", "The token of this connection was revoked or has expired."]
        clock.ms += 1
        await auth.check()
        assert ended[2:] == ["three"]
    with auth.connected(grants[0], lambda _: ended.append("again")):
        await auth.check()
    assert ended[3:] == ["again"]


async def test_the_last_use_is_stored_at_most_once_a_minute(sqlite_store: SqliteStore) -> None:
    clock = Clock()
    text, token = new_token("ann", now_ms=clock.ms)
    await sqlite_store.add_token(token)
    auth = Authenticator(sqlite_store, now_ms=clock, monotonic=clock.monotonic)
    used = []
    for step_ms in (0, USED_MS - 1, 1):
        clock.ms += step_ms
        await auth.authenticate(text, "::1")
        used.append((await sqlite_store.tokens())[0].used_ms)
    assert used == [1_000_000, 1_000_000, 1_000_000 + USED_MS]


@pytest.mark.parametrize("name", ["", "-ann", "../ann", "a/b", "ann bob", "a" * 65, "ann\n", "ä", "."])
def test_names_that_could_be_taken_for_something_else_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="expected 1 to 64 of the characters"):
        new_token(name)


def test_tokens_are_managed_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROW_HOME", str(tmp_path))

    def run(*words: str) -> str:
        assert main(["serve", "token", *words]) == 0
        return capsys.readouterr().out

    text = run("add", "ann", "--label", "laptop", "--expires", "90d").strip()
    assert text.startswith("crow_")
    other = json.loads(run("add", "bob", "--json"))
    (first, second) = map(json.loads, run("list", "--json").splitlines())
    assert (first["principal"], first["label"], first["state"], first["used"]) == ("ann", "laptop", "valid", None)
    assert (second["principal"], second["id"], second["expires"]) == ("bob", other["id"], None)
    assert text[15:] not in run("list", "--all", "--json") + run("list")
    assert run("revoke", first["id"]) == f"{first['id']}: revoked\n"
    assert run("revoke", first["id"]) == f"{first['id']}: was revoked before\n"
    assert [json.loads(line)["principal"] for line in run("list", "--json").splitlines()] == ["bob"]
    for words, problem in (
        (["revoke", other["id"], "none"], 'There is no token "none"'),
        (["add", "a/b"], "expected 1 to 64 of the characters"),
        (["add", "ann", "--expires", "2001-01-01"], "expected a time in the future"),
        (["add", "ann", "--expires", "soon"], 'expires is "soon"'),
        (["add", "ann", "--label", "a\nb"], "printable"),
    ):
        assert main(["serve", "token", *words]) != 0
        assert problem in capsys.readouterr().err
    assert [json.loads(line)["id"] for line in run("list", "--json").splitlines()] == [other["id"]]


def test_sessions_are_shared_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROW_HOME", str(tmp_path))

    async def fill() -> None:
        store = await SqliteStore.open(tmp_path / "crow.db")
        await store.create_session(new_session("a1", principal="ann", title="T"))
        await store.create_session(new_session("a1-task", parent_id="a1"))
        await store.close()

    anyio.run(fill)

    def run(*words: str) -> str:
        assert main(["sessions", *words]) == 0
        return capsys.readouterr().out

    assert "bob may read it" in run("share", "a1", "bob", "--read")
    assert "eve may write it" in run("share", "a1", "eve", "--write")
    shown = run("show", "a1")
    assert "- principal: ann" in shown
    assert "- shared with: bob (read), eve (write)" in shown
    assert "no longer shared with bob" in run("unshare", "a1", "bob")
    assert "- shared with: eve (write)" in run("show", "a1")
    for words, problem in (
        (["share", "a1", "bob"], "--read"),
        (["share", "a1", "ann", "--read"], "belongs to ann already"),
        (["share", "a1-task", "bob", "--read"], "Share the session that started it"),
        (["share", "a1", "b/b", "--read"], "expected 1 to 64 of the characters"),
        (["unshare", "a1", "bob"], 'is not shared with "bob"; it is shared with eve'),
    ):
        try:
            code = main(["sessions", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        assert code != 0
        assert problem in capsys.readouterr().err
