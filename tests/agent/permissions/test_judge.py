"""Questions to the user, and the rules that the answers add to the session."""

from __future__ import annotations

from pathlib import Path

import anyio

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.agent.history.branch import Branch
from crow.agent.permissions.judge import Permissions
from crow.agent.permissions.rules import rules_in
from crow.domain.entries import Announcement, CallRef
from crow.domain.messages import ToolCall
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore
from crow.tools import Coverage, PlannedCall
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker


class TwoQuestions(NoteTaker):
    """Answers "always" as soon as two questions are open, to both at once."""

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        self.questions.append(question)
        if len(self.questions) == 2:
            self.asked.set()
        await self.asked.wait()
        return "reject_always"


async def test_two_answers_at_once_are_both_stored_as_rules(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(NewSession(id="s1", cwd=str(tmp_path), model="m", mode="ask"))
        branch = Branch(store, NoteTaker(), await store.open_session("s1"))
        permissions = Permissions(branch, TwoQuestions(), DiskWorkspace(tmp_path))

        async def judge(asking: Permissions, line: str) -> None:
            plan = PlannedCall(
                announcement=Announcement(title=line), access="execute", coverage=Coverage(argument=line)
            )
            call = ToolCall(id="c1", name="shell", arguments="{}")
            await asking.judge(CallRef(assistant=1, index=0), call, plan)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(judge, permissions, "make one")
                tasks.start_soon(judge, permissions.narrowed("ask"), "make two")
        stored = (await store.session("s1")).permissions
        assert {rule.argument for rule in rules_in(stored)} == {"make one", "make two"}
    finally:
        await store.close()
