"""Tables, drawings, pictures, Perfetto traces; `page/` is the web page.

May import `core`, `planning` and `simulate`.
Begin with `tables.py`.
"""
