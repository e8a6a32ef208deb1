"""`python -m echoreduce` is the `echoreduce` command."""

from echoreduce.cli import main

main()
