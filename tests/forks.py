"""Ranks as copies of one process, so that torch is imported once for all of them; without torchrun."""

import os
import signal
import sys
import time
import traceback
from pathlib import Path


def fork(size: int, work, out, patience=600, last=None) -> list[int]:
    """Runs work() on that many ranks: their exit codes, that of SIGKILL for one that is not patient enough.

    What a rank writes to standard error goes to OUT/log_N. last: seconds that the last rank may take when the others have
    ended. Where MASTER_PORT is not set, rank 0 has the store.
    """
    if "MASTER_PORT" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    pids = [start(rank, work, out) for rank in range(size)]
    codes = [wait(pid, patience) for pid in pids[:-1]]
    return [*codes, wait(pids[-1], last or patience)]


def free_port() -> int:
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(rank: int, work, out) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.dup2(os.open(Path(out, f"log_{rank}"), os.O_WRONLY | os.O_CREAT), 2)
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
