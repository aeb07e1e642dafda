"""`crow mcp`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any

import pytest

from crow.cli import main
from crow.settings.write import add_server, without_server
from tests.support.oauth_server import OAuthServer, oauth_server, visit
from tests.support.terminal import forkable, start

SERVERS = Path(__file__).parents[1] / "tools" / "servers"

FILE = """\
# mine
[model]
name = "m" # the good one

# about a
[mcp_servers.a]
command = "x"
args = [
  "1", # one
]
[mcp_servers.a.env]
K = "v"

# about b
[mcp_servers."b c"]
url = "https://x/y"

# the end
[log]
level = "info"
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "CROW_MODEL", "CROW_LOG", "CROW_CONFIG", "DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("CROW_HOME", str(home))
    return home


@pytest.fixture
def server() -> Iterator[OAuthServer]:
    with oauth_server() as running:
        yield running


def mcp(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run `crow mcp`; return the exit code and all output."""
    code = main(["mcp", *arguments])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


# Editing the file


def test_a_server_is_added_and_removed_with_every_comment_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home / "config.toml"
    file.write_text(FILE)
    assert mcp(capsys, "add", "web", "https://example.com/mcp", "--header", "X-Key: ${KEY}")[0] == 0
    assert file.read_text() == FILE + (
        '\n[mcp_servers.web]\nurl = "https://example.com/mcp"\nheaders = {X-Key = "${KEY}"}\n'
    )
    assert mcp(capsys, "remove", "web") == (0, f"Removed web from {file}.\n")
    assert file.read_text() == FILE + "\n"


def test_a_removed_server_takes_only_its_own_tables_along() -> None:
    left = without_server(FILE, "a")
    assert left == FILE.replace(FILE[FILE.index("[mcp_servers.a]") : FILE.index("# about b")], "\n")
    assert without_server(FILE, "b c") == FILE.replace('[mcp_servers."b c"]\nurl = "https://x/y"\n', "")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (
            ("--", "npx", "-y", "server", "--root", "/srv"),
            {"command": "npx", "args": ["-y", "server", "--root", "/srv"]},
        ),
        (("--env", "A=b=c", "--sandbox", "read", "prog"), {"command": "prog", "env": {"A": "b=c"}, "sandbox": "read"}),
        (("https://x/sse", "--transport", "sse"), {"url": "https://x/sse", "transport": "sse"}),
    ],
)
def test_a_command_and_a_url_become_a_table(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], values: dict[str, Any]
) -> None:
    assert mcp(capsys, "add", "new.one", *arguments)[0] == 0
    assert tomllib.loads((home / "config.toml").read_text()) == {"mcp_servers": {"new.one": values}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "ftp://x"), "url cannot be used; expected an http or https URL."),
        (("a", "https://x", "more"), "https://x is a URL, which takes no arguments, no --env and no --sandbox."),
        (("a", "prog", "--header", "A: b"), "prog is a command: --header and --transport are for URLs."),
        (("a", "prog", "--env", "A"), "--env is 'A'; expected a name and a value, such as TOKEN=${TOKEN}."),
        (("", "prog"), "The name of a server has 1 to 64 characters, and '' has 0."),
        (("here", "prog"), "There is already an MCP server here; to replace it, add --replace."),
    ],
)
def test_what_cannot_be_added_changes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    before = '[mcp_servers.here]\ncommand = "x"\n'
    (home / "config.toml").write_text(before)
    assert mcp(capsys, "add", *arguments) == (2, f"crow: {words}\n")
    assert (home / "config.toml").read_text() == before


def test_a_server_is_replaced_on_request(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "config.toml").write_text('[mcp_servers.here]\ncommand = "x"\nargs = ["1"]\n')
    assert mcp(capsys, "add", "here", "--replace", "y")[0] == 0
    assert tomllib.loads((home / "config.toml").read_text()) == {"mcp_servers": {"here": {"command": "y"}}}


@pytest.mark.parametrize(
    "text",
    [
        'mcp_servers = { a = { url = "https://u" } }\n',
        'mcp_servers.a.url = "https://u"\n',
        '[model]\nname = """\n[mcp_servers.a]\n"""\n[mcp_servers]\na = { url = "https://u" }\n',
    ],
)
def test_a_file_that_cannot_be_edited_safely_is_left_alone(
    home: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (home / "config.toml").write_text(text)
    code, words = mcp(capsys, "remove", "a")
    assert (code, "edit it by hand" in words) == (2, True)
    assert (home / "config.toml").read_text() == text


def test_names_that_toml_must_quote_stay_what_they_are() -> None:
    for name in ('a"b', "a.b", "ü x", "a\nb", "]"):
        added = add_server(FILE, name, {"url": "https://u"}, replace=False)
        assert tomllib.loads(added)["mcp_servers"][name] == {"url": "https://u"}
        assert tomllib.loads(without_server(added, name)) == tomllib.loads(FILE)


# Trying servers


def test_a_trial_shows_what_a_server_lists_and_what_is_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mcp(capsys, "add", "good", "--", sys.executable, "-I", "-S", str(SERVERS / "tiny.py"), "classic")[0] == 0
    assert mcp(capsys, "add", "gone", "no-such-program")[0] == 0
    code, shown = mcp(capsys, "test")
    lines = shown.splitlines()
    assert code == 1
    assert lines[0].startswith("good: ready after ")
    assert lines[1].startswith("  14 tools in ")
    assert ": echo, refuse, broken, " in lines[1]
    assert any(line.startswith("gone: failed after ") and "no-such-program" in line for line in lines)
    code, shown = mcp(capsys, "test", "good", "--json")
    assert code == 0
    report = json.loads(shown)
    assert (report["ok"], report["listings"][0]["names"][0], report["offered"][0]) == (True, "echo", "good__echo")


def test_an_unknown_server_is_named_with_those_there_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "config.toml").write_text('[mcp_servers.here]\ncommand = "x"\n')
    where = f"{home / 'config.toml'}; the servers are here."
    assert mcp(capsys, "test", "nope") == (2, f"crow: There is no MCP server nope in {where}\n")
    assert mcp(capsys, "login", "nope") == (2, f"crow: There is no MCP server nope in {where}\n")
    assert mcp(capsys, "login", "here")[1] == (
        "crow: here is started by a command; only a server with a URL can have a login.\n"
    )


# Logging in


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Stops at the page that redirects to this machine, as a browser elsewhere does."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        self.target = newurl


def last_address(page: str) -> str:
    """Where the login ends if the browser cannot reach this machine."""
    stop = NoRedirect()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), stop)
    with pytest.raises(urllib.request.HTTPError):
        opener.open(page, timeout=60)
    return stop.target


def log_in(server: str, *, pastes: bool = False) -> tuple[int, str, str]:
    """Run `crow mcp login` and log in. Return the exit code, what it printed after the page's address, and stderr."""
    argv = ["mcp", "login", server, "--no-browser"]
    with start(argv, env=forkable(os.environ), cwd=Path.cwd(), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        page = next((line.strip().decode() for line in process.stdout if line.startswith(b"  http")), "")
        if page and not pastes:
            assert visit(page) == 200
        words = f"nonsense\n\n{last_address(page)}\n" if page and pastes else ""
        rest, errors = process.communicate(words.encode(), timeout=120)
    return process.wait(), rest.decode(), errors.decode()


@pytest.mark.long
@pytest.mark.parametrize("how", ["browser", "paste"])
def test_a_login_in_the_browser_is_kept_until_the_logout(
    home: Path, capsys: pytest.CaptureFixture[str], server: OAuthServer, how: str
) -> None:
    (home / "config.toml").write_text(f'[mcp_servers.web]\nurl = "{server.url}"\n')
    assert mcp(capsys, "test", "web")[1].endswith("it needs you to log in; run `crow mcp login web`\n")
    code, rest, errors = log_in("web", pastes=how == "paste")
    assert (code, errors) == (0, "")
    assert rest.endswith(f"Logged in to web at {server.base}.\n")
    assert ("That is not the address of the last login page." in rest) == (how == "paste")
    assert mcp(capsys, "list") == (0, f"web\t{server.url}\tlogged in at {server.base}\n")
    code, shown = mcp(capsys, "test", "web")
    assert (code, "1 tool in " in shown) == (0, True)
    revoked = "Logged out of web: its tokens are revoked and deleted.\n"
    assert mcp(capsys, "logout", "web") == (0, revoked)
    assert server.valid == {}
    assert server.refresh_tokens == set()
    assert mcp(capsys, "logout", "web") == (0, "Crow is not logged in to web.\n")
    assert list((home / "mcp-logins").glob("*.json")) == []
    token = "-secret-"
    assert [file for file in home.rglob("*") if file.is_file() and token in file.read_text("utf-8", "replace")] == []


def test_another_login_replaces_the_one_before(
    home: Path, capsys: pytest.CaptureFixture[str], server: OAuthServer
) -> None:
    (home / "config.toml").write_text(f'[mcp_servers.web]\nurl = "{server.url}"\n')
    found = []
    for _ in range(2):
        assert log_in("web")[0] == 0
        (file,) = (home / "mcp-logins").glob("*.json")
        found.append(json.loads(file.read_text())["tokens"]["access_token"])
    assert found[0] != found[1]
    assert server.seen.count("/register") == 1
    file.write_text("damaged")
    assert mcp(capsys, "list")[1].endswith("is damaged; delete it and log in again\n")
    assert log_in("web")[0] == 0


def test_a_login_that_fails_leaves_the_one_before(
    home: Path, capsys: pytest.CaptureFixture[str], server: OAuthServer
) -> None:
    (home / "config.toml").write_text(f'[mcp_servers.web]\nurl = "{server.url}"\n')
    assert log_in("web")[0] == 0
    (file,) = (home / "mcp-logins").glob("*.json")
    before = file.read_text()
    server.metadata["issuer"] = "https://evil.example.com"
    code, words = mcp(capsys, "login", "web")
    assert (code, words.startswith("crow: web: the login failed: ")) == (1, True)
    assert file.read_text() == before


def test_a_server_without_oauth_needs_no_login(
    home: Path, capsys: pytest.CaptureFixture[str], server: OAuthServer
) -> None:
    server.valid[""] = ""  # no token is as good as any
    assert mcp(capsys, "login", server.url) == (0, "127.0.0.1 asked for no login; it is ready.\n")


def test_a_server_with_a_header_of_its_own_is_not_logged_in_to(
    home: Path, capsys: pytest.CaptureFixture[str], server: OAuthServer
) -> None:
    header = 'headers = { authorization = "Bearer x" }'
    (home / "config.toml").write_text(f'[mcp_servers.web]\nurl = "{server.url}"\n{header}\n')
    words = "crow: web has an Authorization header in the settings; to log in instead, remove this header.\n"
    assert mcp(capsys, "login", "web") == (2, words)


def test_a_login_that_cannot_be_revoked_is_deleted_all_the_same(
    home: Path, capsys: pytest.CaptureFixture[str], server: OAuthServer
) -> None:
    server.answers["/revoke"] = lambda _: (503, {}, b"")
    assert log_in(server.url)[0] == 0
    words = "Deleted the login of 127.0.0.1. Its tokens were not revoked: "
    refused = f"{words}{server.base}/revoke did not revoke the refresh_token: HTTP 503\n"
    assert mcp(capsys, "logout", server.url) == (0, refused)
    assert list((home / "mcp-logins").glob("*.json")) == []
