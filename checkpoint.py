"""The folder of one run: its metrics, its rollouts, its checkpoints. Killed at any moment, the run continues.

    run = Run(folder, options, world)
    run.begin(["step", "reward"])                         # back to the last checkpoint, if there is one
    for step in range(run.state["step"], 200):
        ...
        run.record({"step": step, "reward": 0.5})
        run.write_rollouts(step, rollouts)
        run.save(policy, optimizer, source, step + 1)

    config.json       the options; a run with others does not write here
    metrics.jsonl     one object a step, every key in each, null where not measured
    rollouts/         step_N.jsonl: the completions of the last steps
    step_N/           the checkpoint after N updates: a Hugging Face folder, with the optimizer's shards in
                      optimizer/ and counters in trainer.json
    latest            a link to the last complete checkpoint
    lock              held by the process that writes here

A checkpoint is written under another name, synced to the disk and then renamed; `latest` moves last. So there
is always a complete one.
"""

import contextlib
import fcntl
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Run:
    """The folder of one run. Rank 0 looks after it; other ranks only add their shards to a checkpoint.

    state: what trainer.json of the last checkpoint says; {"step": 0} without a checkpoint.

    Raises ValueError or OSError where the folder cannot be used. What is in it has not been changed then.
    """

    folder: Path
    options: dict  # what config.json holds
    world: object
    free: tuple = ()  # names of options that may differ when the run is resumed
    fresh: bool = False  # start anew, whatever is there
    save_total_limit: int = 2  # checkpoints to keep
    save_rollouts: int = 10  # how many steps' rollouts to keep
    report_to: tuple = ()  # "tensorboard", "wandb"

    def __post_init__(self):
        self.latest = self.folder / "latest"
        self.metrics = self.folder / "metrics.jsonl"
        self.options = json.loads(json.dumps(self.options))  # as they come back: tuples are lists
        self.writes = self.world.rank == 0
        self.writer = None  # the process that writes rollouts
        state = self.find() if self.writes else None
        self.state = self.world.all_gather(state)[0]
        if not (self.folder / "lock").exists():  # rank 0 has just written it
            raise ValueError(f"{self.folder} is not on a disk that all hosts share")

    # ---- Taking the folder ---------------------------------------------------------------------------------

    def find(self):
        """Takes the folder and returns the state of its last checkpoint."""
        self.take()
        if self.fresh:
            model = Path(self.options["model"]).resolve()
            if model in self.folder.resolve().glob("step_*"):
                raise ValueError(f"--fresh would remove --model {self.options['model']}")
            return {"step": 0}
        steps = self.steps()
        if steps and not self.latest.exists():  # killed just before it moved, or copied without links
            self.point_to(steps[-1])
        state = self.read_state() if self.latest.exists() else {"step": 0}
        # Without a checkpoint there may be rows, which another command is not to lose.
        if self.latest.exists() or self.metrics.exists() and self.metrics.stat().st_size:
            self.check_options()
        return state

    def take(self):
        """Makes the folder, and locks it for as long as this process lives."""
        lock = self.folder / "lock"
        if not lock.exists():
            for name in ("config.json", "metrics.jsonl", "rollouts", "step_*", "latest"):
                if any(self.folder.glob(name)):
                    raise ValueError(f"{self.folder} holds {name}, which was written by no run")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(lock, "a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.seek(0)
            raise ValueError(f"{self.folder} is in use by process {self.lock.read()}") from None
        self.lock.truncate(0)
        print(os.getpid(), end="", file=self.lock, flush=True)

    def read_state(self):
        """What trainer.json says of the last checkpoint. Raises ValueError where it says it of another."""
        path = self.latest / "trainer.json"
        state = read_object(path)
        step = state.get("step")
        target = self.latest.resolve()
        # A folder that was renamed or put together from two would train on as if it were another update.
        if target.name != f"step_{step!r}":
            raise ValueError(f"{path} says step {step!r}, but its folder is {target}")
        return state

    def check_options(self):
        """Raises ValueError, naming the options, where the run that is here had others."""
        path = self.folder / "config.json"
        old = read_object(path)
        names = sorted({*old, *self.options} - {*self.free})
        changed = [name for name in names if old.get(name) != self.options.get(name)]
        if changed:
            raise ValueError(f"{path} is of a run with other options ({', '.join(changed)})")

    def steps(self):
        """Of the complete checkpoints, in order."""
        return sorted(n for n in map(number_of, self.folder.glob("step_*/")) if n > 0)

    # ---- Going back to the last checkpoint -----------------------------------------------------------------

    def begin(self, keys):
        """Goes back to the last checkpoint. Called once all other input is known to be in order.

        keys: of every row of metrics, in order.
        """
        self.keys = keys
        if self.writes:
            self.cut_back(self.state["step"])
            self.report = Report(self.report_to, self.folder, self.state["step"], self.options)

    def cut_back(self, step):
        """Removes what came after update `step`: rows, half-written lines, rollouts, folders."""
        kept = self.rows_before(step)
        (self.folder / "rollouts").mkdir(exist_ok=True)
        if self.fresh:
            self.latest.unlink(missing_ok=True)
            (self.folder / "wandb_id").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        for path in self.folder.glob("step_*/"):
            if path.name.endswith((".partial", ".partial-old")) or number_of(path) > step:
                shutil.rmtree(path)
        for path in self.folder.glob("rollouts/step_*.jsonl"):
            if number_of(path) >= step:
                path.unlink()
        rewrite(self.metrics, kept)
        rewrite(self.folder / "config.json", json.dumps(self.options, indent=2).encode())

    def rows_before(self, step):
        """The complete lines of metrics.jsonl that are of steps before this one."""
        if step == 0 or not self.metrics.exists():
            return b""
        kept = []
        for number, line in enumerate(self.metrics.read_bytes().splitlines(keepends=True), start=1):
            with naming(f"{self.metrics}, line {number}"):
                if line.endswith(b"\n") and json.loads(line)["step"] < step:
                    kept.append(line)
        return b"".join(kept)

    # ---- What each step writes -----------------------------------------------------------------------------

    def record(self, row):
        """Appends a row to metrics.jsonl."""
        if not self.writes:
            return
        values = {}
        for key in self.keys:
            value = row.get(key)
            measured = value is not None and math.isfinite(value)
            values[key] = value if measured else None  # JSON has no NaN
        with open(self.metrics, "a") as file:
            file.write(json.dumps(values) + "\n")
        self.report(values)

    def write_rollouts(self, step, rollouts):
        """Begins to write rollouts/step_N.jsonl, once those of the step before are written.

        A process of its own makes JSON of them: a thread of this one shares Python's lock with the trainer,
        and held up the next update by an eighth. To pickle them takes 6 ms per 100,000 tokens.
        """
        if not self.writes or not self.save_rollouts:
            return
        self.finish_writing()
        path = self.folder / f"rollouts/step_{step}.jsonl"
        old = self.folder / f"rollouts/step_{step - self.save_rollouts}.jsonl"
        with tempfile.TemporaryFile() as file:
            pickle.dump(rollouts, file)
            file.seek(0)
            self.writer = subprocess.Popen(
                [sys.executable, "-I", __file__, path, old],  # -I: Python's own modules are all it needs
                stdin=file,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a signal to the run is not for it
            )

    def finish_writing(self):
        """Waits for what `write_rollouts` began. Raises OSError where that failed, e.g. on a full disk."""
        if self.writer is None:
            return
        _, printed = self.writer.communicate()
        status = self.writer.returncode
        self.writer = None
        if status != 0:
            error = printed.decode().strip().split("\n")[-1]  # of a traceback, the line that says what
            raise OSError(f"{self.folder}/rollouts: the process that writes it ended with {status} {error}")

    # ---- Checkpoints ---------------------------------------------------------------------------------------

    def save(self, policy, optimizer, source, step, **state):
        """Writes the checkpoint after `step` updates. All ranks call this together.

        source: the model folder whose tokenizer and such policy.save copies. state: more for trainer.json.
        Raises OSError where the disk lacks room.
        """
        folder = self.folder / f"step_{step}"
        partial = self.folder / f"step_{step}.partial"
        trainer = json.dumps({"step": step, **state}, indent=2).encode()
        if step == self.state["step"]:
            # Stopped after the last update, and started again: weights and optimizer are already there.
            if self.writes:
                rewrite(folder / "trainer.json", trainer)
            return
        if self.writes:
            self.finish_writing()  # a run that continues from here does not write these rollouts again
            self.check_room(optimizer.checkpoint_bytes)
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "optimizer").mkdir(parents=True)  # apart: vLLM loads all .safetensors of a folder
        self.world.barrier("room for a checkpoint")  # the folder is there
        optimizer.save(partial / "optimizer")
        self.world.barrier("the optimizer's checkpoint")  # every shard is there
        if self.writes:
            policy.save(partial, source)
            (partial / "trainer.json").write_bytes(trainer)
            for path in [*partial.rglob("*"), partial, self.metrics]:
                sync(path)
            partial.rename(folder)
            self.point_to(step)
            self.remove_old()

    def check_room(self, needed):
        free = shutil.disk_usage(self.folder).free
        if free < 1.1 * needed:
            raise OSError(f"{self.folder}: a checkpoint takes {needed / 2**30:.1f} GiB, only "
                          f"{free / 2**30:.1f} are free: make room, then the same command continues")

    def point_to(self, step):
        """Moves `latest`. After a power cut it is the old link or the new one."""
        link = self.folder / "latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(f"step_{step}")
        sync(self.folder)
        link.replace(self.latest)
        sync(self.folder)

    def remove_old(self):
        for step in self.steps()[:-self.save_total_limit]:
            # Renamed first: killed in between, it is no checkpoint any more, and `cut_back` removes the rest.
            old = self.folder / f"step_{step}.partial-old"
            (self.folder / f"step_{step}").rename(old)
            shutil.rmtree(old)

    def seconds_to_save(self, optimizer):
        """A guess, from writing 32 MiB here. torchrun waits 30 s for a run that it was told to end."""
        if not self.writes:
            return 0.0
        start = time.perf_counter()
        with tempfile.TemporaryFile(dir=self.folder) as probe:
            probe.write(os.urandom(2**25))
            probe.flush()
            os.fsync(probe)
        seconds = time.perf_counter() - start
        return seconds * optimizer.checkpoint_bytes / 2**25

    def close(self):
        """Waits for all that is on its way. Called before the process ends with os._exit."""
        self.finish_writing()
        if self.writes and self.report.online:
            self.report.online.finish()


class Report:
    """Hands rows of metrics to TensorBoard and Weights & Biases, where asked for.

    step: of the next row. What an interrupted run has shown from there on does not appear twice.
    """

    def __init__(self, names, folder, step, options):
        self.board = self.online = None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        if "wandb" in names:
            import wandb
            mark = folder / "wandb_id"
            if not mark.exists():
                rewrite(mark, os.urandom(8).hex().encode())
            with naming("--report_to wandb"):
                self.online = wandb.init(project="minigrpo", name=folder.name, id=mark.read_text(),
                                         resume="allow", dir=str(folder), config=options)

    def __call__(self, row):
        values = {key: value for key, value in row.items() if value is not None}
        if self.board:
            for key, value in values.items():
                self.board.add_scalar(key, value, row["step"])
            self.board.flush()  # the process may be killed
        if self.online and row["step"] >= self.online.step:  # the server keeps what it has seen
            self.online.log(values, step=row["step"])


# ---- Files -------------------------------------------------------------------------------------------------

def number_of(path):
    """N of step_N or step_N.jsonl, -1 for a name of somebody else's."""
    number = path.name.removeprefix("step_").removesuffix(".jsonl")
    return int(number) if number.isdecimal() else -1


@contextlib.contextmanager
def naming(what):
    """Whatever goes wrong inside becomes a ValueError that says where."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from None


def read_object(path):
    with naming(path):
        return {**json.loads(path.read_text())}  # TypeError where it is not an object


def rewrite(path, content):
    """Killed at any moment, it leaves the old content or the new."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def sync(path):
    """Returns when the file or folder is on the disk and would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_lines(path, old):
    """In the process that `write_rollouts` starts: the pickled rows on stdin become lines of JSON."""
    rows = pickle.load(sys.stdin.buffer)
    # A model may write half a surrogate pair, which UTF-8 cannot hold: it stays an escape.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    Path(old).unlink(missing_ok=True)  # now that there are enough others


if __name__ == "__main__":
    write_lines(*sys.argv[1:])
