"""Pages that `crow serve` shows to anyone with their address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from crow.settings import load_settings
from crow.store.sqlite.store import SqliteStore
from tests.serve.test_server import add_token, bearer
from tests.support.server import ServerProcess, WebSocketClient, server_environment

NEEDED = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-robots-tag": "noindex, nofollow, noarchive",
}


async def command(client: WebSocketClient, session: str, text: str) -> str:
    """The answer to a slash command."""
    before = len(client.text(session))
    await client.prompt(session, text)
    return client.text(session)[before:]


def path_in(answer: str) -> str:
    """The path of the link in an answer to `/share`."""
    return urlsplit(next(word for word in answer.split() if word.startswith("http"))).path


async def test_a_page_is_read_only_has_strict_headers_and_ends_with_its_link(
    server: ServerProcess, place: Path
) -> None:
    async with server.client() as client:
        await client.initialize()
        session = await client.new_session(place)
        await client.prompt(session, "say <b>hello</b>")
        made = await command(client, session, "/share 2h")
        path = path_in(made)
        page = await server.get(path)
        assert page.status_code == 200
        assert "&lt;b&gt;hello&lt;/b&gt;" in page.text
        assert {name: page.headers[name] for name in NEEDED} == NEEDED
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert policy.endswith("frame-ancestors 'none'; sandbox allow-scripts")
        async with httpx2.AsyncClient(trust_env=False) as http:
            assert (await http.post(server.base_url + path)).status_code == 405
            assert (await http.get(server.base_url + path, headers={"Host": "evil.example"})).status_code == 403
        name = path.removeprefix("/share/")[:10]
        assert f"- `{name}`: " in await command(client, session, "/share list")
        for wrong in (path[:-4] + "aaaa", path + "/..", "/share/", "/share/%2e%2e%2fconfig.toml", "/share/x%00"):
            assert (await server.get(wrong)).status_code == 404
        assert (await command(client, session, f"/share revoke {name}")).startswith("Revoked: ")
        gone = await server.get(path)
        assert (gone.status_code, gone.text) == (404, "There is no such page.\n")
        assert {key: gone.headers[key] for key in NEEDED} == NEEDED
        assert "There is no link" in await command(client, session, f"/share revoke {name}")
        assert "is not a lifetime; expected 1h to 366d" in await command(client, session, "/share forever")
        assert "expected a lifetime such as 7d" in await command(client, session, "/share 7d 8d")


async def test_the_page_of_a_deleted_session_is_gone(server: ServerProcess, place: Path) -> None:
    async with server.client() as client:
        await client.initialize()
        session = await client.new_session(place)
        await client.prompt(session, "say hello")
        path = path_in(await command(client, session, "/share redact"))
        assert (await server.get(path)).status_code == 200
        await client.request("session/delete", {"sessionId": session})
        assert (await server.get(path)).status_code == 404


async def test_principals_list_and_revoke_only_links_of_their_own_and_share_no_shared_session(
    tmp_path: Path, place: Path
) -> None:
    home = tmp_path / "home"
    (ann, _), (bob, _) = await add_token(home, "ann"), await add_token(home, "bob")
    (home / "config.toml").write_text(f'[serve]\nroots = ["{place}"]\n[share]\nurl = "https://crow.example/team"\n')
    env = server_environment(home, CROW_SANDBOX="off")
    async with ServerProcess("--listen", "0.0.0.0:0", env=env, cwd=place) as server:
        server.address = f"ws://127.0.0.1:{server.port}/acp"
        async with server.client(headers=bearer(ann)) as first, server.client(headers=bearer(bob)) as other:
            sessions = []
            for client in (first, other):
                await client.initialize()
                sessions.append(await client.new_session(place))
                await client.prompt(sessions[-1], "say hello")
            made = await command(first, sessions[0], "/share")
            assert "https://crow.example/team/share/" in made
            name = path_in(made).removeprefix("/team/share/")[:10]
            assert await command(other, sessions[1], "/share list") == "There are no links. `/share` makes one."
            assert f'There is no link "{name}".' in await command(other, sessions[1], f"/share revoke {name}")
            assert (await server.get(path_in(made).removeprefix("/team"))).status_code == 200, "a reader needs no token"
            store = await SqliteStore.open(load_settings({}, {"CROW_HOME": str(home)}).paths.database)
            await store.share_session(sessions[0], "bob", "write")
            await store.close()
            refused = await command(first, sessions[0], "/share")
            assert refused.startswith("`/share` is not available while the session is shared with other principals")
