"""The error for what the person at the command line can mend."""


class CheckError(Exception):
    """An option, a file or the agent's command cannot be used. The message says why."""
