"""`crow login`: asks for endpoint, key and model, tries them, and writes them to the user's file.

Strategy: a plain dialogue on stdin and stdout, each question with what holds now as its default; the key is not shown.
Nothing is written before a request has been answered, or the user says that it shall be all the same. This is also what
an editor starts in its terminal to log in, so the exit code tells whether it worked.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from crow.app import open_model
from crow.domain.errors import ConfigError, CrowError
from crow.domain.messages import SystemMessage, Text, UserMessage
from crow.llm import Request
from crow.settings import OFFLINE, Loaded, ModelSettings, Settings, target_of
from crow.settings.write import save_model_settings

if TYPE_CHECKING:
    from crow.llm.chat_completions import ChatCompletions

__all__ = ["log_in"]

SHOWN_MODELS = 20


async def log_in(loaded: Loaded) -> int:
    """Hold the dialogue; 0 when the settings were written.

    :raises ConfigError: an answer that no setting can have, or a file that cannot be written.
    """
    if loaded.problem is not None:
        raise loaded.problem
    now = loaded.settings.model
    print("Which endpoint shall crow use? Any that speaks OpenAI's chat completions will do.")
    base_url = _ask("Endpoint", now.base_url)
    same = base_url.rstrip("/") == now.base_url
    key = _ask_secretly("Key (none for a local server)", kept=same and now.api_key is not None)
    known = now.api_key.get_secret_value() if same and now.api_key is not None else ""
    key = key or known
    await _show_models(_settings(base_url=base_url, api_key=key or None))
    name = _ask("Model", now.name or "")
    settings = _settings(base_url=base_url, api_key=key or None, name=name or None)
    if settings.name is None:
        print("No model was named; nothing was written.")
        return 1
    if not await _works(settings) and not _ask("Write it all the same? [y/N]", "").lower().startswith("y"):
        print("Nothing was written.")
        return 1
    file = loaded.paths.config_file
    values: dict[str, str | None] = {"name": settings.name, "base_url": settings.base_url, "api_key": key or None}
    if key == known and loaded.sources["model.api_key"].startswith("environment"):
        del values["api_key"]  # it stays where it is
    save_model_settings(file, values)
    print(f"Written to {file}.")
    _warn_of_environment(loaded.sources)
    return 0


def _ask(question: str, default: str) -> str:
    shown = f"{question} [{default}]: " if default else f"{question}: "
    try:
        return input(shown).strip() or default
    except EOFError:
        print()
        return default


def _ask_secretly(question: str, *, kept: bool) -> str:
    shown = f"{question} [as it is]: " if kept else f"{question}: "
    if not sys.stdin.isatty():
        return _ask(shown.removesuffix(": "), "")
    try:
        return getpass.getpass(shown).strip()
    except EOFError:
        print()
        return ""


def _settings(**values: str | None) -> ModelSettings:
    try:
        return ModelSettings.model_validate({key: value for key, value in values.items() if value is not None})
    except ValueError:  # its own text shows what was typed, the key too
        raise ConfigError(
            "That cannot be used: an endpoint is an http or https URL without user name and query, such as "
            "http://localhost:11434/v1; a key is plain ASCII without spaces."
        ) from None


async def _opened(settings: ModelSettings) -> ChatCompletions:
    return await open_model(target_of(settings.name or "", Settings(model=settings)), None)


async def _show_models(settings: ModelSettings) -> None:
    try:
        model = await _opened(settings)
        try:
            names = [each.name for each in await model.models()]
        finally:
            await model.close()
    except CrowError as error:
        print(f"(Its models are not known: {error})")
        return
    if names:
        more = f", and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
        print(f"It offers {', '.join(names[:SHOWN_MODELS])}{more}.")


async def _works(settings: ModelSettings) -> bool:
    if settings.name == OFFLINE:
        return True
    print(f"Trying {settings.name} ...")
    question = UserMessage(parts=(Text(text="Reply with the single word OK."),))
    try:
        model = await _opened(settings)
        try:
            model.check()
            async with model.stream(Request(messages=(SystemMessage(text="You are crow."), question))) as stream:
                async for _ in stream:
                    pass
        finally:
            await model.close()
    except CrowError as error:
        print(f"That did not work: {error}")
        return False
    print("It answers.")
    return True


def _warn_of_environment(sources: Mapping[str, str]) -> None:
    for key in ("model.base_url", "model.api_key", "model.name"):
        if sources[key].startswith("environment"):
            print(f"The {sources[key]} is set and takes precedence over the file.")
