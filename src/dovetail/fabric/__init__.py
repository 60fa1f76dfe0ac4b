"""Data-plane routing (after D2R): topology, policy, the eBPF programs and their loader, emulation in namespaces.

May import `core` and `view`.
Begin with `topology.py`, then `dataplane.py`; the rules for a packet are in `bpf/forward.h`.
"""
