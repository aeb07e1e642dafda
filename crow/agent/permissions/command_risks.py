"""Finds words that make a command run another program or write to another place.

An allow rule that ends with `*` does not cover a command with one of these words, unless the user wrote the word into
the rule. The tables hold the words that are known to be dangerous. They cannot be complete; confinement stops the
dangers that they miss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from crow.agent.permissions.command_line import ASSIGNMENT
from crow.agent.permissions.known_programs import RUNNERS, SHELLS, SUBCOMMANDS, WRAPPERS, program_of
from crow.agent.permissions.shell_text import Words


class _Risks(NamedTuple):
    """Words that make a program run another program or write to another place."""

    long: str = ""
    """Long options, which may be shortened."""
    letters: str = ""
    """Short options, which may be combined into one word."""
    words: str = ""
    """Other words, such as subcommands."""
    pattern: str = ""
    """A word that matches this pattern is risky too."""
    harmless: str = ""
    """Long options that are not risky although they look like a shortened risky one."""


_ALWAYS = _Risks(pattern=r"^")
"""Every word is risky."""

_OUTWARD = r"(?:^|=|^-[A-Za-z]+)(?:[/~]|\.[^/.]|\.\.)|/\.[^/.]|/\.\.|(?i:(?:agents|claude|gemini)\.md)|(?:^|/)HEAD$|\$"
"""Matches a word that may lead out of the working directory or to a protected file: a path that is absolute or begins
at the home directory (also as the value of an option), a hidden file, `..`, an instruction file of an agent, the `HEAD`
of a repository, or anything with a variable."""
_WRITER = _Risks(pattern=_OUTWARD)
_SED = re.compile(
    r"(?:(?:\d+|\$|/[^/\\\n]*/)(?:,(?:\d+|\$|/[^/\\\n]*/))?!?)?"
    r"(?:[pdq=]|s([/|#,])(?:(?!\1)[^\\\n]|\\[^\n])*\1(?:(?!\1)[^\\\n]|\\[^\n])*\1[gpiI0-9]*)?"
)
"""Matches a sed command that can only print: p, d, q or = with an optional address, or a substitution without the flags
e and w."""
_RISKS: Mapping[str, _Risks] = {
    "git": _Risks(
        long="output ext-diff textconv filters upload-pack receive-pack exec template separate-git-dir in-place "
        "open-files-in-pager output-directory no-index extcmd tool remote-submodules unsafe-paths directory config "
        "smtp-server sendmail-cmd to-cmd cc-cmd reference recurse-submodules global system git-completion-helper",
        letters="Ox",
        words="foreach bisect filter-branch config difftool mergetool send-email instaweb daemon worktree clone init "
        "checkout-index merge-index fast-export "
        "submodule hook archive bundle bugreport diagnose format-patch alias credential fast-import gui citool svn",
        pattern=r"^ext::|^--?[A-Za-z-]*=ext::",
        harmless="--text --cc --filter",
    ),
    "find": _Risks(words="-exec -execdir -ok -okdir -delete -fprint -fprint0 -fprintf -fls -files0-from"),
    "fd": _Risks(long="exec exec-batch", letters="xX"),
    "fdfind": _Risks(long="exec exec-batch", letters="xX"),
    "sort": _Risks(long="output compress-program temporary-directory files0-from", letters="oT"),
    "uniq": _Risks(pattern=r"^[^-]"),
    "split": _Risks(long="filter", pattern=_OUTWARD),
    "tar": _Risks(
        long="checkpoint-action to-command use-compress-program rsh-command rmt-command info-script new-volume-script "
        "directory absolute-names index-file files-from remove-files one-top-level",
        letters="IFCP",
        pattern=rf"{_OUTWARD}|^[A-Za-z]*[IFCP][A-Za-z]*$",
        harmless="--file",
    ),
    "rg": _Risks(long="pre search-zip hostname-bin", letters="z"),
    "ag": _Risks(long="pager"),
    "bat": _Risks(long="pager"),
    "tree": _Risks(letters="o"),
    "less": _Risks(letters="kooO", long="lesskey-file log-file LOG-FILE", pattern=r"^\+"),
    "man": _Risks(long="pager html preprocessor", letters="PHpC"),
    "xxd": _Risks(letters="r", pattern=_OUTWARD),
    "zip": _Risks(long="unzip-command", letters="T", pattern=_OUTWARD),
    "file": _Risks(letters="C"),
    "date": _Risks(letters="s", long="set"),
    "awk": _Risks(
        long="file include load exec source dump-variables profile pretty-print debug",
        letters="fiElodpDe",
        pattern=r"system|\||>|getline|@",
    ),
    "sed": _Risks(long="in-place file follow-symlinks", letters="if"),
    "curl": _Risks(
        long="output remote-name remote-name-all config dump-header cookie-jar trace trace-ascii stderr libcurl "
        "etag-save hsts output-dir upload-file data data-binary data-raw data-urlencode form json alt-svc engine "
        "unix-socket netrc-file cookie cert url-query variable",
        letters="oOKDcTdFJbE",
        pattern=r"%output|^@|=@|^-[A-Za-z]+@",
    ),
    "wget": _ALWAYS,
    "rsync": _Risks(long="rsh rsync-path log-file write-batch", letters="e", pattern=_OUTWARD),
    "scp": _Risks(letters="SoF", pattern=_OUTWARD),
    "sftp": _ALWAYS,
    "make": _Risks(
        long="file makefile directory eval include-dir environment-overrides", letters="fCIeE", pattern=r"="
    ),
    "pip": _Risks(
        long="target prefix root src log report cache-dir index-url extra-index-url find-links python config-settings "
        "global-option build-option proxy trusted-host cert",
        letters="tif",
        words="config download",
    ),
    "uv": _Risks(
        long="target prefix index-url extra-index-url index default-index find-links cache-dir directory project "
        "python config-file",
        words="run tool pip publish venv init",
    ),
    "npm": _Risks(
        long="prefix global script-shell node-options registry userconfig globalconfig cache location call",
        letters="gCc",
        words="exec x config c set edit explore init create publish",
    ),
    "yarn": _Risks(long="cwd registry global-folder", words="exec dlx create config global publish node"),
    "pnpm": _Risks(
        long="dir registry global script-shell store-dir", letters="Cg", words="exec dlx create config env publish"
    ),
    "cargo": _Risks(
        long="config manifest-path target-dir root out-dir artifact-dir path registry index",
        letters="CZ",
        words="install new init",
    ),
    "go": _Risks(
        words="generate tool install env",
        pattern=r"^--?(?:test\.)?(?:exec|toolexec|o|C|overlay|modfile|vettool|ldflags|gcflags|gccgoflags|asmflags|compiler|"
        r"outputdir|\w*profile|trace|pkgdir)(?:=|$)",
    ),
    "pytest": _Risks(
        long="rootdir confcutdir override-ini junit-xml junitxml log-file basetemp cov-report cov-config debug pdbcls "
        "pastebin config-file report-log",
        letters="cop",
        harmless="--co --cov --pdb",
    ),
    "mypy": _Risks(
        long="python-executable config-file cache-dir junit-xml shadow-file custom-typing-module custom-typeshed-dir "
        "install-types html-report xml-report any-exprs-report linecount-report cobertura-xml-report txt-report "
        "xslt-html-report xslt-txt-report linecoverage-report lineprecision-report"
    ),
    "ruff": _Risks(long="output-file config cache-dir", letters="o"),
    "eslint": _Risks(
        long="output-file config rulesdir resolve-plugins-relative-to plugin parser format cache-file cache-location",
        letters="ocf",
    ),
    "prettier": _Risks(long="config plugin plugin-search-dir cache-location"),
    "tsc": _Risks(pattern=r"(?i)^--?(?:outDir|outFile|p|project|build|b|declarationDir|tsBuildInfoFile|generate)"),
    "docker": _Risks(
        long="config host context",
        letters="Hc",
        words="run exec build buildx compose cp create import load plugin save swarm export commit",
    ),
    "kubectl": _Risks(
        long="kubeconfig context server user",
        letters="s",
        words="exec cp apply create delete edit debug run plugin config",
    ),
    "gh": _Risks(
        words="alias extension config codespace api auth clone", long="editor output dir clobber", letters="OD"
    ),
    "openssl": _Risks(pattern=r"^--?(?:out|engine|provider-path|writerand|CAserial|keyout|config)(?:=|$)"),
    "gpg": _Risks(long="output homedir options exec-path photo-viewer keyserver", letters="o"),
    "iconv": _Risks(long="output", letters="o"),
    "patch": _Risks(long="output directory reject-file prefix", letters="odrB", pattern=_OUTWARD),
    "sqlite3": _Risks(pattern=r"^\.|^--?(?:cmd|init)|(?i:writefile|load_extension|attach|edit\()|\|"),
    "psql": _Risks(long="output log-file file", letters="oLf", pattern=r"\\|(?i:copy)"),
    "mysql": _Risks(long="pager tee", pattern=r"\\|(?i:system|outfile|dumpfile)"),
    **dict.fromkeys(
        ("cp", "mv", "ln", "install", "touch", "mkdir", "rm", "rmdir", "chmod", "chown", "chgrp", "truncate", "tee"),
        _WRITER,
    ),
    **dict.fromkeys(("dd", "csplit", "unzip", "gzip", "gunzip", "bzip2", "xz", "zstd", "shred", "mktemp"), _WRITER),
    **dict.fromkeys(("mkfifo", "unlink", "rename", "sponge", "7z", "ar", "cpio"), _WRITER),
    **dict.fromkeys(
        ("gcc", "g++", "cc", "c++", "clang", "clang++", "ld"),
        _Risks(
            long="specs plugin config output dumpdir save-temps",
            pattern=r"^-(?:o|B|wrapper|fplugin|specs|dumpdir|save-temps|Xclang|load)|^@",
        ),
    ),
    **dict.fromkeys(
        ("vi", "vim", "nvim", "view", "ex", "ed", "emacs", "nano", "crontab", "at", "batch", "expect", "gdb", "lldb"),
        _ALWAYS,
    ),
    **dict.fromkeys(("source", ".", "trap", "alias", "socat", "nc", "ncat", "telnet", "tclsh", "osascript"), _ALWAYS),
}
_GIT_SAFE = frozenset(("--no-pager", "--no-optional-locks", "--literal-pathspecs", "--version", "--help", "-h", "-v"))
"""Harmless options that may come between `git` and its subcommand."""
_RUN = frozenset(("run", "exec", "dlx", "x", "eval", "repl"))
"""Subcommands with which package managers run another program."""
_MANAGERS = frozenset(
    ("poetry", "pipenv", "pdm", "rye", "hatch", "conda", "mamba", "bundle", "uv", "pnpm", "npm", "yarn", "bun", "deno")
)
_SCRIPTED = frozenset(("npm", "pnpm", "yarn", "bun", "deno"))
"""Package managers whose `run` only runs scripts of the project, so it is no riskier than `python *`."""
_INTERPRETERS = re.compile(
    r"(?:python|pypy)[\d.]*|node|deno|bun|perl[\d.]*|ruby[\d.]*|php[\d.]*|lua[\d.]*|Rscript|julia"
)
_INTERPRETER_SAFE = {
    "python": frozenset(("-u", "-b", "-B", "-O", "-OO", "-s", "-q", "-V")),
    "node": frozenset(
        ("--test", "--watch", "--no-warnings", "--enable-source-maps", "--max-old-space-size", "--trace-warnings")
    ),
}
"""Options of interpreters that neither run other code nor write files. Other options may, or their values may look like
the script."""
_ALWAYS_SAFE = frozenset(("-v", "-h", "-w", "--version", "--help"))
"""Harmless options of every interpreter."""
_ALIASES = {
    "gawk": "awk",
    "mawk": "awk",
    "nawk": "awk",
    "gsed": "sed",
    "gtar": "tar",
    "bsdtar": "tar",
    "gmake": "make",
    "pip3": "pip",
    "py.test": "pytest",
    "podman": "docker",
    "gfind": "find",
    "gsort": "sort",
}
"""Other names of the programs in `_RISKS`."""


def find_risk(words: Words, fixed: int) -> str | None:
    """Return the first word that may make a command run another program or write to another place, or None if there is
    no such word. The first `fixed` words are not examined, because the user wrote them into the rule. If the program
    runs whatever follows it, the first word after them is risky."""
    if words and ASSIGNMENT.fullmatch(words[0]):
        return words[0] if fixed < 1 else find_risk(words[1:], fixed - 1)
    if fixed < 1:
        return words[0] if words else None
    program = program_of(words[0])
    program = _ALIASES.get(program, program)
    more = words[fixed:]
    if program in SHELLS or program in RUNNERS or program == "eval":
        return next(iter(more), None)
    if program in WRAPPERS:
        start = _wrapped_start(words)
        if start is None or start >= fixed:
            return next(iter(more), None)
        return find_risk(words[start:], fixed - start)
    if program in _MANAGERS and words[1:2] and words[1] in _RUN and not (words[1] == "run" and program in _SCRIPTED):
        if fixed < 3 or words[2].startswith("-"):  # the rule does not say which program runs
            return next(iter(more), None)
        return find_risk(words[2:], fixed - 2)
    if _INTERPRETERS.fullmatch(program):
        return _interpreter_option(words, fixed)
    if program == "git" and (option := next(_git_options(words, fixed), None)):
        return option
    if program == "sed" and (script := next((word for word in _sed_scripts(words) if word in more), None)):
        return script
    risks = _RISKS.get(program)
    return None if risks is None else next((word for word in more if _is_risky(word, risks)), None)


def _interpreter_option(words: Words, fixed: int) -> str | None:
    """Return the first option of an interpreter that may run other code, or its script if that is a URL. The words
    after the script or the module are its arguments, so they are not risky."""
    program = program_of(words[0])
    kind = "python" if program.startswith(("python", "pypy")) else program
    safe = _INTERPRETER_SAFE.get(kind, frozenset()) | _ALWAYS_SAFE
    start = 2 if words[1:2] and words[1] in _RUN else 1  # `deno run`
    for at, word in enumerate(words[start:], start):
        is_option = word.startswith("-")
        if at >= fixed and (word.partition("=")[0] not in safe if is_option and word != "-m" else "://" in word):
            return word
        if not is_option or word == "-m":
            break
    return None


def _git_options(words: Words, fixed: int) -> Iterator[str]:
    """Yield the options between `git` and its subcommand, because they can name programs to run, and the option of
    `git format-patch` that names the directory to write to. Harmless options, and options among the first `fixed`
    words, are left out."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if at >= fixed and words[at] not in _GIT_SAFE:
            yield words[at]
        at += 2 if words[at] in SUBCOMMANDS["git"] else 1
    if "format-patch" in words:
        yield from (word for word in words[fixed:] if word.startswith("-o"))


def _sed_scripts(words: Words) -> Iterator[str]:
    """Yield the words of a sed command that contain a script, if the script may do more than print."""
    is_script_next, has_script = False, False
    for word in words[1:]:
        script = None
        name, equals, value = word.partition("=")
        if is_script_next:
            script, is_script_next = word, False
        elif word.startswith("--"):
            if "--expression".startswith(name):  # long options may be shortened
                has_script, is_script_next, script = True, not equals, value if equals else None
        elif word.startswith("-") and word != "-":
            _, e, rest = word.partition("e")  # short options may be combined, and `-es/a/b/` has its script with it
            if e:
                has_script, is_script_next, script = True, not rest, rest or None
        elif not has_script:
            script, has_script = word, True
        if script is not None and not all(_SED.fullmatch(part.strip()) for part in script.split(";")):
            yield word


def _is_risky(word: str, risks: _Risks) -> bool:
    name = word.partition("=")[0]
    if word in risks.words.split():
        return True
    if name in risks.harmless.split():
        pass
    elif word.startswith("--"):
        if len(name) > 2 and any(f"--{option}".startswith(name) for option in risks.long.split()):
            return True
    elif word.startswith("-") and any(letter in name[1:] for letter in risks.letters):
        return True
    return bool(risks.pattern) and re.search(risks.pattern, word, re.DOTALL) is not None


def _wrapped_start(words: Words) -> int | None:
    """Find the program that a wrapper runs. Return the index of its word in `words`, or None if the index is
    unknown."""
    letters, operands = WRAPPERS[program_of(words[0])]
    at = 1
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
        elif word.startswith("--"):
            if "=" not in word:
                return None
            at += 1
        elif word.startswith("-") and len(word) > 1:
            if "S" in word or ("c" in word and "c" in letters):
                return None  # env -S and su -c take a command line
            at += 2 if word[-1] in letters else 1
        elif ASSIGNMENT.fullmatch(word):
            at += 1
        elif operands:
            operands, at = operands - 1, at + 1
        else:
            return at
    return None
