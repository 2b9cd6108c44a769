"""The short way through a decode step against vLLM's own scheduler: one engine, the two alternating, same seeds.

    torchrun --nproc_per_node=1 tests/decode_speed.py MODEL                                # 64 × 1,024 tokens
    torchrun --nproc_per_node=1 tests/decode_speed.py MODEL 256x2048-ragged 64x2048 16x512

MODEL: a Hugging Face folder; random weights of a real shape do. A job is completions x tokens, in groups of 16; ragged:
as in bench.py, a quarter of the tokens in the mean. Prints the rates, and what the CPU spends a step on, in ms.
"""

import hashlib
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.distributed as dist
from bench import length

from colocate import ColocatedEngine
from model import Policy

ROUNDS = 3  # of each way


def timed(seconds, place, name):
    """Adds what this method takes to `seconds`."""
    real = getattr(place, name)

    def call(*args, **kwargs):
        start = time.perf_counter()
        result = real(*args, **kwargs)
        seconds[name] += time.perf_counter() - start
        return result

    setattr(place, name, call)


def main(folder, jobs):
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    sizes = [[int(number) for number in job.partition("-")[0].split("x")] for job in jobs]
    policy = Policy.from_folder(folder, "cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)
    start = time.perf_counter()
    engine = ColocatedEngine(
        folder, dtype=policy.dtype, max_model_len=128 + max(tokens for _, tokens in sizes),
        max_num_seqs=max(count for count, _ in sizes), enforce_eager=not cuda)
    engine.wake(policy.named_parameters())
    print(f"{folder}: engine ready after {time.perf_counter() - start:.1f} s", flush=True)
    core = engine.core.engine_core
    seconds, real = Counter(), engine.vllm.SamplingParams
    for place, name in ((core.scheduler, "schedule"), (core.scheduler, "update_from_output"),
                        (core.model_executor, "execute_model"), (core.model_executor, "sample_tokens")):
        timed(seconds, place, name)
    for job, (count, tokens) in zip(jobs, sizes):
        ragged = job.endswith("ragged")
        limit = (lambda kw: length(kw["seed"], tokens)) if ragged else (lambda kw: tokens)
        engine.vllm = type(sys)("vllm")
        engine.vllm.SamplingParams = lambda **kw: real(**kw | {"max_tokens": limit(kw)})
        groups = max(1, count // 16)
        words = [[random.Random(g).randrange(policy.config.vocab_size) for _ in range(128)] for g in range(groups)]
        rates, digests, parts = {True: [], False: []}, set(), {True: Counter(), False: Counter()}
        for turn in range(-2, 2 * ROUNDS):  # the first of each is not counted
            short = turn % 2 == 1
            core.scheduler.usable = short
            seconds.clear()
            start = time.perf_counter()
            out = engine.generate(words, n=min(16, count), max_tokens=tokens, temperature=1.0, eos_token_ids=[],
                                  seeds=[1000 * g for g in range(groups)])
            elapsed = time.perf_counter() - start
            engine.llm.reset_prefix_cache()
            lengths = [len(ids) for group in out for ids, _ in group]
            digests.add(hashlib.sha256(repr(out).encode()).hexdigest()[:12])
            if turn >= 0:
                rates[short].append(sum(lengths) / elapsed)
                for name, value in seconds.items():
                    parts[short][name] += 1e3 * value / max(lengths) / ROUNDS
                parts[short]["all"] += 1e3 * elapsed / max(lengths) / ROUNDS
        print(f"{job}: {sum(lengths)} tokens in {max(lengths)} steps; the same tokens and log-probabilities: "
              f"{len(digests) == 1}; short / vLLM's {statistics.mean(rates[True]) / statistics.mean(rates[False]):.2f}")
        for short, name in ((False, "vLLM's"), (True, "short")):
            print(f"  {name:7} {' '.join(f'{rate:.0f}' for rate in rates[short])} tokens/s; ms a step: "
                  + ", ".join(f"{part} {value:.3f}" for part, value in parts[short].items()), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["64x1024"])
