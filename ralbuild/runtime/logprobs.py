"""Log probabilities of drawn tokens, as OpenAI's ``logprobs`` field asks for them.

They are those of what the rules leave: after biases and penalties, over the legal tokens alone, at
temperature 1 and before top_k, top_p and min_p. So a banned token is never named, and a value does
not depend on how the token was drawn.
"""

from __future__ import annotations

import numpy as np

from ralbuild.contract.vocab import TokenBytes
from ralbuild.runtime.orders import Alternative, TokenLogprob
from ralbuild.runtime.sampler import Logits


def token_logprob(value: Logits, token: int, most: int, vocab: TokenBytes) -> TokenLogprob:
    """Return the log probability of ``token`` and the ``most`` likeliest tokens, best first."""
    wide = value.astype(np.float64)
    top = wide.max()
    total = top + np.log(np.exp(wide - top).sum())
    least = np.partition(value, len(value) - most)[len(value) - most] if 0 < most < len(value) else -np.inf
    kept = np.flatnonzero((value >= least) & (value > -np.inf)) if most else np.zeros(0, np.int64)
    order = kept[np.lexsort((kept, -value[kept]))][:most]
    best = tuple(Alternative(vocab[int(index)], float(wide[index] - total)) for index in order)
    return TokenLogprob(vocab[token], float(wide[token] - total), best)
