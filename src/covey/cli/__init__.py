"""The command `covey`.

options       what may be typed: the parser of each command, the help on every field
main          what each command does
completion    words for a shell that completes a line with Tab
"""
