"""Each module copied alone into an empty folder and used by a short program, as a person who came for it would."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_checkpoint, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]

PROGRAMS = {
    "rewards.py": """
from rewards import Group, Scorer
with Scorer(["math"], timeout=5) as scorer:
    [scores] = scorer.score([Group("1/4 + 1/4?", ["It is 1/2", "It is 3"], [[1], [2]], {"answer": "0.5"})])
print(scores.rewards == [1.0, 0.0])
""",
    "data.py": """
from data import Tokenizer, load_prompts, prompt_indices
tokenizer = Tokenizer("model")
prompts = load_prompts("sums", tokenizer, max_prompt_length=100)
first = prompts.train[prompt_indices(step=0, prompts_per_step=4, size=len(prompts.train), seed=0)[0]]
print(tokenizer.decode(first.token_ids).endswith("assistant\\n"), first.columns["answer"].isdigit())
""",
    "model.py": """
import torch
from model import Policy, sample, token_logprobs
policy = Policy.from_folder("model")
tokens = torch.tensor([5, 6, 7, 8, 9])
logp, entropy = token_logprobs(policy.packed(tokens, [2, 3]), policy.head_weight, tokens.roll(-1))
logp.sum().backward()
policy.save("out", source="model")
print(logp.shape == (5,), len(sample(policy, [[5, 6]], 3, 1.0, [0], [1])) == 1)
""",
    "checkpoint.py": """
import json
from dataclasses import dataclass
from types import SimpleNamespace as Bag
from checkpoint import Run
@dataclass
class Options:
    model: str = "model"; data: tuple = ("sums",); out: str = "run"; fresh: bool = False
    report_to: tuple = (); save_rollouts: int = 2; save_total_limit: int = 1; learning_rate: float = 0.1
optimizer = Bag(weights=Bag(nbytes=2), master=Bag(nbytes=4), save=lambda folder: (folder / "shard").write_text("s"))
policy = Bag(save=lambda folder, source: (folder / "model").write_text("w"))
one = lambda: Run(Options(), Bag(rank=0, size=1, gather=lambda value: [value]))
run = one()
run.begin()
for step in range(5):
    run.keep_rollouts(step, [Bag(slot=0, reward=step)])
    run.write_rollouts()
    run.record({"step": step, "reward": step})
    if step == 2:
        run.save(policy, optimizer, "model", 3, note="as it was")
run.lock.close()
again = one()
again.begin()
rows = [json.loads(line) for line in open("run/metrics.jsonl")]
print(again.state == {"step": 3, "note": "as it was"}, [row["step"] for row in rows] == [0, 1, 2])
print((again.latest / "model").read_text() == "w", (again.latest / "optimizer/shard").read_text() == "s")
""",
    "sharded.py": """
import torch
from types import SimpleNamespace as Bag
from sharded import ShardedAdamW, World
model, x = torch.nn.Linear(4, 1), torch.ones(8, 4)
options = Bag(learning_rate=0.1, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
              max_grad_norm=1.0, optimizer_offload=False)
optimizer, losses = ShardedAdamW(model, options, World()), []
for step in range(20):
    optimizer.begin()
    for part in x.split(4):
        loss = (model(part) - 3).square().mean()
        loss.backward()
    optimizer.step(0.1)
    losses.append(loss.item())
print(losses[-1] < losses[0] / 10, optimizer.weights.numel() % 64 == 0)
""",
    "colocate.py": """
import torch
from safetensors.torch import load_file
from colocate import ColocatedEngine
torch.distributed.init_process_group("gloo")
engine = ColocatedEngine("model", dtype=torch.float32, max_model_len=64, max_num_seqs=4, enforce_eager=True)
engine.wake(load_file("model/model.safetensors").items())
[[(ids, logps), _]] = engine.generate([[5, 6, 7]], n=2, max_tokens=4, temperature=1.0, seeds=[0], eos_token_ids=[1])
engine.sleep()
print(len(ids) == len(logps), 1 <= len(ids) <= 4)
engine.close()
""",
}


@pytest.mark.parametrize("module", PROGRAMS)
def test_module_alone(tmp_path, module):
    shutil.copy(ROOT / module, tmp_path)
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", "qwen2-untied", vocab_size=320)
    write_tokenizer(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAMS[module])
    launcher = TORCHRUN if module == "colocate.py" else []
    done = subprocess.run([sys.executable, *launcher, "program.py"], capture_output=True, text=True, cwd=tmp_path,
                          timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.split()
    assert "True" in said and "False" not in said
