"""`crow serve` as clients and operators see it: a real process, real connections."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import signal
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import acp
import pytest
from acp import schema
from acp.ws import create_websocket_stream
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from crow.domain.errors import ConfigError
from crow.serve.server import serve
from crow.serve.tokens import new_token
from crow.settings import load_settings
from crow.store.sqlite.store import SqliteStore
from crow.version import __version__
from tests.support.acp_client import RpcError, allow_once, reject_once
from tests.support.bridged import BridgedEditor
from tests.support.server import ServerProcess, WebSocketClient, server_environment


async def test_a_client_prompts_over_a_websocket(server: ServerProcess, place: Path) -> None:
    async with server.client() as client:
        await client.initialize()
        session = await client.new_session(place)
        assert await client.prompt(session, "say hello") == {"stopReason": "end_turn"}
        assert client.text(session) == "hello"
        assert client.socket.response is not None
        assert client.socket.response.headers["Crow-Version"] == __version__
        assert len(client.connection_id) == 36


async def test_permissions_are_asked_over_the_same_socket(server: ServerProcess, place: Path) -> None:
    async with server.client(answers={"session/request_permission": reject_once}) as client:
        await client.initialize()
        session = await client.new_session(place)
        await client.prompt(session, "write notes.txt: twigs")
        assert not (place / "notes.txt").exists()
    async with server.client() as client:
        await client.initialize()
        await client.load_session(session, place)
        await client.prompt(session, "write notes.txt: twigs")
        assert (place / "notes.txt").read_text().strip() == "twigs"


async def test_a_client_that_breaks_off_and_returns_keeps_its_connection_id(server: ServerProcess) -> None:
    async with server.client() as first:
        await first.initialize()
        first.break_off()
        # The server may notice the end before or after the client is back.
        async with server.client(headers={"Acp-Connection-Id": first.connection_id}) as second:
            assert second.connection_id == first.connection_id
            await second.initialize()
            async with server.client(headers={"Acp-Connection-Id": second.connection_id}) as third:
                assert third.connection_id == second.connection_id
                assert await second.closed() == (1008, "This client has connected again.")
                await third.initialize()
    async with server.client(headers={"Acp-Connection-Id": "made-up"}) as stranger:
        assert stranger.connection_id != "made-up"


async def test_the_endpoints_of_operators_answer(server: ServerProcess) -> None:
    assert (await server.get("/healthz")).text == "ok\n"
    assert (await server.get("/readyz")).json() == {"status": "ready"}
    plain = await server.get("/acp")
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket")
    assert (await server.get("/nothing")).status_code == 404


async def test_metrics_count_connections_turns_and_store_calls(server: ServerProcess, place: Path) -> None:
    before = await server.metrics()
    async with server.client() as client:
        await client.initialize()
        await client.prompt(await client.new_session(place), "say hello")
        during = await server.metrics()

    def grown(name: str) -> float:
        return during[name] - before.get(name, 0)

    assert during["crow_connections"] == before["crow_connections"] + 1
    assert grown("crow_connections_total") == 1
    assert grown("crow_turns_started_total") == 1
    assert grown('crow_turns_ended_total{stop="end_turn"}') == 1
    assert grown('crow_tokens_total{kind="output"}') > 0
    assert grown('crow_requests_total{method="session/prompt"}') == 1
    assert grown('crow_store_seconds_count{method="append"}') >= 2
    assert grown('crow_store_seconds_bucket{method="append",le="+Inf"}') >= 2
    assert during["process_resident_memory_bytes"] > 1e7


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1"])
async def test_web_pages_are_refused(server: ServerProcess, origin: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with server.client(headers={"Origin": origin}):
            pass
    assert refused.value.response.status_code == 403
    assert f'Web pages of "{origin}" may not connect' in bytes(refused.value.response.body).decode()


@pytest.mark.parametrize(
    "name", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "LOCALHOST..evil"]
)
async def test_names_that_could_be_rebound_are_refused(server: ServerProcess, name: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with WebSocketClient(f"ws://{name}:{server.port}/acp", host="127.0.0.1", port=server.port):
            pass
    assert refused.value.response.status_code == 403
    assert (
        f'"{name}:{server.port}" is not a name of this server'.lower()
        in bytes(refused.value.response.body).decode().lower()
    )
    assert (await server.get("/metrics", Host=name)).status_code == 403
    assert (await server.get("/metrics", Host=f"[::1].{name}")).status_code == 403
    assert (await server.get("/metrics", Host="LocalHost.:1")).status_code == 200


async def test_the_first_message_must_be_initialize(server: ServerProcess) -> None:
    problem = "The first message of a connection must be an initialize request."
    async with server.client() as client:
        with pytest.raises(RpcError, match=problem):
            await client.request("session/list", {})
        assert await client.closed() == (1002, problem)
    async with server.client() as client:
        await client.send_raw(b'{"jsonrpc":"2.0","method":"initialize","params":{}}')
        assert await client.closed() == (1002, problem)


async def test_garbage_is_answered_and_the_connection_goes_on(server: ServerProcess, place: Path) -> None:
    async with server.client() as client:
        client.checks_schema = False
        await client.initialize()
        since = len(client.log)
        await client.send_raw(b"{nonsense\n[]\n17\nnull")
        await client.socket.send(b"\x00\x01binary")
        await client.socket.send('{"jsonrpc":"2.0","id":7}')
        await client.socket.send('{"jsonrpc":"2.0","method":"no/such/thing","params":[1]}')
        await client.socket.send("[" * 100_000)
        session = await client.new_session(place)
        codes = [each.message["error"]["code"] for each in client.log[since:] if "error" in each.message]
        assert codes == [-32700, -32600, -32600, -32600, -32600, -32600, -32700]
        assert (await client.prompt(session, "say hello")) == {"stopReason": "end_turn"}
        client.check()


async def test_a_message_over_the_limit_closes_the_connection(server: ServerProcess) -> None:
    async with server.client(max_size=None) as client:
        await client.initialize()
        with suppress(ConnectionClosed):  # the server may close before it has read everything
            await client.socket.send("x" * (32 * 1024 * 1024 + 1))
        assert (await client.closed())[0] == 1009
    async with server.client() as client:
        await client.initialize()


async def test_the_python_sdk_drives_the_server_over_its_own_websocket(server: ServerProcess, place: Path) -> None:
    class SdkClient:
        def __init__(self) -> None:
            self.text = ""
            self.asked = 0

        def on_connect(self, conn: Any) -> None:
            pass

        async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
            if isinstance(update, schema.AgentMessageChunk) and isinstance(update.content, schema.TextContentBlock):
                self.text += update.content.text

        async def request_permission(self, options: list[Any], **_: Any) -> acp.RequestPermissionResponse:
            self.asked += 1
            (option,) = [each for each in options if each.kind == "allow_once"]
            outcome = schema.AllowedOutcome(outcome="selected", option_id=option.option_id)
            return acp.RequestPermissionResponse(outcome=outcome)

    client = SdkClient()
    connection = acp.connect_to_agent(cast(Any, client), await create_websocket_stream(server.address))
    try:
        answer = await connection.initialize(protocol_version=1)
        assert answer.agent_info is not None
        assert answer.agent_info.name == "crow"
        session = (await connection.new_session(cwd=str(place), mcp_servers=[])).session_id
        prompt: list[Any] = [acp.text_block("write notes.txt: twigs then say done")]
        assert (await connection.prompt(prompt=prompt, session_id=session)).stop_reason == "end_turn"
        assert client.asked == 1
        assert client.text.partition("\n\nReceipt: ")[0].endswith("done")
        assert (place / "notes.txt").read_text().strip() == "twigs"
        with pytest.raises(acp.RequestError):
            await connection.load_session(cwd=str(place), session_id="no-such-session", mcp_servers=[])
    finally:
        await connection.close()


async def test_a_unix_socket_is_private_and_taken_once(tmp_path: Path, place: Path) -> None:
    path = tmp_path / "run" / "crow.sock"
    options, env = ("--listen", str(path)), server_environment(tmp_path / "home", CROW_SANDBOX="off")
    async with ServerProcess(*options, env=env, cwd=place) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert (await server.get("/readyz")).status_code == 200
        async with server.client() as client:
            await client.initialize()
            assert await client.prompt(await client.new_session(place), "say hello") == {"stopReason": "end_turn"}
        assert await refusal(tmp_path, listen=str(path)) == f"Another crow serve is listening on {path}."
        server.is_checked = False
        server.process.kill()
        await server.wait()
    assert path.exists()  # nobody has removed it
    async with ServerProcess(*options, env=env, cwd=place) as server:
        assert (await server.get("/healthz")).status_code == 200
    assert not path.exists()


async def test_addresses_that_others_reach_or_change_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "file").write_text("")
    assert "would let other machines connect, and no token exists" in await refusal(tmp_path, listen="0.0.0.0:0")
    assert "because other users can write there" in await refusal(tmp_path, listen=f"{shared}/crow.sock")
    assert "because the file at this path is not a socket" in await refusal(tmp_path, listen=f"{tmp_path}/file")
    assert 'cannot listen on "7431"; expected HOST:PORT' in await refusal(tmp_path, listen="7431")
    assert 'cannot listen on "::1:99999"; expected HOST:PORT' in await refusal(tmp_path, listen="::1:99999")
    assert "works only in a service that a systemd socket" in await refusal(tmp_path, listen="systemd")
    assert "needs both a certificate and its key" in await refusal(tmp_path, tls_cert="c.pem")
    words = await refusal(tmp_path, tls_cert="c.pem", tls_key="k.pem")
    assert words.endswith("cannot be used: No such file or directory.")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = await refusal(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        assert words.endswith(": another program listens there.")


async def test_sigterm_lets_turns_finish_and_tells_the_clients(tmp_path: Path, place: Path) -> None:
    home = tmp_path / "home"
    env = server_environment(home, CROW_SANDBOX="off")
    async with ServerProcess(env=env, cwd=place) as server:
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def answer(params: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            await may_answer.wait()
            return reject_once(params)

        async with server.client(answers={"session/request_permission": answer}) as client, server.client() as idle:
            await client.initialize()
            await idle.initialize()
            session = await client.new_session(place)
            call = await client.start_prompt(session, "write notes.txt: twigs then say done")
            await asked.wait()
            server.send_signal(signal.SIGTERM)
            await server.wait_for_log("The server drains", sessions=1)
            with pytest.raises(RpcError, match="in a moment and repeat this request"):
                await idle.new_session(place)
            with pytest.raises(InvalidStatus) as refused:
                async with server.client():
                    pass
            assert refused.value.response.status_code == 503
            assert refused.value.response.headers["Retry-After"] == "5"
            assert (await server.get("/readyz")).json() == {"status": "not ready", "problem": "draining"}
            assert (await server.get("/healthz")).status_code == 200
            may_answer.set()
            assert await call.result() == {"stopReason": "end_turn"}
            reason = "This server is shutting down. Connect again in a moment."
            assert await client.closed() == (1001, reason)
            assert await idle.closed() == (1001, reason)
        assert await server.wait() == 0


async def test_a_second_sigterm_cancels_and_stores_running_turns(tmp_path: Path, place: Path) -> None:
    env = server_environment(tmp_path / "home", CROW_SANDBOX="off")
    async with ServerProcess(env=env, cwd=place) as server:
        asked = asyncio.Event()

        async def never(_params: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            await asyncio.Event().wait()
            return {}

        async with server.client(answers={"session/request_permission": never}) as client:
            await client.initialize()
            session = await client.new_session(place)
            call = await client.start_prompt(session, "write notes.txt: twigs")
            await asked.wait()
            server.send_signal(signal.SIGTERM)
            await server.wait_for_log("The server drains")
            server.send_signal(signal.SIGTERM)
            assert await call.result() == {"stopReason": "cancelled"}
            assert (await client.closed())[0] == 1001
        assert await server.wait() == 0
    async with ServerProcess(env=env, cwd=place) as server, server.client() as client:
        await client.initialize()
        await client.load_session(session, place)
        assert client.text(session, "user_message_chunk") == "write notes.txt: twigs"
        assert not (place / "notes.txt").exists()


async def refusal(home: Path, **options: str) -> str:
    """Why the server refuses to start with these settings."""
    settings = {f"serve.{name}": value for name, value in options.items()}
    loaded = load_settings(settings, {"CROW_HOME": str(home)})
    with pytest.raises(ConfigError) as refused:
        await serve(loaded, lambda: loaded)
    return str(refused.value)


async def add_token(home: Path, principal: str) -> tuple[str, str]:
    """Adds a token for a principal; returns its text and its id."""
    store = await SqliteStore.open(load_settings({}, {"CROW_HOME": str(home)}).paths.database)
    try:
        text, token = new_token(principal)
        await store.add_token(token)
    finally:
        await store.close()
    return text, token.id


async def test_with_tokens_everybody_needs_one_and_sees_only_their_own(tmp_path: Path, place: Path) -> None:
    home = tmp_path / "home"
    ann, ann_id = await add_token(home, "ann")
    (bob, _), (operator, _) = await add_token(home, "bob"), await add_token(home, "prometheus")
    settings = f'[serve]\nroots = ["{place}"]\noperators = ["prometheus"]\nmax_connections_each = 2\n'
    (home / "config.toml").write_text(settings)
    env = server_environment(home, CROW_SANDBOX="off")
    async with ServerProcess("--listen", "0.0.0.0:0", env=env, cwd=place) as server:
        server.address = f"ws://127.0.0.1:{server.port}/acp"
        for headers, status in (({}, 401), (bearer("crow_nonsense"), 401), ({"Authorization": f"Basic {ann}"}, 401)):
            with pytest.raises(InvalidStatus) as refused:
                await server.client(headers=headers).__aenter__()
            assert refused.value.response.status_code == status
            assert refused.value.response.headers["WWW-Authenticate"] == 'Bearer realm="crow"'
        for token, status in (("crow_x", 401), (ann, 403), (operator, 200)):
            assert (await server.get("/metrics", **bearer(token))).status_code == status
        async with server.client(headers=bearer(ann)) as first, server.client(headers=bearer(bob)) as other:
            await first.initialize()
            await other.initialize()
            session = await first.new_session(place)
            await first.prompt(session, "say hello")
            assert (await other.request("session/list", {}))["sessions"] == []
            with pytest.raises(RpcError, match=session):
                await other.load_session(session, place)
            async with server.client(headers=bearer(ann)) as second:
                await second.initialize()
                (listed,) = (await second.request("session/list", {}))["sessions"]
                assert listed["sessionId"] == session
                with pytest.raises(InvalidStatus) as refused:
                    await server.client(headers=bearer(ann)).__aenter__()
                assert refused.value.response.status_code == 503
                stranger = {"Acp-Connection-Id": first.connection_id} | bearer(bob)
                async with server.client(headers=stranger) as thief:
                    assert thief.connection_id != first.connection_id
                    await thief.initialize()
            store = await SqliteStore.open(load_settings({}, {"CROW_HOME": str(home)}).paths.database)
            await store.revoke_token(ann_id)
            await store.close()
            assert await first.closed() == (1008, "The token of this connection was revoked or has expired.")
            await other.new_session(place)
        for _ in range(11):
            with pytest.raises(InvalidStatus) as refused:
                await server.client(headers=bearer(ann)).__aenter__()
        assert refused.value.response.status_code == 429
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        async with server.client(headers=bearer(bob)) as other:
            await other.initialize()


def bearer(token: str) -> dict[str, str]:
    """The header with a token."""
    return {"Authorization": f"Bearer {token}"}


async def test_a_turn_goes_on_without_the_client_that_has_sent_it(server: ServerProcess, place: Path) -> None:
    async with server.client() as client:
        await client.initialize()
        session = await client.new_session(place)
        await client.start_prompt(session, "count to 12 then write notes.txt: twigs")
        await client.wait_for_text(session, "2")
        client.break_off()
    asked: list[str] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params["toolCall"]["title"])
        return allow_once(params)

    async with server.client(answers={"session/request_permission": allow}) as other:
        other.follows_order = False  # it sees a turn that another client has started
        await other.initialize()
        await other.load_session(session, place)
        await other.wait_for_update("tool_call_update", status="completed")
        assert asked != []
        assert (place / "notes.txt").read_text().strip() == "twigs"


async def test_tls_needs_only_a_certificate_and_its_key(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    options = ("--tls-cert", "cert.pem", "--tls-key", "key.pem")
    context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    env = server_environment(tmp_path / "home", CROW_SANDBOX="off")
    async with ServerProcess(*options, env=env, cwd=tmp_path) as server:
        assert server.address.startswith("wss://127.0.0.1:")
        async with server.client(ssl=context) as client:
            await client.initialize()
            assert await client.prompt(await client.new_session(place), "say hello") == {"stopReason": "end_turn"}
            assert client.socket.transport.get_extra_info("ssl_object").version() in {"TLSv1.2", "TLSv1.3"}
        place_of_page = server.address.removeprefix("wss://").removesuffix("/acp")
        async with server.client(ssl=context, headers={"Origin": f"https://{place_of_page}"}) as client:
            await client.initialize()
        with pytest.raises(InvalidStatus):
            await server.client(ssl=context, headers={"Origin": f"http://{place_of_page}"}).__aenter__()
        with pytest.raises((InvalidMessage, ConnectionError, EOFError)):
            await WebSocketClient(server.address.replace("wss", "ws")).__aenter__()
        async with BridgedEditor(server.address) as editor:
            error = (await editor.request("initialize", protocolVersion=1))["error"]
            assert f"The certificate of {server.address} is not trusted" in error["message"]
            assert await editor.ended() == 2
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        async with BridgedEditor(server.address) as editor:
            session = await editor.new_session(place)
            assert "result" in await editor.prompt(session, "x" * 3_000_000)


def make_certificate(cert: Path, key: Path) -> None:
    """Writes a certificate for 127.0.0.1 that signs itself."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private_bytes = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key.write_bytes(private_bytes)
