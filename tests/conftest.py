"""What all tests share: helpers beside the tests are importable from every folder below."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# A shell that runs the tests in the background ignores SIGINT, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_worker_a_request() -> Iterator[None]:
    """Most folders of a file have the same template and tokenizer: start verify's workers once for each."""
    from ralbuild.weights import child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "run_limited", functools.cache(child.run_limited))
        yield
