"""Finds the tests, type checks, builds and linters that a command line runs, and what its exit code says about each."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

CheckKind: TypeAlias = Literal["test", "types", "build", "lint", "named"]
"""`named`: the user's settings say that the command is a check."""
Outcome: TypeAlias = Literal["passed", "failed", "unknown"]
"""`unknown`: the exit code does not show how the check ended."""

_MAX_CHARS = 32_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RUNNERS = "npm|pnpm|yarn|bun"

_FORMAT_CHECKS = """
ruff format --check; black --check; isort --check|--check-only|-c; prettier --check|-c; cargo fmt --check
"""
_CHECKS: dict[CheckKind, str] = {
    "lint": """
        ruff check; flake8; pylint; eslint; oxlint; biome check|lint|ci; stylelint; cargo clippy; go vet;
        golangci-lint run; shellcheck; rubocop; RUNNERS run lint*; RUNNERS lint*; make|just @lint*;
        pre-commit run; lint-imports; yamllint; markdownlint; hadolint; bandit; terraform validate
    """,
    "types": """
        mypy; dmypy run|check; pyright; basedpyright; pyrefly check; ty check; pytype; tsc; vue-tsc; svelte-check;
        RUNNERS run type*|check-types|tsc; RUNNERS typecheck|type-check|tsc; make|just @type*|mypy;
        deno check; flow check; phpstan analyse|analyze; psalm; srb tc; cargo check
    """,
    "test": """
        pytest; py.test; tox; nox; unittest; nosetests; jest; vitest; mocha; ava; playwright test; cypress run;
        RUNNERS test*|t; RUNNERS run test*|check*|ci; deno test; node --test; cargo test|nextest; go test; dotnet test;
        mvn|mvnw @test|verify; gradle|gradlew @test|check; make|just|task @test*|check*|ci|verify; rspec;
        rake @test|spec; rails test; phpunit; pest; composer test; ctest; swift test; mix test; sbt test; stack test;
        cabal test; zig test; dart test; flutter test; bats; busted; lein test; bazel|bazelisk test; meson test;
        ninja @test; hatch test; gotestsum; manage.py test
    """,
    "build": """
        cargo build; go build; dotnet build; cmake --build; swift build; mix compile; bazel|bazelisk build; zig build;
        RUNNERS run build*; RUNNERS build*; vite build; next build; webpack; docker build; make; xcodebuild; build;
        mvn|mvnw @compile|package|install; gradle|gradlew @build|assemble; meson compile; ninja; compileall;
        py_compile; javac; gcc; g++; clang; clang++; rustc; node --check; php -l; bash|sh -n
    """,
}
"""Each pattern has a program and then words. `a|b` are alternatives. A word with `-` must be among the options, a word
with `@` may be any operand, and other words must be the first operands. The first kind with a match counts."""

_CHANGES = """
* --fix|--write|--apply|--fix-only|--in-place|--snapshot-update; ruff format; black; isort; prettier -w;
gofmt|goimports -w; cargo fmt|fix|add|update; go fmt|generate|mod|get; jest|vitest -u|--updateSnapshot|--update;
RUNNERS run format*|fix*|lint:fix; make|just|task @format*|fmt|fix; rubocop -a|-A|--autocorrect; mypy --install-types
"""
"""Commands that change files although they look like checks."""

_HARMLESS = _words(
    "cd pushd popd echo printf ls cat bat head tail less wc grep egrep rg ag fd tree pwd which whereis type "
    "true false test [ export set unset shopt sleep stat file du df date whoami id uname env printenv diff cmp "
    "sort uniq cut tr jq nl od xxd md5sum sha256sum ps basename dirname realpath readlink seq column ulimit : "
    "wait jobs"
)
"""Programs that change no files, unless their output goes to one."""
_HARMLESS_GIT = _words(
    "status diff log show branch blame grep ls-files ls-tree rev-parse describe remote add commit push fetch "
    "tag config shortlog reflog cat-file"
)
_OUTPUT_OF = {"git": ("--output",), "sort": ("-o", "--output"), "tree": ("-o",)}
"""Options with which one of these harmless programs writes a file."""
_IDLE = _words(
    "--version -V --help -h --collect-only --co --fixtures --listTests --list --list-tests --dry-run "
    "--setup-plan --setup-only --no-run --showconfig --just-print --show-files --show-settings --showConfig "
    "--print-config"
)
"""With one of these options, a program checks nothing."""
_IDLE_OF = {"make": "-n", "ctest": "-N", "tox": "-l", "nox": "-l", "go": "-list"}
"""Options with which only this program checks nothing."""
_FORGIVING = _words("--exit-zero --ignore-errors --if-present")
"""With one of these options, a check ends with exit code 0 although it failed or did not run."""
_NARROWING = _words(
    "-k -m -t -p -g --lf --last-failed --ff --sw --deselect --ignore -run --run --testNamePattern --filter "
    "--grep --only --lib --bins --package --bin --testPathPattern --onlyChanged --changed --related -R "
    "--tests-regex --select --workspaces -E --example --doc --test --spec --project -w --workspace"
)
"""With one of these options, a program runs only a part of the tests."""
_RUN_ALL = frozenset(("--test", "--project", "-p", "-w"))
"""Options that narrow nothing for some programs; see `_is_partial`."""
_VALUED = _words(
    "--config-file --config -c --select --extend-select --ignore --exclude --python-version --project -p "
    "--rcfile -f --max-warnings --ext -j --output-format --format --line-length -n --timeout"
)
"""Options of linters and type checkers whose next word is their value."""
_WITH_VERB = _words("ruff biome dmypy ty pyrefly go golangci-lint flow phpstan deno")
"""Linters and type checkers whose first operand is not a path."""
_PATHLESS = frozenset((*_RUNNERS.split("|"), "make", "just", "cargo", "pre-commit", "terraform", "srb", "lint-imports"))
_HIDING = _words("exit exec return trap eval alias kill enable break continue builtin")
"""With one of these commands in a line, the exit code of the line does not show how its other commands ended."""
_UNFAILING = _words("cd pushd popd echo printf export set unset shopt true : pwd date sleep source .")
"""Programs that hardly ever fail. If all other commands of a failed line are among these, the check is to blame."""
_FILTERS = _words("cat tee tail head sort uniq wc nl tr cut")
"""Programs that hardly ever fail if they read from a pipe."""
_SUFFIXES = {
    "py pyi": "mypy dmypy pyright basedpyright pyrefly ty pytype ruff black isort flake8 pylint bandit",
    "ts tsx js jsx mts cts mjs cjs vue svelte": "tsc vue-tsc svelte-check eslint oxlint biome flow",
    "rs toml": "cargo",
    "go mod": "go golangci-lint",
    "sh bash": "shellcheck",
    "rb": "rubocop srb",
    "php": "phpstan psalm",
    "css scss": "stylelint",
    "yml yaml": "yamllint",
    "md": "markdownlint",
    "tf": "terraform",
}
_SUFFIXES_OF = {name: frozenset(suffixes.split()) for suffixes, names in _SUFFIXES.items() for name in names.split()}
"""Maps each linter and type checker to the suffixes of the files that it reads."""

_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|\\\n|(?<![^\s;&|()])\#[^\n]*)|(?P<redirect>[0-9]*(?:<<<|<<-?|<>|>>|>\||[<>]&|&>>?|[<>]))"""
    r"""|(?P<op>\|\||&&|\|&|;;|[;&|()\n])|(?P<single>'[^']*')|(?P<double>"(?:[^"\\]|\\.)*")|(?P<escaped>\\.)"""
    r"""|(?P<bare>[^\s;&|()<>'"\\]+)""",
    re.DOTALL,
)
_KEYWORDS = _words("if then else elif fi for while until do done case esac function { } ! [[ select coproc")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_WRAPPERS = _words("env time nice nohup command exec sudo xvfb-run stdbuf chronic npx bunx uvx pnpx xargs timeout")
_RUN_WRAPPERS = {
    **dict.fromkeys(["uv", "poetry", "pipenv", "pdm", "rye", "hatch", "conda", "micromamba", "pixi"], "run"),
    **dict.fromkeys(["bundle", "npm", "pnpm", "yarn", "mise", "direnv"], "exec"),
    "coverage": "run",
}
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """A check that a command line ran, or that crow ran after an edit."""

    line: str
    """The words of the check itself, without wrappers such as `uv run`."""
    program: str
    kind: CheckKind
    outcome: Outcome = "unknown"
    exit_code: int | None = None
    """The exit code of the whole command line. None if the line timed out or was cancelled."""
    began: int = 0
    """The id of the entry with which the command line began, if it comes from a log."""
    files: tuple[str, ...] | None = None
    """The only files for which it ran. None if the fields below say what it covers."""
    directory: str = ""
    """Where it ran, as the line's `cd` names it. Empty for the session's directory."""
    paths: tuple[str, ...] = ()
    """The files and directories that it was limited to. Empty means everything in the directory."""
    is_partial: bool = False
    """It ran only some tests."""

    def covers(self, name: str) -> bool:
        """Return whether the check can find faults in the file `name`, relative to the session's directory. An empty
        name stands for files that the log does not name."""
        if self.files is not None:
            return name in self.files
        if self.kind in ("types", "lint"):
            suffixes = _SUFFIXES_OF.get(self.program)
            if name and suffixes is not None and name.rpartition(".")[2] not in suffixes:
                return False
            places = [posixpath.join(self.directory, path) for path in self.paths] or [self.directory]
            return any(_is_below(name, place) for place in places)
        return not self.directory or self.is_partial or _is_below(name, self.directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFacts:
    """What a command line does."""

    checks: tuple[CheckRun, ...] = ()
    may_change: bool = False
    """It may change files, if it is allowed to."""
    changes_last: bool = False
    """It may change files after its first check has begun, so that check says nothing about them."""


@dataclass(slots=True)
class _Segment:
    """One command of a line."""

    words: list[str]
    before: str
    """The operator in front of it."""
    writes: bool = False
    """Its output goes to a file."""


def command_facts(
    line: str,
    exit_code: int | None,
    *,
    cwd: str = "/",
    named: Sequence[str] = (),
    pipes: Sequence[Sequence[int]] | None = None,
) -> CommandFacts:
    """Read a command line that ended with `exit_code`. The exit code is None if the line timed out or was cancelled.

    `named` are the commands that the user calls checks. `pipes` are the exit codes of the line's last pipe, and
    those of earlier pipes in which a command failed; None if they are unknown.
    """
    segments, is_clear = _segments(line)
    if is_clear and len(segments) == 1 and (inner := _inner_line(segments[0].words)) is not None:
        return command_facts(inner, exit_code, cwd=cwd, named=named, pipes=None if "|" in inner else pipes)
    is_clear = is_clear and not any(_HIDING & set(each.words[:1]) for each in segments)
    directory = ""
    found: list[tuple[int, CheckRun]] = []
    changes: list[int] = []
    for index, segment in enumerate(segments):
        words = _unwrapped(segment.words)
        if words[:1] in (["cd"], ["pushd"]):
            directory = _inside(posixpath.join(directory, words[1] if len(words) > 1 else "~"), cwd)
        kind = _kind_of(words, named)
        if kind is not None:
            check = _check(words, kind, directory, cwd)
            outcome: Outcome = "unknown"
            if is_clear and not _is_forgiving(words):
                outcome = _outcome(segments, index, exit_code, pipes)
            elif exit_code != 0:
                outcome = _failure(segments, segment)
            found.append((index, replace(check, outcome=outcome, exit_code=exit_code)))
        elif segment.writes or not (_is_harmless(words) or (found and words[0] == "tee")):
            changes.append(index)
    first = found[0][0] if found else 0
    return CommandFacts(
        checks=tuple(check for _, check in found),
        may_change=bool(changes),
        changes_last=bool(changes)
        and (not is_clear or changes[-1] > first or any(each.before == "&" for each in segments)),
    )


def _segments(line: str) -> tuple[list[_Segment], bool]:
    """Split a line at its operators. The second value is false if the line is too complex to say from its exit code how
    its commands ended."""
    if len(line) > _MAX_CHARS:
        return [_Segment(words=line[:_MAX_CHARS].split(), before="")], False
    segments, at, is_clear, joins, target = [_Segment(words=[], before="")], 0, True, False, ""
    while at < len(line):
        found = _TOKEN.match(line, at)
        if found is None:  # a quote without its end
            return segments, False
        at, name, text = found.end(), found.lastgroup, found[0]
        if name == "op":
            is_clear = is_clear and text not in ("(", ")", ";;", "&")
            segments.append(_Segment(words=[], before=text))
        elif name == "redirect":
            is_clear = is_clear and "<<" not in text
            target = text
        elif name != "blank":
            piece = text[1:-1] if name in ("single", "double") else text[1:] if name == "escaped" else text
            is_clear = is_clear and (name in ("single", "escaped") or not ("$(" in piece or "`" in piece))
            current = segments[-1]
            if target:
                current.writes = current.writes or (">" in target and not _is_sink(target, piece))
            elif joins and current.words:
                current.words[-1] += piece
            else:
                current.words.append(piece)
            is_clear = is_clear and not (
                name == "bare" and not joins and piece in _KEYWORDS and len(current.words) == 1
            )
            target = ""
        joins = name not in ("blank", "op", "redirect")
    segments = [each for each in segments if each.words or each.writes]
    return segments, is_clear


def _is_sink(operator: str, target: str) -> bool:
    """Return whether writing to the target of this redirection changes no file of the workspace."""
    is_descriptor = operator.endswith("&") and re.fullmatch("[0-9]*-?", target) is not None
    return is_descriptor or target.startswith(("/dev/", "$TMPDIR"))


def _inner_line(words: Sequence[str]) -> str | None:
    """Return the line that `bash -c` runs, or None."""
    words = _unwrapped(words)
    if len(words) >= 3 and words[0] in ("bash", "sh", "zsh") and re.fullmatch(r"-[a-z]*c", words[1]):
        return words[2]
    return None


def _unwrapped(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the programs that run it, such as `uv run`."""
    rest = list(words)
    for _ in range(8):
        while rest and (rest[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(rest[0])):
            rest = rest[1:]
        if not rest:
            return rest
        rest[0] = posixpath.basename(rest[0]) or rest[0]
        if rest[0] in _WRAPPERS:
            rest = _after_options(rest[1:], takes_number=rest[0] == "timeout")
        elif len(rest) > 2 and _RUN_WRAPPERS.get(rest[0]) == rest[1]:
            rest = _after_options(rest[2:])
        elif _PYTHON.fullmatch(rest[0]) and len(rest) > 1:
            at = rest.index("-m") if "-m" in rest else 0
            if at and all(word.startswith("-") for word in rest[1:at]):
                rest = rest[at + 1 :]
            elif rest[1].endswith("manage.py"):
                rest = rest[1:]
            else:
                return rest
        elif rest[0] == "-m":
            rest = rest[1:]
        else:
            return rest
    return rest


def _after_options(words: list[str], *, takes_number: bool = False) -> list[str]:
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[1:]
    return words[1:] if takes_number else words


def _kind_of(words: Sequence[str], named: Sequence[str]) -> CheckKind | None:
    """Return the kind of check that a command is, or None."""
    if not words or _is_idle(words):
        return None
    for each in named:
        wanted = each.split()
        if wanted and (
            list(words[: len(wanted)]) == wanted or _unwrapped(wanted) == list(words[: len(_unwrapped(wanted))])
        ):
            return "named"
    if _matches_any(words, _FORMAT_CHECKS):
        return "lint"
    if _matches_any(words, _CHANGES):
        return None
    kind = next((kind for kind, patterns in _CHECKS.items() if _matches_any(words, patterns)), None)
    return None if kind == "build" and words[0] in ("make", "ninja") and _targets(words) else kind


def _is_idle(words: Sequence[str]) -> bool:
    return _IDLE_OF.get(words[0]) in words or not _IDLE.isdisjoint(words)


def _is_forgiving(words: Sequence[str]) -> bool:
    return not _FORGIVING.isdisjoint(words) or (words[0] == "make" and "-i" in words)


def _targets(words: Sequence[str]) -> list[str]:
    """Return the targets of `make` that do not build."""
    return [word for word in words[1:] if not word.startswith("-") and "=" not in word and word not in ("all", "build")]


def _matches_any(words: Sequence[str], patterns: str) -> bool:
    return any(_matches(words, pattern.replace("RUNNERS", _RUNNERS).split()) for pattern in patterns.split(";"))


def _matches(words: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a command matches a pattern of `_CHECKS`."""
    if not any(fnmatchcase(words[0], each) for each in pattern[0].split("|")):
        return False
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("-")}
    operands = [word for word in words[1:] if not word.startswith(("-", "+"))]
    place = 0
    for wanted in pattern[1:]:
        if wanted.startswith("-"):
            if not options & set(wanted.split("|")):
                return False
        elif wanted.startswith("@"):
            if not any(fnmatchcase(word, each) for word in operands for each in wanted[1:].split("|")):
                return False
        else:
            if place >= len(operands) or not any(fnmatchcase(operands[place], each) for each in wanted.split("|")):
                return False
            place += 1
    return True


def _is_harmless(words: Sequence[str]) -> bool:
    """Return whether a command changes no files."""
    if not words:
        return True
    if any(word.startswith(_OUTPUT_OF.get(words[0], ())) for word in words):
        return False
    if words[0] in _HARMLESS or _is_idle(words):
        return True
    if words[0] in ("source", "."):
        return len(words) > 1 and words[1].endswith("/activate")
    if words[0] == "git":
        verb = next((word for word in words[1:] if not word.startswith("-")), "status")
        return verb in _HARMLESS_GIT
    if words[0] == "find":
        return not any(word.startswith(("-delete", "-exec", "-fprint", "-fls", "-ok")) for word in words)
    return words[0] == "sed" and "-n" in words and not any(word.startswith(("-i", "--in-place")) for word in words)


def _check(words: Sequence[str], kind: CheckKind, directory: str, cwd: str) -> CheckRun:
    program, operands, is_value = words[0], [], False
    for word in words[1:]:
        if not word.startswith(("-", "+")) and not is_value:
            operands.append(word)
        is_value = word in _VALUED
    places = [word for word in operands if "/" in word or "." in word]
    paths: tuple[str, ...] = ()
    if kind in ("types", "lint") and program not in _PATHLESS:
        paths = tuple(_inside(path.removesuffix("/..."), cwd) for path in operands[program in _WITH_VERB :])
    is_partial = kind == "test" and _is_partial(words, [_inside(path.rstrip("/"), cwd) for path in places])
    return CheckRun(
        line=" ".join(words), program=program, kind=kind, directory=directory, paths=paths, is_partial=is_partial
    )


def _is_partial(words: Sequence[str], places: Sequence[str]) -> bool:
    """Return whether a test command runs only some tests."""
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("-")}
    if words[0] == "node":
        options -= _RUN_ALL
    if words[:2] in (["cargo", "test"], ["cargo", "nextest"]) and len([w for w in words[2:] if w[0] != "-"]) > (
        words[1] == "nextest"
    ):
        return True
    whole = ("", ".", "./...", "...")
    return bool(options & _NARROWING) or any(
        place not in whole and ("/" in place.removesuffix("/...") or "." in place) for place in places
    )


def _outcome(
    segments: Sequence[_Segment], index: int, exit_code: int | None, pipes: Sequence[Sequence[int]] | None
) -> Outcome:
    """Return how the command at `index` ended, as far as the exit code of the whole line shows it."""
    if exit_code is None:
        return _failure(segments, segments[index])
    start = max((at for at in range(index + 1) if segments[at].before in (";", "\n", "")), default=0)
    end = next((at for at in range(index + 1, len(segments)) if segments[at].before in (";", "\n")), len(segments))
    sets = [segment.words for segment in segments[:start] if segment.words[:1] == ["set"]]
    stops = [word.startswith("-") for words in sets for word in words[1:2] if "e" in word][-1:] == [True]
    if end < len(segments) and not (stops and exit_code == 0):
        return "unknown"
    if end < len(segments) and any(each.before == "&&" for each in segments[start + 1 : end]):
        return "unknown"  # `set -e` does not end a line between these commands
    begin = max(at for at in range(index + 1) if segments[at].before not in ("|", "|&"))
    pipeline_end = next((at for at in range(index + 1, end) if segments[at].before not in ("|", "|&")), end)
    if pipeline_end > index + 1:
        last = next(iter(pipes or ()), ())
        if pipeline_end == len(segments) and len(last) == pipeline_end - begin:
            return "passed" if last[index - begin] == 0 else "failed"
        was_hidden = pipes is None or any(any(each[:-1]) for each in pipes)
        if was_hidden and not any("pipefail" in words for words in sets):
            return "unknown"
    is_optional = any(each.before == "||" for each in (segments[begin], *segments[index + 1 : end]))
    if exit_code == 0:
        return "unknown" if is_optional else "passed"
    tried = segments[:end] if stops else segments[start:end]
    if all(each.before == "||" for each in tried[1:]):  # the line fails only if all of them fail
        return "failed"
    return _failure(tried, segments[index])


def _failure(segments: Sequence[_Segment], check: _Segment) -> Outcome:
    """Return how `check` ended in a failed line of these commands: `unknown` if another command may have failed
    instead."""
    others = [each for each in segments if each is not check and each.words]
    is_blamed = all(
        each.words[0] in _UNFAILING or (each.before in ("|", "|&") and each.words[0] in _FILTERS) for each in others
    )
    return "failed" if is_blamed else "unknown"


def _inside(path: str, cwd: str) -> str:
    """Return a path relative to `cwd` if it is below it, without `.` and `..` where possible."""
    joined = posixpath.normpath(posixpath.join(cwd, path))
    if joined == posixpath.normpath(cwd):
        return ""
    return joined.removeprefix(cwd.rstrip("/") + "/")


def _is_below(name: str, place: str) -> bool:
    place = posixpath.normpath(place) if place else ""
    return place in ("", ".") or name == place or name.startswith(place.rstrip("/") + "/")
