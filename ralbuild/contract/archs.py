"""Which machine code runs on which GPU: NVIDIA's rule, for the launcher and for whoever asks before it."""

from __future__ import annotations

_SPECIFIC = 90
"""From this architecture on Triton compiles for ``sm_90a``, code that runs on no other one."""


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Tell whether code for ``arch`` (``sm_80``) runs on a device: same major version, not newer."""
    code, device = int(arch.removeprefix("sm_")), 10 * capability[0] + capability[1]
    return code == device or (code // 10 == device // 10 and code < min(device, _SPECIFIC))
