"""A tiny GPT: pre-norm blocks, rotary positions, tied embeddings, with a key-value cache for decoding.

Rotary positions enter attention only as differences, so a sequence padded on the left (decoding) and the same sequence
padded on the right (training) give the same logits. B = rows, T = positions, H = heads, D = width of one head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.tokenizer import PAD

_EARLIER = 3  # the input vector of a token also holds so many tokens before it: copying is then learned in a minute


class Cache:
    """Keys and values of the positions decoded so far, for rows padded on the left to a common length."""

    def __init__(self, layers: int, heads: int, head_width: int, visible: Tensor, capacity: int) -> None:
        """`visible` (B, P) is False where the prompt is padding."""
        rows, prompt_length = visible.shape
        self.keys = torch.zeros(layers, rows, heads, capacity, head_width)
        self.values = torch.zeros(layers, rows, heads, capacity, head_width)
        self.visible = torch.ones(rows, capacity, dtype=torch.bool)  # (B, capacity)
        self.visible[:, :prompt_length] = visible
        self.last_tokens = torch.full((rows, _EARLIER), PAD)
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, T, D) behind the cached ones and return all of them."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def mask(self, new: int) -> Tensor:
        """Return which positions the `new` ones may attend to: (B, 1, new, length + new)."""
        end = self.length + new
        causal = torch.ones(new, end, dtype=torch.bool).tril(self.length)
        own = torch.eye(new, end, dtype=torch.bool).roll(self.length, 1)  # a padded query sees itself: no NaN
        return ((causal & self.visible[:, None, :end]) | own)[:, None]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows` (indices)."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.visible, self.last_tokens = self.visible[rows], self.last_tokens[rows]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Cache | None, layer: int) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        if cache is None:
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.extend(layer, k, v)
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask(length))
        x = x + self.project(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm_mlp(x))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary_size: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.earlier_embeddings = nn.ModuleList(nn.Embedding(vocabulary_size, width) for _ in range(_EARLIER))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return logits (B, T, vocabulary) for `tokens` (B, T), which follow what `cache` holds and extend it."""
        length = tokens.shape[1]
        before = tokens.new_full((len(tokens), _EARLIER), PAD) if cache is None else cache.last_tokens
        extended = torch.cat([before, tokens], dim=1)
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        for distance, embedding in enumerate(self.earlier_embeddings, start=1):
            x = x + embedding(extended[:, _EARLIER - distance : _EARLIER - distance + length])
        rotation = _rotation(0 if cache is None else cache.length, length, self.head_width)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, cache, layer)
        if cache is not None:
            cache.length += tokens.shape[1]
            cache.last_tokens = extended[:, length:]
        return self.norm(x) @ self.embedding.weight.T

    def new_cache(self, visible: Tensor, capacity: int) -> Cache:
        return Cache(len(self.blocks), self.heads, self.head_width, visible, capacity)


def _rotation(start: int, length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, D / 2) of the rotary angles (Su et al. 2021, arXiv:2104.09864)."""
    frequencies = 1000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.arange(start, start + length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
