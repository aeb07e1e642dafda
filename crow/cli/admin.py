"""The commands of `crow sessions` that write files or change the database: export, import, archive, rename, tag, delete
and others."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from crow.adapters import export_redactor, open_admin, open_links, open_store_at, trace_redactor
from crow.cli.output import Column, in_terminal, print_json, print_table, say
from crow.cli.publish import publish
from crow.cli.replay import known_extras, scratch
from crow.cli.sessions import SessionsContext, all_listed, parse_age, short_directory, show_time
from crow.domain.errors import ArgumentError
from crow.domain.text import plural, safe, safe_json
from crow.export.links import DEFAULT_AGE, PageLink
from crow.export.page import session_page
from crow.export.redact import Redactor
from crow.replay.case import with_subagents, write_case
from crow.replay.requests import Rebuilder
from crow.settings import Loaded
from crow.store import SessionChanges
from crow.store.codec import new_tag, tag_name, tags_of, tags_patch
from crow.store.copying import CopiedConversation, SessionCopy
from crow.store.files import move_to_new
from crow.store.portable import clean_title
from crow.store.principals import check_principal
from crow.store.transcript import Transcript, time_text
from crow.telemetry.otlp import otlp_lines
from crow.terminal.browser import open_page

_MEGABYTE = 1024 * 1024


async def export(context: SessionsContext) -> None:
    """`crow sessions export`: write sessions as complete JSONL, as Markdown or HTML for reading, as a case file,
    or as traces."""
    options = context.options
    if bool(options.ids) == options.all:
        raise ArgumentError("Name the sessions to export, or give --all.")
    ids = None if options.all else await context.find_ids()
    lines: AsyncIterator[bytes]
    if options.format == "jsonl":
        if options.redact:
            raise ArgumentError(
                "--redact does not work with --format jsonl, because jsonl is always complete; use html or markdown."
            )
        lines = context.admin.export(ids)
    elif options.format == "otlp":
        lines = _otlp(context, ids)
    elif options.format == "markdown":
        lines = _markdown(context, ids)
    else:
        if ids is None or len(ids) != 1:
            raise ArgumentError(f"--format {options.format} writes one session; name one SESSION.")
        lines = _case(context, ids[0]) if options.format == "case" else await _html(context, ids[0])
    if options.output is None:
        escape = None if not in_terminal() else safe_json if options.format in ("jsonl", "case", "otlp") else safe
        decoder = codecs.getincrementaldecoder("utf-8")()  # a piece of a page can end inside a character
        async for line in lines:
            sys.stdout.buffer.write(line if escape is None else escape(decoder.decode(line)).encode())
        sys.stdout.buffer.flush()
        return
    path, size = Path(options.output), 0
    with _new_file(path) as write:
        async for line in lines:
            size += write(line)
    context.report([{"path": str(path), "bytes": size}], f"Wrote {path} ({size:,} bytes).")


async def view(context: SessionsContext) -> None:
    """`crow sessions view`: write a session as HTML to a private directory, and open it in the browser."""
    (session_id,) = await context.find_ids()
    path = await _write_page(context, session_id, None)
    is_open = await asyncio.to_thread(open_page, path.as_uri())
    hints = [] if is_open else ["No browser could be opened; open this file yourself."]
    context.report([{"path": str(path), "opened": is_open}], str(path), *hints)


async def _write_page(context: SessionsContext, session_id: str, path: Path | None) -> Path:
    """Write the page of a session to a new file, by default in a private directory. Return its path."""
    if path is None:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", session_id)[:80].lstrip(".-") or "session"
        path = Path(tempfile.mkdtemp(prefix="crow-")) / f"{name}.html"
    with _new_file(path) as write:
        async for piece in await _html(context, session_id):
            write(piece)
    return path


async def set_archived(context: SessionsContext, *, archived: bool) -> None:
    """`crow sessions archive` and `crow sessions unarchive`."""
    for name in await context.find_ids():
        row = await context.store.update_session(name, SessionChanges(archived=archived))
        values = {"id": row.id, "title": row.title, "archived": row.archived}
        context.report([values], f"{_name(row.id, row.title)}: {'archived' if archived else 'back on the list'}")


async def share(context: SessionsContext) -> None:
    """`crow sessions share` and `crow sessions unshare`."""
    (session_id,) = await context.find_ids()
    if context.options.is_page:
        return await _share_page(context, session_id)
    if context.options.principal is None:
        raise ArgumentError("Name the PRINCIPAL with whom to share the session, or give --html.")
    principal, access = check_principal(context.options.principal), context.options.access
    if access is not None and (given := _page_options(context.options)):
        raise ArgumentError(f"{given[0]} works only with --html, because {principal} sees the session itself.")
    had = {one.principal: one.access for one in await context.store.shares(session_id)}
    if access is None and principal not in had:
        with_whom = ", ".join(had) or "nobody"
        raise ArgumentError(f'Session {session_id} is not shared with "{principal}"; it is shared with {with_whom}.')
    await context.store.share_session(session_id, principal, access)
    row = await context.store.session(session_id)
    words = f"no longer shared with {principal}" if access is None else f"{principal} may {access} it"
    values = {"id": row.id, "title": row.title, "principal": principal, "access": access}
    context.report([values], f"{_name(row.id, row.title)}: {words}")
    return None


def _page_options(options: argparse.Namespace) -> list[str]:
    """Return the options of `crow sessions share` that were given but apply only to a page."""
    values = {
        "--output": options.output is not None,
        "--link": options.link,
        "--expires": options.expires is not None,
        "--redact": options.redact,
    }
    return [name for name, is_given in values.items() if is_given]


async def _share_page(context: SessionsContext, session_id: str) -> None:
    """`crow sessions share --html`: write a page, and publish it if a command is configured. With --link, let `crow
    serve` show it instead."""
    options, settings = context.options, context.loaded.settings
    if options.principal is not None:
        raise ArgumentError(f'--html makes a page for anyone; leave out the principal "{options.principal}".')
    if options.link:
        if options.output is not None:
            raise ArgumentError("--link keeps the page in crow's own directory; leave out --output.")
        link, url = await open_links(lambda: context.loaded).add(
            context.store, session_id, age=options.expires or DEFAULT_AGE, is_strict=options.redact
        )
        hint = (
            f"crow serve shows it until {time_text(link.expires_ms)}; crow sessions links --revoke {link.id} ends it."
        )
        return context.report([{**_link_values(link), "url": url}], url, hint)
    if options.expires is not None:
        raise ArgumentError("--expires works only with --link, because crow cannot delete a file or a published page.")
    path = await _write_page(context, session_id, None if options.output is None else Path(options.output))
    values: dict[str, object] = {"path": str(path), "bytes": path.stat().st_size}
    if settings.share.command is None:
        return context.report([values], str(path))
    url = await asyncio.to_thread(publish, settings.share.command, path, context.loaded.paths.config_file.parent)
    return context.report([{**values, "url": url}], str(path), url)


async def list_links(context: SessionsContext) -> None:
    """`crow sessions links`: list the links to pages that `crow serve` shows, or revoke some."""
    links = open_links(lambda: context.loaded)
    if context.options.revoke:
        for name in dict.fromkeys(context.options.revoke):
            link = await links.revoke(name)
            context.report(
                [{**_link_values(link), "revoked": True}], f"{link.id}: revoked ({_name(link.session, None)})"
            )
        return None
    found = await links.list()
    if context.options.json:
        return print_json(map(_link_values, found))
    cells = [(one.id, one.session, time_text(one.expires_ms), one.principal or "", one.title) for one in found]
    columns = (Column("Link", "fixed"), Column("Session", "fixed"), Column("Expires", "fixed"), Column("Owner"))
    print_table(
        (*columns, Column("Title")), cells, empty="No links. crow sessions share SESSION --html --link makes one."
    )
    return None


def _link_values(link: PageLink) -> dict[str, object]:
    times = {"created": time_text(link.created_ms, "seconds"), "expires": time_text(link.expires_ms, "seconds")}
    return {"id": link.id, "session": link.session, "title": link.title, "principal": link.principal, **times}


async def rename(context: SessionsContext) -> None:
    """`crow sessions rename`: set the title."""
    (session_id,) = await context.find_ids()
    title = clean_title(" ".join(context.options.title))
    if title is None:
        raise ArgumentError("The new title is empty; expected at least one visible character.")
    row = await context.store.update_session(session_id, SessionChanges(title=title, title_by_user=True))
    context.report([{"id": row.id, "title": row.title}], _name(row.id, row.title))


async def tag(context: SessionsContext) -> None:
    """`crow sessions tag`: add and remove tags of a session, or show its tags. Without a session, list the tags of all
    sessions."""
    options = context.options
    if not options.ids:
        if options.remove:
            raise ArgumentError("Name the SESSION from which to remove tags: crow sessions tag SESSION --remove TAG.")
        return await _list_tags(context)
    (session_id,) = await context.find_ids()
    row = await context.store.session(session_id)
    add, remove = [new_tag(text) for text in options.tags], [tag_name(text) for text in options.remove]
    unknown = sorted(set(remove) - set(tags_of(row.metadata)))
    if unknown:
        raise ArgumentError(f'{row.id} has no tag "{unknown[0]}"; it has {", ".join(tags_of(row.metadata)) or "none"}.')
    if add or remove:
        row = await context.store.merge_metadata(row.id, tags_patch(row.metadata, add=add, remove=remove))
    tags = tags_of(row.metadata)
    context.report([{"id": row.id, "title": row.title, "tags": tags}], f"{_name(row.id, row.title)}: {_hashed(tags)}")
    return None


async def _list_tags(context: SessionsContext) -> None:
    counts = await context.admin.count_tags()
    if context.options.json:
        return print_json({"tag": tag, "sessions": number} for tag, number in counts.items())
    cells = [(tag, str(number)) for tag, number in counts.items()]
    empty = 'No session has a tag. "crow sessions tag SESSION TAG" adds one.'
    print_table((Column("Tag"), Column("Sessions", "number")), cells, empty=empty)
    return None


def _hashed(tags: Sequence[str]) -> str:
    return " ".join(f"#{tag}" for tag in tags) or "no tags"


async def delete(context: SessionsContext) -> None:
    """`crow sessions delete`: delete either all of the named sessions or none."""
    rows = [await context.store.session(name) for name in await context.find_ids()]
    await context.admin.remove([row.id for row in rows])
    for row in rows:
        values = {"id": row.id, "title": row.title, "deleted": True}
        context.report([values], f"{_name(row.id, row.title)}: deleted")


async def prune(context: SessionsContext) -> None:
    """`crow sessions prune`: delete sessions that were not used for a long time."""
    options, admin = context.options, context.admin
    before_ms = parse_age("--older-than", options.older_than, now=datetime.now().astimezone())
    shorten = await context.id_shortener()  # looks at all sessions, so it must run before some are deleted
    old = await (admin.unused_since if options.dry_run else admin.prune)(before_ms, context.cwd)
    if options.json:
        return print_json(
            {**asdict(one), "used": time_text(one.used_ms, "seconds"), "deleted": not options.dry_run} for one in old
        )
    columns = (Column("Id", "fixed"), Column("Last used", "fixed"), Column("Entries", "number"), Column("Directory"))
    cells = [
        (shorten(one.id), show_time(one.used_ms), str(one.entries), short_directory(one.cwd), one.title or "")
        for one in old
    ]
    empty = f"Nothing to remove: every session has been used since {time_text(before_ms)}."
    print_table((*columns, Column("Title")), cells, empty=empty)
    if in_terminal() and old:
        print(f"{plural(len(old), 'session')} {'would be' if options.dry_run else 'were'} removed.")
    return None


async def vacuum(context: SessionsContext) -> None:
    """`crow sessions vacuum`: free the disk space of removed sessions. Other processes may use the database at the same
    time."""
    before = await context.admin.size()
    if before is None:
        raise ArgumentError(
            "PostgreSQL frees the space of removed sessions by itself (autovacuum). To give this space back to the file"
            " system, run VACUUM FULL in PostgreSQL while nobody uses crow."
        )
    await context.store.tidy()
    after = await context.admin.size() or 0
    values = {"bytes_before": before, "bytes_after": after}
    context.report([values], f"{before / _MEGABYTE:.1f} MB before, {after / _MEGABYTE:.1f} MB now.")


async def back_up(context: SessionsContext) -> None:
    """`crow sessions backup`: copy the database to a new file. If the given path is a directory, crow names the
    file."""
    done = await context.admin.back_up(_backup_path(Path(context.options.path)))
    size = f"{done.bytes / _MEGABYTE:.1f} MB, {plural(done.sessions, 'session')}"
    context.report([asdict(done)], f"Wrote {done.path} ({size}); it passes the integrity check.")


async def copy(options: argparse.Namespace, loaded: Loaded) -> None:
    """`crow sessions copy`: copy all sessions from one database to another."""
    found: list[CopiedConversation] = []

    def report(one: CopiedConversation) -> None:
        found.append(one)
        if options.json:
            print_json([asdict(one)])
        elif one.words:
            say(f"{', '.join(one.sessions)}: {one.words}")

    if _place(loaded, options.source) == _place(loaded, options.target):
        raise ArgumentError("--from and --to name the same database; expected two different ones.")
    async with AsyncExitStack() as opened:
        source = await open_store_at(loaded, options.source, to_read=True)
        opened.push_async_callback(source.close)
        target = await open_store_at(loaded, options.target)
        opened.push_async_callback(target.close)
        await SessionCopy(open_admin(source), open_admin(target), target, report).run()
    copied = [one for one in found if one.outcome == "copied"]
    known, rest = sum(one.outcome == "known" for one in found), sum(bool(one.words) for one in found)
    if not options.json:
        sessions, entries = sum(len(one.sessions) for one in copied), sum(one.entries for one in copied)
        print(f"Copied and verified {plural(sessions, 'session')} with {plural(entries, 'entry')}.")
        if known:
            print(f"{plural(known, 'conversation')} had been copied before.")
    if rest:
        raise ArgumentError(f"{plural(rest, 'conversation')} could not be copied, for the reasons above.")


def _place(loaded: Loaded, place: str | None) -> str:
    """Return `place`: either the URL of a database, or the resolved path of its file. If `place` is None, return the
    place of the database that crow uses."""
    url = loaded.settings.database.url
    place = place or (str(loaded.paths.database) if url is None else url.get_secret_value())
    return place if "://" in place else str(Path(place).expanduser().resolve())


@contextmanager
def _new_file(path: Path) -> Iterator[Callable[[bytes], int]]:
    """Create a file that only its owner can read. Yield a function that writes bytes to the file and returns their
    number. The file appears only when it is complete.

    :raises ArgumentError: `path` exists or cannot be written, or the body of the `with` statement raised an `OSError`.
    The yielded function raises this error, too.
    """
    exists = ArgumentError(f"{path} already exists. Choose another name, because crow does not overwrite files.")
    if os.path.lexists(path):
        raise exists
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    with _naming(path):
        file = open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115  # closed below

    def write(data: bytes) -> int:
        with _naming(path):
            return file.write(data)

    try:
        yield write
        with _naming(path):
            file.flush()
            os.fsync(file.fileno())
            if not move_to_new(part, path):
                raise exists
    except OSError as error:  # of another file, such as a temporary one
        raise ArgumentError(f"{path} was not written, because another file failed: {error}.") from error
    finally:
        with suppress(OSError):  # after a failed write, closing fails too
            file.close()
        part.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise an `OSError` as an `ArgumentError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}.") from error


async def _all_if_none(context: SessionsContext, ids: Sequence[str] | None) -> Sequence[str]:
    return ids if ids is not None else [one.row.id for one in await all_listed(context)]


async def _otlp(context: SessionsContext, ids: Sequence[str] | None) -> AsyncIterator[bytes]:
    names = await _all_if_none(context, ids)
    trees = [await with_subagents(context.store, name) for name in names]
    written_with = {below for _, *subagents in trees for below in subagents}
    for name, sessions in zip(names, trees, strict=True):
        if name in written_with:  # it is a subagent of another named session
            continue
        async for line in otlp_lines(context.store, sessions, trace_redactor(context.loaded)):
            yield line


async def _markdown(context: SessionsContext, ids: Sequence[str] | None) -> AsyncIterator[bytes]:
    redact = _redactor(context)
    for name in await _all_if_none(context, ids):
        transcript = Transcript(is_full=True)
        yield redact(transcript.head(await context.store.session(name))).encode()
        async for batch in context.store.history(name):
            for entry in batch:
                yield redact(transcript.feed(entry)).encode()
        for entry in await context.store.unstored_end(name):
            yield redact(transcript.feed(entry)).encode()


async def _html(context: SessionsContext, session_id: str) -> AsyncIterator[bytes]:
    row = await context.store.session(session_id)
    window = context.loaded.settings.model.with_name(row.model).context_window if row.model else None
    return session_page(context.store, session_id, _redactor(context), window=window)


async def _case(context: SessionsContext, session_id: str) -> AsyncIterator[bytes]:
    async with scratch(context.loaded) as (store, admin, folder):
        async for line in write_case(
            (context.store, context.admin),
            session_id,
            (store, admin),
            folder,
            redact=_redactor(context, is_strict=True),
            rebuilder=Rebuilder(known_extras(context.loaded)),
        ):
            yield line


def _redactor(context: SessionsContext, *, is_strict: bool = False) -> Redactor:
    return export_redactor(context.loaded, is_strict=is_strict or context.options.redact)


def _backup_path(path: Path) -> Path:
    return path / f"crow-{datetime.now().astimezone():%Y%m%d-%H%M%S}.db" if os.path.isdir(path) else path


def _name(session_id: str, title: str | None) -> str:
    return f'{session_id} "{title}"' if title else session_id
