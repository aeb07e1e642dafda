"""Converts calls that were written for the tools of other agents to calls of crow's tools.

Models are trained with the tools of other agents, and sometimes use their names. A call is changed only if its meaning
is clear. The changed call, not the original one, is then stored, shown to the user, and sent back to the model.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from crow.domain.messages import ToolCall, ToolSpec
from crow.tools.builtin.shell import MAX_TIMEOUT_S

_Arguments = dict[str, Any]

_TOOL_NAMES = {
    **dict.fromkeys(("read", "view", "open_file", "read_many_files", "view_file", "cat"), "read_file"),
    **dict.fromkeys(("write", "create_file", "write_to_file", "save_file", "create"), "write_file"),
    **dict.fromkeys(
        ("edit", "str_replace", "replace", "replace_in_file", "search_replace", "update_file"), "edit_file"
    ),
    **dict.fromkeys(("applypatch", "apply_diff", "patch"), "apply_patch"),
    **dict.fromkeys(
        ("bash", "run_shell_command", "execute_command", "exec_command", "run_command", "run_terminal_cmd", "exec"),
        "shell",
    ),
    **dict.fromkeys(("local_shell", "run_in_terminal", "terminal", "shell_command", "sh"), "shell"),
    **dict.fromkeys(("search_files", "search_file_content", "grep_search", "rg", "ripgrep"), "grep"),
    **dict.fromkeys(("glob", "ls", "list_dir", "list_directory", "find_files", "file_search"), "list_files"),
    **dict.fromkeys(("webfetch", "web_fetch", "fetch_url", "read_url"), "fetch"),
    **dict.fromkeys(("todowrite", "todo_write", "write_todos", "update_todos", "todo"), "update_plan"),
    **dict.fromkeys(("agent", "delegate", "subagent"), "task"),
}
"""Names that other agents give to tools, in lower case."""

_PATHS = ("file_path", "filepath", "filename", "file", "target_file", "absolute_path", "relative_path")
_DIRECTORIES = (*_PATHS, "directory", "dir", "dir_path", "target_directory", "directory_path", "folder")
_ARGUMENT_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "read_file": {
        "path": _PATHS,
        "line": ("offset", "start_line", "line_start", "start", "from_line", "startline"),
        "limit": ("num_lines", "max_lines", "line_count", "lines"),
    },
    "write_file": {"path": _PATHS, "content": ("contents", "text", "file_text", "new_content")},
    "edit_file": {
        "path": _PATHS,
        "old_text": ("old_string", "old_str", "oldtext", "oldstring", "search", "find", "old"),
        "new_text": ("new_string", "new_str", "newtext", "newstring", "replace", "replacement", "new"),
        "all": ("replace_all", "replaceall", "allow_multiple"),
    },
    "apply_patch": {"input": ("patch", "diff", "patch_text", "patchtext", "content")},
    "shell": {
        "command": ("cmd", "script", "commandline", "command_line"),
        "background": ("run_in_background", "is_background", "isbackground"),
    },
    "grep": {
        "pattern": ("query", "regex", "regexp", "search", "search_term"),
        "path": _DIRECTORIES,
        "glob": ("include", "include_pattern", "file_pattern", "glob_pattern"),
        "ignore_case": ("-i", "case_insensitive", "ignorecase"),
        "context": ("-c", "context_lines", "contextlines", "lines_of_context"),
    },
    "list_files": {"path": _DIRECTORIES, "pattern": ("glob", "glob_pattern", "query")},
    "fetch": {"url": ("uri", "link", "address")},
    "update_plan": {"items": ("todos", "plan", "steps", "entries")},
    "task": {
        "prompt": ("task", "instructions", "query"),
        "description": ("title", "name"),
        "agent": ("subagent_type",),
    },
}
"""For each of crow's tools and arguments, the names that other agents give to the argument, in lower case."""


_AROUND = ("-A", "-B", "after_context", "before_context", "after", "before")
"""Names that other agents give to the number of lines after or before a match of `grep`."""

_SILENT = frozenset({"description", "explanation", "purpose", "justification"})
"""Arguments that only explain a call. They are ignored without a note."""


def understood(call: ToolCall, offered: Collection[str], specs: Mapping[str, ToolSpec]) -> ToolCall:
    """Return `call` in terms of crow's tools. Return it unchanged if it needs no change, or if its meaning is not
    clear. `offered` are the names of all tools that the model can use, and `specs` are the built-in ones."""
    if call.fault is not None:
        return _bare_patch(call) if call.name == "apply_patch" else call
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(given, dict):
        return call
    name, arguments = call.name, dict(given)
    if name not in offered:
        name, arguments = _renamed(name, arguments)
        if name not in offered or name not in specs:
            return call
    if name not in specs:
        return call
    properties = _properties(specs[name])
    arguments = _with_own_names(arguments, _ARGUMENT_NAMES.get(name, {}), properties)
    if name in _REWRITES:
        arguments = _REWRITES[name](arguments)
    if (name, arguments) == (call.name, given):
        return call
    return replace(call, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _bare_patch(call: ToolCall) -> ToolCall:
    """If the arguments of a call are a whole patch instead of JSON, return a call with this patch as its argument."""
    patch = (call.raw or "").strip()
    if not (patch.startswith("*** Begin Patch\n") and patch.endswith("\n*** End Patch")):
        return call
    return replace(call, arguments=json.dumps({"input": patch}, ensure_ascii=False), fault=None, raw=None)


def ignored_note(call: ToolCall, spec: ToolSpec) -> str:
    """Return a line that names the arguments of `call` that its tool does not have, or an empty string."""
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return ""
    properties = _properties(spec)
    unknown = (
        [name for name in given if name not in properties and name not in _SILENT] if isinstance(given, dict) else []
    )
    if not unknown:
        return ""
    shown = ", ".join(name[:40] for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    return f"[ignored: {shown}; {spec.name} takes only {', '.join(properties)}]"


def _properties(spec: ToolSpec) -> Collection[str]:
    properties = spec.input_schema["properties"]
    assert isinstance(properties, Mapping)
    return properties


def _renamed(name: str, arguments: _Arguments) -> tuple[str, _Arguments]:
    """Return the name of crow's tool, and the arguments without an argument that only chooses the tool. A name that is
    not known is returned as it is, apart from case and dashes."""
    plain = name.replace("-", "_").lower()
    if plain in ("str_replace_editor", "str_replace_based_edit_tool", "text_editor"):
        tools = {"view": "read_file", "create": "write_file", "str_replace": "edit_file"}
        rest = {key: value for key, value in arguments.items() if key != "command"}
        return tools.get(str(arguments.get("command")), name), rest
    return _TOOL_NAMES.get(plain, plain), arguments


def _with_own_names(
    arguments: _Arguments, names: Mapping[str, tuple[str, ...]], properties: Collection[str]
) -> _Arguments:
    """Rename arguments that have another agent's name, unless crow's own name is given, too, or several of them mean
    the same argument."""
    others = {other: own for own, known in names.items() for other in known}
    meant = [others.get(name.lower(), "") for name in arguments if name not in properties]
    renamed: _Arguments = {}
    for name, value in arguments.items():
        own = others.get(name.lower()) if name not in properties else None
        is_clear = own is not None and own not in arguments and meant.count(own) == 1 and own in properties
        renamed[own if own is not None and is_clear else name] = value
    return renamed


def _reading(arguments: _Arguments) -> _Arguments:
    """Convert `view_range: [first, last]`, `end_line`, and lines counted from 0 to `line` and `limit`."""
    rest = dict(arguments)
    match rest.get("view_range"):
        case [int(first), int(last)] if "line" not in rest and "limit" not in rest:
            del rest["view_range"]
            rest["line"] = first
            if last >= first:
                rest["limit"] = last - first + 1
    for name in ("end_line", "line_end", "to_line", "endLine"):
        match rest.get(name), rest.get("line", 1):
            case int(last), int(first) if last >= max(first, 1) and "limit" not in rest:
                del rest[name]
                rest["limit"] = last - max(first, 1) + 1
    if rest.get("line") == 0:
        rest["line"] = 1
    return rest


def _searching(arguments: _Arguments) -> _Arguments:
    """Combine separate numbers of lines before and after a match into `context`."""
    rest = dict(arguments)
    given = [rest.get(name) for name in _AROUND]
    counts = [value for value in given if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    if counts and "context" not in rest:
        rest = {name: value for name, value in rest.items() if name not in _AROUND}
        rest["context"] = max(counts)
    return rest


_DIRECTORY_NAMES = ("workdir", "cwd", "working_directory", "working_dir")


def _command(arguments: _Arguments) -> _Arguments:
    """Accept a command as a list of words, a timeout in milliseconds, and another working directory."""
    rest = dict(arguments)
    match rest.get("command"):
        case [str(shell), "-c" | "-lc", str(line)] if shell.rpartition("/")[2] in ("bash", "sh", "zsh"):
            rest["command"] = line
        case [*words] if words and all(isinstance(word, str) for word in words):
            rest["command"] = shlex.join(words)
    for name, divisor in (("timeout_ms", 1_000), ("timeout", 1)):
        value = rest.get(name)
        if "timeout_s" not in rest and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            del rest[name]
            value = min(value, 1_000 * MAX_TIMEOUT_S)  # it may be infinite
            # a value above crow's maximum must be in milliseconds
            seconds = value / 1_000 if divisor == 1 and value > MAX_TIMEOUT_S else value / divisor
            rest["timeout_s"] = min(MAX_TIMEOUT_S, max(1, math.ceil(seconds)))
    places = [name for name in _DIRECTORY_NAMES if isinstance(rest.get(name), str)]
    if len(places) == 1 and isinstance(script := rest.get("command"), str) and not script.endswith("\\"):
        directory = rest.pop(places[0])
        if directory not in ("", "."):
            place = f"./{directory}" if directory.startswith("-") else directory
            rest["command"] = f"cd {shlex.quote(place)} && {{ {script}\n}}"
    return rest


def _plan(arguments: _Arguments) -> _Arguments:
    """Accept steps that have the field names of other agents."""
    rest, items = dict(arguments), arguments.get("items")
    if isinstance(items, list) and all(isinstance(item, dict) for item in items):
        known = ("content", "status", "priority")
        names = {"step": "content", "title": "content", "text": "content", "task": "content"}
        states = {"done": "completed", "complete": "completed", "todo": "pending", "in-progress": "in_progress"}
        rest["items"] = []
        for item in items:
            is_clear = "content" not in item and len(names.keys() & item.keys()) == 1
            renamed = {(names.get(key, key) if is_clear else key): value for key, value in item.items()}
            step = {key: value for key, value in renamed.items() if key in known}
            if isinstance(step.get("status"), str):
                step["status"] = states.get(step["status"], step["status"])
            rest["items"].append(step)
    return rest


_REWRITES: Mapping[str, Callable[[_Arguments], _Arguments]] = {
    "read_file": _reading,
    "grep": _searching,
    "shell": _command,
    "update_plan": _plan,
}
