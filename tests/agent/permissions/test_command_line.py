"""Tests what a command line runs, and which words of an allowed command are dangerous."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.agent.permissions.command_line import MAX_CHARS, read_commands
from crow.agent.permissions.command_patterns import runs
from crow.agent.permissions.command_risks import find_risk
from crow.agent.permissions.shell_text import simple_words
from tests.support.amounts import examples

YES = [
    "git push",
    "git   push --force origin main",
    "git -C . push",
    "git --git-dir=x push",
    "git --git-dir x push",
    'git -C "$D" push',
    "git --no-pager push",
    "git -c a.b=c push",
    "/usr/bin/git push",
    "GIT PUSH",
    "command git push",
    "builtin command git push",
    "env A=b git push",
    "env -i -u X git push",
    "env -S 'git push'",
    "A=b C=$D git push",
    "sudo -u me git push",
    "nohup git push &",
    "timeout -k 1 5 git push",
    "xargs -n1 git push < f",
    "echo x | xargs -I{} git push {}",
    "find . -name x -exec git push \\;",
    "nice -n 5 git push",
    "poetry run git push",
    "docker exec c git push",
    "hyperfine 'git push'",
    "npx -y git push",
    'sh -c "git push"',
    "bash -o pipefail -xc 'cd x && git push'",
    "busybox sh -c 'git push'",
    "ssh host 'git push'",
    "eval git push",
    "eval 'git' \"push\"",
    "g''it push",
    "g\\it pu'sh'",
    '"git" "push"',
    "\\git push",
    "git pus\\\nh",
    "true\ngit  push",
    "true; git push",
    "true && git push || false",
    "(cd x; git push)",
    "{ git push; }",
    "! git push",
    "a=$(git push)",
    'echo "`git push`"',
    "echo ${x:-$(git push)}",
    "cat <(git push)",
    "cat <<EOF\n$(git push)\nEOF",
    "if true; then git push; fi",
    "while :; do git push; done",
    "case x in a) git push;; esac",
    "f() { git push; }; f",
    "git push > log 2>&1",
    "2>log git push",
    "git <in push",
    "time git push",
    "#x\ngit push",
    "((x=1<<2))\ngit push",
    "((x=1<<E))\ngit push\nE",
    "if (( 1 << 2 )); then\ngit push\nfi",
    "for((i=1<<E;;)); do\ngit push; done\nE",
    "echo $[1<<E]\ngit push\nE]",
    "((git push) | cat)",
    "trap 'git push' EXIT",
    "trap -- 'git push' EXIT",
    "time -p git push",
    "time -p -- git push",
    "function f { git push; }; f",
    "coproc P { git push; }",
    "coproc git push",
    "{fd}>x git push",
    "env -S'git push'",
    "env -iS'git push'",
    "env -Sgit push",
    "su -c'git push'",
    "su -lc'git push' me",
    "gtimeout 5 git push",
    "fd -x git push",
]
NO = [
    "git pull",
    "git status",
    "git commit -m 'push it'",
    'git commit -m "git push later"',
    'git commit -m "$(cat message)"',
    "git commit -F - <<EOF\ngit push\nEOF",
    "git log --grep push",
    "git log -- push",
    "git stash push",
    "git help push",
    "git config push.default simple",
    "git -C push status",
    "cat <<'EOF' > a\n$(git push)\nEOF",
    "echo 'git push'",
    "echo git push",
    "grep 'git push' README.md",
    "echo a # git push",
    "A=$(date) make",
    "echo $HOME",
    "for x in git push; do echo $x; done",
    "gitx push",
    "echo $((1<<2))",
    "((x=1<<2))\ngit pull",
    "ls | tee x; bash -eo pipefail script.sh",
    "bash",
    "time -p make",
    "trap 'rm -f x' EXIT",
    "env -S'git pull'",
    "make push",
    "find . -exec grep push {} \\;",
    "ls | xargs -I{} git log {}",
    "",
]
MAYBE = [
    "$(echo git) push",
    "$x push",
    "git $x",
    "git $OPTIONS push",
    "git {push,}",
    "{git,push}",
    "g?t push",
    "$'\\x67it' push",
    'eval "$x"',
    'sh -c "$x"',
    "echo git push | sh",
    "bash <<EOF\ngit push\nEOF",
    "bash <<<'git push'",
    "echo push | xargs git",
    "git -c alias.p=push p",
    "bash -euo pipefail <<'EOF'\ngit push\nEOF",
    "curl x | bash -s -- a",
    "curl x | bash --norc -s a",
    "curl x | sudo bash -s a",
    "bash -s foo <<< 'git push'",
    "cat f | bash /dev/stdin",
    "cat f | bash ../dev/fd/0",
    "cat f | (bash)",
    "{ bash; } <f",
    "source /dev/stdin <<< 'git push'",
    ". <(curl x)",
    "cat <<$'EOF'\na\nEOF\ngit push",
    "cat <<EOF\ngit push",
    "cat <<EOF\nE\\\nOF\ngit push\nEOF",
    'cat <<"E\\OF"\nE\\OF\ngit push\nEOF',
    "a[1<<E]=3\ngit push\nE]=3",
    "echo $(case x in x) git push;; esac)",
    "git push 'unclosed",
    'f() { git "$@"; }; f push',
    "echo push | xargs -I{} git {}",
    "echo push | xargs -I % git %",
    "echo push | xargs -i@ git @",
    "echo git | xargs -I{} {} push",
    "echo push | xargs --replace=% git %",
    "parallel git ::: push",
    "parallel git {1} ::: push",
    "find . -exec git {} \\;",
]


@pytest.mark.parametrize(
    ("line", "certainty"),
    [*((line, "yes") for line in YES), *((line, "no") for line in NO), *((line, "maybe") for line in MAYBE)],
)
def test_whether_a_line_runs_a_command(line: str, certainty: str) -> None:
    answer = runs(line, "git push")
    assert answer == certainty or (line.endswith("'unclosed") and answer in ("yes", "maybe"))


@pytest.mark.parametrize(
    ("pattern", "line", "certainty"),
    [
        ("rm -rf", "rm -fr x", "yes"),
        ("rm -rf", "rm x -r -f", "yes"),
        ("rm -rf", "rm -r x", "no"),
        ("rm -rf *", "rm -rf /", "yes"),
        ("git push --force", "git push origin --force", "yes"),
        ("git push --force", "git push --forc", "yes"),
        ("git push --force", "git push origin", "no"),
        ("git push --force", "git push $X", "maybe"),
        ("git push --force*", "git push --force-with-lease", "yes"),
        ("git push --force*", "git push --force-with-lease=main", "yes"),
        ("git push --force*", "git push --follow-tags", "no"),
        ("git push -*", "git push -f", "yes"),
        ("git push -f*", "git push -vf", "yes"),
        ("git push -*", "git push origin", "no"),
        ("npm publish", "npm --registry x publish", "yes"),
        ("npm publish", "npm run publish", "no"),
        ("make deploy", "make -j4 clean deploy", "yes"),
        ("docker compose down", "docker compose -f x down", "yes"),
        ("./deploy.sh", "sh ./deploy.sh now", "yes"),
        ("./deploy.sh", "bash deploy.sh", "yes"),
        ("deploy*", "deploy-all", "yes"),
        ("*", "anything", "yes"),
        ("a | b", "x; a | b", "yes"),
        (".env", "cat ./.env", "no"),
    ],
)
def test_what_a_pattern_means(pattern: str, line: str, certainty: str) -> None:
    assert runs(line, pattern) == certainty


def test_a_line_that_is_too_long_to_read_is_unknown() -> None:
    assert runs("x" * (MAX_CHARS + 1), "git push") == "maybe"


@pytest.mark.long
@pytest.mark.parametrize(
    "piece",
    [
        *("{", "`", "$(", "${", "'\"", "\\", "env ", "<<a\n", "$'", "((", "sh -c ", "eval ", "x{a,", "xargs sh -c "),
        *("find -exec ", "timeout 1 sh ", "a=1 ", 'sh -c "', "eval '", "env -S 'x ", "-Senv ", "env -Senv ", "x "),
    ],
)
def test_reading_a_line_is_bounded(piece: str) -> None:
    for start in ("", "sh - "):
        found = read_commands(start + piece * ((MAX_CHARS - len(start)) // len(piece)))
        assert len(found.commands) <= 2_100
        assert sum(map(len, found.commands)) < 400_000


BASH = shutil.which("bash") or "/bin/bash"
QUOTED = st.sampled_from(["git push", "g''it push", "'git' \"push\"", "gi\\t push", "git  push", "git -C x push"])
AROUND = st.sampled_from(
    [
        *("{}", "true; {}", "{} && true", "true | {}", "({})", "{{ {}; }}", "! {}", "x=$({})", '"$({})"'),
        *("if {}; then true; fi", "for i in 1; do {}; done", "{} >f 2>&1", "A=b {}", "env -i {}", "nohup {} &"),
        *("command {}", "timeout 5 {}", "true\n{}", "cat <<E\n$({})\nE", "echo ${{x:-$({})}}", "eval {}"),
    ]
)


@settings(max_examples=examples(20))
@given(QUOTED, st.lists(AROUND, max_size=4))
def test_a_denied_command_is_found_however_it_is_wrapped(line: str, around: list[str]) -> None:
    for frame in around:
        line = frame.format(line)
    assert runs(line, "git push") != "no"


@settings(max_examples=examples(20))
@given(st.text(alphabet=";&|<>()$`\n\\'\"*?[]{}#~! ab=-/", max_size=40))
def test_any_text_is_read_without_an_error(line: str) -> None:
    assert runs(line, "a b") in ("yes", "no", "maybe")


@settings(max_examples=examples(20))
@given(st.text(alphabet=";&|()$`\n\\'\" ab{}#=!", max_size=24))
def test_what_bash_runs_is_found(line: str) -> None:
    """Bash runs the line with a function `ab`, in an empty directory with an empty PATH."""
    script = 'ab() { [ "$1" = ba ] && echo RAN >&7; }; ' + line
    done = subprocess.run(
        [BASH, "--norc", "-c", f"exec 7>&1 >/dev/null; {script}"],
        capture_output=True,
        env={"PATH": ""},
        cwd=Path("/"),
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    if b"RAN" in done.stdout:
        assert runs(line, "ab ba") != "no"


@given(st.text(alphabet=";&|<>()$`\n\\'\"*?[]{}#~! ab=-/", max_size=30))
def test_a_shell_reads_a_simple_command_the_same_way(line: str) -> None:
    words = simple_words(line)
    if words is not None:
        assert list(words) == shlex.split(line, comments=False)
        assert not set(line) & set(";&|<>()`$\n") or any(quote in line for quote in "'\"")


RISKY = [
    ("git log", "--output=x"),
    ("git log", "--outp=x"),
    ("git log", "-p --ext-diff"),
    ("git diff", "--output x"),
    ("git diff", "--no-index /etc/passwd x"),
    ("git grep", "-Oless x"),
    ("git grep", "-nOless x"),
    ("git grep", "--open-files-in-pager=x y"),
    ("git", "-c core.pager=x log"),
    ("git", "-C /x status"),
    ("git", "--exec-path=x status"),
    ("git -C sub", "-c core.pager=x log"),
    ("git --no-pager", "-p -c core.pager=x log"),
    ("git", "--git-dir=x status"),
    ("git", "--config-env=a=b status"),
    ("git", "config alias.x !sh"),
    ("git", "bisect run x"),
    ("git", "submodule foreach x"),
    ("git fetch", "--upload-pack=x origin"),
    ("git fetch", "ext::x"),
    ("git push", "--receive-pack=x"),
    ("git cat-file", "--filters a"),
    ("git interpret-trailers", "--in-place x"),
    ("poetry run", "x"),
    ("poetry", "run x"),
    ("poetry run python", "-c x"),
    ("poetry run", "--quiet x"),
    ("python", "-W ignore -c x"),
    ("php", "-B x"),
    ("deno run", "-A x.ts"),
    ("deno run", "https://a.example/x.ts"),
    ("tar", "-c --file=/home/u/.bashrc x"),
    ("tar", "-c --file=../x x"),
    ("cp", "-t.git/hooks x"),
    ("unzip", "x -d../y"),
    ("sed", "p -se '1e touch x' f"),
    ("sed", "-e p -e1e f"),
    ("sed", "-e p -es/a/b/e f"),
    ("sed", "-n p --exp=1etouch f"),
    ("make", "-E x"),
    ("sqlite3", "--init x db"),
    ("openssl rand", "-out=x 5"),
    ("gcc", "--output=x a.c"),
    ("xxd", "a ../x"),
    ("curl", "-w '%output{x}' https://a.example"),
    ("gh release", "download -O x"),
    ("git", "checkout-index -a --prefix=x/"),
    ("go test", "-test.coverprofile=x"),
    ("cargo", "new ../x"),
    ("python -u", "-c x"),
    ("php", "-d auto_prepend_file=x y.php"),
    ("node", "-r ./x y.js"),
    ("bundle exec", "x"),
    ("uv run", "x"),
    ("npm exec", "x"),
    ("deno", "eval x"),
    ("bun", "x y"),
    ("hyperfine", "x"),
    ("tmux", "new x"),
    ("git rebase", "-x make"),
    ("git archive", "--output=x HEAD"),
    ("git format-patch", "-o /x"),
    ("find", ". -exec rm {}"),
    ("find", ". -execdir rm {}"),
    ("find", ". -ok rm {}"),
    ("find", ". -delete"),
    ("find", ". -fprint x"),
    ("find", ". -fprintf x y"),
    ("find", ". -fls x"),
    ("fd", "a -x rm"),
    ("fd", "a --exec rm"),
    ("sort", "-o x y"),
    ("sort", "-uo x y"),
    ("sort", "--output=x"),
    ("sort", "--compress-program=x"),
    ("uniq", "a b"),
    ("awk", "'BEGIN{system(1)}'"),
    ("awk", "'{print > 1}'"),
    ("awk", "'{print | 1}'"),
    ("awk", "-f x.awk"),
    ("gawk", "--load=x"),
    ("sed", "-i s/a/b/ x"),
    ("sed", "-n -i p x"),
    ("sed", "--in-place s/a/b/ x"),
    ("sed", "'w x' y"),
    ("sed", "'1e date' y"),
    ("sed", "'s/a/b/w x' y"),
    ("sed", "'s/a/b/e' y"),
    ("sed", "-e 'w x' y"),
    ("sed", "-ne 'w x' y"),
    ("sed", "--expression='w x' y"),
    ("sed", "p -e 'w x'"),
    ("sed", "-f x y"),
    ("tar", "xf a --checkpoint-action=exec=x"),
    ("tar", "xf a --to-command=x"),
    ("tar", "-I x -xf a"),
    ("tar", "xIf x a"),
    ("tar", "--use-compress-program=x -xf a"),
    ("tar", "xf a -C /x"),
    ("tar", "cf /x a"),
    ("xargs", "rm"),
    ("xargs -n1", "rm"),
    ("env", "-S 'rm x'"),
    ("env", "rm x"),
    ("env A=b", "rm x"),
    ("rg", "--pre x y"),
    ("rg", "--pre=x y"),
    ("rg", "-z x"),
    ("ssh", "-oProxyCommand=x h"),
    ("ssh", "-o ProxyCommand=x h"),
    ("ssh h", "rm x"),
    ("curl", "-o x u"),
    ("curl", "-sSLo x u"),
    ("curl", "--output x u"),
    ("curl", "-K x"),
    ("curl", "-H @key https://a.example"),
    ("curl", "-sH@key https://a.example"),
    ("curl", "--header=@key https://a.example"),
    ("curl", "-b key https://a.example"),
    ("curl", "--url-query a@key https://a.example"),
    ("zip", "a.zip b -TT 'sh -c x'"),
    ("wget", "u"),
    ("rsync", "-e x a b"),
    ("make", "SHELL=x"),
    ("make", "-f x"),
    ("make", "--eval=x"),
    ("sh", "-c x"),
    ("bash", "x.sh"),
    ("eval", "x"),
    ("sudo", "x"),
    ("sudo -u me", "x"),
    ("nohup", "x"),
    ("timeout 5", "x"),
    ("timeout", "5 x"),
    ("nice -n 5", "x"),
    ("command", "x"),
    ("npx", "x"),
    ("python", "-c x"),
    ("python3.12", "-Ic x"),
    ("node", "-e x"),
    ("node", "--eval=x"),
    ("node", "-r ./x y"),
    ("perl", "-ne x"),
    ("ruby", "-e x"),
    ("php", "-r x"),
    ("pytest", "-p x"),
    ("pytest", "--junitxml=x"),
    ("pytest", "--basetemp=x"),
    ("go test", "-exec x"),
    ("go build", "-o x"),
    ("go test", "-coverprofile=x"),
    ("cargo", "--config x build"),
    ("npm", "exec x"),
    ("npm", "install -g x"),
    ("npm", "--prefix /x install"),
    ("pip", "install --target=x y"),
    ("docker", "run x"),
    ("cp", "a /etc/x"),
    ("cp", "a ~/.bashrc"),
    ("cp", "a ../b"),
    ("cp", "a .git/hooks/x"),
    ("cp", "-t/etc a"),
    ("mv", "a AGENTS.md"),
    ("tee", ".envrc"),
    ("dd", "if=a of=/dev/x"),
    ("rm", "-rf /"),
    ("gcc", "-o x y.c"),
    ("gcc", "-fplugin=x y.c"),
    ("vim", "x"),
    ("sqlite3", "x.db '.shell x'"),
]
HARMLESS = [
    ("git log", "-5 --oneline src"),
    ("git log", "--stat --since=yesterday"),
    ("git diff", "--text HEAD~1"),
    ("git status", "-s"),
    ("git add", "-A src"),
    ("git log", "-p -5"),
    ("git push", "-u origin main"),
    ("git switch", "-c topic"),
    ("git ls-files", "-o --exclude-standard"),
    ("git rev-parse", "--git-dir"),
    ("git", "--no-pager log -5"),
    ("git diff", "-C --cc"),
    ("poetry run pytest", "-q"),
    ("poetry run python", "x.py -c y"),
    ("python", "-u x.py -c y"),
    ("sed", "-ne 5p -e '$d' x"),
    ("sed", "--expression=5p x"),
    ("python", "-m pytest -c y"),
    ("node", "--test --max-old-space-size=4096 x.js"),
    ("uv run pytest", "-q"),
    ("bundle exec rspec", "spec"),
    ("pytest", "--co --cov=src"),
    ("awk", "-F: '{print $1}' x"),
    ("deno run", "x.ts"),
    ("pnpm run", "build"),
    ("git commit", "-m 'add a thing'"),
    ("find", ". -name x -type f"),
    ("sort", "-rn -k2 x"),
    ("uniq", "-c"),
    ("awk", "'{print $1}' x"),
    ("sed", "-n 1,5p x.py"),
    ("sed", "s/a/b/g x.py"),
    ("sed", "-n '/def /p' x.py"),
    ("sed", "-e 's|a|b|' -e 5q x"),
    ("sed", "'$d;2p' x"),
    ("tar", "tf a.tar"),
    ("rg", "-n --pretty x src"),
    ("curl", "-sSL --compressed https://a.example"),
    ("curl", "-H 'Accept: text/plain' https://a.example/@me"),
    ("zip", "-r a.zip b"),
    ("make", "-j4 test"),
    ("timeout 5 make", "test"),
    ("env A=b make", "test"),
    ("sudo -u me make", "test"),
    ("nohup make", "test"),
    ("A=b make", "test"),
    ("python", "-V"),
    ("python", "-m pytest -q"),
    ("python x.py", "-c x"),
    ("python", "x.py -e"),
    ("node", "x.js"),
    ("pytest", "-q tests/test_a.py -k 'a or b'"),
    ("npm run", "build"),
    ("npm test", "-- --watch=false"),
    ("cargo test", "--all"),
    ("go test", "./... -run X"),
    ("cp", "a b/c"),
    ("rm", "-r build"),
    ("mkdir", "-p a/b"),
    ("chmod", "+x ./a.sh"),
    ("ls", "-la /etc"),
    ("cat", "~/.bashrc"),
    ("grep", "-rn x ."),
    ("xargs -n1 echo", "a"),
    ("docker ps", "-a"),
]


def words_of(fixed: str, more: str) -> tuple[tuple[str, ...], int]:
    rule, line = simple_words(fixed), simple_words(f"{fixed} {more}") or tuple(shlex.split(f"{fixed} {more}"))
    assert rule is not None
    return line, len(rule)


@pytest.mark.parametrize(("fixed", "more"), RISKY)
def test_options_that_write_or_run_are_dangerous(fixed: str, more: str) -> None:
    words, count = words_of(fixed, more)
    assert find_risk(words, count) is not None
    assert find_risk(words, len(words)) is None, "the user who writes them into the rule gets them"


@pytest.mark.parametrize(("fixed", "more"), HARMLESS)
def test_usual_options_are_not_dangerous(fixed: str, more: str) -> None:
    assert find_risk(*words_of(fixed, more)) is None
