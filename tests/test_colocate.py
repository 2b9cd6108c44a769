"""The real vLLM engine on two CPU ranks: invariants H1 to H5, and tests of their tests (red when broken)."""

import gc
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import colocate
from colocate import ColocatedEngine, bit_sum, check_push, checkpoint_shapes

HERE = Path(__file__).resolve().parent


def torchrun(ranks: int, *command, timeout=600):
    """Runs a command on that many ranks; CompletedProcess with returncode, stdout and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv-backend=c10d",
         "--rdzv-endpoint=localhost:0", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on; SIGKILL would leave the ranks running
        out, err = process.communicate(timeout=60)
        pytest.fail(f"hangs: {out[-2000:]}{err[-2000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module", params=[("qwen2-tied", 2), ("llama-biases", 1), ("qwen3-untied", 1)], ids=lambda p: f"{p[0]} on {p[1]}")
def seen(request, tmp_path_factory):
    """What each rank saw; two of them for one family only, because an engine takes half a minute to start."""
    family, size = request.param
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out")
    write_checkpoint(folder, family, scale=3.0)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": 1, "repetition_penalty": 1.5, "top_p": 0.5, "temperature": 0.1, "do_sample": True}))
    run = torchrun(size, HERE / "engine_worker.py", folder, out)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-12000:]
    assert all((out / f"closed{rank}").exists() for rank in range(size))  # close() left no process group behind
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(size)]


def test_h1_engine_equals_trainer_after_every_push(seen):
    for rank in seen:
        assert len(rank["gap"]) == 3 and max(rank["gap"]) < 1e-5
        assert max(rank["gap_after_reset"], rank["gap_after_refusals"]) < 1e-5
        assert min(rank["lengths"]) > 0 and rank["eos_only_last"] and rank["greedy_is_argmax"]


def test_h1_goes_red_without_the_push(seen):
    assert all(rank["red_no_push"] > 1e-3 for rank in seen)


def test_stop_strings_cut_completions_and_change_nothing_else(seen):
    for rank in seen:
        assert rank["stopped_as_expected"] == [True, True] and max(rank["stop_gap"]) < 1e-5
        some, every = rank["stop_cuts"]
        assert max(some) > 0 == min(some) and min(every) > 0 and rank["left_running"] == []


def test_h2_an_engine_asleep_refuses(seen):
    for rank in seen:
        assert "asleep" in rank["asleep_at_first"] and "asleep" in rank["asleep_again"]
        assert rank["weight_version"] == 2 and not rank["awake_after_sleep"]


def test_h3_prefix_cache_is_reset_and_the_test_would_notice(seen):
    for rank in seen:
        assert rank["cached_tokens"] > 0, "no prefix was cached: this test proves nothing"
        assert rank["red_stale_cache"] > 1e-3


def test_h3_wrong_pushes_are_refused_by_name(seen):
    for rank in seen:
        name = "model.layers.0.self_attn.k_proj.weight"
        assert "missing" in rank["missing"] and name in rank["missing"]
        assert "shape" in rank["misshapen"] and name in rank["misshapen"]
        assert "twice" in rank["doubled"] and name in rank["doubled"]
        assert "model.extra.weight" in rank["unknown"] and rank["asleep_after_refusal"]


def test_h4_seeds_decide_alone(seen):
    for rank in seen:
        assert rank["random_state_kept"]
        assert rank["samples"] == rank["again"]
        assert len({tuple(ids) for ids in rank["samples"][:3]}) == 3  # samples of a group differ
    assert all(rank["samples"] != seen[0]["samples"] for rank in seen[1:]) and seen[0]["no_prompts"] == []


def test_h5_generation_config_changes_nothing_and_the_test_would_notice(seen):
    for rank in seen:
        assert rank["defaults_are_neutral"] == [1.0, 1.0, 1.0]
        assert rank["red_penalty"] > 1e-3


class RecordingEngine(ColocatedEngine):
    """Everything of ColocatedEngine but vLLM, which is a recorder."""

    def __init__(self, cuda: bool, tied: bool, sums_agree: bool = True):
        self.calls, self.cuda, self.sleeps, self.copied_head, self.times = [], cuda, cuda, tied and not cuda, {}
        self.expected = {"model.embed_tokens.weight": (4, 2)}
        self.awake, self.llm, self.given_back, agree = False, self, 10 * 2**30, sums_agree

        def record(name, result=None):
            return lambda *args, **kwargs: (self.calls.append((name, *args, *kwargs.get("tags", ()))), result)[1]

        self.wake_up, self.reset_prefix_cache = record("wake_up"), record("reset_prefix_cache", True)
        self.collective_rpc = record("reload_weights")
        pushed = torch.arange(8).view(4, 2).float()
        self.apply_model = lambda fn: (self.calls.append(("apply_model",)), [bit_sum([pushed]) + (not agree)])[1]


def test_h3_order_of_waking(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.calls.append(("empty_cache",)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 2**30))
    engine, free = RecordingEngine(cuda=True, tied=True), 10 * 2**30  # what it gave back, and nothing to spare
    weights = [("model.embed_tokens.weight", torch.arange(8).view(4, 2).float())]
    engine.wake(weights, version=5)
    assert [c[:2] for c in engine.calls] == [
        ("empty_cache",), ("wake_up", "weights"), ("apply_model",), ("wake_up", "kv_cache"),
        ("reset_prefix_cache",), ("apply_model",)]  # the first apply_model pushes, the second sums
    assert engine.awake and engine.weight_version == 5
    engine.calls, free = [], 12 * 2**30
    engine.wake(weights)
    assert engine.calls[0] == ("wake_up", "weights")  # with room for the engine the trainer keeps its cache
    broken = RecordingEngine(cuda=True, tied=True, sums_agree=False)
    for before in (False, True):  # awake already, it has not these weights either
        broken.awake = before
        with pytest.raises(RuntimeError, match="handoff broken"):
            broken.wake(weights)
        assert not broken.awake


def test_h3_shapes_are_those_of_the_files_in_use(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    save_file({"b": torch.zeros(4), "rotary_emb.inv_freq": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    assert checkpoint_shapes(tmp_path) == {"a": (2, 3)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"b": "model-00001-of-00002.safetensors"}}')
    assert checkpoint_shapes(tmp_path) == {"b": (4,)}  # what else lies there is not of this model
    index.write_text('{"weight_map": {"b": "model-2.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/model-2.safetensors"):
        checkpoint_shapes(tmp_path)
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(SafetensorError):
        checkpoint_shapes(tmp_path)


def test_sleep_leaves_the_trainers_objects_and_memory_alone(monkeypatch):
    engine, free, emptied = RecordingEngine(cuda=True, tied=True), iter((3 * 2**30, 8 * 2**30)), []
    empty_cache, collect = (lambda: emptied.append(1)), (lambda *a: emptied.append(2))
    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 80 * 2**30))
    engine.awake = True
    gc.freeze()  # vLLM does, when it is built, with its own objects
    frozen = gc.get_freeze_count()

    def sleep(level):
        gc.collect()  # as vLLM does
        torch.cuda.empty_cache()
        assert level == 2 and not engine.awake

    engine.llm = types.SimpleNamespace(sleep=sleep)
    engine.sleep()
    assert not emptied and engine.given_back == 5 * 2**30 and engine.times["sleep"] > 0
    assert torch.cuda.empty_cache is empty_cache and gc.collect is collect and gc.get_freeze_count() == frozen > 1000
    gc.unfreeze()


def test_tied_head_is_pushed_on_a_cpu_only(monkeypatch):
    engine, pushed = RecordingEngine(cuda=False, tied=True), []
    monkeypatch.setattr(RecordingEngine, "push", lambda self, pairs: pushed.extend(name for name, _ in pairs))
    engine.wake([("model.embed_tokens.weight", torch.zeros(4, 2))])
    assert pushed == ["model.embed_tokens.weight", "lm_head.weight"]


def test_checksum_is_independent_of_order_and_sees_one_bit():
    a, b = torch.randn(5, 3).bfloat16(), torch.randn(7).bfloat16()
    assert bit_sum([a, b]) == bit_sum([b.flip(0), a.T.contiguous()]) == bit_sum([torch.cat([a.flatten(), b])])
    other = b.clone()
    other.view(torch.int16)[3] ^= 1
    assert bit_sum([a, other]) != bit_sum([a, b])


def test_a_wrong_push_is_named():
    a, b = torch.zeros(4, 2), torch.zeros(3)
    check_push([("b", b), ("a", a)], {"a": (4, 2), "b": (3,)})
    for pairs, words in (([("a", a)], r"weights missing: b \(1 in all\)"), ([("a", a), ("b", b), ("a", a)], "pushed twice: a "),
                         ([("a", a), ("b", b), ("c", b)], "not in the checkpoint: c "),
                         ([("a", a.T), ("b", b)], r"another shape than in the checkpoint: a \(2, 4\) instead of \(4, 2\)")):
        with pytest.raises(ValueError, match=words):
            check_push(pairs, {"a": (4, 2), "b": (3,)})


def test_what_a_person_can_get_wrong(monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="^MASTER_PORT not set.*torchrun"):
        colocate.check_environment(cuda=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match="expandable_segments"):
        colocate.check_environment(cuda=True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 2**30, 80 * 2**30))
    with pytest.raises(ValueError, match=r"24.0 GiB, but 10.0 of 80.0 GiB are free.*--vllm_gpu_memory_utilization to 0.11"):
        colocate.check_free_memory(0.3)
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        checkpoint_shapes(tmp_path)

    def version(found):
        def look_up(package):
            if package in found:
                return found[package]
            raise colocate.importlib.metadata.PackageNotFoundError
        monkeypatch.setattr(colocate.importlib.metadata, "version", look_up)

    version({})
    with pytest.raises(ValueError, match="installed is none.*requirements"):
        colocate.check_vllm()
    for bad in ("0.25.1", "0.34.0", "1.0.0"):
        version({"vllm": bad})
        with pytest.raises(ValueError, match=f"0.26 to 0.33 is needed, installed is {bad}"):
            colocate.check_vllm()


def test_untried_versions_start_with_one_warning(monkeypatch, capsys):
    monkeypatch.setattr(colocate.importlib.metadata, "version", lambda package: "0.29.1")
    colocate.check_vllm()
    assert "0.29.1 was not tried" in capsys.readouterr().err
    monkeypatch.setattr(colocate.importlib.metadata, "version", lambda package: "0.26.0+cu130")
    colocate.check_vllm()
    assert capsys.readouterr().err == ""


def test_colocate_alone_proves_the_handoff_also_of_a_tied_head_that_is_stored_twice(tmp_path):
    """A trainer pushes the table once; newer versions of vLLM then build a head of its own, which must not be forgotten."""
    write_checkpoint(tmp_path, "qwen2-tied", scale=3.0)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run = torchrun(1, HERE.parent / "colocate.py", tmp_path, "--rounds", "2")
    assert run.returncode == 0, run.stderr[-3000:]
    rounds = [line for line in run.stdout.splitlines() if line.startswith("round")]
    assert len(rounds) == 2 and all(float(line.split("gap mean ")[1].split()[0]) < 1e-5 for line in rounds)
    assert "\nproven: the engine computes what the policy computes" in run.stdout


def test_colocate_without_torchrun_is_one_line(tmp_path):
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    run = subprocess.run([sys.executable, HERE.parent / "colocate.py", tmp_path], capture_output=True, text=True, env=clean)
    assert run.returncode == 1 and "torchrun" in run.stderr and len(run.stderr.splitlines()) == 1, run.stderr
