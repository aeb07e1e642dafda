"""The log file: created by the first record, private, bounded and without secrets."""

from __future__ import annotations

import logging
import stat
import warnings
from pathlib import Path

import pytest

from crow.log import mask_in_log, start_logging


def test_nothing_is_opened_before_the_first_record(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "crow.log"
    start_logging(file, "info")
    logging.getLogger("crow.x").debug("too small a matter")
    assert not file.parent.exists()
    logging.getLogger("crow.x").info("hello")
    assert file.read_text().endswith(" INFO crow.x: hello\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_secrets_are_masked_in_messages_arguments_and_tracebacks(tmp_path: Path) -> None:
    file = tmp_path / "crow.log"
    start_logging(file, "debug", ["hunter22", "", "abc"])
    log = logging.getLogger("crow")
    log.info("key %s and %s", "hunter22", {"Authorization": "Bearer tok-123"})
    try:
        raise ValueError("it was sk-abcdefghij or hunter22, abc")
    except ValueError:
        log.exception("failed")
    text = file.read_text()
    assert "key … and {'Authorization': 'Bearer …'}" in text
    assert "ValueError: it was … or …, abc" in text


def test_secrets_that_are_learned_later_are_masked_too(tmp_path: Path) -> None:
    file = tmp_path / "crow.log"
    start_logging(file, "info", ["from-the-file"])
    for number in range(300):
        mask_in_log([f"tokens-{number:04}-end"])
    logging.getLogger("crow").info("from-the-file, tokens-0299-end, tokens-0100-end, tokens-0050-end")
    assert file.read_text().endswith(" …, …, …, tokens-0050-end\n")


def test_libraries_log_only_warnings_and_python_warnings_are_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "crow.log"
    start_logging(file, "debug")
    logging.getLogger("somebody").info("chatter")
    logging.getLogger("somebody").warning("trouble")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old ways", stacklevel=1)
        logging.captureWarnings(False)
    text = file.read_text()
    assert "chatter" not in text
    assert "WARNING somebody: trouble" in text
    assert "old ways" in text
    assert capfd.readouterr() == ("", "")


def test_a_log_that_cannot_be_written_is_given_up_silently(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    start_logging(tmp_path / "file" / "crow.log", "info")
    logging.getLogger("crow").error("one")
    logging.getLogger("crow").error("two")
    assert capfd.readouterr() == ("", "")


def test_an_invalid_record_does_not_stop_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "crow.log"
    start_logging(file, "info")
    logging.getLogger("crow").error("a lone surrogate \ud800")
    logging.getLogger("crow").handle(logging.makeLogRecord({"levelno": 40, "msg": "%s %s", "args": ("too few",)}))
    logging.getLogger("crow").error("after")
    assert "a lone surrogate \\ud800" in file.read_text()
    assert file.read_text().endswith("after\n")
    assert capfd.readouterr() == ("", "")


def test_the_file_is_rotated(tmp_path: Path) -> None:
    file = tmp_path / "crow.log"
    start_logging(file, "info")
    for _ in range(5):
        logging.getLogger("crow").info("x" * 1_000_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crow.log", "crow.log.1", "crow.log.2"]
    assert all(path.stat().st_size <= 2_000_200 for path in tmp_path.iterdir())
