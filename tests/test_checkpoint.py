"""The run folder alone: what a run leaves, wherever it is killed; what is refused; rollouts and reports."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

import checkpoint
from checkpoint import Report, Run

OPTIONS = {"model": "m", "learning_rate": 0.1, "betas": (0.9, 0.99), "save_steps": 5}
KEYS = ("step", "reward", "kl")


class Saved:
    """A policy and an optimizer in one: what is saved is a few bytes."""

    checkpoint_bytes = 100

    def save(self, folder, source=None):
        (folder / ("weights" if source else "00000.safetensors")).write_text(f"saved in {folder.name}")


def world(rank=0) -> types.SimpleNamespace:
    return types.SimpleNamespace(rank=rank, world_size=1, all_gather=lambda value: [value], barrier=lambda stage: None)


def a_run(out, options=(), **more) -> Run:
    return Run(out, {**OPTIONS, **dict(options)}, world(), free=("save_steps",), **more)


def begun(out, options=(), **more) -> Run:
    run = a_run(out, options, **more)
    run.begin(KEYS)
    return run


def train(run: Run, steps: int, save_every=1, **state) -> None:
    """As far as `steps`, with a row, rollouts and perhaps a checkpoint for each."""
    for step in range(run.state["step"], steps):
        run.record({"step": step, "reward": step / 8})
        run.write_rollouts(step, [rollout(0, reward=step)])
        if (step + 1) % save_every == 0:
            run.save(Saved(), Saved(), Path("source"), step + 1, **state)
    run.finish_writing()
    run.lock.close()  # as when the process ends


def rollout(slot: int, **more) -> dict:
    return {"slot": slot, "completion_ids": [5, 6, 1], "completion": "é\ud83d", **more}


def written(folder, step) -> list[dict]:
    text = (folder / f"rollouts/step_{step}.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def snapshot(folder: Path) -> dict:
    """Every path below the folder, but the lock, with what it is."""
    def state(path):
        if path.is_symlink():
            return os.readlink(path)
        return "folder" if path.is_dir() else path.read_bytes()
    return {str(p.relative_to(folder)): state(p) for p in sorted(folder.rglob("*")) if p.name != "lock"}


# ---- What a run leaves -------------------------------------------------------------------------------------

def test_the_folder_byte_for_byte(tmp_path):
    run = begun(tmp_path / "run", save_total_limit=2, save_rollouts=3)
    run.record({"step": 0, "reward": float("nan"), "other": 1})
    run.lock.close()
    assert (run.folder / "metrics.jsonl").read_text() == '{"step": 0, "reward": null, "kl": null}\n'
    run = begun(tmp_path / "run", save_total_limit=2, save_rollouts=3)
    train(run, 4, data="abc", stopped=False)
    assert snapshot(run.folder) == {
        "config.json": b'{\n  "model": "m",\n  "learning_rate": 0.1,\n  "betas": [\n    0.9,\n    0.99\n  ],\n  "save_steps": 5\n}',
        "metrics.jsonl": b"".join(b'{"step": %d, "reward": %s, "kl": null}\n' % (n, repr(n / 8).encode()) for n in range(4)),
        "latest": "step_4", "rollouts": "folder",
        **{f"rollouts/step_{n}.jsonl": '{"slot": 0, "completion_ids": [5, 6, 1], "completion": "é\\ud83d", "reward": %d}\n'.encode() % n
           for n in (1, 2, 3)},
        **{path: content for n in (3, 4) for path, content in {
            f"step_{n}": "folder", f"step_{n}/weights": f"saved in step_{n}.partial".encode(), f"step_{n}/optimizer": "folder",
            f"step_{n}/optimizer/00000.safetensors": b"saved in optimizer",
            f"step_{n}/trainer.json": f'{{\n  "step": {n},\n  "data": "abc",\n  "stopped": false\n}}'.encode()}.items()}}


class Killed(BaseException):
    """As kill -9 between two calls: nothing of the run goes on."""


OPERATIONS = [(Path, "rename"), (Path, "replace"), (Path, "symlink_to"), (Path, "mkdir"), (Path, "write_bytes"), (Path, "unlink"),
              (shutil, "rmtree"), (checkpoint, "sync"), (Saved, "save")]


def killed_at(monkeypatch, moment: int, run_it) -> bool:
    """Whether run_it() came to its moment-th operation on files, where it ended."""
    count = 0

    def counted(operation):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == moment:
                raise Killed
            return operation(*args, **kwargs)
        return wrapped

    with monkeypatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            run_it()
        except Killed:
            return True
    return False


def test_killed_between_any_two_operations_it_continues_to_the_same_folder(tmp_path, monkeypatch):
    """Also where it is killed a second time while it starts again."""
    def whole(out, steps):
        train(begun(out, save_total_limit=1, save_rollouts=0), steps, save_every=2)

    whole(tmp_path / "undisturbed", 6)
    want = snapshot(tmp_path / "undisturbed")
    moments = 0
    for moment in range(1, 1000):
        out = tmp_path / f"run_{moment}"
        if not killed_at(monkeypatch, moment, lambda: whole(out, 4)):
            break
        moments += 1
        if (out / "latest").exists():
            assert json.loads((out / "latest/trainer.json").read_text())["step"] == int(os.readlink(out / "latest")[5:])
            assert (out / "latest/weights").exists() and (out / "latest/optimizer/00000.safetensors").exists()
        if (out / "config.json").exists():  # it had begun, and may have been in the middle of a row
            with open(out / "metrics.jsonl", "a") as file:
                file.write('{"step": 1, "rew')
        killed_at(monkeypatch, 3, lambda: begun(out, save_total_limit=1, save_rollouts=0))
        whole(out, 6)
        assert snapshot(out) == want, moment
    assert moments > 30


def test_the_last_checkpoint_is_never_away(tmp_path):
    """Stopped in its last update a run has its last weights; to continue it only notes the result."""
    run = begun(tmp_path, save_total_limit=1)
    run.save(Saved(), Saved(), tmp_path, 1, stopped=True)
    run.lock.close()
    again = begun(tmp_path, save_total_limit=1)
    again.save(None, None, tmp_path, 1, finished=True)  # neither weights nor optimizer are touched
    again.lock.close()
    assert a_run(tmp_path).state == {"step": 1, "finished": True}
    assert (tmp_path / "latest/weights").exists() and not list(tmp_path.glob("**/*partial*"))


def test_other_ranks_write_nothing_but_their_shard(tmp_path):
    first = begun(tmp_path)
    state = {"step": 0}
    other = Run(tmp_path, OPTIONS, types.SimpleNamespace(**{**vars(world(1)), "all_gather": lambda value: [state]}))
    before = snapshot(tmp_path)
    other.begin(KEYS)
    other.record({"step": 0})
    other.write_rollouts(0, [rollout(0)])
    assert other.state is state and other.seconds_to_save(Saved()) == 0.0 and snapshot(tmp_path) == before
    (tmp_path / "step_1.partial/optimizer").mkdir(parents=True)  # rank 0 has made it
    other.save(Saved(), Saved(), tmp_path, 1)
    other.close()
    assert {*snapshot(tmp_path)} - {*before} == {"step_1.partial", "step_1.partial/optimizer", "step_1.partial/optimizer/00000.safetensors"}
    assert first.seconds_to_save(Saved()) > 0 and not list(tmp_path.glob("probe*"))


def test_a_disk_without_room_is_found_before_a_checkpoint(tmp_path, monkeypatch):
    run = begun(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=109))
    with pytest.raises(OSError, match="a checkpoint takes 0.0 GiB, only 0.0 are free: make room"):
        run.save(Saved(), Saved(), tmp_path, 1)
    assert not list(tmp_path.glob("step_*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=111))
    run.save(Saved(), Saved(), tmp_path, 1)
    assert os.readlink(tmp_path / "latest") == "step_1"


# ---- What is refused, and what is mended -------------------------------------------------------------------

def test_other_options_are_refused_before_the_first_checkpoint_too(tmp_path):
    run = begun(tmp_path)
    run.record({"step": 0})
    run.lock.close()
    with pytest.raises(ValueError, match=r"config.json is of a run with other options \(learning_rate, new\)"):
        a_run(tmp_path, {"learning_rate": 1.0, "new": 1})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    again = begun(tmp_path, {"save_steps": 7})  # one of those that are free
    assert (tmp_path / "metrics.jsonl").read_text() == "" and again.state == {"step": 0}
    assert json.loads((tmp_path / "config.json").read_text())["save_steps"] == 7


def test_a_folder_that_another_process_has_is_refused(tmp_path):
    script = ("import sys, types; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from checkpoint import Run\n"
              "one = types.SimpleNamespace(rank=0, all_gather=lambda v: [v]); run = Run(Path(sys.argv[2]), {}, one)\n"
              "print('taken', flush=True); sys.stdin.read()")
    holder = subprocess.Popen([sys.executable, "-c", script, Path(checkpoint.__file__).parent, tmp_path], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "taken\n"
    with pytest.raises(ValueError, match=f"in use by process {holder.pid}$"):
        a_run(tmp_path)
    holder.kill()
    holder.communicate()
    assert a_run(tmp_path).state == {"step": 0}
    assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_folder_that_other_hosts_do_not_see_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run is not on a disk that all hosts share"):
        Run(tmp_path / "run", OPTIONS, world(rank=1))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "rollouts", "step_7", "latest"])
def test_what_no_run_wrote_is_not_touched(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").touch()
    before = snapshot(tmp_path)
    for fresh in (False, True):
        with pytest.raises(ValueError, match="which was written by no run"):
            a_run(tmp_path, fresh=fresh)
        assert snapshot(tmp_path) == before and not (tmp_path / "lock").exists()


@pytest.mark.parametrize("out", ["file", "file/run", "/proc/run", "x" * 300])
def test_where_no_folder_can_be_it_is_an_os_error_with_the_name(tmp_path, out):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=out):
        a_run(tmp_path / out)


@pytest.fixture
def stopped(tmp_path):
    """A run after two updates, with the checkpoints of both."""
    train(begun(tmp_path / "run"), 2)
    return tmp_path / "run"


def puts(name, content):
    def edit(run):
        (run / name).unlink(missing_ok=True)
        (run / name).write_bytes(content if type(content) is bytes else json.dumps(content).encode())
    return edit


def row(content, place):
    def edit(run):
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (run / "metrics.jsonl").write_bytes(b"".join([*lines[:place], content, *lines[place:]]))
    return edit


def link(target):
    def edit(run):
        (run / "latest").unlink()
        (run / "latest").symlink_to(target)
    return edit


def gone(name):
    return lambda run: (run / name).unlink()


def latest_is_a_folder(run):
    (run / "latest").unlink()
    (run / "step_2").rename(run / "latest")


def rollouts_is_a_file(run):
    shutil.rmtree(run / "rollouts")
    (run / "rollouts").touch()


NOT_JSON = [b"", b"\0\xff", b"{", b"[" * 100_000]
NOT_OBJECTS = [b"[]", b"5", b"null", b'"x"', b"[[]]", b'[["step", 2]]']


@pytest.mark.parametrize("edit, words", [
    *[(puts(name, content), name) for content in [*NOT_JSON, *NOT_OBJECTS] for name in ("config.json", "latest/trainer.json")],
    *[(puts("latest/trainer.json", {"step": step}), "trainer.json says step .*, but its folder is .*/step_2")
      for step in ("2", 2.0, True, -1, 0, 3, 10**30, None, [2], float("nan"))],
    (puts("config.json", {}), "config.json is of a run with other options (betas, learning_rate, model)"),
    (gone("config.json"), "config.json"), (gone("latest/trainer.json"), "trainer.json"),
    *[(row(content, 1), "metrics.jsonl, line 2") for content in (
        b"garbage\n", b"\0\0\n", b"\xff\n", b"5\n", b"[]\n", b"{}\n", b'{"step": "x"}\n', b'{"step": null}\n', b"\n",
        b'{"step": 0, "rew', b"[" * 100_000 + b"\n")],
    (rollouts_is_a_file, "rollouts"), (latest_is_a_folder, "says step 2, but its folder is .*/latest"),
    (puts("latest", b"step_2"), "latest"), (link("."), "trainer.json"), (link("step_2/optimizer"), "trainer.json")])
def test_damage_is_refused_by_name_and_nothing_is_changed(stopped, edit, words):
    edit(stopped)
    before = snapshot(stopped)
    with pytest.raises((ValueError, OSError), match=words.replace("(", r"\(").replace(")", r"\)")):
        begun(stopped)
    assert snapshot(stopped) == before


def leftovers(run):
    for name in ("step_3/x", "step_3.partial/x", "step_1.partial-old/x"):
        (run / name).parent.mkdir()
        (run / name).touch()


@pytest.mark.parametrize("edit", [
    gone("latest"), link("step_9"), link("latest"), link("step_1"), leftovers,
    *[row(content, 2) for content in (b'{"step": 2, "rew', b"\0\0\0", b"\xff", b"[" * 100_000, b'{"step": 2, "reward": null}\n', b"{")]])
def test_what_a_kill_may_leave_is_mended(stopped, edit):
    mine = ["step_notes/x", "step_2 copy/x", "step_²/x", "step_.partially/x", "rollouts/step_x.jsonl", "notes.txt"]
    for name in mine:
        (stopped / name).parent.mkdir(exist_ok=True)
        (stopped / name).touch()
    edit(stopped)
    train(begun(stopped), 4)
    for name in mine:
        (stopped / name).unlink()
    for name in mine[:4]:
        (stopped / name).parent.rmdir()
    train(begun(stopped.parent / "undisturbed"), 4)
    assert snapshot(stopped) == snapshot(stopped.parent / "undisturbed")


def test_fresh_removes_what_a_run_wrote_and_no_more(stopped):
    for name in ("config.json", "metrics.jsonl", "latest/trainer.json", "wandb_id", "notes.txt"):
        (stopped / name).write_bytes(b"\0garbage\n")
    (stopped / "tensorboard").mkdir()
    begun(stopped, fresh=True)
    options = json.dumps({**OPTIONS, "betas": [0.9, 0.99]}, indent=2).encode()
    assert snapshot(stopped) == {"config.json": options, "metrics.jsonl": b"", "rollouts": "folder", "notes.txt": b"\0garbage\n"}


def test_fresh_does_not_remove_the_model_that_it_starts_from(stopped):
    before = snapshot(stopped)
    for model in (stopped / "latest", stopped / "step_1"):
        with pytest.raises(ValueError, match=f"--fresh would remove --model {model}"):
            a_run(stopped, {"model": str(model)}, fresh=True)
        assert snapshot(stopped) == before


# ---- Rollouts written beside what follows ------------------------------------------------------------------

class Held:
    """rollouts/step_N.jsonl as a pipe: it is not written before somebody reads it."""

    def __init__(self, folder, step):
        self.path = folder / f"rollouts/step_{step}.jsonl"
        os.mkfifo(self.path)

    def read(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def blocked(call) -> threading.Thread:
    """The call in a thread, where it waits."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    return thread


def test_the_last_rollouts_are_kept_and_written_beside_what_follows(tmp_path):
    run = begun(tmp_path, save_rollouts=2)
    held = Held(tmp_path, 0)
    run.write_rollouts(0, [rollout(0)])  # returns, though nothing is written
    run.record({"step": 1, "reward": float("nan")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    next_step = blocked(lambda: run.write_rollouts(1, [rollout(0)]))
    assert not (tmp_path / "rollouts/step_1.jsonl").exists() and [r["slot"] for r in held.read()] == [0]
    next_step.join(600)
    for step in range(2, 6):
        run.write_rollouts(step, [rollout(slot, reward=step) for slot in range(3)])
        run.finish_writing()
        assert {p.name for p in tmp_path.glob("rollouts/*")} == {f"step_{s}.jsonl" for s in (step - 1, step)}
    assert written(tmp_path, 5) == [rollout(slot, reward=5) for slot in range(3)]
    run.close()


def test_no_rollouts_are_written_where_none_are_wanted(tmp_path):
    run = begun(tmp_path, save_rollouts=0)
    run.write_rollouts(0, [rollout(0)])
    assert run.writer is None and not list(tmp_path.glob("rollouts/*"))


def test_writing_rollouts_costs_this_process_almost_nothing(tmp_path, monkeypatch):
    """A thread that made JSON here took turns with the one that launches an update's kernels."""
    logps = [-1 / (3 + i) for i in range(2048)]
    batch = [rollout(slot, prompt_ids=list(range(2048)), sampler_logps=logps, trainer_logps=logps) for slot in range(64)]
    start = time.process_time()
    for r in batch:
        json.dumps(r)
    here = time.process_time() - start
    run = begun(tmp_path)
    with monkeypatch.context() as patch:
        for name in ("encode", "iterencode"):
            patch.setattr(json.JSONEncoder, name, None)  # none is made here
        start = time.process_time()
        run.write_rollouts(1, batch)
        run.finish_writing()
        assert time.process_time() - start < here / 4  # a ninetieth, where the machine is not busy
    assert [r["trainer_logps"] for r in written(tmp_path, 1)] == [logps] * 64  # every bit of them


def test_rollouts_are_written_before_the_checkpoint(tmp_path):
    run = begun(tmp_path)
    held = Held(tmp_path, 0)
    run.write_rollouts(0, [rollout(0)])
    waiting = blocked(lambda: run.save(Saved(), Saved(), tmp_path, 1))
    assert {p.name for p in tmp_path.glob("*")} == {"lock", "config.json", "metrics.jsonl", "rollouts"}
    assert len(held.read()) == 1
    waiting.join(600)
    assert (tmp_path / "latest").exists()


def test_closing_waits_for_the_rollouts(tmp_path):
    run = begun(tmp_path)
    held = Held(tmp_path, 0)
    run.write_rollouts(0, [rollout(0)])
    closing = blocked(run.close)
    assert len(held.read()) == 1
    closing.join(600)
    assert not closing.is_alive()


@pytest.mark.parametrize("then", ["the next step", "the checkpoint", "the end"])
@pytest.mark.parametrize("fault", ["no folder", "killed"])
def test_an_error_while_writing_rollouts_is_an_error_of_the_run(tmp_path, then, fault):
    run = begun(tmp_path)
    if fault == "no folder":
        (tmp_path / "rollouts").rename(tmp_path / "elsewhere")
    else:
        Held(tmp_path, 1)  # so that it is there to be killed
    run.write_rollouts(1, [rollout(0)])
    if fault == "killed":
        run.writer.kill()
    with pytest.raises(OSError, match="No such file.*rollouts/step_1.jsonl" if fault == "no folder" else "ended with -9"):
        if then == "the next step":
            run.write_rollouts(2, [])
        elif then == "the checkpoint":
            run.save(Saved(), Saved(), tmp_path, 1)
        else:
            run.close()
    assert not list(tmp_path.glob("step_*"))


def test_a_signal_to_the_run_does_not_reach_the_process_that_writes(tmp_path):
    run = begun(tmp_path)
    held = Held(tmp_path, 0)
    run.write_rollouts(0, [rollout(0)])
    assert os.getsid(run.writer.pid) == run.writer.pid != os.getsid(0)
    assert len(held.read()) == 1
    run.close()


# ---- TensorBoard -------------------------------------------------------------------------------------------

def test_tensorboard_holds_the_numbers_of_the_rows(tmp_path, monkeypatch):
    board = types.SimpleNamespace(calls=[], SummaryWriter=lambda folder, purge_step: board)
    board.add_scalar, board.flush = lambda *a: board.calls.append(a), lambda: board.calls.append("flush")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    Report(["tensorboard"], tmp_path, 0, {})({"step": 3, "reward": 0.5, "kl": None})
    assert board.calls == [("step", 3, 3), ("reward", 0.5, 3), "flush"]


def test_real_tensorboard_shows_each_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for first, steps in ((0, range(5)), (2, range(2, 6))):  # it had shown 2, 3 and 4 when it was killed
        report = Report(["tensorboard"], tmp_path, first, {})
        for step in steps:
            report({"step": step, "reward": first + step / 8, "kl": None})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(e.step, e.value) for e in events.Scalars("reward")]
    assert shown == [(0, 0), (1, 0.125), (2, 2.25), (3, 2.375), (4, 2.5), (5, 2.625)]
    assert events.Tags()["scalars"] == ["step", "reward"]
