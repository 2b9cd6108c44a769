"""The loss, L1 to L6 and L8 of the design, with one and with two ranks.

The expectations come from numbers worked out by hand, from a transformer and a loss written here over a
padded [B, T] batch with plain loops (in float64), and from transformers (in float32).
"""

import dataclasses
import json
import math
import statistics
import types

import pytest
import ranks
import torch
from checkpoints import write_checkpoint
from ranks import (
    BUDGETS, CASES, EOS, INF, LONGEST, NAN, SMALL, TEMPERATURE, Reduced, optimizer_of, ragged_rollouts, rollout,
    update_at, with_advantages)

import minigrpo
from config import Config, parse
from data import Prompt, sample_seed
from minigrpo import LOSSES, METRICS, Loss, MicroBatch, group_advantages, policy_loss, reward_table
from model import Policy
from sharded import World

DOUBLE = torch.float64


@pytest.fixture(scope="module")
def checkpoint():
    return ranks.checkpoint()



# ---- Oracles: nothing below calls the code under test ------------------------------------------------------

def plain_logits(weights: dict, config, ids):
    """A Llama/Qwen2 forward pass over ids [B, T], right-padded, attention written out."""
    c, (batch, length) = config, ids.shape
    norm = lambda x, w: x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w
    linear = lambda x, name: x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)
    frequency = 1 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    angle = torch.arange(length)[:, None].float() * frequency  # float32, as checkpoints are trained
    cos, sin = (torch.cat([f(angle), f(angle)], -1).double() for f in (torch.cos, torch.sin))

    def turned(x):  # [B, heads, T, head_dim]
        half = c.head_dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    x = weights["model.embed_tokens.weight"][ids]
    hidden = torch.full((length, length), -INF).triu(1)
    for i in range(c.num_hidden_layers):
        name = f"model.layers.{i}."
        h = norm(x, weights[name + "input_layernorm.weight"])
        q, k, v = (linear(h, f"{name}self_attn.{p}_proj").view(batch, length, -1, c.head_dim).transpose(1, 2)
                   for p in "qkv")
        repeats = c.num_attention_heads // c.num_key_value_heads
        k, v = turned(k).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = (turned(q) @ k.transpose(-1, -2) / math.sqrt(c.head_dim) + hidden).softmax(-1) @ v
        x = x + linear(mixed.transpose(1, 2).flatten(-2), name + "self_attn.o_proj")
        h = norm(x, weights[name + "post_attention_layernorm.weight"])
        gate = linear(h, name + "mlp.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(h, name + "mlp.up_proj"), name + "mlp.down_proj")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, weights["model.norm.weight"]) @ head.T


def padded(rollouts, pad=EOS):
    ids = [r.prompt_ids + r.completion_ids for r in rollouts]
    return torch.tensor([row + [pad] * (max(map(len, ids)) - len(row)) for row in ids])


def plain_advantages(rollouts, scale, size):
    """By the text of L4, with the statistics module."""
    rewards = [r.reward for r in rollouts if r.reward is not None]
    made = []
    for start in range(0, len(rollouts), size):
        group = [r.reward for r in rollouts[start:start + size]]
        known = [x for x in group if x is not None]
        teaches = len(known) > 1 and max(known) - min(known) > 1e-6
        for x in group:
            if x is None or not teaches:
                made.append(0.0)
                continue
            over = {"group": known, "batch": rewards}.get(scale)
            made.append((x - statistics.fmean(known)) / (statistics.stdev(over) + 1e-4 if over else 1.0))
    return made


def plain_loss(logits, rollouts, c, advantages=None):
    """The loss of the whole batch: logits [B, T, V], one completion and one token after the other."""
    advantages = advantages or plain_advantages(rollouts, c.scale_rewards, c.num_generations)
    sums, counts, facts = [], [], {"capped": 0, "tokens": 0, "entropy": 0.0, "gap": 0.0}
    for row, r, advantage in zip(logits, rollouts, advantages):
        if r.reward is None or c.mask_truncated_completions and r.truncated:
            continue
        total, count = 0.0, 0
        for j, (token, sampler) in enumerate(zip(r.completion_ids, r.sampler_logps)):
            if not math.isfinite(sampler):
                continue
            table = (row[len(r.prompt_ids) + j - 1] / c.temperature).log_softmax(-1)
            logp = table[token]
            ratio = (logp - logp.detach()).exp()
            correction = math.exp(logp.item() - sampler)
            facts["capped"] += correction > c.vllm_importance_sampling_clip_max
            facts["entropy"] -= (table.exp() * table).sum().item()
            facts["gap"] += abs(logp.item() - sampler)
            if c.vllm_importance_sampling_correction:
                total = total + min(correction, c.vllm_importance_sampling_clip_max) * ratio * advantage
            else:
                total = total + ratio * advantage
            count += 1
        if count:
            sums.append(total)
            counts.append(count)
    facts["tokens"] = sum(counts)
    if c.loss_type == "dapo":
        return -sum(sums) / sum(counts), facts
    if c.loss_type == "grpo":
        return -sum(s / n for s, n in zip(sums, counts)) / len(sums), facts
    return -sum(sums) / (len(sums) * c.max_completion_length), facts


def plain_weights(policy):
    return {name: p.detach().clone().requires_grad_() for name, p in policy.named_parameters()}


def plain_gradients(folder, rollouts, configs, advantages=None):
    """[(gradient by name, loss, facts)] for each config, from one float64 forward pass."""
    policy = Policy.from_folder(folder, dtype=DOUBLE)
    weights = plain_weights(policy)
    logits = plain_logits(weights, policy.config, padded(rollouts))
    made = []
    for c in configs:
        loss, facts = plain_loss(logits, rollouts, c, advantages)
        grads = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
        made.append((dict(zip(weights, grads)), loss.item(), facts))
    return made


def distance(got: dict, want: dict) -> float:
    """Relative to the norm over all parameters."""
    assert got.keys() == want.keys()
    square = lambda tensors: sum(t.double().square().sum().item() for t in tensors)
    return math.sqrt(square(got[k].double() - want[k].double() for k in want) / square(want.values()))


def case_config(loss_type, scale, mask):
    return Config(loss_type=loss_type, scale_rewards=scale, mask_truncated_completions=mask,
                  num_generations=4, temperature=TEMPERATURE, max_completion_length=LONGEST)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """(gradient, loss, facts) for each of CASES."""
    configs = [case_config(*case) for case in CASES]
    return dict(zip(CASES, plain_gradients(checkpoint[0], ragged_rollouts(), configs)))


def test_the_plain_forward_equals_transformers(checkpoint):
    folder, oracle = checkpoint
    policy = Policy.from_folder(folder, dtype=DOUBLE)
    ids = padded(ragged_rollouts())
    with torch.no_grad():
        ours, theirs = plain_logits(plain_weights(policy), policy.config, ids), oracle(ids).logits
    assert theirs.std() > 0.5 and (ours - theirs).abs().max() < 1e-4


# ---- L1: cutting the batch and spreading it do not change the gradient -------------------------------------

@pytest.mark.parametrize("dtype, limit", [(DOUBLE, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("loss_type, scale, mask", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_gradient_equals_the_padded_loop(expected, world, loss_type, scale, mask, dtype, limit):
    grad, loss, facts = expected[loss_type, scale, mask]
    norm = math.sqrt(sum(g.square().sum().item() for g in grad.values()))
    for result in ranks.results(world):
        for budget in BUDGETS:
            got = result["gradients"][f"{loss_type} {scale} {mask} {budget} {dtype}"]
            assert distance(got["grad"], grad) < limit
            row, tokens = got["row"], facts["tokens"]
            assert row["loss"] == pytest.approx(loss, rel=100 * limit)
            assert row["grad_norm"] == pytest.approx(norm, rel=100 * limit)
            assert row["trained_tokens"] == tokens
            assert row["entropy"] == pytest.approx(facts["entropy"] / tokens, rel=1e-5)
            assert row["logprob_gap/mean"] == pytest.approx(facts["gap"] / tokens, rel=1e-5)


def test_the_cases_differ_and_hold_what_they_are_for(expected):
    """Equal gradients would prove nothing if the cases were alike, or the cap and the masks never at work."""
    for case, (grad, _, facts) in expected.items():
        assert 5 < facts["capped"] < facts["tokens"] - 5
        assert all(distance(other, grad) > 1e-3 for key, (other, _, _) in expected.items() if key != case)
    batch = ragged_rollouts()
    assert any(r.truncated for r in batch) and any(r.reward is None for r in batch)
    assert sum(not math.isfinite(p) for r in batch for p in r.sampler_logps) > 5


@pytest.mark.parametrize("loss_type, scale, mask", CASES)
def test_gradient_equals_transformers(checkpoint, loss_type, scale, mask):
    """Temperature included: the logits are transformers'."""
    oracle = checkpoint[1]
    oracle.zero_grad()
    ids = padded(ragged_rollouts())
    loss, _ = plain_loss(oracle(ids).logits, ragged_rollouts(), case_config(loss_type, scale, mask))
    loss.backward()
    want = {name: p.grad for name, p in oracle.named_parameters()}
    [result] = ranks.results(1)
    assert distance(result["gradients"][f"{loss_type} {scale} {mask} 40 torch.float32"]["grad"], want) < 1e-4


def test_bf16_weights_give_nearly_that_gradient_in_fp32(checkpoint, expected):
    loss_type, scale, mask = case = ("dapo", "none", True)
    policy = Policy.from_folder(checkpoint[0], dtype=torch.bfloat16)
    reduced = Reduced(policy, Config(max_grad_norm=1e30), World())
    c = case_config(loss_type, scale, mask)
    update_at(0.0, reduced.policy, reduced.optimizer, with_advantages(ragged_rollouts(), c), c, reduced.world)
    grad = reduced.pop()
    assert distance(grad, expected[case][0]) < 0.05 and {g.dtype for g in grad.values()} == {torch.float32}


def test_ranks_see_the_same_sums():
    first, second = (r["gradients"] for r in ranks.results(2))
    assert all(first[key]["row"] == second[key]["row"] for key in first)


# ---- L2: denominators --------------------------------------------------------------------------------------

def test_denominators_by_hand():
    tokens = [2, 4, 0, 1]
    assert LOSSES["grpo"].denominators(tokens, 10) == [6, 12, 0, 3]
    assert LOSSES["dapo"].denominators(tokens, 10) == [7] * 4 == LOSSES["cispo"].denominators(tokens, 10)
    assert LOSSES["dr_grpo"].denominators(tokens, 10) == [30] * 4
    assert LOSSES["dr_grpo"].denominators(tokens, 5) == [15] * 4


def loss_of(policy, rollouts, world=None, **options):
    """update() on hand-made advantages, without correction: the metrics, and the gradient."""
    c = Config(**{"num_generations": len(rollouts), "max_completion_length": 10, "max_grad_norm": 1e30,
                  "vllm_importance_sampling_correction": False, **options})
    reduced = Reduced(policy, c, world or World())
    rollouts = [dataclasses.replace(r, slot=i) for i, r in enumerate(rollouts)]
    row, _ = update_at(0.0, policy, reduced.optimizer, rollouts, c, reduced.world)
    return row, reduced.pop() if reduced.seen else {}


@pytest.fixture
def policy(checkpoint):
    return Policy.from_folder(checkpoint[0], dtype=DOUBLE)


# Tokens 2, 4, 3 and 1 with advantages 1, -0.5, 0 and 2: sums 2, -2, 0 and 2.
@pytest.mark.parametrize("loss_type, loss", [
    ("dapo", -2 / 10), ("grpo", -(1 - 0.5 + 0 + 2) / 4), ("dr_grpo", -2 / 40)])
def test_denominators_count_tokens_of_advantage_zero(policy, loss_type, loss):
    batch = [rollout(completion=range(2, 2 + n), advantage=a)
             for n, a in [(2, 1.0), (4, -0.5), (3, 0.0), (1, 2.0)]]
    row, _ = loss_of(policy, batch, loss_type=loss_type)
    assert row["loss"] == pytest.approx(loss, rel=1e-12) and row["trained_tokens"] == 10


# Without the unrewarded, the truncated and the broken there remain 2, 3 and 1 tokens with sums 2, -1.5 and 2.
@pytest.mark.parametrize("loss_type, loss", [
    ("dapo", -2.5 / 6), ("grpo", -(1 - 0.5 + 2) / 3), ("dr_grpo", -2.5 / 30)])
def test_denominators_come_after_every_mask(policy, loss_type, loss):
    batch = [rollout(completion=range(2, 4), advantage=1.0),
             rollout(completion=range(2, 6), advantage=-0.5, logps=[-1, NAN, -1, -1]),
             rollout(completion=range(2, 5), advantage=5.0, reward=None),
             rollout(completion=range(2, 10), advantage=7.0, truncated=True),
             rollout(completion=range(2, 4), advantage=9.0, logps=[NAN, -INF]),
             rollout(completion=range(2, 3), advantage=2.0)]
    sums, _ = loss_of(policy, batch, loss_type=loss_type, mask_truncated_completions=True)
    assert sums["loss"] == pytest.approx(loss, rel=1e-12)
    assert sums["trained_tokens"] == 6 and sums["broken_logprobs"] == 3


# ---- L3: the sampler's ids are trained as they are ---------------------------------------------------------

def end_of_text(folder, policy, batch, **options):
    """(distance to the plain loop, the gradient): all advantages 1 over the tokens that are there."""
    for r in batch:
        r.advantage = 1.0
    _, grad = loss_of(policy, batch, **options)
    c = Config(num_generations=len(batch), vllm_importance_sampling_correction=False, **options)
    [(want, _, _)] = plain_gradients(folder, batch, [c], [1.0] * len(batch))
    return distance(grad, want), grad


def test_an_emitted_eos_is_trained(checkpoint, policy):
    with_eos = [rollout(prompt=[3, 4], completion=[5, 6, EOS])]
    far, grad = end_of_text(checkpoint[0], policy, with_eos)
    assert far < 1e-12
    c = Config(num_generations=1, vllm_importance_sampling_correction=False)
    without_eos = [rollout(prompt=[3, 4], completion=[5, 6])]
    [(without, _, _)] = plain_gradients(checkpoint[0], without_eos, [c], [1.0])
    assert distance(grad, without) > 0.1


@pytest.mark.parametrize("cut", [[5, 6], [5, EOS, 6], [EOS]])
def test_nothing_is_appended_to_a_truncated_completion(tmp_path, cut):
    """Untied, the last token gets no gradient in the embedding table: nothing is predicted from it."""
    write_checkpoint(tmp_path, "llama-biases", scale=5.0, **SMALL)
    policy = Policy.from_folder(tmp_path, dtype=DOUBLE)
    far, grad = end_of_text(tmp_path, policy, [rollout(prompt=[3, 4], completion=[*cut, 9], truncated=True)])
    rows = grad["model.embed_tokens.weight"].abs().sum(-1)
    assert far < 1e-12
    assert rows[9] == 0 and all(rows[t] > 0 for t in {3, 4, *cut})


def test_eos_as_padding_and_inside_prompts_is_harmless(checkpoint, policy):
    """Lengths decide, ids do not: EOS first, last, doubled, in the prompt, beside longer neighbours."""
    batch = [rollout(prompt=p, completion=c) for p, c in [
        ([EOS, 3, EOS], [5, EOS, EOS]), ([EOS], [EOS]), ([7] * 9, [8] * 7 + [EOS]), ([4, EOS], [EOS, 6, 7])]]
    far, _ = end_of_text(checkpoint[0], policy, batch)
    assert far < 1e-12


class FakeTokenizer:
    eos_token_ids = [1, 2]

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(i) for i in ids if i not in self.eos_token_ids or not skip_special_tokens)


class FakeEngine:
    weight_version = 7

    def __init__(self, completions):
        self.completions = completions

    def generate(self, prompts, **options):
        self.prompts, self.options = prompts, options
        return self.completions


def test_evaluation_ends_completions_where_rollouts_do():
    engine, stop = FakeEngine([[([5, 6], [0.0, 0.0])]]), ["</answer>"]
    world = types.SimpleNamespace(my_part=lambda items: items, barrier=lambda stage: None, all_gather=lambda value: [value])
    scores = types.SimpleNamespace(parts={"f": [1.0]}, rewards=[1.0])
    scorer = types.SimpleNamespace(score=lambda groups: [scores for _ in groups])
    inputs = minigrpo.Inputs(None, None, FakeTokenizer(), None, {"a": [Prompt("a", [3], {})]}, scorer, updates=1, schedule=1)
    assert minigrpo.evaluate(engine, inputs, Config(stop=stop), world) == {"eval/accuracy": 1.0}
    assert engine.options["stop"] == stop


def test_rollouts_take_ids_as_sampled():
    """Truncated means: the last id is none of the EOS ids and completes no stop string, whatever the length."""
    groups = [[([5, 6, 1], [-1.0, -2.0, -3.0]), ([1, 5, 6], [-1.0, -1.0, -1.0])],
              [([2], [-0.5]), ([7], [-0.25])]]
    engine = FakeEngine(groups)
    prompts = [(4, Prompt("a", [3], {})), (9, Prompt("b", [3, 3], {}))]
    c = Config(num_generations=2, max_completion_length=3, temperature=0.6, seed=11)
    generate = lambda prompts: minigrpo.generate_rollouts(engine, prompts, 5, FakeTokenizer(), c)
    made = generate(prompts)
    assert [(r.completion_ids, r.sampler_logps) for r in made] == [pair for group in groups for pair in group]
    assert [r.truncated for r in made] == [False, True, False, True]
    assert [r.slot for r in made] == [8, 9, 18, 19] and {r.weight_version for r in made} == {7}
    assert [r.prompt_ids for r in made] == [[3], [3], [3, 3], [3, 3]] and made[1].completion == "5 6"
    assert [r.seed for r in made] == [sample_seed(11, 5, 0, slot) + i for slot in (4, 9) for i in (0, 1)]
    assert engine.prompts == [[3], [3, 3]]
    assert engine.options == dict(n=2, max_tokens=3, temperature=0.6, eos_token_ids=[1, 2], stop=(),
                                  seeds=[sample_seed(11, 5, 0, 4), sample_seed(11, 5, 0, 9)])
    c.stop = ["6", "1 5 7"]
    made = generate(prompts)
    assert [r.truncated for r in made] == [False, False, False, True] and engine.options["stop"] == ["6", "1 5 7"]
    engine.completions = [[([1, 5, 7], [0.0] * 3), ([5, 7, 7], [0.0] * 3)]]  # special tokens belong to the text
    made = generate(prompts[:1])
    assert [r.truncated for r in made] == [False, True]


# ---- L4: advantages ----------------------------------------------------------------------------------------

def advantages(*groups, scale="group"):
    return group_advantages(torch.tensor(groups, dtype=DOUBLE), scale).tolist()


def test_one_success_in_eight():
    # Mean 1/8; std with Bessel's correction sqrt((49/64 + 7/64) / 7) = sqrt(1/8).
    [[first, *others]] = advantages([1, 0, 0, 0, 0, 0, 0, 0])
    assert first == pytest.approx(0.875 / (math.sqrt(1 / 8) + 1e-4), rel=1e-12)
    assert others == pytest.approx([-0.125 / (math.sqrt(1 / 8) + 1e-4)] * 7, rel=1e-12)
    assert round(first, 4) == 2.4742 and round(others[0], 4) == -0.3535


def test_missing_rewards_stay_out_of_mean_and_std():
    assert advantages([1, NAN, 0, NAN])[0] == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4), 0,
                                                            -0.5 / (math.sqrt(0.5) + 1e-4), 0])
    assert advantages([5, NAN, NAN, NAN], [NAN] * 4) == [[0] * 4] * 2
    assert advantages([5, NAN, NAN, 4], [NAN] * 4, scale="none") == [[0.5, 0, 0, -0.5], [0] * 4]
    for scale in ("none", "batch"):
        assert advantages([5, NAN, NAN, NAN], scale=scale) == [[0] * 4]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_that_agree_give_exactly_zero(scale):
    agree = [0.1 + 0.2, 0.3, 0.3, 0.3]  # differ in the last bit
    near, apart = [0.0, 0.0, 0.0, 1e-6], [0.0, 0.0, 0.0, 1.1e-6]
    a, b, c = advantages(agree, near, apart, scale=scale)
    assert a == b == [0.0] * 4
    assert c[3] > 0 > c[0]
    assert advantages([NAN, 2, 2, 2], scale=scale) == [[0.0] * 4]


def test_scale_over_the_batch_or_not_at_all():
    # All rewards 0, 1, 2, 5: mean 2, squares 4 + 1 + 0 + 9, std sqrt(14 / 3); group means 0.5 and 3.5.
    assert advantages([0, 1], [2, 5], scale="none") == [[-0.5, 0.5], [-1.5, 1.5]]
    std = math.sqrt(14 / 3) + 1e-4
    [a, b] = advantages([0, 1], [2, 5], scale="batch")
    assert a == pytest.approx([-0.5 / std, 0.5 / std]) and b == pytest.approx([-1.5 / std, 1.5 / std])
    [a, b, _] = advantages([0, 1], [2, 5], [NAN, NAN], scale="batch")  # what is missing stays out
    assert a == pytest.approx([-0.5 / std, 0.5 / std]) and b == pytest.approx([-1.5 / std, 1.5 / std])


def test_groups_go_by_index_so_that_duplicate_prompts_stay_apart():
    batch = [rollout(i, prompt=[3, 4], reward=r) for i, r in enumerate([1.0, 0.0, 5.0, 3.0])]
    assert [r.advantage for r in with_advantages(batch, Config(num_generations=2, scale_rewards="none"))] == [0.5, -0.5, 1, -1]
    assert reward_table(batch, 2).tolist() == [[1, 0], [5, 3]]


def test_masked_truncated_completions_stay_in_mean_and_std(policy):
    batch = [rollout(i, reward=r, truncated=i == 0) for i, r in enumerate([1.0, 0.0, 0.0])]
    batch = with_advantages(batch, Config(num_generations=3, scale_rewards="none", mask_truncated_completions=True))
    assert [r.advantage for r in batch] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    sums, _ = loss_of(policy, batch, mask_truncated_completions=True)
    assert sums["loss"] == pytest.approx(1 / 3) and sums["trained_tokens"] == 6  # itself it does not train


def test_unrewarded_completions_replace_old_advantages():
    batch = with_advantages([rollout(i, reward=None, advantage=3.0) for i in range(2)], Config(num_generations=2))
    assert [r.advantage for r in batch] == [0.0, 0.0]


# ---- L5 and the clipped surrogate --------------------------------------------------------------------------

def surrogate(ratios, advantages, *, gaps=None, weight=None, cap=None, completion=None, **options):
    """(loss, gradient of each log-probability, sums) with old log-probabilities of -1."""
    ratios = torch.tensor(ratios, dtype=DOUBLE)
    logp = (ratios.log() - 1).requires_grad_()
    old = torch.full_like(ratios, -1.0)
    sampler = old - torch.tensor(gaps if gaps is not None else [0.0] * len(ratios), dtype=DOUBLE)
    weight = torch.tensor(weight if weight is not None else [1.0] * len(ratios), dtype=DOUBLE)
    batch = MicroBatch([], None, None, completion, sampler, torch.tensor(advantages, dtype=DOUBLE), weight, old)
    c = Config(**{"epsilon": 0.2, "epsilon_high": 0.3, "vllm_importance_sampling_correction": cap is not None,
                  "vllm_importance_sampling_clip_max": cap, **options})
    loss, sums = policy_loss(logp, batch, c)
    loss.backward()
    return loss.item(), logp.grad.tolist(), {k: v.item() for k, v in sums.items()}


@pytest.mark.parametrize("ratio, advantage, value, slope, clipped", [
    (1.5, 2.0, 2 * 1.3, 0, True),       # already likelier than 1 + epsilon_high: no more
    (1.25, 2.0, 2 * 1.25, 2.5, False),  # above 1 + epsilon, under 1 + epsilon_high
    (0.5, 2.0, 2 * 0.5, 1.0, False),    # a good token that became rare: pulled back, never clipped
    (0.5, -2.0, -2 * 0.8, 0, True),
    (0.9, -2.0, -2 * 0.9, -1.8, False),
    (1.5, -2.0, -2 * 1.5, -3.0, False),
    (1.0, 0.0, 0, 0, False), (1.5, 0.0, 0, 0, False), (0.5, 0.0, 0, 0, False)])
def test_clipping_by_hand(ratio, advantage, value, slope, clipped):
    loss, grad, sums = surrogate([ratio], [advantage])
    assert loss == pytest.approx(-value) == sums["loss"] and grad == pytest.approx([-slope])
    assert sums["clip_ratio"] == clipped


@pytest.mark.parametrize("ratio, advantage, value, slope", [
    (3.0, -2.0, -2 * 2.0, 0), (1.9, -2.0, -2 * 1.9, -3.8),  # capped at delta 2, where there was no cap
    (3.0, 2.0, 2 * 1.3, 0), (0.5, -2.0, -2 * 0.8, 0), (0.5, 2.0, 1.0, 1.0)])  # as without
def test_two_sided_clip_by_hand(ratio, advantage, value, slope):
    loss, grad, _ = surrogate([ratio], [advantage], delta=2.0)
    assert loss == pytest.approx(-value) and grad == pytest.approx([-slope])


@pytest.mark.parametrize("ratio, advantage, weight, clipped", [
    (1.5, 2.0, 1.5, False), (6.0, 2.0, 5.0, True), (6.0, -2.0, 5.0, False), (0.1, 2.0, 0.1, False)])
def test_cispo_by_hand(ratio, advantage, weight, clipped):
    """-min(ratio, 5) · advantage · log π; the gradient is that of log π alone, and no token loses it."""
    loss, grad, sums = surrogate([ratio], [advantage], loss_type="cispo", epsilon_high=5.0)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 1))
    assert grad == pytest.approx([-weight * advantage]) and sums["clip_ratio"] == clipped


def test_gspo_by_hand():
    """Completions of 2 tokens each. Ratios: sqrt(1.2 · 0.9) and sqrt(1.6 · 1.5), which is over 1.3. d ratio / d log π
    of a token = ratio / tokens."""
    first, second = math.sqrt(1.2 * 0.9), math.sqrt(1.6 * 1.5)
    gspo = dict(weight=[0.5, 0.5, 0.25, 0.25], completion=torch.tensor([0, 0, 1, 1]), importance_sampling_level="sequence")
    loss, grad, sums = surrogate([1.2, 0.9, 1.6, 1.5], [2.0, 2.0, 1.0, 1.0], **gspo)
    assert loss == pytest.approx(-(first * 2.0 + 0.5 * 1.3))
    assert grad == pytest.approx([-first, -first, 0, 0]) and sums["clip_ratio"] == 2
    assert sums["first_ratio_error"] == pytest.approx(second - 1)
    loss, grad, _ = surrogate([1.2, 0.9, 1.6, 1.5], [2.0, 2.0, -1.0, -1.0], **gspo)
    assert loss == pytest.approx(-(first * 2.0 - 0.5 * second))
    assert grad == pytest.approx([-first, -first, second / 4, second / 4])


def test_kl_by_hand():
    """k3 with log π_reference - log π = d: e^d - d - 1, slope 1 - e^d in log π."""
    logp = torch.tensor([-1.0, -2.0], dtype=DOUBLE, requires_grad=True)
    sampler = logp.detach() - 0.7  # whose correction is not for this term
    batch = MicroBatch([], None, None, None, sampler_logp=sampler, advantage=torch.zeros(2, dtype=DOUBLE),
                       weight=torch.tensor([0.5, 0.25], dtype=DOUBLE), old_logp=logp.detach(),
                       reference_logp=torch.tensor([-1.5, -1.0], dtype=DOUBLE))
    loss, sums = policy_loss(logp, batch, Config(beta=0.1))
    loss.backward()
    first, second = math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1
    assert loss.item() == pytest.approx(0.1 * (0.5 * first + 0.25 * second)) == sums["loss"].item()
    assert sums["kl"].item() == pytest.approx(first + second)
    assert logp.grad.tolist() == pytest.approx([0.05 * (1 - math.exp(-0.5)), 0.025 * (1 - math.e)])


def test_a_loss_is_one_function_and_one_line(monkeypatch, policy):
    """REINFORCE: A · log π, averaged over tokens; its gradient by plain autograd."""
    objective = lambda ratio, logp, advantage, c: (advantage * logp, torch.zeros_like(ratio, dtype=torch.bool))
    monkeypatch.setitem(LOSSES, "reinforce", Loss(objective, LOSSES["dapo"].denominators))
    batch = [rollout(completion=[5, 6], advantage=1.0), rollout(completion=[7, 8, EOS], advantage=-2.0)]
    row, grad = loss_of(policy, batch, loss_type="reinforce")
    weights = plain_weights(policy)
    tables = plain_logits(weights, policy.config, padded(batch)).log_softmax(-1)
    want = 0.0
    for table, r in zip(tables, batch):
        for k, token in enumerate(r.completion_ids):
            want = want - r.advantage * table[len(r.prompt_ids) + k - 1, token] / 5
    wanted = dict(zip(weights, torch.autograd.grad(want, list(weights.values()))))
    assert row["loss"] == pytest.approx(want.item()) and distance(grad, wanted) < 1e-12


def test_the_reference_is_the_first_model_and_comes_back_out(checkpoint):
    """With advantages of 0 only the KL term moves the policy: back to the reference, which is held as a shard."""
    c = Config(num_generations=2, beta=0.5, max_grad_norm=1e30, temperature=0.7,
               vllm_importance_sampling_correction=False)
    policy, first = (Policy.from_folder(checkpoint[0], dtype=DOUBLE) for _ in range(2))
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.05)
    optimizer = Reduced(policy, c, World()).optimizer
    optimizer.keep_reference(first.parameters())
    before = [p.clone() for p in policy.parameters()]
    with optimizer.as_reference():
        assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), first.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before))
    batch = [rollout(i, completion=[3 + i, 5, 7]) for i in range(2)]
    for r in batch:
        r.advantage = 0.0
    row, _ = update_at(0.0, policy, optimizer, batch, c, World())

    def logps(model, r):
        stream = torch.tensor(r.prompt_ids + r.completion_ids)
        hidden = model.packed(stream, [len(stream)])[len(r.prompt_ids) - 1:-1]
        every = (hidden @ model.head_weight.T / 0.7).log_softmax(-1)
        return every.gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0]

    with torch.no_grad():
        d = torch.cat([logps(first, r) - logps(policy, r) for r in batch])
    kl = (d.exp() - d - 1).mean().item()
    assert kl > 1e-4 and row["kl"] == pytest.approx(kl, rel=1e-9) and row["grad_norm"] > 0
    assert row["loss"] == pytest.approx(0.5 * kl, rel=1e-9)


@pytest.mark.parametrize("options", [
    {}, {"micro_batch_tokens": 12}, {"num_iterations": 2}, {"num_minibatches": 2}, {"mask_truncated_completions": True}])
def test_old_logps_are_those_before_the_update(checkpoint, options):
    """Of every token that trains, by transformers; None for the others. The update itself is large."""
    folder, oracle = checkpoint
    c = Config(num_generations=4, prompts_per_step=7, temperature=0.6, learning_rate=1e-2, max_completion_length=LONGEST,
               **options)
    batch, policy = with_advantages(ragged_rollouts(), c), Policy.from_folder(folder)
    row, old = update_at(1e-2, policy, optimizer_of(policy, c, World()), batch, c, World())
    assert math.isfinite(row["grad_norm"])
    with torch.no_grad():
        tables = (oracle(padded(batch)).logits / 0.6).log_softmax(-1)
    for r, table in zip(batch, tables):
        trained = set(r.trained(c.mask_truncated_completions))
        if not trained:
            assert r.slot not in old
            continue
        rows = table[len(r.prompt_ids) - 1:]
        for k, (row, token) in enumerate(zip(rows, r.completion_ids)):
            assert old[r.slot][k] == (pytest.approx(row[token].item(), abs=2e-5) if k in trained else None)
    assert 3 < len(batch) - len(old) < len(batch)


def test_old_logps_of_two_ranks_come_together_and_only_where_rollouts_are_kept(checkpoint):
    one, two = ranks.results(1)[0]["old_logps"], [part["old_logps"] for part in ranks.results(2)]
    assert set(one) == {r.slot for r in ragged_rollouts() if r.trained(False)}
    for slot, logps in one.items():
        for mine, first, second in zip(logps, two[0][slot], two[1][slot], strict=True):
            assert first == second and (mine is None) == (first is None)
            assert mine is None or mine == pytest.approx(first, abs=1e-5)
    calls, policy = [], Policy.from_folder(checkpoint[0])
    world, c = World(), Config(num_generations=4, save_rollouts=0)
    world.all_gather = lambda value: (calls.append(value), [value])[1]
    _, old = update_at(0.0, policy, optimizer_of(policy, c, world), with_advantages(ragged_rollouts(), c), c, world)
    [sums] = calls  # nothing else travels
    assert sums["tokens"] > 0 and old == {}


def test_leave_one_out_by_hand():
    """Each reward against the mean of the others: 1 - 1/3, 0 - 2/3 …; nothing is divided by a standard deviation."""
    scores = torch.tensor([[1.0, 0, 1, 0], [3, math.nan, 1, 2], [5, 5, 5, 5]], dtype=DOUBLE)
    assert group_advantages(scores, "none", "leave_one_out").tolist() == [
        pytest.approx([2 / 3, -2 / 3, 2 / 3, -2 / 3]), pytest.approx([1.5, 0, -1.5, 0]), [0, 0, 0, 0]]
    scaled = group_advantages(scores, "group", "leave_one_out")[0]
    assert scaled.tolist() == pytest.approx([x * 4 / 3 for x in group_advantages(scores)[0].tolist()])


def test_several_updates_a_batch_by_plain_autograd(checkpoint):
    """Two passes in two optimizer steps each against the same written down plainly: old
    log-probabilities from before the first step, denominators of each minibatch, AdamW between."""
    c = Config(num_generations=2, prompts_per_step=4, num_iterations=2, num_minibatches=2, loss_type="grpo",
               learning_rate=1e-2, adam_epsilon=1e-3, epsilon=0.05, epsilon_high=0.1, max_completion_length=10,
               micro_batch_tokens=12, max_grad_norm=0.5, vllm_importance_sampling_correction=False, temperature=0.7)
    batch = [rollout(i, completion=[3 + i, 5, 7 + i % 3][:1 + i % 3], advantage=(-1.0) ** i * (1 + i))
             for i in range(8)]
    policy, other = (Policy.from_folder(checkpoint[0], dtype=DOUBLE) for _ in range(2))
    sums, _ = update_at(1e-2, policy, optimizer_of(policy, c, World()), batch, c, World())

    def logps(r):
        stream = torch.tensor(r.prompt_ids + r.completion_ids)
        hidden = other.packed(stream, [len(stream)])[len(r.prompt_ids) - 1:-1]
        every = (hidden @ other.head_weight.T / 0.7).log_softmax(-1)
        return every.gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0]

    with torch.no_grad():
        old = [logps(r) for r in batch]
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    losses, norms, clipped = [], [], 0
    for half in (range(4), range(4, 8)) * 2:
        loss = 0.0
        for i in half:
            ratio, a = (logps(batch[i]) - old[i]).exp(), batch[i].advantage
            loss = loss - torch.minimum(ratio * a, ratio.clamp(0.95, 1.1) * a).mean() / 4
            clipped += int(((ratio < 0.95) & (a < 0) | (ratio > 1.1) & (a > 0)).sum())
        adam.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5).item())
        adam.step()
    assert clipped > 0 and losses[0] != losses[2]
    for p, q in zip(policy.parameters(), other.parameters()):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)
    assert sums["loss"] == pytest.approx(sum(losses) / 4)
    assert sums["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-4)
    tokens = sum(len(r.completion_ids) for r in batch)
    assert sums["clip_ratio"] == pytest.approx(clipped / (2 * tokens)) and sums["trained_tokens"] == tokens
    assert sums["first_ratio_error"] < 1e-12 and sums["skipped_updates"] == 0


def test_mini_batches_are_of_whole_groups(checkpoint, monkeypatch):
    """Seven groups of four in three optimizer steps: 2, 2 and 3 groups."""
    c = Config(num_generations=4, prompts_per_step=7, num_minibatches=3, max_completion_length=LONGEST)
    real, cut = minigrpo.make_micro_batches, []
    monkeypatch.setattr(minigrpo, "make_micro_batches", lambda policy, rollouts, *rest: (
        cut.append([r.slot for r in rollouts]), real(policy, rollouts, *rest))[1])
    policy = Policy.from_folder(checkpoint[0])
    update_at(1e-3, policy, optimizer_of(policy, c, World()), with_advantages(ragged_rollouts(), c), c, World())
    assert cut == [list(range(8)), list(range(8, 16)), list(range(16, 28))]


def test_weights_multiply():
    loss, grad, sums = surrogate([1.0, 1.1], [1.0, -2.0], weight=[0.25, 0.5], gaps=[0.0, 0.1])
    assert loss == pytest.approx(-0.25 + 1.1) and grad == pytest.approx([-0.25, 1.1])
    assert sums["clip_ratio"] == 0
    assert sums["logprob_gap/mean"] == pytest.approx(0.1) == sums["logprob_gap/max"]


def test_importance_correction_is_capped_above_and_measured_uncapped():
    # Trainer over sampler probability 4, 0.5, 1 and 2.5, with a cap of 2: weights 2, 0.5, 1 and 2.
    gaps = [math.log(4), math.log(0.5), 0.0, math.log(2.5)]
    loss, grad, sums = surrogate([1.0] * 4, [1.0, 1.0, 1.0, -1.0], gaps=gaps, cap=2.0)
    assert loss == pytest.approx(-(2 + 0.5 + 1 - 2)) and grad == pytest.approx([-2, -0.5, -1, 2])
    assert sums["importance_ratio/mean"] == pytest.approx(8) and sums["importance_ratio/max"] == pytest.approx(4)
    assert sums["importance_ratio/squared"] == pytest.approx(16 + 0.25 + 1 + 6.25)
    assert sums["logprob_gap/max"] == pytest.approx(math.log(4))
    assert sums["logprob_gap/mean"] == pytest.approx(math.log(4) + math.log(2) + math.log(2.5))
    loss, _, without = surrogate([1.0] * 4, [1.0, 1.0, 1.0, -1.0], gaps=gaps, cap=None)
    assert loss == pytest.approx(-2)
    assert {k: v for k, v in without.items() if k != "loss"} == {k: v for k, v in sums.items() if k != "loss"}


@pytest.mark.parametrize("broken", [NAN, -INF, INF])
def test_tokens_without_a_sampler_log_probability_are_harmless(policy, broken):
    """Beside the first completion stands one with a broken token: as if that one token were not trained."""
    batch = [rollout(completion=[5, 6, 7], advantage=1.0), rollout(completion=[8, 9], advantage=-1.0)]
    batch[1].sampler_logps[0] = broken
    row, grad = loss_of(policy, batch, vllm_importance_sampling_correction=True)
    assert row["trained_tokens"] == 4 and row["broken_logprobs"] == 1
    assert all(g.isfinite().all() for g in grad.values())
    assert all(v is None or isinstance(v, list) or math.isfinite(v) for v in row.values())


def test_temperature_and_gap_against_transformers(checkpoint):
    """With the sampler's log-probabilities taken from transformers' logits / T, the gap is rounding."""
    folder, oracle = checkpoint
    batch = [r for r in ragged_rollouts() if r.reward is not None]
    with torch.no_grad():
        tables = (oracle(padded(batch)).logits / 0.6).log_softmax(-1)
    entropy = 0.0
    for r, table in zip(batch, tables):
        rows = table[len(r.prompt_ids) - 1:len(r.prompt_ids) + len(r.completion_ids) - 1]
        r.sampler_logps = [row[t].item() for row, t in zip(rows, r.completion_ids)]
        entropy -= (rows.exp() * rows).sum().item()
    sums, _ = loss_of(Policy.from_folder(folder), batch, temperature=0.6)
    tokens = sum(len(r.completion_ids) for r in batch)
    assert sums["trained_tokens"] == tokens and sums["entropy"] == pytest.approx(entropy / tokens, rel=1e-5)
    assert sums["logprob_gap/max"] < 2e-5 and sums["importance_ratio/max"] == pytest.approx(1, abs=2e-5)
    assert sums["importance_ratio/mean"] == pytest.approx(1, rel=1e-5)
    hotter, _ = loss_of(Policy.from_folder(folder), batch, temperature=1.0)
    assert hotter["logprob_gap/max"] > 0.1


def test_correction_and_its_cap_reach_the_update(checkpoint, policy):
    batch = ragged_rollouts()[:4]
    configs = [Config(num_generations=4), Config(num_generations=4, vllm_importance_sampling_clip_max=1.5),
               Config(num_generations=4, vllm_importance_sampling_correction=False)]
    batch = with_advantages(batch, configs[0])
    reduced = Reduced(policy, Config(max_grad_norm=1e30), World())
    wanted = plain_gradients(checkpoint[0], batch, configs)
    for c, (want, _, _) in zip(configs, wanted):
        update_at(0.0, policy, reduced.optimizer, batch, c, reduced.world)
        assert distance(reduced.pop(), want) < 1e-12
    assert min(distance(wanted[i][0], wanted[j][0]) for i, j in [(0, 1), (0, 2), (1, 2)]) > 1e-3


# ---- L6: on policy; nothing to train; not finite -----------------------------------------------------------

def test_with_one_update_the_ratio_is_exactly_one(policy):
    """A band of one rounding error around 1 clips nothing and changes no bit."""
    batch = with_advantages(ragged_rollouts(), Config(num_generations=4))
    reduced = Reduced(policy, Config(max_grad_norm=1e30), World())
    made = []
    for epsilon, high in [(0.2, 0.0), (1e-15, 0.0), (1e-15, 1e-15)]:
        c = Config(num_generations=4, epsilon=epsilon, epsilon_high=high)
        sums, _ = update_at(0.0, policy, reduced.optimizer, batch, c, reduced.world)
        assert sums["clip_ratio"] == 0
        made.append((sums["loss"], reduced.pop()))
    assert made[0][0] == made[1][0] == made[2][0]
    assert all(torch.equal(g, made[0][1][name]) for _, grad in made for name, g in grad.items())


@pytest.mark.parametrize("name", ["none rewarded", "no finite sampler"])
@pytest.mark.parametrize("world", [1, 2])
def test_batches_that_train_nothing(world, name):
    for odd in (r["odd"] for r in ranks.results(world)):
        row = odd[name]["row"]
        assert row["loss"] == 0 and row["grad_norm"] == 0 and row["skipped_updates"] == 0
        assert all(g.isfinite().all() and not g.any() for g in odd[name]["grad"].values())
        assert all(v is None or isinstance(v, list) or math.isfinite(v) for v in row.values())
        assert odd[name]["weights"].isfinite().all()
        assert row["unscored"] == (8 if name == "none rewarded" else 0)
        assert row["broken_logprobs"] == (0 if name == "none rewarded" else 24)


@pytest.mark.parametrize("world", [1, 2])
def test_equal_rewards_train_on_zeros(world):
    for odd in (r["odd"] for r in ranks.results(world)):
        row = odd["equal rewards"]["row"]
        assert row["loss"] == 0 and row["grad_norm"] == 0 and row["frac_reward_zero_std"] == 1
        assert row["entropy"] > 0.1  # they count as trained


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_not_finite_skips_the_update_everywhere(world):
    for odd in (r["odd"] for r in ranks.results(world)):
        assert not odd["not finite"]["changed"] and odd["not finite"]["row"]["skipped_updates"] == 1
        assert not math.isfinite(odd["not finite"]["row"]["grad_norm"])
        assert not odd["nan of the last rank"]["changed"]
        assert not math.isfinite(odd["nan of the last rank"]["norm"])
        for name in ("usual", "usual again"):  # `changed` does see changes, and the run goes on
            assert odd[name]["changed"] and odd[name]["row"]["skipped_updates"] == 0
            assert odd[name]["row"]["grad_norm"] > 0 and odd[name]["weights"].isfinite().all()


# ---- L8: no rank hangs another -----------------------------------------------------------------------------

def test_ranks_with_uneven_work_agree():
    """One sequence for two ranks, or none at all: the same rows, and the same weights to the last bit."""
    one, first, second = (r["odd"] for size in (1, 2) for r in ranks.results(size))
    for name in one:
        if "row" in one[name]:
            a, b = first[name]["row"], second[name]["row"]
            assert {k: repr(v) for k, v in a.items()} == {k: repr(v) for k, v in b.items()}
            for key, value in one[name]["row"].items():
                close = value is None or a[key] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True)
                assert close or "per_gpu" in key, (name, key)
            weights = one[name]["weights"]
            assert torch.equal(first[name]["weights"], second[name]["weights"])
            assert (first[name]["weights"][:len(weights)] - weights).abs().max() < 1e-4
    assert one["one trains"]["row"]["grad_norm"] > 0 and one["one trains"]["changed"]


REWARD = "def remainder(completion_ids, **_):\n    return [float(sum(ids) % 3) for ids in completion_ids]\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders PROMPTSxRANKS of two steps, with fewer prompts than ranks, and of one rank for each."""
    folder = tmp_path_factory.mktemp("runs")
    ranks.write_digits_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    options = dict(model=folder / "model", reward=f"{folder}/reward.py:remainder", reward_workers=0,
                   num_generations=6, max_steps=2, max_completion_length=5, max_prompt_length=8, seed=3,
                   micro_batch_tokens=16, temperature=0.8, learning_rate=1e-2, adam_epsilon=1e-3)

    def flags(prompts, size):
        every = {**options, "prompts_per_step": prompts, "eval_steps": 1, "out": folder / f"{prompts}x{size}"}
        return [str(part) for name, value in every.items() for part in (f"--{name}", value)]

    started = [ranks.start(size, "minigrpo.py", *flags(prompts, size)) for prompts, size in [(1, 2), (2, 3)]]
    with ranks.signals_kept():
        for prompts in (1, 2):
            minigrpo.train(parse(flags(prompts, 1)), World())
    for process in started:
        ranks.finish(process)
    return folder


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("prompts, size", [(1, 2), (2, 3)])
def test_more_ranks_than_prompts_give_the_same_run(runs, prompts, size):
    alone, shared = runs / f"{prompts}x1", runs / f"{prompts}x{size}"
    for step in (0, 1):
        one, many = (rows_of(run / f"rollouts/step_{step}.jsonl") for run in (alone, shared))
        assert len(one) == len(many) == 6 * prompts
        for a, b in zip(one, many):
            for key in ("sampler_logps", "trainer_logps"):
                assert a.pop(key) == pytest.approx(b.pop(key), abs=1e-5)
            assert a == b
    one, many = (rows_of(run / "metrics.jsonl") for run in (alone, shared))
    assert len(one) == len(many) == 3
    for a, b in zip(one, many):
        assert a.keys() == b.keys() == set(METRICS)
        for key in a:
            if not key.startswith(("time/", "tokens_per")):
                assert a[key] == b[key] or a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
    a, b = (Policy.from_folder(run / "latest") for run in (alone, shared))
    assert all((p - q).abs().max() < 1e-4 for p, q in zip(a.parameters(), b.parameters()))
    start = Policy.from_folder(runs / "model")
    assert max((p - q).abs().max() for p, q in zip(a.parameters(), start.parameters())) > 1e-3


def test_a_run_records_what_happened(runs):
    """Rewards and advantages worked out again from the rollouts; without vLLM the gap is rounding."""
    rows = rows_of(runs / "2x3" / "metrics.jsonl")
    for step in (0, 1):
        rollouts = rows_of(runs / "2x3" / f"rollouts/step_{step}.jsonl")
        rewards = [float(sum(r["completion_ids"]) % 3) for r in rollouts]
        groups = [rewards[:6], rewards[6:]]
        stds = [statistics.stdev(group) for group in groups]
        assert [r["reward"] for r in rollouts] == rewards and min(stds) > 0
        assert len({r["prompt"] for r in rollouts[:6]}) == len({r["prompt"] for r in rollouts[6:]}) == 1
        assert [r["advantage"] for r in rollouts] == pytest.approx(
            [(x - statistics.fmean(group)) / (std + 1e-4) for group, std in zip(groups, stds) for x in group])
        assert [r["slot"] for r in rollouts] == list(range(12))
        assert {r["weight_version"] for r in rollouts} == {step}
        row, lengths = rows[step], [len(r["completion_ids"]) for r in rollouts]
        assert row["step"] == row["weight_version"] == step
        assert row["reward"] == pytest.approx(statistics.fmean(rewards))
        assert row["reward_std"] == pytest.approx(statistics.fmean(stds))
        assert row["completions/mean_length"] == pytest.approx(statistics.fmean(lengths))
        cut = [r["completion_ids"][-1] != 12 for r in rollouts]
        assert [r["truncated"] for r in rollouts] == cut
        assert row["completions/clipped_ratio"] == statistics.fmean(cut)
        assert row["loss"] == pytest.approx(
            -sum(n * r["advantage"] for n, r in zip(lengths, rollouts)) / sum(lengths), abs=1e-4)
        assert row["logprob_gap/max"] < 1e-4 and row["importance_ratio/max"] == pytest.approx(1, abs=1e-4)
        assert row["ess"] == pytest.approx(1, abs=1e-4)
        assert row["clip_ratio"] == row["skipped_updates"] == row["unscored"] == row["broken_logprobs"] == 0
        assert row["grad_norm"] > 0 and row["learning_rate"] == 1e-2
    assert rows[2]["step"] == 2 and rows[2]["eval/accuracy"] is not None and rows[2]["loss"] is None
