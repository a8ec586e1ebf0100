"""Monitors memory, power, utilization, clocks, temperature and ECC errors of GPUs through NVML.

    NVML --every second--> GpuMonitor --take--> gpu/<quantity>/{mean,max} over GPUs and a step
    those of each node --over_nodes--> of all nodes

Quantities that a GPU does not report are omitted. Without a GPU, a driver or nvidia-ml-py, there
are no metrics.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from statistics import fmean
from threading import Event, Lock, Thread
from typing import Any

INTERVAL_S = 1.0


def open_gpus(gpus: Sequence[str | int]) -> "GpuMonitor | None":
    """Starts a monitor of GPUs, given as UUIDs without the prefix `GPU-`, or as indices of NVML.

    Returns None without GPUs or nvidia-ml-py, or if NVML does not find the GPUs.
    """
    if not gpus:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        devices = [
            pynvml.nvmlDeviceGetHandleByIndex(gpu)
            if isinstance(gpu, int)
            else pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}")
            for gpu in gpus
        ]
    except pynvml.NVMLError:
        return None
    return GpuMonitor(pynvml, devices)


def _quantities(nvml: Any) -> Mapping[str, Callable[[Any], float]]:
    """Returns {quantity: function that reads it from a device handle}.

    The unit is the suffix of the name; `utilization` is a fraction, `throttled` a boolean.
    """
    slowed = (  # throttling by heat or the power supply; the software power cap is normal
        nvml.nvmlClocksThrottleReasonHwSlowdown
        | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    return {
        "memory_gb": lambda device: nvml.nvmlDeviceGetMemoryInfo(device).used / 1e9,
        "power_w": lambda device: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
        "utilization": lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
        "sm_clock_mhz": lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
        "temperature_c": lambda device: nvml.nvmlDeviceGetTemperature(
            device, nvml.NVML_TEMPERATURE_GPU
        ),
        "ecc_errors": lambda device: nvml.nvmlDeviceGetTotalEccErrors(  # since boot
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "throttled": lambda device: bool(
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & slowed
        ),
    }


def over_nodes(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the means and maxima over `metrics`, one entry per node or one per GPU.

    If there is one per node, nodes have equally many GPUs.
    """
    merged = {}
    for key in dict.fromkeys(chain.from_iterable(metrics)):
        values = [one[key] for one in metrics if key in one]
        merged[key] = max(values) if key.endswith("/max") else fmean(values)
    return merged


class GpuMonitor:
    """Reads all devices every INTERVAL_S in a background thread, and in every call of `take`."""

    def __init__(self, nvml: Any, devices: Sequence[Any]) -> None:
        self._nvml = nvml
        self._devices = devices
        self._quantities = _quantities(nvml)
        self._readings: dict[str, list[float]] = defaultdict(list)
        self._lock = Lock()
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="gpus", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Returns the mean and maximum of each quantity over all GPUs since the last call."""
        self._read()
        with self._lock:
            readings = self._readings
            self._readings = defaultdict(list)
        metrics = {}
        for name, values in readings.items():
            metrics[f"gpu/{name}/mean"] = fmean(values)
            metrics[f"gpu/{name}/max"] = float(max(values))
        return metrics

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._read()

    def _read(self) -> None:
        with self._lock:
            for device in self._devices:
                for name, read in self._quantities.items():
                    with suppress(self._nvml.NVMLError):  # not supported, or the GPU is lost
                        value = read(device)
                        self._readings[name].append(value)
