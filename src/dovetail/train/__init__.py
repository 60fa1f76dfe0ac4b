"""Plans inside PyTorch, one room for each technique; `run` is for unchanged scripts.

May import `core`, `measure` and `planning`.
Begin with `data_parallel/module.py`.
"""
