"""What tests start ends with the process of the tests, also if that is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAIT_S = 200.0
TESTS = """
import json, os, sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from tests.support.fork_server import ForkedProgram
from tests.support.postgres import server_url
place = Path(sys.argv[1])
env = {"PATH": os.environ["PATH"], "CROW_HOME": str(place / "home"), "CROW_MODEL": "offline"}
server = ForkedProgram(["serve", "--listen", "127.0.0.1:0"], env=env, cwd=place)
server.stderr.readline()
[data] = parse_qs(urlsplit(server_url()).query)["host"]
postmaster = int((Path(data) / "postmaster.pid").read_text().split()[0])
print(json.dumps([data, postmaster, server.pid]), flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked only on Linux")
@pytest.mark.parametrize("is_killed", [False, True])
def test_servers_end_with_the_process_that_started_them(tmp_path: Path, is_killed: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CROW_TEST_DATABASE_URL"}
    with subprocess.Popen(
        [sys.executable, "-c", TESTS, str(tmp_path)], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tests:
        assert tests.stdout is not None
        data, *pids = json.loads(tests.stdout.readline())
        processes = [os.pidfd_open(pid) for pid in pids]
        try:
            if is_killed:
                tests.send_signal(signal.SIGKILL)
            tests.communicate(timeout=WAIT_S)
            ended = [select.select([process], [], [], WAIT_S)[0] == [process] for process in processes]
        finally:
            for process in processes:
                os.close(process)
    assert ended == [True, True]
    assert is_killed or not Path(data).exists()
