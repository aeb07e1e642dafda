"""`crow sessions`, `crow config` and the Python API say the same about a PostgreSQL database as about a file."""

from __future__ import annotations

import builtins
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

import crow
from crow.adapters import open_admin, open_store_at
from crow.cli import main
from crow.settings import load_settings
from crow.store.codec import tags_patch
from crow.store.copying import SessionCopy
from crow.store.sqlite.store import SqliteStore
from tests.cli.test_sessions import fill
from tests.store.scenes import converse, new_session
from tests.support.postgres import create_database, drop_database


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "CROW_MODEL", "CROW_LOG", "CROW_CONFIG", "CROW_DATABASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CROW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def url(home: Path) -> Iterator[str]:
    """An empty PostgreSQL database."""
    made = anyio.run(create_database)
    yield made
    anyio.run(drop_database, made)


class BothDatabases:
    """Runs command lines on a file, and on a PostgreSQL database with the same sessions."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def crow(self, *arguments: str, in_postgres: bool) -> tuple[int, str, str]:
        with self._monkeypatch.context() as patched:
            if in_postgres:
                patched.setenv("CROW_DATABASE_URL", self.url)
            return main(arguments), *self._capfd.readouterr()

    def same(self, *arguments: str) -> str:
        """The output, which must be the same for both."""
        code, out, err = self.crow("sessions", *arguments, in_postgres=False)
        assert self.crow("sessions", *arguments, in_postgres=True) == (code, out, err)
        return out + err


@pytest.fixture
def both(home: Path, url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> BothDatabases:
    async def prepare() -> None:
        await fill(home)
        store = await SqliteStore.open(home / "crow.db")
        await store.create_session(new_session("sub", parent_id="aaaa1111-one", cwd="/one"))
        await converse(store, "sub", "find the needle")
        await store.merge_metadata("aaaa1111-one", tags_patch({}, add=["red"], remove=[]))
        other = await open_store_at(load_settings({}, {}), url)
        await SessionCopy(open_admin(store), open_admin(other), other, lambda _: None).run()
        await store.close()
        await other.close()

    anyio.run(prepare)
    return BothDatabases(url, monkeypatch, capfd)


COMMANDS = """
list
list --json
--all
--model M1
--title first
--cwd /one
--continue --cwd /two
--since 1d
--tag red
show aaaa1
show aaaa1 --full
show aaaa1 --call call_2_0
show cli:default --as-model
show sub --json
show aaaa
show bbbb
show ''
tag
search needle
search NEEDLE one
search needle --cwd /two
stats
stats --by day
stats --by model,day --json
export --all
export aaaa1
export aaaa1 --format markdown
prune --older-than 2200-01-01 --dry-run
"""

WITHOUT_RESULT = """
--archived
--model m2
--until 1d
search %
search needles
stats --model none
prune --older-than 2000-01-01
"""

CHANGES = """
archive aaaa2
--archived
unarchive aaaa2
rename aaaa1 New name
tag aaaa2 blue
tag aaaa1 --remove red
--tag blue
tag
import FILE
delete aaaa1
list
search needle
stats
import FILE
import FILE
list
show aaaa1 --full
stats
delete aaaa2 nobody
prune --older-than 2200-01-01
"""


@pytest.mark.long
def test_commands_print_the_same_for_both_engines(both: BothDatabases) -> None:
    for command in COMMANDS.strip().splitlines():
        assert both.same(*shlex.split(command)), command
    for command in WITHOUT_RESULT.strip().splitlines():
        assert both.same(*command.split()) == "", command


@pytest.mark.long
def test_changes_have_the_same_effect_on_both_engines(both: BothDatabases, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    both.crow("sessions", "export", "aaaa1", "-o", str(file), in_postgres=True)
    for command in CHANGES.strip().splitlines():
        assert both.same(*command.replace("FILE", str(file)).split()), command
    assert both.same("list") == both.same("stats") == ""


def test_what_only_a_file_can_do_says_what_to_do_instead(both: BothDatabases, tmp_path: Path) -> None:
    code, out, err = both.crow("sessions", "backup", str(tmp_path / "b.db"), in_postgres=True)
    assert (code, out) == (2, "")
    assert "Use pg_dump: pg_dump --format custom" in err
    assert not (tmp_path / "b.db").exists()
    code, out, err = both.crow("sessions", "vacuum", in_postgres=True)
    assert (code, out) == (2, "")
    assert "PostgreSQL frees the space of removed sessions by itself (autovacuum)." in err
    code, out, err = both.crow("doctor", "--repair", in_postgres=True)
    assert (code, out) == (2, "")
    assert "Crow can repair only SQLite files, but the sessions are in postgresql://" in err
    code, out, err = both.crow("sessions", "stats", "--disk", "--json", in_postgres=True)
    rows = {row["what"]: row for row in map(json.loads, out.splitlines())}
    assert (code, err, rows["entries: user"]["number"]) == (0, "", 3)
    assert rows["the whole database"]["bytes"] > 1_000_000


def test_the_doctor_opens_the_database_and_says_what_is_wrong(
    url: str, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROW_MODEL", "offline")
    monkeypatch.setenv("CROW_SANDBOX", "off")

    def database() -> dict[str, Any]:
        main(["doctor", "--json"])
        out, err = capfd.readouterr()
        assert err == ""
        assert "sk-" not in out
        (found,) = [one for one in map(json.loads, out.splitlines()) if one["check"] == "database"]
        return dict(found)

    monkeypatch.setenv("CROW_DATABASE_URL", url.replace("postgres:@", "postgres:sk-secret@"))
    found = database()
    assert (found["state"], found["words"].endswith(" has no sessions yet")) == ("ok", True)
    assert found["words"].startswith("postgresql://postgres:…@/crow_")
    monkeypatch.setenv("CROW_DATABASE_URL", "postgresql://me:sk-secret@127.0.0.1:1/team")
    found = database()
    assert found["state"] == "failed"
    assert "PostgreSQL database team on 127.0.0.1:1 cannot be used: " in found["words"]


def test_copy_moves_sessions_from_the_file_to_the_server(
    both: BothDatabases, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "other.db")
    assert main(["sessions", "copy", "--to", target]) == 0
    assert capfd.readouterr().out == "Copied and verified 3 sessions with 17 entries.\n"
    assert main(["sessions", "copy", "--from", both.url, "--to", target, "--json"]) == 0
    reported = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [one["outcome"] for one in reported] == ["known"] * 3
    assert [one["sessions"] for one in reported] == [["aaaa1111-one"], ["aaaa2222-two"], ["sub"]]
    both.crow("sessions", "rename", "aaaa1", "Other", in_postgres=True)
    code, out, err = both.crow("sessions", "copy", "--from", target, in_postgres=True)
    assert (code, out, err) == (
        0,
        "Copied and verified 0 sessions with 0 entries.\n3 conversations had been copied before.\n",
        "",
    )
    for arguments in (["--to", str(home / "crow.db")], [], ["--from", both.url, "--to", both.url]):
        assert main(["sessions", "copy", *arguments]) == 2
        assert capfd.readouterr().err == "crow: --from and --to name the same database; expected two different ones.\n"
    assert main(["sessions", "copy", "--from", str(tmp_path / "missing.db"), "--to", both.url]) == 1
    assert "There is no database at" in capfd.readouterr().err


async def test_the_python_api_reads_either_database(both: BothDatabases, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(path: str | None) -> Any:
        async with crow.Sessions.open(path) as sessions:
            one = await sessions.get("aaaa1")
            hits = await sessions.search("needle", workspace="/one")
            export = b"".join([piece async for piece in sessions.export()])
            return await sessions.list(), await one.messages(), await one.context(), hits, export

    expected = await read(None)
    assert await read(both.url) == expected
    monkeypatch.setenv("CROW_DATABASE_URL", both.url)
    assert await read(None) == expected


# what can be wrong


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("postgresql://me:sk-secret@127.0.0.1:1/team", "PostgreSQL database team on 127.0.0.1:1 cannot be used: "),
        ("postgresql://me:sk-secret@127.0.0.1:x/team", "The database URL is not valid. Either the part"),
        ("postgresql://me:sk-secret/x@127.0.0.1/team", "The database URL is not valid. Either the part"),
        ("mysql://me:sk-secret@127.0.0.1/team", 'The database URL begins with "mysql:".'),
        ("postgresql://me:sk-secret@127.0.0.1:1/team?sslmode=sometimes", "sslmode"),
        (
            "postgresql://me:sk-secret@127.0.0.1:1/team?sslmode=verify-full&sslrootcert=/no.pem",
            "No such file: either the server's socket, or",
        ),
        ("{nobody}", 'role "nobody_here" does not exist'),
        ("{server}/no_such_database?{query}", 'database "no_such_database" does not exist'),
    ],
)
def test_a_database_that_cannot_be_opened_is_named_without_its_password(
    url: str, place: str, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, rest = url.rpartition("/crow_")
    place = (
        place.replace("{nobody}", url.replace("postgres:@", "nobody_here:sk-secret@"))
        .replace("{server}", server)
        .replace("{query}", rest.partition("?")[2])
    )
    monkeypatch.setenv("HOME", "/nowhere")
    assert main(["sessions", "copy", "--from", place, "--to", "x.db"]) in (1, 2)
    _, err = capfd.readouterr()
    assert words in err
    assert "sk-" not in err
    assert err.count("\n") == 1


def test_without_the_driver_the_package_to_install_is_named(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> ModuleType:
        if name.partition(".")[0] == "asyncpg":
            raise ModuleNotFoundError("No module named 'asyncpg'", name="asyncpg")
        return real(name, *arguments, **options)

    for name in [name for name in sys.modules if name.startswith("crow.store.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setenv("CROW_DATABASE_URL", "postgresql://me@db/team")
    assert main(["sessions"]) == 2
    assert "pipx install --force '.[postgres]'" in capfd.readouterr().err


def test_config_shows_where_sessions_are_but_no_password(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROW_DATABASE_URL", "postgresql://me:sk-secret@db.example/team?sslmode=require")
    assert main(["config"]) == 0
    out, _ = capfd.readouterr()
    shown = "postgresql://me:…@db.example/team?sslmode=require"
    assert f"# sessions   {shown}\n" in out
    assert f'= "{shown}"' in out
    assert "environment CROW_DATABASE_URL" in out
    assert "sk-" not in out
