"""The usual endpoints: what their makers publish of them, each value beside the page that says so.

Strategy: data alone. A value that no page states is left out, and then crow's general behaviour holds; what the user's
file says is stronger. Sizes and prices of models are not here: they change, and endpoints list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar
from urllib.parse import urlsplit

__all__ = ["PRESETS", "Fact", "Preset", "preset_at"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value and the public page that states it."""

    value: T
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One endpoint. `key_env`: the variable that its pages put the key into. `thinking`: where a request says how much
    to think. `limit_field`: what the output limit is called. `cache`: prompts are cached by a key, or where a marker
    asks for it."""

    base_url: Fact[str]
    key_env: Fact[str] | None = None
    thinking: Fact[Literal["effort", "reasoning", "switch", "switch_effort", "enable_thinking"]] | None = None
    limit_field: Fact[Literal["max_tokens", "max_completion_tokens"]] | None = None
    cache: Fact[Literal["key", "marker"]] | None = None


_OPENAI = "https://github.com/openai/openai-python/blob/main/README.md"
_OPENAI_CHAT = "https://github.com/openai/openai-python/blob/main/src/openai/types/chat/completion_create_params.py"
_OPENROUTER = "https://openrouter.ai/docs/quickstart"
_DEEPSEEK = "https://api-docs.deepseek.com/"
_KIMI = "https://platform.kimi.ai/docs/api/overview"
_GEMINI = "https://ai.google.dev/gemini-api/docs/openai"
_GROQ = "https://console.groq.com/docs/openai"
_XAI = "https://docs.x.ai/api/integrations"
_MISTRAL = "https://docs.mistral.ai/resources/migration-guides"
_TOGETHER = "https://docs.together.ai/docs/inference/openai-compatibility"
_FIREWORKS = "https://docs.pipecat.ai/api-reference/server/services/llm/fireworks"
_QWEN = "https://www.alibabacloud.com/help/en/model-studio/deep-thinking"

PRESETS: dict[str, Preset] = {
    "openai": Preset(
        base_url=Fact("https://api.openai.com/v1", _OPENAI),
        key_env=Fact("OPENAI_API_KEY", _OPENAI),
        thinking=Fact("effort", _OPENAI_CHAT),
        limit_field=Fact("max_completion_tokens", _OPENAI_CHAT),
        cache=Fact("key", _OPENAI_CHAT),
    ),
    "openrouter": Preset(
        base_url=Fact("https://openrouter.ai/api/v1", _OPENROUTER),
        key_env=Fact("OPENROUTER_API_KEY", _OPENROUTER),
        thinking=Fact("reasoning", "https://openrouter.ai/docs/use-cases/reasoning-tokens"),
        cache=Fact("marker", "https://openrouter.ai/docs/client-sdks/python/api-reference/components/caching"),
    ),
    "deepseek": Preset(
        base_url=Fact("https://api.deepseek.com", _DEEPSEEK),
        key_env=Fact("DEEPSEEK_API_KEY", _DEEPSEEK),
        thinking=Fact("switch_effort", _DEEPSEEK),
    ),
    "kimi": Preset(
        base_url=Fact("https://api.moonshot.ai/v1", _KIMI),
        key_env=Fact("MOONSHOT_API_KEY", _KIMI),
        thinking=Fact("switch", _KIMI),
    ),
    "glm": Preset(
        base_url=Fact("https://api.z.ai/api/paas/v4", "https://docs.z.ai/llms-full.txt"),
        key_env=Fact("ZAI_API_KEY", "https://docs.openclaw.ai/providers/zai"),
        thinking=Fact("switch", "https://docs.z.ai/guides/capabilities/thinking"),
    ),
    "qwen": Preset(
        base_url=Fact(
            "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "https://docs.agno.com/reference/models/dashscope"
        ),
        key_env=Fact("DASHSCOPE_API_KEY", "https://docs.agno.com/concepts/models/dashscope"),
        thinking=Fact("enable_thinking", _QWEN),
    ),
    "gemini": Preset(
        base_url=Fact("https://generativelanguage.googleapis.com/v1beta/openai", _GEMINI),
        key_env=Fact("GEMINI_API_KEY", _GEMINI),
    ),
    "groq": Preset(
        base_url=Fact("https://api.groq.com/openai/v1", _GROQ),
        key_env=Fact("GROQ_API_KEY", _GROQ),
    ),
    "xai": Preset(
        base_url=Fact("https://api.x.ai/v1", _XAI),
        key_env=Fact("XAI_API_KEY", _XAI),
    ),
    "mistral": Preset(
        base_url=Fact("https://api.mistral.ai/v1", _MISTRAL),
        key_env=Fact(
            "MISTRAL_API_KEY", "https://developers.llamaindex.ai/python/framework-api-reference/llms/mistralai"
        ),
    ),
    "together": Preset(
        base_url=Fact("https://api.together.ai/v1", _TOGETHER),
        key_env=Fact("TOGETHER_API_KEY", _TOGETHER),
    ),
    "fireworks": Preset(
        base_url=Fact("https://api.fireworks.ai/inference/v1", "https://readme.fireworks.ai/docs/openai-compatibility"),
        key_env=Fact("FIREWORKS_API_KEY", _FIREWORKS),
    ),
    "ollama": Preset(
        base_url=Fact("http://localhost:11434/v1", "https://docs.ollama.com/api/openai-compatibility"),
    ),
    "lmstudio": Preset(
        base_url=Fact("http://localhost:1234/v1", "https://lmstudio.ai/docs/api/openai-api"),
    ),
    "vllm": Preset(
        base_url=Fact("http://localhost:8000/v1", "https://docs.vllm.ai/en/stable/serving/openai_compatible_server/"),
    ),
    "llamacpp": Preset(
        base_url=Fact(
            "http://localhost:8080/v1", "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md"
        ),
    ),
    "sglang": Preset(
        base_url=Fact("http://127.0.0.1:30000/v1", "https://mintlify.com/sgl-project/sglang/quickstart"),
    ),
    "tgi": Preset(
        base_url=Fact(
            "http://localhost:8080/v1",
            "https://huggingface.co/docs/text-generation-inference/en/basic_tutorials/consuming_tgi",
        ),
    ),
}
"""By the name that `[providers.NAME]` gives it."""


def preset_at(base_url: str) -> Preset | None:
    """The preset of the endpoint at `base_url`; those on this machine differ by port alone, and say nothing more."""
    host = urlsplit(base_url).hostname
    return next((preset for preset in PRESETS.values() if urlsplit(preset.base_url.value).hostname == host), None)
