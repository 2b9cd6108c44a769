"""--split: the last rank only generates. Against --colocate with the real engine, and its parts with a fake one.

    python tests/test_split.py WHAT OUT SIZE        # the ranks that `several` starts
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import forks
import pytest
import ranks
import tokenizers
import torch
import torch.distributed as dist

import config
import engines
from colocate import Completion
from engines import RemoteEngine
from sharded import World

PATIENT = 600  # seconds
MARK = "MINIGRPO_TEST_MARK"  # in the environment of all that a test starts, and so of its children too


def left_over(mark) -> list[str]:
    """Command lines of the processes that carry the mark and still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    return lambda out, flags: ranks.start(3, "minigrpo.py", "--split", "--out", out, *flags)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---- The whole program with the real engine ----------------------------------------------------------------

def test_split_is_the_same_run_as_colocate_when_it_is_stopped_and_continued_and_says_that_it_is_finished(
        start, colocated, tmp_path, monkeypatch):
    """Both shares of prompts, seeds and updates are those of two trainers. Only the engine's batch differs: all
    prompts in one, or each rank's own. That may change the last bits of a log-probability, hence of an update,
    and from there on everything: so the first two steps are compared in full, as in test_loss.py, and later
    ones only by accuracy."""
    import minigrpo
    split, (colocated, flags) = tmp_path / "split", colocated
    stopped_in_its_second_step(start, split, flags, tmp_path, monkeypatch)
    text = ranks.finish(start(split, flags))  # it ended with 0
    assert not left_over(tmp_path)
    assert "tiny on 2 ranks" in text and "continues after update 2" in text and "done: accuracy" in text
    taught = 0.0
    for step in (0, 1):
        ours, theirs = (rows(run / f"rollouts/step_{step}.jsonl") for run in (split, colocated))
        assert [r["slot"] for r in ours] == list(range(20)) and {r["weight_version"] for r in ours} == {step}
        assert len({tuple(r["prompt_ids"]) for r in ours}) == 5
        taught += sum(abs(r["advantage"]) for r in ours)
        for a, b in zip(ours, theirs, strict=True):
            for key in ("sampler_logps", "trainer_logps"):
                assert a.pop(key) == pytest.approx(b.pop(key), abs=1e-5)
            assert a == b  # token ids, rewards, advantages, slots
    assert taught > 0
    ours, theirs = (rows(run / "metrics.jsonl") for run in (split, colocated))
    assert [r["step"] for r in ours] == [r["weight_version"] for r in ours] == [0, 1, 2, 3, 4]
    for a, b in zip(ours[:2], theirs[:2]):
        assert a.keys() == b.keys() == set(minigrpo.METRICS)
        for key in a:
            if key == "eval/accuracy" and a[key] is not None:
                assert abs(a[key] - b[key]) <= 0.01  # a tie between two tokens may fall the other way
            elif not key.startswith(("time/", "tokens_per")):
                assert a[key] == b[key] or a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
    for a, b in zip(ours, theirs, strict=True):
        assert (a["eval/accuracy"] is None) == (b["eval/accuracy"] is None) == (a["step"] % 2 == 1)
        assert a["eval/accuracy"] is None or abs(a["eval/accuracy"] - b["eval/accuracy"]) <= 0.05
    for row in ours[:-1]:  # H1 across two processes
        assert row["logprob_gap/mean"] < 1e-5 and row["skipped_updates"] == 0
        generated = row["completions/mean_length"] * 20  # the generating GPU counts as well
        seconds = row["time/step"] - (row["time/eval"] or 0)
        assert row["tokens_per_second_per_gpu"] == pytest.approx(generated / seconds / 3)
    for run in (split, colocated):
        assert {p.name for p in run.glob("step_*")} == {"step_2", "step_4"} and (run / "latest").exists()
    assert len(list((split / "latest/optimizer").iterdir())) == 2  # the generating rank has no shard

    before = (split / "metrics.jsonl").read_bytes()
    text = ranks.finish(start(split, flags))  # no engine is ever wanted
    assert "finished run" in text and "→" in text and (split / "metrics.jsonl").read_bytes() == before
    assert not left_over(tmp_path)


def stopped_in_its_second_step(start, out, flags, tmp_path, monkeypatch) -> None:
    """SIGTERM saves, and ends all ranks."""
    hold, metrics, end = tmp_path / "hold", out / "metrics.jsonl", time.monotonic() + PATIENT
    hold.write_text("1")
    with monkeypatch.context() as patch:
        patch.setenv("HOLD", str(hold))
        process, log = start(out, flags)
    while not Path(f"{hold}.held").exists():
        assert process.poll() is None and time.monotonic() < end, ranks.printed(log)
        time.sleep(0.05)
    running = left_over(tmp_path)
    assert len([line for line in running if "torch.distributed" not in line]) >= 3  # left_over() does see them
    process.terminate()
    while "closing signal" not in ranks.printed(log):  # torchrun passes it on
        assert time.monotonic() < end
        time.sleep(0.05)
    hold.unlink()
    assert process.wait(PATIENT) == 1, ranks.printed(log)  # so ends torchrun when it is signalled
    log.seek(0)
    text, state = log.read(), json.loads((out / "latest/trainer.json").read_text())
    assert "forcefully" not in text, "torchrun had to kill its ranks: it waits 30 seconds"
    assert state["stopped"] and state["step"] == len(rows(metrics)) == 2
    assert "stopped after update 2: the same command continues" in text
    assert 'minigrpo.py", line' not in text  # no rank failed; a traceback of torchrun's own names the signal
    assert not left_over(tmp_path)


# ---- Link, RemoteEngine and serve with a fake engine -------------------------------------------------------

# Prompts of each trainer in each round: token ids; the seed of a prompt is 100 times its first token.
SHARES = [([[1, 1], [2]], [[3, 3, 3]]), ([], [[4], [5], [6, 7]]), ([[8]], []), ([], [])]
STOP = ["</answer>", "é"]


def weights_of(version: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(version)
    made = {"a.weight": torch.randn(3, 5, generator=g).bfloat16(), "b.bias": torch.randn(7, generator=g),
            "c": torch.randn(1, 2, 2, generator=g).bfloat16()}
    made["b.bias"][:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    return {name: torch.nn.Parameter(t) for name, t in made.items()}  # as a policy's: they require gradients


def completion(prompt: list[int], seed: int, i: int) -> Completion:
    return Completion([*prompt, seed + i], [-1.0 * seed - i] * (len(prompt) + 1))


class FakeEngine:
    """Remembers what reached it."""

    def __init__(self, tokenizer, **arguments):
        self.seen = {"arguments": arguments, "wakes": [], "batches": [], "text": tokenizer.decode([1, 0])}

    def wake(self, pairs, version):
        self.seen["wakes"].append((version, [(name, t.clone()) for name, t in pairs]))

    def generate(self, prompts, *, n, seeds, **rest):
        self.seen["batches"].append((prompts, n, seeds, rest))
        return [[completion(p, s, i) for i in range(n)] for p, s in zip(prompts, seeds, strict=True)]

    def close(self):
        torch.save(self.seen, Path(sys.argv[2], "engine.pt"))


def worker(what: str, out: str) -> None:
    """The trainers die at the moment `what`, or go through all rounds and close."""
    engines.ColocatedEngine, world = FakeEngine, World(generators=1)
    link = engines.connect(world)  # as minigrpo.main does, before anything can go wrong
    Path(out, f"joined{os.environ['RANK']}").touch()
    if not world.trains:
        return engines.serve(world)

    def die_at(moment):
        while what == moment:
            if len(list(Path(out).glob("joined*"))) == world.world_size + 1:
                os._exit(7)

    die_at("before an engine is wanted")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"b": 0, "a": 1}))
    engine = RemoteEngine(world, {"folder": "F", "max_num_seqs": 3, "sleeps": False, "tokenizer": words})
    die_at("idle")
    if what == "while it pushes" and link:
        link.broadcast = lambda tensor: die_at(what)
    got = []
    for version, shares in enumerate(SHARES):
        engine.wake(weights_of(version).items(), version)
        die_at("awake")
        prompts = shares[world.rank]
        got.append(engine.generate(prompts, n=2, seeds=[100 * p[0] for p in prompts], max_tokens=9, stop=STOP))
        engine.sleep()
    torch.save({"got": got, "version": engine.weight_version}, Path(out, f"trainer{world.rank}.pt"))
    world.all_gather(None)
    engine.close()
    dist.destroy_process_group()


def several(what: str, out: Path, trainers: int = 2) -> list:
    """Trainers and a generating rank, without torchrun, which would end the others itself. The store is ours, as it
    would be torchrun's, and so outlives the trainers. Returns [(exit code, standard error)]."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = subprocess.run([sys.executable, __file__, what, str(out), str(trainers + 1)], env=environment, stdout=subprocess.PIPE, text=True)
    return [(code, (out / f"log_{rank}").read_text()) for rank, code in enumerate(json.loads(done.stdout))]


@pytest.mark.parametrize("trainers", [1, 2])
def test_completions_and_weights_arrive_where_they_belong(tmp_path, trainers):
    ended = several("all rounds", tmp_path, trainers)
    assert [code for code, _ in ended] == [0] * (trainers + 1), ended
    for rank in range(trainers):
        seen = torch.load(tmp_path / f"trainer{rank}.pt", weights_only=False)
        assert seen["version"] == 3
        assert all(type(one) is Completion for groups in seen["got"] for group in groups for one in group)
        assert seen["got"] == [[[completion(p, 100 * p[0], i) for i in range(2)] for p in shares[rank]]
                               for shares in SHARES]
    engine = torch.load(tmp_path / "engine.pt")
    assert engine["arguments"] == {"folder": "F", "max_num_seqs": 3, "sleeps": False} and engine["text"] == "a b"
    together = [[p for part in shares[:trainers] for p in part] for shares in SHARES]  # one batch a round
    assert engine["batches"] == [(ps, 2, [100 * p[0] for p in ps], {"max_tokens": 9, "stop": STOP}) for ps in together]
    assert [version for version, _ in engine["wakes"]] == [0, 1, 2, 3]
    for version, pairs in engine["wakes"]:
        for (name, tensor), (wanted_name, want) in zip(pairs, weights_of(version).items(), strict=True):
            as_int = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
            assert name == wanted_name and tensor.dtype == want.dtype and tensor.shape == want.shape
            assert torch.equal(tensor.view(as_int), want.detach().view(as_int)), name


def test_the_generating_rank_outlives_no_trainer(tmp_path):
    for what in ("before an engine is wanted", "idle", "while it pushes", "awake"):
        out = tmp_path / what
        out.mkdir()
        *trainers, (code, text) = several(what, out)
        assert trainers[0][0] == 7, trainers
        if what == "before an engine is wanted":  # as when the run was finished, or had a mistake in it
            assert code == 0 and "Traceback" not in text, text
        else:
            # By itself: -9 would be `several`. In the middle of a push the connection's own error is the reason.
            assert code in (1, -6) and ("ended before they closed the engine" in text or "RuntimeError" in text), (what, code, text)
        assert not (out / "engine.pt").exists()


# ---- What a person can get wrong ---------------------------------------------------------------------------

def test_mistakes_with_split_name_what_to_do(monkeypatch):
    def refusal(**options) -> str:
        with pytest.raises(ValueError) as error:
            config.check(config.Config(**options))
        return str(error.value)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "torchrun --nproc_per_node=2" in (text := refusal(split=True)) and "--split" in text
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--colocate, --split" in (text := refusal(split=True, colocate=True)) and "use --colocate" in text
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "--split needs 2 ranks" in (text := refusal(split=True))
    assert "--nproc_per_node=2" in text and "--colocate" in text
    monkeypatch.setenv("WORLD_SIZE", "2")
    config.check(config.Config(split=True))


if __name__ == "__main__":
    what, out, size = sys.argv[1:]
    # The last rank is to end a few seconds after the trainers, where the machine is not busy.
    print(json.dumps(forks.fork(int(size), lambda: worker(what, out), out, last=100)))
