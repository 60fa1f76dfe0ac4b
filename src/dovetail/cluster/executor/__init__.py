"""The process that owns one device: keeps weights of several jobs and runs one task at a time.

May import `cluster.job` and `cluster.transport`.
Begin with `main.py`, then `tenants.py`.
"""
