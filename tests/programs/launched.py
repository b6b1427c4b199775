"""Prints the signal that the kernel sends to this process when its parent ends; 0 means none."""
import ctypes

from common import launch

launch.end_with_launcher()
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
