"""One colour and one sign per kind of work, the same in the terminal, in pictures and in legends.

The colours are Okabe and Ito's, which people with colour blindness can tell apart; the signs tell the kinds apart where
there is no colour at all.
"""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    color: str
    sign: str
    ascii: str
    short: str
    """A label short enough for a legend in 80 columns."""
    label: str


LOOKS: dict[str, Look] = {
    "forward": Look("#56b4e9", "░", "-", "forward", "forward"),
    "backward": Look("#0072b2", "▒", "=", "backward", "backward"),
    "communication": Look("#e69f00", "▄", "~", "communication", "communication, hidden"),
    "exposed": Look("#d55e00", "█", "#", "exposed", "communication, exposed"),
    "optimizer": Look("#009e73", "▓", "+", "optimizer", "optimizer"),
    "wait": Look("#bbbbbb", "·", ".", "waiting", "waiting"),
    "idle": Look("#bbbbbb", "_", "_", "idle", "idle, free for other jobs"),
    "task": Look("#0072b2", "▒", "=", "task", "task of a job"),
    "lease": Look("#56b4e9", "░", "-", "lease", "lease of a device"),
}
"""By span kind; "exposed" is the part of communication that no computation of the same rank hides."""

SERIES: tuple[str, ...] = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#8c564b", "#7f7f7f", "#000000", "#999933", "#882255", "#44aa99"),
)
"""Colours of lines, one policy each; MARKERS distinguish them too."""
MARKERS = "osD^vPX*<>hd"
