"""Which refusals lead to another wire, in the words of many servers, and which do not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from crow.domain.errors import BadRequest
from crow.domain.messages import WireName
from crow.llm import Request
from crow.llm.client import EndpointClient
from crow.llm.errors import find_error, parse_error_response, refuses_wire
from tests.llm.chat.test_chat_completions import Memory, refusals
from tests.llm.test_wires import ALL, WITH_TOOLS, asking, wires_of
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, failing, text

# ruff: noqa: E501

OF_A_WIRE: list[tuple[WireName, int, str]] = [
    (
        "chat",
        404,
        '{"error": {"message": "This model is only supported in v1/responses and not in v1/chat/completions.", "type": "invalid_request_error", "param": "model"}}',
    ),
    (
        "chat",
        404,
        '{"error": {"message": "This is not a chat model and thus not supported in the v1/chat/completions endpoint. Did you mean to use v1/completions?", "type": "invalid_request_error", "param": "model"}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "The chatCompletion operation does not work with the specified model, gpt-5-codex. Please choose different model and try again.", "code": "OperationNotSupported"}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "model \\"gpt-5-codex\\" is not accessible via the /chat/completions endpoint", "code": "unsupported_api_for_model"}}',
    ),
    (
        "chat",
        404,
        '{"error": {"message": "No endpoints found that support tool use. To learn more about provider routing, visit: https://openrouter.ai/docs", "code": 404}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "litellm.UnsupportedParamsError: azure does not support parameters: [\'tools\'], for model=gpt-6. To drop these, set `litellm.drop_params=True`"}}',
    ),
    ("chat", 400, '{"error": {"message": "This model doesn\'t support tool use."}}'),
    (
        "responses",
        404,
        '{"error": {"message": "Unknown request URL: POST /openai/v1/responses. Please check the URL for typos, or see the docs", "code": "unknown_url", "type": "invalid_request_error"}}',
    ),
    ("responses", 404, '{"error": {"message": "Invalid URL (POST /v1/responses)", "type": "invalid_request_error"}}'),
    ("responses", 404, '{"message":"no Route matched with those values"}'),
    ("messages", 404, "<!DOCTYPE html><html><body><pre>Cannot POST /v1/messages</pre></body></html>"),
    (
        "messages",
        404,
        '{"success":false,"errors":[{"code":7003,"message":"Could not route to /v1/messages, perhaps your object identifier is invalid?"}],"messages":[],"result":null}',
    ),
    (
        "messages",
        404,
        '{"timestamp":"2026-11-01T10:00:00.000+00:00","status":404,"error":"Not Found","path":"/v1/messages"}',
    ),
    (
        "messages",
        405,
        "<html><head><title>405 Not Allowed</title></head><body><center><h1>405 Not Allowed</h1></center><hr><center>nginx</center></body></html>",
    ),
    (
        "responses",
        400,
        '{"object":"error","message":"The model does not support Responses API","type":"BadRequestError","param":null,"code":400}',
    ),
    (
        "chat",
        400,
        '{"object":"error","message":"The model does not support Chat Completions API","type":"BadRequestError","param":null,"code":400}',
    ),
    ("chat", 410, '{"error": {"message": "The Chat Completions API has been removed here. Migrate to Responses."}}'),
    (
        "chat",
        400,
        '{"error": {"message": "API \'gpt-5-4\' does not support the \'openai/v1/chat/completions\' api type", "code": "BAD_REQUEST"}}',
    ),
    ("chat", 400, '{"error": {"message": "Reasoning with function calling requires the Responses endpoint."}}'),
    ("responses", 501, '{"error": {"message": "not implemented"}}'),
    ("responses", 501, '{"detail":"Not Implemented"}'),
    ("responses", 200, '{"error":"Unexpected endpoint or method. (POST /v1/responses)"}'),
    ("responses", 404, '{"error":"Unexpected endpoint or method. (POST /v1/responses)"}'),
    (
        "responses",
        500,
        '{"error": {"message": "not implemented (request id: 2026)", "type": "new_api_error", "code": "convert_request_failed"}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "Unsupported legacy protocol: /v1/chat/completions is not supported. Please use /v1/responses."}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "\\u8be5\\u6a21\\u578b\\u4e0d\\u652f\\u6301 chat/completions \\u63a5\\u53e3\\uff0c\\u8bf7\\u4f7f\\u7528 responses \\u63a5\\u53e3"}}',
    ),
    ("chat", 400, '{"error": {"message": "Function calling is not supported for gpt-6 when reasoning is enabled."}}'),
    ("chat", 400, '{"error": {"message": "When thinking is on, tools cannot be used on this endpoint."}}'),
    ("chat", 400, '{"error": {"message": "Only the Responses API accepts functions for reasoning models."}}'),
    ("chat", 400, '{"error": {"message": "reasoning_effort must be \'none\' when tools are present."}}'),
    (
        "chat",
        400,
        '{"error": {"message": "Invalid value for \'reasoning_effort\': when \'tools\' is set the only permitted value is \'none\'.", "param": "reasoning_effort"}}',
    ),
    ("chat", 400, '{"error": {"message": "`tools` and `reasoning_effort` cannot be used together."}}'),
    ("chat", 400, '{"error": {"message": "tools and reasoning_effort are mutually exclusive for this model"}}'),
    (
        "chat",
        422,
        '{"error": {"message": "Tool definitions require reasoning_effort=none on this route; see the Responses API"}}',
    ),
    ("chat", 400, '{"error": {"message": "Function tools with reasoning are unavailable here."}}'),
    (
        "chat",
        400,
        '{"error": {"message": "Tools may only be combined with reasoning effort \'none\' on chat completions."}}',
    ),
    (
        "messages",
        400,
        '{"error": {"message": "This model is not available on the Anthropic Messages endpoint", "type": "invalid_request_error"}}',
    ),
    ("messages", 404, '{"type":"error","error":{"type":"not_found_error","message":"Not found: /v1/messages"}}'),
    ("responses", 404, '{"error":{"code":"404","message":"Resource not found"}}'),
    (
        "responses",
        400,
        '{"error": {"message": "Azure OpenAI Responses API is enabled only for api-version 2025-03-01-preview and later"}}',
    ),
    ("messages", 404, '{"code":5,"message":"Not Found","details":[]}'),
    ("responses", 400, '{"error": {"message": "Responses API is not supported for this model"}}'),
    (
        "responses",
        400,
        '{"error": {"message": "The model `x` does not support the Responses API.", "code": "unsupported_api"}}',
    ),
    ("messages", 400, '{"error": {"message": "Anthropic-style requests are not enabled for this deployment."}}'),
    ("responses", 404, '{"error": {"message": "The requested URL /v1/responses was not found on this server."}}'),
    (
        "chat",
        400,
        '{"error": {"message": "gpt-6.1: tool use together with reasoning is only offered by POST /v1/responses."}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "Please disable reasoning (reasoning_effort=none) before passing tools to this deployment.", "code": "BadRequest"}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "This deployment does not accept tools if the reasoning effort is above none."}}',
    ),
    ("chat", 422, '{"error": {"message": "tools: not available while reasoning is active"}}'),
    ("chat", 400, '{"error": {"message": "Model gpt-6 is a Responses-only model."}}'),
    ("chat", 400, '{"error": {"message": "The model gpt-6-codex can only be called through the responses endpoint."}}'),
    ("chat", 404, '{"error": {"message": "There is nothing here. Did you mean /v1/responses?"}}'),
    (
        "chat",
        400,
        '{"error": {"message": "Functions are disallowed for reasoning models on this API. Consider /v1/responses."}}',
    ),
    ("responses", 404, '{"error":"route POST:/v1/responses not found"}'),
    ("responses", 404, '{"statusCode":404,"message":"Route POST:/v1/responses not found","error":"Not Found"}'),
    ("messages", 404, '{"message":"The route v1/messages could not be found."}'),
    ("messages", 404, "<html><body><h1>Not Found</h1></body></html>"),
    ("messages", 405, '{"error":{"message":"POST is not supported for this path"}}'),
    ("responses", 404, '{"error":{"message":"Unrecognized request URL (POST: /v1/responses)."}}'),
    ("responses", 400, '{"error": {"message": "This provider doesn\'t offer the Responses API yet."}}'),
    ("responses", 400, '{"error": {"message": "Responses API unsupported by backend \'vllm-3\'"}}'),
    ("messages", 400, '{"error": {"message": "The anthropic messages api is not enabled on this gateway"}}'),
    ("messages", 400, '{"error": {"message": "Backend cannot serve Anthropic format"}}'),
    ("responses", 410, ""),
    (
        "responses",
        404,
        '{"fault":{"faultstring":"Unable to identify proxy for host: default and url: /v1/responses","detail":{"errorcode":"messaging.adaptors.http.flow.ApplicationNotFound"}}}',
    ),
    ("chat", 400, '{"error": {"message": "model does not support function calling"}}'),
    ("chat", 400, '{"error": {"message": "`tools` are not compatible with thinking mode; pass thinking=disabled."}}'),
    ("chat", 400, '{"error": {"message": "Reasoning models reject function tools in this API version."}}'),
    (
        "chat",
        404,
        '{"error": {"message": "Completions for model gpt-6-pro are served on the Responses endpoint only."}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "Legacy chat/completions route is closed for gpt-6; please move to /v1/responses"}}',
    ),
    ("messages", 501, "Not Implemented"),
    ("chat", 400, '{"error": {"message": "This model requires the use of the Responses API."}}'),
    ("chat", 400, '{"error": {"message": "To combine tools and reasoning, switch to the Responses API"}}'),
    ("responses", 404, '{"error": {"message": "Operation \'create response\' is unknown for this resource"}}'),
    ("chat", 400, '{"error": {"message": "No tool support for this model"}}'),
    ("chat", 400, '{"error": {"message": "gpt-6 needs the Responses API when you pass `tools`."}}'),
    ("chat", 400, '{"error": {"message": "Tool calling with reasoning is a Responses feature."}}'),
    ("chat", 400, '{"error": {"message": "Function calling: unsupported while reasoning_effort != none"}}'),
    ("chat", 422, '{"detail":"This model cannot use tools on chat completions"}'),
    ("responses", 404, '{"detail":"No matching operation"}'),
    ("messages", 404, "page not found"),
    ("messages", 405, ""),
    ("responses", 400, '{"error": {"message": "Responses endpoint disabled by administrator"}}'),
    ("chat", 410, '{"error": {"message": "Gone"}}'),
    ("chat", 400, '{"error": {"message": "This model has been moved to /v1/responses."}}'),
    ("chat", 400, '{"error": {"message": "With thinking enabled, this endpoint does not take tools."}}'),
    ("messages", 400, '{"error": {"message": "/v1/messages is not available for non-Claude models"}}'),
    ("responses", 501, '{"error": {"message": "unimplemented"}}'),
    ("responses", 500, '{"error": {"message": "Not Implemented: responses"}}'),
    ("chat", 400, '{"error": {"message": "model llama3 does not have tools: does not support tools"}}'),
]
"""Wire, status and body. A status of 200 is an error within an answer."""

OF_SOMETHING_ELSE: list[tuple[WireName, int, str]] = [
    (
        "responses",
        404,
        '{"error": {"message": "Item with id \'rs_abc\' not found. Items are not persisted when `store` is set to false. Try again with `store` set to true, or remove this item from your input.", "type": "invalid_request_error", "param": "input"}}',
    ),
    (
        "responses",
        404,
        '{"error": {"message": "Previous response with id \'resp_1\' not found.", "code": "previous_response_not_found"}}',
    ),
    (
        "chat",
        404,
        '{"error": {"message": "The API deployment for this resource does not exist. If you created the deployment within the last 5 minutes, please wait a moment and try again.", "code": "DeploymentNotFound"}}',
    ),
    (
        "chat",
        404,
        '{"error": {"message": "No endpoints found that can handle the requested parameters.", "code": 404}}',
    ),
    ("chat", 404, '{"error": {"message": "No endpoints found that support image input", "code": 404}}'),
    (
        "chat",
        404,
        '{"error": {"message": "No endpoints found matching your data policy (Free model publication).", "code": 404}}',
    ),
    ("chat", 404, '{"error":"model \'qwen9\' not found, try pulling it first"}'),
    ("messages", 404, '{"type":"error","error":{"type":"not_found_error","message":"model: claude-9"}}'),
    ("chat", 400, '{"error": {"message": "parallel tool calling is not supported"}}'),
    ("chat", 400, '{"error": {"message": "strict is required for tool calling"}}'),
    ("chat", 400, '{"error": {"message": "This model doesn\'t support tool use in streaming mode."}}'),
    ("chat", 400, '{"error": {"message": "tool_choice \\"required\\" is not supported with reasoning"}}'),
    ("chat", 400, '{"error": {"message": "Thinking may not be enabled when tool_choice forces tool use."}}'),
    ("chat", 400, '{"error": {"message": "Invalid schema for function \'shell\': schema must be an object"}}'),
    (
        "chat",
        400,
        '{"error": {"message": "An assistant message with \'tool_calls\' must be followed by tool messages responding to each \'tool_call_id\'."}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "Invalid \'tools[0].function.name\': string does not match pattern \'^[a-zA-Z0-9_-]+$\'."}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "Unsupported value: \'reasoning_effort\' does not support \'minimal\' with this model. Supported values are: \'low\', \'medium\', and \'high\'.", "param": "reasoning_effort", "code": "unsupported_value"}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "The `reasoning_content` in the thinking mode must be passed back to the API."}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "Unsupported parameter: \'max_tokens\' is not supported with this model. Use \'max_completion_tokens\' instead."}}',
    ),
    (
        "responses",
        400,
        '{"error": {"message": "Unsupported parameter: \'max_tokens\'. In the Responses API, this parameter has moved to \'max_output_tokens\'. Try again with the new parameter."}}',
    ),
    ("responses", 400, '{"error": {"message": "No tool output found for function call call_abc."}}'),
    ("responses", 400, '{"error": {"message": "Unknown parameter: \'reasoning.summary\'."}}'),
    ("responses", 400, '{"error": {"message": "Encrypted content is not supported with this model."}}'),
    ("chat", 400, '{"error": {"message": "Image inputs are not supported together with tools."}}'),
    (
        "messages",
        400,
        '{"error": {"message": "messages.3: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_1"}}',
    ),
    ("messages", 400, '{"error": {"message": "tools.0.custom.input_schema: JSON schema is invalid"}}'),
    ("messages", 400, '{"error": {"message": "Your credit balance is too low to access the Anthropic API."}}'),
    (
        "chat",
        400,
        '{"error": {"message": "max_tokens is too large: 99999. This model supports at most 16384 completion tokens"}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "This model\'s maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens (tools 2000)."}}',
    ),
    ("chat", 500, '{"error": {"message": "Internal error while calling tools"}}'),
    ("chat", 429, '{"error": {"message": "Too many requests. Use the Responses API with background mode."}}'),
    ("chat", 403, '{"error": {"message": "Your project may not use /v1/chat/completions with this key"}}'),
    (
        "messages",
        400,
        '{"error": {"message": "thinking.type.enabled is not supported for this model. Use thinking.type.adaptive and output_config.effort"}}',
    ),
    ("chat", 400, '{"error": {"message": "Invalid content type. image_url is only supported by certain models."}}'),
    (
        "chat",
        422,
        '{"detail":[{"type":"extra_forbidden","loc":["body","tools",0,"function","strict"],"msg":"Extra inputs are not permitted","input":false}]}',
    ),
    ("chat", 400, '{"error": {"message": "Unrecognized request argument supplied: reasoning_effort"}}'),
    ("chat", 400, '{"error": {"message": "Tool names must be unique."}}'),
    (
        "responses",
        400,
        '{"error": {"message": "Hosted tool \'web_search\' is not supported with reasoning.effort \'minimal\'."}}',
    ),
    (
        "chat",
        400,
        '{"error": {"message": "Unsupported parameter: \'reasoning_effort\' is not supported with this model."}}',
    ),
    (
        "responses",
        400,
        '{"error": {"message": "Tool \'apply_patch\' of type custom is not supported when reasoning.effort is minimal"}}',
    ),
    ("chat", 400, '{"error": {"message": "Function \'shell\' has more than 128 properties"}}'),
    (
        "chat",
        400,
        '{"error": {"message": "tools[3].function.description: string too long. Expected a string with maximum length 1024"}}',
    ),
    ("chat", 400, '{"error": {"message": "Reasoning effort \'high\' is not supported; use low or medium."}}'),
    ("chat", 400, '{"error": {"message": "This model always reasons and cannot turn thinking off."}}'),
    ("chat", 400, '{"error": {"message": "messages[4].tool_calls[0].function.arguments must be a JSON object"}}'),
    ("chat", 400, '{"error": {"message": "Role \'developer\' is not supported, use \'system\'."}}'),
    ("chat", 400, '{"error": {"message": "Only one tool call may be made at a time."}}'),
    ("chat", 400, '{"error": {"message": "You must provide a model parameter"}}'),
    (
        "responses",
        400,
        '{"error": {"message": "input[2]: reasoning item rs_1 was provided without its required following item."}}',
    ),
    ("responses", 400, '{"error": {"message": "The encrypted content for item rs_1 could not be verified."}}'),
    (
        "messages",
        400,
        '{"error": {"message": "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` is enabled, a final `assistant` message must start with a thinking block."}}',
    ),
    ("messages", 400, '{"error": {"message": "max_tokens must be greater than thinking.budget_tokens"}}'),
    ("chat", 400, '{"error": {"message": "Your request was flagged as potentially violating our usage policy."}}'),
    ("chat", 400, '{"error": {"message": "Duplicate tool name: read_file"}}'),
    ("chat", 400, '{"error": {"message": "Missing thought_signature in function call; required while thinking"}}'),
    ("chat", 400, '{"error": {"message": "Too many tools: 300 were given, 128 is the maximum"}}'),
    ("chat", 400, '{"error": {"message": "The tool result for call_1 must be text"}}'),
    ("messages", 400, '{"error": {"message": "tool_choice forces tool use is not compatible with thinking"}}'),
    ("chat", 413, '{"error": {"message": "Request Entity Too Large"}}'),
    ("chat", 402, '{"error": {"message": "Insufficient balance for tools with reasoning"}}'),
    (
        "chat",
        400,
        '{"error": {"message": "Unsupported value: \'temperature\' does not support 0 with this model when reasoning."}}',
    ),
    ("chat", 400, '{"error": {"message": "A document can only be read with vision models"}}'),
    ("chat", 400, '{"error": {"message": "function name must match ^[a-z]+$ for reasoning models"}}'),
    ("chat", 400, '{"error": {"message": "Invalid JSON in tool arguments; the reasoning model requires an object"}}'),
    (
        "responses",
        400,
        '{"error": {"message": "Unsupported parameter: \'messages\'. In the Responses API, this parameter has moved to \'input\'. Try again with the new parameter."}}',
    ),
    ("chat", 400, '{"error": {"message": "temperature must be 1 for reasoning models"}}'),
    ("chat", 400, '{"error": {"message": "Request body is not valid JSON"}}'),
    ("responses", 400, '{"error": {"message": "Error in POST /v1/responses: \'input\' must not be empty"}}'),
    (
        "chat",
        400,
        '{"error": {"message": "stream_options is only allowed when stream is enabled on /v1/chat/completions"}}',
    ),
    ("chat", 400, '{"error": {"message": "tools[0].type: expected \'function\'"}}'),
    ("chat", 404, '{"error": {"message": "The model `gpt-x` was not found at /v1/chat/completions"}}'),
    (
        "chat",
        400,
        '{"error": {"message": "context_length_exceeded: reduce the length of messages or tools; reasoning included"}}',
    ),
    ("messages", 400, '{"error": {"message": "tools.3.input_schema: invalid for thinking models"}}'),
    ("chat", 400, '{"error": {"message": "Multiple tool calls in one message are not supported by reasoning models"}}'),
    ("chat", 503, '{"error": {"message": "No backend for /v1/chat/completions; try /v1/responses"}}'),
    ("chat", 400, '{"error": {"message": "Bad Request"}}'),
    ("chat", 400, '{"error": {"message": "Invalid \'user\': string too long"}}'),
    (
        "chat",
        400,
        '{"error": {"message": "See https://example.com/docs/api/responses for the format of errors: bad top_p"}}',
    ),
]


def is_refused(wire: WireName, status: int, body: str) -> bool:
    error = find_error(json.loads(body)) if status == 200 else parse_error_response(status, body.encode())
    assert error is not None
    return refuses_wire(error, wire)


@pytest.mark.parametrize(("wire", "status", "body"), OF_A_WIRE)
def test_these_refusals_lead_to_another_wire(wire: WireName, status: int, body: str) -> None:
    assert is_refused(wire, status, body)


@pytest.mark.parametrize(("wire", "status", "body"), OF_SOMETHING_ELSE)
def test_these_refusals_do_not(wire: WireName, status: int, body: str) -> None:
    assert not is_refused(wire, status, body)


def test_a_long_refusal_is_read_quickly() -> None:
    words = "the tools of a parameter " * 20_000
    assert not is_refused("chat", 400, json.dumps({"error": {"message": words}}))


TOGETHER = "`tools` and `reasoning_effort` cannot be used together."


async def test_an_endpoint_with_one_wire_gets_the_request_without_what_it_refuses_beside_tools() -> None:
    def answer(request: Recorded) -> Reply:
        return failing(400, TOGETHER) if "reasoning_effort" in request.sent else text("Hello", " there", ".")

    memory = Memory()
    async with FakeEndpoint(otherwise=answer) as endpoint, asking(endpoint, memory=memory) as model:
        high = replace(WITH_TOOLS, thought_level="high")
        assert await tried(model, endpoint, high) == [
            "/chat/completions",
            "/responses",
            "/messages",
            "/chat/completions",
        ]
        assert refusals(memory) == {"thought_level": (1, True)}
        assert await tried(model, endpoint, high) == ["/chat/completions"]


async def tried(model: EndpointClient, endpoint: FakeEndpoint, request: Request) -> list[str]:
    """Send a request that works, and return the paths to which it was sent."""
    before = len(endpoint.requests)
    await wires_of(model, endpoint, request)
    return [each.path.removeprefix("/v1") for each in endpoint.requests[before:] if each.method == "POST"]


async def test_an_item_that_the_endpoint_lost_is_no_reason_to_change_the_wire() -> None:
    lost = "Item with id 'rs_1' not found. Items are not persisted when `store` is set to false."
    memory = Memory()
    async with FakeEndpoint(otherwise=text("Hello", " there", ".")) as endpoint:
        endpoint.wires = ALL
        endpoint.script(failing(404, lost))
        async with asking(endpoint, memory=memory, wires=("responses", "chat")) as model:
            assert await wires_of(model, endpoint) == ["responses", "responses"]
    assert "responses_wire" not in refusals(memory)


async def test_without_another_wire_the_error_says_how_to_turn_reasoning_off() -> None:
    async with FakeEndpoint(otherwise=failing(400, TOGETHER)) as endpoint, asking(endpoint) as model:
        with pytest.raises(BadRequest, match=r'cannot be used together.*set thought_level = "off"'):
            await wires_of(model, endpoint)
