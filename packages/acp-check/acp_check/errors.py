"""The error for what the person at the command line can mend."""


class CheckError(Exception):
    """An option, a file or the agent's command cannot be used. The message says why."""


class AgentEnded(Exception):
    """The agent ended before it answered the first `initialize`."""

    def __init__(self, code: int | None) -> None:
        super().__init__(
            f"The agent ended{'' if code is None else f' with exit code {code}'} before it answered initialize."
        )
