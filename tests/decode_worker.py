"""Run under torchrun by test_decode.py: one engine decodes the same work vLLM's way and the short way.

    torchrun --nproc_per_node=1 decode_worker.py MODEL_DIR OUT_FILE
"""

import collections
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy
import tokenizers
import torch
import torch.distributed as dist
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

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


def drive(kind, blocks=0):
    """The log of an asynchronous scheduler, as a GPU has it: each step is scheduled before the tokens of the one before
    are in. A token and its log-probability follow from request and place. blocks: of 128 tokens, to begin with."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    core = engine.core.engine_core
    driven = kind(vllm_config=core.vllm_config, kv_cache_config=scheduler.kv_cache_config, block_size=scheduler.block_size,
                  structured_output_manager=core.structured_output_manager, hash_block_size=scheduler.hash_block_size)
    pool = driven.kv_cache_manager.block_pool
    if blocks:
        pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    preempted, preempt = [0], driven._preempt_request

    def counted_preempt(*args, **kwargs):
        preempted[0] += 1
        return preempt(*args, **kwargs)

    driven._preempt_request = counted_preempt
    log, drawn, flight, names = [], collections.Counter(), None, []
    real, engine.core.add_request = engine.core.add_request, lambda request: driven.add_request(core.preprocess_add_request(request)[0])
    engine.names, engine.decode = itertools.count(10**6), lambda completions, stop: names.extend(completions)
    for prompts in (MANY, LONG[:3]):
        # Where blocks are few, at first there is one for each sequence, and later not.
        limits = {"eos_token_ids": [], "max_tokens": 180} if blocks else {"eos_token_ids": SOME, "max_tokens": 45}
        engine.generate(**USUAL | limits | {"prompts": prompts, "seeds": [7] * len(prompts), "n": 1})
        while driven.has_requests() or flight:
            output = driven.schedule()
            cached = output.scheduled_cached_reqs
            log.append([output.num_scheduled_tokens, [new.req_id for new in output.scheduled_new_reqs], cached.req_ids,
                        cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens,
                        sorted(output.finished_req_ids)])
            ids = list(output.num_scheduled_tokens)
            tokens = [hash((int(name), drawn[name])) % 149 + 2 for name in ids]
            drawn.update(ids)
            columns = numpy.array(tokens).reshape(-1, 1)
            result = ModelRunnerOutput(
                req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=[[token] for token in tokens], prompt_logprobs_dict={}, pooler_output=[],
                logprobs=LogprobsLists(columns, columns / 7, columns))
            if flight:
                for part in driven.update_from_output(*flight).values():
                    for o in part.outputs:
                        logprob = o.new_logprobs if isinstance(o.new_logprobs, float) else o.new_logprobs.logprobs.item(0)
                        log.append([o.request_id, o.new_token_ids, logprob, str(o.finish_reason)])
            flight = (output, result) if ids else None
            if len(log) == 300:
                driven.finish_requests(ids[:2], RequestStatus.FINISHED_ABORTED)  # as a stop string does
    engine.core.add_request = real
    del engine.decode
    return {"preempted": preempted[0], "log": log, "free": pool.get_num_free_blocks(), "short": driven.steps if hasattr(driven, "steps") else 0}


class Counted(colocate.decoding_scheduler(True)):
    steps = 0

    def schedule_decoding(self):
        self.steps += 1
        return super().schedule_decoding()


colocate.OF_REQUEST = colocate.OF_REQUEST[:-1]
for blocks in (0, 29):
    seen[f"asynchronous {blocks}"] = [drive(AsyncScheduler, blocks), drive(Counted, blocks)]
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
