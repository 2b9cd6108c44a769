"""What tests of several files read: made once, also where several processes of pytest-xdist run them."""

import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks share this machine's cores, and sums keep one order
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores it, and so would the runs
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Sums of single digits. The variable HOLD may name a file with the number of a step: that step is kept until the file is
# gone, and FILE.held appears.
REWARD = """
import os, time
def held(step):
    try:
        return open(os.environ["HOLD"]).read() == str(step)
    except (KeyError, OSError):
        return False
def right(completions, answer, trainer_state, **columns):
    while held(trainer_state.global_step):
        open(os.environ["HOLD"] + ".held", "w").close()
        time.sleep(0.01)
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""


def pytest_collection_modifyitems(items):
    """The long files first: what is left at the end is then small, and both workers end together."""
    first = ("test_run", "test_faults", "test_resume", "test_split", "test_colocate", "test_speed", "test_replay", "test_leave")
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would put the files with most tests first, which are short


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make) gives the folder that make(folder) has filled; who comes second waits for the first."""
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    base.mkdir(exist_ok=True)

    def once(name, make):
        folder, ready = base / name, base / f"{name}.ready"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                ready.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def tiny_model(once):
    """The built-in model as a folder: a run that is given it need not make its own."""
    import tiny
    return once("tiny", lambda folder: tiny.write_tiny_model(folder, seed=0))


@pytest.fixture(scope="session")
def reward(once):
    """Flags for a reward function that can be held: see REWARD."""
    folder = once("reward", lambda folder: (folder / "reward.py").write_text(REWARD))
    return ["--reward", f"{folder}/reward.py:right", "--reward_timeout", "1000"]


@pytest.fixture(scope="session")
def colocated(once, reward):
    """A run of four steps on two ranks with the real engine: (its folder, the flags that make another one like it).
    5 prompts over 2 ranks: their shares differ in size."""
    import ranks

    flags = ["--max_steps", "4", "--eval_steps", "2", "--save_steps", "2", "--prompts_per_step", "5", "--num_generations", "4",
             *reward]
    folder = once("colocated", lambda folder: ranks.finish(
        ranks.start(2, "minigrpo.py", "--colocate", *flags, "--out", folder / "run")))
    return folder / "run", flags
