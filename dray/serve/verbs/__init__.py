"""The verbs of an experiment (stop, extend, fork and so on), wherever it is: on a server, or in its directory."""
