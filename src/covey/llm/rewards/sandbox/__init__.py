"""A sandbox for the programs of a model.

backends      chooses a backend, which is a command line: bubblewrap, sandlock, or no sandbox if the user asks for it;
              tries it with a program that attempts what it must prevent; the filter of system calls
session       one sandboxed process: frames to and from it, its end
supervisor    starts and ends it, in a worker (`runtime/worker`)
harness       runs inside: sets the limits, runs the program, encodes values
"""
