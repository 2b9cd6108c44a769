"""Data parallel training with a sharded optimizer, and the ranks that do it.

    world = World()                                   # under torchrun; without it, a single rank
    optimizer = ShardedAdamW(model, config, world)    # config: learning_rate, adam_beta1, ... as attributes
    optimizer.begin()
    loss.backward()                                   # as often as you like: gradients add up in fp32
    norm = optimizer.step(learning_rate=1e-6)

Every rank holds the working weights (2 bytes a parameter in bf16) and, only between `begin` and `step`, fp32
gradients (4); fp32 master weights and Adam's moments (12) are cut over the ranks. One reduce-scatter and one
all-gather a step. DDP would keep all 18 on every GPU.

Left out: sharded working weights (ZeRO stage 3, FSDP): the engine needs whole ones at every step anyway.
"""

import contextlib
import datetime
import functools
import math
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, from the data sheets


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


class Stalled(Exception):
    """A rank did not come to where the others wait."""


class World:
    """This process among the ranks of the job; without torchrun a single one.

    With `split` the last rank generates: it is not counted in `size`, and `link` joins it with rank 0.
    """

    def __init__(self, split: bool = False, timeout_minutes: float = 30.0):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.cuda, self.link, self.generates = torch.cuda.is_available(), None, False
        self.device, self.peak_flops = torch.device("cpu"), None
        if self.cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
            self.card, name = torch.cuda.mem_get_info()[1], torch.cuda.get_device_name()  # bytes
            self.peak_flops = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
        else:  # ranks share the cores; sums in one thread keep one order
            torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
        if "RANK" in os.environ:
            threading.Thread(target=self.end_with_torchrun, args=(os.getppid(),), daemon=True).start()
            self.patience = datetime.timedelta(minutes=timeout_minutes)
            self.join(split)

    def join(self, split: bool) -> None:
        store, _, _ = next(dist.rendezvous("env://"))  # torchrun's
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # One host: after a restart torchrun's store still holds the addresses of those who died.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        if split:
            from colocate import Link
            self.size -= 1
            self.generates = self.rank == self.size
            if self.rank in (0, self.size):
                self.link = Link(store, int(self.generates), self.device)
        if not self.generates:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo", timeout=self.patience,
                                    store=dist.PrefixStore("trainers", store), rank=self.rank,
                                    world_size=self.size)
            self.meeting = dist.new_group(backend="gloo", timeout=self.patience)

    @staticmethod
    def end_with_torchrun(parent: int) -> None:
        """torchrun's workers live in sessions of their own: killing it with -9 would leave them running."""
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    def meet(self, stage: str) -> None:
        """Returns when all ranks are here. Raises Stalled, naming those that are not in time."""
        start = time.monotonic()
        try:
            if self.size > 1:
                dist.monitored_barrier(self.meeting, self.patience, wait_all_ranks=True)
        except RuntimeError as error:
            if time.monotonic() - start < self.patience.total_seconds() - 1:
                raise  # the connection broke: the other rank says why
            raise Stalled(f"after {self.patience} at the end of {stage}: {error}") from None

    def say(self, words: str) -> None:
        """To the console, once."""
        if self.rank == 0:
            print(words, flush=True)

    def gather(self, value) -> list:
        """The value of every rank, in their order, on every rank. Values are pickled and travel by CPU."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def now(self) -> float:
        """Seconds on a clock, once the GPU has done what it was given."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def share(self, items: list) -> list:
        """This rank's contiguous part of a list that every rank has; parts differ by at most one."""
        return items[self.rank * len(items) // self.size:(self.rank + 1) * len(items) // self.size]


# torch 2.13 renamed both and warns at the old names; 2.11 has only those.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedAdamW:
    """AdamW whose fp32 master weights and moments are cut over the ranks (ZeRO stage 2).

    The parameters become views of one flat buffer in the working dtype. Backward passes add into a flat
    buffer of gradients in at least fp32, which exists only between `begin` and `step`. One rank's shard is
    1/N of both.
    """

    ALIGN = 64  # elements: every parameter starts at an address that matrix products like

    def __init__(self, policy: torch.nn.Module, c, world: World):
        self.c, self.world, self.grads, self.reference = c, world, None, None
        self.parameters, self.offsets, size = list(policy.parameters()), [], 0
        for p in self.parameters:
            self.offsets.append(size)
            size += -(-p.numel() // self.ALIGN) * self.ALIGN
        shard = -(-size // (world.size * self.ALIGN)) * self.ALIGN
        first = self.parameters[0]
        self.weights = torch.zeros(shard * world.size, dtype=first.dtype, device=first.device)
        for p, offset in zip(self.parameters, self.offsets):
            view = self.weights[offset:offset + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            p.register_post_accumulate_grad_hook(functools.partial(self.accumulate, offset))
        self.shard = slice(world.rank * shard, (world.rank + 1) * shard)
        self.grad_dtype = torch.promote_types(first.dtype, torch.float32)
        home = "cpu" if c.optimizer_offload else first.device
        self.master = self.weights[self.shard].to(home, self.grad_dtype, copy=True)
        self.adam = torch.optim.AdamW([self.master], lr=c.learning_rate, betas=(c.adam_beta1, c.adam_beta2),
                                      eps=c.adam_epsilon, weight_decay=c.weight_decay, fused=True)
        self.state = {"step": torch.zeros((), device=home), "exp_avg": torch.zeros_like(self.master),
                      "exp_avg_sq": torch.zeros_like(self.master)}
        self.adam.state[self.master] = self.state  # now, so that saving and loading know no first step

    def accumulate(self, offset: int, p: torch.Tensor) -> None:
        self.grads[offset:offset + p.numel()].add_(p.grad.flatten())  # sums in bf16 would lose bits
        p.grad = None

    def begin(self) -> None:
        self.grads = torch.zeros(self.weights.shape, dtype=self.grad_dtype, device=self.weights.device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Sums the gradients over the ranks, clips, updates, spreads the weights; returns the norm unclipped.

        A norm that is not finite changes nothing, on any rank.
        """
        self.world.meet("the backward passes")
        grad = self.grads[self.shard]
        if self.world.size > 1:
            grad = grad if self.world.cuda else torch.empty_like(grad)  # NCCL works in place, gloo does not
            REDUCE_SCATTER(grad, self.grads)
        self.grads = None
        # In pieces: whole, the squares and their copy in float64 would be three more buffers of this size.
        squares = sum(part.square().sum(dtype=torch.float64) for part in grad.split(2**26))
        if self.world.size > 1:
            dist.all_reduce(squares)
        norm = math.sqrt(squares) if squares.isfinite() else math.nan
        if math.isfinite(norm):
            grad = grad.mul_(min(1.0, self.c.max_grad_norm / (norm + 1e-6)))
            self.master.grad = grad.to(self.master.device)
            self.adam.param_groups[0]["lr"] = learning_rate
            self.adam.step()
            self.master.grad = None
            self.spread(self.master)
        return norm

    def spread(self, shard: torch.Tensor) -> None:
        """The policy takes its weights from the shards of all ranks."""
        mine = self.weights[self.shard].copy_(shard)
        if self.world.size > 1:
            ALL_GATHER(self.weights, mine if self.world.cuda else mine.clone())

    def keep_reference(self, policy: torch.nn.Module) -> None:
        """This rank's shard of another policy's weights; on the CPU, so that it costs a GPU nothing."""
        start, stop = self.shard.start, self.shard.stop
        self.reference = torch.zeros(stop - start, dtype=self.weights.dtype)
        for p, offset in zip(policy.parameters(), self.offsets):
            low, high = max(offset, start), min(offset + p.numel(), stop)
            if low < high:
                self.reference[low - start:high - start] = p.detach().flatten()[low - offset:high - offset]

    @contextlib.contextmanager
    def as_reference(self):
        """Inside, the policy is the reference."""
        self.spread(self.reference)
        yield
        self.spread(self.master)

    def save(self, folder: Path) -> None:
        """Writes this rank's shard."""
        save_file({"master": self.master, **self.state}, folder / f"{self.world.rank:05}.safetensors")

    def load(self, folder: Path) -> None:
        """Reads this rank's part, whatever number of ranks wrote the shards."""
        parts = {"master": self.master, **{k: self.state[k] for k in ("exp_avg", "exp_avg_sq")}}
        for path, start, end in shards(folder, self.parameters):
            with safe_open(path, "pt") as file:
                low, high = max(start, self.shard.start), min(end, self.shard.stop)
                for name, mine in parts.items() if low < high else ():
                    piece = file.get_slice(name)[low - start:high - start]
                    mine[low - self.shard.start:high - self.shard.start].copy_(piece)
                self.state["step"].copy_(file.get_tensor("step"))


def shards(folder: Path, parameters: list[torch.Tensor]) -> list[tuple[Path, int, int]]:
    """(file, its first element, its end) of each part of an optimizer, in order. Raises UserError where they
    are damaged or do not make up the optimizer of `parameters`."""
    found, end, size = [], 0, sum(p.numel() for p in parameters)
    again = f"remove {folder.parent.resolve()} to continue from the checkpoint before, or use --fresh"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                slices = [file.get_slice(name) for name in ("master", "exp_avg", "exp_avg_sq")]
                [(_, length)] = {(s.get_dtype(), *s.get_shape()) for s in slices}
                file.get_tensor("step").item()
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is damaged ({error}): {again}") from None
        found.append((path, end, end + length))
        end += length
    padding = ShardedAdamW.ALIGN * (len(parameters) + len(found))  # at most: both are aligned
    numbered = [path.name for path, *_ in found] == [f"{n:05}.safetensors" for n in range(len(found))]
    if not (numbered and size <= end <= size + padding):
        raise UserError(f"{folder}: {end} elements in {len(found)} files are not the optimizer of the {size} "
                        f"weights beside it: {again}")
    return found
