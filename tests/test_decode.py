"""The short way through a decode step draws what vLLM's own scheduler draws, bit for bit: the real engine on a CPU."""

import json
from pathlib import Path

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from test_colocate import torchrun

HERE = Path(__file__).resolve().parent
CASES = ["fixed", "ragged", "greedy", "one token", "two tokens", "a whole block", "stop strings", "more than slots",
         "up to max_model_len", "prompts of 5640 tokens", "preempted", "prefix cache", "interrupted", "after that"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "qwen2-tied", scale=3.0, vocab_size=259)
    write_tokenizer(folder)
    run = torchrun(1, HERE / "decode_worker.py", folder, folder / "seen.json", timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return json.loads((folder / "seen.json").read_text()) | {"stderr": run.stderr}


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_and_log_probabilities(seen, case):
    assert seen["short"][case] == seen["plain"][case]


def test_each_case_is_what_it_is_called(seen):
    lengths = {name: [len(ids) for group in groups for ids, _ in group] for name, groups in seen["short"].items()
               if name != "interrupted"}
    assert set(lengths["fixed"]) == {70} and set(lengths["one token"]) == {1}
    assert len(set(lengths["ragged"])) > 3 and max(lengths["ragged"]) > 40
    assert len(set(lengths["stop strings"])) > 3
    assert len(lengths["more than slots"]) == 24 and set(lengths["up to max_model_len"]) == {512 - 470}
    assert seen["short_calls"]["preempted"]["_preempt_request"] > 0
    assert seen["short"]["interrupted"] == "broken"
    assert seen["short"]["after that"] == seen["short"]["fixed"]


def test_most_steps_go_the_short_way(seen):
    for case, calls in seen["short_calls"].items():
        share = calls.get("schedule_decoding", 0) / calls["schedule"]
        if case in ("fixed", "ragged", "stop strings", "up to max_model_len"):
            assert share > 0.9, (case, calls)
        if case in ("more than slots", "preempted"):
            assert share > 0.1, (case, calls)  # only while nobody waits
    assert not any(calls.get("schedule_decoding") for calls in seen["plain_calls"].values())


@pytest.mark.parametrize("blocks", [0, 29])
def test_an_asynchronous_scheduler_plans_the_same_steps(seen, blocks):
    """As on a GPU, without a model: the same requests, blocks and tokens step by step, also where blocks run out."""
    plain, short = seen[f"asynchronous {blocks}"]
    assert len(plain["log"]) > 400 and short["log"] == plain["log"] and short["free"] == plain["free"]
    steps = sum(isinstance(entry[0], dict) for entry in plain["log"])
    assert short["short"] > (0.8 if not blocks else 0.3) * steps
    assert short["preempted"] == plain["preempted"] and (short["preempted"] > 0) == (blocks > 0)


def test_nothing_is_left_behind(seen):
    assert seen["short_left"] == seen["plain_left"] and seen["short_left"][:2] == [0, 0]


def test_where_vllm_lacks_something_it_decodes_its_own_way_and_says_so(seen):
    assert seen["without"] == [False, 0]
    assert seen["stderr"].count("warning: this vLLM lacks something_new: it decodes slower") == 1


def test_the_log_probability_of_another_token_ends_the_run(seen):
    assert "another token" in seen["wrong_True"] and "another token" in seen["wrong_False"]
