"""`crow login`: asks the user for an endpoint, a key and a model, tests them and saves them.

The answers are saved if the model answers a test request, or if the user wants to save them anyway. Editors run this
command in a terminal to let the user log in. The exit code tells the editor whether the answers were saved.
"""

from __future__ import annotations

import asyncio
import getpass
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from crow.adapters import EndpointModel, open_model
from crow.domain.errors import AuthError, CrowError, ModelNotFound
from crow.domain.messages import SystemMessage, Text, ToolSpec, UserMessage
from crow.domain.text import on_one_line
from crow.llm import WIRE_TITLES, Request
from crow.settings import OFFLINE, Loaded, ModelSettings, Settings, target_of
from crow.settings.endpoints import PRESETS, pattern_named, url_named
from crow.settings.write import save_model_settings

_MODELS_SHOWN = 20
_NAMES = ", ".join(PRESETS)
_TOOL = ToolSpec(name="report_word", description="Reports a word.", input_schema={"type": "object"})
"""Offered in the test request, because on some APIs, some endpoints answer only requests without tools."""
_DOT_S = 1.0
"""While crow waits, it prints a dot each time this many seconds have passed."""


async def log_in(loaded: Loaded) -> int:
    """Ask the user on stdin and stdout. Return 0 if the answers were saved, otherwise another exit code.

    :raises ConfigError: the settings file cannot be written.
    """
    if loaded.problem is not None:
        raise loaded.problem
    settings = await _LoginDialogue(loaded).ask()
    if settings is None:
        _say("Nothing was saved.")
        return 1
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    values = {"name": settings.name, "base_url": settings.base_url, "api_key": key}
    known = loaded.settings.model
    is_moved = bool(known.headers) and known.base_url != settings.base_url
    if is_moved:
        values["headers"] = None  # they may hold secrets, and would be sent to the new endpoint
    if key == _key_of(loaded) and loaded.sources["model.api_key"].startswith("environment"):
        del values["api_key"]  # do not copy the key from the environment into the file
    save_model_settings(loaded.paths.config_file, values)
    _say(f"Saved to {loaded.paths.config_file}.")
    if is_moved:
        _say(f"The headers {', '.join(known.headers)} were removed from it, because they were for {known.base_url}.")
    for setting in ("model.base_url", "model.api_key", "model.name"):
        if loaded.sources[setting].startswith("environment"):
            _say(f"The {loaded.sources[setting]} is also set, and crow uses it instead of the value in the file.")
    return 0


class _LoginDialogue:
    """The questions of `crow login`. The answers so far are the defaults when a question is asked again."""

    def __init__(self, loaded: Loaded) -> None:
        self._known = loaded.settings.model
        self._known_key = _key_of(loaded)
        self._base_url = self._known.base_url
        self._key = ""
        self._name = self._known.name or ""

    async def ask(self) -> ModelSettings | None:
        """Ask until a model answers, or until the user wants to save the answers anyway. Return None if stdin ends
        first."""
        _say(
            "Which endpoint should crow use? Every endpoint with OpenAI's Chat Completions or Responses API or "
            f"Anthropic's Messages API works. Enter its URL, or one of these names: {_NAMES}."
        )
        question = "endpoint"
        while True:
            try:
                if question == "endpoint":
                    self._ask_endpoint()
                if question in ("endpoint", "key"):
                    self._ask_key()
                await self._ask_model()
            except EOFError:
                return None
            settings = self._answers()
            problem = await _problem(settings)
            if problem is None:
                return settings
            _say(f"That did not work: {problem}")
            try:
                if _ask("Save anyway? [y/N]").lower().startswith("y"):
                    return settings
            except EOFError:
                return None
            # Ask again from the first question whose answer can be wrong.
            match problem:
                case AuthError():
                    question = "key"
                case ModelNotFound():
                    question = "model"
                case _:
                    question = "endpoint"

    def _answers(self) -> ModelSettings:
        """Return the answers so far. If the endpoint is the configured one, its other settings, such as headers, apply,
        too."""
        found = _settings(base_url=self._base_url, api_key=self._key, name=self._name)
        if found.base_url != self._known.base_url:
            return found
        return self._known.model_copy(update={"api_key": found.api_key, "name": found.name})

    def _ask_endpoint(self) -> None:
        while True:
            typed = _ask("Endpoint", self._base_url)
            if pattern := pattern_named(typed):
                _say(f"The URL of this endpoint differs for each user. Enter yours: {pattern}")
                continue
            self._base_url = url_named(typed)
            try:
                self._base_url = _settings(base_url=self._base_url).base_url
            except ValueError:  # the text of this error would show what was typed, which may hold a password
                self._base_url = self._known.base_url
                _say(
                    "This is not an endpoint. An endpoint is an http or https URL without a user name or a query, such "
                    "as http://localhost:11434/v1."
                )
            else:
                return

    def _ask_key(self) -> None:
        """Ask for the key. An empty answer keeps the known key if the endpoint is still the configured one."""
        default = self._key or (self._known_key if self._base_url == self._known.base_url else "")
        while True:
            self._key = _ask_secret(f"Key (none for a local server){' [unchanged]' if default else ''}") or default
            try:
                _settings(api_key=self._key)
            except ValueError:  # the text of this error would show the key
                _say("This is not a key. A key is plain ASCII without spaces.")
            else:
                return

    async def _ask_model(self) -> None:
        """Ask for the model. The default is the model that is in use. If the endpoint lists models, but not this one,
        the default is the first model in its list."""
        names = await _offered(self._answers())
        default = self._name if self._name in names or not names else names[0]
        while True:
            _say_models(names)
            typed = _ask("Model (a number or a name)" if names else "Model", default)
            self._name = names[int(typed) - 1] if typed.isdecimal() and 0 < int(typed) <= len(names) else typed
            if self._name:
                return
            _say("A model is needed: type its name.")


def _key_of(loaded: Loaded) -> str:
    key = loaded.settings.model.api_key
    return "" if key is None else key.get_secret_value()


def _say(words: str) -> None:
    """Print a text from crow or from the endpoint. On a terminal, it is wrapped between words."""
    line = on_one_line(words)
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns - 1
        line = textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
    print(line, flush=True)


def _say_models(names: Sequence[str]) -> None:
    for number, name in enumerate(names[:_MODELS_SHOWN], 1):
        print(f"{number:>4}) {on_one_line(name)}")
    if len(names) > _MODELS_SHOWN:
        print(f"      and {len(names) - _MODELS_SHOWN} more, by name: crow models lists all of them")


def _ask(question: str, default: str = "") -> str:
    """Ask a question, and return the answer or the default. :raises EOFError: stdin has ended."""
    return input(f"{question} [{on_one_line(default)}]: " if default else f"{question}: ").strip() or default


def _ask_secret(question: str) -> str:
    return getpass.getpass(f"{question}: ").strip() if sys.stdin.isatty() else _ask(question)


@asynccontextmanager
async def _waiting(words: str) -> AsyncIterator[None]:
    """Say what crow waits for. On a terminal, a dot is added each second, so that crow does not seem to hang."""

    async def show_dots() -> None:
        while True:
            await asyncio.sleep(_DOT_S)
            print(".", end="", flush=True)

    print(f"{on_one_line(words)} ...", end="", flush=True)
    dots = asyncio.create_task(show_dots()) if sys.stdout.isatty() else None
    try:
        yield
    finally:
        if dots is not None:
            dots.cancel()
        print()


def _settings(**values: str) -> ModelSettings:
    """Check answers. :raises ValueError: one of them is not valid."""
    return ModelSettings.model_validate({key: value for key, value in values.items() if value})


async def _open(settings: ModelSettings) -> EndpointModel:
    return await open_model(target_of(settings.name or "", Settings(model=settings)), None)


async def _offered(settings: ModelSettings) -> Sequence[str]:
    """Return the names of the models that the endpoint lists. If it lists none, say why."""
    try:
        async with _waiting("Asking for the models"):
            model = await _open(settings)
            try:
                return [each.name for each in await model.models()]
            finally:
                await model.close()
    except CrowError as error:
        _say(f"(The endpoint does not list its models: {error})")
        return []


async def _problem(settings: ModelSettings) -> CrowError | None:
    """Send one short prompt. Return None if the model answers, or else the error."""
    if settings.name == OFFLINE:
        return None
    question = UserMessage(parts=(Text(text="Reply with the single word OK."),))
    try:
        async with _waiting(f"Trying {settings.name}"):
            model = await _open(settings)
            try:
                model.check()
                request = Request(messages=(SystemMessage(text="You are crow."), question), tools=(_TOOL,))
                async with model.stream(request) as stream:
                    async for _ in stream:
                        pass
                title = WIRE_TITLES[model.info.wire]
            finally:
                await model.close()
    except CrowError as error:
        return error
    _say(f"It answers ({title} API).")
    return None
