"""From what a model name means to the endpoint that is asked: the one place where settings become an `Endpoint`.

Strategy: a plain mapping of values, besides the key that a command prints, which is asked for when it is first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crow.settings.target import Target

if TYPE_CHECKING:
    from crow.llm import EndpointMemory
    from crow.llm.chat_completions import ChatCompletions
    from crow.llm.endpoint import Endpoint

__all__ = ["endpoint_of", "open_model"]

_PENDING = "pending"
"""Stands for the key that a command will print, where only its presence matters."""


def endpoint_of(target: Target, *, key: str | None = None) -> Endpoint:
    """The endpoint; `key` is what its command has printed."""
    from crow.llm.endpoint import Endpoint, Timeouts

    preset = target.preset
    if key is None and target.key is not None:
        key = target.key.get_secret_value()
    if key is None and target.key_command:
        key = _PENDING
    return Endpoint(
        base_url=target.base_url,
        model=target.model,
        api_key=key,
        key_hint=target.key_hint,
        headers=tuple(target.headers.items()),
        context_window=target.context_window,
        max_output_tokens=target.max_output_tokens,
        takes_images=target.takes_images,
        input_price=target.input_price,
        cached_price=target.cached_price,
        output_price=target.output_price,
        timeouts=Timeouts(
            connect_s=target.connect_timeout_s,
            first_byte_s=target.first_byte_timeout_s,
            idle_s=target.idle_timeout_s,
        ),
        extra_body=target.extra_body,
        thought_level=target.thought_level,
        thinking=preset.thinking.value if preset is not None and preset.thinking is not None else "effort",
        limit_field=preset.limit_field.value if preset is not None and preset.limit_field is not None else "max_tokens",
        cache=preset.cache.value if preset is not None and preset.cache is not None else None,
        proxy=target.proxy,
        ca_file=target.ca_file,
    )


async def open_model(target: Target, memory: EndpointMemory | None) -> ChatCompletions:
    """The model, with what is known of it. :raises ~crow.domain.errors.ConfigError: its key command fails."""
    import anyio.to_thread

    from crow.llm.chat_completions import ChatCompletions
    from crow.settings.key import key_from

    key = await anyio.to_thread.run_sync(key_from, target.key_command) if target.key_command else None
    endpoint = endpoint_of(target, key=key)
    learned = {} if memory is None else await memory.learned(endpoint.base_url, endpoint.model)
    return ChatCompletions(endpoint, memory=memory, learned=learned)
