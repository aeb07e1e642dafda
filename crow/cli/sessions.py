"""The commands of `crow sessions` that only read (list, show, search, stats), and code shared by all its commands."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from calendar import monthrange
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from crow.adapters import is_empty, open_admin, open_store, open_store_to_read
from crow.cli.loading import load
from crow.cli.output import (
    Column,
    age_text,
    in_terminal,
    print_json,
    print_markdown,
    print_matches,
    print_table,
    say,
    unique_prefixes,
)
from crow.domain.conversation import for_model
from crow.domain.entries import Assistant, CallRef, Entry, ToolResult
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.domain.receipts import receipt_in
from crow.domain.spending import Spending
from crow.domain.text import plural, safe, safe_json, title_line
from crow.export.lines import entry_line
from crow.export.redact import committed
from crow.llm.chat.encode import ChatEncoder
from crow.llm.dialect import Dialect
from crow.settings import Loaded, load_settings
from crow.store import GROUPS, Group, Scope, SessionRow, Store, UsageTotal, hits_by_session, node_of
from crow.store.admin import Admin, ListedSession, SessionFilter
from crow.store.codec import tag_name, tags_of
from crow.store.spending import add_session, add_sessions
from crow.store.transcript import Transcript, message_text, time_text

if TYPE_CHECKING:
    from crow.store.watching import Watcher

LISTED = 20


class SessionsContext(NamedTuple):
    """The objects that a command of `crow sessions` needs."""

    options: argparse.Namespace
    loaded: Loaded
    store: Store
    """Closed by the code that opened it."""
    admin: Admin

    @property
    def cwd(self) -> str | None:
        """The directory of `--cwd` as an absolute path, or None if that option is not given."""
        given: str | None = getattr(self.options, "cwd", None)
        return str(Path(given).resolve()) if given else None

    async def find_ids(self) -> list[str]:
        """Return the ids of the named sessions, without duplicates. :raises ArgumentError: a name matches no session,
        or several."""
        names = [self.options.ids] if isinstance(self.options.ids, str) else self.options.ids
        return list(dict.fromkeys([await self.admin.find(name) for name in names]))

    async def id_shortener(self) -> Callable[[str], str]:
        """Return a function that shortens the id of a session. If stdout is a terminal, the function returns a prefix
        that no other id has. Otherwise, it returns the whole id."""
        prefixes = unique_prefixes(await self.admin.ids()) if in_terminal() else {}
        return lambda name: prefixes.get(name, name)

    def report(self, values: Iterable[Mapping[str, object]], *lines: str) -> None:
        """Print `values` with --json, otherwise `lines`."""
        if self.options.json:
            print_json(values)
        else:
            for line in lines:
                say(line)


_Command: TypeAlias = Callable[[SessionsContext], Awaitable[None]]


def run_command(options: argparse.Namespace) -> None:
    """`crow sessions`: run `options.run` on the user's database. If there is no database and the command does not
    create one, only report that there are no sessions."""
    loaded = load(options)
    if getattr(options, "opens_databases", False):
        asyncio.run(options.run(options, loaded))
        return
    if is_empty(loaded) and not getattr(options, "creates_database", False):
        if getattr(options, "ids", None) or options.newest or hasattr(options, "path"):
            raise ArgumentError(f"There are no sessions yet: {loaded.paths.database} does not exist.")
        if not options.json:
            print_table((), (), empty="No sessions yet.")
        return

    async def run() -> None:
        store = await open_store(loaded)
        try:
            await options.run(SessionsContext(options, loaded, store, open_admin(store)))
        finally:
            await store.close()

    asyncio.run(run())


async def list_sessions(context: SessionsContext) -> None:
    """`crow sessions`: list the sessions, most recently used first."""
    options = context.options
    if options.newest:
        return await _print_newest(context)
    chosen = await _chosen(context)
    found = await context.admin.listed(chosen, limit=None if options.all else LISTED + 1)
    shown = found if options.all else found[:LISTED]
    receipts = await _receipts(context, shown) if options.receipts else {}
    if options.json:
        more = {key: {"receipt": receipt} for key, receipt in receipts.items()}
        return print_json({**_listed_values(one), **more.get(one.row.id, {})} for one in shown)
    shown = tuple(_with_receipt(one, receipts.get(one.row.id)) for one in shown)
    if not in_terminal():
        for one in shown:
            print_table((), (_cells_in_pipe(one), *(_cells_in_pipe(each) for each in one.subagents)), empty="")
        return None
    shorten, now_s = await context.id_shortener(), time.time()
    cells = [row for one in shown for row in _cells_on_terminal(one, shorten, now_s, most=None if options.all else 5)]
    columns = (Column("Id", "fixed"), Column("Age", "fixed"), Column("Messages", "number"), Column("Directory"))
    kind = "archived sessions" if options.archived else "sessions"
    is_limited = replace(chosen, archived=False) != SessionFilter()
    print_table((*columns, Column("Title")), cells, empty=f"No {kind} {'match' if is_limited else 'yet'}.")
    if len(found) > len(shown):
        print(f"These are the newest {LISTED}; --all lists every session.")
    return None


async def _receipts(
    context: SessionsContext, listed: Sequence[ListedSession]
) -> Mapping[str, Mapping[str, object] | None]:
    """Map the id of each session to the session's newest receipt, or to None if the session has no receipt."""
    found = {}
    for one in listed:
        entries = await context.store.entries_beyond(one.row.leaf, None, ("custom",))
        found[one.row.id] = next(
            (data for each in reversed(entries) if (data := receipt_in(each.body)) is not None), None
        )
    return found


def _with_receipt(one: ListedSession, receipt: Mapping[str, object] | None) -> ListedSession:
    """Return the session with the state of its receipt in its title."""
    if receipt is None:
        return one
    return replace(one, row=replace(one.row, title=f"[{receipt.get('state', '')}] {one.row.title or ''}"))


async def show_session(context: SessionsContext) -> None:
    """`crow sessions show`: print a transcript, the messages for the model, or the output of one call."""
    (session_id,) = await context.find_ids()
    if context.options.call is not None:
        return await _show_call(context, session_id)
    if context.options.follow and (context.options.as_model or context.options.format == "openai"):
        raise ArgumentError("--follow works only with a transcript and with --format jsonl.")
    if context.options.as_model or context.options.format == "openai":
        return await _show_context(context, session_id)
    row = await context.store.session(session_id)
    as_lines = context.options.json or context.options.format == "jsonl"
    transcript = Transcript(is_full=context.options.full)
    show: Callable[[Entry], None]
    if as_lines:
        redact = committed(context.loaded.settings.secrets())
        show = lambda entry: _print_line(entry_line(entry, redact))  # noqa: E731
    else:
        print_markdown(transcript.head(row, await context.store.shares(session_id)))
        show = lambda entry: print_markdown(transcript.feed(entry))  # noqa: E731
    last = row.newest_entry
    async for batch in context.store.history(session_id):
        for entry in batch:
            show(entry)
            last = max(last, entry.id)
    if context.options.follow:
        await _follow(context.store, session_id, last, show)
    elif not as_lines:
        for entry in await context.store.unstored_end(session_id):
            show(entry)
    return None


async def _follow(store: Store, session_id: str, last: int, show: Callable[[Entry], None]) -> None:
    """Show each entry that the session stores after the entry `last`, on whatever branch, until the user stops it or
    the session is deleted."""
    sys.stdout.flush()
    with suppress(NoSuchSession):
        async for news in cast("Watcher", store).watch(session_id, after=last):
            for entry in news.entries:
                show(entry)
            sys.stdout.flush()


def _print_line(line: str) -> None:
    """Print a line of JSON. Characters that the encoding of stdout may lack are written as JSON escapes."""
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(line if is_utf else json.dumps(json.loads(line)) + "\n")


async def _show_call(context: SessionsContext, session_id: str) -> None:
    """Print the whole output of a tool call. If stdout is not a terminal, the output is printed unchanged."""
    call = CallRef.parse(context.options.call)
    if call is None:
        raise ArgumentError(f'--call is "{context.options.call}"; expected the id of a call, such as call_12_0.')
    found = await context.store.result(session_id, call)
    if found is None or not isinstance(found.body, ToolResult):
        raise ArgumentError(f"Session {session_id} has no result of {call.call_id}.")
    text = found.body.text
    sys.stdout.write(f"{safe(text) if in_terminal() else text}\n")


async def _show_context(context: SessionsContext, session_id: str) -> None:
    """Print the messages that the next request to the model would contain before the new prompt."""
    tail = await context.store.tail(session_id)
    entries = (*tail.entries, *await context.store.unstored_end(session_id))
    messages = for_model(entries).messages
    if context.options.format == "openai" or context.options.json:
        # Crow sends an endpoint only the opaque fields that this endpoint has made. Here, assume the endpoint of the
        # newest answer.
        endpoint = next(
            (e.body.endpoint for e in reversed(entries) if isinstance(e.body, Assistant) and e.body.endpoint), ""
        )
        sent = ChatEncoder().messages(messages, endpoint=endpoint, dialect=Dialect())
        text = b"[\n" + b",\n".join(sent) + b"\n]\n"
        sys.stdout.buffer.write(safe_json(text.decode()).encode() if in_terminal() else text)
        sys.stdout.buffer.flush()
        return
    for message in messages:
        print_markdown(message_text(message))


async def search(context: SessionsContext) -> None:
    """`crow sessions search`: full-text search."""
    options = context.options
    if options.limit < 1:
        raise ArgumentError(f"--limit is {options.limit}; expected 1 or more.")
    words = " ".join(options.query)
    groups = hits_by_session(await context.store.search(words, scope=_scope(context), limit=options.limit))
    if options.json:
        return print_json(
            {
                "session": hit.session,
                "entry": hit.entry,
                "kind": hit.kind,
                "created": time_text(hit.created_ms, "seconds"),
                "snippet": hit.snippet,
            }
            for hits in groups.values()
            for hit in hits
        )
    if not in_terminal() or not groups:
        cells = [
            (one.session, show_time(one.created_ms), one.kind, one.snippet) for hits in groups.values() for one in hits
        ]
        return print_table((), cells, empty=f'No matches for "{words}".')
    shorten, now_s = await context.id_shortener(), time.time()
    for session_id, hits in groups.items():
        row = await context.store.session(session_id)
        notes = [f"subagent of {shorten(row.parent_id)}"] if row.parent_id else []
        notes += ["archived"] * row.archived
        title = " ".join([_titled(row), *(f"({note})" for note in notes)])
        lines = [
            (f"{age_text(now_s - hit.created_ms / 1000):>6}  {hit.kind:<9}", hit.snippet)
            for hit in hits
            if hit.kind != "title"  # the heading already shows the title
        ]
        print_matches((shorten(row.id), title, short_directory(row.cwd)), lines, words.split())
    return None


async def stats(context: SessionsContext) -> None:
    """`crow sessions stats`: print tokens and cost. With `--disk`, print what takes up the space in the database
    instead."""
    if context.options.disk:
        return await _disk(context)
    if context.options.breakdown or context.options.session:
        return await _breakdown(context)
    groups, scope = _groups(context.options.by), _scope(context)
    rows = await context.admin.totals(groups, scope)
    if context.options.json:
        unused = {"session", "title", "model", "day"} - {*groups, *(("title",) if "session" in groups else ())}
        return print_json({key: value for key, value in asdict(row).items() if key not in unused} for row in rows)
    shorten = await context.id_shortener()
    titles = groups == ("session",)
    columns = [Column(group.capitalize(), "fixed") for group in groups] + [Column("Title")] * titles
    (sum_of_all,) = await context.admin.totals((), scope)
    has_estimates = sum_of_all.estimated > 0
    numbers = ("Requests", "In", "Cached", "Out", "Cost $", *(("Estimated",) if has_estimates else ()))
    columns += [Column(name, "number") for name in numbers]
    cells = []
    for row in rows:
        session = shorten(row.session) if row.session else "(deleted)"
        keys = {"session": session, "model": row.model or "", "day": row.day or ""}
        cells.append([*(keys[group] for group in groups), *[row.title or ""] * titles])
        cells[-1] += _numbers(row, has_estimates=has_estimates)
    total = ["Total", *[""] * (len(columns) - len(numbers) - 1)]
    total += _numbers(sum_of_all, has_estimates=has_estimates)
    print_table(columns, cells, empty="No requests to a model yet.", total=total)
    return None


async def _breakdown(context: SessionsContext) -> None:
    """Print where tokens and time went, in one session or in all sessions that the options choose."""
    scope = _scope(context)
    spending = Spending(since_ms=scope.since_ms or 0, model=scope.model or "")
    spending.before_ms = spending.before_ms if scope.before_ms is None else scope.before_ms
    if context.options.session:
        await add_session(context.store, await context.admin.find(context.options.session), spending)
    else:
        listed = await all_listed(context, None if scope.cwd is None else (scope.cwd,))
        ids = [row.id for one in listed for row in (one.row, *(each.row for each in one.subagents))]
        await add_sessions(context.store, ids, spending)
    if context.options.json:
        return print_json([spending.as_json()])
    used = f"{spending.tokens_in:,} input and {spending.tokens_out:,} output tokens"
    print_markdown(
        f"{plural(spending.requests, 'request')}: {used}, {spending.cost:.4f} US dollars.\n\n{spending.text()}\n"
    )
    return None


async def _disk(context: SessionsContext) -> None:
    uses = await context.admin.disk_use()
    if context.options.json:
        return print_json(asdict(use) for use in uses)
    show = "{:,}".format if in_terminal() else str
    columns = (Column("What"), Column("Number", "number"), Column("Bytes", "number"))
    cells = [(use.what, "" if use.number is None else show(use.number), show(use.bytes)) for use in uses]
    print_table(columns, cells, empty="")
    return None


async def session_names(limit: int) -> list[tuple[str, str | None, str]]:
    """Return the id, alias and title of each of the `limit` newest sessions."""
    store = await open_store_to_read(load_settings({}, os.environ))
    try:
        page = await store.sessions(limit=limit)
    finally:
        await store.close()
    return [(row.id, row.alias, title_line(row.title or "", 60)) for row in page.rows]


async def all_listed(context: SessionsContext, directories: tuple[str, ...] | None = None) -> list[ListedSession]:
    """Return all sessions with their subagents, archived ones last. If `directories` is given, return only the sessions
    of these directories."""
    filters = [SessionFilter(directories=directories, archived=archived) for archived in (False, True)]
    return [one for chosen in filters for one in await context.admin.listed(chosen)]


def short_directory(cwd: str) -> str:
    """Return the text to show for a directory. If stdout is a terminal, `~` stands for the home directory in this
    text."""
    home = os.path.expanduser("~")
    is_at_home = in_terminal() and home != "/" and f"{cwd}/".startswith(f"{home}/")
    return f"~{cwd[len(home) :]}" if is_at_home else cwd


def show_time(unix_ms: int) -> str:
    """Return a Unix time in ms as text, in local time. If stdout is not a terminal, the text includes the UTC
    offset."""
    return time_text(unix_ms)[:16] if in_terminal() else time_text(unix_ms)


def parse_day(option: str, text: str, *, days_later: int = 0) -> int:
    """Convert a date, or a date with a time, to Unix ms. A date without a time stands for the start of the day, and
    `days_later` days are added to it. :raises ArgumentError: `text` is not a date, with or without a time."""
    try:
        moment = datetime.fromisoformat(text).astimezone()
        if len(text) <= len("2026-11-01"):
            moment = (datetime.fromisoformat(text) + timedelta(days=days_later)).astimezone()
        return round(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError) as error:
        raise ArgumentError(f'{option} is "{text}"; expected a date such as 2026-11-01.') from error


def parse_age(option: str, text: str, *, now: datetime, days_later: int = 0) -> int:
    """Convert an age (`12h`, `30d`, `8w`, `6m`, `2y`) or a date (see `parse_day`) to a Unix time in ms. An age is
    counted back from `now`. :raises ArgumentError: `text` is neither an age nor a date."""
    match = re.fullmatch(r"([0-9]{1,6})([hdwmy])", text)
    try:
        if match is None:
            return parse_day(option, text, days_later=days_later)
        number, unit = int(match[1]), match[2]
        if unit in "my":
            moment = _months_before(now, number * (12 if unit == "y" else 1))
        else:
            moment = now - number * {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}[unit]
        return max(0, round(moment.timestamp() * 1000))
    except (ArgumentError, ValueError, OverflowError, OSError) as error:
        raise ArgumentError(
            f'{option} is "{text}"; expected an age such as 12h, 30d, 8w, 6m or 2y, or a date such as 2026-11-01.'
        ) from error


def _months_before(now: datetime, months: int) -> datetime:
    """Return the same day of the month `months` months earlier, or the last day of that month if there is no such day.
    :raises ValueError: the result is before the first year."""
    year, month = divmod(now.year * 12 + now.month - 1 - months, 12)
    return now.replace(year=year, month=month + 1, day=min(now.day, monthrange(year, month + 1)[1]))


async def _print_newest(context: SessionsContext) -> None:
    chosen, here = await _chosen(context), context.cwd or str(Path.cwd())
    if chosen.directories is None:
        chosen = replace(chosen, directories=(here,))
    found = await context.admin.listed(chosen, limit=1)
    if not found:
        place = "matches" if chosen != SessionFilter(directories=(here,)) else f"in {here}"
        raise ArgumentError(f'No session {place}. Run "crow sessions" to list the sessions of all directories.')
    if context.options.json:
        print_json([_listed_values(found[0])])
    else:
        sys.stdout.write(f"{safe(found[0].row.id)}\n")


async def _chosen(context: SessionsContext) -> SessionFilter:
    """Return the filter that the options of `crow sessions list` describe."""
    options, scope = context.options, _scope(context)
    directories: tuple[str, ...] | None = None if scope.cwd is None else (scope.cwd,)
    if options.repo is not None:
        if scope.cwd is not None:
            raise ArgumentError("Give either --cwd (one directory) or --repo (a whole repository), not both.")
        directories = _directories_of_repository(options.repo, await context.admin.directories())
    return SessionFilter(
        directories=directories,
        model=scope.model,
        title=options.title or "",
        tags=tuple(map(tag_name, options.tag or ())),
        since_ms=scope.since_ms,
        before_ms=scope.before_ms,
        archived=options.archived,
    )


def _directories_of_repository(directory: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the directories in `known` that belong to the same Git repository as `directory`. Linked worktrees belong
    to their repository. A repository inside another repository is separate.

    :raises ArgumentError: `directory` is not in a repository.
    """
    from crow.tools.sandbox.repositories import linked_repository  # takes 20 ms, and only --repo needs it

    found: dict[Path, Path | None] = {}

    def repository(path: Path) -> Path | None:
        if path not in found:
            if os.path.lexists(path / ".git"):
                found[path] = linked_repository(path) or path / ".git"
            else:
                found[path] = repository(path.parent) if path.parent != path else None
        return found[path]

    wanted = repository(Path(os.path.realpath(directory)))
    if wanted is None:
        raise ArgumentError(
            f'--repo is "{directory}", which is not in a Git repository. For other directories, use --cwd.'
        )
    return tuple(cwd for cwd in known if repository(Path(os.path.realpath(cwd))) == wanted)


def _scope(context: SessionsContext) -> Scope:
    options, now = context.options, datetime.now().astimezone()
    return Scope(
        cwd=context.cwd,
        model=options.model,
        since_ms=parse_age("--since", options.since, now=now) if options.since else None,
        before_ms=parse_age("--until", options.until, now=now, days_later=1) if options.until else None,
    )


def _groups(text: str) -> tuple[Group, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(name in GROUPS for name in names):
        raise ArgumentError(
            f'--by is "{text}"; expected session, model or day, or several of these, such as model,day.'
        )
    return tuple(group for group in GROUPS if group in names)


def _numbers(total: UsageTotal, *, has_estimates: bool) -> Sequence[str]:
    """Return the cells of a row that contain numbers. If `has_estimates` is true, the last cell is the number of
    requests whose tokens were estimated."""
    show = "{:,}".format if in_terminal() else str
    counts = (total.requests, total.tokens_in, total.tokens_cached, total.tokens_out)
    cost = "" if total.cost is None else f"{total.cost:.4f}"
    return (*map(show, counts), cost, *((show(total.estimated),) if has_estimates else ()))


def _cells_in_pipe(one: ListedSession) -> Sequence[str]:
    row = one.row
    cells = (row.id, show_time(one.used_ms), str(one.messages), row.cwd, row.title or "")
    return (*cells, " ".join(tags_of(row.metadata)), row.parent_id or "")


def _cells_on_terminal(
    one: ListedSession, shorten: Callable[[str], str], now_s: float, *, most: int | None
) -> Iterator[Sequence[str]]:
    """Yield the row of a session, and then the rows of its subagents. If there are more than `most` subagents, yield
    only the newest ones, after a row that says how many are hidden."""

    def cells(each: ListedSession, prefix: str = "") -> Sequence[str]:
        place = "" if prefix else short_directory(each.row.cwd)
        age = age_text(now_s - each.used_ms / 1000)
        return f"{prefix}{shorten(each.row.id)}", age, str(each.messages), place, _titled(each.row)

    yield cells(one)
    hidden = max(0, len(one.subagents) - most) if most is not None else 0
    if hidden:
        yield "└ …", "", "", "", f"{plural(hidden, 'earlier subagent')}; --all shows them"
    for each in one.subagents[hidden:]:
        yield cells(each, "└ ")


def _titled(row: SessionRow) -> str:
    """Return the title and the tags of a session as one text."""
    return " ".join([row.title or "", *(f"#{tag}" for tag in tags_of(row.metadata))]).strip()


def _listed_values(one: ListedSession) -> Mapping[str, object]:
    row = one.row
    values = {
        "id": row.id,
        "title": row.title,
        "alias": row.alias,
        "principal": row.principal,
        "cwd": row.cwd,
        "node": node_of(row) or None,
        "created": time_text(row.created_ms, "seconds"),
        "used": time_text(one.used_ms, "seconds"),
        "updated": time_text(row.updated_ms, "seconds"),
        "messages": one.messages,
        "entries": row.entries,
        "compacted": one.is_compacted,
        "files_changed": row.files_changed,
        "lines_added": row.lines_added,
        "lines_removed": row.lines_removed,
        "model": row.model,
        "mode": row.mode,
        "archived": row.archived,
        "tags": tags_of(row.metadata),
    }
    return values if row.parent_id else {**values, "subagents": [_listed_values(each) for each in one.subagents]}
