"""Logs in to MCP servers with OAuth, and keeps the logins valid.

The SDK's `OAuthClientProvider` decides which requests to send, for discovery, registration, PKCE, refresh and wider
scopes. It yields these requests, and crow sends them itself, through `LoginClient`: they must not carry the headers
that the user has set for the MCP server, must not go to arbitrary addresses, and must not delay other calls to the
server while the user logs in.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.to_thread
import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.utils import extract_field_from_www_auth, extract_scope_from_www_auth
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)
from pydantic import AnyUrl

from crow.domain.errors import ArgumentError, LoginRequired, ToolServerError
from crow.domain.text import on_one_line
from crow.tools.mcp.calls import describe_error, page_to_open
from crow.tools.mcp.exchange import LoginClient, finish, plain_url
from crow.tools.mcp.logins import POLL_S, Account, Login, LoginFolder
from crow.tools.mcp.redirect import RedirectListener, code_from, listening
from crow.tools.servers import HttpServer, LoginAsker, LoginQuestion
from crow.tools.urls import normalize_url

logger = logging.getLogger(__name__)
# The SDK logs each failed login with a traceback that may contain codes and tokens. Crow logs the reason itself.
logging.getLogger("mcp.client.auth.oauth2").setLevel(logging.CRITICAL)

_CLIENT_NAME = "Crow"
_LOGIN_S = 900.0
"""The user has this many seconds to log in with the browser."""
_EARLY_S = 30.0
"""A token is refreshed this many seconds before it expires."""
_RETRY_S = 15.0
"""For this many seconds after a failed attempt to get a token, crow does not try again. Requests that need a new token
fail at once."""
_FINISH_S = 5.0
"""A refresh that is cancelled, for example because crow ends, still has this many seconds."""
_REASON_CHARS = 300
_TOKEN = re.compile(r"[!-~]{1,16384}")


@dataclass(eq=False, kw_only=True)
class ServerAuth(httpx2.Auth):
    """Adds the token to each request to an MCP server, and gets a new token if the server asks for one."""

    server: HttpServer
    logins: LoginFolder
    asker: LoginAsker
    hold: Callable[[bool], AbstractContextManager[None]]
    """Returns a context that suspends the time limit for the server's start while crow gets a token. The argument says
    whether the server has asked for the token."""
    forces_login: bool = False
    """The user is asked to log in even if a login is stored."""
    problem: str = ""
    """Why crow has no token that the server accepts. Empty if there is no problem."""
    _login: Login | None = None
    """The login in use. None if there is none, or before it was read."""
    _is_read: bool = False
    """Whether crow has looked for a stored login."""
    _is_final: bool = False
    """Whether no further attempt can succeed until `reset`: the user has declined, or the server has refused a token
    that was just issued."""
    _failed_at: float = -_RETRY_S
    """The monotonic time of the last failure, in seconds."""
    _steps: set[str] = field(default_factory=set)
    """The wider scopes that the server has asked for, and for which the user has logged in since."""
    _refused: set[str] = field(default_factory=set)
    """The access tokens that crow must not send again."""
    _fresh: set[str] = field(default_factory=set)
    """Holds the token of the last refresh until the server has accepted it. If the server refuses this token, the user
    must log in."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def account(self) -> Account:
        """The server and account that the login is for."""
        return account_of(self.server)

    def reset(self) -> None:
        """Forget earlier failures: the user wants another attempt."""
        self.problem, self._is_final, self._failed_at, self._is_read = "", False, -_RETRY_S, False
        self._steps.clear()
        self._refused.clear()
        self._fresh.clear()

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """See `httpx2.Auth`. A failed login raises no exception: the caller gets the server's refusal as the response,
        and `problem` says why there is no token."""
        token = await self._token_for(request)
        response = yield request
        asked_for: set[int] = set()
        while _is_challenge(response) and response.status_code not in asked_for:
            status = response.status_code
            try:
                with self.hold(True):
                    token, was_asked = await self._renew(request, response, token)
            except ToolServerError as error:
                self._note(error)
                return
            if was_asked:
                asked_for.add(status)
            response = yield request
        if _is_challenge(response):
            words = "it refuses the token that its authorization server has just issued"
            self._note(ToolServerError(f"{words}; to log in again, run {self._command}"))
            self._is_final = True
        elif response.is_success and token:
            self.problem = ""
            self._fresh.discard(token)

    async def _token_for(self, request: httpx2.Request) -> str:
        """Add the token to `request`; if the token expires soon, refresh it first. Return the token, or an empty string
        if there is none."""
        try:
            if not self._is_read:
                self._login, self._is_read = await self._read(), True
                if self.forces_login and self._login is not None:
                    self._refused.add(self._login.token)
                    self._login = None
            login = self._login
            if login is not None and _ends_soon(login) and not self._must_wait() and not self._lock.locked():
                async with self._lock:
                    with self.hold(False):
                        self._login = await self._refreshed(request, login)
        except ToolServerError as error:
            self._note(error)
        if self._login is None:
            return ""
        _add_token(request, self._login)
        return self._login.token

    async def _renew(self, request: httpx2.Request, response: httpx2.Response, token: str) -> tuple[str, bool]:
        """Get a new token after the server refused `token`, and add it to `request`. Return the new token, and whether
        the user was asked to log in.

        :raises ToolServerError: no new token is available.
        """
        is_second = response.status_code == 401 and token in self._fresh
        if response.status_code == 401:
            self._refused.add(token)
        was_asked = False
        async with self._lock:
            login = self._login
            if login is None or login.token == token or login.token in self._refused:
                stored = await self._read()
                if stored is not None and stored.token != token and stored.token not in self._refused:
                    login = stored  # another session has logged in
                elif self._must_wait():
                    raise ToolServerError(self.problem)
                else:
                    must_ask = is_second or self.forces_login
                    refreshed = None if must_ask else await self._refreshed_after(request, response, stored)
                    was_asked = refreshed is None
                    login = refreshed or await self._new_login(request, response, stored)
                self._login = login
        _add_token(request, login)
        return login.token, was_asked

    async def _refreshed_after(
        self, request: httpx2.Request, response: httpx2.Response, login: Login | None
    ) -> Login | None:
        """Return the login with a refreshed token. Return None if there is no login, if the server wants wider scopes,
        or if the token cannot be refreshed."""
        if response.status_code != 401 or login is None:
            return None
        refreshed = await self._refreshed(request, login)
        return refreshed if refreshed is not None and refreshed.token != login.token else None

    async def _new_login(self, request: httpx2.Request, response: httpx2.Response, login: Login | None) -> Login:
        """Ask the user to log in. :raises ToolServerError: there is nobody to ask, or the login failed."""
        scope = extract_scope_from_www_auth(response) or ""
        if response.status_code == 403 and scope in self._steps:
            raise ToolServerError(
                "it still refuses the token after a login with the scope that it asked for "
                f"({on_one_line(scope)[:_REASON_CHARS]}); to log in again, run {self._command}"
            )
        if not self.asker.can_ask:
            raise LoginRequired(f"it needs you to log in; run {self._command}")
        made = await self._asked(request, response, login)
        if response.status_code == 403:
            self._steps.add(scope)
        return made

    async def _refreshed(self, request: httpx2.Request, login: Login) -> Login | None:
        """Return the login with a new token; None if the token cannot be refreshed.

        Only one session refreshes at a time, because many authorization servers accept a refresh token only once, and
        revoke all tokens if it is used twice. For the same reason, a cancelled refresh still has `_FINISH_S` to get the
        new token and store it.
        """
        if not login.tokens.get("refresh_token"):
            return login if not _has_ended(login) else None
        async with self.logins.locked(self.account, "refresh"):
            stored = await self._read()
            if stored is None or stored.token != login.token:
                return stored
            return await finish(partial(self._refresh, request, login), _FINISH_S)

    async def _refresh(self, request: httpx2.Request, login: Login) -> Login | None:
        """Get a new token and store it. Return None if the authorization server refuses to give one."""
        storage = _Storage(login=login)
        provider = self._provider(storage, None)
        provider.context.token_expiry_time = 1.0  # in the past, so that the SDK refreshes the token first
        await self._drive(provider, request, None)
        if not storage.is_changed:
            self._refused.add(login.token)
            return None
        made = await self._save(storage, provider)
        self._fresh = {made.token}
        return made

    async def _asked(self, request: httpx2.Request, response: httpx2.Response, login: Login | None) -> Login:
        """Ask the user to log in. If another session is already asking, use its login.

        :raises ToolServerError: the user did not log in.
        """
        found: Login | None = None
        known = login.token if login is not None else ""

        async def watch() -> None:
            nonlocal found
            while found is None:
                await anyio.sleep(POLL_S * 10)
                with suppress(ToolServerError):
                    stored = await self._read()
                    is_new = stored is not None and stored.token not in (known, *self._refused)
                    found = stored if is_new else None
            tasks.cancel_scope.cancel()

        made: Login | ToolServerError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                async with self.logins.locked(self.account, "ask"):
                    stored = await self._read()
                    is_new = stored is not None and stored.token not in (known, *self._refused)
                    made = stored if is_new else await self._authorized(request, response, stored)
            except ToolServerError as error:
                made = error
            tasks.cancel_scope.cancel()
        if isinstance(made, Login):
            return made
        if found is None:
            raise made or ToolServerError("the login was cancelled")
        return found

    async def _authorized(self, request: httpx2.Request, response: httpx2.Response, login: Login | None) -> Login:
        """Run the whole authorization flow, in which the user logs in with a browser.

        The browser comes back to the port in the settings, else to the port of the stored registration, else to a free
        port. :raises ToolServerError: the login failed, or crow cannot listen on the port.
        """
        options = self.server.oauth
        client = _client_of(login)
        port = options.redirect_port or _registered_port(client)
        try:
            return await self._authorized_at(port, client, request, response, login)
        except OSError as error:
            if not port:
                raise ToolServerError(
                    f"crow cannot listen for the browser on this machine: {error.strerror}"
                ) from error
            if options.redirect_port:
                raise ToolServerError(
                    f"port {port} cannot be used: {error.strerror}; end the program that uses it, or set "
                    "oauth_redirect_port to another port"
                ) from error
        # another program now uses the port of the stored registration; register again with a free port
        try:
            return await self._authorized_at(0, None, request, response, login, registers=True)
        except OSError as error:
            raise ToolServerError(f"crow cannot listen for the browser on this machine: {error.strerror}") from error

    async def _authorized_at(
        self,
        port: int,
        client: OAuthClientInformationFull | None,
        request: httpx2.Request,
        response: httpx2.Response,
        login: Login | None,
        *,
        registers: bool = False,
    ) -> Login:
        """Run the authorization flow. The authorization server sends the browser back to `port` on this machine.

        If `registers` is set, crow registers again instead of using the stored registration.
        """
        async with listening(port) as redirect:
            configured = self._configured_client(redirect.uri)
            storage = _Storage(login=login, client=configured or client, registers=registers)
            provider = self._provider(storage, redirect)
            await self._drive(provider, request, response)
            if not storage.is_changed:
                raise ToolServerError("its authorization server gave no token")
            return await self._save(storage, provider)

    def _configured_client(self, redirect_uri: str) -> OAuthClientInformationFull | None:
        options = self.server.oauth
        if not options.client_id:
            return None
        return OAuthClientInformationFull(
            client_id=options.client_id,
            client_secret=options.client_secret or None,
            redirect_uris=[AnyUrl(redirect_uri)],
            issuer=options.issuer or None,
        )

    def _provider(self, storage: _Storage, redirect: RedirectListener | None) -> OAuthClientProvider:
        """Make the SDK's provider for a login. Without `redirect`, the provider can only refresh the token."""
        options, page = self.server.oauth, ""

        async def open_page(url: str) -> None:
            nonlocal page
            page = url
            await self._check_page(provider, url)

        async def wait_for_code() -> AuthorizationCodeResult:
            assert redirect is not None, "without a redirect, the SDK only refreshes"
            return await self._code(redirect, _one_query(page))

        uri = redirect.uri if redirect is not None else "http://127.0.0.1/callback"
        provider = OAuthClientProvider(
            self.account.url,
            OAuthClientMetadata(redirect_uris=[AnyUrl(uri)], client_name=_CLIENT_NAME),
            storage,
            open_page,
            wait_for_code,
            options.client_metadata_url or None,
        )
        if storage.login is not None:
            context, stored = provider.context, storage.login
            with suppress(ValueError):
                context.oauth_metadata = OAuthMetadata.model_validate(stored.metadata) if stored.metadata else None
                resource = ProtectedResourceMetadata.model_validate(stored.resource) if stored.resource else None
                context.protected_resource_metadata = resource
                context.auth_server_url = str(resource.authorization_servers[0]) if resource is not None else None
        return provider

    async def _drive(
        self, provider: OAuthClientProvider, request: httpx2.Request, response: httpx2.Response | None
    ) -> None:
        """Send the requests that the SDK yields until the SDK has a token. Without `response`, the SDK only refreshes
        the token.

        :raises ToolServerError: the login failed.
        """
        exchange = LoginClient(self.account.url, self.server.oauth.issuer)
        flow = provider.async_auth_flow(request)
        try:
            outgoing = await anext(flow)
            while outgoing is not request:
                outgoing = await flow.asend(await self._sent(provider, exchange, outgoing))
            if response is None:
                return
            outgoing = await flow.asend(response)
            while outgoing is not request:
                outgoing = await flow.asend(await self._sent(provider, exchange, outgoing))
        except ToolServerError:
            raise
        except OSError as error:
            raise ToolServerError(f"the login failed: {error.strerror or error}") from error
        except Exception as error:  # noqa: BLE001 - the library may raise any error for a bad answer
            words = on_one_line(describe_error(error))
            # the error quotes the server's answer, which may contain a token
            words = "its authorization server gave an unusable token" if "token response" in words else words
            raise ToolServerError(f"the login failed: {words[:_REASON_CHARS]}") from None
        finally:
            await flow.aclose()

    async def _sent(
        self, provider: OAuthClientProvider, exchange: LoginClient, request: httpx2.Request
    ) -> httpx2.Response:
        """Send one request of the login and return the answer. If the authorization server refuses a refresh token, its
        answer is returned, too, because the user can log in instead.

        :raises ToolServerError: the request is not allowed or failed, or the authorization server refused a token for
            another reason.
        """
        context = provider.context
        is_post = request.method == "POST"
        body = request.content if is_post else b""
        is_token_request = b"grant_type=" in body
        if is_post and not is_token_request:
            self._check_registration(provider)
        response = await exchange.send(request)
        if is_token_request and not response.is_success and not response.is_redirect:
            reason = _reason_of(response)
            if "invalid_client" in reason and not self.server.oauth.client_id:
                context.client_info = None
                await anyio.to_thread.run_sync(self.logins.remove, self.account)  # the next login registers again
            if b"grant_type=refresh_token" in body and response.status_code not in (429, *range(500, 600)):
                logger.info("MCP server %s: its token could not be refreshed: %s", self.server.name, reason)
                return response
            raise ToolServerError(f"{plain_url(str(request.url))} gave no token: {reason}")
        return response

    def _check_registration(self, provider: OAuthClientProvider) -> None:
        """Check that crow may register itself at the authorization server. :raises ToolServerError: the user has set a
        client id, or the authorization server does not let crow register."""
        options, metadata = self.server.oauth, provider.context.oauth_metadata
        place = plain_url(provider.context.auth_server_url or self.account.url)
        uris = provider.context.client_metadata.redirect_uris or ()
        if options.client_id:
            raise ToolServerError(
                f"its authorization server is now {place} instead of {options.issuer}; if that is right, change "
                "oauth_issuer, oauth_client_id and oauth_client_secret"
            )
        if metadata is None and provider.context.protected_resource_metadata is not None:
            raise ToolServerError(f"its authorization server {place} publishes no metadata, so nobody can log in")
        if metadata is not None and metadata.registration_endpoint is None:
            raise ToolServerError(
                f"its authorization server {place} does not let programs register; register crow there by hand, with "
                f"the redirect address {uris[0] if uris else 'http://127.0.0.1/callback'}, and set oauth_client_id"
            )

    async def _check_page(self, provider: OAuthClientProvider, page: str) -> None:
        """Check the login page before the user sees it, and choose how crow authenticates at the token endpoint.

        :raises ToolServerError: the login would not be safe.
        """
        context, options = provider.context, self.server.oauth
        metadata, client = context.oauth_metadata, context.client_info
        if options.issuer and not _same_issuer(metadata, options.issuer):
            named = "none" if metadata is None else plain_url(str(metadata.issuer))
            raise ToolServerError(f"its authorization server is {named}, but oauth_issuer is {options.issuer}")
        if metadata is not None and "S256" not in (metadata.code_challenge_methods_supported or ()):
            raise ToolServerError(
                f"its authorization server {plain_url(str(metadata.issuer))} does not offer PKCE with S256; without "
                "it, others could steal the login"
            )
        if client is not None and client.client_secret and client.token_endpoint_auth_method is None:
            # the default of RFC 7591; the SDK would send no secret
            offered = (metadata and metadata.token_endpoint_auth_methods_supported) or ["client_secret_basic"]
            known = ("client_secret_basic", "client_secret_post", "none")
            client.token_endpoint_auth_method = next((one for one in known if one in offered), "client_secret_basic")
        await LoginClient(self.account.url, options.issuer).check(page)

    async def _code(self, redirect: RedirectListener, page: str) -> AuthorizationCodeResult:
        """Ask the user to open the login page, wait for the browser to come back, and return the authorization code."""
        try:
            page, host = page_to_open(page)
        except ArgumentError as error:
            raise ToolServerError(f"its login page cannot be opened: {error}") from None
        redirect.state = parse_qs(urlsplit(page).query).get("state", [""])[-1]
        question = LoginQuestion(
            server=self.server.name,
            server_host=urlsplit(self.account.url).netloc,
            page=page,
            place=host,
            wait=redirect.answered.wait,
            take=redirect.take,
        )
        answer = "accept"
        code: str | ToolServerError = ToolServerError("the login was cancelled")

        async def ask() -> None:
            nonlocal answer
            answer = await self.asker.ask(question)
            if answer != "accept":
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            try:
                code = await code_from(redirect, _LOGIN_S)
            except ToolServerError as error:
                code = error
            tasks.cancel_scope.cancel()
        if answer == "decline" and not redirect.answered.is_set():
            raise LoginRequired(f"it needs you to log in; run {self._command}")
        if isinstance(code, ToolServerError):
            raise code
        return AuthorizationCodeResult(code=code, state=redirect.state, iss=redirect.issuer)

    async def _read(self) -> Login | None:
        """Return the stored login. None if there is none, or if it belongs to another client id than the settings say.

        :raises ToolServerError: the file cannot be used.
        """
        login = await anyio.to_thread.run_sync(self.logins.read, self.account)
        configured = self.server.oauth.client_id
        if login is not None and configured and login.client.get("client_id") != configured:
            return None  # this login belongs to another client id
        return login

    async def _save(self, storage: _Storage, provider: OAuthClientProvider) -> Login:
        """Store the new login and return it. If it cannot be stored, only this session uses it."""
        login = storage.new_login(self.account, provider)
        try:
            await anyio.to_thread.run_sync(self.logins.write, login)
        except OSError as error:
            logger.warning("The login to MCP server %s is not stored: %s", self.server.name, error)
        return login

    def _must_wait(self) -> bool:
        """Return whether crow must not try to get a token now: the last attempt failed less than `_RETRY_S` ago, or no
        attempt can succeed."""
        return self._is_final or (bool(self.problem) and time.monotonic() - self._failed_at < _RETRY_S)

    def _note(self, error: ToolServerError) -> None:
        """Record why there is no token. Log it, unless crow already waits after an earlier failure."""
        if not self._must_wait():
            self._failed_at = time.monotonic()
            logger.warning("MCP server %s: %s", self.server.name, error)
        self.problem = str(error)
        self._is_final = self._is_final or (isinstance(error, LoginRequired) and self.asker.can_ask)

    @property
    def _command(self) -> str:
        return f"`crow mcp login {self.server.oauth.login or plain_url(self.server.url)}`"


@dataclass(eq=False, kw_only=True)
class _Storage:
    """The SDK's storage during one login. Nothing is written to disk before the login is complete."""

    login: Login | None
    """The stored login that is refreshed or replaced. None if there is none."""
    client: OAuthClientInformationFull | None = None
    """Crow's registration at the authorization server. None if it is not known yet."""
    tokens: OAuthToken | None = None
    """The new tokens."""
    registers: bool = False
    """Crow must register again, even if `login` has a registration."""
    is_changed: bool = False
    """Whether there are new tokens."""

    async def get_tokens(self) -> OAuthToken | None:
        """See `mcp.client.auth.TokenStorage`."""
        if self.login is None:
            return None
        with suppress(ValueError):
            return OAuthToken.model_validate(self.login.tokens)
        return None  # somebody edited the file by hand

    async def set_tokens(self, tokens: OAuthToken) -> None:
        """See `mcp.client.auth.TokenStorage`. :raises ToolServerError: a token cannot be sent in a header."""
        for token in (tokens.access_token, tokens.refresh_token):
            if token is not None and not _TOKEN.fullmatch(token):
                raise ToolServerError("its authorization server gave a token that cannot be sent in an HTTP header")
        self.tokens, self.is_changed = tokens, True

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        """See `mcp.client.auth.TokenStorage`."""
        if self.client is None and not self.registers:
            self.client = _client_of(self.login)
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        """See `mcp.client.auth.TokenStorage`."""
        self.client = client_info

    def new_login(self, account: Account, provider: OAuthClientProvider) -> Login:
        """Return the complete login. Call this only after `set_tokens`."""
        context = provider.context
        assert self.tokens is not None, "called after a login"
        lasts_s = self.tokens.expires_in
        return Login(
            account=account,
            tokens=_dumped(self.tokens),
            client=_dumped(context.client_info),
            metadata=_dumped(context.oauth_metadata),
            resource=_dumped(context.protected_resource_metadata),
            expires_at=time.time() + min(lasts_s, 10**9) if lasts_s is not None and lasts_s > 0 else None,
        )


def _dumped(model: Any) -> dict[str, Any]:
    return {} if model is None else model.model_dump(mode="json", exclude_none=True)


def account_of(server: HttpServer) -> Account:
    """Return the server and account that a login is for. :raises ~crow.domain.errors.ArgumentError: the URL is not
    valid."""
    return Account(url=normalize_url(server.url), name=server.oauth.account)


def may_log_in(server: HttpServer) -> bool:
    """Return whether crow may log in to a server. False if the user set an Authorization header, or the URL is
    invalid."""
    if any(name.casefold() == "authorization" for name, _ in server.headers):
        return False
    try:
        normalize_url(server.url)
    except ArgumentError:
        return False
    return True


def _is_challenge(response: httpx2.Response) -> bool:
    """Return whether the server asks for a token, for another token, or for a token with wider scopes."""
    if response.status_code == 401:
        return True
    return response.status_code == 403 and extract_field_from_www_auth(response, "error") == "insufficient_scope"


def _add_token(request: httpx2.Request, login: Login) -> None:
    request.headers["Authorization"] = f"Bearer {login.token}"


def _ends_soon(login: Login) -> bool:
    has_refresh = bool(login.tokens.get("refresh_token"))
    return has_refresh and login.expires_at is not None and time.time() > login.expires_at - _EARLY_S


def _has_ended(login: Login) -> bool:
    return login.expires_at is not None and time.time() > login.expires_at


def _client_of(login: Login | None) -> OAuthClientInformationFull | None:
    """Return crow's registration at the authorization server; None if crow is not registered, or if the stored
    registration is damaged."""
    if login is None:
        return None
    with suppress(ValueError):
        return OAuthClientInformationFull.model_validate(login.client)
    return None


def _registered_port(client: OAuthClientInformationFull | None) -> int:
    """Return the port on 127.0.0.1 in a registration's redirect addresses; 0 if there is no such port."""
    for uri in (client.redirect_uris if client is not None else None) or ():
        if uri.host == "127.0.0.1" and uri.port:
            return uri.port
    return 0


def _same_issuer(metadata: OAuthMetadata | None, issuer: str) -> bool:
    return metadata is not None and str(metadata.issuer).rstrip("/") == issuer.rstrip("/")


def _one_query(page: str) -> str:
    """Make the URL of a login page valid. If the server's URL already has a `?`, the SDK adds a second one. Replace the
    second one with `&`."""
    head, mark, query = page.partition("?")
    return f"{head}{mark}{query.replace('?', '&')}"


def _reason_of(response: httpx2.Response) -> str:
    """Return why the authorization server refused a request. If its answer has the standard form, the reason is the
    error in the answer. Otherwise, the reason is the HTTP status."""
    found: object = None
    with suppress(ValueError, RecursionError):
        found = json.loads(response.content)
    if isinstance(found, Mapping) and isinstance(found.get("error"), str):
        words = [found["error"], found.get("error_description")]
        return on_one_line(": ".join(word for word in words if isinstance(word, str)))[:_REASON_CHARS]
    return f"HTTP {response.status_code}"


async def revoke(login: Login) -> bool:
    """Revoke the tokens at the authorization server. Return False if the server does not offer revocation.

    :raises ToolServerError: the server did not revoke a token.
    """
    endpoint = login.metadata.get("revocation_endpoint")
    if not isinstance(endpoint, str):
        return False
    provider = OAuthClientProvider(login.account.url, OAuthClientMetadata(redirect_uris=None), _Storage(login=login))
    provider.context.client_info = _client_of(login)
    exchange = LoginClient(login.account.url, login.issuer)
    for kind in ("refresh_token", "access_token"):
        if token := login.tokens.get(kind):
            data = {"token": str(token), "token_type_hint": kind, "client_id": str(login.client.get("client_id"))}
            data, headers = provider.context.prepare_token_auth(data, {})
            answer = await exchange.send(httpx2.Request("POST", endpoint, data=data, headers=headers))
            if not answer.is_success:
                raise ToolServerError(f"{plain_url(endpoint)} did not revoke the {kind}: {_reason_of(answer)}")
    return True
