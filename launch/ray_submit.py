"""`megarl submit` under the name that it had before it was a command."""

import sys

from megarl.cli.main import main

sys.exit(main(["submit", *sys.argv[1:]]))
