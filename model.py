"""The policy: a decoder-only transformer in plain torch, read from and written to Hugging Face folders.

    import torch
    from model import Policy, token_logprobs

    policy = Policy.from_folder("model")  # device="cuda", dtype=torch.bfloat16 on a GPU
    tokens = torch.tensor([5, 6, 7, 8, 9])  # two sequences in one stream, without padding
    hidden = policy.packed(tokens, lengths=[2, 3])  # [5, hidden]
    before = torch.tensor([0, 2, 3])  # the state before a token predicts it: 5 → 6, and 7 → 8 → 9
    logp, entropy = token_logprobs(hidden[before], policy.head_weight, tokens[before + 1])
    logp.sum().backward()
    policy.save("out", source="model")  # loads in transformers and in vLLM
    assert torch.equal(Policy.from_folder("out").head_weight, policy.head_weight)

Llama (SmolLM2, Llama 2 and 3.x), Qwen2/Qwen2.5 and Qwen3 share one block: RMSNorm, rotary grouped-query
attention, SwiGLU. Modules carry the checkpoint's names, so `named_parameters()` is the checkpoint and needs
no mapping.

Sequences are packed: a batch is one stream of tokens [T], with the lengths of its sequences beside it. Only
attention knows where one sequence ends, and it is an argument of the forward pass. So training
(`PackedAttention`) and sampling with a KV cache (engines.py) share all other code.

Left out: sliding windows, mixtures of experts, quantized weights (all refused by name); dropout (0 in all
these models); tensor parallelism (data parallel with a sharded optimizer reaches the sizes that this project
is for).
"""

import contextlib
import functools
import inspect
import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

LOGITS_IN_FLIGHT = {"cpu": 2**27, "cuda": 2**29}  # elements of one [chunk, vocabulary] block


@dataclass(frozen=True)
class ModelConfig:
    """Those values of a Hugging Face config.json that decide what is computed."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    # {"rope_type": "linear" or "llama3", "factor": …}. Left out of the hash, since a dict has none.
    rope_scaling: dict | None = field(default=None, hash=False)
    tie_word_embeddings: bool = False  # the embedding table is the output head as well
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_folder(cls, folder):
        """Reads config.json; raises ValueError that names it, and the key, for what is not computed here."""
        path = Path(folder, "config.json")
        with naming(path):
            return read_config(json.loads(path.read_bytes()))


# ---- The transformer ---------------------------------------------------------------------------------------

class Attention(nn.Module):
    """Grouped-query attention: several query heads share one head of keys and values.

    Which tokens see which is decided by attend(q, k, v): q and its result are [T, heads, head_dim], k and v
    [T, kv_heads, head_dim].
    """

    def __init__(self, c):
        super().__init__()
        self.heads = (-1, c.head_dim)
        queries = c.num_attention_heads * c.head_dim
        keys = c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, queries, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, keys, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, keys, bias=c.qkv_bias)
        self.o_proj = nn.Linear(queries, c.hidden_size, bias=c.o_bias)
        norm = nn.RMSNorm if c.qk_norm else nn.Identity  # which takes any arguments, and does nothing
        self.q_norm = norm(c.head_dim, c.rms_norm_eps)
        self.k_norm = norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x, cos, sin, attend):  # x [T, hidden]
        q = self.q_proj(x).unflatten(-1, self.heads)  # [T, heads, head_dim]
        k = self.k_proj(x).unflatten(-1, self.heads)  # [T, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, self.heads)
        q = apply_rotary_emb(self.q_norm(q), cos, sin)
        k = apply_rotary_emb(self.k_norm(k), cos, sin)
        out = attend(q, k, v)  # [T, heads, head_dim]
        return self.o_proj(out.flatten(-2))


def apply_rotary_emb(x, cos, sin):
    """x [T, heads, head_dim]; cos, sin [T, 1, head_dim / 2]. Hugging Face checkpoints pair channel i with
    channel i + head_dim / 2, where the paper pairs neighbours."""
    a, b = x.chunk(2, -1)
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    return torch.cat((rotated_a, rotated_b), -1)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x):
        gate = F.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, attend):  # x [T, hidden]; cos, sin [T, 1, head_dim / 2]
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Policy(nn.Module):
    """A causal language model; `named_parameters()` are the tensors of its checkpoint."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.hidden_size),
            layers=nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            norm=nn.RMSNorm(config.hidden_size, config.rms_norm_eps),
        ))
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.prepare_blocks()

    @property
    def head_weight(self):
        """[vocabulary, hidden]; with tied embeddings the embedding table itself."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.weight

    @property
    def device(self):
        return self.model.norm.weight.device

    @property
    def dtype(self):
        return self.model.norm.weight.dtype

    def forward(
        self,
        tokens,  # int64 [T]
        positions,  # int64 [T], of each token in its own sequence
        attends,  # the attend(q, k, v) of each layer: a KV cache differs from layer to layer
        run_block=Block.forward,  # or a compiled or recomputing version of it
    ):
        """Returns the normed hidden states [T, hidden]; `head_weight` makes them logits."""
        x = self.model.embed_tokens(tokens)
        angles = positions[:, None, None].float() * rope_frequencies(self.config, x.device)
        cos = angles.cos().to(x.dtype)  # [T, 1, head_dim / 2]
        sin = angles.sin().to(x.dtype)
        for block, attend in zip(self.model.layers, attends):
            x = run_block(block, x, cos, sin, attend)
        return self.model.norm(x)

    def packed(self, tokens, lengths):
        """tokens [sum(lengths)], the sequences one after the other → hidden states [sum(lengths), hidden]."""
        attend = PackedAttention(lengths, tokens.device, self.dtype)
        attends = [attend] * len(self.model.layers)
        return self(tokens, attend.positions, attends, self.run_block)

    def prepare_blocks(self, compiled=False, recompute=False):
        """How `packed` runs its blocks from now on.

        compiled: torch.compile fuses what lies between the matrix products; one graph serves all layers and
        lengths. recompute: the backward pass computes each block once more, so that until then only the
        blocks' inputs are kept (Chen et al. 2016, arXiv 1604.06174).
        """
        run = compile_once(Block.forward) if compiled else Block.forward
        if recompute:  # no block draws random numbers, whose state would have to be restored
            run = functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        self.run_block = run

    def update_flops(self, lengths):
        """Useful operations of forward and backward over sequences of these lengths: 6 for each parameter and
        token, and attention as in appendix B of PaLM (arXiv 2204.02311), halved because it is causal."""
        c = self.config
        pairs = sum(n * n for n in lengths)
        attention = 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * pairs
        return 6 * parameter_count(c) * sum(lengths) + attention

    @classmethod
    def from_folder(cls, folder, device="cpu", dtype=torch.float32):
        """Reads config.json and the safetensors of a Hugging Face folder, in one file or in several.

        Raises ValueError naming file and tensor where one is missing, unknown, quantized or of another shape.
        """
        folder = Path(folder)
        with torch.device("meta"):  # takes no memory, whatever config.json says
            policy = cls(ModelConfig.from_folder(folder))
        shapes = {name: tuple(p.shape) for name, p in policy.named_parameters()}
        loaded = {}
        for path in safetensors_files(folder):
            with naming(path):
                for name, tensor in load_file(path).items():  # views of the file, therefore copied
                    # Some checkpoints store a tied table under both names, or the rotary frequencies.
                    tied_head = name == "lm_head.weight" and policy.config.tie_word_embeddings
                    if tied_head or name.endswith("rotary_emb.inv_freq"):
                        continue
                    check_tensor(name, tensor, shapes)
                    loaded[name] = tensor.to(device, dtype, copy=True)
        missing = shapes.keys() - loaded.keys()
        if missing:
            raise ValueError(f"{folder} lacks {len(missing)} tensors, among them {min(missing)}")
        policy.load_state_dict(loaded, assign=True)
        return policy

    def save(self, folder, source=None):
        """Writes model.safetensors in the working dtype; copies config, tokenizer and such from `source`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if source:
            copy_other_files(Path(source), folder)
        # Copied on a CPU too: the trainer's parameters are views of one buffer, which safetensors refuses.
        tensors = {name: p.detach().to("cpu", copy=True) for name, p in self.named_parameters()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@functools.cache
def rope_frequencies(c, device):
    """Angle per position of each pair of channels, float32 [head_dim / 2] (Su et al. 2021, eq. 15).

    `linear` divides all by the factor. `llama3` divides only the slow ones, which turn less than
    low_freq_factor times within the original context, with a ramp up to high_freq_factor (Llama 3.1 release).
    """
    exponents = torch.arange(0, c.head_dim, 2).float() / c.head_dim
    frequencies = 1.0 / c.rope_theta**exponents
    scaling = c.rope_scaling or {"rope_type": "linear", "factor": 1.0}  # which changes nothing
    slower = frequencies / scaling["factor"]
    keep = 0.0
    if scaling["rope_type"] == "llama3":
        low = scaling["low_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        ramp = (turns - low) / (scaling["high_freq_factor"] - low)
        keep = ramp.clamp(0, 1)  # 1: fast enough to stay as it is
    mixed = slower * (1 - keep) + frequencies * keep
    return mixed.to(device)


@functools.cache
def compile_once(function):
    return torch.compile(function, dynamic=True)


# ---- Attention over packed sequences -----------------------------------------------------------------------

class PackedAttention:
    """Causal attention inside each sequence of a flat stream: an attend(q, k, v) for Policy.forward.

    lengths: tokens of each sequence. dtype: of the queries, keys and values.

    Half precision on CUDA goes through FlashAttention with cumulative lengths. Elsewhere the stream is laid
    out as [sequences, longest]. The padding stands on the right, where the causal mask hides it from every
    real query.
    """

    def __init__(self, lengths, device, dtype):
        self.shape = (len(lengths), max(lengths))  # (sequences, longest)
        counts = torch.tensor(lengths)
        row = torch.repeat_interleave(counts)  # [T] which sequence: lengths [2, 3] → 0, 0, 1, 1, 1
        column = torch.cat([torch.arange(n) for n in lengths])  # [T] which place in it: 0, 1, 0, 1, 2
        self.row = upload(row, device)
        self.positions = upload(column, device)
        self.flash = None
        if dtype.itemsize == 2 and torch.device(device).type == "cuda":
            self.flash = flash_attention()
            cu_seqlens = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)  # [sequences + 1] where each begins
            self.cu_seqlens = upload(cu_seqlens, device)

    def __call__(self, q, k, v):
        if self.flash:
            longest = self.shape[1]
            return self.flash(q, k, v, self.cu_seqlens, self.cu_seqlens, longest, longest)
        out = F.scaled_dot_product_attention(
            self.pad(q), self.pad(k), self.pad(v), is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)[self.row, self.positions]

    def pad(self, x):  # [T, heads, head_dim] → [sequences, heads, longest, head_dim]
        zeros = x.new_zeros(*self.shape, *x.shape[1:])
        padded = zeros.index_put((self.row, self.positions), x)
        return padded.transpose(1, 2)


@functools.cache
def flash_attention():
    """torch's packed FlashAttention, made causal."""
    from torch.nn.attention.varlen import varlen_attn
    options = {"window_size": (-1, 0)}  # all tokens to the left, none to the right
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 does this without being asked
        options["enable_gqa"] = True
    return functools.partial(varlen_attn, **options)


def upload(tensor, device):
    """Copies to the device; to a GPU from pinned memory, as an ordinary copy waits until the GPU is idle."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# ---- Log-probabilities without [tokens, vocabulary] --------------------------------------------------------

def token_logprobs(
    hidden,  # [T, hidden], the state before each target
    weight,  # [vocabulary, hidden]
    targets,  # int64 [T]
    temperature=1.0,
    chunk=None,  # rows for which logits exist at a time
):
    """Log-probability of each target under softmax(logits / temperature), and that distribution's entropy.

    Both [T], in nats, fp32 or wider; only the first has a gradient. By default a chunk has LOGITS_IN_FLIGHT
    logits. On a CPU four more blocks of that size hold what is computed from them.
    """
    if chunk is None:
        chunk = max(1, LOGITS_IN_FLIGHT[hidden.device.type] // weight.shape[0])
    return ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk)


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(h Wᵀ / temperature)[target] and the entropy, a chunk of rows at a time.

    The forward pass keeps one number a row, the log-sum-exp; with it the backward pass computes the softmax
    of each chunk again. The gradient of W is summed over the chunks in fp32 or wider. The entropy is a metric
    and has no gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        outputs = hidden.new_empty(3, len(targets), dtype=wide)
        logp, entropy, lse = outputs
        compute = fused(chunk_logprobs, hidden)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = F.linear(hidden[rows], weight)  # [chunk, vocabulary]
            logp[rows], entropy[rows], lse[rows] = compute(logits, targets[rows], temperature)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, _):
        hidden, weight, targets, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype)
        compute = fused(chunk_gradient, hidden)
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = F.linear(hidden[rows], weight)
            grad = compute(logits, targets[rows], lse[rows], grad_logp[rows], ctx.temperature)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def chunk_logprobs(logits, targets, temperature):
    """logits [rows, vocabulary] → log-probability of the targets, entropy, log-sum-exp; each [rows]."""
    z = scaled_logits(logits, temperature)
    lse = z.logsumexp(-1)
    logp = z - lse[:, None]
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
    return chosen, entropy, lse


def chunk_gradient(logits, targets, lse, grad_logp, temperature):
    """d loss / d logits: with z = logits / temperature, d logp[target] / dz = onehot(target) − softmax(z)."""
    z = scaled_logits(logits, temperature)
    softmax = (z - lse[:, None]).exp()
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    onehot = (targets[:, None] == vocabulary).to(softmax.dtype)
    upstream = grad_logp / temperature  # [rows]
    grad = (onehot - softmax) * upstream[:, None]
    return grad.to(logits.dtype)


def scaled_logits(logits, temperature):
    """In fp32 or wider; the matrix product before was in the working dtype, as it is in vLLM."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide) / temperature


def fused(function, tensor):
    """On a GPU the function as one or two kernels, which read the bf16 logits and store no fp32 copy."""
    return compile_once(function) if tensor.is_cuda else function


# ---- Hugging Face folders ----------------------------------------------------------------------------------

WEIGHT_FILES = "model*.safetensors"
OTHER_FILES = ("*.json", "*.jinja", "merges.txt", "tokenizer.model", "LICENSE*")  # config, tokenizer and such
SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KEYS = {  # what each type of rotary embedding cannot do without
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def checkpoint_folder(name):
    """The folder of that name, or else the model of that Hugging Face hub id, of which it fetches only the
    files needed. Raises ValueError where there is neither."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=(WEIGHT_FILES, *OTHER_FILES)))
    except Exception as error:  # no network, no such model, a gate: the library's errors share no base class
        raise ValueError(f"{name}: no such folder, and fetching it from the hub failed ({error!r}). Where "
                         f"there is network: hf download {name} --local-dir DIR; then --model DIR") from error


@contextlib.contextmanager
def naming(path):
    """Whatever fails inside becomes a ValueError that names the file: the libraries that read it do not."""
    try:
        yield
    except Exception as error:
        plain = isinstance(error, (OSError, ValueError))
        words = error if plain else repr(error)  # KeyError("vocab_size") says nothing without its type
        raise ValueError(f"{path}: {words}") from error


def read_config(raw):
    """The contents of a config.json as a ModelConfig.

    Raises ValueError, KeyError or TypeError, naming the key, for what would load and then compute something
    else.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # written by transformers 5, or 4
    rope_type = rope
    if isinstance(rope, dict):
        rope_type = rope.get("rope_type", rope.get("type", "default"))
    refuse_unsupported(raw, str(rope_type))
    # transformers 5 writes rope_theta into rope_parameters. null stands for the default.
    given = {key: value for key, value in {**raw, **rope}.items() if value is not None}
    for key, kind in {**ModelConfig.__annotations__, "attention_bias": bool}.items():
        if key in given and kind in (int, float, bool):
            check_value(key, given[key], kind)
    for key in ROPE_KEYS[rope_type]:
        check_value(f"rope {key}", given.get(key), float)
    heads = given["num_attention_heads"]
    kv_heads = given.setdefault("num_key_value_heads", heads)
    head_dim = given.get("head_dim", given["hidden_size"] / heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"num_attention_heads {heads}, num_key_value_heads {kv_heads} and head_dim "
                         f"{head_dim} do not go together")
    bias = given.get("attention_bias", False)
    [family] = given["architectures"]
    given |= {
        "head_dim": int(head_dim),
        "rope_scaling": None if rope_type == "default" else {**rope, "rope_type": rope_type},
        "qkv_bias": bias or family == "Qwen2ForCausalLM",  # Qwen2 always has them, and does not say so
        "o_bias": bias and family != "Qwen2ForCausalLM",
        "qk_norm": family == "Qwen3ForCausalLM",
    }
    return ModelConfig(**{key: given[key] for key in ModelConfig.__annotations__ if key in given})


def refuse_unsupported(raw, rope_type):
    """Raises ValueError for a model whose weights would load, and would then compute something else."""
    architectures = raw.get("architectures")
    activation = raw.get("hidden_act", "silu")
    layer_types = str(raw.get("layer_types"))
    unsupported = {
        f"architectures {architectures}": architectures not in [[name] for name in SUPPORTED],
        f"rope_parameters or rope_scaling of type {rope_type}": rope_type not in ROPE_KEYS,
        f"hidden_act {activation}": activation != "silu",
        "sliding window": raw.get("use_sliding_window") or "sliding_attention" in layer_types,
        "num_experts": raw.get("num_experts") or raw.get("num_local_experts"),
        "quantization_config": raw.get("quantization_config"),
        "vision_config": raw.get("vision_config"),
    }
    for what, found in unsupported.items():
        if found:
            raise ValueError(f"{what} is not supported: use a dense bf16 or fp32 checkpoint of "
                             f"{', '.join(SUPPORTED)}")


def check_value(key, value, kind):
    """Raises ValueError for a value of another type, or for a number that no model has.

    Python takes true for 1 and "no" for true, and would not come to an end with 10**15 layers.
    """
    if kind is bool:
        right = type(value) is bool
    elif kind is int:
        limit = 2**10 if key == "num_hidden_layers" else 2**24
        right = type(value) is int and 0 < value < limit
    else:
        right = type(value) in (int, float) and 0 < value < math.inf  # false for NaN as well
    if not right:
        raise ValueError(f"{key} is {value!r:.40}, which no model has")


def safetensors_files(folder):
    """The weight files of a Hugging Face folder: those that the index names, or model.safetensors."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        with naming(index):
            names = json.loads(index.read_bytes())["weight_map"].values()
            files = {folder / name for name in names}
            for file in files:
                file.stat()  # fails where it is missing
            return sorted(files)
    if not single.exists():
        raise ValueError(f"{single} not found (convert the .bin weights of an older model to safetensors)")
    return [single]


def check_tensor(name, tensor, shapes):
    """Raises ValueError where no parameter has this name and shape, or where the tensor is quantized."""
    shape = tuple(tensor.shape)
    expected = shapes.get(name, "no such tensor")
    if shape != expected:
        raise ValueError(f"tensor {name} has shape {shape}; by config.json: {expected}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"tensor {name} is {tensor.dtype}: quantized checkpoints are not supported")


def copy_other_files(source, folder):
    """Copies everything but the weights of a Hugging Face folder."""
    for pattern in OTHER_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".safetensors.index.json"):  # names files that are not written here
                shutil.copyfile(file, folder / file.name)


# ---- What a step costs -------------------------------------------------------------------------------------

def memory_plan(
    c,
    *,
    size,  # bytes of a working weight
    ranks,  # over which the optimizer is cut
    micro_batch,  # tokens of one forward and backward pass
    sequence,  # tokens of the longest sequence
    cache_tokens,  # how many the engine would like to hold at once
    engine_limit,  # bytes that the engine's weights and KV cache stay below
    recompute,
    compiled,
    shared=True,  # False for an engine that has a GPU for itself
):
    """Bytes on each GPU in the two halves of a step: {"training": {what: bytes}, "generating": {…}}.

    The engine always gets room for one sequence, even where that is more than engine_limit.
    """
    n = parameter_count(c)
    # What the backward pass of a block needs, in elements a token: its input, both norms, the sum between;
    # queries, keys, values and the output of attention; gate, up and their product (and silu, unless fused).
    heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads
    inner = 3 if compiled else 4
    block = 4 * c.hidden_size + heads * c.head_dim + inner * c.intermediate_size
    blocks = c.num_hidden_layers * block
    if recompute:  # the input of each, and one block at a time
        blocks = c.num_hidden_layers * c.hidden_size + block
    around = 6 * c.hidden_size  # before the first block and after the last
    logits = min(LOGITS_IN_FLIGHT["cuda"], micro_batch * c.vocab_size)

    weights = size * n
    graphs = {"CUDA and graphs": 2.5 * 2**30}
    trainer = {"weights": weights, "optimizer": 12 * n / ranks, **graphs}
    training = {
        **trainer,
        "gradients": 4 * n,
        "activations": size * micro_batch * (blocks + around),
        # A chunk and its gradient; the gradient of the table, in fp32 and as it is returned.
        "logits": 2 * size * logits + (4 + size) * c.vocab_size * c.hidden_size,
    }
    cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size  # keys and values of a token
    needed = cached * max(4096, sequence + 32)
    generating = {
        **(trainer if shared else graphs),
        "engine weights": weights,
        "KV cache": max(needed, min(cached * cache_tokens, engine_limit - weights)),
    }
    return {"training": training, "generating": generating}


@functools.cache
def parameter_count(c):
    """Parameters of a Policy; a tied table counts once."""
    with torch.device("meta"):  # takes no memory
        return sum(p.numel() for p in Policy(c).parameters())
