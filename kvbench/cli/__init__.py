"""The command line: options, output, signals, exit codes."""
