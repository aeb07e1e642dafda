from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from crow.domain.entries import Announcement, Attachment
from crow.domain.messages import Image, ToolCall
from crow.tools import Coverage, Outcome, PlannedCall, Ports, ServerStatus, builtin
from crow.tools.mcp.client import open_toolbox
from crow.tools.process import HiddenKeys
from crow.tools.servers import HttpServer, ServerOptions, StdioServer
from crow.tools.workspace import DiskWorkspace
from tests.tools.conftest import FixedPlan, OpenBox, RecordingLog, call, pids_in, skip_time, stdio, until_gone

BUILT_IN = [
    *(
        "read_file",
        "write_file",
        "edit_file",
        "apply_patch",
        "list_files",
        "grep",
        "shell",
        "shell_output",
        "shell_kill",
        "fetch",
    ),
    *("update_plan", "recall"),
]


def names(box: object) -> list[str]:
    return [spec.name for spec in box.toolbox.specs()]  # type: ignore[attr-defined]


async def test_built_in_tools_come_first_and_servers_in_the_order_given(open_box: OpenBox) -> None:
    async with open_box(stdio("unruly.py", "garbage", name="b"), stdio("unruly.py", "flood", name="a")) as box:
        assert names(box) == BUILT_IN
        await box.toolbox.wait_ready(120)
        assert names(box) == [*BUILT_IN, "b__echo", "a__echo"]
        assert box.toolbox.specs()[-1].input_schema == {"properties": {}, "type": "object"}
        assert box.toolbox.servers() == (
            ServerStatus(name="b", state="ready", tools=1),
            ServerStatus(name="a", state="ready", tools=1),
        )
        assert await box.run("a__echo") == Outcome(text="still here")


@pytest.mark.parametrize("era", ["classic", "modern"])
async def test_both_protocol_versions_work(open_box: OpenBox, era: str) -> None:
    async with open_box(stdio("tiny.py", era)) as box:
        await box.toolbox.wait_ready(120)
        assert [status.state for status in box.toolbox.servers()] == ["ready"]
        assert await box.run("srv__echo", text="hi") == Outcome(text="you said hi")


@pytest.mark.long
@pytest.mark.parametrize("how", ["-32600", "-32601", "-32602", "-32020", "-32021", "-32022", "greets"])
async def test_a_server_that_refuses_the_old_handshake_gets_the_new_one(open_box: OpenBox, how: str) -> None:
    async with open_box(stdio("tiny.py", "modern", how)) as box:
        await box.toolbox.wait_ready(120)
        assert [(status.state, status.detail) for status in box.toolbox.servers()] == [("ready", "")]
        assert await box.run("srv__echo", text="hi") == Outcome(text="you said hi")


async def test_an_http_server_that_requires_the_new_headers_gets_them(open_box: OpenBox) -> None:
    with http_server(ModernHttp) as url:
        async with open_box(HttpServer(name="web", url=url)) as box:
            await box.toolbox.wait_ready(120)
            assert box.toolbox.servers() == (ServerStatus(name="web", state="ready", tools=1),)
            assert await box.run("web__whoami") == Outcome(text="you spoke 2026-07-28")


async def test_results_become_text_pictures_and_errors(open_box: OpenBox) -> None:
    async with open_box(stdio("tiny.py", "pages")) as box:
        await box.toolbox.wait_ready(120)
        assert len(names(box)) == len(BUILT_IN) + 14
        results = {
            tool: await box.run(f"srv__{tool}") for tool in ("refuse", "broken", "picture", "table", "links", "liar")
        }
    liar = results.pop("liar")
    assert results == {
        "refuse": Outcome(text="no such user", is_error=True),
        "broken": Outcome(text="MCP server srv refused broken: out of order", is_error=True),
        "picture": Outcome(text="(a picture)", images=(Image(data="iVBORw0KGgo=", mime_type="image/png"),)),
        "table": Outcome(text='{\n  "rows": [\n    1,\n    2\n  ]\n}', raw_output={"rows": [1, 2]}),
        "links": Outcome(
            text=(
                "b (file:///b.txt): the other\nfile:///a.txt:\ninside\n[sound, audio/wav, 3 bytes: not shown]\n"
                "[file:///c.zip, application/zip, 3 bytes: not shown]\n"
                "[a picture, image/png, 3 bytes: models cannot see this kind]"
            ),
            attachments=(
                Attachment(name="b", uri="file:///b.txt"),
                Attachment(name="sound", mime_type="audio/wav", data="AAAA"),
                Attachment(name="file:///c.zip", uri="file:///c.zip", mime_type="application/zip", data="AAAA"),
                Attachment(name="picture", mime_type="image/png", data="AAAA"),
            ),
        ),
    }
    assert liar.is_error
    words = "the structured content of the result does not fit the tool's output schema"
    reason = f"{words}: n is not of type integer"
    assert liar.text == f"MCP server srv returned an unusable result for liar: {reason}"


async def test_a_failure_without_words_and_a_malformed_result_are_told_as_such(open_box: OpenBox) -> None:
    async with open_box(stdio("tiny.py")) as box:
        await box.toolbox.wait_ready(120)
        silent, malformed = await box.run("srv__refuse", text="without words"), await box.run("srv__liar", text="x")
    assert silent == Outcome(text="The tool reported an error without saying what went wrong.", is_error=True)
    reason = "MCP server srv returned an unusable result for liar: content: Input should be a valid list"
    assert malformed == Outcome(text=reason, is_error=True)


async def test_progress_is_shown_while_a_call_runs(open_box: OpenBox) -> None:
    async with open_box(stdio("tiny.py")) as box:
        await box.toolbox.wait_ready(120)
        assert await box.run("srv__count") == Outcome(text="counted")
        assert box.shown[0] == "1/2"


@pytest.mark.parametrize("era", ["classic", "modern"])
async def test_log_messages_of_a_server_go_to_the_log(
    open_box: OpenBox, caplog: pytest.LogCaptureFixture, era: str
) -> None:
    caplog.set_level(logging.INFO, "crow")
    keys = HiddenKeys(values=("sk-secret-0123456789",))
    async with open_box(stdio("tiny.py", era), keys=lambda: keys) as box:
        await box.toolbox.wait_ready(120)
        assert await box.run("srv__log", text="slow\nquery with sk-secret-0123456789\x1b[2J") == Outcome(text="logged")
    logged = [(each.levelname, each.getMessage()) for each in caplog.records if each.name.endswith("mcp.connection")]
    assert logged == [
        ("WARNING", "srv: db: slow query with [secret hidden by crow]\\x1b[2J"),
        ("INFO", 'srv: db: {"n": 1}'),
    ]


async def test_a_server_cannot_fill_the_log(open_box: OpenBox, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "crow")
    async with open_box(stdio("tiny.py")) as box:
        await box.toolbox.wait_ready(120)
        for _ in range(6):
            await box.run("srv__log", text="x" * 5_000, times=100)
    logged = [each.getMessage() for each in caplog.records if each.name.endswith("mcp.connection")]
    assert logged[0] == f"srv: db: {'x' * 1_996}"
    assert logged[1000:] == ["srv: further log messages are left out"]


async def test_an_external_call_is_announced_by_server_and_title(open_box: OpenBox) -> None:
    async with open_box(stdio("tiny.py")) as box:
        offer = await box.plan("srv__table")  # waits for the server to have started
        assert offer == PlannedCall(
            announcement=Announcement(title="srv: Give a table"),
            access="external",
            coverage=Coverage(fingerprint=offer.coverage.fingerprint, definition=offer.coverage.definition),
        )
        assert (len(offer.coverage.fingerprint), offer.coverage.definition.partition("\n")[0]) == (64, "Give a table")


async def test_cancelling_a_call_tells_the_server(open_box: OpenBox, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    async with open_box(stdio("tiny.py", env=(("CANCELLED_FILE", str(heard)),))) as box:
        await box.toolbox.wait_ready(120)
        with anyio.CancelScope() as scope:

            async def cancel(_progress: str) -> None:
                scope.cancel()

            await box.toolbox.run(call("srv__wait"), "call_1_0", cancel)
        assert scope.cancelled_caught
        with anyio.fail_after(60):
            while not heard.exists():  # noqa: ASYNC110 - written by another process
                await anyio.sleep(0.005)
        assert await box.run("srv__echo", text="alive") == Outcome(text="you said alive")


async def test_a_call_that_takes_too_long_is_an_error_that_names_the_server(open_box: OpenBox) -> None:
    async def expire(_: str) -> None:
        skip_time(300)

    async with open_box(stdio("tiny.py"), call_timeout_s=300) as box:
        await box.toolbox.wait_ready(120)
        assert await box.toolbox.run(call("srv__wait"), "call_7_0", expire) == Outcome(
            text="MCP server srv did not answer the call of wait within 300 s", is_error=True
        )


async def test_a_server_that_dies_during_a_call_is_restarted_at_its_next_use(open_box: OpenBox) -> None:
    failed = anyio.Event()
    listings: list[list[str]] = []

    async def on_change() -> None:
        listings.append(names(box))
        if box.toolbox.servers()[0].state == "failed":
            failed.set()

    async with open_box(stdio("tiny.py"), on_change=on_change) as box:
        await box.toolbox.wait_ready(120)
        outcome = await box.run("srv__die")
        with anyio.fail_after(60):
            await failed.wait()
        detail = 'it ended with exit code 7; it last said "about to die"'
        assert outcome == Outcome(text=f"MCP server srv ended during die: {detail}", is_error=True)
        ended = ServerStatus(name="srv", state="failed", detail=detail, losses=1, loss=detail)
        assert box.toolbox.servers() == (ended,)
        assert listings[-1] == BUILT_IN
        assert (await box.run("recall", query="x")).text == "words=x entry=None limit=20"
        assert await box.run("srv__echo", text="again") == Outcome(text="you said again")
        assert names(box) == listings[0]
        assert box.toolbox.servers() == (replace(ended, state="ready", detail="", tools=14),), "what it lost is told"


async def test_a_server_that_dies_at_every_use_is_started_less_and_less_often(
    open_box: OpenBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.mcp.connection.BACKOFF_S", 600)
    async with open_box(stdio("tiny.py")) as box:
        await box.toolbox.wait_ready(120)
        for _ in range(2):
            assert (await box.run("srv__die")).text.startswith("MCP server srv ended during die")
            with anyio.fail_after(60):
                while box.toolbox.servers()[0].state == "ready":  # noqa: ASYNC110 - its end is noticed a moment later
                    await anyio.sleep(0.005)
        third = await box.plan("srv__echo", text="too soon")
        assert third.fault == (
            'MCP server srv is not available: it ended with exit code 7; it last said "about to die"'
        )
        assert await box.toolbox.restart("srv") == ("srv",)
        assert await box.run("srv__echo", text="asked for") == Outcome(text="you said asked for")


async def test_a_failed_server_is_not_started_again_before_its_backoff_unless_asked(
    open_box: OpenBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.mcp.connection.BACKOFF_S", 600)
    late = tmp_path / "late"
    server = StdioServer(name="late", command=str(late))
    async with open_box(server) as box:
        await box.toolbox.wait_ready(120)
        assert box.toolbox.servers()[0].state == "failed"
        command = stdio("tiny.py")
        late.write_text(f"#!/bin/sh\nexec {command.command} {' '.join(command.args)}\n")
        late.chmod(0o755)
        await box.toolbox.wait_ready(120)
        assert box.toolbox.servers()[0].state == "failed"
        assert await box.toolbox.restart() == ("late",)
        assert box.toolbox.servers()[0].state == "ready"


async def test_a_server_that_changes_its_tools_is_listed_again(open_box: OpenBox) -> None:
    changed = anyio.Event()

    async def on_change() -> None:
        if box.toolbox.servers()[0].tools == 15:
            changed.set()

    async with open_box(stdio("tiny.py"), on_change=on_change) as box:
        await box.toolbox.wait_ready(120)
        await box.run("srv__more")
        with anyio.fail_after(60):
            await changed.wait()
        assert await box.run("srv__extra") == Outcome(text="called extra")


async def test_servers_that_fail_are_named_and_delay_only_themselves(open_box: OpenBox, tmp_path: Path) -> None:
    servers = (
        StdioServer(name="missing", command="no-such-program-anywhere"),
        stdio("unruly.py", "early-end", name="early"),
        stdio("unruly.py", "mute", str(tmp_path / "pid"), name="mute", options=ServerOptions(start_timeout_s=300)),
        StdioServer(name="nul", command="a\0b"),
        HttpServer(name="nobody", url="http://127.0.0.1:1/mcp"),
        HttpServer(name="nobody-sse", url="http://127.0.0.1:1/sse", transport="sse"),
        stdio("unruly.py", "no-schema", name="vague"),
        stdio("tiny.py", name="good"),
    )
    async with open_box(*servers, start_timeout_s=3_600) as box:
        assert await box.run("good__echo", text="early") == Outcome(text="you said early")
        (pid,) = await pids_in(tmp_path / "pid")
        with anyio.fail_after(60):  # the wait for the exit code of a server that ended must not expire
            while [one.name for one in box.toolbox.servers() if one.state == "starting"] != ["mute"]:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        skip_time(300)
        await box.toolbox.wait_ready(120)
        statuses = {status.name: (status.state, status.detail) for status in box.toolbox.servers()}
        await until_gone(pid)
        assert (await box.run("update_plan", items=[])).is_error is False
        fault = (await box.plan("mute__tool")).fault
    assert statuses.pop("vague") == ("ready", "")  # but its one tool, which has no schema, is left out
    for name, word in (("nobody", "connect"), ("nobody-sse", "connect")):
        state, detail = statuses.pop(name)
        assert state == "failed"
        assert word in detail.lower()
        assert "\n" not in detail
    assert statuses == {
        "missing": ("failed", "no-such-program-anywhere is not on PATH (directories of the workspace do not count)"),
        "early": ("failed", 'it ended with exit code 3; it last said "bad configuration: no token"'),
        "mute": ("failed", "it did not answer within 300 s"),
        "nul": ("failed", "embedded null byte"),
        "good": ("ready", ""),
    }
    assert fault == 'No tool "mute__tool": MCP server mute is not available: it did not answer within 300 s'


async def test_closing_ends_servers_that_ignore_everything(open_box: OpenBox, tmp_path: Path) -> None:
    servers = [stdio("unruly.py", "deaf", str(tmp_path / f"pids{number}"), name=f"s{number}") for number in range(3)]
    async with open_box(*servers, stdio("unruly.py", "mute", name="mute")) as box:
        with anyio.fail_after(60):
            for number in range(3):
                await box.run(f"s{number}__echo")
    for number in range(3):
        for pid in (tmp_path / f"pids{number}").read_text().split():
            await until_gone(int(pid))


async def test_closing_stops_a_server_that_is_still_starting(
    open_box: OpenBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.tools.mcp.client._CLOSE_S", 60.0)  # a busy machine may need more than half a second
    pid_file = anyio.Path(tmp_path / "pid")
    async with open_box(stdio("unruly.py", "mute", str(pid_file))) as box:
        with anyio.fail_after(60):
            while not await pid_file.exists():  # noqa: ASYNC110 - written by another process
                await anyio.sleep(0.005)
    assert box.toolbox.servers() == (ServerStatus(name="srv", state="failed", detail="stopped"),)
    await until_gone(int(await pid_file.read_text()))


async def test_cancelling_the_session_ends_its_servers(open_box: OpenBox, tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        async with open_box(stdio("unruly.py", "deaf", str(tmp_path / "pids"))) as box:
            await box.run("srv__echo")
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    for pid in (tmp_path / "pids").read_text().split():
        await until_gone(int(pid))


async def test_an_exception_of_the_session_is_raised_unchanged(open_box: OpenBox) -> None:
    class Mine(Exception): ...

    async def session() -> None:
        async with open_box(stdio("tiny.py")) as box:
            await box.toolbox.wait_ready(120)
            raise Mine

    with pytest.raises(Mine):
        await session()


async def test_two_external_calls_run_at_once(open_box: OpenBox) -> None:
    async with open_box(stdio("tiny.py")) as box:
        await box.toolbox.wait_ready(120)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(box.run, "srv__wait")
                assert await box.run("srv__echo", text="beside") == Outcome(text="you said beside")
                tasks.cancel_scope.cancel()


async def test_two_servers_with_one_name_get_their_own_calls(open_box: OpenBox) -> None:
    first = stdio("tiny.py", name="db", env=(("WHO", "first"),))
    second = stdio("tiny.py", name="db", env=(("WHO", "second"),))
    async with open_box(first, second) as box:
        await box.toolbox.wait_ready(120)
        tools = [name for name in names(box) if name.endswith("__env")]
        said = [(await box.run(tool, text="WHO")).text for tool in tools]
    assert said == ["first", "second"]


async def test_a_tool_whose_name_was_made_valid_can_be_called(open_box: OpenBox) -> None:
    async with open_box(stdio("tiny.py")) as box:
        await box.toolbox.wait_ready(120)
        assert await box.run("srv__get_user") == Outcome(text="called get.user")


async def test_bad_calls_get_precise_errors_and_do_not_run(open_box: OpenBox) -> None:
    async with open_box(stdio("unruly.py", "garbage")) as box:
        await box.toolbox.wait_ready(120)
        faulty = {
            "no tool": call("read_fiel"),
            "bad arguments": ToolCall(id="c", name="shell", arguments="[]"),
            "fault of the stream": ToolCall(
                id="c", name="shell", arguments="{}", fault="The arguments broke off.", raw='{"comm'
            ),
            "external": ToolCall(id="c", name="srv__echo", arguments='"x"'),
            "half a pair": ToolCall(id="c", name="write_file", arguments='{"path": "a", "content": "\\ud83d"}'),
            "half a pair outside": ToolCall(id="c", name="srv__echo", arguments='{"text": "\\ud83d"}'),
        }
        faults = {}
        for what, bad in faulty.items():
            offer = await box.toolbox.plan(bad)
            outcome = await box.toolbox.run(bad, "call_1_0", box.show)
            assert outcome == Outcome(text=offer.fault or "", is_error=True)
            faults[what] = offer.fault
    takes = (
        "Expected a JSON object with command (string), access (string, optional), timeout_s (integer, optional), "
        "background (boolean, optional)."
    )
    assert faults == {
        "no tool": 'No tool "read_fiel".',
        "bad arguments": f"shell: the arguments are []; expected a JSON object. {takes}",
        "fault of the stream": f"The arguments broke off. {takes}",
        "external": 'srv__echo: the arguments are "x"; expected a JSON object. srv__echo takes no arguments: {}.',
        "half a pair": "write_file: content holds half a surrogate pair, \\ud83d, at character 0; "
        "expected text that UTF-8 can encode",
        "half a pair outside": "srv__echo: the JSON text of the arguments holds half a surrogate pair, \\ud83d, "
        "at character 10; expected text that UTF-8 can encode",
    }


async def test_a_bug_in_a_built_in_tool_is_raised_as_it_is(root: Path) -> None:
    class Broken(RecordingLog):
        async def recall(self, *_: object, **__: object) -> str:
            raise ZeroDivisionError("a bug")

    async with open_toolbox(DiskWorkspace(root), Ports(log=Broken(), plan=FixedPlan()), []) as toolbox:

        async def unwatched(_text: str) -> None: ...

        with pytest.raises(ZeroDivisionError, match="a bug"):
            await toolbox.run(call("recall", query="x"), "call_1_0", unwatched)


async def test_schemas_of_built_in_tools_are_valid() -> None:
    from jsonschema import Draft202012Validator

    for spec in builtin.SPECS:
        schema: dict[str, Any] = dict(spec.input_schema)
        Draft202012Validator.check_schema(schema)
        assert set(schema.get("required", ())) <= set(schema["properties"])


async def test_built_in_tools_do_not_block_the_event_loop(open_box: OpenBox, root: Path) -> None:
    from blockbuster import blockbuster_ctx

    (root / "a.txt").write_text("one\n")
    async with open_box() as box:
        with blockbuster_ctx("crow") as guard:
            for function in guard.functions.values():  # resolving and judging a path is synchronous by contract
                function.can_block_in("crow/tools/workspace.py", {"resolve", "read_protection"})
                function.can_block_in("crow/tools/disk.py", {"shared_inode"})
                function.can_block_in("crow/tools/process.py", {"_children_of", "_families"})  # /proc is no disk
                function.can_block_in("crow/tools/process.py", {"of", "has_mark"})
            assert (await box.run("read_file", path="a.txt")).text == "one"
            assert (await box.run("edit_file", path="a.txt", old_text="one", new_text="two")).is_error is False
            assert (await box.run("grep", pattern="two")).text == "a.txt:1: two"
            assert (await box.run("shell", command="sleep 600 >/dev/null & echo hi")).text.startswith("hi")


FORGETFUL: dict[str, bool] = {}


class Http(BaseHTTPRequestHandler):
    """Streamable HTTP with plain JSON answers."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "id" not in message:
            self.send_response(202)
            self.end_headers()
            return
        result = self.result_of(message)
        if result is None:
            self.send_error(404)
            return
        body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def result_of(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request, or None if the server knows nothing of the session."""
        match message["method"]:
            case "initialize":
                version, info = message["params"]["protocolVersion"], {"name": "http", "version": "1"}
                return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                return {"tools": [{"name": "whoami", "inputSchema": {"type": "object"}}]}
            case _ if FORGETFUL.pop("session", None):
                return None
        return {"content": [{"type": "text", "text": f"you are {self.headers.get('Authorization')}"}]}

    def do_GET(self) -> None:
        self.send_error(405)

    def do_DELETE(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class ModernHttp(Http):
    """Speaks only the newer protocol: what lacks its headers is refused by 400 and -32020, the handshake too."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        version, cache = self.headers.get("MCP-Protocol-Version"), {"ttlMs": 0, "cacheScope": "private"}
        match message["method"]:
            case method if self.headers.get("Mcp-Method") != method:
                answer: dict[str, object] = {"error": {"code": -32020, "message": "Mcp-Method header is missing"}}
            case "server/discover":
                answer = {"result": {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **cache}}
            case "tools/list":
                answer = {"result": {"tools": [{"name": "whoami", "inputSchema": {"type": "object"}}], **cache}}
            case _:
                answer = {"result": {"content": [{"type": "text", "text": f"you spoke {version}"}]}}
        if "result" in answer:
            answer = {"result": {**answer["result"], "resultType": "complete"}}  # type: ignore[dict-item]
        body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), **answer}).encode()
        self.send_response(400 if "error" in answer else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def http_server(handler: type[Http] = Http) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/mcp"
        finally:
            server.shutdown()
            thread.join()


async def test_a_server_over_http_gets_its_headers(open_box: OpenBox) -> None:
    with http_server() as url:
        async with open_box(HttpServer(name="web", url=url, headers=(("Authorization", "Bearer t"),))) as box:
            await box.toolbox.wait_ready(120)
            assert box.toolbox.servers() == (ServerStatus(name="web", state="ready", tools=1),)
            assert await box.run("web__whoami") == Outcome(text="you are Bearer t")


async def test_a_server_over_http_that_forgot_the_session_is_greeted_again_at_its_next_use(open_box: OpenBox) -> None:
    with http_server() as url:
        async with open_box(HttpServer(name="web", url=url)) as box:
            await box.toolbox.wait_ready(120)
            FORGETFUL["session"] = True
            first = await box.run("web__whoami")
            assert first.is_error
            assert first.text.startswith("MCP server web ")
            assert await box.run("web__whoami") == Outcome(text="you are None")


async def test_a_restart_while_the_connection_to_a_lost_server_is_closed_starts_it_again(open_box: OpenBox) -> None:
    closing, done = threading.Event(), threading.Event()

    class SlowToClose(Http):
        def do_DELETE(self) -> None:
            closing.set()
            done.wait(120)
            super().do_DELETE()

        def end_headers(self) -> None:
            self.send_header("Mcp-Session-Id", "s")  # a client ends a session that has an id
            super().end_headers()

    with http_server(SlowToClose) as url:
        async with open_box(HttpServer(name="web", url=url)) as box:
            await box.toolbox.wait_ready(120)
            FORGETFUL["session"] = True
            assert (await box.run("web__whoami")).is_error
            assert await anyio.to_thread.run_sync(closing.wait, 60)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(box.toolbox.restart, "web")
                await anyio.wait_all_tasks_blocked()
                done.set()
            assert box.toolbox.servers() == (ServerStatus(name="web", state="ready", tools=1),)


async def test_an_http_server_of_the_newer_protocol_is_never_sent_the_old_handshake(open_box: OpenBox) -> None:
    methods: list[str] = []

    class Recording(ModernHttp):
        def do_POST(self) -> None:
            methods.append(self.headers["Mcp-Method"])
            super().do_POST()

    with http_server(Recording) as url:
        async with open_box(HttpServer(name="web", url=url)) as box:
            await box.toolbox.wait_ready(120)
            assert box.toolbox.servers() == (ServerStatus(name="web", state="ready", tools=1),)
            assert methods[:2] == ["server/discover", "tools/list"]


@pytest.mark.parametrize("how", ["ignores", "disconnects"])
async def test_an_http_server_that_does_not_answer_the_probe_gets_the_old_handshake(
    open_box: OpenBox, how: str
) -> None:
    probed, done = threading.Event(), threading.Event()

    class Silent(Http):
        def do_POST(self) -> None:
            if self.headers["Mcp-Method"] == "server/discover":
                probed.set()
                if how == "ignores":
                    done.wait(120)
                self.close_connection = True
            else:
                super().do_POST()

    with http_server(Silent) as url:
        async with open_box(HttpServer(name="web", url=url), start_timeout_s=9) as box:
            assert await anyio.to_thread.run_sync(probed.wait, 60)
            skip_time(2)  # the library would wait for ten seconds
            await box.toolbox.wait_ready(120)
            done.set()
            assert box.toolbox.servers() == (ServerStatus(name="web", state="ready", tools=1),)
            assert await box.run("web__whoami") == Outcome(text="you are None")


async def test_a_tool_that_changes_after_it_was_planned_is_not_called(open_box: OpenBox, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"

    def listed(description: str) -> None:
        file.write_text(json.dumps([{"name": "say", "description": description, "inputSchema": {"type": "object"}}]))

    listed("Says it.")
    async with open_box(stdio("various.py", "shifts", str(file))) as box:
        await box.toolbox.wait_ready(120)
        planned = await box.toolbox.plan(call("srv__say"))
        assert (await box.toolbox.run(call("srv__say"), "c", box.show, planned=planned)).text == "say {}"
        listed("Sends it away.")
        await box.toolbox.restart("srv")
        late = await box.toolbox.run(call("srv__say"), "c", box.show, planned=planned)
        again = await box.toolbox.plan(call("srv__say"))
        assert (await box.toolbox.run(call("srv__say"), "c", box.show, planned=again)).text == "say {}"
    text = "srv__say was not called: its server changed the tool after the call was planned. Call it again."
    assert late == Outcome(text=text, is_error=True)
    assert planned.coverage.fingerprint != again.coverage.fingerprint
    assert again.coverage.definition.startswith("say\nSends it away.\n")
