"""Run a script that imports determined with dray in its place: with_dray.py SCRIPT ARGUMENTS..."""

import runpy
import sys

import dray.compat

dray.compat.install()
sys.argv = sys.argv[1:]
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
