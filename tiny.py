"""The built-in demonstration: two tasks of addition, and a model that learns one on a CPU in two minutes.

    python minigrpo.py            # write_tiny_model, then GRPO on rows("digits")

`digits` is for the tiny model, whose tokenizer knows 14 tokens; `sums` is for models that speak English. From
random weights no completion would ever be right, and a group without a difference teaches nothing. So the
tiny model first sees sums in the ordinary, supervised way, 40 % of them wrong: it then mostly adds wrong, but
sometimes right, and that is what GRPO needs to begin with.
"""

import itertools
import json
import random

import tokenizers
import torch

from data import Tokenizer
from model import ModelConfig, Policy, token_logprobs

TASKS = {"digits": 100, "sums": 512}  # how many prompts of each are held out for evaluation

TINY_CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    vocab_size=14,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=True,
    torch_dtype="float32",
    bos_token_id=None,
    eos_token_id=12,
    pad_token_id=13,
)
WARM_START = dict(steps=120, wrong=0.4, learning_rate=1e-3)


def rows(task):
    """All prompts of a task, with their answers; the first TASKS[task] are held out."""
    if task == "digits":
        pairs = itertools.product(range(10), repeat=2)
        return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    return [{"question": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}
            for a, b in pairs]


def write_tiny_model(folder, seed):
    """Writes a 2-layer Llama with its tokenizer, after WARM_START["steps"] supervised steps on sums."""
    write_digits_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG, indent=2))
    tokenizer = Tokenizer(folder)
    policy = Policy(ModelConfig.from_folder(folder))
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters():
        if p.ndim > 1:  # the vectors belong to norms, which begin as ones
            torch.nn.init.normal_(p, std=0.02, generator=generator)
    rng = random.Random(seed)
    adam = torch.optim.Adam(policy.parameters(), lr=WARM_START["learning_rate"])
    for _ in range(WARM_START["steps"]):
        examples = [tokenizer.encode(digit_sum(rng)) + tokenizer.eos_token_ids for _ in range(64)]
        lengths = list(map(len, examples))
        tokens = torch.tensor(sum(examples, []))  # [T]
        place = torch.cat([torch.arange(n) for n in lengths])
        answer = place >= len("7+5=")  # [T]: only the result is learned
        hidden = policy.packed(tokens, lengths)
        before = hidden[answer.roll(-1)]  # the state before a token predicts it
        logp, _ = token_logprobs(before, policy.head_weight, tokens[answer])
        loss = -logp.mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    policy.save(folder)


def digit_sum(rng):
    """As "7+5=12", or with a random result."""
    a = rng.randrange(10)
    b = rng.randrange(10)
    result = a + b
    if rng.random() < WARM_START["wrong"]:
        result = rng.randrange(19)
    return f"{a}+{b}={result}"


def write_digits_tokenizer(folder):
    """Writes the tokenizer of the tiny model: "0".."9", "+", "=", <eos>, <pad>; all else is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {name: i for i, name in enumerate("0123456789+=")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()  # the default puts spaces between tokens
    tokenizer.add_special_tokens(["<eos>", "<pad>"])  # 12 and 13
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
