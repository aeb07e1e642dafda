"""Resources of MCP servers that a prompt mentions as `@server:uri` are attached to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from crow.agent.turns.mentions import Mention, find_mentions
from crow.domain.entries import Remark, User
from crow.domain.messages import Image, Part, Resource, Text, ToolCall
from crow.store import SessionChanges
from crow.tools import PlannedCall
from crow.tools.mcp.client import open_toolbox
from crow.tools.servers import ServerOptions, StdioServer
from tests.agent.harness import Opened, Tools, opened, text
from tests.support.scripted_model import Say, ScriptedModel
from tests.tools.conftest import stdio


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("Look at @docs:docs:///a.md, please.", ["docs docs:///a.md"]),
        ("@docs:docs:///a.md", ["docs docs:///a.md"]),
        ("(see @docs:docs:///a(b).md)", ["docs docs:///a(b).md"]),
        ("@my_docs:a:b and @my-docs:a:b", ["my_docs a:b"]),
        ("@docs:a:b @docs:a:b @docs:a:c", ["docs a:b", "docs a:c"]),
        ("mail me@docs:a:b, @docs: a:b, @docs:plain, @other:a:b, @docs:7:b, @:a:b, @docs:a:", []),
        (" ".join(f"@docs:a:{number}" for number in range(30)), [f"docs a:{number}" for number in range(10)]),
    ],
)
def test_mentions_are_found(typed: str, found: list[str]) -> None:
    mentions = find_mentions([Text(text=typed)], ["docs", "my docs"])
    assert [f"{mention.server} {mention.uri}" for mention in mentions] == found


def test_only_typed_text_is_searched() -> None:
    parts: list[Part] = [Resource(uri="file:///a", text="@docs:a:b"), Text(text="@docs:a:c")]
    assert find_mentions(parts, ["docs"]) == (Mention(server="docs", uri="a:c"),)
    assert find_mentions(parts, []) == ()


def library(options: ServerOptions | None = None) -> StdioServer:
    return stdio("library.py", "classic", name="docs", options=options or ServerOptions())


async def prompted(tmp_path: Path, typed: str, *, mode: str = "ask", server: StdioServer | None = None) -> Opened:
    """The closed session after one prompt."""
    async with opened(
        tmp_path, ScriptedModel(Say(text=["Seen."])), mode=mode, servers=[server or library()], open_tools=open_toolbox
    ) as run:
        assert await run.session.prompt(text(typed)) == "end_turn"
        assert await run.store.queued("s1") == ()
    return run


async def test_the_model_gets_a_mentioned_resource_with_the_prompt(tmp_path: Path) -> None:
    run = await prompted(tmp_path, "Compare @docs:docs:///logo.png with @docs:issue://me/7.")
    (user,) = run.client.stored(User)
    assert user.parts == (
        Text(text="Compare @docs:docs:///logo.png with @docs:issue://me/7."),
        Resource(uri="docs:///logo.png", text="[docs:///logo.png: a picture]"),
        Image(data="iVBORw0KGgo=", mime_type="image/png", uri="docs:///logo.png"),
        Resource(uri="issue://me/7", text="Issue 7"),
    )
    assert run.client.questions == []


async def test_a_resource_that_cannot_be_read_does_not_fail_the_prompt(tmp_path: Path) -> None:
    run = await prompted(tmp_path, "Read @docs:docs:///missing and @docs:docs:///a{b} and @docs:docs:///a.md")
    (user,) = run.client.stored(User)
    missing = "@docs:docs:///missing: MCP server docs refused docs:///missing: no such thing"
    template = "@docs:docs:///a{b}: read_resource: the uri is a template; fill in the variables between the braces"
    assert user.parts[1:] == (
        Resource(uri="docs:///a.md", text="# Notes\nsk-secret-0123456789"),
        Text(text=f"(crow could not attach:\n{missing}\n{template})"),
    )
    told = [remark.text for remark in run.client.stored(Remark)]
    assert told == [f"A resource could not be attached: {words}" for words in (missing, template)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "options", "is_read"),
    [
        ("plan", ServerOptions(), False),
        ("plan", ServerOptions(read_only=("read_resource",)), True),
        ("auto", ServerOptions(deny=("read_*",)), False),
        ("auto", ServerOptions(), True),
    ],
)
async def test_a_mention_follows_the_rules_for_reading(
    tmp_path: Path, mode: str, options: ServerOptions, is_read: bool
) -> None:
    run = await prompted(tmp_path, "@docs:issue://me/7", mode=mode, server=library(options))
    (user,) = run.client.stored(User)
    assert isinstance(user.parts[1], Resource) == is_read


async def test_a_deny_rule_holds_for_mentions(tmp_path: Path) -> None:
    model = ScriptedModel(Say(text=["No."]))
    async with opened(tmp_path, model, servers=[library()], open_tools=open_toolbox) as run:
        rule = {"tool": "docs__*", "argument": "issue:*", "allow": False, "pattern": True}
        await run.session.branch.change(SessionChanges(permissions=(rule,)))
        await run.session.prompt(text("@docs:issue://me/7 and @docs:docs:///a.md"))
    (user,) = run.client.stored(User)
    assert [part.uri for part in user.parts if isinstance(part, Resource)] == ["docs:///a.md"]
    assert "The user has forbidden this call of docs__read_resource." in user.parts[-1].text


class Hanging(Tools):
    """A toolbox whose server never answers."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked = anyio.Event()

    def understood(self, call: ToolCall) -> ToolCall:
        return call

    async def plan(self, call: ToolCall) -> PlannedCall:
        self.asked.set()
        await anyio.sleep_forever()
        raise AssertionError


async def test_a_prompt_that_is_cancelled_while_a_resource_is_read_stays_in_the_history(tmp_path: Path) -> None:
    toolbox = Hanging()
    stops: list[str] = []

    @asynccontextmanager
    async def open_tools(*_: object, **__: object) -> AsyncIterator[Tools]:
        yield toolbox

    async with opened(tmp_path, ScriptedModel(), servers=[library()], open_tools=open_tools) as run:

        async def prompt() -> None:
            stops.append(await run.session.prompt(text("@docs:a:b")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await toolbox.asked.wait()
            run.session.cancel()
        assert stops == ["cancelled"]
        assert await run.kinds() == ["User", "TurnEnd"]
        assert [user.parts for user in run.client.stored(User)] == [text("@docs:a:b")]
        assert await run.store.queued("s1") == ()


async def test_a_steered_prompt_brings_resources_too(tmp_path: Path) -> None:
    first = Say(text=["first"], hold=anyio.Event())
    model = ScriptedModel(first, Say(text=["second"]))
    async with (
        opened(tmp_path, model, servers=[library()], open_tools=open_toolbox) as run,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run.session.prompt, text("begin"))
        await first.reached.wait()
        assert await run.session.steer(text("and @docs:issue://me/7"))
        assert first.hold is not None
        first.hold.set()
    (steered,) = run.client.stored(User)
    assert steered.parts == (Text(text="and @docs:issue://me/7"), Resource(uri="issue://me/7", text="Issue 7"))
