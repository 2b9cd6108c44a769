"""What the tests of the loss and of the optimizer run on one rank in their own process, and on several:

    python tests/ranks.py CHECKPOINT OUT 2        # the number of ranks

Every rank writes what it saw to OUT/rank_N.pt. Here are only inputs and calls; the expectations, worked out
by hand or by other code, stand in the tests.
"""

import atexit
import contextlib
import dataclasses
import functools
import io
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import forks
import torch

from config import TINY, Config
from minigrpo import Rollout, group_advantages, reward_table, step_metrics, update
from model import Policy
from sharded import ShardedAdamW, World
from tiny import write_digits_tokenizer

NAN, INF, EOS = math.nan, math.inf, 1
VOCAB, LONGEST, TEMPERATURE = 40, 8, 0.7
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_key_value_heads=1, head_dim=8,
             eos_token_id=EOS)
CASES = [(loss_type, scale, (i + j) % 2 == 1)  # the last: mask_truncated_completions
         for i, loss_type in enumerate(("grpo", "dapo", "dr_grpo"))
         for j, scale in enumerate(("group", "batch", "none"))]
BUDGETS = (1, 40, 10**6)  # every sequence alone, a few together, all in one


# ---- Starting several ranks --------------------------------------------------------------------------------

def start(ranks: int, *arguments) -> tuple[subprocess.Popen, object]:
    """A script of this repository on that many ranks under torchrun: (process, what it prints)."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    log = tempfile.TemporaryFile("w+")
    return subprocess.Popen([sys.executable, *launcher, *map(str, arguments)], cwd=ROOT, stdout=log,
                            stderr=subprocess.STDOUT, env={**clean, "OMP_NUM_THREADS": "1"}), log


def finish(started, timeout: float = 600) -> str:
    """Waits; what it printed. AssertionError where it failed or hung."""
    process, log = started
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on; SIGKILL would leave its workers behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        raise AssertionError(f"the ranks hang:\n{printed(log)}") from None
    assert process.returncode == 0, printed(log)
    return printed(log)


def printed(log) -> str:
    log.seek(0)
    return log.read()[-6000:]


@functools.cache
def checkpoint():
    """(folder, transformers model) of a small policy with tied embeddings, and biases on q, k and v."""
    from checkpoints import write_checkpoint  # here: the ranks do without transformers
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name, write_checkpoint(folder.name, "qwen2-tied", scale=5.0, **SMALL)


def as_tiny(folder, **changes) -> list[str]:
    """Flags that train the model of a folder as --model tiny is trained."""
    return [f"--{name}={value}" for name, value in {"model": folder, **TINY, **changes}.items()]


def write_digits_model(folder) -> None:
    """Random weights with the tokenizer of the built-in digits task."""
    from checkpoints import write_checkpoint
    write_checkpoint(folder, "llama-tied", scale=2.0, **{**SMALL, "vocab_size": 14, "eos_token_id": 12})
    write_digits_tokenizer(folder)


@contextlib.contextmanager
def signals_kept():
    """train() takes SIGTERM and SIGINT for itself; afterwards they do what they did."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def program(*flags) -> tuple[int, str, str]:
    """minigrpo.py in this process: (exit code, what it printed, what it printed as errors). For a run that costs the
    seconds of its steps and not those of starting Python."""
    import minigrpo
    out, err, code = io.StringIO(), io.StringIO(), 0
    with unittest.mock.patch.dict(os.environ), unittest.mock.patch.object(sys, "argv", ["minigrpo.py", *map(str, flags)]), \
            unittest.mock.patch.object(sys, "path", sys.path[:]), signals_kept(), \
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        try:
            minigrpo.main()
        except SystemExit as error:
            code = error.code
    return code, out.getvalue(), err.getvalue()


@functools.cache
def outcome(size: int) -> list[dict] | AssertionError:
    if size == 1:
        return [all_jobs(checkpoint()[0], World())]
    with tempfile.TemporaryDirectory() as out:
        try:
            subprocess.run([sys.executable, "tests/ranks.py", checkpoint()[0], out, str(size)], cwd=ROOT)
            logs = "".join(path.read_text() for path in Path(out).glob("log_*"))
            assert len(list(Path(out).glob("rank_*.pt"))) == size, logs
        except AssertionError as error:
            return error  # ranks that hang once are not waited for by every test
        return [torch.load(Path(out) / f"rank_{rank}.pt") for rank in range(size)]


def results(size: int) -> list[dict]:
    """What all jobs below give, a dictionary for each rank of that many; run once for all tests."""
    made = outcome(size)
    if isinstance(made, AssertionError):
        raise made
    return made


# ---- Inputs ------------------------------------------------------------------------------------------------

def rollout(slot=0, prompt=(3, 4), completion=(5, 6, EOS), logps=None, truncated=False, reward=1.0,
            advantage=0.0):
    logps = [-3.0] * len(completion) if logps is None else logps
    return Rollout(slot=slot, prompt="", prompt_ids=list(prompt), completion_ids=list(completion),
                   sampler_logps=list(logps), completion="", truncated=truncated, weight_version=0,
                   seed=0, reward=reward, advantage=advantage)


def ragged_rollouts() -> list[Rollout]:
    """Seven groups of four with everything that can be odd about one; EOS stands inside prompts as well."""
    rng = random.Random(5)
    rewards = [[1, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1], [0.5, None, 1, 0], [None, None, 1, None],
               [0.2, 0.7, 0.1, 0.9], [0, 0, 1, 1]]
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (3, 3, 1, 9, 2, 5, 14)]
    prompts[1], prompts[3][4], prompts[6][:3] = prompts[0], EOS, [EOS] * 3
    made = []
    for prompt, group in zip(prompts, rewards):
        for reward in group:
            n, cut = rng.randrange(1, LONGEST + 1), rng.random() < 0.3
            ids = [rng.randrange(2, VOCAB) for _ in range(LONGEST)] if cut else \
                [rng.randrange(2, VOCAB) for _ in range(n - 1)] + [EOS]
            logps = [-4.5 + rng.gauss(0, 1) for _ in ids]
            made.append(rollout(len(made), prompt, ids, logps, cut, reward))
    for slot, values in {1: [NAN], 5: [-INF], 9: [INF], 13: [NAN, NAN], 20: [NAN] * LONGEST}.items():
        made[slot].sampler_logps[:len(values)] = values[:len(made[slot].completion_ids)]
    return made


def with_advantages(rollouts, c: Config) -> list[Rollout]:
    """As the loop fills them in."""
    advantages = group_advantages(reward_table(rollouts, c.num_generations), c.scale_rewards, c.baseline)
    return [dataclasses.replace(r, advantage=a) for r, a in zip(rollouts, advantages.flatten().tolist())]


def optimizer_of(policy, c: Config, world: World) -> ShardedAdamW:
    return ShardedAdamW(
        policy.parameters(), lr=c.learning_rate, betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_epsilon,
        weight_decay=c.weight_decay, max_grad_norm=c.max_grad_norm, world=world)


def update_at(rate: float, policy, optimizer, rollouts, c: Config, world: World) -> tuple[dict, dict]:
    """update() with that learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return update(policy, optimizer, rollouts, c, world)


# ---- Jobs --------------------------------------------------------------------------------------------------

class Reduced:
    """An optimizer with the gradient that reaches Adam: summed over the ranks, before the step."""

    def __init__(self, policy, c: Config, world: World):
        self.policy, self.world, self.optimizer, self.seen = policy, world, optimizer_of(policy, c, world), []
        self.optimizer.adam.register_step_pre_hook(
            lambda *_: self.seen.append(self.optimizer.master.grad.detach().clone()))

    def pop(self) -> dict[str, torch.Tensor]:
        """By name; joined from the shards of all ranks."""
        flat = torch.cat(self.world.all_gather(self.seen.pop()))
        return {name: flat[o:o + p.numel()].view_as(p).clone()
                for (name, p), o in zip(self.policy.named_parameters(), self.optimizer.offsets)}


def gradients(checkpoint, world: World) -> dict:
    """The reduced gradient and the sums of update() for every case, dtype and size of micro-batch."""
    results = {}
    for dtype in (torch.float64, torch.float32):
        reduced = Reduced(Policy.from_folder(checkpoint, dtype=dtype), Config(max_grad_norm=1e30), world)
        for loss_type, scale, mask in CASES:
            for budget in BUDGETS:
                c = Config(loss_type=loss_type, scale_rewards=scale, mask_truncated_completions=mask,
                           micro_batch_tokens=budget, num_generations=4, temperature=TEMPERATURE,
                           max_completion_length=LONGEST)
                rollouts = with_advantages(ragged_rollouts(), c)
                row, _ = update_at(0.0, reduced.policy, reduced.optimizer, rollouts, c, world)
                case = f"{loss_type} {scale} {mask} {budget} {dtype}"
                results[case] = {"grad": reduced.pop(), "row": row}
    return results


def state_of(optimizer: ShardedAdamW) -> list[torch.Tensor]:
    """Everything an update may change on this rank."""
    adam = [v for s in optimizer.adam.state.values() for v in s.values()]
    return [t.clone() for t in (optimizer.weights, optimizer.master, *adam)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def odd_batches(checkpoint, world: World) -> dict:
    """Batches that leave ranks without work, train nothing, or end in a gradient that is not finite."""
    policy = Policy.from_folder(checkpoint)
    c = Config(num_generations=4, max_completion_length=LONGEST, micro_batch_tokens=8)
    reduced, results = Reduced(policy, c, world), {}
    optimizer = reduced.optimizer

    def run(name, rollouts, advantages=None):
        rollouts = with_advantages(rollouts, c)
        for r, a in zip(rollouts, advantages or []):
            r.advantage = a
        before = state_of(optimizer)
        row, _ = update_at(1e-3, policy, optimizer, rollouts, c, world)
        row |= {"time/step": 1.0, "time/update": 1.0}
        row |= step_metrics(rollouts, reward_table(rollouts, c.num_generations), row, policy, c, world)
        changed = not same(before, state_of(optimizer))
        grad = reduced.pop() if reduced.seen else {}
        results[name] = {"row": row, "changed": changed, "grad": grad, "weights": optimizer.weights.clone()}

    run("usual", ragged_rollouts())
    run("one trains", [rollout(i, completion=range(2, 8), reward=r)
                       for i, r in enumerate([1.0, None, None, None])], [1.0] * 4)
    run("equal rewards", [rollout(i, reward=1.0) for i in range(8)])
    run("none rewarded", [rollout(i, reward=None) for i in range(8)])
    run("no finite sampler", [rollout(i, logps=[NAN] * 3, reward=i % 2) for i in range(8)])
    # One rank meets the infinite advantage: the longest goes to rank 0.
    run("not finite", [rollout(i, reward=i % 2, completion=range(2, 10 - i)) for i in range(4)],
        [INF, 1.0, 1.0, -1.0])

    optimizer.zero_grad()
    if world.rank == world.world_size - 1:
        optimizer.grads[0] = NAN  # reduced into the shard of rank 0 alone
    before = state_of(optimizer)
    norm = optimizer.step()
    results["nan of the last rank"] = {"norm": norm, "changed": not same(before, state_of(optimizer))}
    run("usual again", ragged_rollouts())
    return results


def old_logps(folder, world: World) -> dict:
    """What update() returns for the rollouts on this rank."""
    policy, c = Policy.from_folder(folder), Config(num_generations=4, micro_batch_tokens=20)
    optimizer = optimizer_of(policy, c, world)
    return update_at(1e-3, policy, optimizer, with_advantages(ragged_rollouts(), c), c, world)[1]


def all_jobs(folder, world: World) -> dict:
    return {"gradients": gradients(folder, world), "odd": odd_batches(folder, world),
            "old_logps": old_logps(folder, world)}


def main(folder: str, out: str) -> None:
    world = World()
    torch.save(all_jobs(folder, world), Path(out) / f"rank_{world.rank}.pt")
    world.barrier("all jobs")  # rank 0 has the store
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    checkpoint_folder, results_folder, size = sys.argv[1:]
    forks.fork(int(size), lambda: main(checkpoint_folder, results_folder), results_folder)
