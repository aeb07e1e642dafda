"""The command `crow run`: one prompt, the answer on stdout, and what happens on stderr."""

from __future__ import annotations

import argparse
import asyncio
import base64
import difflib
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import anyio.to_thread

from crow.agent.permissions import MODES, typed_rule
from crow.domain.errors import ArgumentError
from crow.domain.rendering import on_one_line, safe
from crow.frontend import frames
from crow.frontend.frames import RequestError
from crow.settings import Loaded
from crow.terminal.connection import Params, TerminalConnection, connect, error_of, find_session

DONE, FAILED, USAGE, LIMIT, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit codes."""

EXIT_CODES = f"""exit codes:
  {DONE}    the turn is done
  {FAILED}    it failed: the model, the endpoint, the database, or no JSON that --schema accepts
  {USAGE}    an argument or a setting cannot be used; nothing was sent
  {LIMIT}    a limit stopped it: --max-steps, --max-cost, or the length of an answer
  {REFUSED}    a tool call was refused because nobody could be asked, and no later call succeeded
  {INTERRUPTED}  Ctrl-C
"""

INPUT_BYTES = 1_000_000
"""The most that is read from standard input and from each file of --prompt-file."""

ATTACHED_BYTES = 200_000
"""A larger file of --file is only named: the model reads the parts that it needs."""

IMAGE_BYTES = 15_000_000
STDIN_HINT_S = 2.0
QUESTION_LINES = 60
SCHEMA_TRIES = 3
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_S = 0.1

IMAGE_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif"}
IMAGE_TYPES |= {".webp": "image/webp"}

CAPABILITIES: Mapping[str, Any] = {
    "session": {"notices": {}, "compaction": {}},
    "_meta": {"crow": {"remarks": True}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `crow run`, except those of the settings."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add("prompt", metavar="PROMPT", nargs="?", help="what to do; standard input is appended if it is no terminal")
    add("--prompt-file", metavar="FILE", help="read the prompt, or its first part, from FILE")
    add("--file", metavar="FILE", action="append", default=[], help="attach FILE; repeatable")
    add("--image", metavar="FILE", action="append", default=[], help="attach a PNG, JPEG, GIF or WebP; repeatable")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--session", metavar="NAME|ID", help="continue this session; a new NAME starts one")
    which.add_argument("--continue", dest="newest", action="store_true", help="continue the newest session of --cwd")
    add("--fork", action="store_true", help="continue in a copy of that session, and leave the session as it is")
    add(
        "--allow", metavar="RULE", action="append", default=[], help='allow, such as "shell(make *)"; for this run only'
    )
    add("--max-cost", metavar="USD", type=float, help="stop once this run has cost so much")
    add("--max-steps", metavar="N", type=int, help="stop after N answers of the model")
    add("--cwd", metavar="DIR", help="the workspace (default: the current directory, or that of --session)")
    add("--schema", metavar="FILE", help="print only JSON that this JSON Schema accepts; asks again up to three times")
    add("--json", action="store_true", help="print each ACP session/update as a line, then one result line")


def with_options(loaded: Loaded, options: argparse.Namespace) -> Loaded:
    """The settings with the rules and limits of this run, which are not stored."""
    settings = loaded.settings
    allow = (*settings.permissions.allow, *options.allow)
    changes: dict[str, object] = {"permissions": settings.permissions.model_copy(update={"allow": allow})}
    if options.max_steps is not None:
        changes["limits"] = settings.limits.model_copy(update={"steps_per_turn": options.max_steps})
    return replace(loaded, settings=settings.model_copy(update=changes))


def run_prompt(load: Callable[[], Loaded], options: argparse.Namespace) -> int:
    """Run one prompt, and return the exit code. `load` reads the settings.

    :raises ~crow.domain.errors.CrowError: nothing was sent.
    """
    cwd = check_options(options)
    schema = read_schema(options.schema) if options.schema else None
    prompt = read_prompt(options)
    if schema is not None:
        wanted = json.dumps(schema.schema, ensure_ascii=False)
        prompt.append(text_block(f"Your last message must be only JSON, which this JSON Schema accepts:\n{wanted}"))
    loaded = load()
    if loaded.problem is not None:
        raise loaded.problem
    run = Run(options, with_options(loaded, options), lambda: with_options(load(), options), schema)
    return asyncio.run(run.run(prompt, cwd))


def check_options(options: argparse.Namespace) -> str | None:
    """The directory of --cwd. :raises ArgumentError: an option cannot be used."""
    if options.fork and not (options.session or options.newest):
        raise ArgumentError("--fork needs the session to copy: add --continue or --session ID.")
    if options.max_steps is not None and options.max_steps < 1:
        raise ArgumentError(f"--max-steps is {options.max_steps}; expected 1 or more.")
    if options.max_cost is not None and not options.max_cost > 0:
        raise ArgumentError(f"--max-cost is {options.max_cost:g}; expected US dollars above 0, such as 0.50.")
    if options.mode is not None and options.mode not in MODES:
        raise ArgumentError(f'--mode is "{options.mode}"; expected {", ".join(MODES)}.')
    for rule in options.allow:
        typed_rule(rule, allow=True, cwd="/")
    if options.cwd is None:
        return None
    if not os.path.isdir(options.cwd):
        raise ArgumentError(f'--cwd is "{options.cwd}", which is not an existing directory.')
    return str(Path(options.cwd).resolve())


# The prompt.


def read_prompt(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The content blocks of the prompt. :raises ArgumentError: there is none, or a file cannot be read."""
    texts = [] if options.prompt_file is None else [read_text("--prompt-file", options.prompt_file)]
    texts += [] if options.prompt in (None, "-") else [options.prompt]
    blocks = [text_block("\n\n".join(texts))] if any(text.strip() for text in texts) else []
    if (given := read_stdin()).strip():
        blocks.append(text_block(f"Standard input:\n\n{given}" if blocks else given))
    if not blocks:
        raise ArgumentError('There is no prompt. Give one as an argument, such as crow run "explain this repository".')
    return [*blocks, *map(file_block, options.file), *map(image_block, options.image)]


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def read_stdin() -> str:
    """Standard input up to `INPUT_BYTES`; empty if it is a terminal. Says so if it is waited for, or cut."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    fd = sys.stdin.fileno()
    if not stat.S_ISREG(os.fstat(fd).st_mode) and not select.select([fd], [], [], STDIN_HINT_S)[0]:
        print("crow: reading standard input until it ends; </dev/null sends none", file=sys.stderr)
    with os.fdopen(fd, "rb", closefd=False) as file:
        data = file.read(INPUT_BYTES + 1)
    if len(data) <= INPUT_BYTES:
        return decoded("Standard input", data)
    print(f"crow: standard input is cut after {INPUT_BYTES:,} bytes", file=sys.stderr)
    return f"{decoded('Standard input', data[:INPUT_BYTES])}\n[cut here: crow reads {INPUT_BYTES:,} bytes at most]"


def read_text(option: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(INPUT_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"{option} {path}: {error.strerror or error}") from None
    if len(data) > INPUT_BYTES:
        raise ArgumentError(f"{option} {path} has more than {INPUT_BYTES:,} bytes; attach it with --file instead.")
    return decoded(f"{option} {path}", data)


def decoded(what: str, data: bytes) -> str:
    if b"\0" in data:
        raise ArgumentError(f"{what} is not text: it has a zero byte. Give the path of a binary file in the prompt.")
    return data.decode("utf-8", "replace")


def file_block(path: str) -> dict[str, Any]:
    """A small text file with its content; a link to anything else. :raises ArgumentError: there is no such file."""
    place = Path(path).resolve()
    try:
        is_small = place.is_file() and place.stat().st_size <= ATTACHED_BYTES
        data = place.read_bytes() if is_small else b"\0"
        place.stat()
    except OSError as error:
        raise ArgumentError(f"--file {path}: {error.strerror or error}") from None
    try:
        text = data.decode() if b"\0" not in data else None
    except UnicodeDecodeError:
        text = None
    if text is None:
        return {"type": "resource_link", "uri": place.as_uri(), "name": place.name}
    return {"type": "resource", "resource": {"uri": place.as_uri(), "text": text}}


def image_block(path: str) -> dict[str, Any]:
    mime_type = IMAGE_TYPES.get(Path(path).suffix.lower())
    if mime_type is None:
        raise ArgumentError(f"--image {path}: expected a file that ends with {', '.join(IMAGE_TYPES)}.")
    try:
        with open(path, "rb") as file:
            data = file.read(IMAGE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"--image {path}: {error.strerror or error}") from None
    if len(data) > IMAGE_BYTES:
        raise ArgumentError(f"--image {path} has more than {IMAGE_BYTES:,} bytes; scale it down.")
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": mime_type}


# The schema.


class AnswerSchema:
    """A JSON Schema for the last answer. References to other files are not followed."""

    def __init__(self, schema: Any) -> None:
        from jsonschema.validators import validator_for  # 40 ms, which only --schema needs
        from referencing.jsonschema import EMPTY_REGISTRY

        kind = validator_for(schema)
        kind.check_schema(schema)
        self.schema = schema
        self._validator = kind(schema, registry=EMPTY_REGISTRY)

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, in one line; None if the schema accepts it."""
        error = next(self._validator.iter_errors(value), None)
        if error is None:
            return None
        place = "/".join(str(step) for step in error.absolute_path)
        return f"at /{place}: {error.message[:500]}"


def read_schema(path: str) -> AnswerSchema:
    """The schema of --schema. :raises ArgumentError: the file has none."""
    try:
        schema = json.loads(read_text("--schema", path))
        checked = AnswerSchema(schema)
        checked.problem(None)  # resolves the references
    except ArgumentError:
        raise
    except Exception as error:  # noqa: BLE001 - jsonschema and referencing raise many kinds
        words = getattr(error, "message", None) or str(error)
        raise ArgumentError(f"--schema {path} is not a JSON Schema that can be used: {words}") from None
    return checked


def json_in(answer: str) -> Any:
    """The JSON of an answer, which may stand in a fence or between sentences. :raises ValueError: there is none."""
    text = answer.strip()
    with suppress(ValueError):
        return json.loads(text)
    decoder, found = json.JSONDecoder(), []
    start = 0
    while (start := next((at for at in range(start, len(text)) if text[at] in "{["), len(text))) < len(text):
        try:
            value, start = decoder.raw_decode(text, start)
            found.append(value)
        except (ValueError, RecursionError):
            start += 1
        if len(found) > 100:
            break
    if not found:
        raise ValueError("the answer has no JSON")
    return max(found, key=lambda value: len(json.dumps(value)))


# The run.


@dataclass
class Turn:
    """What a run has shown so far. `text` is the last message, `newlines` how many (at most 2) the output ends
    with, `refused` the rules for what nobody could be asked about."""

    message_id: str = ""
    text: str = ""
    newlines: int = 2
    titles: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    diffs: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)
    refused_calls: set[str] = field(default_factory=set)
    was_refused_last: bool = False
    first_cost: float = 0.0
    cost: float | None = None
    stopped_by: str = ""


class Run:
    """One run: the :class:`crow.terminal.connection.TerminalClient` of its session."""

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
        self._turn = Turn()
        self._session_id = ""
        self._connection: TerminalConnection | None = None
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
                async with connect(
                    self._loaded, self, reload=self._reload, capabilities=CAPABILITIES, is_warmed=False
                ) as connection:
                    self._connection = connection
                    try:
                        await self._open(connection, cwd)
                    except RequestError as error:
                        raise error_of(error) from None
                    return await self._prompt(connection, prompt)
            except asyncio.CancelledError:
                if not self._interrupts:
                    raise
                self._say_how_to_continue("Interrupted.")
                return INTERRUPTED

    async def _open(self, connection: TerminalConnection, cwd: str | None) -> None:
        """Open the session that the options name."""
        options, here = self._options, cwd or os.getcwd()
        meta: dict[str, Any] = {}
        known: str | None = None
        if options.newest:
            known = await self._newest(connection, here)
        elif options.session:
            found = await find_session(self._loaded, options.session)
            if found is not None:
                known, here = found.id, cwd or found.cwd
            elif options.fork:
                raise ArgumentError(f'No session "{options.session}" to copy. Run "crow sessions" to list them.')
            else:
                meta["crow"] = {"alias": options.session}
        params: dict[str, Any] = {"cwd": here, "mcpServers": []}
        if known is None:
            opened = await connection.call("session/new", params | ({"_meta": meta} if meta else {}))
            self._session_id = opened["sessionId"]
            return
        meta = {"_meta": {"model": options.model}} if options.model else {}
        method = "session/fork" if options.fork else "session/resume"
        opened = await connection.call(method, params | meta | {"sessionId": known})
        self._session_id = opened["sessionId"] if options.fork else known
        session = {"sessionId": self._session_id}
        if options.fork and options.model:
            value = {"configId": "model", "value": options.model}
            await connection.call("session/set_config_option", session | value)
        if options.mode:
            await connection.call("session/set_mode", session | {"modeId": options.mode})

    async def _newest(self, connection: TerminalConnection, cwd: str) -> str:
        listed = await connection.call("session/list", {"cwd": cwd})
        if not listed["sessions"]:
            raise ArgumentError(f"No session in {cwd} to continue. Run crow run without --continue to start one.")
        return str(listed["sessions"][0]["sessionId"])

    async def _prompt(self, connection: TerminalConnection, prompt: list[dict[str, Any]]) -> int:
        """Run the prompt, and again while --schema does not accept the answer; print the result."""
        before = await connection.store.session(self._session_id)
        self._turn.first_cost = before.cost
        stop, problem, value = "", "", None
        for tries_left in range(SCHEMA_TRIES, -1, -1):
            params = {"sessionId": self._session_id, "prompt": prompt}
            self._turn.text = self._turn.message_id = ""
            self._is_prompting = True
            try:
                stop = (await connection.call("session/prompt", params))["stopReason"]
            except RequestError as error:
                problem = str(error)
                break
            finally:
                self._is_prompting = False
            problem, value = self._judge_answer(stop)
            if not problem or stop != "end_turn" or not tries_left:
                break
            await self._screen.say(f"The answer is not accepted: {problem}. Asking again.")
            prompt = [text_block(f"--schema does not accept this: {problem}. Answer with the corrected JSON only.")]
        code = self._exit_code(stop, problem)
        await self._screen.end_line(self._turn)
        if self._options.json:
            await self._print_result(connection, stop, problem, value, code, before.tokens_in, before.tokens_out)
        elif self._schema is not None and code == DONE:
            await self._screen.print_answer(json.dumps(value, ensure_ascii=False) + "\n")
        await self._say_end(code, stop, problem)
        return code

    def _judge_answer(self, stop: str) -> tuple[str, Any]:
        """What is wrong with the answer, and its JSON."""
        if self._schema is None or stop != "end_turn":
            return "", None
        try:
            value = json_in(self._turn.text)
        except ValueError as error:
            return str(error), None
        return self._schema.problem(value) or "", value

    def _exit_code(self, stop: str, problem: str) -> int:
        if self._interrupts:
            return INTERRUPTED
        if self._turn.stopped_by or stop in ("max_turn_requests", "max_tokens"):
            return LIMIT
        if problem or stop != "end_turn":
            return FAILED
        return REFUSED if self._turn.was_refused_last else DONE

    async def _say_end(self, code: int, stop: str, problem: str) -> None:
        turn = self._turn
        match code:
            case 130:
                self._say_how_to_continue("Cancelled.")
            case 3:
                self._say_how_to_continue(turn.stopped_by or f"Stopped by a limit ({stop}).")
            case 1:
                await self._screen.say(f"crow: {problem or f'the model stopped: {stop}'}")
                self._say_how_to_continue("")

    def _say_how_to_continue(self, words: str) -> None:
        self._screen.clear()
        how = f'Everything is kept; continue with: crow run --session {self._session_id} "..."'
        line = f"{words} {how if self._session_id else ''}".strip()
        with suppress(OSError):
            print(f"crow: {safe(line)}", file=sys.stderr)

    async def _print_result(
        self, connection: TerminalConnection, stop: str, problem: str, value: Any, code: int, sent: int, made: int
    ) -> None:
        turn, row = self._turn, await connection.store.session(self._session_id)
        result: dict[str, Any] = {
            "sessionId": self._session_id,
            "stopReason": stop or None,
            "text": turn.text,
            "usage": {"inputTokens": row.tokens_in - sent, "outputTokens": row.tokens_out - made},
            "cost": self._spent(),
            "files": list(turn.files),
            "refused": list(turn.refused),
            "exitCode": code,
        }
        if self._schema is not None and code == DONE:
            result["json"] = value
        if problem:
            result["error"] = problem
        await self._screen.print_line({"result": result})

    def _spent(self) -> float | None:
        """What this run has cost in US dollars; None if unknown."""
        turn = self._turn
        return None if turn.cost is None else round(turn.cost - turn.first_cost, 9)

    def _interrupt(self, main: asyncio.Task[Any]) -> None:
        """Ctrl-C: the first cancels the turn, the second ends the program."""
        self._interrupts += 1
        if self._interrupts == 1 and self._is_prompting and self._connection is not None:
            self._screen.clear()
            with suppress(OSError):
                print("crow: cancelling; Ctrl-C again ends at once", file=sys.stderr)
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
            case "usage_update" if self._is_prompting:
                await self._check_cost(update.get("cost", {}).get("amount"))
            case "notice":
                await self._screen.say(" ".join(filter(None, [update["title"], update.get("description")])))
            case "compaction_update" if update["status"] == "in_progress" and "summary" not in update:
                await self._screen.say("Compacting the context")

    async def _show_text(self, message_id: str, text: str) -> None:
        turn = self._turn
        if message_id != turn.message_id:
            turn.message_id, turn.text = message_id, ""
            shown = "\n" * (2 - turn.newlines) + text
        else:
            shown = text
        turn.text += text
        if shown and not self._options.json and self._schema is None:
            await self._screen.print_answer(shown)
            turn.newlines = min(2, len(shown) - len(shown.rstrip("\n")))

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
            await self._screen.end_line(turn)
            await self._screen.say(f"• {title}")
        if has_ended and status == "completed":
            turn.was_refused_last = False
            turn.files |= dict.fromkeys(turn.diffs[call_id])
        elif has_ended and call_id not in turn.refused_calls:
            await self._screen.say(f"  failed: {title}")

    async def _check_cost(self, cost: float | None) -> None:
        """Cancel the turn once it has cost what --max-cost allows, or if its cost cannot be known."""
        turn, most = self._turn, self._options.max_cost
        turn.cost = cost if cost is not None else turn.cost
        if most is None or turn.stopped_by or self._connection is None:
            return
        spent = self._spent()
        if spent is None:
            turn.stopped_by = (
                "Stopped: the price of this model is not known, so --max-cost cannot be kept. Set its input_price and "
                "output_price."
            )
        elif spent >= most:
            turn.stopped_by = f"Stopped: this run has cost ${spent:.4f}, and --max-cost is {most:g}."
        if turn.stopped_by:
            self._start(self._connection.cancel(self._session_id))

    async def ask_permission(self, params: Params) -> dict[str, Any]:
        """See `TerminalClient`. Without a terminal, the call is refused with the rule that would allow it."""
        call = params["toolCall"]
        terminal = open_terminal()
        if terminal is not None:
            with terminal:
                await self._screen.end_line(self._turn)
                with self._screen.paused():
                    return chosen(await answer_at(terminal, question_text(params)), params)
        rule = params.get("_meta", {}).get("crow", {}).get("rule", "")
        self._turn.refused[rule] = None
        self._turn.refused_calls.add(call["toolCallId"])
        self._turn.was_refused_last = True
        how = f"; allow it with --allow {quoted(rule)}" if rule else ""
        await self._screen.say(f"  refused, because there is no terminal to ask at: {call['title']}{how}")
        return chosen("", params)

    async def elicit(self, params: Params) -> dict[str, Any]:  # noqa: ARG002
        """See `TerminalClient`. Not offered: a run is not interactive."""
        return {"action": "cancel"}


# The terminal.


class Screen:
    """stdout for the answer and stderr for the rest. Text for a terminal is escaped; stdout in a pipe is not."""

    def __init__(self) -> None:
        self._escapes = sys.stdout.isatty()
        self._can_spin = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_spinning = False
        self._is_paused = False
        self._at_line_start = True

    async def print_answer(self, text: str) -> None:
        """Write a part of the answer."""
        if not text:
            return
        self.clear()
        await write(sys.stdout, safe(text) if self._escapes else text)
        self._at_line_start = text.endswith("\n") or not self._escapes

    async def print_line(self, value: Mapping[str, Any]) -> None:
        """Write a JSON line to stdout."""
        self.clear()
        await write(sys.stdout, frames.encode(dict(value)).decode())

    async def say(self, line: str) -> None:
        """Write a line to stderr."""
        self.clear()
        lead = "" if self._at_line_start else "\n"
        self._at_line_start = True
        with suppress(OSError):
            await write(sys.stderr, f"{lead}{safe(line)}\n")

    async def end_line(self, turn: Turn) -> None:
        """End the last line of the answer."""
        if not turn.newlines:
            turn.newlines = 1
            await self.print_answer("\n")

    def clear(self) -> None:
        """Remove the spinner."""
        if self._is_spinning:
            self._is_spinning = False
            with suppress(OSError):
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show no spinner during the block."""
        self.clear()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def spinning(self) -> Iterator[None]:
        """Show a spinner while nothing is written; only in a terminal."""
        task = asyncio.ensure_future(self._spin()) if self._can_spin else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
            self.clear()

    async def _spin(self) -> None:
        at = 0
        while True:
            await asyncio.sleep(SPINNER_S)
            if self._at_line_start and not self._is_paused:
                at += 1
                self._is_spinning = True
                sys.stderr.write(f"\r{SPINNER[at % len(SPINNER)]} ")
                sys.stderr.flush()


async def write(file: TextIO, text: str) -> None:
    """Write and flush; in a thread if the reader may make this wait. Lone surrogates become question marks."""
    data = text.encode("utf-8", "replace")
    can_wait = len(data) > select.PIPE_BUF or not select.select([], [file], [], 0)[1]

    def write_all() -> None:
        file.flush()
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]

    if can_wait:
        await anyio.to_thread.run_sync(write_all, abandon_on_cancel=True)
    else:
        write_all()


@contextmanager
def interrupts(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` for each Ctrl-C, and for SIGTERM and SIGHUP, during the block."""
    loop, names = asyncio.get_running_loop(), ("SIGINT", "SIGTERM", "SIGHUP")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    with suppress(NotImplementedError):  # event loops on Windows take no signal handlers
        for each in signals:
            loop.add_signal_handler(each, interrupt)
    try:
        yield
    finally:
        with suppress(NotImplementedError):
            for each in signals:
                loop.remove_signal_handler(each)


def open_terminal() -> TextIO | None:
    """The terminal of the user, if stderr is one: stdin may be a pipe."""
    if not sys.stderr.isatty():
        return None
    try:
        return open(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY), "w", encoding="utf-8", errors="replace")
    except OSError:
        return None


def question_text(params: Params) -> str:
    """The question as plain lines: what would run or change, then the choices."""
    call = params["toolCall"]
    lines = [f"Allow this? {call['title']}"]
    for part in call.get("content") or ():
        match part:
            case {"type": "content", "content": {"type": "text", "text": str(text)}}:
                lines += text.splitlines()
            case {"type": "diff", "path": str(path), "newText": str(new)}:
                old = part.get("oldText") or ""
                lines += difflib.unified_diff(old.splitlines(), new.splitlines(), path, path, lineterm="", n=2)
    if len(lines) > QUESTION_LINES:
        lines[QUESTION_LINES:] = [f"... ({len(lines) - QUESTION_LINES} more lines)"]
    choices = [f"{index}) {option['name']}" for index, option in enumerate(params["options"], 1)]
    return "".join(f"{safe(line)}\n" for line in [*lines, *choices]) + "Number, or y / n: "


async def answer_at(terminal: TextIO, question: str) -> str:
    """Ask at the terminal. What was typed before the question does not count."""
    fd, loop = terminal.fileno(), asyncio.get_running_loop()
    with suppress(ImportError, OSError):
        import termios  # there is none on Windows

        termios.tcflush(fd, termios.TCIFLUSH)
    terminal.write(question)
    terminal.flush()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
        return os.read(fd, 1000).decode("utf-8", "replace").strip().lower()
    finally:
        loop.remove_reader(fd)


def chosen(answer: str, params: Params) -> dict[str, Any]:
    """The response for what the user typed; anything unclear rejects once."""
    options = params["options"]
    kind = {"y": "allow_once", "yes": "allow_once"}.get(answer, "reject_once")
    if answer.isascii() and answer.isdigit() and 1 <= int(answer) <= len(options):
        kind = options[int(answer) - 1]["kind"]
    option = next(option for option in options if option["kind"] == kind)
    return {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}


def quoted(rule: str) -> str:
    """The rule for a command line of a shell."""
    line = on_one_line(rule)
    return "'" + line.replace("'", "'\\''") + "'"
