"""What is sampled, and when: the policy's own sampler, dynamic sampling's replacements and evaluation's estimators,
against the packed forward pass, values worked out by hand, or all cases gone over.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import write_checkpoint

import colocate
import engines
from config import Config, check
from data import Prompt, PromptSet, prompt_indices, sample_seed
from engines import PolicySampler, draw, sample
from minigrpo import Inputs, draw_prompts, eval_metrics, evaluate, generate_rollouts, resample_groups, score_rollouts
from model import Policy, token_logprobs
from rewards import Scores
from sharded import World

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = SimpleNamespace(eos_token_ids=[9], decode=str)
PROMPTS = [Prompt(f"p{i}", [i], {"answer": str(i)}) for i in range(30)]


# ---- The policy samples for itself -------------------------------------------------------------------------

class Numbers:
    """A tokenizer: the text of a token is its number and a space."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens is False
        return "".join(f"{token} " for token in ids)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    made = {}
    for family in ("qwen3-tied", "llama-tied"):
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(folder, family)
        made[family] = Policy.from_folder(folder)
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_logprobs_equal_the_packed_forward(policies, temperature):
    policy = policies["qwen3-tied"]
    tokens = torch.randint(0, 160, (14,), generator=torch.Generator().manual_seed(0))
    prompts = [t.tolist() for t in tokens.split([4, 9, 1])]
    drawn = sample(policy, prompts, 12, temperature, seeds=[1, 2, 3], eos_token_ids=[0, 5, 7])
    for prompt, (ids, logps) in zip(prompts, drawn):
        stream = torch.tensor(prompt + ids)
        hidden = policy.packed(stream, [len(stream)])[len(prompt) - 1:-1]
        expected, _ = token_logprobs(hidden, policy.head_weight, stream[len(prompt):], temperature)
        assert torch.allclose(torch.tensor(logps), expected, atol=2e-5)
        assert not set(ids[:-1]) & {0, 5, 7} and (len(ids) == 12 or ids[-1] in (0, 5, 7))


def test_a_sample_depends_on_its_seed_alone(policies):
    policy, prompts = policies["qwen3-tied"], [[3, 4, 5]] * 3
    together = sample(policy, prompts, 8, 1.0, seeds=[7, 8, 7], eos_token_ids=[1])
    alone = sample(policy, [prompts[0]], 8, 1.0, seeds=[7], eos_token_ids=[1])
    assert together[0].token_ids == together[2].token_ids == alone[0].token_ids != together[1].token_ids


def test_completion_i_draws_with_the_seed_plus_i_whatever_else_is_in_the_batch(policies, monkeypatch):
    engine, prompts = PolicySampler(policies["qwen3-tied"]), [[3, 4, 5], [6]]
    arguments = dict(max_tokens=5, temperature=1.0, eos_token_ids=[0])
    groups = engine.generate(prompts, n=3, seeds=[10, 20], **arguments)
    monkeypatch.setattr(engines, "SEQUENCES_AT_ONCE", 2)
    assert [[c.token_ids for c in group] for group in engine.generate(prompts, n=3, seeds=[10, 20], **arguments)] == \
        [[c.token_ids for c in group] for group in groups]
    for prompt, seed, group in zip(prompts, (10, 20), groups):
        for i in range(3):
            [[alone]] = engine.generate([prompt], n=1, seeds=[seed + i], **arguments)
            assert alone.token_ids == group[i].token_ids
    assert engine.generate([], n=3, seeds=[], **arguments) == []


def test_stop_strings_cut_samples_and_change_nothing_else(policies):
    """"5 " as a string is also in "15 ", which is where that sample ends."""
    arguments = dict(n=3, max_tokens=12, temperature=1.0, seeds=[1, 2, 3], eos_token_ids=[0])
    tokenizer, prompts = Numbers(), [[3, 4, 5], [6], [7, 8]]
    engine = PolicySampler(policies["qwen3-tied"], tokenizer)
    whole = engine.generate(prompts, **arguments)
    ids = whole[0][0].token_ids
    stop, cuts, expected = [f"{ids[4]} {ids[5]} ", "5 "], set(), []
    for group in whole:
        expected.append([])
        for ids, logps in group:
            n = next((n for n in range(1, len(ids) + 1) if colocate.completes(tokenizer, ids[:n], stop)), len(ids))
            cuts.add((n, n < len(ids)))
            expected[-1].append((ids[:n], logps[:n]))
    assert engine.generate(prompts, stop=stop, **arguments) == expected
    assert len(cuts) > 2 and len(expected[0][0][0]) <= 6


def test_samples_follow_the_distribution(policies):
    policy = policies["llama-tied"]
    with torch.no_grad():
        p = (policy.packed(torch.tensor([3, 4]), [2])[-1] @ policy.head_weight.T).softmax(-1)
    drawn = sample(policy, [[3, 4]] * 4000, 1, 1.0, seeds=list(range(4000)), eos_token_ids=[1])
    counts = torch.bincount(torch.tensor([ids[0] for ids, _ in drawn]), minlength=160)
    assert (counts / 4000 - p).abs().max() < 4 * (0.25 / 4000) ** 0.5  # four standard errors at worst
    greedy = sample(policy, [[3, 4]], 1, 0.0, seeds=[0], eos_token_ids=[1])
    assert greedy[0].token_ids[0] == int(p.argmax())


def test_draws_are_inverse_cumulative_probabilities():
    logp = torch.tensor([[0.25, 0.0, 0.5, 0.25]] * 5).log()
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7501, 1 - 1e-16], dtype=torch.float64)
    assert draw(logp, uniform).tolist() == [0, 0, 2, 3, 3]  # never the second, which has no probability


# ---- Which prompts, which groups ---------------------------------------------------------------------------

class FakeEngine:
    """Answers with the prompt's number and the sample's seed."""

    weight_version = 3

    def __init__(self):
        self.asked = []

    def generate(self, prompts, *, n, seeds, **arguments):
        self.asked.append((prompts, seeds, arguments))
        return [[colocate.Completion([p[0], seed + i, 9], [-1.0] * 3) for i in range(n)]
                for p, seed in zip(prompts, seeds, strict=True)]


class FakeScorer:
    """Groups of prompts that `differs` get rewards that do; counts the groups it has seen."""

    def __init__(self, differs):
        self.differs, self.groups = differs, 0

    def score(self, groups):
        self.groups += len(groups)
        rewards = [[float(i if self.differs(g.completion_ids[0][0]) else 1) for i in range(len(g.completions))]
                   for g in groups]
        return [Scores(r, {"fake": r}) for r in rewards]


def inputs(scorer, held_out=()):
    return Inputs(None, None, TOKENIZER, PromptSet(PROMPTS, [], [], ""), held_out, scorer, updates=9, schedule=9)


def a_step(c, step, mine, differs):
    engine, scorer = FakeEngine(), FakeScorer(differs)
    batch = draw_prompts(PROMPTS, step, c)
    rollouts = generate_rollouts(engine, [batch[slot] for slot in mine], step, TOKENIZER, c)
    rollouts = resample_groups(engine, rollouts, step, inputs(scorer), c)
    return engine, scorer, score_rollouts(rollouts, scorer, c.num_generations)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_group_of_equal_rewards_is_replaced_by_the_prompt_of_its_slot_in_the_next_round(rounds):
    c, step, odd = Config(prompts_per_step=8, num_generations=4, dynamic_sampling_rounds=rounds), 5, lambda p: p % 2
    engine, scorer, rollouts = a_step(c, step, range(8), odd)
    order = [i for e in range(20) for i in prompt_indices(e, 30, 30, c.seed)]  # the concatenated epochs
    scored = 0
    for slot in range(8):
        tried = [order[(step * (1 + rounds) + r) * 8 + slot] for r in range(rounds + 1)]
        taken = next((r for r, prompt in enumerate(tried) if odd(prompt)), rounds)
        scored += taken + 1
        group = rollouts[slot * 4:slot * 4 + 4]
        assert [r.slot for r in group] == [*range(slot * 4, slot * 4 + 4)]
        assert {(r.prompt, r.round) for r in group} == {(f"p{tried[taken]}", taken)}
        assert all(r.columns == {"answer": str(tried[taken])} for r in group)
        assert [r.completion_ids[1] for r in group] == [sample_seed(c.seed, step, taken, slot) + i for i in range(4)]
        assert [r.reward for r in group] == ([0, 1, 2, 3] if odd(tried[taken]) else [1] * 4)
    assert scorer.groups == scored, "a group is scored once"
    assert len(engine.asked) == 1 + rounds  # with --split all ranks must ask equally often


def test_what_replaces_a_group_does_not_depend_on_the_ranks():
    c = Config(prompts_per_step=7, num_generations=2, dynamic_sampling_rounds=2)
    whole = a_step(c, 2, range(7), lambda p: p % 3 == 0)[2]
    parts = [a_step(c, 2, mine, lambda p: p % 3 == 0)[2] for mine in (range(3), range(3, 5), range(5, 7))]
    assert [vars(r) for r in whole] == [vars(r) for part in parts for r in part]


def test_a_rank_without_prompts_takes_part():
    c = Config(prompts_per_step=2, num_generations=2, dynamic_sampling_rounds=2)
    engine, _, rollouts = a_step(c, 0, [], lambda p: True)
    assert rollouts == [] and len(engine.asked) == 3


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
    points = [[1, 0, 0, 1, 0, 0], [0] * 6, [1] * 6, [0.5, 0.9, 1, 0, 0, 0]]
    row = eval_metrics({"a": points})
    assert row.keys() == {"eval/accuracy", "eval/pass@2", "eval/pass@4"}
    assert row["eval/accuracy"] == pytest.approx((2 / 6 + 0 + 1 + 2.4 / 6) / 4)
    for k in (2, 4):
        passed = [[any(p[i] >= 1 for i in chosen) for chosen in itertools.combinations(range(6), k)] for p in points]
        assert row[f"eval/pass@{k}"] == pytest.approx(sum(sum(p) / len(p) for p in passed) / 4)
    assert eval_metrics({"a": [[1.0], [0.0]]}) == {"eval/accuracy": 0.5}


def test_several_sets_are_told_apart_and_counted_together():
    row = eval_metrics({"a": [[1, 1], [0, 1]], "b": [[0, 0]]})
    assert row == {"eval/accuracy": 0.5, "eval/pass@2": pytest.approx(2 / 3), "eval/a/accuracy": 0.75,
                   "eval/a/pass@2": 1.0, "eval/b/accuracy": 0.0, "eval/b/pass@2": 0.0}


def test_evaluation_uses_its_own_temperature_length_and_seeds():
    class Ranks(World):
        def __init__(self, rank):
            self.rank, self.world_size, self.parts = rank, 2, []

        def barrier(self, stage):
            pass

        def all_gather(self, value):
            self.value = value
            return [value] if not self.parts else self.parts

    c = Config(eval_num_generations=4, eval_temperature=0.6, eval_max_completion_length=50)
    held_out, seeds, values = {"a": PROMPTS[:3], "b": PROMPTS[3:5]}, [], []
    for rank in range(2):
        world, engine = Ranks(rank), FakeEngine()
        world.parts = [[0.0] * 20]
        evaluate(engine, inputs(FakeScorer(lambda p: p == 1), held_out), c, world)
        [(prompts, own, arguments)] = engine.asked
        assert arguments == {"max_tokens": 50, "temperature": 0.6, "eos_token_ids": [9], "stop": ()}
        seeds, values = seeds + own, values + world.value
    assert len({*seeds}) == 5 and values == [*[1.0] * 4, 0.0, 1.0, 2.0, 3.0, *[1.0] * 12]
    world.parts = [values[:8], values[8:]]  # of the first two prompts and of the other three
    row = evaluate(FakeEngine(), inputs(FakeScorer(lambda p: False), held_out), c, world)
    assert row["eval/a/accuracy"] == (4 + 6 + 4) / 12 and row["eval/b/accuracy"] == 1.0


def test_greedy_completions_of_a_prompt_would_be_alike():
    with pytest.raises(ValueError, match="--eval_temperature"):
        check(Config(eval_num_generations=4))


def test_a_run_with_all_of_it(tmp_path):
    """The tiny model samples for itself: replacements happen, and each row has each key."""
    for name, sums in (("small", ["1+1", "2+1"]), ("large", ["9+9", "8+9", "9+8"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"prompt": f"{s}=", "answer": str(eval(s))}) + "\n" for s in sums))
    command = [sys.executable, ROOT / "minigrpo.py", "--max_steps", "3", "--prompts_per_step", "6", "--num_generations",
               "4", "--dynamic_sampling_rounds", "2", "--eval_data", tmp_path / "small.jsonl", tmp_path / "large.jsonl",
               "--eval_num_generations", "4", "--eval_temperature", "1", "--eval_steps", "2", "--out", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in open(tmp_path / "run/metrics.jsonl")]
    keys = {f"eval/{name}{metric}" for name in ("", "small/", "large/") for metric in ("accuracy", "pass@2", "pass@4")}
    assert all(row.keys() == rows[0].keys() >= keys for row in rows) and len(rows) == 4
    assert [row["eval/small/pass@4"] is None for row in rows] == [False, True, False, False]
    assert sum(row["dropped_groups"] for row in rows[:-1]) > 0
    for step, row in enumerate(rows[:-1]):
        rollouts = [json.loads(line) for line in open(tmp_path / f"run/rollouts/step_{step}.jsonl")]
        assert row["dropped_groups"] == sum(r["round"] for r in rollouts[::4])
        for group in (rollouts[i:i + 4] for i in range(0, 24, 4)):
            assert group[0]["round"] == 2 or not math.isclose(*(f(r["reward"] for r in group) for f in (min, max)))
