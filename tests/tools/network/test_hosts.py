"""Hosts, the rules about them, and the registries of projects."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.agent.permissions.rules import typed_rule
from crow.domain.errors import ArgumentError
from crow.tools.network.hosts import Host, covers_host, is_host_pattern, names_host, parse_host
from crow.tools.network.registries import DEFAULT_REGISTRIES, find_registries

PIP, NPM = DEFAULT_REGISTRIES["pip"], DEFAULT_REGISTRIES["npm"]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a.test:443", "a.test"),
        ("A.Test.:443", "a.test"),
        ("a.test:8443", "a.test:8443"),
        ("0x7f.1:80", "127.0.0.1"),
        ("[::1]:80", "[::1]"),
        ("[::1]:8080", "[::1]:8080"),
        ("[::ffff:93.184.216.34]:443", "93.184.216.34"),
    ],
)
def test_a_host_has_one_form(text: str, host: str) -> None:
    assert str(parse_host(text)) == host


@pytest.mark.parametrize(
    "text", ["a.test", "a@b:1", "a:0", "a:65536", "a b:1", "a%2e:1", "ä.test:1", ":1", "a..:1", ""]
)
def test_what_is_not_a_host_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not a host"):
        parse_host(text)


@pytest.mark.parametrize(
    ("pattern", "covered", "others"),
    [
        ("a.test", ["a.test"], ["b.a.test", "a.test:8080", "a.test.b", "xa.test"]),
        ("A.Test.", ["a.test"], ["b.test"]),
        ("a.test:8080", ["a.test:8080"], ["a.test", "a.test:8081"]),
        ("a.test:443", ["a.test"], ["a.test:8080", "b.test"]),
        ("a.test:80", ["a.test"], ["a.test:8080"]),
        ("a.test:*", ["a.test", "a.test:1"], ["b.test"]),
        ("*.a.test", ["b.a.test", "c.b.a.test"], ["a.test", "ba.test", "b.a.test:8080"]),
        ("*", ["a.test", "10.0.0.1"], ["a.test:8080"]),
        ("*:*", ["a.test", "a.test:8080"], []),
        ("registries", [*PIP, *NPM], ["registries", "evil.test", f"{PIP[0]}:8080"]),
        ("bücher.test", ["xn--bcher-kva.test"], ["bcher.test"]),
        ("10.0.0.1", ["10.0.0.1", "[::ffff:10.0.0.1]", "[::FFFF:a00:1]"], ["10.0.0.2", "[::ffff:10.0.0.2]"]),
        ("[::ffff:10.0.0.1]:8080", ["10.0.0.1:8080"], ["10.0.0.1"]),
        ("[::a00:1]", ["[::10.0.0.1]"], ["10.0.0.1"]),
        ("*.0.0.1", [], ["10.0.0.1"]),
        ("a.*", [], ["a.test"]),
        ("*test", [], ["a.test"]),
        ("", [], ["a.test"]),
    ],
)
def test_a_rule_covers_these_hosts_and_no_others(pattern: str, covered: list[str], others: list[str]) -> None:
    assert [host for host in (*covered, *others) if covers_host(pattern, host)] == covered


def test_only_a_rule_without_wildcards_names_a_host() -> None:
    patterns = ("localhost", "*", "*:*", "*.localhost", "registries", "LOCALHOST")
    assert [pattern for pattern in patterns if names_host(pattern, "localhost")] == ["localhost", "LOCALHOST"]


def test_a_rule_for_a_host_and_a_port_is_accepted() -> None:
    assert typed_rule("network(*.a.test:8080)", allow=True, cwd="/").argument == "*.a.test:8080"


@pytest.mark.parametrize(
    "argument",
    [
        *("https://a.test", "a.*", "*.*", "*.10.0.0.1", "a test", "a.test:0", "a.test:99999", "*:0", "*:65536"),
        *(
            "b\u00fccher.test/login",
            "b\u00fccher.test?x",
            "b\u00fccher.test#x",
            "b\u00fccher.test\\x",
            "b\u00fccher%2etest",
        ),
    ],
)
def test_a_rule_that_names_no_host_is_refused(argument: str) -> None:
    assert not is_host_pattern(argument)
    with pytest.raises(ArgumentError, match="names no host"):
        typed_rule(f"network({argument})", allow=False, cwd="/")


def test_a_host_of_a_rule_may_have_any_letters() -> None:
    assert is_host_pattern("*.\u0939\u093f\u0928\u094d\u0926\u0940.test")  # with combining marks


def test_registries_are_found_by_the_files_of_a_project(tmp_path: Path) -> None:
    assert find_registries([tmp_path]).hosts == ()
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "requirements.txt").write_text("--extra-index-url https://wheels.corp.example:8443/simple\nx\n")
    (tmp_path / ".npmrc").write_text("# registry=https://no.example/\n@corp:registry=https://npm.corp.example/\n")
    found = find_registries([tmp_path])
    assert found.usual == (*PIP, *NPM)
    assert found.named == ("wheels.corp.example:8443", "npm.corp.example")
    assert found.words() == (
        f"the registries of pip, npm: {', '.join((*PIP, *NPM))}, and "
        "wheels.corp.example:8443, npm.corp.example, which files of this project name"
    )


def test_a_password_in_the_url_of_a_registry_is_not_a_host(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://bob:secret@wheels.corp.example:8443/simple\n")
    assert find_registries([tmp_path]).named == ("wheels.corp.example:8443",)


def test_files_of_a_project_can_name_only_a_few_registries(tmp_path: Path) -> None:
    lines = (f"--extra-index-url https://h{number}.example/" for number in range(100))
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    assert len(find_registries([tmp_path]).named) == 4


def test_a_host_without_a_port_needs_a_default() -> None:
    assert parse_host("a.test", 443) == Host("a.test", 443)
