"""The process that owns one device: it keeps the weights of several jobs and runs one task at a time.

May import `cluster.job` and `cluster.transport`.
Begin with `main.py`, then `tenants.py` (all jobs of the device) and `tenant.py` (one of them).
"""
