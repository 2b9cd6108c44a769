"""Run under torchrun by test_colocate.py: one engine start, many checks. Each rank writes what it saw as JSON.

    torchrun --nproc_per_node=2 engine_worker.py MODEL_DIR OUT_DIR
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy
import tokenizers
import torch
import torch.distributed as dist

from colocate import ColocatedEngine
from model import Policy, token_logprobs

folder, out = sys.argv[1:]
dist.init_process_group("gloo")
rank, seen = dist.get_rank(), {}
torch.set_num_threads(1)
policy = Policy.from_folder(folder)


def refused(act) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def random_states():
    return [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


for generator in (random.seed, numpy.random.seed, torch.manual_seed):
    generator(1234 + rank)
states = random_states()
tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
engine = ColocatedEngine(
    folder, dtype=torch.float32, max_model_len=512, max_num_seqs=16, enforce_eager=True, tokenizer=tokenizer)
seen["random_state_kept"] = states == random_states()

# Longer than a cache block, so that a second generation finds the prompt's keys and values in the prefix cache.
PROMPTS = [[(7 * i + rank) % 150 + 2 for i in range(270)], [5, 6, 7, 8 + rank]]
ARGS = dict(n=3, max_tokens=24, temperature=0.7, seeds=[11 + rank, 22], eos_token_ids=[1])


def gap(samples, temperature=ARGS["temperature"]) -> float:
    """Mean |sampler's log-probability - trainer's| over what the engine sampled."""
    differences = []
    for prompt, group in zip(PROMPTS, samples):
        for ids, logps in group:
            stream = torch.tensor(prompt + ids)
            hidden = policy.packed(stream, [len(stream)])[len(prompt) - 1:-1]
            ours, _ = token_logprobs(hidden, policy.head_weight, stream[len(prompt):], temperature)
            differences.append((ours.detach() - torch.tensor(logps)).abs())
    return torch.cat(differences).mean().item()


def train(scale=0.02):
    g = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1 + scale * torch.randn(p.shape, generator=g))


# H2: nothing is generated before the first push, nor after a sleep.
seen["asleep_at_first"] = refused(lambda: engine.generate(PROMPTS, **ARGS))
engine.wake(policy.named_parameters(), version=0)
samples = engine.generate(PROMPTS, **ARGS)
seen["gap"] = [gap(samples)]
seen["lengths"] = [len(ids) for group in samples for ids, _ in group]
seen["eos_only_last"] = all(1 not in ids[:-1] and (ids[-1] == 1 or len(ids) == 24) for g in samples for ids, _ in g)
seen["samples"] = [ids for group in samples for ids, _ in group]
text = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
plain = lambda ids, k, n: text(ids[k:k + n]).isascii() and len(ids) > k + n
stops = [[next(text(ids[k:k + 2]) for k in range(6, 20) for ids, _ in samples[0] if plain(ids, k, 2)), "no|where"],
         [next(text(ids[k:k + 1]) for k in range(3, 20) if plain(ids, k, 1)) for g in samples for ids, _ in g]]  # ends all
seen["stop_cuts"], seen["stop_gap"], seen["stopped_as_expected"], seen["left_running"] = [], [], [], []
for stop in stops:
    ends = lambda ids: next((n for n in range(1, len(ids) + 1) if any(s in text(ids[:n]) for s in stop)), len(ids))
    expected = [(ids[:ends(ids)], logps[:ends(ids)]) for group in samples for ids, logps in group]
    stopped = [sample for group in engine.generate(PROMPTS, **ARGS, stop=stop) for sample in group]
    seen["stop_cuts"].append([len(ids) - ends(ids) for group in samples for ids, _ in group])
    seen["stopped_as_expected"].append([ids for ids, _ in stopped] == [ids for ids, _ in expected])
    seen["stop_gap"] += [abs(p - q) for (_, ps), (_, qs) in zip(stopped, expected) for p, q in zip(ps, qs)]
    seen["left_running"] += engine.core.engine_core.scheduler.requests
seen["again"] = [ids for group in engine.generate(PROMPTS, **ARGS) for ids, _ in group]
engine.sleep()
seen["asleep_again"] = refused(lambda: engine.generate(PROMPTS, **ARGS))

# H1: after every push the engine is the trainer.
for version in (1, 2):
    train()
    engine.wake(policy.named_parameters(), version=version)
    seen["gap"].append(gap(engine.generate(PROMPTS, **ARGS)))
    engine.sleep()
seen["weight_version"] = engine.weight_version
seen["awake_after_sleep"] = engine.awake

# Red: the push left out.
train()
real_push, engine.push = engine.push, lambda pairs: None
engine.wake(policy.named_parameters())
seen["red_no_push"] = gap(engine.generate(PROMPTS, **ARGS))
engine.push = real_push
engine.sleep()

# Red: the prefix cache not reset. The cache must have been hit, otherwise this proves nothing.
engine.wake(policy.named_parameters())
engine.generate(PROMPTS, **ARGS)
train()
real_reset, engine.llm.reset_prefix_cache = engine.llm.reset_prefix_cache, lambda: True
engine.wake(policy.named_parameters())
engine.llm.reset_prefix_cache = real_reset
parameters = engine.vllm.SamplingParams(n=1, max_tokens=1, temperature=1.0, detokenize=False)
seen["cached_tokens"] = engine.llm.generate([{"prompt_token_ids": PROMPTS[0]}], parameters, use_tqdm=False)[0].num_cached_tokens
seen["red_stale_cache"] = gap(engine.generate(PROMPTS, **ARGS))
engine.wake(policy.named_parameters())  # now with the reset
seen["gap_after_reset"] = gap(engine.generate(PROMPTS, **ARGS))

# H5: the folder's generation_config.json holds a penalty and a top_p; only explicit parameters keep them out.
defaults = engine.llm.get_default_sampling_params()
seen["defaults_are_neutral"] = [defaults.repetition_penalty, defaults.top_p, defaults.temperature]
real = engine.vllm.SamplingParams
engine.vllm.SamplingParams = lambda **kw: real(**{**kw, "repetition_penalty": 1.5})
seen["red_penalty"] = gap(engine.generate(PROMPTS, **ARGS))
engine.vllm.SamplingParams = real

# Greedy equals the trainer's argmax.
[[(ids, _)], _] = engine.generate(PROMPTS, **{**ARGS, "n": 1, "temperature": 0.0})
stream = torch.tensor(PROMPTS[0] + ids)
logits = policy.packed(stream, [len(stream)])[len(PROMPTS[0]) - 1:-1] @ policy.head_weight.T
seen["greedy_is_argmax"] = logits.argmax(-1).tolist() == ids
seen["no_prompts"] = engine.generate([], **{**ARGS, "seeds": []})
engine.sleep()

# H3: a wrong push is refused by name before anything is written, and the next right one is not disturbed.
pairs = list(policy.named_parameters())
name = "model.layers.0.self_attn.k_proj.weight"
seen["missing"] = refused(lambda: engine.wake([p for p in pairs if p[0] != name]))
seen["misshapen"] = refused(lambda: engine.wake([(n, p[:-1] if n == name else p) for n, p in pairs]))
seen["doubled"] = refused(lambda: engine.wake(pairs + [(name, dict(pairs)[name])]))
seen["unknown"] = refused(lambda: engine.wake(pairs + [("model.extra.weight", pairs[0][1])]))
seen["asleep_after_refusal"] = not engine.awake
engine.wake(pairs)
seen["gap_after_refusals"] = gap(engine.generate(PROMPTS, **ARGS))

Path(out, f"rank{rank}.json").write_text(json.dumps(seen))
dist.barrier()
engine.close()
if not dist.is_initialized():  # close() ends the process group too
    Path(out, f"closed{rank}").touch()
