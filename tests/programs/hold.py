"""Hold the lock of the file argv[1], with the text argv[2] in it, until standard input ends."""
import fcntl
import sys

file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(sys.argv[2])
file.flush()
print("held", flush=True)
sys.stdin.read()
