"""Planning a cluster before it exists: `covey plan --ranks N --cluster`.

report        the entry point
simulation    discrete-event simulation of servers and a trainer, and the schedules that it compares
servers       a server of the simulation: completions that share its throughput
lengths       distributions of the lengths of completions
"""
