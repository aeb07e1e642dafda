"""What endpoints say of the models they offer."""

from __future__ import annotations

import pytest

from crow.llm.models import Offered, read_listing


@pytest.mark.parametrize(
    ("item", "offered"),
    [
        ({"id": "m", "object": "model"}, Offered(name="m")),
        ("m", Offered(name="m")),
        ({"id": "m", "max_model_len": 32768}, Offered(name="m", context_window=32768)),
        ({"id": "m", "meta": {"n_ctx": 8192, "n_ctx_train": 131072}}, Offered(name="m", context_window=8192)),
        ({"id": "m", "meta": {"n_ctx_train": 131072}}, Offered(name="m")),
        (
            {"id": "m", "max_context_length": 131072, "loaded_context_length": 4096},
            Offered(name="m", context_window=4096),
        ),
        ({"id": "m", "context_window": 131072, "max_completion_tokens": 65536},
         Offered(name="m", context_window=131072, max_output_tokens=65536)),
        (
            {
                "id": "a/m",
                "context_length": 200000,
                "top_provider": {"context_length": 128000, "max_completion_tokens": None},
                "pricing": {"prompt": "0.0000025", "completion": "0.00001", "input_cache_read": "0.00000125"},
            },
            Offered(
                name="a/m",
                context_window=128000,
                input_price=2.5,
                cached_price=1.25,
                output_price=10.0,
            ),
        ),
        ({"id": "m", "context_length": "big", "pricing": {"prompt": "-1"}, "meta": 3}, Offered(name="m")),
        ({"name": "m", "context_length": True}, Offered(name="m")),
    ],
)  # fmt: skip
def test_what_is_stated_of_a_model_is_read_wherever_it_stands(item: object, offered: Offered) -> None:
    for body in ({"data": [item]}, {"models": [item, {"id": 3}, None]}, [item]):
        assert read_listing(body) == (offered,)


@pytest.mark.parametrize("body", [None, 3, "m", {}, {"data": None}, {"error": {"message": "no"}}])
def test_what_is_no_listing_is_none(body: object) -> None:
    assert read_listing(body) is None
