"""Lines as messages and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.messages import MAX_DEPTH
from crow.protocol.frames import FrameError, LineSplitter, encode, line_too_long, parse

REQUEST = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
members = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | json_values,
        "id": st.integers() | st.text() | json_values,
        "method": st.text() | json_values,
        "params": st.dictionaries(st.text(), json_values) | json_values,
        "result": json_values,
        "error": json_values,
    },
)


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("empty", [b"", b"  ", b"\r", b"\t \r", b"\xef\xbb\xbf", b"\xef\xbb\xbf \r"])
def test_blank_lines_are_ignored(empty: bytes) -> None:
    assert parse(empty) is None


def test_a_byte_order_mark_and_a_carriage_return_are_tolerated() -> None:
    assert parse(b"\xef\xbb\xbf" + line(REQUEST) + b"\r") == REQUEST


def test_unknown_members_of_the_envelope_are_dropped() -> None:
    assert parse(line({"type": "com.example.JsonRpcRequest", **REQUEST})) == REQUEST


@pytest.mark.parametrize("params", [None, {}])
def test_missing_and_null_parameters_are_an_empty_object(params: Any) -> None:
    given_message = {"jsonrpc": "2.0", "method": "x", "id": "a", "params": params}
    assert parse(line(given_message)) == {"jsonrpc": "2.0", "method": "x", "id": "a", "params": {}}
    assert parse(line({"jsonrpc": "2.0", "method": "x"})) == {"jsonrpc": "2.0", "method": "x", "params": {}}


@pytest.mark.parametrize(
    ("raw", "code", "request_id"),
    [
        (b"{bad", -32700, None),
        (b'{"jsonrpc": "2.0", "id": 1', -32700, None),
        (b'{"a": "\xff"}', -32700, None),
        (b"[" * 100_000, -32700, None),
        (b"[" * (MAX_DEPTH + 5) + b"]" * (MAX_DEPTH + 5), -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"n":NaN}}', -32700, None),
        (b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"x"}', -32700, None),
        (b"[]", -32600, None),
        (line([REQUEST]), -32600, None),
        (b"null", -32600, None),
        (b"42", -32600, None),
        (b"4.2", -32600, None),
        (b"true", -32600, None),
        (b'"x"', -32600, None),
        (b"{}", -32600, None),
        (line({"jsonrpc": "2.0"}), -32600, None),
        (line({"jsonrpc": "2.0", "id": None}), -32600, None),
        (line({"jsonrpc": "2.0", "method": "x", "id": None}), -32600, None),
        (line({"jsonrpc": "2.0", "method": "x", "id": True}), -32600, None),
        (line({"jsonrpc": "2.0", "method": "x", "id": 1.5}), -32600, None),
        (line({"jsonrpc": "2.0", "method": "x", "id": [1]}), -32600, None),
        (line({"jsonrpc": "2.0", "method": "x", "id": "i" * 2000}), -32600, None),
        (line({"jsonrpc": "2.0", "method": 5, "id": 7}), -32600, 7),
        (line({"jsonrpc": "2.0", "method": ["x"], "id": "s"}), -32600, "s"),
        (line({"jsonrpc": "2.0", "method": None, "id": 7}), -32600, 7),
        (line({"jsonrpc": "1.0", "method": "x", "id": 7}), -32600, 7),
        (line({"method": "x", "id": 7}), -32600, 7),
        (line({"jsonrpc": "2.0", "method": "x", "id": 7, "params": [1]}), -32602, 7),
        (line({"jsonrpc": "2.0", "method": "x", "id": 7, "params": "p"}), -32602, 7),
        (line({"jsonrpc": "2.0", "id": [], "result": 1}), -32600, None),
        (line({"jsonrpc": "2.0", "id": {}, "error": {}}), -32600, None),
    ],
)
def test_an_invalid_message_gets_the_json_rpc_error(raw: bytes, code: int, request_id: Any) -> None:
    fault = parse(raw)
    assert isinstance(fault, FrameError)
    assert (fault.code, fault.id) == (code, request_id)
    assert fault.response() == {
        "jsonrpc": "2.0",
        "id": request_id,
        "error": {"code": code, "message": fault.message, "data": {"details": fault.message}},
    }
    assert len(fault.message) < 200


def test_a_notification_with_invalid_parameters_is_ignored() -> None:
    assert parse(line({"jsonrpc": "2.0", "method": "session/cancel", "params": [1]})) is None


def test_an_error_response_without_id_is_ignored() -> None:
    assert parse(line({"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "Invalid"}})) is None


@pytest.mark.parametrize(
    ("error", "whole"),
    [
        ({"code": 5, "message": "no", "data": {"a": 1}}, {"code": 5, "message": "no", "data": {"a": 1}}),
        ({"code": "5"}, {"code": -32603, "message": "Error", "data": None}),
        ("words", {"code": -32603, "message": "words", "data": None}),
        ([1], {"code": -32603, "message": "[1]", "data": None}),
    ],
)
def test_an_error_response_of_any_shape_is_completed(error: Any, whole: Any) -> None:
    given_message = {"jsonrpc": "2.0", "id": 3, "result": None, "error": error}
    assert parse(line(given_message)) == {"jsonrpc": "2.0", "id": 3, "error": whole}


def test_a_null_error_beside_a_result_is_ignored() -> None:
    given_message = {"jsonrpc": "2.0", "id": 3, "method": None, "result": {"a": 1}, "error": None}
    assert parse(line(given_message)) == {"jsonrpc": "2.0", "id": 3, "result": {"a": 1}}


def test_lone_surrogates_become_replacement_characters_in_both_directions() -> None:
    raw = rb'{"jsonrpc":"2.0","id":1,"method":"x","params":{"\ud800":["a\udfffb","\ud83d\ude00"]}}'
    message = parse(raw)
    assert message == {"jsonrpc": "2.0", "id": 1, "method": "x", "params": {"\ufffd": ["a\ufffdb", "😀"]}}
    assert encode({"text": "a\udfffb\ud800"}) == '{"text":"a\ufffdb\ufffd"}\n'.encode()


def test_messages_are_encoded_as_one_compact_line_of_utf_8_without_nan() -> None:
    message = {"text": "é\n\u2028😀", "n": [float("nan"), float("-inf"), 1.5], "none": None}
    assert encode(message) == '{"text":"é\\n\u2028😀","n":[null,null,1.5],"none":null}\n'.encode()


@given(st.lists(st.binary(max_size=30)), st.integers(1, 40), st.randoms())
def test_any_split_of_the_stream_gives_the_same_lines(chunks: list[bytes], limit: int, random: Any) -> None:
    stream = b"".join(chunks)
    whole = LineSplitter(limit=limit)
    expected = [*whole.feed(stream), *whole.finish()]
    splitter = LineSplitter(limit=limit)
    lines = []
    at = 0
    while at < len(stream):
        step = random.randint(1, 7)
        lines += splitter.feed(stream[at : at + step])
        at += step
    assert [*lines, *splitter.finish()] == expected
    plain = stream.split(b"\n")
    plain = plain if plain[-1] else plain[:-1]
    assert expected == [one if len(one) <= limit else line_too_long(len(one), limit) for one in plain]


def test_a_line_over_the_limit_is_dropped_while_it_arrives_and_reported() -> None:
    splitter = LineSplitter(limit=1000)
    for _ in range(100):
        assert splitter.feed(b"x" * 100) == []
    assert splitter._parts == []
    too_long, after = splitter.feed(b"\nnext\n")
    assert (too_long, after) == (line_too_long(10_000, 1000), b"next")
    assert "10000 bytes long; crow reads at most 1000 bytes" in line_too_long(10_000, 1000).message


@given(members)
def test_every_parsed_message_is_safe_for_the_connection(value: dict[str, Any]) -> None:
    message = parse(line(value))
    match message:
        case None | FrameError():
            return
        case {"method": method}:
            assert isinstance(method, str)
            assert isinstance(message["params"], dict)
            assert message.keys() <= {"jsonrpc", "id", "method", "params"}
        case {"error": error}:
            assert isinstance(error["code"], int)
            assert isinstance(error["message"], str)
            assert "result" not in message
        case _:
            assert message.keys() <= {"jsonrpc", "id", "result"}
    if "id" in message:
        assert isinstance(message["id"], int | str)
        assert not isinstance(message["id"], bool)


@given(st.binary(max_size=200))
def test_parse_never_raises(raw: bytes) -> None:
    assert parse(raw) is None or isinstance(parse(raw), dict | FrameError)
