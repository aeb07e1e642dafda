"""Every setting: its type, bounds, default and meaning.

A field's `Expected` is the end of every error message about that field. The field's docstring says what the setting
does. `schemas/config.schema.json` is generated from both. This module does not postpone annotations: pydantic would
evaluate them a second time at every start.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic.fields import FieldInfo

OFFLINE = "offline"
"""The name of the built-in model, which needs no endpoint."""

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Matches a variable in the settings of an MCP server. The group is the variable's name."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a setting accepts: the last words of the error message `... is VALUE; expected ...`."""

    words: str


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
        raise ValueError  # no message, because the value may be secret
    return url.rstrip("/")


def _ascii_key(key: SecretStr) -> SecretStr:
    if not all("!" <= character <= "~" for character in key.get_secret_value()):
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
    Expected("an http or https URL without user name and query, such as http://localhost:11434/v1"),
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
ModelName = Annotated[NonEmpty, Expected('a model name, such as "gpt-5.2", or "offline"')]
ToolNames = Annotated[Strings, Expected('a list of tool names or globs, such as ["get_*"]')]
SmallModel = Annotated[NonEmpty, Expected('a model name, such as "gpt-5-mini" or "openrouter/mistral-small"')]
OtherModel = Annotated[NonEmpty, Expected("the name of another model that your settings name")]
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


class Section(BaseModel):
    """A table of `config.toml`. Types are strict: a string is not accepted as a number, nor a number as a string."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in a log, an error or an export."""
        key = getattr(self, "api_key", None)
        texts = (*getattr(self, "headers", {}).values(), *getattr(self, "env", {}).values())
        texts += (secret,) if (secret := getattr(self, "oauth_client_secret", None)) else ()
        return texts if key is None else (key.get_secret_value(), *texts)


class ModelOptions(Section):
    """Settings of one model."""

    name: ModelName | None = None
    """The model's name at its endpoint."""
    context_window: Window | None = None
    """Size of the context window in tokens; crow refuses longer requests. If unset, crow uses the size that the
    endpoint reports or that crow has learned, and leaves it to the endpoint to refuse longer requests."""
    max_output_tokens: Tokens | None = None
    """Limit of one answer in tokens, at most a quarter of the window. If unset, the endpoint's own limit."""
    takes_images: Switch = True
    """Whether the model accepts images."""
    input_price: Price | None = None
    """US dollars per million input tokens; used to show the cost of sessions."""
    cached_price: Price | None = None
    """US dollars per million cached input tokens."""
    cache_write_price: Price | None = None
    """US dollars per million input tokens that are written to the provider's cache."""
    output_price: Price | None = None
    """US dollars per million output tokens."""
    thought_level: Thought | None = None
    """How much the model thinks before it answers. If unset, the endpoint's default."""
    extra_body: Body = Field(default_factory=dict, repr=False)
    """Extra members of every request. They replace crow's own members of the same name."""
    fallback: OtherModel | None = None
    """The model that answers for the rest of a turn if this model's endpoint still fails after all retries."""


class ModelSettings(ModelOptions):
    """The default model and its endpoint."""

    name: ModelName | None = None
    """The model's name at its endpoint; "offline" is the built-in model. Environment: CROW_MODEL."""
    base_url: Url = "https://api.openai.com/v1"
    """URL of the endpoint, without `/chat/completions`. Environment: OPENAI_BASE_URL."""
    api_key: Key | None = None
    """The endpoint's key. Prefer an environment variable: see api_key_env."""
    api_key_env: Variable = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key."""
    headers: Texts = Field(default_factory=dict, repr=False)
    """Extra HTTP headers for the endpoint; their values are treated as secrets."""

    def with_name(self, name: str) -> Self:
        """Return a copy with the same endpoint but another model. Options of the configured model are reset to their
        defaults."""
        if name == self.name:
            return self
        fields = ModelOptions.model_fields.items()
        unset = {key: field.get_default(call_default_factory=True) for key, field in fields}
        return self.model_copy(update=unset | {"name": name})


class ProviderSettings(Section):
    """A further endpoint, under a name that the user chooses."""

    base_url: Url | None = None
    """URL of the endpoint, without `/chat/completions`. If unset, the URL of the preset that has the provider's
    name."""
    api_key: Key | None = None
    """The endpoint's key. Prefer api_key_env or api_key_command."""
    api_key_env: Variable | None = None
    """Name of the environment variable that holds the key. If unset, the preset's variable."""
    api_key_command: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
        Expected('a command as a list, such as ["pass", "show", "openrouter"]'),
    ] = None
    """A command that prints the key; it runs before the first request."""
    headers: Texts = Field(default_factory=dict, repr=False)
    """Extra HTTP headers; their values are treated as secrets."""
    extra_body: Body = Field(default_factory=dict, repr=False)
    """Extra members of every request. They replace crow's own members of the same name."""
    models: Annotated[Strings, Expected('a list of model names, such as ["small", "large"]')] = ()
    """Models of this endpoint to offer in the editor."""
    connect_timeout_s: Seconds | None = None
    """Seconds to wait for a connection; 15 if unset."""
    first_byte_timeout_s: Seconds | None = None
    """Overrides first_byte_timeout_s of [limits] for this endpoint."""
    idle_timeout_s: Seconds | None = None
    """Overrides idle_timeout_s of [limits] for this endpoint."""
    proxy: Url | None = Field(default=None, repr=False)
    """The HTTP proxy to use."""
    ca_file: Annotated[NonEmpty, Expected("the path of a PEM file")] | None = None
    """A file with additional certificate authorities, such as a company's own."""


class NamedModel(ModelOptions):
    """A model under a name that the user chooses: NAME, or PROVIDER/NAME."""

    provider: Annotated[NonEmpty, Expected("the NAME of a table [providers.NAME]")] | None = None
    """The provider that serves the model. If unset, the part of the table's name before the slash, otherwise the
    endpoint in [model]."""
    name: ModelName | None = None
    """The model's name at its endpoint. If unset, the table's name without the provider."""


class McpServerSettings(Section):
    """An MCP server: a command to start or a URL to call. `${NAME}` stands for an environment variable. In args and
    env, `${workspace}` stands for the session's working directory."""

    command: Annotated[NonEmpty, Expected('a command, such as "npx"')] | None = None
    """The program to start, with the arguments in args and the variables in env. It starts in a directory of its own,
    not in the workspace. A relative path is resolved against the directory of config.toml."""
    args: Annotated[Strings, Expected('a list of strings, such as ["--read-only"]')] = Field(default=(), repr=False)
    """The program's arguments."""
    env: Texts = Field(default_factory=dict, repr=False)
    """Environment variables for the server, in addition to a minimal set."""
    sandbox: Annotated[Literal["read", "write"], Expected('"read" or "write"')] | None = None
    """Confine the server in the same way as a shell command that has this access. If unset, the server is not
    confined."""
    url: Annotated[str, Field(pattern=r"^(https?://|\$\{)"), Expected("an http or https URL")] | None = None
    """The server's URL, instead of a command."""
    headers: Texts = Field(default_factory=dict, repr=False)
    """HTTP headers to send to the URL."""
    transport: Annotated[Literal["http", "sse"], Expected('"http" or "sse"')] = "http"
    """How to call the URL: streamable HTTP, or the older SSE."""
    allow_tools: ToolNames = ()
    """The only tools to offer. If empty, all tools are offered."""
    deny_tools: ToolNames = ()
    """Tools not to offer."""
    read_only: Annotated[bool | Strings, Expected('true, false or a list of tool names, such as ["get_*"]')] = False
    """Which of the server's tools change nothing and may be used in plan mode."""
    start_timeout_s: Seconds | None = None
    """Seconds the server may take to start."""
    call_timeout_s: Seconds | None = None
    """Seconds a call may take."""
    enabled: Switch = True
    """Whether the server is used."""
    oauth_account: Annotated[NonEmpty, Expected('a name, such as "work"')] | None = None
    """Distinguishes this login from others at the same URL."""
    oauth_client_id: Annotated[NonEmpty, Expected("the id of a client that you registered")] | None = None
    """The client that you registered at the authorization server. If unset, crow registers itself."""
    oauth_client_secret: (
        Annotated[NonEmpty, Expected("the secret of that client, or the name of a variable that holds it: ${NAME}")]
        | None
    ) = Field(default=None, repr=False)
    """The secret of the client in oauth_client_id. Needs oauth_issuer: no other authorization server gets the
    secret."""
    oauth_client_metadata_url: (
        Annotated[
            Annotated[str, Field(pattern=r"^https://[^/]+/.+")],
            Expected("the https URL of a client metadata document, such as https://example.com/crow.json"),
        ]
        | None
    ) = None
    """The client metadata document that stands for crow at authorization servers that accept such documents."""
    oauth_issuer: Url | None = None
    """The only authorization server to log in at. If unset, the one that the MCP server names."""
    oauth_redirect_port: (
        Annotated[int, Field(ge=1, le=65535), Expected("the number of a port, such as 8765")] | None
    ) = None
    """The port of this machine to which the browser returns after a login. If unset, any free port."""

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError
        return self

    def masked(self) -> dict[str, object]:
        """Return the values that were set, for printing. Values that may be secret are `SecretStr`."""
        values = {key: value for key, value in self if key in self.model_fields_set}
        for key in {"env", "headers"} & values.keys():
            values[key] = {name: SecretStr(text) for name, text in values[key].items()}
        if "oauth_client_secret" in values:
            values["oauth_client_secret"] = SecretStr(self.oauth_client_secret or "")
        if "args" in values:
            values["args"] = tuple(map(SecretStr, self.args))
        return values


class HookSettings(Section):
    """A command that takes part in the agent's loop: a table `[[hooks]]`."""

    event: (
        Annotated[
            Literal[
                "session_start",
                "before_prompt",
                "before_request",
                "before_tool",
                "after_tool",
                "before_compact",
                "after_compact",
                "turn_end",
            ],
            Expected(
                '"session_start", "before_prompt", "before_request", "before_tool", "after_tool", "before_compact", '
                '"after_compact" or "turn_end"'
            ),
        ]
        | None
    ) = None
    """When the command runs."""
    command: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
        Expected('a program and its arguments as a list, such as ["python3", "-I", "~/.config/crow/hooks/audit.py"]'),
    ] = Field(default=None, repr=False)
    """The program and its arguments. It runs in the workspace, unconfined. A leading `~/` stands for the home
    directory. If the program is a relative path, it is resolved against the directory of config.toml."""
    name: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$"),
            Expected('1 to 64 letters, digits and the characters . _ : -, such as "format"'),
        ]
        | None
    ) = None
    """The hook's name in messages. If unset, the program's name."""
    tools: ToolNames = ()
    """The hook runs only for calls of these tools. If empty, for calls of all tools."""
    does: Annotated[
        tuple[Literal["read", "write", "execute", "fetch", "external"], ...],
        Field(strict=False),
        Expected('a list of "read", "write", "execute", "fetch" and "external"'),
    ] = ()
    """The hook runs only for calls that may do one of these things, whatever the tool. If empty, for all calls."""
    paths: Annotated[Strings, Expected('a list of path globs, such as ["*.py", "src/**"]')] = ()
    """The hook runs only for calls that may touch one of these paths. If empty, for all calls."""
    workspaces: Annotated[Strings, Expected('a list of path globs, such as ["~/repos/**"]')] = ()
    """The hook runs only in sessions whose working directory matches one of these globs. If empty, in all sessions."""
    timeout_s: Seconds = 10.0
    """Time limit of the command in seconds. After that, crow ends the command and skips the hook."""
    enabled: Switch = True
    """Whether the hook runs."""

    def masked(self) -> dict[str, object]:
        """Return the values that were set, for printing. The arguments of the command are `SecretStr`."""
        values = {key: value for key, value in self if key in self.model_fields_set}
        program, *args = self.command or ("",)
        return values | {"command": (program, *map(SecretStr, args))}

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.event is None or self.command is None:
            raise ValueError
        return self


class CompactionSettings(Section):
    """When and how a long conversation is compacted."""

    auto: Switch = True
    """Whether crow compacts when the context is full; `/compact` always works."""
    threshold: Annotated[
        float, Field(ge=0.1, le=0.95), Expected("a fraction of the window from 0.1 to 0.95, such as 0.85")
    ] = 0.85
    """The fraction of the context window at which compaction starts."""
    keep_tokens: Annotated[int, Field(ge=0), Expected("a whole number of tokens, such as 20000")] = 20_000
    """At most this many tokens of the newest messages are kept unchanged."""
    target: Annotated[float, Field(ge=0.1, le=0.9), Expected("a fraction from 0.1 to 0.9, such as 0.5")] = 0.5
    """After a compaction, this fraction of the room for messages is still filled. The room is the threshold minus the
    size of the system message and the tools."""
    early: Annotated[
        Literal[False] | Annotated[float, Field(ge=0.1, le=1)],
        Expected("a fraction of the threshold from 0.1 to 1, such as 0.6, or false"),
    ] = 0.6
    """If an idle session fills more than this fraction of the threshold, crow writes the summary before the next prompt
    needs it. `false` turns this off. Local models never write summaries early."""
    compact_model: SmallModel | None = None
    """The model that is asked first for a summary. It gets a shortened transcript; the session's model is asked only if
    compact_model fails. If unset, the session's model writes summaries, with a request that its endpoint has mostly
    cached."""
    prompt_file: Annotated[NonEmpty, Expected("the path of a readable UTF-8 text file")] | None = None
    """A file with a prompt for summaries, which replaces crow's own. `{words}` in it is replaced by the word limit. A
    relative path is resolved against the directory of config.toml."""


class TitleSettings(Section):
    """How sessions get their titles."""

    model: SmallModel | None = None
    """The model that writes a session's title after the first turn. If unset, the title is the first line of the first
    prompt."""


class PermissionSettings(Section):
    """Which calls run without asking the user."""

    mode: StartMode = "ask"
    """The mode in which a session starts."""
    allow: Rules = ()
    """Calls that run without asking: a tool, or a tool and an argument, such as "shell(git status)"."""
    deny: Rules = ()
    """Calls that never run, in any mode; deny takes precedence over allow."""
    fetch_private: Switch = False
    """Whether fetch may read private addresses, such as those of this machine."""


class SandboxSettings(Section):
    """How the kernel confines commands."""

    enabled: Annotated[Literal["auto", "off", "required"], Expected('"auto", "off" or "required"')] = "auto"
    """Whether commands are confined. "auto" confines them where that is possible, "off" never does, and "required" also
    refuses to run a command that cannot be confined. Environment: CROW_SANDBOX."""
    network: Switch = False
    """Whether commands with write access can use the network."""
    readable: Annotated[Strings, Expected('a list of paths, such as ["~/datasets"]')] = ()
    """Additional directories that confined commands can read."""
    writable: Annotated[Strings, Expected('a list of paths, such as ["~/.cache/ccache"]')] = ()
    """Additional directories that commands with write access can write to."""


class LimitSettings(Section):
    """Limits on steps, cost, tools and waiting."""

    steps_per_turn: Annotated[int, Field(ge=1), Expected("a whole number above 0, such as 500")] = 500
    """The maximum number of answers that the model may give in one turn."""
    cost_per_turn: Usd | None = None
    """A turn stops before its next request if it has cost this many US dollars. Another prompt continues the work."""
    cost_per_session: Usd | None = None
    """A turn stops before its next request each time the session's cost has grown by this many US dollars. Another
    prompt continues the work."""
    mcp_start_timeout_s: Seconds = 10.0
    """Seconds an MCP server may take to start."""
    mcp_call_timeout_s: Seconds = 600.0
    """Seconds a call of an MCP tool may take."""
    offered_tools: Annotated[int, Field(ge=0), Expected("a whole number, such as 100")] = 100
    """How many MCP tools the model is offered directly; it finds the others with find_tools."""
    first_byte_timeout_s: Seconds = 300.0
    """Seconds until an answer must begin."""
    idle_timeout_s: Seconds = 120.0
    """Seconds of silence allowed within an answer."""


class EditorSettings(Section):
    """How crow uses the editor."""

    terminals: Switch = False
    """Whether commands run in the editor's terminals, if it has any."""
    answer_timeout_s: Seconds = 30.0
    """Seconds the editor may take to answer about a file or a terminal."""
    user_timeout_s: Seconds = 86_400.0
    """Seconds that a question to the user (a permission, a form or a link) stays open."""


class DatabaseSettings(Section):
    """Where sessions are stored."""

    url: DatabaseUrl | None = None
    """URL of a PostgreSQL database in which to store sessions; needs `crow-acp[postgres]`. If unset, sessions are in
    a file of this user. Environment: CROW_DATABASE_URL."""
    direct_url: DatabaseUrl | None = None
    """URL that leads to the server itself. Needed if `url` leads to a pooler in transaction mode, such as PgBouncer."""

    def secrets(self) -> tuple[str, ...]:
        """The URLs and the passwords in them."""
        urls = [url.get_secret_value() for url in (self.url, self.direct_url) if url is not None]
        return tuple(secret for url in urls for secret in (url, *database_passwords(url)))

    def shown(self) -> dict[str, object]:
        """The values for printing: the URLs without passwords."""
        return {key: None if url is None else without_passwords(url.get_secret_value()) for key, url in self}


class StoreSettings(Section):
    """How sessions are stored."""

    compress_after_days: Annotated[int, Field(ge=1), Expected("a whole number of days, such as 30")] | None = None
    """Compress tool outputs, images and file contents that are older than this many days; by default nothing is
    compressed."""


class LogSettings(Section):
    """The log file."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Expected('"debug", "info", "warning" or "error"')
    ] = "warning"
    """The lowest level that is logged. Environment: CROW_LOG."""


PRINCIPAL_PART = "{principal}"
"""What stands for a principal's name in `serve.roots`."""


def static_part(root: str) -> Path:
    """The part of an entry of `serve.roots` that is the same for all principals."""
    parts = Path(root).parts
    return Path(*parts[: parts.index(PRINCIPAL_PART)]) if PRINCIPAL_PART in parts else Path(root)


class ServeSettings(Section):
    """`crow serve`."""

    listen: Annotated[
        NonEmpty, Expected('HOST:PORT, such as "127.0.0.1:7431", or the absolute path of a Unix socket')
    ] = "127.0.0.1:7431"
    """Where the server listens. `crow serve --listen` takes precedence."""
    node: Annotated[NonEmpty, Expected('the name of this machine, such as "build-1"')] | None = None
    """The name of this machine among those that use the same PostgreSQL database; by default its host name. A session
    names the machine that last ran it."""
    tls_cert: Annotated[NonEmpty, Expected("the path of a PEM file with the certificate chain")] | None = None
    """The certificate for TLS. A relative path is resolved against the directory of config.toml."""
    tls_key: Annotated[NonEmpty, Expected("the path of a PEM file with the private key")] | None = None
    """The private key of the certificate."""
    hosts: Annotated[Strings, Expected('a list of host names, such as ["crow.example.org"]')] = ()
    """Names under which clients reach the server, besides localhost and addresses. Requests for other names are
    refused."""
    origins: Annotated[Strings, Expected('a list of origins, such as ["https://chat.example.org"]')] = ()
    """Web pages that may connect. Other pages are refused; programs that are no browsers send no origin."""
    operators: Annotated[Strings, Expected('a list of principals, such as ["prometheus"]')] = ()
    """Principals whose tokens may read /metrics, which counts the work of all. Without tokens, everybody may."""
    trusted_proxies: Annotated[Strings, Expected('a list of addresses, such as ["10.0.0.5"]')] = ()
    """Proxies whose X-Forwarded-For header tells the address of the client."""
    roots: Annotated[Strings, Expected('a list of absolute paths, such as ["/srv/crow/{principal}"]')] = ()
    """Directories below which the workspaces of principals must be, with links resolved. `{principal}` stands for the
    name of the principal. A server with tokens needs at least one."""
    client_servers: Switch = False
    """Whether principals may bring MCP servers of their own: programs that start on this machine unconfined, and URLs
    that it calls. Turn this on only for principals whom you would give a shell."""
    max_connections: Count = 1000
    """How many clients may be connected at once."""
    max_connections_each: Count = 100
    """How many of them may belong to one principal."""
    drain_timeout_s: Seconds = 60.0
    """Seconds that running turns get to finish after SIGTERM. Then they are cancelled and stored."""
    autostart: Switch = False
    """Whether `crow acp` uses the resident server of this user (`crow serve --user`), and starts it when none runs."""
    idle_timeout_s: Annotated[
        float, Field(ge=0, allow_inf_nan=False), Expected("a number of seconds, such as 3600; 0 for never")
    ] = 3600.0
    """After how many seconds without a client and without a running turn the resident server ends; 0 for never."""
    log_file: Annotated[NonEmpty, Expected("the path of a file")] | None = None
    """Where the server's log goes, one JSON object per line. If unset, to stderr."""


class Settings(Section):
    """Everything that can be set in crow's config.toml."""

    models: Annotated[
        Strings | Mapping[str, NamedModel],
        Expected('a list of model names, such as ["small", "large"], or tables [models.NAME]'),
    ] = ()
    """Further models to offer in the editor: a list of names, or tables with the settings of each model."""
    providers: Annotated[Mapping[str, ProviderSettings], Expected("tables: [providers.NAME]")] = Field(
        default_factory=dict
    )
    """Further endpoints; their models are called NAME/MODEL."""
    model: ModelSettings = Field(default_factory=ModelSettings)
    compaction: CompactionSettings = Field(default_factory=CompactionSettings)
    titles: TitleSettings = Field(default_factory=TitleSettings)
    permissions: PermissionSettings = Field(default_factory=PermissionSettings)
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    editor: EditorSettings = Field(default_factory=EditorSettings)
    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    serve: ServeSettings = Field(default_factory=ServeSettings)
    mcp_servers: Annotated[
        Mapping[Annotated[str, Field(min_length=1, max_length=64)], McpServerSettings],
        Expected("a table for each server: [mcp_servers.NAME] with command or url"),
    ] = Field(default_factory=dict)
    """MCP servers for every session, by name."""
    hooks: Annotated[
        tuple[HookSettings, ...], Field(strict=False), Expected("tables [[hooks]], each with event and command")
    ] = ()
    """Commands that take part in the agent's loop, in the order in which they run."""

    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in a log, an error or an export."""
        tables = (self.model, self.database, *self.providers.values(), *self.mcp_servers.values())
        return tuple(secret for table in tables for secret in table.secrets())


_PASSWORD = re.compile(r"(?<=://).*@|(?<=[?&])((?:ssl)?password)=[^&#]*", re.IGNORECASE | re.DOTALL)
"""Matches the user and password of a database URL, and the passwords among its options. A password may contain
characters that should have been escaped."""


def database_passwords(url: str) -> tuple[str, ...]:
    """Return the passwords in the URL of a database, as they are written there and as they are meant."""
    found = []
    for match in _PASSWORD.finditer(url):
        text = match[0].partition("=")[2] if match[1] else match[0][:-1].partition(":")[2]
        found += [text, unquote(text)]
    return tuple(dict.fromkeys(filter(None, found)))


def without_passwords(url: str) -> str:
    """Return the URL of a database with `…` in place of its passwords."""

    def mask(match: re.Match[str]) -> str:
        if match[1]:
            return f"{match[1]}=…"
        user, colon, _ = match[0][:-1].partition(":")
        return f"{user}{colon and ':…'}@"

    return _PASSWORD.sub(mask, url)


def expand_variables(
    server: McpServerSettings, env: Mapping[str, str], *, workspace: str
) -> tuple[McpServerSettings, str]:
    """Return the server with its variables replaced, and a sentence that names the variables that cannot be replaced
    (empty if there are none).

    `${workspace}` becomes `workspace` in args and env.
    """
    local = (*server.args, *server.env.values())
    client = (server.oauth_client_id or "", server.oauth_client_secret or "")
    others = (server.command or "", server.url or "", *server.headers.values(), *client)
    missing = dict.fromkeys(name for text in (*others, *local) for name in VARIABLE.findall(text) if name not in env)
    if "workspace" in missing:
        if any("${workspace}" in text for text in others):
            return server, "${workspace} can only be used in args and env"
        del missing["workspace"]
    if missing:
        plural = len(missing) > 1
        names = f"environment variable{'s' if plural else ''} {', '.join(missing)} {'are' if plural else 'is'} not set"
        is_meant = any(name.casefold().startswith("workspace") for name in missing)
        return server, names + ("; ${workspace} stands for the session's working directory" if is_meant else "")

    def expand(text: str, variables: Mapping[str, str] = env) -> str:
        return VARIABLE.sub(lambda match: variables[match[1]], text)

    with_workspace = {**env, "workspace": workspace}
    changes = {
        "command": None if server.command is None else expand(server.command),
        "args": tuple(expand(text, with_workspace) for text in server.args),
        "url": None if server.url is None else expand(server.url),
        "env": {name: expand(text, with_workspace) for name, text in server.env.items()},
        "headers": {name: expand(text) for name, text in server.headers.items()},
        "oauth_client_id": server.oauth_client_id and expand(server.oauth_client_id),
        "oauth_client_secret": server.oauth_client_secret and expand(server.oauth_client_secret),
    }
    return server.model_copy(update=changes), ""


def expectation(field: FieldInfo) -> str:
    """Return what a setting accepts, as the end of a sentence."""
    parts = getattr(field.annotation, "__args__", ())
    metadata = (*field.metadata, *(item for part in parts for item in getattr(part, "__metadata__", ())))
    return next(item.words for item in metadata if isinstance(item, Expected))
