"""Remembers in an SQLite file what was received, and how far it was answered and delivered.

Whatever a restart must know is written before it has an effect elsewhere: a prompt before the chat or the server hears
of it, an answer before the chat shows it, and each message of an answer before it is sent.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from crow_channels.errors import StateError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS places (
  chat TEXT NOT NULL, place TEXT NOT NULL, owner TEXT, session TEXT, seen TEXT, parent TEXT, is_direct INTEGER,
  PRIMARY KEY (chat, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS prompts (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  chat TEXT NOT NULL, place TEXT NOT NULL, message TEXT NOT NULL, user TEXT NOT NULL, principal TEXT NOT NULL,
  blocks TEXT NOT NULL, stage TEXT NOT NULL, session TEXT, cursor TEXT, text TEXT NOT NULL DEFAULT '',
  last TEXT NOT NULL DEFAULT '', calls TEXT NOT NULL DEFAULT '[]', has_begun INTEGER NOT NULL DEFAULT 0,
  is_cancelled INTEGER NOT NULL DEFAULT 0,
  UNIQUE (chat, place, message)
);
CREATE INDEX IF NOT EXISTS open_prompts ON prompts (chat, place, number) WHERE stage <> 'done';
CREATE TABLE IF NOT EXISTS posts (
  prompt INTEGER NOT NULL, number INTEGER NOT NULL, content TEXT NOT NULL, message TEXT, PRIMARY KEY (prompt, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (
  prompt INTEGER NOT NULL, number INTEGER NOT NULL, name TEXT NOT NULL, mime TEXT NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (prompt, number)
);
CREATE TABLE IF NOT EXISTS questions (
  id TEXT PRIMARY KEY, prompt INTEGER NOT NULL, number INTEGER NOT NULL, name TEXT NOT NULL, text TEXT NOT NULL,
  choices TEXT NOT NULL, answer TEXT, is_open INTEGER NOT NULL DEFAULT 1
) WITHOUT ROWID;
"""

_KEPT_PROMPTS = 20_000
"""The state remembers this many answered messages, to recognise them if the chat repeats them."""

Stage = Literal["waiting", "sent", "answered", "done"]
"""A prompt waits, was sent to the server, has its whole answer, or was delivered."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A message from the chat, and its answer so far."""

    number: int
    """Its place in the order of all prompts."""
    chat: str
    """The name of the chat."""
    place: str
    """The channel, thread or conversation."""
    message: str
    """The chat's id of the message."""
    user: str
    """Who wrote it."""
    principal: str
    """The principal of that user."""
    blocks: list[dict[str, Any]]
    """The content, as the protocol has it."""
    stage: Stage
    """How far it is."""
    session: str | None = None
    """The session to which it was sent."""
    cursor: str | None = None
    """The place in the session up to which `text` contains the answer."""
    text: str = ""
    """The answer so far."""
    last: str = ""
    """The message or call to which the end of `text` belongs."""
    calls: list[str] = field(default_factory=list)
    """The tool calls that `text` names."""
    has_begun: bool = False
    """Whether the cursor is behind the prompt in the session's log."""
    is_cancelled: bool = False
    """Whether somebody cancelled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A message of an answer."""

    content: str
    """What was sent, or is being sent."""
    message: str | None
    """The chat's id of it. None if it is unknown whether it has arrived. Empty if the chat refused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the person whose prompt runs."""

    id: str
    """A random name, which the buttons carry."""
    prompt: int
    """The prompt whose turn asks."""
    number: int
    """The number of its post."""
    name: str
    """What the server asks, to recognise a question that it asks again."""
    text: str
    """The question."""
    choices: tuple[tuple[str, str], ...]
    """The value and the label of each answer. Empty if the answer is a text."""
    answer: str | None
    """The value that was chosen. None while nobody has answered."""
    is_open: bool
    """Whether the server may still need the answer."""


class State:
    """The state file. Only one process at a time can open it."""

    def __init__(self, path: Path) -> None:
        """:raises StateError: the file cannot be used, or another process uses it."""
        try:
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
                raise StateError(f"{path} is in use by another crow-channels.") from None
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)  # SQLite gives its other files the same mode
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + _SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"{path} cannot be used: {error}") from error

    def close(self) -> None:
        """Close the file, and let other processes open it."""
        self._database.close()
        os.close(self._lock)

    # Places.

    def place(self, chat: str, place: str) -> tuple[str | None, str | None]:
        """Return the owner and the session of a place."""
        row = self._one("SELECT owner, session FROM places WHERE chat = ? AND place = ?", chat, place)
        return (None, None) if row is None else (row[0], row[1])

    def set_session(self, chat: str, place: str, owner: str, session: str | None) -> None:
        """Remember which session a place has."""
        self._do(
            "INSERT INTO places (chat, place, owner, session) VALUES (?, ?, ?, ?) ON CONFLICT (chat, place) DO UPDATE"
            " SET owner = excluded.owner, session = excluded.session",
            *(chat, place, owner, session),
        )

    def places(self, chat: str) -> dict[str, str]:
        """Return the newest message that was seen in each place."""
        return dict(self._all("SELECT place, seen FROM places WHERE chat = ? AND seen IS NOT NULL", chat))

    def about(self, chat: str, place: str) -> tuple[str | None, bool]:
        """Return the channel to which a place belongs, and whether it is a direct conversation."""
        row = self._one("SELECT parent, is_direct FROM places WHERE chat = ? AND place = ?", chat, place)
        return (None, False) if row is None else (row[0], bool(row[1]))

    def see(self, chat: str, place: str, message: str, parent: str | None, is_direct: bool) -> None:
        """Remember the newest message of a place."""
        self._do(
            "INSERT INTO places (chat, place, seen, parent, is_direct) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (chat, place) DO UPDATE SET seen = excluded.seen, parent = excluded.parent,"
            " is_direct = excluded.is_direct",
            *(chat, place, message, parent, is_direct),
        )

    # Prompts.

    def knows(self, chat: str, place: str, message: str) -> bool:
        """Whether a message was taken before."""
        sql = "SELECT 1 FROM prompts WHERE chat = ? AND place = ? AND message = ?"
        return self._one(sql, chat, place, message) is not None

    def add(
        self,
        chat: str,
        place: str,
        message: str,
        *,
        user: str,
        principal: str,
        blocks: Sequence[Mapping[str, Any]] = (),
        stage: Stage = "waiting",
        text: str = "",
    ) -> None:
        """Store a message. One that was stored before stays as it is."""
        self._do(
            "INSERT INTO prompts (chat, place, message, user, principal, blocks, stage, text)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            *(chat, place, message, user, principal, json.dumps(blocks), stage, text),
        )

    def next_prompt(self, chat: str, place: str) -> Prompt | None:
        """Return the oldest prompt of a place that is not done."""
        row = self._one(
            "SELECT number, chat, place, message, user, principal, blocks, stage, session, cursor, text, last, calls,"
            " has_begun, is_cancelled FROM prompts WHERE chat = ? AND place = ? AND stage <> 'done' ORDER BY number"
            " LIMIT 1",
            *(chat, place),
        )
        if row is None:
            return None
        number, chat, place, message, user, principal, blocks, stage, session, cursor, text, last, calls, *flags = row
        return Prompt(
            number=number,
            chat=chat,
            place=place,
            message=message,
            user=user,
            principal=principal,
            blocks=json.loads(blocks),
            stage=stage,
            session=session,
            cursor=cursor,
            text=text,
            last=last,
            calls=json.loads(calls),
            has_begun=bool(flags[0]),
            is_cancelled=bool(flags[1]),
        )

    def waiting(self, chat: str, place: str) -> int:
        """Return how many messages of a place are not done."""
        sql = "SELECT count(*) FROM prompts WHERE chat = ? AND place = ? AND stage <> 'done'"
        return int(self._one(sql, chat, place)[0])

    def open_places(self) -> list[tuple[str, str]]:
        """Return the chats and places that have prompts which are not done."""
        return self._all("SELECT DISTINCT chat, place FROM prompts WHERE stage <> 'done'")

    def save(self, prompt: Prompt) -> None:
        """Store how far a prompt is, and its answer."""
        self._do(
            "UPDATE prompts SET stage = ?, session = ?, cursor = ?, text = ?, last = ?, calls = ?, has_begun = ?"
            " WHERE number = ?",
            *(prompt.stage, prompt.session, prompt.cursor, prompt.text, prompt.last),
            *(json.dumps(prompt.calls), prompt.has_begun, prompt.number),
        )

    def cancel(self, chat: str, place: str) -> int | None:
        """Mark the oldest open prompt of a place as cancelled. Return its number, or None if there is none."""
        row = self._one(
            "SELECT number FROM prompts WHERE chat = ? AND place = ? AND stage IN ('waiting', 'sent') ORDER BY number"
            " LIMIT 1",
            *(chat, place),
        )
        if row is None:
            return None
        self._do("UPDATE prompts SET is_cancelled = 1 WHERE number = ?", row[0])
        return int(row[0])

    def give_up(self, chat: str, place: str, text: str) -> None:
        """End the oldest open prompt of a place with this text. If even that was tried before, forget the prompt."""
        prompt = self.next_prompt(chat, place)
        if prompt is None:
            return
        if prompt.stage == "answered":
            self.finish(prompt.number)
        else:
            prompt.stage, prompt.text = "answered", f"{prompt.text}\n\n{text}".strip()
            self.save(prompt)

    def finish(self, number: int) -> None:
        """Mark a prompt as delivered, and forget everything but its name."""
        with self._database:
            self._do("BEGIN")
            self._do(
                "UPDATE prompts SET stage = 'done', blocks = '[]', text = '', calls = '[]' WHERE number = ?", number
            )
            for table in ("posts", "files", "questions"):
                self._do(f"DELETE FROM {table} WHERE prompt = ?", number)  # noqa: S608  # the names are ours
            self._do("DELETE FROM prompts WHERE stage = 'done' AND number <= ?", number - _KEPT_PROMPTS)

    # Messages of answers.

    def post(self, prompt: int, number: int) -> Post | None:
        """Return a message of an answer, or None if nobody has tried to send it."""
        row = self._one("SELECT content, message FROM posts WHERE prompt = ? AND number = ?", prompt, number)
        return None if row is None else Post(content=row[0], message=row[1])

    def set_post(self, prompt: int, number: int, content: str, message: str | None) -> None:
        """Remember a message of an answer."""
        self._do("INSERT OR REPLACE INTO posts VALUES (?, ?, ?, ?)", prompt, number, content, message)

    def posts(self, prompt: int) -> frozenset[str]:
        """Return the ids of the messages of an answer that have arrived."""
        return frozenset(row[0] for row in self._all("SELECT message FROM posts WHERE prompt = ?", prompt) if row[0])

    def add_file(self, prompt: int, number: int, name: str, mime: str, data: bytes) -> None:
        """Store a file of an answer."""
        self._do("INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?)", prompt, number, name, mime, data)

    def files(self, prompt: int) -> list[tuple[int, str, str, bytes]]:
        """Return the number, name, media type and content of each file of an answer."""
        return self._all("SELECT number, name, mime, data FROM files WHERE prompt = ? ORDER BY number", prompt)

    # Questions.

    def add_question(self, question: Question) -> None:
        """Store a question."""
        self._do(
            "INSERT INTO questions (id, prompt, number, name, text, choices) VALUES (?, ?, ?, ?, ?, ?)",
            *(question.id, question.prompt, question.number, question.name, question.text),
            json.dumps(question.choices),
        )

    def question(self, question_id: str) -> Question | None:
        """Return a question."""
        return self._question(self._one(f"{_QUESTIONS} WHERE id = ?", question_id))

    def question_named(self, prompt: int, name: str) -> Question | None:
        """Return the open question of a prompt that asks the same."""
        return self._question(self._one(f"{_QUESTIONS} WHERE prompt = ? AND name = ? AND is_open", prompt, name))

    def questions(self, prompt: int) -> list[Question]:
        """Return all questions of a prompt."""
        found = self._all(f"{_QUESTIONS} WHERE prompt = ? ORDER BY number", prompt)
        return [each for row in found if (each := self._question(row)) is not None]

    def answer(self, question_id: str, value: str) -> bool:
        """Store the answer to an open question. Return False if it is not open, or was answered before."""
        sql = "UPDATE questions SET answer = ? WHERE id = ? AND answer IS NULL AND is_open"
        return self._do(sql, value, question_id) == 1

    def close_question(self, question_id: str) -> None:
        """Remember that the server no longer needs the answer."""
        self._do("UPDATE questions SET is_open = 0 WHERE id = ?", question_id)

    def close_answered(self, prompt: int, call: str) -> None:
        """Close the answered questions about a tool call."""
        sql = "UPDATE questions SET is_open = 0 WHERE prompt = ? AND answer IS NOT NULL AND substr(name, 1, ?) = ?"
        self._do(sql, prompt, len(call) + 1, f"{call}:")

    # The database.

    def _question(self, row: Sequence[Any] | None) -> Question | None:
        if row is None:
            return None
        return Question(
            id=row[0],
            prompt=row[1],
            number=row[2],
            name=row[3],
            text=row[4],
            choices=tuple((value, label) for value, label in json.loads(row[5])),
            answer=row[6],
            is_open=bool(row[7]),
        )

    def _do(self, sql: str, *values: Any) -> int:
        try:
            return self._database.execute(sql, values).rowcount
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._database.rollback()
            raise StateError(f"The state file cannot be written: {error}") from error

    def _one(self, sql: str, *values: Any) -> Any:
        return self._database.execute(sql, values).fetchone()

    def _all(self, sql: str, *values: Any) -> list[Any]:
        return self._database.execute(sql, values).fetchall()


_QUESTIONS = "SELECT id, prompt, number, name, text, choices, answer, is_open FROM questions"
