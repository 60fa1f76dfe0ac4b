"""What a cluster serves over HTTP: the API and the live page.

May import everything of `cluster`, and `view`.
Begin with `api.py`.
"""
