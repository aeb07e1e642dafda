"""Links to pages: addresses, expiry, revoking and hostile input."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.errors import ArgumentError
from crow.export.links import PATH, PageLinks, parse_lifetime
from crow.export.redact import redactor
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import converse, new_session

EVIL = "</title><script>alert(1)</script>\x1b]0;owned\x07 \u202etitle sk-ant-REDACT"
KEY = "key-that-is-secret"


def links_in(folder: Path, url: str = "https://crow.example/") -> PageLinks:
    return PageLinks(folder, url=lambda: url, redactor=lambda strict: redactor([KEY], is_strict=strict))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / "crow.db")
    await opened.create_session(new_session("s1", title=EVIL))
    await converse(opened, "s1", f"use {KEY} and mail ann@example.org")
    yield opened
    await opened.close()


async def test_a_link_shows_the_page_as_it_was_and_its_record_holds_no_secret(
    store: SqliteStore, tmp_path: Path
) -> None:
    links = links_in(tmp_path / "links")
    link, url = await links.add(store, "s1", age="2h", is_strict=False)
    address = url.removeprefix(f"https://crow.example{PATH}")
    assert len(address) == 62
    found = await links.find(address)
    assert found is not None
    shown, page = found
    assert shown == link == (await links.list())[0]
    await converse(store, "s1", "later words")
    html = page.read_text()
    assert KEY not in html
    assert "ann@example.org" in html
    assert "<script>alert(1)" not in html
    assert "later words" not in html
    assert "\x1b" not in link.title
    assert "\u202e" not in link.title
    assert link.expires_ms - link.created_ms == 2 * 3_600_000
    records = "".join(file.read_text() for file in (tmp_path / "links").glob("*.json"))
    assert address[10:] not in records
    assert "sandbox allow-scripts" in link.policy
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "links").iterdir()}
    assert (modes, (tmp_path / "links").stat().st_mode & 0o777) == ({0o600}, 0o700)


async def test_a_strict_page_hides_personal_data_too(store: SqliteStore, tmp_path: Path) -> None:
    links = links_in(tmp_path / "links")
    _, url = await links.add(store, "s1", age="7d", is_strict=True)
    found = await links.find(url.rpartition("/")[2])
    assert found is not None
    assert "ann@example.org" not in found[1].read_text()


async def test_revoked_and_expired_links_are_not_found_and_their_files_are_gone(
    store: SqliteStore, tmp_path: Path
) -> None:
    links = links_in(folder := tmp_path / "links")
    first, url = await links.add(store, "s1", age="1h", is_strict=False)
    assert await links.revoke(first.id) == first
    assert await links.find(url.rpartition("/")[2]) is None
    second, url = await links.add(store, "s1", age="1h", is_strict=False)
    record = folder / f"{second.id}.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"expires_ms": time.time_ns() // 1_000_000 - 1}))
    assert await links.find(url.rpartition("/")[2]) is None
    assert (await links.list(), list(folder.iterdir())) == ((), [])
    with pytest.raises(ArgumentError, match='There is no link "aaaaaaaaaa"'):
        await links.revoke("aaaaaaaaaa")


async def test_pages_of_killed_processes_are_removed_after_an_hour(store: SqliteStore, tmp_path: Path) -> None:
    links = links_in(tmp_path)
    link, _ = await links.add(store, "s1", age="2h", is_strict=False)
    old, new = "a" * 10, "b" * 10
    for name in (f"{old}.html", f"{old}.part", f"{link.id}.html", f"{new}.html"):
        (tmp_path / name).touch()
        if not name.startswith(new):
            os.utime(tmp_path / name, (0, 0))
    assert [one.id for one in await links.list()] == [link.id]
    assert sorted(name for name in os.listdir(tmp_path) if "crow.db" not in name) == sorted(
        [f"{link.id}.html", f"{link.id}.json", f"{new}.html"]
    )


async def test_a_link_is_revoked_only_by_its_owner(store: SqliteStore, tmp_path: Path) -> None:
    links = links_in(tmp_path / "links")
    link, _ = await links.add(store, "s1", age="1h", is_strict=False)
    with pytest.raises(ArgumentError, match="There is no link"):
        await links.revoke(link.id, is_own=lambda each: each.principal == "bob")
    assert await links.list() == (link,)


async def test_a_wrong_secret_finds_nothing(store: SqliteStore, tmp_path: Path) -> None:
    links = links_in(tmp_path / "links")
    _, url = await links.add(store, "s1", age="1h", is_strict=False)
    address = url.rpartition("/")[2]
    for wrong in (address[:-2] + "zz", address[:-1], address + "a", address.upper(), f"{address}\n", "", "a" * 62):
        assert await links.find(wrong) is None


@given(st.text(max_size=80) | st.from_regex(r"[a-z2-7./%]{0,70}", fullmatch=True))
async def test_no_address_leads_out_of_the_folder(address: str) -> None:
    folder = Path(os.devnull).parent / "nowhere"
    assert await links_in(folder).find(address) is None
    assert await links_in(Path(__file__).parent).find(f"../{address}") is None


async def test_a_damaged_record_is_no_link(store: SqliteStore, tmp_path: Path) -> None:
    links = links_in(folder := tmp_path / "links")
    link, url = await links.add(store, "s1", age="1h", is_strict=False)
    (folder / "notes.json").write_text("{}")
    for text in ("", "[]", "{}", '{"id": 1}', "\xff"):
        (folder / f"{link.id}.json").write_text(text)
        assert await links.find(url.rpartition("/")[2]) is None
        assert await links.list() == ()


@pytest.mark.parametrize("text", ["", "0d", "7", "d7", "367d", "-1d", "9999w", "7d\n", "١d"])
def test_a_lifetime_that_is_not_valid_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a lifetime; expected 1h to 366d"):
        parse_lifetime(text)


def test_a_lifetime_is_in_hours_days_or_weeks() -> None:
    assert [parse_lifetime(text) for text in ("1h", "2d", "3w")] == [3_600_000, 172_800_000, 1_814_400_000]
