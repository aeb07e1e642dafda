"""The MCP servers that tools may use: how to reach them, how to log in, and what they offer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from crow.domain.messages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The user's options for an MCP server. The globs match the server's own tool names."""

    allow: tuple[str, ...] = ()
    """Globs of the tools that may be used. If empty, every tool is allowed."""
    deny: tuple[str, ...] = ()
    """Globs of the tools that may not be used. Takes precedence over `allow`."""
    read_only: tuple[str, ...] = ()
    """Globs of the tools that may be used in plan mode."""
    start_timeout_s: float | None = None
    """The server must start within this time. If None, the general setting applies."""
    call_timeout_s: float | None = None
    """A call must end within this time. If None, the general setting applies."""
    problem: str = ""
    """Why the server cannot be started with this configuration. Empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioServer:
    """An MCP server that crow starts."""

    name: str
    command: str
    """An absolute path, or the name of a program on PATH."""
    args: tuple[str, ...] = ()
    """`THE_WORKSPACE` in an argument stands for the session's working directory."""
    env: tuple[tuple[str, str], ...] = ()
    """Added to a minimal environment. `THE_WORKSPACE` in a value stands for the session's working directory."""
    sandbox: Literal["read", "write"] | None = None
    """The access that the server is confined to. None means that the server is not confined."""
    options: ServerOptions = ServerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthOptions:
    """The user's options for logging in to an MCP server. If a value is empty or 0, crow gets it from the server, or
    chooses it itself."""

    login: str = ""
    """The argument that the user passes to `crow mcp login`. If empty, the argument is the server's URL."""
    account: str = ""
    """Distinguishes two logins at the same URL."""
    client_id: str = ""
    """Set if the user registered crow by hand. Crow sends it only to `issuer`."""
    client_secret: str = field(default="", repr=False)
    """The secret of `client_id`, if there is one. Crow sends it only to `issuer`."""
    client_metadata_url: str = ""
    """If `client_id` is empty, crow uses this URL as its client id, provided that the authorization server accepts such
    ids."""
    issuer: str = ""
    """The only authorization server that gets `client_id` and `client_secret`."""
    redirect_port: int = 0
    """The port on this machine to which the authorization server sends the browser back after the login."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """An MCP server that crow connects to."""

    name: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    transport: Literal["http", "sse"] = "http"
    """`http` for streamable HTTP, or `sse` for the older SSE."""
    options: ServerOptions = ServerOptions()
    oauth: OAuthOptions = OAuthOptions()


McpServer: TypeAlias = StdioServer | HttpServer

THE_WORKSPACE = "\0workspace\0"
"""A placeholder for the session's working directory. No real argument or variable can contain it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginQuestion:
    """A request that the user log in to an MCP server."""

    server: str
    """The name of the server."""
    server_host: str
    """The host in the URL of the server."""
    page: str
    """The URL of the login page."""
    place: str
    """The host of the login page."""
    wait: Callable[[], Awaitable[None]]
    """Returns when the authorization server has sent the browser back to crow."""
    take: Callable[[str], bool]
    """Takes the URL to which the browser was sent after the login. The user can enter it if the browser cannot reach
    crow. Returns whether the URL belongs to this login."""


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
    """The entries of one kind, such as tools, that an MCP server lists."""

    kind: str
    names: Sequence[str] = ()
    seconds: float = 0.0
    """How long the listing took."""
    problem: str = ""
    """Why the listing failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """The result of trying an MCP server."""

    name: str
    seconds: float
    """How long the start took."""
    problem: str = ""
    """Why the server did not start. Empty if it started."""
    implementation: str = ""
    """The server's name and version, if the server started."""
    protocol: str = ""
    listings: Sequence[ServerListing] = ()
    offered: Sequence[str] = ()
    """The names of the tools that the model gets."""
    faults: Sequence[str] = ()
    """What is wrong with each invalid tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptArgument:
    """An argument of a server's prompt."""

    name: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPrompt:
    """A prompt that an MCP server offers."""

    name: str
    """Has the form `server:prompt`, contains no spaces, and is unique in the session."""
    server: str
    """The server's name for display."""
    description: str
    arguments: tuple[PromptArgument, ...] = ()


class ServerPrompts(Protocol):
    """The prompts of a session's MCP servers."""

    def prompts(self) -> tuple[ServerPrompt, ...]:
        """Return the prompts of the servers that are ready now, in the order of the servers."""

    async def prompt(self, name: str) -> ServerPrompt | None:
        """Return the prompt with this name, or None if no ready server has it. First wait for the prompt's server if it
        is starting, or start it again if it has failed."""

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """Return the content of the prompt, filled with these arguments. It is never empty.

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
