"""The third side of the comparison with TRL: a GRPO loop with no product around it, one JSON line with its speed.

    python benchmarks/trl/bare.py --case 0.8M --model runs/trl/0.8M --prompts runs/trl/prompts-0-60.jsonl --seed 0 \\
        --steps 60

Plain PyTorch in one file: sampling with a shared prompt cache (one prefill for each prompt, forked for its group), one
packed training pass in which a prompt stands once for its group, AdamW. No metrics, samples, checkpoints, checks, or
settings; all prompts have the same length, no response stops at a string, and the reward is called as a function. What
it leaves out is what a product costs. Uses nothing of TRL or Hone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import BETAS, CASES, CHARACTERS, GROUP_SIZE, LEARNING_RATE, PROMPTS_PER_STEP, correct
from safetensors.torch import load_file
from torch import Tensor

ROWS = PROMPTS_PER_STEP * GROUP_SIZE
VOCABULARY = ["<pad>", "<eos>", *CHARACTERS]
EOS = 1

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v), each (X, H, D) -> (X, H, D)."""


class Qwen3:
    """A Qwen3 model on a flat list of tokens, with float32 master weights."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads, self.head_dim = (
            config[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim")
        )
        stored = load_file(folder / "model.safetensors")
        stored = {name.removeprefix("model."): value.float() for name, value in stored.items()}
        for i in range(self.layers):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            stored[f"{i}.qkv"] = torch.cat([stored.pop(f"{attention}.{part}_proj.weight") for part in "qkv"])
            stored[f"{i}.gate_up"] = torch.cat([stored.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")])
        self.master = {name: value.requires_grad_() for name, value in stored.items() if name != "lm_head.weight"}
        self.weights = {
            name: value.detach().to(dtype, copy=True).requires_grad_() for name, value in self.master.items()
        }
        theta = config["rope_parameters"]["rope_theta"]
        inverse = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angle = torch.arange(config["max_position_embeddings"])[:, None] * inverse
        self.cos, self.sin = (x.repeat(1, 2).to(dtype)[:, None] for x in (angle.cos(), angle.sin()))

    def __call__(self, tokens_X: Tensor, position_X: Tensor, attend: Attend) -> Tensor:
        """(X, h) final hidden states."""
        w, size = self.weights, (self.head_dim,)
        x, cos, sin = w["embed_tokens.weight"][tokens_X], self.cos[position_X], self.sin[position_X]

        def rotate(x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat((-right, left), -1) * sin

        for i in range(self.layers):
            name = f"layers.{i}."
            normed = F.rms_norm(x, x.shape[1:], w[f"{name}input_layernorm.weight"], 1e-6)
            q, k, v = F.linear(normed, w[f"{i}.qkv"]).view(len(x), 3, self.heads, -1).unbind(1)
            q = rotate(F.rms_norm(q, size, w[f"{name}self_attn.q_norm.weight"], 1e-6))
            k = rotate(F.rms_norm(k, size, w[f"{name}self_attn.k_norm.weight"], 1e-6))
            x = x + F.linear(attend(i, q, k, v).flatten(1), w[f"{name}self_attn.o_proj.weight"])
            normed = F.rms_norm(x, x.shape[1:], w[f"{name}post_attention_layernorm.weight"], 1e-6)
            gate, up = F.linear(normed, w[f"{i}.gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[f"{name}mlp.down_proj.weight"])
        return F.rms_norm(x, x.shape[1:], w["norm.weight"], 1e-6)

    def logprobs(self, hidden: Tensor) -> Tensor:
        """(X, V) float32."""
        return F.linear(hidden, self.weights["embed_tokens.weight"]).float().log_softmax(-1)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """(N, H, Q, D) queries against (N, H, K, D) keys: the products themselves are faster here than a fused kernel."""
    scores = (q @ k.mT).mul(q.shape[-1] ** -0.5).float()
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def causal(size: int, before: int = 0) -> Tensor:
    """(size, before + size)."""
    return torch.ones(size, before + size, dtype=torch.bool).tril(before)


@torch.no_grad()
def sample(model: Qwen3, prompt_NP: Tensor, max_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(ROWS, L) tokens, and how many of each row are its response, its EOS included."""
    num_prompts, width = prompt_NP.shape
    shape = (model.layers, 2, ROWS, model.heads, width + max_tokens, model.head_dim)
    cache = torch.empty(shape, dtype=model.cos.dtype)

    def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(num_prompts, width, model.heads, -1).transpose(1, 2) for x in (q, k, v))
        cache[layer, 0, :, :, :width], cache[layer, 1, :, :, :width] = (
            x.repeat_interleave(GROUP_SIZE, 0) for x in (k, v)
        )
        return attention(q, k, v, causal(width)).transpose(1, 2).flatten(0, 1)

    def decode(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache[layer, 0, :, :, end - 1], cache[layer, 1, :, :, end - 1] = k, v
        keys, values = cache[layer, :, :, :, :end]
        return attention(q[:, :, None], keys, values)[:, :, 0]

    hidden = model(prompt_NP.flatten(), torch.arange(width).repeat(num_prompts), prefill)
    hidden = hidden.view(num_prompts, width, -1)[:, -1].repeat_interleave(GROUP_SIZE, 0)
    tokens = torch.zeros(ROWS, max_tokens, dtype=torch.int64)
    length, live_B = torch.full((ROWS,), max_tokens), torch.arange(ROWS)
    for step in range(max_tokens):
        drawn = torch.multinomial(model.logprobs(hidden).exp(), 1, generator=generator)[:, 0]
        tokens[live_B, step] = drawn
        length[live_B[drawn == EOS]] = step + 1
        continues = drawn != EOS
        if step + 1 == max_tokens or not continues.any():
            break
        if not continues.all():
            live_B, drawn, cache = live_B[continues], drawn[continues], cache[:, :, continues]
        end = width + step + 1
        hidden = model(drawn, torch.full_like(drawn, end - 1), decode)
    return tokens[:, : step + 1], length


def loss_of(model: Qwen3, prompt_NP: Tensor, tokens_RL: Tensor, length_R: Tensor, advantage_R: Tensor) -> Tensor:
    """GRPO's loss, a mean over each sample's tokens, in one pass over each prompt once and every real token."""
    num_prompts, width = prompt_NP.shape
    longest = tokens_RL.shape[1]
    column = torch.arange(longest)
    is_input, is_target = column < length_R[:, None] - 1, column < length_R[:, None]
    place = is_input.flatten().nonzero()[:, 0]  # of each input among the padded ones
    position = torch.cat((torch.arange(width).repeat(num_prompts), width + place % longest))
    seen = causal(longest, width)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = num_prompts * width
        of_prompts = [x[:first].view(num_prompts, width, model.heads, -1).transpose(1, 2) for x in (q, k, v)]
        padded = [
            x.new_zeros(ROWS * longest, *x.shape[1:]).index_copy(0, place, x[first:]).view(ROWS, longest, *x.shape[1:])
            for x in (q, k, v)
        ]
        query, *own = (x.transpose(1, 2) for x in padded)
        keys, values = (
            torch.cat((shared.repeat_interleave(GROUP_SIZE, 0), x), 2)
            for shared, x in zip(of_prompts[1:], own, strict=True)
        )
        out = attention(query, keys, values, seen).transpose(1, 2).flatten(0, 1)[place]
        return torch.cat((attention(*of_prompts, causal(width)).transpose(1, 2).flatten(0, 1), out))

    hidden = model(torch.cat((prompt_NP.flatten(), tokens_RL.flatten()[place])), position, attend)
    before = torch.full((ROWS, longest), -1)  # where in `hidden` each token is predicted
    before[:, 0] = torch.arange(num_prompts).repeat_interleave(GROUP_SIZE) * width + width - 1
    inputs = torch.full((ROWS * longest,), -1)
    inputs[place] = num_prompts * width + torch.arange(len(place))
    before[:, 1:] = inputs.view(ROWS, longest)[:, :-1]
    target = tokens_RL[is_target]
    logprob = model.logprobs(hidden[before[is_target]]).gather(1, target[:, None])[:, 0]
    weight = (advantage_R / length_R)[:, None].expand(-1, longest)[is_target] / ROWS
    return -((logprob - logprob.detach()).exp() * weight).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    model, case = Qwen3(options.model, getattr(torch, options.precision)), CASES[options.case]
    master, weights = list(model.master.values()), list(model.weights.values())
    optimizer = torch.optim.AdamW(master, LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.steps)
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    rewards, lengths, wall_s, cpu_s = [], [], [time.perf_counter()], [time.process_time()]
    for step in range(options.steps):
        chosen = rows[step * PROMPTS_PER_STEP : (step + 1) * PROMPTS_PER_STEP]
        prompt_NP = torch.tensor([[VOCABULARY.index(c) for c in row["prompt"]] for row in chosen])
        tokens_RL, length_R = sample(model, prompt_NP, case.max_response_tokens, generator)
        texts = [
            "".join(VOCABULARY[i] for i in row[:length] if i > EOS)
            for row, length in zip(tokens_RL.tolist(), length_R.tolist(), strict=True)
        ]
        reward_R = torch.tensor([correct(text, chosen[i // GROUP_SIZE]["answer"]) for i, text in enumerate(texts)])
        group = reward_R.view(-1, GROUP_SIZE)
        advantage_R = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)).flatten()
        gradients = torch.autograd.grad(loss_of(model, prompt_NP, tokens_RL, length_R, advantage_R), weights)
        for parameter, gradient in zip(master, gradients, strict=True):
            parameter.grad = gradient.float()
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, master)
        rewards.append(reward_R.mean().item())
        lengths.append(length_R.float().mean().item())
        wall_s.append(time.perf_counter())
        cpu_s.append(time.process_time())
    print(
        json.dumps(
            {
                "step_s": [later - before for before, later in itertools.pairwise(wall_s)],
                "step_cpu_s": [later - before for before, later in itertools.pairwise(cpu_s)],
                "response_tokens_mean": statistics.fmean(lengths),
                "rewards": [round(value, 4) for value in rewards],
            }
        )
    )


if __name__ == "__main__":
    main()
