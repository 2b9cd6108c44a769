"""The ranks, and ShardedAdamW (L6, L7) against torch.optim.AdamW with one and two of them.

    python tests/test_sharded.py WHAT OUT 2

runs one of the jobs below on two ranks, each of which writes what it saw to OUT/rank_N.pt. Nothing here needs minigrpo.
"""

import datetime
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import forks
import pytest
import torch
from safetensors.torch import load_file, save_file

import sharded
from sharded import ShardedAdamW, Stalled, World, check_shards

NAN, INF = float("nan"), float("inf")
TOY = dict(lr=1.0, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
TOY_CLIP = 0.5
TOY_RATES = [1e-2, 2e-2, 3e-2, 1e-2, 5e-3, 1e-3]
SHAPES = [(3, 5), (7,), (1,), (65,), (64, 2), (129,)]  # odd: no shard ends where a parameter does


# ---- Inputs, and what a rank does --------------------------------------------------------------------------

def toy_parameters(dtype) -> torch.nn.ParameterList:
    g = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=g, dtype=torch.float64) * 0.01 for shape in SHAPES]
    return torch.nn.ParameterList([v.to(dtype) for v in values])


def toy_gradients(step: int, rank: int, part: int, dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    values = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in SHAPES]
    return [(v * 3.0**-step).to(dtype) for v in values]  # the first steps are clipped, the last are not


def backward(module, gradients, scale=1.0) -> None:
    """Adds the gradients to those that the optimizer has."""
    sum((p * g).sum() * scale for p, g in zip(module, gradients)).backward()


def set_rate(optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_of(optimizer: ShardedAdamW) -> list[torch.Tensor]:
    """Everything an update may change on this rank."""
    return [t.clone() for t in (optimizer.weights, optimizer.master, *optimizer.adam.state[optimizer.master].values())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def updates(world: World, dtype, rates, fixed=False, **options) -> dict:
    """A step for each rate, with two backward passes a rank; their gradients differ by step, or are `fixed`."""
    module = toy_parameters(dtype)
    optimizer, norms = ShardedAdamW(module.parameters(), world=world, **options), []
    for step, rate in enumerate(rates):
        optimizer.zero_grad()
        for part in range(2):
            backward(module, toy_gradients(0 if fixed else step, world.rank, part, dtype))
        set_rate(optimizer, rate)
        norms.append(optimizer.step())
    held = [optimizer.grads, *(p.grad for p in module)]
    return {"norms": norms, "parameters": [p.detach().clone() for p in module], "gradients freed": held == [None] * len(held)}


def adamw(world: World) -> dict:
    """Double precision with everything on; 100 small updates of bfloat16 weights; a NaN of the last rank; a reference."""
    seen = {"double": updates(world, torch.float64, TOY_RATES, max_grad_norm=TOY_CLIP, **TOY),
            "bf16": updates(world, torch.bfloat16, [1e-6] * 100, fixed=True, lr=1e-6, max_grad_norm=1e9)}
    module = toy_parameters(torch.float32)
    optimizer = ShardedAdamW(module.parameters(), lr=1e-2, world=world)
    optimizer.zero_grad()
    backward(module, toy_gradients(0, world.rank, 0, torch.float32))
    if world.rank == world.world_size - 1:
        optimizer.grads[0] = NAN  # reduced into the shard of rank 0 alone
    before = state_of(optimizer)
    norm = optimizer.step()
    seen["nan"] = {"finite": norm - norm == 0, "changed": not same(before, state_of(optimizer))}

    optimizer.keep_reference([p.detach() * 2 for p in module])
    with optimizer.as_reference():
        seen["reference"] = [p.detach().clone() for p in module]
    seen["afterwards"] = [p.detach().clone() for p in module]
    return seen


def generator(world: World) -> dict:
    """The last of three ranks does not train."""
    seen = {"rank": world.rank, "world_size": world.world_size, "generators": world.generators, "trains": world.trains,
            "group": torch.distributed.is_initialized()}
    if world.trains:
        seen["gathered"] = world.all_gather(("value", world.rank))
        world.barrier("the test")
    world.store.set(f"rank {world.rank}", "was here")  # all ranks see the same store
    for rank in range(3):
        world.store.wait([f"rank {rank}"])
    return seen


def late(world: World) -> dict:
    """Rank 1 does not come to the barrier before the others have lost patience."""
    seen, gave_up = {"timeout": str(world.timeout)}, ["0 gave up", "2 gave up"]
    world.timeout = datetime.timedelta(seconds=3)  # only now: a busy machine may need longer to start
    if world.rank == 1:
        world.store.wait(gave_up, datetime.timedelta(minutes=10))
        return seen
    try:
        world.barrier("the test")
    except Stalled as error:
        world.store.set(f"{world.rank} gave up", "")
        return {**seen, "said": str(error)}


JOBS = {"adamw": (adamw, {}), "generator": (generator, {"generators": 1}), "late": (late, {"timeout_minutes": 12.5})}


@functools.cache
def results(what: str, ranks: int) -> list[dict]:
    """What a job saw on each of that many ranks."""
    job, options = JOBS[what]
    if ranks == 1:
        return [job(World(**options))]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [sys.executable, __file__, what, out, str(ranks)], capture_output=True, text=True, env=clean)
        logs = "".join(path.read_text() for path in Path(out).glob("log_*"))
        assert done.stdout == f"{[0] * ranks}\n", done.stderr[-5000:] + logs[-5000:]
        return [torch.load(Path(out) / f"rank_{rank}.pt") for rank in range(ranks)]


def part_of(rank: int, world_size: int) -> World:
    """One of several ranks, without the others."""
    world = World.__new__(World)
    world.rank, world.world_size, world.cuda = rank, world_size, False
    return world


# ---- World -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_parts_are_contiguous_and_even(n):
    for count in range(12):
        parts = [part_of(rank, n).my_part(list(range(count))) for rank in range(n)]
        assert list(itertools.chain(*parts)) == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_single_rank_needs_no_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    world = World()
    assert (world.rank, world.world_size, world.trains, world.store) == (0, 1, True, None)
    world.barrier("nothing")
    world.print0("said once")
    assert world.all_gather("value") == ["value"] and capsys.readouterr().out == "said once\n"
    start = world.clock()
    assert 0 <= world.clock() - start < 1


def test_generators_are_no_ranks_of_the_training_but_share_the_store():
    first, second, third = results("generator", 3)
    gathered = [("value", 0), ("value", 1)]
    assert first == dict(rank=0, world_size=2, generators=1, trains=True, group=True, gathered=gathered)
    assert second == {**first, "rank": 1}
    assert third == dict(rank=2, world_size=2, generators=1, trains=False, group=False)


def test_a_barrier_names_the_straggler_and_the_stage():
    first, second, third = results("late", 3)
    assert first["said"].startswith("after 0:00:03 at the end of the test") and "Ranks 1 failed" in first["said"]
    assert {rank["timeout"] for rank in (first, second, third)} == {"0:12:30"} and "said" not in second


# ---- ShardedAdamW ------------------------------------------------------------------------------------------

def summed_gradients(step, world_size, dtype):
    """Of all ranks and both backward passes, added in double precision."""
    parts = [toy_gradients(step, rank, part, dtype) for rank in range(world_size) for part in range(2)]
    return [sum(g.double() for g in column) for column in zip(*parts)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_adamw_with_clipping(ranks):
    """Weight decay, betas, epsilon, a new rate each step; steps that are clipped and steps that are not."""
    module = toy_parameters(torch.float64)
    oracle, norms = torch.optim.AdamW(module, **TOY), []
    for step, rate in enumerate(TOY_RATES):
        for p, g in zip(module, summed_gradients(step, ranks, torch.float64)):
            p.grad = g
        norms.append(torch.nn.utils.clip_grad_norm_(module, TOY_CLIP).item())
        set_rate(oracle, rate)
        oracle.step()
    assert max(norms) > 10 * TOY_CLIP and min(norms) < TOY_CLIP
    for seen in results("adamw", ranks):
        assert seen["double"]["norms"] == pytest.approx(norms, rel=1e-12)
        for got, want in zip(seen["double"]["parameters"], module):
            assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-12, atol=1e-14)
        assert seen["double"]["gradients freed"]
    assert max((p - q).abs().max() for p, q in zip(module, toy_parameters(torch.float64))) > 0.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_100_small_updates_move_bf16_weights_as_fp32_adamw_does(ranks):
    """Each update is far below the spacing of bf16 numbers; AdamW on bf16 weights itself stands still."""
    start = toy_parameters(torch.bfloat16)
    exact = torch.nn.ParameterList([p.detach().float() for p in start])
    stuck = toy_parameters(torch.bfloat16)
    gradients = summed_gradients(0, ranks, torch.bfloat16)
    for module in (exact, stuck):
        oracle = torch.optim.AdamW(module, lr=1e-6, weight_decay=0.0)
        for _ in range(100):
            for p, g in zip(module, gradients):
                p.grad = g.to(p.dtype)
            oracle.step()
    flat = lambda tensors: torch.cat([t.detach().flatten().float() for t in tensors])
    first, want = flat(start), flat(exact)
    toward = -flat(gradients).sign()  # Adam with a constant gradient: the rate, against its sign
    moved = lambda tensors: ((flat(tensors) - first) * toward)[first.abs() > 1e-3].mean().item()
    assert moved(exact) == pytest.approx(1e-4, rel=1e-2) and abs(moved(stuck)) < 1e-5
    for seen in results("adamw", ranks):
        got = seen["bf16"]["parameters"]
        assert all(p.dtype == torch.bfloat16 for p in got)
        assert moved(got) == pytest.approx(1e-4, rel=0.1)
        assert (flat(got) == want.bfloat16().float()).float().mean() > 0.99  # but for ties in the rounding
        assert ((flat(got) - want).abs() <= want.abs() / 256 + 1e-9).all()
        assert seen["bf16"]["gradients freed"]


def test_ranks_hold_the_same_weights_to_the_last_bit():
    first, second = results("adamw", 2)
    for name in ("double", "bf16"):
        assert same(first[name]["parameters"], second[name]["parameters"])
        assert first[name]["norms"] == second[name]["norms"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_of_one_rank_changes_nothing_on_any(ranks):
    assert [seen["nan"] for seen in results("adamw", ranks)] == [{"finite": False, "changed": False}] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_policy_is_the_reference_inside_the_block_only(ranks):
    before = [p.detach() for p in toy_parameters(torch.float32)]
    for seen in results("adamw", ranks):
        assert same(seen["reference"], [p * 2 for p in before]) and same(seen["afterwards"], before)


def test_micro_batches_add_up_in_fp32():
    """256 gradients of 2**-9 beside one of 1: bf16, with 8 bits, would keep the 1."""
    module = torch.nn.ParameterList([torch.zeros(3, dtype=torch.bfloat16)])
    optimizer = ShardedAdamW(module.parameters(), lr=0.0, max_grad_norm=1e9)
    optimizer.zero_grad()
    for value in [1.0] + [2.0**-9] * 256:
        (module[0] * value).sum().backward()
    assert optimizer.step() == pytest.approx(1.5 * 3**0.5, rel=1e-6)


def test_modules_keep_their_values_and_gradients_do_not_leak_between_steps():
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    before, x = [p.detach().clone() for p in module.parameters()], torch.randn(4, 3)
    out = module(x)
    optimizer = ShardedAdamW(module.parameters(), lr=0.0, max_grad_norm=1e9)
    assert torch.equal(module(x), out) and same(before, list(module.parameters()))
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        module(x).sum().backward()
        norms.append(optimizer.step())
    assert norms[0] == pytest.approx(norms[1]) and optimizer.grads is None
    assert same(before, list(module.parameters()))  # a rate of 0 moves nothing
    optimizer.zero_grad()
    module(x).sum().backward()
    set_rate(optimizer, 1e-2)
    optimizer.step()
    assert not torch.equal(module(x), out)  # the module computes with the new weights


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_norm_that_is_not_finite_leaves_every_bit(value):
    module = toy_parameters(torch.float32)
    optimizer = ShardedAdamW(module.parameters(), max_grad_norm=TOY_CLIP, **TOY)

    def step(scale=1.0):
        optimizer.zero_grad()
        backward(module, toy_gradients(0, 0, 0, torch.float32), scale)
        before = state_of(optimizer)
        return optimizer.step(), same(before, state_of(optimizer))

    assert step()[1] is False
    norm, unchanged = step(value)
    assert norm - norm != 0 and unchanged and optimizer.grads is None
    norm, unchanged = step()
    assert norm > 0 and not unchanged


def test_offload_changes_nothing_on_a_cpu():
    made = []
    for offload in (False, True):
        module = toy_parameters(torch.float32)
        optimizer = ShardedAdamW(module.parameters(), offload=offload, **TOY)
        optimizer.zero_grad()
        backward(module, toy_gradients(0, 0, 0, torch.float32))
        optimizer.step()
        made.append(state_of(optimizer))
    assert same(*made)


# ---- Checkpoints of the optimizer --------------------------------------------------------------------------

def sharded_over(size: int, values: list[torch.Tensor]) -> list[ShardedAdamW]:
    """The optimizers of all ranks, for parameters with these values."""
    return [ShardedAdamW(torch.nn.ParameterList([v.clone() for v in values]).parameters(), lr=1.0, world=part_of(rank, size))
            for rank in range(size)]


def joined(parts: list[ShardedAdamW]) -> list[torch.Tensor]:
    """Without the padding behind the last parameter, which depends on the number of ranks."""
    length = parts[0].offsets[-1] + parts[0].parameters[-1].numel()
    names = ("exp_avg", "exp_avg_sq")
    return [torch.cat([p.master for p in parts])[:length], *(torch.cat([p.state[n] for p in parts])[:length] for n in names)]


def test_shards_load_on_another_number_of_ranks(tmp_path):
    """Written by 2 ranks, then by each number that has just read; their shards end elsewhere."""
    values = [p.detach() for p in toy_parameters(torch.float32)]
    written, g = sharded_over(2, values), torch.Generator().manual_seed(0)
    for part in written:
        part.state["step"].fill_(17)
        for tensor in (part.state["exp_avg"], part.state["exp_avg_sq"]):
            tensor.normal_(generator=g)
        part.save(tmp_path)
    for size in (1, 2, 3, 5, 4):
        read = sharded_over(size, values)
        for part in read:
            part.master.zero_()
            part.load(tmp_path)
            assert part.state["step"] == 17 and part.adam.state[part.master] is part.state
        assert same(joined(written), joined(read))
        for file in tmp_path.iterdir():
            file.unlink()
        for part in read:
            part.save(tmp_path)


def test_a_loaded_optimizer_goes_on_as_if_nothing_had_happened(tmp_path):
    def step(module, optimizer, number):
        optimizer.zero_grad()
        backward(module, toy_gradients(number, 0, 0, torch.bfloat16))
        optimizer.step()

    module = toy_parameters(torch.bfloat16)
    optimizer = ShardedAdamW(module.parameters(), **TOY)
    step(module, optimizer, 0)
    optimizer.save(tmp_path)
    again = torch.nn.ParameterList([p.detach().clone() for p in module])  # as saved: in bf16
    resumed = ShardedAdamW(again.parameters(), **TOY)
    resumed.load(tmp_path)
    for number in (1, 2):
        step(module, optimizer, number)
        step(again, resumed, number)
    assert same(state_of(optimizer), state_of(resumed))


def test_checkpoint_bytes_are_those_of_the_weights_and_all_shards(tmp_path):
    values = [p.detach() for p in toy_parameters(torch.bfloat16)]
    for size in (1, 3):
        parts = sharded_over(size, values)
        for part in parts:
            part.save(tmp_path)
        files = [load_file(tmp_path / f"{rank:05}.safetensors") for rank in range(size)]
        shards = sum(t.nbytes for file in files for t in file.values() if t.ndim)
        assert {part.checkpoint_bytes for part in parts} == {shards + parts[0].weights.nbytes}


def shard_where(**changes):
    """Edits the first of two files. changes: what becomes of a tensor, None: it is left out."""
    def edit(folder):
        path = folder / "00000.safetensors"
        tensors = {name: changes.get(name, lambda t: t) for name in ("master", "exp_avg", "exp_avg_sq", "step")}
        kept = {name: tensors[name](value).clone() for name, value in load_file(path).items() if tensors[name]}
        save_file(kept, path)
    return edit


def all_three(change):
    return shard_where(master=change, exp_avg=change, exp_avg_sq=change)


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def rename(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def folder_in_place(folder):
    (folder / "00001.safetensors").unlink()
    (folder / "00001.safetensors").mkdir()


@pytest.mark.parametrize("edit, words", [
    (shard_where(master=lambda t: t[:-64]), "00000.safetensors is damaged"),
    (shard_where(master=lambda t: t.view(-1, 64)), "00000.safetensors is damaged"),
    (shard_where(master=lambda t: t.to(torch.int32)), "00000.safetensors is damaged"),
    (shard_where(exp_avg=None), "00000.safetensors is damaged"),
    (shard_where(step=None), "00000.safetensors is damaged"),
    (shard_where(step=lambda t: torch.ones(3)), "00000.safetensors is damaged"),
    (write("00001.safetensors", b""), "00001.safetensors is damaged"),
    (write("00001.safetensors", b"\0\xff garbage"), "00001.safetensors is damaged"),
    (folder_in_place, "00001.safetensors is damaged"),
    (all_three(lambda t: t[:0]), "elements in 2 files are not the optimizer"),
    (all_three(lambda t: torch.cat([t, t])), "elements in 2 files are not the optimizer"),
    (rename("00000.safetensors", "00002.safetensors"), "0 elements in 0 files"),
    (rename("00001.safetensors", "00002.safetensors"), "elements in 1 files are not the optimizer"),
    (shard_where(master=lambda t: t * NAN), "the optimizer is not that of model.safetensors"),
    (shard_where(master=lambda t: t * 0), "the optimizer is not that of model.safetensors")])
def test_damaged_shards_are_named(tmp_path, edit, words):
    folder = tmp_path / "step_3/optimizer"
    folder.mkdir(parents=True)
    values = [p.detach() for p in toy_parameters(torch.float32)]
    for part in sharded_over(2, values):
        part.save(folder)
    [first, second] = sharded_over(2, values)
    assert [(path.name, part.start) for path, part in check_shards(folder, first.parameters).items()] == [
        ("00000.safetensors", 0), ("00001.safetensors", first.shard.stop)]
    edit(folder)
    with pytest.raises(ValueError, match=words) as error:
        first.load(folder)
    assert str(tmp_path / "step_3") in str(error.value)
    if "model.safetensors" not in words:
        with pytest.raises(ValueError, match=words):
            check_shards(folder, first.parameters)


def test_the_program_of_the_docstring_runs(tmp_path):
    program = re.search(r"\n\n((?:    .*\n|\n)+)", sharded.__doc__)[1]
    code = "\n".join(line[4:] for line in program.splitlines())
    (tmp_path / "sharded.py").write_text(Path(sharded.__file__).read_text())
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "assert loss" in code, done.stderr


if __name__ == "__main__":
    what, out, size = sys.argv[1:]
    job, options = JOBS[what]

    def work():
        world = World(**options)
        torch.save(job(world), Path(out) / f"rank_{world.rank}.pt")
        world.store.set(f"{world.rank} is through", "")
        if world.rank == 0:  # it has the store
            world.store.wait([f"{rank} is through" for rank in range(int(size))])

    print(forks.fork(int(size), work, out))
