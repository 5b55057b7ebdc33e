"""Promises on a real device, each rehearsed on the simulated one."""
