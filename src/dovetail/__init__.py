"""dovetail."""
