from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from crow.tools.mcp.names import prefixes, unique_names

NAME = st.text(alphabet=st.sampled_from("ab_-.é "), max_size=40)


def tool_names(prefix: str, tools: list[str]) -> tuple[str, ...]:
    return unique_names(prefix, "__", tools)


def test_plain_names_stay_plain() -> None:
    assert prefixes(["github", "my-db"]) == ("github", "my-db")
    assert tool_names("github", ["list_issues", "get.user"]) == ("github__list_issues", "github__get_user")


def test_names_that_would_be_equal_get_a_hash() -> None:
    assert prefixes(["a b", "a_b", "a__b", "é"]) == ("a_b", "a_b-f92b04e3", "a_b-fe2c189b", "server-8c15a821")
    assert tool_names("s", ["get_user", "get.user", "get user"]) == (
        "s__get_user",
        "s__get_user-9401c551",
        "s__get_user-4f8a6cae",
    )


def test_a_tool_named_like_the_hash_of_another_keeps_its_name() -> None:
    (_, bent) = tool_names("s", ["a b", "a.b"])
    names = tool_names("s", ["a b", "a.b", bent.removeprefix("s__")])
    assert len(set(names)) == 3
    assert names[2] == bent


def test_a_name_does_not_depend_on_the_order_of_the_list() -> None:
    assert tool_names("s", ["b", "a"]) == tuple(reversed(tool_names("s", ["a", "b"])))


@given(st.lists(st.tuples(NAME, st.lists(NAME, max_size=6, unique=True)), max_size=5))
def test_names_are_valid_unique_and_never_a_built_in(servers: list[tuple[str, list[str]]]) -> None:
    from crow.tools.builtin import SPECS

    names = [spec.name for spec in SPECS]
    for prefix, (_, tools) in zip(prefixes([server for server, _ in servers]), servers, strict=True):
        own = tool_names(prefix, tools)
        assert all(name.startswith(f"{prefix}__") for name in own)
        names.extend(own)
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names)
