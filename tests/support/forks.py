"""Forks of this process."""

import faulthandler
import os
import time
import traceback


def in_child(work, seconds=60):
    """The exit code of a forked child that runs `work`, or None where it hangs."""
    child = os.fork()
    if not child:
        # Where it hangs, the report shows at what.
        faulthandler.dump_traceback_later(seconds * 0.8, file=2)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None
