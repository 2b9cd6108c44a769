"""GRPO from scratch: every rank trains the policy and generates with a vLLM engine colocated on the same GPU.

    torchrun --nproc_per_node=8 minigrpo.py --colocate               # a tiny built-in model learns to add
    torchrun --nproc_per_node=8 minigrpo.py --colocate --model Qwen/Qwen2.5-1.5B-Instruct --data gsm8k.jsonl
    torchrun --nproc_per_node=8 minigrpo.py --split                  # 7 train, 1 generates: for comparison
    python minigrpo.py                                               # no vLLM: the policy samples for itself

GRPO (group relative policy optimization): sample a group of completions for each prompt from the model
itself and score each of them. What is better than its group gets a positive advantage, what is worse a
negative one. A gradient step makes the tokens of the better completions more likely and those of the worse
less likely, and the next step samples from the changed model. There is no value model and no labelled answer
to imitate.

This file in its order: the mathematics; rollouts; the update; the loop, `train`, with its seven stages in the
margin; what is seen of a step; what is read before the first one.

Every rank has all rollouts, and computes advantages, denominators and the division of work from them alike.
So no rank waits for another's decision, and the gradient does not depend on how many there are.
"""

import contextlib
import functools
import itertools
import math
import os
import signal
import statistics
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import colocate
import config
import data
import model
import rewards
from checkpoint import Run
from data import Prompt, PromptSet, Tokenizer, prompt_indices, sample_seed
from model import Policy
from rewards import Group, Scorer
from sharded import ShardedAdamW, World, check_shards


# ---- The mathematics: pure functions -----------------------------------------------------------------------

def group_advantages(scores, scale_rewards="group", baseline="group"):
    """How much better each completion is than its group: (r - mean) / (std + 1e-4) (DeepSeekMath, section
    4.1.2).

    scores: float64 [groups, G], NaN where there is no reward; those stay out of mean and std and get 0.
    scale_rewards: std over the "group", over the whole "batch", or "none" (Dr. GRPO). baseline: the mean over
    the whole "group", or over the others alone, "leave_one_out" (RLOO, eq. 5). A group whose rewards agree to
    1e-6, or with fewer than two of them, teaches nothing: exactly 0.
    """
    scored = ~scores.isnan()
    count = scored.sum(1, keepdim=True)  # [groups, 1]
    others = (count - 1).clamp(min=1)
    mean = scores.nanmean(1, keepdim=True)
    difference = torch.where(scored, scores - mean, 0.0)  # NaN would spread to the whole group
    # Not > 0: rewards that differ only by rounding (0.1 + 0.2 and 0.3) are equal, and teach nothing.
    teaches = difference.amax(1, keepdim=True) - difference.amin(1, keepdim=True) > 1e-6
    variance = difference.square().sum(1, keepdim=True) / others  # Bessel's correction, as in TRL
    if baseline == "leave_one_out":  # r - (the others' mean) = (r - mean) · n / (n - 1)
        difference = difference * count / others
    if scale_rewards == "group":
        difference = difference / (variance.sqrt() + 1e-4)
    elif scale_rewards == "batch" and scored.sum() > 1:
        difference = difference / (scores[scored].std() + 1e-4)
    return torch.where(teaches, difference, 0.0)


def clipped_objective(ratio, logp, advantage, c):
    """min(ratio · A, clip(ratio, 1 - ε, 1 + ε_high) · A) (PPO, eq. 7; ε_high: DAPO, eq. 10).

    delta, where above 0, caps the ratio also where A < 0 (INTELLECT-2, eq. 1). All [T].
    """
    low = 1 - c.epsilon
    high = 1 + (c.epsilon_high or c.epsilon)
    # For A < 0 the min() picks the unclipped ratio, however large; delta caps it.
    capped = ratio.clamp(max=c.delta) if c.delta else ratio
    objective = torch.minimum(capped * advantage, ratio.clamp(low, high) * advantage)
    too_rare = (ratio < low) & (advantage < 0)
    too_likely = (ratio > high) & (advantage > 0)
    return objective, too_rare | too_likely


def cispo_objective(ratio, logp, advantage, c):
    """stop_gradient(min(ratio, ε_high)) · A · log π (MiniMax-M1, eq. 4): no token loses its gradient."""
    objective = ratio.clamp(max=c.epsilon_high).detach() * advantage * logp
    clipped = (ratio > c.epsilon_high) & (advantage > 0)
    return objective, clipped


# What the sum over tokens is divided by, for each completion; counts: how many of its tokens train.

def over_completions(counts, max_completion_length):
    """The mean over the tokens of each completion, then over completions (DeepSeekMath, eq. 3)."""
    completions = sum(tokens > 0 for tokens in counts)
    return [tokens * completions for tokens in counts]


def over_tokens(counts, max_completion_length):
    """The mean over all tokens of the step: long completions weigh more (DAPO, eq. 8)."""
    return [sum(counts)] * len(counts)


def over_max_length(counts, max_completion_length):
    """A constant in place of the length, then the mean over completions (Dr. GRPO: no length bias)."""
    completions = sum(tokens > 0 for tokens in counts)
    return [completions * max_completion_length] * len(counts)


class Loss(NamedTuple):
    objective: Callable  # (ratio, log π, advantage, options) → what a token adds, whether it was clipped
    denominators: Callable  # (token counts, max_completion_length) → the divisor of each completion


LOSSES = {  # --loss_type. A new loss is one function, named here
    "grpo": Loss(clipped_objective, over_completions),
    "dapo": Loss(clipped_objective, over_tokens),
    "dr_grpo": Loss(clipped_objective, over_max_length),
    "cispo": Loss(cispo_objective, over_tokens),
}


def policy_loss(logp, batch, c):
    """-Σ weight · correction · objective(ratio) + β · Σ weight · KL over the T tokens of a micro-batch.

    logp: [T]. The weights hold the denominators of the whole optimizer step, so the losses of micro-batches
    and ranks add up. Returns (loss, {metric: its sum over the tokens, or its maximum}).
    """
    log_ratio = logp - batch.old_logp  # 0 in the first update of a batch, but its gradient is not
    if c.importance_sampling_level == "sequence":  # one ratio a completion, the geometric mean (GSPO, eq. 7)
        log_ratio = mean_by_completion(log_ratio, batch.completion)
    ratio = log_ratio.exp()  # exactly 1 in the first update of a batch
    objective, clipped = LOSSES[c.loss_type].objective(ratio, logp, batch.advantage, c)
    gap = batch.old_logp - batch.sampler_logp
    mismatch = gap.exp()
    weight = batch.weight
    if c.vllm_importance_sampling_correction:
        # The engine rounds otherwise than the trainer, so it sampled from a slightly different distribution.
        weight = weight * mismatch.clamp(max=c.vllm_importance_sampling_clip_max)
    loss = -(weight * objective).sum()  # a sum, not a mean: the mean is in the weights
    sums = {
        "clip_ratio": clipped.sum(),
        "logprob_gap/mean": gap.abs().sum(),
        "logprob_gap/max": gap.abs().max(),
        "importance_ratio/mean": mismatch.sum(),
        "importance_ratio/max": mismatch.max(),
        "importance_ratio/squared": mismatch.square().sum(),
        "first_ratio_error": (ratio - 1).abs().max().detach(),
    }
    if c.beta:
        difference = batch.reference_logp - logp
        kl = difference.exp() - difference - 1  # k3 of Schulman 2020: never negative, little variance
        loss = loss + c.beta * (batch.weight * kl).sum()  # not corrected for the sampler's rounding
        sums["kl"] = kl.detach().sum()
    return loss, sums | {"loss": loss.detach()}


def mean_by_completion(x, completion):
    """x [T] → [T]: each value becomes the mean over its completion; completion: int64 [T]."""
    total = torch.zeros_like(x).index_add(0, completion, x)
    count = completion.bincount()  # of its tokens; a token stands here only where it trains
    return total[completion] / count[completion]


# ---- Rollouts ----------------------------------------------------------------------------------------------

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
    round: int = 0  # of dynamic sampling: groups that were dropped in this place before
    reward: float | None = None
    parts: dict | None = None  # reward of each function
    advantage: float = 0.0
    trainer_logps: list | None = None  # of the policy before its update; None where it does not train
    columns: dict = field(default_factory=dict)  # of the prompt's row, for the reward functions

    @property
    def length(self):
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def finite(self):
        """Which tokens have a log-probability of the sampler that is a number."""
        if math.isfinite(sum(self.sampler_logps)):  # all of them, found in a tenth of the time
            return list(range(len(self.sampler_logps)))
        return [k for k, logp in enumerate(self.sampler_logps) if math.isfinite(logp)]

    def trained(self, mask_truncated):
        """Which tokens train: none without a reward, and none of a cut completion where those are masked."""
        if self.reward is None or (self.truncated and mask_truncated):
            return []
        return self.finite()


def draw_prompts(prompts, step, c, resampling=0):
    """[(index in the batch, prompt), …] for all ranks; resampling: the round of dynamic sampling.

    It follows from the arguments alone, so no rank waits for another and checkpoints store no order.
    """
    position = step * (1 + c.dynamic_sampling_rounds) + resampling  # the rounds take the prompts that follow
    indices = prompt_indices(position, c.prompts_per_step, len(prompts), c.seed)
    return [(index, prompts[i]) for index, i in enumerate(indices)]


def generate_rollouts(engine, prompts, step, tokenizer, c, resampling=0):
    """num_generations Rollouts for each (index in the batch, prompt) of this rank, group after group."""
    # Of the index, not of the rank: any number of ranks draws the same completions.
    seeds = [sample_seed(c.seed, step, resampling, index) for index, _ in prompts]
    groups = engine.generate(
        [prompt.token_ids for _, prompt in prompts],
        n=c.num_generations,
        max_tokens=c.max_completion_length,
        temperature=c.temperature,
        seeds=seeds,
        eos_token_ids=tokenizer.eos_token_ids,
        stop=c.stop)
    rollouts = []
    for (index, prompt), first, group in zip(prompts, seeds, groups):
        for i, (token_ids, logprobs) in enumerate(group):
            ended = token_ids[-1] in tokenizer.eos_token_ids
            stopped = c.stop and colocate.completes(tokenizer, token_ids, c.stop)
            rollouts.append(Rollout(
                slot=index * c.num_generations + i,
                prompt=prompt.prompt,
                prompt_ids=prompt.token_ids,
                completion_ids=token_ids,
                sampler_logps=logprobs,
                completion=tokenizer.decode(token_ids),
                truncated=not (ended or stopped),
                weight_version=engine.weight_version,
                seed=first + i,
                round=resampling,
                columns=prompt.columns))
    return rollouts


def score_rollouts(rollouts, scorer, group_size):
    """The rollouts with their rewards. A group is scored in one call; what has rewards keeps them."""
    waiting = [r for r in rollouts if r.parts is None]  # dynamic sampling has scored some already
    groups = in_groups(waiting, group_size)
    requests = []
    for group in groups:
        texts = [r.completion for r in group]
        token_ids = [r.completion_ids for r in group]
        requests.append(Group(group[0].prompt, texts, token_ids, group[0].columns))
    with reading("--reward", ValueError):  # a function that fails on its whole first batch must be wrong
        results = scorer.score(requests)
    scored = {r.slot: r for r in rollouts}  # keeps their order
    for group, scores in zip(groups, results):
        for r, reward, *parts in zip(group, scores.rewards, *scores.parts.values()):
            scored[r.slot] = replace(r, reward=reward, parts=dict(zip(scores.parts, parts)))
    return list(scored.values())


def in_groups(items, size):
    return [items[start:start + size] for start in range(0, len(items), size)]


def flatten(lists):
    return list(itertools.chain.from_iterable(lists))


def reward_table(rollouts, group_size):
    """float64 [groups, G], NaN where there is no reward."""
    scores = [math.nan if r.reward is None else r.reward for r in rollouts]
    return torch.tensor(scores, dtype=torch.float64).view(-1, group_size)


# ---- The update --------------------------------------------------------------------------------------------

def update(policy, optimizer, rollouts, c, world):
    """num_iterations passes over the batch of all ranks, each in num_minibatches optimizer steps.

    Returns metrics over all ranks, and {slot: log-probabilities of the policy before the update} of every
    completion that trains, which rank 0 writes down.
    """
    prompts = len(rollouts) // c.num_generations
    minibatches = []
    start = 0
    for m in range(1, c.num_minibatches + 1):
        stop = m * prompts // c.num_minibatches * c.num_generations  # groups stay together
        minibatches.append(make_micro_batches(policy, rollouts[start:stop], c, world))
        start = stop
    every = flatten(minibatches)  # several optimizer steps, one after the other
    with torch.no_grad():
        if c.num_iterations * c.num_minibatches > 1:  # the policy will move away from the one that sampled
            for batch in every:
                batch.old_logp, _ = batch.logprobs(policy, c.temperature)
        if c.beta:
            with optimizer.as_reference():
                for batch in every:
                    batch.reference_logp, _ = batch.logprobs(policy, c.temperature)
    seen, norms = [], []
    for batches in minibatches * c.num_iterations:
        optimizer.zero_grad()  # also on a rank without micro-batches: `step` is collective
        for batch in batches:
            logp, entropy = batch.logprobs(policy, c.temperature)
            if batch.old_logp is None:  # the only update of this batch: the policy is still what sampled
                batch.old_logp = logp.detach()
            loss, sums = policy_loss(logp, batch, c)
            loss.backward()  # one micro-batch's activations are freed before the next begins
            if norms:  # only in the first optimizer step the ratio must be 1
                del sums["first_ratio_error"]
            sums["entropy"] = entropy.sum()
            sums["tokens"] = batch.weight.count_nonzero()
            seen.append(sums)
        norms.append(optimizer.step())
    old_logps = gather_old_logps(every, world) if c.save_rollouts else {}
    return update_metrics(seen, norms, rollouts, c, world), old_logps


@dataclass
class MicroBatch:
    """Completions that pass through the policy together, packed one after the other without padding.

    The S tokens of the stream are prompts and completions; T of them train.
    """

    rollouts: list[Rollout]
    stream: Tensor  # int64 [S]: prompt, completion, the next prompt, its completion, …
    places: Tensor  # int64 [T]: where in the stream the tokens stand that train
    completion: Tensor  # int64 [T]: the number of the token's completion in this micro-batch
    sampler_logp: Tensor  # [T]
    advantage: Tensor  # [T]
    weight: Tensor  # [T]: 1 / the denominator of the token's completion
    old_logp: Tensor | None = None  # [T]: of the policy before the update
    reference_logp: Tensor | None = None  # [T]: of the first model; None without a KL term

    def logprobs(self, policy, temperature):
        """Log-probability of each token that trains, and the entropy of what it was drawn from; each [T]."""
        lengths = [r.length for r in self.rollouts]
        hidden = policy.packed(self.stream, lengths)  # [S, hidden]
        before = hidden[self.places - 1]  # [T, hidden]: the state before a token predicts it
        tokens = self.stream[self.places]
        return model.token_logprobs(before, policy.head_weight, tokens, temperature)


# ---- The step and the loop ---------------------------------------------------------------------------------

def train(c, world):
    """The run: seven stages a step; after the last update one more wake to evaluate what came out."""
    run, stop = open_run(c, world), Stop()
    if run.state.get("finished"):
        return world.print0(f"{run.folder} holds a finished run: {run.state['result']} (--fresh starts anew)")
    inputs = load(c, run, world)
    policy, engine, optimizer = begin(c, inputs, run, world)
    save = functools.partial(save_checkpoint, run, policy, optimizer, inputs)
    health = Health(c.max_skipped, bool(c.replay))
    console = Console(inputs.updates, c.log_completions)
    before, after = run.state.get("before"), None  # accuracy of the first weights, and of the last

    for step in range(run.state["step"], inputs.updates + 1):
        last = step == inputs.updates
        row = {"step": step}
        began = world.clock()
        watch = functools.partial(timed, row, world=world)
        epoch = step * c.prompts_taken / len(inputs.prompts.train)
        inputs.scorer.state.update(global_step=step, max_steps=inputs.schedule, epoch=epoch)
        with watch("wake"):                                                                     # 1. wake
            engine.wake(policy.named_parameters(), version=step)
        row["weight_version"] = engine.weight_version
        if inputs.held_out and c.eval_steps and (last or step % c.eval_steps == 0):
            with watch("eval"):
                row |= evaluate(engine, inputs, c, world)
            after = row["eval/accuracy"]
            before = after if step == 0 else before
        if last:  # a row with nothing but the accuracy of the last weights
            run.record(row)
            break
        mine = world.my_part(draw_prompts(inputs.prompts.train, step, c))
        with watch("generate"):                                                                 # 2. generate
            rollouts = generate_rollouts(engine, mine, step, inputs.tokenizer, c)
            rollouts = resample_groups(engine, rollouts, step, inputs, c)
        with watch("sleep"):                                                                    # 3. sleep
            engine.sleep()
        if world.cuda:
            row["memory/asleep_gib"] = colocate.card_in_use() / 2**30
            torch.cuda.reset_peak_memory_stats()
        with watch("reward"):                                                                   # 4. reward
            rollouts = score_rollouts(rollouts, inputs.scorer, c.num_generations)
            world.barrier("reward")  # before a collective, so that a straggler is named
            rollouts = flatten(world.all_gather(rollouts))  # by slot, as the ranks' parts are contiguous
        scores = reward_table(rollouts, c.num_generations)                                      # 5. advantage
        advantages = group_advantages(scores, c.scale_rewards, c.baseline).flatten()
        rollouts = [replace(r, advantage=a) for r, a in zip(rollouts, advantages.tolist())]
        row["learning_rate"] = learning_rate_at(step, inputs.schedule, c)
        with watch("update"):                                                                   # 6. update
            # The schedule is a function of the step: a resumed run has no scheduler's state to restore.
            for group in optimizer.param_groups:
                group["lr"] = row["learning_rate"]
            measured, old_logps = update(policy, optimizer, rollouts, c, world)
        if world.cuda:  # torch believes that it still has what the sleeping engine gave back
            peak = torch.cuda.max_memory_allocated() - engine.given_back
            row["memory/peak_gib"] = peak / 2**30
        row |= measured | {"time/step": world.clock() - began}                                  # 7. record
        row |= step_metrics(rollouts, scores, row, policy, c, world)
        run.record(row)
        run.write_rollouts(step, to_records(rollouts, old_logps))
        world.print0(console.text(row, rollouts))
        for trouble in health.check(row, rollouts):
            world.print0(f"warning: step {step + 1}: {trouble}")
        stopped = any(world.all_gather(stop.wanted))  # a signal may have reached one rank only
        due = (step + 1) % c.save_steps == 0 and step + 1 < inputs.updates
        if due or stopped:
            save(step + 1, before=before, stopped=stopped)
        if stopped:
            world.print0(f"stopped after update {step + 1}: the same command continues")
            break  # without `last`: nothing is evaluated, and the run is not finished
    if last:
        accuracy = "" if after is None else f"accuracy {before:.1%} → {after:.1%}, "
        result = f"{accuracy}model in {run.folder / f'step_{inputs.updates}'}"
        save(inputs.updates, before=before, after=after, result=result, finished=True)
        world.print0(f"done: {result}")
    world.barrier("the run")  # nobody ends the engine, and with it the process group, while another needs it
    run.close()
    inputs.scorer.close()
    engine.close()


class Stop:
    """SIGTERM or SIGINT: the ranks finish the step, save and end. A second one ends the process at once."""

    def __init__(self):
        self.wanted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        if self.wanted:
            os._exit(128 + number)
        self.wanted = True


@contextlib.contextmanager
def timed(row, stage, world):
    """Notes the seconds that the slowest rank spends inside, as time/<stage>."""
    start = world.clock()
    yield
    world.barrier(stage)
    row[f"time/{stage}"] = world.clock() - start


def learning_rate_at(step, steps, c):
    """Learning rate of update `step` of `steps`, from 0: linear warm-up, then constant, linear or cosine."""
    if step < c.warmup_steps:
        return c.learning_rate * (step + 1) / c.warmup_steps
    progress = (step - c.warmup_steps) / max(1, steps - c.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    shape = {
        "constant": 1,
        "linear": 1 - progress,
        "cosine": c.min_lr_rate + (1 - c.min_lr_rate) * cosine,
    }
    return c.learning_rate * shape[c.lr_scheduler_type]


def to_records(rollouts, old_logps):
    """The lines of rollouts/step_N.jsonl; old_logps: slot → the trainer's log-probabilities."""
    records = []
    for r in rollouts:
        record = vars(r) | {"trainer_logps": old_logps.get(r.slot)}
        del record["columns"]
        records.append(record)
    return records


def save_checkpoint(run, policy, optimizer, inputs, step, **state):
    """state: what a run needs to know when it is resumed, beside weights, optimizer and data."""
    with reading(f"--out {run.folder}", OSError):  # a full disk is nobody's bug
        run.save(policy, optimizer, inputs.source, step, data=inputs.prompts.fingerprint, **state)


# ---- Dividing the work of an update ------------------------------------------------------------------------

def make_micro_batches(policy, rollouts, c, world):
    """This rank's part of one optimizer step; every rank divides the same list."""
    trained = [r.trained(c.mask_truncated_completions) for r in rollouts]
    counts = [len(tokens) for tokens in trained]
    denominators = LOSSES[c.loss_type].denominators(counts, c.max_completion_length)
    everything = zip(rollouts, trained, denominators)
    work = [(r, tokens, denominator) for r, tokens, denominator in everything if tokens]
    # By FLOP, not by tokens: attention makes long sequences dearer than their length says.
    costs = [policy.update_flops([r.length]) for r, _, _ in work]
    mine = [work[i] for i in balance(costs, world.world_size)[world.rank]]
    batches = []
    for indices in pack([r.length for r, _, _ in mine], c.micro_batch_tokens):
        batches.append(join([mine[i] for i in indices], policy))
    return batches


def balance(costs, ranks):
    """Indices for each rank, the largest first to the rank with the least so far. Same on every rank."""
    parts = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in largest_first(costs):
        rank = load.index(min(load))
        parts[rank].append(i)
        load[rank] += costs[i]
    return parts


def largest_first(sizes):
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


def pack(lengths, budget):
    """Indices for each micro-batch, first fit, longest first. A sequence over the budget travels alone."""
    bins, room = [], []
    for i in largest_first(lengths):
        first = next((b for b, free in enumerate(room) if lengths[i] <= free), len(bins))
        if first == len(bins):  # it fits nowhere
            bins.append([])
            room.append(budget)
        bins[first].append(i)
        room[first] -= lengths[i]
    return bins


def join(work, policy):
    """The MicroBatch of some completions. work: each with its tokens that train and their denominator."""
    stream, places, sampler_logp = [], [], []
    for r, tokens, _ in work:
        first = len(stream) + len(r.prompt_ids)
        stream += r.prompt_ids + r.completion_ids
        places += [first + k for k in tokens]
        sampler_logp += [r.sampler_logps[k] for k in tokens]  # without NaN and inf: exp would spread them
    counts = torch.tensor([len(tokens) for _, tokens, _ in work])
    completion = torch.arange(len(work)).repeat_interleave(counts)  # [T]
    wide = torch.promote_types(policy.dtype, torch.float32)  # as token_logprobs returns them
    advantage = torch.tensor([r.advantage for r, _, _ in work], dtype=wide)
    weight = torch.tensor([1 / denominator for _, _, denominator in work], dtype=wide)
    upload = functools.partial(model.upload, device=policy.device)
    return MicroBatch(
        rollouts=[r for r, _, _ in work],
        # By way of arrays: torch.tensor takes 0.4 µs for each number of a list, which is 5 % of an update.
        stream=upload(torch.asarray(array("q", stream), dtype=torch.int64)),
        places=upload(torch.asarray(array("q", places), dtype=torch.int64)),
        completion=upload(completion),
        sampler_logp=upload(torch.asarray(array("d", sampler_logp), dtype=torch.float64).to(wide)),
        advantage=upload(advantage[completion]),
        weight=upload(weight[completion]))


def gather_old_logps(batches, world):
    """{slot: log-probabilities of its tokens before the update, None for a token that does not train}."""
    mine = {}
    for batch in batches:
        logps = [None] * len(batch.stream)
        for place, logp in zip(batch.places.tolist(), batch.old_logp.tolist()):
            logps[place] = logp
        end = 0
        for r in batch.rollouts:
            end += r.length
            mine[r.slot] = logps[end - len(r.completion_ids):end]
    return functools.reduce(dict.__or__, world.all_gather(mine))


# ---- Dynamic sampling --------------------------------------------------------------------------------------

def resample_groups(engine, rollouts, step, inputs, c):
    """Groups whose rewards all agree are replaced by those of other prompts (DAPO, section 3.2)."""
    size = c.num_generations
    for attempt in range(1, c.dynamic_sampling_rounds + 1):
        rollouts = score_rollouts(rollouts, inputs.scorer, size)
        teaches = group_advantages(reward_table(rollouts, size)).any(1)
        others = draw_prompts(inputs.prompts.train, step, c, attempt)
        some = [others[r.slot // size] for r, useful in zip(rollouts[::size], teaches) if not useful]
        # Also with nothing to replace: with --split all ranks ask the engine together.
        new = generate_rollouts(engine, some, step, inputs.tokenizer, c, attempt)
        by_slot = {r.slot: r for r in rollouts + new}  # the new ones take the places of the old
        rollouts = list(by_slot.values())
    return rollouts


# ---- Evaluation --------------------------------------------------------------------------------------------

def evaluate(engine, inputs, c, world):
    """eval_metrics by the first reward function, every rank its part of the prompts of all sets."""
    n = c.eval_num_generations
    prompts = list(enumerate(flatten(inputs.held_out.values())))
    mine = world.my_part(prompts)
    # Step -1: the same seeds at every evaluation, and none that training uses.
    rollouts = generate_rollouts(engine, mine, -1, inputs.tokenizer, c.evaluation)
    rollouts = score_rollouts(rollouts, inputs.scorer, n)
    scores = [next(iter(r.parts.values())) or 0.0 for r in rollouts]
    world.barrier("evaluation")  # before a collective, so that a straggler is named
    scores = flatten(world.all_gather(scores))  # n of every prompt, in order
    groups = iter(in_groups(scores, n))
    points = {name: list(itertools.islice(groups, len(p))) for name, p in inputs.held_out.items()}
    return eval_metrics(points)


def eval_metrics(points):
    """Accuracy, the mean over all completions, and pass@k for k = 2, 4, ...: the chance that one of k has the
    full score, from c such among n without bias 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    points: data set → prompt → the score of each of its n completions. Of several sets, of each one too.
    """
    sets = {"eval": flatten(points.values())}
    if len(points) > 1:
        sets |= {f"eval/{name}": prompts for name, prompts in points.items()}
    row = {}
    for name, prompts in sets.items():
        n = len(prompts[0])
        row[f"{name}/accuracy"] = sum(sum(scores) / n for scores in prompts) / len(prompts)
        wrong = [sum(score < 1 for score in scores) for scores in prompts]
        k = 2
        while k <= n:
            missed = [math.comb(w, k) / math.comb(n, k) for w in wrong]
            row[f"{name}/pass@{k}"] = 1 - sum(missed) / len(prompts)
            k *= 2
    return row


# ---- What is seen of a step --------------------------------------------------------------------------------

# In every row of metrics.jsonl, null where not measured; evaluation adds pass@k and its sets.
METRICS = """
    step reward reward_std frac_reward_zero_std completions/mean_length completions/clipped_ratio
    loss grad_norm learning_rate entropy clip_ratio kl
    logprob_gap/mean logprob_gap/max importance_ratio/mean importance_ratio/max ess
    eval/accuracy unscored dropped_groups trained_tokens broken_logprobs skipped_updates first_ratio_error
    time/wake time/generate time/eval time/sleep time/reward time/update time/step
    tokens_per_second_per_gpu mfu memory/peak_gib memory/asleep_gib weight_version
    """.split()
TOKEN_MEANS = "entropy clip_ratio logprob_gap/mean importance_ratio/mean kl".split()
TOKEN_MAXIMA = "logprob_gap/max importance_ratio/max first_ratio_error".split()


def update_metrics(seen, norms, rollouts, c, world):
    """seen: the sums of this rank's micro-batches; norms: of the gradients, one an optimizer step."""
    # Only now are numbers asked of the GPU: before, each would have waited for its kernels.
    numbers = [{name: value.item() for name, value in sums.items()} for sums in seen]
    whole = add_up(world.all_gather(add_up(numbers)))
    tokens = max(1, whole["tokens"])
    row = {name: whole[name] / tokens for name in TOKEN_MEANS}
    row |= {name: whole[name] for name in TOKEN_MAXIMA}
    broken = [len(r.completion_ids) - len(r.finite()) for r in rollouts]
    squared = max(whole["importance_ratio/squared"], 1e-30)
    return row | {
        "kl": row["kl"] if c.beta else None,
        "loss": whole["loss"] / len(norms),
        # The effective sample size, as a share of the tokens.
        "ess": whole["importance_ratio/mean"] ** 2 / (tokens * squared),
        "grad_norm": sum(norms) / len(norms),
        "skipped_updates": sum(not math.isfinite(norm) for norm in norms),
        "trained_tokens": whole["tokens"] // c.num_iterations,
        "broken_logprobs": sum(broken),
    }


def add_up(parts):
    """Sums by key, 0 for a key that is nowhere; of TOKEN_MAXIMA the maximum."""
    whole = Counter()
    for part in parts:
        for key, value in part.items():
            if key not in TOKEN_MAXIMA:
                whole[key] += value
            elif not value <= whole[key]:  # so that NaN is not lost, which max() would do
                whole[key] = value
    return whole


def step_metrics(rollouts, scores, row, policy, c, world):
    """The metrics of rewards, lengths and speed. scores: float64 [groups, G], NaN where there is no reward;
    row: what is known so far."""
    scored = scores[~scores.isnan()]  # of all groups, flat
    groups = [group[~group.isnan()] for group in scores]
    stds = [group.std().item() for group in groups if len(group) > 1]
    generated = sum(len(r.completion_ids) for r in rollouts)
    gpus = world.world_size + world.generators
    mfu = None
    if world.peak_flops:
        lengths = [r.length for r in rollouts if r.trained(c.mask_truncated_completions)]
        flops = c.num_iterations * policy.update_flops(lengths)
        mfu = flops / (row["time/update"] * world.peak_flops * world.world_size)
    return {
        "reward": scored.mean().item() if len(scored) else None,
        "reward_std": sum(stds) / len(stds) if stds else None,
        "frac_reward_zero_std": sum(std <= 1e-6 for std in stds) / len(scores),
        "unscored": len(rollouts) - len(scored),
        "dropped_groups": sum(r.round for r in rollouts) // scores.shape[1],
        "completions/mean_length": generated / len(rollouts),
        "completions/clipped_ratio": sum(r.truncated for r in rollouts) / len(rollouts),
        "tokens_per_second_per_gpu": generated / (row["time/step"] - row.get("time/eval", 0)) / gpus,
        "mfu": mfu,
    }


class Health:
    """Watches the numbers of a run: warns where they look wrong, ends it where they stay wrong.

    All ranks have the same numbers, so all of them end together.
    """

    def __init__(self, max_skipped, replay=False):
        self.max_skipped, self.replay = max_skipped, replay
        self.in_a_row = Counter()  # trouble → steps
        self.first = []  # (gap, entropy) of the first steps, at most ten: what is healthy in this run

    def check(self, row, rollouts):
        """Warnings, each once in a row of such steps. Raises RunError where a trouble lasts too long."""
        gap, entropy = row["logprob_gap/mean"], row["entropy"]
        self.first = [*self.first, (gap, entropy)][:10]
        usual_gap, usual_entropy = map(statistics.median, zip(*self.first))
        if self.replay:  # its policy parts from the one that was recorded, and the gap has to grow
            usual_gap = math.inf
        # A sample of 64 is enough: this would otherwise cost more than all the rest of the watch.
        some = rollouts[::1 + len(rollouts) // 64]
        long = [r.completion_ids for r in some if len(r.completion_ids) >= 32]
        flooded = [ids for ids in long if max(Counter(ids).values()) > len(ids) / 2]
        troubles = [  # (whether it is there, after how many steps in a row it ends the run, what to say)
            (row["reward"] is None, 3,
             "no completion had a reward: does --reward return one number or None for each completion of a "
             "group, and has the data what it asks for?"),
            (row["skipped_updates"] or row["broken_logprobs"] > row["trained_tokens"], self.max_skipped,
             "gradients or log-probabilities were not finite: lower --learning_rate"),
            (gap > max(0.05, 3 * usual_gap), 3,
             f"sampler and trainer differ by {gap:.3f} in log-probability, at first by {usual_gap:.3f}: the "
             "engine no longer computes what the policy computes"),
            (entropy < 0.02 * usual_entropy, math.inf,
             f"entropy fell from {usual_entropy:.2f} to {entropy:.3f}: the completions of a prompt hardly "
             "differ, and a group without a difference teaches nothing"),
            (len(flooded) > len(long) / 4, math.inf,
             f"one token is more than half of {len(flooded)} of {len(long)} completions"),
        ]
        warnings = []
        for number, (present, limit, words) in enumerate(troubles):
            self.in_a_row[number] = self.in_a_row[number] + 1 if present else 0
            if self.in_a_row[number] >= limit:
                raise RunError(f"{limit} steps in a row: {words}")
            if self.in_a_row[number] == 1:
                warnings.append(words)
        return warnings


class Console:
    """What a person sees of a step: a line, and some completions spread over the prompts."""

    def __init__(self, updates, completions):
        self.updates, self.completions = updates, completions
        self.recent = deque(maxlen=20)  # seconds of the last steps, from which the time left is guessed

    def text(self, row, rollouts):
        done, total = row["step"] + 1, self.updates
        self.recent.append(row["time/step"] - row.get("time/eval", 0))
        left = (total - done) * statistics.median(self.recent)
        minutes, seconds = divmod(round(left), 60)
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        accuracy = f"  accuracy {row['eval/accuracy']:.1%}" if "eval/accuracy" in row else ""
        lines = [
            f"step {done}/{total}  reward {reward}{accuracy}"
            f"  length {row['completions/mean_length']:.1f}  gap {row['logprob_gap/mean']:.1e}"
            f"  generate {row['time/generate']:.2f}s  update {row['time/update']:.2f}s"
            f"  handoff {row['time/wake'] + row['time/sleep']:.2f}s"
            f"  {done / total:.0%}, {minutes}m{seconds:02}s left"]
        shown = min(self.completions, len(rollouts))
        for i in range(shown):
            r = rollouts[i * len(rollouts) // shown]
            prompt = r.prompt if isinstance(r.prompt, str) else r.prompt[-1]["content"]
            before = "…" if len(prompt) > 80 else ""
            behind = "…" if len(r.completion) > 240 else ""
            # As literals, because a terminal would obey some of the characters.
            lines.append(f"  {before}{prompt[-80:]!r} → {r.completion[:240]!r}{behind}"
                         f"  reward {r.reward}  advantage {r.advantage:.3f}")
        return "\n".join(lines)


# ---- Before the first step ---------------------------------------------------------------------------------

class RunError(Exception):
    """Ends the run with one line, without a traceback: `main` prints it."""


@contextlib.contextmanager
def reading(what, kind=Exception):
    """Turns what fails while `what` is read into one line. MINIGRPO_TRACEBACK=1 shows where it failed.

    kind: of errors that are the fault of `what`; others are bugs, and keep their traceback.
    """
    try:
        yield
    except kind as error:
        if isinstance(error, RunError) or os.environ.get("MINIGRPO_TRACEBACK"):
            raise  # in the first case something more precise has been blamed already
        words = " ".join(str(error).split())
        if not isinstance(error, (OSError, ValueError)):  # those speak for themselves; others say too little
            words = f"{type(error).__name__}: {words}"
        raise RunError(f"{what}: {words}") from error


@dataclass
class Inputs:
    """What a run is given, read and checked."""

    source: Path  # the folder of the model that it begins with
    model_config: model.ModelConfig
    tokenizer: Tokenizer
    prompts: PromptSet
    held_out: dict[str, list[Prompt]]  # name of the data set → its prompts
    scorer: Scorer
    updates: int  # of this run
    schedule: int  # updates over which the learning rate is scheduled


def open_run(c, world):
    with reading(f"--out {c.run_folder}"):
        return Run(
            c.run_folder,
            c.saved_options,
            world,
            free=config.FREE,
            fresh=c.fresh,
            save_total_limit=c.save_total_limit,
            save_rollouts=c.save_rollouts,
            report_to=c.report_to)


def load(c, run, world):
    """The Inputs, with everything found that can be wrong with them, before the weights are read."""
    with reading("--reward, --reward_weights"):
        scorer = Scorer(c.reward, c.reward_weights, c.reward_timeout, c.reward_workers)
        scorer.state["max_completion_length"] = c.max_completion_length
    folder = make_tiny_model(c, run, world) if c.model == "tiny" else c.model
    with reading(f"--model {folder}"):
        source = model.checkpoint_folder(folder)
        model_config = model.ModelConfig.from_folder(source)
        tokenizer = Tokenizer(source, c.chat_template, c.chat_template_kwargs)
    prompts = data.concatenate(c.data, [load_prompts("--data", name, tokenizer, c) for name in c.data])
    held_out = {"held out": prompts.held_out} if prompts.held_out and not c.eval_data else {}
    for name in c.eval_data:
        other = load_prompts("--eval_data", name, tokenizer, c)
        held_out[Path(name).stem] = other.held_out or other.train  # of a file, all prompts
        prompts.fingerprint += other.fingerprint
    schedule = c.max_steps
    if schedule == -1:
        schedule = math.ceil(c.num_train_epochs * len(prompts.train) / c.prompts_taken)
    inputs = Inputs(source, model_config, tokenizer, prompts, held_out, scorer, schedule, schedule)
    if c.replay:
        inputs = replace(inputs, updates=rehearse(c, inputs), held_out={})
        prompts.notes.append(f"replays {inputs.updates} steps of {c.replay}; no engine, no evaluation")
    check_together(c, inputs, run)
    evaluated = sum(map(len, inputs.held_out.values()))
    world.print0("\n".join([*prompts.notes, f"{evaluated} prompts to evaluate on"]))
    return inputs


def make_tiny_model(c, run, world):
    """The folder of the built-in model, which is made here when the run begins."""
    import tiny
    folder = run.folder / "tiny"
    if run.state["step"] == 0:
        world.print0(f"built-in tiny model: {tiny.WARM_START['steps']} supervised steps on sums with "
                     f"{tiny.WARM_START['wrong']:.0%} wrong answers come first, so that GRPO finds something "
                     "to reward")
        if world.rank == 0:
            tiny.write_tiny_model(folder, c.seed)
        world.barrier("writing the tiny model")
    return folder


def load_prompts(option, source, tokenizer, c):
    """The prompts of a file or of a built-in task. option: --data or --eval_data."""
    import tiny
    task = {}
    if source in tiny.TASKS:
        task = dict(rows=tiny.rows(source), held_out=tiny.TASKS[source])
    with reading(f"{option} {source}"):
        return data.load_prompts(
            source,
            tokenizer,
            max_prompt_length=c.max_prompt_length,
            system_prompt=c.system_prompt,
            prompt_column=c.prompt_column,
            answer_column=c.answer_column,
            **task)


def rehearse(c, inputs):
    """How many updates --replay has rollouts for. All are read once, so that damage is found now."""
    import engines
    with reading(f"--replay {c.replay}"):
        steps = engines.recorded_steps(Path(c.replay), vars(c), inputs.schedule)
        recorded = engines.RecordedEngine(Path(c.replay))
        for step in range(steps):
            recorded.wake((), version=step)
            batch = draw_prompts(inputs.prompts.train, step, c)
            generate_rollouts(recorded, batch, step, inputs.tokenizer, c)
    return steps


def check_together(c, inputs, run):
    """Raises RunError where model, data, options and run folder are each right, but do not go together."""
    m, tokenizer, prompts = inputs.model_config, inputs.tokenizer, inputs.prompts
    every = prompts.train + flatten(inputs.held_out.values())
    # Of the EOS ids the least: one that the model can draw is enough.
    largest = max(tokenizer.eos_token_ids[0], *(max(p.token_ids) for p in every))
    needs_answers = not rewards.NEED_ANSWER.isdisjoint(c.reward)
    step, files = run.state["step"], " ".join(c.data)
    mistakes = [  # (whether it is made, what to say of it)
        (c.max_model_len > m.max_position_embeddings,
         f"--max_prompt_length {c.max_prompt_length} + --max_completion_length "
         f"{c.max_model_len - c.max_prompt_length} = {c.max_model_len} tokens, {c.model} takes "
         f"{m.max_position_embeddings}: lower one of them"),
        (largest >= m.vocab_size,
         f"--model {c.model}: tokenizer.json or eos_token_id goes past the vocab_size {m.vocab_size} of "
         "config.json: they are of different models"),
        (needs_answers and all(p.columns["answer"] is None for p in prompts.train),
         f"--data {files} has no gold answers for --reward {' '.join(c.reward)}: --answer_column names their "
         "column"),
        # What follows would be another run than the one that is recorded so far.
        (run.state.get("data", prompts.fingerprint) != prompts.fingerprint,
         f"--out {run.folder}: {files} changed since the run began: give another --out, or --fresh"),
        (step > inputs.updates,
         f"--out {run.folder}: it is at update {step}, but {c.replay} now has rollouts for {inputs.updates}: "
         "give another --out, or --fresh"),
    ]
    for made, words in mistakes:
        if made:
            raise RunError(words)


def begin(c, inputs, run, world):
    """The policy, the engine and the optimizer, as they were after the run's last checkpoint."""
    usual = torch.bfloat16 if world.cuda else torch.float32
    dtype = getattr(torch, c.dtype, usual)  # torch has no "auto"
    kv_cache_bytes = None  # on a CPU VLLM_CPU_KVCACHE_SPACE decides
    if world.cuda and (c.colocate or c.split):
        kv_cache_bytes = plan_memory(c, inputs.model_config, dtype, world)
    policy = load_policy(c, inputs, dtype, run, world)
    keys = [*METRICS]
    if inputs.held_out:  # every row has every key
        keys += eval_metrics({name: [[0.0] * c.eval_num_generations] for name in inputs.held_out})
    with reading(f"--out {run.folder}"):
        run.begin(keys)
    engine = build_engine(c, inputs, policy, kv_cache_bytes, world)
    optimizer = ShardedAdamW(  # after the engine: vLLM measures the memory that is free
        policy.parameters(),
        lr=c.learning_rate,
        betas=(c.adam_beta1, c.adam_beta2),
        eps=c.adam_epsilon,
        weight_decay=c.weight_decay,
        max_grad_norm=c.max_grad_norm,
        offload=c.optimizer_offload,
        world=world)
    if c.beta:
        optimizer.keep_reference(Policy.from_folder(inputs.source, "cpu", dtype).parameters())
    step = run.state["step"]
    with reading(f"--out {run.folder}"):  # a checkpoint whose halves do not belong together
        if step:
            optimizer.load(run.latest / "optimizer")
        seconds = run.seconds_to_save(optimizer)
    beside = " and one that generates" if c.split else ""
    world.print0(f"{c.model} on {world.world_size} ranks{beside}, {inputs.updates} steps; everything is "
                 f"written to {run.folder}, a checkpoint in about {seconds:.1f} s")
    if step:
        world.print0(f"continues after update {step}")
    return policy, engine, optimizer


def plan_memory(c, m, dtype, world):
    """Says what each GPU will hold in the two halves of a step. Returns the bytes of the engine's KV cache.

    Raises RunError, naming the option to change, where it does not fit.
    """
    trained = c.max_prompt_length + c.max_completion_length  # tokens of the longest sequence in training
    batch = completions_at_once(c, world) * trained
    plan = model.memory_plan(
        m,
        size=dtype.itemsize,
        ranks=math.inf if c.optimizer_offload else world.world_size,  # offloaded: no bytes of the GPU
        shared=not c.split,
        recompute=c.recompute,
        compiled=compiles(c, m, world),
        sequence=c.max_model_len,
        cache_tokens=batch,
        micro_batch=min(max(c.micro_batch_tokens, trained), batch),
        engine_limit=world.card * (0.85 if c.split else c.vllm_gpu_memory_utilization))
    words = [f"GiB on each GPU, of {world.card / 2**30:.1f}:"]
    advice = []
    for half, parts in plan.items():
        whole = sum(parts.values())
        listed = " + ".join(f"{what} {size / 2**30:.1f}" for what, size in parts.items())
        words.append(f"{half} {whole / 2**30:.1f} = {listed}")
        if whole > world.card:
            advice.append(what_to_change(half, trained, c))
    if advice:
        raise RunError("\n".join(words + advice))
    world.print0("\n".join(words))
    return int(plan["generating"]["KV cache"])


def what_to_change(half, trained, c):
    """Advice where this half of a step does not fit."""
    if half == "generating" and c.split:
        return "lower --prompts_per_step"
    if half == "generating":
        return "lower --vllm_gpu_memory_utilization, or use more GPUs"
    if not c.recompute:
        return "use --recompute"
    if c.micro_batch_tokens > trained:
        return f"use --micro_batch_tokens {trained}"
    return "use more GPUs"


def completions_at_once(c, world):
    """How many completions one engine generates in a step."""
    engines = world.generators or world.world_size
    return math.ceil(c.prompts_per_step / engines) * c.num_generations


def load_policy(c, inputs, dtype, run, world):
    """With the weights of the last checkpoint, or of the model where there is none."""
    step = run.state["step"]
    folder = run.latest if step else inputs.source
    with reading(f"--model {folder}"):
        policy = Policy.from_folder(folder, world.device, dtype)
        if step:
            check_shards(folder / "optimizer", list(policy.parameters()))
        if policy.config != inputs.model_config:
            raise ValueError(f"config.json is not the one of {c.model}: --fresh starts anew")
    policy.prepare_blocks(compiles(c, policy.config, world), c.recompute)
    return policy


def compiles(c, m, world):
    """Whether the blocks of the policy are compiled."""
    # With a smaller model the GPU waits for the CPU, and faster kernels gain nothing.
    worthwhile = world.cuda and model.parameter_count(m) > 4e8
    return c.compile == "on" or c.compile == "auto" and worthwhile


def build_engine(c, inputs, policy, kv_cache_bytes, world):
    """What generates: an engine on every rank, one for all, recorded rollouts, or the policy itself."""
    tokenizer = inputs.tokenizer.backend
    if c.colocate or c.split:
        arguments = dict(
            folder=inputs.source,
            dtype=policy.dtype,
            max_model_len=c.max_model_len,
            max_num_seqs=completions_at_once(c, world),
            sleeps=c.colocate,
            tokenizer=tokenizer,
            gpu_memory_utilization=c.vllm_gpu_memory_utilization,
            kv_cache_bytes=kv_cache_bytes,
            enforce_eager=c.vllm_enforce_eager or not world.cuda)
        # What vLLM refuses (a cache too small, a model it cannot run) is one line; the rest are failures.
        with reading("vLLM", ValueError):
            if c.colocate:
                return colocate.ColocatedEngine(**arguments)
            from engines import RemoteEngine
            return RemoteEngine(world, arguments)
    import engines
    if c.replay:
        return engines.RecordedEngine(Path(c.replay))
    return engines.PolicySampler(policy, tokenizer)


def main():
    try:
        with reading("command line"):
            c = config.parse(sys.argv[1:], loss_type=tuple(LOSSES))
            config.check(c)
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            c.fresh = False  # a restart by torchrun continues what this command began
        world = World(c.timeout_minutes, generators=int(c.split))
        if c.split:
            import engines
            engines.connect(world)  # both ends at once: only then each of them sees that the other has ended
        if world.trains:
            train(c, world)
        else:
            engines.serve(world)
        if dist.is_initialized():  # ending a vLLM engine has already destroyed it
            dist.destroy_process_group()
    except RunError as error:
        # Most mistakes are seen by all ranks: rank 0 says it, and torchrun ends the others in the meantime.
        yield_to_torchrun(0 if os.environ.get("RANK", "0") == "0" else 2)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except RuntimeError:  # perhaps only because another rank failed, and says why
        yield_to_torchrun(5 if "RANK" in os.environ else 0)
        raise


def yield_to_torchrun(seconds):
    """Where another rank ended with an error, torchrun ends this one in the meantime."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(seconds)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # all is saved; while Python shuts down, threads of native libraries may crash
