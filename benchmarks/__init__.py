"""Benchmarks: `make bench`, or `python -m benchmarks [NAME ...]`.

Each module here except `rows` and `write` is one benchmark: `python -m benchmarks.NAME [--json FILE]` prints a
table and writes the same rows as JSON; `--help` lists the options. Each row (`benchmarks.rows.Row`) has a median,
the worst value, a limit, and a floor: the same work in the same run without crow. `python -m benchmarks` runs all
of them, each in its own process, writes their rows below build/bench/ and prints those over their limit. `python -m
benchmarks.write` copies them into BENCHMARKS.md.

- `process`: the real process over stdio and an endpoint in another process, measured as an editor would
- `pure`: projection, planner and replay of growing sessions
- `llm`: parser and encoder, with their floors
- `store`, `upkeep`: the database with 100,000 entries and 10,000 sessions
- `tools`: the cost of a tool call beyond the tool
- `edits`: edits with slips that models make, made right, refused usefully, or made wrong
- `tokens`: tokens of requests: the first one, a whole task, noisy commands, hundreds of MCP tools
- `questions`: how often a user is asked about commands, with and without confinement
- `retention`: facts that survive compaction
- `prefix`: bytes of requests that a provider's cache saves
- `endpoints`: what crow pays to follow endpoints that change
"""
