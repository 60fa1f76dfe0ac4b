"""Numbers in fewer bytes: how far off they may be, what is never lost, and what n ranks make of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dovetail.train.data_parallel.wire import codec as codec_module
from dovetail.train.data_parallel.wire import kernels
from dovetail.train.data_parallel.wire.codec import ALIGNMENT, BLOCK, CODECS, Codec
from precision_arithmetic import gather_differences, gather_sums, reduce_in

SMALLEST = 2.0**-126
"""The smallest normal fp32 number: below it roundings are absolute, not relative."""

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
lengths = st.one_of(st.integers(0, 1700), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]))
seeds = st.integers(0, 2**31)
exponents = st.integers(-149, 120)


@st.composite
def numbers(draw: st.DrawFn) -> Tensor:
    """Flat tensors whose numbers differ by many orders of magnitude, some of them zero or denormal."""
    length, top, spread = draw(lengths), draw(exponents), draw(st.integers(0, 40))
    generator = torch.Generator().manual_seed(draw(seeds))
    found = torch.randn(length, generator=generator, dtype=torch.float64)
    found *= 2.0 ** (top - spread * torch.rand(length, generator=generator, dtype=torch.float64))
    found[torch.rand(length, generator=generator) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = 0.0
    return found.float()


def encoded(codec: Codec, values: Tensor, error: Tensor | None = None) -> Tensor:
    wire = torch.full((codec.wire_bytes(values.numel()),), 255, dtype=torch.uint8)
    codec.encode(values, error, wire)
    return wire


def decoded(codec: Codec, wire: Tensor, elements: int) -> Tensor:
    out = torch.full((elements,), 7.0)
    codec.decode(wire, out)
    return out


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), values.numel())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@contextmanager
def operators() -> Iterator[None]:
    """torch's operators in place of the compiled functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        yield


@pytest.mark.skipif(kernels.library() is None, reason="needs a C compiler")
@every_codec
@given(values=numbers(), seed=seeds, bad=st.sampled_from([None, float("nan"), float("inf"), -float("inf")]))
def test_compiled_functions_give_the_bits_of_torchs_operators(
    codec: Codec, values: Tensor, seed: int, bad: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(values.numel(), generator=generator) * values.abs().mean().nan_to_num()
    if bad is not None and values.numel():
        values[seed % values.numel()] = bad

    def results(error: Tensor | None) -> list[Tensor]:
        wire = torch.zeros(codec.wire_bytes(values.numel()), dtype=torch.uint8)
        codec.encode(values, error, wire)
        out, total = torch.zeros_like(values), before.clone()
        codec.decode(wire, out)
        codec.decode_add(wire, total)
        # How a block that is not finite is sent is open; that it arrives as one is not.
        return [
            t.nan_to_num(nan=7.0, posinf=7.0, neginf=7.0) for t in (out, total, *([] if error is None else [error]))
        ]

    for error in (None, before.clone()):
        compiled = results(None if error is None else error.clone())
        with operators():
            plain = results(error)
        assert all(same_bits(a, b) for a, b in zip(compiled, plain, strict=True))


def test_without_a_compiler_and_when_switched_off_operators_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_KERNELS", "off")
    assert kernels.library.__wrapped__() is None
    monkeypatch.delenv("DOVETAIL_KERNELS")
    monkeypatch.setenv("PATH", "")
    assert kernels.library.__wrapped__() is None


def test_a_source_that_does_not_compile_costs_a_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "codec.c"
    broken.write_text("int main( {")
    monkeypatch.setattr(kernels, "SOURCE", broken)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kernels.library.__wrapped__() is None
    assert "could not be compiled" in caplog.text and len(caplog.records) == 1
    assert list((tmp_path / "cache" / "dovetail" / "kernels").iterdir()) == []


@given(numbers())
def test_bf16_is_off_by_at_most_one_part_in_256(values: Tensor) -> None:
    off = (there_and_back(CODECS["bf16"], values).double() - values.double()).abs()
    assert bool((off <= (values.double().abs() * 2.0**-8).clamp(min=SMALLEST)).all())


@given(numbers())
def test_int8_is_off_by_at_most_half_the_scale_of_its_block(values: Tensor) -> None:
    off = (there_and_back(CODECS["int8"], values).double() - values.double()).abs()
    for got, block in zip(off.split(BLOCK), values.split(BLOCK), strict=True):
        if block.numel():
            scale = max(float(block.abs().max()) / 127, SMALLEST)
            assert float(got.max()) <= 0.50002 * scale  # the quotient and the product are rounded to 24 bits


@every_codec
@given(values=numbers())
def test_zero_stays_zero_and_values_stay_as_they_are(codec: Codec, values: Tensor) -> None:
    before = values.clone()
    back = there_and_back(codec, values)
    assert same_bits(values, before)
    assert bool((back[values == 0] == 0).all())


@every_codec
@given(values=numbers(), seed=seeds)
def test_adding_what_is_decoded_gives_the_bits_of_decoding_and_adding(codec: Codec, values: Tensor, seed: int) -> None:
    # All ranks must have the same bits, whichever of the two they call.
    start = torch.randn(values.numel(), generator=torch.Generator().manual_seed(seed))
    wire, out = encoded(codec, values), start.clone()
    codec.decode_add(wire, out)
    assert same_bits(out, start + decoded(codec, wire, values.numel()))


@every_codec
@given(length=lengths, seed=seeds, steps=st.integers(1, 12))
def test_error_feedback_loses_nothing_but_the_last_error(codec: Codec, length: int, seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    error = torch.zeros(length)
    wanted, got = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    for _ in range(steps):
        values = torch.randn(length, generator=generator) * 10.0 ** (4 * torch.rand(length, generator=generator) - 4)
        got += decoded(codec, encoded(codec, values, error), length).double()
        wanted += values.double()
    torch.testing.assert_close(got, wanted - error.double(), rtol=0, atol=1e-5)
    if length:
        largest = 6.0 * 2  # of a normal number, and of what the error before it adds at most
        assert float(error.abs().max()) <= max(2.0**-8, 0.5 / 127 * 1.01) * largest


@every_codec
def test_a_value_below_the_rounding_is_sent_in_the_end(codec: Codec) -> None:
    values = torch.full((BLOCK,), 1e-4)
    values[0] = 1.0
    error, sent = torch.zeros(BLOCK), torch.zeros(BLOCK)
    for _ in range(200):
        codec.decode_add(encoded(codec, values, error), sent)
    # At most one step of rounding is missing, of the 0.02 that 200 messages were to bring.
    assert float((sent[1:] - 0.02).abs().max()) <= 1.001 / 127
    without = sum(there_and_back(codec, values) for _ in range(200))
    assert isinstance(without, Tensor) and (codec.name == "bf16" or float(without[1:].abs().max()) == 0.0)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, BLOCK + 90, 3 * BLOCK + 10])
def test_what_is_not_finite_stays_so_and_spoils_neither_other_blocks_nor_later_messages(
    codec: Codec, bad: float, at: int
) -> None:
    torch.manual_seed(0)
    values = torch.randn(3 * BLOCK + 20)
    error = torch.randn_like(values) * 1e-3
    clean, clean_error = values.clone(), error.clone()
    values[at] = bad
    out = decoded(codec, encoded(codec, values, error), values.numel())
    assert not bool(out[at].isfinite())
    elsewhere = torch.arange(len(values)) // BLOCK != at // BLOCK
    expected = decoded(codec, encoded(codec, clean, clean_error), values.numel())
    assert same_bits(out[elsewhere], expected[elsewhere])
    assert same_bits(error[elsewhere], clean_error[elsewhere])
    assert bool(error.isfinite().all()) and float(error[at]) == 0.0
    assert bool(decoded(codec, encoded(codec, clean, error), values.numel()).isfinite().all())


@every_codec
@pytest.mark.parametrize("piece", [BLOCK, 4 * BLOCK, 2**20])
def test_pieces_do_not_change_a_bit(codec: Codec, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "library", lambda: None)  # only torch's operators work in pieces
    torch.manual_seed(1)
    values, error = torch.randn(20 * BLOCK + 77), torch.randn(20 * BLOCK + 77) * 0.01
    whole_error, pieced_error = error.clone(), error.clone()
    whole = encoded(codec, values, whole_error)
    monkeypatch.setattr(codec_module, "PIECE", piece)
    # Bytes that only fill up the encoded form are nobody's.
    used = 2 * values.numel() if codec.name == "bf16" else 4 * 21 + values.numel()
    assert torch.equal(encoded(codec, values, pieced_error)[:used], whole[:used])
    assert same_bits(pieced_error, whole_error)
    a, b = decoded(codec, whole, values.numel()), torch.zeros_like(values)
    codec.decode_add(whole, b)
    assert same_bits(a, b)


@every_codec
def test_encoded_forms_can_be_laid_end_to_end(codec: Codec) -> None:
    torch.manual_seed(2)
    parts = [torch.randn(n) for n in (1, 513, 0, 7, 1024)]
    ends = torch.tensor([codec.wire_bytes(p.numel()) for p in parts]).cumsum(0).tolist()
    assert all(end % ALIGNMENT == 0 for end in ends)
    wire = torch.empty(ends[-1], dtype=torch.uint8)
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        codec.encode(part, None, wire[start:end])
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        assert same_bits(decoded(codec, wire[start:end], part.numel()), there_and_back(codec, part))


@pytest.mark.parametrize("elements", [0, 1, BLOCK, 10 * BLOCK + 1, 1_000_000])
def test_bytes_on_the_wire(elements: int) -> None:
    assert 0 <= CODECS["bf16"].wire_bytes(elements) - 2 * elements < ALIGNMENT
    assert 0 <= CODECS["int8"].wire_bytes(elements) - elements - 4 * -(-elements // BLOCK) < ALIGNMENT


@every_codec
def test_threads_do_not_disturb_each_other(codec: Codec) -> None:
    torch.manual_seed(3)
    values = [torch.randn(5 * BLOCK + i) for i in range(8)]

    def work(i: int) -> tuple[Tensor, Tensor]:
        error, total = torch.zeros_like(values[i]), torch.zeros_like(values[i])
        for _ in range(30):
            codec.decode_add(encoded(codec, values[i], error), total)
        return error, total

    alone = [work(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(8)))
    assert all(same_bits(a, b) for one, two in zip(alone, together, strict=True) for a, b in zip(one, two, strict=True))


@every_codec
def test_other_devices_are_not_waited_for(codec: Codec) -> None:
    # Tensors of the meta device have no values: whoever asks for one gets an error.
    values, error, out = (torch.empty(2 * BLOCK + 3, device="meta") for _ in range(3))
    wire = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8, device="meta")
    codec.encode(values, error, wire)
    codec.encode(values, None, wire)
    codec.decode(wire, out)
    codec.decode_add(wire, out)


def gradients(ranks: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(ranks * width, generator=generator) for _ in range(ranks)]


@every_codec
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_owners_add_once_rounded_contributions_and_their_own_exact(codec: Codec, ranks: int) -> None:
    given, width = gradients(ranks, 700), 700
    before = [g.clone() for g in given]
    total = reduce_in(codec, given, None)
    assert all(same_bits(a, b) for a, b in zip(given, before, strict=True))
    for owner in range(ranks):
        part = slice(owner * width, (owner + 1) * width)
        sent = [g[part] if r == owner else there_and_back(codec, g[part]) for r, g in enumerate(given)]
        torch.testing.assert_close(total[part], torch.stack(sent).sum(0), rtol=0, atol=3e-6)
    if ranks == 1:
        assert same_bits(total, given[0])


@every_codec
def test_sums_over_time_lack_only_the_senders_last_errors(codec: Codec) -> None:
    ranks, width, steps = 4, 600, 20
    errors = [torch.zeros(ranks * width) for _ in range(ranks)]
    owners = [torch.zeros(width) for _ in range(ranks)]
    wanted, got = torch.zeros(ranks * width), torch.zeros(ranks * width)
    for step in range(steps):
        given = [g * (1 + step) / steps for g in gradients(ranks, width)]
        got += gather_sums(codec, reduce_in(codec, given, errors).split(width), owners)
        wanted += torch.stack(given).sum(0)
    assert all(float(e[r * width : (r + 1) * width].abs().max()) == 0.0 for r, e in enumerate(errors))
    torch.testing.assert_close(got, wanted - torch.stack(errors).sum(0) - torch.cat(owners), rtol=0, atol=1e-4)


@every_codec
def test_public_values_follow_the_masters_within_one_rounding(codec: Codec) -> None:
    torch.manual_seed(4)
    ranks, width = 4, 600
    public = torch.randn(ranks * width)
    masters = [part.clone() for part in public.split(width)]
    for _ in range(50):
        for master in masters:
            master.add_(torch.randn(width) * 1e-3)
        gather_differences(codec, masters, public)
        # The last difference was rounded; those before it are made up for. Public values have their own fp32 rounding.
        assert float((torch.cat(masters) - public).abs().max()) <= 6e-3 * 2.0**-8 + 1e-6
    for _ in range(3):  # the residual travels even when the masters rest
        gather_differences(codec, masters, public)
    assert float((torch.cat(masters) - public).abs().max()) <= 5e-7
