"""Tests of the thought levels that lists of models state."""

from __future__ import annotations

from typing import Any

import pytest

from crow.llm import THOUGHT_LEVELS
from crow.llm.client import EndpointClient
from crow.llm.endpoint import Endpoint
from crow.llm.listing import facts_of, read_listing

_YES, _NO = {"supported": True}, {"supported": False}


def _claude(thinking: object, effort: object = None) -> dict[str, Any]:
    return {"type": "model", "capabilities": {"batch": _YES, "thinking": thinking, "effort": effort}}


_ADAPTIVE = {"supported": True, "types": {"adaptive": _YES, "enabled": _NO}}
_BUDGET = {"supported": True, "types": {"adaptive": _NO, "enabled": _YES}}
_EFFORTS = {"supported": True, "low": _YES, "medium": _NO, "high": _YES, "max": _YES}


@pytest.mark.parametrize(
    ("item", "levels"),
    [
        ({}, None),
        (_claude(_NO), ()),
        (_claude(_BUDGET, _NO), THOUGHT_LEVELS),
        (_claude(_ADAPTIVE, _EFFORTS), ("off", "low", "high")),
        (_claude(_ADAPTIVE), THOUGHT_LEVELS),
        ({"capabilities": None}, None),
        ({"capabilities": ["completion"]}, None),
        ({"supported_parameters": ["tools", "max_tokens"]}, ()),
        ({"supported_parameters": ["tools", "reasoning"]}, THOUGHT_LEVELS),
        ({"reasoning": {"mandatory": False, "supported_efforts": None}}, THOUGHT_LEVELS),
        ({"reasoning": {"mandatory": True, "supported_efforts": ["xhigh", "high", "low"]}}, ("low", "high")),
        ({"reasoning": {"mandatory": False, "supported_efforts": ["xhigh"]}}, ("off",)),
        ({"supports_reasoning": False}, ()),
        ({"supports_reasoning": True}, None),
        ({"capabilities": {"reasoning": False, "vision": True}}, ()),
        # Nothing of a known form says nothing.
        ({"reasoning": [["low"]], "supported_parameters": "reasoning", "supports_reasoning": "no"}, None),
        ({"reasoning": {"supported_efforts": [{}, None, 4, "low"]}}, ("off", "low")),
        (_claude({"supported": 1, "types": []}), None),
        (_claude({"supported": True, "types": []}, []), THOUGHT_LEVELS),
    ],
)
def test_levels_are_read_from_a_list_of_models_and_stored(item: dict[str, Any], levels: tuple[str, ...] | None) -> None:
    (offered,) = read_listing({"data": [{"id": "m", **item}]}) or ()
    assert offered.thought_levels == levels
    client = EndpointClient(Endpoint(base_url="http://localhost:1/v1", model="m"), learned=facts_of(offered))
    assert client.info.thought_levels == levels


@pytest.mark.parametrize("stored", ["high", {"high": 1}, 4, None])
def test_stored_levels_of_another_form_are_ignored(stored: object) -> None:
    learned = {"listed": {"thought_levels": stored}}
    client = EndpointClient(Endpoint(base_url="http://localhost:1/v1", model="m"), learned=learned)
    assert client.info.thought_levels is None
