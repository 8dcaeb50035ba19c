"""The peak rates of accelerators, for the utilization of a device."""

import re
from collections.abc import Iterable
from typing import Any

# Pattern of the whole `device_kind` -> peak of dense products, in TFLOPs a second: of bfloat16
# inputs with float32 sums, and of float32 inputs as jax computes them by default, which is TF32 on
# NVIDIA and one pass of bfloat16 on TPUs. Vendors often print the doubled numbers of structured
# sparsity. A part of a GPU (MIG) has no known peak: `_PART` in its name excludes it.
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU datasheet; all forms have the same peak.
    r"NVIDIA A100[ -].*": (312.0, 156.0),
    # NVIDIA A10, A30 and A40 GPU datasheets.
    r"NVIDIA A10": (125.0, 62.5),
    r"NVIDIA A30": (165.0, 82.5),
    r"NVIDIA A40": (149.7, 74.8),
    # NVIDIA RTX A6000 datasheet.
    r"NVIDIA RTX A6000": (154.8, 77.4),
    # NVIDIA L4, L40 and L40S GPU datasheets.
    r"NVIDIA L4": (121.0, 60.0),
    r"NVIDIA L40": (181.05, 90.5),
    r"NVIDIA L40S": (362.05, 183.0),
    # NVIDIA H100 Tensor Core GPU Architecture whitepaper (SXM5, PCIe); H100 and H200 datasheets.
    r"NVIDIA H100 80GB HBM3": (989.4, 494.7),
    r"NVIDIA H100 PCIe": (756.0, 378.0),
    r"NVIDIA H100 NVL": (835.5, 417.5),
    r"NVIDIA H200": (989.4, 494.7),
    r"NVIDIA H200 NVL": (835.5, 417.5),
    r"NVIDIA GH200 .*": (989.4, 494.7),
    # NVIDIA HGX B200 and GB200 NVL72 datasheets, divided by their 8 and 72 GPUs.
    r"NVIDIA B200": (2250.0, 1125.0),
    r"NVIDIA GB200": (2500.0, 1250.0),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell GPU Architecture whitepapers.
    r"NVIDIA GeForce RTX 3080": (59.5, 29.8),
    r"NVIDIA GeForce RTX 3090": (71.0, 35.6),
    r"NVIDIA GeForce RTX 4080": (97.5, 48.7),
    r"NVIDIA GeForce RTX 4090": (165.2, 82.6),
    r"NVIDIA GeForce RTX 5090": (209.5, 104.8),
    # Google Cloud TPU documentation, system architecture of each version. The two cores of a chip
    # of v2 and v3 are devices of their own.
    r"TPU v2": (22.5, 22.5),
    r"TPU v3": (61.5, 61.5),
    r"TPU v4": (275.0, 275.0),
    r"TPU v5 lite|TPU v5e": (197.0, 197.0),
    r"TPU v5p?": (459.0, 459.0),
    r"TPU v6 lite|TPU v6e": (918.0, 918.0),
}
_PART = "MIG"


def peak_flops(kind: str, precision: str) -> float | None:
    """Returns the peak of a device, by its `device_kind`, in FLOPs a second; None if not known.

    Example:
        >>> peak_flops("NVIDIA H200", "bfloat16"), peak_flops("cpu", "float32")
        (989400000000000.0, None)
    """
    found = next((x for name, x in _PEAKS.items() if re.fullmatch(name, kind)), None)
    if found is None or _PART in kind:
        return None
    return found[precision == "float32"] * 1e12


def peak_of(devices: Iterable[Any], precision: str) -> float | None:
    """Returns the sum of `peak_flops` over devices; None if one of them is not known."""
    peaks = [peak_flops(device.device_kind, precision) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None
