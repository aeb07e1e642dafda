"""Sessions of other tools are imported from their own files, which stay as they are, also when they are hostile."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.conversation import for_model
from crow.domain.entries import (
    Assistant,
    Body,
    Checkpoint,
    Command,
    Entry,
    Note,
    Pin,
    Remark,
    Reminder,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.errors import ArgumentError
from crow.domain.messages import AssistantMessage, Image, Text, Usage
from crow.store import SessionRow
from crow.store.admin import ImportDefaults, Imported
from crow.store.importers import Batch, Problems, SessionScan, files, importable
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import history
from tests.support import foreign_sessions as foreign
from tests.support.amounts import examples
from tests.support.foreign_sessions import ANSWER, CWD, LAST, NEXT, PLAN, PROMPT, SUMMARY, THOUGHT, UUID
from tests.support.paths import problems as faults_of_request

HERE = "/here"


async def bring(store: SqliteStore, path: Path, *, tool: str | None = None) -> tuple[list[Imported], Problems]:
    """Import everything below `path`."""
    with SessionScan(path, tool=tool) as scan, tempfile.NamedTemporaryFile() as file:
        batch = Batch(file, cwd=HERE)  # type: ignore[arg-type]
        for group in scan.groups:
            batch.add(group, scan.problems)
        batch.end()
        defaults = ImportDefaults(model="mine", mode="ask")
        return list(await SessionAdmin(store).import_file(Path(file.name), defaults)), scan.problems


async def rows(store: SqliteStore) -> dict[str, SessionRow]:
    return {name: await store.session(name) for name in await SessionAdmin(store).ids()}


async def only(store: SqliteStore) -> SessionRow:
    (row,) = (await rows(store)).values()
    return row


async def told(store: SqliteStore, session: str) -> list[tuple[str, str]]:
    """The history of a session: kinds with their words."""
    return [shown(entry.body) for entry in await history(store, session)]


def shown(body: Body) -> tuple[str, str]:
    match body:
        case User(parts=parts):
            return "user", "|".join(part.text if isinstance(part, Text) else type(part).__name__ for part in parts)
        case Assistant(text=text, thought=thought, calls=calls):
            return "assistant", "|".join(filter(None, [thought, text, *(call.name for call in calls)]))
        case ToolResult(text=text, is_error=is_error):
            return "error" if is_error else "result", text
        case Checkpoint(summary=summary):
            return "checkpoint", summary
        case TurnEnd(stop=stop):
            return "end", stop
        case Reminder(text=text) | Remark(text=text):
            return type(body).__name__.lower(), text
        case Command(text=text, answer=answer):
            return "command", f"{text}|{answer}"
        case Note(value=value):
            return "note", value
        case _:
            raise AssertionError(body)


def request(entries: Sequence[Entry]) -> list[str]:
    """The faults of the request that the model would get."""
    return faults_of_request(for_model(entries).messages)


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Time and hash of every file in a folder."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


SCENE = [
    ("user", PROMPT),
    ("assistant", f"{THOUGHT}|{PLAN}|read|bash"),
    ("result", "7 eggs"),
    ("error", "no such file"),
    ("assistant", ANSWER),
    ("checkpoint", SUMMARY),
    ("end", "end_turn"),
    ("user", NEXT),
    ("assistant", LAST),
    ("end", "end_turn"),
]


@pytest.mark.parametrize("name", foreign.WRITERS)
async def test_a_session_keeps_its_messages_times_models_usage_and_directory(
    name: str, sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    foreign.WRITERS[name](tmp_path / "home")
    _, problems = await bring(sqlite_store, tmp_path / "home")
    row = await only(sqlite_store)
    entries = await history(sqlite_store, row.id)
    scene = SCENE
    if name == "openai-json":  # the format has no compactions and does not say whether a call failed
        scene = [("result", words) if kind == "error" else (kind, words) for kind, words in SCENE]
        scene = [one for one in scene if one[0] != "checkpoint"]
    assert [shown(entry.body) for entry in entries] == scene
    assert problems == Problems()
    assert (row.title, row.cwd, row.model, row.mode, row.permissions) == ("Eggs", CWD, "mine", "ask", ())
    assert row.created_ms == foreign.ms(0)
    answers = [entry for entry in entries if isinstance(entry.body, Assistant)]
    assert {answer.model for answer in answers} == {"" if name == "goose-file" else "egg-1"}
    if name != "openai-json":
        assert row.updated_ms == foreign.ms(6)
        assert [answer.created_ms for answer in answers] == [foreign.ms(1), foreign.ms(3), foreign.ms(6)]
    has_usage = not name.startswith(("goose", "openai"))
    usage = (answers[0].usage.input_tokens, answers[0].usage.cached_tokens) if answers[0].usage else None
    assert usage == ((100, 70) if has_usage else None)
    written = [answer.usage.cache_write_tokens for answer in answers if answer.usage]
    assert set(written) <= {20 if name == "claude-code" else None if name == "codex" else 0}
    assert (row.tokens_in, row.tokens_out) == ((300, 15) if has_usage else (0, 0))
    assert row.cost == (0.75 if name.startswith(("pi", "opencode")) else 0.0)
    assert request(entries) == []


@pytest.mark.parametrize("name", foreign.WRITERS)
async def test_importing_again_adds_nothing_and_never_touches_the_source(
    name: str, sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    foreign.WRITERS[name](tmp_path / "home")
    before = snapshot(tmp_path / "home")
    (first,), _ = await bring(sqlite_store, tmp_path / "home")
    entries = await history(sqlite_store, first.sessions[0])
    (second,), _ = await bring(sqlite_store, tmp_path / "home")
    assert (first.is_new, second.is_new) == (True, False)
    assert first.sessions == second.sessions
    assert await history(sqlite_store, first.sessions[0]) == entries
    assert snapshot(tmp_path / "home") == before


async def test_a_directory_gives_the_sessions_of_all_tools(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    for name in ("claude-code", "codex", "pi", "opencode-files", "goose-file", "openai-json"):
        foreign.WRITERS[name](tmp_path)
    (tmp_path / "notes.json").write_text('{"role": "none of ours"}')
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n')
    done, problems = await bring(sqlite_store, tmp_path)
    tools = sorted(name.partition("-")[0] for one in done for name in one.sessions)
    assert tools == ["claude", "codex", "goose", "openai", "opencode", "pi"]
    assert problems == Problems()
    only_pi, _ = await bring(sqlite_store, tmp_path, tool="pi")
    assert [one.sessions for one in only_pi] == [(f"pi-{UUID}",)]


async def test_damaged_lines_are_skipped_and_named(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    path = foreign.pi(tmp_path)
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:-5]
    lines[5:5] = ['"only text"', "[" * 100_000, ""]
    path.write_text("\n".join(lines))
    _, problems = await bring(sqlite_store, tmp_path)
    places = [(problem.place.rpartition("line ")[2], problem.words.partition(":")[0]) for problem in problems.named]
    assert places == [
        ("5", "it is not JSON"),
        ("6", "it is not a JSON object but 'only text'"),
        ("7", "its JSON is nested too deeply"),
        ("9", "the entry before it is missing, so it was put at the end"),
    ]
    assert problems.lines == 4
    row = await only(sqlite_store)
    scene = [one for one in SCENE if one != ("result", "7 eggs")]
    assert await told(sqlite_store, row.id) == scene
    assert request(await history(sqlite_store, row.id)) == []


async def test_hostile_files_are_refused_without_waiting_for_them(
    sqlite_store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10_000)
    home = tmp_path / "home"
    good = foreign.claude_code(home)
    secret = foreign.write_json(tmp_path / "secret.json", foreign.openai_messages())
    os.mkfifo(home / "pipe.jsonl")
    (home / "link.json").symlink_to(secret)
    (home / "loop").symlink_to(home)
    (home / "fake.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 2000)
    with good.open("a") as file:
        file.write(json.dumps(foreign.claude_user("u9", None, 9, "x" * 50_000)) + "\n")
    _, problems = await bring(sqlite_store, home)
    assert (await only(sqlite_store)).id == f"claude-{UUID}"
    assert [Path(one.place).name for one in problems.named] == [
        "fake.db",
        "link.json",
        f"{good.name}, line 16",
    ]


async def test_control_characters_odd_ids_and_odd_directories_are_made_harmless(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    evil = "\x1b]0;owned\x07\nEggs \ud800 \u0000"
    call = {"type": "toolCall", "id": "\x1b[31m/../" * 30, "name": "rm -rf /\n", "arguments": {"path": "\ud800"}}
    lines = [
        {"type": "session", "version": 3, "id": "../../\x1b", "timestamp": "yesterday", "cwd": "/a\x1b[0m/../b"},
        foreign.pi_user("e1", None, 0, evil),
        foreign.pi_answer("e2", "e1", 1, call),
        foreign.pi_result("e3", "e2", 2, (call["id"], "", {}, evil), is_error=False),
        foreign.pi_result("e4", "e3", 2, (call["id"], "", {}, "a second result"), is_error=False),
        foreign.pi_line("session_info", "e5", "e4", 6, name=evil),
        foreign.pi_line("label", "e6", "e5", 6, targetId="e5", label=evil),
    ]
    foreign.write_lines(tmp_path / "evil.jsonl", lines)
    _, problems = await bring(sqlite_store, tmp_path)
    row = await only(sqlite_store)
    assert row.id == f"pi-{hashlib.sha256(b'../../' + bytes([27])).hexdigest()[:32]}"
    assert (row.title, row.cwd) == ("\\x1b]0;owned\\x07 Eggs \ufffd \\x00", HERE)
    entries = await history(sqlite_store, row.id)
    answer = entries[1].body
    assert isinstance(answer, Assistant)
    assert answer.calls[0].name == "rm_-rf___"
    assert answer.calls[0].id.startswith("call_")
    assert json.loads(answer.calls[0].arguments) == {"path": "\ufffd"}
    assert [problem.words for problem in problems.named] == ["a tool result without its call"]
    assert request(entries) == []


async def test_an_imported_file_cannot_name_a_session_of_the_user(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    """A subagent is put below a session only if that session is imported with it."""
    meta = {"id": "child", "cwd": CWD, "source": {"subagent": {"thread_spawn": {"parent_thread_id": "parent"}}}}
    foreign.write_lines(
        tmp_path / "rollout-1.jsonl",
        [foreign.codex_line("session_meta", 0, **meta), foreign.codex_message(0, "user", PROMPT)],
    )
    await bring(sqlite_store, tmp_path)
    assert (await only(sqlite_store)).parent_id is None
    foreign.write_lines(
        tmp_path / "rollout-2.jsonl",
        [foreign.codex_line("session_meta", 0, id="parent", cwd=CWD), foreign.codex_message(0, "user", NEXT)],
    )
    await SessionAdmin(sqlite_store).remove(["codex-child"])
    await bring(sqlite_store, tmp_path)
    found = await rows(sqlite_store)
    assert {name: row.parent_id for name, row in found.items()} == {
        "codex-child": "codex-parent",
        "codex-parent": None,
    }


async def test_claude_code_calls_at_once_stay_together_and_an_edited_prompt_is_a_branch(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    path = foreign.claude_code(tmp_path)
    with path.open("a") as file:
        for line in (
            foreign.claude_user("u3", "r2", 10, "Count differently"),  # inside the first turn: after its end
            foreign.claude_answer("a7", "u3", 11, "m7", {"type": "text", "text": "Seven."}),
            foreign.claude_user("u4", None, 12, "Start over"),
            foreign.claude_user("x", "u4", 12, [{"type": "text", "text": "[Request interrupted by user]"}]),
        ):
            file.write(json.dumps(line) + "\n")
    await bring(sqlite_store, tmp_path)
    row = await only(sqlite_store)
    assert await told(sqlite_store, row.id) == [("user", "Start over"), ("end", "cancelled")]
    tips = (await sqlite_store.outline(row.id)).tips
    texts = [await told_until(sqlite_store, tip.entry) for tip in tips]
    assert texts == [
        [("user", "Start over"), ("end", "cancelled")],
        [*SCENE[:6], ("end", "end_turn"), ("user", "Count differently"), ("assistant", "Seven.")],
        SCENE[:-1],
    ]


async def told_until(store: SqliteStore, leaf: int | None) -> list[tuple[str, str]]:
    found = []
    while leaf is not None:
        entry = await store.entry(leaf)
        assert entry is not None
        found.append(shown(entry.body))
        leaf = entry.parent
    return found[::-1]


async def test_claude_code_commands_queued_prompts_and_subagents_are_kept(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    path = foreign.claude_code(tmp_path)
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": foreign.BIRD}}
    queued = {"type": "queued_command", "prompt": "hurry", "commandMode": "prompt"}
    side = {"isSidechain": True}
    command = "<command-name>/review</command-name><command-args>nest</command-args>"
    lines = [
        foreign.claude_user("c1", "a6", 10, "<command-name>/model</command-name>"),
        foreign.claude_user("c2", "c1", 10, "<local-command-stdout>Set to egg-2</local-command-stdout>"),
        foreign.claude_user("c3", "c2", 11, command),
        foreign.claude_user("c4", "c3", 11, [{"type": "text", "text": "Review the nest."}], isMeta=True),
        foreign.claude_answer(
            "a7", "c4", 12, "m7", {"type": "tool_use", "id": "t7", "name": "Task", "input": {"prompt": "look"}}
        ),
        foreign.claude_user("s1", None, 13, "look", **side),
        foreign.claude_answer("s2", "s1", 13, "m8", {"type": "text", "text": "I looked."}, **side),
        foreign.claude_line("attachment", "q1", "a7", 13, attachment=queued),
        foreign.claude_result("r7", "a7", 14, "t7", [picture]),
        foreign.claude_user("u8", "r7", 15, [picture, {"type": "text", "text": "See?"}]),
        foreign.claude_answer("a9", "u8", 16, "m9", {"type": "text", "text": "Limit"}, isApiErrorMessage=True),
    ]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    agent = [
        foreign.claude_line("user", "g1", None, 1, message={"content": "dig"}, isSidechain=True, agentId="a1b2"),
        foreign.claude_answer("g2", "g1", 2, "g", {"type": "text", "text": "Dug."}, isSidechain=True, agentId="a1b2"),
    ]
    foreign.write_lines(path.parent / UUID / "subagents/agent-a1b2.jsonl", agent)
    await bring(sqlite_store, tmp_path)
    found = await rows(sqlite_store)
    parent = f"claude-{UUID}"
    agents = [row for name, row in found.items() if name != parent]
    assert [row.parent_id for row in agents] == [parent, parent]
    assert sorted([(await told(sqlite_store, row.id))[0] for row in agents]) == [("user", "dig"), ("user", "look")]
    after = (await told(sqlite_store, parent))[len(SCENE) - 1 :]
    assert after == [
        ("command", "/model|Set to egg-2"),
        ("end", "end_turn"),
        ("user", "/review nest|Review the nest."),
        ("assistant", "Task"),
        ("end", "end_turn"),
        ("user", "hurry"),
        ("result", ""),
        ("end", "end_turn"),
        ("user", "Image|See?"),
        ("remark", "Limit"),
        ("end", "error"),
    ]
    entries = await history(sqlite_store, parent)
    assert request(entries) == []


async def test_codex_rollbacks_old_files_and_encrypted_summaries_are_understood(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    user = partial(foreign.codex_message, 1, "user")
    history_item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "keep me"}]}
    foreign.write_lines(
        tmp_path / "rollout-new.jsonl",
        [
            foreign.codex_line("session_meta", 0, id="new", cwd=CWD),
            user("keep me"),
            user("take this back"),
            foreign.codex_message(1, "assistant", "gone"),
            foreign.codex_line("event_msg", 1, type="thread_rolled_back", num_turns=1),
            foreign.codex_item(2, type="custom_tool_call", call_id="p", name="apply_patch", input="*** Begin"),
            foreign.codex_item(2, type="custom_tool_call_output", call_id="p", output="ok"),
            foreign.codex_line("event_msg", 2, type="turn_aborted", reason="interrupted"),
            foreign.codex_line("compacted", 3, message="", replacement_history=[history_item, {"type": "compaction"}]),
            user(NEXT),
        ],
    )
    foreign.write_lines(
        tmp_path / "archived_sessions/rollout-old.jsonl",
        [
            {"id": "old", "timestamp": foreign.iso(0), "instructions": None},
            {"record_type": "state"},
            history_item,
            {"type": "local_shell_call", "call_id": "s", "status": "completed", "action": {"command": ["ls", "-l"]}},
            {"type": "function_call_output", "call_id": "s", "output": {"content": "eggs", "success": False}},
        ],
    )
    await bring(sqlite_store, tmp_path)
    assert await told(sqlite_store, "codex-new") == [
        ("user", "keep me"),
        ("assistant", "apply_patch"),
        ("result", "ok"),
        ("checkpoint", "[Codex compacted the conversation here. It stored the summary encrypted.]"),
        ("end", "cancelled"),
        ("user", NEXT),
        ("end", "end_turn"),
    ]
    entries = await history(sqlite_store, "codex-new")
    found = await rows(sqlite_store)
    assert {name: row.archived for name, row in found.items()} == {"codex-new": False, "codex-old": True}
    checkpoint = entries[3].body
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.pins == (Pin(entry=entries[0].id, text="keep me"),)
    assert await told(sqlite_store, "codex-old") == [
        ("user", "keep me"),
        ("assistant", "local_shell"),
        ("error", "eggs"),
        ("end", "end_turn"),
    ]


async def test_pi_branches_summaries_and_commands_are_kept(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    bash = {"role": "bashExecution", "command": "ls", "output": "eggs", "exitCode": 0}
    foreign.write_lines(
        tmp_path / "tree.jsonl",
        [
            {"type": "session", "version": 3, "id": "tree", "timestamp": foreign.iso(0), "cwd": "/two  spaces/é"},
            foreign.pi_user("e1", None, 0, PROMPT),
            foreign.pi_answer("e2", "e1", 1, {"type": "text", "text": PLAN}),
            foreign.pi_user("e3", "e2", 2, "one way"),
            foreign.pi_answer("e4", "e3", 3, {"type": "text", "text": ""}, reason="aborted"),
            foreign.pi_line("branch_summary", "e5", "e2", 4, fromId="e4", summary="tried"),
            foreign.pi_user("e6", "e5", 5, "another way"),
            foreign.pi_line("message", "e7", "e6", 6, message=bash),
            foreign.pi_line("label", "e8", "e7", 6, targetId="e7", label="here"),
        ],
    )
    old = [
        {"type": "session", "id": "old", "timestamp": foreign.iso(0), "cwd": CWD},
        *({**line, "id": None} for line in (foreign.pi_user("", None, 1, PROMPT), foreign.pi_user("", None, 2, NEXT))),
        {"type": "compaction", "summary": SUMMARY, "firstKeptEntryIndex": 2, "timestamp": foreign.iso(3)},
    ]
    for line in old:
        line.pop("parentId", None)
    foreign.write_lines(tmp_path / "old.jsonl", old)
    await bring(sqlite_store, tmp_path)
    ran = "The user ran this command:\nls\n\nIts output:\neggs"
    assert await told(sqlite_store, "pi-tree") == [
        ("user", PROMPT),
        ("assistant", PLAN),
        ("reminder", "[A summary of a branch that the user left before this point.]\n\ntried"),
        ("end", "end_turn"),
        ("user", "another way"),
        ("reminder", ran),
        ("command", "!ls|eggs"),
        ("note", "here"),
        ("end", "end_turn"),
    ]
    assert (await sqlite_store.session("pi-tree")).cwd == "/two  spaces/é"
    assert len((await sqlite_store.outline("pi-tree")).tips) == 2
    entries = await history(sqlite_store, "pi-old")
    checkpoint = entries[3].body
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.first_kept == entries[2].id
    assert request(entries) == []


async def test_opencode_undone_messages_and_subagents_are_understood(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    path = foreign.opencode_database(tmp_path)
    picture = {"type": "file", "mime": "image/png", "url": f"data:image/png;base64,{foreign.BIRD}"}
    child = [
        foreign.opencode_user(
            "msg_8", 7, foreign.opencode_text("dig"), picture, foreign.opencode_text("a file", synthetic=True)
        )
    ]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE session SET revert = ?", (json.dumps({"messageID": "msg_6"}),))
        session = {"id": "ses_child", "parent_id": foreign.OPENCODE_SESSION, "title": "Child session - 2026"}
        foreign.opencode_rows(database, session, child)
        database.execute("INSERT INTO message VALUES ('msg_9', 'ses_child', 9, 9, '{damaged')")
    _, problems = await bring(sqlite_store, tmp_path)
    found = await rows(sqlite_store)
    parent = f"opencode-{foreign.OPENCODE_SESSION}"
    assert await told(sqlite_store, parent) == SCENE[:7]
    assert [shown_title(found, name) for name in sorted(found)] == [(None, "Eggs"), (parent, "dig")]
    entries = await history(sqlite_store, "opencode-ses_child")
    assert isinstance(entries[0].body, User)
    assert entries[0].body.parts[1] == Image(data=foreign.BIRD, mime_type="image/png")
    assert shown(entries[1].body) == ("reminder", "a file")
    assert [problem.place.rpartition(", ")[2] for problem in problems.named] == ["message msg_9"]


def shown_title(found: dict[str, SessionRow], name: str) -> tuple[str | None, str | None]:
    return found[name].parent_id, found[name].title


async def test_a_database_in_use_is_read_with_what_is_only_in_its_log(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    path = foreign.goose_database(tmp_path / "home")
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("UPDATE sessions SET name = 'Only in the log'")
        database.commit()
        before = snapshot(tmp_path / "home")
        await bring(sqlite_store, path)
        assert snapshot(tmp_path / "home") == before
    assert (await only(sqlite_store)).title == "Only in the log"


async def test_openai_json_takes_lists_and_lines_of_conversations(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    one = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1", "usage": {"prompt_tokens": 3}}]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{foreign.BIRD}"}}
    two = [
        {"role": "user", "content": [url]},
        {"role": "assistant", "content": None, "function_call": {"name": "dig", "arguments": "not JSON"}},
        {"role": "function", "name": "dig", "content": "dug"},
    ]
    foreign.write_json(tmp_path / "list.json", [{"messages": one}, {"messages": two}, {"messages": two}])
    foreign.write_json(tmp_path / "bare.json", [{"role": "user", "content": "bare"}])
    foreign.write_lines(tmp_path / "lines.jsonl", [{"messages": one}, {"messages": []}])
    _, problems = await bring(sqlite_store, tmp_path)
    found = [await told(sqlite_store, name) for name in await rows(sqlite_store)]
    assert sorted(found) == [
        [("user", "Image"), ("assistant", "dig"), ("result", "dug"), ("end", "end_turn")],
        [("user", "bare"), ("end", "end_turn")],
        [("user", "one"), ("assistant", "1"), ("end", "end_turn")],
    ]
    (call,) = [
        entry.body.calls[0]
        for name in await rows(sqlite_store)
        for entry in await history(sqlite_store, name)
        if isinstance(entry.body, Assistant) and entry.body.calls
    ]
    assert call.arguments == '{"input": "not JSON"}'
    assert problems.lines == 1


async def test_the_model_sees_the_head_and_tail_of_huge_imported_arguments(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    arguments = json.dumps({"content": "twigs " * 100_000})
    function = {"name": "write_file", "arguments": arguments}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}
    foreign.write_json(tmp_path / "one.json", [{"role": "user", "content": "Write it."}, answer])
    await bring(sqlite_store, tmp_path)
    path = await history(sqlite_store, (await only(sqlite_store)).id)
    stored = [call for entry in path if isinstance(entry.body, Assistant) for call in entry.body.calls]
    shown = [call for one in for_model(path).messages if isinstance(one, AssistantMessage) for call in one.calls]
    assert [json.loads(call.arguments) for call in stored] == [json.loads(arguments)]
    assert [47_000 < len(call.arguments) < 50_000 for call in shown] == [True]


IN_FILES = [name for name in foreign.WRITERS if not name.endswith("-database")]


@pytest.mark.long
@settings(max_examples=examples(20))
@given(st.data())
def test_any_mixture_of_a_tools_lines_gives_a_valid_conversation(data: st.DataObject) -> None:
    """Lines are missing, repeated, in any order, and damaged at any place."""

    async def check() -> None:
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory) / "home"
            foreign.WRITERS[data.draw(st.sampled_from(IN_FILES))](home)
            for path in home.rglob("*.json*"):
                first, *lines = map(json.loads, path.read_text().splitlines())
                if lines:
                    lines = data.draw(st.lists(st.sampled_from(lines), max_size=30))
                for line in lines or [first]:
                    if data.draw(st.booleans()):
                        spoil(line, data)
                foreign.write_lines(path, [first, *lines])
            store = await SqliteStore.open(Path(directory) / "crow.db")
            try:
                await bring(store, home)
                for session in await rows(store):
                    assert request(await history(store, session)) == []
            finally:
                await store.close()

    anyio.run(check)


def spoil(value: Any, data: st.DataObject) -> None:
    """Replace a random member, at any depth."""
    while isinstance(value, dict | list) and value:
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            value[key] = data.draw(st.sampled_from([None, 7, -1, 2**70, "", "x", "\x1b", [], {}, [None], True, 1.5]))
            return
        value = inner


def test_importable_counts_sessions_at_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_DATA_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "PI_CODING_AGENT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert importable() == []
    for name in ("claude-code", "codex", "pi", "opencode-database", "goose-database"):
        foreign.WRITERS[name](tmp_path)
    found = [(one.tool, one.path.relative_to(tmp_path).as_posix(), one.sessions) for one in importable()]
    assert found == [
        ("claude-code", ".claude/projects", 1),
        ("codex", ".codex", 1),
        ("pi", ".pi/agent/sessions", 1),
        ("opencode", ".local/share/opencode", 1),
        ("goose", ".local/share/goose/sessions", 1),
    ]


def test_sessions_that_are_only_in_a_write_ahead_log_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".local/share/opencode/opencode.db"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as database:  # as opencode, which is still running
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        with database:
            database.executescript(foreign.OPENCODE_TABLES)
            foreign.opencode_rows(database, {"id": foreign.OPENCODE_SESSION}, foreign.opencode_messages())
        assert path.stat().st_size == 4096
        before = snapshot(tmp_path)
        assert [(one.tool, one.sessions) for one in importable()] == [("opencode", 1)]
        assert snapshot(tmp_path) == before
        with database:
            foreign.opencode_rows(database, {"id": "ses_another"}, [])
        assert [(one.tool, one.sessions) for one in importable()] == [("opencode", 2)]


@pytest.mark.parametrize(
    ("given", "created", "updated"),
    [
        ({"created_at": 1_700_000_000, "updated_at": 1_700_000_900}, 1_700_000_000_000, 1_700_000_900_000),
        ({"created": 1_700_000_000, "updated": "2023-11-14T22:30:00Z"}, 1_700_000_000_000, 1_700_001_000_000),
        ({"updated_at": 1_700_000_900}, 1_700_000_900_000, 1_700_000_900_000),
    ],
)
async def test_openai_json_keeps_the_time_of_the_last_change(
    sqlite_store: SqliteStore, tmp_path: Path, given: Mapping[str, object], created: int, updated: int
) -> None:
    foreign.write_json(tmp_path / "chat.json", {"messages": [{"role": "user", "content": "one"}], **given})
    await bring(sqlite_store, tmp_path)
    row = await only(sqlite_store)
    assert (row.created_ms, row.updated_ms) == (created, updated)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"missing cannot be read: No such file or directory\."):
        SessionScan(tmp_path / "missing")


async def test_opencode_steps_of_a_message_become_answers_and_a_compaction_keeps_its_tail(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    tokens = {"input": 1, "output": 2, "reasoning": 0, "cache": {"read": 0, "write": 0}}
    pending = {"type": "tool", "callID": "c", "tool": "bash", "state": {"status": "running", "input": {}}}
    steps = [
        {"type": "step-start"},
        foreign.opencode_text(PLAN),
        {"type": "step-finish", "cost": 0.5, "tokens": tokens},
        {"type": "step-start"},
        pending,
        {"type": "step-finish", "cost": 0.5, "tokens": tokens},
    ]
    aborted = {"name": "MessageAbortedError", "data": {"message": "aborted"}}
    messages = [
        foreign.opencode_user("msg_1", 0, foreign.opencode_text(PROMPT)),
        foreign.opencode_answer("msg_2", 1, *steps, error=aborted),
        foreign.opencode_user("msg_3", 2, {"type": "compaction", "auto": False, "tail_start_id": "msg_2"}),
        foreign.opencode_answer("msg_4", 3, foreign.opencode_text(SUMMARY), summary=True),
    ]
    path = tmp_path / "opencode.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(foreign.OPENCODE_TABLES)
        foreign.opencode_rows(database, {"id": "ses_1"}, messages)
    await bring(sqlite_store, path)
    entries = await history(sqlite_store, "opencode-ses_1")
    assert [shown(entry.body) for entry in entries] == [
        ("user", PROMPT),
        ("assistant", PLAN),
        ("assistant", "bash"),
        ("checkpoint", SUMMARY),
        ("end", "cancelled"),
    ]
    spent = Usage(input_tokens=1, output_tokens=2, cached_tokens=0, reasoning_tokens=0, cache_write_tokens=0)
    assert [(entry.usage, entry.cost) for entry in entries[1:3]] == [(spent, 0.5), (spent, 0.5)]
    checkpoint = entries[3].body
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.first_kept, checkpoint.reason) == (entries[1].id, "command")
    assert request(entries) == []
