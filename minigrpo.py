"""GRPO from scratch: every rank trains the policy and generates with a vLLM engine colocated on the same GPU.

    torchrun --nproc_per_node=8 minigrpo.py --colocate               # a tiny built-in model learns to add
    torchrun --nproc_per_node=8 minigrpo.py --colocate --model Qwen/Qwen2.5-1.5B-Instruct --data gsm8k.jsonl
    torchrun --nproc_per_node=8 minigrpo.py --split                  # 7 train, 1 generates: for comparison
    python minigrpo.py                                               # no vLLM: the policy samples for itself

One step: wake the engine and push every weight into it, generate a group of completions for each prompt, put
the engine to sleep, score, turn rewards into advantages inside each group, update, record.

After the rollouts of all ranks are gathered, everything up to the gradient is a pure function of that one
batch: advantages, denominators and the division of work are computed by every rank alike, so no rank can wait
for another.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import itertools
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import colocate
import data
import model
import rewards
import sharded
from checkpoint import Health, RecordedEngine, Run, step_metrics
from colocate import ColocatedEngine, RemoteEngine, completes
from data import Prompt, PromptSet, Tokenizer, UserError, load_data, load_prompts, prompt_indices, sample_seed
from model import (
    WARM_START, ModelConfig, Policy, PolicySampler, balance, checkpoint_folder, memory_plan, pack,
    parameter_count, token_logprobs, upload, write_tiny_model)
from rewards import Group, Scorer
from sharded import ShardedAdamW, World

USER_ERRORS = tuple(module.UserError for module in (checkpoint, colocate, data, model, rewards, sharded))
Engine = ColocatedEngine | RemoteEngine | PolicySampler | RecordedEngine  # wake, generate, sleep, close
ABOVE_0 = 1e-30  # and as much as fp32 can hold


def option(default, help: str, **more):
    """more: `choices`, or how `low` and `high` a number may be (if not said: 1 or more, fractions above 0)
    and what to `use` instead."""
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclass
class Config:
    """The command line. Names are TRL's where TRL has the option."""

    # what to train on
    model: str = option("tiny", "a folder with a Hugging Face checkpoint, or a hub id; tiny is built in")
    data: list[str] = option(("digits",), "prompts: files, or built in: digits (single-digit sums), sums "
                             "(two-digit)")
    eval_data: list[str] = option((), "files of prompts to evaluate on; built-in tasks bring their own")
    reward: list[str] = option(("gsm8k",), "reward functions: built-in names or file.py:function; the "
                               "first one is also the accuracy at evaluation")
    reward_weights: list[float] = option((), "one weight for each reward function (default 1)")
    reward_timeout: float = option(30.0, "seconds that scoring one group may take before it is killed")
    reward_workers: int = option(1, "processes that score on a rank; 0: the trainer's own", low=0, high=1024)
    system_prompt: str = option("", "put before every prompt as a system message")
    chat_template: str = option("", "a jinja file that replaces the model's chat template")
    chat_template_kwargs: str = option("", "keywords for the template, as JSON: {\"enable_thinking\": false}")
    prompt_column: str = option("", "column of the data file that holds the prompt (default: recognised)")
    answer_column: str = option("", "column that holds the gold answer (default: recognised)")
    max_prompt_length: int = option(512, "tokens; longer prompts are dropped at load, and counted")
    # rollouts
    colocate: bool = option(False, "a vLLM engine on every rank; without, the policy samples for itself")
    split: bool = option(False, "the last rank only generates, the others only train; to compare with")
    replay: str = option("", "a run's folder: trains on its rollouts; no engine, no evaluation")
    prompts_per_step: int = option(16, "prompts a step, over all ranks")
    num_generations: int = option(8, "completions a prompt: the group that a completion is compared with",
                                  low=2, use="2 or more, best 8 or 16: completions of a prompt are compared")
    max_completion_length: int = option(256, "tokens; a completion without EOS is cut here")
    stop: list[str] = option((), "texts that end a completion, e.g. </answer>; they train like the rest")
    dynamic_sampling_rounds: int = option(0, "replace groups whose rewards all agree, up to so many times "
                                          "(DAPO); when most are all right or all wrong", low=0, high=64)
    temperature: float = option(1.0, "divides the logits, in the sampler and in the trainer", low=0.01,
                                use="0.7 to 1.0; at 0 all completions are alike")
    vllm_gpu_memory_utilization: float = option(0.3, "share of the card that the awake engine may use; it "
                                                "takes less where the batch's KV cache is smaller",
                                                low=0.01, high=0.99, use="0.1 to 0.9")
    vllm_enforce_eager: bool = option(False, "no CUDA graphs: starts sooner, generates slower")
    # the update
    loss_type: str = option("dapo", "how tokens are averaged; cispo weighs instead of clipping",
                            choices=("grpo", "dapo", "dr_grpo", "cispo"))
    num_iterations: int = option(1, "passes over each batch; more than 1 uses dear rollouts again", high=64)
    num_minibatches: int = option(1, "optimizer steps a pass; at most prompts_per_step")
    epsilon: float = option(0.2, "lower clip of the probability ratio, 1 - epsilon; clips act from the "
                            "second update of a batch on")
    epsilon_high: float = option(0.0, "upper clip, 1 + epsilon_high; 0 takes epsilon. cispo: the cap itself",
                                 low=0)
    delta: float = option(0.0, "caps the ratio also where the advantage is negative; 0: does not", low=0)
    importance_sampling_level: str = option("token", "what has a ratio of its own; sequence: GSPO, with "
                                            "--loss_type grpo",
                                            choices=("token", "sequence"))
    beta: float = option(0.0, "weight of the KL term, which holds the policy near its first weights", low=0)
    scale_rewards: str = option("group", "std that divides advantages", choices=("group", "batch", "none"))
    baseline: str = option("group", "what a reward is compared with: the mean of all, or of the others",
                           choices=("group", "leave_one_out"))
    mask_truncated_completions: bool = option(False, "do not train on completions that were cut")
    vllm_importance_sampling_correction: bool = option(True, "weigh tokens by trainer/sampler probability")
    vllm_importance_sampling_clip_max: float = option(3.0, "cap of that weight")
    learning_rate: float = option(1e-6, "peak learning rate of AdamW")
    lr_scheduler_type: str = option("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    min_lr_rate: float = option(0.1, "the cosine ends at this part of the learning rate", low=0, high=0.999)
    warmup_steps: int = option(0, "steps of linear warm-up", low=0)
    weight_decay: float = option(0.0, "decoupled weight decay, of all parameters", low=0)
    adam_beta1: float = option(0.9, "AdamW", low=0, high=0.999999)
    adam_beta2: float = option(0.999, "AdamW", low=0, high=0.999999)
    adam_epsilon: float = option(1e-8, "AdamW")
    max_grad_norm: float = option(1.0, "the gradient's norm over all parameters is clipped to this")
    micro_batch_tokens: int = option(16384, "tokens of one forward and backward; lower it when out of memory")
    optimizer_offload: bool = option(False, "master weights and moments in the CPU's memory: slower updates")
    recompute: bool = option(False, "keep no activations between forward and backward: a third more work")
    compile: str = option("auto", "fuse layers with torch.compile, 10 to 15 s at first, updates a quarter "
                          "shorter; auto: GPUs, from 0.4 billion parameters", choices=("auto", "on", "off"))
    dtype: str = option("auto", "working weights; auto is bfloat16 on a GPU, float32 on a CPU",
                        choices=("auto", "bfloat16", "float32"))
    # the run
    max_steps: int = option(-1, "updates; -1 takes num_train_epochs over the data", low=-1,
                            use="1 or more, or leave it away for --num_train_epochs")
    num_train_epochs: float = option(1.0, "passes over the data when max_steps is not given", high=1e6)
    eval_steps: int = option(50, "evaluate every so many steps, before and after; 0: never", low=0)
    eval_num_generations: int = option(1, "completions a prompt at evaluation; from 2 on also gives pass@k")
    eval_temperature: float = option(0.0, "of evaluation; 0 is greedy", low=0)
    eval_max_completion_length: int = option(0, "tokens at evaluation; 0: as in training", low=0)
    save_steps: int = option(50, "a checkpoint every so many steps; the last weights are always written")
    save_total_limit: int = option(2, "checkpoints to keep")
    timeout_minutes: float = option(30.0, "give up, naming the rank, when one is so much later than another")
    max_skipped: int = option(10, "give up after so many updates in a row whose gradient is not finite")
    save_rollouts: int = option(10, "keep the completions of the last so many steps", low=0)
    log_completions: int = option(0, "how many to print a step; TRL's is a switch, ours a number", low=0)
    report_to: list[str] = option((), "where metrics go too; needs the package of that name",
                                  choices=("tensorboard", "wandb"))
    seed: int = option(0, "of the order of prompts and of every sample", low=-2**31)
    out: str = option("", "run folder (default: runs/<model>-<data>-<hash of the options>)")
    fresh: bool = option(False, "start anew where the run folder holds an earlier run")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the engine has to hold."""
        return self.max_prompt_length + max(self.max_completion_length, self.eval_max_completion_length)


# What the bare command runs: about two minutes on two CPU cores.
TINY = dict(prompts_per_step=32, num_generations=16, max_completion_length=4, max_prompt_length=8,
            max_steps=200, learning_rate=1e-3, lr_scheduler_type="linear", max_grad_norm=0.2, eval_steps=25)

REFUSED = {  # options that people bring along, and why they are not here
    **dict.fromkeys(
        ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        "rollouts are drawn from the policy itself (top_p 1, no top_k, no penalties): otherwise the "
        "sampler's log-probabilities are of another distribution than the one that is trained"),
    "per_device_train_batch_size": "use --prompts_per_step (over all ranks) and --micro_batch_tokens",
    "gradient_accumulation_steps": "use --micro_batch_tokens: micro-batches are cut by length",
    "steps_per_generation": "use --num_minibatches",
    "gradient_checkpointing": "use --recompute",
    **dict.fromkeys(("use_vllm", "vllm_mode"), "use --colocate"),
}


def check(c: Config) -> None:
    """Raises UserError for values with which no run makes sense, and names values with which one does."""
    for field in dataclasses.fields(c):
        value, meta = getattr(c, field.name), field.metadata
        if type(value) not in (int, float):
            continue
        low, high = (1, 2**31) if type(value) is int else (ABOVE_0, 1e30)
        low, high = meta.get("low", low), meta.get("high", high)
        if not low <= value <= high:  # nor is NaN
            limit = f"at most {high}" if value > high else "above 0" if low == ABOVE_0 else f"{low} or more"
            use = meta.get("use", f"{limit}, e.g. {field.default}")
            raise UserError(f"--{field.name} {value}: use {use}")
    if (whole := c.prompts_per_step * c.num_generations) > 2**20:
        raise UserError(f"--prompts_per_step {c.prompts_per_step} times --num_generations "
                        f"{c.num_generations} is {whole}: use at most {2**20} completions a step")
    if c.max_steps == 0:
        raise UserError("--max_steps 0: use 1 or more, or leave it away for --num_train_epochs")
    if "" in c.stop:
        raise UserError('--stop "": use a text that completions are to end with, e.g. "</answer>"')
    if c.num_minibatches > c.prompts_per_step:
        raise UserError(f"--num_minibatches {c.num_minibatches}: use at most --prompts_per_step")
    if c.eval_num_generations > 1 and c.eval_temperature == 0:
        raise UserError(f"--eval_num_generations {c.eval_num_generations}: greedy completions are all alike: "
                        "give --eval_temperature, e.g. 1.0")
    if 0 < c.eval_temperature < 0.01:
        raise UserError(f"--eval_temperature {c.eval_temperature}: use 0 or at least 0.01")
    if c.loss_type == "cispo" and c.epsilon_high <= 1:
        raise UserError(f"--epsilon_high {c.epsilon_high} is the cap of cispo's weights: use e.g. 5")
    if 0 < c.delta <= 1 + (c.epsilon_high or c.epsilon):
        raise UserError(f"--delta {c.delta}: use more than 1 + epsilon_high, e.g. 2, or 0 for none")
    for package in c.report_to:  # a folder of that name is found too, and has no origin
        if not getattr(importlib.util.find_spec(package), "origin", None):
            raise UserError(f"--report_to {package} needs a package: pip install {package}")
    if c.colocate + c.split + bool(c.replay) > 1:
        raise UserError("--colocate, --split and --replay exclude each other: use --colocate, the fastest")
    if (c.colocate or c.split) and "RANK" not in os.environ:
        raise UserError(f"{'--split' if c.split else '--colocate'} runs under torchrun: torchrun "
                        f"--nproc_per_node={1 + c.split} {' '.join(sys.argv)}")
    if c.split and os.environ["WORLD_SIZE"] == "1":
        raise UserError("--split needs 2 ranks or more: --nproc_per_node=2, or --colocate on one")


# ---- The mathematics: pure functions -----------------------------------------------------------------------

def group_advantages(scores: torch.Tensor, scale_rewards: str = "group",
                     baseline: str = "group") -> torch.Tensor:
    """Advantage of each completion against its group: (r - mean) / (std + 1e-4) (DeepSeekMath, eq. of section
    4.1.2).

    scores: float64 [groups, G], NaN where there is no reward; those stay out of mean and std and get 0.
    scale_rewards: std over the "group", over the whole "batch", or "none" (Dr. GRPO). baseline: the mean over
    the whole "group", or over the others alone, "leave_one_out" (RLOO, eq. 5). A group whose rewards agree to
    1e-6, or with fewer than two of them, teaches nothing: exactly 0.
    """
    scored = ~scores.isnan()
    count = scored.sum(1, keepdim=True)
    mean = scores.nansum(1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(scored, scores - mean, 0.0)
    variance = centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    if baseline == "leave_one_out":  # r - (the others' mean) = (r - mean) · n / (n - 1)
        centered = centered * count / (count - 1).clamp(min=1)
    highest, lowest = scores.nan_to_num(-math.inf).amax(1), scores.nan_to_num(math.inf).amin(1)
    spread = (highest - lowest)[:, None]
    if scale_rewards == "group":
        centered = centered / (variance.sqrt() + 1e-4)
    elif scale_rewards == "batch" and scored.sum() > 1:
        centered = centered / (scores[scored].std() + 1e-4)
    return torch.where((spread > 1e-6) & (count > 1), centered, 0.0)


def completion_weights(tokens: list[int], loss_type: str, max_completion_length: int) -> list[float]:
    """What one token of each completion weighs in the loss of the whole optimizer step, over all ranks.

    tokens: trained tokens of every completion of the step, 0 where it is masked out.
    grpo: mean over each completion, then over completions (DeepSeekMath, eq. 3). dapo: mean over all tokens
    (DAPO, eq. 8), and so does cispo. dr_grpo: sum over tokens / max_completion_length, mean over completions
    (Dr. GRPO: no length bias).
    """
    completions = max(1, sum(n > 0 for n in tokens))
    if loss_type == "grpo":
        return [1 / (n * completions) if n else 0.0 for n in tokens]
    whole = max(1, sum(tokens)) if loss_type in ("dapo", "cispo") else completions * max_completion_length
    return [1 / whole if n else 0.0 for n in tokens]


def policy_loss(logp: torch.Tensor, old_logp: torch.Tensor, sampler_logp: torch.Tensor,
                advantage: torch.Tensor, weight: torch.Tensor, *, epsilon: float, epsilon_high: float,
                importance_cap: float | None, loss_type: str = "dapo", delta: float = 0.0,
                sequence: torch.Tensor | None = None,
                reference_logp: torch.Tensor | None = None, beta: float = 0.0) -> tuple[torch.Tensor, dict]:
    """The clipped surrogate (PPO, eq. 7), summed with weights that already hold the denominators.

    All float [T], a token each; weight is 0 where a token is not trained, whatever else stands there.
    delta: where above 0, cap of the ratio also where the advantage is negative (INTELLECT-2, eq. 1). "cispo"
    instead weighs log-probabilities by the ratio, capped at epsilon_high, without a gradient of its own
    (MiniMax-M1, eq. 4). sequence: int64 [T], the completion of each token: it has one ratio, the geometric
    mean over its trained tokens (GSPO, eq. 7). importance_cap: tokens are weighed by min(trainer / sampler
    probability, cap), the truncated importance sampling that corrects for the engine's rounding; None leaves
    it out. reference_logp: adds beta · KL, estimated as e^d - d - 1 with d = log π_reference - log π (k3 of
    Schulman 2020). Returns (loss, {sums for the metrics}).
    """
    trained = weight > 0
    log_ratio = torch.where(trained, logp - old_logp, 0.0)  # masked before exp: inf × 0 would be NaN
    if sequence is not None:
        total = lambda x: torch.zeros_like(x).index_add(0, sequence, x)
        log_ratio = (total(log_ratio) / total(trained.to(logp.dtype)).clamp(min=1))[sequence]
    ratio = log_ratio.exp()
    advantage = torch.where(trained, advantage, 0.0)
    if loss_type == "cispo":
        surrogate = ratio.clamp(max=epsilon_high).detach() * advantage * torch.where(trained, logp, 0.0)
        clipped = (ratio > epsilon_high) & (advantage > 0)
    else:
        capped = ratio.clamp(max=delta) if delta else ratio
        surrogate = torch.minimum(capped * advantage, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage)
        clipped = (ratio < 1 - epsilon) & (advantage < 0) | (ratio > 1 + epsilon_high) & (advantage > 0)
    gap = torch.where(trained, old_logp - sampler_logp, 0.0)
    mismatch = torch.where(trained, gap.exp(), 0.0)
    correction = 1.0 if importance_cap is None else mismatch.clamp(max=importance_cap)
    loss = -(weight * correction * surrogate).sum()
    stats = {}
    if reference_logp is not None:
        difference = torch.where(trained, reference_logp - logp, 0.0)
        kl = difference.exp() - difference - 1
        loss, stats = loss + beta * (weight * kl).sum(), {"kl": kl.detach().sum()}
    return loss, {**stats, "loss": loss.detach(), "tokens": trained.sum(), "gap": gap.abs().sum(),
                  "gap_max": gap.abs().max(), "clipped": (clipped & trained).sum(),
                  "mismatch": mismatch.sum(), "mismatch_max": mismatch.max(),
                  "mismatch_squared": mismatch.square().sum(),
                  "ratio_error_max": (ratio - 1).abs().max().detach()}


def eval_metrics(points: dict[str, list[list[float]]]) -> dict[str, float]:
    """Accuracy, the mean over all completions, and pass@k for k = 2, 4, ...: the chance that one of k has the
    full score, from c such among n without bias 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    points: data set → prompt → the score of each of its n completions. Of several sets, of each one too.
    """
    sets = {"eval": [p for prompts in points.values() for p in prompts]}
    sets |= {f"eval/{name}": prompts for name, prompts in points.items() if len(points) > 1}
    row = {}
    for name, prompts in sets.items():
        n = len(prompts[0])
        row[f"{name}/accuracy"] = sum(sum(p) / n for p in prompts) / len(prompts)
        for k in (2**i for i in range(1, n.bit_length())):
            missed = [math.comb(n - sum(v >= 1 for v in p), k) / math.comb(n, k) for p in prompts]
            row[f"{name}/pass@{k}"] = 1 - sum(missed) / len(prompts)
    return row


def learning_rate_at(step: int, c: Config) -> float:
    """Learning rate of update `step`, from 0: linear warm-up, then constant, linear or cosine."""
    if step < c.warmup_steps:
        return c.learning_rate * (step + 1) / c.warmup_steps
    progress = (step - c.warmup_steps) / max(1, c.max_steps - c.warmup_steps)
    cosine = c.min_lr_rate + (1 - c.min_lr_rate) * (1 + math.cos(math.pi * progress)) / 2
    return c.learning_rate * {"constant": 1, "linear": 1 - progress, "cosine": cosine}[c.lr_scheduler_type]


# ---- Rollouts ----------------------------------------------------------------------------------------------

@dataclass
class Inputs:
    """What a run is given, read and checked."""

    tokenizer: Tokenizer
    prompts: PromptSet
    held_out: dict[str, list[Prompt]]  # name of the data set → its prompts
    scorer: Scorer
    policy: Policy
    updates: int  # of this run; the learning rate is scheduled over c.max_steps


@dataclass
class Rollout:
    """One completion. `slot` is its place in the batch of all ranks: prompt × num_generations + sample."""

    slot: int
    prompt: str | list[dict]
    prompt_ids: list[int]
    completion_ids: list[int]  # as sampled: the EOS is in it if and only if it was emitted
    sampler_logps: list[float]
    completion: str
    truncated: bool
    weight_version: int  # updates that the weights which produced it had seen
    seed: int  # with these weights it draws this completion of prompt_ids again
    round: int = 0  # of dynamic sampling: groups of this slot that were dropped before
    reward: float | None = None
    parts: dict | None = None  # reward of each function
    advantage: float = 0.0
    trainer_logps: list[float] | None = None  # of the policy before its update; None where it does not train

    def trained(self, mask_truncated: bool) -> list[bool]:
        """Which tokens train: none without reward or masked as truncated, and none with a broken log-prob."""
        if self.reward is None or (self.truncated and mask_truncated):
            return [False] * len(self.completion_ids)
        return self.finite()

    def finite(self) -> list[bool]:
        """Which log-probabilities of the sampler are numbers."""
        if math.isfinite(sum(self.sampler_logps)):  # all of them, in a tenth of the time
            return [True] * len(self.sampler_logps)
        return [math.isfinite(p) for p in self.sampler_logps]


def generate_rollouts(engine: Engine, prompts: list[tuple[int, Prompt]], step: int, tokenizer: Tokenizer,
                      c: Config, round: int = 0) -> list[Rollout]:
    """num_generations completions for each (slot, prompt) of this rank."""
    seeds = [sample_seed(c.seed, step, round, slot) for slot, _ in prompts]
    groups = engine.generate(
        [p.token_ids for _, p in prompts], n=c.num_generations, max_tokens=c.max_completion_length,
        temperature=c.temperature, seeds=seeds, eos_token_ids=tokenizer.eos_token_ids, stop=c.stop)
    cut = lambda ids: not (ids[-1] in tokenizer.eos_token_ids or c.stop and completes(tokenizer, ids, c.stop))
    return [Rollout(slot=slot * c.num_generations + i, prompt=prompt.prompt, prompt_ids=prompt.token_ids,
                    completion_ids=ids, sampler_logps=logps, completion=tokenizer.decode(ids), seed=seed + i,
                    truncated=cut(ids), weight_version=engine.weight_version, round=round)
            for (slot, prompt), seed, group in zip(prompts, seeds, groups)
            for i, (ids, logps) in enumerate(group)]


def replace_dull_groups(engine: Engine, rollouts: list[Rollout], mine: list[tuple[int, Prompt]],
                        step: int, inputs: Inputs, c: Config) -> None:
    """Dynamic sampling (DAPO, section 3.2): in place, groups without an advantage get another prompt.

    Which one follows from step, round and slot alone: no rank waits for another, and nothing is stored.
    """
    size, rounds = c.num_generations, c.dynamic_sampling_rounds
    for round in range(1, rounds + 1):
        score_rollouts(rollouts, mine, inputs.scorer, c)
        differs = group_advantages(rewards_of(rollouts, c)).any(1).tolist()
        dull = [group for group, useful in enumerate(differs) if not useful]
        prompts, position = inputs.prompts.train, step * (1 + rounds) + round
        indices = prompt_indices(position, c.prompts_per_step, len(prompts), c.seed)
        for group in dull:
            slot, _ = mine[group]
            mine[group] = slot, prompts[indices[slot]]
        fresh = generate_rollouts(engine, [mine[group] for group in dull], step, inputs.tokenizer, c, round)
        for i, group in enumerate(dull):
            rollouts[group * size:(group + 1) * size] = fresh[i * size:(i + 1) * size]


def score_rollouts(rollouts: list[Rollout], prompts: list[tuple[int, Prompt]], scorer: Scorer,
                   c: Config) -> None:
    """Fills in `reward` and `parts` where they are not yet; a group is scored in one call."""
    groups = [rollouts[i:i + c.num_generations] for i in range(0, len(rollouts), c.num_generations)]
    todo = [(prompt, group) for (_, prompt), group in zip(prompts, groups) if group[0].parts is None]
    scores = scorer.score([
        Group(prompt.prompt, [r.completion for r in group], [r.completion_ids for r in group], prompt.columns)
        for prompt, group in todo])
    for (_, group), result in zip(todo, scores):
        for i, rollout in enumerate(group):
            rollout.reward = result.rewards[i]
            rollout.parts = {name: values[i] for name, values in result.parts.items()}


def evaluate(engine: Engine, inputs: Inputs, c: Config, world: World) -> dict[str, float]:
    """eval_metrics by the first reward function, every rank its share of the prompts of all sets."""
    tokenizer, held_out = inputs.tokenizer, inputs.held_out
    mine = world.share([*enumerate(itertools.chain.from_iterable(held_out.values()))])
    groups = engine.generate(
        [p.token_ids for _, p in mine], n=c.eval_num_generations, temperature=c.eval_temperature,
        max_tokens=c.eval_max_completion_length or c.max_completion_length,
        seeds=[sample_seed(c.seed, -1, 0, i) for i, _ in mine], eos_token_ids=tokenizer.eos_token_ids,
        stop=c.stop)
    completions = [[ids for ids, _ in group] for group in groups]
    scores = inputs.scorer.score([Group(p.prompt, [tokenizer.decode(ids) for ids in group], group, p.columns)
                                  for (_, p), group in zip(mine, completions)])
    world.meet("evaluation")
    points = world.gather([[v or 0.0 for v in next(iter(s.parts.values()))] for s in scores])
    points = itertools.chain.from_iterable(points)  # of every prompt, in order
    return eval_metrics({name: [*itertools.islice(points, len(p))] for name, p in held_out.items()})


# ---- The update --------------------------------------------------------------------------------------------

def rewards_of(rollouts: list[Rollout], c: Config) -> torch.Tensor:
    """float64 [groups, G], NaN where there is no reward."""
    scores = [math.nan if r.reward is None else r.reward for r in rollouts]
    return torch.tensor(scores, dtype=torch.float64).view(-1, c.num_generations)


def assign_advantages(rollouts: list[Rollout], c: Config) -> torch.Tensor:
    """Fills in `advantage`. rollouts: of all ranks, by slot. Returns the rewards, [groups, G]."""
    scores = rewards_of(rollouts, c)
    advantages = group_advantages(scores, c.scale_rewards, c.baseline).flatten().tolist()
    for rollout, advantage in zip(rollouts, advantages):
        rollout.advantage = advantage
    return scores


def make_micro_batches(policy: Policy, rollouts: list[Rollout], c: Config,
                       world: World) -> tuple[list, list[int]]:
    """This rank's micro-batches of one optimizer step, each (rollouts, masks, weights), and the lengths of
    all sequences that train. Denominators and shares follow from the same list on every rank."""
    masks = [r.trained(c.mask_truncated_completions) for r in rollouts]
    weights = completion_weights([sum(m) for m in masks], c.loss_type, c.max_completion_length)
    useful = [i for i, w in enumerate(weights) if w > 0]
    lengths = [len(rollouts[i].prompt_ids) + len(rollouts[i].completion_ids) for i in useful]
    mine = balance([policy.update_flops([n]) for n in lengths], world.size)[world.rank]
    batches = [[useful[mine[i]] for i in b] for b in pack([lengths[i] for i in mine], c.micro_batch_tokens)]
    return [tuple([values[i] for i in b] for values in (rollouts, masks, weights)) for b in batches], lengths


def update(policy: Policy, optimizer: ShardedAdamW, rollouts: list[Rollout], learning_rate: float, c: Config,
           world: World) -> dict:
    """num_iterations passes over the batch of all ranks, each in num_minibatches optimizer steps. Returns the
    sums behind the metrics, over all ranks; on rank 0 also fills in the rollouts' `trainer_logps`."""
    groups = len(rollouts) // c.num_generations
    cuts = [m * groups // c.num_minibatches * c.num_generations for m in range(c.num_minibatches + 1)]
    parts = [rollouts[low:high] for low, high in itertools.pairwise(cuts)]
    steps = [make_micro_batches(policy, part, c, world) for part in parts]
    all_logps = lambda: [[completion_logprobs(policy, b[0], c)[0] for b in batches] for batches, _ in steps]
    old = reference = [[None] * len(batches) for batches, _ in steps]
    with torch.no_grad():
        if c.num_iterations * c.num_minibatches > 1:  # the policy moves away from the one that sampled
            old = all_logps()
        if c.beta:
            with optimizer.as_reference():
                reference = all_logps()
    sums, norms, seen = [], [], []
    for (batches, _), *logps in [*zip(steps, old, reference)] * c.num_iterations:
        optimizer.begin()
        for batch, old_logp, reference_logp in zip(batches, *logps):
            loss, stats, logp = micro_batch_loss(policy, *batch, old_logp, reference_logp, c)
            loss.backward()
            sums.append(stats)
            seen.append((batch[0], logp if old_logp is None else old_logp))
        norms.append(optimizer.step(learning_rate))
    for stats in sums[len(steps[0][0]):]:
        del stats["ratio_error_max"]  # it is to be 0 where nothing has moved yet
    if c.save_rollouts:
        gather_trainer_logps(seen[:sum(len(batches) for batches, _ in steps)], rollouts, world)
    ranks = world.gather(add_up([{k: v.item() for k, v in stats.items()} for stats in sums]))
    whole = {**dict.fromkeys(("loss", "tokens"), 0), **add_up(ranks)}
    return {**whole, "loss": whole["loss"] / len(norms), "grad_norm": sum(norms) / len(norms),
            "skipped": sum(not math.isfinite(norm) for norm in norms),
            "trained_lengths": [n for _, lengths in steps for n in lengths] * c.num_iterations,
            "trained_tokens": whole["tokens"] // c.num_iterations,
            "broken_logprobs": sum(r.finite().count(False) for r in rollouts)}


def gather_trainer_logps(seen: list[tuple[list[Rollout], torch.Tensor]], rollouts: list[Rollout],
                         world: World) -> None:
    """seen: the micro-batches of this rank, with the log-probabilities of their tokens, [T]. Fills them in on
    rank 0, which writes the rollouts of all ranks down."""
    lengths = [(r.slot, len(r.completion_ids)) for batch, _ in seen for r in batch]
    logps = torch.cat([logp for _, logp in seen]).cpu() if seen else torch.empty(0)  # one transfer
    by_slot = {r.slot: r for r in rollouts}
    everywhere = world.gather((lengths, logps))
    for lengths, logps in everywhere if world.rank == 0 else ():
        for (slot, _), part in zip(lengths, logps.split([n for _, n in lengths])):
            by_slot[slot].trainer_logps = part.tolist()


def completion_logprobs(policy: Policy, rollouts: list[Rollout],
                        c: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token of the completions, and the entropy there, one after the other; each [T].
    Packed; only states that predict a completion get logits."""
    device, lengths = policy.device, [len(r.prompt_ids) + len(r.completion_ids) for r in rollouts]
    ends = itertools.accumulate(lengths)
    places = [i for r, end in zip(rollouts, ends) for i in range(end - len(r.completion_ids), end)]
    tokens, places = (upload(torch.tensor(values), device) for values in (
        [t for r in rollouts for t in r.prompt_ids + r.completion_ids], places))
    hidden = policy.packed(tokens, lengths)[places - 1]  # the state before a token predicts it
    return token_logprobs(hidden, policy.head_weight, tokens[places], c.temperature)


def micro_batch_loss(policy: Policy, rollouts: list[Rollout], masks: list[list[bool]], weights: list[float],
                     old_logp: torch.Tensor | None, reference_logp: torch.Tensor | None,
                     c: Config) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """Loss, sums for the metrics and log-probabilities, [T], of one micro-batch. old_logp: None where the
    policy is the one that sampled."""
    logp, entropy = completion_logprobs(policy, rollouts, c)
    sampler_logp, advantage, weight = (
        upload(torch.tensor(values, dtype=logp.dtype), logp.device) for values in (
            [p for r in rollouts for p in r.sampler_logps],
            [r.advantage for r in rollouts for _ in r.completion_ids],
            [w * m for w, mask in zip(weights, masks) for m in mask]))
    sequence = None if c.importance_sampling_level == "token" else upload(
        torch.tensor([i for i, r in enumerate(rollouts) for _ in r.completion_ids]), logp.device)
    loss, stats = policy_loss(
        logp, logp.detach() if old_logp is None else old_logp, sampler_logp, advantage, weight,
        loss_type=c.loss_type, epsilon=c.epsilon, epsilon_high=c.epsilon_high or c.epsilon, delta=c.delta,
        sequence=sequence, reference_logp=reference_logp, beta=c.beta,
        importance_cap=c.vllm_importance_sampling_clip_max if c.vllm_importance_sampling_correction else None)
    return loss, {**stats, "entropy": torch.where(weight > 0, entropy, 0.0).sum()}, logp.detach()


def add_up(parts: list[dict]) -> dict:
    """Sums by key; keys that end in _max take the maximum."""
    whole = {}
    for part in parts:
        for key, value in part.items():
            so_far = whole.get(key, 0)
            whole[key] = max(so_far, value) if key.endswith("_max") else so_far + value
    return whole


# ---- The loop ----------------------------------------------------------------------------------------------

class Stop:
    """SIGTERM or SIGINT: the ranks finish the step, save and end. A second one ends the process at once."""

    def __init__(self):
        self.wanted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame) -> None:
        if self.wanted:
            os._exit(128 + number)
        self.wanted = True


@contextlib.contextmanager
def timed(seconds: dict, stage: str, world: World):
    """Notes the seconds spent inside, by the slowest rank, as time/<stage>."""
    start = world.now()
    yield
    world.meet(stage)
    seconds[f"time/{stage}"] = world.now() - start


def load(c: Config, folder: Path, weights: Path, world: World) -> Inputs:
    """Finds everything that can be wrong with the input, before an engine starts. Settles c.max_steps.

    folder: the model as it was given. weights: that, or the last checkpoint.
    """
    scorer = Scorer(list(c.reward), list(c.reward_weights) or None, c.reward_timeout, c.reward_workers)
    scorer.state["max_completion_length"] = c.max_completion_length
    config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer(folder, c.chat_template or None, c.chat_template_kwargs)
    if c.longest > config.max_position_embeddings:
        raise UserError(f"--max_prompt_length {c.max_prompt_length} + --max_completion_length "
                        f"{c.longest - c.max_prompt_length} = {c.longest} tokens, {c.model} takes "
                        f"{config.max_position_embeddings}: lower one of them")
    prompts, held_out = load_prompt_sets(c, tokenizer)
    last = max(max(p.token_ids) for p in itertools.chain(prompts.train, *held_out.values()))
    if last >= config.vocab_size or min(tokenizer.eos_token_ids) >= config.vocab_size:
        raise UserError(f"{folder}: tokenizer.json or eos_token_id goes past the vocab_size "
                        f"{config.vocab_size} of config.json: they are of different models")
    if c.max_steps == -1:
        taken = c.prompts_per_step * (1 + c.dynamic_sampling_rounds)  # of the order of prompts, by a step
        c.max_steps = math.ceil(c.num_train_epochs * len(prompts.train) / taken)
    updates = c.max_steps
    if c.replay:
        updates, held_out = checkpoint.recorded_steps(c), {}
        prompts.notes.append(f"replays {updates} steps of {c.replay}; no engine, no evaluation")
    dtype = {"auto": torch.bfloat16 if world.cuda else torch.float32}.get(c.dtype) or getattr(torch, c.dtype)
    if world.cuda and (c.colocate or c.split):
        prompts.notes.append(plan_memory(c, config, dtype.itemsize, world.size, world.card)[0])
    policy = Policy.from_folder(weights, world.device, dtype)
    if weights != folder:
        sharded.shards(weights / "optimizer", list(policy.parameters()))
        if policy.config != config:
            raise UserError(f"{weights / 'config.json'} is not the one of {c.model}: --fresh starts anew")
    worthwhile = world.cuda and parameter_count(config) > 4e8  # smaller ones wait for the CPU anyway
    policy.training_mode({"auto": worthwhile, "on": True, "off": False}[c.compile], c.recompute)
    return Inputs(tokenizer, prompts, held_out, scorer, policy, updates)


def load_prompt_sets(c: Config, tokenizer: Tokenizer) -> tuple[PromptSet, dict[str, list[Prompt]]]:
    """The prompts to train on, and by name the sets to evaluate on."""
    columns = dict(max_prompt_length=c.max_prompt_length, system_prompt=c.system_prompt,
                   prompt_column=c.prompt_column, answer_column=c.answer_column)
    prompts = load_data(c.data, tokenizer, **columns)
    if all(p.columns["answer"] is None for p in prompts.train) and rewards.NEED_ANSWER & {*c.reward}:
        raise UserError(f"--data {' '.join(c.data)} has no gold answers for --reward {' '.join(c.reward)}: "
                        "--answer_column names their column")
    if not c.eval_data:
        return prompts, {"held out": prompts.held_out} if prompts.held_out else {}
    others = {source: load_prompts(source, tokenizer, **columns) for source in c.eval_data}
    held_out = {Path(source).stem: other.held_out or other.train for source, other in others.items()}
    prompts.fingerprint += "".join(other.fingerprint for other in others.values())
    if len(held_out) < len(c.eval_data):
        raise UserError(f"--eval_data {' '.join(c.eval_data)}: give each file another name")
    return prompts, held_out


def plan_memory(c: Config, m: ModelConfig, size: int, ranks: int, card: int) -> tuple[str, int]:
    """What each GPU will hold, in words, and how much of it is KV cache; size: bytes of a working weight.

    Raises UserError, naming what to change, where it is more than the card's bytes.
    """
    longest, whole = c.max_prompt_length + c.max_completion_length, c.prompts_per_step * c.num_generations
    halves = memory_plan(
        m, size=size, ranks=math.inf if c.optimizer_offload else ranks, shared=not c.split,
        recompute=c.recompute, compiled=c.compile != "off",
        sequence=c.longest, cache_tokens=completions_at_once(c, ranks) * longest,
        micro_batch=min(max(c.micro_batch_tokens, longest), -(-whole // ranks) * longest),
        engine_limit=(0.85 if c.split else c.vllm_gpu_memory_utilization) * card)
    words = "\n".join(f"{name} {sum(half.values()) / 2**30:.1f} = " + " + ".join(
        f"{what} {value / 2**30:.1f}" for what, value in half.items()) for name, half in halves.items())
    words = f"GiB on each GPU, of {card / 2**30:.1f}:\n{words}"
    if sum(halves["generating"].values()) > card:
        raise UserError(f"{words}\n" + ("lower --prompts_per_step" if c.split else (
            "lower --vllm_gpu_memory_utilization, or use more GPUs")))
    if sum(halves["training"].values()) > card:
        raise UserError(f"{words}\n" + ("use --recompute" if not c.recompute else (
            f"use --micro_batch_tokens {longest}" if c.micro_batch_tokens > longest else "use more GPUs")))
    return words, int(halves["generating"]["KV cache"])


def completions_at_once(c: Config, ranks: int) -> int:
    """That one engine generates in a step; ranks: that train."""
    prompts = c.prompts_per_step if c.split else math.ceil(c.prompts_per_step / ranks)
    return prompts * c.num_generations


def build_engine(c: Config, folder: Path, tokenizer: Tokenizer, policy: Policy, world: World) -> Engine:
    if c.replay:
        return RecordedEngine(Path(c.replay))
    if not (c.colocate or c.split):
        return PolicySampler(policy, functools.partial(completes, tokenizer))
    dtype = policy.dtype
    arguments = dict(
        folder=folder, dtype=dtype, max_model_len=c.longest, max_num_seqs=completions_at_once(c, world.size),
        gpu_memory_utilization=c.vllm_gpu_memory_utilization, sleeps=c.colocate,
        enforce_eager=c.vllm_enforce_eager or not world.cuda)
    if world.cuda:
        _, arguments["kv_cache_bytes"] = plan_memory(c, policy.config, dtype.itemsize, world.size, world.card)
    if c.colocate:
        return ColocatedEngine(**arguments)
    return RemoteEngine(world.link, arguments)


def model_folder(c: Config, run: Run, world: World) -> Path:
    """Where the model is that the run begins with; the tiny one is made here."""
    if c.model != "tiny":
        return checkpoint_folder(c.model)
    folder = run.folder / "tiny"
    if run.state["step"] == 0:
        world.say(f"built-in tiny model: {WARM_START['steps']} supervised steps on sums with "
                  f"{WARM_START['wrong']:.0%} wrong answers come first, so that GRPO finds something to "
                  "reward")
        if world.rank == 0:
            data.write_digits_tokenizer(folder)
            write_tiny_model(folder, Tokenizer(folder), c.seed)
        world.meet("writing the tiny model")
    return folder


def begin(c: Config, folder: Path, inputs: Inputs, run: Run, world: World) -> tuple[Engine, ShardedAdamW]:
    """The engine and the optimizer, as they were after the run's last checkpoint."""
    prompts, policy = inputs.prompts, inputs.policy
    if run.state.get("data", prompts.fingerprint) != prompts.fingerprint:
        raise UserError(f"{' '.join(c.data)} changed since {run.folder} began: give another --out or "
                        "--fresh")
    if run.state["step"] > inputs.updates:
        raise UserError(f"{run.folder} is at update {run.state['step']}, but {c.replay} now has rollouts for "
                        f"{inputs.updates}: --fresh starts anew")
    run.begin(inputs.updates)
    held_out = sum(map(len, inputs.held_out.values()))
    world.say("\n".join([*prompts.notes, f"{held_out} prompts to evaluate on"]))
    engine = build_engine(c, folder, inputs.tokenizer, policy, world)
    optimizer = ShardedAdamW(policy, c, world)  # after the engine: vLLM measures the memory that is free
    beside = " and one that generates" if c.split else ""
    world.say(f"{c.model} on {world.size} ranks{beside}, {inputs.updates} steps; everything is written to "
              f"{run.folder}, a checkpoint in about {run.seconds_to_save(optimizer):.1f} s")
    if c.beta:
        optimizer.keep_reference(Policy.from_folder(folder, "cpu", optimizer.weights.dtype))
    if step := run.state["step"]:
        optimizer.load(run.latest / "optimizer")
        weights = optimizer.weights[optimizer.shard].to(optimizer.master.device)
        if not torch.equal(optimizer.master.bfloat16(), weights.bfloat16()):
            raise UserError(f"{run.latest.resolve()}: the optimizer is not that of model.safetensors: remove "
                            "it to continue from the checkpoint before, or use --fresh")
        world.say(f"continues after update {step}")
    return engine, optimizer


def train(c: Config, world: World) -> None:
    """The run: seven stages a step; after the last update one more wake to evaluate what came out."""
    run, stop, health = Run(c, world), Stop(), Health(c, world.rank == 0)
    if run.state.get("finished"):
        return world.say(f"{run.folder} holds a finished run: {run.state.get('result')} "
                         "(--fresh starts anew)")
    start, before, after = run.state["step"], run.state.get("before"), None
    folder = model_folder(c, run, world)
    inputs = load(c, folder, run.latest if start else folder, world)
    prompts, policy, scorer = inputs.prompts, inputs.policy, inputs.scorer
    engine, optimizer = begin(c, folder, inputs, run, world)
    if inputs.held_out:  # every row has every key
        run.metrics |= eval_metrics({name: [[0.0] * c.eval_num_generations] for name in inputs.held_out})

    for step in range(start, inputs.updates + 1):
        last, row, began = step == inputs.updates, {"step": step, "weight_version": step}, world.now()
        watch = functools.partial(timed, row, world=world)
        scorer.state.update(global_step=step, max_steps=c.max_steps)  # evaluation scores too
        with watch("wake"):                                                                     # 1. wake
            engine.wake(policy.named_parameters(), version=step)
        if inputs.held_out and c.eval_steps and (last or step % c.eval_steps == 0):
            with watch("eval"):
                row |= evaluate(engine, inputs, c, world)
            after = row["eval/accuracy"]
            before = after if step == 0 else before
        if last:
            run.record(row)
            break
        first = step * (1 + c.dynamic_sampling_rounds)  # the rounds take the prompts that follow
        indices = prompt_indices(first, c.prompts_per_step, len(prompts.train), c.seed)
        mine = world.share([(slot, prompts.train[i]) for slot, i in enumerate(indices)])
        with watch("generate"):                                                                 # 2. generate
            rollouts = generate_rollouts(engine, mine, step, inputs.tokenizer, c)
            replace_dull_groups(engine, rollouts, mine, step, inputs, c)
        with watch("sleep"):                                                                    # 3. sleep
            engine.sleep()
        if world.cuda:
            row["memory/asleep_gib"] = colocate.card_in_use() / 2**30
            torch.cuda.reset_peak_memory_stats()
        with watch("reward"):                                                                   # 4. reward
            score_rollouts(rollouts, mine, scorer, c)
            world.meet("reward")  # before a collective, so that who is late is named
            rollouts = [r for part in world.gather(rollouts) for r in part]  # by slot: shares are contiguous
        scores = assign_advantages(rollouts, c)                                                 # 5. advantage
        rate = learning_rate_at(step, c)
        with watch("update"):                                                                   # 6. update
            sums = update(policy, optimizer, rollouts, rate, c, world)
        if world.cuda:  # torch believes that it still has what the sleeping engine gave back
            row["memory/peak_gib"] = (torch.cuda.max_memory_allocated() - engine.given_back) / 2**30
        row |= {"learning_rate": rate, "time/step": world.now() - began}                        # 7. record
        row |= step_metrics(rollouts, scores, sums, policy, world, row)
        run.record(row)
        run.write_rollouts(step, rollouts)
        run.print_line(row, rollouts)
        health.check(row, rollouts)
        stopped = any(world.gather(stop.wanted))  # a signal may have reached one rank only
        if stopped or ((step + 1) % c.save_steps == 0 and step + 1 < inputs.updates):
            run.save(policy, optimizer, folder, step + 1, before=before, stopped=stopped,
                     data=prompts.fingerprint)
        if stopped:
            world.say(f"stopped after update {step + 1}: the same command continues")
            break
    if last:
        accuracy = "" if after is None else f"accuracy {before:.1%} → {after:.1%}, "
        result = f"{accuracy}model in {run.folder / f'step_{inputs.updates}'}"
        run.save(policy, optimizer, folder, inputs.updates, before=before, after=after, result=result,
                 finished=True, data=prompts.fingerprint)
        world.say(f"done: {result}")
    world.meet("the run")  # nobody ends the engine, and with it the process group, while another needs it
    run.close()
    scorer.close()
    engine.close()


def parse(arguments: list[str]) -> Config:
    """The command line → Config. Every field of Config is an option of the same name. Raises UserError."""
    def refuse(message):
        raise UserError(f"{message} (--help lists all options)")  # argparse itself prints all of the usage

    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], allow_abbrev=False, usage="%(prog)s [--option value ...]",
        epilog="Other defaults of --model tiny: " + ", ".join(f"{k} {v}" for k, v in TINY.items()))
    parser.error = refuse
    for field in dataclasses.fields(Config):
        kind, meta, default = field.type, field.metadata, field.default
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif kind in (list[str], list[float]):
            how = {"nargs": "+", "type": kind.__args__[0], "choices": meta.get("choices")}
        else:
            how = {"type": kind, "choices": meta.get("choices")}
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        help = meta["help"] + f" (default: {shown})" * (shown != "" and "default" not in meta["help"])
        parser.add_argument(f"--{field.name}", default=default, help=help, **how)
    known, unknown = parser.parse_known_args(arguments)
    names = [argument.removeprefix("--").split("=")[0] for argument in unknown]
    for argument, name in zip(unknown, names):
        if argument.startswith("--") and name in REFUSED:
            raise UserError(f"--{name}: {REFUSED[name]}")
    if unknown:
        near = difflib.get_close_matches(names[0], [field.name for field in dataclasses.fields(Config)], 1)
        refuse(f"{unknown[0]} is no option" + f": did you mean --{''.join(near)}?" * bool(near))
    if known.model == "tiny":
        parser.set_defaults(**TINY)
    return Config(**vars(parser.parse_args(arguments)))


def main() -> None:
    try:
        c = parse(sys.argv[1:])
        check(c)
        c.fresh &= os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"  # a restart continues
        world = World(c.split, c.timeout_minutes)
        colocate.serve(world.link) if world.generates else train(c, world)
        if dist.is_initialized():  # ending a vLLM engine has already destroyed it
            dist.destroy_process_group()
    except USER_ERRORS as error:
        yield_to_torchrun(2 * (os.environ.get("RANK", "0") != "0"))  # all see most: rank 0 says it
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except RuntimeError:
        yield_to_torchrun(5 * ("RANK" in os.environ))  # perhaps another rank failed, and says why
        raise


def yield_to_torchrun(seconds: float) -> None:
    """Where another rank ended with an error, torchrun ends this one in the meantime."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(seconds)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # everything is saved: threads of native libraries must not make a failure of the way out
