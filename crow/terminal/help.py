"""The help of `crow chat`."""

OWN_COMMANDS = {
    "exit": "Leave; the session is kept",
    "session": "Go to another session: its id, its alias, its title, or a new alias; without a name, pick one",
}

HELP = """\
**Keys**

- `Enter` sends; `Alt-Enter`, `Ctrl-J`, or `\\` at the end of the line breaks the line
- `Tab` completes `/commands`, their arguments and `@files`; `Ctrl-R` searches earlier prompts
- `Shift-Tab` changes the permission mode; `!git status` runs a command yourself and shows its output to the model
- `Esc` or `Ctrl-C` stops the turn; `Ctrl-C` also clears an unfinished prompt; `Ctrl-D` or `Ctrl-C` twice leaves
- While crow works, `Enter` queues what you type for after the turn; a second `Enter` sends it into this turn, and `Esc`
  takes it back

**Commands of the terminal**

- `/session`, `/model` and `/rewind` let you pick from a list; `/session SESSION` goes there at once
- `/exit` leaves; the session is kept
"""

PLAIN_HELP = """\
**Keys**

- Enter sends. A line that ends with `\\` continues on the next line.
- Ctrl-C cancels the turn. Ctrl-D leaves.
- `!git status` runs a command yourself and shows its output to the model.
- While crow works, a line is queued for after the turn. An empty line sends it into this turn, and Esc with Enter takes
  it back.

**Commands of the terminal**

- `/session`, `/model` and `/rewind` let you pick from a list; `/session SESSION` goes there at once
- `/exit` leaves; the session is kept
"""
