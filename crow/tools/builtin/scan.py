"""The program behind `list_files` and `grep`: lists files, or searches them for a regular expression.

The program runs in a process of its own, because matching a regular expression may never end, and can be stopped only
by killing the process. The process also exits when its time is up or when the reader of its answer is gone. Python runs
this file by its path, without the rest of crow, so the program uses only the standard library. Its argument is a JSON
object (see `main`). Standard input contains file names relative to the current directory, each followed by a NUL. If
standard input is empty, the program walks the current directory instead. The answer is one line of JSON.

If ripgrep is available, it is used only to rule out files that cannot match. This program itself always finds the
matching lines, so the answer is the same with and without ripgrep. The program never follows symbolic links, even if
git lists a file that is reached through one. It opens each directory on the way to a file separately, so that nobody
can replace a directory with a link in the meantime.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from unicodedata import normalize

_PACKAGES = frozenset((".venv", "venv", "node_modules", ".tox", ".nox"))
"""Directories that tools fill with installed packages. They are left out, and the answer names them."""
_INTERNAL = frozenset((".git", ".hg", ".svn", ".jj", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"))
"""Directories that tools use for themselves. They are left out, and the answer does not mention them."""
_NOT_NAMES = ("", ".", "..")
MAX_WALKED = 200_000
"""If git does not list the files below a directory, at most this many are found."""
_MAX_SUMMARY = 150
"""A large tree is described in at most this many lines."""
_MAX_KINDS = 4
_MAX_SHOWN_DEPTH = 30
_SUFFIX_CHARS = 10
"""A longer suffix does not count as the kind of a file."""
FILE_BYTES = 20_000_000
"""Larger files are not searched."""
_SNIFFED_BYTES = 8_192
"""A file with a NUL in its first bytes counts as binary."""
_WIDE = (
    *((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32")),
    *((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")),
)
"""Byte order marks with their encodings. A mark that begins with a shorter mark comes before that mark."""
_LINE_CHARS = 400
"""If a line is longer, only the part around the match is returned."""
_PATH_CHARS = 4_000
_MAX_OPEN = 64
"""At most this many directories are kept open."""
_OPENS_FOLDERS = os.open in os.supports_dir_fd and os.scandir in os.supports_fd
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_PATH", os.O_RDONLY)
_READER_CHECK_S = 0.5
_ANCHORED = re.compile(r"\\[AZ]|\(\?(?![:i])|[*+?}]\+")
"""Finds an anchor at the start or end of a text, a group such as a lookahead, or a possessive quantifier. A pattern
with one of these may match a line, but nothing in the whole text of the file, so it must be tried on each line
separately."""

_META = re.compile(r"[\\^$.|?*+()\[\]{}]")
RIPGREP_FILES = 100
"""Ripgrep is used only if there are at least this many files, and never for a pattern that is plain text. In all other
cases, this program finishes its own search before ripgrep would have started."""
_RIPGREP_OPTIONS = (
    *("--no-config", "--no-messages", "--no-ignore", "--hidden", "--text", "--encoding", "none"),
    *("--color", "never", "--case-sensitive", "--files-with-matches", "--null"),
)
ARGUMENT_BYTES = 200_000
_OUTSIDE_ASCII = r"(?-u:[\x80-\xFF\r\x1c-\x1f])"
"""Bytes that ripgrep and Python treat differently. A file with one of these bytes is always searched by this program
itself."""
_SHARED = re.compile(
    r"""(?: [\w\s"'#%&,/:;<=>@`~!\-] | [.^$|)*+?] | \((?:\?:)?(?!\?) | \{\d+(?:,\d*)?\}
          | \\[wWdDsSbBt.^$*+?(){}\[\]|\\/"'#%&,:;=@`~!\-]
          | \[\^?+\]?+(?: (?!--|&&|~~)[^\\\[\]] | \\[wWdDsSt.^$*+?(){}|\\/\-] )*\] )*""",
    re.VERBOSE | re.ASCII,
)
"""Matches the search patterns for which ripgrep and Python find the same lines, if all lines are plain ASCII."""


def main() -> None:
    """Answer the request in the first argument.

    `glob`: see `_filter_names`, or null. `limit`: the maximum number of lines to return. `seconds`: the maximum
    processor time. `excluded`: the files to leave out (see `_Exclusion`). This member is absent if no file is left out.
    A request for grep also has `pattern`, `ignore_case`, `context`, `file` (the name of a single file to search, or
    null) and `ripgrep` (the program's path, or null).

    The answer for a list has `names` (see `summarize`) and `total`, the number of files. The answer for grep has
    `matches` and the lines `around` them as [name, line, text], `more` (whether there are more matches), and `files`
    (the number of files that the glob matches, with the excluded ones). Both answers have `left_out` (the number of
    excluded files), and `skipped` and `folders` (the counts and folders of :class:`Skipped`). If the pattern is not a
    regular expression, the answer has only `fault`, which says why.
    """
    request = json.loads(sys.argv[1])
    limit_lifetime(request["seconds"])
    if "pattern" in request and (fault := find_pattern_fault(request["pattern"])):
        answer: dict[str, object] = {"fault": fault}
    else:
        skipped = Skipped()
        names = [request["file"]] if request.get("file") else sorted(_find_files(skipped))
        if request["glob"]:
            names = _filter_names(names, request["glob"])
        found = len(names)
        if request.get("excluded"):
            excluded = _Exclusion(**request["excluded"])
            names = [name for name in names if not excluded.covers(name)]
        left_out = found - len(names)
        if "pattern" in request:
            pattern, flags = request["pattern"], re.IGNORECASE if request["ignore_case"] else 0
            is_plain = not flags and not _META.search(pattern)
            if request["ripgrep"] and len(names) >= RIPGREP_FILES and not is_plain and is_shared(pattern):
                names = narrow(names, request["ripgrep"], pattern, flags)
            answer = {**search(names, pattern, flags, request["limit"], skipped, request["context"]), "files": found}
        else:
            answer = {"names": summarize(names, request["limit"]), "total": len(names)}
        answer |= {"left_out": left_out, "skipped": skipped.counts, "folders": sorted(skipped.folders)}
    print(json.dumps(answer))  # noqa: T201


class Skipped:
    """The files and directories that a list or a search has left out, apart from excluded files."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """The number of files for each reason: `walked` (always 1; further files were not looked for because of
        `MAX_WALKED`), `unreadable` (files and directories), and for a search also `large` (more than `FILE_BYTES`),
        `binary`, `links` (that lead out of the current directory) and `not_utf8` (searched, but characters outside
        ASCII cannot be found in them)."""
        self.folders: set[str] = set()
        """The directories with installed packages that were left out."""

    def note_error(self, error: OSError) -> None:
        """Count a file or directory that could not be opened. It is not counted if it does not exist, or if its
        directory is reached through a link."""
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
            self.counts["unreadable"] += 1


class _Exclusion:
    """The files to leave out: those that the user's rules forbid, and those in places where secrets are kept.

    `patterns` are regular expressions. A file is left out if one of them matches its whole absolute path or, for a
    file below the directory `root`, its whole path relative to `root`. Case is ignored. `top` is the current directory.
    """

    def __init__(self, *, top: str, root: str, patterns: Sequence[str]) -> None:
        whole = "|".join(f"(?:{pattern})" for pattern in patterns)
        self._matches = re.compile(whole, re.IGNORECASE | re.DOTALL).fullmatch if patterns else None
        self._top = top.rstrip("/") + "/"
        root = root.rstrip("/") + "/"
        self._relative = self._top.removeprefix(root) if self._top.startswith(root) else None

    def covers(self, name: str) -> bool:
        """Return whether the file with this name, relative to the current directory, is left out."""
        if self._matches is None:
            return False
        path = normalize("NFC", self._top + name)
        relative = self._relative is not None and normalize("NFC", self._relative + name)
        return bool(self._matches(path) or (relative and self._matches(relative)))


class Folders:
    """Opens files and directories below the current directory, never through a link.

    A directory stays open while the names that are opened next are below it. So opening many names is fast if they are
    sorted.
    """

    def __init__(self) -> None:
        self._open = [("", os.open(".", _FOLDER))] if _OPENS_FOLDERS else []

    def open(self, name: str) -> int:
        """Open a file to read it. :raises OSError: the file cannot be opened, or a part of its path is a link."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        if not _OPENS_FOLDERS:
            return os.open(name, flags)
        folder, _, last = name.rpartition("/")
        return os.open(last, flags, dir_fd=self._folder(folder))

    def status(self, name: str) -> os.stat_result:
        """Return the status of a file or directory. For a link, this is the status of the link itself. :raises OSError:
        there is no such file, or its directory is reached through a link."""
        if not _OPENS_FOLDERS:
            return os.lstat(name)
        folder, _, last = name.rpartition("/")
        return os.stat(last, dir_fd=self._folder(folder), follow_symlinks=False)

    def entries(self, folder: str) -> list[tuple[str, bool]]:
        """Return the sorted names in a directory, each with whether it is a directory. A link does not count as one.

        :raises OSError: the directory cannot be read, or a part of its path is a link.
        """
        if not _OPENS_FOLDERS:
            return _described(folder or ".")
        handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._folder(folder))
        try:
            return _described(handle)
        finally:
            os.close(handle)

    def _folder(self, folder: str) -> int:
        """Return a handle of the directory. The handle is valid until this method is called again."""
        if len(folder) > _PATH_CHARS:
            raise OSError(errno.ENAMETOOLONG, "the path is too long for other programs", folder)
        while len(self._open) > 1 and not f"{folder}/".startswith(f"{self._open[-1][0]}/"):
            os.close(self._open.pop()[1])
        path, handle = self._open[-1]
        for part in filter(None, folder[len(path) :].split("/")):
            if part in _NOT_NAMES:
                raise OSError(errno.EINVAL, "not a name", folder)
            handle = os.open(part, _FOLDER, dir_fd=handle)
            path = f"{path}/{part}" if path else part
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop()[1])
            self._open.append((path, handle))
        return handle


def find_pattern_fault(pattern: str) -> str:
    """Return why `pattern` is not a regular expression, or "" if it is one."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def limit_lifetime(seconds: int) -> None:
    """End this process after `seconds` of processor time, or soon after the reader of its output is gone.

    Both limits use signals, because no other thread can run while a regular expression is being matched.
    """
    try:
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    except (ImportError, ValueError, OSError):  # no such limit on this system, or a stricter one is set
        pass
    if not hasattr(select, "poll") or not hasattr(signal, "setitimer"):
        return
    answer = select.poll()
    answer.register(1, 0)  # wait only for errors, such as a reader that has closed its end

    def check_reader(_number: int, _frame: object) -> None:
        if answer.poll(0):
            os._exit(1)

    signal.signal(signal.SIGALRM, check_reader)
    signal.setitimer(signal.ITIMER_REAL, _READER_CHECK_S, _READER_CHECK_S)


def _find_files(skipped: Skipped) -> set[str]:
    """Return the existing files that standard input names, and the files below the directories that it names. If
    standard input is empty, return all files below the current directory."""
    given = [os.fsdecode(name) for name in sys.stdin.buffer.read().split(b"\0") if name]
    if not given:
        return set(walk("", skipped))
    names: set[str] = set()
    folders = Folders()
    for name in (each.rstrip("/") for each in given):
        if name.rpartition("/")[2] in _NOT_NAMES or name.startswith("/"):
            continue
        try:
            is_folder = stat.S_ISDIR(folders.status(name).st_mode)
        except OSError as error:  # such as a file that was deleted, but is still in git's index
            skipped.note_error(error)
            continue
        names.update(walk(name, skipped) if is_folder else (name,))  # git lists a nested repository as one directory
    return names


def walk(top: str, skipped: Skipped) -> Iterator[str]:
    """Yield all files and links below `top` at any depth, except in directories that tools create, such as
    `node_modules`. An empty `top` is the current directory."""
    count, waiting, folders = 0, [top], Folders()
    while waiting:
        directory = waiting.pop()
        try:
            entries = folders.entries(directory)
        except OSError as error:  # no permission, deleted, replaced by a link, or the path is too long for the system
            skipped.note_error(error)
            continue
        prefix = f"{directory}/" if directory else ""
        for name, is_folder in entries:
            if not is_folder:
                if count == MAX_WALKED:
                    skipped.counts["walked"] = 1
                    return
                yield prefix + name
                count += 1
        below = [name for name, is_folder in entries if is_folder and name not in _INTERNAL]
        skipped.folders.update(prefix + name for name in below if name in _PACKAGES)
        waiting += [prefix + name for name in reversed(below) if name not in _PACKAGES]


def _described(directory: str | int) -> list[tuple[str, bool]]:
    """See :meth:`Folders.entries`."""
    with os.scandir(directory) as found:
        return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)


def _filter_names(names: list[str], glob: str) -> list[str]:
    """Return the names that the glob matches. If the glob begins with `!`, return the names that its rest does not
    match. A glob without a slash is compared with the last part of a name or, after `!`, with each part of a name. A
    glob may be absolute."""
    glob, is_wanted = normalize("NFC", glob), not glob.startswith("!")
    glob = glob if is_wanted else glob[1:].rstrip("/")
    glob_here = glob.removeprefix(f"{normalize('NFC', os.getcwd())}/")
    try:
        expression = re.compile(glob_expression(glob_here))
    except re.error:  # `[user-id]` is a usual name of a directory, but `r-i` is not a valid range of characters
        expression = re.compile(glob_expression(glob_here.replace("[", "[[]")))

    def matches(name: str) -> bool:
        return expression.fullmatch(normalize("NFC", name)) is not None

    if "/" in glob:
        return [name for name in names if matches(name) == is_wanted]
    if is_wanted:
        return [name for name in names if matches(name.rpartition("/")[2])]
    return [name for name in names if not any(map(matches, name.split("/")))]


def glob_expression(pattern: str) -> str:
    """Convert a glob to a regular expression: `*` and `?` match within a name, `**` across directories; `[...]` and
    `{a,b}` also work."""
    expression, at, braces = "", 0, 0
    pattern = pattern.removeprefix("./")
    while at < len(pattern):
        rest, char = pattern[at:], pattern[at]
        step = 1
        if rest.startswith("**/"):
            expression, step = expression + "(?:.*/)?", 3
        elif rest.startswith("**"):
            expression, step = expression + ".*", 2
        elif char == "*":
            expression += "[^/]*"
        elif char == "?":
            expression += "[^/]"
        elif char == "[" and (end := rest.find("]", 2)) > 0:
            inner = rest[1:end].replace("\\", "\\\\")
            expression, step = expression + f"[{'^' + inner[1:] if inner[0] == '!' else inner}]", end + 1
        elif char == "{" and "}" in rest:
            expression, braces = expression + "(?:", braces + 1
        elif char == "," and braces:
            expression += "|"
        elif char == "}" and braces:
            expression, braces = expression + ")", braces - 1
        else:
            expression += re.escape(char)
        at += step
    return expression + ")" * braces


def summarize(names: list[str], limit: int) -> list[str]:
    """Return the sorted names or, if there are more than `limit`, at most `_MAX_SUMMARY` lines about them.

    The largest directories are opened, that is, their files and directories are listed, as long as there are lines
    left. Every other directory gets one line, with the number of its files by kind. If an opened directory has many
    files of one kind, only the first of them are named.
    """
    if len(names) <= limit:
        return names
    folders: dict[str, list[str]] = {"": []}
    inner: dict[str, set[str]] = {"": set()}
    below: dict[str, Counter[str]] = {}
    for name in names:
        parts = name.split("/", _MAX_SHOWN_DEPTH)
        for depth in range(len(parts)):
            folder = "/".join(parts[:depth])
            below.setdefault(folder, Counter())[_kind_of(name)] += 1
            folders.setdefault(folder, [])
            inner.setdefault(folder, set())
            if depth:
                inner["/".join(parts[: depth - 1])].add(folder)
        folders["/".join(parts[:-1])].append(name)
    opened = {""}
    waiting = sorted(inner[""], key=lambda folder: below[folder].total())
    left = _MAX_SUMMARY - len(waiting) - len(_lines_of(folders[""], 1))
    while waiting:
        folder = waiting.pop()
        own = _lines_of(folders[folder], 1)
        more = len(inner[folder]) + len(own) - 1
        # The line of a closed directory already has the number of its files of each kind. So opening it is worth it
        # only if it contains directories, if all its files are then named, or if it has a large part of all files.
        is_worth = inner[folder] or len(own) == len(folders[folder]) or len(folders[folder]) * 20 > len(names)
        if more <= left and is_worth:
            opened.add(folder)
            left -= more
            waiting = sorted([*waiting, *inner[folder]], key=lambda each: below[each].total())
    closed = [folder for parent in opened for folder in inner[parent] if folder not in opened]
    lines = [f"{folder}/ ({_described_kinds(below[folder])})" for folder in closed]
    for shown in (100, 50, 20, 10, 5, 3, 1):
        own = [line for folder in opened for line in _lines_of(folders[folder], shown)]
        if len(own) + len(lines) <= _MAX_SUMMARY:
            break
    lines = sorted([*lines, *own])
    cut = len(lines) - _MAX_SUMMARY
    return [*lines[:_MAX_SUMMARY], f"({cut:,} more directories and files)"] if cut > 0 else lines


def _lines_of(files: list[str], shown: int) -> list[str]:
    """Return the lines about the files of one directory. At most `shown` files of each kind are named, or `shown` + 2
    if the kind has no more files than that."""
    kinds: dict[str, list[str]] = {}
    for name in files:
        kinds.setdefault(_kind_of(name), []).append(name)
    lines = []
    for kind, group in kinds.items():
        if len(group) <= shown + 2:
            lines += group
        else:
            folder = group[0].rpartition("/")[0]
            some = f"*{kind}" if kind else "other files"
            lines += [*group[:shown], f"{folder}{'/' if folder else ''}{some} ({len(group) - shown:,} more files)"]
    return lines


def _kind_of(name: str) -> str:
    """Return the suffix of a file's name, or "" if it has none."""
    suffix = os.path.splitext(name.rpartition("/")[2])[1]
    return suffix if len(suffix) <= _SUFFIX_CHARS else ""


def _described_kinds(kinds: Counter[str]) -> str:
    """Describe files by number and kind, such as `12 files: 9 .py, 3 other`."""
    total = kinds.total()
    named = [(kind, count) for kind, count in kinds.most_common(_MAX_KINDS) if kind]
    rest = total - sum(count for _, count in named)
    parts = [f"{count:,} {kind}" for kind, count in named] + ([f"{rest:,} other"] if rest else [])
    files = "1 file" if total == 1 else f"{total:,} files"
    return f"{files}: {', '.join(parts)}" if len(parts) > 1 else f"{files}{f', {named[0][0]}' if named else ''}"


def search(
    names: list[str], pattern: str, flags: int, limit: int, skipped: Skipped, context: int = 0
) -> dict[str, object]:
    """Return the lines that match, and up to `context` lines around each. See `main`."""
    matcher = re.compile(pattern, flags)
    # If the pattern does not match anywhere in the whole text, no line matches. The patterns that `_ANCHORED` finds
    # are an exception.
    in_whole = None if _ANCHORED.search(pattern) else re.compile(pattern, flags | re.MULTILINE).search
    matches: list[tuple[str, int, str]] = []
    around: list[tuple[str, int, str]] = []
    folders, is_full = Folders(), False
    for name in names:
        text = _text_of(name, folders, skipped).replace("\r\n", "\n").removesuffix("\r")
        if not pattern.isascii() and "\ufffd" in text:
            skipped.counts["not_utf8"] += 1
        if text and (in_whole is None or in_whole(text)):
            lines = text.removesuffix("\n").split("\n")
            found: set[int] = set()
            for number, line in enumerate(lines, 1):
                match = matcher.search(line)
                if match is None:
                    continue
                if len(matches) == limit:
                    is_full = True
                    break
                found.add(number)
                matches.append((name, number, _excerpt(line, match.start())))
            near = {each for number in found for each in range(number - context, number + context + 1)} - found
            near = {number for number in near if 0 < number <= len(lines)}
            around += [(name, number, _excerpt(lines[number - 1], 0)) for number in sorted(near)]
        if is_full:
            break
    return {"matches": matches, "around": around, "more": is_full}


def is_shared(pattern: str) -> bool:
    """Return whether ripgrep finds at least all lines of plain ASCII that Python finds with this pattern."""
    return pattern.isascii() and _SHARED.fullmatch(pattern) is not None


def narrow(names: list[str], ripgrep: str, pattern: str, flags: int) -> list[str]:
    """Return the names without those of files in which ripgrep finds nothing. If ripgrep fails on a group of files, all
    names of this group are kept. If ripgrep does not accept the pattern, all names are kept."""
    command = [ripgrep, *_RIPGREP_OPTIONS, "--regexp", f"{'(?i)' if flags else ''}(?:{pattern})|{_OUTSIDE_ASCII}", "--"]
    candidates = [name for name in names if _is_searchable(name)]
    wanted = set(names).difference(candidates)
    for batch in _batches(candidates):
        status, output = _run_program([*command, *(f"./{name}" for name in batch)])
        if status > 1 and not output:
            return names  # ripgrep does not understand the pattern or an option
        wanted.update(batch if status > 1 else (os.fsdecode(name)[2:] for name in output.split(b"\0") if name))
    return [name for name in names if name in wanted]


def _is_searchable(name: str) -> bool:
    """Return whether ripgrep may read this file: it must be a regular file of at most `FILE_BYTES`."""
    try:
        status = os.lstat(name)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= FILE_BYTES


def _batches(names: list[str]) -> Iterator[Sequence[str]]:
    """Split the names into groups, each of which fits on a command line."""
    start, size = 0, 0
    for at, name in enumerate(names):
        size += len(os.fsencode(name)) + 11  # for "./", the NUL, and the pointer to the argument
        if size > ARGUMENT_BYTES:
            yield names[start:at]
            start, size = at, 0
    yield names[start:]


def _run_program(command: list[str]) -> tuple[int, bytes]:
    """Run a program, and return its exit code and output. If the program cannot be started, return 2 and an empty
    output."""
    import subprocess  # importing it takes 4 ms, and most searches do not need it

    try:
        done = subprocess.run(  # noqa: S603 - the ripgrep that crow found in a fixed place
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            # variables that begin with LD_ or DYLD_ may name libraries in the workspace
            env={name: value for name, value in os.environ.items() if not name.startswith(("LD_", "DYLD_"))},
        )
    except OSError:
        return 2, b""
    return done.returncode % 256, done.stdout


def _text_of(name: str, folders: Folders, skipped: Skipped) -> str:
    """Return the text of a file. Return "" for a file that is not searched."""
    try:
        file = folders.open(name)
    except OSError as error:
        if error.errno != errno.ELOOP:  # O_NOFOLLOW refuses links
            skipped.note_error(error)
        elif not os.path.realpath(name).startswith(f"{os.getcwd()}/".replace("//", "/")):
            skipped.counts["links"] += 1  # a link to a file that is searched anyway is not counted
        return ""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_size > FILE_BYTES:
            skipped.counts["large"] += 1
            return ""
        data = os.read(file, status.st_size)
    except OSError as error:
        skipped.note_error(error)
        return ""
    finally:
        os.close(file)
    for mark, encoding in _WIDE:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    if b"\0" in data[:_SNIFFED_BYTES]:
        skipped.counts["binary"] += 1
        return ""
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")


def _excerpt(line: str, at: int) -> str:
    """Return the line or, if it is long, only the part around the match."""
    if len(line) <= _LINE_CHARS:
        return line
    start = max(0, at - _LINE_CHARS // 4)
    end = start + _LINE_CHARS
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")


if __name__ == "__main__":
    main()
