"""A vLLM engine inside the training process, on the same GPU: it sleeps while the policy trains and wakes to
generate.

    # torchrun --nproc_per_node=1 program.py
    import torch
    from safetensors.torch import load_file
    from colocate import ColocatedEngine

    torch.distributed.init_process_group("gloo")
    engine = ColocatedEngine(
        "model", dtype=torch.float32, max_model_len=64, max_num_seqs=4, enforce_eager=True)
    weights = load_file("model/model.safetensors")
    engine.wake(weights.items())  # memory back, every weight pushed; a trainer: policy.named_parameters()
    [group] = engine.generate([[5, 6, 7]], n=2, max_tokens=4, temperature=1.0, seeds=[0], eos_token_ids=[1])
    engine.sleep()  # weights and KV cache are discarded; train here
    engine.close()
    assert all(1 <= len(token_ids) == len(logprobs) <= 4 for token_ids, logprobs in group)

Every rank of a torchrun job builds an engine, all of them at the same time, because building is collective
over the default process group. `torchrun --nproc_per_node=1 colocate.py MODEL` times the handoff on this
machine and proves it (it needs model.py beside it).

The engine reads no weights from disk: it starts with dummy ones, refuses to generate until it has been given
all of them, and forgets them at `sleep`. So nothing can be sampled from stale or base weights.

Left out: tensor-parallel engines, LoRA, quantized engines, several nodes for one engine.
"""

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

# Every parameter that changes the distribution is given, so that no default of vLLM's decides one.
PLAIN_SAMPLING = dict(
    n=1,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    min_tokens=0,
    ignore_eos=False,
    detokenize=False,
    logprobs=0,  # of the sampled token alone
)


class Completion(NamedTuple):
    """What was sampled after a prompt. The EOS is the last token if and only if it was emitted."""

    token_ids: list[int]
    logprobs: list[float]  # of each token, in nats, under the distribution that it was drawn from


class Engine(Protocol):
    """Something that generates: `ColocatedEngine`, or one of engines.py."""

    weight_version: int | None = None  # the `version` of the last wake
    given_back: int = 0  # bytes of the GPU that the last sleep gave back

    def wake(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Takes GPU memory back and copies every weight of the checkpoint, by name, into the engine.

        named_weights: each parameter of the checkpoint exactly once, in the engine's dtype, on its device.
        version: says of which update these weights are; kept as `weight_version`.
        Raises ValueError naming a missing, unknown, doubled or misshapen tensor before any is written, and
        RuntimeError where the engine's weights after the push are not bit for bit those pushed (CUDA only).
        """
        self.weight_version = version  # all there is to do for an engine without weights of its own

    def generate(self, prompts: list[list[int]], *, n: int, max_tokens: int, temperature: float,
                 seeds: list[int], eos_token_ids: list[int],
                 stop: Sequence[str] = ()) -> list[list[Completion]]:
        """n completions for each prompt of token ids.

        A completion ends with the EOS it emitted, or with the token that completes one of the strings `stop`
        in its text; otherwise it was cut at max_tokens, or where it and its prompt reach max_model_len.
        Temperature 0 is greedy. Completion i of a prompt draws with the seed seeds[prompt] + i.
        Raises RuntimeError while the engine is asleep, and ValueError for a prompt or a temperature that vLLM
        would change or fail on.
        """

    def sleep(self) -> None:
        """Discards weights and KV cache: nothing is generated until the next wake."""

    def close(self) -> None:
        """Ends the engine and, as vLLM does, the default process group. Only ever the last call."""


class ColocatedEngine(Engine):
    """One vLLM engine in this process.

    folder: a Hugging Face checkpoint; its config and its tensors' names and shapes are read, not its weights.
    dtype: of the pushed weights, torch.bfloat16 or torch.float32.
    max_model_len: tokens of prompt and completion together.
    max_num_seqs: completions generated at once, at most 1,024; the others wait in vLLM's queue.
    gpu_memory_utilization: share of the whole card that the awake engine may use (weights, activations, KV
    cache). kv_cache_bytes: size of the KV cache, in place of what that share would leave for it; more than
    the batch needs only makes sleeping and waking slower. (On a CPU VLLM_CPU_KVCACHE_SPACE, in GiB, decides.)
    enforce_eager: no CUDA graphs, which starts sooner and decodes slower.
    sleeps: False for an engine that has the GPU for itself and keeps its memory.
    tokenizer: only stop strings need it; has decode(ids, skip_special_tokens=...), as a tokenizers.Tokenizer.

    Raises ValueError, before an engine starts, where vLLM is missing or of an unsupported version, torchrun's
    variables are missing, `expandable_segments` is set, or too little memory is free.
    """

    def __init__(self, folder, *, dtype, max_model_len, max_num_seqs, gpu_memory_utilization=0.3,
                 kv_cache_bytes=None, enforce_eager=False, sleeps=True, tokenizer=None):
        self.cuda = torch.cuda.is_available()
        self.sleeps = sleeps and self.cuda
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        check_vllm()
        check_environment(self.cuda)
        if self.cuda:
            check_free_memory(gpu_memory_utilization)
        self.expected = checkpoint_shapes(folder)
        max_num_seqs = min(max_num_seqs, 1024)
        # A decode step is padded to the next of these sizes, each of which has a CUDA graph.
        largest = min(max_num_seqs, 512)
        graph_sizes = sorted({1, 2, 4, *range(8, largest + 1, 8), largest})
        prepare_environment()  # before the import, which reads it
        with random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # importing vLLM touches deprecated names of torch
            import vllm
            from vllm.v1.engine import EngineCoreRequest
            self.vllm = vllm
            self.request = EngineCoreRequest
            self.llm = vllm.LLM(
                model=str(folder),
                dtype=str(dtype).removeprefix("torch."),
                load_format="dummy",  # the first push brings the weights
                distributed_executor_backend="external_launcher",  # in this process: no workers of its own
                scheduler_cls=decoding_scheduler(self.cuda),
                enable_chunked_prefill=self.cuda,  # a CPU's generators cannot be rewound after half a prompt
                async_scheduling=self.cuda,  # the CPU launches a step while the GPU computes the one before
                enable_sleep_mode=self.sleeps,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_memory_bytes=kv_cache_bytes,
                enforce_eager=enforce_eager,
                compilation_config={} if enforce_eager else {"cudagraph_capture_sizes": graph_sizes},
                enable_prefix_caching=True,  # the completions of a group share their prompt
                logprobs_mode="processed_logprobs",  # log softmax(logits / T), from which it samples
                generation_config="vllm",  # the model's own may hide a top_p or a penalty
                skip_tokenizer_init=True,
                seed=0,
                disable_log_stats=True)
        self.core = self.llm.llm_engine.engine_core
        model_config = self.llm.llm_engine.model_config
        # Where a tied checkpoint stores its table a second time, as lm_head.weight, newer versions of vLLM
        # no longer call the model tied and build a head of its own.
        own_head = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
        tied = model_config.hf_config.tie_word_embeddings or own_head
        if tied:
            self.expected.pop("lm_head.weight", None)  # a trainer has the table once, as embed_tokens
        # Such a head has to be pushed as well, and so has a CPU engine's, a repacked copy of the table. In
        # all other tied models both names are one tensor.
        self.copied_head = tied and (own_head or not self.cuda)
        # Names of requests, never used twice: vLLM schedules a step ahead, so one more step is in flight when
        # generate returns, and its tokens would go to a later request with the same name.
        self.names = itertools.count()
        self.checksums = None  # (of the pushed weights, of the engine's) at the last push; CUDA only
        self.times = {}  # seconds of the last wake, push, kv and sleep
        self.sleep()

    def wake(self, named_weights, version=0):
        pairs = [(name, tensor.detach()) for name, tensor in named_weights]
        check_push(pairs, self.expected)
        if self.copied_head:
            # Without this the head would stay that of the last push.
            pairs.append(("lm_head.weight", dict(pairs)["model.embed_tokens.weight"]))
        if self.sleeps and torch.cuda.mem_get_info()[0] < self.given_back + 2**30:
            torch.cuda.empty_cache()  # what torch keeps for the trainer's next use, the engine cannot have
        self.awake = False  # until all of these weights are in; the previous ones are being overwritten
        with self.timed("wake"):
            if self.sleeps:
                self.llm.wake_up(tags=["weights"])
        with self.timed("push"):
            self.push(pairs)
        # Only now, so that the KV cache does not stand beside what the push needs for a moment.
        with self.timed("kv"):
            if self.sleeps:
                self.llm.wake_up(tags=["kv_cache"])
        # Keys and values in the prefix cache belong to the previous weights, and no push resets it.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: a request is still running")
        if self.cuda:
            pushed = bit_sum(tensor for _, tensor in pairs)
            # Tied tables are one parameter, which parameters() gives once.
            [held] = self.llm.apply_model(lambda model: bit_sum(model.parameters()))
            self.checksums = pushed, held
            if pushed != held:
                raise RuntimeError(f"handoff broken: {pushed} is the sum of the pushed weights, {held} of "
                                   "the engine's")
        self.weight_version = version
        self.awake = True

    def push(self, pairs):
        """Overwrites the engine's weights. One call for all: a fused layer needs its parts together."""
        if self.cuda:
            # Straight into the live model: 20 ms for 1.5 billion parameters, a reload takes 120.
            self.llm.apply_model(lambda model: model.load_weights(iter(pairs)))
        else:
            # A CPU engine has repacked its linear layers, and only a reload does so again. Without the
            # iterator it would reload the checkpoint on the disk, and say nothing.
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(pairs)})

    def generate(self, prompts, *, n, max_tokens, temperature, seeds, eos_token_ids,
                 stop=()) -> list[list[Completion]]:
        if not self.awake:
            raise RuntimeError("the engine is asleep and has no weights: call wake(named_weights) first")
        if 0 < temperature < 0.01:
            raise ValueError(f"temperature {temperature}: use 0 or at least 0.01 (vLLM would take 0.01)")
        if not all(0 < len(prompt) < self.max_model_len for prompt in prompts):
            raise ValueError(f"prompts must have 1 to {self.max_model_len - 1} tokens (max_model_len - 1)")
        completions = {}  # by the name of the request, in the order of the prompts
        for prompt, seed in zip(prompts, seeds, strict=True):
            for i in range(n):  # a request each; vLLM splits `n` too, in a layer that is skipped here
                name = str(next(self.names))
                completions[name] = Completion([], [])
                parameters = self.vllm.SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, seed=seed + i,
                    stop_token_ids=eos_token_ids, **PLAIN_SAMPLING)
                # Straight to the core: LLM.generate adds only what texts need.
                self.core.add_request(self.request(
                    request_id=name, prompt_token_ids=list(prompt), sampling_params=parameters,
                    mm_features=None, pooling_params=None, arrival_time=time.time(), lora_request=None,
                    cache_salt=None, data_parallel_rank=None))
        self.decode(completions, stop)
        flat = list(completions.values())
        return [flat[start:start + n] for start in range(0, len(flat), n)]

    def decode(self, completions, stop):
        """Steps the engine until every request is finished, appending to `completions` what it samples.

        A decode step of a small model is bound by the CPU. So this is vLLM's loop with the scheduler below,
        and without its output processor, which builds texts, containers and statistics that nobody reads.
        That processor also looks for stop strings; here `completes` does.
        """
        unfinished = len(completions)
        gc.disable()  # a collection walks over every object of the trainer; a step leaves no cycles
        try:
            while unfinished:
                # In one process this runs a step. A request ends when it likes, and its outputs come in any
                # order: they are found by name.
                for output in self.core.get_output().outputs:
                    completion = completions[output.request_id]
                    finished = output.finish_reason is not None  # EOS or a length
                    if output.new_token_ids:  # a step of prefill has none
                        completion.token_ids.extend(output.new_token_ids)
                        completion.logprobs.append(output.new_logprobs)  # a number: ShortWay has put it there
                        if stop and not finished and completes(self.tokenizer, completion.token_ids, stop):
                            self.core.abort_requests([output.request_id])  # what is in flight is dropped
                            finished = True
                    if finished:
                        unfinished -= 1
        finally:
            gc.enable()
            if unfinished:  # an exception or Ctrl-C: the next call would be given these requests' tokens
                self.core.abort_requests(list(completions))

    def sleep(self):
        self.awake = False  # also where the engine keeps its memory: no weights are used a second time
        with self.timed("sleep"):
            if self.sleeps:
                free = torch.cuda.mem_get_info()[0]
                # vLLM gives the pages of its memory back and keeps their addresses, where waking puts new
                # ones: tensors and CUDA graphs stay valid, only the contents are gone. (Level 1 would copy
                # the weights to the CPU, only to have them overwritten.)
                self.llm.sleep(level=2)
                self.given_back = torch.cuda.mem_get_info()[0] - free

    def close(self):
        self.core.shutdown()

    @contextlib.contextmanager
    def timed(self, part):
        """Writes the seconds that the block takes, on the GPU too, into `times`."""
        start = time.perf_counter()
        with trainer_left_alone():
            yield
        if self.cuda:
            torch.cuda.synchronize()
        self.times[part] = time.perf_counter() - start


# ---- The short way through a decode step -------------------------------------------------------------------

# What it uses of vLLM's Scheduler and Request that vLLM does not promise to keep. All of it was there, and
# meant the same, in the sources of 0.26 to 0.33; it ran with 0.26.0 on a GPU and with 0.32.0 on a CPU.
OF_SCHEDULER = ("running", "requests", "kv_cache_manager", "block_size", "max_model_len", "current_step",
                "finished_req_ids", "prev_step_scheduled_req_ids", "get_request_counts", "_free_request",
                "_update_after_schedule", "_update_request_with_output")
OF_REQUEST = ("num_computed_tokens", "num_in_flight_tokens", "num_prompt_tokens", "max_tokens",
              "is_prefill_chunk")


class ShortWay:
    """Put before vLLM's Scheduler: a short way through steps in which each request draws one more token.

    At every step vLLM asks of every request whether it has images, drafts, adapters, a grammar and much else.
    That is 0.9 of the 2.5 ms of CPU time that a step of 64 sequences costs, while the GPU needs 1.7 ms for it
    (0.5B model). The steps of a rollout are nearly all alike, and here is only what such a step needs, with
    the same results. Prefills, waiting requests and a cache that may run out go vLLM's way.
    """

    usable = None  # whether this vLLM has what the short way needs; known from the first request on
    prefilling = True  # whether part of a prompt is still to be scheduled
    short = False  # whether the last step was scheduled the short way

    def add_request(self, request):
        if self.usable is None:
            missing = [name for name in OF_SCHEDULER if not hasattr(self, name)]
            missing += [name for name in OF_REQUEST if not hasattr(request, name)]
            self.usable = not missing
            if missing:
                print(f"warning: this vLLM lacks {', '.join(missing)}: it decodes slower", file=sys.stderr)
        super().add_request(request)

    def schedule(self, *arguments):
        _, waiting = self.get_request_counts()
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        # With a free block for each of them, no request has to be preempted for another.
        roomy = free >= len(self.running) > 0
        self.short = self.usable and roomy and not waiting and not self.prefilling
        if self.short:
            return self.schedule_decoding()
        output = super().schedule(*arguments)
        self.prefilling = any(request.is_prefill_chunk for request in self.running)
        return output

    def schedule_decoding(self):
        """One more token for each request, but for those whose last one is in flight already."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
        self.current_step += 1
        names, blocks, computed, counts = [], [], [], []
        for request in self.running:
            start = request.num_computed_tokens  # in the KV cache, with the step in flight
            count = start + 1 - request.num_prompt_tokens
            if count < request.max_tokens and start + 1 < self.max_model_len:
                new_blocks = None
                if start % self.block_size == 0:  # its last block is full
                    new_blocks = self.kv_cache_manager.allocate_slots(request, 1).get_block_ids()
                names.append(request.request_id)
                blocks.append(new_blocks)
                computed.append(start)
                counts.append(count)
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=names, resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
            new_block_ids=blocks, num_computed_tokens=computed, num_output_tokens=counts)
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        output.total_num_scheduled_tokens = len(names)
        output.finished_req_ids = self.finished_req_ids  # the model runner forgets these
        self.prev_step_scheduled_req_ids = set(names)
        self._update_after_schedule(output)
        output.short = len(names) > 0
        return output

    def update_from_output(self, scheduled, result):
        # The next step is planned before the tokens of this one are in. Where that went vLLM's way, one of
        # these requests may have been preempted, so this result goes vLLM's way too.
        if not (self.short and getattr(scheduled, "short", False)):
            parts = super().update_from_output(scheduled, result)
            for part in parts.values():
                for output in part.outputs:
                    if output.new_logprobs:  # as in the short way, a number in place of arrays
                        [output.new_logprobs] = of_tokens(output.new_token_ids, output.new_logprobs)
            return parts
        from vllm.v1.core.sched.utils import remove_all
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        tokens = [token for [token] in result.sampled_token_ids]
        logprobs = of_tokens(tokens, result.logprobs)
        outputs, ended = [], set()
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None:  # it ended, or was aborted, while this step was in flight
                continue
            request.num_in_flight_tokens -= 1
            place = result.req_id_to_index[name]
            drawn, stopped = self._update_request_with_output(request, [tokens[place]])
            reason = None
            if stopped:
                reason = request.get_finished_reason()
                self._free_request(request)
                ended.add(request)
            outputs.append(EngineCoreOutput(name, drawn, logprobs[place], finish_reason=reason))
        if ended:
            self.running = remove_all(self.running, ended)
        return {0: EngineCoreOutputs(outputs=outputs)}


def decoding_scheduler(asynchronous):
    """vLLM's scheduler with the short way. asynchronous: it plans a step before it knows the last tokens."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    return type("DecodingScheduler", (ShortWay, AsyncScheduler if asynchronous else Scheduler), {})


def of_tokens(tokens, reported) -> list[float]:
    """The log-probabilities that vLLM reports, one a token. Raises RuntimeError where they are of others."""
    # Nothing else would show it.
    if reported.logprob_token_ids[:, 0].tolist() != tokens:
        raise RuntimeError("vLLM reported the log-probability of another token")
    return reported.logprobs[:, 0].tolist()


# ---- Before an engine starts -------------------------------------------------------------------------------

def check_vllm():
    """Raises ValueError where vLLM is missing or of an unsupported version; warns of one not tried."""
    version = "none"
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
    supported = tuple(f"0.{minor}." for minor in range(26, 34))
    if not version.startswith(supported):
        raise ValueError(f"vLLM 0.26 to 0.33 is needed, installed is {version}: pip install -r "
                         "requirements.txt (with an NVIDIA GPU) or requirements-cpu.txt")
    if not version.startswith(("0.26.0", "0.32.0")) and os.environ.get("RANK", "0") == "0":
        print(f"warning: vLLM {version} was not tried, 0.26.0 and 0.32.0 were", file=sys.stderr)


def check_environment(cuda):
    """Raises ValueError where torchrun's variables are missing or the allocator setting forbids sleeping."""
    problems = []
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        problems.append(f"{', '.join(missing)} not set: start it with torchrun --nproc_per_node=N")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if cuda and "expandable_segments:true" in os.environ.get(name, "").lower():
            problems.append(f"{name} sets expandable_segments, with which vLLM cannot sleep: unset it")
    if problems:
        raise ValueError("; ".join(problems))


def check_free_memory(gpu_memory_utilization):
    """Raises ValueError where less of the card is free than the engine may use."""
    free, total = torch.cuda.mem_get_info()
    needed = gpu_memory_utilization * total
    if needed > free:
        possible = int(free / total * 95) / 100  # rounded down, and a twentieth less
        gib = 2**30
        raise ValueError(f"the engine may use {gpu_memory_utilization:.2f} of the card = {needed / gib:.1f} "
                         f"GiB, but {free / gib:.1f} of {total / gib:.1f} GiB are free: end what else runs, "
                         f"or lower --vllm_gpu_memory_utilization to {possible:.2f}")


def checkpoint_shapes(folder):
    """Name → shape of every tensor, from the headers of model.safetensors or of the files that the index
    names."""
    files = {"model.safetensors"}
    index = Path(folder, "model.safetensors.index.json")
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    shapes = {}
    for name in files:
        with safe_open(Path(folder, name), framework="pt") as file:
            for key in file.keys():
                # Old Llama checkpoints store these angles, which follow from the config.
                if not key.endswith("rotary_emb.inv_freq"):
                    shapes[key] = tuple(file.get_slice(key).get_shape())
    return shapes


def prepare_environment():
    """Sets what vLLM reads when it is imported; the first in any case, the others unless set."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that tensors can be handed over
    # A CPU engine would warn at every sleep that it cannot sleep.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if torch.cuda.is_available() else "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks would all bind to the same cores


@contextlib.contextmanager
def random_state_kept():
    """vLLM reseeds the generators of python, numpy and torch while it is built; this restores them."""
    import numpy
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(gpus):
        yield
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)


# ---- The handoff -------------------------------------------------------------------------------------------

def check_push(pairs, expected):
    """Raises ValueError unless every expected name is there once, with its shape. vLLM does not check: a
    partial or misshapen push of a fused layer corrupts it silently."""
    count = Counter(name for name, _ in pairs)
    wrong = {
        "pushed twice": [name for name in count if count[name] > 1],
        "missing": expected.keys() - count.keys(),
        "not in the checkpoint": count.keys() - expected.keys(),
        "of another shape than in the checkpoint": [
            f"{name} {tuple(tensor.shape)} instead of {expected[name]}" for name, tensor in pairs
            if tensor.shape != expected.get(name, tensor.shape)],
    }
    for what, names in wrong.items():
        if names:
            raise ValueError(f"weights {what}: {', '.join(sorted(names)[:5])} ({len(names)} in all)")


@contextlib.contextmanager
def trainer_left_alone():
    """On its way to sleep, some versions also on waking, vLLM collects garbage and empties torch's memory
    cache; in this block neither happens. The engine's memory needs neither. The trainer would pay for both at
    every step: all its objects are walked over, and its gigabytes have to be asked for again."""
    kept = gc.collect, torch.cuda.empty_cache, torch.accelerator.empty_cache
    gc.collect = torch.cuda.empty_cache = torch.accelerator.empty_cache = lambda *a: 0
    try:
        yield
    finally:
        gc.collect, torch.cuda.empty_cache, torch.accelerator.empty_cache = kept


def bit_sum(tensors):
    """Sum of all 16-bit words, modulo 2**64. The order does not matter: a fused layer has its parts' sum."""
    total = 0
    for tensor in tensors:
        words = tensor.detach().flatten().view(torch.int16)
        # In pieces: the sum over a whole tensor would first make a copy of it in int64.
        for piece in words.split(2**24):
            total += piece.sum(dtype=torch.int64)
    return int(total)  # the one number that is asked of the GPU


def card_in_use():
    """Bytes of the GPU in use, by torch or by others, without those that torch only keeps for later."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return total - free - kept


# ---- Stop strings ------------------------------------------------------------------------------------------

def completes(tokenizer, token_ids, stop):
    """Whether the text of the last tokens contains one of the strings. Asked after every token, this becomes
    true with the token that completes one. tokenizer: has decode(ids, skip_special_tokens=...)."""
    last = token_text(tokenizer, token_ids[-1])
    # Nearly always the last token holds the end of no string. The lines below take ten times as long.
    # U+FFFD is part of a character, whose other bytes are in the tokens before.
    if "\ufffd" not in last and not any(string[-1] in last for string in stop):
        return False
    longest = max(len(string.encode(errors="replace")) for string in stop)  # bytes
    # A token is a byte or more, so that many are enough; 8 more, as a few decode to nothing by themselves.
    text = tokenizer.decode(token_ids[-longest - 8:], skip_special_tokens=False)
    return any(string in text for string in stop)


@functools.cache
def token_text(tokenizer, token):
    """The token twice, because some decoders take a space from the first."""
    return tokenizer.decode([token, token], skip_special_tokens=False)


# ---- torchrun colocate.py MODEL ----------------------------------------------------------------------------

def main():
    """Times and proves the handoff on this machine, with weights that are on no disk."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=4, help="sleeps and wakes; each with other weights")
    args = parser.parse_args()
    try:
        prove(args.model, args.rounds)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


@torch.no_grad()
def prove(folder, rounds):
    """One line a round: milliseconds of each part, log-probability gap, checksums of both sides."""
    from model import Policy  # only this demonstration needs a trainer beside the engine

    device, dtype = "cpu", torch.float32
    cuda = torch.cuda.is_available()
    if cuda:
        device, dtype = "cuda", torch.bfloat16
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    engine = ColocatedEngine(folder, dtype=dtype, max_model_len=128, max_num_seqs=16, enforce_eager=not cuda)
    policy = Policy.from_folder(folder, device, dtype)
    prompt = [token % policy.config.vocab_size for token in range(3, 40)]
    worst = 0.0
    for turn in range(rounds):
        engine.wake(policy.named_parameters())
        [group] = engine.generate(
            [prompt], n=16, max_tokens=64, temperature=1.0, seeds=[turn], eos_token_ids=[])
        engine.sleep()
        gap = logprob_gap(policy, prompt, group)
        worst = max(worst, gap.mean())
        parts = [f"{part} {seconds * 1e3:.0f}" for part, seconds in engine.times.items()]
        print(f"round {turn} on rank {dist.get_rank()}  {'  '.join(parts)} ms  gap mean {gap.mean():.1e} "
              f"max {gap.max():.1e}  checksums {engine.checksums}", flush=True)
        for parameter in policy.parameters():
            parameter *= 1 + 0.01 * torch.randn_like(parameter)
    # On a GPU bf16 leaves a gap. There another checksum would have ended the wake that saw it.
    verdict = "proven" if cuda or worst < 1e-5 else "NOT proven"
    print(f"{verdict}: the engine computes what the policy computes", flush=True)
    dist.barrier()  # closing ends the process group, which another rank may still need
    engine.close()


def logprob_gap(policy, prompt, group):
    """|policy's − sampler's| log-probability of every token of the completions of one prompt."""
    from model import token_logprobs
    gaps = []
    for token_ids, sampled in group:
        tokens = torch.tensor(prompt + token_ids, device=policy.device)
        hidden = policy.packed(tokens, [len(tokens)])
        before = hidden[len(prompt) - 1:-1]  # the state before a token predicts it
        logp, _ = token_logprobs(before, policy.head_weight, tokens[len(prompt):])
        gaps.append((logp.cpu() - torch.tensor(sampled)).abs())
    return torch.cat(gaps)


if __name__ == "__main__":
    main()
