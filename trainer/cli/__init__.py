"""The command line.

Start with commands.py, which has one function per command. options.txt has their options, and
resolving.py reads the config that the options name.
"""
