"""Permission modes and config options."""

from __future__ import annotations

from typing import Any

import pytest

from acp_check.schema import validate
from crow.domain.errors import ArgumentError
from crow.frontend.options import config_options, mode_named, mode_state, option_value


def test_modes_and_options_are_valid_and_agree() -> None:
    state = mode_state("plan")
    options = config_options(mode="plan", model="b", models=["a", "b"], config={}, booleans=True)
    validate("NewSessionResponse", {"sessionId": "s", "modes": state, "configOptions": options})
    modes = [mode["id"] for mode in state["availableModes"]]
    assert modes == ["ask", "accept-edits", "plan", "auto"]
    mode, model, level, compacts = options
    assert (mode["category"], mode["currentValue"]) == ("mode", "plan")
    assert [option["value"] for option in mode["options"]] == modes
    assert (model["category"], model["currentValue"]) == ("model", "b")
    assert [option["value"] for option in model["options"]] == ["a", "b"]
    assert (level["category"], level["currentValue"]) == ("thought_level", "default")
    assert (compacts["type"], compacts["currentValue"]) == ("boolean", True)


def test_stored_values_are_current_and_boolean_options_need_the_capability() -> None:
    config = {"thought_level": "high", "auto_compact": False, "max_turns": 3}
    options = config_options(mode="ask", model="a", models=[], config=config, booleans=True)
    values = {option["id"]: option["currentValue"] for option in options}
    assert values == {"mode": "ask", "model": "a", "thought_level": "high", "auto_compact": False}
    gated = config_options(mode="ask", model="a", models=[], config=config, booleans=False)
    assert [option["id"] for option in gated] == ["mode", "model", "thought_level"]


@pytest.mark.parametrize(
    ("model", "models", "offered"),
    [("x", ["a"], ["a", "x"]), ("a", ["a", "a"], ["a"]), ("", ["a"], ["none", "a"]), ("x", [], ["x"])],
)
def test_the_current_model_is_always_offered(model: str, models: list[str], offered: list[str]) -> None:
    option = config_options(mode="ask", model=model, models=models, config={}, booleans=False)[1]
    assert [one["value"] for one in option["options"]] == offered
    assert option["currentValue"] in offered


def test_without_models_there_is_no_model_option() -> None:
    options = config_options(mode="ask", model="", models=[], config={}, booleans=False)
    assert [option["id"] for option in options] == ["mode", "thought_level"]


@pytest.mark.parametrize(
    ("levels", "current", "offered"),
    [
        (None, "", ["default", "off", "low", "medium", "high"]),
        (("low", "high"), "", ["default", "low", "high"]),
        (("low",), "high", ["default", "low", "high"]),
        ((), "off", ["default", "off"]),
        ((), "", None),
    ],
)
def test_the_levels_of_the_model_and_the_current_one_are_offered(
    levels: tuple[str, ...] | None, current: str, offered: list[str] | None
) -> None:
    config = {"thought_level": current}
    options = config_options(mode="ask", model="a", models=[], config=config, booleans=False, levels=levels)
    found = [[one["value"] for one in each["options"]] for each in options if each["id"] == "thought_level"]
    assert found == ([] if offered is None else [offered])


def test_valid_choices_give_the_value_to_store() -> None:
    assert mode_named("auto") == "auto"
    assert option_value("mode", "plan", model="a", models=[]) == "plan"
    assert option_value("model", "b", model="a", models=["b"]) == "b"
    assert option_value("model", "none", model="", models=["b"]) == ""
    assert option_value("thought_level", "high", model="", models=[]) == "high"
    assert option_value("thought_level", "default", model="", models=[]) == ""
    assert option_value("auto_compact", False, model="", models=[]) is False


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("mode", "yolo", 'There is no mode "yolo"; choose one of ask, accept-edits, plan, auto.'),
        ("mode", True, "There is no mode true; choose one of ask, accept-edits, plan, auto."),
        ("model", "c", 'There is no model "c"; choose one of b, a.'),
        ("thought_level", "huge", 'There is no thought level "huge"; choose one of default, off, low, medium, high.'),
        ("auto_compact", "no", 'auto_compact is "no"; expected true or false.'),
        (
            "effort",
            "high",
            'There is no config option "effort"; the options are mode, model, thought_level and auto_compact.',
        ),
    ],
)
def test_an_invalid_choice_is_an_error_with_the_value_and_the_choices(option: str, value: Any, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        option_value(option, value, model="a", models=["b"])
    assert str(raised.value) == words
