"""Data parallel training with a sharded optimizer, and the ranks that do it.

    import torch
    from sharded import ShardedAdamW

    model, x = torch.nn.Linear(4, 1), torch.ones(8, 4)
    optimizer = ShardedAdamW(model.parameters(), lr=0.1)   # under torchrun: 1/N of its state on each rank
    for step in range(20):
        optimizer.zero_grad()
        for part in x.split(4):                            # gradients add up in fp32
            loss = (model(part) - 3).square().mean()
            loss.backward()
        norm = optimizer.step()
    assert loss < 0.5

Every rank holds the working weights (2 bytes a parameter in bf16) and, only between `zero_grad` and `step`,
fp32 gradients (4). The fp32 master weights and Adam's two moments (12) are cut over the ranks: ZeRO, stage 1
(Rajbhandari et al. 2020). One reduce-scatter and one all-gather a step. DDP would keep all 18 on every GPU.

Left out: sharded working weights (ZeRO stage 3, FSDP). The engine needs whole ones at every step anyway.
"""

import contextlib
import datetime
import functools
import math
import os
import threading
import time

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, from the data sheets


# ---- The ranks ---------------------------------------------------------------------------------------------

class Stalled(Exception):
    """A rank did not reach a barrier in time."""


class World:
    """This process among the ranks that torchrun started; without torchrun, a single rank.

    timeout_minutes: how long a barrier or a collective waits. generators: how many of the last ranks do not
    train. They are not counted in `world_size` nor in the default process group; `trains` is False there.
    """

    device = torch.device("cpu")
    card = 0  # bytes of the GPU's memory
    peak_flops = None  # of the GPU, where it is in PEAK_FLOPS
    store = None  # torchrun's keys and values, shared by all ranks, those that generate included

    def __init__(self, timeout_minutes=30.0, generators=0):
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) - generators
        self.generators = generators
        self.trains = self.rank < self.world_size
        self.timeout = datetime.timedelta(minutes=timeout_minutes)
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
            _, self.card = torch.cuda.mem_get_info()
            for name, flops in PEAK_FLOPS.items():
                if name in torch.cuda.get_device_name():
                    self.peak_flops = flops
        else:
            # Ranks share the cores, and sums made by one thread always have the same order.
            threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
            torch.set_num_threads(int(threads))
        if "RANK" in os.environ:
            self.join()

    def join(self):
        """Finds the other ranks. Those that train become the default process group."""
        threading.Thread(target=end_with_torchrun, daemon=True).start()
        self.store, _, _ = next(dist.rendezvous("env://"))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # On one host torchrun's store outlives a restart, and holds the addresses of the ranks that died.
            # (Several hosts may count attempts differently, and get a new store.)
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
            self.store = dist.PrefixStore(f"attempt {attempt}", self.store)
        if self.trains:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.cuda else "gloo",
                timeout=self.timeout,
                store=dist.PrefixStore("trainers", self.store),
                rank=self.rank,
                world_size=self.world_size,
            )
            # A group of its own, of gloo: NCCL cannot say which ranks are late.
            self.barriers = dist.new_group(backend="gloo", timeout=self.timeout)

    def barrier(self, stage):
        """Returns when all ranks have ended the stage. Raises Stalled, naming the stragglers."""
        if self.world_size == 1:
            return
        start = time.monotonic()
        try:
            dist.monitored_barrier(self.barriers, self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            if time.monotonic() - start < self.timeout.total_seconds() - 1:
                raise  # the connection broke: the rank that failed says why
            raise Stalled(f"after {self.timeout} at the end of {stage}: {error}") from None

    def all_gather(self, value):
        """The values of all ranks, in their order, on every rank. They are pickled and travel by CPU."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def print0(self, text):
        """Prints, on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def clock(self):
        """Seconds, read when the GPU has finished what it was given."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def my_part(self, items):
        """This rank's contiguous part of a list that all ranks have; lengths differ by at most one."""
        start = self.rank * len(items) // self.world_size
        stop = (self.rank + 1) * len(items) // self.world_size
        return items[start:stop]


def end_with_torchrun():
    """Ends this process when the one that started it is gone."""
    # torchrun's workers live in sessions of their own: killing it with -9 would leave them running.
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


# ---- The optimizer -----------------------------------------------------------------------------------------

# torch 2.13 renamed both and warns at the old names; 2.11 has only those.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ALIGN = 64  # elements: every parameter starts at an address that matrix products like
SHARDED = ("master", "exp_avg", "exp_avg_sq")  # what is cut over the ranks; only Adam's step number is not


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) whose fp32 master weights and moments are cut over the ranks.

    The parameters become views of one flat buffer in the working dtype. Backward passes add into a flat
    buffer of gradients in at least fp32, which exists only between `zero_grad` and `step`. This rank's shard
    is the same 1/N of every buffer.

    offload: keep master weights and moments in the CPU's memory. world: the ranks, by default World().
    """

    def __init__(self, params, *, lr, betas=(0.9, 0.999), eps=1e-8,
                 weight_decay=0.0, max_grad_norm=1.0, offload=False, world=None):
        self.world = world or World()
        self.max_grad_norm = max_grad_norm
        self.parameters = list(params)  # in their order in the buffers
        self.flatten()
        self.grads = None  # [elements] between zero_grad and step
        self.reference = None  # [elements / world_size] after keep_reference
        device = "cpu" if offload else self.weights.device
        # At least fp32: an update of 1e-6 is below the spacing of bf16 numbers and would be rounded away.
        dtype = torch.promote_types(self.weights.dtype, torch.float32)
        self.master = self.weights[self.shard].to(device, dtype, copy=True)  # [elements / world_size]
        self.adam = torch.optim.AdamW(
            [self.master], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.param_groups = self.adam.param_groups  # as in torch's optimizers: one sets the rate here
        # AdamW would make its state in the first step. Made here, save and load have no special case.
        self.state = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(self.master),
            "exp_avg_sq": torch.zeros_like(self.master),
        }
        self.adam.state[self.master] = self.state
        self.saved = {"master": self.master, **self.state}

    def flatten(self):
        """Moves the parameters into one buffer, `weights`, where parameter i starts at element offsets[i]."""
        self.offsets = []
        size = 0  # elements so far
        for p in self.parameters:
            self.offsets.append(size)
            size += math.ceil(p.numel() / ALIGN) * ALIGN
        world_size = self.world.world_size
        length = math.ceil(size / (world_size * ALIGN)) * ALIGN  # of a shard, the same on all ranks
        start = self.world.rank * length
        self.shard = slice(start, start + length)

        self.weights = self.parameters[0].new_zeros(world_size * length)
        for p, offset in zip(self.parameters, self.offsets):
            view = self.weights[offset:offset + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view  # the module keeps its Parameter, and computes with whatever is in the buffer
            p.register_post_accumulate_grad_hook(functools.partial(self.accumulate, offset))

    def accumulate(self, offset, p):
        """Called by autograd as soon as a parameter has its gradient."""
        grad = p.grad.flatten()
        self.grads[offset:offset + len(grad)].add_(grad)  # sums in bf16 would lose bits
        p.grad = None  # now, so that the bf16 gradients of all parameters never exist together

    def zero_grad(self):
        self.grads = torch.zeros_like(self.weights, dtype=self.master.dtype)

    @torch.no_grad()
    def step(self):
        """Sums the gradients over the ranks, clips them and updates the weights of all ranks.

        Returns the norm before clipping. A norm that is not finite changes nothing, on any rank.
        """
        self.world.barrier("the backward passes")  # names stragglers, which a collective could not
        grad = self.grads[self.shard]
        if self.world.world_size > 1:
            if not self.world.cuda:
                grad = torch.empty_like(grad)  # NCCL reduces in place, gloo cannot
            REDUCE_SCATTER(grad, self.grads)
        self.grads = None

        # In pieces: whole, the squares and their copy in float64 would be three more buffers of this size.
        squares = sum(piece.square().sum(dtype=torch.float64) for piece in grad.split(2**26))
        if self.world.world_size > 1:
            dist.all_reduce(squares)  # the shards' sums
        norm = math.sqrt(squares)
        if not math.isfinite(norm):  # on all ranks alike: each has the sum over all
            return norm

        grad.mul_(min(1.0, self.max_grad_norm / (norm + 1e-6)))
        self.master.grad = grad.to(self.master.device)
        self.adam.step()
        self.master.grad = None
        del grad  # it keeps the whole buffer alive, and the all-gather needs room
        self.all_gather_weights(self.master)
        return norm

    def all_gather_weights(self, shard):
        """The working weights of every rank become what the shards of all ranks hold."""
        if self.world.world_size > 1:
            ALL_GATHER(self.weights, shard.to(self.weights))  # in their dtype, on their device
        else:
            self.weights.copy_(shard)

    def keep_reference(self, params):
        """Keeps this rank's shard of other weights of the same shapes, for `as_reference`."""
        # By way of the weights' own buffer, which gives the shards their layout; the last line restores it.
        for p, other in zip(self.parameters, params):
            p.data.copy_(other.data)
        self.reference = self.weights[self.shard].to("cpu", copy=True)  # costs no GPU memory
        self.all_gather_weights(self.master)

    @contextlib.contextmanager
    def as_reference(self):
        """Inside the `with` block the parameters have the reference's values."""
        self.all_gather_weights(self.reference)
        yield
        self.all_gather_weights(self.master)

    @property
    def checkpoint_bytes(self):
        """Bytes of the weights and of all ranks' shards, which hold three numbers a parameter."""
        return self.weights.nbytes + 3 * self.master.nbytes * self.world.world_size

    def save(self, folder):
        """Writes this rank's shard."""
        save_file(self.saved, folder / f"{self.world.rank:05}.safetensors")

    def load(self, folder):
        """Reads this rank's shard, however many ranks wrote theirs.

        The parameters must already be those saved with it. Raises ValueError where they are not, or where a
        file is damaged.
        """
        for path, part in check_shards(folder, self.parameters).items():
            with safe_open(path, "pt") as file:
                self.state["step"].copy_(file.get_tensor("step"))  # the same in every file
                for name in SHARDED:
                    self.fill(self.saved[name], part, file.get_slice(name))
        weights = self.weights[self.shard].to(self.master.device)
        # In bf16: weights that train in bf16 are saved rounded, and the master weights are not.
        if not torch.equal(self.master.bfloat16(), weights.bfloat16()):
            raise ValueError(f"{folder.parent.resolve()}: the optimizer is not that of model.safetensors; "
                             "without this folder the run continues from the checkpoint before")

    def fill(self, shard, part, values):
        """Copies into this rank's shard what `values` hold of it. They are the elements `part` of the buffer.

        values: a tensor in a safetensors file, from which only the elements needed are read.
        """
        start = self.shard.start
        low = max(part.start, start)
        high = min(part.stop, self.shard.stop)
        if low < high:  # they overlap
            shard[low - start:high - start] = values[low - part.start:high - part.start]


def check_shards(folder, parameters):
    """The files of a saved optimizer, and which elements of the buffers each holds. Reads only headers.

    Raises ValueError where a file is damaged, or where together they are not the optimizer of `parameters`.
    """
    shards = {}
    end = 0
    path = folder / "00000.safetensors"
    while path.exists():
        start = end
        end += shard_length(path)
        shards[path] = slice(start, end)
        path = folder / f"{len(shards):05}.safetensors"
    size = sum(p.numel() for p in parameters)
    padding = ALIGN * (len(parameters) + len(shards))  # at most: parameters and shards are aligned
    if not size <= end <= size + padding:
        raise ValueError(f"{folder}: {end} elements in {len(shards)} files are not the optimizer of the "
                         f"{size} weights beside it; without this checkpoint the run continues from the "
                         "one before")
    return shards


def shard_length(path):
    """How many elements each of the file's tensors has."""
    try:
        with safe_open(path, "pt") as file:
            file.get_tensor("step").item()
            slices = [file.get_slice(name) for name in SHARDED]
            kinds = {(s.get_dtype(), *s.get_shape()) for s in slices}
            [(_, length)] = kinds  # fails unless all have one dtype and one length
            return length
    except Exception as error:  # safetensors does not say which file it is
        raise ValueError(f"{path} is damaged ({error}); without this checkpoint the run continues from the "
                         "one before") from None
