"""The command line."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from crow.agent.permissions.rules import MODES
from crow.cli import main
from crow.cli.arguments import whole_parser
from crow.cli.reference import reference_of
from crow.domain.messages import Text
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore
from crow.version import __version__
from tests.support.fork_server import command, put_on_path
from tests.support.terminal import forkable, start

INITIALIZE = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "CROW_MODEL", "CROW_LOG", "CROW_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CROW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


async def add_session(home: Path, session_id: str, cwd: str, prompt: str) -> None:
    await anyio.Path(home).mkdir(exist_ok=True)
    store = await SqliteStore.open(home / "crow.db")
    try:
        await store.create_session(NewSession(id=session_id, cwd=cwd, model="offline", mode="ask", title=prompt))
        await store.enqueue(session_id, (Text(text=prompt),), f"message-{session_id}")
        start = await store.take_turn(session_id, f"message-{session_id}", leaf=None)
        await store.append(session_id, leaf=start.entries[-1].id, turn=start.turn, entries=(), release=True)
    finally:
        await store.close()


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    process = start(arguments, env=forkable(os.environ), cwd=Path.cwd(), stdin=subprocess.PIPE)
    out, err = process.communicate(stdin)
    return subprocess.CompletedProcess(arguments, process.wait(), out, err)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"crow {__version__}\n")


def test_without_arguments_a_terminal_gets_help() -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run([sys.executable, "-m", "crow"], stdin=theirs, capture_output=True, timeout=120)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"usage: crow")


@pytest.mark.parametrize("arguments", [(), ("acp",)])
def test_without_a_terminal_the_protocol_is_served_until_input_ends(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, stdin=INITIALIZE)
    assert (done.returncode, done.stderr) == (0, b"")
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["result"]["protocolVersion"] == 1


def test_the_protocol_is_served_even_if_the_settings_are_invalid(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("[model]\nname = 1\n")
    done = run("acp", stdin=INITIALIZE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["result"]["protocolVersion"] == 1


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err


def test_config_prints_toml_with_sources_and_without_secrets(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "config.toml").write_text(
        'models = ["b"]\n[model]\nbase_url = "http://h/v1"\nheaders = { X-Key = "header-secret-0123456789" }\n'
    )
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789abcdefgh")
    assert main(["config", "--model", "a"]) == 0
    out = capsys.readouterr().out
    assert f"{home / 'config.toml'}\n" in out
    shown = tomllib.loads(out)
    assert shown["models"] == ["b"]
    assert shown["model"] == {
        "name": "a",
        "base_url": "http://h/v1",
        "api_key": "sk-…efgh",
        "api_key_env": "OPENAI_API_KEY",
        "takes_images": True,
        "extra_body": {},
        "headers": {"X-Key": "hea…6789"},
    }
    sources = {line.split()[0]: line.rsplit("# ", 1)[1] for line in out.splitlines() if " = " in line}
    assert {key: source for key, source in sources.items() if source != "default"} == {
        "models": "config.toml",
        "model.name": "flag --model",
        "model.base_url": "config.toml",
        "model.api_key": "environment OPENAI_API_KEY",
        "model.headers": "config.toml",
    }


def test_a_short_secret_is_masked_completely(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "short-key")
    assert main(["config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["model"]["api_key"] == "…"


def test_an_invalid_setting_gives_one_sentence_and_exit_code_2(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    file = home / "config.toml"
    file.write_text('[model]\ncontext_window = "128k"\n')
    assert main(["config"]) == 2
    assert capsys.readouterr() == (
        "",
        f'crow: {file}: model.context_window is "128k"; expected a whole number of tokens, such as 128000\n',
    )


def test_listing_creates_no_database(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not home.exists()


def test_a_pipe_gets_one_line_for_each_session_the_newest_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(add_session, home, "s1", "/one", "first prompt")
    anyio.run(add_session, home, "s2", "/two", "second\tprompt")

    def output(*arguments: str) -> str:
        assert main(["sessions", *arguments]) == 0
        return capsys.readouterr().out

    lines = [line.split("\t") for line in run("sessions").stdout.decode().splitlines()]
    assert [(line[0], *line[2:5]) for line in lines] == [
        ("s2", "1", "/two", "second prompt"),
        ("s1", "1", "/one", "first prompt"),
    ]
    assert output("--cwd", "/one").split("\t")[0] == "s1"
    assert output("--cwd", "/elsewhere") == ""
    (row,) = (json.loads(line) for line in output("--json", "--cwd", "/two").splitlines())
    assert (row["id"], row["title"], row["cwd"], row["entries"], row["model"], row["mode"]) == (
        "s2",
        "second\tprompt",
        "/two",
        1,
        "offline",
        "ask",
    )


def test_only_all_lists_more_than_twenty_sessions(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(22):
        anyio.run(add_session, home, f"s{number}", "/one", "prompt")
    assert main(["sessions"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 20
    assert main(["sessions", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"s{number}" for number in reversed(range(22))]


def test_a_file_that_is_not_a_database_gives_one_sentence_and_exit_code_1(home: Path) -> None:
    home.mkdir()
    (home / "crow.db").write_bytes(b"no database" * 1000)
    done = run("sessions")
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("crow: ")
    assert str(home / "crow.db") in line
    assert (home / "crow.db").read_bytes() == b"no database" * 1000


def test_a_closed_pipe_is_not_reported() -> None:
    process = subprocess.Popen([*command(), "config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=120) == 1


def test_a_broken_installation_gives_one_sentence_and_a_traceback_in_the_log(home: Path) -> None:
    script = "import sys\nsys.modules['crow.app'] = None\nfrom crow.cli import main\nsys.exit(main(['acp']))"
    done = subprocess.run(command(script), input=INITIALIZE, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("crow: internal error: ModuleNotFoundError: ")
    assert str(home / "crow.log") in line
    assert "Traceback" in (home / "crow.log").read_text()


BASH = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_crow
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def in_bash(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Completes a line in bash, in a directory with `a file.txt` and `folder/`."""
    bash, place = shutil.which("bash"), tmp_path_factory.mktemp("shell")
    assert bash is not None
    script = place / "crow.bash"
    script.write_bytes(run("completion", "bash").stdout)
    put_on_path(place)
    (place / "work" / "folder").mkdir(parents=True)
    (place / "work" / "a file.txt").touch()

    def complete(*words: str) -> list[str]:
        env = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}
        command = [bash, "--norc", "-c", BASH, "bash", str(script), *words]
        done = subprocess.run(command, cwd=place / "work", env=env, capture_output=True, timeout=120, check=True)
        assert done.stderr == b""
        return done.stdout.decode().splitlines()

    return complete


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["do"], ["doctor"]),
        (["sess"], ["sessions", "session"]),
        (["run", "--mo"], ["--model", "--mode"]),
        (["run", "--mode", "a"], ["ask", "accept-edits", "auto"]),
        (["run", "--mode", "=", "pl"], ["plan"]),
        (["run", "--model", "sessions", "--max-c"], ["--max-cost"]),
        (["run", "--file", "a"], ["a file.txt"]),
        (["run", "--cwd", ""], ["folder"]),
        (["run", "--allow", "a"], [""]),
        (["session", "un"], ["unarchive", "unshare"]),
        (["sessions", "export", "--format", ""], ["jsonl", "markdown", "html", "case", "otlp"]),
        (["sessions", "--json", "lis"], ["list"]),
        (["sessions", "--cwd", "--al"], ["--all"]),
        (["trace", "s"], ["show"]),
        (["trace", "show", "a"], ["a file.txt"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes_commands_options_and_their_values(
    in_bash: Callable[..., list[str]], line: list[str], found: list[str]
) -> None:
    assert in_bash("crow", *line) == found


def test_fish_completes_below_an_alias_as_below_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    below = [line for line in capsys.readouterr().out.splitlines() if "seen_subcommand_from show" in line]
    assert any("__fish_seen_subcommand_from sessions session; and " in line for line in below)
    assert not any("__fish_seen_subcommand_from sessions; and " in line for line in below)


def test_the_manual_has_no_brackets_around_a_command_that_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man"]) == 0
    manual = capsys.readouterr().out
    assert '.SS "crow serve token COMMAND"' in manual
    assert '.SS "crow sessions [OPTION ...] [COMMAND]"' in manual


async def test_bash_completes_sessions_by_id_name_and_title(home: Path, in_bash: Callable[..., list[str]]) -> None:
    assert in_bash("crow", "run", "--session", "") == [""]  # there is no database yet
    for session_id, title in (
        ("crow-1a", "Build a nest"),
        ("crow-1b", "$(touch x) \x1b[31m\tred"),
        ("$(touch y)", "z"),
    ):
        await add_session(home, session_id, "/w", title)
    store = await SqliteStore.open(home / "crow.db")
    await store.update_session("crow-1a", {"alias": "nest"})
    await store.close()
    assert in_bash("crow", "run", "--session", "n") == ["nest"]
    assert in_bash("crow", "sessions", "show", "crow-1a") == ["crow-1a"]
    assert in_bash("crow", "sessions", "show", "BUILD") == ["crow-1a"]
    assert in_bash("crow", "sessions", "delete", "crow-1a", "crow-1b") == ["crow-1b"]
    assert in_bash("crow", "sessions", "show", "E") == [
        "crow-1b  $(touch x) \\x1b[31m red",
        "crow-1a  Build a nest",
        " ",
    ]
    assert in_bash("crow", "sessions", "show", "crow") == [
        "crow-1b  $(touch x) \\x1b[31m red",
        "crow-1a  Build a nest",
    ]
    store = await SqliteStore.open(home / "crow.db")
    await store.update_session("crow-1a", {"alias": "build:default"})  # a word break for bash
    await store.close()
    assert in_bash("crow", "sessions", "show", "buil") == ["crow-1a"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_each_completion_script_and_in_the_manual(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert main(["man"]) == 0
    manual = capsys.readouterr().out.replace("\\-", "-")
    commands = list(reference_of(whole_parser()).all())
    assert "crow sessions export" in {" ".join(each.path) for each in commands}
    for each in commands:
        assert each.path[-1] in script
        assert f'"{" ".join(each.path)}' in manual or len(each.path) == 1
        for flag in (flag for option in each.options for flag in option.flags):
            assert (flag if shell != "fish" else f"-{flag}".replace("---", "-l ").replace("--", "-s ")) in script
            assert flag in manual


def test_the_words_of_a_completion_are_those_that_crow_takes() -> None:
    run = next(command for command in reference_of(whole_parser()).commands if command.path[-1] == "run")
    assert next(option.words for option in run.options if "--mode" in option.flags) == MODES


def test_a_completion_for_no_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 2
    assert "bash, zsh or fish" in capsys.readouterr().err


def test_the_help_fits_into_a_terminal_of_24_lines_and_names_every_command() -> None:
    parser = whole_parser()
    lines = parser.format_help().splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) < 80
    table = parser.format_help().split("\n\n")[2].splitlines()
    assert sorted(line[11:].split()[0] for line in table) == sorted(
        one.path[-1] for one in reference_of(parser).commands
    )


def test_help_needs_no_argument_parser() -> None:
    program = "import sys; from crow.__main__ import main; sys.argv = ['crow', '--help']; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("usage: crow")
    assert {"argparse", "crow.cli"} & set(done.stdout.splitlines()[-1].split()) == set()
