from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from crow.domain.entries import Announcement
from crow.tools import Coverage, Outcome, PlannedCall
from tests.tools.conftest import OpenBox, call, skip_time, until_gone


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("echo hi", Outcome(text="hi", raw_output={"exit_code": 0, "timed_out": False, "access": "full"})),
        ("true", Outcome(text="(no output)", raw_output={"exit_code": 0, "timed_out": False, "access": "full"})),
        (
            "echo no >&2; exit 3",
            Outcome(
                text="no\n[exit code 3]",
                is_error=True,
                raw_output={"exit_code": 3, "timed_out": False, "access": "full"},
            ),
        ),
        (
            "false",
            Outcome(
                text="[exit code 1]", is_error=True, raw_output={"exit_code": 1, "timed_out": False, "access": "full"}
            ),
        ),
        (
            "kill -KILL $$",
            Outcome(
                text="[ended by SIGKILL]",
                is_error=True,
                raw_output={"exit_code": -9, "timed_out": False, "access": "full"},
            ),
        ),
    ],
)
async def test_a_command_returns_its_output_and_how_it_ended(open_box: OpenBox, command: str, outcome: Outcome) -> None:
    async with open_box() as box:
        assert await box.run("shell", command=command) == outcome


async def test_a_timeout_is_reported_and_keeps_the_output(open_box: OpenBox) -> None:
    async def expire(_: str) -> None:
        skip_time(300)

    async with open_box() as box:
        command = call("shell", command="echo begun; sleep 600", timeout_s=300)
        assert await box.toolbox.run(command, "call_7_0", expire) == Outcome(
            text="begun\n[timed out after 300 s; the command and all processes it started were ended. "
            "timeout_s can be at most 3600]",
            is_error=True,
            raw_output={"exit_code": None, "timed_out": True, "access": "full"},
        )


async def test_a_planned_command_is_no_barrier_and_names_its_command_line(open_box: OpenBox) -> None:
    async with open_box() as box:
        assert await box.plan("shell", command="make  test\n  && ls", description="run the tests") == PlannedCall(
            announcement=Announcement(title="make  test … (+1 line)", kind="execute"),
            access="execute",
            command_access="full",
            requested_access="read",
            coverage=Coverage(argument="make  test\n  && ls"),
        )
        with_nul = await box.plan("shell", command="a\0b")
        assert with_nul.fault == "shell: command contains a NUL character; expected a command line"
        assert (await box.run("shell", command="a\0b")).text == with_nul.fault


async def test_cancelling_a_call_ends_the_whole_process_group(open_box: OpenBox) -> None:
    async with open_box() as box:
        with anyio.CancelScope() as scope:

            async def stop_when_both_run(text: str) -> None:
                box.shown.append(text)
                scope.cancel()

            command = "sh -c 'sleep 600 & echo $$ $!; sleep 600'"
            await box.toolbox.run(call("shell", command=command), "call_1_0", stop_when_both_run)
        assert scope.cancelled_caught
        pids = [int(pid) for pid in box.shown[0].split()]
        assert len(pids) == 2
        for pid in pids:
            await until_gone(pid)


async def test_two_commands_run_at_once(open_box: OpenBox, root: Path) -> None:
    meeting = "touch {0}; until [ -e {1} ]; do sleep 0.01; done; echo met"
    async with open_box() as box:
        outcomes: list[Outcome] = []

        async def run(own: str, other: str) -> None:
            outcomes.append(await box.run("shell", command=meeting.format(own, other), timeout_s=60))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "a", "b")
            tasks.start_soon(run, "b", "a")
    assert [outcome.text for outcome in outcomes] == ["met", "met"]


async def test_seven_megabytes_of_output_cross_the_toolbox_whole(open_box: OpenBox) -> None:
    async with open_box() as box:
        outcome = await box.run("shell", command="head -c 7000000 /dev/zero | tr '\\0' a")
    whole, _, note = outcome.text.rpartition("\n")
    assert (whole, outcome.max_chars) == ("a" * 7_000_000, 8_000)
    assert note.startswith("[the whole output is in ")


async def test_a_long_output_can_be_read_and_searched_until_the_session_ends(open_box: OpenBox) -> None:
    async with open_box() as box:
        outcome = await box.run("shell", command="seq 1 9999")
        path = outcome.text.rpartition("[the whole output is in ")[2].partition(";")[0]
        planned = await box.plan("read_file", path=path)
        read = await box.run("read_file", path=path, line=5000, limit=1)
        found = await box.run("grep", path=path, pattern="^7777$")
        mode = (await anyio.Path(path).stat()).st_mode
        other = await box.plan("read_file", path=f"{path}/../../passwd")
    assert (planned.touched.is_outside, other.touched.is_outside, mode & 0o777) == (False, True, 0o600)
    assert read.text == "[lines 5000-5000 of 9,999]\n5000"
    assert "7777: 7777" in found.text
    assert not await anyio.Path(path).parent.exists()


REDRAWN = r"[lines drawn again after \r are shown only in their last state]"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (r"\033[31mred\033[0m \033]8;;http://x\033\\link\033]8;;\007", "red link"),
        (r"a \033]0;title\nan error\nb \033Pq\nc", "a \nan error\nb \nc"),
        (r"a \033]1337;File=:QUJD\nREVG\007b", "a b"),
        (r"  5%%\r 50%%\r100%%\r\ndone\n", f"100%\ndone\n{REDRAWN}"),
        (r"one\rtwo\rthree", f"three\n{REDRAWN}"),
        (r"windows\r\nline\r\n", "windows\nline"),
        (r"abd\bc", "abc"),
        (r"x\nx\nx\n", "x\nx\nx"),
        (r"\001\002\003\004\005\006\016\017PNG\nnest\n", "[binary data]\nnest"),
        (r"x\nx\nx\nx\nx\ny", "x\n[the line above came 5 times in a row]\ny"),
    ],
)
async def test_output_is_what_a_terminal_would_show_in_the_end(open_box: OpenBox, printed: str, shown: str) -> None:
    async with open_box() as box:
        assert (await box.run("shell", command=f"printf '{printed}'")).text == shown


PASSED = {
    "pytest -v": "tests/test_nest.py::test_twigs[{n}] PASSED              [ {n}%]",
    "unittest -v": "test_twig_{n} (nest.test_twigs.TestTwigs.test_twig_{n}) ... ok",
    "cargo test": "test nest::twigs::holds_{n} ... ok",
    "go test -v": "    --- PASS: TestNest/twig_{n} (0.00s)",
    "vitest": " ✓ nest/twigs.test.ts > holds {n} twigs 3ms",
    "tap": "ok {n} - holds twigs",
}


@pytest.mark.parametrize("line", PASSED.values(), ids=PASSED)
async def test_lines_that_only_report_passed_tests_are_left_out(open_box: OpenBox, root: Path, line: str) -> None:
    lines = [line.format(n=number) for number in range(10, 60)]
    whole = "\n".join(["begin", *lines[:40], "test_egg ... FAIL", *lines[40:47], "end"])
    (root / "printed.txt").write_text(whole)
    async with open_box() as box:
        text = (await box.run("shell", command="cat printed.txt")).text
        shown, _, note = text.rpartition("\n")
        path = note.removeprefix("[the whole output is in ").partition(";")[0]
        kept = await anyio.Path(path).read_text()
    brief = ["begin", lines[0], "[39 more lines of passed tests]", "test_egg ... FAIL", *lines[40:47], "end"]
    assert (shown, kept) == ("\n".join(brief), whole)


async def test_lines_that_are_like_passed_tests_but_say_more_are_shown(open_box: OpenBox, root: Path) -> None:
    kinds = [
        "not ok {n} - twigs",
        "ok {n} - twigs # SKIP no nest",
        "t.py::test_{n} XPASS",
        "copied {n} ... ok",
        "{n} ok",
    ]
    printed = "\n".join(kind.format(n=number) for kind in kinds for number in range(20))
    (root / "printed.txt").write_text(printed)
    async with open_box() as box:
        assert (await box.run("shell", command="cat printed.txt")).text == printed


async def test_a_failure_in_front_of_a_pipe_is_named(open_box: OpenBox) -> None:
    async with open_box() as box:
        hidden = await box.run("shell", command="(echo broken; exit 2) | cat")
        usual = await box.run("shell", command="yes | head -1")
        failed = await box.run("shell", command="false | (exit 3)")
        quoted = await box.run("shell", command="echo 'a | b' \"$?\"")
        earlier = await box.run("shell", command="(exit 4) | cat && for n in 1 2; do false | cat; done; true")
        traced = await box.run("shell", command="set -x; (exit 4) | cat; true")
        own = await box.run("shell", command="false | true; echo ${PIPESTATUS[@]} $?; f() { false | cat; }; f | cat")
        strict = await box.run("shell", command="set -euo pipefail; echo a | cat; echo b | cat")
        options = await box.run("shell", command="set -u +o pipefail; false | true; echo exec; echo hi")
    assert (hidden.text, hidden.is_error) == ("broken\n[exit codes in the last pipe: 2, 0]", False)
    assert (usual.text, usual.is_error) == ("y", False)
    assert (failed.text, failed.is_error) == ("[exit code 3]", True)
    assert quoted.text.startswith("a | b ")
    assert earlier.text == "[exit codes in an earlier pipe: 4, 0; exit codes in an earlier pipe: 1, 0]"
    assert sorted(traced.text.splitlines()) == ["+ cat", "+ exit 4", "+ true", "[exit codes in an earlier pipe: 4, 0]"]
    assert (strict.text, strict.is_error) == ("a\nb", False)
    assert options.text == "exec\nhi\n[exit codes in an earlier pipe: 1, 0]"
    assert own.text == "1 0 0\n[exit codes in an earlier pipe: 1, 0]"


async def test_a_failure_in_front_of_a_pipe_in_the_background_is_named(open_box: OpenBox) -> None:
    async with open_box() as box:
        line = "echo begun; find . -maxdepth 0 -exec false {} + | cat; (echo broken; exit 2) | cat"
        begun = await box.run("shell", command=line, background=True)
        ended = await box.run("shell_output", job="job1", wait_s=60)
        again = await box.run("shell_kill", job="job1")
    assert "begun" in begun.text + ended.text
    state = "ended with exit code 0; exit codes in the last pipe: 2, 0; exit codes in an earlier pipe: 1, 0"
    assert ended.text.endswith(f"[job1: {state}]")
    assert again.text == f"[job1 had already {state}]"
    assert "crow-" not in begun.text + ended.text


async def test_a_background_command_runs_on_between_calls(open_box: OpenBox, root: Path) -> None:
    async with open_box() as box:
        line = "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo done; exit 3"
        started = await box.run("shell", command=line, background=True)
        assert started == Outcome(
            text="begun\n[job1: running; read its output with shell_output, end it with shell_kill]",
            raw_output={"job": "job1", "state": "running", "access": "full"},
        )
        assert (await box.run("shell_output", job="job1")).text == "[job1: running]"
        (root / "go").touch()
        ended = await box.run("shell_output", job="job1", wait_s=10)
        assert ended.text == "done\n[job1: ended with exit code 3]"
        assert (await box.run("shell_output", job="job1")).text == "[job1: ended with exit code 3]"
        assert (await box.run("shell_kill", job="job1")).text == "[job1 had already ended with exit code 3]"


async def test_a_command_line_that_no_system_accepts_is_refused_with_a_remedy(open_box: OpenBox) -> None:
    async with open_box() as box:
        planned = await box.plan("shell", command=f": {'x' * 200_000}")
        ran = await box.run("shell", command=f": {'x' * 200_000}")
        longest = await box.run("shell", command=f": {'x' * 124_998}")
    assert planned.fault == ran.text
    assert ran.text == (
        "shell: command has 200,002 bytes, too many for the system; write long text to a file with write_file first"
    )
    assert (longest.text, longest.is_error) == ("(no output)", False)


async def test_killing_a_job_ends_all_processes_it_started(open_box: OpenBox) -> None:
    async with open_box() as box:
        started = await box.run("shell", command="sleep 600 & echo $! $$; wait", background=True)
        pids = [int(pid) for pid in started.text.split("\n")[0].split()]
        assert (await box.run("shell_kill", job="job1")).text == "[job1: ended by signal 15]"
        for pid in pids:
            await until_gone(pid)


async def test_killing_a_job_that_has_ended_ends_the_processes_that_it_left(open_box: OpenBox, root: Path) -> None:
    async with open_box() as box:
        await box.run("shell", command="sleep 600 & echo $! >pid", background=True)
        assert (await box.run("shell_output", job="job1", wait_s=60)).text == "[job1: ended with exit code 0]"
        assert (await box.run("shell_kill", job="job1")).text == "[job1 had already ended with exit code 0]"
        await until_gone(int((root / "pid").read_text()))


async def test_jobs_end_with_the_session_even_if_they_ignore_sigterm(open_box: OpenBox) -> None:
    async with open_box() as box:
        line = "trap '' TERM; sleep 600 & echo $! $$; while :; do sleep 1; done"
        started = await box.run("shell", command=line, background=True)
        pids = [int(pid) for pid in started.text.split("\n")[0].split()]
        with anyio.CancelScope() as turn:
            turn.cancel()
            await anyio.lowlevel.checkpoint()
        assert (await box.run("shell_output", job="job1")).text == "[job1: running]"  # it outlives the turn
    for pid in pids:
        await until_gone(pid)


async def test_background_commands_need_permission_but_reading_their_output_does_not(open_box: OpenBox) -> None:
    async with open_box() as box:
        offer = await box.plan("shell", command="make watch", background=True)
        missing = await box.plan("shell_output", job="job9")
        await box.run("shell", command="sleep 600", background=True)
        look = await box.plan("shell_output", job="job1")
    assert (offer.access, offer.coverage.argument) == ("execute", "make watch")
    assert look == PlannedCall(announcement=Announcement(title="Output of job1: sleep 600", kind="read"), access="none")
    assert missing.fault == 'shell_output: there is no job "job9"; jobs: none'


async def test_at_most_sixteen_jobs_run_at_once(open_box: OpenBox) -> None:
    async with open_box() as box:
        async with anyio.create_task_group() as tasks:
            for _ in range(16):
                tasks.start_soon(lambda: box.run("shell", command="sleep 600", background=True))
        assert (await box.run("shell", command="sleep 600", background=True)).text == (
            "shell: 16 commands are already running in the background; end one first"
        )
