"""Gets documents from the web, but only from hosts that were allowed.

Each host is resolved once, all its addresses are checked, and the connection goes to a checked address. So a name
server cannot lead the connection into a private network by giving a different answer to a second query. A redirect is
followed only if the user's rules allow its target, or if the target is the same document. Any other redirect is
returned, because the user has to be asked again. Size, time and the number of redirects are limited. No proxy, cookies
or credentials are used.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.to_thread
import httpx2

from crow.domain.errors import ArgumentError
from crow.tools.urls import NO_URL_RULES, PORTS, UrlRules, is_address, join_url, normalize_url

MAX_BYTES = 5_000_000
_TIMEOUT_S = 30.0
_MAX_REDIRECTS = 5
_HEADERS = {"User-Agent": "crow", "Accept": "text/html, text/*, application/json;q=0.9, */*;q=0.5"}
_REMEDY = "the user can allow such addresses with permissions.fetch_private = true"
_IPV4_IN_IPV6 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))
_LOCAL = (ipaddress.ip_network("fec0::/10"), ipaddress.ip_network("64:ff9b:1::/48"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A response."""

    url: str
    status: int
    media: str = ""
    """The media type in lower case, without parameters. Empty if the server declared none."""
    charset: str = ""
    """The charset that the server declared. Empty if it declared none."""
    data: bytes = b""
    is_cut: bool = False
    """If set, `data` holds only the first bytes."""
    moved_to: str | None = None
    """The target of a redirect that was not followed. The document then has no data. None for any other response."""


async def get(url: str, *, allow_private: bool, rules: UrlRules = NO_URL_RULES) -> Document:
    """Get a document. `rules` decide which redirects are followed.

    :raises ~crow.domain.errors.ArgumentError: the request failed. The message is for the model.
    """
    url = normalize_url(url)
    try:
        with anyio.fail_after(_TIMEOUT_S):
            for _ in range(_MAX_REDIRECTS + 1):
                document = await _get_once(url, allow_private=allow_private)
                if document.moved_to is None:
                    return document
                target = join_url(url, document.moved_to)
                if not may_follow(url, target, rules):
                    return Document(url=url, status=document.status, moved_to=target)
                url = target
    except TimeoutError:
        raise ArgumentError(f"{url} did not answer within {_TIMEOUT_S:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ArgumentError(f"{url}: {' '.join(str(error).split()) or type(error).__name__}") from None
    raise ArgumentError(f"{url} was redirected more than {_MAX_REDIRECTS} times")


def may_follow(url: str, target: str, rules: UrlRules) -> bool:
    """Return whether a redirect may be followed without asking again. Both URLs are in normal form.

    The redirect must stay on the same host and must not go from https to http. The port may change only from http to
    https. The target must be the same document, apart from a slash at the end of the path, or a rule must allow it.
    """
    before, after = urlsplit(url), urlsplit(target)
    is_upgrade = (before.scheme, after.scheme) == ("http", "https")
    if before.hostname != after.hostname or (before.scheme, after.scheme) == ("https", "http"):
        return False
    if before.port != after.port and not is_upgrade:
        return False
    judgement = rules.judge(target)
    is_same = (before.path.rstrip("/"), before.query) == (after.path.rstrip("/"), after.query)
    return judgement == "allow" or (judgement == "ask" and is_same)


async def _get_once(url: str, *, allow_private: bool) -> Document:
    """Send one request to a checked address. Return a redirect without following it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    address = await checked_address(host, port, allow_private=allow_private)
    place = f"[{address}]" if ":" in address else address
    pinned = urlunsplit((parts.scheme, f"{place}:{port}", parts.path, parts.query, ""))
    is_tls = parts.scheme != "http"
    # in a thread, because for TLS it reads the system's certificates
    client = await anyio.to_thread.run_sync(
        lambda: httpx2.AsyncClient(verify=is_tls, trust_env=False, timeout=_TIMEOUT_S)
    )
    headers, extensions = {**_HEADERS, "Host": parts.netloc}, {} if is_address(host) else {"sni_hostname": host}
    async with (
        client,
        client.stream("GET", pinned, headers=headers, extensions=extensions, follow_redirects=False) as response,
    ):
        location = response.headers.get("location")
        if response.is_redirect and location:
            return Document(url=url, status=response.status_code, moved_to=location)
        data = bytearray()
        async for piece in response.aiter_bytes(65_536):
            data += piece
            if len(data) > MAX_BYTES:
                break
    media, _, parameters = response.headers.get("content-type", "").partition(";")
    return Document(
        url=url,
        status=response.status_code,
        media=media.strip().lower(),
        charset=parameters.lower().partition("charset=")[2].strip(" \"'").partition(";")[0],
        data=bytes(data[:MAX_BYTES]),
        is_cut=len(data) > MAX_BYTES,
    )


async def checked_address(host: str, port: int, *, allow_private: bool, remedy: str = _REMEDY) -> str:
    """Return an address of `host`. :raises ~crow.domain.errors.ArgumentError: the host has no address, or it has a
    private address although `allow_private` is not set. `remedy` says how the user can allow that."""
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ArgumentError(f"there is no host {host}") from None
    addresses = [str(entry[4][0]) for entry in found]
    private = [address for address in addresses if not is_public(address)]
    if private and not allow_private:
        raise ArgumentError(f"{host} is at {private[0]}, a private address; {remedy}")
    return addresses[0]


def is_public(text: str) -> bool:
    """Return whether an address, and any IPv4 address embedded in it, belong to the public internet."""
    address = ipaddress.ip_address(text.partition("%")[0])
    addresses = [address]
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _LOCAL):
            return False
        inner = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
        addresses += [each for each in inner if each is not None]
        if any(address in network for network in _IPV4_IN_IPV6):
            addresses.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(each.is_global and not each.is_multicast for each in addresses)
