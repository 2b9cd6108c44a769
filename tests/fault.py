"""minigrpo.py with a fault built in: FAULT=what, on rank FAULT_RANK, at step FAULT_STEP. Started by test_faults.py."""

import datetime
import errno
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import engines
import minigrpo
from checkpoint import Run
from sharded import World

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


def stall():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun need not wait 30 seconds before it uses SIGKILL
    time.sleep(10_000)


class PatientAtFirst(World):
    """--timeout_minutes counts from the step of the fault on: a busy machine may be slow to start."""

    def __init__(self, timeout_minutes, **more):
        super().__init__(**more)
        self.wanted, self.rewards = datetime.timedelta(minutes=timeout_minutes), 0

    def barrier(self, stage):
        self.rewards += stage == "reward"  # two in a step
        if self.rewards == 2 * int(os.environ["FAULT_STEP"]) - 1:
            self.timeout = self.wanted
        super().barrier(stage)


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
        minigrpo.World = PatientAtFirst
        patch(minigrpo, "score_rollouts", stall)
    case "nothing":
        pass

if os.environ["RANK"] != os.environ["FAULT_RANK"]:
    # This rank gives torchrun five seconds to end it, before it shows an error of its own. A busy machine needs longer.
    yields = minigrpo.yield_to_torchrun
    minigrpo.yield_to_torchrun = lambda seconds: yields(100 * seconds)
minigrpo.main()
os._exit(0)
