"""What is sampled when: dynamic sampling's replacements and evaluation's estimators, against values worked
out by hand or by going over all cases.
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

from data import Prompt, PromptSet, prompt_indices, sample_seed
from minigrpo import (
    Config, Inputs, UserError, World, check, eval_metrics, evaluate, generate_rollouts, replace_dull_groups,
    score_rollouts)
from rewards import Scores

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = SimpleNamespace(eos_token_ids=[9], decode=str)
PROMPTS = [Prompt(f"p{i}", [i], {"answer": str(i)}) for i in range(30)]


class FakeEngine:
    """Answers with the prompt's number and the sample's seed."""

    weight_version = 3

    def __init__(self):
        self.asked = []

    def generate(self, prompts, *, n, seeds, **arguments):
        self.asked.append((prompts, seeds, arguments))
        return [[([p[0], seed + i, 9], [-1.0] * 3) for i in range(n)] for p, seed in zip(prompts, seeds, strict=True)]


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
    return Inputs(TOKENIZER, PromptSet(PROMPTS, [], [], ""), held_out, scorer, policy=None, updates=9)


def a_step(c, step, mine, differs):
    engine, scorer = FakeEngine(), FakeScorer(differs)
    first = step * (1 + c.dynamic_sampling_rounds)
    indices = prompt_indices(first, c.prompts_per_step, len(PROMPTS), c.seed)
    mine = [(slot, PROMPTS[indices[slot]]) for slot in mine]
    rollouts = generate_rollouts(engine, mine, step, TOKENIZER, c)
    replace_dull_groups(engine, rollouts, mine, step, inputs(scorer=scorer), c)
    score_rollouts(rollouts, mine, scorer, c)
    return engine, scorer, mine, rollouts


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_dull_group_is_replaced_by_the_prompt_of_its_slot_in_the_next_round(rounds):
    c, step, odd = Config(prompts_per_step=8, num_generations=4, dynamic_sampling_rounds=rounds), 5, lambda p: p % 2
    engine, scorer, mine, rollouts = a_step(c, step, range(8), odd)
    order = [i for e in range(20) for i in prompt_indices(e, 30, 30, c.seed)]  # the concatenated epochs
    scored = 0
    for slot in range(8):
        tried = [order[(step * (1 + rounds) + r) * 8 + slot] for r in range(rounds + 1)]
        taken = next((r for r, prompt in enumerate(tried) if odd(prompt)), rounds)
        scored += taken + 1
        group = rollouts[slot * 4:slot * 4 + 4]
        assert [r.slot for r in group] == [*range(slot * 4, slot * 4 + 4)]
        assert {(r.prompt, r.round) for r in group} == {(f"p{tried[taken]}", taken)} == {(mine[slot][1].prompt, taken)}
        assert [r.completion_ids[1] for r in group] == [sample_seed(c.seed, step, taken, slot) + i for i in range(4)]
        assert [r.reward for r in group] == ([0, 1, 2, 3] if odd(tried[taken]) else [1] * 4)
    assert scorer.groups == scored, "a group is scored once"
    assert len(engine.asked) == 1 + rounds  # with --split all ranks must ask equally often


def test_what_replaces_a_group_does_not_depend_on_the_ranks():
    c = Config(prompts_per_step=7, num_generations=2, dynamic_sampling_rounds=2)
    whole = a_step(c, 2, range(7), lambda p: p % 3 == 0)[3]
    parts = [a_step(c, 2, mine, lambda p: p % 3 == 0)[3] for mine in (range(3), range(3, 5), range(5, 7))]
    assert [vars(r) for r in whole] == [vars(r) for part in parts for r in part]


def test_a_rank_without_prompts_takes_part():
    c = Config(prompts_per_step=2, num_generations=2, dynamic_sampling_rounds=2)
    engine, _, _, rollouts = a_step(c, 0, [], lambda p: True)
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
            self.rank, self.size, self.parts = rank, 2, []

        def meet(self, stage):
            pass

        def gather(self, value):
            self.value = value
            return [value] if not self.parts else self.parts

    c = Config(eval_num_generations=4, eval_temperature=0.6, eval_max_completion_length=50)
    held_out, seeds, values = {"a": PROMPTS[:3], "b": PROMPTS[3:5]}, [], []
    for rank in range(2):
        world, engine = Ranks(rank), FakeEngine()
        world.parts = [[[0.0] * 4] * 5]
        evaluate(engine, inputs(FakeScorer(lambda p: p == 1), held_out), c, world)
        [(prompts, own, arguments)] = engine.asked
        assert arguments == {"max_tokens": 50, "temperature": 0.6, "eos_token_ids": [9], "stop": ()}
        seeds, values = seeds + own, values + world.value
    assert len({*seeds}) == 5 and values == [[1.0] * 4, [0.0, 1.0, 2.0, 3.0], *[[1.0] * 4] * 3]
    world.parts = [values[:2], values[2:]]
    row = evaluate(FakeEngine(), inputs(FakeScorer(lambda p: False), held_out), c, world)
    assert row["eval/a/accuracy"] == (4 + 6 + 4) / 12 and row["eval/b/accuracy"] == 1.0


def test_greedy_completions_of_a_prompt_would_be_alike():
    with pytest.raises(UserError, match="--eval_temperature"):
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
