"""Loads a tokenizer.json with the tokenizers library: a program of its own, the builder's only door to it.

`ralbuild.weights.tokenizer` starts it under limits: a normalizer or a regular expression of the file
can take any time and memory. Standard input is one line of JSON, the texts and an id to decode alone
(or null), and then the file.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Read texts and file, answer with the ids of each text."""
    asked = json.loads(sys.stdin.buffer.readline())
    json.dump(_answer(sys.stdin.buffer.read().decode(), asked["texts"], asked["single"]), sys.stdout)


def _answer(source: str, texts: list[str], single: int | None) -> dict[str, Any]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(source)
    except MemoryError:
        raise
    except BaseException as error:  # bare Exception, and a Rust panic, which is no Exception
        return {"refused": str(error)}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        probed = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        added = tokenizer.encode("a").ids
        decoded = tokenizer.decode(probed[0], skip_special_tokens=True)
        alone = "" if single is None else tokenizer.decode([single])
    except MemoryError:
        raise
    except BaseException as error:
        return {"failed": str(error)}
    return {"probed": probed, "added": added, "decoded": decoded, "single": alone}


if __name__ == "__main__":
    main()
