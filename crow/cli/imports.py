"""`crow sessions import`: imports sessions of other tools."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from crow.cli.output import print_json, say
from crow.cli.sessions import SessionsContext
from crow.domain.errors import ArgumentError
from crow.domain.text import plural
from crow.store import importers
from crow.store.admin import ImportDefaults

_BATCH_BYTES = 32 * 1024 * 1024
_BATCH_GROUPS = 100
_LISTED = 10


async def import_sessions(context: SessionsContext) -> None:
    """`crow sessions import`: import sessions of another tool, or sessions that crow exported. The import does not
    change sessions that the database already has."""
    options = context.options
    if options.file is not None and options.tool is None and importers.is_crow_export(Path(options.file)):
        return await _import_export(context)
    if options.tool is not None and options.tool not in importers.TOOLS:
        raise ArgumentError(f'--from is "{options.tool}"; expected one of {", ".join(importers.TOOLS)}.')
    if options.file is not None:
        path = Path(options.file)
    elif options.tool is not None and (found := importers.default_path(options.tool)) is not None:
        path = found
    else:
        raise ArgumentError(_nothing_named(options.tool))
    with importers.SessionScan(path, tool=options.tool) as scan:
        done = _ImportRun(context, scan)
        await done.run()
    return done.report(path)


async def _import_export(context: SessionsContext) -> None:
    """Import sessions from a file that crow exported. The import does not change sessions that
    the database already has."""
    for one in await context.admin.import_file(Path(context.options.file), _import_defaults(context)):
        result = f"imported with {plural(one.entries, 'entry')}" if one.is_new else "exists already; left unchanged"
        values = {"sessions": one.sessions, "entries": one.entries, "imported": one.is_new, "cleaned": one.cleaned}
        cleaned = dict.fromkeys(one.cleaned, "; its title was shortened or cleaned")
        context.report([values], *(f"{name}: {result}{cleaned.get(name, '')}" for name in one.sessions))


def _import_defaults(context: SessionsContext) -> ImportDefaults:
    """Return the default model and mode of imported sessions."""
    settings = context.loaded.settings
    return ImportDefaults(model=settings.model.name or "", mode=settings.permissions.mode)


def _nothing_named(tool: str | None) -> str:
    """Return an error message that asks for a path. If `tool` is None, the message also lists the tools whose sessions
    can be imported."""
    if tool is not None:
        return f"No sessions of {tool} at the usual place; give the PATH of a file or a directory."
    found = [f"{one.tool} ({one.path}, {plural(one.sessions, 'session')})" for one in importers.importable()]
    if not found:
        return "Give the PATH of a file or a directory; no other tool's sessions are at the usual places."
    return f"Give a PATH, or --from with one of these: {'; '.join(found)}."


class _ImportRun:
    """Imports the sessions that a scan found, in batches. Each batch is imported completely or not at all."""

    def __init__(self, context: SessionsContext, scan: importers.SessionScan) -> None:
        self._context = context
        self._scan = scan
        self._new: list[tuple[str, str, int]] = []
        """The id, the tool and the number of entries of each imported session."""
        self._known: dict[str, int] = {}
        """How many sessions of each tool the database already had."""
        self._counted: set[str] = set()
        """The ids of the sessions that `_known` counted before the import."""
        self._empty = 0
        """The number of sessions without messages."""

    async def run(self) -> None:
        """Import all sessions that the database does not have yet, and show the progress if stderr is a terminal."""
        known = frozenset(await self._context.admin.ids())
        new = [group for group in self._scan.groups if not all(one.session_id in known for one in group)]
        for group in self._scan.groups:
            old = [one.session_id for one in group if one.session_id in known]
            self._counted.update(old)
            self._known[group[0].tool] = self._known.get(group[0].tool, 0) + len(old)
        with _progress(len(new)) as advance:
            while new:
                new = new[await self._import_batch(new, advance, self._scan.problems) :]

    def report(self, path: Path) -> None:
        """Print which sessions were imported and which were not. :raises ArgumentError: no sessions were found in
        `path`."""
        problems = self._scan.problems
        if self._context.options.json:
            print_json({"session": name, "tool": tool, "entries": size} for name, tool, size in self._new)
        tools = {tool: 0 for tool, number in self._known.items() if number}
        for name, tool, size in self._new:
            tools[tool] = tools.get(tool, 0) + 1
            if not self._context.options.json and len(self._new) <= _LISTED:
                say(f"{name}: imported with {plural(size, 'entry')}")
        for tool, number in [] if self._context.options.json else tools.items():
            known = self._known.get(tool, 0)
            exist = f", {plural(known, 'session')} already there" if known else ""
            print(f"{tool}: {plural(number, 'session')} imported{exist}")
        if self._empty:
            print(f"left out {plural(self._empty, 'session')} without messages", file=sys.stderr)
        for problem in problems.named:
            say(f"skipped {problem}", file=sys.stderr)
        if problems.lines or problems.files:
            skipped = f"{plural(problems.lines, 'line')} and {plural(problems.files, 'file')}"
            print(f"{skipped} skipped in all; everything else was imported", file=sys.stderr)
        if not tools:
            expected = self._context.options.tool or ", ".join(importers.TOOLS)
            raise ArgumentError(f"{path} has no sessions; expected sessions of {expected}.")

    async def _import_batch(
        self, groups: Sequence[Sequence[importers.Source]], advance: Callable[[int], None], problems: importers.Problems
    ) -> int:
        """Import one batch: as many groups from the beginning of `groups` as fit into it. Return the number of these
        groups."""
        with tempfile.TemporaryDirectory(prefix="crow-") as directory:
            path = Path(directory) / "batch.jsonl"
            with path.open("wb") as file:
                batch = importers.Batch(file, cwd=str(Path.cwd()))
                taken = 0
                for group in groups[:_BATCH_GROUPS]:
                    batch.add(group, problems)
                    taken += 1
                    advance(1)
                    if batch.size > _BATCH_BYTES:
                        break
                batch.end()
            try:
                imported = await self._context.admin.import_file(path, _import_defaults(self._context))
            except ArgumentError as error:
                if taken > 1:  # import one group at a time, to find the faulty one
                    for group in groups[:taken]:
                        # the problems of these groups are already in `problems`
                        await self._import_batch([group], lambda _: None, importers.Problems())
                else:
                    self._scan.problems.skip_file(groups[0][0].place, str(error))
                return taken
        self._empty += batch.empty
        for one in imported:
            for name in one.sessions:
                if one.is_new:
                    self._new.append((name, batch.tools[name], one.entries))
                elif name not in self._counted:
                    self._known[batch.tools[name]] = self._known.get(batch.tools[name], 0) + 1
        return taken


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar during the block if stderr is a terminal. To advance the bar, call the yielded function with
    a number of items."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("Importing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.advance(task, done)
