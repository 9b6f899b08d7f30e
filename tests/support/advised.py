"""A training program with everything that `gemmsmith advise` knows, in plain PyTorch."""

PROGRAM = """
import math, os
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class NewGELU(nn.Module):
    def forward(self, x):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down, self.act = nn.Linear(64, 1024), nn.Linear(1024, 64), NewGELU()

    def attend(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.reshape(*x.shape[:2], 4, 16).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / 4
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(x)
        return x + self.down(self.act(self.up(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1027, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 1027, bias=False).bfloat16()

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)).bfloat16())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    tokens = torch.randint(1027, (2, 256))
    logits = model(tokens)[:, :-1].float()
    loss = F.cross_entropy(logits.reshape(-1, 1027), tokens[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), flush=True)
"""
