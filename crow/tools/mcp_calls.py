"""The calls of one MCP server's tools, and the questions that the server asks the user meanwhile.

Strategy: a failure of a call is an outcome that names the server. A question belongs to the call that ran when it was
asked, if that is certain, and is taken back when nobody waits for that call any more: its answer could change nothing.
Knows a client that is connected; not how the server lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio
import mcp_types as mcp
from mcp.client import Client
from mcp.client.session import ClientRequestContext
from mcp.shared.exceptions import MCPError

from crow.tools import Asker, OnOutput, Outcome
from crow.tools.mcp_elicitation import elicited
from crow.tools.mcp_listing import ExternalTool
from crow.tools.mcp_results import outcome_of, progress_shown, sentence

__all__ = ["ServerCalls"]


class ServerCalls:
    """What runs on one server. `failed` is told of an error that a call came back with; `ending` says why the server
    ended. `timeout_s`: how long a call may take."""

    def __init__(
        self,
        name: str,
        prefix: str,
        *,
        timeout_s: float,
        asker: Asker | None,
        failed: Callable[[MCPError], None],
        ending: Callable[[MCPError], str],
    ) -> None:
        self._name = name
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._asker = asker
        self._told_failed = failed
        self._ending = ending
        self._running: list[str] = []
        self._questions: dict[anyio.CancelScope, str] = {}
        self._asked = 0

    async def call(
        self, client: Client, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput, call_id: str
    ) -> Outcome:
        """Call a tool; a failure is an outcome that names the server."""
        self._running.append(call_id)
        try:
            result = await client.call_tool(tool.name, dict(arguments), progress_callback=progress_shown(on_output))
        except MCPError as error:
            self._told_failed(error)
            return self.failure(self._words(tool, error))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's answer provokes in the library
            return self.failure(f"gave {tool.name} an answer that cannot be used: {sentence(error)}")
        finally:
            self._running.remove(call_id)
            self._withdraw(call_id)
        return outcome_of(result)

    async def elicit(
        self,
        context: ClientRequestContext,  # noqa: ARG002 (the library's signature)
        params: mcp.ElicitRequestParams,
    ) -> mcp.ElicitResult | mcp.ErrorData:
        """Answer a question of the server's, as the library wants it."""
        call_id = self._running[0] if len(self._running) == 1 else ""
        self._asked += 1
        with anyio.CancelScope() as scope:
            if self._running:
                self._questions[scope] = call_id
            try:
                return await elicited(self._asker, self._name, params, call_id, f"{self._prefix}-{self._asked}")
            finally:
                self._questions.pop(scope, None)
        return mcp.ElicitResult(action="cancel")

    def failure(self, words: str) -> Outcome:
        """A call that came to nothing."""
        return Outcome(text=f"MCP server {self._name} {words}", is_error=True)

    def _withdraw(self, ended: str) -> None:
        """Take back what was asked in the call that `ended`, and with the last of all calls everything."""
        for scope, call_id in self._questions.items():
            if not self._running or (call_id and call_id == ended):
                scope.cancel()

    def _words(self, tool: ExternalTool, error: MCPError) -> str:
        if error.code == mcp.REQUEST_TIMEOUT:
            return f"did not answer {tool.name} within {self._timeout_s:g} s"
        if error.code == mcp.CONNECTION_CLOSED:
            return f"ended during {tool.name}: {self._ending(error)}"
        return f"refused {tool.name}: {sentence(error)}"
