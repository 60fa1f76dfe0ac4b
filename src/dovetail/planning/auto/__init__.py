"""`dovetail plan --auto`: the best combination of all techniques, with what each part gives.

Pure functions; may import `core` and the other rooms of planning but `sharing`.
Begin with `search.py`.
"""
