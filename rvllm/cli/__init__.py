"""The command line: one file a command, imported when it is called. stdout is data, stderr is talk."""
