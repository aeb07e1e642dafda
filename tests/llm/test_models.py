"""Tests of what endpoints say about their models, against a real server on the loopback."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import date
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest

from crow.domain.errors import BadRequest, ConfigError, ProtocolError
from crow.domain.messages import Answer, ToolSpec
from crow.llm import Retrying, client
from crow.llm.client import EndpointClient
from crow.llm.dialect import Dialect
from crow.llm.endpoint import Endpoint
from crow.llm.listing import Offered, last_of_page, read_listing
from tests.llm.chat.test_chat_completions import ASK, Memory, ask, asking, failure_of, refusals
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply, body, chunk, failing, sse, text, usage


class Listing(FakeEndpoint):
    """An endpoint that lists its models with sizes and prices."""

    def __init__(self, *items: dict[str, Any], gate: Gate | None = None) -> None:
        super().__init__()
        self.items, self.gate = items, gate

    def _reply(self, request: Any) -> Reply:
        if request.path.endswith("/models"):
            listed = body(json.dumps({"data": self.items}).encode())
            return replace(listed, steps=(self.gate, *listed.steps)) if self.gate else listed
        return super()._reply(request)

    @property
    def listings(self) -> int:
        return sum(request.path.endswith("/models") for request in self.requests)


class Pages(FakeEndpoint):
    """An endpoint that lists its models in pages of two, as Anthropic does, and ignores larger limits."""

    def __init__(self, *names: str, ignores_query: bool = False) -> None:
        super().__init__()
        self.names, self.ignores_query = names, ignores_query

    def _reply(self, request: Recorded) -> Reply:
        query = parse_qs(urlsplit(request.path).query)
        after = "" if self.ignores_query else query.get("after_id", [""])[0]
        first = self.names.index(after) + 1 if after else 0
        page = self.names[first : first + 2]
        items = [{"type": "model", "id": name} for name in page]
        has_more = first + 2 < len(self.names)
        return body(json.dumps({"data": items, "has_more": has_more, "last_id": page[-1]}).encode())


async def listed_by(endpoint: FakeEndpoint) -> list[str]:
    async with asking(endpoint) as model:
        return [each.name for each in await model.models()]


async def test_all_pages_of_a_list_of_models_are_read() -> None:
    async with Pages("a", "b/1&c", "c", "d", "e") as endpoint:
        assert await listed_by(endpoint) == ["a", "b/1&c", "c", "d", "e"]
        later = "/v1/models?limit=1000&after_id="
        assert [each.path for each in endpoint.requests] == ["/v1/models", f"{later}b%2F1%26c", f"{later}d"]


async def test_a_list_of_models_that_repeats_its_first_page_ends() -> None:
    async with Pages("a", "b", "c", ignores_query=True) as endpoint:
        assert await listed_by(endpoint) == ["a", "b"]
        assert len(endpoint.requests) == 2


async def test_the_pages_of_a_list_of_models_are_limited_in_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"m{number}" for number in range(100)]
    monkeypatch.setattr(client, "MAX_LISTING_PAGES", 3)
    async with Pages(*names) as endpoint:
        assert await listed_by(endpoint) == names[:6]
    monkeypatch.setattr(client, "MAX_LISTING_BYTES", 200)
    async with Pages(*names) as endpoint:
        with pytest.raises(ProtocolError, match="/models is longer than 200 bytes"):
            await listed_by(endpoint)
        assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("listing", "last"),
    [
        ({"has_more": True, "last_id": "m"}, "m"),
        ({"has_more": False, "last_id": "m"}, None),
        ({"has_more": "yes", "last_id": "m"}, None),
        ({"has_more": True, "last_id": 3}, None),
        ({"has_more": True, "last_id": "m" * 1000}, None),
        ({"last_id": "m"}, None),
        (["m"], None),
    ],
)
def test_a_page_names_the_model_after_which_the_next_page_begins(listing: object, last: str | None) -> None:
    assert last_of_page(listing) == last


async def test_a_listed_window_is_read_after_the_first_answer_and_stored() -> None:
    memory = Memory()
    async with Listing({"id": "fake-model", "max_model_len": 16384}) as endpoint:
        async with asking(endpoint, memory=memory) as model:
            assert model.info.context_window is None
            await ask(model)
            assert [request.path for request in endpoint.requests] == ["/v1/chat/completions", "/v1/models"]
            assert model.info.context_window == 16384
            await ask(model)
        learned = Memory(memory.facts)
        async with asking(endpoint, memory=learned) as model:
            await ask(model)
            assert model.info.context_window == 16384
        assert endpoint.listings == 1
    assert memory.facts["listed"] == {"context_window": 16384}


async def test_a_listed_window_is_read_again_when_it_fills_up() -> None:
    full = Reply(steps=(sse(chunk({"content": "ok"}), chunk(finish="stop"), usage(9_000)),))
    memory = Memory({"listed": {"context_window": 16_384}})
    listing = Listing({"id": "fake-model", "max_model_len": 65_536})
    async with listing as endpoint, asking(endpoint, memory=memory) as model:
        await ask(model)
        assert (model.info.context_window, endpoint.listings) == (16_384, 0)
        endpoint.script(full)
        await ask(model)
        assert (model.info.context_window, endpoint.listings) == (65_536, 1)
        endpoint.items = ({"id": "fake-model", "max_model_len": 10_000},)
        endpoint.script(
            *[replace(full, steps=(sse(chunk({"content": "ok"}), chunk(finish="stop"), usage(60_000)),))] * 51
        )
        for _ in range(50):
            await ask(model)
        assert (model.info.context_window, endpoint.listings) == (10_000, 2)
    assert memory.facts["listed"] == {"context_window": 10_000}


async def test_stored_facts_are_known_before_the_first_request() -> None:
    endpoint = Endpoint(base_url="http://localhost:1/v1", model="m")
    facts = {"listed": {"context_window": 9000, "input_price": 0.0, "output_price": 2.5}}
    info = EndpointClient(endpoint, learned=facts).info
    assert (info.context_window, info.input_price, info.output_price) == (9000, 0.0, 2.5)
    info = EndpointClient(replace(endpoint, context_window=16000), learned=facts).info
    assert info.context_window == 16000


async def test_a_configured_window_needs_no_listing_and_a_failed_listing_is_harmless() -> None:
    async with Listing({"id": "fake-model"}) as endpoint:
        async with asking(endpoint, window=9000) as model:
            assert (await ask(model))[1].text == "Hello there."
        assert endpoint.listings == 0
    async with FakeEndpoint() as endpoint:
        endpoint.models = []
        async with asking(endpoint) as model:
            for _ in range(2):
                assert (await ask(model))[1].text == "Hello there."
            assert model.info.context_window is None


async def test_listed_prices_are_used_if_none_are_configured() -> None:
    priced = {"id": "fake-model", "pricing": {"prompt": "0.000001", "completion": "0.000002"}}
    async with Listing(priced) as endpoint, asking(endpoint) as model:
        await ask(model)
        assert (model.info.input_price, model.info.output_price) == (1.0, 2.0)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_parameter_refused_within_a_successful_response_is_left_out_and_remembered(is_stream: bool) -> None:
    memory = Memory()
    refusal = {"error": {"message": "Unknown parameter: 'stream_options'", "type": "invalid_request_error"}}
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory) as model:
        endpoint.script(Reply(steps=(sse(refusal),)) if is_stream else body(json.dumps(refusal).encode()))
        deltas, answer = await ask(model)
        assert answer.text == "Hello there."
        assert [delta for delta in deltas if isinstance(delta, Retrying)] == []
        first, second = (request.body for request in endpoint.asked)
        assert ("stream_options" in first, "stream_options" in second) == (True, False)
    assert refusals(memory) == {"stream_options": (1, True)}


async def test_a_part_that_is_refused_again_after_leaving_it_out_is_reported() -> None:
    refusal = {"error": {"message": "Unknown parameter: 'stream_options'", "code": 400}}
    async with FakeEndpoint(otherwise=Reply(steps=(sse(refusal),))) as endpoint, asking(endpoint) as model:
        error, _, partial = await failure_of(model)
        assert len(endpoint.asked) == 2
    assert isinstance(error, BadRequest)
    assert "stream_options" in str(error)
    assert partial == Answer(finish="interrupted")


async def test_extra_members_replace_all_but_the_conversation() -> None:
    async with FakeEndpoint() as endpoint:
        wanted = {"temperature": 0.2, "max_tokens": 7, "messages": [], "stream": False}
        model = EndpointClient(Endpoint(base_url=endpoint.base_url, model="fake-model", extra_body=wanted))
        with anyio.fail_after(60):
            await ask(model)
        await model.close()
        sent = endpoint.asked[0].body
    assert (sent["temperature"], sent["max_tokens"], sent["stream"], len(sent["messages"])) == (0.2, 7, True, 2)


@pytest.mark.parametrize(
    ("thinking", "level", "sent"),
    [
        ("effort", "high", {"reasoning_effort": "high"}),
        ("effort", "off", {"reasoning_effort": "none"}),
        ("reasoning", "low", {"reasoning": {"effort": "low"}}),
        ("reasoning", "off", {"reasoning": {"enabled": False}}),
        ("switch", "medium", {"thinking": {"type": "enabled"}}),
        ("switch_effort", "high", {"thinking": {"type": "enabled"}, "reasoning_effort": "high"}),
        ("switch_effort", "off", {"thinking": {"type": "disabled"}}),
        ("enable_thinking", "off", {"enable_thinking": False}),
    ],
)
async def test_a_thought_level_is_sent_where_the_vendor_reads_it_and_dropped_when_refused(
    thinking: Any, level: Any, sent: dict[str, object]
) -> None:
    async with FakeEndpoint() as endpoint:
        named = Endpoint(
            base_url=endpoint.base_url, model="fake-model", dialect=Dialect(thinking=thinking), thought_level="medium"
        )
        model = EndpointClient(named)
        words = f"Unsupported parameter: '{next(iter(sent))}' is not supported with this model."
        endpoint.script(text("ok"), body(json.dumps({"error": {"message": words}}).encode(), status=400))
        with anyio.fail_after(60):
            for _ in range(2):
                await ask(model, replace(ASK, thought_level=level))
        await model.close()
        first, _, last = (request.body for request in endpoint.asked)
    keys = ("reasoning_effort", "reasoning", "thinking", "enable_thinking")
    assert {key: first[key] for key in keys if key in first} == sent
    assert [key for key in keys if key in last] == []


async def test_models_that_cache_on_request_get_a_marker() -> None:
    async with FakeEndpoint() as endpoint:
        marked: list[object] = []
        for name in ("anthropic/claude-x", "other/m"):
            model = EndpointClient(Endpoint(base_url=endpoint.base_url, model=name, dialect=Dialect(cache="marker")))
            await ask(model)
            await model.close()
            marked.append(endpoint.asked[-1].body.get("cache_control"))
    assert marked == [{"type": "ephemeral"}, None]


async def test_a_summary_keeps_the_tool_choice_of_models_that_would_drop_their_cache() -> None:
    tool = ToolSpec(name="read_file", description="Reads.", input_schema={"type": "object"})
    sent: dict[str, object] = {}
    async with FakeEndpoint() as endpoint:
        for name in ("anthropic/claude-x", "other/m"):
            model = EndpointClient(Endpoint(base_url=endpoint.base_url, model=name, dialect=Dialect(cache="marker")))
            await ask(model, replace(ASK, tools=(tool,), tool_choice="none"))
            await model.close()
            sent[name] = endpoint.asked[-1].body.get("tool_choice")
    assert sent == {"anthropic/claude-x": None, "other/m": "none"}


_ACCOUNT = {"openai-organization": "org-1", "openai-project": "proj-1"}


@pytest.mark.parametrize(
    ("host", "account"),
    [
        ("api.openai.com", _ACCOUNT),
        ("eu.api.openai.com", _ACCOUNT),
        ("api.openai.com.example", {}),
        ("myapi.openai.com", {}),
        ("models.invalid", {}),
    ],
)
@pytest.mark.parametrize("lists", [False, True])
async def test_only_openai_gets_the_account_that_its_environment_variables_name(
    monkeypatch: pytest.MonkeyPatch, host: str, account: dict[str, str], lists: bool
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: blue")
    async with FakeEndpoint() as endpoint:
        proxy = endpoint.base_url.removesuffix("/v1")
        model = EndpointClient(Endpoint(base_url=f"http://{host}/v1", model="m", api_key="k", proxy=proxy))
        with anyio.fail_after(60):
            await (model.models() if lists else ask(model))
        await model.close()
        sent = endpoint.requests[0].headers
    assert {name: value for name, value in sent.items() if name in _ACCOUNT} == account
    assert not [name for name in sent if name.startswith("x-")]
    assert sent["authorization"] == "Bearer k"


async def test_headers_of_an_account_that_the_user_configured_are_sent_to_every_endpoint() -> None:
    headers = (("OpenAI-Organization", "org-2"), ("user-agent", "mine"))
    async with FakeEndpoint() as endpoint:
        model = EndpointClient(Endpoint(base_url=endpoint.base_url, model="m", headers=headers))
        await ask(model)
        await model.close()
        sent = endpoint.requests[0].headers
    assert (sent["openai-organization"], sent["user-agent"]) == ("org-2", "mine")


async def test_a_proxy_is_used_and_a_missing_ca_file_is_reported(tmp_path: Any) -> None:
    async with FakeEndpoint() as endpoint:
        proxy = endpoint.base_url.removesuffix("/v1")
        model = EndpointClient(Endpoint(base_url="http://models.invalid/v1", model="m", api_key="k", proxy=proxy))
        with anyio.fail_after(60):
            await ask(model)
        await model.close()
        assert endpoint.requests[0].path == "http://models.invalid/v1/chat/completions"
    missing = str(tmp_path / "ca.pem")
    model = EndpointClient(Endpoint(base_url="https://models.invalid/v1", model="m", api_key="k", ca_file=missing))
    with pytest.raises(ConfigError, match=r"ca\.pem cannot be used: No such file"):
        await ask(model)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"proxy": "socks5://127.0.0.1:9"}, "cannot be used: it is a SOCKS proxy. Set proxy"),
        ({"proxy": "http://127.0.0.1:x"}, "cannot be used: Invalid port: 'x'. Set proxy"),
        ({"headers": (("X-Name", "Zoë"),)}, 'The header "X-Name" for http://127.0.0.1:9/v1 has characters'),
        ({"headers": (("X-Name", "a\nb"),)}, 'The header "X-Name" for http://127.0.0.1:9/v1 has characters'),
        ({"headers": (("X Name", "a"),)}, 'The header "X Name" for http://127.0.0.1:9/v1 has characters'),
        ({"base_url": "https://☃-.example/v1"}, 'The base URL "https://☃-.example/v1" cannot be used: Invalid'),
        ({"extra_body": {"a": [date(2026, 1, 1)]}}, "extra_body for http://127.0.0.1:9/v1 has a value that JSON"),
        ({"extra_body": {"a": math.nan}}, "extra_body for http://127.0.0.1:9/v1 has a value that JSON"),
    ],
)
async def test_settings_that_make_no_request_possible_are_named(more: dict[str, Any], words: str) -> None:
    model = EndpointClient(Endpoint(**{"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key": "k"} | more))
    with pytest.raises(ConfigError, match=re.escape(words)):
        await ask(model)
    if "extra_body" not in more:
        with pytest.raises(ConfigError, match=re.escape(words)):
            await model.models()


async def test_an_error_hides_the_values_of_headers_but_not_each_last_word_of_them() -> None:
    headers = (("X-Title", "My favourite editor"), ("Authorization", "Bearer token-1"), ("X-Key", "key-12345"))
    async with FakeEndpoint(otherwise=failing(400, "Neither key-12345 nor token-1 suits this editor")) as endpoint:
        model = EndpointClient(Endpoint(base_url=endpoint.base_url, model="m", headers=headers))
        error, _, _ = await failure_of(model)
        await model.close()
    assert "Neither [secret] nor [secret] suits this editor" in str(error)


async def test_a_refusal_that_repeats_the_key_is_remembered_without_it() -> None:
    memory = Memory()
    async with (
        FakeEndpoint() as endpoint,
        asking(endpoint, memory=memory, api_key="sk-secret") as model,
    ):
        endpoint.script(failing(400, "stream_options is not supported for sk-secret"))
        await ask(model)
    assert list(refusals(memory)) == ["stream_options"]
    assert "supported for [secret]" in str(memory.facts)
    assert "sk-secret" not in str(memory.facts)


async def test_an_answer_does_not_wait_for_the_list_of_models() -> None:
    gate = Gate()
    async with Listing({"id": "fake-model", "max_model_len": 16384}, gate=gate) as endpoint, asking(endpoint) as model:
        async with model.stream(ASK) as stream:
            async for _ in stream:
                pass
            assert stream.answer.text
        await gate.reached()
        assert model.info.context_window is None
        gate.open()
        await model.settled()
        assert model.info.context_window == 16384


@pytest.mark.parametrize(
    ("item", "offered"),
    [
        ({"id": "m", "object": "model"}, Offered(name="m")),
        ("m", Offered(name="m")),
        ({"id": "m", "max_model_len": 32768}, Offered(name="m", context_window=32768)),
        ({"id": "m", "meta": {"n_ctx": 8192, "n_ctx_train": 131072}}, Offered(name="m", context_window=8192)),
        ({"id": "m", "meta": {"n_ctx_train": 131072}}, Offered(name="m")),
        (
            {"id": "m", "max_context_length": 131072, "loaded_context_length": 4096},
            Offered(name="m", context_window=4096),
        ),
        ({"id": "m", "context_window": 131072, "max_completion_tokens": 65536},
         Offered(name="m", context_window=131072, max_output_tokens=65536)),
        (
            {
                "id": "a/m",
                "context_length": 200000,
                "top_provider": {"context_length": 128000, "max_completion_tokens": None},
                "pricing": {"prompt": "0.0000025", "completion": "0.00001", "input_cache_read": "0.00000125"},
            },
            Offered(
                name="a/m",
                context_window=128000,
                input_price=2.5,
                cached_price=1.25,
                output_price=10.0,
            ),
        ),
        ({"id": "m", "context_length": "big", "pricing": {"prompt": "-1"}, "meta": 3}, Offered(name="m")),
        ({"name": "m", "context_length": True}, Offered(name="m")),
    ],
)  # fmt: skip
def test_sizes_and_prices_are_read_from_every_known_place(item: object, offered: Offered) -> None:
    for listing in ({"data": [item]}, {"models": [item, {"id": 3}, None]}, [item]):
        assert read_listing(listing) == (offered,)


@pytest.mark.parametrize("listing", [None, 3, "m", {}, {"data": None}, {"error": {"message": "no"}}])
def test_other_bodies_are_not_listings(listing: object) -> None:
    assert read_listing(listing) is None
