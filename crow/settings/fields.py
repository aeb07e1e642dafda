"""What single settings may be: their types, their bounds, and how an error sentence about each ends.

Strategy: annotated types shared by the tables of `config.toml`; a validator that refuses says nothing itself, since its
value may be secret.
"""

# No postponed annotations here: evaluating them again would double what this module costs at every start.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo

__all__ = [
    "Body",
    "Expect",
    "Given",
    "Headers",
    "Key",
    "Price",
    "Rules",
    "Seconds",
    "Section",
    "Switch",
    "Thought",
    "Tokens",
    "Url",
    "Window",
    "all_metadata",
]


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
        raise ValueError
    return url.rstrip("/")


def _sendable(key: SecretStr) -> SecretStr:
    if not all("!" <= character <= "~" for character in key.get_secret_value()):
        raise ValueError
    return key


@dataclass(frozen=True, slots=True)
class Expect:
    """What a setting takes: the end of the sentence `expected ...`."""

    words: str


Switch = Annotated[bool, Expect("true or false")]
Tokens = Annotated[int | None, Field(ge=1), Expect("a whole number of tokens, such as 4000")]
Price = Annotated[float | None, Field(ge=0, allow_inf_nan=False), Expect("US dollars per million tokens, such as 2.5")]
Window = Annotated[int | None, Field(ge=2000), Expect("a whole number of tokens, such as 128000")]
Url = Annotated[
    str,
    AfterValidator(_plain_url),
    Expect("an http or https URL without user name and query, such as http://localhost:11434/v1"),
]
Key = Annotated[
    Annotated[SecretStr, AfterValidator(_sendable)] | None, Expect("the key alone, in plain ASCII without spaces")
]
Headers = Annotated[Mapping[str, str], Expect('a table of texts, such as { "X-Title" = "crow" }')]
Body = Annotated[Mapping[str, Any], Expect("a table, such as { temperature = 0.2 }")]
Thought = Annotated[Literal["off", "low", "medium", "high"] | None, Expect('"off", "low", "medium" or "high"')]
Rule = Annotated[str, Field(pattern=r"^[A-Za-z0-9_*?-]{1,64}(\(.+\))?$")]
Rules = Annotated[
    tuple[Rule, ...],
    Field(strict=False),
    Expect(
        'a list of rules, each a tool or a tool and an argument, such as ["shell(git status)", "edit_file(docs/**)"]'
    ),
]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Expect("a number of seconds above 0, such as 30")]


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave: `source` for a table, `origin` for an error."""

    value: object
    source: str
    origin: str


class Section(BaseModel):
    """A table of `config.toml`: fixed once read; a number is not taken for a text, nor a text for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


def all_metadata(setting: FieldInfo) -> tuple[object, ...]:
    """What is annotated at a setting, at the parts of a union too."""
    parts = getattr(setting.annotation, "__args__", ())
    return (*setting.metadata, *(item for part in parts for item in getattr(part, "__metadata__", ())))
