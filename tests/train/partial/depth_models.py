"""Small models for partial backpropagation, in double precision, each with a batch of its own for every worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dovetail.core.depth_plan import DepthPlan
from dovetail.train.partial.segments import cut


class Convolutions(nn.Module):
    """Blocks with batch norms and in-place activations."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
                for _ in range(blocks)
            )
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(nn.Module):
    """Every block takes the outputs of all blocks before it: connections cross every cut."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(blocks))
        self.head = nn.Linear(6 * (blocks + 1), 2)

    def forward(self, x: torch.Tensor) -> Any:
        seen = [x * self.scale]
        for block in self.blocks:
            y = torch.sin(block(sum(seen)))
            y += seen[0]  # in place, onto what may be no part of the graph
            seen.append(y)
        return self.head(torch.cat(seen, dim=1))


class Tied(nn.Module):
    """A language model whose first and last layer share their weight."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Checkpointed(nn.Module):
    """Recomputes its blocks in backward."""

    def __init__(self, blocks: int = 4, *, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(blocks))
        self.head = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        x = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = checkpoint(lambda v, b=block: torch.tanh(b(v)), x, use_reentrant=self.reentrant)
        return self.head(x)


class Unused(nn.Module):
    """Has a head that forward never calls, and a layer that the user has frozen."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(blocks)))
        self.blocks[1].requires_grad_(False)
        self.spare = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(x))


class Forgetful(nn.Module):
    """Goes back through its last blocks only if something before them asks for a gradient."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(blocks)))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.blocks[:2](x)
        with torch.set_grad_enabled(x.requires_grad):
            x = self.blocks[2:](x)
        return self.head(x)


class Hooked(nn.Module):
    """Asks for the gradient of an activation, which a frozen prefix does not have."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(blocks)))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.blocks[0](x)
        x.retain_grad()
        return self.head(self.blocks[1:](x))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    nothing: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=8, n_head=2, vocab_size=11, n_positions=8, **nothing))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    nothing: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = BertConfig(
        num_hidden_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=11,
        max_position_embeddings=8,
        **nothing,
    )
    return BertForSequenceClassification(config)


KINDS: dict[str, Any] = {
    "cnn": Convolutions,
    "transformer": Transformer,
    "skips": Skips,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "unused": Unused,
    "hooked": Hooked,
    "forgetful": Forgetful,
    "gpt2": gpt2,
    "bert": bert,
}
BLOCKS = {"gpt2": "transformer.h", "bert": "bert.encoder.layer"}


def build(kind: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = KINDS[kind](**options)
    return model.to(dtype).train()


def inputs(kind: str, samples: int, seed: int, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "cnn":
        return torch.randn(samples, 1, 5, 5, generator=generator, dtype=dtype)
    if kind in ("transformer", "tied", "gpt2", "bert"):
        return torch.randint(0, 11, (samples, 7), generator=generator)
    return torch.randn(samples, 6, generator=generator, dtype=dtype)


def loss(output: Any) -> torch.Tensor:
    """The mean over samples of something that depends on every output."""
    value = getattr(output, "logits", output)
    weights = torch.linspace(-1, 2, value.shape[-1], dtype=value.dtype)
    result: torch.Tensor = (value * weights).sin().square().sum() / len(value)
    return result


def cuts(kind: str, segments: int, blocks: int) -> list[str]:
    """Cut points that spread the blocks evenly; the first segment begins with the model."""
    at = [round(i * blocks / segments) for i in range(1, segments)]
    return [f"{BLOCKS.get(kind, 'blocks')}.{i}" for i in at]


def linear_plan(batches: tuple[int, ...] = (5, 3)) -> DepthPlan:
    """Two workers, depths 1 and 2, for a chain of five linear layers."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 2))
    return cut(model, torch.randn(4, 6), at=["2"], depths=[1, 2], batches=batches)
