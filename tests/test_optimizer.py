"""The sharded AdamW (L6, L7) against torch.optim.AdamW with one and two ranks; learning rates, the division
of work and the command line against values worked out by hand.
"""

import itertools
import random
import sys
import types

import pytest
import ranks
import torch
from ranks import SMALL_RATE, TOY, TOY_RATES, toy_gradients, toy_parameters

import minigrpo
from data import UserError
from minigrpo import Config, Health, ShardedAdamW, World, balance, check, learning_rate_at, pack, parse


def results(world):
    return [r["adamw"] for r in ranks.results(world)]


def summed_gradients(step, world, dtype):
    """Of all ranks and both backward passes, added in double precision."""
    parts = [toy_gradients(step, rank, part, dtype) for rank in range(world) for part in range(2)]
    return [sum(g.double() for g in column) for column in zip(*parts)]


def adamw(parameters, c, **more):
    return torch.optim.AdamW(parameters, lr=1.0, betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_epsilon,
                             weight_decay=c.weight_decay, **more)


# ---- ShardedAdamW ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("world", [1, 2])
def test_equals_adamw_with_clipping(world):
    """Weight decay, betas, epsilon, a new rate each step; steps that are clipped and steps that are not."""
    module = toy_parameters(torch.float64)
    oracle, norms = adamw(module, TOY), []
    for step, rate in enumerate(TOY_RATES):
        for p, g in zip(module, summed_gradients(step, world, torch.float64)):
            p.grad = g
        norms.append(torch.nn.utils.clip_grad_norm_(module, TOY.max_grad_norm).item())
        oracle.param_groups[0]["lr"] = rate
        oracle.step()
    assert max(norms) > 10 * TOY.max_grad_norm and min(norms) < TOY.max_grad_norm
    for result in results(world):
        assert result["double"]["norms"] == pytest.approx(norms, rel=1e-12)
        for got, want in zip(result["double"]["parameters"], module):
            assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-12, atol=1e-14)
        assert result["double"]["gradients freed"]
    assert max((p - q).abs().max() for p, q in zip(module, toy_parameters(torch.float64))) > 0.01


@pytest.mark.parametrize("world", [1, 2])
def test_100_small_updates_move_bf16_weights_as_fp32_adamw_does(world):
    """Each update is far below the spacing of bf16 numbers; AdamW on bf16 weights itself stands still."""
    start = toy_parameters(torch.bfloat16)
    exact = torch.nn.ParameterList([p.detach().float() for p in start])
    stuck = toy_parameters(torch.bfloat16)
    gradients = summed_gradients(0, world, torch.bfloat16)
    for module in (exact, stuck):
        oracle = adamw(module, SMALL_RATE)
        oracle.param_groups[0]["lr"] = 1e-6
        for _ in range(100):
            for p, g in zip(module, gradients):
                p.grad = g.to(p.dtype)
            oracle.step()
    flat = lambda tensors: torch.cat([t.detach().flatten().float() for t in tensors])
    first, want = flat(start), flat(exact)
    toward = -flat(gradients).sign()  # Adam with a constant gradient: the rate, against its sign
    moved = lambda tensors: ((flat(tensors) - first) * toward)[first.abs() > 1e-3].mean().item()
    assert moved(exact) == pytest.approx(1e-4, rel=1e-2) and abs(moved(stuck)) < 1e-5
    for result in results(world):
        got = result["bf16"]["parameters"]
        assert all(p.dtype == torch.bfloat16 for p in got)
        assert moved(got) == pytest.approx(1e-4, rel=0.1)
        assert (flat(got) == want.bfloat16().float()).float().mean() > 0.99  # but for ties in the rounding
        assert ((flat(got) - want).abs() <= want.abs() / 256 + 1e-9).all()
        assert result["bf16"]["gradients freed"]


def test_ranks_hold_the_same_weights_to_the_last_bit():
    first, second = results(2)
    for name in ("double", "bf16"):
        assert all(torch.equal(a, b) for a, b in zip(first[name]["parameters"], second[name]["parameters"]))
        assert first[name]["norms"] == second[name]["norms"]


def test_micro_batches_add_up_in_fp32():
    """256 gradients of 2**-9 beside one of 1: bf16, with 8 bits, would keep the 1."""
    module = torch.nn.ParameterList([torch.zeros(3, dtype=torch.bfloat16)])
    optimizer = ShardedAdamW(module, Config(max_grad_norm=1e9), World())
    optimizer.begin()
    for value in [1.0] + [2.0**-9] * 256:
        (module[0] * value).sum().backward()
    assert optimizer.step(0.0) == pytest.approx(1.5 * 3**0.5, rel=1e-6)


def test_modules_keep_their_values_and_gradients_do_not_leak_between_steps():
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    before, x = [p.detach().clone() for p in module.parameters()], torch.randn(4, 3)
    out = module(x)
    optimizer = ShardedAdamW(module, Config(max_grad_norm=1e9), World())
    assert torch.equal(module(x), out) and all(torch.equal(a, b) for a, b in zip(before, module.parameters()))
    norms = []
    for _ in range(2):
        optimizer.begin()
        module(x).sum().backward()
        norms.append(optimizer.step(0.0))
    assert norms[0] == pytest.approx(norms[1]) and optimizer.grads is None
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters()))  # a rate of 0 moves nothing
    optimizer.begin()
    module(x).sum().backward()
    optimizer.step(1e-2)
    assert not torch.equal(module(x), out)  # the module computes with the new weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_that_is_not_finite_leaves_every_bit(value):
    module = toy_parameters(torch.float32)
    optimizer = ShardedAdamW(module, TOY, World())

    def step(scale=1.0):
        optimizer.begin()
        sum((p * g).sum() * scale for p, g in zip(module, toy_gradients(0, 0, 0, torch.float32))).backward()
        before = ranks.state_of(optimizer)
        return optimizer.step(1e-2), ranks.same(before, ranks.state_of(optimizer))

    assert step()[1] is False
    norm, same = step(value)
    assert norm != norm and same and optimizer.grads is None
    norm, same = step()
    assert norm > 0 and not same


def test_shards_load_on_another_number_of_ranks(tmp_path):
    """Written by 2 ranks, read by 1, 2, 3 and 5, whose shards end elsewhere."""
    def shards(size):
        made = []
        for rank in range(size):
            world = World.__new__(World)
            world.rank, world.size = rank, size
            made.append(ShardedAdamW(toy_parameters(torch.float32), TOY, world))
        return made

    def joined(parts):  # without the padding behind the last parameter, which depends on the number of ranks
        length = parts[0].offsets[-1] + parts[0].parameters[-1].numel()
        names = ("exp_avg", "exp_avg_sq")
        return [torch.cat([p.master for p in parts])[:length],
                *(torch.cat([p.state[n] for p in parts])[:length] for n in names)]

    written, g = shards(2), torch.Generator().manual_seed(0)
    for part in written:
        part.state["step"].fill_(17)
        for values in (part.master, part.state["exp_avg"], part.state["exp_avg_sq"]):
            values.normal_(generator=g)
        part.save(tmp_path)
    for size in (1, 2, 3, 5):
        read = shards(size)
        for part in read:
            part.load(tmp_path)
            assert part.state["step"] == 17 and part.adam.state[part.master] is part.state
        assert all(torch.equal(a, b) for a, b in zip(joined(written), joined(read)))


# ---- Learning rates ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule, rates", [
    ("constant", [1, 2, 3, 4, 4, 4, 4, 4]),
    ("linear", [1, 2, 3, 4, 4, 3, 2, 1]),  # four steps up, then a quarter less each, towards 0 after the last
    ("cosine", [1, 2, 3, 4, 4, 0.4 + 3.6 * (1 + 0.5**0.5) / 2, 2.2, 0.4 + 3.6 * (1 - 0.5**0.5) / 2])])
def test_learning_rates_by_hand(schedule, rates):
    c = Config(learning_rate=4.0, warmup_steps=4, max_steps=8, lr_scheduler_type=schedule, min_lr_rate=0.1)
    assert [learning_rate_at(step, c) for step in range(8)] == pytest.approx(rates)


def test_learning_rates_without_warm_up_and_with_nothing_else():
    c = Config(learning_rate=2.0, max_steps=2, lr_scheduler_type="linear")
    assert [learning_rate_at(step, c) for step in range(2)] == [2.0, 1.0]
    c = Config(learning_rate=2.0, max_steps=2, warmup_steps=2, lr_scheduler_type="cosine", min_lr_rate=0.0)
    assert [learning_rate_at(step, c) for step in range(3)] == [1.0, 2.0, 2.0]
    c = Config(learning_rate=2.0, max_steps=4, lr_scheduler_type="cosine", min_lr_rate=0.25)
    assert learning_rate_at(4, c) == pytest.approx(0.5)


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


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_shares_are_contiguous_and_even(n):
    for count in range(12):
        shares = []
        for rank in range(n):
            world = World.__new__(World)
            world.rank, world.size = rank, n
            shares.append(world.share(list(range(count))))
        assert list(itertools.chain(*shares)) == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_sums_add_up_and_maxima_do_not():
    parts = [{"a": 1, "a_max": 5.0}, {}, {"a": 2, "a_max": 3.0}, {"a": 4, "a_max": 4.0}]
    assert minigrpo.add_up(parts) == {"a": 7, "a_max": 5.0} and minigrpo.add_up([]) == {}


# ---- The command line --------------------------------------------------------------------------------------

REFUSED = [  # flags, and what the message must hold: the flag, and something that works
    (["--num_generations", "1"], ["--num_generations 1", "2 or more"]),
    (["--num_generations", "0"], ["--num_generations 0", "2 or more"]),
    (["--temperature", "0"], ["--temperature 0", "0.7 to 1.0"]),
    (["--temperature", "-1"], ["--temperature -1", "0.7 to 1.0"]),
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
    (["--vllm_gpu_memory_utilization", "1.5"], ["--vllm_gpu_memory_utilization 1.5", "0.1 to 0.9"]),
    (["--vllm_gpu_memory_utilization", "0"], ["--vllm_gpu_memory_utilization 0", "0.1 to 0.9"]),
    (["--max_steps", "0"], ["--max_steps", "1 or more"]),
    (["--max_steps", "-2"], ["--max_steps", "1 or more"]),
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
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError) as error:
        check(parse(flags))
    assert all(part in str(error.value) for part in named), str(error.value)


@pytest.mark.parametrize("flags", [
    "--temperature nan", "--temperature inf", "--learning_rate inf", "--epsilon_high -0.5", "--min_lr_rate -1",
    "--weight_decay -1", "--adam_beta1 1", "--adam_beta2 1.5", "--adam_epsilon -1", "--model x --num_train_epochs nan"])
def test_numbers_that_cannot_work_are_refused(flags):
    with pytest.raises(UserError, match="use "):
        check(parse(flags.split()))


def test_what_works_is_not_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
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
    (["--loss_type", "ppo"], "'cispo'"), (["--scale_rewards", "all"], "'batch'"), (["--nonsense", "1"], "is no option (--help"),
    (["--num_gen", "4"], "did you mean --num_generations?"), (["--lerning_rate", "1"], "did you mean --learning_rate?"),
    (["--num_generations", "x"], "'x'"), (["--seed"], "expected one argument"), (["gsm8k.jsonl"], "is no option"),
    (["--use_vllm", "true"], "use --colocate"), (["--top_p=0.9"], "rollouts are drawn from the policy itself")])
def test_other_words_are_one_line_with_what_was_meant(flags, said):
    with pytest.raises(UserError) as error:
        parse(flags)
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


def test_a_run_whose_numbers_go_wrong_ends_with_the_reason():
    row = {"step": 4, "reward": 0.5, "skipped_updates": 0, "logprob_gap/mean": 0.02, "broken_logprobs": 0, "trained_tokens": 9,
           "entropy": 1.5}
    health = Health(Config(max_skipped=3))
    for skipped in (1, 1, 0, 1, 1):  # never three in a row
        health.check({**row, "skipped_updates": skipped})
    with pytest.raises(minigrpo.USER_ERRORS, match="3 updates in a row.*--learning_rate"):
        health.check({**row, "skipped_updates": 1})
    health = Health(Config(max_skipped=2))
    health.check({**row, "broken_logprobs": 10})  # more than what could be trained on
    with pytest.raises(minigrpo.USER_ERRORS, match="2 updates in a row"):
        health.check({**row, "broken_logprobs": 10})
    health = Health(Config())
    for gap in [0.02] * 9 + [0.2] + [0.059, 0.07, 0.07, 0.05, 0.07, 0.07]:  # over 3 × 0.02 twice in a row
        health.check({**row, "logprob_gap/mean": gap})
    with pytest.raises(minigrpo.USER_ERRORS, match="differ by 0.070 .* at first by 0.020"):
        health.check({**row, "logprob_gap/mean": 0.07})
    health = Health(Config())
    for reward in (None, None, 0.0, None, None):  # never three in a row
        health.check({**row, "reward": reward})
    with pytest.raises(minigrpo.USER_ERRORS, match="for three steps no completion had a reward"):
        health.check({**row, "reward": None})
    health = Health(Config())
    for gap in [1e-7] * 10 + [0.049] * 20:  # under 0.05 nothing is alarming
        health.check({**row, "logprob_gap/mean": gap})


def test_what_looks_wrong_is_a_warning_line(capsys):
    row = {"step": 11, "reward": 0.5, "skipped_updates": 0, "logprob_gap/mean": 0.02, "broken_logprobs": 0, "trained_tokens": 9,
           "entropy": 1.5}
    health = Health(Config(), speaks=True)
    for _ in range(10):
        health.check(row)
    assert capsys.readouterr().out == ""
    health.check({**row, "logprob_gap/mean": 1.2})  # one such step does not end the run
    assert capsys.readouterr().out.startswith("warning: step 12: sampler and trainer differ by 1.200")
    health.check({**row, "entropy": 0.031})  # 2 % of 1.5 is 0.03
    assert capsys.readouterr().out == ""
    health.check({**row, "entropy": 0.029})
    health.check({**row, "entropy": 0.029})
    assert capsys.readouterr().out.count("warning: step 12: entropy fell from 1.50 to 0.029") == 1  # once is enough
    rollout = lambda ids: types.SimpleNamespace(completion_ids=ids)
    varied, same = rollout(list(range(40))), rollout([7] * 21 + list(range(100, 119)))
    health.check(row, [same] + [varied] * 3)  # a quarter of them, and not more
    health.check(row, [rollout([7] * 31)] * 4)  # short ones: "1111" may be an answer
    assert capsys.readouterr().out == ""
    health.check(row, [same, same] + [varied] * 3)
    assert "one token is more than half of 2 of 5 completions" in capsys.readouterr().out
    quiet = Health(Config())
    for _ in range(12):
        quiet.check({**row, "logprob_gap/mean": 0.0, "entropy": 0.0}, [same])
    assert capsys.readouterr().out == ""
