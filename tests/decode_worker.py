"""Run under torchrun by test_decode.py: one engine decodes the same work vLLM's way and the short way.

    torchrun --nproc_per_node=1 decode_worker.py MODEL_DIR OUT_FILE
"""

import collections
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tokenizers
import torch
import torch.distributed as dist

import colocate
from colocate import ColocatedEngine
from model import Policy

folder, out = sys.argv[1:]
dist.init_process_group("gloo")
torch.set_num_threads(1)
colocate.OF_REQUEST += ("something_new",)  # for the first requests this vLLM is one that lacks it
policy = Policy.from_folder(folder)
tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
engine = ColocatedEngine(
    folder, dtype=torch.float32, max_model_len=512, max_num_seqs=16, enforce_eager=True, tokenizer=tokenizer)
scheduler = engine.core.engine_core.scheduler
pool = scheduler.kv_cache_manager.block_pool
seen = {"without": None, "plain": {}, "short": {}, "plain_calls": {}, "short_calls": {}}
calls = collections.Counter()


def count(name):
    real = getattr(scheduler, name)

    def counted(*args, **kwargs):
        calls[name] += 1
        return real(*args, **kwargs)

    setattr(scheduler, name, counted)


for name in ("schedule", "schedule_decoding", "_preempt_request"):
    count(name)

PROMPTS = [[(7 * i + k) % 150 + 2 for i in range(100 + 9 * k)] for k in range(3)]
MANY = [[(3 * i + k) % 150 + 2 for i in range(100)] for k in range(12)]
LONG = [[(5 * i + k) % 150 + 2 for i in range(470)] for k in range(12)]
# Past the end of a block of 128 tokens, where each sequence gets another one.
USUAL = dict(prompts=PROMPTS, n=2, max_tokens=70, temperature=1.0, seeds=[1, 20, 300], eos_token_ids=[])
SOME = [3, 14, 15, 92, 93, 94]  # ids that end a completion after 40 tokens in the mean
CASES = {
    "fixed": USUAL,
    "ragged": USUAL | {"eos_token_ids": SOME},
    "greedy": USUAL | {"temperature": 0.0, "max_tokens": 40},
    "one token": USUAL | {"max_tokens": 1},
    "two tokens": USUAL | {"max_tokens": 2},
    "a whole block": USUAL | {"max_tokens": 28},
    "stop strings": USUAL | {"stop": [*"e7kQz4mW"]},
    "more than slots": USUAL | {"prompts": MANY, "seeds": list(range(0, 120, 10)), "eos_token_ids": SOME},
    "up to max_model_len": USUAL | {"prompts": LONG[:2], "seeds": [4, 5]},
    "prompts of 5640 tokens": USUAL | {"prompts": LONG, "n": 1, "seeds": list(range(12)), "max_tokens": 4},
    "preempted": USUAL | {"prompts": MANY[:3]},
    "prefix cache": USUAL | {"prompts": LONG[:2], "seeds": [4, 5], "max_tokens": 20},
}


class Broken(Exception):
    pass


def interrupted(arguments):
    """A generate that ends after some steps with an exception."""
    left, real = [40], engine.core.get_output

    def get_output():
        left[0] -= 1
        if left[0] == 0:
            raise Broken
        return real()

    engine.core.get_output = get_output
    try:
        engine.generate(**arguments)
    except Broken:
        return "broken"
    finally:
        engine.core.get_output = real


def run(way):
    for name, arguments in CASES.items():
        if name != "prefix cache":
            assert engine.llm.reset_prefix_cache()
        calls.clear()
        taken = []
        if name == "preempted":  # six sequences of 170 tokens need 12 blocks of 128: leave 9
            taken = pool.get_new_blocks(pool.get_num_free_blocks() - 9)
        seen[way][name] = engine.generate(**arguments)
        pool.free_blocks(taken)
        seen[f"{way}_calls"][name] = dict(calls)
    seen[way]["interrupted"] = interrupted(USUAL)
    seen[way]["after that"] = engine.generate(**USUAL)
    seen[f"{way}_left"] = [len(scheduler.running), len(scheduler.requests), pool.get_num_free_blocks()]


engine.wake(policy.named_parameters())
engine.generate(**USUAL | {"max_tokens": 5})
seen["without"] = [scheduler.usable, calls["schedule_decoding"]]
run("plain")
scheduler.usable = True
run("short")
# Of a log-probability of another token the run must end, on either way.
for way in (True, False):
    scheduler.usable = way
    real = colocate.of_tokens
    colocate.of_tokens = lambda tokens, reported: real([token + 1 for token in tokens], reported)
    try:
        engine.generate(**USUAL)
    except RuntimeError as error:
        seen[f"wrong_{way}"] = str(error)
    colocate.of_tokens = real
Path(out).write_text(json.dumps(seen))
engine.close()
