"""The command `crow run`: runs one prompt, prints the answer on stdout, and reports on stderr what happens."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from crow.agent.permissions.rules import typed_rule
from crow.app import recording
from crow.bridge.loop import Times
from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject
from crow.domain.receipts import receipt_in
from crow.domain.text import safe
from crow.protocol.frames import RequestError
from crow.settings import Loaded
from crow.store import SessionRow
from crow.terminal.answer import AnswerSchema, json_in, read_schema
from crow.terminal.connection import Connection, Params, TerminalConnection, connect, error_of
from crow.terminal.numbered import numbered_question
from crow.terminal.prompt import read_prompt, text_block
from crow.terminal.remote import RemoteConnection, connect_to
from crow.terminal.screen import Screen, answer_at, interrupts, open_terminal, shell_quoted
from crow.terminal.sessions import add_session_arguments, check_session_options, open_session

_DONE, _FAILED, _USAGE, _LIMIT, _REFUSED, _UNVERIFIED, _INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
"""Exit codes."""

_EXIT_CODES = f"""exit codes:
  {_DONE}    the turn is done
  {_FAILED}    the run failed: the model, the endpoint, the database, or no JSON that --schema accepts
  {_USAGE}    an argument or a setting cannot be used; nothing was sent
  {_LIMIT}    a limit stopped the run: --max-steps, --max-cost, or the length of an answer
  {_REFUSED}    a tool call was refused because nobody could be asked, and no later call succeeded
  {_UNVERIFIED}    with --require-verified: files were changed, and no check verified all of them after the last change
  {_INTERRUPTED}  Ctrl-C, SIGTERM or SIGHUP
"""

_SCHEMA_TRIES = 3

_LOCAL_OPTIONS = ("base_url", "allow", "max_steps", "require_verified")
"""Options that cannot be used with --connect, because the server does not take them from a client."""

_CAPABILITIES: Mapping[str, Any] = {
    "session": {"notices": {}, "compaction": {}},
    "_meta": {"crow": {"remarks": True}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `crow run`, except those of the settings."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    add = parser.add_argument
    add("prompt", metavar="PROMPT", nargs="?", help="what to do; standard input is appended if it is not a terminal")
    add("--prompt-file", metavar="FILE", help="read the prompt from FILE; PROMPT is appended to it")
    add("--file", metavar="FILE", action="append", default=[], help="attach FILE; repeatable")
    add(
        "--image", metavar="FILE", action="append", default=[], help="attach a PNG, JPEG, GIF or WebP image; repeatable"
    )
    add_session_arguments(parser)
    add("--fork", action="store_true", help="continue in a copy of the session; the session itself stays as it is")
    add(
        "--allow",
        metavar="RULE",
        action="append",
        default=[],
        help='in this run, allow calls that match this rule, such as "shell(make *)"',
    )
    add("--max-cost", metavar="USD", type=float, help="stop when the cost of this run reaches this many US dollars")
    add("--max-steps", metavar="N", type=int, help="stop after N answers of the model")
    add(
        "--require-verified",
        action="store_true",
        help="fail if the run changed files and no check passed after the last change",
    )
    add(
        "--schema",
        metavar="FILE",
        help="print only JSON that the JSON Schema in FILE accepts; on a mismatch, ask up to three times more",
    )
    add(
        "--json",
        action="store_true",
        help="print each ACP session/update as a line of JSON, then the result as the last line",
    )


def _with_options(loaded: Loaded, options: argparse.Namespace) -> Loaded:
    """Return the settings together with the rules and limits of the options. These are not stored: they apply to this
    run only."""
    settings = loaded.settings
    allow = (*settings.permissions.allow, *options.allow)
    starts = [server.start_timeout_s or 0.0 for server in settings.mcp_servers.values()]
    # There is no later turn that could use the tools of a slow server, so this turn waits for it.
    limits: dict[str, object] = {"mcp_wait_s": max(settings.limits.mcp_start_timeout_s, *starts, 0.0)}
    if options.max_steps is not None:
        limits["steps_per_turn"] = options.max_steps
        loaded = replace(loaded, sources={**loaded.sources, "limits.steps_per_turn": "flag --max-steps"})
    changes: dict[str, object] = {
        "permissions": settings.permissions.model_copy(update={"allow": allow}),
        "limits": settings.limits.model_copy(update=limits),
    }
    return replace(loaded, settings=settings.model_copy(update=changes))


def run_prompt(load: Callable[[], Loaded], options: argparse.Namespace) -> int:
    """Run one prompt, and return the exit code. `load` reads the settings.

    :raises ~crow.domain.errors.CrowError: the prompt was not sent.
    """
    cwd = _check_options(options)
    schema = read_schema(options.schema) if options.schema else None
    prompt = read_prompt(options)
    if options.connect is not None and any(block["type"] == "resource_link" for block in prompt):
        raise ArgumentError(
            "--file attaches only small text files with --connect: the server cannot read this machine."
        )
    if schema is not None:
        wanted = json.dumps(schema.schema, ensure_ascii=False)
        prompt.append(text_block(f"Your last message must be only JSON, which this JSON Schema accepts:\n{wanted}"))
    loaded = load()
    if loaded.problem is not None:
        raise loaded.problem
    if options.connect is None:
        loaded = _with_options(loaded, options)
    run = _RunClient(options, loaded, lambda: _with_options(load(), options), schema)
    return asyncio.run(run.run(prompt, cwd))


def _check_options(options: argparse.Namespace) -> str | None:
    """Check the options, and return the directory of --cwd. :raises ArgumentError: an option cannot be used."""
    for name in _LOCAL_OPTIONS if options.connect is not None else ():
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{flag} cannot be used with --connect: the settings of the server apply.")
    if options.fork and not (options.session or options.newest):
        raise ArgumentError("--fork needs a session to copy: add --continue or --session SESSION.")
    if options.max_steps is not None and options.max_steps < 1:
        raise ArgumentError(f"--max-steps is {options.max_steps}; expected 1 or more.")
    if options.max_cost is not None and not options.max_cost > 0:
        raise ArgumentError(f"--max-cost is {options.max_cost:g}; expected US dollars above 0, such as 0.50.")
    for rule in options.allow:
        typed_rule(rule, allow=True, cwd="/")
    return check_session_options(options, is_remote=options.connect is not None)


@dataclass
class _RunProgress:
    """The state of a run."""

    message_id: str = ""
    """The id of the model's last message."""
    text: str = ""
    """The model's last message."""
    titles: dict[str, str] = field(default_factory=dict)
    """Maps the ids of tool calls to their titles."""
    statuses: dict[str, str] = field(default_factory=dict)
    """Maps the ids of tool calls to their statuses."""
    diffs: dict[str, list[str]] = field(default_factory=dict)
    """Maps the ids of tool calls to the paths in their diffs."""
    files: dict[str, None] = field(default_factory=dict)
    """The paths that completed calls have changed, in order."""
    refused: dict[str, None] = field(default_factory=dict)
    """The rules that would have allowed the refused calls, in order."""
    refused_calls: set[str] = field(default_factory=set)
    """The ids of the calls that were refused because there was no terminal to ask at."""
    was_refused_last: bool = False
    """Whether a call was refused, and no call has completed since then."""
    first_cost: float | None = 0.0
    """The cost of the session before the run, in US dollars. With `--connect`, None until the server has sent it."""
    tokens_in: int = 0
    """The input tokens of this run, as reported in the answers to its prompts. This number is used if the session's own
    counts cannot be read, for example because a server runs it."""
    tokens_out: int = 0
    """The output tokens of this run, as reported in the same answers."""
    cost: float | None = None
    """The cost of the session now, in US dollars, or None if it is unknown."""
    stopped_by: str = ""
    """Why the run was stopped by --max-cost, or empty."""


class _RunClient:
    """One run of `crow run`: the :class:`crow.terminal.connection.TerminalClient` for its session."""

    def __init__(
        self,
        options: argparse.Namespace,
        loaded: Loaded,
        reload: Callable[[], Loaded],
        schema: AnswerSchema | None,
    ) -> None:
        self._options = options
        self._loaded = loaded
        self._reload = reload
        self._schema = schema
        self._turn = _RunProgress()
        self._session_id = ""
        self._connection: Connection | None = None
        self._is_lost = False
        self._interrupts = 0
        self._is_prompting = False
        self._screen = Screen()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, prompt: list[dict[str, Any]], cwd: str | None) -> int:
        """Open the session, run the prompt and return the exit code."""
        main = asyncio.current_task()
        assert main is not None
        with interrupts(lambda: self._interrupt(main)), self._screen.spinning():
            try:
                async with self._connect() as connection:
                    self._connection = connection
                    try:
                        opened = await open_session(connection, self._options, cwd)
                        self._session_id = opened.id
                        if opened.notice:
                            await self._screen.say(f"crow: {opened.notice}")
                    except RequestError as error:
                        raise error_of(error) from None
                    return await self._prompt(connection, prompt)
            except asyncio.CancelledError:
                if not self._interrupts:
                    raise
                self._say_how_to_continue("Interrupted.")
                return _INTERRUPTED

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Connection]:
        loaded, address = self._loaded, self._options.connect
        if address is None:
            async with connect(loaded, self, reload=self._reload, capabilities=_CAPABILITIES, is_warmed=False) as local:
                yield local
            return
        self._turn.first_cost = None
        token, caps, times = self._options.token_file, _CAPABILITIES, Times()
        with recording(loaded) as recorder:
            async with connect_to(address, token, self, capabilities=caps, observe=recorder, times=times) as remote:
                yield remote

    async def _stored(self, connection: Connection) -> SessionRow | None:
        """Return the session as it is stored, or None if it is on a server."""
        return await connection.store.session(self._session_id) if isinstance(connection, TerminalConnection) else None

    async def _prompt(self, connection: Connection, prompt: list[dict[str, Any]]) -> int:
        """Run the prompt and print the result. If the schema of --schema rejects the answer, ask for a corrected
        answer, at most `_SCHEMA_TRIES` times."""
        before = await self._stored(connection)
        if before is not None:
            self._turn.first_cost = before.cost
        stop, problem, value = "", "", None
        for tries_left in range(_SCHEMA_TRIES, -1, -1):
            params = {"sessionId": self._session_id, "prompt": prompt}
            self._turn.text = self._turn.message_id = ""
            self._is_prompting = True
            try:
                answer = await connection.call("session/prompt", params)
                stop = answer["stopReason"]
                self._turn.tokens_in += answer.get("usage", {}).get("inputTokens", 0)
                self._turn.tokens_out += answer.get("usage", {}).get("outputTokens", 0)
            except RequestError as error:
                problem = str(error)
                break
            finally:
                self._is_prompting = False
            problem, value = self._judge_answer(stop)
            if not problem or stop != "end_turn" or not tries_left:
                break
            await self._screen.say(f"The answer is not accepted: {problem}. Asking again.")
            prompt = [text_block(f"Your answer is not accepted: {problem}. Answer with the corrected JSON only.")]
        code = self._exit_code(stop, problem)
        receipt = None if before is None else await self._receipt(connection, before.leaf)
        if code == _DONE and self._options.require_verified and receipt and receipt.get("state") != "verified":
            code = _UNVERIFIED
        await self._screen.end_line()
        if self._options.json:
            await self._print_result(connection, stop, problem, value, code, before, receipt)
        elif self._schema is not None and code == _DONE:
            await self._screen.print_answer(json.dumps(value, ensure_ascii=False) + "\n")
        await self._say_end(code, stop, problem)
        return code

    def _judge_answer(self, stop: str) -> tuple[str, Any]:
        """Return two values: the problem with the answer (empty if there is none), and the JSON in the answer."""
        if self._schema is None or stop != "end_turn":
            return "", None
        try:
            value = json_in(self._turn.text)
        except ValueError as error:
            return str(error), None
        return self._schema.problem(value) or "", value

    def _exit_code(self, stop: str, problem: str) -> int:
        if self._interrupts:
            return _INTERRUPTED
        if self._turn.stopped_by or stop in ("max_turn_requests", "max_tokens"):
            return _LIMIT
        if problem or stop != "end_turn":
            return _FAILED
        return _REFUSED if self._turn.was_refused_last else _DONE

    async def _say_end(self, code: int, stop: str, problem: str) -> None:
        turn = self._turn
        match code:
            case 130:
                self._say_how_to_continue("Cancelled.")
            case 3:
                self._say_how_to_continue(turn.stopped_by or f"Stopped by a limit ({stop}).")
            case 5:
                self._say_how_to_continue("The changes are not verified.")
            case 1:
                await self._screen.say(f"crow: {problem or f'the model stopped: {stop}'}")
                self._say_how_to_continue("")

    def _say_how_to_continue(self, words: str) -> None:
        self._screen.clear()
        server = f"--connect {shell_quoted(self._options.connect)} " if self._options.connect else ""
        how = f'Everything is kept; continue with: crow run {server}--session {self._session_id} "..."'
        line = f"{words} {how if self._session_id else ''}".strip()
        with suppress(OSError):
            print(f"crow: {safe(line)}", file=sys.stderr)

    async def _print_result(
        self,
        connection: Connection,
        stop: str,
        problem: str,
        value: Any,
        code: int,
        before: SessionRow | None,
        receipt: JsonObject | None,
    ) -> None:
        turn, row = self._turn, await self._stored(connection)
        tokens_in, tokens_out = turn.tokens_in, turn.tokens_out
        if row is not None and before is not None:  # these counts include subagents and summaries
            tokens_in, tokens_out = row.tokens_in - before.tokens_in, row.tokens_out - before.tokens_out
        result: dict[str, Any] = {
            "sessionId": self._session_id,
            "stopReason": stop or None,
            "text": turn.text,
            "usage": {"inputTokens": tokens_in, "outputTokens": tokens_out},
            "cost": self._spent(),
            "files": list(turn.files),
            "receipt": receipt,
            "refused": list(turn.refused),
            "exitCode": code,
        }
        if self._schema is not None and code == _DONE:
            result["json"] = value
        if problem:
            result["error"] = problem
        await self._screen.print_line({"result": result})

    async def _receipt(self, connection: Connection, leaf: int | None) -> JsonObject | None:
        """Return the newest receipt since `leaf`, or None if the run changed no files."""
        assert isinstance(connection, TerminalConnection)
        row = await connection.store.session(self._session_id)
        entries = await connection.store.entries_beyond(row.leaf, leaf, ("custom",))
        return next((data for entry in reversed(entries) if (data := receipt_in(entry.body)) is not None), None)

    def _spent(self) -> float | None:
        """Return the cost of this run in US dollars, or None if it is unknown."""
        turn = self._turn
        return None if turn.cost is None else round(turn.cost - (turn.first_cost or 0.0), 9)

    def _interrupt(self, main: asyncio.Task[Any]) -> None:
        """Handle Ctrl-C. The first press cancels a running turn. Any other press ends the program."""
        self._interrupts += 1
        if self._interrupts == 1 and self._is_prompting and self._connection is not None:
            self._screen.clear()
            with suppress(OSError):
                print("crow: cancelling; press Ctrl-C again to end at once", file=sys.stderr)
            self._start(self._connection.cancel(self._session_id))
        else:
            main.cancel()

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # See TerminalClient.

    async def update(self, params: Params) -> None:
        """See `TerminalClient`."""
        if self._options.json:
            await self._screen.print_line({"jsonrpc": "2.0", "method": "session/update", "params": params})
        update = params["update"]
        match update["sessionUpdate"]:
            case "agent_message_chunk" if "_meta" in update:
                await self._screen.say(update["content"].get("text", "").strip())
            case "agent_message_chunk":
                await self._show_text(update.get("messageId", ""), update["content"].get("text", ""))
            case "tool_call" | "tool_call_update":
                await self._show_call(update)
            case "usage_update" if self._turn.first_cost is None:  # a server sends it when a session is opened
                self._turn.first_cost = float(update.get("cost", {}).get("amount") or 0.0)
            case "usage_update" if self._is_prompting:
                await self._check_cost(update.get("cost", {}).get("amount"))
            case "notice":
                await self._screen.say(" ".join(filter(None, [update["title"], update.get("description")])))
            case "compaction_update" if update["status"] == "in_progress" and "summary" not in update:
                await self._screen.say("Compacting the context")

    async def _show_text(self, message_id: str, text: str) -> None:
        turn = self._turn
        is_new = message_id != turn.message_id
        if is_new:
            turn.message_id, turn.text = message_id, ""
        turn.text += text
        if not self._options.json and self._schema is None:
            await self._screen.print_message(text, is_new=is_new)

    async def _show_call(self, update: Params) -> None:
        turn, call_id = self._turn, update["toolCallId"]
        is_new = call_id not in turn.titles
        title, status = update.get("title", turn.titles.get(call_id, "")), update.get("status", "pending")
        turn.titles[call_id] = title
        turn.diffs.setdefault(call_id, [])
        turn.diffs[call_id] += [part["path"] for part in update.get("content") or () if part["type"] == "diff"]
        has_ended = status in ("completed", "failed") and turn.statuses.get(call_id) != status
        turn.statuses[call_id] = status
        if is_new:
            await self._screen.end_line()
            await self._screen.say(f"• {title}")
        if has_ended and call_id in turn.refused_calls:
            return  # a command whose change was refused has run, so it can end as completed
        if has_ended and status == "completed":
            turn.was_refused_last = False
            turn.files |= dict.fromkeys(turn.diffs[call_id])
        elif has_ended:
            await self._screen.say(f"  failed: {title}")

    async def _check_cost(self, cost: float | None) -> None:
        """If --max-cost is given, cancel the turn when the cost of the run has reached this limit or is unknown."""
        turn, most = self._turn, self._options.max_cost
        turn.cost = cost if cost is not None else turn.cost
        if most is None or turn.stopped_by or self._connection is None:
            return
        spent = self._spent()
        if spent is None:
            turn.stopped_by = (
                "Stopped: the price of this model is not known, so --max-cost cannot be enforced. Set its input_price "
                "and output_price."
            )
        elif spent >= most:
            turn.stopped_by = f"Stopped: this run has cost ${spent:.4f}, and --max-cost is {most:g}."
        if turn.stopped_by:
            self._start(self._connection.cancel(self._session_id))

    async def ask_permission(self, params: Params) -> dict[str, Any]:
        """See `TerminalClient`. Without a terminal, the call is refused, and the user is told which rule would allow
        it."""
        call, question = params["toolCall"], numbered_question(params)
        terminal = open_terminal()
        if terminal is not None:
            with terminal:
                await self._screen.end_line()
                with self._screen.paused():
                    return _selected(question.option_for(await answer_at(terminal, question.text)))
        rule = params.get("_meta", {}).get("crow", {}).get("rule", "")
        self._turn.refused[rule] = None
        self._turn.refused_calls.add(call["toolCallId"])
        self._turn.was_refused_last = True
        how = f"; allow it with --allow {shell_quoted(rule)}" if rule else ""
        how = "; a rule in the server's settings can allow it" if self._options.connect else how
        await self._screen.say(f"  refused, because there is no terminal to ask at: {call['title']}{how}")
        return _selected(question.no)

    async def elicit(self, params: Params) -> dict[str, Any]:  # noqa: ARG002
        """See `TerminalClient`. This method is not called, because `_CAPABILITIES` do not offer elicitation."""
        return {"action": "cancel"}

    # See RemoteClient.

    def connection_changed(self) -> None:
        """See `RemoteClient`."""
        is_lost = isinstance(self._connection, RemoteConnection) and not self._connection.is_connected
        if is_lost is not self._is_lost:
            self._is_lost = is_lost
            self._start(self._screen.say("crow: reconnecting to the server" if is_lost else "crow: connected again"))

    async def warn(self, words: str) -> None:
        """See `RemoteClient`."""
        await self._screen.say(words)


def _selected(option_id: str) -> dict[str, Any]:
    """Return the response that selects this option of a `session/request_permission`."""
    return {"outcome": {"outcome": "selected", "optionId": option_id}}
