"""The other things that generate, each with the methods of colocate.py's Engine: no caller asks which it has.

    engine = PolicySampler(policy)              # the policy samples for itself: only torch is needed
    engine = RemoteEngine(world, arguments)     # --split: the last rank, which runs `serve`, only generates
    engine = RecordedEngine(Path("runs/sums"))  # --replay: what an earlier run generated, from its files

The first is slow, and simple enough to check an engine against. The second is the layout that colocation
replaces, kept for comparison. The third repeats a run to the last bit, so that a changed loss can be compared
on equal rollouts.
"""

import datetime
import functools
import itertools
import json
import os
import pickle
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from colocate import ColocatedEngine, Completion, Engine, completes
from model import PackedAttention, scaled_logits

# ---- The policy itself -------------------------------------------------------------------------------------

SEQUENCES_AT_ONCE = 256  # bounds the KV cache


class PolicySampler(Engine):
    """The policy generates for itself, without vLLM. tokenizer: as ColocatedEngine's, for stop strings."""

    def __init__(self, policy, tokenizer=None):
        self.policy = policy
        self.tokenizer = tokenizer

    def generate(self, prompts, *, n, max_tokens, temperature, seeds, eos_token_ids, stop=()):
        repeated, every_seed = [], []  # of each completion
        for prompt, seed in zip(prompts, seeds, strict=True):
            repeated += [prompt] * n
            every_seed += range(seed, seed + n)
        drawn = []
        for start in range(0, len(repeated), SEQUENCES_AT_ONCE):
            some = slice(start, start + SEQUENCES_AT_ONCE)
            drawn += sample(
                self.policy,
                repeated[some],
                max_tokens,
                temperature,
                every_seed[some],
                eos_token_ids,
                self.tokenizer,
                stop)
        return [drawn[start:start + n] for start in range(0, len(drawn), n)]


@torch.no_grad()
def sample(policy, prompts, max_tokens, temperature, seeds, eos_token_ids, tokenizer=None, stop=()):
    """One completion for each prompt of token ids. Temperature 0 is greedy.

    A completion ends with the EOS it emitted, with the token that completes one of the strings `stop`, or
    after max_tokens. What a sequence draws depends on its own seed alone, not on its neighbours: its seed
    gives a number u in [0, 1) for each step, which is looked up in the cumulative distribution.
    """
    device = policy.device
    uniform = []
    for seed in seeds:  # on the CPU, so that every device draws the same
        generator = torch.Generator().manual_seed(seed)
        row = torch.rand(max_tokens, dtype=torch.float64, generator=generator)
        uniform.append(row)
    uniform = torch.stack(uniform, 1).to(device)  # [max_tokens, batch]
    lengths = [len(prompt) for prompt in prompts]
    cache = KVCache(policy, lengths, max_tokens)
    packed = list(itertools.chain(*prompts))
    tokens = torch.tensor(packed, device=device)  # [tokens of all prompts]
    prefill = cache.attends(cache.prefill)
    step = cache.attends(cache.step)
    hidden = policy(tokens, cache.packed.positions, prefill)
    last = cache.used.cumsum(0) - 1  # where each prompt's last token stands
    hidden = hidden[last]  # [batch, hidden]
    completions = [Completion([], []) for _ in prompts]
    unfinished = set(range(len(prompts)))
    for numbers in uniform:
        logits = F.linear(hidden, policy.head_weight)  # [batch, vocabulary]
        logp = scaled_logits(logits, temperature or 1.0).log_softmax(-1)
        if temperature > 0:
            token = draw(logp, numbers)
        else:
            token = logp.argmax(-1)
        chosen = logp.gather(-1, token[:, None])  # [batch, 1]
        ids = token.tolist()
        logprobs = chosen.squeeze(-1).tolist()
        # Who is finished goes on with the batch; what it draws from here on is dropped.
        for i in list(unfinished):
            token_ids = completions[i].token_ids
            token_ids.append(ids[i])
            completions[i].logprobs.append(logprobs[i])
            ended = ids[i] in eos_token_ids or len(token_ids) == max_tokens
            if ended or stop and completes(tokenizer, token_ids, stop):
                unfinished.remove(i)
        if not unfinished:
            break
        hidden = policy(token, cache.used, step)
        cache.used += 1
    return completions


def draw(logp, uniform):
    """Inverse-CDF sampling: logp [batch, vocabulary], uniform float64 [batch] → token ids [batch]."""
    cumulative = logp.double().exp().cumsum(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]  # whose last value is 1 only up to rounding
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return token.clamp_(max=logp.shape[-1] - 1)


class KVCache:
    """Keys and values, [layers, batch, length, kv_heads, head_dim], filled from the left."""

    def __init__(self, policy, lengths, max_tokens):
        c = policy.config
        room = max(lengths) + max_tokens
        shape = (c.num_hidden_layers, len(lengths), room, c.num_key_value_heads, c.head_dim)
        self.k = torch.zeros(shape, dtype=policy.dtype, device=policy.device)
        self.v = torch.zeros_like(self.k)
        self.packed = PackedAttention(lengths, policy.device, policy.dtype)
        self.used = torch.tensor(lengths, device=policy.device)  # [batch] tokens in the cache
        self.rows = torch.arange(len(lengths), device=policy.device)

    def attends(self, method):
        """For each layer the attend(q, k, v) that Policy.forward takes. method: self.prefill or self.step."""
        layers = range(len(self.k))
        return [functools.partial(method, layer) for layer in layers]

    def prefill(self, layer, q, k, v):
        """attend() over whole prompts, packed."""
        self.k[layer, self.packed.row, self.packed.positions] = k
        self.v[layer, self.packed.row, self.packed.positions] = v
        return self.packed(q, k, v)

    def step(self, layer, q, k, v):
        """attend() for one new token a sequence, q [batch, heads, head_dim], at position `used`."""
        self.k[layer, self.rows, self.used] = k
        self.v[layer, self.rows, self.used] = v
        places = torch.arange(self.k.shape[2], device=q.device)  # [length]
        seen = places <= self.used[:, None]  # [batch, length]
        keys = self.k[layer].transpose(1, 2)  # [batch, kv_heads, length, head_dim]
        values = self.v[layer].transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True)
        return out.squeeze(2)  # [batch, heads, head_dim]


# ---- One engine for all, on a rank of its own (--split) ----------------------------------------------------

class RemoteEngine(Engine):
    """The engine of the generating rank, as the trainers see it. All of them call every method together.

    Its weights are pushed over NCCL by the first trainer, whose weights are everybody's. It has its GPU for
    itself and never sleeps. arguments: those of ColocatedEngine.
    """

    def __init__(self, world, arguments):
        self.world = world
        self.link = connect(world)  # None on all trainers but the first
        if self.link:
            self.link.send(("build", arguments))
            self.link.receive()  # it is built

    def wake(self, named_weights, version=0):
        self.weight_version = version
        if self.link:
            tensors = dict(named_weights)
            kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
            self.link.send(("wake", kinds, version))
            for tensor in tensors.values():
                self.link.broadcast(tensor)
            self.link.receive()  # it has them

    def generate(self, prompts, *, seeds, **arguments):
        """Every trainer brings its own prompts, and gets their completions; the engine sees one batch."""
        parts = self.world.all_gather(list(zip(prompts, seeds, strict=True)))
        answers = None
        if self.link:
            together = list(itertools.chain(*parts))
            arguments["prompts"] = [prompt for prompt, _ in together]
            arguments["seeds"] = [seed for _, seed in together]
            self.link.send(("generate", arguments))
            groups = iter(self.link.receive())
            answers = []
            for part in parts:
                answer = itertools.islice(groups, len(part))
                answers.append(list(answer))
        mine = [None]
        dist.scatter_object_list(mine, answers, src=0)
        return mine[0]

    def close(self):
        if self.link:
            self.link.send(("close",))


def serve(world):
    """The life of the generating rank: does what the first trainer's RemoteEngine asks, until it closes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the trainers finish their step, and then close this engine
    link = connect(world)
    os.environ.update(
        # Building an engine waits for every rank that these variables count, but the trainers build none.
        RANK="0",
        WORLD_SIZE="1",
        # So this rank becomes a job of its own, which opens a store of its own.
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # any free one
        TORCHELASTIC_USE_AGENT_STORE="False")
    engine = None
    while True:
        try:
            message = link.receive()
        except RuntimeError:
            if engine is None:  # the run was finished, or had a mistake in it
                return
            print("error: the trainers ended before they closed the engine", file=sys.stderr, flush=True)
            os._exit(1)  # an ordinary exit would abort in one of vLLM's threads
        match message:
            case "build", arguments:
                engine = ColocatedEngine(**arguments)
                link.send("built")
            case "wake", kinds, version:
                weights = {}
                for name, shape, dtype in kinds:
                    weights[name] = torch.empty(shape, dtype=dtype, device=world.device)
                    link.broadcast(weights[name])
                engine.wake(weights.items(), version)
                del weights  # beside them stand the engine's own
                link.send("awake")
            case "generate", arguments:
                link.send(engine.generate(**arguments))
            case ("close",):
                return engine.close()


@functools.cache
def connect(world):
    """The link between the first trainer and the rank that generates, made at the first call; None elsewhere.

    Both call it as soon as they start: only a linked rank notices that the other one has ended, which it may
    before any engine is wanted.
    """
    if world.rank == 0 or not world.trains:
        return Link(world)


class Link:
    """Joins two processes: objects travel over gloo, weights over NCCL where there is a GPU.

    The default process group has no part in this, because building a vLLM engine is collective over it.
    """

    def __init__(self, world):
        end = 0 if world.trains else 1
        self.other = 1 - end
        patience = datetime.timedelta(days=7)  # when the other process ends, so does any wait for it
        gloo_store = dist.PrefixStore("objects", world.store)
        self.objects = dist.ProcessGroupGloo(gloo_store, end, 2, patience)
        self.weights = self.objects
        if world.cuda:
            nccl_store = dist.PrefixStore("weights", world.store)
            self.weights = dist.ProcessGroupNCCL(nccl_store, end, 2, patience)

    def send(self, value):
        """Any object that can be pickled."""
        pickled = bytearray(pickle.dumps(value))
        data = torch.frombuffer(pickled, dtype=torch.uint8)
        size = torch.tensor([len(pickled)])
        for tensor in (size, data):  # the size first, so that the other end can make room
            self.objects.send([tensor], self.other, 0).wait()

    def receive(self):
        """What the other end sends next; RuntimeError when that process has ended."""
        size = torch.zeros(1, dtype=torch.int64)
        self.objects.recv([size], self.other, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self.objects.recv([data], self.other, 0).wait()
        return pickle.loads(data.numpy())

    def broadcast(self, tensor):
        """Called on both ends: fills the tensor on the generating rank with the trainer's."""
        options = dist.BroadcastOptions()  # from end 0
        self.weights.broadcast([tensor.detach()], options).wait()


# ---- Recorded rollouts (--replay) --------------------------------------------------------------------------

SAME_OPTIONS = (  # or the rollouts would be of other prompts, seeds or distributions
    "model",
    "data",
    "seed",
    "prompts_per_step",
    "num_generations",
    "temperature",
    "dynamic_sampling_rounds",
)


class RecordedEngine(Engine):
    """Answers with the completions that an earlier run recorded. folder: of that run."""

    def __init__(self, folder):
        self.folder = folder

    def generate(self, prompts, *, n, seeds, **ignored):
        """Raises ValueError where the rollouts of this step are damaged, or of other prompts or seeds."""
        path = self.folder / f"rollouts/step_{self.weight_version}.jsonl"
        recorded = read_rollouts(path)
        groups = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            found = [recorded.get((seed + i, *prompt)) for i in range(n)]
            if None in found:
                raise ValueError(f"{path} has completions of other prompts: give all options that make "
                                 f"prompts as they are in {self.folder / 'config.json'}, and the same data")
            groups.append(found)
        return groups


def read_rollouts(path):
    """(seed, *token ids of the prompt) → completion. Seeds alone would not show that the prompts changed."""
    recorded = {}
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            completion = Completion(row["completion_ids"], row["sampler_logps"])
            recorded[row["seed"], *row["prompt_ids"]] = completion
            pairs = zip(*completion, strict=True)
            types = {(type(token), type(logprob)) for token, logprob in pairs}
            right = types == {(int, float)}
        except Exception:  # whatever the damage made of this line
            right = False
        if not right:
            raise ValueError(f"{path}, line {number}, is damaged: record that run again")
    return recorded


def recorded_steps(folder, options, max_steps):
    """How many updates the run in `folder` has rollouts for, at most max_steps.

    options: of the run that is to replay them. Raises ValueError where they are of other prompts or another
    sampler than this run would have, where a step is missing, and where this run would overwrite them.
    """
    path = folder / "config.json"
    problems = []
    try:
        old = json.loads(path.read_text())
        for key in SAME_OPTIONS:
            was = without_folders(old[key])
            wanted = without_folders(options[key])
            if was != wanted:
                problems.append(f"--{key} {wanted}: {folder} was recorded with {was}: give the same")
    except Exception as error:  # it is missing, damaged or another program's
        raise ValueError(f"{path} is not that of a run ({error!r})") from None
    if options["dynamic_sampling_rounds"]:
        problems.append("--dynamic_sampling_rounds dropped groups that were not recorded")
    out = options["out"]
    if out and Path(out).resolve() == folder.resolve():
        problems.append(f"{folder} would be overwritten: give another --out")
    files = set(folder.glob("rollouts/step_*.jsonl"))
    steps = 0
    while folder / f"rollouts/step_{steps}.jsonl" in files:
        steps += 1
    if steps < max_steps and (steps == 0 or steps < len(files)):  # there are later ones
        problems.append(f"{folder} keeps no rollouts of step {steps}: record with --save_rollouts N, for all "
                        "N steps of a run")
    if problems:
        raise ValueError("; ".join(problems))
    return min(steps, max_steps)


def without_folders(value):
    """An option as it is given, with only the names of files: folders move."""
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(Path(str(one)).name for one in values)
