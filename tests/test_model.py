"""model.py against transformers, against plain formulas, and against itself packed and unpacked."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from checkpoints import FAMILIES, write_checkpoint
from safetensors.torch import load_file, save_file

from model import ModelConfig, Policy, PolicySampler, UserError, checkpoint_folder, sample, token_logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = (folder, write_checkpoint(folder, family))
        return made[family]
    return get


def tokens_of(lengths, vocab=160, seed=1):
    return torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(folders, family):
    folder, oracle = folders(family)
    policy = Policy.from_folder(folder)
    lengths = [3, 1, 70, 12]  # 70 lies past the original context of llama3-rope
    tokens = tokens_of(lengths)
    with torch.no_grad():
        ours = policy.packed(tokens, lengths) @ policy.head_weight.T
        theirs = torch.cat([oracle(seq[None]).logits[0] for seq in tokens.split(lengths)])
    assert theirs.std() > 0.5  # not a flat output that anything equals
    assert (ours - theirs).abs().max() < 1e-4


def test_packed_equals_one_by_one(folders):
    policy = Policy.from_folder(folders("qwen2-untied")[0])
    lengths = [5, 33, 1, 17]
    tokens = tokens_of(lengths)
    with torch.no_grad():
        packed = policy.packed(tokens, lengths)
        single = torch.cat([policy.packed(seq, [len(seq)]) for seq in tokens.split(lengths)])
    assert (packed - single).abs().max() < 1e-5


def test_config_in_the_layout_of_transformers_4(folders, tmp_path):
    folder, _ = folders("llama3-rope")
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"], raw["torch_dtype"] = rope, raw.pop("dtype")
    path.write_text(json.dumps(raw))
    old, new = ModelConfig.from_folder(tmp_path / "m"), ModelConfig.from_folder(folder)
    assert (old.rope_theta, old.rope_scaling["factor"]) == (new.rope_theta, new.rope_scaling["factor"])
    tokens = tokens_of([40])
    assert torch.equal(Policy.from_folder(tmp_path / "m").packed(tokens, [40]),
                       Policy.from_folder(folder).packed(tokens, [40]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_logprobs_equal_the_plain_formula(temperature, chunk):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, dtype=torch.float64, generator=g).requires_grad_() for n in (20, 50))
    targets, upstream = torch.randint(0, 50, (20,), generator=g), torch.randn(20, dtype=torch.float64, generator=g)
    table = (hidden @ weight.T / temperature).log_softmax(-1)
    plain, plain_entropy = table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)
    expected = torch.autograd.grad((plain * upstream).sum(), (hidden, weight))
    logp, entropy = token_logprobs(hidden, weight, targets, temperature, chunk)
    got = torch.autograd.grad((logp * upstream).sum(), (hidden, weight))
    assert torch.allclose(logp, plain, atol=1e-12) and torch.allclose(entropy, plain_entropy, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, expected))


def test_chunked_logprobs_never_hold_tokens_by_vocabulary():
    """Peak resident memory of forward and backward stays far under one [tokens, vocabulary] block (800 MB here)."""
    program = """
import resource, torch
from model import token_logprobs
h = torch.randn(2000, 8, requires_grad=True); w = torch.randn(100_000, 8, requires_grad=True)
token_logprobs(h[:10], w, torch.arange(10), 1.0, 10)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(h, w, torch.arange(2000), 1.0, 50)[0].sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    freed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back, and does not count
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=freed,
                         cwd=__file__.rsplit("/tests/", 1)[0])
    assert int(out.stdout) < 200_000  # KiB; two blocks of 50 rows are 40 MB


@pytest.mark.parametrize("family", FAMILIES)
def test_load_save_load_is_exact_and_transformers_reads_it(folders, tmp_path, family):
    folder, oracle = folders(family)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    policy = Policy.from_folder(folder)
    policy.save(tmp_path / "out", source=folder)
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    again = Policy.from_folder(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters()))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = tokens_of([9])
    assert torch.equal(theirs(tokens[None]).logits, oracle(tokens[None]).logits)


def test_sharded_checkpoints_load(folders, tmp_path):
    folder, oracle = folders("qwen2-untied")
    oracle.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    one, many = Policy.from_folder(folder), Policy.from_folder(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters()))
    many.save(tmp_path / "out", source=tmp_path)
    assert not list((tmp_path / "out").glob("*.index.json"))  # it would name shards that are not there
    Policy.from_folder(tmp_path / "out")


def broken(folders, tmp_path, edit_config=None, edit_tensors=None):
    shutil.copytree(folders("qwen2-untied")[0], tmp_path / "m")
    if edit_config:
        path = tmp_path / "m" / "config.json"
        raw = json.loads(path.read_text())
        edit_config(raw)
        path.write_text(json.dumps(raw))
    if edit_tensors:
        tensors = load_file(tmp_path / "m" / "model.safetensors")
        edit_tensors(tensors)
        save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError) as error:
        Policy.from_folder(tmp_path / "m")
    return str(error.value)


@pytest.mark.parametrize("change, named", [
    (dict(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"), (dict(quantization_config={"bits": 4}), "quantization"),
    (dict(use_sliding_window=True), "sliding window"), (dict(hidden_act="gelu"), "hidden_act"),
    (dict(rope_parameters={"rope_type": "yarn"}), "yarn"), (dict(num_experts=8), "num_experts")])
def test_unsupported_configs_are_refused_by_name(folders, tmp_path, change, named):
    message = broken(folders, tmp_path, lambda raw: raw.update(change))
    assert named in message and ("supported" in message)


def test_wrong_tensors_are_refused_by_name(folders, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    assert name in broken(folders, tmp_path / "a", edit_tensors=lambda t: t.pop(name))
    assert "extra.weight" in broken(folders, tmp_path / "b", edit_tensors=lambda t: t.update({"extra.weight": t[name].clone()}))
    message = broken(folders, tmp_path / "c", edit_tensors=lambda t: t.update({name: t[name][:-1].clone()}))
    assert name in message and "(191, 128)" in message and "(192, 128)" in message
    (tmp_path / "c" / "m" / "model.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(UserError, match="cannot be read"):
        Policy.from_folder(tmp_path / "c" / "m")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_logprobs_equal_the_packed_forward(folders, temperature):
    policy = Policy.from_folder(folders("qwen3-tied")[0])
    prompts = [t.tolist() for t in tokens_of([4, 9, 1]).split([4, 9, 1])]
    drawn = sample(policy, prompts, 12, temperature, seeds=[1, 2, 3], eos_token_ids=[0, 5, 7])
    for prompt, (ids, logps) in zip(prompts, drawn):
        stream = torch.tensor(prompt + ids)
        hidden = policy.packed(stream, [len(stream)])[len(prompt) - 1:-1]
        expected, _ = token_logprobs(hidden, policy.head_weight, stream[len(prompt):], temperature)
        assert torch.allclose(torch.tensor(logps), expected, atol=2e-5)
        assert not set(ids[:-1]) & {0, 5, 7} and (len(ids) == 12 or ids[-1] in (0, 5, 7))


def test_a_sample_depends_on_its_seed_alone(folders):
    policy = Policy.from_folder(folders("qwen3-tied")[0])
    prompts = [[3, 4, 5]] * 3
    together = sample(policy, prompts, 8, 1.0, seeds=[7, 8, 7], eos_token_ids=[1])
    alone = sample(policy, [prompts[0]], 8, 1.0, seeds=[7], eos_token_ids=[1])
    assert together[0][0] == together[2][0] == alone[0][0] != together[1][0]


def test_stop_strings_cut_samples_and_change_nothing_else(folders):
    """Texts of the tokens are their numbers; "5" as a string is also in "15", which is where that sample ends."""
    policy, asked = Policy.from_folder(folders("qwen3-tied")[0]), []

    def completes(ids, stop):
        asked.append(stop)
        return any(string in " ".join(map(str, ids)) for string in stop)

    arguments = dict(n=3, max_tokens=12, temperature=1.0, seeds=[1, 2, 3], eos_token_ids=[0])
    engine, prompts = PolicySampler(policy, completes), [[3, 4, 5], [6], [7, 8]]
    whole = engine.generate(prompts, **arguments)
    assert not asked
    ids = whole[0][0][0]
    stop = [f"{ids[4]} {ids[5]}", "5"]
    expected, cuts = [], set()
    for group in whole:
        expected.append([])
        for ids, logps in group:
            n = next((n for n in range(1, len(ids) + 1) if completes(ids[:n], stop)), len(ids))
            cuts.add((n, n < len(ids)))
            expected[-1].append((ids[:n], logps[:n]))
    assert engine.generate(prompts, stop=stop, **arguments) == expected
    assert len(cuts) > 2 and len(expected[0][0][0]) <= 6 and asked[-1] == stop


def test_samples_follow_the_distribution(folders):
    policy = Policy.from_folder(folders("llama-tied")[0])
    with torch.no_grad():
        p = (policy.packed(torch.tensor([3, 4]), [2])[-1] @ policy.head_weight.T).softmax(-1)
    drawn = sample(policy, [[3, 4]] * 4000, 1, 1.0, seeds=list(range(4000)), eos_token_ids=[1])
    counts = torch.bincount(torch.tensor([ids[0] for ids, _ in drawn]), minlength=160)
    assert (counts / 4000 - p).abs().max() < 4 * (0.25 / 4000) ** 0.5  # four standard errors at worst
    greedy = sample(policy, [[3, 4]], 1, 0.0, seeds=[0], eos_token_ids=[1])
    assert greedy[0][0][0] == int(p.argmax())


def test_hub_ids_fetch_only_what_is_needed(monkeypatch, tmp_path):
    import huggingface_hub

    def fetch(name, allow_patterns):
        assert name == "Qwen/Qwen2.5-0.5B" and not any(p in ("*", "*.safetensors", "*.bin") for p in allow_patterns)
        return str(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert checkpoint_folder("Qwen/Qwen2.5-0.5B") == tmp_path == checkpoint_folder(str(tmp_path))

    def no_network(name, allow_patterns):
        raise OSError("no route to host\nmore")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(UserError, match="no route to host.*hf download Qwen/Qwen2.5-0.5B --local-dir DIR"):
        checkpoint_folder("Qwen/Qwen2.5-0.5B")

    def time_out(name, allow_patterns):
        raise TimeoutError
    monkeypatch.setattr(huggingface_hub, "snapshot_download", time_out)
    with pytest.raises(UserError, match="TimeoutError.*hf download"):
        checkpoint_folder("Qwen/Qwen2.5-0.5B")
    with pytest.raises(UserError, match="no such folder"):
        checkpoint_folder("models/a/b")
