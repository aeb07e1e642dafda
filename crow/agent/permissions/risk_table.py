"""Lists the words that make programs run other programs or write to other places.

The table cannot be complete; confinement stops the dangers that it misses. For programs that are not in the table,
`OF_OTHERS` lists the options that are risky in most programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Risks(NamedTuple):
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


_ALWAYS = Risks(pattern=r"^")
"""Every word is risky."""

_OUTWARD = r"(?:^|=|^-[A-Za-z]+)(?:[/~]|\.[^/.]|\.\.)|/\.[^/.]|/\.\.|(?i:(?:agents|claude|gemini)\.md)|(?:^|/)HEAD$|\$"
"""Matches a word that may lead out of the working directory or to a protected file: a path that is absolute or begins
at the home directory (also as the value of an option), a hidden file, `..`, an instruction file of an agent, the `HEAD`
of a repository, or anything with a variable."""
_PLAIN_SETTING = r"\w+(?::\w+)?=(?i:on|off|yes|no|true|false|\d+|release|debug|relwithdebinfo|minsizerel)"
"""Matches a setting of CMake whose value cannot name a program or a file."""
_WRITER = Risks(pattern=_OUTWARD)
OF_OTHERS = Risks(
    long="command editor eval exec exec-batch execute init-file init-hook init-script interpreter launcher load "
    "load-extension load-plugins pager plugin plugins post-renderer preload rcfile require run-under script shell "
    "shell-escape wrapper",
    pattern=r"^-(?:exec|eval|execute|script|plugin|init-script|rcfile)(?:=|$)",
)
"""Risky words of programs that `RISKS` does not name."""
RISKS: Mapping[str, Risks] = {  # by program, or by program and subcommand
    "git": Risks(
        long="output ext-diff textconv filters upload-pack receive-pack exec template separate-git-dir in-place "
        "open-files-in-pager output-directory no-index extcmd tool remote-submodules unsafe-paths directory config "
        "smtp-server sendmail-cmd to-cmd cc-cmd reference recurse-submodules global system git-completion-helper "
        "object-dir",
        letters="Ox",
        words="foreach bisect filter-branch config difftool mergetool send-email instaweb daemon worktree clone init "
        "checkout-index merge-index fast-export maintenance remote-ext shell web--browse p4 cvsexportcommit "
        "credential-store credential-cache "
        "submodule hook archive bundle bugreport diagnose format-patch alias credential fast-import gui citool svn",
        pattern=r"^ext::|^--?[A-Za-z-]*=ext::",
        harmless="--text --cc --filter",
    ),
    "git push": Risks(pattern=r"^(?:\.{0,2}/|\.\.$|~|file:)"),
    "find": Risks(words="-exec -execdir -ok -okdir -delete -fprint -fprint0 -fprintf -fls -files0-from"),
    "fd": Risks(long="exec exec-batch", letters="xX"),
    "fdfind": Risks(long="exec exec-batch", letters="xX"),
    "sort": Risks(long="output compress-program temporary-directory files0-from", letters="oT"),
    "uniq": Risks(pattern=r"^[^-]"),
    "split": Risks(long="filter", pattern=_OUTWARD),
    "tar": Risks(
        long="checkpoint-action to-command use-compress-program rsh-command rmt-command info-script new-volume-script "
        "directory absolute-names index-file files-from remove-files one-top-level",
        letters="IFCP",
        pattern=rf"{_OUTWARD}|^[A-Za-z]*[IFCP][A-Za-z]*$",
        harmless="--file",
    ),
    "rg": Risks(long="pre search-zip hostname-bin", letters="z"),
    "ag": Risks(long="pager"),
    "bat": Risks(long="pager"),
    "tree": Risks(letters="o"),
    "less": Risks(letters="kooO", long="lesskey-file log-file LOG-FILE", pattern=r"^\+"),
    "man": Risks(long="pager html preprocessor", letters="PHpC"),
    "xxd": Risks(letters="r", pattern=_OUTWARD),
    "zip": Risks(long="unzip-command", letters="T", pattern=_OUTWARD),
    "file": Risks(letters="C"),
    "date": Risks(letters="s", long="set"),
    "awk": Risks(
        long="file include load exec source dump-variables profile pretty-print debug",
        letters="fiElodpDe",
        pattern=r"system|\||>|getline|@",
    ),
    "sed": Risks(long="in-place file follow-symlinks", letters="if"),
    "curl": Risks(
        long="output remote-name remote-name-all config dump-header cookie-jar trace trace-ascii stderr libcurl "
        "etag-save hsts output-dir upload-file data data-binary data-raw data-urlencode form json alt-svc engine "
        "unix-socket netrc-file cookie cert url-query variable",
        letters="oOKDcTdFJbE",
        pattern=r"%output|^@|=@|^-[A-Za-z]+@",
    ),
    "wget": _ALWAYS,
    "rsync": Risks(long="rsh rsync-path log-file write-batch", letters="e", pattern=_OUTWARD),
    "scp": Risks(letters="SoF", pattern=_OUTWARD),
    "sftp": _ALWAYS,
    "make": Risks(long="file makefile directory eval include-dir environment-overrides", letters="fCIeE", pattern=r"="),
    "pip": Risks(
        long="target prefix root src log report cache-dir index-url extra-index-url find-links python config-settings "
        "global-option build-option proxy trusted-host cert",
        letters="tif",
        words="config download",
    ),
    "uv": Risks(
        long="target prefix index-url extra-index-url index default-index find-links cache-dir directory project "
        "python config-file",
        words="run tool pip publish venv init",
    ),
    "npm": Risks(
        long="prefix global script-shell node-options registry userconfig globalconfig cache location call "
        "pack-destination",
        letters="gCc",
        words="exec x config c set edit explore init create publish",
    ),
    "yarn": Risks(long="cwd registry global-folder", words="exec dlx create config global publish node"),
    "pnpm": Risks(
        long="dir registry global script-shell store-dir", letters="Cg", words="exec dlx create config env publish"
    ),
    "cargo": Risks(
        long="config manifest-path target-dir root out-dir artifact-dir path registry index",
        letters="CZ",
        words="install binstall new init rustc",
    ),
    "go run": Risks(pattern=r"@|://"),
    "go": Risks(
        words="generate tool install env",
        pattern=r"^--?(?:test\.)?(?:exec|toolexec|o|C|overlay|modfile|vettool|ldflags|gcflags|gccgoflags|asmflags|compiler|"
        r"outputdir|\w*profile|trace|pkgdir)(?:=|$)",
    ),
    "cmake": Risks(
        long="toolchain graphviz trace-redirect debugger-pipe debugger-dap-log prefix install-prefix",
        pattern=rf"^-[PECU]|^--$|^-D(?!{_PLAIN_SETTING}$)|{_OUTWARD}",
    ),
    "ctest": Risks(
        long="script script-new-process build-and-test output-log output-junit dashboard extra-submit",
        letters="SOD",
        pattern=_OUTWARD,
    ),
    "ninja": Risks(letters="f", pattern=_OUTWARD),
    "meson": Risks(
        long="native-file cross-file wrapper gdb-path prefix destdir output",
        words="devenv dist install rewrite",
        pattern=_OUTWARD,
    ),
    "bazel": Risks(
        words="run",
        pattern=r"^--\w*(?:_under|_executable|_command|rc|_base|_root|_repository|_module|registry|_strategy|config)(?:=|$)",
    ),
    "gradle": Risks(
        long="init-script build-file settings-file project-dir gradle-user-home include-build project-cache-dir "
        "system-prop",
        pattern=r"^-[IbcpgD]",
    ),
    "mvn": Risks(
        long="file settings global-settings toolchains global-toolchains log-file",
        pattern=r"^-(?:f|s|gs|t|gt|l)(?:=|$)|^-D(?!skip|test=|it\.test=|maven\.test\.skip|failIfNo)|^[^-:][^:]*:",
    ),
    "ant": Risks(pattern=r"^-(?:f|file|buildfile|s|find|lib|main|l\w+|inputhandler|propertyfile|D)"),
    "sbt": Risks(pattern=r"^(?:eval|set|apply|new|console|<|!)|;|^-"),
    "dotnet": Risks(
        long="output artifacts-path configfile source settings test-adapter-path results-directory diag "
        "property additionalprobingpath",
        words="tool new exec script msbuild vstest",
        pattern=rf"^-(?:o|s|d)$|^[-/]{{1,2}}\w+:|(?i:logfile)|{_OUTWARD}",
    ),
    "java": Risks(
        pattern=r"^-(?:javaagent|agentlib|agentpath|Xbootclasspath|XX:\w*(?:On|Flags|VMOptions))|^@|^--patch-module"
    ),
    "javac": Risks(pattern=rf"^-(?:d|h|s|processor\w*|-processor\S*|J\S*|Xplugin\S*)|^@|{_OUTWARD}"),
    "gem": Risks(
        long="install-dir bindir source config-file trust-policy",
        letters="i",
        words="exec install push sources generate_index",
    ),
    "composer": Risks(long="working-dir", letters="d", words="exec global create-project config self-update"),
    "mix": Risks(words="run cmd eval do archive.install escript.install", letters="er", long="eval require"),
    "stack": Risks(long="work-dir stack-yaml with-gcc", words="exec ghc ghci runghc runhaskell script eval repl setup"),
    "cabal": Risks(long="with-compiler project-file config-file installdir", letters="w", words="exec repl install"),
    "ghc": Risks(pattern=r"^-(?:e|o|F|pgm|opt|plugin|fplugin|odir|hidir|outputdir|dumpdir)"),
    "rustc": Risks(long="out-dir codegen", letters="oCZ", pattern=r"^@"),
    "swift": Risks(
        long="package-path build-path scratch-path toolchain disable-sandbox", letters="X", words="repl package"
    ),
    "zig": Risks(words="run cc c++ init", pattern=r"^-f?emit|^--?(?:build-file|prefix|cache-dir|global-cache-dir)|^@"),
    "rake": Risks(
        long="rakefile require libdir rakelib rakelibdir execute execute-print execute-continue", letters="fIrReEp"
    ),
    "just": Risks(long="justfile working-directory command shell shell-arg chooser set", letters="fdc"),
    "task": Risks(long="taskfile dir global init", letters="tdg"),
    "tox": Risks(long="conf root workdir override", letters="cx", words="exec e devenv"),
    "nox": Risks(long="noxfile envdir", letters="f"),
    "coverage": Risks(long="rcfile data-file output-file directory", letters="od"),
    "pylint": Risks(long="init-hook load-plugins rcfile output output-format"),
    "flake8": Risks(long="config append-config output-file"),
    "tsx": Risks(letters="er", long="eval require import loader tsconfig", pattern=r"://"),
    "jest": Risks(
        long="config rootDir globalSetup globalTeardown setupFiles setupFilesAfterEnv runner testRunner transform "
        "testEnvironment reporters outputFile coverageDirectory cacheDirectory resolver preset watchPlugins",
        letters="c",
        harmless="--coverage",
    ),
    "vitest": Risks(long="config root dir globalSetup environment outputFile reporter", letters="cr"),
    "mocha": Risks(long="require config package opts reporter ui loader import node-option", letters="r"),
    **dict.fromkeys(("webpack", "vite", "rollup"), Risks(long="plugin configPlugin", letters="p", pattern=_OUTWARD)),
    "esbuild": Risks(pattern=r"^--(?:out|servedir|metafile|certfile)"),
    "terraform": Risks(pattern=r"^--?(?:chdir|plugin-dir|out|state|backup|backend-config|from-module)"),
    "helm": Risks(
        long="post-renderer kubeconfig kube-apiserver registry-config repository-config output-dir", words="plugin"
    ),
    "hg": Risks(long="config cwd tool ssh remotecmd debugger", letters="te", words="serve bisect"),
    "svn": Risks(long="diff-cmd diff3-cmd editor-cmd config-option config-dir"),
    "jj": Risks(long="config config-file config-toml tool", words="util"),
    "pandoc": Risks(
        long="filter lua-filter output pdf-engine pdf-engine-opt extract-media defaults data-dir log", letters="FLodt"
    ),
    **dict.fromkeys(
        ("tex", "latex", "pdflatex", "xelatex", "lualatex"),
        Risks(pattern=rf"^--?(?:shell-escape|enable|output|jobname|cnf-line|lua|fmt|ini)|{_OUTWARD}|\\"),
    ),
    "latexmk": Risks(pattern=r"^--?(?:[er]$|\w*latex=|outdir|auxdir|output-directory|shell-escape|usepretex|deps-out)"),
    "protoc": Risks(pattern=r"^--(?:plugin|\w+_out|descriptor_set_out|dependency_out)|^-o|^@"),
    "clang-tidy": Risks(pattern=r"^--?(?:load|fix|config|export|store|vfs|extra-arg|warnings-as)"),
    "yq": Risks(long="inplace split-exp", letters="is"),
    "ffmpeg": Risks(pattern=_OUTWARD),
    "tcpdump": Risks(letters="zwrF"),
    "nmap": Risks(pattern=r"^--?(?:script|o[NXSGA]|iL|datadir|resume)"),
    "rpm": Risks(long="eval pipe define root dbpath rcfile macros", letters="DE"),
    "dpkg": Risks(long="pre-invoke post-invoke root admindir instdir"),
    **dict.fromkeys(("apt", "apt-get"), Risks(letters="oc", long="option config-file")),
    "ip": Risks(words="exec", letters="b", long="batch"),
    "pytest": Risks(
        long="rootdir confcutdir override-ini junit-xml junitxml log-file basetemp cov-report cov-config debug pdbcls "
        "pastebin config-file report-log",
        letters="cop",
        pattern=r"=(?:[/~]|\.\./)",
        harmless="--co --cov --pdb",
    ),
    "mypy": Risks(
        long="python-executable config-file cache-dir junit-xml shadow-file custom-typing-module custom-typeshed-dir "
        "install-types html-report xml-report any-exprs-report linecount-report cobertura-xml-report txt-report "
        "xslt-html-report xslt-txt-report linecoverage-report lineprecision-report"
    ),
    "ruff": Risks(long="output-file config cache-dir", letters="o"),
    "eslint": Risks(
        long="output-file config rulesdir resolve-plugins-relative-to plugin parser format cache-file cache-location",
        letters="ocf",
    ),
    "prettier": Risks(long="config plugin plugin-search-dir cache-location"),
    "tsc": Risks(pattern=r"(?i)^--?(?:outDir|outFile|p|project|build|b|declarationDir|tsBuildInfoFile|generate)"),
    "docker": Risks(
        long="config host context",
        letters="Hc",
        words="run exec build buildx compose cp create import load plugin save swarm export commit",
    ),
    **dict.fromkeys(
        ("docker build", "docker buildx"), Risks(long="output iidfile metadata-file cache-to", letters="o")
    ),
    "bun build": Risks(long="outdir outfile config metafile", pattern=_OUTWARD),
    **dict.fromkeys(("deno compile", "deno install"), Risks(long="output root global allow-all", letters="ogA")),
    "docker cp": _WRITER,
    "docker run": Risks(
        long="volume volumes-from mount privileged entrypoint device cap-add security-opt pid userns ipc", letters="v"
    ),
    "kubectl": Risks(
        long="kubeconfig context server user",
        letters="s",
        words="exec cp apply create delete edit debug run plugin config",
    ),
    "gh": Risks(
        words="alias extension config codespace api auth clone", long="editor output dir clobber", letters="OD"
    ),
    "openssl": Risks(pattern=r"^--?(?:out|engine|provider-path|writerand|CAserial|keyout|config)(?:=|$)"),
    "gpg": Risks(long="output homedir options exec-path photo-viewer keyserver", letters="o"),
    "iconv": Risks(long="output", letters="o"),
    "patch": Risks(long="output directory reject-file prefix", letters="odrB", pattern=_OUTWARD),
    "sqlite3": Risks(pattern=r"^\.|^--?(?:cmd|init)|(?i:writefile|load_extension|attach|edit\()|\|"),
    "psql": Risks(long="output log-file file", letters="oLf", pattern=r"\\|(?i:copy)"),
    "mysql": Risks(long="pager tee", pattern=r"\\|(?i:system|outfile|dumpfile)"),
    **dict.fromkeys(
        ("cp", "mv", "ln", "install", "touch", "mkdir", "rm", "rmdir", "chmod", "chown", "chgrp", "truncate", "tee"),
        _WRITER,
    ),
    **dict.fromkeys(("dd", "csplit", "unzip", "gzip", "gunzip", "bzip2", "xz", "zstd", "shred", "mktemp"), _WRITER),
    **dict.fromkeys(("strip", "objcopy", "dot", "jar", "convert", "magick", "ctags", "etags", "cscope"), _WRITER),
    **dict.fromkeys(("black", "isort", "autopep8", "gofmt", "clang-format", "shfmt", "rustfmt"), _WRITER),
    **dict.fromkeys(("venv", "zipfile", "tarfile", "json.tool"), _WRITER),  # modules of Python
    **dict.fromkeys(("cProfile", "profile"), Risks(letters="om")),
    **dict.fromkeys(("git index-pack", "git pack-objects", "git mailsplit", "git mailinfo", "git merge-file"), _WRITER),
    "fzf": Risks(long="preview bind listen"),
    "pre-commit": Risks(long="config", letters="c", words="try-repo"),
    **dict.fromkeys(("mkfifo", "unlink", "rename", "sponge", "7z", "ar", "cpio"), _WRITER),
    **dict.fromkeys(
        ("gcc", "g++", "cc", "c++", "clang", "clang++", "ld"),
        Risks(
            long="specs plugin config output dumpdir save-temps",
            pattern=r"^-(?:o|B|wrapper|fplugin|specs|dumpdir|save-temps|Xclang|load)|^@",
        ),
    ),
    **dict.fromkeys(
        ("vi", "vim", "nvim", "view", "ex", "ed", "emacs", "nano", "crontab", "at", "batch", "expect", "gdb", "lldb"),
        _ALWAYS,
    ),
    **dict.fromkeys(  # bash runs the substitutions in the subscript of a variable
        ("test", "printf", "unset", "declare", "typeset", "export", "readonly", "let", "read", "wait"),
        Risks(pattern=r"\$\(|`"),
    ),
    **dict.fromkeys(
        ("enable", "compgen", "jobs", "history", "bind", "complete", "fc", "mapfile", "readarray"), _ALWAYS
    ),
    **dict.fromkeys(("timeit", "pdb", "open", "xdg-open", "sudoedit"), _ALWAYS),
    **dict.fromkeys(
        ("source", ".", "trap", "alias", "socat", "nc", "ncat", "telnet", "tclsh", "osascript", "ansible"), _ALWAYS
    ),
}
ALIASES = {
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
    "cmake3": "cmake",
    "ninja-build": "ninja",
    "bazelisk": "bazel",
    "gradlew": "gradle",
    "mvnw": "mvn",
    "mvnd": "mvn",
    "msbuild": "dotnet",
    "tofu": "terraform",
    "ts-node": "tsx",
    "docker-compose": "docker",
    "nerdctl": "docker",
}
"""Other names of the programs in `RISKS`."""
