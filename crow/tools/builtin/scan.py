"""The program behind `list_files` and `grep`: lists files, or searches them for a regular expression.

It runs as a process of its own, by its path, with the standard library alone, since a regular expression that never
ends can be stopped only by ending its process; it also ends by itself when nobody reads its answer any more, or its
time is up. Argument: a JSON object (see `main`). Standard input: NUL-ended names relative to the current directory, or
nothing, then the directory is walked. Answer: one line of JSON. Where ripgrep is given, it says which files may match;
the lines are always found here, so that the answer is the same. Symbolic links are never followed, neither to files nor
to directories, whatever names the index of a repository holds.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence

VERSION_CONTROL = (".git", ".hg", ".svn", ".jj")
CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox")
SKIPPED = frozenset((*VERSION_CONTROL, *CACHES, ".venv", "venv", "node_modules"))
NO_NAMES = ("", ".", "..")
WALKED_FILES = 200_000
FILE_BYTES = 20_000_000
SNIFFED_BYTES = 8_192
LINE_CHARS = 400
UNSAFE_AS_A_WHOLE = re.compile(r"\\[AZ]|\(\?(?![:i])")
LOOKED_AFTER_S = 0.5

META = re.compile(r"[\\^$.|?*+()\[\]{}]")
RIPGREP_FILES = 100
"""Fewer files are searched here sooner than another program has started; so are any for a plain text."""
RIPGREP_OPTIONS = (
    *("--no-config", "--no-messages", "--no-ignore", "--hidden", "--text", "--encoding", "none"),
    *("--color", "never", "--case-sensitive", "--files-with-matches", "--null"),
)
ARGUMENT_BYTES = 200_000
OUTSIDE_ASCII = r"(?-u:[\x80-\xFF\r\x1c-\x1f])"
"""Bytes about which the two read an expression differently; a file with one of them is searched here."""
SHARED = re.compile(
    r"""(?: [\w\s"'#%&,/:;<=>@`~!\-] | [.^$|)*+?] | \((?:\?:)?(?!\?) | \{\d+(?:,\d*)?\}
          | \\[wWdDsSbBt.^$*+?(){}\[\]|\\/"'#%&,:;=@`~!\-]
          | \[\^?+\]?+(?: (?!--|&&|~~)[^\\\[\]] | \\[wWdDsSt.^$*+?(){}|\\/\-] )*\] )*""",
    re.VERBOSE | re.ASCII,
)
"""Expressions that mean the same to ripgrep in a line of plain ASCII."""


def main() -> None:
    """Answer the request in the first argument.

    `glob`: names to keep, or null. `limit`: how many to give. `seconds`: of processor time, at most. For grep also
    `pattern`, `ignore_case`, `file`: a single name to search, or null, and `ripgrep`: that program, or null. The answer
    of a list: `names`, `total`. Of grep: `matches` as [name, line, text], `more`, `large` (how many files were too
    large to look into); or only `fault`, why the pattern is no expression.
    """
    request = json.loads(sys.argv[1])
    end_by_itself(request["seconds"])
    if "pattern" in request and (fault := fault_in(request["pattern"])):
        print(json.dumps({"fault": fault}))  # noqa: T201
        return
    sizes = {request["file"]: None} if request.get("file") else list_names()
    names = sorted(sizes)
    if request["glob"]:
        keep = re.compile(glob_expression(request["glob"])).fullmatch
        names = [name for name in names if keep(name if "/" in request["glob"] else name.rpartition("/")[2])]
    if "pattern" in request:
        pattern, flags = request["pattern"], re.IGNORECASE if request["ignore_case"] else 0
        is_plain = not flags and not META.search(pattern)
        if request["ripgrep"] and len(names) >= RIPGREP_FILES and not is_plain and is_shared(pattern):
            asked = [name for name in names if is_searchable(name, sizes[name])]
            names = narrowed(names, asked, [request["ripgrep"], *RIPGREP_OPTIONS], expression_for(pattern, flags))
        answer = search(names, pattern, flags, request["limit"])
    else:
        answer = {"names": summarised(names, request["limit"]), "total": len(names)}
    print(json.dumps(answer))  # noqa: T201


def fault_in(pattern: str) -> str:
    """Why `pattern` is no regular expression; "" if it is one."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def end_by_itself(seconds: int) -> None:
    """See to it that this process ends after so much processor time, and soon after nobody reads its answer: whoever
    wanted it may be gone without a word. A signal reaches an expression that never ends; a thread would not."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    except (ImportError, ValueError, OSError):  # no such limits here, or a stricter one already
        pass
    if not hasattr(select, "poll") or not hasattr(signal, "setitimer"):
        return
    answer = select.poll()
    answer.register(1, 0)  # told of errors alone: of a pipe, that its other end is closed

    def look(_number: int, _frame: object) -> None:
        if answer.poll(0):
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOKED_AFTER_S, LOOKED_AFTER_S)


def list_names() -> dict[str, int | None]:
    """Names from standard input that exist; else everything below the current directory. With their sizes in bytes,
    -1 for what is no regular file, None where it is not known."""
    given = [os.fsdecode(name) for name in sys.stdin.buffer.read().split(b"\0") if name]
    if not given:
        return dict.fromkeys(walk("."))
    sizes: dict[str, int | None] = {}
    folders = {"": True}
    for name in (each.rstrip("/") for each in given):
        folder, _, last = name.rpartition("/")
        if last in NO_NAMES or name.startswith("/") or not is_reached(folder, folders):
            continue
        try:
            status = os.lstat(name)
        except OSError:
            continue  # git still knows what was deleted
        if stat.S_ISDIR(status.st_mode):  # a repository in the repository
            sizes.update(dict.fromkeys(walk(name)))
        else:
            sizes[name] = size_in(status)
    return sizes


def is_reached(folder: str, known: dict[str, bool]) -> bool:
    """Whether a directory lies below the current one and no link stands on the way to it. `known` is filled.

    git lists what its index holds: names behind a directory that has become a link since, or ones with `..` in an index
    that was made by hand.
    """
    if folder not in known:
        above = ""
        for part in folder.split("/"):
            path = f"{above}/{part}" if above else part
            if path not in known:
                try:
                    known[path] = known[above] and part not in NO_NAMES and stat.S_ISDIR(os.lstat(path).st_mode)
                except OSError:
                    known[path] = False
            above = path
    return known[folder]


def size_in(status: os.stat_result) -> int:
    """The size of a regular file, -1 for anything else."""
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def walk(top: str) -> Iterator[str]:
    """Files below `top`, without the directories that hold what tools made; however deep it is."""
    count, waiting = 0, [top]
    while waiting:
        directory = waiting.pop()
        try:
            with os.scandir(directory) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:  # not allowed, gone, or its path is longer than the system takes
            continue
        prefix = "" if directory == "." else f"{directory}/"
        for entry in entries:
            if not leads_to_directory(entry):
                yield prefix + entry.name
                count += 1
                if count >= WALKED_FILES:
                    return
        below = [prefix + entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [name for name in reversed(below) if name.rpartition("/")[2] not in SKIPPED]


def leads_to_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def glob_expression(pattern: str) -> str:
    """A glob as a regular expression: `*` and `?` within a name, `**` across directories, `[...]`, `{a,b}`."""
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


def summarised(names: list[str], limit: int) -> list[str]:
    """At most `limit` lines that cover all names: deep directories are given as one line with their count, as far as
    needed; where even that is too much, the first `limit`."""
    if len(names) <= limit:
        return names
    deepest = max(name.count("/") for name in names)
    for depth in range(deepest, 0, -1):
        counts: dict[str, int] = {}
        for name in names:
            parts = name.split("/")
            line = name if len(parts) <= depth else "/".join(parts[:depth]) + "/"
            counts[line] = counts.get(line, 0) + 1
        if len(counts) <= limit:
            return [f"{line} ({count} files)" if line.endswith("/") else line for line, count in counts.items()]
    return names[:limit]


def search(names: list[str], pattern: str, flags: int, limit: int) -> dict[str, object]:
    expression = re.compile(pattern, flags)
    # a file without any match as a whole has none in a line, unless the pattern speaks of the ends of its text
    as_a_whole = None if UNSAFE_AS_A_WHOLE.search(pattern) else re.compile(pattern, flags | re.MULTILINE).search
    matches: list[tuple[str, int, str]] = []
    large = 0
    for name in names:
        text = text_of(name)
        if text is None:
            large += 1
        elif text and (as_a_whole is None or as_a_whole(text)):
            matches.extend(matching_lines(name, text, expression.search, limit + 1 - len(matches)))
            if len(matches) > limit:
                return {"matches": matches[:limit], "more": True, "large": large}
    return {"matches": matches, "more": False, "large": large}


def is_shared(pattern: str) -> bool:
    """Whether ripgrep finds at least the lines of plain ASCII that are found here."""
    return pattern.isascii() and SHARED.fullmatch(pattern) is not None


def expression_for(pattern: str, flags: int) -> str:
    """What ripgrep is to look for."""
    return f"{'(?i)' if flags else ''}(?:{pattern})|{OUTSIDE_ASCII}"


def narrowed(names: list[str], asked: list[str], ripgrep: Sequence[str], expression: str) -> list[str]:
    """The names without those of `asked` in which ripgrep finds nothing; all names where it cannot tell."""
    wanted = set(names).difference(asked)
    for batch in batches(asked):
        status, answer = answer_of([*ripgrep, "--regexp", expression, "--", *(f"./{name}" for name in batch)])
        if status > 1 and not answer:
            return names  # an expression or an option that it does not take
        wanted.update(batch if status > 1 else (os.fsdecode(name)[2:] for name in answer.split(b"\0") if name))
    return [name for name in names if name in wanted]


def is_searchable(name: str, size: int | None) -> bool:
    """Whether a file can be opened by a program that follows links, waits for pipes and reads all."""
    if size is None:
        try:
            size = size_in(os.lstat(name))
        except OSError:
            return False
    return 0 <= size <= FILE_BYTES


def batches(names: list[str]) -> Iterator[Sequence[str]]:
    """The names in pieces that fit on a command line."""
    start, size = 0, 0
    for at, name in enumerate(names):
        size += len(os.fsencode(name)) + 11  # its dot, slash and end, and the pointer to it
        if size > ARGUMENT_BYTES:
            yield names[start:at]
            start, size = at, 0
    yield names[start:]


def answer_of(command: list[str]) -> tuple[int, bytes]:
    """The exit code and output of a program; 2 and nothing if it could not be started."""
    output, given = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    places = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, given, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
    with open(output, "rb") as stream:
        try:
            child = os.posix_spawn(command[0], command, os.environ, file_actions=places)
        except OSError:
            return 2, b""
        finally:
            os.close(given)
            os.close(null)
        answer = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256, answer


def text_of(name: str) -> str | None:
    """The text of a regular file; "" for what is none, None for one that is too large."""
    try:
        file = os.open(name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return ""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_size > FILE_BYTES:
            return None
        data = os.read(file, status.st_size)
    except OSError:
        return ""
    finally:
        os.close(file)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    return "" if b"\0" in data[:SNIFFED_BYTES] else data.decode("utf-8", "replace")


def matching_lines(
    name: str, text: str, matches: Callable[[str], re.Match[str] | None], limit: int
) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        match = matches(line.removesuffix("\r"))
        if match is not None:
            found.append((name, number, excerpt(line.removesuffix("\r"), match.start())))
            if len(found) >= limit:
                break
    return found


def excerpt(line: str, at: int) -> str:
    """The line, or the part of a long one around its match."""
    if len(line) <= LINE_CHARS:
        return line
    start = max(0, at - LINE_CHARS // 4)
    end = start + LINE_CHARS
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")


if __name__ == "__main__":
    main()
