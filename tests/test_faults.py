"""Nothing hangs: faults on one of two CPU ranks end the whole job soon, told once; and two hosts are like one."""

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

from minigrpo import METRICS

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("--max_steps", "6", "--save_steps", "2", "--eval_steps", "0", "--seed", "3")


def launch(out: Path, *torchrun, script="tests/fault.py", flags=(), **env) -> subprocess.Popen:
    """torchrun with a session of its own; what all ranks print goes to out.log."""
    with open(f"{out}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, script, *FLAGS, "--out", str(out), *flags],
            cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def ended(process: subprocess.Popen, within: float) -> int:
    """The exit code; fails, and cleans up, where the process or a child of it is there any longer."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        return process.wait(within)
    finally:
        _, alive = psutil.wait_procs(children, timeout=5)
        for one in [*alive, *([psutil.Process(process.pid)] if process.poll() is None else [])]:
            one.kill()
        assert not alive, f"left running: {alive}"


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("fault, rank, said", [
    ("engine", 1, "RuntimeError: planted: the engine fell over"), ("memory", 1, "planted: out of memory"),
    ("disk", 0, "planted: no space left on device")])
def test_a_fault_on_one_rank_ends_all_and_is_told_once(tmp_path, fault, rank, said):
    out, began = tmp_path / "run", time.time()
    process = launch(out, "--standalone", "--nproc_per_node=2", FAULT=fault, FAULT_RANK=str(rank), FAULT_STEP="4")
    assert ended(process, 90) != 0
    text = Path(f"{out}.log").read_text()
    assert text.count(f"[rank{rank}]: Traceback") == 1 and said in text, text[-4000:]
    assert f"[rank{1 - rank}]: Traceback" not in text, text[-6000:]
    failed = max(path.stat().st_mtime for path in out.rglob("*"))
    assert time.time() - failed < 60 and time.time() - began < 90
    # The last complete checkpoint is there, and nothing was saved after the fault: step 3 failed, or what it wrote
    # beside the steps that followed.
    assert os.readlink(out / "latest") == "step_2"
    assert [row["step"] for row in rows(out)] == [0, 1, 2, *[3] * (fault == "disk")]


def test_a_stalled_rank_is_named_with_its_phase(tmp_path):
    out = tmp_path / "run"
    process = launch(out, "--standalone", "--nproc_per_node=2", flags=("--timeout_minutes", "0.2"),
                     FAULT="stall", FAULT_RANK="1", FAULT_STEP="3")
    assert ended(process, 120) != 0
    text = Path(f"{out}.log").read_text()
    assert "Stalled: after 0:00:12 at the end of reward" in text, text[-4000:]
    assert "[Rank 0]: Ranks 1 failed to pass" in text, text[-4000:]


def test_a_mistake_that_only_one_rank_sees_is_said_once(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ImportError('not on this host')\n"
        "def reward(completions, **columns):\n    return [0.0 for _ in completions]\n")
    out = tmp_path / "run"
    process = launch(out, "--standalone", "--nproc_per_node=2", flags=("--reward", f"{tmp_path}/reward.py:reward"),
                     FAULT="nothing", FAULT_RANK="0", FAULT_STEP="0")
    assert ended(process, 60) != 0
    text = Path(f"{out}.log").read_text()
    assert text.count("error: ") == 1 and "not on this host" in text, text[-4000:]
    assert "[rank0]: Traceback" not in text and "[rank1]: Traceback" not in text, text[-4000:]


def test_max_restarts_continues_after_a_crash(tmp_path):
    out = tmp_path / "run"
    process = launch(out, "--standalone", "--nproc_per_node=2", "--max-restarts=1", flags=("--fresh",),
                     FAULT="crash", FAULT_RANK="1", FAULT_STEP="4")  # anew, but not after every crash
    assert ended(process, 120) == 0, Path(f"{out}.log").read_text()[-4000:]
    assert "continues after update 2" in Path(f"{out}.log").read_text()
    assert [row["step"] for row in rows(out)] == list(range(7))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def two_hosts(out: Path, *flags) -> list[subprocess.Popen]:
    where = ("--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    return [launch(out, *where, script="minigrpo.py", flags=("--colocate", *flags)) for _ in range(2)]


def test_two_hosts_train_as_one_and_go_on_after_losing_one(tmp_path):
    """Two agents of torchrun with one rank each, real engines. One is killed with all it started; the other ends by
    itself, and the same two commands go on to the weights of an undisturbed run on one host."""
    out, alone = tmp_path / "run", tmp_path / "alone"
    flags = ("--max_steps", "12")  # the last --max_steps counts
    one_host = launch(alone, "--standalone", "--nproc_per_node=2", script="minigrpo.py", flags=("--colocate", *flags))
    assert ended(one_host, 240) == 0, Path(f"{alone}.log").read_text()[-4000:]
    first, second = two_hosts(out, *flags)
    deadline = time.time() + 180
    while not (out / "latest").exists() or len(rows(out)) < 3:
        assert time.time() < deadline and first.poll() is second.poll() is None, Path(f"{out}.log").read_text()[-4000:]
        time.sleep(0.05)
    lost = psutil.Process(second.pid)
    for process in [lost, *lost.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)
    second.wait()
    assert ended(first, 60) != 0
    assert len(rows(out)) < 12 and os.readlink(out / "latest") != "step_12"
    again = two_hosts(out, *flags)
    assert [ended(process, 240) for process in again] == [0, 0], Path(f"{out}.log").read_text()[-4000:]
    assert "continues after update" in Path(f"{out}.log").read_text()
    assert [row["step"] for row in rows(out)] == list(range(13)) and set(rows(out)[0]) == set(METRICS)
    assert max(row["logprob_gap/mean"] for row in rows(out)[:-1]) < 1e-5
    assert (out / "latest/model.safetensors").read_bytes() == (alone / "latest/model.safetensors").read_bytes()
