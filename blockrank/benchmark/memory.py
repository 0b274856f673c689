"""Peak memory of this process, from a moment of its choosing on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import jax


def reset_peak() -> None:
    """Give freed memory back and count anew, where the system can (Linux); elsewhere the peak is since start."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Largest memory in use: of the accelerator (since start) where there is one, else resident."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
