"""Plans from profiles and networks: pure functions, no torch, no I/O.

One room for each technique: `merge`, `depth`, `burst`, `auto` (the best combination of these), and `sharing` (many
jobs on shared devices). May import `core` only. Begin with `merge/planner.py`.
"""

from .merge.planner import candidates, compare, plan, predict

__all__ = ["candidates", "compare", "plan", "predict"]
