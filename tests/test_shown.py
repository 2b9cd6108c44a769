"""What a run shows beside its folder: completions on the console, metrics in TensorBoard and Weights & Biases."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

import config
from minigrpo import Console

ROOT = Path(__file__).resolve().parent.parent
ROW = {"step": 4, "reward": None, "time/step": 1.0, "completions/mean_length": 2.0, "logprob_gap/mean": 0.0,
       "time/generate": 0.0, "time/update": 0.0, "time/wake": 0.0, "time/sleep": 0.0}

# Packages that write down what is called. wandb: the history, of which the server keeps all but what is unfinished.
WANDB = """
import json, os, pathlib
LOG = pathlib.Path(os.environ["FAKE_LOG"])
class Error(Exception): pass
def init(**options):
    if os.environ.get("FAKE_LOGIN") == "no": raise Error("api_key not configured")
    return Online(options)
class Online:
    def __init__(self, options):
        self.id = options["id"]
        self.step = max([0, *(s + 1 for kind, id, s in entries() if kind == "log" and id == self.id)])
        self.write("init", {**options, "config": len(options["config"])})
    def write(self, kind, what):
        with LOG.open("a") as file: file.write(json.dumps([kind, self.id, what]) + "\\n")
    def log(self, values, step):
        assert values["step"] == step and None not in values.values()
        self.write("log", step)
    def finish(self): self.write("finish", None)
def entries(): return [json.loads(line) for line in LOG.open()] if LOG.exists() else []
"""


SMALL = dict(prompts_per_step=4, num_generations=4, eval_steps=0)


def run(model, out, *flags, packages=None, **env):
    """In a process of its own, which finds those packages."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, ROOT / "minigrpo.py", "--out", out, *ranks.as_tiny(model, **SMALL), *map(str, flags)],
        capture_output=True, text=True, timeout=600, cwd=out.parent,
        env={**clean, "PYTHONPATH": str(packages or ""), "FAKE_LOG": str(out.parent / "fake.log"), **env})


@pytest.fixture
def fake_wandb(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/wandb.py").write_text(WANDB)
    return tmp_path / "packages"


def test_wandb_sees_every_step_once_though_the_run_was_killed(tiny_model, tmp_path, fake_wandb):
    out, flags = tmp_path / "run", ("--report_to", "wandb", "--max_steps", 5, "--save_steps", 2)
    reward = tmp_path / "reward.py"  # the process dies in the update after step_2 was saved and row 2 was shown
    reward.write_text("import os\ndef die(completions, trainer_state, **columns):\n"
                      "    if trainer_state.global_step == 3 and not os.path.exists('died'):\n"
                      "        open('died', 'w').close(); os._exit(9)\n    return [0.0 for _ in completions]\n")
    flags += ("--reward", f"{reward}:die", "--reward_workers", 0)
    assert run(tiny_model, out, *flags, packages=fake_wandb).returncode == 9
    done = run(tiny_model, out, *flags, packages=fake_wandb)
    assert done.returncode == 0 and "continues after update 2" in done.stdout, done.stderr[-2000:]
    entries = [json.loads(line) for line in (tmp_path / "fake.log").read_text().splitlines()]
    assert [kind for kind, *_ in entries] == ["init", *["log"] * 3, "init", *["log"] * 3, "finish"]
    assert [step for kind, _, step in entries if kind == "log"] == [0, 1, 2, 3, 4, 5]
    assert {id for _, id, _ in entries} == {(out / "wandb_id").read_text()}
    first = entries[0][2]
    assert (first["project"], first["name"], first["resume"]) == ("minigrpo", "run", "allow") and first["config"] > 40
    assert run(tiny_model, out, *flags, "--fresh", packages=fake_wandb).returncode == 0
    entries = [json.loads(line) for line in (tmp_path / "fake.log").read_text().splitlines()][9:]
    assert [step for kind, _, step in entries if kind == "log"] == [0, 1, 2, 3, 4, 5] and entries[0][1] != first["id"]


def test_a_package_that_is_missing_is_named_before_anything_starts(tiny_model, tmp_path, fake_wandb):
    (tmp_path / "wandb").mkdir()  # what wandb leaves where it was used is no package
    for package in ("tensorboard", "wandb"):
        hide = f"import sys, types; sys.modules[{package!r}] = types.ModuleType({package!r})\n"  # also an installed one
        (tmp_path / "packages/sitecustomize.py").write_text(
            hide + f"import importlib.machinery as m; sys.modules[{package!r}].__spec__ = m.ModuleSpec({package!r}, None)\n")
        done = run(tiny_model, tmp_path / "run", "--report_to", package, packages=fake_wandb)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"--report_to {package} needs a package: pip install {package}" in done.stderr
        assert not (tmp_path / "run").exists()
    code, _, errors = ranks.program("--out", tmp_path / "run", "--report_to", "mlflow")
    assert code == 1 and "argument --report_to: invalid choice: 'mlflow'" in errors


def test_wandb_without_a_login_is_one_line(tiny_model, tmp_path, fake_wandb):
    done = run(tiny_model, tmp_path / "run", "--report_to", "wandb", packages=fake_wandb, FAKE_LOGIN="no")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--report_to wandb: Error: api_key not configured" in done.stderr


def test_nothing_is_imported_or_written_unless_asked_for(tiny_model, tmp_path, fake_wandb):
    for name in ("wandb", "tensorboard"):
        (fake_wandb / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    done = run(tiny_model, tmp_path / "run", "--max_steps", 1, packages=fake_wandb)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "run/tensorboard").exists() and not (tmp_path / "run/wandb_id").exists()


# ---- Completions on the console ----------------------------------------------------------------------------

def printed(rollouts, log_completions=0) -> list[str]:
    return Console(10, log_completions).text(ROW, rollouts).splitlines()


def completion(i, **changes):
    rollout = ranks.rollout(i, reward=float(i), advantage=i / 2)
    rollout.prompt, rollout.completion = f"prompt {i}", f"answer {i}"
    return dataclasses.replace(rollout, **changes)


def test_completions_are_printed_from_over_the_prompts():
    batch = [completion(i) for i in range(8)]
    assert len(printed(batch)) == 1
    assert printed(batch, log_completions=2)[1:] == [
        "  'prompt 0' → 'answer 0'  reward 0.0  advantage 0.000", "  'prompt 4' → 'answer 4'  reward 4.0  advantage 2.000"]
    assert len(printed(batch, log_completions=20)) == 9  # there are no more


def test_what_a_model_wrote_does_not_reach_the_terminal_as_it_is():
    [_, line] = printed([completion(0, prompt="p" * 500 + "\x1b[2J", completion="\x1b]0;x\x07\r\n\u202e\x9b\ud83d" * 99,
                                            reward=None)], log_completions=1)
    assert line.isprintable() and "\\x1b[2J" in line and "\\x07\\r\\n\\u202e\\x9b\\ud83d" in line and "reward None" in line
    assert line.startswith("  …'ppp") and "'…  reward" in line
    [_, line] = printed([completion(0, prompt="p" * 900, completion="c" * 900)], log_completions=1)
    assert line.count("p") == 80 and line.count("c") == 240


def test_the_last_message_is_the_prompt():
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    [_, line] = printed([completion(0, prompt=prompt)], log_completions=1)
    assert line.startswith("  '1+1?' → 'answer 0'")


def test_the_whole_program_prints_them(tiny_model, tmp_path):
    flags = ("--out", tmp_path / "run", *ranks.as_tiny(tiny_model, **SMALL))
    code, said, errors = ranks.program(*flags, "--max_steps", 2, "--log_completions", 3)
    assert code == 0, errors[-2000:]
    lines = [line for line in said.splitlines() if " → " in line and "advantage" in line]
    batch = [json.loads(line) for line in (tmp_path / "run/rollouts/step_0.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and lines[0] == (
        f"  {batch[0]['prompt']!r} → {batch[0]['completion']!r}  reward {batch[0]['reward']}  "
        f"advantage {batch[0]['advantage']:.3f}")
    assert ranks.program(*flags, "--log_completions", -1)[0] == 1


def test_what_is_shown_may_change_when_a_run_continues(tiny_model, tmp_path):
    """Where no folder is named it is the same one too."""
    def folder(*flags):
        return config.parse([*flags]).run_folder

    assert folder() == folder("--micro_batch_tokens", "99", "--recompute", "--save_steps", "7")
    assert folder() == folder("--log_completions", "2", "--report_to", "wandb", "--timeout_minutes", "9")
    assert folder() != folder("--seed", "2") and folder("--out", "a", "--seed", "2") == Path("a")
    flags = ("--out", tmp_path / "run", *ranks.as_tiny(tiny_model, **SMALL), "--max_steps", 1)
    assert ranks.program(*flags)[0] == 0
    code, said, _ = ranks.program(*flags, "--log_completions", 1)
    assert code == 0 and "holds a finished run" in said
