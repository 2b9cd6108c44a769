"""Learning rates, the division of work, the command line and the watch on a run's numbers, by hand."""

import itertools
import random
import sys
import types

import pytest
import ranks

import minigrpo
from config import Config, check, parse
from minigrpo import LOSSES, Health, RunError, balance, learning_rate_at, pack


# ---- Learning rates ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule, rates", [
    ("constant", [1, 2, 3, 4, 4, 4, 4, 4]),
    ("linear", [1, 2, 3, 4, 4, 3, 2, 1]),  # four steps up, then a quarter less each, towards 0 after the last
    ("cosine", [1, 2, 3, 4, 4, 0.4 + 3.6 * (1 + 0.5**0.5) / 2, 2.2, 0.4 + 3.6 * (1 - 0.5**0.5) / 2])])
def test_learning_rates_by_hand(schedule, rates):
    c = Config(learning_rate=4.0, warmup_steps=4, lr_scheduler_type=schedule, min_lr_rate=0.1)
    assert [learning_rate_at(step, 8, c) for step in range(8)] == pytest.approx(rates)


def test_learning_rates_without_warm_up_and_with_nothing_else():
    c = Config(learning_rate=2.0, lr_scheduler_type="linear")
    assert [learning_rate_at(step, 2, c) for step in range(2)] == [2.0, 1.0]
    c = Config(learning_rate=2.0, warmup_steps=2, lr_scheduler_type="cosine", min_lr_rate=0.0)
    assert [learning_rate_at(step, 2, c) for step in range(3)] == [1.0, 2.0, 2.0]
    c = Config(learning_rate=2.0, lr_scheduler_type="cosine", min_lr_rate=0.25)
    assert learning_rate_at(4, 4, c) == pytest.approx(0.5)


# ---- The division of work ----------------------------------------------------------------------------------

def test_balance_and_pack_by_hand():
    assert balance([5, 9, 5, 2], 2) == [[1, 3], [0, 2]]  # 9 | 5 + 5, and the 2 joins the 9
    assert balance([1, 2], 3) == [[1], [0], []] and balance([], 2) == [[], []]
    assert pack([5, 9, 5, 2], 10) == [[1], [0, 2], [3]] and pack([5, 30, 5], 10) == [[1], [0, 2]]
    assert pack([6, 5, 4, 3], 10) == [[0, 2], [1, 3]] and pack([], 9) == []  # the 4 goes back to the first


@pytest.mark.parametrize("seed", range(20))
def test_division_loses_nothing_and_keeps_to_the_budget(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(0, 50))]
    for n in (1, 2, 3, 8):
        parts = balance(lengths, n)
        loads = [sum(lengths[i] for i in part) for part in parts]
        assert len(parts) == n and sorted(itertools.chain(*parts)) == list(range(len(lengths)))
        assert max(loads) - min(loads) <= max(lengths, default=0)
        assert parts == balance(list(lengths), n)
    for budget in (1, 30, 64, 10**6):
        bins = pack(lengths, budget)
        assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
        sizes = [sum(lengths[i] for i in b) for b in bins]
        assert all(size <= budget or len(b) == 1 for size, b in zip(sizes, bins))
        assert sum(size <= budget / 2 for size in sizes) <= 1  # two half-empty ones would have been one
        assert bins == pack(list(lengths), budget)


def test_sums_add_up_and_maxima_do_not():
    most = "logprob_gap/max"
    parts = [{"a": 1, most: 5.0}, {}, {"a": 2, most: 3.0}, {"a": 4, most: 4.0}]
    assert minigrpo.add_up(parts) == {"a": 7, most: 5.0} and minigrpo.add_up([]) == {}


# ---- The command line --------------------------------------------------------------------------------------

REFUSED = [  # flags, and what the message must hold: the flag, and something that works
    (["--num_generations", "1"], ["--num_generations 1", "2 or more"]),
    (["--num_generations", "0"], ["--num_generations 0", "2 or more"]),
    (["--temperature", "0"], ["--temperature 0", "0.01 or more"]),
    (["--temperature", "-1"], ["--temperature -1", "0.01 or more"]),
    (["--prompts_per_step", "0"], ["--prompts_per_step 0", "1 or more"]),
    (["--max_completion_length", "0"], ["--max_completion_length 0", "1 or more"]),
    (["--max_prompt_length", "0"], ["--max_prompt_length 0", "1 or more"]),
    (["--micro_batch_tokens", "0"], ["--micro_batch_tokens 0", "1 or more"]),
    (["--warmup_steps", "-1"], ["--warmup_steps -1", "0 or more"]),
    (["--eval_steps", "-1"], ["--eval_steps -1", "0 or more"]),
    (["--save_rollouts", "-1"], ["--save_rollouts -1", "0 or more"]),
    (["--save_steps", "0"], ["--save_steps 0", "1 or more"]),
    (["--save_total_limit", "0"], ["--save_total_limit 0", "1 or more"]),
    (["--reward_workers", "-1"], ["--reward_workers -1", "0 or more"]),
    (["--learning_rate", "0"], ["--learning_rate 0", "1e-06"]),
    (["--learning_rate", "nan"], ["--learning_rate nan", "1e-06"]),
    (["--epsilon", "0"], ["--epsilon 0", "0.2"]),
    (["--max_grad_norm", "-1"], ["--max_grad_norm -1", "1.0"]),
    (["--reward_timeout", "0"], ["--reward_timeout 0", "30"]),
    (["--vllm_importance_sampling_clip_max", "0"], ["--vllm_importance_sampling_clip_max 0", "3.0"]),
    (["--vllm_gpu_memory_utilization", "1.5"], ["--vllm_gpu_memory_utilization 1.5", "at most 0.99"]),
    (["--vllm_gpu_memory_utilization", "0"], ["--vllm_gpu_memory_utilization 0", "0.01 or more"]),
    (["--max_steps", "0"], ["--max_steps", "1 or more"]),
    (["--max_steps", "-2"], ["--max_steps -2", "-1 or more"]),
    (["--model", "x", "--num_train_epochs", "0"], ["--num_train_epochs", "above 0"]),
    (["--colocate"], ["--colocate", "torchrun --nproc_per_node=1"]),
    (["--prompts_per_step", "4", "--num_minibatches", "5"], ["--num_minibatches 5", "at most --prompts_per_step"]),
    (["--num_iterations", "0"], ["--num_iterations 0", "1 or more"]),
    (["--loss_type", "cispo"], ["--epsilon_high 0", "e.g. 5"]),
    (["--delta", "1.1"], ["--delta 1.1", "e.g. 2"]),
    *(([f"--{name}", "0.5"], [f"--{name}", "log-probabilities"]) for name in (
        "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")),
    (["--top_p=0.9"], ["--top_p", "top_p 1"]),
    (["--beta", "-1"], ["--beta -1", "0 or more"]),
    (["--per_device_train_batch_size", "8"], ["--per_device_train_batch_size", "--prompts_per_step"]),
    (["--gradient_accumulation_steps", "8"], ["--gradient_accumulation_steps", "--micro_batch_tokens"]),
]


@pytest.mark.parametrize("flags, named", REFUSED, ids=lambda x: " ".join(x) if x[0].startswith("--") else "")
def test_what_cannot_work_is_refused_by_flag_and_with_what_does(monkeypatch, flags, named):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError) as error:
        check(parse(flags))
    assert all(part in str(error.value) for part in named), str(error.value)


@pytest.mark.parametrize("flags", [
    "--temperature nan", "--temperature inf", "--learning_rate inf", "--epsilon_high -0.5", "--min_lr_rate -1",
    "--weight_decay -1", "--adam_beta1 1", "--adam_beta2 1.5", "--adam_epsilon -1", "--model x --num_train_epochs nan"])
def test_numbers_that_cannot_work_are_refused(flags):
    with pytest.raises(ValueError, match="use "):
        check(parse(flags.split()))


def test_what_works_is_not_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    for flags in ("", "--num_generations 2", "--temperature 0.1", "--max_steps 1", "--colocate",
                  "--model x --num_train_epochs 0.5", "--eval_steps 0", "--warmup_steps 0", "--save_steps 1",
                  "--vllm_gpu_memory_utilization 0.9", "--save_rollouts 0", "--prompts_per_step 1"):
        check(parse(flags.split()))


def test_every_field_is_an_option_with_its_type():
    c = parse(["--model", "m", "--reward", "a", "b.py:f", "--reward_weights", "1", "0.5", "--colocate",
               "--seed", "7", "--no-vllm_importance_sampling_correction", "--learning_rate", "3e-5",
               "--loss_type", "grpo"])
    assert (c.model, c.reward, c.reward_weights) == ("m", ["a", "b.py:f"], [1.0, 0.5])
    assert (c.colocate, c.seed) == (True, 7)
    assert (c.vllm_importance_sampling_correction, c.learning_rate, c.loss_type) == (False, 3e-5, "grpo")
    assert parse(["--model", "m"]) == Config(model="m")


def test_the_bare_command_sets_its_own_defaults_and_flags_win():
    bare, own = parse([]), parse(["--learning_rate", "0.5", "--max_steps", "3"])
    assert (bare.prompts_per_step, bare.num_generations, bare.learning_rate) == (32, 16, 1e-3)
    assert (own.learning_rate, own.max_steps, own.num_generations) == (0.5, 3, 16)


@pytest.mark.parametrize("flags, said", [
    (["--loss_type", "ppo"], "cispo"), (["--scale_rewards", "all"], "'batch'"), (["--nonsense", "1"], "is no option (--help"),
    (["--num_gen", "4"], "did you mean --num_generations?"), (["--lerning_rate", "1"], "did you mean --learning_rate?"),
    (["--num_generations", "x"], "'x'"), (["--seed"], "expected one argument"), (["gsm8k.jsonl"], "is no option"),
    (["--use_vllm", "true"], "use --colocate"), (["--top_p=0.9"], "rollouts are drawn from the policy itself")])
def test_other_words_are_one_line_with_what_was_meant(flags, said):
    with pytest.raises(ValueError) as error:
        parse(flags, loss_type=tuple(LOSSES))
    assert flags[0].split("=")[0] in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_help_has_every_default_once(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "(default: )" not in printed and "peak learning rate of AdamW (default: 1e-06)" in printed
    assert printed.count("default") == printed.count("(default") + 1  # those of the tiny model
    assert "Other defaults of --model tiny: prompts_per_step 32," in printed


@pytest.fixture
def folder(tmp_path):
    ranks.write_digits_model(tmp_path / "model")
    (tmp_path / "no_answers.jsonl").write_text('{"prompt": "1+1=", "gold": "2"}\n')
    return tmp_path


@pytest.mark.parametrize("flags, named", [
    (["--reward", "nonsense"], ["nonsense"]),
    (["--reward", "missing.py:f"], ["missing.py"]),
    (["--reward", "gsm8k", "--reward_weights", "1", "2"], ["--reward_weights"]),
    (["--max_completion_length", "600"], ["--max_prompt_length 8", "--max_completion_length 600", "512"]),
    (["--data", "nowhere.jsonl"], ["nowhere.jsonl"]),
    (["--data", "{}/no_answers.jsonl", "--reward", "format", "math"], ["no_answers.jsonl", "--reward format math",
                                                                       "--answer_column"]),
    (["--model", "nowhere"], ["nowhere", "--model"]),
    (["--temperature", "0"], ["--temperature 0"])])
def test_mistakes_end_in_one_line_before_anything_starts(folder, monkeypatch, capsys, flags, named):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(minigrpo, "build_engine", lambda *_: pytest.fail("an engine was started"))
    usual = ["--model", str(folder / "model"), "--out", str(folder / "run"), "--max_prompt_length", "8",
             "--max_completion_length", "4"]
    monkeypatch.setattr(sys, "argv", ["minigrpo.py", *usual, *(flag.format(folder) for flag in flags)])
    with ranks.signals_kept(), pytest.raises(SystemExit) as error:
        minigrpo.main()
    assert error.value.code == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and all(part in lines[-1] for part in named), lines
    assert not any("Traceback" in line for line in lines)


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["minigrpo.py"])
    monkeypatch.setattr(minigrpo, "train", lambda *_: [][0])
    with pytest.raises(IndexError):
        minigrpo.main()


ROW = {"step": 4, "reward": 0.5, "skipped_updates": 0, "logprob_gap/mean": 0.02, "broken_logprobs": 0,
       "trained_tokens": 9, "entropy": 1.5}


def test_a_run_whose_numbers_go_wrong_ends_with_the_reason():
    health = Health(max_skipped=3)
    for skipped in (1, 1, 0, 1, 1):  # never three in a row
        health.check({**ROW, "skipped_updates": skipped}, [])
    with pytest.raises(RunError, match="3 steps in a row: .*not finite.*--learning_rate"):
        health.check({**ROW, "skipped_updates": 1}, [])
    health = Health(max_skipped=2)
    health.check({**ROW, "broken_logprobs": 10}, [])  # more than what could be trained on
    with pytest.raises(RunError, match="2 steps in a row"):
        health.check({**ROW, "broken_logprobs": 10}, [])
    gaps = [0.02] * 9 + [0.2] + [0.059, 0.07, 0.07, 0.05, 0.07, 0.07]  # over 3 × 0.02 twice in a row
    health, replay = Health(10), Health(10, replay=True)
    for gap in gaps:
        health.check({**ROW, "logprob_gap/mean": gap}, [])
        assert replay.check({**ROW, "logprob_gap/mean": gap}, []) == []
    with pytest.raises(RunError, match="differ by 0.070 .* at first by 0.020: the engine no longer"):
        health.check({**ROW, "logprob_gap/mean": 0.07}, [])
    assert replay.check({**ROW, "logprob_gap/mean": 0.07}, []) == []  # there the gap has to grow
    health = Health(10)
    for reward in (None, None, 0.0, None, None):  # never three in a row
        health.check({**ROW, "reward": reward}, [])
    with pytest.raises(RunError, match="3 steps in a row: no completion had a reward"):
        health.check({**ROW, "reward": None}, [])
    health = Health(10)
    for gap in [1e-7] * 10 + [0.049] * 20:  # under 0.05 nothing is alarming
        assert health.check({**ROW, "logprob_gap/mean": gap}, []) == []


def test_what_looks_wrong_is_a_warning_once_in_a_row_of_such_steps():
    health = Health(10)
    for _ in range(10):
        assert health.check(ROW, []) == []
    [warning] = health.check({**ROW, "logprob_gap/mean": 1.2}, [])  # one such step does not end the run
    assert warning.startswith("sampler and trainer differ by 1.200")
    assert health.check({**ROW, "entropy": 0.031}, []) == []  # 2 % of 1.5 is 0.03
    [warning] = health.check({**ROW, "entropy": 0.029}, [])
    assert warning.startswith("entropy fell from 1.50 to 0.029")
    assert health.check({**ROW, "entropy": 0.029}, []) == []  # said already
    rollout = lambda ids: types.SimpleNamespace(completion_ids=ids)
    varied, same = rollout(list(range(40))), rollout([7] * 21 + list(range(100, 119)))
    assert health.check(ROW, [same] + [varied] * 3) == []  # a quarter of them, and not more
    assert health.check(ROW, [rollout([7] * 31)] * 4) == []  # short ones: "1111" may be an answer
    assert health.check(ROW, [same, same] + [varied] * 3) == ["one token is more than half of 2 of 5 completions"]
    health = Health(10)
    for _ in range(12):  # of what was 0 from the first step on nothing is said
        assert health.check({**ROW, "logprob_gap/mean": 0.0, "entropy": 0.0}, []) == []
