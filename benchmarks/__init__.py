"""What is measured rather than tested: `make bench`, or `python -m benchmarks [NAME ...]`.

Each module here (but `rows` and `write`) is one benchmark: `python -m benchmarks.NAME [--json FILE]` prints a table and
writes the same rows as JSON; `--help` says what can be chosen. All share one form, `benchmarks.rows.Row`: a median,
the worst, a limit, and the floor, which is the same work done in the same run without crow. `python -m benchmarks` runs
all of them, each in a process of its own, leaves their rows below build/bench/ and ends with those over their limit;
`python -m benchmarks.write` puts them into BENCHMARKS.md.

- `process`: the real process over stdio, against an endpoint in another process; what an editor would measure
- `pure`: projection, planner, replay, as a session grows
- `llm`: parser and encoder beside their floors
- `store`, `upkeep`: the database at 100,000 entries and 10,000 sessions
- `tools`: what a tool call costs beyond the tool
- `retention`: what survives compaction
"""
