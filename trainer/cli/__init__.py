"""The command line.

Read commands.py first, which has one function per command. options.py defines their options, and
loading.py reads the config that the options name.
"""
