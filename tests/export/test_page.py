"""The HTML page of a session, read back as a browser reads it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from crow.domain.entries import Announcement, Assistant, CallRef, Checkpoint, Diff, NewEntry, Pin, ToolResult, TurnEnd
from crow.domain.messages import Image, ToolCall, Usage
from crow.export.markdown import render_markdown
from crow.export.page import session_page
from crow.export.redact import redactor
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, converse, new_session

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)><style>*{}</style>]]>--><!-- </main></pre>\n"
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](//evil.example) ![d](https://evil.example/d.png) <vbscript:x>\n"
    "<a href='x'> \u202e\u2066 \x1b[31m `unclosed **\n\n````\nfence"
)
VOID = {"meta", "img", "input", "br", "hr", "line", "polygon", "polyline"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a browser would act on."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.code: dict[str, str] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.code[self.open[-1]] = data
        else:
            self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


async def page_of(
    store: SqliteStore, session_id: str = "s1", *secrets: str, is_strict: bool = False, window: int | None = None
) -> str:
    redact = redactor(secrets, home="/home/ann", is_strict=is_strict)
    return b"".join([piece async for piece in session_page(store, session_id, redact, window=window)]).decode()


async def hostile_session(store: SqliteStore) -> None:
    await store.create_session(new_session(title=EVIL))
    user = await begin(store, "s1", EVIL)
    calls = (ToolCall(id="c", name=EVIL, arguments='{"a":"</script>"}'), ToolCall(id="d", name="never", arguments=EVIL))
    answer = Assistant(text=EVIL, thought=EVIL, message_id="a", calls=calls)
    (asked,) = await store.append("s1", leaf=user.id, turn=1, entries=[NewEntry(body=answer, model=EVIL)])
    announcement = Announcement(title=EVIL, diffs=(Diff(path=EVIL, old_text=EVIL, new_text=f"x\n{EVIL}"),))
    images = tuple(
        Image(data=data, mime_type=f"image/{kind}")
        for data, kind in (("aGk=", "png"), ('x" onerror="y', "png"), ("aGk=", "svg+xml"))
    )
    result = ToolResult(
        call=CallRef(assistant=asked.id, index=0), name=EVIL, text=EVIL, announcement=announcement, images=images
    )
    checkpoint = Checkpoint(
        compaction_id="k", summary=EVIL, first_kept=None, pins=(Pin(entry=1, text=EVIL),), files_read=(EVIL,)
    )
    await add(store, "s1", result, checkpoint, TurnEnd(stop="error", detail=EVIL), release=True)


async def test_hostile_content_stays_text(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await hostile_session(store)
        html = await page_of(store)
    finally:
        await store.close()
    page = Page(html)
    assert page.open == []
    assert (page.tags["script"], page.tags["style"], page.tags["img"]) == (1, 1, 1)
    names = {(tag, name) for tag, name, _ in page.attributes}
    assert {name for _, name in names if name.startswith("on") or name in ("style", "srcdoc", "action")} == set()
    assert {name for tag, name in names if tag == "a"} <= {"href", "rel", "id", "class"}
    assert page.values("src") == ["data:image/png;base64,aGk="]
    assert all(re.match(r"(?:#|https://evil\.example/d\.png$)", link) for link in page.values("href"))
    assert not re.search("[\u202e\u2066\x1b]", html)
    assert "</script><script>alert(1)</script>" in "".join(page.texts)
    assert max(Counter(page.values("id")).values()) == 1
    assert "no result" in "".join(page.texts)


async def test_the_policy_allows_only_the_pages_own_code(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        await converse(store, "s1", "one")
        page = Page(await page_of(store))
    finally:
        await store.close()
    (policy,) = [value for value in page.values("content") if value.startswith("default-src")]
    hashes = {tag: base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for tag, code in page.code.items()}
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


async def test_branches_that_were_left_stand_where_they_began(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        await converse(store, "s1", "before all")
        await store.move_leaf("s1", leaf=(await store.session("s1")).leaf, to=None, reason="new")
        first = await converse(store, "s1", "first")
        left = await converse(store, "s1", "left", "left deeper")
        await store.move_leaf("s1", leaf=left[-1].id, to=left[2].id, reason="undo")
        again = await converse(store, "s1", "left again")
        await store.move_leaf("s1", leaf=again[-1].id, to=first[-1].id, reason="rewind")
        await converse(store, "s1", "taken")
        html = await page_of(store)
    finally:
        await store.close()
    assert "2 prompts, 2 answers, 3 branches not taken" in html
    shown = re.findall(r">([A-Z ]+)</p>|<summary>Branch not taken: ([^<]*)<", html)
    assert [answer or branch for answer, branch in shown] == [
        "1 prompt, 1 answer, left by /new",
        "BEFORE ALL",
        "FIRST",
        "2 prompts, 2 answers, left by /rewind",
        "LEFT",
        "LEFT AGAIN",
        "1 prompt, 1 answer, left by /undo",
        "LEFT DEEPER",
        "TAKEN",
    ]
    assert f'starts from <a class="anchor" href="#entry-{left[2].id}">' in html


async def test_a_branch_names_the_command_that_left_it_last(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        first = await converse(store, "s1", "first")
        end = (await converse(store, "s1", "second"))[-1].id
        await store.move_leaf("s1", leaf=end, to=first[-1].id, reason="undo")
        await store.move_leaf("s1", leaf=first[-1].id, to=end, reason="redo")
        await store.move_leaf("s1", leaf=end, to=None, reason="new")
        await converse(store, "s1", "taken")
        html = await page_of(store)
    finally:
        await store.close()
    assert re.findall(r"<summary>Branch not taken: ([^<]*)<", html) == ["2 prompts, 2 answers, left by /new"]


async def test_the_plots_show_context_and_cost_up_to_the_last_compaction(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        leaf = (await begin(store, "s1", "go")).id
        for tokens, cost in ((1000, 0.5), (9000, 1.0)):
            usage = Usage(input_tokens=tokens, output_tokens=100)
            answer = NewEntry(body=Assistant(text="x", message_id="a"), model="m", usage=usage, cost=cost)
            (entry,) = await store.append("s1", leaf=leaf, turn=1, entries=[answer])
            leaf = entry.id
        await add(
            store, "s1", Checkpoint(compaction_id="k", summary="S", first_kept=1, tokens_before=9000, tokens_after=2000)
        )
        html = await page_of(store)
        with_window = await page_of(store, window=128_000)
    finally:
        await store.close()
    assert "Context: 2,000 tokens now, 9,100 at most. Dashed lines are compactions." in html
    assert "Cost: $1.50 for this path." in html
    assert '<polyline points="0.0,88.4 500.0,4.0 1000.0,78.9"/><line class="cut" x1="1000.0"' in html
    assert '<p class="scale" aria-hidden="true"><span>9,100</span><span>0</span></p>' in html
    assert '<p class="scale" aria-hidden="true"><span>$1.50</span><span>0</span></p>' in html
    assert 'class="limit"' not in html
    assert "<span>128,000</span><span>0</span></p>" in with_window
    assert '<line class="limit" x1="0" x2="1000" y1="4.0" y2="4.0"/>' in with_window
    assert "The dotted line is the window." in with_window
    assert "9,000 → 2,000 tokens" in html


async def test_an_endpoint_that_counts_no_tokens_gives_a_page_without_plots(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        leaf = (await begin(store, "s1", "go")).id
        for _ in range(2):
            answer = NewEntry(body=Assistant(text="x", message_id="a"), usage=Usage(input_tokens=0, output_tokens=0))
            (entry,) = await store.append("s1", leaf=leaf, turn=1, entries=[answer])
            leaf = entry.id
        html = await page_of(store)
    finally:
        await store.close()
    assert "2 answers" in html
    assert '<figure class="plot context">' not in html


async def test_a_long_result_is_cut_and_says_how_long_it_is(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        await begin(store, "s1", "go")
        (asked,) = await add(
            store,
            "s1",
            Assistant(text="x" * 700_000, message_id="a", calls=(ToolCall(id="c", name="f", arguments="{}"),)),
        )
        call = CallRef(assistant=asked.id, index=0)
        await add(
            store, "s1", ToolResult(call=call, name="f", text="y" * 5_000_000, announcement=Announcement(title="f"))
        )
        html = await page_of(store)
    finally:
        await store.close()
    assert "4,980,000 of 5,000,000 characters are not shown" in html
    assert "300,000 of 700,000 characters are not shown" in html
    assert len(html) < 500_000


async def test_configured_keys_are_always_hidden_and_personal_data_on_request(tmp_path: Path) -> None:
    private = "key hunter2-key mail ann@example.org in /home/ann/src and /Users/bob/x with ghp_abcdefghijklmnop1234"
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session(title=private, cwd="/home/ann/src"))
        await begin(store, "s1", private)
        await add(store, "s1", Assistant(text=private, message_id="a", thought=private))
        plain = await page_of(store, "s1", "hunter2-key")
        strict = await page_of(store, "s1", "hunter2-key", is_strict=True)
    finally:
        await store.close()
    assert "hunter2" not in plain
    assert "ann@example.org in /home/ann/src and /Users/bob/x with ghp_abcdefghijklmnop1234" in plain
    assert not re.search("hunter2|ann|bob|ghp_", strict)
    assert "key [hidden] mail [hidden] in ~/src and ~/x with [hidden]" in strict


def test_what_looks_secret_is_redacted() -> None:
    redact = redactor((), home="/srv/me", is_strict=True)
    cases = {
        "Authorization: Bearer abcdefgh12345678": "Authorization: Bearer [hidden]",
        '{"api_key": "abcdef123"}': '{"api_key": "[hidden]"}',
        "password=correct-horse": "password=[hidden]",
        "https://me:secret@example.org/x": "https://[hidden]@example.org/x",
        "AKIAABCDEFGHIJKLMNOP": "[hidden]",
        "/srv/me/x /srv/meadow": "~/x /srv/meadow",
        r"C:\Users\ann\x": r"~\x",
        "a task-list-of-words": "a task-list-of-words",
        "the token budget is 5": "the token budget is 5",
    }
    assert {text: redact(text) for text in cases} == cases


def test_markdown_is_rendered_without_raw_html_and_unsafe_links() -> None:
    html = render_markdown("# T\n**b** [x](https://a.example/?a=1&b=2) [f](src/a.py) <b>\n\n- [ ] i\n\n|a|\n|:-:|\n|1|")
    assert html == (
        '<h3>T</h3>\n<p><strong>b</strong> <a href="https://a.example/?a=1&amp;b=2" rel="noopener noreferrer nofollow">'
        'x</a> <span class="ref" title="src/a.py">f</span> &lt;b&gt;</p>\n<ul>\n<li>[ ] i</li>\n</ul>\n'
        '<div class="table" tabindex="0"><table>\n<thead>\n<tr>\n<th>a</th>\n</tr>\n</thead>\n<tbody>\n<tr>\n<td>1</td>'
        "\n</tr>\n</tbody>\n</table></div>\n"
    )


@given(st.lists(st.sampled_from([*"[]()<>!*_`~#>|-:\\\n\"'& ", "a", "javascript:", "<img ", "http://a", "](", "```"])))
def test_any_markdown_gives_balanced_html_with_safe_attributes(pieces: list[str]) -> None:
    page = Page(render_markdown("".join(pieces)))
    assert page.open == []
    assert {name for _, name, _ in page.attributes} <= {
        "href",
        "rel",
        "class",
        "title",
        "tabindex",
        "data-language",
        "start",
    }
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in page.values("href"))


async def test_a_folded_call_says_how_much_it_changed(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(new_session())
        await begin(store, "s1", "go")
        (asked,) = await add(
            store, "s1", Assistant(text="x", message_id="a", calls=(ToolCall(id="c", name="f", arguments="{}"),))
        )
        diffs = (
            Diff(path="/a", old_text="1\n2\n3\n", new_text="1\ntwo\n3\n4\n"),
            Diff(path="/b", old_text=None, new_text="new\n"),
        )
        call = CallRef(assistant=asked.id, index=0)
        announced = Announcement(title="Edit", diffs=diffs)
        await add(store, "s1", ToolResult(call=call, name="f", text="done", announcement=announced))
        html = await page_of(store)
    finally:
        await store.close()
    assert '<span class="title">Edit</span> <span class="counts">+3 −1</span> <span class="state">done' in html
