"""Version 2 of the protocol: reads its parameters, and converts updates, options and questions of version 1."""

from __future__ import annotations

import base64
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from crow.domain.diff import changed_regions
from crow.domain.errors import ArgumentError
from crow.protocol.frames import describe_member, text_in
from crow.protocol.params import ClientCapabilities, OpenRequest, client_in, open_request_from, question_kinds
from crow.protocol.tool_calls import DiffFields, Fields
from crow.protocol.updates import PLAN_ID, Update

FINAL_STATUSES = frozenset({"completed", "failed", "cancelled"})

_MESSAGES = {
    "user_message_chunk": "user_message",
    "agent_message_chunk": "agent_message",
    "agent_thought_chunk": "agent_thought",
}
_QUOTED = {'"': '\\"', "\\": "\\\\", "\t": "\\t", "\n": "\\n"}


class Converter:
    """Converts the updates of version 1 of the protocol into updates of version 2.

    In a replay, the first chunk of each message becomes an update that replaces any earlier text of the message, and
    the output of a terminal replaces any earlier output. So a client may apply a replay to a session that it already
    shows.
    """

    def __init__(self) -> None:
        self.is_replaying = False
        self._replayed: set[tuple[str, str]] = set()
        """The messages of this replay so far, each by its kind and id."""
        self._message = ("", "")
        """The kind and id of the message to which the last chunk belonged."""

    def end_replay(self) -> None:
        """End the replay, if there is one. The next updates are live, or belong to another replay."""
        self.is_replaying = False
        self._replayed.clear()

    def updates(self, update: Update, *, is_history: bool = False) -> Iterator[Update]:
        """Yield the updates of version 2 that replace `update`. Yield nothing if version 2 sends the content of
        `update` elsewhere. `is_history` means that the update belongs to a replay."""
        if not is_history:
            self.end_replay()
        self.is_replaying = is_history
        match update["sessionUpdate"]:
            case "user_message_chunk" | "agent_message_chunk" | "agent_thought_chunk" as kind:
                yield self._chunk(kind, update)
            case "tool_call" | "tool_call_update":
                yield from self._call(update)
            case "plan":
                plan = {"type": "items", "planId": PLAN_ID, "entries": update["entries"]}
                yield {"sessionUpdate": "plan_update", "plan": plan}
            case "current_mode_update":
                return  # the mode is also a config option, and the update of that option is sent too
            case "config_option_update":
                yield update | {"configOptions": config_options(update["configOptions"])}
            case "available_commands_update":
                yield update | {"availableCommands": commands(update["availableCommands"])}
            case _:
                yield update

    def _chunk(self, kind: str, update: Update) -> Update:
        message = (kind, update["messageId"])
        if self.is_replaying:
            is_first = message not in self._replayed
            self._replayed.add(message)
        else:  # only prompts are sent whole; the model's text is streamed
            is_first = kind == "user_message_chunk" and message != self._message
        self._message = message
        if not is_first:
            return update
        return update | {"sessionUpdate": _MESSAGES[kind], "content": [update["content"]]}

    def _call(self, update: Update) -> Iterator[Update]:
        meta: Mapping[str, Any] = update.get("_meta", {})
        yield from self._terminal(update, meta)
        is_only_output = not update.keys() - {"sessionUpdate", "toolCallId", "status", "_meta"}
        if is_only_output and "terminal_output" in meta and update["status"] not in FINAL_STATUSES:
            return
        yield {"sessionUpdate": "tool_call_update"} | _call_fields(update)

    def _terminal(self, update: Update, meta: Mapping[str, Any]) -> Iterator[Update]:
        """Yield updates with the state and the output of the call's terminal, which version 1 sends in `_meta`."""
        if (info := meta.get("terminal_info")) is not None:
            opened: Update = {"sessionUpdate": "terminal_update", "terminalId": info["terminal_id"]}
            match update.get("rawInput"):
                case {"command": str(command)}:
                    opened["command"] = command
            yield opened | ({"cwd": info["cwd"]} if "cwd" in info else {})
        if (output := meta.get("terminal_output")) is not None:
            named = {"terminalId": output["terminal_id"]}
            data = base64.b64encode(output["data"].encode(errors="replace")).decode()
            if self.is_replaying:
                yield {"sessionUpdate": "terminal_update", **named, "output": {"data": data}}
            else:
                yield {"sessionUpdate": "terminal_output_chunk", **named, "data": data}
        if (exited := meta.get("terminal_exit")) is not None:
            status = {"exitCode": exited["exit_code"], "signal": _signal_name(exited["signal"])}
            known = {name: value for name, value in status.items() if value is not None}
            yield {"sessionUpdate": "terminal_update", "terminalId": exited["terminal_id"], "exitStatus": known}


def _call_fields(call: Mapping[str, Any]) -> Fields:
    """Return the fields of a tool call. A call that the user cancelled has the status `cancelled`."""
    fields = {key: value for key, value in call.items() if key not in ("sessionUpdate", "_meta")}
    if "content" in fields:
        fields["content"] = call_content(fields["content"])
    match fields:
        case {"status": "failed", "rawOutput": {"cancelled": True}}:
            fields["status"] = "cancelled"
    return fields


def call_content(content: Sequence[Fields]) -> list[Fields]:
    """Return the content of a tool call. All changed regions of a file become one diff, which takes the place of the
    first region."""
    regions: dict[str, list[DiffFields]] = {}
    for item in content:
        if isinstance(item, DiffFields):
            regions.setdefault(item["path"], []).append(item)
    converted = []
    for item in content:
        if not isinstance(item, DiffFields):
            converted.append(item)
        elif item["path"] in regions:
            converted.append(_diff(item["path"], regions.pop(item["path"])))
    return converted


def config_options(options: Iterable[Mapping[str, Any]]) -> list[Fields]:
    """Return a session's config options in the form of version 2."""
    return [
        {"configId": option["id"]} | {key: value for key, value in option.items() if key != "id"} for option in options
    ]


def commands(offered: Iterable[Mapping[str, Any]]) -> list[Fields]:
    """Return a session's slash commands in the form of version 2."""
    return [
        {"type": "command", **command} | ({"input": {"type": "text", **command["input"]}} if "input" in command else {})
        for command in offered
    ]


def permission_params(params: Mapping[str, Any]) -> Fields:
    """Return the parameters of `session/request_permission`.

    The texts in the call's content become the description of the question. Content that is not text stays in the call.
    """
    call = _call_fields(params["toolCall"])
    content = call.pop("content", [])
    texts = [item["content"]["text"] for item in content if item["type"] == "content"]
    if rest := [item for item in content if item["type"] != "content"]:
        call["content"] = rest
    asked = {"sessionId": params["sessionId"], "title": f"Allow: {call['title']}"}
    asked |= {"description": "\n\n".join(texts)} if texts else {}
    asked |= {"subject": {"type": "tool_call", "toolCall": call}, "options": params["options"]}
    return asked | ({"_meta": params["_meta"]} if "_meta" in params else {})


def _diff(path: str, regions: Sequence[DiffFields]) -> Fields:
    """Return the change of one file as a diff. The patch in the diff contains only the regions whose text is complete.
    If there is no such region, the diff has no patch."""
    is_new = regions[0].is_new
    change = {"operation": "add" if is_new else "modify", "path": path, "fileType": "text"}
    hunks = [line for region in regions if not region.is_cut for line in _hunks(region)]
    diff: Fields = {"type": "diff", "changes": [change]}
    if not hunks:
        return diff
    name = _quoted(path)
    tab = "\t" if " " in path and not name.startswith('"') else ""  # git ends such a name with a tab
    head = [f"diff --git {name} {name}", *(["new file mode 100644"] if is_new else [])]
    head += ["--- /dev/null" if is_new else f"--- {name}{tab}", f"+++ {name}{tab}"]
    return diff | {"patch": {"format": "git_patch", "text": "\n".join([*head, *hunks, ""])}}


def _hunks(region: DiffFields) -> Iterator[str]:
    """Yield the lines of a patch with the change of `region`. The texts of the region are escaped, so only a newline
    can end a line."""
    for hunk in changed_regions(region["oldText"], region["newText"]):
        before, after = _lines(hunk.old_text), _lines(hunk.new_text)
        shorter = min(len(before), len(after))
        head = next((n for n in range(shorter) if before[n] != after[n]), shorter)
        tail = next((n for n in range(shorter - head) if before[-1 - n] != after[-1 - n]), shorter - head)
        if head == len(before) == len(after):
            continue
        # In a patch, a side without lines starts at the line before the change.
        starts = (region.old_line + hunk.old_line - 1, region.new_line + hunk.new_line - 1)
        old_at, new_at = (start - (not lines) for start, lines in zip(starts, (before, after), strict=True))
        yield f"@@ -{old_at},{len(before)} +{new_at},{len(after)} @@"
        yield from _marked(" ", before[:head])
        yield from _marked("-", before[head : len(before) - tail])
        yield from _marked("+", after[head : len(after) - tail])
        yield from _marked(" ", before[len(before) - tail :])


def _lines(text: str) -> list[str]:
    """Return the lines of a text, with their line ends."""
    lines = [f"{line}\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _marked(mark: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if line.endswith("\n"):
            yield mark + line[:-1]
        else:
            yield mark + line
            yield "\\ No newline at end of file"


def _quoted(path: str) -> str:
    """Return a path as git writes it in the header of a patch."""
    escaped = "".join(_QUOTED.get(character, character) for character in path)
    return path if escaped == path else f'"{escaped}"'


def _signal_name(words: str | None) -> str | None:
    """Return the name of a signal, such as SIGKILL for `signal 9`. An unknown signal is returned unchanged."""
    if words is None:
        return None
    with suppress(ValueError):
        return signal.Signals(int(words.removeprefix("signal "))).name
    return words


def capabilities_from(params: Mapping[str, Any]) -> ClientCapabilities:
    """Read the client's capabilities from the parameters of `initialize`. All clients of version 2 can show terminals,
    notices and compactions.

    :raises ArgumentError: a member has the wrong type.
    """
    info = _object_in(params, "info")
    for key in ("name", "version"):
        text_in(info, key, "info.")
    offered = _object_in(params, "capabilities") if params.get("capabilities") is not None else {}
    elicitation, auth = (
        value if isinstance(value := offered.get(key), dict) else {} for key in ("elicitation", "auth")
    )
    return ClientCapabilities(
        terminal_output=True,
        terminal_auth=isinstance(auth.get("terminal"), dict),
        notices=True,
        compaction=True,
        boolean_options=True,
        cancelled_calls=True,
        question_kinds=question_kinds(elicitation),
        cursors=isinstance(meta := offered.get("_meta"), dict) and meta.get("acp/cursor") is True,
        client=client_in(info),
        is_translated=True,
    )


def open_request(params: Mapping[str, Any], *, may_be_missing: bool = False) -> OpenRequest:
    """Read the parameters of `session/new` or `session/resume`. For `may_be_missing`, see `open_request_from`.

    :raises ArgumentError: a parameter cannot be used.
    """
    text_in(params, "cwd")
    for key in ("additionalDirectories", "mcpServers"):
        if not isinstance(params.get(key), list | None):
            raise ArgumentError(f"{key} is {describe_member(params[key])}; expected a list.")
    for index, server in enumerate(params.get("mcpServers") or ()):
        if isinstance(server, dict) and server.get("type") not in ("stdio", "http"):
            raise ArgumentError(
                f"mcpServers[{index}].type is {describe_member(server.get('type'))}; expected stdio or http."
            )
    if params.get("systemPrompt") is not None:
        raise ArgumentError("Version 2 of the protocol has no systemPrompt; send _meta.systemPrompt instead.")
    return open_request_from(params, may_be_missing=may_be_missing)


def wants_replay(params: Mapping[str, Any]) -> bool:
    """Whether `session/resume` asks for the history. :raises ArgumentError: the value of `replayFrom` is unknown."""
    match params.get("replayFrom"):
        case None:
            return False
        case {"type": "start"}:
            return True
        case other:
            raise ArgumentError(f'replayFrom is {describe_member(other)}; expected {{"type": "start"}} or null.')


def _object_in(params: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the parameter `key`, which must be an object. :raises ArgumentError: the parameter is missing or is not
    an object."""
    value = params.get(key)
    if not isinstance(value, dict):
        raise ArgumentError(f"{key} is {describe_member(value)}; expected an object.")
    return value
