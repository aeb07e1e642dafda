"""Claims the turns of a session, and brings the session up to date at the beginning of each."""

from __future__ import annotations

import anyio

from crow.agent import new_remark
from crow.agent.history.interrupted import take_back_patches
from crow.agent.history.options import set_model
from crow.agent.history.titles import set_default_title
from crow.agent.sessions.conversation import Conversation, SessionFollower
from crow.agent.sessions.pending import PendingPrompt
from crow.domain.errors import CrowError, SessionBusy
from crow.domain.events import NoticeShown, OptionsChanged
from crow.store import NODE_KEY, SessionChanges, node_of


class Claims:
    """Claims the turns of one session."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._has_warned = False
        """Whether the client was shown the warning of the store."""
        self._notices: list[NoticeShown] = []
        """Notices to show when the next turn begins."""
        self._remarks: list[str] = []
        """Texts to add to the history when the next turn begins."""

    def remark_later(self, notice: NoticeShown) -> None:
        """Add this notice to the history when the next turn begins. Call this if the editor shows no notices."""
        self._remarks.append(f"{notice.title}. {notice.description}".strip())

    def notice_later(self, notice: NoticeShown) -> None:
        """Show this notice when the next turn begins."""
        self._notices.append(notice)

    async def take(self, prompt: PendingPrompt) -> bool:
        """Claim the turn of `prompt`. If another process runs a turn, wait until that turn ends.

        Store the prompt, unless it is a command or MCP servers add content to it. Return True if another process has
        moved the session's leaf.
        """
        branch, follower = self._conversation.branch, self._conversation.follower
        while True:
            with anyio.CancelScope(shield=True):  # the prompt is stored even if the user cancels at once
                plan, row = branch.projection.plan, branch.row
                try:
                    await branch.settle()
                    if not branch.row.model and (name := self._conversation.adapters.default_model()):
                        await set_model(branch, name)
                        row = branch.row
                    # A command is stored together with its answer. A prompt to which servers add content is stored
                    # together with that content.
                    if prompt.command is not None:
                        moved = await branch.claim(None, name=prompt.name, command_id=prompt.message_id)
                    elif prompt.needs_servers:
                        moved = await branch.claim(None)
                    else:
                        parts = None if prompt.in_inbox else prompt.parts
                        cut = await self._conversation.cut_for(prompt.parts)
                        moved = await branch.claim(prompt.message_id, parts=parts, cut=cut, name=prompt.name)
                except CrowError as error:
                    if follower is None or not isinstance(error, SessionBusy):
                        if prompt.in_inbox:  # the sender gets an error and can send the prompt again
                            await branch.reject_prompt(prompt.message_id)
                        raise
                    await self._put_in_inbox(prompt)
                else:
                    if moved:
                        await self._conversation.publish_position(plan)
                    if (row.model, row.config) != (branch.row.model, branch.row.config):  # changed by another process
                        await branch.publish(OptionsChanged())
                    return moved
            assert follower is not None
            await self._wait(prompt, follower)

    async def _put_in_inbox(self, prompt: PendingPrompt) -> None:
        """Store a prompt that waits for the turn of another process."""
        if prompt.command is None and not prompt.in_inbox:
            store, session_id = self._conversation.adapters.store, self._conversation.id
            await store.enqueue(session_id, prompt.parts, prompt.message_id, name=prompt.name)
            prompt.in_inbox = True

    async def _wait(self, prompt: PendingPrompt, follower: SessionFollower) -> None:
        """Wait for the turn of another process. If the prompt is cancelled meanwhile, take it out of the inbox."""
        try:
            await follower.until_free()
        except anyio.get_cancelled_exc_class():
            prompt.stop = "cancelled"
            if prompt.in_inbox:
                with anyio.CancelScope(shield=True):
                    await self._conversation.branch.reject_prompt(prompt.message_id, is_cancelled=True)
            raise

    async def begin(self, *, moved: bool) -> None:
        """Do what is due at the start of a claimed turn: update the session's row, take back patches that were cut off,
        show pending notices, and add pending remarks to the history. `moved` is what `take` has returned."""
        branch, adapters = self._conversation.branch, self._conversation.adapters
        if adapters.store.warning and not self._has_warned:
            self._has_warned = True
            await branch.publish(NoticeShown(severity="warning", title=adapters.store.warning))
        # another process opened the session with other directories; this process keeps its own
        if (branch.row.cwd, branch.row.additional_directories) != self._conversation.directories:
            cwd, directories = self._conversation.directories
            await branch.change(SessionChanges(cwd=cwd, additional_directories=directories))
        is_other_node = bool(adapters.node) and node_of(branch.row) != adapters.node
        if is_other_node and await self._conversation.files_elsewhere() is None:
            await branch.change(SessionChanges(config={NODE_KEY: adapters.node}))
        if not is_other_node:
            await take_back_patches(branch, adapters.store, self._conversation.workspace)
        notices, self._notices = self._notices, []
        for notice in notices:
            await self._conversation.report(notice.title, notice.description, severity="info")
        if self._remarks:
            remarks, self._remarks = self._remarks, []
            await branch.record([new_remark(text) for text in remarks])
        if moved and self._conversation.follower is None:
            await branch.record([new_remark("Another process added messages to this session; they are included now.")])
        await set_default_title(branch)
