"""`python -m dpbench`."""

import os
import sys

# Python puts the working directory in front, which may be the folder of somebody else's run: the command `dpbench`
# looks for no modules there, and this is the same command.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from dpbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
