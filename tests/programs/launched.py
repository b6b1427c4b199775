"""Prints the signal that the system sends to this process when its parent ends; 0: none."""
import ctypes

from common import launch

launch.end_with_launcher()
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
