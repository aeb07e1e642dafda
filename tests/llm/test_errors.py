"""Tests of how endpoint failures are read."""

from __future__ import annotations

import json

import pytest

from crow.adapters import endpoint_of
from crow.domain.errors import (
    AuthError,
    BadRequest,
    ContentRefused,
    ContextOverflow,
    ModelError,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
    RateLimited,
)
from crow.llm.dialect import Dialect
from crow.llm.endpoint import Endpoint
from crow.llm.errors import (
    ErrorBody,
    Origin,
    find_error,
    max_output_tokens,
    model_error,
    parse_error_response,
    refused_part,
    retry_after_s,
)
from crow.settings import Settings, target_of

HERE = Origin(endpoint="http://here/v1", model="m")


def error_of(status: int, body: object) -> ModelError:
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return model_error(parse_error_response(status, content), HERE)


@pytest.mark.parametrize(
    ("words", "limit", "size"),
    [
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens",
            8192,
            9001,
        ),
        (
            "This model's maximum context length is 4,096 tokens. However, you requested 5000 tokens (4000 in",
            4096,
            5000,
        ),
        ("Your input exceeds the context window of this model. Please adjust your input", None, None),
        ("prompt is too long: 210000 tokens > 200000 maximum", 200000, 210000),
        ("input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease", 200000, 210000),
        ("The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", 1048576, 1200000),
        ("maximum prompt length is 131072 but the request contains 140000 tokens", 131072, 140000),
        ("Please reduce the length of the messages or completion.", None, None),
        ("Input length 9000 exceeds the maximum allowed input length of 8000 tokens", 8000, 9000),
        ("the request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it", 4096, 9000),
        ("request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it", 4096, 9000),
        ("The number of tokens to keep from the initial prompt is greater than the context length", None, None),
        ("Context size has been exceeded.", None, None),
        ("prompt too long; exceeded max context length by 12 tokens", None, None),
        ("You requested 1000 output tokens and your prompt contains at least 4000 input tokens", None, 5000),
        ("Input length (9000 tokens) exceeds the maximum allowed length (8000 tokens)", 8000, 9000),
        ("The input (9000 tokens) is longer than the model's context length (8000 tokens).", 8000, 9000),
        ("Input length (9000) exceeds model's maximum context length (8000)", 8000, 9000),
        ("Your request exceeded model token limit: 8000 (requested: 9000)", 8000, 9000),
        ("InternalError.Algo.InvalidParameter: Range of input length should be [1, 30720]", 30720, None),
        (
            "Prompt contains 9000 tokens and 0 draft tokens, too large for model with 8000 maximum context length",
            8000,
            9000,
        ),
        ("invalid params, context window exceeds limit (2013)", None, None),
        ("prompt token count of 9000 exceeds the limit of 8000", 8000, 9000),
        ("The context window is 32768 tokens; the prompt is too long", 32768, None),
        ("Input is too long for requested model.", None, None),
        ("prompt tokens (9000) exceed model maximum (8000)", 8000, 9000),
        ("输入长度超过模型限制", None, None),
        # Not in the list of wordings; the general rule finds these.
        ("Context window of 128k tokens exceeded: your request has 131k tokens", 128_000, 131_000),
        ("This model's maximum context length is 128_000 tokens, but 131_072 were requested", 128_000, 131_072),
        ("Your input of 210,332 tokens exceeds the context limit of 200,000 tokens.", 200_000, 210_332),
        ("The prompt has 9.210 tokens, which is more than the limit of 8.192 tokens", 8192, 9210),
        ("Input tokens exceed the configured limit of 8000 tokens. Your messages have 9000 tokens.", 8000, 9000),
        ("Token limit exceeded: 9210 > 8192", 8192, 9210),
        ("too many tokens: 9210, maximum is 8192", 8192, 9210),
        ("the decoder prompt (length 9210) is longer than the maximum model length of 8192", 8192, 9210),
        ("input (9210 tokens) + max_tokens (1000) > context window 8192", 8192, 9210),
        ("`inputs` must have less than 3072 tokens. Given: 5000", 3072, 5000),
        ("Context length exceeded: requested 40,960; available 32,768", 32_768, 40_960),
        ("n_tokens (9210) exceeds n_ctx (8192)", 8192, 9210),
        ("Le contexte maximal du modèle est de 32768 jetons", 32_768, None),
        ("模型的最大上下文长度为 32768 tokens，但请求了 40000 tokens", 32_768, 40_000),
        ("conversation is too long, please start a new one", None, None),
    ],
)
def test_every_known_overflow_wording_is_recognised(words: str, limit: int | None, size: int | None) -> None:
    error = error_of(400, {"error": {"message": words}})
    assert isinstance(error, ContextOverflow)
    assert (error.limit, error.size) == (limit, size)


@pytest.mark.parametrize(
    ("status", "body", "is_unclear"),
    [
        (400, b"", True),
        (400, b"{}", True),
        (400, {"error": {"message": "Possible causes: input exceeds the maximum context length, or bad"}}, True),
        (400, {"error": {"message": "Possible causes: the name of a tool is bad"}}, False),
        (400, {"error": {"message": "temperature must be 1"}}, False),
        (422, b"", False),
    ],
)
def test_a_refusal_without_a_clear_reason_is_marked(status: int, body: object, is_unclear: bool) -> None:
    error = error_of(status, body)
    assert isinstance(error, BadRequest)
    assert error.is_unclear is is_unclear


def test_the_numbers_of_llama_cpp_are_found_in_the_metadata() -> None:
    body = {"error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 9000, "n_ctx": 4096}}
    error = error_of(400, body)
    assert isinstance(error, ContextOverflow)
    assert (error.limit, error.size) == (4096, 9000)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {"error": {"message": "bad key"}}, AuthError),
        (403, {"error": "Forbidden"}, AuthError),
        (400, [{"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}}], AuthError),
        (402, {"error": {"message": "Payment Required"}}, QuotaExceeded),
        (429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}, QuotaExceeded),
        (429, {"error": {"message": "You exceeded your current quota. Please retry in 17.5s."}}, RateLimited),
        (400, {"error": {"message": "Your credit balance is too low to access the API"}}, QuotaExceeded),
        (429, b"", RateLimited),
        (429, {"error": {"message": "Throttling: Too many tokens, please wait before trying again"}}, RateLimited),
        (429, {"error": {"message": "maximum context length reached per minute"}}, RateLimited),
        (503, {"error": {"message": "Rate limit: too many requests"}}, RateLimited),
        (
            413,
            {"error": {"message": "Request too large on tokens per minute (TPM): Limit 6000, Requested 8000"}},
            ContextOverflow,
        ),
        (413, b"<html><head><title>413 Request Entity Too Large</title></head></html>", ContextOverflow),
        (404, {"error": {"message": 'model "x" not found, try pulling it first'}}, ModelNotFound),
        (404, {"error": {"message": "The model `x` does not exist", "code": "model_not_found"}}, ModelNotFound),
        (400, {"error": {"message": "Model Not Exist"}}, ModelNotFound),
        (404, b"404 page not found", BadRequest),
        (404, {"detail": "Not Found"}, BadRequest),
        (400, {"error": {"code": "content_filter", "message": "The response was filtered"}}, ContentRefused),
        (400, {"error": {"message": "x", "innererror": {"code": "ResponsibleAIPolicyViolation"}}}, ContentRefused),
        (400, {"error": {"message": "Unsupported value: 'temperature' is not supported with this model"}}, BadRequest),
        (
            422,
            {"detail": [{"loc": ["body", "x"], "msg": "Field required", "input": {"q": "unauthorized"}}]},
            BadRequest,
        ),
        (400, {"error": {"message": "Possible causes: input exceeds the maximum context length, or bad"}}, BadRequest),
        (400, b"", BadRequest),
        (500, {"error": {"message": "Internal error"}}, Overloaded),
        (529, {"error": {"type": "overloaded_error", "message": "Overloaded"}}, Overloaded),
        (502, b"<html><title>Bad gateway</title></html>", Overloaded),
        (408, b"", Overloaded),
    ],
)
def test_an_http_error_becomes_the_right_kind(status: int, body: object, kind: type[ModelError]) -> None:
    error = error_of(status, body)
    assert type(error) is kind
    assert f"HTTP {status}" in str(error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "a", "code": 1}}, "a"),
        ({"error": "a"}, "a"),
        ({"error": {"error": {"message": "a"}}}, "a"),
        ({"error_type": "t", "error_message": "a"}, "a"),
        ({"object": "error", "message": "a", "code": 400}, "a"),
        ({"errors": [{"message": "a"}]}, "a"),
        ([{"error": {"message": "a"}}], "a"),
        ({"code": 1261, "msg": "a"}, "a"),
        ({"detail": "a"}, "a"),
        ({"success": False, "message": "a"}, "a"),
        ({"choices": [{"error": {"message": "a"}}]}, "a"),
    ],
)
def test_an_error_is_found_in_every_known_shape(body: object, message: str) -> None:
    error = find_error(body)
    assert error is not None
    assert error.message == message


@pytest.mark.parametrize(
    "body",
    [{}, {"choices": []}, {"type": "ping"}, {"error": None}, {"error": ""}, {"message": "hello"}, [], None, 7, "error"],
)
def test_other_bodies_are_not_errors(body: object) -> None:
    assert find_error(body) is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:16:50 GMT"}, 10.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Thu, 01 Jan 99999 00:00:00 GMT"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "1m30s"}, 90.0),
        ({"retry-after": "1970-01-01T00:17:00Z"}, 20.0),
        ({"x-ratelimit-reset-requests": "1m30s", "x-ratelimit-reset-tokens": "250ms"}, 0.25),
        ({"x-ratelimit-reset": "1005"}, 1005.0),
        ({"x-ratelimit-reset": "1700000000000"}, 1699999000.0),
    ],
)
def test_the_wait_in_headers_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, now_s=1000.0) == seconds


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("Please try again in 1.5s.", 1.5),
        ("Please try again in 6m0s.", 360.0),
        ("Try again in 500ms", 0.5),
        ("Retry after 2 minutes", 120.0),
        ("wait 30 seconds before you ask again", 30.0),
        ("Please try again in 1:30", 90.0),
        ("Retry after 1:02:30.", 3750.0),
        ("try again later", None),
        ("wait " + "1" * 5_000 + "x", None),
    ],
)
def test_the_wait_in_an_error_message_is_read(words: str, seconds: float | None) -> None:
    error = error_of(429, {"error": {"message": f"Rate limit reached. {words}"}})
    assert isinstance(error, RateLimited)
    assert error.retry_after_s == seconds


def refusal(words: str, status: int = 400) -> ErrorBody:
    return ErrorBody(message=words, status=status)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("Unrecognized request argument supplied: stream_options", "stream_options"),
        ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", "max_tokens"),
        ("parallel_tool_calls is only allowed when tools are", None),
        ("tool_choice 'none' is not supported", "tool_choice"),
        ("Missing `reasoning_content` field in the assistant message at index 2", "no_reasoning"),
        ("messages.2.assistant.reasoning_content: Extra inputs are not permitted", "reasoning"),
        ("'messages[0].role' does not support 'system' with this model", "system_role"),
        ("System role not supported", "system_role"),
        ("This model does not support image input", "images"),
        ("unknown variant `image_url`, expected `text`", "images"),
        ("messages.1.content: Input should be a valid string, got null", "null_content"),
        ("temperature is not supported", None),
        ("The parameter max_tokens is deprecated for reasoning models, please use max_completion_tokens", "max_tokens"),
        ("Argument not supported on this model: reasoningEffort", "thought_level"),
        ("This model only supports single tool-calls at once!", "parallel_calls"),
        ("Developer instruction is not enabled for this model", "developer_role"),
        ("Conversation roles must alternate user/assistant/user/assistant/...", "system_role"),
        ("text content is empty", "null_content"),
        ("No endpoints found that support image input", "images"),
        ("The model does not have vision capabilities", "images"),
        ("Unsupported value: 'stream' does not support true with this model.", "stream"),
        ("The upstream stream was invalid", None),
    ],
)
def test_a_refused_part_is_found_if_leaving_it_out_would_help(words: str, part: str | None) -> None:
    assert refused_part(refusal(words), Dialect()) == part


def test_a_part_that_is_already_left_out_is_not_found_again() -> None:
    dialect = Dialect().refusing("stream_options")
    assert refused_part(refusal("unknown field stream_options"), dialect) is None


def test_after_both_limit_names_are_refused_none_is_sent() -> None:
    dialect = Dialect().refusing("max_tokens").refusing("max_completion_tokens").refusing("nonsense")
    assert (dialect.limit_field, dialect.refused) == (None, ("max_tokens", "max_completion_tokens"))


def test_a_server_error_refuses_no_part() -> None:
    assert refused_part(refusal("stream_options", status=503), Dialect()) is None


def test_the_dialect_of_openai_comes_from_its_preset() -> None:
    dialect = endpoint_of(target_of("gpt-5.2", Settings())).dialect
    assert (dialect.limit_field, dialect.cache) == ("max_completion_tokens", "key")
    assert Endpoint(base_url="http://localhost:11434/v1", model="m").dialect == Dialect()


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("max_tokens is too large: 99999. This model supports at most 16,384 completion tokens", 16384),
        ("the valid range of max_tokens is [1, 8192]", 8192),
        ("max_tokens must be less than or equal to 4096", 4096),
        ("max_tokens is wrong", None),
        ("max_tokens: 9000 > " + "9" * 5_000, None),
    ],
)
def test_the_largest_accepted_output_is_read(words: str, most: int | None) -> None:
    assert max_output_tokens(refusal(words)) == most


@pytest.mark.parametrize(
    "words",
    [
        "tool name too long: maximum length 64 tokens, got 512",
        "'tools[0].function.description' is too long: maximum length is 1024 tokens",
        "Invalid 'messages[3].tool_calls[0].id': string too long. Expected a string with maximum length 400.",
        "Cached content is too small. total_token_count=1024, min_total_token_count=4096",
        "max_tokens is too large: 100000. This model supports at most 16384 completion tokens.",
    ],
)
def test_other_limits_are_not_an_overflow(words: str) -> None:
    assert type(error_of(400, {"error": {"message": words}})) is BadRequest


def test_a_daily_or_monthly_limit_is_a_quota() -> None:
    for words in ("Your account has exceeded its monthly token limit", "You have exceeded the token limit for today"):
        assert type(error_of(400, {"error": {"message": words}})) is QuotaExceeded


def test_a_model_without_tools_gets_a_hint() -> None:
    error = error_of(400, {"error": {"message": "registry/gemma:2b does not support tools"}})
    assert "Crow needs a model that can call tools" in str(error)


def test_a_server_whose_tools_need_a_flag_is_not_asked_again() -> None:
    error = error_of(
        500, {"error": {"code": 500, "message": "tools param requires --jinja flag", "type": "server_error"}}
    )
    assert type(error) is BadRequest
    assert str(error).endswith(
        "requires --jinja flag (HTTP 500, server_error). Crow needs tools: start the server with this flag."
    )
    assert type(error_of(500, {"error": {"message": "tool calling requires more memory"}})) is Overloaded
