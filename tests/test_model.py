"""model.py against transformers, against plain formulas, and against itself packed and unpacked."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from checkpoints import FAMILIES, LLAMA3_ROPE, write_checkpoint
from safetensors.torch import load_file, save_file

import tiny
from model import ModelConfig, PackedAttention, Policy, checkpoint_folder, parameter_count, token_logprobs


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


def test_padded_attention_equals_the_plain_formula():
    """Every sequence by itself, softmax(q kᵀ / √d) v under a causal mask, forward and backward."""
    lengths, heads, kv_heads, d = [3, 1, 6], 4, 2, 8
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), n, d, dtype=torch.float64, generator=g).requires_grad_() for n in (heads, kv_heads, kv_heads))
    attend = PackedAttention(lengths, "cpu", torch.float64)
    assert attend.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5] and attend.flash is None
    plain = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        b, c = b.repeat_interleave(2, 1), c.repeat_interleave(2, 1)  # each head of keys serves two of queries
        scores = torch.einsum("ihd,jhd->hij", a, b) / d**0.5
        future = torch.ones(len(a), len(a), dtype=torch.bool).triu(1)
        plain.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), c))
    plain, out = torch.cat(plain), attend(q, k, v)
    up = torch.randn(out.shape, dtype=torch.float64, generator=g)
    expected, got = (torch.autograd.grad((x * up).sum(), (q, k, v)) for x in (plain, out))
    assert torch.allclose(out, plain, atol=1e-12) and all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, expected))


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


def test_bf16_is_widened_before_temperature_softmax_and_sums():
    """Of bf16 operands and bf16 logits, as vLLM has them: everything after the matrix product is in fp32."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=g).bfloat16().requires_grad_() for n in (4096, 50))
    targets = torch.randint(0, 50, (4096,), generator=g)
    logp, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, chunk=16)
    table = ((hidden @ weight.T).float() / 0.7).log_softmax(-1)
    assert logp.dtype == torch.float32 and (logp - table.gather(-1, targets[:, None]).squeeze(-1)).abs().max() < 1e-5
    assert (entropy + (table.exp() * table).sum(-1)).abs().max() < 1e-5
    got, = torch.autograd.grad(logp.sum(), weight)
    onehot = torch.nn.functional.one_hot(targets, 50).double()
    exact = ((onehot - table.exp().double()) / 0.7).bfloat16().double().T @ hidden.double()  # as bf16 goes into the product
    assert (got.double() - exact).norm() < 4e-3 * exact.norm()  # 256 sums in bf16 would be off by more


def test_angles_of_a_bf16_policy_are_computed_in_fp32(folders):
    folder, _ = folders("qwen2-tied")
    exact, rounded = Policy.from_folder(folder), Policy.from_folder(folder, dtype=torch.bfloat16)
    tokens = tokens_of([500])  # bf16 has no odd numbers above 256
    with torch.no_grad():
        want, got = exact.packed(tokens, [500]), rounded.packed(tokens, [500]).float()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors[:100].mean() < 0.1 and errors[300:].mean() < 1.5 * errors[:100].mean()


def test_chunked_logprobs_never_hold_tokens_by_vocabulary():
    """Peak resident memory of forward and backward stays far under one [tokens, vocabulary] block (400 MB here)."""
    program = """
import resource, torch
from model import token_logprobs
h = torch.randn(1000, 8, requires_grad=True); w = torch.randn(100_000, 8, requires_grad=True)
token_logprobs(h[:10], w, torch.arange(10), 1.0, 10)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(h, w, torch.arange(1000), 1.0, 50)[0].sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    freed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back, and does not count
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=freed,
                         cwd=__file__.rsplit("/tests/", 1)[0])
    assert int(out.stdout) < 150_000  # KiB; two blocks of 50 rows are 40 MB


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


# ---- What is refused ---------------------------------------------------------------------------------------

@pytest.fixture
def broken(folders, tmp_path):
    """Loads a copy of a good folder after config.json or the tensors were changed: the error's message."""
    def attempt(edit_config=None, edit_tensors=None) -> str:
        folder = shutil.copytree(folders("qwen2-untied")[0], tmp_path / "m", dirs_exist_ok=True)
        if edit_config:
            raw = json.loads((folder / "config.json").read_text())
            edit_config(raw)
            (folder / "config.json").write_text(json.dumps(raw))
        if edit_tensors:
            tensors = load_file(folder / "model.safetensors")
            edit_tensors(tensors)
            save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError) as error:
            Policy.from_folder(folder)
        return str(error.value)
    return attempt


@pytest.mark.parametrize("named, change", [
    ("MixtralForCausalLM", dict(architectures=["MixtralForCausalLM"])), ("quantization", dict(quantization_config={"bits": 4})),
    ("sliding window", dict(use_sliding_window=True)), ("hidden_act gelu", dict(hidden_act="gelu")),
    ("sliding window", dict(layer_types=["full_attention", "sliding_attention"])), ("vision_config", dict(vision_config={"a": 1})),
    ("yarn", dict(rope_parameters={"rope_type": "yarn"})), ("yarn", dict(rope_parameters=None, rope_scaling={"type": "yarn"})),
    ("num_experts", dict(num_experts=8)), ("num_experts", dict(num_local_experts=8))])
def test_what_would_compute_something_else_is_refused_by_name(broken, named, change):
    message = broken(lambda raw: raw.update(change))
    assert "config.json: " in message and named in message and "not supported" in message


@pytest.mark.parametrize("key, value", [
    ("tie_word_embeddings", "no"), ("attention_bias", 1), ("num_hidden_layers", True), ("num_key_value_heads", 0),
    ("vocab_size", 10**15), ("num_hidden_layers", 10**6), ("hidden_size", "128"), ("max_position_embeddings", 512.0),
    ("rms_norm_eps", float("nan")), ("rms_norm_eps", None), ("rope_theta", "1e4"), ("rope_theta", float("inf")),
    ("num_key_value_heads", 3), ("head_dim", 7)])
def test_values_that_python_would_take_are_refused_by_name(broken, key, value):
    def edit(raw):
        raw.pop("rope_parameters", None)
        raw[key] = value
    message = broken(edit)
    assert "config.json: " in message and key in message


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_a_scaled_rope_needs_all_its_numbers(broken, key):
    for value in (None, "8", -1.0):
        message = broken(lambda raw: raw.update(rope_parameters={**LLAMA3_ROPE, key: value}))
        assert "config.json: " in message and key in message


def test_wrong_tensors_are_refused_by_name(broken, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    assert name in broken(edit_tensors=lambda t: t.pop(name))
    file = f"{tmp_path}/m/model.safetensors: "
    message = broken(edit_tensors=lambda t: t.update({"extra.weight": t[name].clone()}))
    assert message.startswith(file) and "extra.weight" in message
    message = broken(edit_tensors=lambda t: t.update({name: t[name][:-1].clone()}))
    assert message.startswith(file) and name in message and "(191, 128)" in message and "(192, 128)" in message
    message = broken(edit_tensors=lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    assert message.startswith(file) and name in message and "quantized" in message
    (tmp_path / "m/model.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(ValueError, match="model.safetensors: .*header"):
        Policy.from_folder(tmp_path / "m")
    (tmp_path / "m/model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors not found .*convert the .bin"):
        Policy.from_folder(tmp_path / "m")
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "model-9.safetensors"}}))
    with pytest.raises(ValueError, match="index.json: .*model-9.safetensors"):
        Policy.from_folder(tmp_path / "m")


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
    with pytest.raises(ValueError, match="no route to host.*hf download Qwen/Qwen2.5-0.5B --local-dir DIR"):
        checkpoint_folder("Qwen/Qwen2.5-0.5B")

    def time_out(name, allow_patterns):
        raise TimeoutError
    monkeypatch.setattr(huggingface_hub, "snapshot_download", time_out)
    with pytest.raises(ValueError, match="TimeoutError.*hf download"):
        checkpoint_folder("Qwen/Qwen2.5-0.5B")
    with pytest.raises(ValueError, match="no such folder"):
        checkpoint_folder("models/a/b")


def test_counting_parameters_draws_no_random_numbers(folders):
    policy = Policy.from_folder(folders("llama-biases")[0])
    state = torch.get_rng_state()
    parameter_count.cache_clear()
    assert parameter_count(policy.config) == sum(p.numel() for p in policy.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# ---- The built-in demonstration ----------------------------------------------------------------------------

def test_rows_of_the_built_in_tasks():
    digits, sums = tiny.rows("digits"), tiny.rows("sums")
    assert len(digits) == tiny.TASKS["digits"] == 100 and digits[75] == {"prompt": "7+5=", "answer": "12"}
    assert len(sums) == 8100 and sums == tiny.rows("sums")
    asked = {row["question"]: row["answer"] for row in sums}
    assert len(asked) == 8100 and asked["What is 10 + 99? Answer with just the number."] == "109"
    assert sums[0] == {"question": "What is 25 + 60? Answer with just the number.", "answer": "85"}  # shuffled, always so


def test_the_tiny_model_is_a_function_of_its_seed(tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.WARM_START, "steps", 2)
    written = []
    for name, seed in ("a", 3), ("b", 3), ("c", 4):
        tiny.write_tiny_model(tmp_path / name, seed)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


def test_the_tiny_model_adds_wrong_more_often_than_right(tmp_path):
    """Right answers are there to be found, but are not the rule."""
    tiny.write_tiny_model(tmp_path, seed=3)
    policy = Policy.from_folder(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("0123456789+=").input_ids == list(range(12)) and tokenizer.eos_token_id == 12
    assert tokenizer.decode([1, 2, 12, 13], skip_special_tokens=True) == "12"
    right = []  # the probability of each right answer
    for row in tiny.rows("digits"):
        prompt, answer = tokenizer(row["prompt"]).input_ids, tokenizer(row["answer"]).input_ids + [12]
        tokens = torch.tensor(prompt + answer)
        with torch.no_grad():
            hidden = policy.packed(tokens, [len(tokens)])[len(prompt) - 1:-1]
            logp, _ = token_logprobs(hidden, policy.head_weight, torch.tensor(answer))
        right.append(logp.sum().exp())
    assert 0.02 < sum(right) / 100 < 0.5
