"""Commands in the background: looked after, ended, and never left behind."""

from __future__ import annotations

from pathlib import Path

import anyio

from crow.domain.entries import Announcement
from crow.tools import Outcome, PlannedCall
from tests.tools.conftest import OpenBox, until_gone


async def test_a_command_goes_on_while_the_model_does_other_things(open_box: OpenBox, root: Path):
    async with open_box() as box:
        line = "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo done; exit 3"
        started = await box.run("shell", command=line, background=True)
        assert started == Outcome(
            text="begun\n[job1: running; read its output with shell_output, end it with shell_kill]",
            raw_output={"job": "job1", "state": "running"},
        )
        assert (await box.run("shell_output", job="job1")).text == "[job1: running]"
        (root / "go").touch()
        ended = await box.run("shell_output", job="job1", wait_s=10)
        assert ended.text == "done\n[job1: ended with exit code 3]"
        assert (await box.run("shell_output", job="job1")).text == "[job1: ended with exit code 3]"
        assert (await box.run("shell_kill", job="job1")).text == "[job1 had already ended with exit code 3]"


async def test_killing_a_job_ends_all_that_it_started(open_box: OpenBox):
    async with open_box() as box:
        started = await box.run("shell", command="sleep 60 & echo $! $$; wait", background=True)
        pids = [int(pid) for pid in started.text.split("\n")[0].split()]
        assert (await box.run("shell_kill", job="job1")).text == "[job1: ended by signal 15]"
        for pid in pids:
            await until_gone(pid)


async def test_jobs_end_with_the_session_however_deaf_they_are(open_box: OpenBox):
    async with open_box() as box:
        line = "trap '' TERM; sleep 60 & echo $! $$; while :; do sleep 1; done"
        started = await box.run("shell", command=line, background=True)
        pids = [int(pid) for pid in started.text.split("\n")[0].split()]
        with anyio.CancelScope() as turn:
            turn.cancel()
            await anyio.lowlevel.checkpoint()
        assert (await box.run("shell_output", job="job1")).text == "[job1: running]"  # a turn's end is not its end
    for pid in pids:
        await until_gone(pid)


async def test_background_commands_are_offered_like_others_and_looking_after_them_is_free(open_box: OpenBox):
    async with open_box() as box:
        offer = await box.offer("shell", command="make watch", background=True)
        missing = await box.offer("shell_output", job="job9")
        await box.run("shell", command="sleep 60", background=True)
        look = await box.offer("shell_output", job="job1")
    assert (offer.access, offer.argument) == ("execute", "make watch")
    assert look == PlannedCall(announcement=Announcement(title="Output of job1: sleep 60", kind="read"), access="none")
    assert missing.fault == 'shell_output: there is no job "job9"; jobs: none'


async def test_there_is_a_bound_on_jobs(open_box: OpenBox):
    async with open_box() as box:
        async with anyio.create_task_group() as tasks:
            for _ in range(16):
                tasks.start_soon(lambda: box.run("shell", command="sleep 60", background=True))
        assert (await box.run("shell", command="sleep 60", background=True)).text == (
            "shell: 16 commands are already running in the background; end one first"
        )
