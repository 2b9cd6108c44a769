"""The README's table of what fits where, from model.memory_plan:  python tests/plan_table.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import ModelConfig, memory_plan

SHAPES = {  # Qwen2.5: hidden, intermediate, layers, heads, kv heads, vocabulary, tied
    "0.5B": (896, 4864, 24, 14, 2, 151936, True), "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True), "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False)}
CARDS, GPUS, SEQUENCE = (24, 48, 80, 141), (1, 2, 4, 8), 2560


def shape(name: str) -> ModelConfig:
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    return ModelConfig(vocabulary, hidden, inner, layers, heads, kv_heads, hidden // heads, 1e-6,
                       tie_word_embeddings=tied, qkv_bias=True)


def largest_micro_batch(name: str, card: int, gpus: int) -> str:
    """In thousands of tokens, up to 32; r: with --recompute; a dash where nothing fits."""
    for recompute in (False, True):
        for tokens in range(32768, SEQUENCE - 1, -512):
            halves = memory_plan(
                shape(name), size=2, ranks=gpus, micro_batch=tokens, sequence=SEQUENCE, cache_tokens=64 * SEQUENCE,
                engine_limit=0.3 * card * 1e9, recompute=recompute, compiled=True)
            if max(sum(half.values()) for half in halves.values()) <= card * 1e9:
                return f"{tokens / 1024:.0f}k" + " r" * recompute
    return "–"


def table() -> str:
    lines = ["| model | GPUs | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "| --- " * (2 + len(CARDS)) + "|"]
    lines += [f"| {name} | {gpus} | " + " | ".join(largest_micro_batch(name, card, gpus) for card in CARDS) + " |"
              for name in SHAPES for gpus in GPUS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
