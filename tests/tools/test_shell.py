from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from crow.domain.entries import Announcement
from crow.tools import Outcome, PlannedCall
from tests.tools.conftest import OpenBox, call, until_gone


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("echo hi", Outcome(text="hi", raw_output={"exit_code": 0, "timed_out": False})),
        ("true", Outcome(text="(no output)", raw_output={"exit_code": 0, "timed_out": False})),
        (
            "echo no >&2; exit 3",
            Outcome(text="no\n[exit code 3]", is_error=True, raw_output={"exit_code": 3, "timed_out": False}),
        ),
        ("false", Outcome(text="[exit code 1]", is_error=True, raw_output={"exit_code": 1, "timed_out": False})),
        (
            "kill -KILL $$",
            Outcome(text="[ended by SIGKILL]", is_error=True, raw_output={"exit_code": -9, "timed_out": False}),
        ),
    ],
)
async def test_a_command_gives_its_output_and_how_it_ended(open_box: OpenBox, command: str, outcome: Outcome):
    async with open_box() as box:
        assert await box.run("shell", command=command) == outcome


async def test_a_timeout_is_said_and_keeps_the_output(open_box: OpenBox):
    async with open_box() as box:
        assert await box.run("shell", command="echo begun; sleep 60", timeout_s=1) == Outcome(
            text="begun\n[timed out after 1 s; the command and all processes it started were ended. timeout_s can be at most 3600]",
            is_error=True,
            raw_output={"exit_code": None, "timed_out": True},
        )


async def test_a_command_is_offered_as_itself_and_may_run_beside_others(open_box: OpenBox):
    async with open_box() as box:
        assert await box.offer("shell", command="make  test\n  && ls", description="run the tests") == PlannedCall(
            announcement=Announcement(title="make test && ls", kind="execute"),
            access="execute",
            argument="make  test\n  && ls",
        )
        with_nul = await box.offer("shell", command="a\0b")
        assert with_nul.fault == "shell: command contains a NUL character; expected a command line"
        assert (await box.run("shell", command="a\0b")).text == with_nul.fault


async def test_a_command_line_that_the_system_does_not_take_is_an_error_in_words(open_box: OpenBox):
    async with open_box() as box:
        outcome = await box.run("shell", command="true " + "x" * 3_000_000)
    assert outcome.is_error
    assert outcome.text.startswith("shell: Argument list too long")


async def test_cancelling_a_call_ends_the_whole_process_group_without_waiting(open_box: OpenBox):
    async with open_box() as box:
        with anyio.CancelScope() as scope:

            async def stop_when_both_run(text: str) -> None:
                box.shown.append(text)
                scope.cancel()

            command = "sh -c 'sleep 60 & echo $$ $!; sleep 60'"
            await box.toolbox.run(call("shell", command=command), "call_1_0", stop_when_both_run)
        assert scope.cancelled_caught
        pids = [int(pid) for pid in box.shown[0].split()]
        assert len(pids) == 2
        for pid in pids:
            await until_gone(pid)


async def test_two_commands_at_once_take_the_time_of_one(open_box: OpenBox, root: Path):
    meeting = "touch {0}; until [ -e {1} ]; do sleep 0.01; done; echo met"
    async with open_box() as box:
        outcomes: list[Outcome] = []

        async def run(own: str, other: str) -> None:
            outcomes.append(await box.run("shell", command=meeting.format(own, other), timeout_s=10))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "a", "b")
            tasks.start_soon(run, "b", "a")
    assert [outcome.text for outcome in outcomes] == ["met", "met"]


async def test_seven_megabytes_cross_the_toolbox_whole_and_quickly(open_box: OpenBox):
    async with open_box() as box:
        began = time.process_time()
        outcome = await box.run("shell", command="head -c 7000000 /dev/zero | tr '\\0' a")
        assert time.process_time() - began < 1.0, "far above what it takes, far below what quadratic work would"
    assert outcome.text == "a" * 7_000_000
