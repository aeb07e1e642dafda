"""`crow login`: asks the user for an endpoint, a key and a model, tests them and saves them.

The answers are saved if the model answers a test request, or if the user wants to save them anyway. Editors run this
command in a terminal to let the user log in. The exit code tells the editor whether the answers were saved.
"""

from __future__ import annotations

import getpass
import sys

from crow.adapters import EndpointModel, open_model
from crow.domain.errors import ConfigError, CrowError
from crow.domain.messages import SystemMessage, Text, ToolSpec, UserMessage
from crow.llm import WIRE_TITLES, Request
from crow.settings import OFFLINE, Loaded, ModelSettings, Settings, target_of
from crow.settings.endpoints import PRESETS, url_named
from crow.settings.write import save_model_settings

_MODELS_SHOWN = 20
_NAMES = ", ".join(name for name, preset in PRESETS.items() if preset.base_url)
_TOOL = ToolSpec(name="report_word", description="Reports a word.", input_schema={"type": "object"})
"""Some endpoints refuse an API only if a request has tools."""


async def log_in(loaded: Loaded) -> int:
    """Ask the user on stdin and stdout. Return 0 if the answers were saved, otherwise another exit code.

    :raises ConfigError: an answer is not valid for its setting, or the settings file cannot be written.
    """
    if loaded.problem is not None:
        raise loaded.problem
    current = loaded.settings.model
    print(
        "Which endpoint should crow use? Every endpoint with OpenAI's Chat Completions or Responses API or Anthropic's "
        f"Messages API works. Enter its URL, or one of these names: {_NAMES}."
    )
    base_url = url_named(_ask("Endpoint", current.base_url))
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
            print(f"The {loaded.sources[setting]} is also set, and crow uses it instead of the value in the file.")
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
    except ValueError:  # the text of this error would show the key
        raise ConfigError(
            "The endpoint or the key is not valid. An endpoint is an http or https URL without a user name or a query, "
            "such as http://localhost:11434/v1. A key is plain ASCII without spaces."
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
    """Send one short prompt, print the outcome, and return whether the model answered."""
    if settings.name == OFFLINE:
        return True
    print(f"Trying {settings.name} ...")
    question = UserMessage(parts=(Text(text="Reply with the single word OK."),))
    try:
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
        print(f"That did not work: {error}")
        return False
    print(f"It answers ({title} API).")
    return True
