"""The questions of an MCP server: to the user, to the session's model, and about logging in."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import anyio
import mcp_types as mcp
from mcp.client.session import ClientRequestContext

from crow.domain.errors import ArgumentError
from crow.tools import ElicitationHandler
from crow.tools.mcp.calls import ask_to_log_in, ask_user
from crow.tools.mcp.sampling import SERVER_WAITS, RunningCall, progress_sender, result_of, sampling_request
from crow.tools.process import KeySource
from crow.tools.sampling import Sampler
from crow.tools.servers import LoginQuestion, McpServer

logger = logging.getLogger(__name__)

_MAX_PAGES = 100
"""Crow remembers this many pages of a server that the user was asked to visit."""
_ID_CHARS = 1_000
"""A page with a longer id is not remembered, so the server cannot close it."""


class ServerQuestions:
    """Passes on the questions of one server. A question is withdrawn when the call that it belongs to has ended.

    Without `elicitation`, every question to the user is declined. `on_sampling` needs a `sampler`. `is_starting`
    returns True as long as the server cannot be used yet. If `may_log_in` is false, the user of the session is not
    asked to log in. This is so on a `crow serve` with tokens: all its users would share the login, so only the
    operator may make it, with `crow mcp login`.
    """

    def __init__(
        self,
        server: McpServer,
        prefix: str,
        keys: KeySource,
        elicitation: ElicitationHandler | None,
        sampler: Sampler | None,
        *,
        is_starting: Callable[[], bool],
        may_log_in: bool = True,
    ) -> None:
        self._server = server
        self._prefix = prefix
        self._keys = keys
        self._elicitation = elicitation
        self._sampler = sampler
        self._is_starting = is_starting
        self._may_log_in = may_log_in
        self._running: list[RunningCall] = []
        self._open: dict[anyio.CancelScope, str] = {}
        """Maps the scope of each open question to the id of its call. The id is empty if it is not certain which call
        the question belongs to."""
        self._pages: dict[str, str] = {}
        """Crow's ids of the pages that the user was asked to visit, by the server's ids of these pages."""
        self._login: anyio.CancelScope | None = None
        """Cancels the question about a login without which the server cannot start. None if no such question is
        open."""

    @contextmanager
    def running(self, call: RunningCall) -> Iterator[None]:
        """Record that the server works on `call` until the block ends."""
        self._running.append(call)
        try:
            yield
        finally:
            self._running.remove(call)
            for scope, asked_by in self._open.items():
                if not self._running or (asked_by and asked_by == call.call_id):
                    scope.cancel()  # nobody needs the answer to this question any more

    def withdraw_login(self) -> bool:
        """Withdraw the question about a login without which the server cannot start. Return whether such a question was
        open."""
        if self._login is None:
            return False
        self._login.cancel()
        return True

    async def on_elicitation(
        self,
        context: ClientRequestContext,  # noqa: ARG002 (the library's signature)
        params: mcp.ElicitRequestParams,
    ) -> mcp.ElicitResult | mcp.ErrorData:
        """Pass a question from the server to the user. If exactly one call is running, the question is attributed to
        that call."""
        call_id, question_id = self._call_id(), self._new_id()
        page_id = params.elicitation_id if isinstance(params, mcp.ElicitRequestURLParams) else None
        if page_id is not None and len(page_id) <= _ID_CHARS:
            self._pages[page_id] = question_id
            if len(self._pages) > _MAX_PAGES:
                del self._pages[next(iter(self._pages))]
        with anyio.CancelScope() as scope:
            if self._running:
                self._open[scope] = call_id
            try:
                return await ask_user(self._elicitation, self._server.name, params, call_id, question_id)
            finally:
                self._open.pop(scope, None)
        return mcp.ElicitResult(action="cancel")

    async def finish_page(self, elicitation_id: str) -> None:
        """Tell the client that the user no longer needs the page of a question, which had this id of the server."""
        question_id = self._pages.pop(elicitation_id, None)
        if question_id is not None and self._elicitation is not None:
            await self._elicitation.finish_question(question_id)

    async def on_sampling(
        self, context: ClientRequestContext, params: mcp.CreateMessageRequestParams
    ) -> mcp.CreateMessageResult | mcp.ErrorData:
        """Let the session's model answer the server, if the user allows it. The request for permission belongs to the
        newest running call of the server."""
        assert self._sampler is not None, "sampling is offered only with a sampler"
        server = self._server
        try:
            running = self._running[-1] if self._running else None
            request = sampling_request(params, running, server.name, self._prefix, server.options, self._keys().mask)
        except ArgumentError as error:
            logger.warning("MCP server %s: its request to the model was refused: %s", server.name, error)
            return mcp.ErrorData(code=mcp.INVALID_PARAMS, message=str(error))
        if sum(1 for each in self._open.values() if each) >= SERVER_WAITS:
            words = f"{SERVER_WAITS} requests wait already"
            logger.info("MCP server %s: its request to the model was refused: %s", server.name, words)
            return mcp.ErrorData(code=mcp.INVALID_REQUEST, message=words)
        with anyio.CancelScope() as scope:
            self._open[scope] = request.call.call_id
            try:
                return result_of(await self._sampler.sample(request, progress_sender(context)))
            finally:
                self._open.pop(scope, None)
        return mcp.ErrorData(code=mcp.INVALID_REQUEST, message="the call that asked has ended")

    @property
    def can_ask(self) -> bool:
        """See :class:`crow.tools.servers.LoginAsker`."""
        has_pages = self._elicitation is not None and "url" in self._elicitation.question_kinds
        return has_pages and self._may_log_in

    async def ask(self, question: LoginQuestion) -> Literal["accept", "decline", "gone"]:
        """Ask the user, through the editor, to log in. See :class:`crow.tools.servers.LoginAsker`."""
        assert self._elicitation is not None, "asked only if `can_ask`"
        call_id, question_id = self._call_id(), self._new_id()
        with anyio.CancelScope() as scope:
            if self._running:
                self._open[scope] = call_id
            elif self._is_starting():
                self._login = scope
            try:
                return await ask_to_log_in(self._elicitation, self._server.name, question, call_id, question_id)
            finally:
                self._open.pop(scope, None)
                self._login = None
        return "gone"

    def _call_id(self) -> str:
        """Return the id of the running call; an empty text if there is none, or more than one."""
        return self._running[0].call_id if len(self._running) == 1 else ""

    def _new_id(self) -> str:
        """Return an id that no question of another session has, because a client may show questions of several
        sessions."""
        return f"{self._prefix}-{secrets.token_hex(8)}"
