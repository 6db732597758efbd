"""The tests. Sets the number of threads before a test's process imports torch, which reads it once."""

import os

# Three test files run at a time. The behavior without this setting is tested in separate processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
