"""An ordinary training script without gemmsmith; docs/training.md tunes it.

A bigram model learns which token follows another. It is small enough to try without a GPU: 16
tokens through a layer of 4096×4096, as large as the output layer of Llama 3 8B's attention.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, TOKENS = 4096, 4096, 16


def main() -> None:
    """Train, and print the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    model.to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    tokens = torch.randint(VOCABULARY, (TOKENS,), device=device)
    following = torch.randperm(VOCABULARY, device=device)
    for step in range(steps):
        loss = functional.cross_entropy(model(tokens).float(), following[tokens])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
