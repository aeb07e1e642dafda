"""Owners of turns, and whether they are alive."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from crow.store.owner import LEASE_MS, Owner, is_alive, open_stores, readable

HERE = Owner.current()


def test_an_owner_is_parsed_back_and_described() -> None:
    assert Owner.parse(str(HERE)) == HERE
    assert readable(str(HERE)) == f"process {os.getpid()} on {HERE.host}"


@pytest.mark.parametrize("text", ["", "{}", "null", "[1]", "somebody", '{"pid":"x"}', str(replace(HERE, pid=-1))])
def test_a_text_that_is_not_an_owner_counts_as_dead(text: str) -> None:
    assert Owner.parse(text) is None
    assert not is_alive(text, lease_age_ms=0)
    assert readable(text) == text


def test_a_store_of_this_process_is_alive_while_open() -> None:
    owner = str(HERE)
    assert not is_alive(owner, lease_age_ms=0)
    open_stores.add(owner)
    assert is_alive(owner, lease_age_ms=10 * LEASE_MS)
    open_stores.discard(owner)
    assert not is_alive(owner, lease_age_ms=0)


def test_another_process_is_alive_while_it_runs_with_the_same_start_time() -> None:
    code = "import sys; from crow.store.owner import Owner; print(Owner.current(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        text = process.stdout.readline().strip()
        owner = Owner.parse(text)
        assert owner is not None
        assert owner.pid == process.pid
        assert is_alive(text, lease_age_ms=10 * LEASE_MS)
        assert not is_alive(str(replace(owner, start="1")), lease_age_ms=0)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, but not yet forgotten
        assert not is_alive(text, lease_age_ms=0)
        process.wait()
        assert not is_alive(text, lease_age_ms=0)


@pytest.mark.parametrize("elsewhere", [replace(HERE, boot="b"), replace(HERE, host="h"), replace(HERE, namespace="n")])
def test_where_processes_cannot_be_looked_up_the_lease_decides(elsewhere: Owner) -> None:
    owner = str(elsewhere)
    assert is_alive(owner, lease_age_ms=LEASE_MS - 1)
    assert not is_alive(owner, lease_age_ms=LEASE_MS)
