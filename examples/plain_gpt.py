"""A small GPT as it is often written, with much that torch does faster; docs/advise.md changes it.

It knows nothing of gemmsmith, and is small enough to try without a GPU.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, TOKENS = 1027, 64, 4, 256


class NewGELU(nn.Module):
    """GELU by tanh, as GPT-2's code wrote it out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to every element."""
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Block(nn.Module):
    """Attention and an MLP, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)
        self.act = NewGELU()

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention of x [batch, tokens, width]."""
        split = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(split).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(split[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        y: torch.Tensor = self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of x's size."""
        x = x + self.attend(x)
        y: torch.Tensor = x + self.down(self.act(self.up(x)))
        return y


class GPT(nn.Module):
    """Two blocks between an embedding and a head in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens [batch, length]."""
        logits: torch.Tensor = self.head(self.blocks(self.embed(tokens)).bfloat16())
        return logits


def main() -> None:
    """Train, and print the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        tokens = torch.randint(VOCABULARY, (2, TOKENS), device=device)
        logits = model(tokens)[:, :-1].float()
        labels = tokens[:, 1:].reshape(-1)
        loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
