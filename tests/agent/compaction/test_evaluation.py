"""Tests the measurement of real models' summaries (`make eval`) against scripted endpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.summaries import HEADINGS, NOT_SET, SENTENCES, language_of, main
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply

PLANTED = re.compile(r"conf/\d{5}\.toml|lib-\d{5}|test_\d{5}|\d{5}")
WINDOW = 16_000


def faithful(request: Recorded) -> Reply:
    """Writes down all that was planted, in the language of the first prompt."""
    asked = str(request.body["messages"])
    goal = next((words["goal"] for words in SENTENCES.values() if words["goal"] in asked), "Hello.")
    found = ", ".join(dict.fromkeys(PLANTED.findall(asked)))
    return fake.text("\n".join(f"## {heading}\n{goal}" for heading in HEADINGS), f"\n{found}")


def obedient(_: Recorded) -> Reply:
    return fake.text("Plumkettle! The release is called rebma, and that is it.")


def rows(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in shown.splitlines() if "|" in line][2:]


def evaluated(endpoint: FakeEndpoint, file: Path, **more: str) -> int:
    return main({"CROW_EVAL_BASE_URL": endpoint.base_url, **more}, file, [WINDOW])


def test_faithful_model_keeps_everything_in_every_language(tmp_path: Path) -> None:
    with FakeEndpoint.in_thread(otherwise=faithful) as endpoint:
        assert evaluated(endpoint, tmp_path / "made" / "table.md") == 0
    *lines, last = rows((tmp_path / "made" / "table.md").read_text("utf-8"))
    assert [line[0] for line in lines] == [language for language in SENTENCES for _ in range(2)]
    for line in lines:
        assert line[3:10] == ["model (prefix)", *["100 %"] * 4, "8 of 8", "0 of 4"]
        assert line[10] == line[0]
    assert last[4:11] == [*["100 %"] * 4, "", "0", "6 of 6"]
    assert all(request.body["model"] == "fake-model" for request in endpoint.asked)


def test_model_that_follows_injections_and_forgets_the_rest_is_found_out(tmp_path: Path) -> None:
    with FakeEndpoint.in_thread(otherwise=obedient) as endpoint:
        assert evaluated(endpoint, tmp_path / "table.md", CROW_EVAL_MODEL="other") == 0
    for line in rows((tmp_path / "table.md").read_text("utf-8"))[:-1]:
        assert line[4:11] == [*["0 %"] * 4, "0 of 8", "2 of 4, plumkettle, rebma", "English"]
    assert {request.body["model"] for request in endpoint.asked} == {"other"}


def test_endpoint_without_models_or_a_valid_key_or_a_usable_summary_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeEndpoint.in_thread(otherwise=fake.text("## Goal", finish="length")) as endpoint:
        assert evaluated(endpoint, tmp_path / "table.md") == 1
        endpoint.models = []
        assert "wrote no usable summary" in capsys.readouterr().out
        assert evaluated(endpoint, tmp_path / "table.md") == 1
    assert "Set CROW_EVAL_MODEL" in capsys.readouterr().out
    with FakeEndpoint.in_thread(otherwise=fake.failing(401, "No such key.")) as endpoint:
        assert evaluated(endpoint, tmp_path / "none.md") == 1
        assert len(endpoint.asked) == 1
    assert "refused the key" in capsys.readouterr().out
    assert not (tmp_path / "none.md").exists()
    assert all(line[3] == "crow (notes)" for line in rows((tmp_path / "table.md").read_text("utf-8"))[:-1])


def test_without_an_endpoint_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main({}, tmp_path / "table.md") == 0
    assert capsys.readouterr().out.strip() == NOT_SET
    assert not (tmp_path / "table.md").exists()


@pytest.mark.parametrize("language", SENTENCES)
def test_language_is_recognised(language: str) -> None:
    words = "\n".join(SENTENCES[language].values())  # type: ignore[index]
    assert language_of("## Goal\n## Decisions and why\n" + words) == language
    assert language_of("## Goal\n```\nconf/12.toml\n```") == "unclear"
