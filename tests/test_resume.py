"""Kill, stop, start again: the same command continues, and nothing shows that it was ever interrupted."""

import contextlib
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
import ranks

ROOT = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("MINIGRPO_KILLS", 3))
STEPS = max(18, 5 * KILLS)
PATIENT = 600  # seconds, for what takes a few where the machine is not busy


@pytest.fixture(scope="module")
def flags(tiny_model, reward) -> list[str]:
    return reward + ranks.as_tiny(tiny_model, max_steps=STEPS, save_steps=3, eval_steps=5, prompts_per_step=6, num_generations=4,
                         save_rollouts=STEPS, max_completion_length=3)


VARYING = ("time/", "tokens_per_second", "mfu", "memory/")


def start(out: Path, *flags, **env) -> subprocess.Popen:
    """On two ranks; what they print goes to out.log."""
    with open(f"{out}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d",
             "--rdzv-endpoint=localhost:0", str(ROOT / "minigrpo.py"), "--out", str(out), *flags],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **env})


def finish(out: Path, process: subprocess.Popen) -> str:
    code = process.wait(PATIENT)
    text = Path(f"{out}.log").read_text()
    assert code == 0, text[-3000:]
    return text


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The pids of torchrun's workers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "minigrpo.py" in Path(f"/proc/{pid}/cmdline").read_text()]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def wait_for(condition):
    end = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def rows_in(out: Path) -> int:
    return (out / "metrics.jsonl").read_bytes().count(b"\n") if (out / "metrics.jsonl").exists() else 0


def what_a_run_leaves(out: Path) -> dict:
    """Weights, optimizer, metrics and rollouts, without what the clock decides."""
    kept = {str(file.relative_to(out)): file.read_bytes()
            for file in [*out.glob("step_*/**/*.safetensors"), *out.glob("rollouts/*.jsonl"), *out.glob("step_*/trainer.json")]}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept["metrics"] = [{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in rows]
    kept["latest"] = os.readlink(out / "latest")
    return kept


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(out, start(out, *flags))
    return out


def assert_same(disturbed: Path, undisturbed: Path) -> None:
    got, want = what_a_run_leaves(disturbed), what_a_run_leaves(undisturbed)
    for name in want.keys() | got.keys():
        text = (got.get(name), want.get(name))
        if name.endswith("trainer.json"):  # the result names the folder
            text = [t.replace(str(o).encode(), b"") for t, o in zip(text, (disturbed, undisturbed))]
        assert text[0] == text[1], name
    assert not list(disturbed.glob("*partial*"))


def test_killed_at_random_moments_it_ends_bitwise_the_same(flags, undisturbed, tmp_path):
    """Kill -9 of torchrun and every rank; the moments spread over start, generate, update, write and rename."""
    out, rng, hold = tmp_path / "run", random.Random(7), tmp_path / "hold"
    hold.write_text(str(STEPS - 1))  # it is not through before the last kill

    def starts() -> int:
        return Path(f"{out}.log").read_text().count("a checkpoint in about")

    for kill in range(KILLS):
        process, before = start(out, *flags, HOLD=str(hold)), starts()
        if kill % 4 == 1:  # while it starts
            moment = time.monotonic() + rng.uniform(1.0, 6.0)
            wait_for(lambda: time.monotonic() > moment or process.poll() is not None)
        else:  # after some steps
            wait_for(lambda: starts() > before or process.poll() is not None)
            wanted = min(rows_in(out) + rng.randrange(1, 4), STEPS - 1)
            wait_for(lambda: rows_in(out) >= wanted or process.poll() is not None)
            time.sleep(rng.uniform(0, 0.1))
        assert process.poll() is None, Path(f"{out}.log").read_text()[-3000:]
        workers = ranks_of(process)
        for pid in [*workers, process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not any(map(alive, workers)))
    finish(out, start(out, *flags))
    assert_same(out, undisturbed)


TRAP = """
import os, pathlib, signal
moment, out, died = (os.environ.get(name, "") for name in ("TRAP_MOMENT", "TRAP_OUT", "TRAP_DIED"))
def die():
    open(died, 'w').close()
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
def trapped(call, when):
    def wrapper(*a, **k):
        if when(*a, **k):
            if moment == 'metrics':
                open(out + '/metrics.jsonl', 'a').write('{"step": 13, "rew')
            if moment == 'save_file':
                open(a[1], 'wb').write(b'half')
            die()
        return call(*a, **k)
    return wrapper
if os.environ.get('RANK') == '0':
    if moment == 'rename':
        pathlib.Path.rename = trapped(pathlib.Path.rename, lambda p, *a: 'step_9' in str(p))
    elif moment == 'symlink':
        pathlib.Path.symlink_to = trapped(pathlib.Path.symlink_to, lambda p, t: t == 'step_12')
    elif moment == 'metrics':
        import json
        json.dumps = trapped(json.dumps, lambda o, **k: isinstance(o, dict) and o.get('step') == 13 and 'reward' in o)
    elif moment == 'save_file':
        import safetensors.torch
        safetensors.torch.save_file = trapped(safetensors.torch.save_file, lambda t, f, **k: 'step_6' in str(f))
"""


def test_killed_while_writing_it_ends_bitwise_the_same(flags, undisturbed, tmp_path):
    """Every process dies in the middle of a write: halfway through a file, between two steps of a checkpoint, or in a row.
    One run, which continues after each."""
    out = tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(TRAP)
    for moment, left in {"save_file": (3,), "rename": (6,), "symlink": (9, 12), "metrics": (12,)}.items():
        died = tmp_path / moment
        process = start(out, *flags, PYTHONPATH=str(tmp_path), TRAP_MOMENT=moment, TRAP_OUT=str(out), TRAP_DIED=str(died))
        workers = []
        while process.poll() is None:
            workers = ranks_of(process) or workers
            time.sleep(0.05)
        assert process.returncode == -signal.SIGKILL and died.exists(), Path(f"{out}.log").read_text()[-3000:]
        assert json.loads((out / "latest" / "trainer.json").read_text())["step"] in left
        wait_for(lambda: not any(map(alive, workers)))  # the other rank sees within a second that torchrun is gone
    assert (out / "metrics.jsonl").read_text().endswith('"rew')
    finish(out, start(out, *flags))
    assert_same(out, undisturbed)


def test_a_signal_saves_and_stops_and_the_same_command_continues(flags, undisturbed, tmp_path):
    """SIGTERM to torchrun, and in what continues SIGINT to one rank."""
    out = tmp_path / "run"
    for step, number, whom in ((4, signal.SIGTERM, "torchrun"), (9, signal.SIGINT, "one rank")):
        hold = tmp_path / f"{step}"
        hold.write_text(str(step))
        process = start(out, *flags, HOLD=str(hold))
        wait_for(lambda: Path(f"{hold}.held").exists())
        os.kill(process.pid if whom == "torchrun" else ranks_of(process)[-1], number)
        if whom == "torchrun":
            wait_for(lambda: "closing signal" in Path(f"{out}.log").read_text())  # it passes it on
        time.sleep(0.1)
        hold.unlink()
        code = process.wait(PATIENT)
        assert code == (1 if whom == "torchrun" else 0)  # torchrun that was signalled reports 1 whatever its ranks return
        state = json.loads((out / "latest" / "trainer.json").read_text())
        assert state["stopped"] and state["step"] == rows_in(out) == step + 1
    text = finish(out, start(out, *flags))
    for step in (5, 10):
        assert f"stopped after update {step}" in text and f"continues after update {step}" in text
        # The stop's own checkpoint is one more than the undisturbed run has; --save_total_limit has removed it since.
        assert (undisturbed / f"step_{step}").exists() or not (out / f"step_{step}").exists()
    assert_same(out, undisturbed)


def copy_of_train_sh(folder: Path, python: str) -> None:
    """train.sh with all that it needs; python: what stands for the interpreter."""
    for file in [*ROOT.glob("*.py"), ROOT / "train.sh", *ROOT.glob("requirements*.txt")]:
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").write_text(f"#!/bin/sh\n{python}\n")
    (folder / ".venv/bin/python").chmod(0o755)
    for requirements in folder.glob("requirements*.txt"):  # as if installed
        stamp = hashlib.sha256(requirements.read_bytes() + (folder / "train.sh").read_bytes()).hexdigest()[:16]
        (folder / f".venv/installed-{stamp}").touch()


def test_ctrl_c_on_train_sh_saves_and_exits_0(flags, tmp_path):
    """A terminal signals the whole process group, train.sh and all that it started."""
    copy_of_train_sh(tmp_path, f'exec {sys.executable} "$@"')
    (tmp_path / "slow.py").write_text("import time\ndef f(completions, **k): time.sleep(0.5); return [len(c) for c in completions]\n")
    process = subprocess.Popen(["bash", "train.sh", *flags, "--no-colocate", "--reward", "slow.py:f", "--eval_steps", "0",
                                "--prompts_per_step", "2", "--max_steps", "9999", "--out", "here"], cwd=tmp_path,
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: rows_in(tmp_path / "here") >= 2)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENT)
    assert process.returncode == 0 and "the same command continues" in said, said[-3000:]
    assert json.loads((tmp_path / "here/latest/trainer.json").read_text())["stopped"]


@pytest.mark.parametrize("out", [["--out", "here"], ["--out=here"], []])
def test_train_sh_is_0_where_the_run_has_saved_and_torchruns_number_elsewhere(tmp_path, out):
    """In place of python a script that writes what a run leaves, and ends as torchrun does after a signal."""
    copy_of_train_sh(tmp_path, """mkdir -p $WHERE
test -z $STOPPED || echo '"stopped": '$STOPPED > $WHERE/trainer.json
exit 3""")
    where = "here/latest" if out else "runs/tiny/latest"
    for stopped, code in (("", 3), ("true", 0), ("false", 3)):
        done = subprocess.run(["bash", "train.sh", "--seed", "1", *out], cwd=tmp_path, env={**os.environ, "STOPPED": stopped, "WHERE": where})
        assert done.returncode == code, stopped


def test_what_continues_no_run_is_refused_and_ranks_end_when_torchrun_is_gone(flags, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 8)
    out = tmp_path / "run"
    same = [*flags, "--data", str(tmp_path / "p.jsonl"), "--max_steps", "99999", "--save_steps", "1", "--out", str(out)]

    def refusal(*more) -> str:
        code, _, said = ranks.program(*same, *more)
        assert code == 1
        return said

    process = start(out, *same)
    wait_for(lambda: (out / "latest").exists())
    holder, workers = int((out / "lock").read_text()), ranks_of(process)
    assert f"in use by process {holder}" in refusal() and len(workers) == 2 and holder in workers
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, workers)))
    wait_for(lambda: "in use by" not in refusal("--learning_rate", "1e-4"))  # the last thread of the process has the lock
    assert "other options (learning_rate)" in refusal("--learning_rate", "1e-4")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+3=", "answer": "4"}\n' * 8)
    assert "changed since" in refusal()
