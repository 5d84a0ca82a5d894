"""The command line: a command is a file here, with add_arguments(parser) and run(arguments) -> exit code."""
