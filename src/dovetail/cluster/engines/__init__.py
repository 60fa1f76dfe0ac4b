"""Engines start and watch the cluster's processes: `local` on one machine, `ray` on several.

May import `cluster.transport`.
Begin with `base.py`.
"""
