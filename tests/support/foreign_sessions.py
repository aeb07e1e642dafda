"""Writes the same session as other tools write theirs, at the places and in the forms that they use.

The session: a prompt, an answer with a thought and two calls at once, their results (the second fails), an answer, a
compaction, and one more prompt with its answer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CWD = "/srv/birds"
PROMPT, THOUGHT, PLAN = "Count the eggs", "Two files, I think.", "I will look."
ANSWER, SUMMARY, NEXT, LAST = "There are 7 eggs.", "The nest has 7 eggs.", "And now?", "Still 7."
READ = ("call-1", "read", {"path": "nest.txt"}, "7 eggs")
RUN = ("call-2", "bash", {"command": "wc eggs"}, "no such file")
CALLS = (READ, RUN)
BIRD = "iVBORw0KGgo="
START_MS = 1_767_261_600_000  # 2026-01-01 10:00 UTC
UUID = "11111111-2222-4333-8444-555555555555"


def iso(second: int) -> str:
    """A time after the start of the session."""
    return f"2026-01-01T10:00:{second:02}.000Z"


def ms(second: int) -> int:
    return START_MS + second * 1000


def write_lines(path: Path, lines: Sequence[Mapping[str, Any] | str]) -> Path:
    """Write JSON lines; a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def claude_line(kind: str, uuid: str, parent: str | None, second: int, **more: Any) -> dict[str, Any]:
    """A line as Claude Code writes it."""
    head = {"parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": CWD, "sessionId": UUID}
    return {**head, "version": "2.1.0", "type": kind, "uuid": uuid, "timestamp": iso(second), **more}


def claude_user(uuid: str, parent: str | None, second: int, content: object, **more: Any) -> dict[str, Any]:
    return claude_line("user", uuid, parent, second, message={"role": "user", "content": content}, **more)


def claude_answer(
    uuid: str, parent: str, second: int, message: str, block: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    usage = {"input_tokens": 10, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 70, "output_tokens": 5}
    body = {"id": message, "type": "message", "role": "assistant", "model": "egg-1", "content": [block], "usage": usage}
    return claude_line("assistant", uuid, parent, second, message=body, **more)


def claude_result(uuid: str, parent: str, second: int, call: str, content: object, **more: Any) -> dict[str, Any]:
    return claude_user(uuid, parent, second, [{"type": "tool_result", "tool_use_id": call, "content": content, **more}])


def claude_code(home: Path) -> Path:
    """Each block of an answer is a line of its own; calls at once make the lines a tree."""
    read, run = CALLS
    lines: list[dict[str, Any]] = [
        {"type": "summary", "summary": "Another session", "leafUuid": "unknown"},
        {"type": "file-history-snapshot", "messageId": "u1", "snapshot": {}, "isSnapshotUpdate": False},
        claude_user("u1", None, 0, PROMPT),
        claude_answer("a1", "u1", 1, "m1", {"type": "thinking", "thinking": THOUGHT, "signature": "x"}),
        claude_answer("a2", "a1", 1, "m1", {"type": "text", "text": PLAN}),
        claude_answer("a3", "a2", 1, "m1", {"type": "tool_use", "id": read[0], "name": read[1], "input": read[2]}),
        claude_answer("a4", "a3", 1, "m1", {"type": "tool_use", "id": run[0], "name": run[1], "input": run[2]}),
        claude_result("r1", "a3", 2, read[0], read[3]),
        claude_result("r2", "a4", 2, run[0], [{"type": "text", "text": run[3]}], is_error=True),
        claude_answer("a5", "r2", 3, "m2", {"type": "text", "text": ANSWER}),
        claude_line(
            "system",
            "b1",
            None,
            4,
            subtype="compact_boundary",
            logicalParentUuid="a5",
            content="Conversation compacted",
            compactMetadata={"trigger": "auto", "preTokens": 1000},
        ),
        claude_user("s1", "b1", 4, SUMMARY, isCompactSummary=True, isVisibleInTranscriptOnly=True),
        claude_user("u2", "s1", 5, NEXT),
        claude_answer("a6", "u2", 6, "m3", {"type": "text", "text": LAST}),
        {"type": "ai-title", "aiTitle": "Eggs", "sessionId": UUID},
    ]
    return write_lines(home / ".claude/projects/-srv-birds" / f"{UUID}.jsonl", lines)


def codex_line(kind: str, second: int, **payload: Any) -> dict[str, Any]:
    return {"timestamp": iso(second), "type": kind, "payload": payload}


def codex_item(second: int, **item: Any) -> dict[str, Any]:
    return codex_line("response_item", second, **item)


def codex_message(second: int, role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return codex_item(second, type="message", role=role, content=[{"type": kind, "text": text}])


def codex_tokens(second: int, number: int) -> dict[str, Any]:
    usage = {"input_tokens": 100, "cached_input_tokens": 70, "output_tokens": 5, "reasoning_output_tokens": 2}
    total = {key: number * value for key, value in usage.items()}
    info = {"total_token_usage": total, "last_token_usage": usage, "model_context_window": 1000}
    return codex_line("event_msg", second, type="token_count", info=info, rate_limits=None)


def codex(home: Path) -> Path:
    """Numbers of tokens come again when only the rate limits changed."""
    read, run = CALLS
    output = json.dumps({"output": run[3], "metadata": {"exit_code": 1, "duration_seconds": 0.5}})
    lines = [
        codex_line("session_meta", 0, id=UUID, timestamp=iso(0), cwd=CWD, originator="codex_cli_rs", source="cli"),
        codex_message(0, "developer", "<permissions instructions>none</permissions instructions>"),
        codex_message(0, "user", "<environment_context><cwd>/srv/birds</cwd></environment_context>"),
        codex_line("turn_context", 0, cwd=CWD, model="egg-1", approval_policy="never"),
        codex_message(0, "user", PROMPT),
        codex_line("event_msg", 0, type="user_message", message=PROMPT),
        codex_item(1, type="reasoning", summary=[{"type": "summary_text", "text": THOUGHT}], encrypted_content="xx"),
        codex_message(1, "assistant", PLAN),
        codex_item(1, type="function_call", name=read[1], arguments=json.dumps(read[2]), call_id=read[0]),
        codex_item(1, type="function_call", name=run[1], arguments=json.dumps(run[2]), call_id=run[0]),
        codex_tokens(1, 1),
        codex_item(2, type="function_call_output", call_id=read[0], output=read[3]),
        codex_tokens(2, 1),
        codex_item(2, type="function_call_output", call_id=run[0], output=output),
        codex_message(3, "assistant", ANSWER),
        codex_tokens(3, 2),
        codex_line("compacted", 4, message=SUMMARY),
        codex_message(5, "user", NEXT),
        codex_message(6, "assistant", LAST),
        codex_tokens(6, 3),
    ]
    index = [{"id": UUID, "thread_name": "Nest", "updated_at": iso(5)}, {"id": UUID, "thread_name": "Eggs"}]
    write_lines(home / ".codex/session_index.jsonl", index)
    return write_lines(home / f".codex/sessions/2026/01/01/rollout-2026-01-01T10-00-00-{UUID}.jsonl", lines)


def pi_line(kind: str, entry: str, parent: str | None, second: int, **more: Any) -> dict[str, Any]:
    return {"type": kind, "id": entry, "parentId": parent, "timestamp": iso(second), **more}


def pi_user(name: str, parent: str | None, second: int, text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": ms(second)}
    return pi_line("message", name, parent, second, message=message)


def pi_answer(
    name: str, parent: str, second: int, *content: Mapping[str, Any], reason: str = "stop", **more: Any
) -> dict[str, Any]:
    usage = {"input": 30, "output": 5, "cacheRead": 70, "cacheWrite": 0, "totalTokens": 105, "cost": {"total": 0.25}}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": list(content),
        "provider": "nest",
        "model": "egg-1",
        "usage": usage,
    }
    message |= {"stopReason": reason, "timestamp": ms(second), **more}
    return pi_line("message", name, parent, second, message=message)


def pi_result(name: str, parent: str, second: int, call: Sequence[Any], *, is_error: bool) -> dict[str, Any]:
    content = [{"type": "text", "text": call[3]}]
    message = {"role": "toolResult", "toolCallId": call[0], "toolName": call[1], "content": content}
    return pi_line("message", name, parent, second, message={**message, "isError": is_error, "timestamp": ms(second)})


def pi(home: Path) -> Path:
    calls = [{"type": "toolCall", "id": call[0], "name": call[1], "arguments": call[2]} for call in CALLS]
    words = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": PLAN}]
    lines = [
        {"type": "session", "version": 3, "id": UUID, "timestamp": iso(0), "cwd": CWD},
        pi_line("model_change", "e0", None, 0, provider="nest", modelId="egg-1"),
        pi_user("e1", "e0", 0, PROMPT),
        pi_answer("e2", "e1", 1, *words, *calls, reason="toolUse"),
        pi_result("e3", "e2", 2, READ, is_error=False),
        pi_result("e4", "e3", 2, RUN, is_error=True),
        pi_answer("e5", "e4", 3, {"type": "text", "text": ANSWER}),
        pi_line("compaction", "e6", "e5", 4, summary=SUMMARY, firstKeptEntryId="e5", tokensBefore=1000),
        pi_user("e7", "e6", 5, NEXT),
        pi_answer("e8", "e7", 6, {"type": "text", "text": LAST}),
        pi_line("session_info", "e9", "e8", 6, name="Eggs"),
    ]
    return write_lines(home / f".pi/agent/sessions/--srv-birds--/2026-01-01T10-00-00_{UUID}.jsonl", lines)


@dataclass(frozen=True, slots=True)
class OpencodeMessage:
    id: str
    second: int
    data: Mapping[str, Any]
    parts: Sequence[Mapping[str, Any]]


def opencode_user(name: str, second: int, *parts: Mapping[str, Any]) -> OpencodeMessage:
    data = {"role": "user", "time": {"created": ms(second)}, "model": {"providerID": "nest", "modelID": "egg-1"}}
    return OpencodeMessage(name, second, data, parts)


def opencode_answer(name: str, second: int, *parts: Mapping[str, Any], **more: Any) -> OpencodeMessage:
    tokens = {"input": 30, "output": 3, "reasoning": 2, "cache": {"read": 70, "write": 0}}
    data: dict[str, Any] = {
        "role": "assistant",
        "time": {"created": ms(second)},
        "modelID": "egg-1",
        "providerID": "nest",
    }
    data |= {"path": {"cwd": CWD, "root": CWD}, "cost": 0.25, "tokens": tokens, **more}
    return OpencodeMessage(name, second, data, parts)


def opencode_text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def opencode_messages() -> list[OpencodeMessage]:
    read, run = CALLS
    time = {"start": ms(1), "end": ms(2)}
    done = {"status": "completed", "input": read[2], "output": read[3], "title": "nest.txt", "time": time}
    failed = {"status": "error", "input": run[2], "error": run[3], "time": time}
    return [
        opencode_user("msg_1", 0, opencode_text(PROMPT)),
        opencode_answer(
            "msg_2",
            1,
            {"type": "step-start"},
            {"type": "reasoning", "text": THOUGHT, "time": time},
            opencode_text(PLAN),
            {"type": "tool", "callID": read[0], "tool": read[1], "state": done},
            {"type": "tool", "callID": run[0], "tool": run[1], "state": failed},
            {"type": "step-finish", "reason": "tool-calls", "cost": 0.25, "tokens": {}},
        ),
        opencode_answer("msg_3", 3, {"type": "step-start"}, opencode_text(ANSWER), {"type": "step-finish"}),
        opencode_user("msg_4", 4, {"type": "compaction", "auto": True}),
        opencode_answer("msg_5", 4, opencode_text(SUMMARY), summary=True),
        opencode_user("msg_6", 5, opencode_text(NEXT)),
        opencode_answer("msg_7", 6, {"type": "step-start"}, opencode_text(LAST), {"type": "step-finish"}),
    ]


OPENCODE_SESSION = "ses_4a1f0c2e7ffeAbCdEfGhIjKlMn"


def opencode_files(home: Path) -> Path:
    """The JSON files of older versions of opencode."""
    storage = home / ".local/share/opencode/storage"
    times = {"created": ms(0), "updated": ms(6)}
    session = {"id": OPENCODE_SESSION, "directory": CWD, "title": "Eggs", "time": times}
    write_json(storage / f"session/birds/{OPENCODE_SESSION}.json", session)
    for message in opencode_messages():
        write_json(storage / f"message/{OPENCODE_SESSION}/{message.id}.json", {"id": message.id, **message.data})
        for number, part in enumerate(message.parts):
            write_json(storage / f"part/{message.id}/prt_{message.id}_{number:02}.json", part)
    return storage


OPENCODE_TABLES = """
    CREATE TABLE session (id text PRIMARY KEY, project_id text, parent_id text, slug text, directory text, title text,
        version text, revert text, time_created integer, time_updated integer, time_archived integer);
    CREATE TABLE message (id text PRIMARY KEY, session_id text, time_created integer, time_updated integer, data text);
    CREATE TABLE part (id text PRIMARY KEY, message_id text, session_id text, time_created integer, data text);
"""


def opencode_rows(
    database: sqlite3.Connection, session: Mapping[str, Any], messages: Sequence[OpencodeMessage]
) -> None:
    """Insert a session."""
    row = {"directory": CWD, "title": "Eggs", "time_created": ms(0), "time_updated": ms(6), **session}
    marks = ", ".join("?" * len(row))
    database.execute(f"INSERT INTO session ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
    for message in messages:
        values = (message.id, row["id"], ms(message.second), json.dumps(message.data))
        database.execute("INSERT INTO message (id, session_id, time_created, data) VALUES (?, ?, ?, ?)", values)
        for number, part in enumerate(message.parts):
            values = (f"prt_{message.id}_{number:02}", message.id, row["id"], json.dumps(part))
            database.execute("INSERT INTO part (id, message_id, session_id, data) VALUES (?, ?, ?, ?)", values)


def opencode_database(home: Path) -> Path:
    path = home / ".local/share/opencode/opencode.db"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(OPENCODE_TABLES)
        opencode_rows(database, {"id": OPENCODE_SESSION}, opencode_messages())
    return path


def goose_message(
    role: str, second: int, *content: Mapping[str, Any], user: bool = True, model: bool = True
) -> dict[str, Any]:
    seen = {"userVisible": user, "agentVisible": model}
    return {"id": None, "role": role, "created": ms(second) // 1000, "content": list(content), "metadata": seen}


def goose_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def goose_messages() -> list[dict[str, Any]]:
    """goose hides what it has compacted from the model, and shows the summary to the model only."""
    requests = [
        {
            "type": "toolRequest",
            "id": call[0],
            "toolCall": {"status": "success", "value": {"name": call[1], "arguments": call[2]}},
        }
        for call in CALLS
    ]
    good = {"status": "success", "value": {"content": [goose_text(READ[3])], "isError": False}}
    bad = {"status": "error", "error": RUN[3]}
    return [
        goose_message("user", 0, goose_text(PROMPT), model=False),
        goose_message(
            "assistant",
            1,
            {"type": "thinking", "thinking": THOUGHT, "signature": ""},
            goose_text(PLAN),
            *requests,
            model=False,
        ),
        goose_message("user", 2, {"type": "toolResponse", "id": READ[0], "toolResult": good}, model=False),
        goose_message("user", 2, {"type": "toolResponse", "id": RUN[0], "toolResult": bad}, model=False),
        goose_message("assistant", 3, goose_text(ANSWER), model=False),
        goose_message("user", 4, goose_text(SUMMARY), user=False),
        goose_message("assistant", 4, goose_text("Do not mention the summary."), user=False),
        goose_message("user", 5, goose_text(NEXT)),
        goose_message("assistant", 6, goose_text(LAST)),
    ]


GOOSE_TABLES = """
    CREATE TABLE sessions (id TEXT PRIMARY KEY, name TEXT, description TEXT, user_set_name BOOLEAN, session_type TEXT,
        working_dir TEXT NOT NULL, created_at TIMESTAMP, updated_at TIMESTAMP, model_config_json TEXT);
    CREATE TABLE messages (id INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT, session_id TEXT NOT NULL,
        role TEXT NOT NULL, content_json TEXT NOT NULL, created_timestamp INTEGER NOT NULL, metadata_json TEXT);
"""


def goose_database(home: Path) -> Path:
    path = home / ".local/share/goose/sessions/sessions.db"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(GOOSE_TABLES)
        times = ("2026-01-01 10:00:00", "2026-01-01 10:00:06")
        row = ("20260101_1", "Eggs", "", 0, "user", CWD, *times, '{"model_name":"egg-1"}')
        database.execute(f"INSERT INTO sessions VALUES ({', '.join('?' * len(row))})", row)
        for message in goose_messages():
            values = (
                message["role"],
                json.dumps(message["content"]),
                message["created"],
                json.dumps(message["metadata"]),
            )
            database.execute(
                "INSERT INTO messages (session_id, role, content_json, created_timestamp, metadata_json)"
                " VALUES ('20260101_1', ?, ?, ?, ?)",
                values,
            )
    return path


def goose_file(home: Path) -> Path:
    """The JSONL of older versions of goose."""
    head = {"working_dir": CWD, "description": "Eggs", "message_count": 9, "total_tokens": 5}
    return write_lines(home / ".local/share/goose/sessions/20260101_100000.jsonl", [head, *goose_messages()])


def openai_messages() -> list[dict[str, Any]]:
    calls = [
        {"id": call[0], "type": "function", "function": {"name": call[1], "arguments": json.dumps(call[2])}}
        for call in CALLS
    ]
    return [
        {"role": "system", "content": "You count eggs."},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        {"role": "assistant", "content": PLAN, "reasoning_content": THOUGHT, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call[0], "content": call[3]} for call in CALLS),
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": NEXT},
        {"role": "assistant", "content": LAST},
    ]


def openai_json(home: Path) -> Path:
    value = {"title": "Eggs", "model": "egg-1", "cwd": CWD, "created": ms(0) // 1000, "messages": openai_messages()}
    return write_json(home / "chat.json", value)


WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "claude-code": claude_code,
    "codex": codex,
    "pi": pi,
    "opencode-files": opencode_files,
    "opencode-database": opencode_database,
    "goose-database": goose_database,
    "goose-file": goose_file,
    "openai-json": openai_json,
}
"""Writes the session below a home directory, and returns its file or directory. The name begins with the tool's."""
