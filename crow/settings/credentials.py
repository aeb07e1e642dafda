"""The credentials that crow adds to HTTPS requests of confined commands, and how crow reads them.

This module does not import `annotations` from `__future__`, for the same reason as `values.py`.
"""

import base64
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from crow.domain.errors import ConfigError
from crow.programs import CommandFailed, helper_environment, named_program, output_of, trusted_path
from crow.settings.types import Expected, NonEmpty, Section, Switch, Variable

CREDENTIAL_HOST = re.compile(
    r"(?!.*\.\.)[a-z0-9_-][a-z0-9_.-]{0,251}[a-z_-][a-z0-9_-]{0,62}(?::[1-9][0-9]{0,4})?", re.ASCII
)
"""Matches the NAME of a table `[credentials.NAME]`: a host name in lower case, with a port unless it is 443. IP
addresses do not match."""
_TIMEOUT_S = 30.0
_REMOVED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_ASKPASS", "SSH_ASKPASS", "GIT_CONFIG_PARAMETERS", "GIT_EXEC_PATH")


class CredentialSettings(Section):
    """A credential for one host. Crow adds it, outside of the sandbox, to the HTTPS requests that confined commands
    send to this host."""

    from_git: Switch = False
    """Whether crow asks git's credential helpers for the user name and the password. Git settings in repositories are
    ignored."""
    token_env: Variable | None = None
    """The name of the environment variable that holds the token. Commands do not get this variable."""
    token_command: Annotated[
        Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
        Expected('a command as a list, such as ["gh", "auth", "token"]'),
    ] = None
    """A command that prints the token. Crow runs it when a command first needs the credential."""
    user: Annotated[NonEmpty, Expected('a user name, such as "x-access-token"')] | None = None
    """The user name for Basic authentication, with the token as the password. If unset, the token is sent as `Bearer
    TOKEN`. A token that contains a space is sent as it is. With from_git, the user name comes from git instead."""
    header: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")], Expected('the name of a header, such as "X-Api-Key"')
    ] = "Authorization"
    """The header of the credential. Headers other than Authorization get the token alone."""
    access: Annotated[Literal["read", "ask", "write"], Expected('"read", "ask" or "write"')] = "ask"
    """What commands may do with the credential. "read" is only for reading. "ask" asks about each push, and about each
    other request that may change something. "write" is for everything, without such questions."""
    ca_file: Annotated[NonEmpty, Expected("the path of a PEM file")] | None = None
    """A PEM file with more certificate authorities to trust at this host. The path may be relative to the directory of
    config.toml."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.from_git + (self.token_env is not None) + (self.token_command is not None) != 1:
            raise ValueError
        return self

    @property
    def source(self) -> str:
        """Where the secret comes from, in words."""
        return "git's credential helpers" if self.from_git else self.token_env or "token_command"


def read_credential(
    host: str, settings: CredentialSettings, git: str | None, is_inside: Callable[[Path], bool] = lambda _path: False
) -> tuple[str, str]:
    """Return the secret, and the value of the header that contains it. This function blocks while a command runs.

    `git` is the path of git, or None if there is none that crow can trust. `is_inside` returns whether a path is in
    the workspace: crow starts no programs from there.

    :raises ConfigError: there is no secret, or it is not valid. The message does not contain the secret.
    """
    user, secret = settings.user, ""
    if settings.from_git:
        user, secret = _from_git(host, git, is_inside)
    elif settings.token_env is not None:
        secret = os.environ.get(settings.token_env, "").strip()
        if not secret:
            raise ConfigError(f"the environment variable {settings.token_env} is not set")
    elif settings.token_command is not None:
        program = named_program(settings.token_command[0], is_inside)
        if program is None:
            raise ConfigError(f"there is no program {settings.token_command[0]}")
        secret = _printed([program, *settings.token_command[1:]], settings.source).strip()
        if not secret:
            raise ConfigError(f"{settings.source} printed nothing")
    if not secret.isascii() or not secret.isprintable():
        raise ConfigError(f"the secret from {settings.source} is not one line of plain ASCII")
    if user is not None:
        return secret, f"Basic {base64.b64encode(f'{user}:{secret}'.encode()).decode()}"
    is_whole = " " in secret or settings.header.lower() != "authorization"
    return secret, secret if is_whole else f"Bearer {secret}"


def _from_git(host: str, git: str | None, is_inside: Callable[[Path], bool]) -> tuple[str, str]:
    """Return the user name and the password from git's credential helpers, without a dialogue. git runs in the root
    directory, so that the settings of no repository apply."""
    if git is None:
        raise ConfigError("there is no git that crow can trust")
    env = {name: value for name, value in helper_environment(os.environ)[0].items() if name not in _REMOVED}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GCM_INTERACTIVE": "never", "PATH": trusted_path(is_inside)}
    command = [git, "-C", os.sep, "-c", "core.askPass=", "credential", "fill"]
    printed = _printed(command, "git credential fill", f"protocol=https\nhost={host}\n\n".encode(), env)
    found = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
    if not found.get("password"):
        raise ConfigError(f"git has no credential for https://{host}")
    return found.get("username", ""), found["password"]


def _printed(command: list[str], name: str, data: bytes = b"", env: Mapping[str, str] | None = None) -> str:
    try:
        return output_of(command, timeout_s=_TIMEOUT_S, data=data, env=env)
    except CommandFailed as error:
        raise ConfigError(f"{name} {error}") from None
