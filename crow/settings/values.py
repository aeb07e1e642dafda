"""Every setting, with its type, bounds, default and meaning.

The docstring of a field says what the setting does. `Expected` is the end of each error message about the field.
`schemas/config.schema.json` is generated from both. This module does not import `annotations` from `__future__`. With
this import, pydantic would evaluate all annotations a second time at every start.
"""

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic.fields import FieldInfo

from crow.domain.secret_values import holds_secret, secrets_in
from crow.settings.credentials import CredentialSettings
from crow.settings.database_urls import database_passwords, without_passwords
from crow.settings.types import (
    Body,
    Count,
    DatabaseUrl,
    EditTool,
    Expected,
    Key,
    ModelName,
    NonEmpty,
    OtherModel,
    Price,
    ProtectedName,
    RemovableName,
    Rules,
    Seconds,
    Section,
    SmallModel,
    StartMode,
    Strings,
    Switch,
    Texts,
    Thought,
    Threshold,
    Tokens,
    ToolNames,
    Url,
    Usd,
    Variable,
    Window,
    WindowPart,
    WireChoice,
)

OFFLINE = "offline"
"""The name of the built-in model, which needs no endpoint."""


class ModelOptions(Section):
    """Settings of one model."""

    name: ModelName | None = None
    """The model's name at its endpoint."""
    context_window: Window | None = None
    """The size of the context window in tokens. Crow does not send requests that are larger. If unset, crow uses the
    size that the endpoint reports or that crow has learned. Crow then also sends larger requests, which the endpoint
    may refuse."""
    max_output_tokens: Tokens | None = None
    """The maximum length of an answer in tokens. Crow lowers it to at most a quarter of the context window. If unset,
    the endpoint's own limit applies."""
    takes_images: Switch = True
    """Whether the model accepts images."""
    takes_files: Switch | None = None
    """Whether the model accepts PDF files. If unset, models of OpenAI, Azure, Anthropic and OpenRouter
    do, and so does Claude wherever crow speaks Anthropic's API."""
    input_price: Price | None = None
    """US dollars per million input tokens. Crow uses the prices to compute the cost of sessions."""
    cached_price: Price | None = None
    """US dollars per million cached input tokens."""
    cache_write_price: Price | None = None
    """US dollars per million input tokens that are written to the provider's cache."""
    output_price: Price | None = None
    """US dollars per million output tokens."""
    thought_level: Thought | None = None
    """How long the model thinks before it answers. If unset, the endpoint's default applies."""
    extra_body: Body = Field(default_factory=dict, repr=False)
    """Extra members of every request. They replace crow's own members of the same name."""
    edit_tool: EditTool | None = None
    """The tool with which the model edits files. If unset, OpenAI's models since gpt-4.1 get `apply_patch`, and all
    others `edit_file`."""
    wire: WireChoice | None = None
    """The API that crow speaks with this model: "chat" (OpenAI's Chat Completions), "responses" (OpenAI's Responses) or
    "messages" (Anthropic's Messages). "auto" lets crow choose: it knows the APIs of the presets, and tries the APIs
    with other endpoints. If unset, the provider's wire applies."""
    fallback: OtherModel | None = None
    """The model that answers for the rest of a turn if the endpoint of this model still fails after all retries."""


class ModelSettings(ModelOptions):
    """The default model and its endpoint."""

    name: ModelName | None = None
    """The model's name at its endpoint. "offline" is the built-in model. Environment: CROW_MODEL."""
    base_url: Url = "https://api.openai.com/v1"
    """The URL of the endpoint, without `/chat/completions`, `/responses` or `/messages`. Environment:
    OPENAI_BASE_URL."""
    api_key: Key | None = None
    """The endpoint's key. It is safer to put the key into an environment variable (see api_key_env)."""
    api_key_env: Variable = "OPENAI_API_KEY"
    """The name of the environment variable that holds the key."""
    headers: Texts = Field(default_factory=dict, repr=False)
    """Extra HTTP headers for the endpoint. Crow treats their values as secrets."""

    def with_name(self, name: str) -> Self:
        """Return a copy with the same endpoint and the model `name`. If this is another model, all its options have
        their defaults, because the configured options belong to the model of the original settings."""
        if name == self.name:
            return self
        fields = ModelOptions.model_fields.items()
        unset = {key: field.get_default(call_default_factory=True) for key, field in fields}
        return self.model_copy(update=unset | {"name": name})


class ProviderSettings(Section):
    """Another endpoint, under a name that the user chooses."""

    base_url: Url | None = None
    """The URL of the endpoint, without `/chat/completions`, `/responses` or `/messages`. If unset, crow's preset for
    this provider's name applies."""
    api_key: Key | None = None
    """The endpoint's key. It is safer to use api_key_env or api_key_command."""
    api_key_env: Variable | None = None
    """The name of the environment variable that holds the key. If unset, crow's preset for this provider's name
    applies."""
    api_key_command: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
        Expected('a command as a list, such as ["pass", "show", "openrouter"]'),
    ] = None
    """A command that prints the key. Crow runs it before the first request."""
    headers: Texts = Field(default_factory=dict, repr=False)
    """Extra HTTP headers. Crow treats their values as secrets."""
    extra_body: Body = Field(default_factory=dict, repr=False)
    """Extra members of every request. They replace crow's own members of the same name."""
    wire: WireChoice = "auto"
    """The API that crow speaks with this endpoint. See wire in [model]."""
    models: Annotated[Strings, Expected('a list of model names, such as ["small", "large"]')] = ()
    """The models of this endpoint that the editor offers."""
    connect_timeout_s: Seconds | None = None
    """The time limit for opening a connection, in seconds. If unset, it is 15."""
    first_byte_timeout_s: Seconds | None = None
    """Replaces limits.first_byte_timeout_s for this endpoint."""
    idle_timeout_s: Seconds | None = None
    """Replaces limits.idle_timeout_s for this endpoint."""
    proxy: Url | None = Field(default=None, repr=False)
    """The URL of the HTTP proxy to use."""
    ca_file: Annotated[NonEmpty, Expected("the path of a PEM file")] | None = None
    """A PEM file with more certificate authorities to trust, such as a company's own."""


class NamedModel(ModelOptions):
    """A model under a name that the user chooses. The name of its table is NAME or PROVIDER/NAME."""

    provider: Annotated[NonEmpty, Expected("the NAME of a table [providers.NAME]")] | None = None
    """The provider that serves the model. If unset, it is the PROVIDER in the table's name. If the table's name has no
    PROVIDER, the endpoint in [model] serves the model."""
    name: ModelName | None = None
    """The model's name at its endpoint. If unset, it is the NAME in the table's name."""


_PRIVATE_IN_URL = re.compile(r"(?<=://)[^/?#]*(?=@)|(?<=[?#]).+", re.DOTALL)
"""Matches the user name and password, and the query with the fragment."""


class McpServerSettings(Section):
    """An MCP server: a command to start or a URL to call. `${NAME}` stands for an environment variable. In args and
    env, `${workspace}` stands for the session's working directory."""

    command: Annotated[NonEmpty, Expected('a command, such as "npx"')] | None = None
    """The program to start, with the arguments in args and the environment variables in env. The program starts in a
    directory of its own, not in the workspace. The path of the program may be relative to the directory of
    config.toml."""
    args: Annotated[Strings, Expected('a list of strings, such as ["--read-only"]')] = Field(default=(), repr=False)
    """The program's arguments."""
    env: Texts = Field(default_factory=dict, repr=False)
    """Environment variables for the server. Apart from them, the server gets only a minimal set of variables."""
    sandbox: Annotated[Literal["read", "write"], Expected('"read" or "write"')] | None = None
    """The access that the server has in crow's sandbox. The sandbox is the same as for a shell command with "read" or
    "write" access. If unset, the server runs without a sandbox."""
    url: Annotated[str, Field(pattern=r"^(https?://|\$\{)"), Expected("an http or https URL")] | None = None
    """The URL of the server. A server has either a url or a command."""
    headers: Texts = Field(default_factory=dict, repr=False)
    """HTTP headers of all requests to the URL."""
    transport: Annotated[Literal["http", "sse"], Expected('"http" or "sse"')] = "http"
    """The transport for the URL. "http" is streamable HTTP, and "sse" is the older transport with SSE."""
    allow_tools: ToolNames = ()
    """The names of the tools that crow offers to the model. If empty, crow offers all tools of the server."""
    deny_tools: ToolNames = ()
    """The names of tools that crow does not offer to the model."""
    read_only: Annotated[bool | Strings, Expected('true, false or a list of tool names, such as ["get_*"]')] = False
    """The tools of this server that change nothing. They may be used in plan mode. `true` means all tools of the
    server."""
    start_timeout_s: Seconds | None = None
    """Replaces limits.mcp_start_timeout_s for this server."""
    call_timeout_s: Seconds | None = None
    """Replaces limits.mcp_call_timeout_s for this server."""
    enabled: Switch = True
    """Whether the server is used."""
    oauth_account: Annotated[NonEmpty, Expected('a name, such as "work"')] | None = None
    """A name for this login, if there are several logins to the same URL."""
    oauth_client_id: Annotated[NonEmpty, Expected("the id of a client that you registered")] | None = None
    """The id of the OAuth client that you registered at the authorization server. If unset, crow registers itself."""
    oauth_client_secret: (
        Annotated[NonEmpty, Expected("the secret of that client, or the name of a variable that holds it: ${NAME}")]
        | None
    ) = Field(default=None, repr=False)
    """The secret of the client in oauth_client_id. It requires oauth_issuer, because crow sends the secret only to the
    authorization server in oauth_issuer."""
    oauth_client_metadata_url: (
        Annotated[
            Annotated[str, Field(pattern=r"^https://[^/]+/.+")],
            Expected("the https URL of a client metadata document, such as https://example.com/crow.json"),
        ]
        | None
    ) = None
    """The URL of a client metadata document. It identifies crow at authorization servers that accept such documents."""
    oauth_issuer: Url | None = None
    """The URL of the only authorization server to log in at. If unset, crow uses the one that the MCP server names."""
    oauth_redirect_port: (
        Annotated[int, Field(ge=1, le=65535), Expected("the number of a port, such as 8765")] | None
    ) = None
    """The port of this machine to which the browser returns after a login. If unset, crow chooses a free port."""

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError
        return self

    def secrets(self) -> tuple[str, ...]:
        """Return the values that must not appear in a log, an error or an export. In the URL and the arguments, these
        are values with names such as `--token`, and texts with the form of a secret."""
        texts = [(name, text) for arg in self.args for name, _, text in [arg.partition("=")]]
        texts += [(name, text) for name, text in pairwise(self.args) if name.startswith("-") and "=" not in name]
        texts += [("", text) for text in (self.url or "", *self.args)]
        found = [
            secret
            for name, text in texts
            if holds_secret(name, text, os.path.lexists)
            for secret in secrets_in(text)
            if secret != self.url and "${" not in secret
        ]
        client = (self.oauth_client_secret,) if self.oauth_client_secret else ()
        return (*super().secrets(), *self.env.values(), *client, *dict.fromkeys(found))

    def masked(self) -> dict[str, object]:
        """Return only the values that the user set, so that they can be printed. Values that may be secret are
        `SecretStr`. In the URL, `…` stands for user name and password, and for the query."""
        values = {key: value for key, value in self if key in self.model_fields_set}
        for key in {"env", "headers"} & values.keys():
            values[key] = {name: SecretStr(text) for name, text in values[key].items()}
        if "oauth_client_secret" in values:
            values["oauth_client_secret"] = SecretStr(self.oauth_client_secret or "")
        if self.url is not None:
            values["url"] = _PRIVATE_IN_URL.sub("…", self.url)
        if "args" in values:
            values["args"] = tuple(map(SecretStr, self.args))
        return values


class HookSettings(Section):
    """A command that crow runs at one event of the agent's loop. Each table `[[hooks]]` is a hook."""

    # event and command are required. They have the default None so that `_is_complete` refuses a table without them:
    # its error is about the whole table and names both keys.
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
    """The event at which the command runs."""
    command: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
        Expected('a program and its arguments as a list, such as ["python3", "-I", "~/.config/crow/hooks/audit.py"]'),
    ] = Field(default=None, repr=False)
    """The program and its arguments. The program runs in the workspace and is not confined. A leading `~/` stands for
    the home directory. The path of the program may be relative to the directory of config.toml."""
    name: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$"),
            Expected('1 to 64 letters, digits and the characters . _ : -, such as "format"'),
        ]
        | None
    ) = None
    """The hook's name in messages. If unset, it is the name of the program."""
    tools: ToolNames = ()
    """The hook runs only for calls of these tools. If empty, it runs for calls of all tools."""
    does: Annotated[
        tuple[Literal["read", "write", "execute", "fetch", "external"], ...],
        Field(strict=False),
        Expected('a list of "read", "write", "execute", "fetch" and "external"'),
    ] = ()
    """The hook runs only for calls that may do at least one of these things. If empty, it runs for all calls."""
    paths: Annotated[Strings, Expected('a list of path globs, such as ["*.py", "src/**"]')] = ()
    """The hook runs only for calls that may read or write one of these paths. If empty, it runs for all calls."""
    workspaces: Annotated[Strings, Expected('a list of path globs, such as ["~/repos/**"]')] = ()
    """The hook runs only in sessions whose working directory matches one of these globs. If empty, it runs in all
    sessions."""
    timeout_s: Seconds = 10.0
    """The time limit of the command, in seconds. After this time, crow ends the command and continues without its
    answer."""
    enabled: Switch = True
    """Whether the hook runs."""

    def masked(self) -> dict[str, object]:
        """Return only the values that the user set, so that they can be printed. The arguments of the command are
        `SecretStr`."""
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
    """Whether crow compacts by itself when the context window fills up. `/compact` always works."""
    threshold: Threshold = 0.85
    """How full the context window may be before compaction starts: a fraction of the window, a percentage, or a number
    of tokens. Room for an answer always stays free."""
    window: WindowPart | None = None
    """How much of a model's context window crow uses: a fraction of it, a percentage, or a number of tokens. If unset,
    crow uses all of it. Crow never refuses a request because of this setting."""
    keep_tokens: Annotated[int, Field(ge=0), Expected("a whole number of tokens, such as 20000")] = 20_000
    """The maximum size, in tokens, of the newest messages that a compaction leaves unchanged."""
    target: Annotated[float, Field(ge=0.1, le=0.9), Expected("a fraction from 0.1 to 0.9, such as 0.5")] = 0.5
    """How much of the room for messages is full after a compaction, as an approximate fraction. The room for messages
    is the threshold minus the size of the system message and the tools."""
    early: Annotated[
        Literal[False] | Annotated[float, Field(ge=0.1, le=1)],
        Expected("a fraction of the threshold from 0.1 to 1, such as 0.6, or false"),
    ] = 0.6
    """If the context of an idle session fills more than this fraction of the threshold, crow writes the summary before
    the next prompt needs it. `false` turns this off. Local models never write summaries early."""
    compact_model: SmallModel | None = None
    """The model that writes summaries. It gets a shortened transcript. If it fails, the session's model writes the
    summary. If unset, the session's model writes all summaries. Its endpoint then has most of each such request in its
    cache."""
    prompt_file: Annotated[NonEmpty, Expected("the path of a readable UTF-8 text file")] | None = None
    """A file with a prompt for summaries. This prompt replaces crow's own prompt. In it, `{words}` stands for the word
    limit. The path of the file may be relative to the directory of config.toml."""


class TitleSettings(Section):
    """How sessions get their titles."""

    model: SmallModel | None = None
    """The model that writes the title of a session after its first turn. If unset, the title is the first line of the
    first prompt."""


class PermissionSettings(Section):
    """Which tool calls run without a question to the user."""

    mode: StartMode = "ask"
    """The mode in which a session starts."""
    allow: Rules = ()
    """Rules for calls that run without a question to the user. Each rule is a tool, or a tool and an argument, such as
    "shell(git status)"."""
    deny: Rules = ()
    """Rules for calls that never run, in any mode. They take precedence over allow."""
    protect: Annotated[
        tuple[ProtectedName, ...],
        Field(strict=False),
        Expected('a list of names, globs or relative paths, such as ["package.json", "deploy/*.sh"]'),
    ] = ()
    """More names of files and folders that are protected in any folder: crow asks about each change."""
    unprotect: Annotated[
        tuple[RemovableName, ...],
        Field(strict=False),
        Expected(
            'a list of names that docs/permissions.md lists as removable, such as [".gitattributes"]; .git, HEAD, '
            ".crow and names that hold keys, such as .ssh, always stay protected"
        ),
    ] = ()
    """Names to remove from the list of protected names. Git's own files, crow's files and names that hold keys, such as
    .ssh, stay protected."""
    keep_ignored: Switch = True
    """Whether commands may change files that git ignores, such as builds and caches, without a question."""
    fetch_private: Switch = False
    """Whether fetch may read private addresses, such as those of this machine."""


class SandboxSettings(Section):
    """How the kernel confines commands."""

    enabled: Annotated[Literal["auto", "off", "required"], Expected('"auto", "off" or "required"')] = "auto"
    """Whether commands are confined. "auto" confines them if this machine can do so. "off" never confines them.
    "required" refuses a command that cannot be confined. Environment: CROW_SANDBOX."""
    network: Switch = False
    """Whether commands with the access `write` can use the network."""
    readable: Annotated[Strings, Expected('a list of paths, such as ["~/datasets"]')] = ()
    """More directories that confined commands can read."""
    writable: Annotated[Strings, Expected('a list of paths, such as ["~/.cache/ccache"]')] = ()
    """More directories that commands with the access `write` can write to."""
    pass_env: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z_*?][A-Za-z0-9_*?]*$")], ...],
        Field(strict=False),
        Expected('a list of names or globs of environment variables, such as ["GH_TOKEN"]'),
    ] = ()
    """Environment variables that commands get although their names or values say that they hold a secret. Results still
    show a mask in place of their values. Keys of endpoints are never passed."""
    sockets: Annotated[Strings, Expected('a list of paths, such as ["/run/postgresql"]')] = ()
    """Unix sockets that confined commands can use, or directories with such sockets. This needs bubblewrap. Without
    this setting, confined commands have no Unix sockets."""


class ReceiptSettings(Section):
    """What a turn changed, and which checks ran after its last change."""

    show: Switch = True
    """Whether editors show receipts, which are stored in any case."""
    checks: Annotated[Strings, Expected('a list of command lines, such as ["just ci"]')] = ()
    """More commands that verify changes. A command that begins with the same words is a check, too."""


class LimitSettings(Section):
    """Limits on steps, cost, tools and waiting."""

    steps_per_turn: Annotated[int, Field(ge=1), Expected("a whole number above 0, such as 500")] = 500
    """The maximum number of answers that the model may give in one turn."""
    cost_per_turn: Usd | None = None
    """When a turn has cost this many US dollars, it stops before its next request. Another prompt continues the
    work."""
    cost_per_session: Usd | None = None
    """Each time the cost of a session has grown by this many US dollars, the running turn stops before its next
    request. Another prompt continues the work."""
    mcp_start_timeout_s: Seconds = 10.0
    """The time limit for the start of an MCP server, in seconds."""
    mcp_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False), Expected("seconds, such as 1.0")] = 1.0
    """The time that a turn waits for MCP servers that are still starting, in seconds. If a server is ready later, its
    tools are added to the running turn. `crow run` waits until each server is ready or its time limit is over."""
    mcp_call_timeout_s: Seconds = 600.0
    """The time limit for a call of an MCP tool, in seconds."""
    offered_tools: Annotated[int, Field(ge=0), Expected("a whole number, such as 100")] = 100
    """The maximum number of MCP tools that are sent to the model. If there are more, the model finds them with
    find_tools."""
    offered_tool_tokens: Annotated[int, Field(ge=0), Expected("a whole number of tokens, such as 2000")] = 2_000
    """If the MCP tools take more tokens than this together, the model finds them with find_tools."""
    always_offered: Annotated[Strings, Expected('a list of tools or globs, such as ["github__get_*"]')] = ()
    """MCP tools that are always sent to the model, up to `offered_tools`. The name of a tool begins with its server's
    name, such as `github__get_issue`."""
    first_byte_timeout_s: Seconds = 300.0
    """The time limit for the beginning of an answer, in seconds."""
    idle_timeout_s: Seconds = 120.0
    """The longest pause within an answer, in seconds."""


class EditorSettings(Section):
    """The ways in which crow uses the editor."""

    terminals: Switch = False
    """Whether commands run in terminals of the editor, if the editor offers terminals."""
    answer_timeout_s: Seconds = 30.0
    """The time limit for the editor to answer a request about a file or a terminal, in seconds."""
    user_timeout_s: Seconds = 86_400.0
    """The time limit for the user to answer a question (a permission, a form or a link), in seconds."""


class ChatSettings(Section):
    """The settings of `crow chat`."""

    notify_after_s: Annotated[
        float, Field(ge=0, allow_inf_nan=False), Expected("a number of seconds, such as 20; 0 for never")
    ] = 20.0
    """If a turn has taken this many seconds, crow notifies the user in the terminal when the turn ends or asks a
    question. 0 means never."""


class DatabaseSettings(Section):
    """Where sessions are stored."""

    url: DatabaseUrl | None = None
    """The URL of a PostgreSQL database for the sessions. Crow must be installed with the extra `postgres`. If unset,
    the sessions are in a SQLite file of this user. Environment: CROW_DATABASE_URL."""
    direct_url: DatabaseUrl | None = None
    """A URL that leads to the same database without a pooler. It is needed if `url` leads to a pooler in transaction
    mode, such as PgBouncer."""

    def secrets(self) -> tuple[str, ...]:
        """Return the URLs, and the passwords in them."""
        urls = [url.get_secret_value() for url in (self.url, self.direct_url) if url is not None]
        return tuple(secret for url in urls for secret in (url, *database_passwords(url)))

    def shown(self) -> dict[str, object]:
        """Return the values for printing. The passwords in the URLs are masked."""
        return {key: None if url is None else without_passwords(url.get_secret_value()) for key, url in self}


class StoreSettings(Section):
    """How sessions are stored."""

    path: Annotated[NonEmpty, Expected('the path of a file, such as "~/crow/sessions.db"')] | None = None
    """The SQLite database with all sessions. A relative path is relative to the directory of config.toml. If unset, it
    is crow.db in crow's data directory. Crow does not move an existing database."""
    compress_after_days: Annotated[int, Field(ge=1), Expected("a whole number of days, such as 30")] | None = None
    """Crow compresses tool outputs, images and file contents that are older than this many days. If unset, nothing is
    compressed."""
    mirror: Annotated[NonEmpty, Expected('a directory, such as "~/crow-sessions"')] | None = None
    """Crow keeps a file of JSON lines for each session in this directory. If the path is relative, it is relative to
    the directory of this file. If unset, there are no such files."""


class ShareSettings(Section):
    """How sessions are shared as pages."""

    command: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
        Expected('a program and its arguments as a list, such as ["gh", "gist", "create"]'),
    ] = Field(default=None, repr=False)
    """The program that `crow sessions share --html` runs to publish the page. The path of the page is its last
    argument. It prints the address of the published page."""
    url: Annotated[Url, Expected("the http or https URL of crow serve, such as https://crow.example.com")] | None = None
    """The address of `crow serve` for people who open links to pages. If unset, it is taken from `serve.listen`."""


class LogSettings(Section):
    """The log file."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Expected('"debug", "info", "warning" or "error"')
    ] = "warning"
    """The lowest level of the records that are written to the log. Environment: CROW_LOG."""


class TelemetrySettings(Section):
    """Traces and metrics for an OpenTelemetry collector. Crow must be installed with the extra `otel`."""

    enabled: Switch = False
    """Whether crow sends traces and metrics. A change takes effect at the next start."""
    endpoint: Url | None = None
    """The base URL of the collector. If unset, OpenTelemetry's variables apply, or else http://localhost:4318."""
    content: Switch = False
    """Whether traces contain prompts, answers, arguments and results. Secrets are masked as in exports."""


PRINCIPAL_PART = "{principal}"
"""The part of a path in `serve.roots` that stands for a principal's name."""


def static_part(root: str) -> Path:
    """Return the part of a path in `serve.roots` before `{principal}`, or the whole path if it has none."""
    parts = Path(root).parts
    return Path(*parts[: parts.index(PRINCIPAL_PART)]) if PRINCIPAL_PART in parts else Path(root)


class ServeSettings(Section):
    """The settings of `crow serve`."""

    listen: Annotated[
        NonEmpty, Expected('HOST:PORT, such as "127.0.0.1:7431", or the absolute path of a Unix socket')
    ] = "127.0.0.1:7431"
    """The address on which the server listens. `crow serve --listen` takes precedence."""
    node: Annotated[NonEmpty, Expected('the name of this machine, such as "build-1"')] | None = None
    """The name of this machine, if several machines use the same PostgreSQL database. If unset, it is the host name.
    Each session stores the name of the machine that last ran it."""
    tls_cert: Annotated[NonEmpty, Expected("the path of a PEM file with the certificate chain")] | None = None
    """A PEM file with the certificate for TLS. The path may be relative to the directory of config.toml."""
    tls_key: Annotated[NonEmpty, Expected("the path of a PEM file with the private key")] | None = None
    """A PEM file with the private key of the certificate."""
    hosts: Annotated[Strings, Expected('a list of host names, such as ["crow.example.org"]')] = ()
    """The host names under which clients may reach the server. Localhost and IP addresses are always allowed. The
    server refuses requests to any other name."""
    origins: Annotated[Strings, Expected('a list of origins, such as ["https://chat.example.org"]')] = ()
    """The origins of web pages that may connect. The server refuses all other pages. The setting does not affect
    programs other than browsers, because they send no origin."""
    operators: Annotated[Strings, Expected('a list of principals, such as ["prometheus"]')] = ()
    """The principals who may read /metrics, which covers the work of all principals. On a server without tokens, every
    client may read /metrics."""
    trusted_proxies: Annotated[Strings, Expected('a list of addresses, such as ["10.0.0.5"]')] = ()
    """The addresses of trusted proxies. If a request comes from such a proxy, crow takes the client's address from the
    X-Forwarded-For header."""
    roots: Annotated[Strings, Expected('a list of absolute paths, such as ["/srv/crow/{principal}"]')] = ()
    """The workspaces of principals must be in one of these directories, after links are resolved. `{principal}` stands
    for the name of the principal. A server with tokens needs at least one directory."""
    client_servers: Switch = False
    """Whether clients may use MCP servers of their own. Such a server is a program that runs unconfined on this
    machine, or a URL that this machine calls. Turn this on only if every principal may have a shell here."""
    max_connections: Count = 1000
    """The maximum number of clients that are connected at the same time."""
    max_connections_each: Count = 100
    """The maximum number of clients of one principal that are connected at the same time."""
    drain_timeout_s: Seconds = 60.0
    """After SIGTERM, running turns have this many seconds to finish. Turns that still run after that are cancelled and
    stored."""
    autostart: Switch = False
    """Whether `crow acp` uses the resident server of this user (`crow serve --user`), and starts it if none is
    running."""
    idle_timeout_s: Annotated[
        float, Field(ge=0, allow_inf_nan=False), Expected("a number of seconds, such as 3600; 0 for never")
    ] = 3600.0
    """The resident server ends after this many seconds without a client and without a running turn. 0 means never."""
    log_file: Annotated[NonEmpty, Expected("the path of a file")] | None = None
    """The file for the server's log, with one JSON object per line. If unset, the server logs to stderr."""


class Settings(Section):
    """All settings in crow's config.toml."""

    models: Annotated[
        Strings | Mapping[str, NamedModel],
        Expected('a list of model names, such as ["small", "large"], or tables [models.NAME]'),
    ] = ()
    """More models that the editor offers: a list of names, or a table with the settings of each model."""
    providers: Annotated[Mapping[str, ProviderSettings], Expected("tables: [providers.NAME]")] = Field(
        default_factory=dict
    )
    """More endpoints. Their models are called NAME/MODEL."""
    model: ModelSettings = Field(default_factory=ModelSettings)
    compaction: CompactionSettings = Field(default_factory=CompactionSettings)
    titles: TitleSettings = Field(default_factory=TitleSettings)
    permissions: PermissionSettings = Field(default_factory=PermissionSettings)
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    receipts: ReceiptSettings = Field(default_factory=ReceiptSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    editor: EditorSettings = Field(default_factory=EditorSettings)
    chat: ChatSettings = Field(default_factory=ChatSettings)
    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    share: ShareSettings = Field(default_factory=ShareSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    serve: ServeSettings = Field(default_factory=ServeSettings)
    mcp_servers: Annotated[
        Mapping[Annotated[str, Field(min_length=1, max_length=64)], McpServerSettings],
        Expected("a table for each server: [mcp_servers.NAME] with command or url"),
    ] = Field(default_factory=dict)
    """MCP servers for every session, by name."""
    credentials: Annotated[Mapping[str, CredentialSettings], Expected("a table for each host: [credentials.HOST]")] = (
        Field(default_factory=dict)
    )
    """Credentials for HTTPS requests of confined commands, by host. Crow adds them outside of the sandbox."""
    hooks: Annotated[
        tuple[HookSettings, ...], Field(strict=False), Expected("tables [[hooks]], each with event and command")
    ] = ()
    """Commands that crow runs at events of the agent's loop, in the order of the tables."""
    checks: Annotated[
        Mapping[NonEmpty, NonEmpty], Expected('a table of globs and command lines, such as { "*.ts" = "npx tsc" }')
    ] = Field(default_factory=dict, repr=False)
    """Commands that check the model's changes, by the files that they are for: `"*.ts" = "npx tsc --noEmit"`. Crow runs
    a command once after the changes of a step, and tells the model what failed. `{files}` in a command stands for the
    changed files. The commands are confined and can only read."""

    def secrets(self) -> tuple[str, ...]:
        """Return the values that must not appear in a log, an error or an export."""
        tables = (self.model, self.database, *self.providers.values(), *self.mcp_servers.values())
        return tuple(secret for table in tables for secret in table.secrets())


def expectation(field: FieldInfo) -> str:
    """Return a description of the values that a setting accepts, as the end of a sentence."""
    # For `Annotated[T, Expected(...)]`, pydantic moves `Expected` into the field's metadata. For `Annotated[T,
    # Expected(...)] | None`, it stays in the metadata of this member of the union.
    parts = getattr(field.annotation, "__args__", ())
    metadata = (*field.metadata, *(item for part in parts for item in getattr(part, "__metadata__", ())))
    return next(item.words for item in metadata if isinstance(item, Expected))
