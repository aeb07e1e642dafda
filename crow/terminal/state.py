"""The state of a chat's session, as the front end reports it: mode, model, usage, and whether a turn runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crow.terminal.completion import Choices
from crow.terminal.connection import Params
from crow.terminal.help import OWN_COMMANDS
from crow.terminal.render import usage_of


@dataclass(slots=True)
class SessionState:
    """The newest values of the open session. Texts are empty if a value is not known."""

    choices: Choices
    """Gets the session's commands and models, so that the keyboard completes them."""
    mode: str = ""
    """The permission mode."""
    model: str = ""
    usage: str = ""
    """The size of the context, its window and the session's cost, in words."""
    tokens: int = 0
    """The size of the context. 0 if it is not known."""
    has_turn: bool = False
    """On a server: whether a turn runs, of this or of another client."""

    def open(self, response: Params, mode: str | None) -> None:
        """Take the response that opened the session. Unless `mode` is None, this mode was set after the response was
        sent."""
        self.take({"sessionUpdate": "config_option_update", "configOptions": response.get("configOptions", ())})
        self._take_turn_state(response)
        self.mode = mode or self.mode

    def take(self, update: Params) -> None:
        """Take an update of the session."""
        match update["sessionUpdate"]:
            case "usage_update":
                self.tokens = int(update["used"])
                self.usage = usage_of(update["used"], update["size"], update.get("cost", {}).get("amount"))
            case "current_mode_update":
                self.mode = str(update["currentModeId"])
            case "session_info_update":
                self._take_turn_state(update)
            case "config_option_update":
                self._take_options(update["configOptions"])
            case "available_commands_update":
                commands = {str(each["name"]): str(each["description"]) for each in update["availableCommands"]}
                self.choices.commands = commands | OWN_COMMANDS

    def _take_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        for option in options:
            match option:
                case {"id": "mode", "currentValue": str(mode)}:
                    self.mode = mode
                case {"id": "model", "currentValue": str(model), "options": list(models)}:
                    self.model = model
                    self.choices.arguments["model"] = {str(one["value"]): "" for one in models}

    def _take_turn_state(self, holder: Params) -> None:
        if isinstance(state := holder.get("_meta", {}).get("acp/turnState"), Mapping):
            self.has_turn = state.get("state") == "running"
