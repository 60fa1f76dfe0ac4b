"""Three small models of our own, one per family, that need nothing but torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 10


class Block(nn.Module):
    """Two convolutions with batch norm, and a skip."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.skip(x))  # type: ignore[no-any-return]


def mlp(width: int = 256, depth: int = 4) -> nn.Module:
    """64 numbers → classes, through equal hidden layers."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth - 1)]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


def cnn(width: int = 16, blocks: int = 2) -> nn.Module:
    """32×32 images → classes: four stages of residual blocks as in ResNet-18, a quarter as wide."""
    stages, channels = [], width
    for stage in range(4):
        for i in range(blocks):
            after = width * 2**stage
            stages.append(Block(channels, after, stride=2 if stage and not i else 1))
            channels = after
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class GPT(nn.Module):
    """Characters → next characters; the first and the last layer share their weights."""

    def __init__(
        self, vocabulary: int = 256, length: int = 64, width: int = 128, heads: int = 4, depth: int = 4
    ) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Against labels that count through the classes: as much work as the true ones."""
    labels = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return F.cross_entropy(logits, labels)
