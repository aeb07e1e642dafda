"""An endpoint with a prompt cache, and scripted sessions that try to break its prefixes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sqlite3
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from crow.agent.compaction.summary import INSTRUCTION, SYSTEM
from crow.domain.rendering import NO_ANSWER
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import CUT, HANG, FakeEndpoint, Recorded, Reply

__all__ = ["CachingEndpoint", "Prefixes", "Step", "run_session", "write_config"]

NOT_CACHED = frozenset(
    {
        *("messages", "input", "system", "tools", "stream", "stream_options", "tool_choice"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens"),
    }
)
"""Members of a request that no provider puts before the conversation. All others must be equal for a hit."""

CACHE_MARK = b',"cache_control":{"type":"ephemeral"}'
MARK = re.compile(r"mark-\d+-\d+")
CWD = re.compile(r"Working directory: ([^\\]+)")
BREAKS = "('prompt', 'checkpoint', 'mask', 'restore')"
SMALL_WINDOW = 20_000
WORDS = "The nest is built of twigs, string and moss, and it lies high up in the old tree behind the house. "
SUMMARY = "## Goal\nBuild a nest.\n## Done\nTwigs were found.\n## Next\nFind string."
SERVER = Path(__file__).parents[1] / "tools" / "servers" / "tiny.py"


class PrefixCache:
    """Remembers requests and tells how much of a new one it has seen before. Works like a provider's cache, but with
    bytes and without forgetting."""

    def __init__(self) -> None:
        self._known: dict[str, list[bytes]] = {}

    def add(self, raw: bytes) -> tuple[bytes, int]:
        """Return the bytes of the tools and messages of a request on any wire, without cache marks, and how many of
        them are a prefix hit."""
        members = json.loads(raw)
        raw = raw.replace(CACHE_MARK, b"")
        key = json.dumps({name: value for name, value in members.items() if name not in NOT_CACHED}, sort_keys=True)
        first = next(name for name in ("tools", "system", "input", "messages") if name in members)
        start = raw.find(f'"{first}":['.encode())
        prompt = raw[start:].removesuffix(b"]}")
        known = self._known.setdefault(key, [])
        hit = max((common_prefix(prompt, other) for other in known), default=0)
        known.append(prompt)
        return prompt, hit


def common_prefix(one: bytes, other: bytes) -> int:
    """How many bytes at the start are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(kw_only=True)
class Prefixes:
    """What the cache saw. `repeated` counts the bytes that were sent before, without a declared break since, and
    `missed` those of them that were no hit. `breaks` counts the declared breaks by kind. `fresh` counts the bytes that
    were no hit by their cause: one of the breaks, the messages that a checkpoint kept, the first request of a session,
    a request for a summary, or messages added since the last request."""

    requests: int = 0
    sent: int = 0
    hits: int = 0
    repeated: int = 0
    missed: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    fresh: Counter[str] = field(default_factory=Counter)
    undeclared: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Conversation:
    """The requests of one session since its last declared break. `state` changes with each declared break."""

    state: tuple[object, ...] = ()
    longest: int = 0


Step: TypeAlias = Callable[[Sequence[dict[str, Any]]], Reply]
"""Takes the chunk with the usage and makes one reply of the model."""


class CachingEndpoint:
    """Answers as scripted, and reports truthfully how many tokens were cached.

    It recognises a session by its directory, and a subagent by the mark in its task. Whether a break was declared is
    read from crow's database when the request arrives: all that leads to a request is stored before.
    """

    def __init__(self, database: Path) -> None:
        self.endpoint = FakeEndpoint(otherwise=self._reply)
        self.endpoint.wires = ("chat", "responses", "messages")
        self.found = Prefixes()
        self.sessions: dict[str, str] = {}
        self.steps: dict[str, deque[Step]] = {}
        self._database = database
        self._cache = PrefixCache()
        self._conversations: dict[str, Conversation] = {}

    def _reply(self, request: Recorded) -> Reply:
        body = request.body
        messages = body["messages"]
        prompt, hit = self._cache.add(request.raw)
        usage = {
            "prompt_tokens": len(prompt) // 4,
            "completion_tokens": 50,
            "prompt_tokens_details": {"cached_tokens": hit // 4},
        }
        counted = [{"choices": [], "usage": usage}]
        session = self._session_of(messages)
        is_transcript = SYSTEM in str(messages[0]["content"])
        is_summary = INSTRUCTION[:30] in str(messages[-1]["content"])
        cause = "summary"
        if not is_transcript:
            judged = self._judge(session, prompt, hit, added=sent_size(request, is_summary=is_summary))
            cause = cause if is_summary else judged
        fresh = len(prompt) - hit
        if cause == "checkpoint":
            kept = min(fresh, json_size(messages[2:]))
            self.found.fresh["kept"] += kept
            fresh -= kept
        self.found.fresh[cause] += fresh
        self.found.requests += 1
        self.found.sent += len(prompt)
        self.found.hits += hit
        if is_transcript or is_summary:
            return say(SUMMARY)(counted)
        if session is not None and session in self.steps:
            steps = self.steps[session]
            return (steps.popleft() if steps else say("Done."))(counted)
        is_new = messages[-1]["role"] == "user"
        return (call(("read_file", {"path": "README.md"})) if is_new else say("It is a nest."))(counted)

    def _session_of(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The id of the session that sends these messages, None for a request without a session."""
        system = str(messages[0]["content"])
        if "You are a subagent" in system and (mark := MARK.search(json.dumps(messages[1]))):
            query = "SELECT session FROM entries WHERE kind = 'user' AND body LIKE ? AND session LIKE 'task-%'"
            rows = self._query(query, f"%{mark[0]}%")
            return str(rows[0][0])
        found = CWD.search(system.replace("\n", "\\"))
        return self.sessions.get(found[1]) if found else None

    def _query(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()

    def _judge(self, session: str | None, prompt: bytes, hit: int, *, added: int) -> str:
        """Compare a request with the earlier ones of its session, and return why part of it is no hit. Its last
        `added` bytes are new in any case: a request for a summary ends with the instruction, which no other request
        contains."""
        assert session is not None, prompt[:2_000]
        rows = self._query(
            f"SELECT id, kind FROM entries WHERE session = ? AND kind IN {BREAKS} ORDER BY id DESC LIMIT 1", session
        )
        moves = self._query("SELECT count(*) FROM moves WHERE session = ?", session)
        kind = rows[0][1] if rows else ""
        state = (rows[0] if rows else None, moves[0][0])
        known = self._conversations.setdefault(session, Conversation())
        if known.state != state:
            cause = "first" if not known.state else "move" if known.state[1] != state[1] else kind
            if known.state:
                self.found.breaks[cause] += 1
            known.state, known.longest = state, len(prompt) - added
            return cause
        expected = min(known.longest, len(prompt) - added)
        self.found.repeated += expected
        self.found.missed += max(0, expected - hit)
        if hit < expected:
            around = prompt[max(0, hit - 80) : hit + 120].decode(errors="replace")
            self.found.undeclared.append(f"{session}: {hit} of {expected} bytes hit; it changed in {around!r}")
        known.longest = max(known.longest, len(prompt) - added)
        return "added"


def sent_size(request: Recorded, *, is_summary: bool) -> int:
    """The bytes of the instruction at the end of a request for a summary, with crow's fixed answer before it if there
    is one. 0 for any other request."""
    if not is_summary:
        return 0
    count = 1 + (request.body["messages"][-2].get("content") in (NO_ANSWER, "Seen."))
    sent = request.sent["input" if request.wire == "responses" else "messages"]
    return (
        len(",".join(json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in sent[-count:]).encode()) + 1
    )


def json_size(messages: Sequence[Mapping[str, Any]]) -> int:
    """The bytes of these messages in a request."""
    return sum(len(json.dumps(one, ensure_ascii=False, separators=(",", ":")).encode()) + 1 for one in messages)


def say(text: str, *, thought: str = "") -> Step:
    deltas = [{"reasoning_content": thought}] if thought else []
    chunks = [fake.chunk(delta) for delta in [*deltas, {"content": text}]]
    return lambda counted: Reply(steps=(fake.sse(*chunks, fake.chunk(finish="stop"), *counted),))


def call(*named: tuple[str, Mapping[str, object]], text: str = "") -> Step:
    """Call tools. The ids repeat, as some servers' ids do."""
    deltas: list[dict[str, Any]] = [{"content": text}] if text else []
    for index, (name, arguments) in enumerate(named):
        function = {"name": name, "arguments": json.dumps(arguments)}
        deltas.append({"tool_calls": [{"index": index, "id": f"call_{index}", "function": function}]})
    chunks = [fake.chunk(delta) for delta in deltas]
    return lambda counted: Reply(steps=(fake.sse(*chunks, fake.chunk(finish="tool_calls"), *counted),))


def broken(text: str) -> Step:
    return lambda _: Reply(steps=(fake.sse(fake.chunk({"content": text}), done=False), CUT))


def endless(text: str) -> Step:
    return lambda _: Reply(steps=(fake.sse(fake.chunk({"content": text}), done=False), HANG))


def too_long() -> Step:
    return lambda _: fake.failing(
        400, "This model's maximum context length is 19000 tokens. Your messages resulted in 19500 tokens."
    )


def write_config(home: Path, base_url: str, wire: str = "chat") -> None:
    """Write settings with two models. On Messages, they have names of Claude's kind, because other models may not begin
    to think in the middle of a turn."""
    home.mkdir(exist_ok=True)
    own = {name: f'name = "claude-{name}-5"\n' if wire == "messages" else "" for name in ("small", "large")}
    (home / "config.toml").write_text(
        f'[model]\nname = "small"\nbase_url = "{base_url}"\nwire = "{wire}"\n'
        f'[models."small"]\ncontext_window = {SMALL_WINDOW}\n{own["small"]}'
        f'[models."large"]\ncontext_window = 400000\n{own["large"]}[permissions]\nmode = "auto"\n',
        "utf-8",
    )


class ScriptedSession:
    """One session, its workspace and its random changes."""

    def __init__(self, agent: CrowProcess, model: CachingEndpoint, place: Path, seed: int) -> None:
        self.agent, self.model, self.place, self.seed = agent, model, place, seed
        self.chance = random.Random(seed)
        self.session = ""
        self.count = 0
        self.with_server = self.chance.random() < 0.5
        self.only_reads = self.chance.random() < 0.3

    @property
    def opening(self) -> dict[str, Any]:
        server = {"name": "nest", "command": sys.executable, "args": ["-I", "-S", str(SERVER)], "env": []}
        return {"cwd": str(self.place), "mcpServers": [server] if self.with_server else []}

    def prepare(self) -> None:
        """Make the workspace."""
        self.place.mkdir(parents=True)
        (self.place / "README.md").write_text("# Nest\nTwigs and string.\n")
        (self.place / "AGENTS.md").write_text("Be brief.\n")
        for number in range(4):
            (self.place / f"part{number}.txt").write_text(WORDS * (number * 50 + 1))

    async def open(self) -> None:
        self.session = (await self.agent.request("session/new", self.opening))["sessionId"]
        self.model.sessions[str(self.place)] = self.session
        self.model.steps[self.session] = deque()
        level = self.chance.choice(["default", "low", "high"])
        params = {"sessionId": self.session, "configId": "thought_level", "value": level}
        await self.agent.request("session/set_config_option", params)

    def mark(self) -> str:
        self.count += 1
        return f"mark-{self.seed}-{self.count}"

    def words(self) -> str:
        return f"{self.mark()} " + WORDS * self.chance.choice([1] if self.only_reads else [1, 3, 10, 40])

    def some_calls(self) -> Step:
        number = self.chance.randrange(4)
        options: list[tuple[str, dict[str, object]]] = [
            ("read_file", {"path": f"part{number}.txt"}),
            ("read_file", {"path": "missing.txt"}),
            ("write_file", {"path": f"new{number}.txt", "content": self.words()}),
            ("shell", {"command": f"echo {self.mark()}", "access": "read"}),
            ("grep", {"pattern": "nest"}),
            ("update_plan", {"items": [{"content": self.mark(), "status": "pending"}]}),
            ("task", {"description": "Look", "prompt": f"Look for {self.mark()}"}),
            ("skill", {"name": "moss"}),
            ("nest__echo", {"text": self.mark()}),
            ("nest__picture", {}),
            ("no_such_tool", {"a": 1}),
            ("write_file", {"path": "huge.txt", "content": "moss " * 30_000}),
        ]
        if self.only_reads:
            del options[2:]
        chosen = [self.chance.choice(options) for _ in range(self.chance.choice([1, 1, 2, 3]))]
        return call(*chosen, text=self.chance.choice(["", "I look at it. "]))

    async def prompt(self) -> None:
        """Prompt with a random turn of the model."""
        steps = self.model.steps[self.session]
        steps.clear()
        steps.extend(self.some_calls() for _ in range(self.chance.choice([0, 1, 2, 4])))
        end = self.chance.random()
        if end < 0.1:
            steps.append(broken("The first half"))
        elif end < 0.15:
            steps.append(too_long())
        elif end < 0.25:
            await self.cancelled_prompt()
            return
        steps.append(say(self.words(), thought=self.chance.choice(["", "Hm. "])))
        with contextlib.suppress(RpcError):
            await self.agent.prompt(self.session, self.words())

    async def cancelled_prompt(self) -> None:
        mark = self.mark()
        self.model.steps[self.session].append(endless(mark))
        since = len(self.agent.log)
        call = await self.agent.start_prompt(self.session, self.words())
        await self.agent.wait_for_text(self.session, mark, since=since)
        await self.agent.notify("session/cancel", {"sessionId": self.session})
        assert (await call.result())["stopReason"] == "cancelled"

    async def killed_prompt(self) -> None:
        """Kill the process in the middle of an answer that is saved as a draft."""
        mark = self.mark()
        steps = self.model.steps[self.session]
        steps.clear()
        steps.extend([self.some_calls(), endless(mark)])
        since = len(self.agent.log)
        await self.agent.start_prompt(self.session, self.words())
        await self.agent.wait_for_text(self.session, mark, since=since)
        await self.agent.kill()

    async def go_on(self, *, prompts: int, changes: bool = True) -> None:
        """Prompt so often, with a change before every second prompt if there are `changes`."""
        for number in range(prompts):
            if changes and number % 2:
                await self.change()
            await self.prompt()

    async def load(self, session: str) -> None:
        """Load a stored session."""
        self.session = session
        self.model.sessions[str(self.place)] = session
        self.model.steps.setdefault(session, deque())
        await self.agent.request("session/load", {**self.opening, "sessionId": session})

    async def command(self, text: str) -> str:
        since = len(self.agent.log)
        await self.agent.prompt(self.session, text)
        return self.agent.text(self.session, since=since)

    async def change(self) -> None:
        """Change something between two prompts."""
        match self.chance.randrange(12):
            case 0:
                mode = self.chance.choice(["plan", "ask", "accept-edits", "auto"])
                await self.agent.request("session/set_mode", {"sessionId": self.session, "modeId": mode})
            case 1:
                (self.place / "AGENTS.md").write_text(f"Be brief. {self.mark()}\n")
            case 2:
                folder = self.place / ".agents" / "skills" / self.chance.choice(["moss", "string"])
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "SKILL.md").write_text(f"---\ndescription: Finds it. {self.mark()}\n---\n{WORDS}")
            case 3:
                self.with_server = not self.with_server
                await self.reopen()
            case 4:
                await self.reopen()
            case 5:
                steps = self.model.steps[self.session]
                steps.clear()
                steps.extend([call(("nest__die", {})), say("It is gone.")])
                await self.agent.prompt(self.session, self.words())
            case 6:
                await self.command(f"/model {self.chance.choice(['small', 'large'])}")
            case 7:
                await self.command("/compact")
            case 8:
                await self.command(self.chance.choice(["/undo", "/undo", "/redo"]))
            case 9:
                await self.command("/retry")
            case 10:
                await self.command("/compact undo")
            case _:
                await self.command("/mcp restart")

    async def reopen(self) -> None:
        await self.agent.request("session/close", {"sessionId": self.session})
        await self.agent.request("session/load", {**self.opening, "sessionId": self.session})


async def run_session(
    agent: CrowProcess, model: CachingEndpoint, place: Path, seed: int, *, prompts: int = 12, changes: bool = True
) -> str:
    """Run one scripted session, with a change before every second prompt if there are `changes`. Return what `/context`
    says at the end."""
    session = ScriptedSession(agent, model, place, seed)
    session.prepare()
    await session.open()
    await session.go_on(prompts=prompts, changes=changes)
    return await session.command("/context")
