"""SHA-256 of what six runs end in, on one and two CPU ranks: for a change that must not change a bit.

    python tests/bits.py FOLDER > before.txt        # before the change, and again after it; then diff

Weights, rows of metrics.jsonl without times and memory, and rollouts. The digests differ between machines.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
USUAL = "--max_steps 20 --eval_steps 5 --save_steps 7 "
RUNS = {
    "bare": "--max_steps 20",
    "two mini-batches, two iterations, KL": USUAL + "--num_minibatches 2 --num_iterations 2 --beta 0.05",
    "cispo": USUAL + "--loss_type cispo --epsilon_high 5 --num_minibatches 2",
    "sequence ratios, delta, masked": USUAL + "--importance_sampling_level sequence --loss_type grpo --delta 2 "
    "--mask_truncated_completions --max_completion_length 2 --num_minibatches 2",
    "dynamic sampling": USUAL + "--dynamic_sampling_rounds 2 --eval_num_generations 4 --eval_temperature 1 "
    "--reward gsm8k overlong --reward_weights 1 0.5 --micro_batch_tokens 100",
    "killed and resumed": USUAL + "--lr_scheduler_type cosine --warmup_steps 3 --weight_decay 0.1 "
    "--baseline leave_one_out --scale_rewards batch",
}
TIMES = ("time/", "memory/", "mfu", "tokens_per_second")


def digests(run: Path) -> str:
    weights, rollouts, rows = hashlib.sha256(), hashlib.sha256(), []
    with safe_open(run / "step_20/model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            weights.update(name.encode())
            weights.update(file.get_tensor(name).numpy().tobytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        rows.append({k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)})
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        rollouts.update(path.read_bytes())
    table = hashlib.sha256(json.dumps(rows, sort_keys=True).encode())
    return "  ".join(f"{name} {digest.hexdigest()[:16]}" for name, digest in (
        ("weights", weights), ("rows", table), ("rollouts", rollouts)))


def main(out: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for ranks in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        for name, flags in RUNS.items():
            run = out / f"{ranks} {name}"
            shutil.rmtree(run, ignore_errors=True)
            command = [sys.executable, *launcher, "minigrpo.py", *flags.split(), "--out", str(run)]
            if name == "killed and resumed":
                first = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
                while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < 11:
                    time.sleep(0.02)
                os.killpg(first.pid, signal.SIGKILL)
                first.wait()
                time.sleep(2.5)  # until the ranks have seen that torchrun is gone
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
            assert ("continues after update" in done.stdout) == (name == "killed and resumed")
            print(f"{ranks} ranks, {name:37} {digests(run)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
