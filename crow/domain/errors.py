"""The exceptions that crow raises on purpose.

    CrowError
    ├── UserError                   configuration, arguments
    │   ├── ConfigError             a setting that cannot be used
    │   ├── ArgumentError           a parameter of a command or request that cannot be used
    │   ├── NoSuchSession           no session has this id
    │   └── FilesElsewhere          the session's files are on another machine
    ├── PeerError                   another program
    │   ├── ModelError              the endpoint
    │   │   ├── AuthError           no key, or a refused key
    │   │   ├── ModelNotFound       the endpoint does not serve this model
    │   │   ├── RateLimited         too many requests; `retry_after_s` if stated
    │   │   ├── QuotaExceeded       no credit left; waiting does not help
    │   │   ├── Overloaded          5xx, or an equivalent event in a stream
    │   │   ├── ContextOverflow     the request is too long; `limit`, `size` in tokens if stated
    │   │   ├── ContentRefused      the provider's filter
    │   │   ├── BadRequest          the endpoint does not accept the request
    │   │   ├── NetworkError        no connection, or a broken connection
    │   │   ├── ModelTimeout        no connection, or no data, within the time limit
    │   │   ├── AnswerTooLong       an answer longer than crow accepts
    │   │   └── ProtocolError       an answer that is incomplete or of another form
    │   ├── ToolServerError         an MCP server
    │   │   └── LoginRequired       the user has to log in to it
    │   └── EditorError             the ACP client
    ├── StoreError                  the database
    │   ├── StoreUnavailable        it cannot be opened, read or written
    │   │   └── StoreUnreachable    its server cannot be reached now; waiting may help
    │   ├── StoreTooNew             a newer crow wrote it
    │   ├── SessionBusy             another living process runs a turn in the session
    │   ├── LeafMoved               another process has added to the session meanwhile
    │   └── RepeatedPrompt          the session already has a prompt with this name
    └── TurnError                   a turn that cannot go on

The type says whose fault the error is. Each message names the thing that is wrong, shows its value and says what would
work. Any other exception is a bug.
"""

from __future__ import annotations

import errno


class CrowError(Exception):
    """The base class of all errors that crow raises on purpose. `str(error)` is the message to show."""


class UserError(CrowError):
    """An error that the user can fix."""

    reason = ""
    """A word by which programs recognise the error. Empty if programs do not need to."""


class ConfigError(UserError):
    """A setting that cannot be used."""


class ArgumentError(UserError):
    """A parameter that cannot be used."""


class NoSuchSession(UserError):
    """No session has this id."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f'Session not found: {session_id}. Run "crow sessions" to list them.')
        self.session_id = session_id


class FilesElsewhere(UserError):
    """The session's directory does not exist on this machine. `node` is the machine that last ran the session."""

    reason = "files_elsewhere"

    def __init__(self, node: str, cwd: str) -> None:
        super().__init__(
            f"The files of this session are on node {node}, in {cwd}. That directory does not exist here. Connect to "
            f"{node} to prompt, or load the session with a directory that exists here."
        )


class PeerError(CrowError):
    """Another program failed."""


class ModelError(PeerError):
    """The endpoint failed."""


class AuthError(ModelError):
    """There is no key, or the endpoint refuses the key."""


class ModelNotFound(ModelError):
    """The endpoint does not serve this model."""


class RateLimited(ModelError):
    """The endpoint received too many requests."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """The number of seconds that the endpoint asks crow to wait, or None if the endpoint does not state a time."""


class QuotaExceeded(ModelError):
    """There is no credit left. Waiting does not help."""


class Overloaded(ModelError):
    """The endpoint failed (5xx)."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """The number of seconds that the endpoint asks crow to wait, or None if the endpoint does not state a time."""


class ContextOverflow(ModelError):
    """The request is too long."""

    def __init__(self, message: str, *, limit: int | None = None, size: int | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        """The endpoint's limit in tokens, or None if the endpoint did not state it."""
        self.size = size
        """The size of the request in tokens, or None if the endpoint did not state it."""


class ContentRefused(ModelError):
    """The provider's filter refused the request or the answer."""


class BadRequest(ModelError):
    """The endpoint does not accept the request."""

    def __init__(self, message: str, *, is_unclear: bool = False) -> None:
        super().__init__(message)
        self.is_unclear = is_unclear
        """If true, the request may be too long: the endpoint gave no reason, or one that may mean this."""


class NetworkError(ModelError):
    """There is no connection, or the connection broke."""


class ModelTimeout(ModelError):
    """The connection was not made in time, or the endpoint was silent for too long."""


class AnswerTooLong(ModelError):
    """The answer is longer than crow accepts. A retry would not help."""


class ProtocolError(ModelError):
    """The answer is incomplete, or not in the form of its wire (Chat Completions, Responses or Messages)."""


class ToolServerError(PeerError):
    """An MCP server did not start, died, or broke the protocol."""


class LoginRequired(ToolServerError):
    """The user has to log in to an MCP server. Either crow could not ask the user to log in, or the user declined."""


class EditorError(PeerError):
    """The ACP client refused a request or did not answer it."""


class StoreError(CrowError):
    """A problem with the database."""


class StoreUnavailable(StoreError):
    """The database cannot be opened, read or written."""


class StoreUnreachable(StoreUnavailable):
    """The server of the database cannot be reached now. It may be starting, or accept connections again later."""


class StoreTooNew(StoreError):
    """A newer crow wrote the database."""


class SessionBusy(StoreError):
    """Another process runs a turn in the session."""

    def __init__(self, session_id: str, owner: str) -> None:
        super().__init__(
            f"Session {session_id} is busy: {owner} is running a turn in it. "
            "Wait for the turn to end, or end that process."
        )
        self.session_id = session_id
        self.owner = owner
        """Names that process."""


class LeafMoved(StoreError):
    """Another process added entries to the session after this process read it. This process wrote nothing."""


class RepeatedPrompt(StoreError):
    """The session already has a prompt with this name, so the repeat was not stored. `message_id` is the message id of
    the stored prompt."""

    def __init__(self, prompt_id: str, message_id: str) -> None:
        super().__init__(f'The prompt "{prompt_id}" was already sent. This repeat was not stored.')
        self.message_id = message_id


class TurnError(CrowError):
    """The turn cannot go on. The message is for the user."""


NO_MEMORY = "The system gives crow no more memory or threads. End other programs, or raise ulimit -v and ulimit -u."


def lacks_memory(error: BaseException) -> bool:
    """Return whether `error` says that there is no memory left. Python raises such errors in several forms, and a task
    group wraps them."""
    match error:
        case BaseExceptionGroup(exceptions=wrapped):
            return any(map(lacks_memory, wrapped))
        case MemoryError():
            return True
        case OSError(errno=number):  # OpenSSL reports it only in the text
            return number == errno.ENOMEM or "] malloc failure" in str(error)
        case RuntimeError():
            return str(error) == "can't start new thread"
        case ImportError():  # an extension module
            return "annot allocate memory" in str(error) or "failed to map segment" in str(error)
        case SystemError():  # an import that ran out of memory
            return str(error) == "error return without exception set"
        case _:
            return False
