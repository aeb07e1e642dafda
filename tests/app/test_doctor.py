"""`crow doctor` and `crow models` against a real server on the loopback."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import pytest

from crow.cli import main
from crow.doctor import Finding, check_everything, sandbox_advice, try_to_escape
from crow.settings import load_settings
from crow.store.sqlite.store import SqliteStore
from crow.tools import NOTHING_EXCLUDED, CommandAccess, ExcludedPaths, OnOutput
from crow.tools.layers import Layer
from crow.tools.network import CommandNetwork
from crow.tools.sandbox.confiner import choose_sandbox
from crow.tools.workspace import DiskWorkspace
from tests.store.scenes import converse, new_session
from tests.support import foreign_sessions as foreign
from tests.support.disks import without_shared_memory
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, body, calls, failing, text

ROOT = Path(__file__).parents[2]
OFF = {"confinement": "warning"}
"""Confinement is turned off in these tests, except in those about it."""

TINY = ROOT / "tests" / "tools" / "servers" / "tiny.py"


@dataclass(frozen=True)
class Done:
    """What a command line gave."""

    returncode: int
    stdout: str
    stderr: str


class Run(Protocol):
    """Runs `crow` in this process, in the directory `home`, with no environment but `env`."""

    def __call__(self, home: Path, *arguments: str, **env: str) -> Done: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def command(home: Path, *arguments: str, **env: str) -> Done:
        with monkeypatch.context() as patched:
            for name in os.environ.keys() - {"PATH"}:
                patched.delenv(name)
            for name, value in {"CROW_HOME": str(home), "HOME": str(home), "CROW_SANDBOX": "off", **env}.items():
                patched.setenv(name, value)
            patched.chdir(home)
            code = main(arguments)
        return Done(code, *capfd.readouterr())

    return command


def findings(done: Done) -> dict[str, dict[str, Any]]:
    assert done.stderr == ""
    return {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}


def states(done: Done) -> dict[str, str]:
    return {check: each["state"] for check, each in findings(done).items()}


def answer_well(request: Recorded) -> Reply:
    return calls(("report_word", {"word": "ready"})) if "tools" in request.body else text("rea", "dy")


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint.in_thread(otherwise=answer_well) as server:
        yield server


def environment(endpoint: FakeEndpoint, **env: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": "sk-secret-123456",
        "CROW_MODEL": "fake-model",
        **env,
    }


def test_a_working_endpoint_passes_every_check(run: Run, tmp_path: Path, endpoint: FakeEndpoint) -> None:
    (tmp_path / "config.toml").write_text("model.context_window = 64000\n")
    (tmp_path / "config.toml").chmod(0o600)
    server = f"{sys.executable} {TINY}"
    done = run(tmp_path, "doctor", "--json", "--mcp", server, **environment(endpoint))
    assert states(done) == {
        "configuration": "ok",
        "database": "ok",
        "endpoint": "ok",
        "key": "ok",
        "model": "ok",
        "streaming": "ok",
        "usage": "ok",
        "context window": "ok",
        "tool calling": "ok",
        "API": "ok",
        "learned: usage": "ok",
        "tools": "ok",
        "confinement": "warning",
        f"MCP server {Path(sys.executable).name}": "ok",
    }
    assert done.returncode == 0


def test_each_warning_says_what_to_do(run: Run, tmp_path: Path, endpoint: FakeEndpoint) -> None:
    endpoint.models = ["fake-model-2"]
    endpoint.script(body(b'data: {"choices":[{"delta":{"content":"All of it at once."},"finish_reason":"stop"}]}\n\n'))
    endpoint.script(text("I can call no tools."))
    done = run(tmp_path, "doctor", "--json", **environment(endpoint))
    found = findings(done)
    assert {check: each["state"] for check, each in found.items() if each["state"] != "ok"} == {
        "model": "warning",
        "streaming": "warning",
        "usage": "warning",
        "context window": "warning",
        "tool calling": "failed",
        "confinement": "warning",
    }
    assert found["model"]["advice"] == "Did you mean fake-model-2? crow models lists them all."
    assert "parser for tool calls" in found["tool calling"]["advice"]
    assert done.returncode == 1


def test_a_learned_window_is_shown_with_its_source_unless_one_is_configured(
    run: Run, tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    found = findings(run(tmp_path, "doctor", "--json", **environment(endpoint)))["context window"]
    assert found["words"] == "not known: crow assumes 128,000 tokens"
    learned = {
        "tokens": 12_000,
        "source": 'a refused request of about 13,000 tokens: "at most 12000"',
        "learned_on": "2026-01-02",
        "session": "s",
    }
    scopes = "for one session only (seen once)", "for every session (seen 2 times)"
    for times, scope in enumerate(scopes, start=1):
        with closing(sqlite3.connect(tmp_path / "crow.db")) as connection, connection:
            facts = json.dumps({"window": learned | {"times": times}})
            connection.execute("UPDATE endpoints SET learned = ?", (facts,))
        found = findings(run(tmp_path, "doctor", "--json", **environment(endpoint)))["context window"]
        assert found["words"] == (
            f"Crow learned a window of 12,000 tokens on 2026-01-02, {scope}, from a refused request of about 13,000 "
            'tokens: "at most 12000". Crow uses it only to decide when to compact. When the context is full, crow '
            "tests whether the endpoint accepts more."
        )
        assert "use /context forget in a session" in found["advice"]
    (tmp_path / "config.toml").write_text("model.context_window = 128000\n")
    found = findings(run(tmp_path, "doctor", "--json", **environment(endpoint)))["context window"]
    assert found["words"] == "128,000 tokens, as configured"


def test_everything_learned_of_the_endpoint_is_shown_with_its_words_and_next_test(
    run: Run, tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(failing(400, "Unknown parameter: 'stream_options'"))
    found = findings(run(tmp_path, "doctor", "--json", **environment(endpoint)))
    assert re.fullmatch(
        r"Crow leaves this out of requests \(since (\S+)\), for one session only \(seen once\), because of a "
        r"refused request: \"Unknown parameter: 'stream_options' \(HTTP 400\)\"\. Crow tests this again on \S+\.",
        found["learned: usage while streaming (stream_options)"]["words"],
    )
    assert found["learned: usage"]["words"].startswith("The endpoint reports input and output tokens (after several")


@pytest.mark.parametrize("case", ["key", "server", "configuration", "database", "nothing"])
def test_each_failure_is_named_and_checks_that_depend_on_it_are_skipped(
    run: Run, tmp_path: Path, endpoint: FakeEndpoint, case: str
) -> None:
    env = environment(endpoint)
    match case:
        case "key":
            (tmp_path / "config.toml").write_text(
                '[providers.far]\nbase_url = "http://far.invalid/v1"\nmodels = ["m"]\n'
            )
            env = {}
            expected = {"key": "failed"}
        case "server":
            env |= {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
            expected = {"endpoint": "failed", "answers": "skipped"}
        case "configuration":
            (tmp_path / "config.toml").write_text("model.context_window = 1\n")
            expected = {"configuration": "failed", "model": "skipped", "confinement": "skipped"}
        case "database":
            (tmp_path / "crow.db").write_bytes(b"no database" * 1000)
            expected = {"database": "failed", "context window": "warning"}
        case _:
            env = {}
            expected = {"model": "failed"}
    done = run(tmp_path, "doctor", "--json", **env)
    assert {check: state for check, state in states(done).items() if state != "ok"} == OFF | expected
    assert done.returncode == 1


def test_a_refused_key_is_named_and_not_shown(run: Run, tmp_path: Path, endpoint: FakeEndpoint) -> None:
    def refusing(request: Recorded) -> Reply:
        return failing(401, "Incorrect API key provided: sk-secret-123456")

    endpoint._reply = refusing  # type: ignore[method-assign]
    done = run(tmp_path, "doctor", **environment(endpoint))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert line.startswith("failed   key")
    assert "refused the key: Incorrect API key provided: [secret]" in line
    assert "sk-secret" not in done.stdout + done.stderr
    assert done.returncode == 1
    endpoint._reply = FakeEndpoint._reply.__get__(endpoint)  # type: ignore[method-assign]
    endpoint._otherwise = refusing
    done = run(tmp_path, "doctor", "--json", **environment(endpoint))  # everybody may see its list of models
    assert {check: state for check, state in states(done).items() if state != "ok"} == OFF | {"key": "failed"}


def test_the_built_in_model_passes_without_an_endpoint(run: Run, tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json", CROW_MODEL="offline")
    assert {check: state for check, state in states(done).items() if state != "ok"} == OFF
    assert done.returncode == 0


def create_database(tmp_path: Path) -> Path:
    """A database with a session of two turns."""
    path = tmp_path / "crow.db"

    async def fill() -> None:
        store = await SqliteStore.open(path)
        await store.create_session(new_session())
        await converse(store, "s1", "kittiwake", "albatross")
        await store.close()

    anyio.run(fill)
    return path


def test_a_data_directory_that_cannot_be_made_is_named_and_ends_no_check(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path, "doctor", "--json", CROW_HOME=str(tmp_path / "file" / "crow"), CROW_MODEL="offline")
    found = states(done)
    assert (done.returncode, found["database"], found["streaming"]) == (1, "failed", "ok")
    assert (found["tools"], found["confinement"]) == ("failed", "skipped")


def test_a_damaged_database_is_reported_and_repaired_on_request(run: Run, tmp_path: Path) -> None:
    path = create_database(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'entries_fts_data'").fetchone()
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = bytes(4096)
    path.write_bytes(content)
    done = run(tmp_path, "doctor", "--json", CROW_MODEL="offline")
    found = findings(done)["database"]
    assert (done.returncode, found["state"]) == (1, "failed")
    assert found["words"].startswith(f"{path} is damaged: ")
    assert "run crow doctor --repair" in found["advice"]
    done = run(tmp_path, "doctor", "--repair", "--json")
    found = findings(done)
    assert {check: each["state"] for check, each in found.items()} == {
        "damage": "warning",
        "copy": "ok",
        "database": "ok",
    }
    assert found["database"]["words"].endswith("(1 session, 6 entries)")
    assert done.returncode == 0
    assert states(run(tmp_path, "doctor", "--json", CROW_MODEL="offline"))["database"] == "ok"
    done = run(tmp_path, "doctor", "--repair")
    assert done.stdout == f"ok       database        {path} is whole: nothing was changed (1 session, 6 entries)\n"
    hits = run(tmp_path, "sessions", "search", "kittiwake", "--json").stdout.splitlines()
    assert len(hits) == 2


def test_entries_that_cannot_be_recovered_are_listed(run: Run, tmp_path: Path) -> None:
    path = create_database(tmp_path)
    content = path.read_bytes().replace(b'"text":"ALBATROSS"', b'"text":"ALBUTROSS"')
    path.write_bytes(content)
    found = findings(run(tmp_path, "doctor", "--json", CROW_MODEL="offline"))["database"]
    assert (found["state"], found["words"].partition(": ")[0]) == ("warning", "1 entry cannot be read")
    done = run(tmp_path, "doctor", "--repair", "--json")
    lost = findings(done)["lost"]
    assert lost["words"] == "entry 5 (assistant) of session s1: it is damaged: its checksum is wrong"
    assert "ALBUTROSS" not in run(tmp_path, "sessions", "show", "s1", "--full").stdout


def test_hooks_are_listed_in_order_and_a_missing_program_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[[hooks]]\nname = "format"\nevent = "after_tool"\ndoes = ["write"]\npaths = ["*.py", "*.pyi"]\n'
        'command = ["python3", "-I", "secret-argument"]\n'
        '[[hooks]]\nevent = "turn_end"\ncommand = ["hooks/tests.sh"]\n'
        '[[hooks]]\nevent = "turn_end"\ncommand = ["off"]\nenabled = false\n'
    )
    done = run(tmp_path, "doctor", "--json", CROW_MODEL="offline")
    hooks = [each for each in findings(done).values() if each["check"].startswith("hook ")]
    assert [(each["check"], each["state"], each["words"]) for each in hooks] == [
        ("hook format", "ok", "runs at after_tool; does: write; paths: *.py, *.pyi"),
        ("hook tests.sh", "failed", f"there is no program {tmp_path}/hooks/tests.sh"),
    ]
    assert str(tmp_path / "config.toml") in hooks[1]["advice"]
    assert "secret-argument" not in done.stdout
    assert done.returncode == 1


def test_agent_files_that_cannot_be_used_are_named(run: Run, tmp_path: Path) -> None:
    for folder, name, head in (
        ("agents", "fine", "description: x"),
        ("agents", "broken", "description: x\nmode: yolo"),
        (".crow/agents", "theirs", "tools: grep"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"{name}.md").write_text(f"---\n{head}\n---\nDo it.")
    found = findings(run(tmp_path, "doctor", "--json", CROW_MODEL="offline"))
    assert {check: each["words"] for check, each in found.items() if check.startswith("agent ")} == {
        "agent broken": f"{tmp_path}/agents/broken.md: its mode is yolo; expected one of plan, ask, accept-edits, auto",
        "agent theirs": f"{tmp_path}/.crow/agents/theirs.md: its front matter has no description",
    }


async def test_an_unsuitable_disk_for_the_database_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_shared_memory(monkeypatch)
    loaded = load_settings({}, {"CROW_HOME": str(tmp_path), "CROW_MODEL": "offline"})
    found: dict[str, Finding] = {}
    await check_everything(loaded, lambda finding: found.update({finding.check: finding}))
    assert found["database"].state == "warning"
    assert "network disk" in found["database"].words


def test_models_are_listed_one_on_a_line(run: Run, tmp_path: Path, endpoint: FakeEndpoint) -> None:
    endpoint.models = ["b", "a"]
    assert [line.split("\t")[0] for line in run(tmp_path, "models", **environment(endpoint)).stdout.splitlines()] == [
        "b",
        "a",
    ]
    (tmp_path / "config.toml").write_text(f'[providers.here]\nbase_url = "{endpoint.base_url}"\n')
    done = run(tmp_path, "models", "here", "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"name": "b"}, {"name": "a"}]
    done = run(tmp_path, "models", "there")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('crow: No provider "there" in ')


def test_sessions_of_other_tools_are_mentioned_until_they_are_imported(run: Run, tmp_path: Path) -> None:
    foreign.claude_code(tmp_path)
    assert findings(run(tmp_path, "doctor", "--json", CROW_MODEL="offline"))["import claude-code"]["words"] == (
        f"claude-code has 1 session in {tmp_path}/.claude/projects; "
        "to import them, run `crow sessions import --from claude-code`"
    )
    done = run(tmp_path, "sessions", "import", "--from", "claude-code")
    assert (done.returncode, done.stderr) == (0, "")
    assert "import claude-code" not in findings(run(tmp_path, "doctor", "--json", CROW_MODEL="offline"))


def confined_here() -> str:
    """Why commands cannot be confined on this machine; empty if they can."""
    choice = choose_sandbox()
    return choice.problem if choice.sandbox is None else ""


def test_confinement_is_proved_by_attempts_that_fail(run: Run, tmp_path: Path) -> None:
    if problem := confined_here():
        pytest.skip(problem)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_nest").write_text("key")
    done = run(tmp_path, "doctor", "--json", CROW_MODEL="offline", CROW_SANDBOX="required", HOME=str(tmp_path))
    found = findings(done)
    proofs = ("confinement", "read access", "write access", "secrets", "processes", "network")
    assert {check: found[check]["state"] for check in proofs} == dict.fromkeys(proofs, "ok")
    assert "confines commands; " in found["confinement"]["words"]
    assert found["secrets"]["words"] == "a write command was not able to read crow's database or ~/.ssh"
    assert done.returncode == 0


class Unconfined(DiskWorkspace):
    """Gives every command full access."""

    async def run(
        self,
        command: str,
        *,
        access: CommandAccess,
        timeout_s: float,
        on_output: OnOutput,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        network: CommandNetwork | None = None,
    ) -> tuple[int | None, str]:
        assert access
        assert network is None
        assert not excluded.patterns
        assert layer is None
        return await super().run(command, access="full", timeout_s=timeout_s, on_output=on_output)


def test_every_attempt_to_escape_succeeds_where_nothing_confines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, place = tmp_path / "home", tmp_path / "work"
    for folder in (home / ".ssh", place):
        folder.mkdir(parents=True)
    (home / ".ssh" / "id_nest").write_text("key")
    monkeypatch.setenv("HOME", str(home))
    create_database(home)
    found: list[Finding] = []
    paths = load_settings({}, {"CROW_HOME": str(home)}).paths
    anyio.run(partial(try_to_escape, Unconfined(place), paths, found.append, has_network=False))
    assert [(each.check, each.state) for each in found] == [
        ("read access", "failed"),
        ("write access", "failed"),
        ("secrets", "failed"),
        ("processes", "failed"),
        ("network", "failed"),
    ]
    assert found[1].words == "a write command was able to write outside of the workspace"
    assert all("SECURITY.md" in each.advice for each in found)
    assert not list(home.glob(".crow-doctor-*")), "what the attempts wrote is removed"


def test_what_would_make_confinement_possible_is_said(run: Run, tmp_path: Path) -> None:
    found = findings(run(tmp_path, "doctor", "--json", CROW_MODEL="offline"))["confinement"]
    assert found["words"] == (
        '`sandbox.enabled` is "off"; every command has full access, and needs your permission unless a rule allows it'
    )
    assert found["advice"] == 'Set sandbox.enabled = "auto".'


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is about Linux")
@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (None, "", "Install bubblewrap (apt, dnf, pacman, zypper or apk"),
        (
            "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1\n",
            "Add a profile for bwrap with the rule `userns,`",
        ),
        ("proc/sys/user/max_user_namespaces", "0\n", "The sysctl user.max_user_namespaces is 0"),
        ("proc/sys/kernel/unprivileged_userns_clone", "0\n", "The sysctl kernel.unprivileged_userns_clone is 0"),
        (".dockerenv", "", "This is a container, and its seccomp profile"),
        ("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "0\n", "Run `bwrap --ro-bind / / true` by hand"),
    ],
)
def test_the_advice_on_confinement_fits_the_machine(tmp_path: Path, file: str | None, text: str, words: str) -> None:
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert words in sandbox_advice(tmp_path, has_bubblewrap=file is not None)


REFUSAL = (
    "Function tools with reasoning_effort are not supported for gpt-x in /v1/chat/completions. To use function tools, "
    "use /v1/responses or set reasoning_effort to 'none'."
)


def answer_as_the_newest(request: Recorded) -> Reply:
    """Refuse tools on Chat Completions unless the request turns the reasoning off."""
    if request.wire == "chat" and "tools" in request.sent and request.sent.get("reasoning_effort") != "none":
        return failing(400, REFUSAL, type="invalid_request_error", param="reasoning_effort", code=None)
    return answer_well(request)


def test_an_endpoint_that_refuses_tools_with_reasoning_is_asked_on_its_other_api(
    run: Run, tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.answer_with(answer_as_the_newest)
    endpoint.wires = ("chat", "responses")
    done = run(tmp_path, "doctor", "--json", **environment(endpoint))
    found = findings(done)
    assert (found["tool calling"]["state"], found["API"]["words"]) == ("ok", "crow speaks Responses with this model")
    assert found["learned: API Chat Completions"]["words"].startswith("Crow uses another API of this endpoint")
    assert [request.wire for request in endpoint.asked] == ["chat", "chat", "responses"]
    assert endpoint.asked[-1].sent["reasoning"] == {"effort": "medium", "summary": "auto"}


def test_doctor_names_reasoning_as_the_cause_if_the_settings_allow_only_one_api(
    run: Run, tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    (tmp_path / "config.toml").write_text('model.wire = "chat"\n')
    (tmp_path / "config.toml").chmod(0o600)
    endpoint.answer_with(answer_as_the_newest)
    found = findings(run(tmp_path, "doctor", "--json", **environment(endpoint)))["tool calling"]
    assert found["state"] == "failed"
    assert found["words"].startswith("the endpoint refuses tools while the model reasons: ")
    assert found["advice"] == (
        'Crow speaks Chat Completions with this model. Set wire = "auto" or "responses" in [model] or '
        '[providers.NAME], so that crow uses another API. Or set thought_level = "off" for this model.'
    )


SHORT = "Use /v1/responses."
LONG = REFUSAL + " See the guide for reasoning models." * 40
UNSUPPORTED = "'tools' is not supported with reasoning_effort on this endpoint."


def refusing(status: int, words: str) -> Callable[[Recorded], Reply]:
    """Refuse tools with reasoning on Chat Completions."""

    def answer(request: Recorded) -> Reply:
        if request.wire == "chat" and "tools" in request.sent and request.sent.get("reasoning_effort") != "none":
            return failing(status, words, type="invalid_request_error", code=None)
        return answer_well(request)

    return answer


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "words"),
    [
        *[(400, SHORT), (400, LONG), (404, ""), (404, SHORT), (422, UNSUPPORTED)],
        (400, "Please disable reasoning before passing tools to this deployment."),
        (400, 'model "gpt-x" is not accessible via the /chat/completions endpoint'),
    ],
)
def test_doctor_tries_tools_with_reasoning_and_understands_each_refusal(
    run: Run, tmp_path: Path, endpoint: FakeEndpoint, status: int, words: str
) -> None:
    endpoint.answer_with(refusing(status, words))
    endpoint.wires = ("chat", "responses")
    found = findings(run(tmp_path, "doctor", "--json", **environment(endpoint)))
    assert (found["tool calling"]["state"], found["API"]["words"]) == ("ok", "crow speaks Responses with this model")
    (tmp_path / "config.toml").write_text('model.wire = "chat"\n')
    (tmp_path / "config.toml").chmod(0o600)
    (tmp_path / "crow.db").unlink()
    tried = findings(run(tmp_path, "doctor", "--json", **environment(endpoint)))["tool calling"]
    assert tried["state"] == "failed"
    assert tried["words"].startswith("the endpoint refuses tools while the model reasons: ")
    assert 'thought_level = "off"' in tried["advice"]


def test_traces_are_reported_only_if_the_user_wants_them(run: Run, tmp_path: Path) -> None:
    def line(toml: str) -> list[str]:
        (tmp_path / "config.toml").write_text(toml)
        done = run(tmp_path, "doctor", CROW_HOME=str(tmp_path), CROW_MODEL="offline", CROW_SANDBOX="off")
        return [line.strip() for line in done.stdout.splitlines() if "telemetry" in line]

    assert line("[telemetry]\ncontent = true\n") == []
    (found,) = line("[telemetry]\nenabled = true\n")
    assert found.endswith("traces without content are sent to a collector")


def test_each_credential_is_read_and_never_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[credentials."git.test"]\ntoken_env = "MINE"\n[credentials."api.test"]\ntoken_env = "UNSET"\naccess = "read"\n'
    )
    done = run(tmp_path, "doctor", MINE="value-of-the-user", CROW_MODEL="offline")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any('credential git.test from MINE, in the header Authorization; access is "ask"' in line for line in lines)
    assert any("credential api.test the environment variable UNSET is not set" in line for line in lines)
    assert any("credentials are not used: only commands in layers" in line for line in lines)
    shown = run(tmp_path, "config", MINE="value-of-the-user").stdout
    assert 'credentials."git.test".token_env' in shown
    assert "value-of-the-user" not in done.stdout + shown
