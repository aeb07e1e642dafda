"""The configuration of one endpoint and model."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from crow.domain.errors import AuthError, ConfigError
from crow.domain.text import describe
from crow.llm import ModelInfo, ModelLimits, ThoughtLevel
from crow.llm.dialect import Dialect

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The form of names of headers (RFC 9110, section 5.6.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTimeouts:
    """Timeouts in seconds."""

    connect_s: float = 15.0
    """The limit for opening a connection."""
    first_byte_s: float = 300.0
    """The limit for each wait before the first piece of text, reasoning or a call. A local model may take minutes to
    read its prompt, and others think without sending anything."""
    idle_s: float = 120.0
    """The limit for each later wait for more data."""
    grace_s: float = 2.0
    """The limit for usage and `[DONE]` after the finish reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(ModelLimits):
    """An endpoint, a model that it serves, and the settings for requests."""

    base_url: str
    """The URL without `/chat/completions` and the like."""
    messages_url: str = ""
    """The URL of the Messages API without `/messages`. Empty if it is the same as `base_url`."""
    model: str
    """The model's name."""
    api_key: str | None = field(default=None, repr=False)
    """The key, if one is set."""
    key_hint: str = "Set OPENAI_API_KEY"
    """Tells the user where to set the key."""
    needs_key: bool = True
    """Whether a key is required, unless the endpoint is on this machine or its local network."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The user's own headers."""
    timeouts: EndpointTimeouts = field(default_factory=EndpointTimeouts)
    """How long crow waits for the endpoint."""
    extra_body: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Members that are added to every request."""
    thought_level: ThoughtLevel | None = None
    """The thought level of requests that name none."""
    dialect: Dialect = field(default_factory=Dialect)
    """The form of requests as configured, before the endpoint has refused any part."""
    proxy: str | None = field(default=None, repr=False)
    """The proxy. If None, the environment variables for proxies apply."""
    ca_file: str | None = None
    """A PEM file with certificate authorities that crow trusts in addition to the usual ones."""

    @property
    def name(self) -> str:
        """The base URL and the model, separated by a space. This name is stored with each answer."""
        return f"{self.base_url} {self.model}"

    @property
    def sends_authorization(self) -> bool:
        """Whether requests have the header `Authorization`. If no key is set, crow sends a placeholder, because some
        local servers expect a key."""
        has_header = any(name.lower() == "authorization" for name, _ in self.headers)
        return self.needs_key or self.api_key is not None or has_header

    @property
    def info(self) -> ModelInfo:
        """The model as configured."""
        limits = {each.name: getattr(self, each.name) for each in fields(ModelLimits)}
        is_configured = self.context_window is not None
        return ModelInfo(
            name=self.model,
            endpoint=self.name,
            is_local=is_local(self.base_url),
            is_window_configured=is_configured,
            wire=self.dialect.wire,
            **limits,
        )

    def check(self) -> None:
        """See :meth:`crow.llm.Model.check`."""
        if not self.model:
            raise ConfigError(
                "No model is set. Run `crow login`, or set CROW_MODEL or model.name in config.toml. In an editor, you "
                "can also choose one in its menu or with /model NAME."
            )
        try:
            parts = urlsplit(self.base_url)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            problem = f'The base URL "{self.base_url}" cannot be used'
            raise ConfigError(f"{problem}; expected a URL such as http://localhost:11434/v1.")
        if not self.api_key and self.needs_key and not is_local(self.base_url):
            raise AuthError(
                f'{self.base_url} needs a key for the model "{self.model}", and none is set. {self.key_hint}, or '
                "use a local endpoint (OPENAI_BASE_URL), or the built-in model (CROW_MODEL=offline)."
            )
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            problem = f"The key for {self.base_url} contains characters that are not allowed in a key."
            raise AuthError(f"{problem} {self.key_hint}, without line breaks.")
        self.check_headers()
        try:
            json.dumps(self.extra_body, allow_nan=False, default=dict)
        except (TypeError, ValueError):
            raise ConfigError(
                f"extra_body for {self.base_url} has a value that JSON does not have, such as a date or nan; write it "
                "as a string or a finite number."
            ) from None

    def check_headers(self) -> None:
        """Check that the user's own headers can be sent. The error does not show their values, which may be secret.

        :raises ~crow.domain.errors.ConfigError: a header has characters that HTTP does not allow.
        """
        for name, value in self.headers:
            if not (_HEADER_NAME.fullmatch(name) and value.isascii() and value.isprintable()):
                raise ConfigError(
                    f"The header {describe(name)} for {self.base_url} has characters that are not allowed in a header; "
                    "use plain ASCII without line breaks."
                )


def is_local(base_url: str) -> bool:
    """Return whether the URL points to this machine or its local network."""
    try:
        host = urlsplit(base_url).hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal", ".lan")):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host and bool(host)
    return address.is_loopback or address.is_private or address.is_link_local or address.is_unspecified
