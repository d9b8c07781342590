"""Completions by samplers in other processes: `covey serve`, and vLLM with its native routes.

wire        the routes and their bodies; answers from outside are parsed strictly
client      one server over HTTP
fleet       the servers of a run: which have the current weights; `covey serve` processes that it starts and ends
weights     gives the policy's weights to servers, as a file or over a process group, and verifies them there
proof       the sampler's log-probabilities against the trainer's
generator   `RemoteGenerator`: requests -> servers -> completions, on the next server where one fails
server      `covey serve`: the routes over an engine (`generation/local_generator.py`)
"""
