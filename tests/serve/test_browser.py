"""The page for browsers, and how a browser is paired: a real server, real requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from websockets.exceptions import InvalidStatus

from crow.serve.tokens import new_token
from crow.store.sqlite.store import SqliteStore
from tests.support.acp_client import WAIT_S, allow_once
from tests.support.server import ServerProcess, server_environment

MINUTE_MS = 60_000


async def make_token(home: Path, principal: str, *, is_pairing: bool = False, minutes: int = 10) -> str:
    """Store a token, and return its text. With negative `minutes` it has expired."""
    store = await SqliteStore.open(home / "crow.db")
    try:
        now_ms = None if minutes > 0 else 1_000_000
        text, token = new_token(
            principal,
            expires_ms=(2_000_000 if minutes < 0 else None) if not is_pairing or minutes < 0 else 4_000_000_000_000,
            now_ms=now_ms,
            is_pairing=is_pairing,
        )
        await store.add_token(token)
    finally:
        await store.close()
    return text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser") / "home"


@pytest.fixture(scope="module")
def configured(home: Path) -> Path:
    """The home of a server with tokens."""
    home.mkdir()
    (home / "config.toml").write_text(f'[serve]\nroots = ["{home.parent}"]\n')
    return home


@pytest.fixture(scope="module")
async def team(configured: Path) -> AsyncIterator[ServerProcess]:
    """A server whose clients need tokens."""
    await make_token(configured, "ann")
    async with ServerProcess(env=server_environment(configured, CROW_SANDBOX="off"), cwd=configured.parent) as started:
        yield started


async def post(
    server: ServerProcess, path: str, token: str = "", *, origin: str | None = None, cookie: str = ""
) -> httpx2.Response:
    """POST to the server as the page does, or as a page of another origin."""
    headers = {"Origin": server.base_url if origin is None else origin}
    if cookie:
        headers["Cookie"] = f"crow_token={cookie}"
    async with httpx2.AsyncClient(trust_env=False, timeout=WAIT_S) as http:
        return await http.post(server.base_url + path, headers=headers, json={"token": token})


def cookie_of(response: httpx2.Response) -> str:
    found = re.match(
        r"crow_token=(crow_[a-z2-7]+); HttpOnly; Max-Age=\d+; Path=/; SameSite=strict$", response.headers["set-cookie"]
    )
    assert found is not None, response.headers["set-cookie"]
    return found[1]


async def status_of_connection(server: ServerProcess, **headers: str) -> int:
    """The HTTP status with which the WebSocket is accepted or refused."""
    try:
        async with server.client(headers=headers) as client:
            await client.initialize()
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


async def test_the_page_is_served_with_headers_that_let_it_load_nothing_else(server: ServerProcess) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/icon.svg", "image/svg"),
    ):
        answer = await server.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    icon = Path(__file__).parents[2] / "registry" / "icon.svg"
    assert (await server.get("/icon.svg")).text == icon.read_text("utf-8")
    page = (await server.get("/")).text
    assert re.findall(r"<script(?! src=\"page\.js\")|\son\w+=|style=", page) == []
    assert (await server.get("/page/page.js")).status_code == 404
    assert (await server.get("/..%2fbrowser.py")).status_code == 404


async def test_without_tokens_the_page_itself_may_connect_and_no_other_page(server: ServerProcess) -> None:
    assert (await server.get("/paired")).status_code == 204
    assert await status_of_connection(server, Origin=server.base_url) == 101
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", server.base_url.replace("http", "ftp")):
        assert await status_of_connection(server, Origin=origin) == 403


async def test_a_pairing_link_gives_one_browser_a_token_of_its_own(team: ServerProcess, home: Path) -> None:
    link = await make_token(home, "ann", is_pairing=True)
    assert await status_of_connection(team, Authorization=f"Bearer {link}") == 401, "it only pairs"
    assert (await post(team, "/pair", link, origin="https://evil.example")).status_code == 403
    cookie = cookie_of(await post(team, "/pair", link))
    again = await post(team, "/pair", link)
    assert (again.status_code, "set-cookie" in again.headers) == (401, False)
    assert await status_of_connection(team, Origin=team.base_url, Cookie=f"crow_token={cookie}") == 101
    async with httpx2.AsyncClient(trust_env=False, timeout=WAIT_S) as http:
        assert (
            await http.get(team.base_url + "/paired", headers={"Cookie": f"crow_token={cookie}"})
        ).status_code == 204
    assert (await post(team, "/unpair", cookie=cookie)).status_code == 204
    assert await status_of_connection(team, Origin=team.base_url, Cookie=f"crow_token={cookie}") == 401


async def test_the_cookie_counts_for_no_other_web_page(team: ServerProcess, home: Path) -> None:
    cookie = cookie_of(await post(team, "/pair", await make_token(home, "ann", is_pairing=True)))
    assert await status_of_connection(team, Origin="https://evil.example", Cookie=f"crow_token={cookie}") == 403
    assert await status_of_connection(team, Cookie=f"crow_token={cookie}") == 401
    assert (await post(team, "/unpair", origin="https://evil.example", cookie=cookie)).status_code == 403
    assert await status_of_connection(team, Origin=team.base_url, Cookie=f"crow_token={cookie}") == 101


@pytest.mark.parametrize("body", ["", "[]", '{"token": 7}', '{"token": "crow_x"}', "{", "x" * 5000, "[" * 4000])
async def test_what_is_no_pairing_token_pairs_nothing(team: ServerProcess, body: str) -> None:
    async with httpx2.AsyncClient(trust_env=False, timeout=WAIT_S) as http:
        answer = await http.post(team.base_url + "/pair", headers={"Origin": team.base_url}, content=body)
    assert answer.status_code in {401, 429}
    assert "set-cookie" not in answer.headers


async def test_ordinary_and_expired_tokens_pair_nothing(team: ServerProcess, home: Path) -> None:
    for text in (await make_token(home, "ann"), await make_token(home, "ann", is_pairing=True, minutes=-1)):
        assert (await post(team, "/pair", text)).status_code in {401, 429}


async def test_a_page_prompts_and_answers_like_every_client(server: ServerProcess, place: Path) -> None:
    headers = {"Origin": server.base_url}
    async with server.client(headers=headers, answers={"session/request_permission": allow_once}) as client:
        await client.initialize()
        session = await client.new_session(place)
        await client.prompt(session, "write notes.txt: twigs")
    assert (place / "notes.txt").read_text().strip() == "twigs"
