"""--replay: the recorded rollouts of a run instead of an engine. The same loss, the same bits; other runs are refused."""

import json
import shutil
from pathlib import Path

import pytest
import ranks

import config
from colocate import Completion
from config import parse
from engines import RecordedEngine, recorded_steps
from minigrpo import Health

FLAGS = ["--max_steps", "4", "--prompts_per_step", "6", "--num_generations", "6", "--eval_steps", "2"]
VARYING = ("time/", "tokens_per_second", "mfu", "memory/", "eval/")


def like(run: Path) -> list[str]:
    """Flags for the model of a run, which so is made only once."""
    return [*ranks.as_tiny(run / "tiny"), *FLAGS]


def finished(*flags) -> str:
    """One rank and no engine of vLLM."""
    code, said, errors = ranks.program(*flags)
    assert code == 0, said[-2000:] + errors[-3000:]
    return said


def replayed(out, run, *flags) -> str:
    return finished(*like(run), "--out", out, "--replay", run, *flags)


def rows(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in lines]


def weights(out: Path) -> bytes:
    return (out / "latest/model.safetensors").read_bytes()


def rollouts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("rollouts/*")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run in which the policy sampled for itself. Its model is the built-in one."""
    out = tmp_path_factory.mktemp("recorded") / "run"
    finished(*FLAGS, "--out", out)
    return out


def test_replay_is_the_recorded_run_to_the_last_bit_and_so_is_another(recorded, tmp_path):
    said = finished(*FLAGS, "--out", tmp_path / "a", "--replay", recorded)
    assert "replays 4 steps" in said and "no evaluation" in said and "accuracy" not in said
    assert (tmp_path / "a/tiny/model.safetensors").read_bytes() == (recorded / "tiny/model.safetensors").read_bytes()
    assert rows(tmp_path / "a") == rows(recorded) and weights(tmp_path / "a") == weights(recorded)
    assert rollouts(tmp_path / "a") == rollouts(recorded) and len(rollouts(recorded)) == 4
    replayed(tmp_path / "b", recorded)
    assert rows(tmp_path / "b") == rows(tmp_path / "a") and weights(tmp_path / "b") == weights(tmp_path / "a")
    metrics = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["eval/accuracy"] for row in metrics] == [None] * 5


def test_the_learning_rate_is_that_of_the_whole_run_where_only_its_begin_was_kept(recorded, tmp_path):
    copy = broken(recorded, tmp_path)
    for step in (2, 3):
        (copy / f"rollouts/step_{step}.jsonl").unlink()
    replayed(tmp_path / "a", copy)
    assert rows(tmp_path / "a")[:-1] == rows(recorded)[:2]
    assert rows(recorded)[1]["learning_rate"] == pytest.approx(1e-3 * 3 / 4)  # linear, over four steps


def test_another_loss_of_the_same_completions(recorded, tmp_path):
    replayed(tmp_path / "a", recorded, "--loss_type", "dr_grpo", "--max_completion_length", 8, "--max_steps", 3)
    ours, theirs = rows(tmp_path / "a"), rows(recorded)
    assert [row["step"] for row in ours] == [0, 1, 2, 3]  # fewer were wanted than were recorded
    for a, b in zip(ours[:-1], theirs):
        assert a["reward"] == b["reward"] and a["completions/mean_length"] == b["completions/mean_length"]
    assert abs(ours[0]["loss"] - theirs[0]["loss"]) > 1e-3 * abs(theirs[0]["loss"])
    assert abs(ours[0]["grad_norm"] / theirs[0]["grad_norm"] - 1) > 1e-3
    assert weights(tmp_path / "a") != weights(recorded)


def test_two_ranks_replay_a_colocated_run(colocated, tmp_path):
    """Recorded by the real engine, on two ranks."""
    run, flags = colocated
    flags = [*ranks.as_tiny(run / "tiny"), *flags, "--replay"]
    ranks.finish(ranks.start(2, "minigrpo.py", *flags, run, "--out", tmp_path / "two"))
    finished(*flags, run, "--out", tmp_path / "one")
    two, one, theirs = rows(tmp_path / "two"), rows(tmp_path / "one"), rows(run)
    assert theirs[0]["grad_norm"] > 0
    for ours, steps in ((two, 4), (one, 1)):  # one rank adds up in another order, and later weights differ by it
        for a, b in zip(ours[:steps], theirs):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6, abs=1e-7) and a["reward"] == b["reward"]
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)
    finished(*flags, tmp_path / "one", "--out", tmp_path / "again")  # what a replay records can be replayed
    assert weights(tmp_path / "again") == weights(tmp_path / "one")


def test_a_killed_replay_continues(recorded, tmp_path):
    out = tmp_path / "a"
    replayed(out, recorded, "--save_steps", 2)
    shutil.rmtree(out / "step_4")
    (out / "latest").unlink()
    assert "continues after update 2" in replayed(out, recorded, "--save_steps", 2)
    assert rows(out) == rows(recorded) and weights(out) == weights(recorded)


def steps_of(recorded, *flags) -> int:
    c = parse([*FLAGS, "--replay", str(recorded), *map(str, flags)])
    return recorded_steps(recorded, vars(c), c.max_steps)


@pytest.mark.parametrize("flags, words", [
    (["--seed", 1], ["--seed 1", "recorded with 0"]),
    (["--prompts_per_step", 5], ["--prompts_per_step 5", "recorded with 6"]),
    (["--num_generations", 2], ["--num_generations 2", "recorded with 6"]),
    (["--dynamic_sampling_rounds", 1], ["--dynamic_sampling_rounds 1", "recorded with 0"]),
    (["--data", "digits", "p.jsonl"], ["--data digits p.jsonl", "recorded with digits"]),
    (["--temperature", 0.5], ["--temperature 0.5", "recorded with 1.0"]),
    (["--data", "p.jsonl"], ["--data p.jsonl", "recorded with digits"]),
    (["--model", "other/model"], ["--model model", "recorded with tiny"])])
def test_other_options_are_refused(recorded, flags, words):
    with pytest.raises(ValueError) as caught:
        steps_of(recorded, *flags)
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_that_differs_is_said_at_once(recorded):
    with pytest.raises(ValueError, match="--seed 1: .*; --temperature 0.5: .*; .* would be overwritten: give another --out"):
        steps_of(recorded, "--seed", 1, "--temperature", 0.5, "--out", recorded)
    assert steps_of(recorded) == 4 and steps_of(recorded, "--max_steps", 3) == 3


@pytest.mark.parametrize("engine", ["--colocate", "--split"])
def test_an_engine_beside_the_recorded_one_is_refused(engine):
    with pytest.raises(ValueError, match="--replay exclude"):
        config.check(parse(["--replay", "run", engine]))


def refused(out, recorded, *flags, words):
    code, _, errors = ranks.program(*like(recorded), "--out", out, *flags)
    assert code == 1 and "Traceback" not in errors, errors[-2000:]
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line


def broken(recorded, tmp_path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(recorded, tmp_path / "broken", symlinks=True))


@pytest.mark.parametrize("step", [0, 2])
def test_a_missing_step_is_named(recorded, tmp_path, step):
    copy = broken(recorded, tmp_path)
    (copy / f"rollouts/step_{step}.jsonl").unlink()
    with pytest.raises(ValueError, match=f"step {step}: record with --save_rollouts"):
        steps_of(copy)
    if step:
        assert steps_of(copy, "--max_steps", step) == step  # those before it are there


def test_no_rollouts_no_run_and_the_run_itself(recorded, tmp_path):
    copy = broken(recorded, tmp_path)
    refused(copy, recorded, "--replay", copy, "--fresh", words=["overwritten", "--out"])
    assert rollouts(copy) == rollouts(recorded) and weights(copy) == weights(recorded)
    shutil.rmtree(copy / "rollouts")
    refused(tmp_path / "out", recorded, "--replay", copy, words=["step 0", "--save_rollouts"])
    refused(tmp_path / "out", recorded, "--replay", tmp_path / "nowhere", words=["--replay", "nowhere/config.json"])


def test_a_replay_that_went_further_than_the_record_now_goes_is_one_line(recorded, tmp_path):
    copy, out = broken(recorded, tmp_path), tmp_path / "out"
    replayed(out, copy)
    (out / "latest/trainer.json").write_text('{"step": 4}')  # as if it had been stopped there
    for step in (2, 3):
        (copy / f"rollouts/step_{step}.jsonl").unlink()
    refused(out, copy, "--replay", copy, words=["is at update 4", "for 2"])


def ask(folder, step, **changes):
    """The recorded engine for the completions of the first prompt of a step."""
    r = json.loads((folder / f"rollouts/step_{step}.jsonl").read_bytes().splitlines()[0])
    asked = {"prompt_ids": r["prompt_ids"], "seed": r["seed"], **changes}
    engine = RecordedEngine(folder)
    engine.wake((), version=step)
    return engine.generate([asked["prompt_ids"]], n=6, seeds=[asked["seed"]], temperature=1.0)


def test_it_answers_by_seed_and_prompt(recorded):
    want = [json.loads(line) for line in (recorded / "rollouts/step_1.jsonl").read_text().splitlines()[:6]]
    assert ask(recorded, 1) == [[Completion(r["completion_ids"], r["sampler_logps"]) for r in want]]
    for changes in ({"seed": 5}, {"seed": want[1]["seed"]}, {"prompt_ids": [3, 4]}):
        with pytest.raises(ValueError, match=r"rollouts/step_1\.jsonl has completions of other prompts"):
            ask(recorded, 1, **changes)


@pytest.mark.parametrize("change", [
    lambda line: line[:40], lambda line: "[" * 100000, lambda line: "3", lambda line: "\xff",
    lambda line: line.replace('"completion_ids": [', '"completion_ids": ["x", '),
    lambda line: line.replace('"sampler_logps": [', '"sampler_logps": [-1.0, '),
    lambda line: line.replace('"sampler_logps": [', '"sampler_logps": [null], "x": ['),
    lambda line: line.replace('"completion_ids": [', '"completion_ids": [], "x": ['),
    lambda line: line.replace('"seed": ', '"seed": [1], "x": '), lambda line: line.replace('"seed"', '"speed"')])
def test_damage_is_named(recorded, tmp_path, change):
    file = broken(recorded, tmp_path) / "rollouts/step_1.jsonl"
    first, second, *lines = file.read_text().splitlines()
    file.write_bytes("\n".join([first, change(second), *lines]).encode("latin-1"))
    with pytest.raises(ValueError, match=r"rollouts/step_1\.jsonl, line 2, is damaged"):
        ask(tmp_path / "broken", 1)


@pytest.mark.parametrize("text", ["{", "[" * 100000, "\xff", "[]", "3"])
def test_a_damaged_config_is_named(recorded, tmp_path, text):
    copy = broken(recorded, tmp_path)
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"broken/config\.json is not that of a run"):
        steps_of(copy)


@pytest.mark.parametrize("damage, words", [
    (lambda rows: rows[0].update(prompt_ids=[3]), ["step_2.jsonl has completions of other prompts"]),
    (lambda rows: rows[5].pop("sampler_logps"), ["step_2.jsonl, line 6, is damaged"])])
def test_a_later_step_is_read_before_the_first_update(recorded, tmp_path, damage, words):
    """The rehearsal: nothing of the run was written when it is refused."""
    file = broken(recorded, tmp_path) / "rollouts/step_2.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    damage(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(tmp_path / "out", recorded, "--replay", tmp_path / "broken", words=["--replay", *words])
    assert not (tmp_path / "out/metrics.jsonl").exists() or not (tmp_path / "out/metrics.jsonl").read_text()


def test_health_lets_the_gap_grow_in_a_replay():
    row = {"entropy": 1.0, "reward": 0.0, "skipped_updates": 0, "broken_logprobs": 0, "trained_tokens": 9}
    for replay in (False, True):
        health, warned = Health(max_skipped=10, replay=replay), []
        for step in range(12):
            warned += health.check({**row, "step": step, "logprob_gap/mean": 0.001 if step < 10 else 9.0}, [])
        assert len(warned) == (0 if replay else 1)
