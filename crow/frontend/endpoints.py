"""The providers that a client may set, and the credentials that a client may ask about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

from crow.domain.errors import ArgumentError
from crow.protocol.frames import describe_member

ApiType: TypeAlias = Literal["openai", "anthropic", "azure"]
"""The kinds of endpoints that crow can use, as the protocol names them."""

AuthState: TypeAlias = Literal["authenticated", "unauthenticated", "not_required", "unknown"]

_MAX_HEADERS = 100
_MAX_VALUE_CHARS = 16_384
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A model provider whose address the client may set."""

    id: str
    """The id by which clients name the provider."""
    current: tuple[ApiType, str] | None
    """The kind and the URL of the endpoint, or None if the client has disabled the provider."""
    is_required: bool
    """Whether the client may not disable the provider."""

    def as_json(self) -> dict[str, Any]:
        """Return the provider as an item of the response to `providers/list`."""
        current = None if self.current is None else {"apiType": self.current[0], "baseUrl": self.current[1]}
        supported = list(get_args(ApiType))
        return {"providerId": self.id, "supported": supported, "required": self.is_required, "current": current}


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials that crow has."""

    state: AuthState
    """Whether crow can send requests."""
    accounts: Mapping[str, bool]
    """A label for each endpoint with a key, and whether the default model uses the endpoint."""

    def as_json(self) -> dict[str, Any]:
        """Return the response to `auth/status`."""
        return {
            "state": self.state,
            "accounts": [{"label": label, "active": active} for label, active in self.accounts.items()],
        }


LOGGED_OUT_STATUS: dict[str, Any] = {"state": "unauthenticated", "accounts": []}
"""The response to `auth/status` after `logout`."""


class Endpoints(Protocol):
    """The endpoints of this process. If the client changes them, the changes last until the process ends."""

    def providers(self) -> Sequence[Provider]:
        """Return all providers, including those that the client has disabled."""
        ...

    def set_provider(self, provider_id: str, api_type: ApiType, base_url: str, headers: Mapping[str, str]) -> None:
        """Change the address of a provider. From now on, requests to the provider go to that address, with these
        headers and without the user's key.

        :raises ArgumentError: there is no such provider, or the address cannot be used.
        """
        ...

    def disable_provider(self, provider_id: str) -> None:
        """Stop using a provider. Do nothing if the provider is unknown.

        :raises ArgumentError: this provider may not be disabled.
        """
        ...

    def credentials(self) -> Credentials:
        """Return the credentials that crow has now."""
        ...


def set_provider(endpoints: Endpoints, params: Mapping[str, Any]) -> None:
    """Carry out `providers/set`. :raises ArgumentError: a parameter cannot be used. In this case, nothing is
    changed."""
    api_type: ApiType | None = next((each for each in get_args(ApiType) if each == params["apiType"]), None)
    if api_type is None:
        known = ", ".join(f'"{each}"' for each in get_args(ApiType))
        raise ArgumentError(f"apiType is {describe_member(params['apiType'])}; crow supports {known}.")
    headers = params.get("headers", {})
    if len(headers) > _MAX_HEADERS:
        raise ArgumentError(f"headers has {len(headers)} members; expected at most {_MAX_HEADERS}.")
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ArgumentError(f"headers: {describe_member(name)} is not the name of an HTTP header.")
        if len(value) > _MAX_VALUE_CHARS or not (value.isascii() and (not value or value.isprintable())):
            raise ArgumentError(
                f"headers.{name}: expected at most {_MAX_VALUE_CHARS} printable ASCII characters without line breaks."
            )
    endpoints.set_provider(params["providerId"], api_type, params["baseUrl"], headers)
