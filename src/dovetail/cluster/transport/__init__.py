"""Messages between the cluster's processes and the connections that carry them.

May import `core`.
Begin with `messages.py`.
"""
