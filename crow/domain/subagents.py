"""Ids and texts of the messages between a session and its subagents and background commands."""

from __future__ import annotations

from crow.domain.entries import ToolResult

WAKE = "wake_"
"""The start of the ids of some messages in the inbox. Such a message is not a prompt. It tells the model which work in
the background has ended. The rest of the id is the id of the call that started this work."""

TASK_WORDS = "The task "
"""The start of the text of a message whose id starts with `WAKE`, if a subagent did the work."""

_ORDER = "order_"
"""The start of the id of a prompt that a session gave to a subagent. The rest of the id is the id of the call of
`task`."""


def order_id(call_id: str) -> str:
    """Return the message id of the prompt that this call of `task` gives to a subagent."""
    return f"{_ORDER}{call_id}"


def call_of_order(message_id: str) -> str | None:
    """Return the id of the call that gave this prompt to a subagent, or None if the prompt came from a client."""
    return message_id.removeprefix(_ORDER) if message_id.startswith(_ORDER) else None


def answer_id(call_id: str) -> str:
    """Return the message id of a subagent's answer. `call_id` is the id of the call that gave the prompt to the
    subagent."""
    return f"answer_{call_id}"


def resume_hint(task_id: str) -> str:
    """Return the end of a task's result for the model."""
    return f"\n[task {task_id}; to continue it, call task with resume={task_id}]"


def task_of(result: ToolResult) -> str | None:
    """Return the id of the subagent that carried out a call of `task`."""
    found = result.raw_output.get("task") if result.name == "task" else None
    return found if isinstance(found, str) else None


def answer_text(result: ToolResult) -> str | None:
    """Return the subagent's answer in the result of a call of `task`. None if the task failed or went to the
    background."""
    task_id = task_of(result)
    if task_id is None or result.is_error or result.raw_output.get("background") is True:
        return None
    return result.text.removesuffix(resume_hint(task_id))
