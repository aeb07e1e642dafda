"""Logins to MCP servers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import anyio
import anyio.to_thread
import httpx2
import pytest

from crow.domain.errors import ToolServerError
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, FormQuestion, UrlQuestion
from crow.tools import Outcome
from crow.tools.mcp import auth
from crow.tools.mcp.exchange import LoginClient, plain_url
from crow.tools.mcp.logins import Account, Login, LoginFolder
from crow.tools.mcp.redirect import listening
from crow.tools.servers import HttpServer, OAuthOptions
from tests.support.oauth_server import Answer, OAuthServer, as_json, oauth_server, visit
from tests.tools.conftest import Box, OpenBox, skip_time


class Browser:
    """An editor whose user visits each page, or declines. `visits` is what the user does with the page's URL."""

    question_kinds: frozenset[ElicitationKind] = frozenset({"url"})

    def __init__(self, visits: Callable[[str], object] | None = visit) -> None:
        self.visits = visits
        self.questions: list[UrlQuestion] = []
        self.finished: list[str] = []

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        assert isinstance(question, UrlQuestion)
        self.questions.append(question)
        if self.visits is None:
            return ElicitationAnswer(action="decline")
        await anyio.to_thread.run_sync(self.visits, question.url)
        return ElicitationAnswer(action="accept")

    async def finish_question(self, question_id: str) -> None:
        self.finished.append(question_id)


class Editor(Browser):
    """An editor that can show forms only."""

    question_kinds: frozenset[ElicitationKind] = frozenset({"form"})

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        assert isinstance(question, FormQuestion)
        return ElicitationAnswer(action="decline")


@pytest.fixture
def server() -> Iterator[OAuthServer]:
    with oauth_server() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "logins"


def http(server: OAuthServer, **oauth: Any) -> HttpServer:
    return HttpServer(name="web", url=server.url, oauth=OAuthOptions(login="web", **oauth))


async def ready(box: Box) -> str:
    """Wait until the server has started or failed, and return why it failed."""
    await box.toolbox.wait_ready(120)
    await box.toolbox.prompt("web:none")  # waits also for a server that has never worked
    (status,) = box.toolbox.servers()
    return status.detail if status.state == "failed" else ""


def stored(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def modes_in(folder: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in (folder, *folder.iterdir())}


def edit_stored(folder: Path, **changes: Any) -> None:
    (file,) = folder.glob("*.json")
    file.write_text(json.dumps(stored(folder) | changes))


async def test_the_user_logs_in_through_the_editor_and_the_next_session_needs_no_login(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser()
    for _ in range(2):
        async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
            assert await ready(box) == ""
            assert (await box.run("web__whoami")).text.startswith("you are ")
    (question,) = browser.questions
    place = urlsplit(server.base).hostname
    assert question.message == (
        f"web: this MCP server ({urlsplit(server.base).netloc}) asks you to log in.\n\nThis opens a page on {place}."
    )
    assert browser.finished == [question.id]
    assert server.seen.count("/token") == 1


async def test_a_login_is_in_a_file_of_the_users_alone_and_shown_nowhere(
    open_box: OpenBox, server: OAuthServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    async with open_box(http(server), elicitation=Browser(), login_folder=folder, on_secrets=told.extend) as box:
        assert await ready(box) == ""
        outcome = await box.run("web__whoami")
    login = stored(folder)
    token, refresh = login["tokens"]["access_token"], login["tokens"]["refresh_token"]
    assert outcome.text.startswith("you are ")
    assert token not in outcome.text
    assert told == [token, refresh]
    assert token not in caplog.text
    assert refresh not in caplog.text
    assert modes_in(folder) == {0o700, 0o600}
    assert login["account"] == {"url": server.url, "name": ""}


async def test_without_an_editor_that_opens_pages_the_command_to_log_in_is_named(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    for elicitation in (None, Editor()):
        async with open_box(http(server), elicitation=elicitation, login_folder=folder) as box:
            assert await ready(box) == "it needs you to log in; run `crow mcp login web`"
    async with open_box(HttpServer(name="x", url=server.url), login_folder=folder) as box:
        assert await ready(box) == f"it needs you to log in; run `crow mcp login {server.url}`"
    assert server.seen == []


async def test_a_login_that_the_user_declines_is_asked_for_again_only_after_a_restart(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser(None)
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        for _ in range(3):
            assert await ready(box) == "it needs you to log in; run `crow mcp login web`"
            (await box.run("web__whoami"))
        assert len(browser.questions) == 1
        browser.visits = visit
        await box.toolbox.restart("web")
        assert await ready(box) == ""
        assert len(browser.questions) == 2


async def test_a_restart_during_a_login_asks_again(open_box: OpenBox, server: OAuthServer, folder: Path) -> None:
    browser = Browser(lambda _: None)  # the user closes the page
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        with anyio.fail_after(60):
            while not browser.questions:  # noqa: ASYNC110 - the question is asked by another task
                await anyio.sleep(0.005)
        browser.visits = visit
        assert await box.toolbox.restart("web") == ("web",)
        assert await ready(box) == ""
    assert browser.finished == [question.id for question in browser.questions]
    assert len(browser.questions) == 2


async def test_a_login_made_elsewhere_is_used_by_a_session_that_waits(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    waiting = Browser(lambda _: None)
    async with open_box(http(server), elicitation=waiting, login_folder=folder) as first:
        with anyio.fail_after(60):
            while not waiting.questions:  # noqa: ASYNC110 - the question is asked by another task
                await anyio.sleep(0.005)
        second = Login(
            account=Account(url=server.url), tokens={"access_token": "from-elsewhere"}, client={"client_id": "c"}
        )
        server.valid["from-elsewhere"] = ""
        await anyio.to_thread.run_sync(LoginFolder(folder).write, second)
        assert await ready(first) == ""
        assert waiting.finished == [waiting.questions[0].id]


async def test_a_login_made_elsewhere_is_used_at_the_next_call(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    async with open_box(http(server), login_folder=folder) as box:
        assert await ready(box) == "it needs you to log in; run `crow mcp login web`"
        for _ in range(4):
            assert (await box.run("web__whoami")).is_error
        login = Login(account=Account(url=server.url), tokens={"access_token": "new"}, client={"client_id": "c"})
        server.valid["new"] = ""
        await anyio.to_thread.run_sync(LoginFolder(folder).write, login)
        assert await box.run("web__whoami") == Outcome(text="you are new")


async def test_two_sessions_ask_once(open_box: OpenBox, server: OAuthServer, folder: Path) -> None:
    browser = Browser()
    async with (
        open_box(http(server), elicitation=browser, login_folder=folder) as one,
        open_box(http(server), elicitation=browser, login_folder=folder) as two,
    ):
        assert [await ready(one), await ready(two)] == ["", ""]
    assert len(browser.questions) == 1


async def test_two_accounts_at_one_url_have_their_own_logins(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser()
    for account in ("work", "home"):
        async with open_box(http(server, account=account), elicitation=browser, login_folder=folder) as box:
            assert await ready(box) == ""
    assert len(browser.questions) == 2
    assert len(files_in(folder)) == 2


async def test_a_server_with_the_older_transport_is_logged_in_to(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    server.resource["resource"] = f"{server.base}/sse"
    old = HttpServer(name="web", url=f"{server.base}/sse", transport="sse")
    try:
        async with open_box(old, elicitation=Browser(), login_folder=folder) as box:
            assert await ready(box) == ""
            assert (await box.run("web__whoami")).text.startswith("you are ")
    finally:
        server.events.put(None)


# Refresh


async def open_and_wait(open_box: OpenBox, server: HttpServer, folder: Path) -> None:
    async with open_box(server, login_folder=folder):
        await anyio.sleep_forever()


@pytest.mark.parametrize("how", ["expired", "ends soon", "refused"])
async def test_a_token_is_refreshed_without_the_user(
    open_box: OpenBox, server: OAuthServer, folder: Path, how: str
) -> None:
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    before = stored(folder)
    if how != "refused":
        edit_stored(folder, expires_at=time.time() + (-100 if how == "expired" else 5))
    server.expire()
    async with open_box(http(server), login_folder=folder) as box:
        assert await ready(box) == ""
        assert not (await box.run("web__whoami")).is_error
    after = stored(folder)
    assert after["tokens"]["access_token"] != before["tokens"]["access_token"]
    assert server.forms[-1]["grant_type"] == "refresh_token"
    assert server.forms[-1]["resource"] == server.url
    assert ("Bearer " + before["tokens"]["access_token"] in server.authorizations[3:]) == (how == "refused")


async def test_a_refresh_that_outlasts_the_probe_is_not_broken_off(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    edit_stored(folder, expires_at=time.time() - 100)
    loop, probe_is_over = asyncio.get_running_loop(), threading.Event()

    def end_probe() -> None:
        skip_time(2)
        loop.call_later(0.01, probe_is_over.set)

    def slow(values: Mapping[str, str]) -> Answer:
        answer = server._token(values)
        loop.call_soon_threadsafe(end_probe)
        assert probe_is_over.wait(60)
        return answer

    server.answers["/token"] = slow
    async with open_box(http(server), login_folder=folder) as box:
        assert await ready(box) == ""
        assert not (await box.run("web__whoami")).is_error
    assert server.seen.count("/token") == 2


async def test_a_token_is_refreshed_again_and_again(open_box: OpenBox, server: OAuthServer, folder: Path) -> None:
    browser, server.expires_in = Browser(), None
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""
        for _ in range(3):
            server.expire()
            assert not (await box.run("web__whoami")).is_error
    assert [form["grant_type"] for form in server.forms] == ["authorization_code", *["refresh_token"] * 3]
    assert len(browser.questions) == 1


async def test_sessions_that_refresh_at_once_use_each_refresh_token_once(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    server.expire()
    async with (
        open_box(http(server), login_folder=folder) as one,
        open_box(http(server), login_folder=folder) as two,
        open_box(http(server), login_folder=folder) as three,
    ):
        assert [await ready(box) for box in (one, two, three)] == ["", "", ""]
    assert [form["grant_type"] for form in server.forms] == ["authorization_code", "refresh_token"]


async def test_a_session_that_ends_during_a_refresh_keeps_the_new_token(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    before = stored(folder)
    edit_stored(folder, expires_at=time.time() - 100)
    loop, refreshing, is_cancelled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow(values: Mapping[str, str]) -> Answer:
        answer = server._token(values)  # from now on, the old refresh token is used up
        loop.call_soon_threadsafe(refreshing.set)
        assert is_cancelled.wait(60)
        return answer

    server.answers["/token"] = slow
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_and_wait, open_box, http(server), folder)
        await refreshing.wait()
        tasks.cancel_scope.cancel()
        loop.call_later(0.01, is_cancelled.set)
    assert stored(folder)["tokens"]["refresh_token"] in server.refresh_tokens

    assert stored(folder)["tokens"] != before["tokens"]
    async with open_box(http(server), login_folder=folder) as box:
        assert await ready(box) == ""


async def test_a_session_does_not_wait_long_for_a_refresh_without_an_answer(
    open_box: OpenBox, server: OAuthServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_FINISH_S", 0.05)
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    before = stored(folder) | {"expires_at": 1}
    edit_stored(folder, expires_at=1)
    loop, refreshing, is_over = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def silent(values: Mapping[str, str]) -> Answer:
        loop.call_soon_threadsafe(refreshing.set)
        assert is_over.wait(60)
        return 500, {}, b""

    server.answers["/token"] = silent
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_and_wait, open_box, http(server), folder)
            await refreshing.wait()
            tasks.cancel_scope.cancel()
    finally:
        is_over.set()
    assert stored(folder) == before


async def test_a_refresh_token_that_is_refused_leads_to_a_new_login(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser()
    for _ in range(2):
        async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
            assert await ready(box) == ""
        server.expire()
        server.refresh_tokens.clear()
    assert len(browser.questions) == 2
    assert server.seen.count("/register") == 1, "the registration is used again, with its port"


async def test_a_registration_that_the_authorization_server_has_forgotten_is_made_again(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    forgotten = stored(folder)["client"]["client_id"]
    server.expire()

    def token(values: Mapping[str, str]) -> Answer:
        return as_json({"error": "invalid_client"}, 401) if values["client_id"] == forgotten else server._token(values)

    server.answers["/token"] = token
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    assert stored(folder)["client"]["client_id"] != forgotten


async def test_an_authorization_server_that_is_down_costs_no_login(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser()
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""
    before = stored(folder)
    server.expire()
    server.answers["/token"] = lambda _: (503, {}, b"")
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == f"{server.base}/token gave no token: HTTP 503"
        del server.answers["/token"]
        await box.toolbox.restart()
        assert await ready(box) == ""
    assert len(browser.questions) == 1
    assert before["tokens"]["refresh_token"] == server.forms[-1]["refresh_token"]


async def test_a_server_that_refuses_every_token_asks_the_user_once(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser()
    server.answers["/token"] = lambda _: as_json({"access_token": server.next("none"), "token_type": "Bearer"})
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        for _ in range(3):
            assert (await ready(box)).startswith("it refuses the token that its authorization server has just issued")
    assert len(browser.questions) == 1


async def test_a_refreshed_token_that_is_refused_too_leads_to_a_login(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser()
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""
    server.expire()

    def token(values: Mapping[str, str]) -> Answer:
        if values["grant_type"] == "refresh_token":
            return as_json({"access_token": server.next("none"), "token_type": "Bearer", "refresh_token": "again"})
        server.valid["good"] = ""
        return as_json({"access_token": "good", "token_type": "Bearer"})

    server.answers["/token"] = token
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""
    assert len(browser.questions) == 2


async def test_a_session_that_closes_takes_its_question_back(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser(lambda _: None)
    async with open_box(http(server), elicitation=browser, login_folder=folder):
        with anyio.fail_after(60):
            while not browser.questions:  # noqa: ASYNC110 - the question is asked by another task
                await anyio.sleep(0.005)
    assert browser.finished == [browser.questions[0].id]
    browser.visits = visit
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""


# Wider scopes


async def test_a_call_that_needs_a_wider_scope_asks_the_user_once(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser, server.tool_scope = Browser(), "files:write"
    server.resource["scopes_supported"] = ["files:read"]
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""
        assert not (await box.run("web__whoami")).is_error
        assert not (await box.run("web__whoami")).is_error
    scopes = [parse_qs(urlsplit(question.url).query)["scope"] for question in browser.questions]
    assert scopes == [["files:read"], ["files:read files:write"]]


async def test_a_scope_that_is_never_granted_is_asked_for_once(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser, server.tool_scope = Browser(), "admin"

    def token(_: object) -> tuple[int, dict[str, str], bytes]:
        server.valid["weak"] = server.valid["weaker"] = ""
        return as_json({"access_token": "weak" if len(browser.questions) == 1 else "weaker", "token_type": "Bearer"})

    server.answers["/token"] = token
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""
        outcomes = [await box.run("web__whoami") for _ in range(3)]
    assert len(browser.questions) == 2
    assert all(outcome.is_error for outcome in outcomes)
    refused = (
        "it refuses the token that its authorization server has just issued; to log in again, run `crow mcp login web`"
    )
    assert outcomes[0].text == f"MCP server web refused whoami: {refused}"


# Clients that the user registered


async def test_a_client_registered_by_hand_is_used_with_its_secret(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    del server.metadata["registration_endpoint"]
    server.metadata["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
    own = http(server, client_id="mine", client_secret="its-secret", issuer=server.base)
    async with open_box(own, elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
    assert server.forms[0]["client_id"] == "mine"
    assert server.forms[0]["client_secret"] == "its-secret"


async def test_a_secret_never_goes_to_another_authorization_server(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    browser = Browser()
    own = http(server, client_id="mine", client_secret="its-secret", issuer="https://login.example.com")
    async with open_box(own, elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == (
            f"its authorization server is now {server.base} instead of https://login.example.com; if that is right, "
            "change oauth_issuer, oauth_client_id and oauth_client_secret"
        )
    assert browser.questions == []
    assert server.forms == []


async def test_a_server_that_registers_nobody_says_what_to_do(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    del server.metadata["registration_endpoint"]
    async with open_box(http(server, redirect_port=0), elicitation=Browser(), login_folder=folder) as box:
        words = await ready(box)
    assert words.startswith(f"its authorization server {server.base} does not let programs register; register crow ")
    assert words.endswith("/callback, and set oauth_client_id")


async def test_a_port_that_is_in_use_is_named(open_box: OpenBox, server: OAuthServer, folder: Path) -> None:
    async with (
        listening(0) as other,
        open_box(http(server, redirect_port=other.port), elicitation=Browser(), login_folder=folder) as box,
    ):
        words = await ready(box)
    assert words.startswith(f"port {other.port} cannot be used: ")


# Hostile servers


@pytest.mark.long
@pytest.mark.parametrize(
    ("member", "value", "words"),
    [
        ("issuer", "https://evil.example.com", "issuer mismatch"),
        ("code_challenge_methods_supported", ["plain"], "does not offer PKCE with S256"),
        ("token_endpoint", "http://169.254.169.254/token", "is not encrypted"),
        ("token_endpoint", "https://169.254.169.254/token", "is in a private network (169.254.169.254)"),
        ("registration_endpoint", "http://example.com/register", "is not encrypted"),
        ("authorization_endpoint", "https://169.254.169.254/", "is in a private network (169.254.169.254)"),
    ],
)
async def test_metadata_that_is_not_safe_is_refused_with_words(
    open_box: OpenBox, server: OAuthServer, folder: Path, member: str, value: object, words: str
) -> None:
    browser = Browser()
    server.metadata[member] = value
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert words in await ready(box)
    assert server.forms == []
    assert files_in(folder) == []


@pytest.mark.long
@pytest.mark.parametrize("url", ["javascript:alert(1)", "file:///etc/passwd", "ftp://x/y", "https://u:p@x/", 7, None])
@pytest.mark.parametrize("member", ["authorization_endpoint", "token_endpoint"])
async def test_a_url_that_is_no_web_page_is_never_opened(
    open_box: OpenBox, server: OAuthServer, folder: Path, member: str, url: object
) -> None:
    browser = Browser()
    server.metadata[member] = url
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) != ""
    assert [question.url for question in browser.questions if not question.url.startswith(server.base)] == []
    assert server.valid == {}


@pytest.mark.long
@pytest.mark.parametrize(
    "path", ["/.well-known/oauth-protected-resource/mcp", "/.well-known/oauth-authorization-server"]
)
@pytest.mark.parametrize("how", ["giant", "endless redirect", "other host", "compressed", "deep", "no object"])
async def test_metadata_without_end_fails_the_login_and_nothing_else(
    open_box: OpenBox, server: OAuthServer, folder: Path, path: str, how: str
) -> None:
    server.answers[path] = lambda _: {
        "giant": (200, {}, b" " * 1_500_000),
        "endless redirect": (302, {"Location": path}, b""),
        "other host": (302, {"Location": "http://169.254.169.254/"}, b""),
        "compressed": (200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"),
        "deep": (200, {}, b"[" * 100_000),
        "no object": (200, {}, b"null"),
    }[how]
    server.metadata["registration_endpoint"] = None
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) != ""
    assert server.seen.count(path) <= 12


@pytest.mark.long
@pytest.mark.parametrize("token", ["a\r\nX-Evil: 1", "a b", "", "ä", "x" * 20_000, 7])
async def test_a_token_that_no_header_can_hold_is_refused(
    open_box: OpenBox, server: OAuthServer, folder: Path, token: object
) -> None:
    server.answers["/token"] = lambda _: as_json({"access_token": token, "token_type": "Bearer"})
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        words = await ready(box)
    assert "token" in words
    assert str(token) not in words or token in ("", 7)
    assert files_in(folder) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"iss": "https://evil.example.com"}, "iss mismatch"),
        ({"error": "access_denied", "error_description": "no\x1b[31m"}, "refused the login: access_denied: no"),
    ],
)
async def test_an_answer_of_another_server_or_a_refusal_ends_the_login(
    open_box: OpenBox, server: OAuthServer, folder: Path, changes: dict[str, str], words: str
) -> None:
    def come_back(values: Any) -> tuple[int, dict[str, str], bytes]:
        back = {"code": "c", "state": values["state"], "iss": server.base} | changes
        return 302, {"Location": f"{values['redirect_uri']}?{urlencode(back)}"}, b""

    server.answers["/authorize"] = come_back
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        found = await ready(box)
    assert words in found
    assert "\x1b" not in found
    assert server.forms == []


@pytest.mark.parametrize("body", [b'{"access_token": "s3cr3t", "token_type": "Mac"}', b'{"access_token": "s3cr3t"'])
async def test_an_answer_with_a_token_in_it_is_not_repeated(
    open_box: OpenBox, server: OAuthServer, folder: Path, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers["/token"] = lambda _: (200, {}, body)
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == "the login failed: its authorization server gave an unusable token"
    assert "s3cr3t" not in caplog.text


async def test_the_headers_of_the_settings_reach_only_the_server(
    open_box: OpenBox, server: OAuthServer, folder: Path
) -> None:
    token = HttpServer(name="web", url=server.url, headers=(("authorization", "Bearer mine"),))
    async with open_box(token, elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) != ""
    assert set(server.authorizations) == {"Bearer mine"}
    assert server.seen == []


# The way back from the browser


async def test_only_the_answer_with_the_right_state_counts(tmp_path: Path) -> None:
    async with listening(0) as redirect:
        redirect.state = "s" * 43
        good = f"{redirect.uri}?code=c&state={redirect.state}&iss=i"
        for bad in (
            f"{redirect.uri}?code=evil&state=guess",
            f"{redirect.uri}?code=evil",
            f"{redirect.uri}?code=evil&state={redirect.state}&state=x",
            f"{redirect.uri}?state={redirect.state}",
            good.replace("/callback", "/other"),
            good.replace("127.0.0.1", "localhost"),
        ):
            assert await anyio.to_thread.run_sync(visit, bad) == 400
            assert not redirect.answered.is_set()
        assert await anyio.to_thread.run_sync(visit, good) == 200
        assert (redirect.code, redirect.issuer) == ("c", "i")
        assert await anyio.to_thread.run_sync(visit, good.replace("code=c", "code=second")) == 400
        assert redirect.code == "c"


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"GET", b"\xff" * 70_000, b"GET //x HTTP/1.1\r\n\r\n"])
async def test_a_visitor_that_speaks_no_http_changes_nothing(sent: bytes) -> None:
    async with listening(0) as redirect:
        redirect.state = "s"
        async with await anyio.connect_tcp("127.0.0.1", redirect.port) as visitor:
            with anyio.move_on_after(5):
                try:
                    await visitor.send(sent)
                    await visitor.send_eof()
                    await visitor.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    pass
        assert not redirect.answered.is_set()


# Places and files


@pytest.mark.parametrize(
    ("server_url", "url", "words"),
    [
        ("https://1.1.1.1/mcp", "https://127.0.0.1/token", "on this machine"),
        ("https://1.1.1.1/mcp", "http://127.0.0.1/token", "on this machine"),
        ("https://1.1.1.1/mcp", "https://10.0.0.1/token", "in a private network"),
        ("https://1.1.1.1/mcp", "https://[::ffff:10.0.0.1]/token", "in a private network"),
        ("https://10.0.0.1/mcp", "https://127.0.0.1/token", "on this machine"),
        ("https://10.0.0.1/mcp", "https://10.0.0.2/token", ""),
        ("http://127.0.0.1/mcp", "https://10.0.0.2/token", ""),
        ("http://127.0.0.1/mcp", "https://169.254.169.254/", "in a private network"),
        ("http://10.0.0.1/mcp", "http://10.0.0.1/token", ""),
        ("http://10.0.0.1/mcp", "http://10.0.0.1:81/token", "not encrypted"),
        ("https://1.1.1.1/mcp", "https://8.8.8.8/token", ""),
        ("https://1.1.1.1/mcp", "file:///etc/passwd", "not an http or https URL"),
    ],
)
async def test_a_server_leads_only_to_places_no_further_inside_than_its_own(
    monkeypatch: pytest.MonkeyPatch, server_url: str, url: str, words: str
) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    exchange = LoginClient(server_url)
    if not words:
        assert await exchange.check(url)
        return
    with pytest.raises(ToolServerError, match="its login leads to") as raised:
        await exchange.check(url)
    assert words in str(raised.value)


async def test_a_host_is_reached_at_the_address_on_which_it_listens(
    monkeypatch: pytest.MonkeyPatch, server: OAuthServer
) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    places = [(*kind, (address, urlsplit(server.base).port)) for address in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    url = server.base.replace("127.0.0.1", "localhost") + "/.well-known/oauth-authorization-server"
    answer = await LoginClient(url).send(httpx2.Request("GET", url))
    assert answer.json()["issuer"] == server.base


def test_a_url_is_shown_without_what_may_be_secret() -> None:
    assert plain_url("https://user:pw@host/path?key=1#x") == "https://host/path"


DAMAGED = ("", "null", "[]", "{}", '{"account": {"url": 1}}', "[" * 100_000, "\x00")


async def test_a_damaged_file_is_named_and_left_alone(open_box: OpenBox, server: OAuthServer, folder: Path) -> None:
    account = Account(url=server.url)
    file = folder / f"{account.file_name}.json"
    await anyio.Path(folder).mkdir()
    for text in DAMAGED:
        await anyio.Path(file).write_text(text)
        with pytest.raises(ToolServerError, match="is damaged; delete it and log in again"):
            LoginFolder(folder).read(account)
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == f"{file} is damaged; delete it and log in again"
    assert await anyio.Path(file).read_text() == DAMAGED[-1]


def test_a_login_is_bound_to_its_server(folder: Path) -> None:
    logins, account = LoginFolder(folder), Account(url="https://a/mcp")
    login = Login(account=account, tokens={"access_token": "t"}, client={})
    logins.write(login)
    assert logins.read(account) == login
    other = Account(url="https://b/mcp")
    (folder / f"{account.file_name}.json").rename(folder / f"{other.file_name}.json")
    with pytest.raises(ToolServerError, match="belongs to another server"):
        logins.read(other)


def test_a_link_in_place_of_a_login_is_not_followed(folder: Path, tmp_path: Path) -> None:
    account = Account(url="https://a/mcp")
    folder.mkdir()
    (tmp_path / "elsewhere").write_text("{}")
    (folder / f"{account.file_name}.json").symlink_to(tmp_path / "elsewhere")
    logins = LoginFolder(folder)
    with pytest.raises(ToolServerError, match="cannot be read"):
        logins.read(account)
    logins.write(Login(account=account, tokens={"access_token": "t"}, client={}))
    assert (tmp_path / "elsewhere").read_text() == "{}"


async def test_calls_of_one_server_run_at_once(open_box: OpenBox, server: OAuthServer, folder: Path) -> None:
    waiting, all_wait = threading.Semaphore(0), threading.Event()
    usual = server.call

    def call(authorization: str | None, message: Mapping[str, Any]) -> Answer:
        if message["method"] == "tools/call":
            waiting.release()
            all_wait.wait(60)
        return usual(authorization, message)

    server.call = call  # type: ignore[method-assign]
    async with open_box(http(server), elicitation=Browser(), login_folder=folder) as box:
        assert await ready(box) == ""
        outcomes: list[Outcome] = []

        async def run() -> None:
            outcomes.append(await box.run("web__whoami"))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(run)
            for _ in range(4):
                assert await anyio.to_thread.run_sync(waiting.acquire, True, 60)
            all_wait.set()
    assert [outcome.is_error for outcome in outcomes] == [False] * 4


async def test_a_cancelled_call_takes_its_question_back(open_box: OpenBox, server: OAuthServer, folder: Path) -> None:
    browser, server.tool_scope = Browser(), "write"
    async with open_box(http(server), elicitation=browser, login_folder=folder) as box:
        assert await ready(box) == ""
        browser.visits = lambda _: None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.run, "web__whoami")
            with anyio.fail_after(60):
                while len(browser.questions) < 2:  # noqa: ASYNC110 - the question is asked by another task
                    await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(60):
            while len(browser.finished) < 2:  # noqa: ASYNC110 - the question is taken back by another task
                await anyio.sleep(0.005)
        browser.visits = visit
        assert not (await box.run("web__whoami")).is_error
    assert browser.finished == [question.id for question in browser.questions]
    assert len(browser.questions) == 3
