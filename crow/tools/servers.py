"""The MCP servers that tools may use: how to reach them, how to log in, and what they offer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from crow.domain.messages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The user's options for an MCP server. `allow`, `deny` and `read_only` are globs that match the server's own tool
    names.

    An empty `allow` allows every tool. `deny` takes precedence over `allow`. Tools that match `read_only` may be used
    in plan mode. If a timeout is None, the general setting applies. `problem` says why the server cannot be started
    with this configuration.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    start_timeout_s: float | None = None
    call_timeout_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioServer:
    """An MCP server that crow starts. `command` is an absolute path, or the name of a program on PATH. `env` is added
    to a minimal environment. `THE_WORKSPACE` in `args` and `env` stands for the session's working directory. `sandbox`
    is the access that the server is confined to; None means that the server is not confined."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    sandbox: Literal["read", "write"] | None = None
    options: ServerOptions = ServerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthOptions:
    """The user's options for logging in to an MCP server. If a value is empty or 0, crow finds it out or chooses it.

    `login` is the argument that the user passes to `crow mcp login`. If `login` is empty, the argument is the server's
    URL. `account` distinguishes two logins at the same URL. If the user registered crow by hand, `client_id` is set,
    and `client_secret` if there is one. Crow sends both only to `issuer`. Otherwise, crow uses `client_metadata_url` as
    its client id if the authorization server accepts such ids. The authorization server sends the browser back to
    `redirect_port` on this machine.
    """

    login: str = ""
    account: str = ""
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    client_metadata_url: str = ""
    issuer: str = ""
    redirect_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """An MCP server that crow connects to. `transport` is `http` for streamable HTTP, or `sse` for the older SSE."""

    name: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    transport: Literal["http", "sse"] = "http"
    options: ServerOptions = ServerOptions()
    oauth: OAuthOptions = OAuthOptions()


McpServer: TypeAlias = StdioServer | HttpServer

THE_WORKSPACE = "\0workspace\0"
"""A placeholder for the session's working directory. No real argument or variable can contain it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginQuestion:
    """A request that the user log in to `server`. `page` is the URL of the login page, and `place` is the host of that
    page.

    `wait` returns when the browser has come back. If the browser cannot come back, the user can enter the URL to which
    the browser was sent. `take` accepts this URL, and returns whether it belongs to this login.
    """

    server: str
    server_host: str
    page: str
    place: str
    wait: Callable[[], Awaitable[None]]
    take: Callable[[str], bool]


class LoginAsker(Protocol):
    """Asks the user to log in to MCP servers."""

    @property
    def can_ask(self) -> bool:
        """Whether there is somebody to ask."""

    async def ask(self, question: LoginQuestion) -> Literal["accept", "decline", "gone"]:
        """Ask the user, and return the answer. `gone` means that nobody needs the login any more. The caller cancels
        this call when the login has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerListing:
    """The entries of one kind, such as tools, that an MCP server lists. `problem` says why the listing failed."""

    kind: str
    names: Sequence[str] = ()
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """The result of trying an MCP server.

    If the server did not start, `problem` says why. Otherwise, `implementation` is the server's name and version.
    `offered` are the names of the tools that the model gets. `faults` says what is wrong with each invalid tool.
    """

    name: str
    seconds: float
    problem: str = ""
    implementation: str = ""
    protocol: str = ""
    listings: Sequence[ServerListing] = ()
    offered: Sequence[str] = ()
    faults: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptArgument:
    """An argument of a server's prompt."""

    name: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPrompt:
    """A prompt that an MCP server offers. `name` has the form `server:prompt`, contains no spaces, and is unique in the
    session. `server` is the server's name for display."""

    name: str
    server: str
    description: str
    arguments: tuple[PromptArgument, ...] = ()


class ServerPrompts(Protocol):
    """The prompts of a session's MCP servers."""

    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts of the servers that are ready now, in the order of the servers."""

    async def prompt(self, name: str) -> ServerPrompt | None:
        """Return the prompt with this name, or None if no ready server has it. First wait for the prompt's server if it
        is starting, or start it again if it has failed."""

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """The content of the prompt, filled with these arguments. It is never empty.

        :raises ~crow.domain.errors.ToolServerError: the server is gone, refused the request, or sent no usable content.
        """


def merge_servers(own: Sequence[McpServer], offered: Sequence[McpServer]) -> tuple[McpServer, ...]:
    """Return the user's servers, followed by the editor's. A server that is in both lists is included only once.

    If two different servers have the same name, both are included. They stay separate, because the user's rules for one
    of them must not apply to the other.
    """

    def identity(server: McpServer) -> tuple[str, ...]:
        address = (server.command, *server.args) if isinstance(server, StdioServer) else (server.url,)
        return (server.name, *address)

    known = {identity(server) for server in own}
    return (*own, *(server for server in offered if identity(server) not in known))
