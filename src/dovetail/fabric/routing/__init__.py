"""What paths are allowed: topologies, policies, their automata, and the oracle that finds the best path. No kernel.

May import `core`. Begin with `topology.py`, then `policy.py`; `oracle.py` is what the data plane is compared with.
"""
