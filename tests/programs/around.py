"""The last step of the programs here: run the script on the command line as if Python had started it."""
import os
import runpy
import sys


def run_script():
    """Run the script sys.argv[1] with the arguments after it."""
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
