"""Questions to the user, and the rules that the answers add to the session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.agent.commands.context import CommandContext
from crow.agent.commands.sessions import permissions as permissions_command
from crow.agent.history.branch import Branch
from crow.agent.permissions.judge import Permissions
from crow.agent.permissions.rules import rules_in
from crow.domain.entries import Announcement, CallRef
from crow.domain.messages import ToolCall
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore
from crow.tools import Coverage, PlannedCall
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker, Tools


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


async def test_a_rule_that_the_user_types_beside_an_answer_is_stored_too(tmp_path: Path) -> None:
    """A subagent in the background gets its answer while `/permissions` waits for the tools."""
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(NewSession(id="s1", cwd=str(tmp_path), model="m", mode="ask"))
        branch = Branch(store, NoteTaker(), await store.open_session("s1"))
        workspace = DiskWorkspace(tmp_path)
        permissions = Permissions(branch, NoteTaker("reject_always", "reject_always"), workspace)

        async def reject(line: str) -> None:
            plan = PlannedCall(
                announcement=Announcement(title=line), access="execute", coverage=Coverage(argument=line)
            )
            call = ToolCall(id="c1", name="shell", arguments="{}")
            await permissions.judge(CallRef(assistant=1, index=0), call, plan)

        async def tools_after_an_answer() -> Tools:
            await reject("make two")
            return Tools({})

        async def unused(*_: object) -> Any:
            raise AssertionError("this command needs only the tools")

        context = CommandContext(
            branch=branch,
            store=store,
            client=NoteTaker(),
            workspace=workspace,
            models=(),
            rules=(),
            compactor=unused,
            set_mode=unused,
            set_model=unused,
            move=unused,
            run_prompt=unused,
            toolbox=tools_after_an_answer,
            instructions=tuple,
            links=None,
            user_instructions=None,
        )
        added = await permissions_command(context, "deny srv__one")
        assert added.endswith("`/permissions forget 2` removes it.")
        assert [rule.argument or rule.tool for rule in rules_in(branch.row.permissions)] == ["make two", "srv__one"]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reject, "make three")
            tasks.start_soon(permissions_command, context, "forget all")
        stored = (await store.session("s1")).permissions
        assert stored == branch.row.permissions
        assert [rule.argument for rule in rules_in(stored)] == ["make three"]
    finally:
        await store.close()
