"""python -m dkm: the command, where its script is not on the path."""

from .app.cli import main

main()
