"""Layers that look across samples or draw at random, made independent of how the batch is spread over ranks.

`convert` replaces torch's BatchNorm and Dropout modules in place. Names, parameters and buffers stay as they were, so a
`state_dict` fits the plain model.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from dovetail.core.errors import Error
from dovetail.train.device_streams import to_device

from .communicator import Communicator

log = logging.getLogger("dovetail")

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64: the i-th output of a stream is mix(seed + i · GOLDEN)."""
_WORD = (1 << 64) - 1


class Context:
    """What a converted layer must know of the part that it runs in; one object per part, updated at every step."""

    def __init__(self, comm: Communicator, ranks: tuple[int, ...], seed: int) -> None:
        self.comm, self.ranks, self.seed = comm, ranks, seed
        self.step = 0
        self.samples: tuple[int, ...] = ()
        """Positions in the global batch of the rows that this rank has in this part."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy or a pickle of the model has no ranks


class GroupBatchNorm(_BatchNorm):
    """BatchNorm whose statistics are those of the global batch: taken over all ranks of the stage, in both passes.

    Each rank computes count, mean and centred sum of squares of its rows; one all-gather brings them together, and all
    ranks combine them in the same order. Backward sums two numbers per channel over the ranks. A rank without rows
    takes part with a count of zero.
    """

    context: Context | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        own = self.running_mean is None or self.training
        if not own or self.context is None or len(self.context.ranks) == 1:
            return super().forward(x)
        out, mean, var, total = _Normalise.apply(x, self.weight, self.bias, self.eps, self.context)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None and self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                unbiased = var * (total / (total - 1))
                if self.momentum is None:
                    share = self.num_batches_tracked.double().reciprocal()
                    self.running_mean.mul_(1 - share).add_(mean * share)
                    self.running_var.mul_(1 - share).add_(unbiased * share)
                else:
                    self.running_mean.mul_(1 - self.momentum).add_(mean, alpha=self.momentum)
                    self.running_var.mul_(1 - self.momentum).add_(unbiased, alpha=self.momentum)
        return cast(Tensor, out)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels, axes = x.shape[1], [0, *range(2, x.dim())]
        count = x.numel() // channels
        mean = wide.mean(axes) if count else wide.new_zeros(channels)
        squares = (wide - _spread(mean, x)).square().sum(axes)
        mine = torch.cat([mean, squares, mean.new_full((1,), float(count))])
        every = context.comm.all_gather(mine, context.ranks, "statistics of a BatchNorm")
        means, squares, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
        total = counts.sum(dtype=torch.float64)
        # A rank with more than one knows that by itself: reading the total would wait for an accelerator.
        if count <= 1 and total <= 1:
            raise ValueError(f"expected more than 1 value per channel when training, got {total:.0f} on all ranks")
        mean = (means * counts).sum(0) / total
        var = (squares + counts * (means - mean).square()).sum(0) / total
        inverse = (var + eps).rsqrt()
        normal = (wide - _spread(mean, x)) * _spread(inverse, x)
        ctx.save_for_backward(normal, inverse, weight, total)
        ctx.context = context
        out = normal if weight is None else normal * _spread(weight, x)
        out = out if bias is None else out + _spread(bias, x)
        ctx.mark_non_differentiable(mean, var, total)
        return out.to(x.dtype), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, inverse, weight, total = ctx.saved_tensors
        axes = [0, *range(2, grad.dim())]
        wide = grad.to(normal.dtype)
        mine = torch.cat([wide.sum(axes), (wide * normal).sum(axes)])
        both = mine.clone()
        comm = ctx.context.comm
        comm.wait(comm.all_reduce(both, ctx.context.ranks), "backward of a BatchNorm")
        plain, along = (both / total).chunk(2)
        scale = inverse if weight is None else inverse * weight
        back = (wide - _spread(plain, grad) - normal * _spread(along, grad)) * _spread(scale, grad)
        of_bias, of_weight = mine.chunk(2)  # of this rank's rows: the part's all-reduce sums them
        return (
            back.to(grad.dtype),
            of_weight if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class SampleDropout(nn.Module):
    """Dropout whose mask depends on (seed, step, site, sample) and nothing else, so that every plan drops the same.

    `site` numbers the model's dropouts. With `whole` it drops whole channels, as Dropout2d does.
    """

    def __init__(self, p: float, site: int, *, whole: bool = False) -> None:
        super().__init__()
        self.p, self.site, self.whole = p, site, whole
        self.context: Context | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.context is None:
            return x
        if self.p == 1:
            return x * 0
        shape = (*x.shape[1:2], *(1 for _ in x.shape[2:])) if self.whole else x.shape[1:]
        return x * keep_mask(self.context, self.site, self.p, tuple(shape), x.device).to(x.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def keep_mask(context: Context, site: int, p: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """True where an element stays: element e of a sample is output e + 1 of the sample's own SplitMix64 stream."""
    base = _mix(_mix(_mix(context.seed) + context.step) + site)
    keys = [_signed(_mix(base + sample * GOLDEN)) for sample in context.samples]
    start = to_device(keys, torch.int64, device).view(-1, *(1 for _ in shape))
    index = torch.arange(1, torch.Size(shape).numel() + 1, device=device).view(shape)
    z = start + index * _signed(GOLDEN)  # 64-bit arithmetic that wraps around
    z = (z ^ _right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _right(z, 27)) * _signed(0x94D049BB133111EB)
    return _right(z ^ _right(z, 31), 11) >= int(p * 2**53)  # 53 random bits against the probability


def convert(module: nn.Module) -> nn.Module:
    """Replaces BatchNorm and Dropout below `module` (or itself) by the layers above; returns what stands in its place.

    Random numbers that a module draws by other means (functional dropout, the dropout inside recurrent and attention
    modules) stay correct dropout, but depend on the plan; the log says so once.
    """
    sites = iter(range(1 << 30))
    done: dict[nn.Module, nn.Module] = {}  # a module used in two places stays one module

    def visit(m: nn.Module, path: str) -> nn.Module:
        if m in done:
            return done[m]
        made = _replacement(m, path, sites)
        done[m] = made
        if made is m:
            for name, child in [(n, c) for n, c in m._modules.items() if c is not None]:
                setattr(m, name, visit(child, f"{path}.{name}" if path else name))
        return made

    return visit(module, "")


def _replacement(m: nn.Module, path: str, sites: Any) -> nn.Module:
    if isinstance(m, _BatchNorm) and not isinstance(m, GroupBatchNorm):
        if isinstance(m, nn.modules.lazy.LazyModuleMixin):
            raise Error(f"layer {path!r}: expected a BatchNorm that knows its channels, got {type(m).__name__}")
        made = GroupBatchNorm(m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats, device="meta")
        made._parameters, made._buffers, made.training = m._parameters, m._buffers, m.training
        return made
    if isinstance(m, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        dropout = SampleDropout(m.p, next(sites), whole=not isinstance(m, nn.Dropout))
        dropout.training = m.training
        return dropout
    draws = getattr(m, "dropout", 0.0)
    if isinstance(m, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RNNBase, nn.MultiheadAttention)) and (
        not isinstance(draws, float) or draws > 0 or hasattr(m, "p")
    ):
        log.warning("dovetail: layer %r: the dropout inside %s depends on the plan", path, type(m).__name__)
    return m


def _spread(channel: Tensor, like: Tensor) -> Tensor:
    return channel.view(1, -1, *(1 for _ in like.shape[2:]))


def _mix(z: int) -> int:
    """SplitMix64's finaliser, a bijection of 64-bit words whose output looks random."""
    z &= _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def _right(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
