"""MCP servers as `config.toml` describes them.

Strategy: one table per server; `${NAME}` in its texts stands for an environment variable, so that no secret need be in
the file. A variable that is not set is that server's problem, told when it should start, and nobody else's.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from crow.settings.fields import Expect, Section

__all__ = ["McpServerSettings", "expanded", "fault_at"]

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

Texts = Annotated[tuple[str, ...], Field(strict=False), Expect('a list of texts, such as ["--read-only"]')]
Table = Annotated[Mapping[str, str], Expect('a table of texts, such as { TOKEN = "${MY_TOKEN}" }')]
Globs = Annotated[tuple[str, ...], Field(strict=False), Expect('a list of tool names or globs, such as ["get_*"]')]
MaybeSeconds = Annotated[
    float | None, Field(gt=0, allow_inf_nan=False), Expect("a number of seconds above 0, such as 30")
]


class McpServerSettings(Section):
    """An MCP server: a command to start, or a URL to call."""

    command: Annotated[str | None, Field(min_length=1), Expect('a command, such as "npx"')] = Field(
        default=None, description="The program to start; with args and env."
    )
    args: Texts = Field(default=(), repr=False, description="Its arguments.")
    env: Table = Field(default_factory=dict, repr=False, description="Variables added to its small environment.")
    url: Annotated[str | None, Field(pattern=r"^(https?://|\$\{)"), Expect("an http or https URL")] = Field(
        default=None, description="Where the server answers, instead of a command."
    )
    headers: Table = Field(default_factory=dict, repr=False, description="HTTP headers for it.")
    transport: Annotated[Literal["http", "sse"], Expect('"http" or "sse"')] = Field(
        default="http", description="How it is called: streamable HTTP, or the older SSE."
    )
    allow_tools: Globs = Field(default=(), description="The only tools of it that are offered; empty: all.")
    deny_tools: Globs = Field(default=(), description="Tools of it that are not offered.")
    read_only: Annotated[
        bool | Annotated[tuple[str, ...], Field(strict=False)],
        Expect('true, false or a list of tool names, such as ["get_*"]'),
    ] = Field(default=False, description="Which of its tools change nothing, and may be asked for in plan mode.")
    start_timeout_s: MaybeSeconds = Field(default=None, description="Seconds that it may take to start.")
    call_timeout_s: MaybeSeconds = Field(default=None, description="Seconds that a call may take.")
    enabled: Annotated[bool, Expect("true or false")] = Field(default=True, description="Whether it is used.")

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
    expected = next(item.words for item in field.metadata if isinstance(item, Expect))
    return f"{place} cannot be used; expected {expected}"
