"""In plan mode no call changes the workspace."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent.permissions.decisions import Allow, decide
from crow.domain.messages import ToolCall
from crow.tools import Ports, builtin
from crow.tools.mcp.client import open_toolbox
from crow.tools.workspace import DiskWorkspace
from tests.support.amounts import examples
from tests.tools.conftest import FixedPlan, RecordingLog

PATHS = st.sampled_from(["a.txt", "new.txt", "sub", "sub/b.txt", "link", "../outside.txt", ".", "/", "a.txt/x", ""])
LINES = st.sampled_from(["touch made", "rm a.txt", "echo x > a.txt", "true", "cat a.txt"])
VALUES = st.one_of(PATHS, LINES, st.booleans(), st.integers(-1, 3), st.none(), st.lists(PATHS, max_size=2))


def arguments(spec_name: str, drawn: dict[str, object]) -> str:
    schema = next(spec.input_schema for spec in builtin.SPECS if spec.name == spec_name)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    return json.dumps({name: drawn.get(name, "a.txt") for name in properties if name in drawn or name == "path"})


CALLS = st.builds(
    lambda name, drawn: ToolCall(id="c", name=name, arguments=arguments(name, drawn)),
    st.sampled_from([spec.name for spec in builtin.SPECS]),
    st.fixed_dictionaries(
        {},
        optional={
            "path": PATHS,
            "content": st.just("changed"),
            "old_text": st.just("one"),
            "new_text": st.just("two"),
            "command": LINES,
            "background": st.booleans(),
            "pattern": st.just("o"),
            "query": st.just("x"),
            "entry": VALUES,
            "job": st.just("job1"),
            "url": st.just("http://127.0.0.1:9/"),
            "items": st.just([]),
            "name": st.just("trick"),
            "description": st.just("d"),
            "prompt": st.just("p"),
        },
    ),
)


def state(root: Path) -> dict[str, tuple[str, int, str]]:
    """Mode, time and content of everything below `root`."""
    found = {}
    for path in sorted(root.rglob("*")):
        stat = path.lstat()
        data = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
        found[str(path)] = (oct(stat.st_mode), stat.st_mtime_ns, hashlib.sha256(data.encode()).hexdigest())
    return found


async def act(root: Path, calls: list[ToolCall]) -> None:
    async def unwatched(_text: str) -> None: ...

    workspace = DiskWorkspace(root)
    async with open_toolbox(workspace, Ports(log=RecordingLog(), plan=FixedPlan()), []) as toolbox:
        for call in calls:
            offer = await toolbox.plan(call)
            if offer.fault is None and isinstance(decide(call.name, offer, "plan", ()), Allow):
                await toolbox.run(call, "call_1_0", unwatched)
    await workspace.reap()


@settings(max_examples=examples(20))
@given(st.lists(CALLS, min_size=1, max_size=4))
def test_no_sequence_of_built_in_calls_changes_files_in_plan_mode(calls: list[ToolCall]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        root = top / "work"
        (root / "sub").mkdir(parents=True)
        (root / "a.txt").write_text("one\n")
        (root / "sub" / "b.txt").write_text("one\n")
        (top / "outside.txt").write_text("one\n")
        (root / "link").symlink_to(top / "outside.txt")
        before = state(top)
        asyncio.run(act(root, calls))
        assert state(top) == before
