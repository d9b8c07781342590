"""A sandbox for the programs of a model.

backends                  chooses a backend: the first that works, or a refusal
bubblewrap                namespaces, an empty root and a seccomp filter, by bwrap
sandlock                  Landlock and seccomp, by the package sandlock; sandlock_launcher starts a program by the
                          processes of sandlock_process
local                     no sandbox, for the option unsafe_without_sandbox
probe                     tries a backend with a program that attempts what it must prevent
session                   one sandboxed process: frames to and from it, its end
pipes                     its stdin, stdout and stderr, under a deadline
harness                   runs inside: sets the limits, runs the program, encodes values
command                   the command line of the harness
watchdog                  ends what is left when the run's process was killed
interpreter               the files that Python needs
seccomp                   the filter of system calls
limits                    the limits of a program
"""
