"""The newest spans of every device, for whoever looks at a cluster while it runs.

The first look reads the end of each device's file, the later ones only what has been written since. A file that the
recorder has moved away meanwhile is read to its end before the new one. Nobody who writes waits for that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dovetail.cluster.executor.recorder import Clock, Held, Line, Ran

_CLOCK = b'{"type":"clock"'
_SPAN_BYTES = 200
"""At most of a line, as they are in practice; a first look takes so much for each span that is wanted."""
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


@dataclass
class _Read:
    """How far a device's file has been read."""

    inode: int
    at: int = 0
    offset: float = 0.0
    """Seconds to add for time.time()."""
    spans: deque[Ran | Held] = field(default_factory=deque)


class Tail:
    """Call `look` from one thread at a time. `most`: spans kept for each device."""

    def __init__(self, home: str | Path, *, most: int) -> None:
        self._folder, self._most = Path(home) / "spans", most
        self._files: dict[str, _Read] = {}
        self._offsets: dict[tuple[str, str], float] = {}  # one for each machine and start, as in `recorder`

    def look(self) -> list[Ran | Held]:
        """The newest spans by their start, in seconds of the calendar's clock (time.time()).

        They begin where those of every device are still known: a busy device's reach back less far.
        """
        for path in self._folder.glob("device-*.jsonl"):
            if ".1." not in path.name:
                with contextlib.suppress(OSError, ValueError):
                    self._follow(path)
        kept = [file.spans for file in self._files.values()]
        begin = max((spans[0].start for spans in kept if len(spans) == self._most), default=0.0)
        found = [span for spans in kept for span in spans if span.start >= begin]
        return sorted(found, key=lambda s: (s.start, s.device))

    def _follow(self, path: Path) -> None:
        now, before = path.stat(), path.with_name(f"{path.stem}.1.jsonl")
        known = self._files.get(path.name)
        if known is None:
            known = self._files[path.name] = _Read(now.st_ino, spans=deque(maxlen=self._most))
            if now.st_size < self._most * _SPAN_BYTES and before.exists():
                known.inode = before.stat().st_ino
                self._begin(before, known)
            else:
                self._begin(path, known)
        if known.inode != now.st_ino:
            with contextlib.suppress(OSError):
                self._take(before, known)
            known.inode, known.at = now.st_ino, 0
        self._take(path, known)

    def _begin(self, path: Path, known: _Read) -> None:
        """Where the last spans begin, and how the clock stands there."""
        size = path.stat().st_size
        start = max(0, size - self._most * _SPAN_BYTES)
        if not start:
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            known.at = data.find(b"\n", start) + 1 or size
            clock = data.rfind(_CLOCK, 0, known.at)
            if clock >= 0:
                self._line(data[clock : data.find(b"\n", clock)], known)

    def _take(self, path: Path, known: _Read) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != known.inode:
                return  # another one by now: next time
            file.seek(known.at)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            self._line(line, known)
        known.at += whole

    def _line(self, data: bytes, known: _Read) -> None:
        try:
            line = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # cut by a kill
        if isinstance(line, Clock):
            known.offset = self._offsets.setdefault((line.node, line.boot), line.offset)
        elif line.stop >= line.start and line.job.isdecimal():
            start, stop = line.start + known.offset, line.stop + known.offset
            known.spans.append(msgspec.structs.replace(line, start=start, stop=stop))
