"""The policy: a decoder-only transformer in plain torch, read from and written to Hugging Face folders.

    policy = Policy.from_folder("Qwen2.5-1.5B", device="cuda", dtype=torch.bfloat16)
    hidden = policy.packed(tokens, lengths)                  # several sequences, one flat stream, no padding
    logp, entropy = token_logprobs(hidden, policy.head_weight, targets, temperature=1.0)
    policy.save("out", source="Qwen2.5-1.5B")                # loads in transformers and in vLLM

Llama (SmolLM2, Llama 2 and 3.x), Qwen2/Qwen2.5 and Qwen3 share one block: RMSNorm, rotary grouped-query
attention, SwiGLU. Modules carry the checkpoint's names, so `named_parameters()` is the checkpoint and needs
no mapping.

Sequences are packed: a batch is a stream of tokens [T] with the lengths of its sequences beside it. Only
attention knows where one sequence ends. It is passed in, one function `attend(q, k, v)` for each layer: so
training (`PackedAttention`) and sampling (`KVCache`) share all other code.

`write_tiny_model` makes a model to try everything on, without any download.

Left out: sliding windows, mixtures of experts, quantized weights (all refused by name); dropout (0 in all
these models); tensor parallelism (data parallel with a sharded optimizer reaches the sizes that this project
is for).
"""

import functools
import inspect
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

SUPPORTED = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "rms_norm_eps")
ROPE_KEYS = {  # what each rope type cannot do without
    "default": (), "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
WEIGHT_FILES = "model*.safetensors"
OTHER_FILES = ("*.json", "*.jinja", "merges.txt", "tokenizer.model", "LICENSE*")  # config, tokenizer and such
LOGITS_IN_FLIGHT = {"cpu": 2**27, "cuda": 2**29}  # elements of one [chunk, vocabulary] block


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


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
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None  # {"rope_type": "linear" or "llama3", "factor": …}
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads config.json as written by transformers 4 (`rope_theta`, `rope_scaling`) or 5
        (`rope_parameters`).

        Raises UserError, naming the key, for what this file does not compute.
        """
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} not found: --model takes a Hugging Face checkpoint") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path} is not valid JSON ({error}): fetch the folder again") from None
        family = model_family(path, raw)
        refuse_unsupported(path, raw)
        rope = rope_settings(path, raw)
        check_values(path, raw, rope)
        heads, bias = raw["num_attention_heads"], bool(raw.get("attention_bias", False))
        kv_heads = raw.get("num_key_value_heads") or heads
        head_dim = raw.get("head_dim") or raw["hidden_size"] / heads
        if heads % kv_heads or head_dim % 2:
            raise UserError(f"{path}: num_attention_heads {heads}, num_key_value_heads {kv_heads} and "
                            f"head_dim {head_dim} do not go together: fetch the folder again")
        return cls(
            **{key: raw[key] for key in NEEDED},
            num_key_value_heads=kv_heads,
            head_dim=int(head_dim),
            max_position_embeddings=raw.get("max_position_embeddings") or 2048,
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,  # Qwen2 always has them; its config.json does not say so
            o_bias=family != "qwen2" and bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
        )


def model_family(path: Path, raw) -> str:
    """One of the values of SUPPORTED; raises UserError for another architecture, or none."""
    names = raw.get("architectures") if isinstance(raw, dict) else None
    name = str(names[0]) if names and isinstance(names, list) else "an architecture that is not named"
    if name not in SUPPORTED:
        raise UserError(f"{path}: {name} is not supported; supported: {', '.join(SUPPORTED)}")
    return SUPPORTED[name]


def refuse_unsupported(path: Path, raw: dict) -> None:
    """Raises UserError for a config whose weights would load and then compute something else."""
    unsupported = {
        "quantization_config": raw.get("quantization_config"),
        "sliding window": raw.get("use_sliding_window") or "sliding_attention" in str(raw.get("layer_types")),
        "num_experts": raw.get("num_experts") or raw.get("num_local_experts"),
        "vision_config": raw.get("vision_config"),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
    }
    for key, found in unsupported.items():
        if found:
            raise UserError(f"{path}: {key} is not supported: use a dense bf16 or fp32 checkpoint of "
                            f"{', '.join(SUPPORTED)}")


def rope_settings(path: Path, raw: dict) -> dict:
    """What config.json says about the rotary embedding, always with a `rope_type`. Raises UserError for a
    type that is not supported or lacks a key."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path}: rope_parameters or rope_scaling is {rope!r}: fetch the folder again")
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in ROPE_KEYS:
        raise UserError(f"{path}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KEYS)}")
    if missing := [key for key in ROPE_KEYS[kind] if rope.get(key) is None]:
        raise UserError(f"{path}: rope type {kind!r} lacks {', '.join(missing)}")
    return {**rope, "rope_type": kind}


def check_values(path: Path, raw: dict, rope: dict) -> None:
    """Raises UserError for a value that is missing, of another type, or of a size that no model has."""
    if missing := [key for key in NEEDED if raw.get(key) is None]:
        raise UserError(f"{path} lacks {', '.join(missing)}")
    kinds = {**ModelConfig.__annotations__, "attention_bias": bool}
    kinds |= dict.fromkeys(ROPE_KEYS["llama3"], float)
    for key, kind in kinds.items():
        value = rope.get(key, raw.get(key))
        if value is None or kind not in (int, float, bool):
            continue
        if kind is bool:
            right = type(value) is bool
        elif kind is int:
            right = type(value) is int and 0 < value < (2**10 if key == "num_hidden_layers" else 2**24)
        else:  # NaN is not above 0 either
            right = type(value) in (int, float) and 0 < value < math.inf
        if not right:
            raise UserError(f"{path}: {key} is {str(value)[:40]}: fetch the folder again")


# ---- Rotary position embedding -----------------------------------------------------------------------------

def rope_frequencies(c: ModelConfig) -> torch.Tensor:
    """Angle per position of each pair of channels, float32 [head_dim / 2] (Su et al. 2021, eq. 15).

    `linear` divides all by the factor. `llama3` divides only the slow ones, which turn less than
    low_freq_factor times within the original context, with a ramp up to high_freq_factor (Llama 3.1 release).
    """
    inv = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.int64).float() / c.head_dim)
    if c.rope_scaling is None:
        return inv
    factor = c.rope_scaling["factor"]
    if c.rope_scaling["rope_type"] == "linear":
        return inv / factor
    low, high = c.rope_scaling["low_freq_factor"], c.rope_scaling["high_freq_factor"]
    turns = c.rope_scaling["original_max_position_embeddings"] * inv / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv / factor * (1 - keep) + inv * keep


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim]; cos, sin [T, 1, head_dim / 2]. Hugging Face checkpoints pair channel i with
    channel i + head_dim / 2, where the paper pairs neighbours."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# ---- The transformer ---------------------------------------------------------------------------------------

class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x, cos, sin, attend):  # x [T, hidden]
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim))  # [T, heads, head_dim]
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_emb(self.q_norm(q), cos, sin), apply_rotary_emb(self.k_norm(k), cos, sin)
        return self.o_proj(attend(q, k, v).flatten(-2))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)


class Policy(nn.Module):
    """A causal language model; `named_parameters()` are the tensors of its checkpoint."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.run_block = Block.forward
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocabulary, hidden]; with tied embeddings the embedding table itself."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @functools.cached_property
    def inv_freq(self) -> torch.Tensor:
        return rope_frequencies(self.config).to(self.device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attends: list[Callable],
                run_block: Callable = Block.forward) -> torch.Tensor:
        """tokens, positions int64 [T] → normed hidden states [T, hidden]; `head_weight` makes them logits.

        attends: for each layer attend(q, k, v) → [T, heads, head_dim]; q is of that shape, k and v [T,
        kv_heads, head_dim]. run_block: called in place of Block.forward, with the same arguments.
        """
        x = self.model.embed_tokens(tokens)
        angles = positions[:, None].float() * self.inv_freq.to(positions.device)
        cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))  # [T, 1, head_dim / 2]
        for block, attend in zip(self.model.layers, attends):
            x = run_block(block, x, cos, sin, attend)
        return self.model.norm(x)

    def packed(self, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """tokens [sum(lengths)], the sequences one after the other → hidden states [sum(lengths), hidden]."""
        attend = PackedAttention(lengths, tokens.device, self.dtype)
        return self(tokens, attend.positions, [attend] * len(self.model.layers), self.run_block)

    def training_mode(self, compiled: bool = False, recompute: bool = False) -> None:
        """How `packed` runs its blocks from now on.

        compiled: torch.compile fuses what lies between the matrix products; one graph serves all layers and
        lengths. recompute: the backward pass computes each block once more, so that until then only the
        blocks' inputs are kept (Chen et al. 2016, arXiv 1604.06174).
        """
        run = compile_once(Block.forward) if compiled else Block.forward
        options = dict(use_reentrant=False, preserve_rng_state=False)  # no block draws random numbers
        self.run_block = functools.partial(checkpoint, run, **options) if recompute else run

    @classmethod
    def from_folder(cls, folder: str | Path, device: torch.device | str = "cpu",
                    dtype: torch.dtype = torch.float32) -> "Policy":
        """Reads config.json and the safetensors of a Hugging Face folder, sharded or not.

        Raises UserError naming the tensor where one is missing, unknown or of another shape.
        """
        with torch.device("meta"):
            policy = cls(ModelConfig.from_folder(folder))
        parameters, loaded = dict(policy.named_parameters()), {}
        for path in safetensors_files(folder):
            with open_safetensors(path) as file:
                for name in file.keys():
                    # Some checkpoints store a tied table under both names, or the rotary frequencies.
                    tied_head = name == "lm_head.weight" and policy.config.tie_word_embeddings
                    if tied_head or name.endswith("rotary_emb.inv_freq"):
                        continue
                    tensor = read_tensor(file, path, name, parameters)
                    loaded[name] = tensor.to(device, dtype, copy=True)  # what was read is a view of the file
        if missing := parameters.keys() - loaded.keys():
            raise UserError(f"{folder} lacks {len(missing)} tensors, among them {min(missing)}")
        policy.load_state_dict(loaded, assign=True)
        return policy

    def update_flops(self, lengths: list[int]) -> int:
        """Useful operations of forward and backward over sequences of these lengths: 6 for each parameter and
        token, and attention as in appendix B of PaLM (arXiv 2204.02311), halved because it is causal."""
        c = self.config
        attention = 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * sum(n * n for n in lengths)
        return 6 * parameter_count(c) * sum(lengths) + attention

    def save(self, folder: str | Path, source: str | Path | None = None) -> None:
        """Writes model.safetensors in the working dtype; copies config, tokenizer and such from `source`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in OTHER_FILES if source else ():
            for file in Path(source).glob(pattern):
                if not file.name.endswith(".safetensors.index.json"):  # names files that are not written here
                    shutil.copyfile(file, folder / file.name)
        # Copied on a CPU too: the trainer's parameters are views of one buffer, which safetensors refuses.
        tensors = {name: p.detach().to("cpu", copy=True) for name, p in self.named_parameters()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ---- Attention over packed sequences -----------------------------------------------------------------------

class PackedAttention:
    """Causal attention inside each sequence of a flat stream: an attend(q, k, v) for Policy.forward.

    Half precision on CUDA goes through FlashAttention with cumulative lengths. Elsewhere the stream is laid
    out as [sequences, longest]. The padding stands on the right, where the causal mask hides it from every
    real query.
    """

    def __init__(self, lengths: list[int], device: torch.device | str, dtype: torch.dtype):
        self.max_seqlen, counts = max(lengths), torch.tensor(lengths)
        ends = counts.cumsum(0)
        starts = torch.repeat_interleave(ends - counts, counts)  # [T] where the token's sequence begins
        column = torch.arange(sum(lengths)) - starts
        self.positions = upload(column, device)  # [T] place of each token inside its own sequence
        half = torch.device(device).type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self.flash = flash_attention() if half else None
        if self.flash:
            self.cu_seqlens = upload(F.pad(ends, (1, 0)).to(torch.int32), device)  # [sequences + 1]
        else:
            self.shape = (len(lengths), self.max_seqlen)
            row = torch.repeat_interleave(torch.arange(len(lengths)), counts)
            self.place = (row * self.max_seqlen + column).to(device)  # [T] → place in [sequences · longest]

    def __call__(self, q, k, v) -> torch.Tensor:
        if self.flash:
            return self.flash(q, k, v, self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
        q, k, v = (self.pad(x) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[self.place]

    def pad(self, x):  # [T, heads, head_dim] → [sequences, heads, longest, head_dim]
        flat = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:]).index_copy(0, self.place, x)
        return flat.unflatten(0, self.shape).transpose(1, 2)


@functools.cache
def flash_attention() -> Callable:
    """torch's packed FlashAttention, made causal."""
    from torch.nn.attention.varlen import varlen_attn
    options = {"window_size": (-1, 0)}  # all tokens to the left, none to the right
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 does this without being asked
        options["enable_gqa"] = True
    return functools.partial(varlen_attn, **options)


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copies to the device; to a GPU from pinned memory, as an ordinary copy waits until the GPU is idle."""
    on_gpu = torch.device(device).type == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor.to(device)


# ---- Log-probabilities without [tokens, vocabulary] --------------------------------------------------------

def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
                   temperature: float = 1.0, chunk: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and that distribution's entropy.

    hidden [T, hidden] predicts targets int64 [T]; weight [vocabulary, hidden]. Returns two [T] in nats, fp32
    or wider; only the first has a gradient. Logits exist for at most chunk × vocabulary at a time (default
    LOGITS_IN_FLIGHT), on a CPU with four more blocks of that size for what is computed from them.
    """
    chunk = chunk or max(1, LOGITS_IN_FLIGHT[hidden.device.type] // weight.shape[0])
    return ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk)


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(h Wᵀ / temperature)[target] and the entropy, a chunk of rows at a time.

    The forward pass keeps one number a row, the log-sum-exp; with it the backward pass computes the softmax
    of each chunk again. The gradient of W is summed over the chunks in fp32 or wider. The entropy is a metric
    and has no gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk):
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        outputs = torch.empty(3, len(targets), dtype=accumulate, device=hidden.device)
        for s in range(0, len(targets), chunk):
            rows = slice(s, s + chunk)
            logits = F.linear(hidden[rows], weight)  # [chunk, vocabulary]
            parts = fused(chunk_logprobs, logits)(logits, targets[rows], temperature)
            for whole, part in zip(outputs, parts):
                whole[rows] = part
        logp, entropy, lse = outputs
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, _):
        hidden, weight, targets, lse = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=lse.dtype)
        for s in range(0, len(targets), ctx.chunk):
            rows = slice(s, s + ctx.chunk)
            logits = F.linear(hidden[rows], weight)
            grad = fused(chunk_gradient, logits)(logits, targets[rows], lse[rows], grad_logp[rows],
                                                 ctx.temperature)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def chunk_logprobs(logits, targets, temperature: float):
    """logits [rows, vocabulary] → log-probability of the targets, entropy, log-sum-exp; each [rows]."""
    z = scaled(logits, temperature)
    lse = z.logsumexp(-1)
    every = z - lse[:, None]
    return every.gather(-1, targets[:, None]).squeeze(-1), -(every.exp() * every).sum(-1), lse


def chunk_gradient(logits, targets, lse, grad_logp, temperature: float):
    """d loss / d logits: with z = logits / temperature, d logp[target] / dz = onehot(target) − softmax(z)."""
    p = (scaled(logits, temperature) - lse[:, None]).exp()
    onehot = targets[:, None] == torch.arange(logits.shape[-1], device=logits.device)
    return ((onehot.to(p.dtype) - p) * (grad_logp / temperature)[:, None]).to(logits.dtype)


def scaled(logits, temperature: float):
    """In fp32 or wider; the matrix product before was in the working dtype, as it is in vLLM."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def fused(function: Callable, tensor: torch.Tensor) -> Callable:
    """On a GPU the function as one or two kernels, which read the bf16 logits and store no fp32 copy."""
    return compile_once(function) if tensor.is_cuda else function


@functools.cache
def compile_once(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


# ---- Sampling without an inference engine ------------------------------------------------------------------

class PolicySampler:
    """The policy generates for itself, without vLLM; the interface is that of colocate.py's engine.

    completes(token ids, stop): whether the last of the ids completes one of the strings `stop`.
    """

    given_back = 0  # bytes of the GPU, by sleep()

    def __init__(self, policy: Policy, completes: Callable | None = None):
        self.policy, self.completes, self.weight_version = policy, completes, None

    def wake(self, named_weights, version: int) -> None:
        self.weight_version = version

    def generate(self, prompts: list[list[int]], *, n: int, max_tokens: int, temperature: float,
                 seeds: list[int], eos_token_ids: list[int], stop=()) -> list[list[tuple[list, list]]]:
        """n completions for each prompt, as `sample` returns them; number i draws with seeds[prompt] + i."""
        ends = (lambda ids: self.completes(ids, stop)) if stop else None
        requests = [(prompt, seed + i) for prompt, seed in zip(prompts, seeds) for i in range(n)]
        drawn = []
        for start in range(0, len(requests), 256):  # bounds the KV cache
            some_prompts, some_seeds = zip(*requests[start:start + 256])
            drawn += sample(self.policy, some_prompts, max_tokens, temperature, some_seeds, eos_token_ids,
                            ends)
        return [drawn[i:i + n] for i in range(0, len(drawn), n)]

    def sleep(self) -> None:
        """There is no memory to give back."""

    close = sleep


@torch.no_grad()
def sample(policy: Policy, prompts: Sequence[list[int]], max_tokens: int, temperature: float,
           seeds: Sequence[int], eos_token_ids: list[int],
           ends: Callable | None = None) -> list[tuple[list[int], list[float]]]:
    """One completion for each prompt: (token ids, log-probability of each). Temperature 0 is greedy.

    A completion ends with the EOS it emitted, or where ends(its token ids) is true, or after max_tokens. What
    a sequence draws depends on its own seed alone, not on its neighbours: its seed gives a number u in [0, 1)
    for each step, which is looked up in the cumulative distribution.
    """
    device = policy.device
    uniform = [torch.rand(max_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
               for seed in seeds]
    uniform = torch.stack(uniform).to(device)  # [batch, max_tokens]
    eos = torch.tensor(eos_token_ids, device=device)
    cache = KVCache(policy, [len(prompt) for prompt in prompts], max_tokens)
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    hidden = policy(tokens, cache.packed.positions, cache.attends(cache.prefill))
    hidden = hidden[cache.used.cumsum(0) - 1]  # [batch, hidden] at the last token of each prompt
    ids, logps = [], []  # of each step, [batch]
    count = torch.zeros_like(cache.used)  # tokens of each completion
    done = torch.zeros_like(count, dtype=torch.bool)
    for t in range(max_tokens):
        logp = scaled(F.linear(hidden, policy.head_weight), temperature or 1.0).log_softmax(-1)
        token = draw(logp, uniform[:, t]) if temperature > 0 else logp.argmax(-1)
        ids.append(token)
        logps.append(logp.gather(-1, token[:, None]).squeeze(-1))
        count += ~done
        done = done | torch.isin(token, eos)
        if ends:
            so_far = torch.stack(ids, 1).tolist()
            done = done | torch.tensor([ends(row) for row in so_far], device=device)
        if t + 1 == max_tokens or bool(done.all()):
            break
        hidden = policy(token, cache.used, cache.attends(cache.step))
        cache.used = cache.used + 1
    rows = zip(torch.stack(ids, 1).tolist(), torch.stack(logps, 1).tolist(), count.tolist())
    return [(row[:n], row_logps[:n]) for row, row_logps, n in rows]


def draw(logp: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: logp [batch, vocabulary], uniform float64 [batch] → token ids [batch]."""
    cumulative = logp.double().exp().cumsum(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]  # whose last value is 1 only up to rounding
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=logp.shape[-1] - 1)


class KVCache:
    """Keys and values, [layers, batch, length, kv_heads, head_dim], filled from the left."""

    def __init__(self, policy: Policy, lengths: list[int], max_tokens: int):
        c, device, room = policy.config, policy.device, max(lengths) + max_tokens
        shape = (c.num_hidden_layers, len(lengths), room, c.num_key_value_heads, c.head_dim)
        self.k, self.v = torch.zeros(2, *shape, dtype=policy.dtype, device=device)
        self.packed = PackedAttention(lengths, device, policy.dtype)
        self.used = torch.tensor(lengths, device=device)  # [batch] tokens in the cache
        self.rows = torch.arange(len(lengths), device=device)
        self.prompt_rows = self.rows.repeat_interleave(self.used)  # [tokens of all prompts]

    def attends(self, method: Callable) -> list[Callable]:
        """What Policy.forward takes; method: self.prefill or self.step."""
        return [functools.partial(method, layer) for layer in range(len(self.k))]

    def prefill(self, layer: int, q, k, v) -> torch.Tensor:
        """attend() over whole prompts, packed."""
        self.k[layer, self.prompt_rows, self.packed.positions] = k
        self.v[layer, self.prompt_rows, self.packed.positions] = v
        return self.packed(q, k, v)

    def step(self, layer: int, q, k, v) -> torch.Tensor:
        """attend() for one new token a sequence, q [batch, heads, head_dim], at position `used`."""
        self.k[layer, self.rows, self.used] = k
        self.v[layer, self.rows, self.used] = v
        seen = torch.arange(self.k.shape[2], device=q.device) <= self.used[:, None]  # [batch, length]
        out = F.scaled_dot_product_attention(
            q[:, :, None], self.k[layer].transpose(1, 2), self.v[layer].transpose(1, 2),
            attn_mask=seen[:, None, None], enable_gqa=True)
        return out.squeeze(2)


# ---- Checkpoint folders ------------------------------------------------------------------------------------

def checkpoint_folder(name: str) -> Path:
    """The folder of that name, or else the model of that Hugging Face hub id, of which it fetches only the
    files needed. Raises UserError where there is neither."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise UserError(f"--model {name}: no such folder, and no hub id of the form organisation/model")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=(WEIGHT_FILES, *OTHER_FILES)))
    except Exception as error:  # no network, no such model, a gate: the library's errors share no base class
        why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:220]
        raise UserError(f"--model {name}: no such folder, and fetching it from the hub failed ({why}). Where "
                        f"there is network: hf download {name} --local-dir DIR; then --model DIR") from None


def safetensors_files(folder: str | Path) -> list[Path]:
    """The weight files of a Hugging Face folder: those that the index names, or model.safetensors. Raises
    UserError where the index is damaged or a file is not there."""
    folder, index = Path(folder), Path(folder) / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    try:
        if index.exists():
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        missing = [file for file in files if not file.exists()]  # OSError where a name is too long for a file
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{index} is damaged ({error}): fetch the folder again") from None
    if missing:
        hint = " (convert the .bin weights to safetensors)" if list(folder.glob("*.bin")) else ""
        raise UserError(f"{missing[0]} not found{hint}")
    return files


def open_safetensors(path: Path) -> safe_open:
    """Raises UserError where the file is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from None


def read_tensor(file, path: Path, name: str, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """Reads one tensor; raises UserError where no parameter has its name and shape, or it is quantized."""
    if name not in parameters:
        raise UserError(f"{path}: tensor {name} has no place in this architecture")
    shape, expected = tuple(file.get_slice(name).get_shape()), tuple(parameters[name].shape)
    if shape != expected:
        raise UserError(f"{path}: tensor {name} has shape {shape}, config.json says {expected}")
    tensor = file.get_tensor(name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise UserError(f"{path}: tensor {name} is {tensor.dtype}: quantized checkpoints are not supported")
    return tensor


# ---- What a step costs, and how it is divided --------------------------------------------------------------

def memory_plan(c: ModelConfig, *, size: int, ranks: int, micro_batch: int, sequence: int, cache_tokens: int,
                engine_limit: float, recompute: bool, compiled: bool, shared: bool = True) -> dict:
    """Bytes on each GPU in the two halves of a step: {"training": {what: bytes}, "generating": {…}}.

    size: bytes of a working weight. ranks: over how many the optimizer is cut. micro_batch: tokens of one
    forward and backward pass. sequence: tokens of the longest sequence. cache_tokens: how many the engine
    would like to hold at once; its weights and KV cache stay below engine_limit bytes, but it always gets
    room for one sequence. shared: False for an engine that has a GPU for itself.
    """
    n = parameter_count(c)
    # What the backward pass of a block needs, in elements a token: its input, both norms, the sum between;
    # queries, keys, values and the output of attention; gate, up and their product (and silu, unless fused).
    heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads
    block = 4 * c.hidden_size + heads * c.head_dim + (3 if compiled else 4) * c.intermediate_size
    kept = c.num_hidden_layers * c.hidden_size + block if recompute else c.num_hidden_layers * block
    logits = min(LOGITS_IN_FLIGHT["cuda"], micro_batch * c.vocab_size)
    wanted = min(kv_cache_bytes(c, cache_tokens, size), engine_limit - size * n)
    graphs = {"CUDA and graphs": 2.5 * 2**30}
    trainer = {"weights": size * n, "optimizer": 12 * n / ranks, **graphs}
    return {
        "training": {**trainer, "gradients": 4 * n,
                     "activations": size * micro_batch * (kept + 6 * c.hidden_size),
                     # A chunk and its gradient; the gradient of the table, in fp32 and as it is returned.
                     "logits": 2 * size * logits + (4 + size) * c.vocab_size * c.hidden_size},
        "generating": {**(trainer if shared else graphs), "engine weights": size * n,
                       "KV cache": max(kv_cache_bytes(c, max(4096, sequence + 32), size), wanted)}}


def kv_cache_bytes(c: ModelConfig, tokens: int, size: int) -> int:
    """Keys and values of that many tokens; size: bytes of an element."""
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size * tokens


def parameter_count(c: ModelConfig) -> int:
    """Parameters of a Policy; a tied table counts once."""
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention = c.hidden_size * (2 * queries + 2 * keys)
    attention += c.qkv_bias * (queries + 2 * keys) + c.o_bias * c.hidden_size + c.qk_norm * 2 * c.head_dim
    mlp = 3 * c.hidden_size * c.intermediate_size + c.mlp_bias * (2 * c.intermediate_size + c.hidden_size)
    tables = (2 - c.tie_word_embeddings) * c.vocab_size * c.hidden_size
    return tables + c.num_hidden_layers * (attention + mlp + 2 * c.hidden_size) + c.hidden_size


def balance(costs: list[float], ranks: int) -> list[list[int]]:
    """Indices for each rank, the largest first to the rank with the least so far. Same on every rank."""
    parts, load = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = load.index(min(load))
        parts[rank].append(i)
        load[rank] += costs[i]
    return parts


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices for each micro-batch, first fit, longest first. A sequence over the budget travels alone."""
    bins, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((b for b, free in enumerate(room) if lengths[i] <= free), None)
        if fit is None:
            bins.append([i])
            room.append(budget - lengths[i])
        else:
            bins[fit].append(i)
            room[fit] -= lengths[i]
    return bins


# ---- The built-in tiny model -------------------------------------------------------------------------------

TINY_CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", vocab_size=14, hidden_size=128,
    intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True,
    torch_dtype="float32", bos_token_id=None, eos_token_id=12, pad_token_id=13)
WARM_START = dict(steps=120, wrong=0.4, learning_rate=1e-3)


def write_tiny_model(folder: Path, tokenizer, seed: int) -> None:
    """Writes a 2-layer Llama that has seen single-digit sums, 40 % of them wrong: mostly it adds wrong.

    From random weights no completion would ever be right, and a group without a difference teaches nothing.
    tokenizer: with encode(text) → one id for each of 0123456789+=, and eos_token_ids = [12].
    """
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG, indent=2))
    policy, rng = Policy(ModelConfig.from_folder(folder)), random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02, generator=generator)
    adam = torch.optim.AdamW(policy.parameters(), lr=WARM_START["learning_rate"], weight_decay=0.0)
    for _ in range(WARM_START["steps"]):
        examples = [tokenizer.encode(digit_sum(rng)) + tokenizer.eos_token_ids for _ in range(64)]
        lengths = [len(ids) for ids in examples]
        tokens = torch.tensor([token for ids in examples for token in ids])
        answer = torch.cat([torch.arange(n) for n in lengths]) >= len("7+5=")
        hidden = policy.packed(tokens, lengths)[answer.roll(-1)]  # the state before a token predicts it
        loss = -token_logprobs(hidden, policy.head_weight, tokens[answer])[0].mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    policy.save(folder)


def digit_sum(rng: random.Random) -> str:
    """As "7+5=12", or with a random result."""
    a, b = rng.randrange(10), rng.randrange(10)
    result = rng.randrange(19) if rng.random() < WARM_START["wrong"] else a + b
    return f"{a}+{b}={result}"
