"""A question to the user beyond a yes or no, asked by a tool server or by crow, and its answer.

Strategy: a form or an address to visit; the answer is accepted with values, declined, or dismissed. Secrets are asked
for by address alone, never by form. Knows neither the protocol nor who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.domain.entries import CallRef
from crow.domain.messages import JsonObject

__all__ = ["Elicitation", "ElicitationAnswer", "ElicitationKind", "FormQuestion", "UrlQuestion"]

ElicitationKind: TypeAlias = Literal["form", "url"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormQuestion:
    """Fields to fill in: `schema` is a flat JSON Schema object. `call`: the running call that it belongs to."""

    message: str
    schema: JsonObject
    call: CallRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlQuestion:
    """A page to visit; `id` names the question when it is over, see `Client.elicited`."""

    message: str
    url: str
    id: str
    call: CallRef | None = None


Elicitation: TypeAlias = FormQuestion | UrlQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class ElicitationAnswer:
    """What the user did; `content` holds the values of an accepted form."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, str | int | float | bool | list[str]] = field(default_factory=dict)
