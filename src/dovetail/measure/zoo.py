"""Models of our own that need nothing but torch: a small one per family, and ResNet-50 for timing studies."""

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


class Bottleneck(nn.Module):
    """Three convolutions with batch norm, the middle one a quarter as wide, and a skip."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        narrow = after // 4
        shapes = ((before, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, after, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shapes)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = self.relu(y) if i < 2 else y
        return self.relu(y + self.skip(x))  # type: ignore[no-any-return]


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50's layers and sizes: 161 tensors, 25,557,032 parameters."""
    stem: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    blocks: list[nn.Module] = []
    channels = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for i in range(depth):
            after = 256 * 2**stage
            blocks.append(Bottleneck(channels, after, stride=2 if stage and not i else 1))
            channels = after
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


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
