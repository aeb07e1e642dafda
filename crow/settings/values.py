"""Every setting: its type, bounds, default and meaning.

Each field says in `Expected` how an error about it ends, and in its description what it does;
`schemas/config.schema.json` is generated from both. No postponed annotations here: pydantic would evaluate them a
second time at every start.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic.fields import FieldInfo

OFFLINE = "offline"
"""The name of the built-in model, which needs no endpoint."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Ends the sentence `... is VALUE; expected ...`."""

    words: str


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
        raise ValueError  # without words: the value may be secret
    return url.rstrip("/")


def _ascii_key(key: SecretStr) -> SecretStr:
    if not all("!" <= character <= "~" for character in key.get_secret_value()):
        raise ValueError
    return key


Switch = Annotated[bool, Expected("true or false")]
Tokens = Annotated[int, Field(ge=1), Expected("a whole number of tokens, such as 4000")]
Window = Annotated[int, Field(ge=2000), Expected("a whole number of tokens, such as 128000")]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False), Expected("US dollars per million tokens, such as 2.5")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("a number of seconds above 0, such as 30")]
Url = Annotated[
    str,
    AfterValidator(_plain_url),
    Expected("an http or https URL without user name and query, such as http://localhost:11434/v1"),
]
Key = Annotated[SecretStr, AfterValidator(_ascii_key), Expected("the key alone, in plain ASCII without spaces")]
Variable = Annotated[str, Field(min_length=1), Expected('the name of a variable, such as "OPENROUTER_API_KEY"')]
Texts = Annotated[Mapping[str, str], Expected('a table of texts, such as { "X-Title" = "crow" }')]
Body = Annotated[Mapping[str, Any], Expected("a table, such as { temperature = 0.2 }")]
Thought = Annotated[Literal["off", "low", "medium", "high"], Expected('"off", "low", "medium" or "high"')]
ModelName = Annotated[str, Field(min_length=1), Expected('a model name, such as "gpt-5.2", or "offline"')]
ToolNames = Annotated[
    tuple[str, ...], Field(strict=False), Expected('a list of tool names or globs, such as ["get_*"]')
]
Rules = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_*?-]{1,64}(\(.+\))?$")], ...],
    Field(strict=False),
    Expected(
        'a list of rules, each a tool or a tool and an argument, such as ["shell(git status)", "edit_file(docs/**)"]'
    ),
]


class Section(BaseModel):
    """A table of `config.toml`. Strict: a number is not accepted for a text, nor a text for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in a log, an error or an export."""
        key = getattr(self, "api_key", None)
        texts = (*getattr(self, "headers", {}).values(), *getattr(self, "env", {}).values())
        return texts if key is None else (key.get_secret_value(), *texts)


class ModelOptions(Section):
    """What can be set about one model."""

    name: ModelName | None = Field(default=None, description="The model's name at its endpoint.")
    context_window: Window | None = Field(
        default=None,
        description="Size of the context window in tokens; unset: what the endpoint reports, or what crow learned.",
    )
    max_output_tokens: Tokens | None = Field(
        default=None,
        description="Limit of one answer in tokens, at most a quarter of the window; unset: the endpoint's own.",
    )
    takes_images: Switch = Field(default=True, description="Whether the model accepts images.")
    input_price: Price | None = Field(
        default=None, description="US dollars per million input tokens; used to show the cost of sessions."
    )
    cached_price: Price | None = Field(default=None, description="US dollars per million cached input tokens.")
    output_price: Price | None = Field(default=None, description="US dollars per million output tokens.")
    thought_level: Thought | None = Field(
        default=None, description="How much the model thinks before it answers; unset: the endpoint's default."
    )
    extra_body: Body = Field(
        default_factory=dict, repr=False, description="Extra members of every request; they replace crow's own."
    )


class ModelSettings(ModelOptions):
    """The default model and its endpoint."""

    name: ModelName | None = Field(
        default=None,
        description='The model\'s name at its endpoint; "offline" is the built-in model. Environment: CROW_MODEL.',
    )
    base_url: Url = Field(
        default="https://api.openai.com/v1",
        description="URL of the endpoint, without `/chat/completions`. Environment: OPENAI_BASE_URL.",
    )
    api_key: Key | None = Field(
        default=None, description="The endpoint's key. Prefer an environment variable: see api_key_env."
    )
    api_key_env: Variable = Field(
        default="OPENAI_API_KEY", description="Name of the environment variable that holds the key."
    )
    headers: Texts = Field(
        default_factory=dict,
        repr=False,
        description="Extra HTTP headers for the endpoint; their values are treated as secrets.",
    )

    def with_name(self, name: str) -> Self:
        """The same endpoint with another model. Options of the configured model are unset."""
        if name == self.name:
            return self
        fields = ModelOptions.model_fields.items()
        unset = {key: field.get_default(call_default_factory=True) for key, field in fields}
        return self.model_copy(update=unset | {"name": name})


class ProviderSettings(Section):
    """A further endpoint, under a name of the user's choice."""

    base_url: Url | None = Field(
        default=None,
        description="URL of the endpoint, without `/chat/completions`; unset: that of the preset with this name.",
    )
    api_key: Key | None = Field(default=None, description="The endpoint's key. Prefer api_key_env or api_key_command.")
    api_key_env: Variable | None = Field(
        default=None, description="Name of the environment variable that holds the key; unset: that of the preset."
    )
    api_key_command: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
        Expected('a command as a list, such as ["pass", "show", "openrouter"]'),
    ] = Field(default=None, description="A command that prints the key; it runs before the first request.")
    headers: Texts = Field(
        default_factory=dict, repr=False, description="Extra HTTP headers; their values are treated as secrets."
    )
    extra_body: Body = Field(
        default_factory=dict, repr=False, description="Extra members of every request; they replace crow's own."
    )
    models: Annotated[
        tuple[str, ...], Field(strict=False), Expected('a list of model names, such as ["small", "large"]')
    ] = Field(default=(), description="Models of this endpoint to offer in the editor.")
    connect_timeout_s: Seconds | None = Field(default=None, description="Seconds to wait for a connection; unset: 15.")
    first_byte_timeout_s: Seconds | None = Field(default=None, description="As in [limits], for this endpoint.")
    idle_timeout_s: Seconds | None = Field(default=None, description="As in [limits], for this endpoint.")
    proxy: Url | None = Field(default=None, repr=False, description="The HTTP proxy to use.")
    ca_file: Annotated[str, Field(min_length=1), Expected("the path of a PEM file")] | None = Field(
        default=None, description="A file of further certificate authorities, such as a company's own."
    )


class NamedModel(ModelOptions):
    """A model under a name of the user's choice: NAME, or PROVIDER/NAME."""

    provider: Annotated[str, Field(min_length=1), Expected("the name of a [providers.NAME]")] | None = Field(
        default=None,
        description="The provider that serves it; unset: the part of its name before the slash, else [model].",
    )
    name: ModelName | None = Field(
        default=None,
        description="The model's name at its endpoint; unset: the table's name without the provider.",
    )


class McpServerSettings(Section):
    """An MCP server: a command to start or a URL to call. `${NAME}` stands for an environment variable."""

    command: Annotated[str, Field(min_length=1), Expected('a command, such as "npx"')] | None = Field(
        default=None, description="The program to start, with args and env."
    )
    args: Annotated[tuple[str, ...], Field(strict=False), Expected('a list of texts, such as ["--read-only"]')] = Field(
        default=(), repr=False, description="The program's arguments."
    )
    env: Texts = Field(
        default_factory=dict, repr=False, description="Environment variables added to a minimal environment."
    )
    url: Annotated[str, Field(pattern=r"^(https?://|\$\{)"), Expected("an http or https URL")] | None = Field(
        default=None, description="The server's URL, instead of a command."
    )
    headers: Texts = Field(default_factory=dict, repr=False, description="HTTP headers to send to the URL.")
    transport: Annotated[Literal["http", "sse"], Expected('"http" or "sse"')] = Field(
        default="http", description="How to call the URL: streamable HTTP, or the older SSE."
    )
    allow_tools: ToolNames = Field(default=(), description="The only tools to offer; empty: all.")
    deny_tools: ToolNames = Field(default=(), description="Tools not to offer.")
    read_only: Annotated[
        bool | Annotated[tuple[str, ...], Field(strict=False)],
        Expected('true, false or a list of tool names, such as ["get_*"]'),
    ] = Field(default=False, description="Which of its tools change nothing and may be used in plan mode.")
    start_timeout_s: Seconds | None = Field(default=None, description="Seconds the server may take to start.")
    call_timeout_s: Seconds | None = Field(default=None, description="Seconds a call may take.")
    enabled: Switch = Field(default=True, description="Whether the server is used.")

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError
        return self

    def masked(self) -> dict[str, object]:
        """The values that were set, for printing; those that may be secret are `SecretStr`."""
        values = {key: value for key, value in self if key in self.model_fields_set}
        for key in {"env", "headers"} & values.keys():
            values[key] = {name: SecretStr(text) for name, text in values[key].items()}
        if "args" in values:
            values["args"] = tuple(map(SecretStr, self.args))
        return values


class CompactionSettings(Section):
    """When and how a long conversation is compacted."""

    auto: Switch = Field(
        default=True, description="Whether crow compacts when the context is full; `/compact` always works."
    )
    threshold: Annotated[
        float, Field(ge=0.1, le=0.95), Expected("a part of the window from 0.1 to 0.95, such as 0.85")
    ] = Field(default=0.85, description="The part of the context window at which compaction starts.")
    keep_tokens: Annotated[int, Field(ge=0), Expected("a whole number of tokens, such as 20000")] = Field(
        default=20_000, description="How many of the newest tokens are kept unchanged, at most."
    )
    target: Annotated[float, Field(ge=0.1, le=0.9), Expected("a part of the room from 0.1 to 0.9, such as 0.5")] = (
        Field(
            default=0.5,
            description="How full to leave the room: the threshold minus the system message and the tools.",
        )
    )
    compact_model: (
        Annotated[str, Field(min_length=1), Expected("the name of a model of the same endpoint, such as a smaller one")]
        | None
    ) = Field(
        default=None,
        description="The model that writes the summary if the session's model fails; unset: the session's model again.",
    )
    prompt_file: Annotated[str, Field(min_length=1), Expected("the path of a readable UTF-8 text file")] | None = Field(
        default=None,
        description=(
            "A file with the prompt for summaries, used instead of crow's own; `{words}` in it becomes the word limit. "
            "A relative path starts at the directory of config.toml."
        ),
    )


class PermissionSettings(Section):
    """What runs without asking."""

    mode: Annotated[
        Literal["ask", "accept-edits", "plan", "auto"], Expected('"ask", "accept-edits", "plan" or "auto"')
    ] = Field(default="ask", description="The mode in which a session starts.")
    allow: Rules = Field(
        default=(), description='What runs without asking: a tool, or a tool and an argument: "shell(git status)".'
    )
    deny: Rules = Field(default=(), description="What never runs, in any mode; deny wins over allow.")
    fetch_private: Switch = Field(
        default=False, description="Whether fetch may read private addresses, such as those of this machine."
    )


class LimitSettings(Section):
    """Limits on steps, tools and waiting."""

    steps_per_turn: Annotated[int, Field(ge=1), Expected("a whole number above 0, such as 500")] = Field(
        default=500, description="Model answers in one turn."
    )
    mcp_start_timeout_s: Seconds = Field(default=10.0, description="Seconds an MCP server may take to start.")
    mcp_call_timeout_s: Seconds = Field(default=600.0, description="Seconds a call of an MCP tool may take.")
    offered_tools: Annotated[int, Field(ge=0), Expected("a whole number, such as 100")] = Field(
        default=100, description="How many MCP tools are offered directly; the model finds the others by find_tools."
    )
    first_byte_timeout_s: Seconds = Field(default=300.0, description="Seconds until an answer must begin.")
    idle_timeout_s: Seconds = Field(default=120.0, description="Seconds of silence allowed within an answer.")


class EditorSettings(Section):
    """How crow uses the editor."""

    terminals: Switch = Field(
        default=False, description="Whether commands run in the editor's terminals, if it has any."
    )
    answer_timeout_s: Seconds = Field(
        default=30.0, description="Seconds the editor may take to answer about a file or a terminal."
    )
    user_timeout_s: Seconds = Field(
        default=86_400.0, description="Seconds a question to the user stays open: a permission, a form, a link."
    )


class LogSettings(Section):
    """The log file."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Expected('"debug", "info", "warning" or "error"')
    ] = Field(default="warning", description="The lowest level that is logged. Environment: CROW_LOG.")


class Settings(Section):
    """Everything that can be set in crow's config.toml."""

    models: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | Mapping[str, NamedModel],
        Expected('a list of model names, such as ["small", "large"], or tables [models.NAME]'),
    ] = Field(
        default=(),
        description="Further models to offer in the editor: names, or tables that say more of each.",
    )
    providers: Annotated[Mapping[str, ProviderSettings], Expected("tables: [providers.NAME]")] = Field(
        default_factory=dict, description="Further endpoints; their models are called NAME/MODEL."
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
        """Values that must not appear in a log, an error or an export."""
        tables = (self.model, *self.providers.values(), *self.mcp_servers.values())
        return tuple(secret for table in tables for secret in table.secrets())


def expand_variables(server: McpServerSettings, env: Mapping[str, str]) -> tuple[McpServerSettings, str]:
    """The server with its variables replaced, and "" or a sentence that names the variables that are not set."""
    texts = (server.command or "", *server.args, server.url or "", *server.env.values(), *server.headers.values())
    missing = dict.fromkeys(name for text in texts for name in _VARIABLE.findall(text) if name not in env)
    if missing:
        plural = len(missing) > 1
        return server, (
            f"environment variable{'s' if plural else ''} {', '.join(missing)} {'are' if plural else 'is'} not set"
        )

    def expand(text: str) -> str:
        return _VARIABLE.sub(lambda match: env[match[1]], text)

    changes = {
        "command": None if server.command is None else expand(server.command),
        "args": tuple(map(expand, server.args)),
        "url": None if server.url is None else expand(server.url),
        "env": {name: expand(text) for name, text in server.env.items()},
        "headers": {name: expand(text) for name, text in server.headers.items()},
    }
    return server.model_copy(update=changes), ""


def expectation(field: FieldInfo) -> str:
    """What a setting accepts, as the end of a sentence."""
    parts = getattr(field.annotation, "__args__", ())
    metadata = (*field.metadata, *(item for part in parts for item in getattr(part, "__metadata__", ())))
    return next(item.words for item in metadata if isinstance(item, Expected))


def show_value(key: str, value: object) -> str:
    """A value for an error message; `key` is the last part of the setting's name. Possible secrets are hidden."""
    is_url = key in {"base_url", "proxy"}
    if key in _SECRET_KEYS or (is_url and not (isinstance(value, str) and {"@", "?"}.isdisjoint(value))):
        return "<hidden: it may be a secret>"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:119] + "…"


def dotted_key(*parts: str) -> str:
    """`part.part`, quoted where TOML needs it."""
    return ".".join(part if _BARE_KEY.match(part) else json.dumps(part, ensure_ascii=False) for part in parts)


_SECRET_KEYS = frozenset({"api_key", "args", "command", "env", "extra_body", "headers", "url"})
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
