"""The comparison with the oracle notices when a part of the mechanism is broken."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from dovetail.fabric import kernel
from dovetail.fabric.hooks import HOOKS
from dovetail.fabric.routing import shapes

from .cases import torture
from .switch_bench import bench

pytestmark = pytest.mark.root

MUTANTS = {
    "failed links are not recorded in the packet": (
        "route.h",
        "s->h.failed[BOUND(link >> 6, LINK_WORDS)] |= 1ULL << (link & 63);",
        ";",
    ),
    "own links count as up": ("route.h", "if (!port || link_up(config, port))", "if (1)"),
    "the automaton's state is not carried": (
        "forward.h",
        "	h->state = state;\n	if ((h->flags",
        "	if ((h->flags",
    ),
    "the level walk ignores the policy": (
        "search.h",
        "ENTERED(choice, nearer, state);",
        "ENTERED(choice, nearer, state); choice.w[0] = ~0ULL;",
    ),
    "preferences are reversed": (
        "search.h",
        "begin(s, states, p->accept[0], target)",
        "begin(s, states, p->accept[BOUND(p->ranks - 1, RANKS)], target)",
    ),
    "beliefs are never forgotten": (
        "route.h",
        "		forget(&s->h);\n		s->h.flags |= CERTAIN;",
        "		s->h.flags |= CERTAIN;",
    ),
    "the failure map is not left out of the graph": ("search.h", "apply_failures(side, 1);", ";"),
    "the failure map is not taken back": ("search.h", "apply_failures(side, 0);", ";"),
    "the inner type is not restored": (
        "forward.h",
        "((struct ethhdr *)data)->h_proto = inner;",
        "((struct ethhdr *)data)->h_proto = 0;",
    ),
    "length is not bounded": ("search.h", "limit = s->h.hops_left", "limit = LEVELS"),
    "kept paths outlive a change of belief or tables": (
        "forward.h",
        "line->version == node->version && line->generation == h->generation",
        "1",
    ),
}


def faults(rounds: int, hook: str) -> bool:
    """Whether the comparison with the oracle finds anything within so many rounds."""
    rng = random.Random(7)
    with bench(shapes.fat_tree(4), hook=hook) as b:
        for _ in range(rounds // 10):
            found = torture(b, rng, rounds=10).faults
            totals = b.plane.totals(b.topology)
            if found or totals["drop hops"] or totals["drop violation"]:
                return True
    return False


@pytest.mark.parametrize("hook", HOOKS)
def test_an_unbroken_switch_is_not_accused(hook: str) -> None:
    assert not faults(300, hook)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_switch_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new = MUTANTS[name]
    shutil.copytree(kernel.BPF_DIR, tmp_path / "bpf")
    text = (tmp_path / "bpf" / file).read_text()
    assert text.count(old) >= 1
    (tmp_path / "bpf" / file).write_text(text.replace(old, new))
    monkeypatch.setattr(kernel, "BPF_DIR", tmp_path / "bpf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hook = HOOKS[list(MUTANTS).index(name) % 2]  # what is broken here is shared by both
    assert faults(300, hook), "not noticed"
