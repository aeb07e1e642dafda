"""Getting a document from the web without letting it lead anywhere else.

Strategy: a host is resolved once, every address it has is judged, and the connection goes to the address that was
judged, so that no second answer of a name server can lead into a private network. Redirects within the host are
followed and judged again; one to another host is handed back, since it is another question to the user. Size, time
and number of redirects are bounded. No proxy, no cookies, no credentials.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit, urlunsplit

import anyio
import anyio.to_thread
import httpx2

from crow.domain.errors import ArgumentError

__all__ = ["Document", "get", "plain_url"]

URL_CHARS = 8_192
MOST_BYTES = 5_000_000
TIMEOUT_S = 30.0
MOST_REDIRECTS = 5
PORTS = {"http": 80, "https": 443}
WRAPPING = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))
"""Addresses of IPv6 that end in one of IPv4."""

LOCAL = (ipaddress.ip_network("fec0::/10"), ipaddress.ip_network("64:ff9b:1::/48"))
HEADERS = {"User-Agent": "crow", "Accept": "text/html, text/*, application/json;q=0.9, */*;q=0.5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What was there. `media` is the media type in lower case, `charset` as declared or empty; `is_cut`: there was
    more than the bound. `moved_to` is another host's address to ask the user about; then there is no data."""

    url: str
    status: int
    media: str = ""
    charset: str = ""
    data: bytes = b""
    is_cut: bool = False
    moved_to: str | None = None


def plain_url(text: str) -> str:
    """`text` as a URL with scheme, host and path, without user name and fragment.

    :raises ~crow.domain.errors.ArgumentError: it is none.
    """
    if len(text) > URL_CHARS:
        raise ArgumentError(f"fetch: url has {len(text):,} characters; expected at most {URL_CHARS:,}")
    try:
        parts = urlsplit(text.strip())
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii") if not is_address(parts.hostname) else ""
    except (ValueError, UnicodeError):
        raise ArgumentError(f"fetch: url is {text!r}; expected an http or https URL") from None
    host = host or (parts.hostname or "")
    if parts.scheme not in PORTS or not host or parts.username is not None or parts.password is not None:
        raise ArgumentError(f"fetch: url is {text!r}; expected an http or https URL without user name and password")
    place = f"[{host}]" if ":" in host else host
    if port is not None and port != PORTS[parts.scheme]:
        place += f":{port}"
    return urlunsplit((parts.scheme, place, parts.path or "/", parts.query, ""))


def is_address(host: str | None) -> bool:
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return True


async def get(url: str, *, allow_private: bool) -> Document:
    """Get a document. :raises ~crow.domain.errors.ArgumentError: it cannot be had, in words for the model."""
    url = plain_url(url)
    try:
        with anyio.fail_after(TIMEOUT_S):
            for _ in range(MOST_REDIRECTS + 1):
                document = await get_once(url, allow_private=allow_private)
                if document.moved_to is None:
                    return document
                target = plain_url(urljoin(url, document.moved_to))
                if not is_same_place(url, target):
                    return Document(url=url, status=document.status, moved_to=target)
                url = target
    except TimeoutError:
        raise ArgumentError(f"fetch: {url} did not answer within {TIMEOUT_S:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ArgumentError(f"fetch: {url}: {' '.join(str(error).split()) or type(error).__name__}") from None
    raise ArgumentError(f"fetch: {url} was redirected more than {MOST_REDIRECTS} times")


def is_same_place(url: str, target: str) -> bool:
    """Whether a redirect stays with the host (and does not give up encryption)."""
    before, after = urlsplit(url), urlsplit(target)
    if before.hostname != after.hostname or (before.scheme, after.scheme) == ("https", "http"):
        return False
    return before.port == after.port or (before.scheme, after.scheme) == ("http", "https")


async def get_once(url: str, *, allow_private: bool) -> Document:
    """One request, to an address that was judged."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    address = await judged_address(host, parts.port or PORTS[parts.scheme], allow_private=allow_private)
    place = f"[{address}]" if ":" in address else address
    pinned = urlunsplit((parts.scheme, f"{place}:{parts.port or PORTS[parts.scheme]}", parts.path, parts.query, ""))
    make = anyio.to_thread.run_sync(client)  # it reads the certificates of the system
    async with await make as http:
        extensions = {} if is_address(host) else {"sni_hostname": host}
        request = http.build_request("GET", pinned, headers={**HEADERS, "Host": parts.netloc}, extensions=extensions)
        response = await http.send(request, stream=True)
        try:
            location = response.headers.get("location")
            if response.is_redirect and location:
                return Document(url=url, status=response.status_code, moved_to=location)
            data = bytearray()
            async for piece in response.aiter_bytes(65_536):
                data += piece
                if len(data) > MOST_BYTES:
                    break
        finally:
            await response.aclose()
    media, _, parameters = response.headers.get("content-type", "").partition(";")
    charset = parameters.lower().partition("charset=")[2].strip(" \"'").partition(";")[0]
    return Document(
        url=url,
        status=response.status_code,
        media=media.strip().lower(),
        charset=charset,
        data=bytes(data[:MOST_BYTES]),
        is_cut=len(data) > MOST_BYTES,
    )


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=TIMEOUT_S)


async def judged_address(host: str, port: int, *, allow_private: bool) -> str:
    """An address of `host` that may be asked. :raises ~crow.domain.errors.ArgumentError: there is none."""
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ArgumentError(f"fetch: there is no host {host}") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    private = [address for address in addresses if not is_public(address)]
    if private and not allow_private:
        raise ArgumentError(
            f"fetch: {host} is at {private[0]}, a private address; the user can allow those with "
            "permissions.fetch_private = true"
        )
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address belongs to the whole internet; one that wraps another is judged by that too."""
    address = ipaddress.ip_address(text.partition("%")[0])
    inside = [address]
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
        inside += [each for each in wrapped if each is not None]
        if any(address in network for network in WRAPPING):
            inside.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(address in network for network in LOCAL):
            return False
    return all(each.is_global and not each.is_multicast for each in inside)
