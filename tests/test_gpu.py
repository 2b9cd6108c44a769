"""What only a GPU can tell. Skipped without one; run by hand: python -m pytest -q tests/test_gpu.py"""

import pytest
import torch
from checkpoints import write_checkpoint

from model import PackedAttention, Policy, token_logprobs
from sharded import ShardedAdamW, World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_flash_attention_equals_padded_attention_forward_and_backward():
    lengths = [5, 130, 1, 64]
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), heads, 64) for heads in (6, 2, 2)]
    q, k, v = (torch.randn(s, device="cuda", generator=g).bfloat16().requires_grad_() for s in shapes)
    up = torch.randn(shapes[0], device="cuda", generator=g)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    fast = PackedAttention(lengths, "cuda", torch.bfloat16)
    slow = PackedAttention(lengths, "cuda", torch.float32)
    assert fast.flash and not slow.flash
    out, reference = fast(q, k, v), slow(*exact)
    (out.float() * up).sum().backward()
    (reference * up).sum().backward()
    for got, want in [(out, reference), (q.grad, exact[0].grad), (k.grad, exact[1].grad), (v.grad, exact[2].grad)]:
        assert (got.float() - want).norm() / want.norm() < 1e-2  # bf16 operands; a wrong mask gives order 1


@pytest.mark.parametrize("family", ["qwen2-tied", "llama3-rope", "qwen3-untied"])
def test_bf16_on_a_gpu_is_near_fp32_on_a_cpu(tmp_path, family):
    write_checkpoint(tmp_path, family, scale=3.0)
    exact, fast = Policy.from_folder(tmp_path), Policy.from_folder(tmp_path, "cuda", torch.bfloat16)
    lengths = [3, 40, 17]
    tokens = torch.randint(0, 160, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1)
    want, entropy = token_logprobs(exact.packed(tokens, lengths), exact.head_weight, targets)
    got, got_entropy = token_logprobs(fast.packed(tokens.cuda(), lengths), fast.head_weight, targets.cuda())
    assert (got.cpu() - want).abs().mean() < 0.05 and (got_entropy.cpu() - entropy).abs().mean() < 0.05
    want.mean().backward()
    got.mean().backward()
    a, b = exact.model.embed_tokens.weight.grad, fast.model.embed_tokens.weight.grad.cpu().float()
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99


def test_an_optimizer_in_the_cpus_memory_takes_the_same_steps(tmp_path):
    write_checkpoint(tmp_path, "qwen2-tied")
    moved = []
    for offload in (False, True):
        policy = Policy.from_folder(tmp_path, "cuda", torch.bfloat16)
        optimizer = ShardedAdamW(policy.parameters(), lr=1e-3, offload=offload, world=World())
        before = optimizer.master.clone().cpu()
        assert optimizer.master.is_cuda != offload and all(s.is_cuda != offload for s in optimizer.state.values())
        for step in range(3):
            optimizer.zero_grad()
            tokens = torch.arange(20, device="cuda") + step
            logp, _ = token_logprobs(policy.packed(tokens, [20]), policy.head_weight, tokens.roll(-1))
            logp.sum().backward()
            assert optimizer.step() > 0
        assert torch.equal(optimizer.master.cpu().bfloat16(), optimizer.weights.cpu())
        moved.append(optimizer.master.cpu() - before)
        saved = tmp_path / f"optimizer-{offload}"
        saved.mkdir()
        optimizer.save(saved)
        again = ShardedAdamW(policy.parameters(), lr=1e-3, offload=offload, world=World())
        again.load(saved)
        assert all(torch.equal(again.saved[name], optimizer.saved[name]) for name in again.saved)
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[0].norm()  # where a gradient is about 0, its sign is chance
