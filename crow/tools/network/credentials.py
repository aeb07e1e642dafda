"""The user's credentials for hosts: crow adds them to requests of commands, which never see them."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.to_thread

from crow.domain.errors import ConfigError
from crow.domain.secret_values import secrets_in
from crow.tools.network.hosts import Host

if TYPE_CHECKING:
    from crow.tools.network.authority import Authority

logger = logging.getLogger(__name__)

_SYSTEM_BUNDLES = (
    *("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"),
    *("/etc/ssl/cert.pem", "/etc/pki/tls/cert.pem", "/etc/ssl/ca-bundle.pem"),
)
_BUNDLE_VARIABLES = (
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
)
"""Variables that name a file with certificate authorities. Programs trust these instead of the system's."""
_MORE_VARIABLES = ("NODE_EXTRA_CA_CERTS",)
"""Variables that name a file with certificate authorities. Programs trust these in addition to the system's."""
_IF_SET = ("GIT_SSL_CAINFO",)
"""Like `_BUNDLE_VARIABLES`, but changed only if the user has set them. Otherwise git's settings for each host suffice;
this variable would override them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A secret of the user, which crow adds to HTTPS requests to one host."""

    host: Host
    read: Callable[[], tuple[str, str]]
    """Returns the secret, and the value of the header that contains it. This call blocks. It raises a
    :class:`~crow.domain.errors.ConfigError` if there is no secret."""
    header: str = "Authorization"
    """The name of the header."""
    access: Literal["read", "ask", "write"] = "ask"
    """Whether commands may use the credential for requests that change something: never (`read`), if the user allows it
    (`ask`), or always (`write`)."""
    ca_file: Path | None = None
    """More certificate authorities to trust at this host."""


@dataclass(frozen=True, slots=True)
class Added:
    """The header that is added to a request, and the secrets that are masked in the response."""

    value: bytes
    """The value of the header."""
    secrets: tuple[bytes, ...]
    """The secrets, longest first. Texts that may occur anywhere by chance are left out."""


class Credentials:
    """The credentials that the commands of one session can use. `on_secret` is called with each secret that was read,
    so that it can be masked elsewhere, too."""

    def __init__(
        self, credentials: Sequence[Credential] = (), on_secret: Callable[[str], object] = lambda _secret: None
    ) -> None:
        self._by_host = {credential.host: credential for credential in credentials}
        self._on_secret = on_secret
        self._added: dict[Host, Added] = {}
        self._contexts: dict[Host, tuple[ssl.SSLContext, ssl.SSLContext]] = {}
        self._lock = anyio.Lock()

    def __bool__(self) -> bool:
        return bool(self._by_host)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts with a credential."""
        return tuple(map(str, self._by_host))

    def find(self, host: Host) -> Credential | None:
        """Return the credential for exactly this host and port."""
        return self._by_host.get(host)

    @cached_property
    def _authority(self) -> Authority:
        from crow.tools.network.authority import Authority  # imports cryptography, which takes 50 ms

        return Authority([host.name for host in self._by_host])

    async def contexts(self, credential: Credential) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return two TLS contexts for the host of a credential: the one with which the proxy answers commands in place
        of the host, and the one that checks the host's own certificate.

        :raises OSError: the file with certificate authorities cannot be read.
        """
        async with self._lock:
            if credential.host not in self._contexts:
                self._contexts[credential.host] = await anyio.to_thread.run_sync(self._new_contexts, credential)
            return self._contexts[credential.host]

    def _new_contexts(self, credential: Credential) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        from httpx2 import create_ssl_context  # imported for the first request to a model, not at the start

        checking = create_ssl_context()
        if credential.ca_file is not None:
            checking.load_verify_locations(credential.ca_file)
        return self._authority.context(credential.host.name), checking

    async def added(self, credential: Credential) -> Added:
        """Return the header to add. The secret is read once, and again after `forget`.

        :raises ~crow.domain.errors.ConfigError: there is no secret.
        """
        async with self._lock:
            if credential.host not in self._added:
                secret, value = await anyio.to_thread.run_sync(credential.read)
                known = dict.fromkeys((value, value.rpartition(" ")[2], secret, *secrets_in(secret)))
                for each in known:
                    self._on_secret(each)
                shown = [each.encode() for each in known if each == value or each in secrets_in(each)]
                self._added[credential.host] = Added(value.encode(), tuple(sorted(shown, key=len, reverse=True)))
            return self._added[credential.host]

    def forget(self, credential: Credential) -> None:
        """Let `added` read the secret again, because the host did not accept it."""
        self._added.pop(credential.host, None)

    def environment(self, env: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Return variables for a command whose environment is `env`. With them, programs trust the certificates with
        which crow answers in place of these hosts, and git uses HTTPS there instead of SSH. This method writes the
        certificates into `folder`. It blocks.

        :raises OSError: the certificates cannot be written.
        """
        own = folder / "crow.pem"
        _write(own, self._authority.pem)
        usual = next(filter(os.path.isfile, _SYSTEM_BUNDLES), None)
        variables = {}
        for name in (*_BUNDLE_VARIABLES, *_MORE_VARIABLES, *(name for name in _IF_SET if name in env)):
            is_whole = name not in _MORE_VARIABLES
            given = env.get(name) or ((env.get("SSL_CERT_FILE") or usual) if is_whole else None)
            if given is not None:
                variables[name] = str(self._bundle(given, folder))
            elif not is_whole:
                variables[name] = str(own)
        settings = [setting for host in self._by_host for setting in _git_settings(host, own)]
        first = int(env["GIT_CONFIG_COUNT"]) if env.get("GIT_CONFIG_COUNT", "").isdecimal() else 0
        for number, (key, value) in enumerate(settings, first):
            variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
        return variables | {"GIT_CONFIG_COUNT": str(first + len(settings))}

    def _bundle(self, given: str, folder: Path) -> Path:
        """Return a file with the certificates in the file `given`, and crow's own."""
        bundle = folder / f"{hashlib.sha256(os.fsencode(given)).hexdigest()[:16]}.pem"
        if not bundle.exists():
            _write(bundle, _content(given) + b"\n" + self._authority.pem)
        return bundle


def _git_settings(host: Host, bundle: Path) -> list[tuple[str, str]]:
    """Return settings of git for one host: the file with certificates to trust, and HTTPS in place of SSH."""
    url = f"https://{host}/"
    old = (f"git@{host.name}:", f"ssh://git@{host.name}/")
    return [(f"http.{url}.sslCAInfo", str(bundle)), *((f"url.{url}.insteadOf", each) for each in old)]


def _write(path: Path, data: bytes) -> None:
    """Write a file, unless it exists. Another command that reads it at the same time sees all of it or nothing."""
    if not path.exists():
        new = path.with_suffix(f".{threading.get_ident()}")
        new.write_bytes(data)
        new.replace(path)


def _content(file: str) -> bytes:
    """Return the content of a file with certificates; nothing if it cannot be read."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        logger.warning("Commands do not trust the certificates in %s: %s", file, error)
        return b""


NO_CREDENTIALS = Credentials()


def problem_of(error: ConfigError) -> str:
    """Return why a credential cannot be read, for the model. The output of `token_command` is left out, because it may
    hold a secret."""
    return str(error).partition(": ")[0]
