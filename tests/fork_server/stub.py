"""Script of client.py, of which Python keeps no compiled file if it is the script itself."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])

import client  # noqa: E402  # pyrefly: ignore[missing-import]

client.main(sys.argv[1:])
