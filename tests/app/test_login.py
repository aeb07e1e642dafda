"""`crow login`: its questions, and the file that it writes."""

from __future__ import annotations

import os
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from crow.domain.errors import ConfigError
from crow.settings.endpoints import PRESETS
from crow.settings.write import save_model_settings, set_model_keys
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, failing, text
from tests.support.terminal import start

ROOT = Path(__file__).parents[2]


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint.in_thread(otherwise=text("OK")) as server:
        yield server


def login(home: Path, *answers: str, command: tuple[str, ...] = ("login",), **env: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the dialogue."""
    env = {"PATH": os.environ["PATH"], "CROW_HOME": str(home), **env}
    typed = "".join(f"{answer}\n" for answer in answers).encode()
    with start(command, env=env, cwd=ROOT, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(typed, timeout=60)
    return process.wait(), out.decode(), err.decode()


@pytest.mark.long
@pytest.mark.parametrize("command", [("login",), ("--setup",), ("acp", "--mode", "plan", "--setup")])
def test_settings_that_work_are_saved_readable_by_the_user_only(
    tmp_path: Path, endpoint: FakeEndpoint, command: tuple[str, ...]
) -> None:
    endpoint.models = ["small", "large"]
    code, out, err = login(tmp_path, endpoint.base_url, "sk-test-0123456789", "large", command=command)
    assert (code, err) == (0, "")
    assert "   1) small\n   2) large\n" in out
    assert "sk-test" not in out
    file = tmp_path / "config.toml"
    wanted = {"name": "large", "base_url": endpoint.base_url, "api_key": "sk-test-0123456789"}
    assert tomllib.loads(file.read_text()) == {"model": wanted}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert endpoint.asked[-1].headers["authorization"] == "Bearer sk-test-0123456789"


class OnlyItsOwnHeader(FakeEndpoint):
    """Takes the key only in the header of Anthropic's API."""

    def _reply(self, request: Recorded) -> Reply:
        is_known = request.headers.get("x-api-key") == "sk-test-0123456789"
        return super()._reply(request) if is_known else failing(401, "invalid x-api-key", type="authentication_error")


def test_an_endpoint_that_takes_the_key_only_in_the_header_of_anthropic_lists_its_models(tmp_path: Path) -> None:
    with OnlyItsOwnHeader.in_thread(otherwise=text("OK")) as endpoint:
        endpoint.models, endpoint.wires = ["claude-small"], ("messages",)
        code, out, err = login(tmp_path, endpoint.base_url, "sk-test-0123456789", "1")
    assert (code, err) == (0, "")
    assert "   1) claude-small\n" in out
    assert "refused" not in out
    assert "It answers (Messages API)." in out


def test_the_configured_endpoint_is_tested_with_its_headers_and_another_endpoint_without(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.models = ["small"]
    (tmp_path / "config.toml").write_text(
        f'[model]\nbase_url = "{endpoint.base_url}"\nheaders = {{ "X-Team" = "blue" }}\n'
    )
    assert login(tmp_path, "", "", "small")[0] == 0
    assert [each.headers.get("x-team") for each in endpoint.requests] == ["blue", "blue"]
    endpoint.requests.clear()
    code, out, _ = login(tmp_path, endpoint.base_url.replace("127.0.0.1", "localhost"), "", "small")
    assert code == 0
    assert [each.headers.get("x-team") for each in endpoint.requests] == [None, None]
    assert "headers" not in tomllib.loads((tmp_path / "config.toml").read_text())["model"]
    assert f"The headers X-Team were removed from it, because they were for {endpoint.base_url}." in out


def test_settings_that_do_not_work_are_saved_only_if_the_user_insists(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    refusal = failing(401, "Incorrect API key provided: sk-wrong-987654321")
    endpoint.script(refusal, refusal)
    answers = (endpoint.base_url, "sk-wrong-987654321", "small")
    code, out, _ = login(tmp_path, *answers, "n")
    assert (code, (tmp_path / "config.toml").exists()) == (1, False)
    assert "That did not work" in out
    assert "sk-wrong-987654321" not in out
    assert login(tmp_path, *answers, "y")[0] == 0
    assert (tmp_path / "config.toml").exists()


def test_a_key_in_the_environment_is_not_saved(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    env = {"OPENAI_API_KEY": "sk-environment-1", "OPENAI_BASE_URL": endpoint.base_url}
    code, out, _ = login(tmp_path, "", "", "small", command=("login",), **env)
    assert code == 0
    assert "OPENAI_API_KEY is also set, and crow uses it instead" in out
    assert "api_key" not in tomllib.loads((tmp_path / "config.toml").read_text())["model"]


@pytest.mark.parametrize("bad", ["http://me:secret@localhost/v1", "localhost:11434", "secret"])
def test_each_invalid_answer_is_asked_for_again_before_the_next_question(
    tmp_path: Path, endpoint: FakeEndpoint, bad: str
) -> None:
    endpoint.models = ["small"]
    code, out, err = login(tmp_path, bad, endpoint.base_url, "secret key", "sk-good-0123", "small")
    assert (code, err) == (0, "")
    assert "secret" not in out
    parts = ["This is not an endpoint.", "Key (none", "This is not a key.", "1) small"]
    assert [part for part in parts if part in out] == parts
    assert sorted(map(out.index, parts)) == list(map(out.index, parts))
    assert tomllib.loads((tmp_path / "config.toml").read_text())["model"]["api_key"] == "sk-good-0123"


def test_every_preset_is_offered_and_asks_for_the_url_if_it_is_the_users_own(
    tmp_path: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.models = ["small"]
    own = [name for name, preset in PRESETS.items() if not preset.base_url]
    code, out, err = login(tmp_path, *own, endpoint.base_url, "sk-test-0123456789", "")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert f"one of these names: {', '.join(PRESETS)}." in words
    assert words.count("Enter yours: https://") == len(own)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["model"]["base_url"] == endpoint.base_url


@pytest.mark.long
@pytest.mark.parametrize(
    ("typed", "chosen"), [("", "first"), ("2", "2"), ("3", "third"), ("second", "second"), ("4", "4"), ("0", "0")]
)
def test_models_have_numbers_and_a_default(tmp_path: Path, endpoint: FakeEndpoint, typed: str, chosen: str) -> None:
    endpoint.models = ["first", "2", "third"]
    code, out, _ = login(tmp_path, endpoint.base_url, "", typed)
    assert (code, "Model (a number or a name) [first]: " in out) == (0, True)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["model"]["name"] == chosen
    code, out, _ = login(tmp_path, "", "", "third")
    assert f"[{chosen if chosen in endpoint.models else 'first'}]: " in out


@pytest.mark.parametrize(
    ("refusal", "asked_again"),
    [
        (failing(401, "wrong key"), ["Key", "Model"]),
        (failing(404, "The model `m1` does not exist", code="model_not_found"), ["Model"]),
        (failing(418, "teapot"), ["Endpoint", "Key", "Model"]),
    ],
)
def test_after_a_failure_only_what_can_be_wrong_is_asked_again(
    tmp_path: Path, endpoint: FakeEndpoint, refusal: Reply, asked_again: list[str]
) -> None:
    endpoint.models = ["m1", "m2"]
    endpoint.script(refusal)
    code, out, _ = login(tmp_path, endpoint.base_url, "sk-0123456789", "m1", "n", *[""] * (len(asked_again) - 1), "m2")
    assert code == 0
    again = out.partition("Save anyway?")[2]
    assert [
        name for name in ("Endpoint", "Key", "Model") if f"{name} [" in again or f"{name} (" in again
    ] == asked_again
    saved = tomllib.loads((tmp_path / "config.toml").read_text())["model"]
    assert saved == {"name": "m2", "base_url": endpoint.base_url, "api_key": "sk-0123456789"}


def test_the_end_of_the_input_saves_nothing(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    for answers in ((), (endpoint.base_url,), (endpoint.base_url, ""), ("nonsense",)):
        code, out, err = login(tmp_path, *answers, CROW_MODEL="offline")
        assert (code, out.splitlines()[-1].endswith("Nothing was saved."), err) == (1, True, "")
    assert not (tmp_path / "config.toml").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '[model]\nname = "m"\n'),
        ("# mine\n\nmodels = []\n", '# mine\n\nmodels = []\n\n[model]\nname = "m"\n'),
        (
            '[model]\n# the big one\nname = "x"  # was\nbase_url = "http://h/v1"\n\n[log]\nlevel = "info"\n',
            '[model]\n# the big one\nname = "m"  # was\nbase_url = "http://h/v1"\n\n[log]\nlevel = "info"\n',
        ),
        ('[model]\nname = "x"\napi_key = "k"\n', '[model]\nname = "m"\n'),
        ('[model] # here\nheaders = { "A" = "b" }\n', '[model] # here\nheaders = { "A" = "b" }\nname = "m"\n'),
        ('model.name = "x"\n', 'model.name = "m"\n'),
        ('model = { name = "x" }\n', 'model = { name = "m" }\n'),
        ('[model]\nname = """\nx"""\n', '[model]\nname = "m"\n'),
        ('model.name = "x"\nlog.level = "info"\n', 'model.name = "m"\nlog.level = "info"\n'),
    ],
)
def test_everything_else_in_the_file_is_kept(before: str, after: str) -> None:
    assert set_model_keys(before, {"name": "m", "api_key": None}) == after


@pytest.mark.parametrize("before", ["model = 3\n", "[model\n"])
def test_a_file_without_a_valid_model_table_is_not_changed(tmp_path: Path, before: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(before, "utf-8")
    with pytest.raises(ConfigError, match="cannot be changed"):
        save_model_settings(file, {"name": "m"})
    assert file.read_text("utf-8") == before


def test_an_endpoint_that_refuses_tools_on_one_api_is_tried_on_the_next(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    endpoint.wires = ("responses",)
    code, out, _ = login(tmp_path, endpoint.base_url, "sk-test-0123456789", "small")
    assert code == 0
    assert "It answers (Responses API)." in out
    assert "anthropic" in out


REFUSAL = "Function tools with reasoning_effort are not supported for gpt-x"


@pytest.mark.parametrize(
    "words",
    [
        f"{REFUSAL} in /v1/chat/completions. To use them, use /v1/responses or set reasoning_effort to 'none'.",
        f"{REFUSAL}. Set reasoning_effort to 'none'.",
        "The chatCompletion operation does not work with the specified model. Choose another model and try again.",
        "With thinking enabled, this endpoint does not take tools.",
    ],
)
def test_a_model_that_refuses_tools_with_reasoning_on_one_api_is_tried_on_the_next(
    tmp_path: Path, endpoint: FakeEndpoint, words: str
) -> None:
    def refusing(request: Recorded) -> Reply:
        is_refused = request.wire == "chat" and "tools" in request.sent
        return failing(400, words, type="invalid_request_error", param="reasoning_effort") if is_refused else text("OK")

    endpoint.wires = ("chat", "responses")
    endpoint.answer_with(refusing)
    code, out, _ = login(tmp_path, endpoint.base_url, "sk-0123456789", "gpt-x")
    assert code == 0
    assert "It answers (Responses API)." in out
    assert [request.wire for request in endpoint.asked] == ["chat", "responses"]
    saved = tomllib.loads((tmp_path / "config.toml").read_text())["model"]
    assert saved == {"name": "gpt-x", "base_url": endpoint.base_url, "api_key": "sk-0123456789"}
