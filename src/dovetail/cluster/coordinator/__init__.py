"""The process that decides: jobs' states, placement, leases, strikes; one for each cluster.

Runs in one event loop; may import `cluster.job`, `cluster.transport` and `cluster.engines`.
Begin with `coordinator.py`, then `decide.py` (who gets devices), `events.py` (what peers report), `watchdog.py`.
"""
