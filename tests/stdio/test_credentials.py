"""Commands of the real process use credentials of the user without seeing them."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_confinement import CONFINED, place
from tests.stdio.test_layers import User, overlay, run, start
from tests.stdio.test_layers import shell as plain_shell
from tests.stdio.test_network import write_config
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint
from tests.tools.layers.trees import git
from tests.tools.network.git_server import PASSWORD, USER, GitServer, serving_git

__all__ = ["overlay", "place"]

IDENTITY = "-c user.name=a -c user.email=a@b"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    root = tmp_path / "repositories"
    root.mkdir()
    with serving_git(root) as serving:
        serving.create("app")
        yield serving


def shell(command: str) -> Any:
    """A command that reaches this machine through the proxy, too."""
    return plain_shell(f"export no_proxy= NO_PROXY=; {command}")


TOKEN = f'token_env = "GIT_SECRET"\nuser = "{USER}"'
HEADER = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
SECRETS = (PASSWORD.encode(), HEADER.split()[1].encode())
ENV = {**CONFINED, "GIT_SECRET": PASSWORD}


def config(server: GitServer, lines: str) -> str:
    return f'[credentials."localhost:{server.port}"]\nca_file = "{server.ca}"\n{lines}\n'


def holds_secret(folder: Path) -> list[str]:
    """Return the files that hold the password, or the header with it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(secret in path.read_bytes() for secret in SECRETS)]


@pytest.mark.long
async def test_git_clones_and_pushes_with_one_question_each(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, home: Path, server: GitServer
) -> None:
    write_config(home, config(server, TOKEN))
    host = f"localhost:{server.port}"
    user = User(*["allow_once"] * 3, "allow_always", *["allow_once"] * 3)
    change = f"cd app && echo two > a && git {IDENTITY} commit -qam second"
    lines = (
        f"git clone -q https://{host}/app.git && cat app/a",
        change,
        "cd app && git push -q",
        f"{change} --amend && git remote set-url origin git@localhost:app.git && git push -q -f",
        f"env; curl -s https://{host}/echo; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'",
    )
    env = {**ENV, "CROW_TRACE": str(home / "trace.jsonl"), "CROW_LOG": "debug"}
    async with crow(endpoint=endpoint, env=env, answers=user.answers) as agent:
        session = await start(agent, place)
        told = await run(agent, endpoint, session, *map(shell, lines))
    assert told[:4] == ["one", "(no output)", "(no output)", "(no output)"]
    assert server.subjects("app") == ["second", "first"]
    asked_first = [line for text in user.texts() for line in text.splitlines() if line.startswith("The command runs.")]
    assert asked_first == [
        f"The command runs. It wants to connect to: {host}, with your credential",
        f"The command runs. It wants to git push to {host}/app, with your credential",
        f"The command runs. It wants to connect to: {host}, with your credential",
    ]
    asked = next(asked for asked, text in zip(user.asked, user.texts(), strict=True) if "git push to" in text)
    assert asked["options"][1]["name"] == (
        f"Always allow commands to change `{host}/app` with your credential in this directory and session"
    )
    assert f"Authorization: {'*' * len(HEADER)}" in told[4]
    assert all(secret.decode() not in text for text in (*told, *user.texts()) for secret in SECRETS)
    assert holds_secret(home) == []
    assert holds_secret(place.parent) == []
    with sqlite3.connect(home / "crow.db") as database:
        dump = "\n".join(database.iterdump())
    assert "git push to" not in dump, "a question is not an entry"
    assert all(secret.decode() not in dump for secret in SECRETS)
    assert all(headers["authorization"] == HEADER for headers in server.headers)


@pytest.mark.long
async def test_what_git_and_a_command_know_is_used_and_what_is_missing_is_named(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, home: Path, server: GitServer
) -> None:
    host, script = f"localhost:{server.port}", home / "token"
    helper = f"!f() {{ echo username={USER}; echo password={PASSWORD}; }}; f"
    git(place, "init", "-q")
    git(place, "config", "credential.helper", f"!touch {home}/ran; false")
    tables = {
        "from_git = true": "one",
        f'token_command = ["{script}"]\nuser = "{USER}"': "one",
        'token_env = "UNSET_VARIABLE"': "cannot be read: the environment variable UNSET_VARIABLE is not set; `crow",
        'token_command = ["/bin/false"]': "cannot be read: token_command ended with code 1; `crow doctor` says more",
        'token_env = "WRONG"': "did not accept the user's credential (status 401)",
    }
    write_config(home, "")
    script.write_text(f"#!/bin/sh\necho {PASSWORD}\n")
    script.chmod(0o700)
    (home / ".gitconfig").write_text(f'[credential]\nhelper = "{helper}"\n')
    for lines, expected in tables.items():
        rules = f'[permissions]\nallow = ["network({host})"]\n'
        (home / "config.toml").write_text(rules + config(server, lines))
        user = User()
        async with crow(
            endpoint=endpoint, env={**CONFINED, "HOME": str(home), "WRONG": "not-the-secret-1"}, answers=user.answers
        ) as agent:
            session = await start(agent, place)
            (told,) = await run(
                agent,
                endpoint,
                session,
                shell(f"cd /tmp && git clone -q https://{host}/app.git && cat app/a"),
            )
        assert expected in told, lines
        assert PASSWORD not in told
        assert user.asked == []
    assert not (home / "ran").exists(), "a helper that the repository names"


@pytest.mark.long
async def test_a_command_in_the_background_uses_a_credential_where_rules_allow_it(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, home: Path, server: GitServer
) -> None:
    write_config(home, config(server, TOKEN))
    host, user = f"localhost:{server.port}", User("allow_always")
    clone = f"export no_proxy= NO_PROXY=; git clone -q https://{host}/app.git $TMPDIR/{{}} && cat $TMPDIR/{{}}/a"
    push = f"cd $TMPDIR/one; echo two > a; git {IDENTITY} commit -qam two; git push -q; env; cat /proc/*/environ"
    async with crow(endpoint=endpoint, env=ENV, answers=user.answers) as agent:
        session = await start(agent, place)

        async def in_background(line: str, job: int) -> str:
            ended = fake.calls(("shell_output", {"job": f"job{job}", "wait_s": 60}))
            told = await run(agent, endpoint, session, plain_shell(line, background=True), ended)
            return "".join(told[-2:])

        refused = await in_background(clone.format("none", "none"), 1)
        assert f"[Hosts not reached: {host}: nobody is asked for a command in the background" in refused
        assert user.asked == []
        await run(agent, endpoint, session, shell(f"git ls-remote -q https://{host}/app.git"))
        cloned = await in_background(clone.format("one", "one"), 2)
        pushed = await in_background(f"export no_proxy= NO_PROXY=; {push}", 3)
    assert "one\n" in cloned
    assert "Hosts not reached" not in cloned
    assert f"[Hosts not reached: {host}: nobody is asked" in pushed, "a push needs a rule of its own"
    assert server.subjects("app") == ["first"]
    assert len(user.asked) == 1
    (spec,) = [tool for tool in endpoint.asked[0].body["tools"] if tool["function"]["name"] == "shell"]
    assert f"For HTTPS to {host}, crow adds the user's credential" in spec["function"]["description"]
    assert all(secret.decode() not in text for text in (refused, cloned, pushed) for secret in SECRETS)
