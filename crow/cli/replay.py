"""`crow replay`: builds the requests of a stored session again, and compares them with what was sent."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import anyio
import anyio.to_thread

from crow.adapters import (
    endpoint_of,
    open_admin,
    open_model,
    open_scratch_toolbox,
    open_store_at,
    open_store_to_read,
    scratch_workspace,
)
from crow.agent.compaction.budget import CompactionPolicy
from crow.cli.loading import load
from crow.cli.output import Column, print_json, print_table, say
from crow.domain.entries import Assistant
from crow.domain.errors import ArgumentError, ModelError
from crow.domain.text import plural, safe
from crow.llm import Model
from crow.llm.sent import extra_digest
from crow.replay.case import import_case, with_subagents
from crow.replay.edits import replayed_edits
from crow.replay.requests import LoggedRequest, Rebuilder, Replayed, logged_requests, request_of
from crow.replay.turns import replayed_requests
from crow.replay.whatif import Change, WouldSend, what_if
from crow.settings import Loaded
from crow.settings.endpoints import names_offered, target_of
from crow.settings.values import CompactionSettings
from crow.store import Store
from crow.store.admin import Admin
from crow.version import __version__

_COMPACTION = "compaction."
_SETTABLE = ("auto", "threshold", "window", "keep_tokens", "target")
_SHOWN = 20
_MAX_PROMPT_BYTES = 4 * 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `crow replay`."""
    parser.add_argument(
        "session",
        metavar="SESSION|FILE",
        help="a session, as for crow sessions show, or a file that crow sessions export wrote",
    )
    changes = parser.add_argument_group("show what would have been sent instead; no model is asked")
    changes.add_argument("--with", dest="prompt", metavar="FILE", help="a text file with another system message")
    changes.add_argument("--model", metavar="NAME", help="another model: its window, prices and limits")
    words = "another setting of compaction, such as compaction.threshold=0.6; may be given several times"
    changes.add_argument("--set", dest="sets", metavar="KEY=VALUE", action="append", default=[], help=words)
    live = parser.add_argument_group("ask a model")
    live.add_argument(
        "--live",
        action="store_true",
        help="send the requests to --model, or to the default model, and compare the answers; no tool runs",
    )
    live.add_argument("--from", dest="turn", metavar="TURN", type=int, default=1, help="begin with this turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run_replay(options: argparse.Namespace) -> int:
    """Replay a session. The exit code is 1 if a request differs or would be refused."""
    return asyncio.run(_run(options, load(options)))


async def _run(options: argparse.Namespace, loaded: Loaded) -> int:
    if options.live and (options.prompt or options.sets):
        raise ArgumentError("--live sends the requests of the log unchanged; leave out --with and --set, or --live.")
    if options.turn != 1 and not options.live:
        raise ArgumentError("--from works only with --live.")
    async with AsyncExitStack() as opened:
        store, sessions, is_from_file = await _open(options.session, loaded, opened)
        if options.live:
            async with _model(loaded, options.model) as model:
                return await _live(store, sessions[0], model, options)
        if options.prompt or options.model or options.sets:
            return await _compare_change(
                store, sessions[0], await _change(options, loaded, store, sessions[0]), options
            )
        return await _compare(store, sessions, Rebuilder(known_extras(loaded), is_from_file=is_from_file), options)


async def _open(name: str, loaded: Loaded, opened: AsyncExitStack) -> tuple[Store, list[str], bool]:
    """Return a store with the session `name` or the content of the file `name`, the ids of the session and its
    subagents, and whether they come from a file."""
    path = await anyio.to_thread.run_sync(_file_named, name)
    if path is not None:
        store, admin, _ = await opened.enter_async_context(scratch(loaded))
        sessions = await import_case(admin, path)
        if not sessions:
            raise ArgumentError(f"{path} contains no session.")
        return store, sessions, True
    store = await open_store_to_read(loaded)
    opened.push_async_callback(store.close)
    return store, await with_subagents(store, await open_admin(store).find(name)), False


def _file_named(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path if path.is_file() else None


@asynccontextmanager
async def scratch(loaded: Loaded) -> AsyncIterator[tuple[Store, Admin, Path]]:
    """Open an empty database in a temporary directory that only the user can read. Yield also this directory, which is
    removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="crow-replay-") as folder:
        store = await open_store_at(loaded, str(Path(folder) / "replay.db"))
        try:
            yield store, open_admin(store), Path(folder)
        finally:
            await store.close()


def known_extras(loaded: Loaded) -> Mapping[str, Mapping[str, object]]:
    """Map the digests of all `extra_body` in the settings to their members."""
    settings = loaded.settings
    found = [endpoint_of(target_of(name, settings)).extra_body for name in names_offered(settings)]
    return {extra_digest(extra): extra for extra in found if extra}


async def _compare(store: Store, sessions: list[str], rebuilder: Rebuilder, options: argparse.Namespace) -> int:
    """Print which requests and edits are identical, and the first difference."""
    found: list[Replayed] = []
    with tempfile.TemporaryDirectory(prefix="crow-replay-") as folder:
        place = scratch_workspace(Path(folder))
        runs = [replayed_requests(store, session, rebuilder, place) for session in sessions]
        if not rebuilder.is_from_file:  # masking has changed the files in a case
            runs += [replayed_edits(store, session, open_scratch_toolbox) for session in sessions]
        for run in runs:
            async for each in run:
                found.append(each)
                if options.json:
                    print_json([asdict(each)])
    if not options.json:
        _print_requests(sessions, [each for each in found if not each.tool])
        _print_edits([each for each in found if each.tool])
    return 1 if any(each.outcome == "different" for each in found) else 0


def _print_edits(edits: list[Replayed]) -> None:
    if edits:
        say(f"edits: {sum(each.outcome == 'identical' for each in edits):,} of {len(edits):,} identical, made again")
    for each in [edit for edit in edits if edit.words][:_SHOWN]:
        say(f"  {each.tool} in turn {each.turn}, entry {each.entry}: {safe(each.words)}")


def _print_requests(sessions: list[str], found: list[Replayed]) -> None:
    subagents = f" and {plural(len(sessions) - 1, 'subagent')}" if len(sessions) > 1 else ""
    turns = plural(len({(each.session, each.turn) for each in found}), "turn")
    say(f"{sessions[0]}{subagents}: {plural(len(found), 'request')} of {turns}, run again by crow {__version__}")
    versions = sorted({each.version[:40] for each in found if each.version})[:_SHOWN]
    sent_by = f", sent by crow {' and '.join(versions)}" if versions else ""
    sizes = [each.size for each in found if each.outcome == "identical"]
    say(f"identical: {len(sizes):,} ({sum(sizes):,} bytes){sent_by}")
    if not found:
        say("The session has no requests: it was imported, or it has no answers yet.")
    for words, count in Counter(each.words for each in found if each.outcome == "unproven").items():
        say(f"not compared: {count:,}: {safe(words)}")
    different = [each for each in found if each.outcome == "different"]
    for first in different[:1]:
        say(f"different: {len(different):,}. The first is the request of turn {first.turn}, entry {first.entry}:")
        say(f"  {safe(first.words)}")


async def _change(options: argparse.Namespace, loaded: Loaded, store: Store, session: str) -> Change:
    """Return the change that the options describe."""
    settings = loaded.settings
    name = options.model or (await store.session(session)).model or settings.model.name or ""
    system = await anyio.to_thread.run_sync(_read_prompt, options.prompt) if options.prompt else None
    policy = _policy(settings.compaction, options.sets)
    return Change(info=endpoint_of(target_of(name, settings)).info, policy=policy, system=system)


def _read_prompt(name: str) -> str:
    try:
        with open(name, "rb") as file:
            data = file.read(_MAX_PROMPT_BYTES + 1)
        if len(data) > _MAX_PROMPT_BYTES:
            raise ArgumentError(f"{name} is larger than {_MAX_PROMPT_BYTES:,} bytes; expected a system message.")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ArgumentError(f"{name} cannot be read: {why}.") from error


def _policy(settings: CompactionSettings, sets: list[str]) -> CompactionPolicy:
    """Return the settings of compaction, with the changes of `--set`."""
    for each in sets:
        key, equals, text = each.partition("=")
        name = key.removeprefix(_COMPACTION)
        if not equals or not key.startswith(_COMPACTION) or name not in _SETTABLE:
            known = ", ".join(_COMPACTION + name for name in _SETTABLE)
            raise ArgumentError(f'--set is "{each}"; expected KEY=VALUE with one of the keys {known}.')
        try:
            settings = CompactionSettings(**{**settings.model_dump(), name: json.loads(text)})
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f'--set is "{each}"; {text} is not a valid value of {key}.') from error
    return CompactionPolicy(**{name: getattr(settings, name) for name in _SETTABLE})


async def _compare_change(store: Store, session: str, change: Change, options: argparse.Namespace) -> int:
    """Print what would have been sent."""
    found = [each async for each in what_if(store, session, change)]
    if options.json:
        print_json(asdict(each) for each in found)
    else:
        _print_change(found, change)
    return 1 if any(each.refused for each in found) else 0


def _print_change(found: list[WouldSend], change: Change) -> None:
    events = [each for each in found if each.compaction or each.refused]
    columns = (Column("Turn", "number"), Column("Entry", "number"), Column("Tokens", "number"), Column("What"))
    cells = [(str(one.turn), str(one.entry), f"{one.tokens:,}", one.compaction or one.refused) for one in events]
    if cells:
        print_table(columns, cells[:_SHOWN], empty="")
    if len(cells) > _SHOWN:
        say(f"and {len(cells) - _SHOWN:,} more; --json lists all")
    was = sum(one.was_tokens or 0 for one in found)
    now, cached = sum(one.tokens for one in found), sum(one.cached for one in found)
    model = change.info.name or "an unknown model"
    say(f"{plural(len(found), 'request')} to {model}, with the answers in the log (estimated):")
    say(f"input: {now:,} tokens, {cached:,} of them as in the request before; the log has {was:,}")
    summaries = sum(one.compaction == "summary" for one in found)
    say(
        f"compactions: {summaries} (summary), {sum(bool(one.compaction) for one in found) - summaries} (hidden outputs)"
    )
    say(f"refused: {sum(bool(one.refused) for one in found)}")
    costs = [one.cost for one in found if one.cost is not None]
    paid = sum(one.was_cost or 0 for one in found)
    say(f"cost: ${sum(costs):.4f}; the log has ${paid:.4f}" if costs else "cost: unknown; the settings have no prices")


@asynccontextmanager
async def _model(loaded: Loaded, name: str | None) -> AsyncIterator[Model]:
    name = name or loaded.settings.model.name or ""
    model = await open_model(target_of(name, loaded.settings), None)
    try:
        model.check()
        yield model
    finally:
        await model.close()


async def _live(store: Store, session: str, model: Model, options: argparse.Namespace) -> int:
    """Send the requests of the session's path to a model. Each request is the one in the log, whatever the model
    answered to earlier requests."""
    differs = False
    async for logged in logged_requests(store, session):
        body = logged.entry.body
        if not isinstance(body, Assistant) or logged.entry.turn < options.turn:
            continue
        words = await _ask(model, logged, body)
        differs = differs or words != "same"
        values = {"turn": logged.entry.turn, "entry": logged.entry.id, "result": words}
        if options.json:
            print_json([values])
        else:
            say(f"turn {logged.entry.turn}, entry {logged.entry.id}: {safe(words)}")
    return 1 if differs else 0


async def _ask(model: Model, logged: LoggedRequest, body: Assistant) -> str:
    """Send one request, and say how the answer differs from the one in the log."""
    try:
        async with model.stream(request_of(logged, logged.sent)) as stream:
            async for _ in stream:
                pass
            answer = stream.answer
    except ModelError as error:
        return f"refused: {error}"
    calls = [(call.name, call.arguments) for call in answer.calls]
    logged_calls = [(call.name, call.arguments) for call in body.calls]
    if (answer.text, calls) == (body.text, logged_calls):
        return "same"
    now, then = ([name for name, _ in each] for each in (calls, logged_calls))
    called = f"calls {', '.join(now) or 'no tool'}, in the log {', '.join(then) or 'no tool'}"
    return f"{called}; {len(answer.text):,} characters of text, in the log {len(body.text):,}"
