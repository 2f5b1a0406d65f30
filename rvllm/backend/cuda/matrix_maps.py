"""Descriptions of matrices for the copy engine of t90a, in device memory: a launch names one by its address."""

from __future__ import annotations

from rvllm.backend.cuda.kernels import Device

MAP_BYTES = 128
AT_ONCE = 512  # maps for which memory is allocated


class MatrixMaps:
    """Each matrix is described once, in boxes of so many rows; what it lies in must not move."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[int, int, int, int], int] = {}
        self._next = self._end = 0

    def __call__(self, address: int, rows: int, columns: int, box_rows: int) -> int:
        """The address of a description; see `Device.matrix_map`."""
        wanted = (address, rows, columns, box_rows)
        if wanted not in self._known:
            if self._next == self._end:
                self._next = self._device.allocate(AT_ONCE * MAP_BYTES)
                self._end = self._next + AT_ONCE * MAP_BYTES
            self._device.write(self._next, self._device.matrix_map(*wanted))
            self._known[wanted] = self._next
            self._next += MAP_BYTES
        return self._known[wanted]
