"""The webhook adapter, over real HTTP, with a real crow."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.crow import Crow, bridge, configure
from tests.hook import Hook
from tests.ports import free_port


@pytest.fixture
async def hook() -> AsyncIterator[Hook]:
    async with Hook() as one:
        yield one


@pytest.fixture
def port() -> int:
    return free_port()


async def test_requests_without_a_valid_signature_are_refused(
    hook: Hook, crow: Crow, tmp_path: Path, port: int
) -> None:
    async with bridge(configure(tmp_path, crow, hook.settings("signed", port))):
        good = {"id": "1", "place": "p", "user": "ann", "text": "say hello"}
        assert await hook.post(port, "/messages", good, secret="another secret") == (401, "The signature is wrong.")
        assert (await hook.post(port, "/messages", good, age_s=400))[0] == 401
        assert (await hook.post(port, "/messages", good, age_s=-400))[0] == 401
        assert (await hook.post(port, "/messages", good | {"user": "eve"}))[0] == 403
        assert (await hook.post(port, "/messages", good | {"direct": True}))[0] == 403
        assert (await hook.post(port, "/messages", None, body=b"x" * 17_000_000))[0] == 413
        for bad in (b"{", b"[]", b"[" * 100_000, b"\xff", b'{"id": 1}', b'{"id": "1", "place": "a\\nb"}'):
            assert (await hook.post(port, "/messages", None, body=bad))[0] == 400
        for bad_values in ({"text": 1}, {"text": "\ud800"}, {"files": [1]}, {"id": "x" * 200}, {"place": ""}):
            assert (await hook.post(port, "/messages", good | bad_values))[0] == 400
        assert (await hook.post(port, "/messages", good))[0] == 202
        assert (await hook.post(port, "/messages", good | {"text": "say again"}))[0] == 200
        await hook.wait(lambda: hook.texts() == ["hello"])
    assert crow.prompts("signed:p") == ["say hello"]


async def test_outgoing_requests_are_tried_again_until_they_are_taken(
    hook: Hook, crow: Crow, tmp_path: Path, port: int
) -> None:
    async with bridge(configure(tmp_path, crow, hook.settings("retried", port, "edits = true"))):
        hook.failures.extend([503, 0, 429, 500, 0])
        await hook.write(port, "1", "say hello")
        await hook.wait(lambda: hook.texts() == ["hello"])
        await hook.write(port, "2", "count to 12")
        await hook.wait(lambda: hook.texts()[1:] == ["\n".join(map(str, range(1, 13)))])
        hook.failures.append(400)  # a refusal is final, and holds nothing up
        await hook.write(port, "3", "say lost")
        await hook.write(port, "4", "say kept")
        await hook.wait(lambda: hook.texts()[2:] == ["kept"])


async def test_questions_arrive_with_buttons(hook: Hook, crow: Crow, tmp_path: Path, port: int) -> None:
    async with bridge(configure(tmp_path, crow, hook.settings("asked", port))):
        await hook.write(port, "1", "write hooked.txt: hi")
        asked = await hook.wait(lambda: [each for each in hook.shown.values() if each["buttons"]])
        allow = next(each["button"] for each in asked[0]["buttons"] if each["label"] == "Allow")
        for place, user in (("p", "eve"), ("p", "bob"), ("other", "ann")):
            _, words = await hook.post(port, "/answers", {"button": allow, "place": place, "user": user})
            assert words in ("Only the person who asked can answer this.", "This question is no longer open.")
        forged = allow.rpartition(":")[0] + ":99"
        for button, said in ((forged, "no longer open"), ("x", "no longer open"), (allow, "You chose: Allow")):
            answer = await hook.post(port, "/answers", {"button": button, "place": "p", "user": "ann"})
            assert said in answer[1]
        await hook.wait(lambda: (crow.workspace / "hooked.txt").exists() and len(hook.texts()) == 2)


async def test_files_are_passed_on_or_named(hook: Hook, crow: Crow, tmp_path: Path, port: int) -> None:
    pixel = base64.b64encode(b"\x89PNG not really").decode()
    files = [
        {"name": "a.txt", "mime": "text/plain", "data": base64.b64encode(b"the text").decode()},
        {"name": "a.png", "mime": "image/png", "data": pixel},
        {"name": "a.zip", "mime": "application/zip", "data": base64.b64encode(b"\x00\x01").decode()},
        {"name": "broken", "mime": "text/plain", "data": "%"},
        {"name": "huge.txt", "mime": "text/plain", "data": base64.b64encode(b"x" * 300_000).decode()},
    ]
    async with bridge(configure(tmp_path, crow, hook.settings("files", port))):
        await hook.write(port, "1", "say thanks", files=files)
        await hook.wait(lambda: hook.texts())
        await hook.write(port, "2", "", files=files[:1])
        await hook.wait(lambda: len(hook.texts()) == 2)
        await hook.write(port, "3", "")
        await hook.write(port, "4", "say last")
        await hook.wait(lambda: hook.texts()[2:] == ["last"])
    prompts = crow.prompts("files:p")
    assert len(prompts) == 3
    bodies = "".join(row[0] for row in crow.rows("SELECT body FROM entry_bodies WHERE kind = 'user'"))
    assert bodies.count("the text") == 2
    assert bodies.count('"type":"image"') == 1
    for name in ("a.zip", "broken", "huge.txt"):
        assert f"(The attachment {name} was not passed on: " in prompts[0]
    assert "a.png was not" not in prompts[0]
    assert prompts[1].startswith("See the attachment.")
