"""What a command on sessions works with: its options, the settings, the open database."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from crow.cli.output import Column, in_terminal, safe, show, show_json, time_text, unique_prefixes
from crow.domain.errors import ArgumentError

if TYPE_CHECKING:
    from crow.settings import Loaded
    from crow.store import Scope, SessionRow
    from crow.store.sqlite.admin import SessionAdmin
    from crow.store.sqlite.search import Group, UsageTotal
    from crow.store.sqlite.store import SqliteStore

__all__ = [
    "LISTED",
    "Act",
    "OpenStore",
    "ago_ms",
    "day_ms",
    "directory",
    "list_sessions",
    "search",
    "shortener",
    "show_session",
    "stats",
    "when",
]


class OpenStore(NamedTuple):
    """Closed by whoever opened it."""

    options: argparse.Namespace
    loaded: Loaded
    store: SqliteStore
    upkeep: SessionAdmin

    @property
    def cwd(self) -> str | None:
        """The directory that `--cwd` names, absolute; None if it was not given."""
        given: str | None = getattr(self.options, "cwd", None)
        return str(Path(given).resolve()) if given else None

    async def found(self) -> list[str]:
        """The ids of the sessions that the command line names, each once.

        :raises ~crow.domain.errors.ArgumentError: one names none, or several.
        """
        return list(dict.fromkeys([await self.upkeep.find(name) for name in self.options.ids]))


Act: TypeAlias = Callable[[OpenStore], Awaitable[None]]


# FROM cli.looking: Commands on sessions that only read: list, show, search, stats.


LISTED = 20


async def list_sessions(opened: OpenStore) -> None:
    """`crow sessions`: newest first."""
    options, cwd = opened.options, opened.cwd
    if options.newest:
        return await _name_newest(opened, cwd)
    rows: list[SessionRow] = []
    cursor: str | None = None
    while True:
        page = await opened.store.sessions(
            cwd=cwd, cursor=cursor, limit=200 if options.all else LISTED, archived=options.archived
        )
        rows.extend(page.rows)
        cursor = page.cursor
        if cursor is None or not options.all:
            break
    messages = await opened.store.count_messages([row.id for row in rows])
    if options.json:
        return show_json(_as_json(row, messages[row.id]) for row in rows)
    shorten = await shortener(opened)
    show(
        (
            Column(name="Id", style="fixed"),
            Column(name="Updated", style="fixed"),
            Column(name="Messages", style="right"),
            Column(name="Directory", style="fold"),
            Column(name="Title"),
        ),
        [
            (shorten(row.id), when(row.updated_ms), str(messages[row.id]), directory(row.cwd), row.title or "")
            for row in rows
        ],
        empty=f"No {'archived ' if options.archived else ''}sessions{f' in {cwd}' if cwd else ''} yet.",
    )
    if in_terminal() and cursor is not None:
        print(f"The newest {LISTED}; --all lists every one.")
    return None


async def show_session(opened: OpenStore) -> None:
    """`crow sessions show`: a transcript."""
    from crow.cli.transcript import Transcript, print_markdown

    (session_id,) = await opened.found()
    row = await opened.store.session(session_id)
    if opened.options.json:
        from crow.store.codec import encode

        async for batch in opened.store.history(session_id):
            for entry in batch:
                body = encode(entry.body)
                text = body.text if body.spilled is None else body.blobs[body.spilled].decode()
                made = time_text(entry.created_ms, "seconds")
                head = {"id": entry.id, "turn": entry.turn, "kind": body.kind, "model": entry.model, "created": made}
                show_json([{**head, "body": json.loads(text or "{}")}])
        return
    transcript = Transcript(is_full=opened.options.full)
    print_markdown(transcript.head(row))
    async for batch in opened.store.history(session_id):
        for entry in batch:
            print_markdown(transcript.feed(entry))


async def search(opened: OpenStore) -> None:
    """`crow sessions search`: what was said."""
    options = opened.options
    if options.limit < 1:
        raise ArgumentError(f"--limit is {options.limit}; expected 1 or more.")
    words = " ".join(options.query)
    hits = await opened.store.search(words, scope=scope_of(opened), limit=options.limit)
    if options.json:
        return show_json(
            {
                "session": hit.session,
                "entry": hit.entry,
                "kind": hit.kind,
                "created": time_text(hit.created_ms, "seconds"),
                "snippet": hit.snippet,
            }
            for hit in hits
        )
    shorten = await shortener(opened)
    show(
        (
            Column(name="Id", style="fixed"),
            Column(name="When", style="fixed"),
            Column(name="Who", style="fixed"),
            Column(name="Text", style="fold"),
        ),
        [(shorten(hit.session), when(hit.created_ms), hit.kind, hit.snippet) for hit in hits],
        empty=f"Nothing that was said holds {words}.",
    )
    return None


async def stats(opened: OpenStore) -> None:
    """`crow sessions stats`: tokens and cost."""
    by, scope = _groups(opened.options.by), scope_of(opened)
    rows = await opened.upkeep.totals(by, scope)
    if opened.options.json:
        return show_json(_total_as_json(row, by) for row in rows)
    shorten = await shortener(opened)
    columns = [Column(name=name.capitalize(), style="fixed") for name in by]
    if by == ("session",):
        columns.append(Column(name="Title"))
    columns += [Column(name=name, style="right") for name in ("Requests", "In", "Cached", "Out", "Cost $")]
    (whole,) = await opened.upkeep.totals((), scope)
    total = ["Total", *[""] * (len(columns) - 6), *_numbers(whole)]
    cells = []
    for row in rows:
        keys = {
            "session": shorten(row.session) if row.session else "(deleted)",
            "model": row.model or "",
            "day": row.day or "",
        }
        title = [row.title or ""] if by == ("session",) else []
        cells.append([*(keys[name] for name in by), *title, *_numbers(row)])
    show(columns, cells, empty="No model was asked yet.", total=total)
    return None


def scope_of(opened: OpenStore) -> Scope:
    """What `--cwd`, `--model`, `--since` and `--until` leave."""
    from crow.store import Scope

    options = opened.options
    return Scope(
        cwd=opened.cwd,
        model=options.model,
        since_ms=day_ms("--since", options.since) if options.since else None,
        before_ms=day_ms("--until", options.until, days_later=1) if options.until else None,
    )


async def shortener(opened: OpenStore) -> Callable[[str], str]:
    """How an id is shown: to a person as much of it as names the session, to a program all of it."""
    if not in_terminal():
        return lambda name: name
    prefixes = unique_prefixes(await opened.upkeep.ids())
    return lambda name: prefixes.get(name, name)


def when(unix_ms: int) -> str:
    """To a person without the offset, which is their own."""
    return time_text(unix_ms)[:16] if in_terminal() else time_text(unix_ms)


def directory(cwd: str) -> str:
    """To a person with `~` for their home."""
    home = os.path.expanduser("~")
    return f"~{cwd[len(home) :]}" if in_terminal() and home != "/" and f"{cwd}/".startswith(f"{home}/") else cwd


async def _name_newest(opened: OpenStore, cwd: str | None) -> None:
    from pathlib import Path

    directory = cwd or str(Path.cwd())
    page = await opened.store.sessions(cwd=directory, limit=1)
    if not page.rows:
        raise ArgumentError(f'No session in {directory}. Run "crow sessions" to list those of other directories.')
    if opened.options.json:
        (row,) = page.rows
        show_json([_as_json(row, (await opened.store.count_messages([row.id]))[row.id])])
    else:
        sys.stdout.write(f"{safe(page.rows[0].id)}\n")


def _groups(text: str) -> tuple[Group, ...]:
    from crow.store.sqlite.search import GROUPS

    names = [name.strip() for name in text.split(",")]
    if not all(name in GROUPS for name in names):
        raise ArgumentError(f'--by is "{text}"; expected session, model or day, or some of them: model,day.')
    return tuple(group for group in GROUPS if group in names)


def _numbers(total: UsageTotal) -> list[str]:
    cost = "" if total.cost is None else f"{total.cost:.4f}"
    numbers = (total.requests, total.tokens_in, total.tokens_cached, total.tokens_out)
    return [*(f"{number:,}" if in_terminal() else str(number) for number in numbers), cost]


def _total_as_json(total: UsageTotal, by: Sequence[Group]) -> Mapping[str, object]:
    keys: dict[str, object] = {name: getattr(total, name) for name in by}
    if "session" in by:
        keys["title"] = total.title
    return {
        **keys,
        "requests": total.requests,
        "tokens_in": total.tokens_in,
        "tokens_out": total.tokens_out,
        "tokens_cached": total.tokens_cached,
        "cost": total.cost,
    }


def _as_json(row: SessionRow, messages: int) -> Mapping[str, object]:
    return {
        "id": row.id,
        "title": row.title,
        "alias": row.alias,
        "cwd": row.cwd,
        "updated": time_text(row.updated_ms, "seconds"),
        "messages": messages,
        "entries": row.entries,
        "model": row.model,
        "mode": row.mode,
        "archived": row.archived,
    }


# FROM cli.dates: Times as a person types them: a day, a time, or how long ago.
#
# Strategy: everything becomes Unix milliseconds, by the local clock. A day stands for its beginning.


_DAYS = {"d": 1, "w": 7}
_AGE = re.compile(r"([0-9]{1,6})(h|d|w|m|y)")


def day_ms(option: str, text: str, *, days_later: int = 0) -> int:
    """When the day or time `text` begins, or so many days after a bare day does.

    :raises ArgumentError: it is none.
    """
    try:
        moment = datetime.fromisoformat(text).astimezone()
        if len(text) <= len("2026-11-01"):
            moment = (datetime.fromisoformat(text) + timedelta(days=days_later)).astimezone()
        return round(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError) as error:
        raise ArgumentError(f'{option} is "{text}"; expected a date such as 2026-11-01.') from error


def ago_ms(option: str, text: str, *, now: datetime) -> int:
    """The time before which things are older than `text`: `12h`, `30d`, `8w`, `6m`, `2y`, or a date.

    :raises ArgumentError: it is none.
    """
    match = _AGE.fullmatch(text)
    try:
        if match is None:
            return day_ms(option, text)
        number, unit = int(match[1]), match[2]
        if unit == "h":
            moment = now - timedelta(hours=number)
        elif unit in _DAYS:
            moment = now - timedelta(days=number * _DAYS[unit])
        else:
            moment = _months_before(now, number * (12 if unit == "y" else 1))
        return max(0, round(moment.timestamp() * 1000))
    except (ArgumentError, ValueError, OverflowError, OSError) as error:
        raise ArgumentError(
            f'{option} is "{text}"; expected an age such as 12h, 30d, 8w, 6m or 2y, or a date such as 2026-11-01.'
        ) from error


def _months_before(now: datetime, months: int) -> datetime:
    """The same day of an earlier month, or its last one."""
    year, month = divmod(now.year * 12 + now.month - 1 - months, 12)
    for day in range(now.day, now.day - 4, -1):
        try:
            return now.replace(year=year, month=month + 1, day=day)
        except ValueError:
            continue
    raise ValueError("before the first year")
