"""What a receipt says about scripted turns."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from crow.domain.check_commands import command_facts
from crow.domain.conversation import for_model
from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Custom,
    Diff,
    Entry,
    File,
    Started,
    ToolResult,
    User,
)
from crow.domain.messages import JsonObject, Text, ToolCall
from crow.domain.receipts import NAMESPACE, Receipt, receipt_of

CWD = "/work"


class Script:
    """Writes the entries of a turn."""

    def __init__(self, session: str = "s", first: int = 10) -> None:
        self.entries: list[Entry] = []
        self.session = session
        self.next = first

    def add(self, body: Body, session: str = "") -> int:
        entry = Entry(id=self.next, conversation=1, session=session or self.session, parent=None, turn=1, body=body)
        self.entries.append(entry)
        self.next += 1
        return entry.id

    def begin(self, name: str, arguments: JsonObject, session: str = "") -> CallRef:
        call = ToolCall(id="c", name=name, arguments=json.dumps(arguments))
        ref = CallRef(assistant=self.add(Assistant(text="", message_id="m", calls=(call,)), session), index=0)
        self.add(Started(call=ref, why="mode auto"), session)
        return ref

    def end(self, ref: CallRef, name: str, raw: JsonObject, kind: str = "execute", session: str = "") -> None:
        shown = Announcement(title=name, kind=kind)  # type: ignore[arg-type]
        self.add(ToolResult(call=ref, name=name, text="", announcement=shown, raw_output=raw), session)

    def edit(self, path: str = "src/a.py", checks: Sequence[JsonObject] = (), session: str = "") -> None:
        ref = self.begin("edit_file", {"path": path}, session)
        self.add(File(call=ref, path=f"{CWD}/{path}", before=b"", after_hash="x", recorded_here=True), session)
        self.end(ref, "edit_file", {"checks": list(checks)} if checks else {}, "edit", session)

    def shell(
        self,
        line: str,
        code: int | None = 0,
        access: str = "read",
        pipes: Sequence[Sequence[int]] | None = None,
        session: str = "",
    ) -> None:
        ref = self.begin("shell", {"command": line}, session)
        raw = {"exit_code": code, "timed_out": code is None, "access": access}
        self.end(ref, "shell", raw if pipes is None else {**raw, "pipes": pipes}, session=session)

    def start_job(self, line: str, job: str = "job1", access: str = "read") -> None:
        ref = self.begin("shell", {"command": line, "background": True})
        self.end(ref, "shell", {"job": job, "state": "running", "access": access})

    def end_job(self, code: int = 0, job: str = "job1", *, told: bool = False, line: str = "pytest") -> None:
        if told:
            text = f"The background command {job} (`{line}`) has ended with exit code {code}. Read the rest"
            self.add(Custom(namespace="crow", text=text, for_model=True))
        else:
            ref = self.begin("shell_output", {"job": job})
            self.end(ref, "shell_output", {"job": job, "state": f"ended with exit code {code}"})

    def receipt(self, named: Sequence[str] = (), running: Sequence[str] = ()) -> Receipt | None:
        return receipt_of(self.entries, cwd=CWD, named=named, running=running)

    def state(self, named: Sequence[str] = (), running: Sequence[str] = ()) -> str:
        receipt = self.receipt(named, running)
        return "" if receipt is None else receipt.state


V, P, N = "verified", "partly verified", "not verified"


@pytest.mark.parametrize(
    ("line", "code", "pipes", "outcomes"),
    [
        ("pytest -q", 0, None, ["passed"]),
        ("pytest -q", 1, None, ["failed"]),
        ("pytest", None, None, ["failed"]),
        ("pytest || true", 0, None, ["unknown"]),
        ("pytest; echo done", 0, None, ["unknown"]),
        ("pytest\necho done", 0, None, ["unknown"]),
        ("set -e; pytest; echo done", 0, None, ["passed"]),
        ("set -e; pytest && echo done; ls", 0, None, ["unknown"]),
        ("set -e; mypy . && pytest; ls", 0, None, ["unknown", "unknown"]),
        ("set -e; set +e; pytest; ls", 0, None, ["unknown"]),
        ("ruff check --exit-zero .", 0, None, ["unknown"]),
        ("make -i test", 0, None, ["unknown"]),
        ("npm test --if-present", 0, None, ["unknown"]),
        ("npm test --if-present", 1, None, ["failed"]),
        ("cd web && npm test", 0, None, ["passed"]),
        ("pytest | tail -5", 0, None, ["unknown"]),
        ("pytest | tail -5", 0, [[1, 0]], ["failed"]),
        ("pytest | tail -5", 0, [[0, 0]], ["passed"]),
        ("set -o pipefail; pytest | tail", 0, None, ["passed"]),
        ("pytest | tail && echo ok", 0, [[0], [1, 0]], ["unknown"]),
        ("true || pytest", 0, None, ["unknown"]),
        ("test -d x || mkdir x && pytest", 0, None, ["passed"]),
        ("exit 0; pytest", 0, None, ["unknown"]),
        ("trap 'exit 0' EXIT; pytest", 0, None, ["unknown"]),
        ("if true; then pytest; fi", 0, None, ["unknown"]),
        ("! pytest", 0, None, ["unknown"]),
        ("(pytest)", 0, None, ["unknown"]),
        ("pytest &", 0, None, ["unknown"]),
        ("pytest() { true; }; pytest", 0, None, ["unknown", "unknown"]),
        ("echo pytest", 0, None, []),
        ("echo 'x && pytest'", 0, None, []),
        ("# pytest", 0, None, []),
        ("pytest --version", 0, None, []),
        ("pytest --collect-only", 0, None, []),
        ("make -n test", 0, None, []),
        ("ctest -N", 0, None, []),
        ("pytest --setup-only", 0, None, []),
        ("make clean", 0, None, []),
        ("ruff check --fix .", 0, None, []),
        ("grep pytest setup.cfg", 0, None, []),
        ("uv run -q python -m pytest", 0, None, ["passed"]),
        ("FOO=1 timeout 60 .venv/bin/pytest", 0, None, ["passed"]),
        ("bash -lc 'mypy . && pytest'", 0, None, ["passed", "passed"]),
        ("mypy . && pytest", 1, None, ["unknown", "unknown"]),
        ("mypy . && pytest", None, None, ["unknown", "unknown"]),
        ("pytest && ./deploy", 1, None, ["unknown"]),
        ("npm ci && npm test", 1, None, ["unknown"]),
        ("set -e; npm ci; npm test", 1, None, ["unknown"]),
        ("npm ci; npm test", 1, None, ["failed"]),
        ("cd web && npm test && echo ok", 1, None, ["failed"]),
        ("pytest || ./report", 1, None, ["failed"]),
        ("pytest | grep FAILED", 1, None, ["unknown"]),
        ("pytest | grep FAILED", 1, [[0, 1]], ["passed"]),
        ("cat names | pytest", 1, None, ["unknown"]),
        ("echo y | pytest", 1, [[0, 1]], ["failed"]),
        ("set -o pipefail; pytest | tail", 1, None, ["failed"]),
        ("if ./ready; then pytest; fi", 1, None, ["unknown"]),
        ("source .venv/bin/activate && tox", 0, None, ["passed"]),
        ("npx tsc --noEmit", 2, None, ["failed"]),
        ("go vet ./... && go test ./...", 0, None, ["passed", "passed"]),
        ("pytest 'unclosed", 0, None, ["unknown"]),
    ],
)
def test_the_exit_code_of_a_line_says_how_its_checks_ended(
    line: str, code: int | None, pipes: list[list[int]] | None, outcomes: list[str]
) -> None:
    facts = command_facts(line, code, cwd=CWD, pipes=pipes)
    assert [check.outcome for check in facts.checks] == outcomes


@pytest.mark.parametrize(
    ("line", "may_change"),
    [
        ("grep -o x a.txt | sort > /dev/null 2>&1", False),
        ("ls >&2", False),
        ("echo x > a.txt", True),
        ("echo x >& a.txt", True),
        ("sort -o a.txt a.txt", True),
        ("git diff --output=a.txt", True),
        ("df --output=size", False),
        ("git ls-files -o", False),
        ("find . -name x -fprintf a.txt %p", True),
        ("find . -okdir rm {} +", True),
        ("find . -newer x", False),
    ],
)
def test_a_command_that_may_write_files_is_known(line: str, may_change: bool) -> None:
    assert command_facts(line, 0).may_change is may_change


def _verified(script: Script) -> None:
    script.edit()
    script.shell("pytest")


def test_a_receipt_names_changes_checks_and_their_exit_codes() -> None:
    script = Script()
    script.edit("src/a.py")
    script.edit("/etc/x".lstrip("/"))
    script.shell("cd /work && pytest -q | tail -3", 0, pipes=[[0, 0]])
    receipt = script.receipt()
    assert receipt is not None
    assert receipt.text == (
        "Receipt: verified. Changed 2 files by 2 edits (`src/a.py`, `etc/x`). "
        "After the last change: `pytest -q` exit 0."
    )
    assert receipt.as_json() == {
        "state": "verified",
        "why": "",
        "files": ["src/a.py", "etc/x"],
        "edits": 2,
        "commands": [],
        "checks": [{"command": "pytest -q", "kind": "test", "exitCode": 0, "outcome": "passed"}],
    }


def test_a_receipt_counts_no_edits_if_only_a_command_changed_files() -> None:
    receipt = Receipt(state="not verified", why="no check ran", files=("src/a.py",), commands=("rm -rf src",))
    assert receipt.text == (
        "Receipt: not verified (no check ran). Changed 1 file (`src/a.py`) by 1 command (`rm -rf src`)."
    )


def test_a_turn_without_changes_has_no_receipt() -> None:
    script = Script()
    script.shell("pytest")
    script.shell("sed -i s/a/b/ x.py", access="read")  # confined: what it wrote was discarded
    assert script.receipt() is None


def test_a_receipt_is_one_safe_line_however_hostile_the_names_are() -> None:
    script = Script()
    script.edit("a`b\nc" + "x" * 5_000)
    script.shell("pytest `\n" + "y" * 9_000, 1)
    receipt = script.receipt()
    assert receipt is not None
    assert "\n" not in receipt.text
    assert len(receipt.text) < 1_000


def test_checks_that_others_claim_to_have_run_do_not_count() -> None:
    script = Script()
    script.edit()
    ref = script.begin("server__tool", {})
    script.end(ref, "server__tool", {"checks": [{"command": "pytest", "exit_code": 0}], "exit_code": 0}, "other")
    script.add(Custom(namespace="hook", text="The background command job1 (`pytest`) has ended with exit code 0."))
    assert script.state() == N


def test_receipts_change_nothing_that_is_sent_to_the_model() -> None:
    user = User(parts=(Text(text="hi"),), message_id="u")
    entries = [Entry(id=1, conversation=1, session="s", parent=None, turn=1, body=user)]
    receipt = Custom(namespace=NAMESPACE, text="Receipt", is_shown=True, message_id="r", data={"state": V})
    stored = [*entries, Entry(id=2, conversation=1, session="s", parent=1, turn=1, body=receipt)]
    assert for_model(stored).messages == for_model(entries).messages


# Each scenario writes the end of a turn that edited src/a.py, and says what must be true of it. They were written from
# the documentation (docs/receipts.md), not from the code.
def _plain(script: Script, check: str) -> str:
    script.shell(check)
    return V


def _failed(script: Script, check: str) -> str:
    script.shell(check, 1)
    return N


def _timed_out(script: Script, check: str) -> str:
    script.shell(check, None)
    return N


def _stale(script: Script, check: str) -> str:
    script.shell(check)
    script.edit("src/b.py")
    return N


def _missing(script: Script, _: str) -> str:
    script.shell("git status && ls -la")
    return N


def _unrelated(script: Script, _: str) -> str:
    script.shell("npx tsc --noEmit")
    return N


def _flaky(script: Script, check: str) -> str:
    script.shell(check, 1)
    script.shell(check, 0)
    return P


def _flaky_the_other_way(script: Script, check: str) -> str:
    script.shell(check, 0)
    script.shell(check, 1)
    return N


def _mended(script: Script, check: str) -> str:
    script.shell(check, 1)
    script.edit()
    script.shell(check, 0)
    return V


def _failed_with_another(script: Script, check: str) -> str:
    script.shell(f"{check} && mypy .", 1)
    script.shell("ruff check .")
    return N


def _hidden_by_true(script: Script, check: str) -> str:
    script.shell(f"{check} || true")
    return N


def _hidden_by_pipe(script: Script, check: str) -> str:
    script.shell(f"{check} 2>&1 | tail -20", 0, pipes=[[1, 0]])
    return N


def _open_pipe(script: Script, check: str) -> str:
    script.shell(f"{check} 2>&1 | tail -20", 0, pipes=[[0, 0]])
    return V


def _hidden_by_echo(script: Script, check: str) -> str:
    script.shell(f"{check}; echo finished")
    return N


def _in_directory(script: Script, check: str) -> str:
    script.shell(f"cd {CWD} && {check}")
    return V


def _elsewhere(script: Script, check: str) -> str:
    script.shell(f"cd api && {check}")
    return N


def _background(script: Script, check: str) -> str:
    script.start_job(check)
    script.end_job()
    return V


def _background_told(script: Script, check: str) -> str:
    script.start_job(check)
    script.end_job(told=True, line=check)
    return V


def _background_failed(script: Script, check: str) -> str:
    script.start_job(check)
    script.end_job(2)
    return N


def _background_never_ended(script: Script, check: str) -> str:
    script.start_job(check)
    return N


def _background_overtaken(script: Script, check: str) -> str:
    script.start_job(check)
    script.edit("src/b.py")
    script.end_job()
    return N


def _watcher_still_writes(script: Script, check: str) -> str:
    script.start_job("python generate.py --watch", "job7", access="write")
    script.shell(check)
    return N


def _formatter_first(script: Script, check: str) -> str:
    script.shell(f"ruff format . && {check}", access="write")
    return V


def _formatter_last(script: Script, check: str) -> str:
    script.shell(check)
    script.shell("ruff format .", access="write")
    return N


def _formatter_in_same_line(script: Script, check: str) -> str:
    script.shell(f"{check} && black .", access="write")
    return N


def _formatter_confined(script: Script, check: str) -> str:
    script.shell(check)
    script.shell("black .", access="read")
    return V


def _command_changes_last(script: Script, check: str) -> str:
    script.shell(check)
    script.shell("sed -i s/a/b/ src/a.py", access="full")
    return N


def _subagent_changes_last(script: Script, check: str) -> str:
    script.shell(check)
    script.edit("src/c.py", session="task-1")
    return N


def _subagent_checks(script: Script, check: str) -> str:
    script.edit("src/c.py", session="task-1")
    script.shell(check, session="task-1")
    return V


def _only_linter(script: Script, _: str) -> str:
    script.shell("ruff check .")
    return P


def _some_tests(script: Script, _: str) -> str:
    script.shell("pytest tests/test_a.py -k one")
    return P


def _some_tests_failed(script: Script, check: str) -> str:
    script.shell("pytest tests/test_a.py", 1)
    script.shell(check)
    return N


def _other_was_not_repeated(script: Script, check: str) -> str:
    script.shell("nox -s docs")
    script.edit("src/b.py")
    script.shell(check)
    return P


def _user_check(script: Script, _: str) -> str:
    script.edit("src/b.py", checks=[{"command": "./verify", "exit_code": 0, "files": None}])
    return V


def _user_check_of_one_file(script: Script, _: str) -> str:
    script.edit("src/b.py", checks=[{"command": "lint {files}", "exit_code": 0, "files": ["src/b.py"]}])
    return P


def _user_check_failed(script: Script, _: str) -> str:
    script.edit("src/b.py", checks=[{"command": "./verify", "exit_code": 3, "files": None}])
    return N


def _cancelled_command(script: Script, check: str) -> str:
    script.shell(check)
    script.begin("shell", {"command": "python migrate.py"})
    return N


SCENARIOS = [
    each for name, each in sorted(globals().items()) if getattr(each, "__code__", None) and name.startswith("_")
]
SCENARIOS = [each for each in SCENARIOS if each.__code__.co_argcount == 2]
CHECKS = ("pytest", "uv run pytest -q", "make test", "tox -e py312", "just ci", "python -m unittest", "npm test")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(500))
def test_scripted_turns_get_the_right_state(seed: int) -> None:
    rng = random.Random(seed)
    script, scenario = Script(), SCENARIOS[seed % len(SCENARIOS)]
    for _ in range(rng.randrange(3)):  # what came before the last change does not matter, if the program runs again
        script.shell(rng.choice(("ls", "cat src/a.py", "git diff")), rng.choice((0, 1)), rng.choice(("read", "full")))
    script.edit()
    expected = scenario(script, rng.choice(CHECKS))
    for _ in range(rng.randrange(3)):  # and neither does what only looks
        script.shell(rng.choice(("git status", "rg TODO src | head", "cat README.md")), 0, rng.choice(("read", "full")))
    assert (scenario.__name__, script.state()) == (scenario.__name__, expected)


def test_every_scenario_is_among_the_scripted_turns() -> None:
    assert len(SCENARIOS) >= 30


def _in_layer(line: str, *changed: tuple[str, str | None]) -> Script:
    """A turn with an edit, a check, and a command in a layer."""
    script = Script()
    _verified(script)
    ref = script.begin("shell", {"command": line})
    if changed:
        script.add(File(call=ref, path=CWD, before=None, after_hash="", recorded_here=True, change_set="x"))
    diffs = tuple(Diff(path=f"{CWD}/{path}", old_text=old, new_text="new") for path, old in changed)
    shown = Announcement(title=line, kind="execute", diffs=diffs)
    raw = {"exit_code": 0, "timed_out": False, "access": "layer"}
    script.add(ToolResult(call=ref, name="shell", text="", announcement=shown, raw_output=raw))
    return script


def test_a_layer_shows_whether_a_command_really_changed_files() -> None:
    assert _in_layer("python look.py").state() == V
    changed = _in_layer("python generate.py", ("src/b.py", "old")).receipt()
    assert changed is not None
    assert (changed.state, changed.files, changed.edits) == (N, ("src/a.py", "src/b.py"), 1)
    assert _in_layer("make test", ("src/b.py", "old")).state() == N
    assert _in_layer("pytest", (".pytest_cache/v/lastfailed", "{}"), ("junit.xml", None)).state() == V
    assert _in_layer("pytest", (".testmondata", "1")).state() == V
    assert _in_layer("python run.py", (".mypy_cache/x", None), (".coverage", "1")).state() == V
    assert _in_layer("python generate.py", (".github/workflows/ci.yml", "old")).state() == N
    assert _in_layer("python generate.py", (".env.example", None)).state() == N


def test_the_user_names_checks() -> None:
    script = Script()
    script.edit()
    script.shell("./scripts/verify.sh --fast")
    assert (script.state(), script.state(["./scripts/verify.sh"])) == (N, V)


def test_a_running_subagent_leaves_a_turn_unverified() -> None:
    script = Script()
    _verified(script)
    assert (script.state(), script.state(running=["the subagent “x” still runs"])) == (V, N)


def test_any_order_of_the_entries_gives_the_same_receipt() -> None:
    script = Script()
    _verified(script)
    _background(script, "mypy .")
    for seed in range(20):
        entries = script.entries[:]
        random.Random(seed).shuffle(entries)
        assert receipt_of(entries, cwd=CWD) == script.receipt()


def test_any_part_of_any_turn_has_a_receipt_or_none() -> None:
    for scenario in SCENARIOS:
        script = Script()
        script.edit()
        scenario(script, "pytest")
        for end in range(len(script.entries)):
            found = receipt_of(script.entries[:end], cwd=CWD)
            assert found is None or found.text
            receipt_of(script.entries[end:], cwd=CWD)
