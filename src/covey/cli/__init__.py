"""The command `covey`.

options       the parser of each command, the help on every field
main          the commands
logs          output streams and logs
completion    words for a shell's completion with Tab
"""
