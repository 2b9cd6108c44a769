"""Small random checkpoints of every supported family, written by transformers, which is the oracle in these tests."""

import json

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SMALL = dict(vocab_size=160, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=512, rms_norm_eps=1e-5,
             bos_token_id=None, eos_token_id=1, pad_token_id=None)
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-biases": ("Llama", dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "llama3-rope": ("Llama", dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)),
    "llama-linear-rope": ("Llama", dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-untied": ("Qwen2", dict(tie_word_embeddings=False)),
    "qwen3-tied": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen3-untied": ("Qwen3", dict(tie_word_embeddings=False)),
}


def write_checkpoint(folder, family: str, scale: float = 6.0, **changes):
    """Random weights in fp32; returns the transformers model. Biases and norms are random too, not 0 and 1."""
    name, options = FAMILIES[family]
    options = {**SMALL, **options, **changes}
    if name == "Qwen2":
        options.pop("head_dim")
        options["num_attention_heads"] = 2  # head_dim follows from the width: 64, which vLLM on a CPU can do
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**options)
    model = getattr(transformers, name + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(scale)  # the default init is so flat that a wrong rotation would hardly show
    model.save_pretrained(folder)
    return model


TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write_tokenizer(folder, eos_token_id=1):
    """A byte-level tokenizer of 259 tokens with a chat template; goes with vocab_size 259 or more."""
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    vocab = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
