"""Kill, stop, start again: the same command continues, and nothing shows that it was ever interrupted."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("MINIGRPO_KILLS", 3))
STEPS = str(max(36, 5 * KILLS))  # a fast machine must not be through before the last kill
FLAGS = ["--max_steps", STEPS, "--save_steps", "3", "--eval_steps", "5", "--prompts_per_step", "6", "--num_generations",
         "4", "--save_rollouts", STEPS, "--max_completion_length", "3"]
VARYING = ("time/", "tokens_per_second", "mfu", "memory/")


def start(out: Path, *flags, ranks: int = 2) -> subprocess.Popen:
    log = open(f"{out}.log", "a")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv-backend=c10d",
         "--rdzv-endpoint=localhost:0", str(ROOT / "minigrpo.py"), "--out", str(out), *FLAGS, *flags],
        stdout=log, stderr=subprocess.STDOUT)


def finish(out: Path, process: subprocess.Popen, timeout: float = 200) -> str:
    code = process.wait(timeout)
    text = Path(f"{out}.log").read_text()
    assert code == 0, text[-3000:]
    return text


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The pids of torchrun's workers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "minigrpo.py" in Path(f"/proc/{pid}/cmdline").read_text()]


def wait_for(condition, seconds: float = 60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def what_a_run_leaves(out: Path) -> dict:
    """Weights, optimizer, metrics and rollouts, without what the clock decides."""
    kept = {str(file.relative_to(out)): file.read_bytes()
            for file in [*out.glob("step_*/**/*.safetensors"), *out.glob("rollouts/*.jsonl"), *out.glob("step_*/trainer.json")]}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept["metrics"] = [{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in rows]
    kept["latest"] = os.readlink(out / "latest")
    return kept


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(out, start(out))
    return out


def assert_same(disturbed: Path, undisturbed: Path) -> None:
    got, want = what_a_run_leaves(disturbed), what_a_run_leaves(undisturbed)
    for name in want.keys() | got.keys():
        text = (got.get(name), want.get(name))
        if name.endswith("trainer.json"):  # the result names the folder
            text = [t.replace(str(o).encode(), b"") for t, o in zip(text, (disturbed, undisturbed))]
        assert text[0] == text[1], name
    assert not list(disturbed.glob("*partial*"))


def test_killed_at_random_moments_it_ends_bitwise_the_same(undisturbed, tmp_path):
    """Kill -9 of torchrun and every rank; the moments spread over start, generate, update, write and rename."""
    out, rng, done = tmp_path / "run", random.Random(7), 0
    for attempt in range(40 * KILLS):
        process = start(out)
        wait_for(lambda: (out / "metrics.jsonl").exists() or process.poll() is not None)
        before = len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").exists() else 0
        moment = time.monotonic() + rng.uniform(1.0, 5.0)
        wait_for(lambda: time.monotonic() > moment or process.poll() is not None)
        if process.poll() is not None or done == KILLS:
            break
        for pid in [*ranks_of(process), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        done += 1
    finish(out, process)
    assert done == KILLS, f"the run ended after {done} kills (it had {before} rows): give it more steps"
    assert_same(out, undisturbed)


@pytest.mark.parametrize("moment", ["save_file", "rename", "symlink", "metrics"])
def test_killed_while_writing_it_ends_bitwise_the_same(undisturbed, tmp_path, moment):
    """Every process dies in the middle of a write: halfway through a file, or between two steps of a checkpoint."""
    out, trap = tmp_path / "run", tmp_path / "sitecustomize.py"
    trap.write_text(f"""
import os, pathlib, signal
def die(*a, **k):
    if not os.path.exists({str(tmp_path / 'died')!r}):
        open({str(tmp_path / 'died')!r}, 'w').close()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
def trapped(name, call, when):
    def wrapper(*a, **k):
        if when(*a, **k):
            if name == 'metrics':
                open({str(out / 'metrics.jsonl')!r}, 'a').write('{{"step": 7, "rew')
            if name == 'save_file':
                open(a[1], 'wb').write(b'half')
            die()
        return call(*a, **k)
    return wrapper
if os.environ.get('RANK') == '0':
    moment = {moment!r}
    if moment == 'rename':
        pathlib.Path.rename = trapped(moment, pathlib.Path.rename, lambda p, *a: 'step_6' in str(p))
    elif moment == 'symlink':
        pathlib.Path.symlink_to = trapped(moment, pathlib.Path.symlink_to, lambda p, t: t == 'step_6')
    elif moment == 'metrics':
        import json
        json.dumps = trapped(moment, json.dumps, lambda o, **k: isinstance(o, dict) and o.get('step') == 7 and 'reward' in o)
    else:
        import safetensors.torch
        safetensors.torch.save_file = trapped(moment, safetensors.torch.save_file, lambda t, f, **k: 'step_6' in str(f))
""")
    environment = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{tmp_path}:{environment}"
    try:
        process = start(out)
        assert process.wait(100) != 0 and (tmp_path / "died").exists()
    finally:
        os.environ["PYTHONPATH"] = environment
    assert json.loads((out / "latest" / "trainer.json").read_text())["step"] in (3, 6)
    time.sleep(2.5)  # the other rank sees within a second that torchrun is gone
    finish(out, start(out))
    assert_same(out, undisturbed)


@pytest.mark.parametrize("number, whom", [(signal.SIGTERM, "torchrun"), (signal.SIGINT, "one rank")])
def test_a_signal_saves_and_stops_and_the_same_command_continues(undisturbed, tmp_path, number, whom):
    out = tmp_path / "run"
    process = start(out)
    rows = out / "metrics.jsonl"
    wait_for(lambda: rows.exists() and len(rows.read_text().splitlines()) >= 4)
    os.kill(process.pid if whom == "torchrun" else ranks_of(process)[-1], number)
    code = process.wait(60)
    assert code == (1 if whom == "torchrun" else 0)  # torchrun that was signalled reports 1 whatever its ranks return
    state = json.loads((out / "latest" / "trainer.json").read_text())
    assert state["stopped"] and state["step"] == len(rows.read_text().splitlines()) < 36
    text = finish(out, start(out))
    assert f"stopped after update {state['step']}" in text and f"continues after update {state['step']}" in text
    for folder in (f"step_{state['step']}",):  # the stop's own checkpoint is one more than the undisturbed run has
        if not (undisturbed / folder).exists():
            assert not (out / folder).exists()  # --save_total_limit has removed it since
    assert_same(out, undisturbed)


@pytest.mark.parametrize("out", [["--out", "here"], ["--out=here"]])
def test_ctrl_c_on_train_sh_saves_and_exits_0(tmp_path, out):
    """A terminal signals the whole process group, train.sh and all that it started."""
    for file in [*ROOT.glob("*.py"), ROOT / "train.sh", *ROOT.glob("requirements*.txt")]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    for requirements in tmp_path.glob("requirements*.txt"):  # as if installed
        stamp = hashlib.sha256(requirements.read_bytes() + (tmp_path / "train.sh").read_bytes()).hexdigest()[:16]
        (tmp_path / f".venv/installed-{stamp}").touch()
    (tmp_path / "slow.py").write_text("import time\ndef f(completions, **k): time.sleep(1); return [len(c) for c in completions]\n")
    process = subprocess.Popen(["bash", "train.sh", "--no-colocate", "--reward", "slow.py:f", "--eval_steps", "0",
                                "--prompts_per_step", "2", *out], cwd=tmp_path, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows = tmp_path / "here/metrics.jsonl"
    wait_for(lambda: rows.exists() and len(rows.read_text().splitlines()) >= 2)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "the same command continues" in said, said[-3000:]
    assert json.loads((tmp_path / "here/latest/trainer.json").read_text())["stopped"]


def test_a_second_run_on_the_same_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    first = start(out, "--max_steps", "99999", ranks=1)
    wait_for(lambda: (out / "config.json").exists())
    holder = int((out / "lock").read_text())
    second = start(out, ranks=1)
    assert second.wait(60) == 1
    assert f"in use by process {holder}" in Path(f"{out}.log").read_text() and holder in ranks_of(first)
    first.terminate()
    first.wait(60)


def test_other_options_and_changed_data_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 8)
    out, flags = tmp_path / "run", ["--data", str(tmp_path / "p.jsonl"), "--max_steps", "99", "--save_steps", "1"]
    process = start(out, *flags, ranks=1)
    wait_for(lambda: (out / "latest").exists())
    for pid in [*ranks_of(process), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    other = start(out, *flags, "--learning_rate", "1e-4", ranks=1)
    assert other.wait(60) == 1 and "other options (learning_rate)" in Path(f"{out}.log").read_text()
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+3=", "answer": "4"}\n' * 8)
    changed = start(out, *flags, ranks=1)
    assert changed.wait(60) == 1 and "changed since" in Path(f"{out}.log").read_text()


def test_ranks_end_when_torchrun_is_gone(tmp_path):
    out = tmp_path / "run"
    process = start(out)
    wait_for(lambda: (out / "metrics.jsonl").exists())
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and "minigrpo" in Path(f"/proc/{pid}/cmdline").read_text()
                             for pid in ranks), 10)


def test_killed_with_the_real_engine_it_ends_bitwise_the_same(tmp_path):
    flags = ["--colocate", "--max_steps", "6", "--save_steps", "2", "--eval_steps", "3"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    undisturbed, process = start(whole, *flags), start(out, *flags)
    wait_for(lambda: (out / "latest").exists(), 200)
    for pid in [*ranks_of(process), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    finish(whole, undisturbed)
    text = finish(out, start(out, *flags))
    assert "continues after update" in text
    assert_same(out, whole)
