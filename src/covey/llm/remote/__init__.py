"""Completions by samplers in other processes: `covey serve`, and vLLM with its native routes.

wire        the routes and their bodies; answers from outside are parsed strictly
client      one server over HTTP
fleet       the servers of a run: which have the current weights
weights     publishes the policy's weights, as a file
group_transport  the same over a process group
proof       the sampler's log-probabilities against the trainer's
outstanding requests that wait for an answer
generator   `RemoteGenerator`: requests -> servers -> completions, on the next server where one fails
children    covey serve processes that a run starts and ends
staging     new weights in a server, verified before they are used
server      `covey serve`: the routes over an engine (`generation/engine.py`)
"""
