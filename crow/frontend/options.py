"""The permission modes, config options and slash commands that a client can choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crow.agent.commands import COMMANDS
from crow.agent.permissions.rules import MODES, Mode
from crow.agent.sessions.session import Session
from crow.agent.templates import hint_of
from crow.domain.errors import ArgumentError
from crow.domain.text import title_line
from crow.protocol.frames import describe_member
from crow.protocol.tool_calls import is_plain

_MODE_TEXTS: Mapping[Mode, tuple[str, str]] = {
    "ask": ("Ask", "Reads freely; asks before it writes, runs commands, fetches or calls MCP tools"),
    "accept-edits": ("Accept edits", "Like Ask, but writes files in the workspace without asking"),
    "plan": ("Plan", "Reads and plans only; changes nothing"),
    "auto": (
        "Auto",
        "Asks only about full access, the network, MCP tools, protected paths and paths outside the workspace",
    ),
}
"""The name and the description of each mode."""

_THOUGHT_LEVELS = {"default": "Default of the endpoint", "off": "Off", "low": "Low", "medium": "Medium", "high": "High"}
"""The thought levels of a reasoning model, and their names. The level "default" is stored as an empty string. With this
level, requests to the endpoint contain no thought level."""

_NO_MODEL = "none"
"""The value of the model option while no model is chosen. The placeholder is needed because every option must have a
current value."""


def mode_state(current: str) -> dict[str, Any]:
    """Return the value for the member `modes` in the response to a request that opens a session."""
    modes = [{"id": mode, "name": name, "description": text} for mode, (name, text) in _MODE_TEXTS.items()]
    return {"currentModeId": current, "availableModes": modes}


def config_options(
    *,
    mode: str,
    model: str,
    models: Sequence[str],
    config: Mapping[str, object],
    booleans: bool,
    levels: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return all config options of a session whose stored configuration is `config`.

    Boolean options are included only if the client supports them. The mode is included as an option too, because some
    clients read only the options, and not `modes`. The current model is offered even if `models` does not contain it.
    If there is no model at all, the option for the model is left out.

    `levels` are the thought levels that the model takes, or None if that is unknown. The current level is always
    offered. If there is no level to choose, the option for the thought level is left out.
    """
    modes = [{"value": mode, "name": name, "description": text} for mode, (name, text) in _MODE_TEXTS.items()]
    options = [_select("mode", "Mode", "What crow may do without asking", mode, modes)]
    names = _offered(model, models)
    if names:
        choices = [{"value": name, "name": title_line(name)} for name in names]
        if not model:
            choices.insert(0, {"value": _NO_MODEL, "name": "None chosen yet"})
        text = "The model for the next prompt and later ones"
        options.append(_select("model", "Model", text, model or _NO_MODEL, choices))
    level = config.get("thought_level")
    current = str(level) if level in _THOUGHT_LEVELS else "default"
    taken = _THOUGHT_LEVELS if levels is None else {"default", current, *levels}
    if len(taken) > 1:
        choices = [{"value": value, "name": name} for value, name in _THOUGHT_LEVELS.items() if value in taken]
        text = "How hard the model thinks, if the endpoint supports it"
        options.append(_select("thought_level", "Thought level", text, current, choices))
    if booleans:
        text = "Summarise older messages when the context window fills up; nothing is deleted"
        option = {"id": "auto_compact", "name": "Automatic compaction", "description": text, "type": "boolean"}
        options.append(option | {"currentValue": config.get("auto_compact") is not False})
    return options


def session_commands(session: Session) -> list[dict[str, Any]]:
    """Return the slash commands of a session for `available_commands_update`: crow's own, the user's templates, and
    the prompts of MCP servers."""
    commands = [
        *((spec.name, spec.description, spec.hint) for spec in COMMANDS),
        *((each.name, each.description, each.hint) for each in session.conversation.adapters.templates()),
        *(
            (prompt.name, f"{prompt.server}: {prompt.description}", hint_of(prompt))
            for prompt in session.runner.prompts
        ),
    ]
    return [
        {"name": name, "description": title_line(text), **({"input": {"hint": title_line(hint)}} if hint else {})}
        for name, text, hint in commands
    ]


def mode_named(value: object) -> Mode:
    """Return the mode with this id. :raises ArgumentError: there is no such mode."""
    for mode in MODES:
        if value == mode:
            return mode
    raise ArgumentError(f"There is no mode {describe_member(value)}; choose one of {', '.join(MODES)}.")


def option_value(option: object, value: object, *, model: str, models: Sequence[str]) -> str | bool:
    """Return the value to store when a client sets `option` to `value`.

    :raises ArgumentError: the option is unknown, or the value is not one of its choices.
    """
    match option:
        case "mode":
            return mode_named(value)
        case "model":
            names = _offered(model, models)
            if isinstance(value, str) and value in names:
                return value
            if value == _NO_MODEL and not model:
                return ""
            remedy = "none is offered; run `crow login`, or set CROW_MODEL or model.name in config.toml"
            if names:
                remedy = f"choose one of {', '.join(names)}"
            raise ArgumentError(f"There is no model {describe_member(value)}; {remedy}.")
        case "thought_level":
            if isinstance(value, str) and value in _THOUGHT_LEVELS:
                return "" if value == "default" else value
            raise ArgumentError(
                f"There is no thought level {describe_member(value)}; choose one of {', '.join(_THOUGHT_LEVELS)}."
            )
        case "auto_compact":
            if isinstance(value, bool):
                return value
            raise ArgumentError(f"auto_compact is {describe_member(value)}; expected true or false.")
        case _:
            known = "mode, model, thought_level and auto_compact"
            raise ArgumentError(f"There is no config option {describe_member(option)}; the options are {known}.")


def _select(option_id: str, name: str, text: str, current: str, choices: list[dict[str, str]]) -> dict[str, Any]:
    option = {"id": option_id, "name": name, "description": text, "category": option_id, "type": "select"}
    return {**option, "currentValue": current, "options": choices}


def _offered(model: str, models: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the models to choose from. A model whose name has hidden characters is left out."""
    plain = (name for name in models if is_plain(name))
    return tuple(dict.fromkeys(name for name in (*plain, model) if name))
