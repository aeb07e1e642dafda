"""Sessions of this process whose requests are recorded as those of an endpoint are, and their replay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from crow.domain.errors import ContextOverflow
from crow.domain.messages import Usage
from crow.llm import Attempt, ModelInfo, Request
from crow.llm.dialect import Dialect
from crow.llm.sent import sent_request
from crow.llm.wires import wire_named
from crow.replay.case import with_subagents
from crow.replay.requests import Rebuilder, Replayed
from crow.replay.turns import replayed_requests
from crow.store.sqlite.store import SqliteStore
from crow.tools.workspace import DiskWorkspace
from tests.support.scripted_model import Say, ScriptedModel, ScriptedStream

__all__ = ["RecordingModel", "replayed"]

ENDPOINT = "http://127.0.0.1:1/v1 scripted"
INFO = ModelInfo(
    name="scripted",
    endpoint=ENDPOINT,
    context_window=20_000,
    is_window_configured=True,
    input_price=1.0,
    output_price=1.0,
)


class RecordingModel(ScriptedModel):
    """A scripted model that says how each request was sent. Without a script, `otherwise` answers. `records_refused`:
    the endpoint says only in its answer that a request is too long."""

    def __init__(
        self,
        *answers: Say,
        info: ModelInfo = INFO,
        otherwise: Callable[[Request], Say] | None = None,
        records_refused: bool = True,
    ) -> None:
        super().__init__(*answers, info=info)
        self._otherwise = otherwise
        self._records_refused = records_refused
        self._encoder = wire_named("chat").encoder()

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ScriptedStream]:
        if not self._answers and self._otherwise is not None:
            self._answers.append(self._otherwise(request))
        limit, dialect = request.max_output_tokens, Dialect()
        name, endpoint = self.info.endpoint.partition(" ")[2], self.info.endpoint
        body = self._encoder.body(request, model=name, endpoint=endpoint, dialect=dialect, limit=limit, extra={})
        sent = sent_request(body, request, endpoint=endpoint, dialect=dialect, limit=limit)
        async with super().stream(request) as stream:
            if isinstance(stream._say.error, ContextOverflow) and not self._records_refused:
                raise stream._say.error
            yield _Recorded(stream, sent, Usage(input_tokens=len(body) // 4, output_tokens=20))


class _Recorded(ScriptedStream):
    def __init__(self, inner: ScriptedStream, sent: object, usage: Usage) -> None:
        super().__init__(replace(inner._say, usage=inner._say.usage or usage))
        self._sent = sent

    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(replace(each, sent=self._sent) for each in super().attempts())  # type: ignore[arg-type]


async def replayed(directory: Path, session: str = "s1") -> list[Replayed]:
    """Replay a stored session and its subagents."""
    place = directory / "scratch"
    place.mkdir(exist_ok=True)
    store = await SqliteStore.open(directory / "crow.db")
    try:
        return [
            each
            for name in await with_subagents(store, session)
            async for each in replayed_requests(store, name, Rebuilder(), DiskWorkspace(place, is_bounded=True))
        ]
    finally:
        await store.close()
