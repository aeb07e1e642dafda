"""Runs the prompts of one channel, one after the other, in the session of the channel."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acp.exceptions import RequestError

from crow_channels.chat import Chat
from crow_channels.config import Config, Rule
from crow_channels.delivery import Delivery
from crow_channels.errors import LinkLost
from crow_channels.link import Link, Links
from crow_channels.questions import Questions
from crow_channels.state import Prompt, State
from crow_channels.turn import Replay, Turn

logger = logging.getLogger(__name__)

NOT_FOUND = -32002
_IDLE_S = 600.0
"""A channel's session is left after this many seconds without a prompt."""
_AGAIN_S = 1.0
_MAX_ALIAS = 200
_ENDINGS: Mapping[str, str] = {
    "end_turn": "",
    "cancelled": "(Cancelled.)",
    "max_tokens": "(The answer ends here, because it reached the limit of the model.)",
    "max_turn_requests": "(The turn ends here, because it reached its limit of requests.)",
    "refusal": "(The model refused.)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the workers share."""

    config: Config
    """The configuration."""
    state: State
    """The state file."""
    links: Links
    """The connections to crow."""


class Worker:
    """One channel. It is the listener of the channel's session."""

    def __init__(self, shared: Shared, chat: Chat, name: str, place: str, rule: Rule) -> None:
        self._shared, self._chat, self._name, self._place, self._rule = shared, chat, name, place, rule
        self._state = shared.state
        self._changed = asyncio.Event()
        self._cancel = asyncio.Event()
        self._link: Link | None = None
        self._session: str | None = None
        self._cursor: str | None = None
        self._is_foreign = False
        """Whether another client's turn runs in the session."""
        self._turn: Turn | None = None
        self._delivery: Delivery | None = None
        self._questions: Questions | None = None

    @property
    def current(self) -> Prompt | None:
        """The prompt that runs."""
        return self._turn.prompt if self._turn is not None else None

    def wake(self) -> None:
        """Look for new prompts and answers to questions."""
        self._changed.set()
        if self._questions is not None:
            self._questions.wake()

    def cancel(self, number: int) -> None:
        """Cancel a prompt that the state has marked as cancelled."""
        if self.current is not None and self.current.number == number:
            self.current.is_cancelled = True
            self._cancel.set()

    async def run(self) -> None:
        """Run all prompts, until there were none for `_IDLE_S` seconds."""
        while True:
            self._changed.clear()
            prompt = self._state.next_prompt(self._name, self._place)
            if prompt is not None:
                await self._serve(prompt)
                continue
            try:
                await asyncio.wait_for(self._changed.wait(), _IDLE_S)
            except TimeoutError:
                await self._leave()
                if not self._changed.is_set():
                    return

    # What the server sends.

    def update(self, params: Mapping[str, Any]) -> None:
        """Take a `session/update`."""
        update, turn = params.get("update") or {}, self._turn
        if turn is None:
            kind = update.get("sessionUpdate")
            state = (update.get("_meta") or {}).get("acp/turnState") or {}
            if kind == "user_message_chunk" or state.get("state") == "running":
                self._is_foreign = True
            elif state.get("state") == "idle":
                self._is_foreign = False
        else:
            has_grown = turn.apply(params)
            if has_grown and self._delivery is not None:
                self._delivery.grow()
            if update.get("sessionUpdate") == "tool_call_update" and update.get("status") not in (None, "pending"):
                assert self._questions is not None
                self._questions.note_progress(str(update.get("toolCallId")))
        cursor = (params.get("_meta") or {}).get("acp/cursor")
        self._cursor = cursor if isinstance(cursor, str) else self._cursor

    async def ask(self, method: str, params: Mapping[str, Any]) -> Any:
        """Ask the person whose prompt runs. The questions of other clients' turns are left to those clients."""
        link, questions = self._link, self._questions
        if questions is None or self._turn is None or not self._turn.is_own:
            await asyncio.get_running_loop().create_future()
        assert questions is not None
        try:
            return await questions.ask(method, params)
        except asyncio.CancelledError:
            if link is not None and not link.lost.is_set():
                questions.drop()
            raise

    # A prompt.

    async def _serve(self, prompt: Prompt) -> None:
        def keep_file(number: int, name: str, mime: str, data: bytes) -> None:
            self._state.add_file(prompt.number, number, name, mime, data)

        self._delivery = delivery = Delivery(self._chat, self._state, prompt)
        self._questions = questions = Questions(self._chat, self._state, prompt, delivery)
        self._turn = turn = Turn(prompt, keep_file, shows_calls=self._rule.shows_calls)
        turn.is_own = not self._is_foreign
        self._cancel.clear()
        if prompt.is_cancelled:
            self._cancel.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(delivery.run())
                if prompt.stage != "answered":
                    ending = await self._answer(turn)
                    if ending or not prompt.text.strip():
                        turn.add(ending or "(No answer.)", "end")
                    prompt.stage = "answered"
                    self._state.save(prompt)
                self._turn = None
                delivery.finish()
            await questions.finish()
        finally:
            self._turn = self._delivery = self._questions = None
        self._state.finish(prompt.number)

    async def _answer(self, turn: Turn) -> str:
        """Run a prompt once, however often the connection breaks. Return what to add to the answer."""
        prompt = turn.prompt
        is_repeated, has_gap = prompt.stage == "sent", False
        while True:
            if prompt.is_cancelled and prompt.stage == "waiting":
                return _ENDINGS["cancelled"]
            link = await self._shared.links.get(prompt.principal)
            try:
                has_gap |= not await self._open(link, prompt, has_gap=has_gap)
                prompt.stage = "sent"
                self._state.save(prompt)
                try:
                    ending = await self._send(link, prompt)
                except RequestError as error:
                    if _is_temporary(error):
                        await asyncio.sleep(_AGAIN_S)
                        continue
                    ending = f"⚠ {error}"
                if is_repeated and has_gap:
                    await self._load(link, turn)
                if _command(prompt) == "/new" and not ending:
                    await self._start_over()
            except LinkLost:
                is_repeated = True
            except RequestError as error:
                if _is_temporary(error):
                    await asyncio.sleep(_AGAIN_S)
                    continue
                return self._refused(prompt, error)
            else:
                return ending

    async def _send(self, link: Link, prompt: Prompt) -> str:
        name = json.dumps([prompt.chat, prompt.place, prompt.message])
        prompt_id = f"channels-{hashlib.sha256(name.encode()).hexdigest()[:40]}"
        params = {"sessionId": prompt.session, "prompt": prompt.blocks, "_meta": {"crow": {"promptId": prompt_id}}}
        cancelling = asyncio.ensure_future(self._send_cancel(link, str(prompt.session)))
        try:
            result = await link.request("session/prompt", params)
        finally:
            cancelling.cancel()
            await asyncio.gather(cancelling, return_exceptions=True)
        stop = str(result.get("stopReason"))
        return _ENDINGS.get(stop, f"({stop})")

    async def _send_cancel(self, link: Link, session: str) -> None:
        """Cancel the turn if somebody wants it, and again if the server had not begun it yet."""
        await self._cancel.wait()
        while True:
            await link.notify("session/cancel", {"sessionId": session})
            await asyncio.sleep(_AGAIN_S)

    def _refused(self, prompt: Prompt, error: RequestError) -> str:
        """Return what to say if the session could not be opened."""
        owner, session = self._state.place(self._name, self._place)
        if error.code != NOT_FOUND or prompt.stage == "sent":
            if error.code == NOT_FOUND and owner is not None:
                self._state.set_session(self._name, self._place, owner, None)
            return f"⚠ {error}"
        if owner in (None, prompt.principal):
            return f"⚠ {error}"
        return (
            f"⚠ The session of this channel belongs to {owner}. The operator of the server can share it: "
            f"`crow sessions share {session} {prompt.principal} --write`"
        )

    # The session.

    async def _open(self, link: Link, prompt: Prompt, *, has_gap: bool) -> bool:
        """Open the session of a prompt. Return whether everything that was missed has arrived, or will."""
        if self._link is link and self._session is not None and prompt.session in (None, self._session):
            if prompt.session is None:
                prompt.session, prompt.cursor = self._session, self._cursor
            return link.has_cursors and not has_gap
        await self._leave()
        if prompt.session is None:
            prompt.session, result = await self._enter(link, prompt.principal)
            prompt.cursor = self._note(result)
            return link.has_cursors
        link.listeners[prompt.session] = self
        self._link, self._session = link, prompt.session
        meta = {"acp/cursor": prompt.cursor} if prompt.cursor and link.has_cursors and not has_gap else {}
        if self._turn is not None and prompt.has_begun:  # otherwise what follows may be another client's
            self._turn.is_own = True
        try:
            self._note(await link.request("session/resume", self._params(prompt.principal, prompt.session, meta)))
        except RequestError as error:
            self._link = None
            if meta and (error.data or {}).get("reason") == "cursor_gap":
                return await self._open(link, prompt, has_gap=True)
            raise
        return bool(meta)

    async def _enter(self, link: Link, principal: str) -> tuple[str, Any]:
        """Open the session of this channel, or create it. Return its id and the response."""
        owner, known = self._state.place(self._name, self._place)
        owner = self._rule.principal or owner or principal
        if owner == principal or known is None:
            owners = link if owner == principal else await self._shared.links.get(owner)
            alias = f"{self._name}:{self._place}"
            if len(alias) > _MAX_ALIAS:
                alias = f"{self._name}:{hashlib.sha256(self._place.encode()).hexdigest()}"
            params = self._params(owner, None, {"crow": {"alias": alias}})
            result = await owners.request("session/new", params)
            known = str(result["sessionId"])
            self._state.set_session(self._name, self._place, owner, known)
            if owners is not link:
                await owners.request("session/close", {"sessionId": known})
        if owner != principal:
            result = await link.request("session/resume", self._params(principal, known, {}))
        link.listeners[known] = self
        self._link, self._session = link, known
        return known, result

    def _note(self, result: Any) -> str | None:
        cursor = (result.get("_meta") or {}).get("acp/cursor") if isinstance(result, dict) else None
        self._cursor = cursor if isinstance(cursor, str) else self._cursor
        return self._cursor

    def _params(self, principal: str, session: str | None, meta: Mapping[str, Any]) -> dict[str, Any]:
        owner, _ = self._state.place(self._name, self._place)
        cwd = self._shared.config.principals[principal].cwd  # the server ignores it for a session that is shared
        if self._rule.cwd and (self._rule.principal or owner or principal) == principal:
            cwd = self._rule.cwd
        about = {} if session is None else {"sessionId": session}
        return about | {"cwd": cwd, "mcpServers": []} | ({"_meta": dict(meta)} if meta else {})

    async def _load(self, link: Link, turn: Turn) -> None:
        """Read the answer from the whole history."""
        replay, session = Replay(turn), str(turn.prompt.session)
        link.listeners[session] = _Loading(replay)
        try:
            await link.request("session/load", self._params(turn.prompt.principal, session, {}))
        except RequestError as error:
            logger.warning("The answer may be incomplete, because %s cannot be loaded: %s", session, error)
        finally:
            replay.finish()
            link.listeners[session] = self

    async def _start_over(self) -> None:
        """Leave the session, because its alias belongs to a new one."""
        owner, _ = self._state.place(self._name, self._place)
        if owner is not None:
            self._state.set_session(self._name, self._place, owner, None)
        await self._leave()

    async def _leave(self) -> None:
        """Leave the open session, if there is one."""
        link, session = self._link, self._session
        self._link = self._session = self._cursor = None
        self._is_foreign = False
        if link is None or session is None:
            return
        link.listeners.pop(session, None)
        if not link.lost.is_set():
            try:
                await link.request("session/close", {"sessionId": session})
            except (LinkLost, RequestError) as error:
                logger.info("Session %s was not closed: %s", session, error)


class _Loading:
    """Listens while a history is loaded."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def update(self, params: Mapping[str, Any]) -> None:
        self._replay.apply(params)

    async def ask(self, method: str, params: Mapping[str, Any]) -> Any:  # noqa: ARG002
        await asyncio.get_running_loop().create_future()


def _is_temporary(error: RequestError) -> bool:
    """Whether the server only asks to try again."""
    return isinstance(error.data, dict) and error.data.get("reason") == "draining"


def _command(prompt: Prompt) -> str:
    text = next((str(block["text"]) for block in prompt.blocks if block.get("type") == "text"), "")
    return text.strip()
