"""The table of slash commands.

A prompt that begins with `/` and a known name is a command. Like any prompt, a command takes a turn and is stored with
its answer, but the model never sees it. If the name is unknown, the text is an ordinary prompt, since paths begin with
a slash too. Handlers are in other modules, which are imported when the first turn starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from crow.agent.templates import ParsedCommand

PLACE_HINT = "prompt number | label | #entry"
"""The places that `/rewind` and `/fork` accept."""

OPTIONS_HINT = "[files | keep] [summary]"
"""The options of commands that move to another place. `files` restores the files that the abandoned turns changed, and
`keep` leaves them as they are; without both, crow asks. `summary` gives the model a summary of these turns."""


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command as clients list it."""

    name: str
    description: str
    hint: str = ""
    """Describes the argument. Empty if the command takes none."""
    is_literal: bool = False
    """The text of the hint is the only argument that the command accepts."""


COMMANDS = (
    CommandSpec("undo", "Take back the last turn", OPTIONS_HINT),
    CommandSpec("redo", "Reverse the last undo or rewind", OPTIONS_HINT),
    CommandSpec(
        "rewind", "Go back to before a prompt, to a label, or to any entry", f"{PLACE_HINT}, then {OPTIONS_HINT}"
    ),
    CommandSpec("retry", "Send the last prompt again, on a new branch", OPTIONS_HINT),
    CommandSpec("new", "Start over; if the session has an alias, a new session takes the alias"),
    CommandSpec("clear", "Start over in this session; nothing is deleted"),
    CommandSpec("history", "List the prompts and labels of this branch", "number of lines | all"),
    CommandSpec("tree", "List all branches, including undone ones", "all", is_literal=True),
    CommandSpec("diff", "Show what this session changed, file by file", "a file"),
    CommandSpec("show", "Show a tool call with its whole output", "a call, such as call_12_0"),
    CommandSpec("label", "Name this place or an entry, so that you can return to it", "[#entry] name | remove name"),
    CommandSpec("fork", "Copy this session, up to here or up to an earlier message", PLACE_HINT),
    CommandSpec("title", "Show or set the session's title", "new title"),
    CommandSpec("tag", "Show the session's tags, or add and remove tags", "tags to add, or remove TAGS"),
    CommandSpec("archive", "Hide this session from the list of sessions, or put it back", "undo", is_literal=True),
    CommandSpec(
        "compact",
        "Replace older messages with a summary to free context; nothing is deleted",
        "tokens to leave | --keep tokens, what the summary should focus on; or undo",
    ),
    CommandSpec(
        "context", "Show what fills the context window, or forget the size that crow learned", "forget", is_literal=True
    ),
    CommandSpec("skills", "Show the skills that the model has loaded, or unload one", "unload skill"),
    CommandSpec("mcp", "Show the state of the MCP servers, or restart them", "restart [server]"),
    CommandSpec("model", "Show or choose the model", "a model"),
    CommandSpec("mode", "Show or choose the permission mode", "a mode"),
    CommandSpec(
        "permissions",
        "Show the permission rules, or change them for this session",
        "allow RULE, deny RULE or forget NUMBER",
    ),
    CommandSpec("search", "Search all sessions", "words"),
    CommandSpec("bring", "Give the model a summary of another session", "session"),
    CommandSpec(
        "remember", "Add a note to this directory's AGENTS.md, or to your personal one", "text, or --user text"
    ),
    CommandSpec("usage", "Show the tokens that this session used"),
    CommandSpec(
        "share",
        "Make a page of this session that crow serve shows under a secret link",
        "7d, redact | list | revoke link",
    ),
    CommandSpec("export", "Write this session to a Markdown file", "a file in the workspace"),
    CommandSpec("help", "List the commands", "a command"),
)
_NAMES = frozenset(spec.name for spec in COMMANDS)


def parse(text: str) -> ParsedCommand | None:
    """Return the command in `text`, or None for an ordinary prompt."""
    name, *rest = text[1:].split(maxsplit=1) or [""]
    if name not in _NAMES or not text.startswith(f"/{name}"):
        return None
    return ParsedCommand(name=name, argument=rest[0].strip() if rest else "")
