"""How settings are shown in a sentence: values without secrets, keys as TOML writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic.fields import FieldInfo

__all__ = [
    "ABOUT_THE_ENDPOINT",
    "ABOUT_THE_MODEL",
    "OFFLINE",
    "Body",
    "CompactionSettings",
    "EditorSettings",
    "Expected",
    "Headers",
    "Key",
    "LimitSettings",
    "LogSettings",
    "McpServerSettings",
    "ModelSettings",
    "NamedModel",
    "PermissionSettings",
    "Price",
    "ProviderSettings",
    "Rules",
    "Seconds",
    "Section",
    "SettingValue",
    "Switch",
    "Thought",
    "Tokens",
    "Url",
    "Window",
    "all_metadata",
    "expanded",
    "fault_at",
    "shown",
    "shown_key",
]

_SECRET = frozenset({"api_key", "headers", "extra_body"})
_URLS = frozenset({"base_url", "proxy"})
_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def shown(name: str, value: object) -> str:
    """The value of a setting called `name` (its last part), as a sentence may show it."""
    if name in _SECRET:
        return "something else (not shown: it may be secret)"
    if name in _URLS and isinstance(value, str) and ("@" in value or "?" in value):
        return "one that may hold a secret (not shown)"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:119] + "…"


def shown_key(kind: str, name: str) -> str:
    """`kind.name`, quoted where TOML needs it."""
    return f"{kind}.{name if _BARE.match(name) else json.dumps(name, ensure_ascii=False)}"


# FROM settings.fields: What single settings may be: their types, their bounds, and how an error sentence about each
# ends.
#
# Strategy: annotated types shared by the tables of `config.toml`; a validator that refuses says nothing itself, since
# its
# value may be secret.


# No postponed annotations here: evaluating them again would double what this module costs at every start.


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
class Expected:
    """What a setting takes: the end of the sentence `expected ...`."""

    words: str


Switch = Annotated[bool, Expected("true or false")]
Tokens = Annotated[int | None, Field(ge=1), Expected("a whole number of tokens, such as 4000")]
Price = Annotated[
    float | None, Field(ge=0, allow_inf_nan=False), Expected("US dollars per million tokens, such as 2.5")
]
Window = Annotated[int | None, Field(ge=2000), Expected("a whole number of tokens, such as 128000")]
Url = Annotated[
    str,
    AfterValidator(_plain_url),
    Expected("an http or https URL without user name and query, such as http://localhost:11434/v1"),
]
Key = Annotated[
    Annotated[SecretStr, AfterValidator(_sendable)] | None, Expected("the key alone, in plain ASCII without spaces")
]
Headers = Annotated[Mapping[str, str], Expected('a table of texts, such as { "X-Title" = "crow" }')]
Body = Annotated[Mapping[str, Any], Expected("a table, such as { temperature = 0.2 }")]
Thought = Annotated[Literal["off", "low", "medium", "high"] | None, Expected('"off", "low", "medium" or "high"')]
Rule = Annotated[str, Field(pattern=r"^[A-Za-z0-9_*?-]{1,64}(\(.+\))?$")]
Rules = Annotated[
    tuple[Rule, ...],
    Field(strict=False),
    Expected(
        'a list of rules, each a tool or a tool and an argument, such as ["shell(git status)", "edit_file(docs/**)"]'
    ),
]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("a number of seconds above 0, such as 30")]


@dataclass(frozen=True, slots=True)
class SettingValue:
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


# FROM settings.endpoints: The named tables of `config.toml`: `[providers.NAME]`, an endpoint, and `[models.NAME]`, a
# model at one.
#
# Strategy: everything may be left out that a preset of that name says; what stands in a model's table is stronger
# than
# what its provider's says. Knows neither files nor variables.


# No postponed annotations here: evaluating them again would double what this module costs at every start.


Wait = Annotated[float | None, Field(gt=0, allow_inf_nan=False), Expected("a number of seconds above 0, such as 30")]
Names = Annotated[tuple[str, ...], Field(strict=False), Expected('a list of model names, such as ["small", "large"]')]
Command = Annotated[
    Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
    Expected('a command as a list, such as ["pass", "show", "openrouter"]'),
]


class ProviderSettings(Section):
    """An endpoint, by a name of the user's choice."""

    base_url: Url | None = Field(
        default=None, description="The endpoint, without `/chat/completions`; unset: that of the preset of this name."
    )
    api_key: Key = Field(default=None, description="The endpoint's key; better left to the environment or a command.")
    api_key_env: Annotated[
        str | None, Field(min_length=1), Expected('the name of a variable, such as "MY_API_KEY"')
    ] = Field(default=None, description="The environment variable that holds the key; unset: that of the preset.")
    api_key_command: Command = Field(
        default=None, description="A command that prints the key; run when the first request needs it."
    )
    headers: Headers = Field(
        default_factory=dict, repr=False, description="Further HTTP headers; their values are kept as secrets."
    )
    extra_body: Body = Field(
        default_factory=dict, description="Further members of every request, in place of crow's own."
    )
    models: Names = Field(default=(), description="Models of this endpoint, offered for choice in the editor.")
    connect_timeout_s: Wait = Field(default=None, description="Seconds until there is a connection; unset: 15.")
    first_byte_timeout_s: Wait = Field(default=None, description="As in [limits], for this endpoint.")
    idle_timeout_s: Wait = Field(default=None, description="As in [limits], for this endpoint.")
    proxy: Url | None = Field(default=None, repr=False, description="The HTTP proxy to go through.")
    ca_file: Annotated[str | None, Field(min_length=1), Expected("the path of a PEM file")] = Field(
        default=None, description="Certificates of further authorities, such as a company's own."
    )

    def secrets(self) -> tuple[str, ...]:
        """What must appear in no log, error or export."""
        key = () if self.api_key is None else (self.api_key.get_secret_value(),)
        return (*key, *self.headers.values())


class NamedModel(Section):
    """A model under a name of the user's choice, which may be NAME or PROVIDER/NAME."""

    provider: Annotated[str | None, Field(min_length=1), Expected("the name of a [providers.NAME]")] = Field(
        default=None, description="Where it is; unset: what stands before the slash of its name, else [model]."
    )
    name: Annotated[str | None, Field(min_length=1), Expected('a model name, such as "gpt-5.2"')] = Field(
        default=None, description="What its endpoint calls it; unset: the table's own name, without the provider."
    )
    context_window: Window = Field(default=None, description="Size of the context window in tokens.")
    max_output_tokens: Tokens = Field(default=None, description="Limit of one answer in tokens.")
    thought_level: Thought = Field(default=None, description="How much the model thinks before it answers.")
    takes_images: Switch = Field(default=True, description="Whether the model can see images.")
    input_price: Price = Field(default=None, description="US dollars per million input tokens.")
    cached_price: Price = Field(default=None, description="US dollars per million cached input tokens.")
    output_price: Price = Field(default=None, description="US dollars per million output tokens.")
    extra_body: Body = Field(default_factory=dict, description="Further members of every request.")


# FROM settings.servers: MCP servers as `config.toml` describes them.
#
# Strategy: one table per server; `${NAME}` in its texts stands for an environment variable, so that no secret need be
# in
# the file. A variable that is not set is that server's problem, told when it should start, and nobody else's.


VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

Texts = Annotated[tuple[str, ...], Field(strict=False), Expected('a list of texts, such as ["--read-only"]')]
Table = Annotated[Mapping[str, str], Expected('a table of texts, such as { TOKEN = "${MY_TOKEN}" }')]
Globs = Annotated[tuple[str, ...], Field(strict=False), Expected('a list of tool names or globs, such as ["get_*"]')]
MaybeSeconds = Annotated[
    float | None, Field(gt=0, allow_inf_nan=False), Expected("a number of seconds above 0, such as 30")
]


class McpServerSettings(Section):
    """An MCP server: a command to start, or a URL to call."""

    command: Annotated[str | None, Field(min_length=1), Expected('a command, such as "npx"')] = Field(
        default=None, description="The program to start; with args and env."
    )
    args: Texts = Field(default=(), repr=False, description="Its arguments.")
    env: Table = Field(default_factory=dict, repr=False, description="Variables added to its small environment.")
    url: Annotated[str | None, Field(pattern=r"^(https?://|\$\{)"), Expected("an http or https URL")] = Field(
        default=None, description="Where the server answers, instead of a command."
    )
    headers: Table = Field(default_factory=dict, repr=False, description="HTTP headers for it.")
    transport: Annotated[Literal["http", "sse"], Expected('"http" or "sse"')] = Field(
        default="http", description="How it is called: streamable HTTP, or the older SSE."
    )
    allow_tools: Globs = Field(default=(), description="The only tools of it that are offered; empty: all.")
    deny_tools: Globs = Field(default=(), description="Tools of it that are not offered.")
    read_only: Annotated[
        bool | Annotated[tuple[str, ...], Field(strict=False)],
        Expected('true, false or a list of tool names, such as ["get_*"]'),
    ] = Field(default=False, description="Which of its tools change nothing, and may be asked for in plan mode.")
    start_timeout_s: MaybeSeconds = Field(default=None, description="Seconds that it may take to start.")
    call_timeout_s: MaybeSeconds = Field(default=None, description="Seconds that a call may take.")
    enabled: Annotated[bool, Expected("true or false")] = Field(default=True, description="Whether it is used.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError
        return self

    def secrets(self) -> tuple[str, ...]:
        """What must appear in no log, error or export."""
        return (*self.env.values(), *self.headers.values())

    def shown(self) -> Mapping[str, object]:
        """What is set, as a person may see it: what may be a secret is a `SecretStr`."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        hidden = {
            name: {key: SecretStr(text) for key, text in given.get(name, {}).items()} for name in ("env", "headers")
        }
        args = {"args": tuple(map(SecretStr, self.args))} if self.args else {}
        return {**given, **{name: table for name, table in hidden.items() if table}, **args}


def expanded(server: McpServerSettings, env: Mapping[str, str]) -> tuple[McpServerSettings, str]:
    """The server with its variables replaced, and what is wrong with that: the variables that are not set, or "" """
    texts = (server.command or "", *server.args, server.url or "", *server.env.values(), *server.headers.values())
    missing = dict.fromkeys(name for text in texts for name in VARIABLE.findall(text) if name not in env)
    if missing:
        one = len(missing) == 1
        names = ", ".join(missing)
        return server, f"environment variable{'' if one else 's'} {names} {'is' if one else 'are'} not set"

    def replaced(text: str) -> str:
        return VARIABLE.sub(lambda match: env[match[1]], text)

    changes = {
        "command": None if server.command is None else replaced(server.command),
        "args": tuple(map(replaced, server.args)),
        "url": None if server.url is None else replaced(server.url),
        "env": {name: replaced(text) for name, text in server.env.items()},
        "headers": {name: replaced(text) for name, text in server.headers.items()},
    }
    return server.model_copy(update=changes), ""


def fault_at(location: tuple[int | str, ...]) -> str:
    """What is wrong at a place in `mcp_servers`, in words; the values are not shown, they may be secret."""
    place = ".".join(map(str, location[:3]))
    if len(location) < 3:
        return f"{place} is no table of a server; expected command or url, one of both"
    field = McpServerSettings.model_fields.get(str(location[2]))
    if field is None:
        return f"there is no setting {place}; there are {', '.join(McpServerSettings.model_fields)}"
    expected = next(item.words for item in field.metadata if isinstance(item, Expected))
    return f"{place} cannot be used; expected {expected}"


# FROM settings.values: Everything that can be set, with its bounds, its default and its meaning.
#
# Strategy: one frozen model per table of `config.toml`; each field says in `Expected` how an error sentence about it
# ends,
# and in its description what it does (`schemas/config.schema.json` is made from both the types and these). Knows
# nothing of files, flags and variables: `gather` does.


# No postponed annotations here: evaluating them again would double what this module costs at every start.


OFFLINE = "offline"
"""The model name that stands for the built-in model, which needs no endpoint."""

ABOUT_THE_ENDPOINT = ("api_key", "api_key_env", "headers")
"""Settings of `[model]` that mean nothing at another base URL."""

ABOUT_THE_MODEL = (
    "context_window",
    "max_output_tokens",
    "takes_images",
    "input_price",
    "cached_price",
    "output_price",
    "thought_level",
    "extra_body",
)
"""Settings of `[model]` that mean nothing for a model of another name."""


class ModelSettings(Section):
    """The model and the endpoint that serves it."""

    name: Annotated[str | None, Field(min_length=1), Expected('a model name, such as "gpt-5.2", or "offline"')] = Field(
        default=None,
        description='The model, as its endpoint calls it; "offline" is the built-in one. Environment: CROW_MODEL.',
    )
    base_url: Url = Field(
        default="https://api.openai.com/v1",
        description="The endpoint, without `/chat/completions`. Environment: OPENAI_BASE_URL.",
    )
    api_key: Key = Field(
        default=None, description="The endpoint's key; better left to the environment: see api_key_env."
    )
    api_key_env: Annotated[
        str, Field(min_length=1), Expected('the name of a variable, such as "OPENROUTER_API_KEY"')
    ] = Field(default="OPENAI_API_KEY", description="The environment variable that holds the key.")
    context_window: Window = Field(
        default=None,
        description="Size of the context window in tokens; unset: as the endpoint tells, or as learned from it.",
    )
    max_output_tokens: Tokens = Field(
        default=None,
        description="Limit of one answer in tokens; unset: as the endpoint has it. At most a quarter of the window.",
    )
    takes_images: Switch = Field(default=True, description="Whether the model can see images.")
    input_price: Price = Field(
        default=None, description="US dollars per million input tokens, to show what sessions cost."
    )
    cached_price: Price = Field(
        default=None, description="US dollars per million input tokens that the provider had cached."
    )
    output_price: Price = Field(default=None, description="US dollars per million output tokens.")
    thought_level: Thought = Field(
        default=None, description="How much the model thinks before it answers; unset: as the endpoint has it."
    )
    extra_body: Body = Field(
        default_factory=dict, description="Further members of every request, in place of crow's own."
    )
    headers: Headers = Field(
        default_factory=dict,
        repr=False,
        description="Further HTTP headers for the endpoint; their values are kept as secrets.",
    )

    def secrets(self) -> tuple[str, ...]:
        """What must appear in no log, error or export."""
        key = () if self.api_key is None else (self.api_key.get_secret_value(),)
        return (*key, *self.headers.values())

    def named(self, name: str) -> Self:
        """The same endpoint with another model: what was set for this model alone (sizes, prices) is unset."""
        if name == self.name:
            return self
        unset = {
            field: type(self).model_fields[field].get_default(call_default_factory=True) for field in ABOUT_THE_MODEL
        }
        return self.model_copy(update=unset | {"name": name})


class CompactionSettings(Section):
    """When and how a long conversation is made shorter."""

    auto: Switch = Field(
        default=True, description="Whether crow compacts by itself; false means never, but on `/compact`."
    )
    threshold: Annotated[
        float, Field(ge=0.1, le=0.95), Expected("a part of the window from 0.1 to 0.95, such as 0.85")
    ] = Field(default=0.85, description="The part of the context window at which compaction starts.")
    keep_tokens: Annotated[int, Field(ge=0), Expected("a whole number of tokens, such as 20000")] = Field(
        default=20_000, description="How many of the newest tokens stay as they are, at most."
    )
    target: Annotated[float, Field(ge=0.1, le=0.9), Expected("a part of the room from 0.1 to 0.9, such as 0.5")] = (
        Field(
            default=0.5,
            description="The part of the room (the threshold less tools and system message) that compaction aims at.",
        )
    )
    compact_model: Annotated[
        str | None, Field(min_length=1), Expected("the name of a model of the same endpoint, such as a smaller one")
    ] = Field(
        default=None,
        description="The model that writes a summary when the session's own did not; unset: the session's own again.",
    )
    prompt_file: Annotated[str | None, Field(min_length=1), Expected("the path of a readable UTF-8 text file")] = Field(
        default=None,
        description=(
            "A file with what the model is asked for a summary, instead of crow's own words; `{words}` in it becomes "
            "the limit in words. A relative path is taken from the directory of config.toml."
        ),
    )


class PermissionSettings(Section):
    """What runs without asking."""

    mode: Annotated[
        Literal["ask", "accept-edits", "plan", "auto"], Expected('"ask", "accept-edits", "plan" or "auto"')
    ] = Field(default="ask", description="The mode in which a session starts.")
    allow: Rules = Field(
        default=(), description='What runs unasked: a tool, or one with an argument, such as "shell(git status)".'
    )
    deny: Rules = Field(default=(), description="What never runs, in any mode; stronger than every allow.")
    fetch_private: Switch = Field(
        default=False, description="Whether fetch may ask private addresses, such as those of this machine."
    )


class LimitSettings(Section):
    """Bounds on what could go on for ever."""

    steps_per_turn: Annotated[int, Field(ge=1), Expected("a whole number above 0, such as 500")] = Field(
        default=500, description="Model answers in one turn."
    )
    mcp_start_timeout_s: Seconds = Field(default=10.0, description="Seconds that an MCP server may take to start.")
    mcp_call_timeout_s: Seconds = Field(default=600.0, description="Seconds that a call of an MCP tool may take.")
    offered_tools: Annotated[int, Field(ge=0), Expected("a whole number, such as 100")] = Field(
        default=100, description="Tools of MCP servers offered one by one; of more, the rest is found by find_tools."
    )
    first_byte_timeout_s: Seconds = Field(default=300.0, description="Seconds until an answer begins.")
    idle_timeout_s: Seconds = Field(default=120.0, description="Seconds of silence within an answer.")


class EditorSettings(Section):
    """What is left to the editor."""

    terminals: Switch = Field(
        default=False, description="Whether commands run in the editor's terminals, where it has any."
    )
    answer_timeout_s: Seconds = Field(
        default=30.0, description="Seconds that the editor may take for an answer about a file or a terminal."
    )
    user_timeout_s: Seconds = Field(
        default=86_400.0, description="Seconds that a question to the user stands: a permission, a form, a link."
    )


class LogSettings(Section):
    """The log file."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Expected('"debug", "info", "warning" or "error"')
    ] = Field(default="warning", description="The least that is logged. Environment: CROW_LOG.")


class Settings(Section):
    """Everything that can be set in crow's config.toml."""

    models: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | Mapping[str, NamedModel],
        Expected('a list of model names, such as ["small", "large"], or tables [models.NAME]'),
    ] = Field(
        default=(),
        description="Further models, offered for choice in the editor: names, or tables that say more of each.",
    )
    providers: Annotated[Mapping[str, ProviderSettings], Expected("tables: [providers.NAME]")] = Field(
        default_factory=dict, description="Further endpoints: a model there is called NAME/MODEL."
    )
    model: ModelSettings = Field(default_factory=ModelSettings)
    compaction: CompactionSettings = Field(default_factory=CompactionSettings)
    permissions: PermissionSettings = Field(default_factory=PermissionSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    editor: EditorSettings = Field(default_factory=EditorSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    mcp_servers: Annotated[
        Mapping[Annotated[str, Field(min_length=1, max_length=64)], McpServerSettings],
        Expected("a table for each server: [mcp_servers.NAME] with command or url"),
    ] = Field(default_factory=dict, description="MCP servers of every session, by name.")

    def secrets(self) -> tuple[str, ...]:
        """What must appear in no log, error or export."""
        providers = (secret for each in self.providers.values() for secret in each.secrets())
        servers = (secret for each in self.mcp_servers.values() for secret in each.secrets())
        return (*self.model.secrets(), *providers, *servers)
