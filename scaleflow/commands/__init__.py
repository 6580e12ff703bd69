"""The frame of every command: the table of commands, parsers, errors, exit codes, `--json`, completion, one worker."""
