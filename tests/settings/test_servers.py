"""MCP servers and permission rules in `config.toml`."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.adapters import configured_servers, hidden_keys, mcp_server, protected_names
from crow.cli import main
from crow.domain.protected_names import ProtectedNames
from crow.settings import Loaded, load_settings
from crow.settings.servers import expand_variables
from crow.settings.values import McpServerSettings
from crow.tools.servers import HttpServer, OAuthOptions, ServerOptions, StdioServer

TOML = """
[mcp_servers.docs]
command = "docs"
args = ["--token", "${TOKEN}"]
env = { KEY = "${TOKEN}-${OTHER}" }
allow_tools = ["get_*"]
deny_tools = ["get_secret"]
read_only = true
call_timeout_s = 5

[mcp_servers."web one"]
url = "https://example.com/mcp"
headers = { Authorization = "Bearer ${TOKEN}" }
transport = "sse"
read_only = ["list"]

[mcp_servers.off]
command = "off"
enabled = false
"""


def load(home: Path, toml: str) -> Loaded:
    (home / "config.toml").write_text(toml, "utf-8")
    return load_settings({}, {"CROW_HOME": str(home)})


def test_servers_in_the_file_are_configured_with_their_variables_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "t0")
    monkeypatch.setenv("OTHER", "o1")
    loaded = load(tmp_path, TOML)
    assert loaded.problem is None
    assert configured_servers(loaded) == (
        StdioServer(
            name="docs",
            command="docs",
            args=("--token", "t0"),
            env=(("KEY", "t0-o1"),),
            options=ServerOptions(allow=("get_*",), deny=("get_secret",), read_only=("*",), call_timeout_s=5),
        ),
        HttpServer(
            name="web one",
            url="https://example.com/mcp",
            headers=(("Authorization", "Bearer t0"),),
            transport="sse",
            options=ServerOptions(read_only=("list",)),
            oauth=OAuthOptions(login="web one"),
        ),
    )


def test_a_client_for_logins_is_configured_and_its_secret_is_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLIENT_SECRET", "very-secret-0123")
    monkeypatch.setenv("CROW_HOME", str(tmp_path))
    loaded = load(
        tmp_path,
        """
        [mcp_servers.web]
        url = "https://example.com/mcp"
        oauth_account = "work"
        oauth_client_id = "me"
        oauth_client_secret = "${CLIENT_SECRET}"
        oauth_client_metadata_url = "https://example.com/crow.json"
        oauth_issuer = "https://login.example.com"
        oauth_redirect_port = 8765
        """,
    )
    (server,) = configured_servers(loaded)
    assert server == HttpServer(
        name="web",
        url="https://example.com/mcp",
        oauth=OAuthOptions(
            login="web",
            account="work",
            client_id="me",
            client_secret="very-secret-0123",
            client_metadata_url="https://example.com/crow.json",
            issuer="https://login.example.com",
            redirect_port=8765,
        ),
    )
    assert "very-secret-0123" not in repr(server)
    direct = load(tmp_path, (tmp_path / "config.toml").read_text().replace("${CLIENT_SECRET}", "very-secret-0123"))
    assert hidden_keys(direct).others == ("very-secret-0123",)
    assert "very-secret-0123" in direct.settings.secrets()
    assert main(["config"]) == 0
    assert "very-secret" not in capsys.readouterr().out


def test_secrets_in_the_url_and_the_arguments_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROW_HOME", str(tmp_path))
    loaded = load(
        tmp_path,
        """
        mcp_servers.a.url = "https://user:passw0rd-1@host.example/mcp?apiKey=an0ther-key&tools=all-of-them1"
        mcp_servers.b.url = "https://host.example/${PART}?api_key=${A_KEY_FROM_1}"
        [mcp_servers.c]
        command = "x"
        args = ["--read-only1", "--api-key", "arg-key-1", "--token=arg-t0ken", "-e", "SOME_KEY=env-key-1", "/data-1"]
        """,
    )
    assert set(loaded.settings.secrets()) == {
        "passw0rd-1", "an0ther-key", "arg-key-1", "arg-t0ken", "--token=arg-t0ken", "env-key-1"
    }  # fmt: skip
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert '"url" = "https://…@host.example/mcp?…"' in shown
    assert '"url" = "https://host.example/${PART}?…"' in shown
    assert not any(secret in shown for secret in loaded.settings.secrets())
    assert main(["mcp", "list"]) == 0
    listed = capsys.readouterr().out
    assert "https://…@host.example/mcp" in listed
    assert not any(secret in listed for secret in loaded.settings.secrets())


def test_the_secret_of_a_client_needs_its_authorization_server(tmp_path: Path) -> None:
    text = '[mcp_servers.web]\nurl = "https://x"\noauth_client_id = "me"\noauth_client_secret = "s"\n'
    (server,) = configured_servers(load(tmp_path, text))
    assert server.options.problem == (
        "oauth_client_secret needs oauth_client_id and oauth_issuer, because crow sends the secret only to "
        "that authorization server"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("oauth_redirect_port = 70000", "oauth_redirect_port is 70000; expected the number of a port, such as 8765"),
        ('oauth_issuer = "file:///x"', 'oauth_issuer is "file:///x"; expected an http or https URL'),
        (
            'oauth_client_secret = ["hidden"]',
            "oauth_client_secret is <hidden: it may be a secret>; expected the secret",
        ),
        ('oauth_client_metadata_url = "https://x"', "expected the https URL of a client metadata document"),
        ('oauth_acount = "x"', "did you mean mcp_servers.web.oauth_account?"),
    ],
)
def test_an_invalid_key_for_logins_is_named(tmp_path: Path, line: str, words: str) -> None:
    loaded = load(tmp_path, f'[mcp_servers.web]\nurl = "https://x"\n{line}\n')
    assert words in str(loaded.problem)


def test_a_missing_variable_is_a_problem_of_its_server_only(tmp_path: Path) -> None:
    server = McpServerSettings(command="x", env={"A": "${ONE}", "B": "${TWO} ${ONE}"})
    assert expand_variables(server, {"ONE": "1"}, workspace="/w") == (server, "environment variable TWO is not set")
    assert expand_variables(server, {}, workspace="/w")[1] == "environment variables ONE, TWO are not set"
    problem = mcp_server("x", server, tmp_path).options.problem
    assert problem == "environment variables ONE, TWO are not set"


def test_the_workspace_is_a_variable_of_arguments_and_environment_only(tmp_path: Path) -> None:
    server = McpServerSettings(command="x", args=("--dir=${workspace}/a", "${ONE}"), env={"A": "${workspace}"})
    made, problem = expand_variables(server, {"ONE": "${workspace}", "workspace": "not this"}, workspace="/w")
    assert (made.args, made.env, problem) == (("--dir=/w/a", "${workspace}"), {"A": "/w"}, "")
    server = McpServerSettings(command="${workspace}/x")
    assert expand_variables(server, {}, workspace="/w") == (server, "${workspace} can only be used in args and env")
    server = McpServerSettings(command="x", args=("${workspaceFolder}",))
    assert mcp_server("x", server, tmp_path).options.problem == (
        "environment variable workspaceFolder is not set; ${workspace} stands for the session's working directory"
    )


def test_relative_commands_start_at_the_directory_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    loaded = load(
        tmp_path,
        """
        mcp_servers.a.command = "bin/server"
        mcp_servers.b.command = "~/bin/server"
        mcp_servers.c.command = "/opt/server"
        mcp_servers.d.command = "server"
        mcp_servers.e = { command = "server", sandbox = "write" }
        mcp_servers.f = { url = "https://example.com", sandbox = "write" }
        """,
    )
    commands = {each.name: each.command for each in configured_servers(loaded) if isinstance(each, StdioServer)}
    below = {"a": f"{tmp_path}/bin/server", "b": "/home/me/bin/server"}
    assert commands == {**below, "c": "/opt/server", "d": "server", "e": "server"}
    *_, confined, remote = configured_servers(loaded)
    assert isinstance(confined, StdioServer)
    assert confined.sandbox == "write"
    assert (
        remote.options.problem
        == "sandbox works only for servers with a command, but this server has a url; remove sandbox"
    )


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[mcp_servers.a]", 'mcp_servers.a must be a table with either "command" or "url"'),
        (
            '[mcp_servers.a]\ncommand = "x"\nurl = "http://x"',
            'mcp_servers.a must be a table with either "command" or "url"',
        ),
        (
            "[mcp_servers.a]\ncommand = 3",
            "mcp_servers.a.command is <hidden: it may be a secret>; expected a command, such as",
        ),
        (
            '[mcp_servers.a]\nurl = "ftp://x"',
            "mcp_servers.a.url is <hidden: it may be a secret>; expected an http or https URL",
        ),
        (
            '[mcp_servers.a]\ncommand = "x"\nargs = "y"',
            "mcp_servers.a.args is <hidden: it may be a secret>; expected a list of strings",
        ),
        (
            '[mcp_servers.a]\ncommand = "x"\ncmd = "y"',
            "there is no setting mcp_servers.a.cmd; did you mean mcp_servers.a.command?",
        ),
        (
            '[mcp_servers.a]\ncommand = "x"\nsandbox = true',
            'mcp_servers.a.sandbox is true; expected "read" or "write"',
        ),
        ('mcp_servers = "a"', 'mcp_servers is "a"; expected a table for each server'),
        ('[permissions]\nallow = "shell"', 'permissions.allow is "shell"; expected a list of rules'),
        ('[permissions]\ndeny = ["shell(", 3]', 'permissions.deny is ["shell(", 3]; expected a list of rules'),
        ('[permissions]\nallow = ["rm -rf"]', 'permissions.allow is ["rm -rf"]; expected a list of rules'),
        ('[permissions]\nprotect = ["/etc"]', 'permissions.protect is ["/etc"]; expected a list of names'),
        ('[permissions]\nprotect = ["a/../b"]', 'permissions.protect is ["a/../b"]; expected a list of names'),
        ('[permissions]\nprotect = ["**"]', 'permissions.protect is ["**"]; expected a list of names'),
        ('[sandbox]\npass_env = ["A B"]', 'sandbox.pass_env is ["A B"]; expected a list of names or globs'),
    ],
)
def test_an_invalid_server_or_rule_is_named(tmp_path: Path, toml: str, words: str) -> None:
    problem = str(load(tmp_path, toml).problem)
    assert problem.startswith(f"{tmp_path / 'config.toml'}: {words}")


@pytest.mark.parametrize(
    "name",
    [".git", ".GIT", "HEAD", ".gitconfig", ".crow", ".ssh", ".gnupg", ".aws", ".netrc", "hooks", "*", "", ".git/*"],
)
def test_names_that_must_stay_protected_cannot_be_removed(tmp_path: Path, name: str) -> None:
    problem = str(load(tmp_path, f'[permissions]\nunprotect = ["{name}"]').problem)
    assert f'permissions.unprotect is ["{name}"]; expected a list of names' in problem
    names = ProtectedNames(removed=[name, "head", ".git"])
    assert all(names.covers(["w", part]) for part in (".git", "head", ".ssh", ".crow", ".aws"))


def test_protected_names_are_added_and_removed(tmp_path: Path) -> None:
    added, removed = '["package.json", "Deploy/*.sh", "infra/"]', '[".gitattributes", "CLAUDE.md"]'
    toml = f"[permissions]\nprotect = {added}\nunprotect = {removed}"
    names = protected_names(load(tmp_path, toml))
    asks = ("package.json", "deploy/a.sh", "x/infra/a", ".gitmodules")
    free = (".gitattributes", "claude.md", "deploy/a.txt")
    assert [path for path in (*asks, *free) if names.covers(["w", *path.split("/")])] == [*asks]


def test_errors_about_servers_show_no_secret(tmp_path: Path) -> None:
    toml = '[mcp_servers.a]\ncommand = "x"\nenv = { KEY = "s3cret", N = 3 }\nheaders = ["s3cret"]'
    problem = str(load(tmp_path, toml).problem)
    assert "s3cret" not in problem
    assert "s3cret" not in repr(McpServerSettings(command="x", env={"KEY": "s3cret"}, args=("s3cret",)))
