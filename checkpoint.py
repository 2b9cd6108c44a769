"""The folder of one run: its metrics, its rollouts, its checkpoints. Killed at whatever moment, it continues.

    run = Run(c, world)                              # takes the folder; goes back to its last checkpoint
    start = run.state["step"]
    run.write_rollouts(7, rollouts)                           # rollouts/step_7.jsonl
    run.record({"step": 7, "reward": 0.5})                    # a row of metrics.jsonl
    run.save(policy, optimizer, source, 8)                    # step_8/, then `latest` points to it

    config.json       the options; another run with others does not write here
    metrics.jsonl     one object a step, every key of METRICS in each, null where not measured
    rollouts/         the completions of the last steps
    step_N/           a Hugging Face folder, the optimizer's shards in optimizer/, counters in trainer.json
    latest            a link to the last complete one
    lock              held by the process that writes here
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


METRICS = (
    "step", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length",
    "completions/clipped_ratio", "loss", "grad_norm", "learning_rate", "entropy", "clip_ratio", "kl",
    "logprob_gap/mean", "logprob_gap/max", "importance_ratio/mean", "importance_ratio/max", "ess",
    "eval/accuracy", "unscored", "trained_tokens", "broken_logprobs", "skipped_updates", "time/wake",
    "time/generate", "time/eval", "time/sleep", "time/reward", "time/update", "time/step",
    "tokens_per_second_per_gpu", "mfu", "memory/peak_gib", "memory/asleep_gib", "weight_version")


class Run:
    """The folder of one run: config.json, metrics.jsonl, rollouts/, step_N/ and `latest`. Rank 0 looks after
    it.

    A step folder is written under another name, synced to disk and then renamed; `latest` moves last. Killed
    at whatever moment, the run has a complete `latest`, and the same command continues after its last update.
    """

    def __init__(self, c, world):
        self.c, self.world, self.writes, self.recent = c, world, world.rank == 0, []
        self.options = {k: v for k, v in dataclasses.asdict(c).items() if k not in ("out", "fresh")}
        digest = hashlib.sha256(json.dumps(self.options, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = Path(c.out or f"runs/{Path(c.model).name}-{Path(c.data).stem}-{digest}")
        self.latest, self.writer, self.writing = self.folder / "latest", ThreadPoolExecutor(1), []
        self.state = world.gather(self.begin() if self.writes else None)[0]  # what `latest` says

    def begin(self) -> dict:
        """Takes the folder for this process and goes back to its last checkpoint; {"step": 0} without one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / "lock", "a+")  # held as long as the process lives, whatever ends it
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.seek(0)
            raise UserError(f"{self.folder} is in use by process {self.lock.read()}: stop that one, or give "
                            "another --out") from None
        self.lock.truncate(0)
        print(os.getpid(), end="", file=self.lock, flush=True)
        config, state = self.folder / "config.json", {"step": 0}
        if self.c.fresh:
            self.latest.unlink(missing_ok=True)
        if self.latest.exists():
            try:
                state, old = (json.loads(p.read_text()) for p in (self.latest / "trainer.json", config))
            except (OSError, ValueError) as error:
                raise UserError(f"{self.folder} is damaged ({error}): --fresh starts anew") from None
            new = json.loads(json.dumps(self.options))
            if changed := sorted(k for k in new.keys() | old.keys() if new.get(k) != old.get(k)):
                raise UserError(f"{self.folder} holds a run with other options ({', '.join(changed)}): give "
                                "another --out, or --fresh to start anew")
        if not state.get("finished"):
            self.cut_back(state["step"])
        config.write_text(json.dumps(self.options, indent=2))
        return state

    def cut_back(self, step: int) -> None:
        """Removes what came after update `step`: rows, rollouts, half-written lines and folders."""
        for path in self.folder.glob("step_*"):
            if "partial" in path.suffix or int(path.name[5:]) > step:
                shutil.rmtree(path)
        for path in self.folder.glob("rollouts/step_*.jsonl"):
            if int(path.stem[5:]) >= step:
                path.unlink()
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
        metrics.with_suffix(".partial").write_text("".join(kept))
        metrics.with_suffix(".partial").replace(metrics)

    def record(self, row: dict) -> None:
        """Appends a row to metrics.jsonl, once the step's rollouts are written."""
        if not self.writes:
            return
        for writing in self.writing:
            writing.result()  # a full disk is an error of this step
        with open(self.folder / "metrics.jsonl", "a") as file:
            number = lambda v: v if v is None or math.isfinite(v) else None  # JSON has no NaN
            file.write(json.dumps({key: number(row.get(key)) for key in METRICS}) + "\n")

    def write_rollouts(self, step: int, rollouts: list) -> None:
        """Begins to write rollouts/step_N.jsonl, beside what follows: the update leaves the CPU idle. Of the
        steps the last save_rollouts are kept."""
        if self.writes and self.c.save_rollouts:
            self.writing = [self.writer.submit(self._write_rollouts, step, rollouts)]

    def _write_rollouts(self, step: int, rollouts: list) -> None:
        folder = self.folder / "rollouts"
        folder.mkdir(exist_ok=True)
        with open(folder / f"step_{step}.jsonl", "w", encoding="utf-8") as file:
            for rollout in rollouts:
                file.write(json.dumps(vars(rollout), ensure_ascii=False) + "\n")
        (folder / f"step_{step - self.c.save_rollouts}.jsonl").unlink(missing_ok=True)

    def print_line(self, row: dict) -> None:
        """One line a step, for a person."""
        if not self.writes:
            return
        total, done = self.c.max_steps, row["step"] + 1
        self.recent = [*self.recent[-19:], row["time/step"]]
        left = (total - done) * sum(self.recent) / len(self.recent)
        accuracy = "" if row.get("eval/accuracy") is None else f"  accuracy {row['eval/accuracy']:.1%}"
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        print(f"step {done}/{total}  reward {reward}{accuracy}"
              f"  length {row['completions/mean_length']:.1f}  gap {row['logprob_gap/mean']:.1e}"
              f"  generate {row['time/generate']:.2f}s  update {row['time/update']:.2f}s"
              f"  handoff {row['time/wake'] + row['time/sleep']:.2f}s"
              f"  {done / total:.0%}, {left // 60:.0f}m{left % 60:02.0f}s left", flush=True)

    def size(self, optimizer) -> int:
        """Bytes of a checkpoint: the weights, and three numbers a parameter in the optimizer's precision."""
        return optimizer.weights.nbytes + 3 * optimizer.master.nbytes * self.world.size

    def seconds_to_save(self, optimizer) -> float:
        """A guess, from writing 32 MiB here. torchrun waits 30 s for a run that it was told to end."""
        if not self.writes:
            return 0.0
        probe, start = self.folder / "probe.partial", time.perf_counter()
        probe.write_bytes(os.urandom(2**25))
        sync(probe)
        probe.unlink()
        return (time.perf_counter() - start) * self.size(optimizer) / 2**25

    def save(self, policy, optimizer, source: Path, step: int, **state) -> None:
        """Writes step_N, every rank its optimizer shard. Raises UserError where the disk lacks room."""
        folder, partial = self.folder / f"step_{step}", self.folder / f"step_{step}.partial"
        if self.writes:
            needed = self.size(optimizer)
            if (free := shutil.disk_usage(self.folder).free) < 1.1 * needed:
                raise UserError(f"{self.folder}: a checkpoint takes {needed / 2**30:.1f} GiB, only "
                                f"{free / 2**30:.1f} are free: make room, then the same command continues")
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "optimizer").mkdir(parents=True)  # apart: vLLM loads all .safetensors of a folder
        self.world.gather(None)  # the folder is there
        optimizer.save(partial / "optimizer")
        self.world.gather(None)  # every shard is there
        if self.writes:
            policy.save(partial, source)
            (partial / "trainer.json").write_text(json.dumps({"step": step, **state}, indent=2))
            for path in [*partial.rglob("*"), partial]:
                sync(path)
            discard(folder)
            partial.rename(folder)
            link = self.folder / "latest.partial"
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name)
            sync(self.folder)
            link.replace(self.latest)
            sync(self.folder)
            steps = sorted(int(p.name[5:]) for p in self.folder.glob("step_*") if p.name[5:].isdigit())
            for old in steps[:-self.c.save_total_limit]:
                discard(self.folder / f"step_{old}")


def sync(path: Path) -> None:
    """Returns when the file or folder is on the disk and would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def discard(folder: Path) -> None:
    """Deletes a step folder; interrupted, it leaves a name that the next start clears away."""
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(folder.name + ".partial-old")))
