"""`crow doctor` and `crow models`: what works, what does not, and what to do about it.

Strategy: `checks` tries one thing after the other, as a prompt would need them, and yields what it found; `shown` puts
findings and lists of models on a terminal or into a pipe. Runs outside of sessions, and stores nothing but what an
endpoint tells of itself.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from crow.agent.compaction.window import DEFAULT_WINDOW, LearnedWindow, learned_in
from crow.app import NOTHING_CONFIGURED, endpoint_of, hidden_keys, open_model, open_store, server_from
from crow.domain.errors import (
    ArgumentError,
    AuthError,
    CrowError,
    ModelError,
    ModelNotFound,
    ModelTimeout,
    NetworkError,
    StoreError,
)
from crow.domain.messages import Answer, SystemMessage, Text, ToolSpec, UserMessage
from crow.llm import Model, Request, TextDelta
from crow.llm.chat_completions import ChatCompletions
from crow.llm.models import Offered
from crow.llm.offline import OfflineModel
from crow.settings import OFFLINE, Loaded, Target, names_offered, target_of
from crow.store.sqlite.connection import REPAIR
from crow.store.sqlite.repair import damaged_entries, problems
from crow.store.sqlite.repair import repair as rebuild
from crow.store.sqlite.store import SqliteStore
from crow.tools import Ports, StdioServer
from crow.tools.mcp.client import ToolSettings, open_toolbox
from crow.tools.workspace import DiskWorkspace

__all__ = ["Finding", "doctor", "examine", "models", "repair", "repaired", "show_findings", "show_models"]


async def doctor(loaded: Loaded, *, commands: Sequence[str] = (), as_json: bool = False) -> int:
    """Check everything and print it; `commands` start further MCP servers to try. The exit code."""
    servers = tuple(_server(command) for command in commands)
    return await show_findings(examine(loaded, servers=servers), as_json=as_json)


async def repair(loaded: Loaded, *, as_json: bool = False) -> int:
    """Rebuild the database if it is damaged, and print what was done. The exit code.

    :raises ~crow.domain.errors.CrowError: it cannot be done.
    """
    return await show_findings(repaired(loaded.paths.database), as_json=as_json)


async def models(loaded: Loaded, *, provider: str | None = None, as_json: bool = False) -> int:
    """Print what the endpoint of the model in use offers, or that of `provider`. The exit code.

    :raises ~crow.domain.errors.CrowError: it cannot be asked.
    """
    if loaded.problem is not None:
        raise loaded.problem
    settings = loaded.settings
    if provider is not None and provider not in settings.providers:
        there = f"there are {', '.join(settings.providers)}" if settings.providers else f"add [providers.{provider}]"
        raise ArgumentError(f'No provider "{provider}" in {loaded.paths.config_file}; {there}.')
    name = next(iter(names_offered(settings)), "") if provider is None else f"{provider}/"
    if name == OFFLINE:
        show_models((Offered(name=OFFLINE),), default=OFFLINE, as_json=as_json)
        return 0
    target = target_of(name, settings)
    if target.model:
        endpoint_of(target).check()
    model = await open_model(target, None)
    try:
        show_models(await model.models(), default=target.model, as_json=as_json)
    finally:
        await model.close()
    return 0


def _server(command: str) -> StdioServer:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ArgumentError(f"--mcp {command}: {error}; quote it as in a shell.") from None
    if not words:
        raise ArgumentError('--mcp is empty; expected a command, such as "npx -y some-server".')
    return StdioServer(name=words[0].rpartition("/")[2], command=words[0], args=tuple(words[1:]))


# FROM doctor.checks: One check after the other, from the configuration file to a tool call.
#
# Strategy: each check finds one thing and says what to do when it is wrong; what a failed one makes pointless is left
# out
# and named so. The questions to the model are the smallest that show streaming, usage and a tool call.


_ANSWER_S = 180.0
_MOST_TOKENS = 2000
_SYSTEM = SystemMessage(text="You are being tested. Do exactly what is asked, in as few words as you can.")
_TOOL = ToolSpec(
    name="report_word",
    description="Reports a word.",
    input_schema={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
_CALL = 'call report_word {"word": "ready"}'
_COUNT = "say one two three four five six seven eight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found. `advice` says what to do where it is not `ok`."""

    check: str
    state: Literal["ok", "warning", "failed", "skipped"]
    words: str
    advice: str = ""


async def examine(loaded: Loaded, *, servers: Sequence[StdioServer] = ()) -> AsyncGenerator[Finding, None]:
    """Check everything, in the order in which a prompt needs it; `servers` are MCP servers to try besides."""
    yield _configuration(loaded)
    store, found = await _database(loaded)
    yield found
    try:
        async with aclosing(_model_checks(loaded, store)) as findings:
            async for found in findings:
                yield found
        async with aclosing(_tools(loaded, servers)) as findings:
            async for found in findings:
                yield found
    finally:
        if store is not None:
            await store.close()


def _configuration(loaded: Loaded) -> Finding:
    file = loaded.paths.config_file
    if loaded.problem is not None:
        return Finding(check="configuration", state="failed", words=str(loaded.problem), advice=f"Change it in {file}.")
    if not file.exists():
        return Finding(check="configuration", state="ok", words=f"{file} does not exist: the defaults hold")
    if os.name == "posix" and file.stat().st_mode & 0o077 and loaded.settings.secrets():
        words = f"{file} can be read by others, and keys are in use"
        return Finding(check="configuration", state="warning", words=words, advice=f"Run chmod 600 {file}.")
    return Finding(check="configuration", state="ok", words=f"{file} is in order")


async def _database(loaded: Loaded) -> tuple[SqliteStore | None, Finding]:
    file = loaded.paths.database
    existed = await anyio.Path(file).exists()
    store: SqliteStore | None = None
    try:
        store = await open_store(loaded)
        page = await store.sessions(cwd=None, cursor=None, limit=1)
    except CrowError as error:
        if store is not None:
            await store.close()
        return None, Finding(check="database", state="failed", words=str(error))
    if found := await store.database.read(problems):
        words = f"{file} is damaged: {found[0]}{f' (and {len(found) - 1} more)' if len(found) > 1 else ''}"
        return store, Finding(check="database", state="failed", words=words, advice=REPAIR)
    if unreadable := await store.database.read(damaged_entries):
        words = f"{_counted(len(unreadable), 'entry')} cannot be read: {unreadable[0]}"
        return store, Finding(check="database", state="warning", words=words)
    held = "made anew" if not existed else "no sessions yet" if not page.rows else "opens and can be read"
    if store.warning:
        return store, Finding(check="database", state="warning", words=store.warning)
    return store, Finding(check="database", state="ok", words=f"{file}: {held}")


async def repaired(file: Path) -> AsyncGenerator[Finding, None]:
    """Rebuild a damaged database, and say what was done."""
    done = await anyio.to_thread.run_sync(rebuild, file)
    if done.copy is not None:
        more = f" (and {len(done.problems) - 1} more)" if len(done.problems) > 1 else ""
        yield Finding(check="damage", state="warning", words=f"{done.problems[0]}{more}")
        yield Finding(check="copy", state="ok", words=f"the file as it was is {done.copy}")
    for one in done.lost:
        yield Finding(check="lost", state="warning", words=one)
    what = {
        "whole": "is whole: nothing was changed",
        "rebuilt": "has new indexes; its rows were whole",
        "recovered": "is a new file with everything that could be read",
    }[done.outcome]
    held = f"{_counted(done.sessions, 'session')}, {_counted(done.entries, 'entry')}"
    yield Finding(check="database", state="ok", words=f"{file} {what} ({held})")


async def _model_checks(loaded: Loaded, store: SqliteStore | None) -> AsyncGenerator[Finding, None]:
    if loaded.problem is not None:
        yield Finding(check="model", state="skipped", words="not tried: the configuration is wrong")
        return
    name = next(iter(names_offered(loaded.settings)), None)
    if name is None:
        advice = NOTHING_CONFIGURED.format(file=loaded.paths.config_file)
        yield Finding(check="model", state="failed", words="no model is set", advice=advice)
        return
    if name == OFFLINE:
        yield Finding(check="endpoint", state="ok", words="the built-in model needs none")
        async with aclosing(_answers(OfflineModel())) as findings:
            async for found in findings:
                yield found
        return
    target = target_of(name, loaded.settings)
    try:
        endpoint_of(target).check()
        model = await open_model(target, store)
    except CrowError as error:
        check = "key" if isinstance(error, AuthError) or target.key_command else "model"
        yield Finding(check=check, state="failed", words=str(error))
        return
    try:
        there, findings_of_endpoint = await _endpoint(model, target)
        for found in findings_of_endpoint:
            yield found
        if not there:
            yield Finding(check="answers", state="skipped", words="not tried: there is nobody to ask")
        else:
            has_key = target.key is not None or bool(target.key_command)
            learned = await _learned(store, target)
            async with aclosing(_answers(model, has_key=has_key, learned=learned)) as findings:
                async for found in findings:
                    yield found
    finally:
        await model.close()


async def _endpoint(model: ChatCompletions, target: Target) -> tuple[bool, list[Finding]]:
    """Whether it is worth to ask on, and what was found."""
    where, name = target.base_url, target.model
    try:
        names = [each.name for each in await model.models()]
    except AuthError as error:
        return False, [Finding(check="key", state="failed", words=str(error))]
    except (NetworkError, ModelTimeout) as error:
        advice = "Start the server, or set OPENAI_BASE_URL (or base_url in config.toml) to where it listens."
        return False, [Finding(check="endpoint", state="failed", words=str(error), advice=advice)]
    except ModelError as error:
        words = f"{where} answers, but lists no models: {error}"
        return True, [Finding(check="endpoint", state="warning", words=words)]
    found = [Finding(check="endpoint", state="ok", words=f"{where} answers and lists {_counted(len(names), 'model')}")]
    if name in names:
        found.append(Finding(check="model", state="ok", words=f"{name} is offered"))
        return True, found
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
    advice = f"Did you mean {' or '.join(near)}? crow models lists them all." if near else ""
    words = f"{name} is not among the models that the endpoint lists"
    found.append(Finding(check="model", state="warning", words=words, advice=advice))
    return True, found


async def _answers(
    model: Model, *, has_key: bool | None = None, learned: LearnedWindow | None = None
) -> AsyncGenerator[Finding, None]:
    """Key (None: there is nobody to give one to), streaming, usage, window, tool calling."""
    question = Request(messages=(_SYSTEM, UserMessage(parts=(Text(text=_COUNT),))), max_output_tokens=_MOST_TOKENS)
    answer, pieces, first_s, failure = await _asked(model, question)
    if answer is None:
        # Many endpoints list their models to everybody: who asks for an answer learns whether the key is good.
        check = (
            "key" if isinstance(failure, AuthError) else "model" if isinstance(failure, ModelNotFound) else "streaming"
        )
        yield Finding(check=check, state="failed", words=str(failure))
        return
    if has_key is not None:
        yield Finding(check="key", state="ok", words="the key is accepted" if has_key else "no key is needed")
    words = f"{_counted(pieces, 'piece')}, the first after {first_s:.1f} s"
    if pieces > 1 or len(answer.text) < 12:
        yield Finding(check="streaming", state="ok", words=words)
    else:
        advice = "Text will appear late. Does a proxy between here and the model hold it back?"
        yield Finding(check="streaming", state="warning", words="the answer came in one piece", advice=advice)
    yield _usage(answer)
    yield _window(model, learned)
    offer = Request(
        messages=(_SYSTEM, UserMessage(parts=(Text(text=_CALL),))), tools=(_TOOL,), max_output_tokens=_MOST_TOKENS
    )
    answer, _, _, failure = await _asked(model, offer)
    yield _tool_call(answer, failure)


def _usage(answer: Answer) -> Finding:
    usage = answer.usage
    if usage is None or usage.input_tokens is None:
        advice = "Crow estimates sizes instead; set model.context_window so that the estimate has a bound."
        return Finding(check="usage", state="warning", words="the endpoint reports no token counts", advice=advice)
    return Finding(check="usage", state="ok", words=f"{usage.input_tokens} tokens in, {usage.output_tokens} out")


def _window(model: Model, learned: LearnedWindow | None) -> Finding:
    window = model.info.context_window
    if learned is not None and not model.info.is_window_configured:
        reach = "for every session" if learned.times > 1 else "for one session only"
        words = f"{learned.tokens:,} tokens {reach}, learned on {learned.learned_on} from {learned.source}"
        advice = (
            "It causes earlier compaction, nothing else. /context forget in a session drops it; so does setting "
            "model.context_window (or that of [models.NAME])."
        )
        return Finding(check="context window", state="warning", words=words, advice=advice)
    if window is None:
        advice = "Set model.context_window (or that of [models.NAME]) to what the server was started with."
        words = f"not known: {DEFAULT_WINDOW:,} tokens are assumed"
        return Finding(check="context window", state="warning", words=words, advice=advice)
    if window < 16_000:
        advice = "Compaction will be frequent. Start the server with a larger context, 32,000 or more."
        return Finding(check="context window", state="warning", words=f"{window:,} tokens is small", advice=advice)
    source = ", as configured" if model.info.is_window_configured else ""
    return Finding(check="context window", state="ok", words=f"{window:,} tokens{source}")


async def _learned(store: SqliteStore | None, target: Target) -> LearnedWindow | None:
    """What sessions learned of the window; None too if the database cannot tell."""
    if store is None:
        return None
    try:
        return learned_in(await store.learned(target.base_url, target.model))
    except StoreError:
        return None


def _tool_call(answer: Answer | None, failure: CrowError | None) -> Finding:
    advice = (
        "Without tool calls crow can only talk. Choose a model that is made for tools, and start the server with its "
        "tool call parser (vLLM: --enable-auto-tool-choice --tool-call-parser; llama.cpp: --jinja)."
    )
    if answer is None:
        return Finding(check="tool calling", state="failed", words=str(failure), advice=advice)
    call = next(iter(answer.calls), None)
    if call is None:
        words = "the model was asked for a call, and made none"
        return Finding(check="tool calling", state="failed", words=words, advice=advice)
    if call.name != _TOOL.name or call.fault is not None:
        words = f"the model called {call.name} with {call.raw or call.arguments!r}: {call.fault or 'no such tool'}"
        return Finding(check="tool calling", state="failed", words=words[:300], advice=advice)
    return Finding(check="tool calling", state="ok", words=f"{call.name} {call.arguments}")


async def _asked(model: Model, request: Request) -> tuple[Answer | None, int, float, CrowError | None]:
    """The answer, how many pieces it came in, seconds until the first; or the failure."""
    started = time.monotonic()
    pieces, first_s = 0, 0.0
    try:
        with anyio.fail_after(_ANSWER_S):
            async with model.stream(request) as stream:
                async for delta in stream:
                    first_s = first_s or time.monotonic() - started
                    pieces += isinstance(delta, TextDelta)
                return stream.answer, pieces, first_s, None
    except TimeoutError:
        return None, 0, 0.0, ModelTimeout(f"no whole answer within {_ANSWER_S:.0f} s")
    except CrowError as error:
        return None, 0, 0.0, error


def _counted(count: int, noun: str) -> str:
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


class _NoLog:
    """What a toolbox wants of a session, where there is none."""

    async def recall(self, *, query: str | None, entry: int | None, limit: int) -> str:  # noqa: ARG002
        return ""

    async def before_change(self, call_id: str, path: Path, before: bytes | None, after: bytes) -> None:
        """Nothing is changed."""

    def current(self) -> tuple[()]:
        return ()


async def _tools(loaded: Loaded, servers: Sequence[StdioServer]) -> AsyncGenerator[Finding, None]:
    """The built-in tools and the MCP servers, each started once."""
    limit_s = loaded.settings.limits.mcp_start_timeout_s
    configured = [server_from(name, each) for name, each in loaded.settings.mcp_servers.items() if each.enabled]
    nothing, keys = _NoLog(), partial(hidden_keys, loaded)
    try:
        async with open_toolbox(
            DiskWorkspace(os.getcwd(), (), keys=keys),
            Ports(log=nothing, plan=nothing),
            [*configured, *servers],
            ToolSettings(start_timeout_s=limit_s, keys=keys),
        ) as toolbox:
            await toolbox.wait_ready(limit_s + 1)
            found = [Finding(check="tools", state="ok", words=f"{len(toolbox.specs())} tools can be offered")]
            for server in toolbox.servers():
                check = f"MCP server {server.name}"
                if server.state == "ready":
                    found.append(Finding(check=check, state="ok", words=f"{server.tools} tools"))
                else:
                    advice = "Run its command by hand; is it installed, and does it want variables or a network?"
                    words = server.detail or "it does not answer"
                    found.append(Finding(check=check, state="failed", words=words, advice=advice))
    except CrowError as error:
        found = [Finding(check="tools", state="failed", words=str(error))]
    for each in found:
        yield each


# FROM doctor.shown: Findings and lists of models, as a person or a program reads them: colours on a terminal, plain
# lines in a pipe.


_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


async def show_findings(findings: AsyncIterator[Finding], *, as_json: bool) -> int:
    """Print each as it is found; the exit code: 1 if any check failed."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    failed = False
    async for finding in findings:
        failed = failed or finding.state == "failed"
        if as_json:
            sys.stdout.write(json.dumps(asdict(finding), ensure_ascii=False) + "\n")
            continue
        line = Text()
        line.append(f"{finding.state:<8} ", style=_COLOURS[finding.state])
        line.append(f"{finding.check:<15} ", style="bold")
        line.append(finding.words)
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<24} {finding.advice}"), soft_wrap=True)
    return 1 if failed else 0


def show_models(offered: Sequence[Offered], *, default: str, as_json: bool) -> None:
    """Print what an endpoint offers; `default` is the model in use there."""
    if as_json:
        for each in offered:
            known = {key: value for key, value in asdict(each).items() if value is not None}
            sys.stdout.write(json.dumps(known, ensure_ascii=False) + "\n")
    elif sys.stdout.isatty():
        _show_table(offered, default)
    else:
        for each in offered:
            sys.stdout.write("\t".join(_row(each)) + "\n")


def _show_table(offered: Sequence[Offered], default: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("Model", "Window", "USD per million in", "out"):
        table.add_column(title, justify="left" if title == "Model" else "right", overflow="fold")
    for each in offered:
        table.add_row(*map(Text, _row(each)), style="bold" if each.name == default else "")
    Console().print(table)


def _row(offered: Offered) -> tuple[str, str, str, str]:
    """Name, window, price in, price out."""
    window = "" if offered.context_window is None else str(offered.context_window)
    price_in = "" if offered.input_price is None else f"{offered.input_price:g}"
    price_out = "" if offered.output_price is None else f"{offered.output_price:g}"
    return offered.name, window, price_in, price_out
