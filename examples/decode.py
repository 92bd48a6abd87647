"""A small Llama-style model with random weights, decoding a batch of ragged prompts over a paged KV cache.

    python examples/decode.py [--tokens 256] [--layout nhd] [--page 16]

The prompts are prefilled in one packed call, then one token a sequence is decoded at a time, from a CUDA graph: keys
and values go into the cache by `fmha.write_kv` and are read by `fmha.attention_paged`. Behind it the same model runs
once more over every sequence as a whole, without a cache, through torch's attention, and the logits of every step are
compared. Both print their tokens a second.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fmha

PROMPTS = (5, 130, 17, 300, 64, 1, 211, 90)  # tokens
TOLERANCE = 0.05  # of the largest logit: what 16-bit activations leave over all layers


@dataclass(frozen=True)
class Model:
    """Weights of `layers` blocks: attention with grouped queries and rotary embeddings, and a gated MLP."""

    layers: int = 8
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 2816
    vocabulary: int = 8192

    def weights(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator, device="cuda")
            return (drawn * columns**-0.5).to(torch.bfloat16)

        found = {"embedding": matrix(self.vocabulary, self.width), "head": matrix(self.vocabulary, self.width)}
        for layer in range(self.layers):
            projected = (self.heads + 2 * self.kv_heads) * self.head_dim
            found[f"qkv {layer}"] = matrix(projected, self.width)
            found[f"out {layer}"] = matrix(self.width, self.heads * self.head_dim)
            found[f"up {layer}"] = matrix(2 * self.hidden, self.width)
            found[f"down {layer}"] = matrix(self.width, self.hidden)
        return found

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embeddings (Su et al. 2021) of [T, H, D]."""
        half = self.head_dim // 2
        frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = positions[:, None, None].float() * frequencies
        first, second = x.float().chunk(2, dim=-1)
        sin, cos = angles.sin(), angles.cos()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def forward(self, weights: dict[str, torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor, attend):
        """Logits [T, vocabulary]. `attend(layer, q, k, v)` is given [T, H, D] each."""
        x = weights["embedding"][tokens]
        for layer in range(self.layers):
            qkv = F.linear(_norm(x), weights[f"qkv {layer}"]).unflatten(-1, (-1, self.head_dim))
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            o = attend(layer, self.rotate(q, positions), self.rotate(k, positions), v)
            x = x + F.linear(o.flatten(1), weights[f"out {layer}"])
            gate, up = F.linear(_norm(x), weights[f"up {layer}"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights[f"down {layer}"])
        return F.linear(_norm(x), weights["head"]).float()


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Cache:
    """Pages of K and V of every layer, given out to sequences in any order."""

    def __init__(self, model: Model, prompts: tuple[int, ...], tokens: int, page: int, layout: str) -> None:
        self.page, self.layout = page, layout
        most = -(-(max(prompts) + tokens) // page)
        count = len(prompts) * most
        self.table = torch.randperm(count, device="cuda").int().view(len(prompts), most)
        heads, dim = model.kv_heads, model.head_dim
        shapes = {
            "nhd": ((count, page, heads, dim),) * 2,
            "hnd": ((count, heads, page, dim),) * 2,
            "vllm": ((count, heads, dim // 8, page, 8), (count, heads, dim, page)),
        }[layout]
        self.pages = [
            [torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda") for shape in shapes]
            for _ in range(model.layers)
        ]

    def slots(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the token at a position of a sequence is kept."""
        pages = self.table[sequences, positions // self.page].long()
        return pages * self.page + positions % self.page


def generate(
    model: Model, weights: dict[str, torch.Tensor], prompts: list[torch.Tensor], tokens: int, page: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The tokens chosen [B, tokens], the logits that each was chosen by [tokens, B, vocabulary], and tokens a second
    while decoding."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device="cuda")
    cache = Cache(model, tuple(map(len, prompts)), tokens, page, layout)
    each = torch.arange(len(prompts), device="cuda")

    def prefill() -> torch.Tensor:
        sequences = torch.repeat_interleave(each, lengths.long())
        starts = F.pad(torch.cumsum(lengths, 0), (1, 0)).int()
        positions = torch.cat([torch.arange(len(prompt), device="cuda") for prompt in prompts])
        slots = cache.slots(sequences, positions)

        def attend(layer, q, k, v):
            k_pages, v_pages = cache.pages[layer]
            fmha.write_kv(k, v, k_pages, v_pages, slots, layout=layout)
            return fmha.attention_paged(
                q, k_pages, v_pages, cache.table, lengths, layout=layout, causal=True, cu_seqlens_q=starts
            )

        logits = model.forward(weights, torch.cat(prompts), positions, attend)
        return logits[starts[1:].long() - 1]

    logits = torch.empty(tokens, len(prompts), model.vocabulary, device="cuda")
    logits[0] = prefill()
    chosen = logits[0].argmax(-1)
    seen = lengths.clone()  # tokens of each sequence in the cache

    def step() -> torch.Tensor:
        """One token of every sequence; `chosen` and `seen` are where the graph finds them."""
        positions = seen.long()
        slots = cache.slots(each, positions)
        seen.add_(1)

        def attend(layer, q, k, v):
            k_pages, v_pages = cache.pages[layer]
            fmha.write_kv(k, v, k_pages, v_pages, slots, layout=layout)
            return fmha.attention_paged(q, k_pages, v_pages, cache.table, seen, layout=layout)

        return model.forward(weights, chosen, positions, attend)

    found = torch.empty(len(prompts), tokens, dtype=torch.int64, device="cuda")
    found[:, 0] = chosen
    graph, output = _captured(step, seen)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for index in range(1, tokens):
        graph.replay()
        logits[index] = output
        chosen.copy_(output.argmax(-1))
        found[:, index] = chosen
    torch.cuda.synchronize()
    rate = len(prompts) * (tokens - 1) / max(1e-9, time.perf_counter() - began)
    return found, logits, rate


def _captured(step, seen: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a step, after a first one that has whatever need be compiled and loaded."""
    before = seen.clone()
    step()
    seen.copy_(before)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    seen.copy_(before)
    return graph, output


def without_cache(
    model: Model, weights: dict[str, torch.Tensor], prompts: list[torch.Tensor], found: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The logits of the same tokens [tokens, B, vocabulary], of whole sequences through torch's attention, and tokens a
    second, were each step computed so."""
    logits = []

    def attend(layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    torch.cuda.synchronize()
    began = time.perf_counter()
    for prompt, chosen in zip(prompts, found, strict=True):
        tokens = torch.cat([prompt, chosen[:-1]])
        every = model.forward(weights, tokens, torch.arange(len(tokens), device="cuda"), attend)
        logits.append(every[len(prompt) - 1 :])
    torch.cuda.synchronize()
    return torch.stack(logits, dim=1), len(prompts) / (time.perf_counter() - began)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="to decode for each prompt")
    parser.add_argument("--layout", default="nhd", choices=("nhd", "hnd", "vllm"))
    parser.add_argument("--page", type=int, default=16, help="slots of a page")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("examples/decode.py: there is no CUDA device here")
        return 2
    generator = torch.Generator("cuda").manual_seed(0)
    model = Model()
    weights = model.weights(generator)
    prompts = [torch.randint(model.vocabulary, (n,), generator=generator, device="cuda") for n in PROMPTS]
    found, logits, rate = generate(model, weights, prompts, chosen.tokens, chosen.page, chosen.layout)
    exact, slow = without_cache(model, weights, prompts, found)
    apart = ((logits - exact).abs().amax() / exact.abs().amax()).item()
    agree = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
    print(f"{len(prompts)} prompts of {min(PROMPTS)} to {max(PROMPTS)} tokens, {chosen.tokens} decoded for each")
    print(f"paged cache, {chosen.layout}, pages of {chosen.page}: {rate:,.0f} tokens/s")
    print(f"without a cache, torch's attention: {slow:,.0f} tokens/s, were every step computed anew")
    print(f"logits apart by {apart:.1e} of the largest, the same token is first in {agree:.1%} of all")
    right = apart <= TOLERANCE
    print("the same" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
