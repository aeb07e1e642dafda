"""Leaves a process that leads no group, has lost its parent and runs in another session; prints its id.

With `deaf` it ignores SIGTERM, with `naked` its environment is new, with `brief` it ends at once, and with `stay` this
process stays too.
"""

import os
import signal
import sys
import time

read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if "deaf" in sys.argv:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(write, str(os.getpid()).encode())
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        command = ["true"] if "brief" in sys.argv else ["sleep", "1000"]
        os.execvpe(command[0], command, {"PATH": os.environ["PATH"]} if "naked" in sys.argv else dict(os.environ))
    os._exit(0)
os.close(write)
pid = b""
while piece := os.read(read, 100):  # it ends when the other process has replaced its program
    pid += piece
print(pid.decode(), flush=True)
if "stay" in sys.argv:
    time.sleep(1000)
