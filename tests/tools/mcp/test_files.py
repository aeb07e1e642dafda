"""Tests of PDF files in the results and prompts of MCP servers."""

from __future__ import annotations

import base64

import mcp_types as mcp
import pytest

from crow.domain.entries import Attachment
from crow.domain.messages import PDF_BYTES, File, Text
from crow.tools.mcp.calls import outcome_of, parts_of

PDF = base64.b64encode(b"%PDF-1.7\n\0").decode()


def _embedded(data: str) -> mcp.EmbeddedResource:
    file = mcp.BlobResourceContents(uri="docs:///a.pdf", blob=data, mime_type="application/pdf")
    return mcp.EmbeddedResource(type="resource", resource=file)


def test_a_pdf_embedded_in_a_result_goes_to_the_model() -> None:
    outcome = outcome_of(mcp.CallToolResult(content=[_embedded(PDF)]))
    assert outcome.text == "[docs:///a.pdf, application/pdf, 10 bytes]"
    (attached,) = outcome.attachments
    assert attached == Attachment(
        name="docs:///a.pdf", uri="docs:///a.pdf", mime_type="application/pdf", data=PDF, for_model=True
    )


_LARGE = base64.b64encode(b"%PDF-1.7" + bytes(PDF_BYTES)).decode()


@pytest.mark.parametrize("data", ["", "JVBERi0xLjcK!", base64.b64encode(b"<html>").decode(), _LARGE])
def test_what_is_no_pdf_or_too_large_is_only_described(data: str) -> None:
    outcome = outcome_of(mcp.CallToolResult(content=[_embedded(data)]))
    assert outcome.text.endswith(": not shown]")
    assert [attached.for_model for attached in outcome.attachments] == [False]
    (part,) = parts_of(mcp.GetPromptResult(messages=[mcp.PromptMessage(role="user", content=_embedded(data))]))
    assert isinstance(part, Text)


def test_a_pdf_in_a_prompt_of_a_server_is_a_file() -> None:
    parts = parts_of(mcp.GetPromptResult(messages=[mcp.PromptMessage(role="user", content=_embedded(PDF))]))
    assert parts == (File(name="a.pdf", data=PDF, mime_type="application/pdf", uri="docs:///a.pdf"),)
