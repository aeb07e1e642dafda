"""Permission modes and config options, as the client chooses among them.

Strategy: an option's id is the name under which the session keeps it. The mode is shown twice, as `modes` and as an
option of category "mode", since clients read one or the other; every answer carries the complete list. Values come
back as text and are checked here. Knows what can be chosen, not what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crow.agent.permissions import MODES as MODE_IDS
from crow.agent.permissions import Mode as ModeId
from crow.domain.errors import ArgumentError

__all__ = [
    "MODES",
    "Choice",
    "Mode",
    "config_options",
    "mode_named",
    "mode_state",
    "option_chosen",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A permission mode as it is offered."""

    id: ModeId
    name: str
    description: str


MODES: tuple[Mode, ...] = (
    Mode(id="ask", name="Ask", description="Reading is free; writing, commands, fetching and other servers' tools ask"),
    Mode(
        id="accept-edits",
        name="Accept edits",
        description="Like Ask, but files inside the workspace are written without asking",
    ),
    Mode(id="plan", name="Plan", description="Look and plan only: nothing is written, run or fetched"),
    Mode(id="auto", name="Auto", description="Nothing asks, except what lies outside the workspace"),
)


THOUGHT_LEVELS: Mapping[str, str] = {
    "": "As the endpoint decides",
    "off": "Off",
    "low": "Low",
    "medium": "Medium",
    "high": "High",
}
"""How hard a reasoning model thinks: the value that endpoints know, and its name; empty sends none."""

DEFAULT_LEVEL = "default"

NO_MODEL = {"value": "none", "name": "None chosen yet"}
"""Stands in the menu until a model is chosen: a menu needs a current value."""

NO_MODEL_HELP = "run `crow login`, or set CROW_MODEL or model.name in config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A checked value of `session/set_config_option`."""

    option: Literal["mode", "model", "thought_level", "auto_compact"]
    value: str | bool


def mode_state(current: str) -> dict[str, Any]:
    """The `modes` of a session's answers."""
    return {
        "currentModeId": current,
        "availableModes": [{"id": mode.id, "name": mode.name, "description": mode.description} for mode in MODES],
    }


def config_options(
    *, mode: str, model: str, models: Sequence[str], config: Mapping[str, object], booleans: bool
) -> list[dict[str, Any]]:
    """The complete `configOptions`; `config` is the session's, `booleans` whether the client takes such options. The
    current model is offered also where `models` does not name it; without any model there is no option for it, and
    while none of them is chosen the option says so."""
    options: list[dict[str, Any]] = [
        {
            "id": "mode",
            "name": "Mode",
            "description": "What crow may do without asking",
            "category": "mode",
            "type": "select",
            "currentValue": mode,
            "options": [{"value": one.id, "name": one.name, "description": one.description} for one in MODES],
        }
    ]
    names = _offered(model, models)
    if names:
        options.append(
            {
                "id": "model",
                "name": "Model",
                "description": "The model that answers from the next prompt on",
                "category": "model",
                "type": "select",
                "currentValue": model or NO_MODEL["value"],
                "options": [*([] if model else [NO_MODEL]), *({"value": name, "name": name} for name in names)],
            }
        )
    level = config.get("thought_level")
    options.append(
        {
            "id": "thought_level",
            "name": "Thought level",
            "description": "How hard the model thinks, where its endpoint lets crow choose",
            "category": "thought_level",
            "type": "select",
            "currentValue": level if level and level in THOUGHT_LEVELS else DEFAULT_LEVEL,
            "options": [{"value": one or DEFAULT_LEVEL, "name": name} for one, name in THOUGHT_LEVELS.items()],
        }
    )
    if booleans:
        options.append(
            {
                "id": "auto_compact",
                "name": "Compact by itself",
                "description": "Summarise older messages when the context window fills up; nothing is deleted",
                "type": "boolean",
                "currentValue": config.get("auto_compact") is not False,
            }
        )
    return options


def mode_named(value: object) -> ModeId:
    """The mode with this id. :raises ArgumentError: there is none."""
    for mode in MODE_IDS:
        if value == mode:
            return mode
    raise ArgumentError(f"No mode {_shown(value)}; choose one of {', '.join(MODE_IDS)}.")


def option_chosen(option: object, value: object, *, model: str, models: Sequence[str]) -> Choice:
    """What `session/set_config_option` chose. :raises ArgumentError: no such option, or no such value."""
    match option:
        case "mode":
            return Choice(option="mode", value=mode_named(value))
        case "model":
            names = _offered(model, models)
            if isinstance(value, str) and value in names:
                return Choice(option="model", value=value)
            if value == NO_MODEL["value"] and not model:
                return Choice(option="model", value="")
            choices = f"choose one of {', '.join(names)}" if names else f"none is offered; {NO_MODEL_HELP}"
            raise ArgumentError(f"No model {_shown(value)}; {choices}.")
        case "thought_level":
            levels = [level or DEFAULT_LEVEL for level in THOUGHT_LEVELS]
            if value in levels:
                return Choice(option="thought_level", value="" if value == DEFAULT_LEVEL else str(value))
            raise ArgumentError(f"No thought level {_shown(value)}; choose one of {', '.join(levels)}.")
        case "auto_compact":
            if not isinstance(value, bool):
                raise ArgumentError(f"auto_compact is {_shown(value)}; expected true or false.")
            return Choice(option="auto_compact", value=value)
        case _:
            options = "mode, model, thought_level and auto_compact"
            raise ArgumentError(f"No config option {_shown(option)}; there are {options}.")


def _offered(model: str, models: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in (*models, model) if name))


def _shown(value: object) -> str:
    return f'"{value[:80]}"' if isinstance(value, str) else repr(value)[:80]
