"""Resources of MCP servers: listed, read, completed and bounded, with both revisions of the protocol."""

from __future__ import annotations

import gzip
import io
import json
import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.domain.entries import Announcement, Attachment
from crow.domain.messages import Image
from crow.tools import Coverage, Outcome, PlannedCall, ServerStatus
from crow.tools.mcp import listing
from crow.tools.process import HiddenKeys
from crow.tools.servers import HttpServer, ServerOptions
from tests.tools.conftest import Box, OpenBox, stdio
from tests.tools.mcp.test_client import Http, http_server

ERAS = pytest.mark.parametrize("era", ["classic", "modern"])
NO_URI = "expected a URI with a scheme and without spaces or hidden characters, such as file:///a%20b"
UNREADABLE = "Failed to parse JSON response:"
READING = ("list_resources", "read_resource")


def offered(box: Box) -> list[str]:
    return [spec.name for spec in box.toolbox.specs() if spec.name in READING]


@ERAS
async def test_resources_are_listed_and_read(open_box: OpenBox, era: str) -> None:
    keys = HiddenKeys(values=("sk-secret-0123456789",))
    async with open_box(stdio("library.py", era, name="my docs"), keys=lambda: keys) as box:
        await box.toolbox.wait_ready(120)
        assert offered(box) == [*READING]
        assert box.toolbox.servers() == (ServerStatus(name="my docs", state="ready", tools=9, resources=3),)
        assert await box.run("list_resources") == Outcome(
            text="my_docs:\n- template issue://{owner}/{number}  Issue: One issue\n"
            "- docs:///a.md  Notes, text/markdown, 1,234 bytes\n"
            r"- docs:///logo.png  logo: Read\u202e\x1b[2K me now"
        )
        assert (await box.run("list_resources", query="NOTES text")).text.splitlines()[1:] == [
            "- docs:///a.md  Notes, text/markdown, 1,234 bytes"
        ]
        assert await box.run("list_resources", query="zebra") == Outcome(text='None of 3 resources matches "zebra".')
        results = {
            uri: await box.run("read_resource", server="my_docs", uri=uri)
            for uri in (
                *("docs:///a.md", "docs:///logo.png", "docs:///a.zip", "docs:///both", "docs:///nothing"),
                *("docs:///a.pdf", "docs:///bad.pdf"),
                *("issue://me/7", "docs:///missing"),
            )
        }
    assert results == {
        "docs:///a.md": Outcome(text="# Notes\n[secret hidden by crow]"),
        "docs:///logo.png": Outcome(
            text="[docs:///logo.png: a picture]", images=(Image(data="iVBORw0KGgo=", mime_type="image/png"),)
        ),
        "docs:///a.zip": Outcome(
            text="[docs:///a.zip, application/zip, 3 bytes: binary, models cannot read it]",
            attachments=(
                Attachment(name="docs:///a.zip", uri="docs:///a.zip", mime_type="application/zip", data="AAAA"),
            ),
        ),
        "docs:///a.pdf": Outcome(
            text="[docs:///a.pdf: a PDF, 9 bytes]",
            attachments=(
                Attachment(
                    name="docs:///a.pdf",
                    uri="docs:///a.pdf",
                    mime_type="application/pdf",
                    data="JVBERi0xLjcK",
                    for_model=True,
                ),
            ),
        ),
        "docs:///bad.pdf": Outcome(
            text="[docs:///bad.pdf, application/pdf, 9 bytes: binary, models cannot read it]",
            attachments=(
                Attachment(
                    name="docs:///bad.pdf", uri="docs:///bad.pdf", mime_type="application/pdf", data="JVBERi0xLjcK!"
                ),
            ),
        ),
        "docs:///both": Outcome(text="docs:///1:\none\ndocs:///Read\\u202e\\x1b[2K me now:\ntwo"),
        "docs:///nothing": Outcome(text="(empty)"),
        "issue://me/7": Outcome(text="Issue 7"),
        "docs:///missing": Outcome(text="MCP server my docs refused docs:///missing: no such thing", is_error=True),
    }


@pytest.mark.long
@ERAS
async def test_values_for_a_template_come_from_the_server(open_box: OpenBox, era: str) -> None:
    asked = {"server": "srv", "template": "issue://{owner}/{number}", "variable": "owner", "value": "c"}
    async with open_box(stdio("library.py", era), stdio("library.py", era, "bare", name="bare")) as box:
        await box.toolbox.wait_ready(120)
        suggested = await box.run("list_resources", **asked)
        assert suggested == Outcome(text="Values for owner:\ncrow\ncow\n[there are more; give a beginning]")
        assert (await box.run("list_resources", **asked | {"value": "z"})).text == (
            "The server suggests no values for owner."
        )
        assert await box.run("list_resources", **asked | {"server": "bare"}) == Outcome(
            text="MCP server bare suggests no values for templates; fill in the template without it", is_error=True
        )
        plan = await box.plan("list_resources", **asked)
        assert (plan.access, plan.coverage.rule_tool) == ("external", "srv__read_resource")


async def test_reading_counts_as_a_tool_of_the_server(open_box: OpenBox) -> None:
    options = ServerOptions(read_only=("read_*",))
    async with open_box(
        stdio("library.py", "classic"), stdio("library.py", "classic", name="ro", options=options)
    ) as box:
        await box.toolbox.wait_ready(120)
        plan = await box.plan("read_resource", server="srv", uri="docs:///[a](b)")
        assert plan == PlannedCall(
            announcement=Announcement(title="srv: `docs:///[a](b)`", kind="read"),
            access="external",
            coverage=Coverage(rule_tool="srv__read_resource", narrower_arguments=("docs:///[a](b)",)),
        )
        assert (await box.plan("read_resource", server="ro", uri="docs:///a.md")).coverage.is_read_only
        assert (await box.plan("list_resources")).access == "none"


@pytest.mark.parametrize(
    "options", [ServerOptions(deny=("read_resource",)), ServerOptions(allow=("listed",)), ServerOptions(deny=("*",))]
)
async def test_the_settings_of_a_server_can_forbid_reading(open_box: OpenBox, options: ServerOptions) -> None:
    async with open_box(stdio("library.py", "classic", options=options)) as box:
        await box.toolbox.wait_ready(120)
        assert offered(box) == []
        refused = "The user's settings do not let you read resources of srv."
        assert (await box.plan("read_resource", server="srv", uri="docs:///a.md")).fault == refused
        assert await box.run("read_resource", server="srv", uri="docs:///a.md") == Outcome(text=refused, is_error=True)
        assert await box.run("list_resources", server="srv") == Outcome(text=refused, is_error=True)


@pytest.mark.parametrize("how", ["none", "broken"])
async def test_a_server_without_resources_adds_no_tools(open_box: OpenBox, how: str) -> None:
    async with open_box(stdio("library.py", "classic", how)) as box:
        await box.toolbox.wait_ready(120)
        assert offered(box) == []
        assert [server.state for server in box.toolbox.servers()] == ["ready"]
        assert (await box.run("list_resources")).text == "There are no resources."
    async with open_box() as box:
        assert (await box.plan("read_resource", server="srv", uri="docs:///a")).fault is not None
        assert (await box.run("read_resource", server="srv", uri="docs:///a")).text.startswith("No tool")


BAD_ARGUMENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"server": "srv"}, "read_resource: uri is missing; expected text"),
    ({"server": "srv", "uri": ""}, "read_resource: the uri is missing; expected text such as file:///notes.md"),
    ({"server": "srv", "uri": 7}, "read_resource: uri is 7; expected text"),
    ({"server": "no", "uri": "docs:///a"}, 'No MCP server "no" has resources. Servers with resources: srv.'),
    (
        {"server": "srv", "uri": "docs:///a\nb"},
        "read_resource: the uri is docs:///a b; " + NO_URI,
    ),
    (
        {"server": "srv", "uri": "docs:///\u202ea"},
        r"read_resource: the uri is docs:///\u202ea; " + NO_URI,
    ),
    (
        {"server": "srv", "uri": "x:" + "a" * 3_000},
        "read_resource: the uri has 3,002 characters; expected at most 2,000",
    ),
    (
        {"server": "srv", "uri": "issue://{owner}/7"},
        "read_resource: the uri is a template; fill in the variables between the braces",
    ),
)


async def test_bad_arguments_get_precise_errors(open_box: OpenBox) -> None:
    async with open_box(stdio("library.py", "classic")) as box:
        await box.toolbox.wait_ready(120)
        for arguments, fault in BAD_ARGUMENTS:
            assert (await box.plan("read_resource", **arguments)).fault == fault
            assert await box.run("read_resource", **arguments) == Outcome(text=fault, is_error=True)


async def test_a_template_needs_its_server_and_variable(open_box: OpenBox) -> None:
    async with open_box(stdio("library.py", "classic")) as box:
        await box.toolbox.wait_ready(120)
        for arguments in (
            {"template": "a:{b}"},
            {"template": "a:{b}", "server": "srv"},
            {"template": "a:{b}", "variable": "b"},
        ):
            fault = (await box.plan("list_resources", **arguments)).fault
            assert fault == "list_resources: if template is given, server and variable must be given too"


@ERAS
async def test_a_changed_listing_is_fetched_again(open_box: OpenBox, era: str) -> None:
    async with open_box(stdio("library.py", era)) as box:
        await box.toolbox.wait_ready(120)
        await box.run("srv__grow")
        with anyio.fail_after(60):
            while "new.md" not in (await box.run("list_resources")).text:  # noqa: ASYNC110 - fetched in the background
                await anyio.sleep(0.005)


@pytest.mark.long
@ERAS
async def test_a_storm_of_changes_causes_few_listings(open_box: OpenBox, era: str) -> None:
    async with open_box(stdio("library.py", era)) as box:
        await box.toolbox.wait_ready(120)
        assert (await box.run("srv__storm")).text == "changed"
        seen = json.loads((await box.run("srv__listed")).text)
    counts = [seen[f"{what}/list"] for what in ("tools", "prompts", "resources", "resources/templates")]
    # the first listing, one after the first change, and one for each doubling wait: 1, 2, 4, ... s
    assert all(1 <= count <= 8 for count in counts), counts


@pytest.mark.long
async def test_a_hundred_thousand_resources_are_bounded(open_box: OpenBox, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "crow")
    async with open_box(stdio("library.py", "classic", "huge")) as box:
        await box.toolbox.wait_ready(120)
        text = (await box.run("list_resources")).text
        found = (await box.run("list_resources", query="docs:///1992")).text
    lines = text.splitlines()
    assert lines[2] == "- docs:///0  0"
    assert len(lines) == 1 + 100 + 2
    assert lines[-1] == "[1,894 more; narrow the query]"
    assert found == "srv:\n- docs:///1992  1992"
    warned = [each.getMessage() for each in caplog.records if each.name.endswith("mcp.listing")]
    reason = f"the uri is docs:///new line; {NO_URI}"
    assert warned == [f"MCP server srv: 98,014 of its resources are left out: {reason}"]


async def test_a_resource_that_is_too_large_ends_the_server_with_words(open_box: OpenBox) -> None:
    async with open_box(stdio("library.py", "classic")) as box:
        await box.toolbox.wait_ready(120)
        many = (await box.run("read_resource", server="srv", uri="docs:///many")).text.splitlines()
        assert (len(many), many[0], many[-1]) == (201, "docs:///many:", "[150 more parts are left out]")
        bad = await box.run("read_resource", server="srv", uri="docs:///bad")
        assert bad.text.startswith("MCP server srv returned an unusable result for docs:///bad: ")
        large = await box.run("read_resource", server="srv", uri="docs:///large")
        assert large == Outcome(
            text="MCP server srv ended during docs:///large: it sent a line of more than 32,000,000 bytes",
            is_error=True,
        )


class Endless(Http):
    """A server over HTTP whose resources never end, or are compressed."""

    def do_POST(self) -> None:  # noqa: N802 - the name in the library
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"resources/read" not in body:
            self.rfile = io.BytesIO(body)
            super().do_POST()
            self.rfile = self.connection.makefile("rb")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if b"stream" in body else "application/json")
        if b"compressed" in body:
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(gzip.compress(b"x" * 50_000_000))
            return
        self.end_headers()
        try:
            self.wfile.write(b"data: " if b"stream" in body else b"")
            while True:
                self.wfile.write(b" " * 1_000_000)
        except OSError:
            self.close_connection = True


@pytest.mark.long
@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("docs:///endless", f"{UNREADABLE} it has more than 32,000,000 bytes"),
        ("docs:///compressed", f"{UNREADABLE} it is compressed (gzip), although crow did not ask for that"),
        ("docs:///stream", "SSE stream failed: Server-sent event exceeded the 32000000 byte limit."),
    ],
)
async def test_an_endless_resource_over_http_is_refused(open_box: OpenBox, uri: str, words: str) -> None:
    with http_server(Endless) as url:
        async with open_box(HttpServer(name="web", url=url)) as box:
            await box.toolbox.wait_ready(120)
            refused = await box.run("read_resource", server="web", uri=uri)
    assert refused.is_error
    assert refused.text.endswith(f"{uri}: {words}")


@pytest.mark.long
async def test_a_flood_of_progress_and_stray_messages_do_no_harm(open_box: OpenBox) -> None:
    async with open_box(stdio("library.py", "classic")) as box:
        await box.toolbox.wait_ready(120)
        assert await box.run("srv__flood") == Outcome(text="flooded")
        assert max(map(len, box.shown)) <= 100 * 510
        assert await box.run("srv__tangle") == Outcome(text="still here")
        assert (await box.run("read_resource", server="srv", uri="issue://me/7")).text == "Issue 7"


async def test_a_cancelled_read_is_taken_back_from_the_server(
    open_box: OpenBox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cancelled"
    async with open_box(stdio("library.py", "classic", env=(("CANCELLED_FILE", str(file)),))) as box:
        await box.toolbox.wait_ready(120)
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                await box.run("read_resource", server="srv", uri="docs:///slow")

            tasks.start_soon(read)
            while "srv: slow" not in caplog.text:  # noqa: ASYNC110 - another process
                await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(60):
            while not file.exists():  # noqa: ASYNC110 - written by another process
                await anyio.sleep(0.005)
        assert (await box.run("read_resource", server="srv", uri="issue://me/7")).text == "Issue 7"


async def test_changes_are_served_at_once_and_then_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 1_000.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(anyio, "current_time", lambda: now)
    monkeypatch.setattr(anyio, "sleep", sleep)
    changes = listing.Changes()
    for _ in range(9):
        changes.report()
        changes.report()
        await changes.next()
    assert slept == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    now += 61
    changes.report()
    await changes.next()
    assert slept[-1] == 0.0
