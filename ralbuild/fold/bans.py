"""Banned phrases to one Aho-Corasick automaton (contract/bans.py), ASCII case ignored.

Every profile has its own start state. A profile that bans nothing starts in a state with only
loops, which the sampler skips.
"""

from __future__ import annotations

from collections import deque

from ralbuild.contract.bans import BANNED, write_bans
from ralbuild.fold.patterns import byte_classes, fold_case


def build_bans(phrases_of: tuple[tuple[bytes, ...], ...]) -> bytes:
    """Return the serialised automaton; ``phrases_of`` holds the phrases of each profile."""
    letters = {frozenset(fold_case(byte)) for phrases in phrases_of for text in phrases for byte in text}
    cls = byte_classes(letters)
    classes = max(cls) + 1
    rows: list[list[int]] = [[BANNED] * classes]
    starts: list[int] = []
    made: dict[tuple[bytes, ...], int] = {}
    for phrases in phrases_of:
        key = tuple(sorted({bytes(cls[byte] for byte in text) for text in phrases}))
        if key not in made:
            made[key] = len(rows)
            rows += _automaton(key, classes, len(rows))
        starts.append(made[key])
    return write_bans(cls=cls, rows=rows, starts=starts)


def _automaton(phrases: tuple[bytes, ...], classes: int, base: int) -> list[list[int]]:
    """Return the rows of one automaton over class strings; its root is ``base``, its accepts the sink."""
    children: list[dict[int, int]] = [{}]
    complete = [False]
    for phrase in phrases:
        node = 0
        for symbol in phrase:
            if symbol not in children[node]:
                children[node][symbol] = len(children)
                children.append({})
                complete.append(False)
            node = children[node][symbol]
        complete[node] = True
    rows: list[list[int]] = [[] for _ in children]
    rows[0] = [children[0].get(symbol, 0) for symbol in range(classes)]
    fail = [0] * len(children)
    queue = deque(children[0].values())
    while queue:
        node = queue.popleft()
        complete[node] |= complete[fail[node]]
        rows[node] = list(rows[fail[node]])
        for symbol, child in children[node].items():
            fail[child] = rows[fail[node]][symbol]
            rows[node][symbol] = child
            queue.append(child)
    kept = [node for node, done in enumerate(complete) if not done]
    number = dict.fromkeys(range(len(complete)), BANNED)
    number.update({node: base + index for index, node in enumerate(kept)})
    return [[number[target] for target in rows[node]] for node in kept]
