"""Which routing rule a route name takes: the patterns of all rules as automata in one table.

State 0 is dead. A group of rules is one automaton with a start state; the groups are in the order of the
rules. ``accept[q]`` is one more than the first rule of the group that matches a name which ends in
``q``, or 0. The cost is the name's bytes, times the number of groups, which is 1 unless the rules'
automaton would be huge. No regular expression runs in the image.
"""

from __future__ import annotations

from dataclasses import dataclass

from ralbuild.contract.arrays import make_array, read_arrays, write_arrays
from ralbuild.contract.codec import FormatError

FORMAT = "ralbuild.routes/1"


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Compiled routing rules.

    Attributes:
        classes: C, number of byte classes.
        cls: byte to class, 256 entries.
        trans: S * C next states.
        accept: per state, number of the rule plus 1, or 0.
        starts: start state per group.
    """

    classes: int
    cls: bytes
    trans: memoryview
    accept: memoryview
    starts: memoryview

    def first(self, route: str) -> int | None:
        """Return the first rule that matches all of ``route``, or None."""
        data = route.encode("utf-8", "replace")
        cls, trans, classes = self.cls, self.trans, self.classes
        for state in self.starts:
            for byte in data:
                state = trans[state * classes + cls[byte]]
                if not state:
                    break
            if found := self.accept[state]:
                return int(found) - 1
        return None


def write_routes(*, cls: list[int], rows: list[list[int]], accept: list[int], starts: list[int]) -> bytes:
    """Serialise routing rules; row 0 is the dead state's."""
    arrays = {
        "cls": make_array("U8", cls),
        "trans": make_array("U32", [entry for row in rows for entry in row], (len(rows), max(cls) + 1)),
        "accept": make_array("U32", accept),
        "starts": make_array("U32", starts),
    }
    return write_arrays(arrays, {"format": FORMAT})


def read_routes(data: bytes, where: str, rules: int) -> RouteTable:
    """Parse and check the table of ``rules`` rules.

    Raises:
        FormatError: when it is no such table, or names a state or rule that is not there.
    """
    file = read_arrays(data, where)
    file.expect_format(FORMAT, where)
    cls = bytes(file.take("cls", "U8", 256))
    trans, accept, starts = (file.take(name, "U32") for name in ("trans", "accept", "starts"))
    classes, states = max(cls) + 1, len(accept)
    if not states or len(trans) != states * classes or max(trans) >= states or accept[0]:
        raise FormatError(where, "the route table has a state out of range")
    if any(trans[:classes]) or max(accept) > rules or max(starts, default=0) >= states:
        raise FormatError(where, "the route table names a rule or start that is not there")
    return RouteTable(classes, cls, trans, accept, starts)
