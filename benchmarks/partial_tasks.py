"""The learning tasks of the quality study: real data, and small models as lists of blocks that train in minutes."""

from __future__ import annotations

import gzip
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.core.errors import Error

WORKERS = 4


@dataclass(frozen=True)
class Task:
    """Something to learn, with the settings under which full backpropagation learns it well."""

    name: str
    build: Callable[[], nn.ModuleList]
    """The model as blocks in execution order; cuts fall between blocks."""
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int
    """Samples of each of the four workers."""
    steps: int
    optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    clip: float | None = None
    window: int = 0
    """Characters per sample of a text; `train` then holds one long text twice. 0 for other data."""

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = self.train
        if self.window:
            starts = torch.randint(0, len(inputs) - self.window - 1, (count, 1), generator=generator)
            text = inputs[starts + torch.arange(self.window + 1)]
            return text[:, :-1], text[:, 1:]
        which = torch.randint(0, len(inputs), (count,), generator=generator)
        return inputs[which], targets[which]


class Residual(nn.Module):
    """Two convolutions with a norm each, and a skip."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            norm(after),
        )
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class Attention(nn.Module):
    """A transformer's block, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, width)
        x = x + self.out(mixed)
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.tokens(x) + self.positions[: x.shape[1]]
        return result


def _resnet(width: int, blocks: int, stride: int, norm: Callable[[int], nn.Module]) -> nn.ModuleList:
    stem = nn.Sequential(nn.Conv2d(1, width, 3, stride, 1, bias=False), norm(width), nn.ReLU())
    layers: list[nn.Module] = [stem]
    channels = width
    for stage in range(3):
        for i in range(blocks):
            after = width * 2**stage
            layers.append(Residual(channels, after, 2 if stage and not i else 1, norm))
            channels = after
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)))
    return nn.ModuleList(layers)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def _sgd(rate: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=5e-4)


def _adamw(rate: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.05)


@cache
def digits() -> Task:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    split = train_test_split(data.images, data.target, test_size=450, stratify=data.target, random_state=0)
    images = [torch.tensor(part, dtype=torch.float32).unsqueeze(1) / 16 for part in split[:2]]
    labels = [torch.tensor(part, dtype=torch.int64) for part in split[2:]]
    return Task(
        name="digits",
        build=lambda: _resnet(16, 2, 1, _group_norm),
        train=(images[0], labels[0]),
        test=(images[1], labels[1]),
        batch=16,
        steps=400,
        optimiser=_sgd(0.05),
    )


@cache
def fashion() -> Task:
    folder = _fashion_folder()
    images, labels = {}, {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images[part] = _idx(folder, f"{prefix}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28).astype(np.float32)
        labels[part] = torch.from_numpy(_idx(folder, f"{prefix}-labels-idx1-ubyte", 8).astype(np.int64))
    mean, spread = float(images["train"].mean()), float(images["train"].std())
    ready = {part: torch.from_numpy((values - mean) / spread) for part, values in images.items()}
    return Task(
        name="fashion",
        build=lambda: _resnet(8, 2, 2, nn.BatchNorm2d),
        train=(ready["train"], labels["train"]),
        test=(ready["test"], labels["test"]),
        batch=32,
        steps=4000,
        optimiser=_sgd(0.1),
    )


@cache
def short() -> Task:
    """Fashion-MNIST with half the steps, so that it ends before its plateau."""
    return replace(fashion(), name="short", steps=2000)


@cache
def text() -> Task:
    """Little text and a small model, which reaches its plateau within minutes."""
    return _characters("text", width=16, heads=2, length=32, every=71, windows=2000, steps=6400, rate=6e-3)


@cache
def early() -> Task:
    """All of the text and a larger model, stopped early in its training, far from any plateau."""
    return _characters("early", width=32, heads=4, length=48, every=1, windows=512, steps=800, rate=3e-3)


def _characters(
    name: str, *, width: int, heads: int, length: int, every: int, windows: int, steps: int, rate: float
) -> Task:
    """Next characters in Python's standard library: one of `every` pieces; every twelfth file is for testing."""
    depth, piece = 4, 2000
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [f.read_text(encoding="utf-8", errors="ignore") for f in files]
    train = "".join(t for i, t in enumerate(texts) if i % 12)
    test = "".join(t for i, t in enumerate(texts) if i % 12 == 0)
    known = sorted({c for c in train if ord(c) < 127})
    index = {c: i + 1 for i, c in enumerate(known)}
    if every > 1:
        train = "".join(train[at : at + piece] for at in range(0, len(train) - piece, piece * every))
    encoded, held = (torch.tensor([index.get(c, 0) for c in t], dtype=torch.int64) for t in (train, test))
    starts = torch.linspace(0, len(held) - length - 2, windows).long()[:, None]
    shown = held[starts + torch.arange(length + 1)]

    def build() -> nn.ModuleList:
        blocks: list[nn.Module] = [Attention(width, heads) for _ in range(depth)]
        first = nn.Sequential(Embedding(len(known) + 1, width, length), blocks[0])
        last = nn.Sequential(blocks[-1], nn.LayerNorm(width), nn.Linear(width, len(known) + 1))
        return nn.ModuleList([first, *blocks[1:-1], last])

    return Task(
        name=name,
        build=build,
        train=(encoded, encoded),
        test=(shown[:, :-1], shown[:, 1:]),
        batch=8,
        steps=steps,
        optimiser=_adamw(rate),
        clip=1.0,
        window=length,
    )


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "fashion": fashion,
    "text": text,
    "short": short,
    "early": early,
}


def _idx(folder: Path, name: str, header: int) -> np.ndarray:
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise Error(f"{folder}: expected {name} or {name}.gz")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return np.frombuffer(raw, dtype=np.uint8, offset=header)


def _fashion_folder() -> Path:
    """The folder of Debian's package with the images, or our cache, into which the package is unpacked once."""
    package = "dataset-fashion-mnist"
    installed = Path("/usr/share/datasets/fashion-mnist")
    if installed.is_dir():
        return installed
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dovetail", "data")
    kept = home / "usr" / "share" / "datasets" / "fashion-mnist"
    if not kept.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            try:
                subprocess.run(
                    ["apt-get", "download", package], cwd=folder, check=True, capture_output=True, timeout=300
                )
                archive = next(Path(folder).glob(f"{package}*.deb"))
                subprocess.run(["dpkg-deb", "-x", archive, home], check=True, capture_output=True, timeout=300)
            except (OSError, subprocess.SubprocessError, StopIteration):
                raise Error(f"Fashion-MNIST: expected Debian's package {package}: apt-get install {package}") from None
    if not kept.is_dir():
        raise Error(f"Fashion-MNIST: expected {kept} in Debian's package {package}")
    return kept
