"""The folder of one run: its metrics, its rollouts, its checkpoints. Killed at whatever moment, it continues.

    run = Run(c, world)                                       # takes the folder
    start = run.state["step"]
    run.begin(updates=200)                                    # goes back to the last checkpoint
    run.record({"step": 7, "reward": 0.5})                    # a row of metrics.jsonl
    run.write_rollouts(7, rollouts)                           # begins rollouts/step_7.jsonl
    run.save(policy, optimizer, source, 8)                    # step_8/, then `latest` points to it

    config.json       the options; another run with others does not write here
    metrics.jsonl     one object a step, every key of METRICS in each, null where not measured
    rollouts/         the completions of the last steps
    step_N/           a Hugging Face folder, the optimizer's shards in optimizer/, counters in trainer.json
    latest            a link to the last complete one
    lock              held by the process that writes here
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pickle
import shutil
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


METRICS = (
    "step", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length",
    "completions/clipped_ratio", "loss", "grad_norm", "learning_rate", "entropy", "clip_ratio", "kl",
    "logprob_gap/mean", "logprob_gap/max", "importance_ratio/mean", "importance_ratio/max", "ess",
    "eval/accuracy", "unscored", "dropped_groups", "trained_tokens", "broken_logprobs", "skipped_updates",
    "first_ratio_error",
    "time/wake", "time/generate", "time/eval", "time/sleep", "time/reward", "time/update", "time/step",
    "tokens_per_second_per_gpu", "mfu", "memory/peak_gib", "memory/asleep_gib", "weight_version")


# With other values of these a run continues all the same: they decide what is seen and kept of it, and in
# how much time and memory it runs.
FREE = ("log_completions", "report_to", "timeout_minutes", "save_steps", "save_total_limit", "save_rollouts",
        "max_skipped", "reward_timeout", "reward_workers", "micro_batch_tokens", "recompute", "compile",
        "optimizer_offload", "vllm_gpu_memory_utilization", "vllm_enforce_eager")


class Health:
    """Watches the numbers of a run: warns where they look wrong, ends it where they are.

    What decides is the same on every rank; rank 0 speaks.
    """

    def __init__(self, c, speaks: bool = False):
        self.c, self.speaks, self.warned = c, speaks, set()
        self.skipped = self.suspicious = self.unrewarded = 0  # steps in a row
        self.first = {"logprob_gap/mean": [], "entropy": []}  # of the first ten steps: what is healthy here

    def warn(self, step: int, text: str, once: str = "") -> None:
        if self.speaks and once not in self.warned:
            print(f"warning: step {step + 1}: {text}", flush=True)
        self.warned |= {once} - {""}

    def check(self, row: dict, rollouts: list = ()) -> None:
        """Raises UserError after max_skipped updates skipped in a row, three steps of a gap far off, or three
        without any reward."""
        gap, step = row["logprob_gap/mean"], row["step"]
        usual, entropy = (statistics.median(v) if len(v) == 10 else None for v in self.first.values())
        for key, values in self.first.items():
            self.first[key] = [*values, row[key]][:10]
        self.unrewarded = self.unrewarded + 1 if row["reward"] is None else 0
        if self.unrewarded >= 3:
            raise UserError("for three steps no completion had a reward: does --reward return one number or "
                            "None for each completion of a group, and has the data what it asks for?")
        broken = row["skipped_updates"] or row["broken_logprobs"] > row["trained_tokens"]
        self.skipped = self.skipped + 1 if broken else 0
        if self.skipped >= self.c.max_skipped:
            raise UserError(f"{self.skipped} updates in a row had gradients or log-probabilities that are "
                            "not finite: lower --learning_rate")
        off = usual is not None and gap > max(0.05, 3 * usual) and not self.c.replay  # there it has to grow
        self.suspicious = self.suspicious + 1 if off else 0
        if off:
            differ = f"sampler and trainer differ by {gap:.3f} in log-probability, at first by {usual:.3f}"
            self.warn(step, differ)
            if self.suspicious >= 3:
                raise UserError(f"{differ}: the engine no longer computes what the policy computes")
        if entropy and row["entropy"] < 0.02 * entropy:
            self.warn(step, f"entropy fell from {entropy:.2f} to {row['entropy']:.3f}: the completions of a "
                      "prompt hardly differ, and a group without a difference teaches nothing", "entropy")
        some = rollouts[::1 + len(rollouts) // 64] if self.speaks else []
        long = [r.completion_ids for r in some if len(r.completion_ids) >= 32]
        flooded = sum(Counter(ids).most_common(1)[0][1] > len(ids) / 2 for ids in long)
        if flooded > len(long) / 4:
            self.warn(step, f"one token is more than half of {flooded} of {len(long)} completions", "flood")


class Run:
    """The folder of one run: config.json, metrics.jsonl, rollouts/, step_N/ and `latest`. Rank 0 looks after
    it.

    A step folder is written under another name, synced to disk and then renamed; `latest` moves last. Killed
    at whatever moment, the run has a complete `latest`, and the same command continues after its last update.
    """

    def __init__(self, c, world):
        self.c, self.world, self.writes, self.recent = c, world, world.rank == 0, []
        self.metrics = dict.fromkeys(METRICS)
        where = ("out", "fresh")  # not in config.json: a folder may be copied
        self.options = {k: v for k, v in dataclasses.asdict(c).items() if k not in where}
        binding = {k: v for k, v in self.options.items() if k not in FREE}
        digest = hashlib.sha256(json.dumps(binding, sort_keys=True).encode()).hexdigest()[:8]
        data = "+".join(Path(source).stem for source in c.data)
        self.folder = Path(c.out or f"runs/{Path(c.model).name}-{data}-{digest}")
        self.latest, self.thread = self.folder / "latest", ThreadPoolExecutor(1)
        self.writer = None  # the process that writes rollouts
        self.writing = None  # what it is at, or was last
        self.state = world.gather(self.find() if self.writes else None)[0]  # what `latest` says
        if not (self.folder / "lock").exists():
            raise UserError(f"{self.folder} is not on a disk that all hosts share: give such an --out")

    def find(self) -> dict:
        """Takes the folder for this process; what its last checkpoint says, {"step": 0} without one."""
        self.take()
        metrics, config, state = self.folder / "metrics.jsonl", self.folder / "config.json", {"step": 0}
        if self.latest.is_dir() and not self.latest.is_symlink():
            raise UserError(f"{self.latest} is a folder, not a link to a step: rename it to step_N")
        if self.c.fresh:
            if Path(self.c.model).resolve() in self.folder.resolve().glob("step_*"):
                raise UserError(f"--fresh would remove --model {self.c.model}: give another --out")
            return state
        if not self.latest.exists() and (steps := self.steps()):  # killed before, or copied without links
            self.point_to(steps[-1])
        if self.latest.exists():
            state = read_object(self.latest / "trainer.json")
            if f"step_{state.get('step')!r}" != (target := self.latest.resolve()).name:
                raise UserError(f"{self.latest / 'trainer.json'} says step {state.get('step')!r}, but the "
                                f"folder is {target}: --fresh starts anew")
        elif not metrics.exists() or not metrics.stat().st_size:  # nothing here to lose
            self.write_options()
            return state
        old, new = read_object(config), json.loads(json.dumps(self.options))
        if changed := sorted(k for k in {*new, *old} - {*FREE} if new.get(k) != old.get(k)):
            raise UserError(f"{self.folder} holds a run with other options ({', '.join(changed)}): give "
                            "another --out, or --fresh to start anew")
        return state

    def take(self) -> None:
        """Makes the folder and locks it, for as long as this process lives. Raises UserError where it is
        another's."""
        lock = self.folder / "lock"
        try:
            names = ("config.json", "metrics.jsonl", "rollouts", "step_*", "latest")
            if not lock.exists() and (others := [p for name in names for p in self.folder.glob(name)]):
                raise UserError(f"{others[0]} was written by no run: give another --out")
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(lock, "a+")
        except OSError as error:
            raise UserError(f"no run can be written to {self.folder} ({error}): give another --out") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.seek(0)
            raise UserError(f"{self.folder} is in use by process {self.lock.read()}: stop that one, or give "
                            "another --out") from None
        self.lock.truncate(0)
        print(os.getpid(), end="", file=self.lock, flush=True)

    def begin(self, updates: int) -> None:
        """Goes back to the last checkpoint, once everything else is known to be in order. updates: of the
        whole run."""
        self.updates = updates
        try:
            if self.writes:
                self.cut_back(self.state["step"])
                self.report = Report(self.c.report_to, self.folder, self.state["step"], self.options)
        except OSError as error:
            raise UserError(f"{self.folder}: {error}: give another --out") from None

    def cut_back(self, step: int) -> None:
        """Removes what came after update `step`: rows, rollouts, half-written lines and folders."""
        metrics, kept = self.folder / "metrics.jsonl", []
        lines = metrics.read_bytes().splitlines(keepends=True) if step and metrics.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                if line.endswith(b"\n") and json.loads(line)["step"] < step:
                    kept.append(line)
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise UserError(f"{metrics}, line {number}: no row of a run ({error!r}): remove it") from None
        (self.folder / "rollouts").mkdir(exist_ok=True)
        if self.c.fresh:
            self.latest.unlink(missing_ok=True)
            (self.folder / "wandb_id").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        for path in self.folder.glob("step_*/"):
            if path.name.endswith((".partial", ".partial-old")) or number_of(path) > step:
                shutil.rmtree(path)
        for path in self.folder.glob("rollouts/step_*.jsonl"):
            if number_of(path) >= step:
                path.unlink()
        rewrite(metrics, b"".join(kept))
        self.write_options()

    def write_options(self) -> None:
        rewrite(self.folder / "config.json", json.dumps(self.options, indent=2).encode())

    def steps(self) -> list[int]:
        """Of the complete step folders, in order."""
        return sorted(n for n in map(number_of, self.folder.glob("step_*/")) if n > 0)

    def point_to(self, step: int) -> None:
        """Moves `latest`, so that a power cut leaves it where it was or where it is."""
        link = self.folder / "latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(f"step_{step}")
        sync(self.folder)
        link.replace(self.latest)
        sync(self.folder)

    def record(self, row: dict) -> None:
        """Appends a row to metrics.jsonl."""
        if not self.writes:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            number = lambda v: v if v is None or math.isfinite(v) else None  # JSON has no NaN
            row = {key: number(row.get(key)) for key in self.metrics}
            file.write(json.dumps(row) + "\n")
        self.report(row)

    def write_rollouts(self, step: int, rollouts: list) -> None:
        """Begins to write rollouts/step_N.jsonl; of the steps the last save_rollouts are kept. Before that it
        waits for those of the step before."""
        if self.writes and self.c.save_rollouts:
            self.finish_writing()
            self.writing = self.thread.submit(self._hand_over, step, rollouts)

    def finish_writing(self) -> None:
        """Waits for what `write_rollouts` began. A full disk is an error of the run."""
        if self.writing:
            self.writing.result()

    def _hand_over(self, step: int, rollouts: list) -> None:
        """A process of its own makes JSON of them: in a thread of this one, which Python lets run in turns,
        that held up the kernels of the next update by an eighth."""
        if not self.writer:  # a signal to the run is not for it: it ends when its stdin does
            self.writer = Popen([sys.executable, os.path.abspath(__file__), self.folder / "rollouts"],
                                stdin=PIPE, stdout=PIPE, start_new_session=True)
        pickle.dump((step, step - self.c.save_rollouts, [vars(r) for r in rollouts]), self.writer.stdin)
        self.writer.stdin.flush()
        answer = self.writer.stdout.readline().decode().strip()
        if answer != "written":
            raise OSError(f"{self.folder / 'rollouts'}: {answer or 'the process that writes it ended'}")

    def print_line(self, row: dict, rollouts: list = ()) -> None:
        """One line a step, for a person, and log_completions of the completions, spread over the prompts."""
        if not self.writes:
            return
        total, done = self.updates, row["step"] + 1
        self.recent = [*self.recent[-19:], row["time/step"] - (row.get("time/eval") or 0)]
        left = round((total - done) * statistics.median(self.recent))
        accuracy = "" if row.get("eval/accuracy") is None else f"  accuracy {row['eval/accuracy']:.1%}"
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        print(f"step {done}/{total}  reward {reward}{accuracy}"
              f"  length {row['completions/mean_length']:.1f}  gap {row['logprob_gap/mean']:.1e}"
              f"  generate {row['time/generate']:.2f}s  update {row['time/update']:.2f}s"
              f"  handoff {row['time/wake'] + row['time/sleep']:.2f}s"
              f"  {done / total:.0%}, {left // 60}m{left % 60:02}s left", flush=True)
        shown = min(self.c.log_completions, len(rollouts))
        for r in [rollouts[i * len(rollouts) // shown] for i in range(shown)]:
            prompt, text = r.prompt if type(r.prompt) is str else r.prompt[-1]["content"], r.completion
            # As literals: a terminal would obey some of the characters.
            print(f"  {'…' * (len(prompt) > 80)}{prompt[-80:]!r} → {text[:240]!r}{'…' * (len(text) > 240)}"
                  f"  reward {r.reward}  advantage {r.advantage:.3f}", flush=True)

    def close(self) -> None:
        """Before a process ends without asking anybody."""
        self.finish_writing()
        if self.writer:
            self.writer.communicate()
        if self.writes and self.report.online:
            self.report.online.finish()

    def size(self, optimizer) -> int:
        """Bytes of a checkpoint: the weights, and three numbers a parameter in the optimizer's precision."""
        return optimizer.weights.nbytes + 3 * optimizer.master.nbytes * self.world.size

    def seconds_to_save(self, optimizer) -> float:
        """A guess, from writing 32 MiB here. torchrun waits 30 s for a run that it was told to end."""
        if not self.writes:
            return 0.0
        probe, start = self.folder / "probe.partial", time.perf_counter()
        try:
            probe.write_bytes(os.urandom(2**25))
            sync(probe)
        except OSError as error:
            raise UserError(f"{self.folder} takes no checkpoint ({error}): give another --out") from None
        finally:
            probe.unlink(missing_ok=True)
        return (time.perf_counter() - start) * self.size(optimizer) / 2**25

    def save(self, policy, optimizer, source: Path, step: int, **state) -> None:
        """Writes step_N, every rank its optimizer shard. Raises UserError where the disk lacks room."""
        folder, partial = self.folder / f"step_{step}", self.folder / f"step_{step}.partial"
        trainer = json.dumps({"step": step, **state}, indent=2).encode()
        if step == self.state["step"]:  # stopped after the last update, and continued: only these are new
            return rewrite(folder / "trainer.json", trainer) if self.writes else None
        if self.writes:
            self.finish_writing()  # who continues from here does not write them again
            needed = self.size(optimizer)
            if (free := shutil.disk_usage(self.folder).free) < 1.1 * needed:
                raise UserError(f"{self.folder}: a checkpoint takes {needed / 2**30:.1f} GiB, only "
                                f"{free / 2**30:.1f} are free: make room, then the same command continues")
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "optimizer").mkdir(parents=True)  # apart: vLLM loads all .safetensors of a folder
        self.world.meet("room for a checkpoint")  # the folder is there
        optimizer.save(partial / "optimizer")
        self.world.meet("the optimizer's checkpoint")  # every shard is there
        if self.writes:
            policy.save(partial, source)
            (partial / "trainer.json").write_bytes(trainer)
            for path in [*partial.rglob("*"), partial, self.folder / "metrics.jsonl"]:
                sync(path)
            partial.rename(folder)
            self.point_to(step)
            for old in self.steps()[:-self.c.save_total_limit]:
                discard(self.folder / f"step_{old}")


class Report:
    """Hands rows of metrics to TensorBoard and Weights & Biases, where asked for. step: of the next row; what
    an interrupted run has shown from there on does not appear twice."""

    def __init__(self, names: list[str], folder: Path, step: int, options: dict):
        self.board = self.online = None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        if "wandb" in names:
            import wandb
            if not (mark := folder / "wandb_id").exists():
                rewrite(mark, os.urandom(8).hex().encode())
            try:
                self.online = wandb.init(project="minigrpo", name=folder.name, id=mark.read_text(),
                                         resume="allow", dir=str(folder), config=options)
            except wandb.Error as error:
                raise UserError(f"--report_to wandb: {error}") from None

    def __call__(self, row: dict) -> None:
        values = {key: value for key, value in row.items() if value is not None}
        if self.board:
            for key, value in values.items():
                self.board.add_scalar(key, value, row["step"])
            self.board.flush()  # the process may be killed
        if self.online and row["step"] >= self.online.step:
            self.online.log(values, step=row["step"])


class RecordedEngine:
    """In the engine's place: the completions that an earlier run recorded, found by seed and prompt. run: its
    folder. `generate` raises UserError where they are not there."""

    given_back = 0

    def __init__(self, run: Path):
        self.run, self.weight_version = run, None

    def wake(self, named_weights, version: int) -> None:
        self.weight_version = version

    def generate(self, prompts: list[list[int]], *, n: int, seeds: list[int], **ignored) -> list:
        path, found, number = self.run / f"rollouts/step_{self.weight_version}.jsonl", {}, 0
        try:
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                r = json.loads(line)
                ids, logps = found[r["seed"], *r["prompt_ids"]] = r["completion_ids"], r["sampler_logps"]
                if len(ids) != len(logps) or {*map(type, ids)} != {int} or {*map(type, logps)} != {float}:
                    raise ValueError("no completion")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}, is damaged ({error!r}): record that run again") from None
        try:
            return [[found[seed + i, *prompt] for i in range(n)] for prompt, seed in zip(prompts, seeds)]
        except KeyError:
            raise UserError(f"{path} has completions of other prompts: give all options that make prompts as "
                            f"they are in {self.run / 'config.json'}, and the same data") from None

    def sleep(self) -> None:
        """Nothing to give back."""

    close = sleep


def recorded_steps(c) -> int:
    """How many updates --replay has rollouts for, at most max_steps. Raises UserError where they are of other
    prompts or another sampler than this run would have, and where one is missing."""
    run = Path(c.replay)
    if not (run / "config.json").exists():
        raise UserError(f"--replay {run}: no config.json there: give the folder of a run")
    names = lambda v: [Path(str(name)).name for name in (v if isinstance(v, list) else [v])]  # folders move
    old = read_object(run / "config.json", "record that run again")
    new = json.loads(json.dumps(dataclasses.asdict(c)))
    for key in ("model", "data", "seed", "prompts_per_step", "num_generations", "temperature",
                "dynamic_sampling_rounds"):
        if names(old.get(key)) != names(new[key]):
            raise UserError(f"--{key} {' '.join(names(new[key]))}: {run} was recorded with "
                            f"{' '.join(names(old.get(key)))}: give the same")
    if c.dynamic_sampling_rounds:
        raise UserError(f"--replay {run}: --dynamic_sampling_rounds dropped groups that were not recorded")
    if c.out and Path(c.out).resolve() == run.resolve():
        raise UserError(f"--replay {run} would be written over: give another --out")
    steps = min(c.max_steps, 1 + max([0, *map(number_of, run.glob("rollouts/step_*.jsonl"))]))
    for step in range(steps):
        if not (run / f"rollouts/step_{step}.jsonl").exists():
            raise UserError(f"{run} keeps no rollouts of step {step}: record with --save_rollouts N, for all "
                            "N steps of a run")
    return steps


def step_metrics(rollouts: list, scores, sums: dict, policy, world, seconds: dict) -> dict:
    """What one step adds to its row of metrics.jsonl. scores: the rewards [groups, G], NaN where there is
    none. sums: what `update` returns, over all ranks. seconds: the row so far."""
    scored, tokens = scores[~scores.isnan()], max(1, sums.get("tokens", 0))
    count, mismatch = len(rollouts), sums.get("mismatch", 0.0)
    generated = sum(len(r.completion_ids) for r in rollouts)
    stds = [g[~g.isnan()].std().item() for g in scores if (~g.isnan()).sum() > 1]
    flops = world.peak_flops and policy.update_flops(sums["trained_lengths"])
    return {
        "reward": scored.mean().item() if len(scored) else None,
        "reward_std": sum(stds) / len(stds) if stds else None,
        "frac_reward_zero_std": sum(s <= 1e-6 for s in stds) / len(scores),
        "unscored": count - len(scored), "dropped_groups": sum(r.round for r in rollouts) // scores.shape[1],
        "broken_logprobs": sums["broken_logprobs"], "trained_tokens": sums["trained_tokens"],
        "completions/mean_length": generated / count,
        "completions/clipped_ratio": sum(r.truncated for r in rollouts) / count,
        "loss": sums.get("loss", 0.0), "grad_norm": sums["grad_norm"],
        "skipped_updates": sums["skipped"], "first_ratio_error": sums.get("ratio_error_max", 0.0),
        "entropy": sums.get("entropy", 0.0) / tokens, "clip_ratio": sums.get("clipped", 0) / tokens,
        "kl": sums["kl"] / tokens if "kl" in sums else None,
        "logprob_gap/mean": sums.get("gap", 0.0) / tokens, "logprob_gap/max": sums.get("gap_max", 0.0),
        "importance_ratio/mean": mismatch / tokens, "importance_ratio/max": sums.get("mismatch_max", 0.0),
        "ess": mismatch ** 2 / (tokens * max(sums.get("mismatch_squared", 0.0), 1e-30)),
        "tokens_per_second_per_gpu": generated / seconds["time/step"] / (world.size + bool(world.link)),
        "mfu": flops and flops / (seconds["time/update"] * world.peak_flops * world.size),
        "weight_version": rollouts[0].weight_version,
    }


def main() -> None:
    """The process that writes rollouts into the folder sys.argv[1]: each pickle on its stdin is (step, the
    step that goes, rows), each answer a line that says "written" or why not."""
    folder = Path(sys.argv[1])
    ended = EOFError, pickle.UnpicklingError, BrokenPipeError  # the run has ended, or was killed meanwhile
    with contextlib.suppress(*ended):
        while True:
            step, old, rows = pickle.load(sys.stdin.buffer)
            answer = "written"
            try:
                with open(folder / f"step_{step}.jsonl", "w", encoding="utf-8",
                          errors="backslashreplace") as file:  # half a surrogate pair stays its escape
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (folder / f"step_{old}.jsonl").unlink(missing_ok=True)
            except OSError as error:
                answer = error
            print(answer, flush=True)


def number_of(path: Path) -> int:
    """N of step_N or step_N.jsonl, -1 for a name of somebody else's."""
    number = path.name[5:].removesuffix(".jsonl")
    return int(number) if number.isdecimal() else -1


def read_object(path: Path, advice: str = "--fresh starts anew") -> dict:
    try:
        if isinstance(value := json.loads(path.read_text()), dict):
            return value
        error = "not an object"
    except (OSError, ValueError, RecursionError) as caught:
        error = caught
    raise UserError(f"{path} is damaged ({error}): {advice}")


def rewrite(path: Path, content: bytes) -> None:
    """The old content or the new, whenever the process is killed."""
    path.with_suffix(".partial").write_bytes(content)
    path.with_suffix(".partial").replace(path)


def sync(path: Path) -> None:
    """Returns when the file or folder is on the disk and would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def discard(folder: Path) -> None:
    """Deletes a step folder; interrupted, it leaves a name that the next start clears away."""
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(folder.name + ".partial-old")))


if __name__ == "__main__":
    main()
