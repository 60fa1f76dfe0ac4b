"""Nouns (Profile, Network, Plan, Timeline, Job, …), their files, and errors: plain data without torch.

Everybody may import it; it imports nothing of ours.
Begin with `files.py` (how a noun is read and written), then `profile.py` and `plan.py`.
"""
