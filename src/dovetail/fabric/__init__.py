"""Data-plane routing (after D2R): policies, the eBPF programs and their loader, emulation in namespaces.

May import `core` and `view`. `routing` holds topologies and policies, `disturbed` trains over a fabric.
Begin with `emulation.py`, then `dataplane.py`; the rules for a packet are in `bpf/forward.h`.
"""
