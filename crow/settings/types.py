"""The base of all tables of `config.toml`, and the types of their values.

This module does not import `annotations` from `__future__`. With this import, pydantic would evaluate all annotations a
second time at every start.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from crow.domain.protected_names import added_name, removed_name


@dataclass(frozen=True, slots=True)
class Expected:
    """A description of the values that a setting accepts: the end of the error message `... is VALUE; expected ...`."""

    words: str


class Section(BaseModel):
    """A table of `config.toml`. Types are strict: a string is not accepted as a number, nor a number as a string."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def secrets(self) -> tuple[str, ...]:
        """Return the values that must not appear in a log, an error or an export: the key and the headers, if the table
        has these fields. Tables with other secrets override this method."""
        key: SecretStr | None = getattr(self, "api_key", None)
        headers: Mapping[str, str] = getattr(self, "headers", {})
        return (*([] if key is None else [key.get_secret_value()]), *headers.values())


def _from_percent(value: object) -> object:
    """Return a percentage such as "85%" as a fraction, and any other value unchanged."""
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


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc or {"?", "#"} & set(url):
        raise ValueError  # no message, because the value may be secret
    if parts.port == 0:  # `port` itself raises a ValueError for what is no port
        raise ValueError
    return url.rstrip("/")


def _ascii_key(key: SecretStr) -> SecretStr:
    if not re.fullmatch("[!-~]+", key.get_secret_value()):
        raise ValueError
    return key


def _database_url(url: SecretStr) -> SecretStr:
    if not url.get_secret_value().startswith(("postgresql://", "postgres://")):
        raise ValueError
    return url


Strings = Annotated[tuple[str, ...], Field(strict=False)]
NonEmpty = Annotated[str, Field(min_length=1)]
Switch = Annotated[bool, Expected("true or false")]
Tokens = Annotated[int, Field(ge=1), Expected("a whole number of tokens, such as 4000")]
Count = Annotated[int, Field(ge=1), Expected("a whole number above 0, such as 100")]
Window = Annotated[int, Field(ge=2000), Expected("a whole number of tokens, such as 128000")]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False), Expected("US dollars per million tokens, such as 2.5")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("a number of seconds above 0, such as 30")]
Url = Annotated[
    str,
    AfterValidator(_plain_url),
    Expected("an http or https URL without user name, password and query, such as http://localhost:11434/v1"),
]
Key = Annotated[SecretStr, AfterValidator(_ascii_key), Expected("the key alone, in plain ASCII without spaces")]
DatabaseUrl = Annotated[
    SecretStr,
    AfterValidator(_database_url),
    Expected("the URL of a PostgreSQL database, such as postgresql://crow@db.example/crow"),
]
Variable = Annotated[NonEmpty, Expected('the name of a variable, such as "OPENROUTER_API_KEY"')]
Texts = Annotated[Mapping[str, str], Expected('a table of strings, such as { "X-Title" = "crow" }')]
Body = Annotated[Mapping[str, Any], Expected("a table, such as { temperature = 0.2 }")]
Thought = Annotated[Literal["off", "low", "medium", "high"], Expected('"off", "low", "medium" or "high"')]
WireChoice = Annotated[
    Literal["auto", "chat", "responses", "messages"], Expected('"auto", "chat", "responses" or "messages"')
]
ModelName = Annotated[NonEmpty, Expected('a model name, such as "gpt-5.2", or "offline"')]
ToolNames = Annotated[Strings, Expected('a list of tool names or globs, such as ["get_*"]')]
SmallModel = Annotated[NonEmpty, Expected('a model name, such as "gpt-5-mini" or "openrouter/mistral-small"')]
OtherModel = Annotated[NonEmpty, Expected("the name of another model that your settings name")]
EditTool = Annotated[Literal["edit_file", "apply_patch"], Expected('"edit_file" or "apply_patch"')]
Usd = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("US dollars above 0, such as 2.5")]
StartMode = Annotated[
    Literal["ask", "accept-edits", "plan", "auto"], Expected('"ask", "accept-edits", "plan" or "auto"')
]
Rules = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_*?-]{1,64}(\(.+\))?$")], ...],
    Field(strict=False),
    Expected(
        'a list of rules, each a tool or a tool and an argument, such as ["shell(git status)", "edit_file(docs/**)"]'
    ),
]
ProtectedName = Annotated[str, AfterValidator(added_name)]
RemovableName = Annotated[str, AfterValidator(removed_name)]
