"""`crow login`: asks for endpoint, key and model, tries them and saves them.

The settings are saved only if a test request is answered or the user insists. Editors run this command in a
terminal to log in, so the exit code says whether it succeeded.
"""

from __future__ import annotations

import getpass
import sys

from crow.adapters import EndpointModel, open_model
from crow.domain.errors import ConfigError, CrowError
from crow.domain.messages import SystemMessage, Text, UserMessage
from crow.llm import Request
from crow.settings import OFFLINE, Loaded, ModelSettings, Settings, target_of
from crow.settings.write import save_model_settings

_MODELS_SHOWN = 20


async def log_in(loaded: Loaded) -> int:
    """Ask on stdin and stdout. Returns 0 if the settings were saved.

    :raises ConfigError: an answer is not valid for its setting, or the file cannot be written.
    """
    if loaded.problem is not None:
        raise loaded.problem
    current = loaded.settings.model
    print("Which endpoint should crow use? Any that speaks OpenAI's chat completions will work.")
    base_url = _ask("Endpoint", current.base_url)
    known_key = ""
    if base_url.rstrip("/") == current.base_url and current.api_key is not None:
        known_key = current.api_key.get_secret_value()
    key = _ask_key(has_default=bool(known_key)) or known_key
    await _print_models(_settings(base_url=base_url, api_key=key))
    name = _ask("Model", current.name or "")
    if not name:
        print("No model was named; nothing was saved.")
        return 1
    settings = _settings(base_url=base_url, api_key=key, name=name)
    if not await _try(settings) and not _ask("Save anyway? [y/N]", "").lower().startswith("y"):
        print("Nothing was saved.")
        return 1
    values: dict[str, str | None] = {"name": name, "base_url": settings.base_url, "api_key": key or None}
    if key == known_key and loaded.sources["model.api_key"].startswith("environment"):
        del values["api_key"]  # do not copy the key from the environment into the file
    save_model_settings(loaded.paths.config_file, values)
    print(f"Saved to {loaded.paths.config_file}.")
    for setting in ("model.base_url", "model.api_key", "model.name"):
        if loaded.sources[setting].startswith("environment"):
            print(f"The {loaded.sources[setting]} is set and takes precedence over the file.")
    return 0


def _ask(question: str, default: str) -> str:
    try:
        return input(f"{question} [{default}]: " if default else f"{question}: ").strip() or default
    except EOFError:
        print()
        return default


def _ask_key(*, has_default: bool) -> str:
    question = f"Key (none for a local server){' [unchanged]' if has_default else ''}"
    if not sys.stdin.isatty():
        return _ask(question, "")
    try:
        return getpass.getpass(f"{question}: ").strip()
    except EOFError:
        print()
        return ""


def _settings(**values: str) -> ModelSettings:
    try:
        return ModelSettings.model_validate({key: value for key, value in values.items() if value})
    except ValueError:  # the error's own text would show the key
        raise ConfigError(
            "The endpoint or the key cannot be used: an endpoint is an http or https URL without user name and query, "
            "such as http://localhost:11434/v1; a key is plain ASCII without spaces."
        ) from None


async def _open(settings: ModelSettings) -> EndpointModel:
    return await open_model(target_of(settings.name or "", Settings(model=settings)), None)


async def _print_models(settings: ModelSettings) -> None:
    try:
        model = await _open(settings)
        try:
            names = [each.name for each in await model.models()]
        finally:
            await model.close()
    except CrowError as error:
        print(f"(The endpoint does not list its models: {error})")
        return
    if names:
        more = f", and {len(names) - _MODELS_SHOWN} more" if len(names) > _MODELS_SHOWN else ""
        print(f"The endpoint offers {', '.join(names[:_MODELS_SHOWN])}{more}.")


async def _try(settings: ModelSettings) -> bool:
    """Send one short prompt and say whether it was answered."""
    if settings.name == OFFLINE:
        return True
    print(f"Trying {settings.name} ...")
    question = UserMessage(parts=(Text(text="Reply with the single word OK."),))
    try:
        model = await _open(settings)
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
