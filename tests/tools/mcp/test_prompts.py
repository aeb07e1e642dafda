"""Prompts of MCP servers are listed under valid names and filled in, and their failures are contained."""

from __future__ import annotations

import base64

import anyio
import mcp_types as mcp
import pytest

from crow.domain.errors import ToolServerError
from crow.domain.messages import Image, Link, Resource, Text
from crow.tools.mcp.calls import parts_of
from crow.tools.servers import PromptArgument, ServerPrompt
from tests.tools.conftest import OpenBox, stdio


async def test_prompts_are_listed_filled_in_and_updated(open_box: OpenBox) -> None:
    changed = anyio.Event()

    async def on_change() -> None:
        if any(prompt.name == "srv:extra" for prompt in box.toolbox.prompts()):
            changed.set()

    async with open_box(stdio("various.py", "prompts"), on_change=on_change) as box:
        talk = await box.toolbox.prompt("srv:talk")
        offered = {prompt.name: prompt for prompt in box.toolbox.prompts()}
        first, second, *others = offered.values()
        arguments = (PromptArgument(name="path", required=True), PromptArgument(name="focus"))
        assert first == ServerPrompt(name=first.name, server="srv", description="Review a file", arguments=arguments)
        assert {first.name[:16], second.name[:16]} == {"srv:review_file-"}
        assert first.name != second.name
        assert second.description == "The other"
        assert [one.name for one in others] == [
            "srv:talk",
            "srv:all_kinds",
            "srv:empty",
            "srv:refuse",
            "srv:more",
            "srv:wait",
        ]

        assert await box.toolbox.fill(first, {"path": "a b"}) == (Text(text='say reviewed {"path": "a b"}'),)
        assert talk is not None
        assert [part.text for part in await box.toolbox.fill(talk, {}) if isinstance(part, Text)] == [
            "User:",
            "Hi.",
            "Assistant:",
            "Hello.",
        ]
        assert await box.toolbox.fill(offered["srv:all_kinds"], {}) == (
            Text(text="look"),
            Image(data="iVBORw0KGgo=", mime_type="image/png"),
            Resource(uri="file:///a.txt", text="inside", mime_type="text/plain"),
            Text(text="(the file file:///a.bin (type unknown, 3 bytes) came with the prompt; crow cannot read it.)"),
            Link(uri="file:///b.txt", name="b"),
            Text(text="(a sound (audio/wav, 3 bytes) came with the prompt; crow cannot read it.)"),
        )
        for name, words in (
            ("empty", "returned an empty prompt"),
            ("refuse", "did not return the prompt: no such method"),
        ):
            with pytest.raises(ToolServerError, match=f"^`/srv:{name}` could not be used: MCP server srv {words}"):
                await box.toolbox.fill(offered[f"srv:{name}"], {})

        await box.toolbox.fill(offered["srv:more"], {})
        with anyio.fail_after(60):
            await changed.wait()
        assert await box.toolbox.prompt("srv:nothing") is None
        assert await box.toolbox.prompt("other:talk") is None


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"\xff\xd8\xff\xe0 a JPEG", "image/jpeg"),
        (b"<html>", "(a picture (image/png, 6 bytes) came with the prompt; crow cannot read it.)"),
    ],
)
def test_a_picture_gets_the_type_of_its_data(data: bytes, part: str) -> None:
    image = mcp.ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type="image/png")
    filled = mcp.GetPromptResult(messages=[mcp.PromptMessage(role="user", content=image)])
    (found,) = parts_of(filled)
    assert (found.mime_type if isinstance(found, Image) else found) == (part if part[0] == "i" else Text(text=part))


async def test_a_server_without_prompts_and_a_dead_server_offer_none(open_box: OpenBox) -> None:
    async with open_box(stdio("tiny.py"), stdio("unruly.py", "early-end", name="dead")) as box:
        assert await box.toolbox.prompt("srv:talk") is None
        assert await box.toolbox.prompt("dead:talk") is None
        assert box.toolbox.prompts() == ()
