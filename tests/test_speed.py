"""What makes a step fast must change nothing: recomputation, torch.compile, the bare decode loop, the division of
work; and the memory plan, and the benchmark itself."""

import gc
import itertools
import json
import random
import re
import statistics
import types
from dataclasses import replace
from pathlib import Path

import bench
import pytest
import ranks
import torch
from checkpoints import write_checkpoint, write_tokenizer
from tokenizers import Tokenizer, decoders, models
from torch._dynamo.utils import counters

import minigrpo
import model
from colocate import ColocatedEngine, completes
from data import sample_seed
from config import Config
from minigrpo import RunError, balance
from model import ModelConfig, Policy, memory_plan, parameter_count

GIB = 2**30
QWEN = ModelConfig(  # Qwen2.5-1.5B
    vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6,
    rope_scaling=None, tie_word_embeddings=True, qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False)
PARAMETERS = 1_543_714_304
SMALL = replace(QWEN, vocab_size=97, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                num_attention_heads=4, head_dim=16)


def policy_of(dtype) -> Policy:
    torch.manual_seed(0)
    return Policy(SMALL).to(dtype)


def forward_and_backward(policy: Policy, lengths) -> tuple[dict[str, torch.Tensor], int]:
    """(hidden states and all gradients, bytes kept in between beside the weights; a storage counts once)."""
    kept, g = {}, torch.Generator().manual_seed(1)

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.packed(torch.randint(0, 97, (sum(lengths),), generator=g), lengths)
    (hidden * torch.randn(hidden.shape, generator=g, dtype=torch.float64).to(hidden.dtype)).sum().backward()
    for p in policy.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    seen = {"hidden": hidden.detach(), **{name: p.grad.clone() for name, p in policy.named_parameters()}}
    return seen, sum(kept.values())


# ---- Recomputation and torch.compile -----------------------------------------------------------------------

def test_recompute_is_bitwise_the_same_and_keeps_less():
    policy, lengths = policy_of(torch.float64), [30, 1, 17, 40]
    plain, plain_bytes = forward_and_backward(policy, lengths)
    policy.prepare_blocks(recompute=True)
    again, fewer_bytes = forward_and_backward(policy, lengths)
    for name, tensor in plain.items():
        assert torch.equal(again[name], tensor) and tensor.abs().max() > 0, name
    inputs = 2 * sum(lengths) * 64 * 8  # of two blocks: these at least must be kept
    assert inputs <= fewer_bytes < plain_bytes / 5


def test_compiled_equals_eager_with_one_graph_for_many_shapes():
    """A second graph is for a batch of one sequence: torch.compile takes sizes of 1 apart."""
    policy, batches = policy_of(torch.float32), [[5, 9, 3], [12, 4], [7, 6, 9, 2, 11], [33]]
    eager = [forward_and_backward(policy, lengths)[0] for lengths in batches]
    for recompute in (False, True):
        torch._dynamo.reset()
        counters.clear()
        policy.prepare_blocks(compiled=True, recompute=recompute)
        for lengths, want in zip(batches, eager):
            got, size = forward_and_backward(policy, lengths)
            for name, tensor in want.items():  # gradients are sums over the tokens: relative to the largest
                assert (got[name] - tensor).abs().max() < 2e-6 * tensor.abs().max(), (name, lengths)
            assert counters["stats"]["unique_graphs"] == 1 + (lengths == [33])
        assert not counters["graph_break"]
    assert size < 2.5 * 33 * 64 * 4 * 2  # with both: of 33 tokens the inputs of two blocks, and a little


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_compiled_chunks_equal_autograd_in_double(dtype, rounding):
    """What the GPU runs: the same two functions through torch.compile(dynamic=True)."""
    for rows, vocabulary, temperature in ((7, 97, 0.7), (12, 130, 1.3)):
        g = torch.Generator().manual_seed(rows)
        logits = (torch.randn(rows, vocabulary, generator=g) * 4).to(dtype)
        targets, upstream = torch.randint(0, vocabulary, (rows,), generator=g), torch.randn(rows, generator=g)
        exact = logits.double().requires_grad_()
        logs = (exact / temperature).log_softmax(-1)
        chosen = logs.gather(-1, targets[:, None]).squeeze(-1)
        chosen.backward(upstream.double())
        logp, entropy, lse = model.compile_once(model.chunk_logprobs)(logits, targets, temperature)
        grad = model.compile_once(model.chunk_gradient)(logits, targets, lse, upstream, temperature)
        assert logp.dtype == entropy.dtype == torch.float32 and grad.dtype == dtype
        assert torch.allclose(logp.double(), chosen, atol=1e-5)
        # A difference of two large numbers, so of fewer digits; a metric only.
        assert torch.allclose(entropy.double(), -(logs.exp() * logs).sum(-1), atol=1e-4)
        assert torch.allclose(lse.double(), (exact / temperature).logsumexp(-1), atol=1e-5)
        assert torch.allclose(grad.double(), exact.grad, atol=1e-6, rtol=rounding)


# ---- The memory plan ---------------------------------------------------------------------------------------

def plan(**changes) -> dict:
    return memory_plan(QWEN, **{**dict(size=2, ranks=1, micro_batch=17408, sequence=2176, cache_tokens=64 * 2176,
                                       engine_limit=1e15, recompute=False, compiled=True), **changes})


def test_memory_plan_by_hand():
    training, generating = plan().values()
    assert training["weights"] == generating["weights"] == generating["engine weights"] == 2 * PARAMETERS
    assert training["gradients"] == 4 * PARAMETERS and "gradients" not in generating
    for size in (1, 2, 8):
        for half in plan(ranks=size).values():  # only the optimizer is cut
            assert half["optimizer"] == 12 * PARAMETERS / size and half["weights"] == 2 * PARAMETERS
    token = 2 * 28 * 2 * 128 * 2  # keys and values · layers · heads · head_dim · bytes
    assert token == 28_672 and generating["KV cache"] == token * 64 * 2176
    capped = plan(engine_limit=2 * PARAMETERS + 10**9)["generating"]
    assert capped["KV cache"] + capped["engine weights"] == 2 * PARAMETERS + 10**9
    assert plan(size=4)["generating"]["KV cache"] == 2 * generating["KV cache"]
    one = plan(engine_limit=0, sequence=16512)["generating"]["KV cache"]  # an engine that cannot hold one sequence
    assert one == token * (16512 + 32)  # would not start
    assert set(plan(shared=False)["generating"]) == {"CUDA and graphs", "engine weights", "KV cache"}
    # A block keeps 4 · 1,536 + (12 + 2 + 2 + 12) · 128 + 3 · 8,960 = 36,608 elements a token, 4 · 8,960 where silu is
    # not fused; with --recompute one block does, and 28 inputs; 6 · 1,536 lie around the blocks.
    for how, elements in (({}, 28 * 36_608), ({"compiled": False}, 28 * 45_568),
                          ({"recompute": True}, 28 * 1536 + 36_608)):
        assert plan(**how)["training"]["activations"] == 2 * 17408 * (elements + 6 * 1536)


@pytest.mark.parametrize("micro_batch, recompute, measured, within", [
    (17408, False, 63.4, 0.10), (34816, False, 96.7, 0.10)])
def test_memory_plan_against_what_was_measured(micro_batch, recompute, measured, within):
    """measured: torch.cuda.max_memory_allocated of an update on one H200, torch 2.11, vLLM 0.26, in GiB. It does not
    see what CUDA itself and the engine's graphs take."""
    training = plan(micro_batch=micro_batch, recompute=recompute)["training"]
    planned = (sum(training.values()) - training["CUDA and graphs"]) / GIB
    assert abs(planned / measured - 1) < within


def planned(c, ranks, card) -> tuple[int, str]:
    """(bytes of the KV cache, what is printed)"""
    said = []
    world = types.SimpleNamespace(world_size=ranks, generators=int(c.split), cuda=True, card=card * GIB, print0=said.append)
    return minigrpo.plan_memory(c, QWEN, torch.bfloat16, world), "\n".join(said)


def test_the_plan_says_every_part_and_what_to_change():
    c = Config(colocate=True, prompts_per_step=12, num_generations=16, max_completion_length=1536)  # 2,048 tokens
    kv_cache_bytes, words = planned(c, 8, 141)
    assert kv_cache_bytes == 28_672 * 2 * 16 * 2048  # 12 prompts on 8 ranks: 2 on the fullest
    split, _ = planned(replace(c, colocate=False, split=True), 7, 141)
    assert split == 28_672 * 12 * 16 * 2048
    assert "of 141.0" in words
    halves = plan(ranks=8, micro_batch=16384, cache_tokens=2 * 16 * 2048)
    for name, half in halves.items():
        [line] = [line for line in words.splitlines() if line.startswith(name)]
        whole, *parts = map(float, re.findall(r" (\d+\.\d)", line))
        assert len(parts) == len(half) and abs(sum(parts) - whole) <= 0.05 * (len(parts) + 1)
        assert all(f"{what} {value / GIB:.1f}" in line for what, value in half.items()), line

    def refusal(card, **options) -> str:
        with pytest.raises(RunError) as error:
            planned(replace(c, **options), 1, card)
        assert all(f"{name} " in str(error.value) for half in halves.values() for name in half)
        return str(error.value).splitlines()[-1]

    assert refusal(48) == "use --recompute"
    big = dict(recompute=True, micro_batch_tokens=200_000, vllm_gpu_memory_utilization=0.1)
    assert refusal(48, **big) == "use --micro_batch_tokens 2048"
    assert refusal(30, **{**big, "micro_batch_tokens": 2048}) == "use more GPUs"
    alone = Config(split=True, recompute=True, prompts_per_step=64, num_generations=16, max_completion_length=2048)
    planned(alone, 1, 80)  # 65 GiB of KV cache on a GPU that holds no trainer
    assert refusal(80, prompts_per_step=999, vllm_gpu_memory_utilization=0.9) == \
        "lower --vllm_gpu_memory_utilization, or use more GPUs"
    planned(replace(c, **{**big, "micro_batch_tokens": 2048}), 1, 48)  # as was advised


# ---- The division of work ----------------------------------------------------------------------------------

def test_update_balances_by_cost(monkeypatch):
    """Long-tailed lengths, and a model so narrow that attention, which grows with the square, is most of the cost."""
    rng, policy, size = random.Random(3), Policy(SMALL), 4
    lengths = [2 + min(4095, int(rng.expovariate(4 / 4096))) for _ in range(64)]
    batch = [ranks.rollout(i, [3], [5] * (n - 1)) for i, n in enumerate(lengths)]
    done = []
    c = Config(max_completion_length=4096)
    for rank in range(size):
        batches = minigrpo.make_micro_batches(policy, batch, c, types.SimpleNamespace(rank=rank, world_size=size))
        done.append([r.slot for made in batches for r in made.rollouts])
    assert sorted(slot for slots in done for slot in slots) == list(range(64))

    def spread(parts) -> float:
        costs = [policy.update_flops([lengths[i] for i in part]) for part in parts]
        return max(costs) / min(costs) - 1

    assert spread(done) < 0.01  # 10 % would be good enough; so little also tells cost from tokens
    assert spread(balance([1] * 64, size)) > 0.1  # as many on each rank
    assert spread(balance(lengths, size)) > 0.02  # as many tokens on each rank


# ---- The decode loop ---------------------------------------------------------------------------------------

class FakeCore:
    """Requests end in an order of its own, and the outputs of a step come shuffled, or not at all. A token and its
    log-probability follow from prompt, seed and place. As in vLLM, scheduling runs a step ahead: when a request ends,
    another token of its is in flight, and goes to whoever has its name when that step is looked at."""

    def __init__(self):
        self.running, self.steps, self.collecting, self.order = {}, 0, [], []
        self.in_flight, self.aborted = [], []

    @staticmethod
    def completion(prompt, seed):
        n = 1 + seed * 7 % 5
        return [sum(prompt) * 31 + seed * 10 + t for t in range(n)], [-seed - t / 8 for t in range(n)]

    def add_request(self, request):
        self.running[request.request_id] = request, 0

    def abort_requests(self, names):
        for name in names:
            self.running.pop(name, None)
        self.aborted += names
        self.in_flight += names

    def get_output(self):
        self.steps += 1
        self.collecting.append(gc.isenabled())
        outputs = [types.SimpleNamespace(request_id=name, new_token_ids=[999], new_logprobs=0.0, finish_reason=None)
                   for name in self.in_flight if name in self.running]
        self.in_flight, rng = [], random.Random(self.steps)
        for name, (request, t) in list(self.running.items()) if self.steps % 3 else []:
            output = types.SimpleNamespace(request_id=name, new_token_ids=[], new_logprobs=None, finish_reason=None)
            outputs.append(output)
            if rng.random() < 0.3:
                continue  # no token for this one
            ids, logps = self.completion(request.prompt_token_ids, request.sampling_params.seed)
            output.new_token_ids, self.running[name] = [ids[t]], (request, t + 1)
            output.new_logprobs = logps[t]
            if t + 1 == len(ids):
                output.finish_reason = "stop"
                self.order.append(int(name))
                del self.running[name]
                self.in_flight.append(name)
        rng.shuffle(outputs)
        return types.SimpleNamespace(outputs=outputs)


def engine_around(core) -> ColocatedEngine:
    engine = ColocatedEngine.__new__(ColocatedEngine)
    engine.vllm, engine.request = types.SimpleNamespace(SamplingParams=types.SimpleNamespace), types.SimpleNamespace
    engine.core, engine.awake, engine.names, engine.max_model_len = core, True, itertools.count(), 64
    return engine


ARGUMENTS = dict(n=3, max_tokens=5, temperature=0.7, eos_token_ids=[9])


def test_decode_loop_gives_each_prompt_its_completions_in_order():
    core, prompts, seeds = FakeCore(), [[1, 2], [3], [1, 2], [4, 4, 4]], [10, 20, 33, 47]
    engine, finished = engine_around(core), set()
    for _ in range(2):  # the names of requests are not used again: the last tokens of the first are in flight
        core.steps, core.order, asked = 0, [], []
        add, core.add_request = core.add_request, lambda r: (asked.append(r.sampling_params), add(r))
        got = engine.generate(prompts, seeds=seeds, **ARGUMENTS)
        core.add_request = add
        assert got == [[core.completion(p, s + i) for i in range(3)] for p, s in zip(prompts, seeds)]
        finished |= {len(ids) for group in got for ids, _ in group}
        assert [p.seed for p in asked] == [s + i for s in seeds for i in range(3)]
        for p in asked:  # the policy's own distribution, and nothing of vLLM's defaults
            assert (p.max_tokens, p.temperature, p.stop_token_ids, p.n, p.logprobs) == (5, 0.7, [9], 1, 0)
            assert (p.top_p, p.top_k, p.min_p, p.repetition_penalty, p.presence_penalty) == (1, 0, 0, 1, 0)
    assert len(finished) > 2 and core.order != sorted(core.order)  # they did end out of order
    assert engine.generate([], seeds=[], **ARGUMENTS) == []
    assert not any(core.collecting) and gc.isenabled()


def test_decode_loop_ends_completions_at_stop_strings():
    core, prompts, seeds = FakeCore(), [[1, 2], [3], [1, 2], [4, 4, 4]], [10, 20, 33, 47]
    engine, text = engine_around(core), lambda ids, **_: ",".join(map(str, ids))
    engine.tokenizer = type("Fake", (), {"decode": staticmethod(text)})()
    whole = engine.generate(prompts, seeds=seeds, **ARGUMENTS)
    assert not core.aborted and core.steps > 5
    ids = max((ids for group in whole for ids, _ in group), key=len)
    for stop in (["1,", "3"], [text(ids[1:3])], [text(ids[-2:])], ["nowhere"]):
        core.aborted.clear()
        expected, cut = [], 0
        for ids, logps in (sample for group in whole for sample in group):
            n = next((n for n in range(1, len(ids) + 1) if any(s in text(ids[:n]) for s in stop)), len(ids))
            expected.append((ids[:n], logps[:n]))
            cut += n < len(ids)
        core.steps = 0
        got = engine.generate(prompts, seeds=seeds, stop=stop, **ARGUMENTS)
        assert [sample for group in got for sample in group] == expected
        assert len(core.aborted) == cut and not core.running and gc.isenabled()


def test_an_interrupted_generate_leaves_nothing_behind():
    core, prompts, seeds = FakeCore(), [[1, 2], [3]], [10, 20]
    engine, step = engine_around(core), core.get_output

    def interrupted():
        if core.steps == 2:
            raise KeyboardInterrupt
        return step()

    core.get_output = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, seeds=seeds, **ARGUMENTS)
    assert not core.running and gc.isenabled()
    core.get_output = step
    assert engine.generate(prompts, seeds=seeds, **ARGUMENTS) == [
        [core.completion(p, s + i) for i in range(3)] for p, s in zip(prompts, seeds)]


@pytest.mark.parametrize("change", [dict(prompts=[[]]), dict(prompts=[[1] * 64]), dict(temperature=0.009)])
def test_what_vllm_would_change_or_break_at_is_refused(change):
    engine = engine_around(FakeCore())
    with pytest.raises(ValueError, match="1 to 63 tokens|at least 0.01"):
        engine.generate(**{"prompts": [[1]], "seeds": [0], **ARGUMENTS, **change})
    assert not engine.core.running and len(engine.generate([[1] * 63], seeds=[0], **ARGUMENTS | {"temperature": 0.01})) == 1


def test_stop_strings_are_found_in_the_text_with_the_token_that_completes_them(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # with a token for every byte

    def end(text, *stop):
        """How many tokens there are when the first string is complete."""
        ids = tokenizer.encode(text).ids
        return next((n for n in range(1, len(ids) + 1) if completes(tokenizer, ids[:n], stop)), None)

    assert end("x" * 50 + "</answer>y</answer>", "</answer>") == 59
    assert end("<answer>4</answer", "</answer>") is None
    assert end("a\n\nb", "\n\n", "b") == 3 and end("ab", "\n\n", "b") == 2
    assert end("x" * 9 + "é" * 30, "é" * 30) == 9 + 60  # each of two bytes
    assert end("xé", "\u00e8", "é") == 3  # not with the first byte, which they share
    assert end("x<|im_end|>y", "<|im_end|>") == 2 and end("x<|im_end|>y", "d|>y") == 3
    words = Tokenizer(models.WordLevel({"\u2581a": 0, "b": 1}))
    words.decoder = decoders.Metaspace()  # takes the space from the first of the tokens that it is given
    assert [completes(words, ids, [" "]) for ids in ([0], [0, 1], [0, 1, 0])] == [False, False, True]


# ---- The benchmark -----------------------------------------------------------------------------------------

def test_ragged_lengths_of_the_bench_are_as_promised():
    lengths = [bench.length(seed, 2048) for seed in range(4000)]  # min(exponential of mean 512, 2048)
    assert min(lengths) >= 1 and max(lengths) == 2048 and 480 < statistics.fmean(lengths) < 525
    assert 0.01 < lengths.count(2048) / 4000 < 0.03  # e^-4


@pytest.mark.parametrize("ragged", [False, True])
def test_bench_on_cpu_ranks(tmp_path, monkeypatch, ragged):
    size = 2 if ragged else 1  # an engine takes a quarter of a minute to start
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", "qwen3-tied", scale=3.0, vocab_size=320)
    write_tokenizer(tmp_path / "model")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the benchmark has its run folder
    flags = ["--ragged"] if ragged else []
    ranks.finish(ranks.start(size, "tests/bench.py", tmp_path / "model", "--completion", 16, "--steps", 4, "--prompts", 4 // size,
                             "--generations", 4, "--label", "x", "--results", tmp_path / "results", *flags))
    row = json.loads((tmp_path / "results/bench-x.json").read_text())
    assert set(row["parts_s"]) == {"wake", "push", "kv", "generate", "sleep", "reward", "update"}
    assert 0.9 < row["parts_over_step"] <= 1.02 and row["gpus"] == size
    assert row["pushes"] == 5 and row["checksums_equal"] and row["logprob_gap/mean"] < 1e-5
    assert row["step_s"] <= row["wall_s"] and row["parts_s"]["update"] > 0 and row["engine_start_s"] > 0
    [run] = tmp_path.glob("bench-*/run")
    seeds = {step: [sample_seed(0, step, 0, slot) + i for slot in range(4) for i in range(4)] for step in range(3)}
    trained = []
    for step in range(3):
        rollouts = [json.loads(line) for line in (run / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
        assert all(len(r["prompt_ids"]) == 128 for r in rollouts)
        lengths = [len(r["completion_ids"]) for r in rollouts]
        assert lengths == [bench.length(seed, 16) if ragged else 16 for seed in seeds[step]]
        assert len(set(lengths)) > 3 or not ragged
        trained.append(sum(lengths))
    assert row["trained_tokens"] == statistics.median([*trained[1:], row["rows"][-1]["trained_tokens"]])
    for stage in ("generate", "the backward passes"):
        assert row["slowest_over_fastest_rank"][stage] >= 1 and len(row["seconds_by_rank"][stage]) == size
    assert not list(run.glob("step_*")) and not (run / "latest").exists()


def test_parameter_count_is_that_of_the_policy():
    every = dict(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    for change in ({}, {"tie_word_embeddings": False}, *({name: on} for name in every for on in (False, True)), every):
        config = replace(QWEN, num_hidden_layers=3, **change)
        with torch.device("meta"):
            assert parameter_count(config) == sum(p.numel() for p in Policy(config).parameters()), change


def test_the_readme_shows_the_table_of_the_plan():
    import plan_table
    assert plan_table.table() in (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
