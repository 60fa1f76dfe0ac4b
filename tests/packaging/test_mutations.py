"""What `make mutants` changes is still there to be changed."""

from __future__ import annotations

from tools.mutations import MUTATIONS

from tests.paths import ROOT


def test_every_mutation_finds_its_place_once() -> None:
    assert len(MUTATIONS) >= 24
    lost = [m.name for m in MUTATIONS if (ROOT / m.file).read_text(encoding="utf-8").count(m.before) != 1]
    assert not lost
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    assert all(m.before != m.after and (m.ways or m.tests) for m in MUTATIONS)
