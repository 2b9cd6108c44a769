"""The program as a user starts it: the bare command with the real engine, the run folder, errors in plain words."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import transformers
from checkpoints import write_checkpoint, write_tokenizer
from test_colocate import torchrun

import tiny
from data import Tokenizer, load_prompts
from engines import sample
from minigrpo import METRICS
from model import Policy

ROOT = Path(__file__).resolve().parent.parent
STEPS = 200


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The bare command on two CPU ranks; only the folder is named, so that nothing is left behind. With fewer than its 200
    steps it does not always come to 90 %."""
    out = tmp_path_factory.mktemp("bare")
    result = torchrun(2, ROOT / "minigrpo.py", "--colocate", "--out", out / "run")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return out / "run", result.stdout


def test_bare_command_learns_to_add(bare):
    run, console = bare
    metrics = rows(run)
    assert metrics[0]["eval/accuracy"] < 0.5 and metrics[-1]["eval/accuracy"] > 0.9
    assert [row["step"] for row in metrics] == list(range(STEPS + 1))
    assert all(set(row) == set(METRICS) for row in metrics)
    lines = [line for line in console.splitlines() if line.startswith("step ")]
    assert len(lines) == STEPS and all(word in lines[0] for word in (
        "reward", "accuracy", "length", "gap", "generate", "update", "handoff", "left"))
    assert "supervised" in console and f"→ {metrics[-1]['eval/accuracy']:.1%}" in console and f"step_{STEPS}" in console


def test_bare_command_h1_and_h2_at_every_step(bare):
    metrics = rows(bare[0])
    assert max(row["logprob_gap/mean"] for row in metrics[:-1]) < 1e-5
    assert [row["weight_version"] for row in metrics] == [row["step"] for row in metrics]
    assert all(row["ess"] > 0.999 and row["skipped_updates"] == 0 for row in metrics[:-1])


def test_rollouts_are_kept_for_the_last_steps(bare):
    folder = bare[0] / "rollouts"
    assert {p.name for p in folder.iterdir()} == {f"step_{i}.jsonl" for i in range(STEPS - 10, STEPS)}
    rollouts = [json.loads(line) for line in (folder / f"step_{STEPS - 1}.jsonl").read_text().splitlines()]
    assert [r["slot"] for r in rollouts] == list(range(32 * 16))
    for r in rollouts:
        a, b = r["prompt"].rstrip("=").split("+")
        numbers = re.findall(r"\d+", r["completion"])
        assert r["reward"] == bool(numbers and int(numbers[-1]) == int(a) + int(b))
        assert len(r["completion_ids"]) == len(r["sampler_logps"]) == len(r["trainer_logps"])
        assert max(abs(a - b) for a, b in zip(r["sampler_logps"], r["trainer_logps"])) < 1e-4
        assert r["truncated"] == (r["completion_ids"][-1] != 12) and r["weight_version"] == STEPS - 1


def test_saved_model_loads_in_transformers_and_vllm_with_the_accuracy_that_was_printed(bare, tmp_path):
    run, _ = bare
    folder = (run / "latest").resolve()
    assert folder.name == f"step_{STEPS}" and not list(run.glob("*.partial"))
    tokenizer = Tokenizer(folder)
    prompts = load_prompts("digits", tokenizer, max_prompt_length=8, rows=tiny.rows("digits")).train
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    right = 0
    for prompt in prompts:
        ids = theirs.generate(torch.tensor([prompt.token_ids]), max_new_tokens=4, do_sample=False, eos_token_id=12,
                              pad_token_id=13)[0, len(prompt.token_ids):]
        right += tokenizer.decode(ids.tolist()) == prompt.columns["answer"]
    accuracy = rows(run)[-1]["eval/accuracy"]
    assert abs(right / len(prompts) - accuracy) <= 0.01  # a tie between two tokens may fall the other way
    program = f"""
import json
from vllm import LLM, SamplingParams
prompts = json.loads({json.dumps(json.dumps([p.token_ids for p in prompts]))})
llm = LLM({str(folder)!r}, skip_tokenizer_init=True, enforce_eager=True, max_model_len=32, dtype="float32")
outs = llm.generate([dict(prompt_token_ids=p) for p in prompts], use_tqdm=False,
                    sampling_params=SamplingParams(temperature=0, max_tokens=4, detokenize=False, stop_token_ids=[12]))
print("IDS", json.dumps([list(o.outputs[0].token_ids) for o in outs]))
"""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    ids = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("IDS"))[4:])
    answers = [tokenizer.decode(i) == p.columns["answer"] for i, p in zip(ids, prompts)]
    assert abs(sum(answers) / len(prompts) - accuracy) <= 0.01


def test_without_vllm_and_torchrun_and_a_finished_run_says_so(tmp_path, monkeypatch):
    """python minigrpo.py; the commands after the first run in this process."""
    small = ("--prompts_per_step", "4", "--num_generations", "4")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    first = subprocess.run([sys.executable, ROOT / "minigrpo.py", *small, "--max_steps", "2"], capture_output=True, text=True,
                           cwd=tmp_path, timeout=600, env=environment)
    assert first.returncode == 0 and "done: accuracy" in first.stdout, first.stderr[-2000:]
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("tiny-digits-")
    before = (run / "metrics.jsonl").read_bytes()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tiny.WARM_START, "steps", 2)
    code, said, _ = ranks.program(*small, "--max_steps", 2)
    assert code == 0 and "finished run" in said and "→" in said
    assert (run / "metrics.jsonl").read_bytes() == before
    code, _, _ = ranks.program(*small, "--max_steps", 1, "--reward", "gsm8k", "overlong")  # another command: its own folder
    assert code == 0 and len(list((tmp_path / "runs").iterdir())) == 2
    code, said, _ = ranks.program(*small, "--max_steps", 2, "--fresh")
    assert code == 0 and "done: accuracy" in said


def test_prompt_files_and_a_reward_file_written_for_trl(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def short(prompts, completions, completion_ids, level, hint, trainer_state=None, log_metric=None, **kwargs):\n"
        "    assert hint == [None if p[0] in '012' else 'h' for p in prompts]\n"
        "    assert len(prompts) == len(completions) == len(completion_ids) == len(level) == 4\n"
        "    return [len(c) / 10 + l for c, l in zip(completions, level)]\n")
    lines = [json.dumps({"prompt": f"{i}+1=", "level": i} | ({"hint": "h"} if i > 2 else {})) + "\n" for i in range(5)]
    (tmp_path / "p.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "q.jsonl").write_text("".join(lines[3:]))
    code, _, errors = ranks.program(*ranks.as_tiny(tiny_model), "--data", "p.jsonl", "q.jsonl", "--reward", "reward.py:short", "overlong",
                                    "--prompts_per_step", 3, "--num_generations", 4, "--max_steps", 2, "--stop", "nowhere", "1")
    assert code == 0, errors[-2000:]
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("tiny-p+q-")
    seen = [json.loads(line) for step in range(2) for line in (run / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
    for r in seen:
        assert r["parts"]["short"] == pytest.approx(len(r["completion"]) / 10 + int(r["prompt"][0]))
        assert r["parts"]["overlong"] == -(len(r["completion_ids"]) == 4)  # of 3 tokens: 4/5 of 4 are more
        assert "1" not in r["completion"][:-1]  # the stop string
        assert r["truncated"] == (r["completion_ids"][-1] not in (1, 12)) and r["truncated"] <= (len(r["completion_ids"]) == 4)
    assert any(r["completion_ids"][-1] == 1 for r in seen)
    assert {r["prompt"] for r in seen} == {f"{i}+1=" for i in range(5)}
    assert len(rows(run)) == 3 and rows(run)[0]["eval/accuracy"] is None


def test_rewards_know_the_step_at_evaluation_too_and_an_epoch_is_the_data_once(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def f(completions, trainer_state, **columns):\n"
                                        "    done = trainer_state.global_step / trainer_state.max_steps\n"
                                        "    return [(done + trainer_state.epoch) / 2 for _ in completions]\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n' * 16)
    code, _, errors = ranks.program(*ranks.as_tiny(tiny_model), "--data", "p.jsonl", "--eval_data", "p.jsonl", "--reward", "reward.py:f",
                                    "--prompts_per_step", 2, "--max_steps", -1, "--dynamic_sampling_rounds", 1, "--eval_steps", 1,
                                    "--out", "run")
    assert code == 0, errors[-2000:]
    assert [row["eval/accuracy"] for row in rows(tmp_path / "run")] == [0, 0.25, 0.5, 0.75, 1]  # 16 prompts, 4 a step
    assert [row["reward"] for row in rows(tmp_path / "run")][:-1] == [0, 0.25, 0.5, 0.75]


def test_a_recorded_sample_is_drawn_again_from_its_seed(tiny_model, tmp_path):
    code, _, errors = ranks.program(*ranks.as_tiny(tiny_model), "--max_steps", 2, "--prompts_per_step", 4, "--num_generations", 4,
                                    "--eval_steps", 0, "--save_steps", 1, "--out", tmp_path / "run")
    assert code == 0, errors[-2000:]
    drawn = set()
    for step, weights in enumerate((tiny_model, tmp_path / "run/step_1")):
        policy = Policy.from_folder(weights)
        for line in (tmp_path / f"run/rollouts/step_{step}.jsonl").read_text().splitlines():
            r = json.loads(line)
            [(ids, logps)] = sample(policy, [r["prompt_ids"]], 4, 1.0, [r["seed"]], [12])
            assert ids == r["completion_ids"] and logps == pytest.approx(r["sampler_logps"], abs=1e-5)
            drawn.add(r["seed"])
    assert len(drawn) == 2 * 4 * 4  # each its own, of 62 bits
    assert 2**60 < max(drawn) < 2**62


@pytest.mark.parametrize("flags, words", [
    (["--data", "none.jsonl"], ["none.jsonl"]),
    (["--model", "nowhere"], ["nowhere", "no such folder"]),
    (["--colocate"], ["torchrun --nproc_per_node"]),
    (["--max_completion_length", 100], ["--max_completion_length 100", "64"])])
def test_mistakes_are_said_in_one_line(tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tiny.WARM_START, "steps", 2)
    code, _, errors = ranks.program(*flags)
    assert code == 1 and "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line


GSM8K = [{"question": f"Tom has {i} apples and buys {i + 1} more. How many?", "answer": f"He has {i}+{i + 1}.\n#### {2 * i + 1}"}
         for i in range(9)]
MATH = [{"problem": rf"What is $\frac{{{i}}}{{2}}$?", "solution": rf"It is $\boxed{{\frac{{{i}}}{{2}}}}$.", "level": "Level 1"}
        for i in range(9)]


@pytest.mark.parametrize("family, rows_of_data, reward", [("qwen3-tied", GSM8K, "gsm8k"), ("llama3-rope", MATH, "math")])
def test_whole_loop_of_other_families_and_files_with_the_real_engine(tmp_path, family, rows_of_data, reward):
    model = tmp_path / "model"
    model.mkdir()
    write_checkpoint(model, family, scale=3.0, vocab_size=320)
    write_tokenizer(model)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_data))
    turns = [[{"role": "user", "content": f"What is {i} + 1?"}, {"role": "assistant", "content": f"{i + 1}, I think."},
              {"role": "user", "content": "Are you sure?"}] for i in range(9)]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in turns))
    done = torchrun(1, ROOT / "minigrpo.py", "--colocate", "--model", model, "--data", tmp_path / "data.jsonl", tmp_path / "turns.jsonl",
                    "--reward", reward, "format", "length", "--reward_weights", 1, 0.1, 0.1, "--max_steps", 2,
                    "--prompts_per_step", 3, "--num_generations", 4, "--max_completion_length", 24,
                    "--max_prompt_length", 200, "--system_prompt", "Think first.", "--out", tmp_path / "run",
                    "--eval_data", tmp_path / "data.jsonl", "--learning_rate", "1e-4")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    metrics = rows(tmp_path / "run")
    assert len(metrics) == 3 and max(row["logprob_gap/mean"] for row in metrics[:-1]) < 1e-5
    assert metrics[-1]["eval/accuracy"] is not None
    made = [json.loads(line) for step in range(2) for line in (tmp_path / f"run/rollouts/step_{step}.jsonl").read_text().splitlines()]
    assert {tuple(m["role"] for m in r["prompt"]) for r in made} == {
        ("system", "user"), ("system", "user", "assistant", "user")}
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    for r in made:
        assert set(r["parts"]) == {reward, "format", "length"}
        assert r["prompt_ids"] == theirs.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False)
        assert r["prompt"][1:] in turns or len(r["prompt"]) == 2
    assert (tmp_path / "run" / "latest" / "config.json").read_bytes() == (model / "config.json").read_bytes()
