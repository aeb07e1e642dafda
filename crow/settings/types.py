"""The base of all tables of `config.toml`, and the types of values that a share of something has.

This module does not import `annotations` from `__future__`, for the same reason as `values.py`.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class Expected:
    """A description of the values that a setting accepts: the end of the error message `... is VALUE; expected ...`."""

    words: str


class Section(BaseModel):
    """A table of `config.toml`. Types are strict: a string is not accepted as a number, nor a number as a string."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def secrets(self) -> tuple[str, ...]:
        """Return the values that must not appear in a log, an error or an export."""
        key = getattr(self, "api_key", None)
        texts = (*getattr(self, "headers", {}).values(), *getattr(self, "env", {}).values())
        texts += (secret,) if (secret := getattr(self, "oauth_client_secret", None)) else ()
        return texts if key is None else (key.get_secret_value(), *texts)


def _from_percent(value: object) -> object:
    """Return the fraction that a percentage such as "85%" stands for, and any other value as it is."""
    if isinstance(value, str) and value.endswith("%") and value[:-1].replace(".", "", 1).isdecimal():
        return float(value[:-1]) / 100
    return value


_MIN_TOKENS = 4_000
"""A window or a threshold in tokens has at least this many."""

_Tokens = Annotated[int, Field(ge=_MIN_TOKENS)]
_Percent = BeforeValidator(_from_percent, json_schema_input_type=float | str)
Threshold = Annotated[
    _Tokens | Annotated[float, Field(ge=0.1, le=0.95), _Percent],
    Expected(
        f'a fraction of the window from 0.1 to 0.95, such as 0.85, a percentage, such as "85%", or a whole number of '
        f"at least {_MIN_TOKENS} tokens, such as 100000"
    ),
]
"""A share of the window (a float) or a number of tokens (an int)."""

WindowPart = Annotated[
    _Tokens | Annotated[float, Field(ge=0.1, le=1), _Percent],
    Expected(
        'a fraction of the model\'s window from 0.1 to 1, such as 0.5, a percentage, such as "50%", or a whole number '
        f"of at least {_MIN_TOKENS} tokens, such as 200000"
    ),
]
"""A share of the model's window (a float) or a number of tokens (an int)."""
