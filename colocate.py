"""A vLLM engine inside the training process, on the same GPU: it sleeps while the policy trains and wakes to
generate.

    engine = ColocatedEngine("Qwen2.5-1.5B", dtype=torch.bfloat16, max_model_len=2560, max_num_seqs=64)
    engine.wake(policy.named_parameters())             # memory back, every weight pushed, caches reset
    samples = engine.generate(prompts, n=16, max_tokens=2048, temperature=1.0, seeds=seeds, eos_token_ids=[2])
    engine.sleep()                                     # weights and KV cache discarded; train here

Every rank of a torchrun job builds one, all at the same time (building is collective over the default process
group). `torchrun --nproc_per_node=1 colocate.py MODEL` times the handoff on this machine and proves it (it
needs model.py beside it).

The engine reads no weights from disk: it starts with dummy ones, refuses to generate until it has been given
all of them, and forgets them at `sleep()`. So nothing can be sampled from stale or base weights.

The layout that colocation replaces is here too, for comparison: one rank `serve`s an engine, and the others
train and see it as a `RemoteEngine` with the same methods.

Left out: tensor-parallel engines, LoRA, quantized engines, several nodes for one engine.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import pickle
import random
import signal
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

VLLM_TESTED, VLLM_FIRST, VLLM_LAST = ("0.26.0", "0.32.0"), (0, 26), (0, 33)
# Everything that could change the distribution is said, so that no default of vLLM's decides it.
PLAIN_SAMPLING = dict(
    top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
    min_tokens=0, ignore_eos=False, detokenize=False, logprobs=0)  # logprobs=0: of the sampled token alone


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


class ColocatedEngine:
    """One vLLM engine of this rank.

    folder: a Hugging Face checkpoint; its config and its tensors' names and shapes are read, not its weights.
    dtype: of the pushed weights, torch.bfloat16 or torch.float32.
    max_model_len: tokens of prompt and completion together. max_num_seqs: completions generated at once, at
    most 1,024 of them; the others wait in vLLM's queue.
    gpu_memory_utilization: share of the whole card that the awake engine may use (weights, activations, KV
    cache). kv_cache_bytes: size of the KV cache, in place of what that share would leave for it; more than
    the batch needs only makes sleeping and waking slower. (On a CPU VLLM_CPU_KVCACHE_SPACE, in GiB, decides.)
    enforce_eager: no CUDA graphs: starts sooner, decodes slower. sleeps: False for an engine that has the GPU
    for itself and keeps its memory.

    Raises UserError for what can be fixed before an engine starts: vLLM missing or of an unsupported version,
    torchrun's variables missing, `expandable_segments`, no checkpoint in the folder, too little free memory.
    """

    def __init__(self, folder: str | Path, *, dtype: torch.dtype, max_model_len: int, max_num_seqs: int,
                 gpu_memory_utilization: float = 0.3, kv_cache_bytes: int | None = None,
                 enforce_eager: bool = False, sleeps: bool = True):
        self.cuda = torch.cuda.is_available()
        self.sleeps = sleeps and self.cuda
        check_vllm()
        check_environment(self.cuda)
        self.tied = read_config(folder).get("tie_word_embeddings", False)
        self.folder, self.expected = Path(folder), checkpoint_shapes(folder)
        self.max_model_len, max_num_seqs = max_model_len, min(max_num_seqs, 1024)
        if self.cuda:
            check_free_memory(gpu_memory_utilization)
        most = min(max_num_seqs, 512)
        graph_sizes = sorted({1, 2, 4, *range(8, most + 1, 8), most})  # of the batches that get a CUDA graph
        prepare_environment()
        with random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # importing vLLM touches deprecated names of torch
            import vllm
            from vllm.v1.engine import EngineCoreRequest
            self.vllm, self.request = vllm, EngineCoreRequest
            self.llm = vllm.LLM(
                model=str(folder), dtype=str(dtype).removeprefix("torch."), load_format="dummy",
                distributed_executor_backend="external_launcher", enable_sleep_mode=self.sleeps,
                max_model_len=max_model_len, max_num_seqs=max_num_seqs, enforce_eager=enforce_eager,
                gpu_memory_utilization=gpu_memory_utilization, kv_cache_memory_bytes=kv_cache_bytes,
                compilation_config={} if enforce_eager else {"cudagraph_capture_sizes": graph_sizes},
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",  # log softmax(logits / T), from which it samples
                generation_config="vllm",  # the model's own may hide a top_p or a penalty
                skip_tokenizer_init=True, seed=0, disable_log_stats=True)
        self.core = self.llm.llm_engine.engine_core
        # Names of requests, never used twice: vLLM schedules a step ahead, so one more step is in flight when
        # generate returns, and its tokens would go to a later request with the same name.
        self.names = itertools.count()
        self.given_back = 0  # bytes of the GPU, by the last sleep
        self.awake = False
        self.weight_version = None
        self.checksums = None  # (of the pushed weights, of the engine's) at the last push; CUDA only
        self.times: dict[str, float] = {}  # seconds of the last wake, push, kv and sleep
        self.sleep()

    def wake(self, named_weights: Iterable[tuple[str, torch.Tensor]], version: int = 0) -> None:
        """Takes the GPU memory back and copies every weight of the checkpoint, by name, into the engine.

        named_weights: each parameter of the checkpoint exactly once, in the engine's dtype, on its device.
        version: kept as `weight_version`, so that a sample can say which update's weights it came from.
        Raises ValueError naming a missing, unknown, doubled or misshapen tensor before any is written, and
        RuntimeError where, after the push, the engine's weights are not bit for bit those pushed (CUDA only).
        """
        pairs = [(name, tensor.detach()) for name, tensor in named_weights]
        check_push(pairs, self.expected, self.tied)
        if self.tied and not self.cuda:
            # The CPU engine keeps a repacked copy of the table for its head; CUDA shares one tensor.
            pairs.append(("lm_head.weight", dict(pairs)["model.embed_tokens.weight"]))
        if self.sleeps and torch.cuda.mem_get_info()[0] < self.given_back + 2**30:
            torch.cuda.empty_cache()  # what torch keeps for the trainer's next use, the engine cannot have
        self.awake = False  # until all of these weights are in, also where the last ones still are
        with self.timed("wake"), trainer_left_alone():
            if self.sleeps:
                self.llm.wake_up(tags=["weights"])
        with self.timed("push"):
            self.push(pairs)
        with self.timed("kv"), trainer_left_alone():
            if self.sleeps:
                self.llm.wake_up(tags=["kv_cache"])
        if not self.llm.reset_prefix_cache():  # cached keys and values belong to the previous weights
            raise RuntimeError("vLLM refused to reset its prefix cache: a request is still running")
        if self.cuda:
            self.compare_checksums(pairs)
        self.weight_version, self.awake = version, True

    def push(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        if self.cuda:  # into the live model, which takes milliseconds
            self.llm.apply_model(lambda model: model.load_weights(iter(pairs)))
        else:  # a CPU engine has repacked its linear layers, and only a reload (of these pairs) does so again
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(pairs)})

    def compare_checksums(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        """Raises RuntimeError where the engine's weights are not bit for bit those pushed."""
        pushed, held = bit_sum(tensor for _, tensor in pairs), self.llm.apply_model(engine_bit_sum)[0]
        self.checksums = pushed, held
        if pushed != held:
            raise RuntimeError(f"handoff broken: the pushed weights sum to {pushed}, the engine's to {held}")

    def generate(self, prompts: list[list[int]], *, n: int, max_tokens: int, temperature: float,
                 seeds: list[int], eos_token_ids: list[int],
                 stop: Sequence[str] = ()) -> list[list[tuple[list[int], list[float]]]]:
        """n completions for each prompt of token ids: (token ids, log-probability of each under the sampler).

        A completion ends with the EOS it emitted, or with the token that completes one of the strings `stop`
        in its text; without either it was cut at max_tokens, or where it and its prompt reach max_model_len.
        Temperature 0 is greedy. Completion i of a prompt draws with seeds[prompt] + i. Raises RuntimeError
        while the engine is asleep, and ValueError for what vLLM would change or break at.
        """
        if not self.awake:
            raise RuntimeError("the engine is asleep and has no weights: call wake(named_weights) first")
        if 0 < temperature < 0.01:
            raise ValueError(f"temperature {temperature}: use 0 or at least 0.01 (vLLM would take 0.01)")
        if not all(0 < len(prompt) < self.max_model_len for prompt in prompts):
            raise ValueError(f"prompts must have 1 to {self.max_model_len - 1} tokens (max_model_len - 1)")
        samples = {}  # request → (token ids, log-probabilities), in the order of the prompts
        for prompt, seed in zip(prompts, seeds, strict=True):
            for i in range(n):
                parameters = self.vllm.SamplingParams(
                    n=1, max_tokens=max_tokens, temperature=temperature, seed=seed + i,
                    stop_token_ids=eos_token_ids, **PLAIN_SAMPLING)
                name = str(next(self.names))
                samples[name] = [], []
                self.core.add_request(self.request(
                    request_id=name, prompt_token_ids=list(prompt), sampling_params=parameters,
                    mm_features=None, pooling_params=None, arrival_time=time.time(), lora_request=None,
                    cache_salt=None, data_parallel_rank=None))
        self.decode(samples, stop)
        flat = list(samples.values())
        return [flat[i:i + n] for i in range(0, len(flat), n)]

    def decode(self, samples: dict[str, tuple[list, list]], stop: Sequence[str]) -> None:
        """Steps the engine until every request is finished, adding tokens and log-probabilities to `samples`.

        A decode step of a small model is bound by the CPU. So this is vLLM's loop without its output
        processor, which builds texts, containers and statistics that nobody reads: 2.8 ms a step instead of
        3.2. It would also look for stop strings; `completes` does that here.
        """
        unfinished = len(samples)
        gc.disable()  # a collection walks over every object of the trainer; a step leaves no cycles
        try:
            while unfinished:
                for output in self.core.get_output().outputs:
                    ids, logps = samples[output.request_id]
                    if output.new_token_ids:
                        [token], reported = output.new_token_ids, output.new_logprobs
                        # Nothing else would show that a log-probability is of another token.
                        if reported.logprob_token_ids.item(0) != token:
                            raise RuntimeError("vLLM reported the log-probability of another token")
                        ids.append(token)
                        logps.append(reported.logprobs.item(0))
                    finished = output.finish_reason is not None
                    if stop and ids and not finished and completes(self.tokenizer, ids, stop):
                        self.core.abort_requests([output.request_id])
                        finished = True
                    unfinished -= finished
        except BaseException:
            self.core.abort_requests(list(samples))  # or the next call would meet their tokens
            raise
        finally:
            gc.enable()

    @functools.cached_property
    def tokenizer(self):
        """The folder's, which only stop strings need."""
        import tokenizers
        return tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def sleep(self) -> None:
        """Discards weights and KV cache. An engine that keeps its memory refuses to generate all the same."""
        self.awake = False
        with self.timed("sleep"):
            if self.sleeps:
                free = torch.cuda.mem_get_info()[0]
                with trainer_left_alone():
                    self.llm.sleep(level=2)
                self.given_back = torch.cuda.mem_get_info()[0] - free

    def close(self) -> None:
        """Ends the engine and, as vLLM does, the default process group. Only ever the last call."""
        self.awake = False
        self.core.shutdown()

    @contextlib.contextmanager
    def timed(self, part: str):
        """Writes the seconds that the block takes, on the GPU too, into `times`."""
        start = time.perf_counter()
        yield
        if self.cuda:
            torch.cuda.synchronize()
        self.times[part] = time.perf_counter() - start


def completes(tokenizer, ids: list[int], stop: Sequence[str]) -> bool:
    """Whether the text of the last tokens contains one of the strings. Asked after every token, this becomes
    true with the token that completes one. tokenizer: has decode(ids, skip_special_tokens=…)."""
    last = token_text(tokenizer, ids[-1])
    if "\ufffd" not in last and not any(string[-1] in last for string in stop):
        return False  # as nearly always: the next lines take ten times as long
    longest = max(len(string.encode(errors="replace")) for string in stop)  # bytes
    # A token is a byte or more, so that many are enough; 8 more, as a few decode to nothing by themselves.
    text = tokenizer.decode(ids[-longest - 8:], skip_special_tokens=False)
    return any(string in text for string in stop)


@functools.cache
def token_text(tokenizer, token: int) -> str:
    """Twice, because some decoders take a space from the first; half a character reads as U+FFFD."""
    return tokenizer.decode([token, token], skip_special_tokens=False)


# ---- What a push must be -----------------------------------------------------------------------------------

def read_config(folder: str | Path) -> dict:
    """config.json; raises UserError where there is none."""
    try:
        return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no Hugging Face checkpoint: no config.json ({error})") from None


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor, from the headers of model.safetensors or of the files that the index
    names. Raises UserError where they cannot be read."""
    index, files, shapes = Path(folder) / "model.safetensors.index.json", {"model.safetensors"}, {}
    try:
        if index.exists():
            files = set(json.loads(index.read_text())["weight_map"].values())
        for name in sorted(files):
            with safe_open(Path(folder) / name, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{folder} holds no model.safetensors that can be read ({error}): fetch the model "
                        "again") from None
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


def check_push(pairs: list[tuple[str, torch.Tensor]], expected: dict[str, tuple], tied: bool) -> None:
    """Raises ValueError unless every expected name is there once, with its shape. vLLM does not check: a
    partial or misshapen push of a fused layer corrupts it silently."""
    if tied:  # one tensor, which some checkpoints store under both names
        expected = {name: shape for name, shape in expected.items() if name != "lm_head.weight"}
    times = Counter(name for name, _ in pairs)
    for what, wrong in (("pushed twice", {name for name in times if times[name] > 1}),
                        ("missing", expected.keys() - times.keys()),
                        ("not in the checkpoint", times.keys() - expected.keys())):
        if wrong:
            raise ValueError(f"weights {what}: {', '.join(sorted(wrong)[:5])} ({len(wrong)} in all)")
    for name, tensor in pairs:
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}, not {expected[name]}")


def bit_sum(tensors: Iterable[torch.Tensor]) -> int:
    """Sum of all bit patterns, modulo 2**64. The order does not matter, so fused layers have the same sum."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = (t.detach().view(as_int[t.element_size()]).flatten() for t in tensors)
    # In pieces: the sum over a whole tensor would first make a copy of it in int64.
    parts = [piece.sum(dtype=torch.int64) for t in flat for piece in t.split(2**24)]
    return int(torch.stack(parts).sum())


def engine_bit_sum(model: torch.nn.Module) -> int:
    """bit_sum of the engine's parameters; tied tables, which share one storage, count once."""
    return bit_sum({p.data_ptr(): p for p in model.parameters()}.values())


# ---- What vLLM needs around it -----------------------------------------------------------------------------

def check_vllm() -> None:
    """Raises UserError where vLLM is missing or of an unsupported version; warns of one not tried."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            break
    else:
        raise UserError("vLLM is not installed: pip install -r requirements.txt (with an NVIDIA GPU) or "
                        "requirements-cpu.txt, or leave --colocate and --split away")
    release = tuple(int(part) for part in version.split(".")[:2])
    if not VLLM_FIRST <= release <= VLLM_LAST:
        raise UserError(f"vLLM {version} is not supported: install one of 0.26 to 0.33, best "
                        f"{VLLM_TESTED[0]} (GPU) or vllm-cpu {VLLM_TESTED[1]}")
    if version.split("+")[0] not in VLLM_TESTED and os.environ.get("RANK", "0") == "0":
        print(f"warning: vLLM {version} was not tried, {' and '.join(VLLM_TESTED)} were", file=sys.stderr)


def check_environment(cuda: bool) -> None:
    """Raises UserError where torchrun's variables are missing or the allocator setting forbids sleeping."""
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise UserError(f"{', '.join(missing)} not set: start it with torchrun --nproc_per_node=N")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if cuda and "expandable_segments:true" in os.environ.get(name, "").lower():
            raise UserError(f"{name} sets expandable_segments, with which vLLM cannot sleep: unset it")


def check_free_memory(gpu_memory_utilization: float) -> None:
    """Raises UserError where less of the card is free than the engine may use."""
    free, total = torch.cuda.mem_get_info()
    needed = gpu_memory_utilization * total
    if needed > free:
        raise UserError(f"the engine may use {gpu_memory_utilization:.2f} of the card = {needed / 2**30:.1f} "
                        f"GiB, but {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free: end what else "
                        f"runs, or lower --vllm_gpu_memory_utilization to {int(free / total * 95) / 100:.2f}")


def prepare_environment() -> None:
    """vLLM reads these variables when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that tensors can be handed over
    # A CPU engine would warn at every sleep that it cannot sleep.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if torch.cuda.is_available() else "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks would all bind to the same cores


@contextlib.contextmanager
def random_state_kept():
    """vLLM reseeds the generators of python, numpy and torch while it is built; this restores them."""
    import numpy
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


@contextlib.contextmanager
def trainer_left_alone():
    """On its way to sleep, some versions also on waking, vLLM collects garbage and empties torch's memory
    cache. The engine's memory needs neither; the trainer would pay for both at every step: all its objects
    are walked over, and its gigabytes have to be asked for again."""
    kept = gc.collect, torch.cuda.empty_cache, torch.accelerator.empty_cache
    gc.collect = torch.cuda.empty_cache = torch.accelerator.empty_cache = lambda *a: 0
    try:
        yield
    finally:
        gc.collect, torch.cuda.empty_cache, torch.accelerator.empty_cache = kept


# ---- One engine for all, on a rank of its own --------------------------------------------------------------

class Link:
    """Joins the first trainer and the rank that generates: objects travel over gloo, weights over NCCL.

    store: one that both see. end: 0 on the trainer's side, 1 on the other. The default process group has no
    part in this, because building a vLLM engine is collective over it.
    """

    def __init__(self, store: dist.Store, end: int, device: torch.device):
        self.end, self.device = end, device
        patience = datetime.timedelta(days=7)  # when the other process ends, so does any wait for it
        self.objects = dist.ProcessGroupGloo(dist.PrefixStore("objects", store), end, 2, patience)
        self.weights = self.objects
        if device.type == "cuda":
            self.weights = dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), end, 2, patience)

    def send(self, value: object) -> None:
        """Any object that can be pickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            self.objects.send([tensor], 1 - self.end, 0).wait()

    def receive(self) -> object:
        """What the other end sends next; RuntimeError when that process has ended."""
        size = torch.zeros(1, dtype=torch.int64)
        self.objects.recv([size], 1 - self.end, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self.objects.recv([data], 1 - self.end, 0).wait()
        return pickle.loads(data.numpy())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Called on both ends: fills the tensor on the generating rank with the trainer's."""
        self.weights.broadcast([tensor.detach()], dist.BroadcastOptions()).wait()


class RemoteEngine:
    """The engine of the generating rank, as the trainers see it. All of them call every method together.

    link: to that rank; None on all trainers but the first. arguments: those of ColocatedEngine.
    """

    given_back = 0

    def __init__(self, link: Link | None, arguments: dict):
        self.link, self.weight_version = link, None
        if link:
            self.ask("build", arguments)

    def ask(self, what: str, *details) -> object:
        """Has `serve` do something on the generating rank, waits, and returns its answer."""
        self.link.send((what, *details))
        return self.link.receive()

    def wake(self, named_weights: Iterable[tuple[str, torch.Tensor]], version: int = 0) -> None:
        """As ColocatedEngine.wake. All trainers hold the same weights; the first one sends its own."""
        if self.link:
            tensors = dict(named_weights)
            self.link.send(("wake", [(k, tuple(t.shape), t.dtype) for k, t in tensors.items()], version))
            for tensor in tensors.values():
                self.link.broadcast(tensor)
            self.link.receive()  # it has them
        self.weight_version = version

    def generate(self, prompts: list[list[int]], *, seeds: list[int], **arguments) -> list:
        """As ColocatedEngine.generate. Every trainer brings its own prompts; the engine sees one batch."""
        shares, answers, mine = [None] * dist.get_world_size(), None, [None]
        dist.all_gather_object(shares, (prompts, seeds))
        if self.link:
            arguments["prompts"] = [prompt for share, _ in shares for prompt in share]
            arguments["seeds"] = [seed for _, share in shares for seed in share]
            flat = iter(self.ask("generate", arguments))
            answers = [[next(flat) for _ in share] for share, _ in shares]
        dist.scatter_object_list(mine, answers, src=0)
        return mine[0]

    def sleep(self) -> None:
        """The engine keeps its memory: the GPU is its own."""

    def close(self) -> None:
        if self.link:
            self.link.send(("close",))


def serve(link: Link) -> None:
    """The life of the generating rank: does what the first trainer's RemoteEngine asks, until it closes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the trainers finish their step, and then close this engine
    become_a_job_of_one_rank()
    engine = None
    while True:
        try:
            message = link.receive()
        except RuntimeError:
            if engine is None:  # the trainers ended before they wanted one
                return
            print("error: the trainers ended without a word", file=sys.stderr, flush=True)
            os._exit(1)  # an ordinary exit would abort in one of vLLM's threads
        match message:
            case "build", arguments:
                engine = ColocatedEngine(**arguments)
                link.send("built")
            case "wake", descriptions, version:
                engine.wake(received(link, descriptions), version)
                link.send("awake")
            case "generate", arguments:
                link.send(engine.generate(**arguments))
            case ("close",):
                return engine.close()


def received(link: Link, descriptions: list[tuple]) -> list[tuple[str, torch.Tensor]]:
    """The weights that a trainer broadcasts, by name. Nobody keeps them: beside them stand the engine's."""
    pairs = [(name, torch.empty(shape, dtype=dtype, device=link.device))
             for name, shape, dtype in descriptions]
    for _, tensor in pairs:
        link.broadcast(tensor)
    return pairs


def become_a_job_of_one_rank() -> None:
    """Building an engine waits for every rank that these variables count, but the trainers build none."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # finds a free port
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(s.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


# ---- torchrun colocate.py MODEL ----------------------------------------------------------------------------

def main() -> None:
    """Times and proves the handoff on this machine, with weights that are on no disk: changed by 1 %."""
    parser = argparse.ArgumentParser(description="Times and proves the handoff: torchrun colocate.py MODEL")
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=4, help="sleeps and wakes; each with other weights")
    parser.add_argument("--sequences", type=int, default=16, help="completions that each round generates")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.3)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    args = parser.parse_args()
    try:
        check_environment(torch.cuda.is_available())
        prove(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def prove(args: argparse.Namespace) -> None:
    """One line a round: milliseconds of each part, log-probability gap, memory of the card, checksum."""
    from model import Policy  # only this demonstration needs a trainer beside the engine
    cuda, rank = torch.cuda.is_available(), int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    dtype = getattr(torch, args.dtype)
    policy, before = Policy.from_folder(args.model, device, dtype), card_in_use() / 2**30
    engine = ColocatedEngine(args.model, dtype=dtype, max_model_len=256, max_num_seqs=args.sequences,
                             gpu_memory_utilization=args.gpu_memory_utilization, enforce_eager=not cuda)
    say = print if rank == 0 else lambda *a: None
    say(f"{args.model}: {sum(p.nbytes for p in policy.parameters()) / 1e9:.2f} GB of {args.dtype} in "
        f"{len(list(policy.parameters()))} tensors on each of {os.environ['WORLD_SIZE']} ranks")
    prompt, largest = [t % policy.config.vocab_size for t in range(3, 40)], 0.0
    for turn in range(args.rounds):
        asleep = card_in_use() / 2**30
        engine.wake(policy.named_parameters())
        [group] = engine.generate([prompt], n=args.sequences, max_tokens=64, temperature=1.0, seeds=[turn],
                                  eos_token_ids=[])
        awake = card_in_use() / 2**30
        gap = logprob_gap(policy, prompt, group)
        largest = max(largest, gap.mean().item())
        engine.sleep()
        parts = [f"{name} {engine.times[name] * 1e3:.0f}" for name in ("wake", "push", "kv", "sleep")]
        line = f"round {turn}  {'  '.join(parts)} ms  gap mean {gap.mean():.1e} max {gap.max():.1e}"
        memory = f"  memory before {before:.1f}, asleep {asleep:.1f}, awake {awake:.1f} GiB"
        say(f"{line}{memory}  checksum {engine.checksums[0]} on both sides" if cuda else line)
        with torch.no_grad():
            for p in policy.parameters():
                p.mul_(1 + 0.01 * torch.randn_like(p))
    if cuda:  # another sum would have ended the first wake that saw it
        say("proven: after every push the engine's weights were those pushed, bit for bit")
    elif args.dtype == "float32":
        say(f"{'proven' if largest < 1e-5 else 'NOT proven'}: the engine computes what the policy computes")
    dist.barrier()
    engine.close()


def logprob_gap(policy, prompt: list[int], group: list[tuple[list[int], list[float]]]) -> torch.Tensor:
    """|policy's − sampler's| log-probability of every token of the completions of one prompt."""
    from model import token_logprobs
    lengths = [len(prompt) + len(ids) for ids, _ in group]
    stream = torch.tensor([t for ids, _ in group for t in prompt + ids], device=policy.device)
    with torch.no_grad():
        ours, _ = token_logprobs(policy.packed(stream, lengths), policy.head_weight, stream.roll(-1))
    ours = torch.cat([part[len(prompt) - 1:-1] for part in ours.cpu().split(lengths)])
    return (ours - torch.tensor([logp for _, logps in group for logp in logps])).abs()


def card_in_use() -> int:
    """Bytes of the GPU in use, by torch or by others, without those that torch only keeps for later."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - (torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


if __name__ == "__main__":
    main()
