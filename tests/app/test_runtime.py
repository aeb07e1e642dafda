"""Protection of the process: what others see of its environment. When pydantic builds models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from crow.runtime import models_built_on_use

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os
from crow.runtime import forbid_inspection, wipe_environment
asked = []
def is_secret(name, value):
    asked.append((name, value))
    return name in ("KEY", "EMPTY", "LAST") or "in-the-middle" in value
before = open("/proc/self/environ", "rb").read()
wipe_environment(is_secret)
after = open("/proc/self/environ", "rb").read()
forbid_inspection()
wipe_environment(lambda name, value: False)
import resource, sys
sys.stdout.buffer.write(json.dumps({
    "after": [os.fsdecode(entry).encode("utf-8", "surrogateescape").decode("latin-1") for entry in after.split(b"\\0")],
    "is_as_long": len(before) == len(after),
    "kept": os.environ["KEY"],
    "asked": len(asked),
    "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
}).encode())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/environ")
def test_only_the_values_of_secret_variables_are_overwritten() -> None:
    env = {
        b"PYTHONPATH": os.fsencode(ROOT),
        b"KEY": b"sk-0123456789=\xc3\xa9\xff",
        b"EMPTY": b"",
        b"OTHER": b"KEY=not this",
        b"\xff\xfe": b"x in-the-middle x",
        b"LAST": b"z",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, check=False)
    assert done.stderr == b""
    found = json.loads(done.stdout)
    assert found == {
        "after": [
            f"PYTHONPATH={ROOT}",
            f"KEY={'*' * 17}",
            "EMPTY=",
            "OTHER=KEY=not this",
            f"\xff\xfe={'*' * 17}",
            "LAST=*",
            "",
        ],
        "is_as_long": True,
        "kept": "sk-0123456789=é\udcff",
        "asked": 5,
        "core": 0,
    }


def test_models_defined_in_the_block_are_built_when_they_are_first_used() -> None:
    with models_built_on_use():

        class Late(BaseModel):
            number: int

    class Early(BaseModel):
        number: int

    assert not Late.__pydantic_complete__
    assert Early.__pydantic_complete__
    assert Late.model_validate({"number": 1}).number == 1
    with pytest.raises(ValidationError):
        Late.model_validate({"number": "one"})


@pytest.mark.parametrize(("flag", "kept"), [("-I", "-I"), ("-P", "-P"), ("-u", "-P")])
def test_crow_starts_itself_with_the_same_python_and_never_from_the_current_directory(flag: str, kept: str) -> None:
    script = "import json, sys; sys.path.insert(0, sys.argv[1])\nfrom crow.runtime import own_command\n"
    script += "print(json.dumps([sys.executable, own_command('acp', '--x')]))"
    told = subprocess.run([sys.executable, flag, "-c", script, str(ROOT)], capture_output=True, text=True, check=True)
    program, command = json.loads(told.stdout)
    assert command == [program, kept, "-m", "crow", "acp", "--x"]
