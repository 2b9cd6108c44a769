"""Nothing hangs: faults on one of two CPU ranks end the whole job soon, told once; and two hosts are like one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranks
from test_resume import assert_same

from minigrpo import METRICS

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(max_steps=6, save_steps=2, eval_steps=0, seed=3, prompts_per_step=4, num_generations=4)
PATIENT = 600  # seconds, on a busy machine too; a collective would wait three times as long for a rank that is gone


def launch(out: Path, *torchrun, script="tests/fault.py", flags=(), **env) -> subprocess.Popen:
    """torchrun with a session of its own; what all ranks print goes to out.log."""
    with open(f"{out}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, script, "--out", str(out), *flags],
            cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def ended(process: subprocess.Popen, within: float = PATIENT) -> int:
    """The exit code; fails, and cleans up, where the process or a child of it is there any longer."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        return process.wait(within)
    finally:
        _, alive = psutil.wait_procs(children, timeout=60)
        for one in [*alive, *([psutil.Process(process.pid)] if process.poll() is None else [])]:
            one.kill()
        assert not alive, f"left running: {alive}"


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


FAULTS = {"engine": 1, "memory": 1, "disk": 0}  # on which rank


@pytest.fixture(scope="module")
def faulty(tiny_model, tmp_path_factory):
    """Runs with a fault at step 3, side by side, because they spend most of their time waiting: {fault: (folder, process)}."""
    made = {fault: tmp_path_factory.mktemp(fault) / "run" for fault in FAULTS}
    return {fault: (out, launch(out, "--standalone", "--nproc_per_node=2", flags=ranks.as_tiny(tiny_model, **SMALL),
                                FAULT=fault, FAULT_RANK=str(FAULTS[fault]), FAULT_STEP="4")) for fault, out in made.items()}


@pytest.mark.parametrize("fault, said", [
    ("engine", "RuntimeError: planted: the engine fell over"), ("memory", "planted: out of memory"),
    ("disk", "planted: no space left on device")])
def test_a_fault_on_one_rank_ends_all_and_is_told_once(faulty, fault, said):
    out, process = faulty[fault]
    rank = FAULTS[fault]
    assert ended(process) != 0
    text = Path(f"{out}.log").read_text()
    assert text.count(f"[rank{rank}]: Traceback") == 1 and said in text, text[-4000:]
    assert f"[rank{1 - rank}]: Traceback" not in text, text[-6000:]
    # The last complete checkpoint is there, and nothing was saved after the fault: step 3 failed, or what it wrote
    # beside the steps that followed.
    assert os.readlink(out / "latest") == "step_2"
    assert [row["step"] for row in rows(out)] == [0, 1, 2, *[3] * (fault == "disk")]


def test_a_stalled_rank_is_named_with_its_phase(tiny_model, tmp_path):
    out = tmp_path / "run"
    process = launch(out, "--standalone", "--nproc_per_node=2", flags=ranks.as_tiny(tiny_model, **SMALL, timeout_minutes=0.05),
                     FAULT="stall", FAULT_RANK="1", FAULT_STEP="3")
    assert ended(process) != 0
    text = Path(f"{out}.log").read_text()
    assert "Stalled: after 0:00:03 at the end of reward" in text, text[-4000:]
    assert "[Rank 0]: Ranks 1 failed to pass" in text, text[-4000:]


def test_a_mistake_that_only_one_rank_sees_is_said_once(tiny_model, tmp_path):
    (tmp_path / "reward.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ImportError('not on this host')\n"
        "def reward(completions, **columns):\n    return [0.0 for _ in completions]\n")
    out = tmp_path / "run"
    process = launch(out, "--standalone", "--nproc_per_node=2",
                     flags=ranks.as_tiny(tiny_model, **SMALL, reward=f"{tmp_path}/reward.py:reward"),
                     FAULT="nothing", FAULT_RANK="1", FAULT_STEP="0")
    assert ended(process) != 0
    text = Path(f"{out}.log").read_text()
    assert text.count("error: ") == 1 and "not on this host" in text, text[-4000:]
    assert "[rank0]: Traceback" not in text and "[rank1]: Traceback" not in text, text[-4000:]


def test_max_restarts_continues_after_a_crash(tiny_model, tmp_path):
    out = tmp_path / "run"
    process = launch(out, "--standalone", "--nproc_per_node=2", "--max-restarts=1",
                     flags=[*ranks.as_tiny(tiny_model, **SMALL), "--fresh"],
                     FAULT="crash", FAULT_RANK="1", FAULT_STEP="4")  # anew, but not after every crash
    assert ended(process) == 0, Path(f"{out}.log").read_text()[-4000:]
    assert "continues after update 2" in Path(f"{out}.log").read_text()
    assert [row["step"] for row in rows(out)] == list(range(7))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def two_hosts(out: Path, flags, **env) -> list[subprocess.Popen]:
    where = ("--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    return [launch(out, *where, script="minigrpo.py", flags=("--colocate", *flags), **env) for _ in range(2)]


def test_two_hosts_train_as_one_and_go_on_after_losing_one(colocated, tmp_path):
    """Two agents of torchrun with one rank each, real engines. One is killed with all it started, in the middle of the
    fourth step; the other ends by itself, and the same two commands go on to what an undisturbed run on one host leaves."""
    out, hold, (alone, flags) = tmp_path / "run", tmp_path / "hold", colocated
    hold.write_text("3")
    first, second = two_hosts(out, flags, HOLD=str(hold))
    deadline = time.time() + PATIENT
    while not Path(f"{hold}.held").exists():
        assert time.time() < deadline and first.poll() is second.poll() is None, Path(f"{out}.log").read_text()[-4000:]
        time.sleep(0.05)
    lost = psutil.Process(second.pid)
    for process in [lost, *lost.children(recursive=True)]:
        with contextlib.suppress(ProcessLookupError):  # the process that wrote the rollouts has ended
            os.kill(process.pid, signal.SIGKILL)
    second.wait()
    hold.unlink()
    assert ended(first) != 0
    assert len(rows(out)) == 3 and os.readlink(out / "latest") == "step_2"
    again = two_hosts(out, flags)
    assert [ended(process) for process in again] == [0, 0], Path(f"{out}.log").read_text()[-4000:]
    assert "continues after update 2" in Path(f"{out}.log").read_text()
    assert [row["step"] for row in rows(out)] == list(range(5)) and set(rows(out)[0]) == set(METRICS)
    assert max(row["logprob_gap/mean"] for row in rows(out)[:-1]) < 1e-5
    assert_same(out, alone)
