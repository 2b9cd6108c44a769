"""minigrpo.py with a fault built in: FAULT=what, on rank FAULT_RANK, at step FAULT_STEP. Started by test_faults.py."""

import errno
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import engines
import minigrpo
from checkpoint import Run

calls = {"n": 0}


def at_the_step(act):
    """The function, which calls act() first when it is called for the FAULT_STEP-th time, on FAULT_RANK."""
    def wrap(function):
        def wrapped(*args, **kwargs):
            if os.environ["RANK"] == os.environ["FAULT_RANK"]:
                calls["n"] += 1
                if calls["n"] == int(os.environ["FAULT_STEP"]) and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                    act()
            return function(*args, **kwargs)
        return wrapped
    return wrap


def fail(error):
    raise error


def patch(owner, name, act):
    setattr(owner, name, at_the_step(act)(getattr(owner, name)))


match os.environ["FAULT"]:
    case "engine":
        patch(engines.PolicySampler, "generate", lambda: fail(RuntimeError("planted: the engine fell over")))
    case "memory":
        patch(minigrpo, "policy_loss", lambda: fail(torch.OutOfMemoryError("planted: out of memory")))
    case "disk":
        patch(Run, "write_rollouts", lambda: fail(OSError(errno.ENOSPC, "planted: no space left on device")))
    case "crash":
        patch(minigrpo, "score_rollouts", lambda: os._exit(7))
    case "stall":
        patch(minigrpo, "score_rollouts", lambda: time.sleep(1000))
    case "nothing":
        pass

minigrpo.main()
os._exit(0)
