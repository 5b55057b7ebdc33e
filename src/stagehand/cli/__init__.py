"""The command line: `stagehand run MODEL`."""
