"""The three wires behind one session of the real process."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_turns import opened
from tests.support import fake_endpoint as fake
from tests.support.acp_client import RpcError
from tests.support.checking_endpoint import MODELS, WIRES, CheckingEndpoint, RandomTurns, write_settings
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply
from tests.support.terminal import forkable, start

NO_MODEL = {"CROW_MODEL": None, "OPENAI_BASE_URL": None, "OPENAI_API_KEY": None}
REFUSAL = (
    "Function tools with reasoning_effort are not supported for gpt-x in /v1/chat/completions. To use function tools, "
    "use /v1/responses or set reasoning_effort to 'none'."
)
SHORT_REFUSAL = "Function tools with reasoning_effort are not supported for this model. Set reasoning_effort to 'none'."
NEWEST = pytest.mark.parametrize("words", [REFUSAL, SHORT_REFUSAL])
LEVEL = pytest.mark.parametrize("level", ["", 'thought_level = "high"'])


def as_the_newest(words: str) -> Callable[[Recorded], Reply]:
    """Return an endpoint that refuses tools on Chat Completions unless the request turns the reasoning off."""

    def answer(request: Recorded) -> Reply:
        if request.wire == "chat" and "tools" in request.sent and request.sent.get("reasoning_effort") != "none":
            return fake.failing(400, words, type="invalid_request_error", param="reasoning_effort", code=None)
        return look_and_answer(request)

    return answer


def set_level(home: Path, level: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(f"[model]\n{level}\n")


def look_and_answer(request: Recorded) -> Reply:
    if request.body["messages"][-1]["role"] == "user":
        return fake.calls(("read_file", {"path": "README.md"}), say="I look.")
    return fake.text("It is ", "a nest.")


@pytest.mark.long
@NEWEST
@LEVEL
async def test_the_newest_models_work_at_the_first_prompt_with_reasoning_on(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, words: str, level: str
) -> None:
    set_level(home, level)
    endpoint.answer_with(as_the_newest(words))
    endpoint.wires = ("chat", "responses")
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        assert await agent.prompt(session, "What is it?") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("It is a nest.")
        await agent.prompt(session, "And now?")
        since = len(agent.log)
        await agent.prompt(session, "/context")
        said = agent.text(session, since=since)
    assert [request.wire for request in endpoint.asked] == ["chat", *["responses"] * 4]
    efforts = [request.sent["reasoning"].get("effort") for request in endpoint.asked[1:]]
    assert efforts == ["high" if level else None] * 4
    assert "API: Responses." in said
    assert "- API Chat Completions: Crow uses another API of this endpoint" in said
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "In another session?")
    assert [request.wire for request in endpoint.asked[5:]] == ["responses", "responses"]


@pytest.mark.long
@NEWEST
@LEVEL
async def test_crow_run_answers_with_a_newest_model(
    home: Path, place: Path, endpoint: FakeEndpoint, words: str, level: str
) -> None:
    set_level(home, level)
    endpoint.answer_with(as_the_newest(words))
    endpoint.wires = ("chat", "responses")
    own = {"CROW_HOME": str(home), "OPENAI_BASE_URL": endpoint.base_url, "CROW_MODEL": "gpt-x"}
    process = start(["run", "What is in README.md?"], env=forkable(os.environ) | own, cwd=place)
    shown, _ = await anyio.to_thread.run_sync(process.communicate)
    assert (process.wait(), shown.decode()) == (0, "I look.\n\nIt is a nest.\n")


ONLY = pytest.mark.parametrize(
    ("only", "status", "words"),
    [
        ("responses", 404, "Unknown request URL: POST /openai/v1/chat/completions. Please check the URL for typos."),
        ("responses", 400, "The chatCompletion operation does not work with the specified model, gpt-x."),
        ("responses", 410, "Gone"),
        ("messages", 405, ""),
        ("messages", 501, "unimplemented"),
        ("messages", 400, "This model only speaks the Anthropic format. Call /v1/messages."),
    ],
)


def with_one_wire(only: str, status: int, words: str) -> Callable[[Recorded], Reply]:
    """Return an endpoint that serves one wire, and refuses the others."""
    return lambda request: look_and_answer(request) if request.wire == only else fake.failing(status, words)


@pytest.mark.long
@ONLY
async def test_an_endpoint_with_one_api_works_at_the_first_prompt(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, only: str, status: int, words: str
) -> None:
    set_level(home, 'thought_level = "high"')
    endpoint.answer_with(with_one_wire(only, status, words))
    endpoint.wires = WIRES
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        assert await agent.prompt(session, "What is it?") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("It is a nest.")
    tried = [request.wire for request in endpoint.asked]
    assert (tried[0], tried[-2:]) == ("chat", [only, only])
    own = {"CROW_HOME": str(home), "OPENAI_BASE_URL": endpoint.base_url, "CROW_MODEL": "another"}
    process = start(["run", "What is in README.md?"], env=forkable(os.environ) | own, cwd=place)
    shown, _ = await anyio.to_thread.run_sync(process.communicate)
    assert (process.wait(), shown.decode()) == (0, "I look.\n\nIt is a nest.\n")


async def test_an_endpoint_without_any_api_at_its_url_is_named_once_with_advice(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.wires = ()
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        with pytest.raises(RpcError, match="has no Chat Completions API at this URL"):
            await agent.prompt(session, "Hello")
    paths = [request.path for request in endpoint.requests if request.method == "POST"]
    assert paths == ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_opaque_item_comes_back_once_unchanged_and_in_place(
    crow: StartCrow, home: Path, place: Path, seed: int
) -> None:
    chance = random.Random(seed)
    (place / "README.md").write_text("# Nest\n" + "Twigs and string.\n" * 100)
    async with CheckingEndpoint(chance) as endpoint:
        write_settings(home, endpoint.base_url)
        turns = RandomTurns(lambda: crow(env=NO_MODEL), endpoint, place, chance)
        await turns.run(30)
    assert endpoint.faults == []
    assert endpoint.returned.total() > 50
    assert endpoint.plain.total() > 0


@pytest.mark.long
@pytest.mark.parametrize("wire", WIRES)
async def test_items_that_the_endpoint_no_longer_accepts_are_left_out_in_the_same_prompt(
    crow: StartCrow, home: Path, place: Path, wire: str
) -> None:
    async with CheckingEndpoint(random.Random(4)) as endpoint:
        write_settings(home, endpoint.base_url)
        model = next(name for name in MODELS if name.endswith(wire))
        async with crow(env={**NO_MODEL, "CROW_MODEL": model}) as agent:
            session = await opened(agent, place)
            for _ in range(3):
                assert await agent.prompt(session, "Go on.") == {"stopReason": "end_turn"}
            endpoint.is_forgetful = True
            assert await agent.prompt(session, "And now?") == {"stopReason": "end_turn"}
    assert endpoint.faults == []


PDF = b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\nendobj\n"
DATA = base64.b64encode(PDF).decode()
FILE_PARTS = {
    "chat": {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{DATA}"}},
    "responses": {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{DATA}"},
    "messages": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": DATA},
        "title": "a.pdf",
    },
}


def configure(home: Path, wire: str, takes_files: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(f'[model]\nwire = "{wire}"\ntakes_files = {takes_files}\n')


def read_the_file(request: Recorded) -> Reply:
    """Read the PDF in the first request."""
    asked = json.dumps(request.body["messages"])
    return fake.text("A nest.") if "a.pdf is a PDF" in asked else fake.calls(("read_file", {"path": "docs/a.pdf"}))


@pytest.mark.long
@pytest.mark.parametrize("takes_files", ["true", "false"])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_pdf_goes_to_a_model_that_takes_files_in_the_form_of_its_wire(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, wire: str, takes_files: str
) -> None:
    """The model reads one, and a prompt has one. Both are in the requests of another process, too."""
    (place / "docs").mkdir()
    (place / "docs" / "a.pdf").write_bytes(PDF)
    configure(home, wire, takes_files)
    endpoint.wires = WIRES
    endpoint.answer_with(read_the_file)
    resource = {"uri": "file:///docs/a.pdf", "blob": DATA, "mimeType": "application/pdf"}
    prompt = [{"type": "resource", "resource": resource}, {"type": "text", "text": "What does it say?"}]
    async with crow(endpoint=endpoint) as agent:
        read = await opened(agent, place)
        assert await agent.prompt(read, "What does it say?") == {"stopReason": "end_turn"}
        given = await agent.new_session(place)
        answer = await agent.request("session/prompt", {"sessionId": given, "prompt": prompt})
        assert answer["stopReason"] == "end_turn"
        await agent.kill()
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        for session in (read, given):
            await agent.load_session(session, place)
            assert await agent.prompt(session, "Again?") == {"stopReason": "end_turn"}
        shown = [each["content"] for each in agent.updates(given) if each["sessionUpdate"] == "user_message_chunk"]
    assert {"type": "resource", "resource": resource} in shown
    first, *later = endpoint.asked
    assert "a.pdf" not in json.dumps(first.sent)
    assert len(later) >= 4
    for request in later:
        assert (FILE_PARTS[wire] in parts_of(request.sent)) == (takes_files == "true")
        note = "a.pdf (application/pdf, 1 KB) was left out: this model takes no files"
        assert (note in json.dumps(request.sent)) == (takes_files == "false")


def parts_of(value: object) -> list[object]:
    """All objects in a request, at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [part for each in inner for part in parts_of(each)]
    return [*found, value] if isinstance(value, dict) else found


@pytest.mark.parametrize("wire", WIRES)
async def test_a_file_that_the_endpoint_refuses_is_left_out_in_the_same_prompt(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, wire: str
) -> None:
    (place / "docs").mkdir()
    (place / "docs" / "a.pdf").write_bytes(PDF)
    configure(home, wire, "true")
    words = {
        "chat": "Invalid content type: 'file' is not supported by this model",
        "responses": "Unsupported content part: input_file",
        "messages": "messages.2.content.0.tool_result.content.1.document: Could not process PDF",
    }

    def refuse(request: Recorded) -> Reply:
        if FILE_PARTS[wire] in parts_of(request.sent):
            return fake.failing(400, words[wire], type="invalid_request_error")
        return read_the_file(request)

    endpoint.wires = WIRES
    endpoint.answer_with(refuse)
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        assert await agent.prompt(session, "What does it say?") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("A nest.")
    assert len(endpoint.asked) == 3
