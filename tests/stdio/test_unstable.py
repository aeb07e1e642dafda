"""Methods and updates of the protocol's unstable version, in the real process."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from crow.store.sqlite.store import SqliteStore
from tests.stdio.conftest import StartCrow
from tests.store.scenes import converse, new_session
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate

SESSION_METHODS = ("session/archive", "session/unarchive", "session/status", "session/set_title")


async def refused(agent: CrowProcess, method: str, params: Any) -> tuple[int, str]:
    """The code and the message of the error that answers a request."""
    with pytest.raises(RpcError) as caught:
        await agent.request(method, params)
    return caught.value.code, caught.value.message


async def listed(agent: CrowProcess, **params: Any) -> list[tuple[str, bool]]:
    """The listed sessions: their titles, and whether they are archived. Only a client that asks is told."""
    sessions = (await agent.request("session/list", params))["sessions"]
    if "archived" in params:
        return [(one.get("title"), one["archived"]) for one in sessions]
    assert not any("archived" in one for one in sessions)
    return [(one.get("title"), params.get("_meta", {}).get("crow", {}).get("archived", False)) for one in sessions]


def rows(home: Path) -> list[tuple[Any, ...]]:
    """What the database says about the sessions."""
    with sqlite3.connect(home / "crow.db") as database:
        return database.execute(
            "SELECT id, title, title_by_user, archived, updated_ms FROM sessions WHERE deleted_ms IS NULL"
        ).fetchall()


async def test_initialize_offers_the_methods(crow: StartCrow) -> None:
    async with crow() as agent:
        capabilities = (await agent.initialize())["agentCapabilities"]
        assert capabilities["sessionCapabilities"].items() >= {"archive": {}, "status": {}, "title": {}}.items()


async def test_an_archived_session_is_hidden_until_it_is_put_back(crow: StartCrow, place: Path, home: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        first, second = await agent.new_session(place), await agent.new_session(place)
        await agent.prompt(first, "say one")
        await agent.prompt(second, "say two")
        assert await listed(agent) == [("say two", False), ("say one", False)]
        (used_ms,) = [row[-1] for row in rows(home) if row[0] == first]
        for _ in range(2):
            assert await agent.request("session/archive", {"sessionId": first}) == {}
            assert await listed(agent) == await listed(agent, archived="exclude") == [("say two", False)]
            assert await listed(agent, archived="only") == [("say one", True)]
            assert await listed(agent, archived=None, _meta={"crow": {"archived": True}}) == [("say one", True)]
            assert await listed(agent, archived="exclude", _meta={"crow": {"archived": True}}) == [("say two", False)]
            assert await listed(agent, archived="include") == [("say two", False), ("say one", True)]
            assert await listed(agent, archived="include", cwd="/elsewhere") == []
        assert [row[-1] for row in rows(home) if row[0] == first] == [used_ms]
        assert (await refused(agent, "session/prompt", {"sessionId": first, "prompt": []}))[0] == -32002
    async with crow() as agent:
        await agent.initialize()
        assert await listed(agent) == [("say two", False)]
        await agent.load_session(first, place)
        assert await agent.prompt(first, "say three") == {"stopReason": "end_turn"}
        assert await listed(agent, archived="only") == [("say one", True)]
        for _ in range(2):
            assert await agent.request("session/unarchive", {"sessionId": first}) == {}
            assert await listed(agent) == [("say one", False), ("say two", False)]
        assert await agent.prompt(first, "say four") == {"stopReason": "end_turn"}


async def test_archiving_cancels_the_running_turn_and_closes_the_session(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("first", " second", between=(gate,)))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "hello")
        await agent.wait_for_text(session, "first")
        assert await agent.request("session/archive", {"sessionId": session}) == {}
        assert await call.result() == {"stopReason": "cancelled"}
        assert await agent.request("session/status", {"sessionId": session}) == {"status": "saved"}
        assert (await refused(agent, "session/close", {"sessionId": session}))[0] == -32002
        gate.open()


async def test_pages_of_the_list_keep_the_filter(crow: StartCrow, home: Path, place: Path) -> None:
    store = await SqliteStore.open(home / "crow.db")
    for number in range(52):
        await store.create_session(new_session(f"s{number}", cwd=str(place), title=f"say {number}"))
        await converse(store, f"s{number}", f"say {number}")
    await store.close()
    async with crow() as agent:
        await agent.initialize()
        for number in range(1, 52, 2):
            await agent.request("session/archive", {"sessionId": f"s{number}"})
        page = await agent.request("session/list", {"archived": "include"})
        rest = await agent.request("session/list", {"archived": "include", "cursor": page["nextCursor"]})
        found = [(one["title"], one["archived"]) for one in (*page["sessions"], *rest["sessions"])]
        assert found == [(f"say {number}", bool(number % 2)) for number in reversed(range(52))]


async def test_status_tells_open_from_saved_and_changes_nothing(crow: StartCrow, place: Path, home: Path) -> None:
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "say one")
        assert await agent.request("session/status", {"sessionId": session}) == {"status": "open"}
        await agent.request("session/close", {"sessionId": session})
        before = rows(home)
        assert await agent.request("session/status", {"sessionId": session}) == {"status": "saved"}
        assert rows(home) == before
        await agent.request("session/delete", {"sessionId": session})
        with pytest.raises(RpcError) as caught:
            await agent.request("session/status", {"sessionId": session})
        assert (caught.value.code, caught.value.data["sessionId"]) == (-32002, session)


async def test_a_title_set_by_the_client_is_stored_and_stays(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "hello")
        since = len(agent.log)
        answer = await agent.request("session/set_title", {"sessionId": session, "title": "  The\n nest\u202e "})
        assert answer == {"title": "The nest\\u202e"}
        (update,) = agent.updates(session, "session_info_update", since=since)
        assert update["title"] == "The nest\\u202e"
        assert await listed(agent) == [("The nest\\u202e", False)]
        await agent.prompt(session, "again")
        assert await listed(agent) == [("The nest\\u202e", False)]
        await agent.request("session/close", {"sessionId": session})
        await agent.request("session/archive", {"sessionId": session})
        long = await agent.request("session/set_title", {"sessionId": session, "title": "x" * 5000})
        assert long == {"title": "x" * 199 + "…"}
        assert await listed(agent, archived="only") == [(long["title"], True)]
        assert [row[1:4] for row in rows(home)] == [(long["title"], 1, 1)]


async def test_bad_requests_get_the_published_errors_and_change_nothing(
    crow: StartCrow, place: Path, home: Path
) -> None:
    async with crow() as agent:
        agent.checks_schema = False
        for method in SESSION_METHODS:
            assert (await refused(agent, method, {"sessionId": "x", "title": "t"}))[0] == -32600
        await agent.initialize()
        session, gone = await agent.new_session(place), await agent.new_session(place)
        await agent.prompt(session, "say one")
        await agent.prompt(gone, "say two")
        await agent.request("session/delete", {"sessionId": gone})
        before = rows(home)
        for method in SESSION_METHODS:
            for wrong in (None, 7, ["x"], {"id": session}, True):
                assert (await refused(agent, method, {"sessionId": wrong, "title": "t"}))[0] == -32602
            assert (await refused(agent, method, {"title": "t"}))[0] == -32602
            for name in ("", "no such session", gone, "x" * 5000):
                assert (await refused(agent, method, {"sessionId": name, "title": "t"}))[0] == -32002
        for title in (None, 7, ["t"], "", " \n\t "):
            assert (await refused(agent, "session/set_title", {"sessionId": session, "title": title}))[0] == -32602
        assert (await refused(agent, "session/set_title", {"sessionId": session}))[0] == -32602
        for archived in ("all", "", "_mine", True, 7, ["only"], {"only": True}):
            assert (await refused(agent, "session/list", {"archived": archived}))[0] == -32602
        assert rows(home) == before
        assert await listed(agent) == [("say one", False)]
        assert await agent.prompt(session, "say three") == {"stopReason": "end_turn"}


async def test_a_client_that_asks_gets_plans_by_id(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    items = [{"content": "Twigs", "status": "in_progress", "priority": "high"}]
    plan = {"type": "items", "planId": "plan", "entries": items}
    for capabilities, shown in (({"plan": {}}, "plan_update"), ({"plan": None}, "plan"), ({"plan": True}, "plan")):
        endpoint.script(
            fake.calls(("update_plan", {"items": items})),
            fake.text("planned"),
            fake.calls(("update_plan", {"items": []})),
            fake.text("done"),
        )
        async with crow(endpoint=endpoint) as agent:
            agent.checks_schema = shown == "plan_update"
            await agent.initialize(**capabilities)
            session = await agent.new_session(place)
            await agent.prompt(session, "plan it")
            await agent.prompt(session, "do it")
            agent.checks_schema = True
            call = await agent.start("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
            await call.result()
            kinds = ("plan", "plan_update", "plan_removed")
            by_id = [
                {"sessionUpdate": "plan_update", "plan": plan},
                {"sessionUpdate": "plan_removed", "planId": "plan"},
            ]
            plain = [{"sessionUpdate": "plan", "entries": items}, {"sessionUpdate": "plan", "entries": []}]
            expected = by_id if shown == "plan_update" else plain
            assert agent.updates(session, *kinds) == [*expected, *expected]


# providers and credentials

GATEWAY_KEY = "gw-5d0c1e7a9b3f4826"


def provider(provider_id: str, base_url: str | None, api_type: str = "openai") -> dict[str, Any]:
    """A provider as `providers/list` returns it."""
    current = None if base_url is None else {"apiType": api_type, "baseUrl": base_url}
    supported = ["openai", "anthropic", "azure"]
    return {"providerId": provider_id, "supported": supported, "required": provider_id == "main", "current": current}


def gateway(provider_id: str, base_url: str, api_type: str = "openai", **headers: str) -> dict[str, Any]:
    """The parameters of `providers/set`."""
    return {"providerId": provider_id, "apiType": api_type, "baseUrl": base_url, "headers": headers}


@pytest.mark.parametrize(
    ("api_type", "path", "wires"),
    [
        ("anthropic", "", ["messages"]),
        ("anthropic", "/v1", ["messages"]),
        ("openai", "/v1", ["chat", "responses"]),
        ("azure", "/v1", ["responses"]),
    ],
)
async def test_a_gateway_is_asked_on_the_api_that_the_client_names(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, api_type: str, path: str, wires: list[str]
) -> None:
    endpoint.wires = ("responses", "messages")
    url = endpoint.base_url.removesuffix("/v1") + path
    async with crow(endpoint=endpoint, env={"CROW_MODEL": "claude-opus-5-5"}) as agent:
        await agent.initialize()
        assert await agent.request("providers/set", gateway("main", url, api_type, Authorization="Bearer gw")) == {}
        assert await agent.request("providers/list", {}) == {"providers": [provider("main", url, api_type)]}
        session = await agent.new_session(place)
        assert await agent.prompt(session, "Hello") == {"stopReason": "end_turn"}
    assert [request.wire for request in endpoint.requests if request.method == "POST"] == wires
    assert {name.lower(): text for name, text in endpoint.requests[-1].headers.items()}["authorization"] == "Bearer gw"


async def test_a_gateway_replaces_address_key_and_headers_and_its_secrets_are_not_recorded(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    settings = '[model]\nheaders = { "X-Own" = "own-0123456789" }\n'
    configure(home, settings)
    trace = tmp_path / "trace.jsonl"
    async with FakeEndpoint() as other:
        env = {"CROW_TRACE": str(trace), "CROW_LOG": "debug"}
        async with crow(endpoint=endpoint, env=env) as agent:
            assert (await agent.initialize())["agentCapabilities"]["providers"] == {}
            assert await agent.request("providers/list", {}) == {"providers": [provider("main", endpoint.base_url)]}
            session = await agent.new_session(place)
            await agent.prompt(session, "one")
            headers = {"authorization": f"Bearer {GATEWAY_KEY}", "X-Team": "team-0123456789"}
            assert await agent.request("providers/set", gateway("main", f"{other.base_url}/", **headers)) == {}
            assert await agent.request("providers/list", {}) == {"providers": [provider("main", other.base_url)]}
            other.script(fake.failing(400, f"bad key {GATEWAY_KEY} of team-0123456789"), fake.text("second"))
            configure(home, settings + "[log]\nlevel = 'debug'\n")  # settings are read again
            assert GATEWAY_KEY not in (await refused(agent, "session/prompt", text_prompt(session, "two")))[1]
            await agent.prompt(session, f"three {GATEWAY_KEY[::-1]}")
            sent = {name.lower(): value for name, value in other.asked[-1].headers.items()}
            assert (sent["authorization"], sent["x-team"]) == (f"Bearer {GATEWAY_KEY}", "team-0123456789")
            assert "x-own" not in sent
            assert (len(endpoint.asked), len(other.asked)) == (1, 2)
            await agent.request("providers/set", gateway("main", other.base_url, **{"X-Team": "team-0123456789"}))
            await agent.prompt(session, "four")
            assert "authorization" not in {name.lower() for name in other.asked[-1].headers}
            assert (home / "config.toml").read_text() == settings + "[log]\nlevel = 'debug'\n"
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            assert await agent.request("providers/list", {}) == {"providers": [provider("main", endpoint.base_url)]}
    written = contents(trace, home)
    assert other.base_url.encode() in written
    for secret in (GATEWAY_KEY, "team-0123456789"):
        assert secret.encode() not in written


def contents(*places: Path) -> bytes:
    """Everything in these files and folders."""
    found = [path for place in places for path in (place, *place.rglob("*"))]
    return b"".join(path.read_bytes() for path in found if path.is_file())


def configure(home: Path, text: str) -> None:
    """Writes the user's file."""
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


def text_prompt(session: str, text: str) -> dict[str, Any]:
    """The parameters of `session/prompt`."""
    return {"sessionId": session, "prompt": [{"type": "text", "text": text}]}


async def test_a_disabled_provider_is_not_used_until_it_is_set(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    async with FakeEndpoint() as other:
        table = f'[providers.{{}}]\nbase_url = "{other.base_url}"\nmodels = ["small"]\n'
        configure(home, table.format("team") + table.format("main"))
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            created = await agent.request("session/new", {"cwd": str(place), "mcpServers": []})
            session = created["sessionId"]
            assert offered(created["configOptions"]) == ["fake-model", "team/small", "main/small"]
            choice = {"sessionId": session, "configId": "model", "value": "team/small"}
            await agent.request("session/set_config_option", choice)
            await agent.prompt(session, "one")
            since = len(agent.log)
            for provider_id in ("team", "team", "nobody"):
                assert await agent.request("providers/disable", {"providerId": provider_id}) == {}
            all_ids = [("main", endpoint.base_url), ("team", None), ("providers.main", other.base_url)]
            assert (await agent.request("providers/list", {}))["providers"] == [provider(*each) for each in all_ids]
            at = await agent.wait_for_update("config_option_update", since=since)
            assert offered(agent.log[at].message["params"]["update"]["configOptions"])[:2] == [
                "fake-model",
                "main/small",
            ]
            code, words = await refused(agent, "session/prompt", text_prompt(session, "two"))
            assert (code, words.partition(". ")[0]) == (-32603, 'The editor has disabled the provider "team"')
            assert len(other.asked) == 1
            assert (await refused(agent, "providers/disable", {"providerId": "main"}))[0] == -32602
            await agent.request("providers/set", gateway("team", endpoint.base_url))
            await agent.prompt(session, "three")
            assert (endpoint.asked[-1].body["model"], len(other.asked)) == ("small", 1)


def offered(options: list[dict[str, Any]]) -> list[str]:
    """The models in a session's options."""
    (model,) = [option for option in options if option["id"] == "model"]
    return [choice["value"] for choice in model["options"]]


async def test_the_authentication_status_follows_logout_and_gateways(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    host = endpoint.base_url.removeprefix("http://").removesuffix("/v1")

    def with_account(label: str) -> dict[str, Any]:
        return {"state": "authenticated", "accounts": [{"label": label, "active": True}]}

    async with crow(endpoint=endpoint) as agent:
        assert (await agent.initialize())["agentCapabilities"]["auth"] == {"logout": {}, "status": {}}
        await agent.request("logout", {})
        await agent.request("authenticate", {"methodId": "configured"})
        assert await agent.request("auth/status", {}) == with_account(f"API key for {host}")
        await agent.request("logout", {})
        assert await agent.request("auth/status", {}) == {"state": "unauthenticated", "accounts": []}
        await agent.request("authenticate", {"methodId": "configured"})
        await agent.request("providers/set", gateway("main", endpoint.base_url, Authorization=f"Bearer {GATEWAY_KEY}"))
        await agent.request("session/list", {})
        told = with_account(f"{host} (set by the editor)")
        await agent.wait_for(lambda message: message.get("params") == told)
        updates = [each.message for each in agent.log if each.message.get("method") == "auth/status_update"]
        logged_out = {"state": "unauthenticated", "accounts": []}
        assert [each["params"] for each in updates] == [logged_out, with_account(f"API key for {host}"), told]
        assert await agent.request("auth/status", {}) == told
    for env, state in (
        ({}, "not_required"),
        ({"CROW_MODEL": "small", "OPENAI_BASE_URL": "http://localhost:1/v1"}, "not_required"),
        ({"CROW_MODEL": "small"}, "unauthenticated"),
        ({"CROW_MODEL": None}, "unauthenticated"),
        ({"CROW_MODEL": None, "OPENAI_API_KEY": "sk-test-0123456789"}, "authenticated"),
        ({"OPENAI_BASE_URL": "ftp://example.com"}, "unknown"),
    ):
        async with crow(env=env) as agent:
            await agent.initialize()
            assert (await agent.request("auth/status", {}))["state"] == state


async def test_bad_provider_requests_change_nothing(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    valid = gateway("main", "http://127.0.0.1:9/v1", Authorization=f"Bearer {GATEWAY_KEY}")
    async with crow(endpoint=endpoint) as agent:
        agent.checks_schema = False
        for method in ("auth/status", "providers/list", "providers/set", "providers/disable"):
            assert (await refused(agent, method, valid))[0] == -32600
        await agent.initialize()
        wrong_values: Iterable[dict[str, Any]] = (
            *({"providerId": wrong} for wrong in (None, 7, ["main"], "", "other", "Main", "x" * 5000)),
            *({"apiType": wrong} for wrong in (None, 7, "", "vertex", "bedrock", "OpenAI", "_mine", ["openai"])),
            *(
                {"baseUrl": wrong}
                for wrong in (None, 7, "", "example.com", "file:///etc/passwd", "http://", "http://[")
            ),
            *({"baseUrl": f"http://{wrong}"} for wrong in (f"u:{GATEWAY_KEY}@h/v1", f"h/v1?key={GATEWAY_KEY}")),
            *({"headers": wrong} for wrong in (None, 7, [["A", "b"]], "A: b", {"A": 7}, {"A": None}, {"": "b"})),
            *({"headers": {"A": wrong}} for wrong in ("b\r\nC: d", "b\n", "\u0430", "x" * 20_000)),
            *({"headers": {wrong: GATEWAY_KEY}} for wrong in ("A B", "A:", "A\r\nB", "\u0430")),
            {"headers": {f"A{number}": "b" for number in range(101)}},
        )
        for changes in wrong_values:
            code, words = await refused(agent, "providers/set", {**valid, **changes})
            assert code == -32602
            assert GATEWAY_KEY not in words
        for missing in ("providerId", "apiType", "baseUrl"):
            without = {name: value for name, value in valid.items() if name != missing}
            assert (await refused(agent, "providers/set", without))[0] == -32602
        for wrong in (None, 7, ["main"], "main"):
            assert (await refused(agent, "providers/disable", {"providerId": wrong}))[0] == -32602
        assert (await agent.request("providers/list", {}))["providers"] == [provider("main", endpoint.base_url)]
        session = await agent.new_session(place)
        await agent.prompt(session, "hello")
        assert len(endpoint.asked) == 1
    assert GATEWAY_KEY.encode() not in contents(home)
