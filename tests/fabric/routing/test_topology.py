"""A topology is what its file says, and a mistake in the file is one line that names the place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.core.errors import Error, InputError
from dovetail.fabric.extra import nx
from dovetail.fabric.routing import shapes
from dovetail.fabric.routing.topology import match
from dovetail.fabric.routing.topology_file import load
from tests.paths import ROOT

ZOO = ROOT.parent / "shared" / "data" / "topologies"
GOOD = """
name: lab
switches: [a, b, c]
links:
  - [a, b]
  - {ends: [b, c], rate: 10gbit}
hosts: {h0: a, h1: {switch: c, rate: 1gbit}}
"""


def write(tmp_path: Path, text: str, name: str = "lab.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_yaml_file_becomes_switches_links_and_hosts(tmp_path: Path) -> None:
    made = load(write(tmp_path, GOOD))
    assert made.switches == ("a", "b", "c")
    assert [(k.a, k.b, k.rate) for k in made.links] == [(0, 1, 0.0), (1, 2, 1.25e9)]
    assert [(h.name, h.switch, h.rate) for h in made.hosts] == [("h0", 0, 0.0), ("h1", 2, 1.25e8)]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("- [a, b]", "- [a, b]\n  - [b, a]"), "links[1]: duplicate link b-a"),
        (("- [a, b]", "- [a, x]"), "links[0]: unknown switch 'x'"),
        (("- [a, b]", "- [a, a]"), "links[0]: a is linked to itself"),
        (("h0: a,", "h0: y,"), "hosts.h0: unknown switch 'y'"),
        (("- [a, b]\n", ""), "hosts: h1 is disconnected: no links lead from it to h0"),
        (("[a, b, c]", "[a, b, c, a]"), "switches: a is there twice"),
        (("h1: {switch: c, rate: 1gbit}", "h0: c"), "h0 is there twice"),
        (("rate: 10gbit", "rate: fast"), "links[1].rate: expected a rate such as 10gbit or 500mbit, got 'fast'"),
        (("h1:", "b:"), "hosts: b is also the name of a switch"),
        (("name: lab", "mtu: .inf"), "mtu: expected a whole number of bytes, got inf"),
        (("name: lab", "polcy: {}"), "polcy: unknown field; expected one of name, mtu, switches, links, hosts, policy"),
        (("rate: 10gbit", "rat: 10gbit"), "links[1].rat: unknown field; expected one of ends, rate"),
        (("rate: 1gbit", "speed: 1gbit"), "hosts.h1.speed: unknown field; expected one of switch, rate"),
        ((GOOD, "switches: [a]\nlinks: []"), "links: expected at least one link or host"),
        (("name: lab", "mtu: 99999"), "mtu: expected 1280 to 65000 bytes, got 99999"),
        (("switches: [a, b, c]", ""), "switches: expected a list, got nothing"),
        (("links:", "links: ["), "expected valid YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_place(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    path = write(tmp_path, GOOD.replace(*change))
    with pytest.raises(InputError) as caught:
        load(path)
    assert line in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("k", "switches", "links"), [(4, 20, 32), (6, 45, 108), (8, 80, 256)])
def test_a_fat_tree_has_its_size_and_full_bisection(k: int, switches: int, links: int) -> None:
    made = shapes.fat_tree(k)
    assert (len(made.switches), len(made.links), len(made.hosts)) == (switches, links, k * k // 2)
    # From one pod to another there are (k/2)² shortest paths, one over each core.
    far = made.hosts[-1].switch
    assert nx.shortest_path_length(made.graph, 0, far) == 4
    if k <= 6:
        assert len(list(nx.all_shortest_paths(made.graph, 0, far))) == (k // 2) ** 2


def test_shapes_in_yaml_equal_the_functions(tmp_path: Path) -> None:
    for text, made in (
        ("{kind: fat-tree, k: 4, hosts: 2}", shapes.fat_tree(4, hosts=2)),
        ("{kind: leaf-spine, leaves: 4, spines: 2}", shapes.leaf_spine(4, 2)),
        ("{kind: ring, size: 6, chords: 2}", shapes.ring(6, chords=2)),
    ):
        got = load(write(tmp_path, f"shape: {text}\n"))
        assert (got.switches, got.links, got.hosts) == (made.switches, made.links, made.hosts)
    for text, line in (
        ("{kind: torus}", "shape.kind: expected one of fat-tree, leaf-spine, ring"),
        ("{kind: fat-tree}", "shape.k: missing"),
        ("{kind: fat-tree, k: 5}", "shape.k: expected an even number"),
        ("{kind: ring, size: 6, k: 3}", "shape.k: unknown field"),
        ("{kind: fat-tree, k: 2000}", "shape: expected at most 512 switches, got 5000000"),
    ):
        with pytest.raises(InputError, match=line.replace("[", r"\[").replace(".", r"\.")):
            load(write(tmp_path, f"shape: {text}\n"))


def test_links_are_found_by_name_even_where_names_hold_hyphens(tmp_path: Path) -> None:
    made = load(write(tmp_path, "switches: [x-1, x-2, y]\nlinks: [[x-1, x-2], [x-2, y]]\nhosts: {h: y}\n"))
    assert made.find_link("x-1-x-2") == made.find_link("x-2-x-1") == 0
    assert made.find_link("y-x-2") == 1
    both = load(write(tmp_path, "switches: [a, b-c, a-b, c]\nlinks: [[a-b, c], [b-c, c], [a, c]]\nhosts: {h: c}\n"))
    assert both.find_link("a-b-c") == 0  # and not the link between a and b-c, which does not exist
    with pytest.raises(Error, match="no link between x-1 and y"):
        made.find_link("x-1-y")
    with pytest.raises(Error, match="expected a link as SWITCH-SWITCH"):
        made.find_link("nonsense")


def test_names_are_what_was_written_even_where_they_look_like_something_else(tmp_path: Path) -> None:
    made = load(write(tmp_path, "switches: [2026-11-15, 'x[1]']\nlinks: [[2026-11-15, 'x[1]']]\nhosts: {h: 'x[1]'}\n"))
    assert made.switches == ("2026-11-15", "x[1]")
    assert match(made.switches, ["x[1]"], file="f", place="p") == [1]


def test_without_the_extra_the_fabric_says_in_one_line_what_to_install() -> None:
    for absent in ("networkx", "pyroute2", "yaml"):
        script = f"import sys; sys.modules[{absent!r}] = None; from dovetail.cli.app import main; main()"
        for arguments in (["fabric", "up", "x.yaml"], ["fabric", "down"], ["demo", "--fabric"]):
            done = subprocess.run(
                [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 1 and not done.stdout
            assert (
                done.stderr
                == "dovetail: the fabric needs dovetail-train[fabric]: pip install 'dovetail-train[fabric]'\n"
            )


def test_a_gml_file_with_parallel_links_and_equal_labels_is_read(tmp_path: Path) -> None:
    text = """graph [
  node [ id 0 label "Oslo" ]
  node [ id 1 label "Oslo" ]
  node [ id 2 label "Bergen Town" ]
  edge [ source 0 target 1 ]
  edge [ source 0 target 1 ]
  edge [ source 1 target 2 ]
]"""
    made = load(write(tmp_path, text, "x.gml"))
    assert made.switches == ("Oslo_0", "Oslo_1", "Bergen_Town")
    assert [(k.a, k.b) for k in made.links] == [(0, 1), (1, 2)]
    with pytest.raises(InputError, match="expected a graph in GML"):
        load(write(tmp_path, "not a graph", "y.gml"))


@pytest.mark.reference
@pytest.mark.skipif(not ZOO.exists(), reason="no Topology Zoo files beside the checkout")
def test_every_topology_zoo_file_is_read_whole() -> None:
    files = sorted(ZOO.glob("*.gml"))
    assert len(files) >= 8
    for path in files:
        made = load(path)
        assert len(made.switches) == path.read_text().count("node [")
        assert all(made.find_link(made.link_name(i)) == i for i in range(len(made.links)))
