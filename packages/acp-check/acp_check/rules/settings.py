"""Rules about modes, configuration options and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from acp_check.rules.rule import (
    MUST,
    SHOULD,
    Finding,
    Outcome,
    Rule,
    answered_by_error,
    answered_by_result,
    every,
    page,
)
from acp_check.run import OPENING, Connection, Exchange, Run, Update

_NO_MODES = "the agent has no modes"
_NO_OPTIONS = "the agent has no configuration options to choose from"


def _opened(run: Run) -> list[Exchange]:
    """Return the requests that opened a session."""
    return [each for each in run.asked_for(*OPENING) if each.result is not None]


def _modes(run: Run) -> list[Exchange]:
    return [each for each in _opened(run) if isinstance((each.result or {}).get("modes"), dict)]


def _mode_ids(exchange: Exchange) -> list[Any]:
    modes = (exchange.result or {})["modes"].get("availableModes")
    return [mode.get("id") for mode in modes if isinstance(mode, dict)] if isinstance(modes, list) else []


def _current_mode(exchange: Exchange) -> str | None:
    current = (exchange.result or {})["modes"].get("currentModeId")
    return None if current in _mode_ids(exchange) else f"the current mode {current!r} is not in {_mode_ids(exchange)}"


def _repeated(what: str, values: Callable[[Exchange], list[Any]]) -> Callable[[Exchange], str | None]:
    def problem(exchange: Exchange) -> str | None:
        found = values(exchange)
        return f"two {what} have the same id: {found}" if len({str(each) for each in found}) < len(found) else None

    return problem


def _shown_modes(run: Run) -> Outcome:
    modes = {each.opened: _mode_ids(each) for each in _modes(run)}
    updates = run.updates("current_mode_update")
    return [
        Finding(
            words=f"the mode {update.body.get('currentModeId')!r} is not in {modes[update.session]}", lines=update.lines
        )
        for update in updates
        if update.session in modes and update.body.get("currentModeId") not in modes[update.session]
    ] or ([] if updates else "the agent sent no current_mode_update")


def options_of(value: Any) -> list[dict[str, Any]]:
    """Return the options in a `configOptions` member, or [] if it is not a list."""
    return [option for option in value if isinstance(option, dict)] if isinstance(value, list) else []


def choices(option: dict[str, Any]) -> list[Any]:
    """Return the values that can be chosen for an option, including the values in groups."""
    found: list[Any] = []
    for each in options_of(option.get("options")):
        found += (
            [inner.get("value") for inner in options_of(each["options"])] if "options" in each else [each.get("value")]
        )
    return found


def _configured(run: Run) -> list[Exchange]:
    """Return the requests whose response contains configuration options."""
    asked = run.asked_for(*OPENING, "session/set_config_option")
    return [each for each in asked if options_of((each.result or {}).get("configOptions"))]


def _option_check(problem: Callable[[dict[str, Any]], str | None]) -> Callable[[Exchange], str | None]:
    def check(exchange: Exchange) -> str | None:
        options = options_of((exchange.result or {}).get("configOptions"))
        return next((words for option in options if (words := problem(option))), None)

    return check


def _option_current(option: dict[str, Any]) -> str | None:
    if option.get("type", "select") != "select" or option.get("currentValue") in choices(option):
        return None
    return f"{option.get('id')}: the current value {option.get('currentValue')!r} is not in {choices(option)}"


def _option_values(option: dict[str, Any]) -> str | None:
    values = [str(each) for each in choices(option)]
    return f"{option.get('id')}: two choices have the same value" if len(set(values)) < len(values) else None


def _option_ids(exchange: Exchange) -> list[Any]:
    return [option.get("id") for option in options_of((exchange.result or {}).get("configOptions"))]


def _complete(exchange: Exchange) -> str | None:
    if exchange.result is None:
        return None
    ids = _option_ids(exchange)
    return None if exchange.params.get("configId") in ids else f"the response lists only the options {ids}"


def _is_set(exchange: Exchange) -> str | None:
    asked, options = exchange.params, options_of((exchange.result or {}).get("configOptions"))
    now = next((option.get("currentValue") for option in options if option.get("id") == asked.get("configId")), None)
    return (
        None
        if now == asked.get("value")
        else f"{asked.get('configId')} was set to {asked.get('value')!r} and is {now!r}"
    )


def _all_options(run: Run) -> Outcome:
    known = {each.opened: set(map(str, _option_ids(each))) for each in _opened(run)}
    found, has_any = [], False
    for update in run.updates("config_option_update"):
        has_any = True
        ids = {str(option.get("id")) for option in options_of(update.body.get("configOptions"))}
        if not ids and known.get(update.session):
            found.append(Finding(words="the update lists no option", lines=update.lines))
    return found if has_any else "the agent sent no config_option_update"


def _in_sync(run: Run) -> Outcome:
    """Find requests that set a mode, but left the option of the category `mode` with another value. Agents without this
    option are not checked."""
    found, has_any = [], False
    for connection in run.connections:
        for exchange in connection.asked_for("session/set_mode"):
            options = _mode_option(connection, exchange)
            if exchange.result is None or exchange.request.purpose != "set-mode" or options is None:
                continue
            has_any = True
            mode = exchange.params.get("modeId")
            if options != mode:
                words = f"the mode was set to {mode!r}, but the option of category mode says {options!r}"
                found.append(Finding(words=words, lines=exchange.lines))
    return found if has_any else "the agent has no modes, or no option of category mode"


def _mode_option(connection: Connection, exchange: Exchange) -> Any:
    """Return the value that the option of the category `mode` has just before the next request that sets a mode or an
    option. Return None if the agent does not have this option, or if the option does not offer the mode that was
    set."""
    if exchange.response is None:
        return None
    setting = (each for each in connection.asked if each.method in ("session/set_mode", "session/set_config_option"))
    end = min((each.request.line for each in setting if each.request.line > exchange.request.line), default=1 << 62)
    value = None
    modes: list[Any] = []
    for each in connection.asked:
        result = each.result or {}
        if each.method in OPENING and each.opened == exchange.session:
            value = _category_mode(result.get("configOptions"))
            modes = choices(
                next((o for o in options_of(result.get("configOptions")) if o.get("category") == "mode"), {})
            )
    if value is None or exchange.params.get("modeId") not in modes:
        return None
    for update in connection.updates:
        if update.kind == "config_option_update" and update.session == exchange.session and update.line.line < end:
            value = _category_mode(update.body.get("configOptions")) or value
    return value


def _category_mode(options: Any) -> Any:
    return next((o.get("currentValue") for o in options_of(options) if o.get("category") == "mode"), None)


def _commands(run: Run) -> Iterable[Update]:
    return run.updates("available_commands_update")


def _command_names(update: Update) -> list[str]:
    return [str(command.get("name")) for command in options_of(update.body.get("availableCommands"))]


def _slash(update: Update) -> str | None:
    wrong = [name for name in _command_names(update) if name.startswith("/") or not name.strip() or " " in name]
    return f"these names are not single words without a slash: {wrong}" if wrong else None


def _same_commands(update: Update) -> str | None:
    names = _command_names(update)
    return f"two commands share a name: {names}" if len(set(names)) < len(names) else None


RULES = (
    Rule(
        "modes.current",
        MUST,
        "The current mode is one of the available modes.",
        page("session-modes#sessionmodestate"),
        every(_modes, _current_mode, _NO_MODES),
    ),
    Rule(
        "modes.unique-ids",
        MUST,
        "Modes have different ids.",
        page("session-modes#sessionmode"),
        every(_modes, _repeated("modes", _mode_ids), _NO_MODES),
    ),
    Rule(
        "modes.set",
        SHOULD,
        "Each available mode can be set.",
        page("session-modes#from-the-client"),
        answered_by_result("expected a result", _NO_MODES, "set-mode"),
    ),
    Rule(
        "modes.unknown",
        SHOULD,
        "Setting a mode that is not available fails.",
        page("session-modes#from-the-client"),
        answered_by_error("expected an error", _NO_MODES, "set-unknown-mode"),
    ),
    Rule(
        "modes.known-updates",
        MUST,
        "A current_mode_update names an available mode.",
        page("session-modes#from-the-agent"),
        _shown_modes,
    ),
    Rule(
        "modes.in-sync",
        SHOULD,
        "Modes and the option of category mode are in sync.",
        page("session-config-options#relationship-to-session-modes"),
        _in_sync,
    ),
    Rule(
        "options.unique-ids",
        MUST,
        "Configuration options have different ids.",
        page("session-config-options#configoption"),
        every(_configured, _repeated("options", _option_ids), _NO_OPTIONS),
    ),
    Rule(
        "options.current",
        MUST,
        "The current value of an option is one of its choices.",
        page("session-config-options#default-values-and-graceful-degradation"),
        every(_configured, _option_check(_option_current), _NO_OPTIONS),
    ),
    Rule(
        "options.unique-values",
        MUST,
        "The choices of an option have different values.",
        page("schema#sessionconfigselectoption"),
        every(_configured, _option_check(_option_values), _NO_OPTIONS),
    ),
    Rule(
        "options.set",
        MUST,
        "An option can be set to one of its choices.",
        page("session-config-options#from-the-client"),
        answered_by_result("expected a result", _NO_OPTIONS, "set-option"),
    ),
    Rule(
        "options.value",
        MUST,
        "The response to session/set_config_option has the new value.",
        page("session-config-options#from-the-client"),
        every(
            lambda run: [each for each in run.exchanges("set-option") if each.result is not None],
            _is_set,
            _NO_OPTIONS,
        ),
    ),
    Rule(
        "options.complete",
        MUST,
        "The response to session/set_config_option lists all options, including the one that was set.",
        page("session-config-options#from-the-client"),
        every(lambda run: run.asked_for("session/set_config_option"), _complete, _NO_OPTIONS),
    ),
    Rule(
        "options.unknown-id",
        SHOULD,
        "Setting an unknown option fails.",
        page("session-config-options#from-the-client"),
        answered_by_error("expected an error", _NO_OPTIONS, "set-unknown-option"),
    ),
    Rule(
        "options.unknown-value",
        SHOULD,
        "Setting an option to a value that is not one of its choices fails.",
        page("session-config-options#from-the-client"),
        answered_by_error("expected an error", _NO_OPTIONS, "set-unknown-value"),
    ),
    Rule(
        "options.updates",
        MUST,
        "A config_option_update lists the options.",
        page("session-config-options#from-the-agent"),
        _all_options,
    ),
    Rule(
        "commands.names",
        SHOULD,
        "The name of a command is one word without a slash.",
        page("slash-commands#availablecommand"),
        every(_commands, _slash, "the agent has no commands"),
    ),
    Rule(
        "commands.unique-names",
        SHOULD,
        "Commands have different names.",
        page("slash-commands#availablecommand"),
        every(_commands, _same_commands, "the agent has no commands"),
    ),
)
